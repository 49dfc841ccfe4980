"""Connections between ranks, in threads of one process: which are accepted, what is read, and who learns of the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import Store

from odb_ref.core.errors import JobError, PeerError
from odb_ref.core.events import PeerLost, Report
from odb_ref.torch.exchange import links as links_module
from odb_ref.torch.exchange import process_table
from odb_ref.torch.exchange.bounded_store import LEAST_S
from odb_ref.torch.exchange.collectives import GatherTransport, Transport
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.exchange.identity import LoaderIdentity
from odb_ref.torch.exchange.link import End, EndedError, Endpoint, Link, MessageKind
from odb_ref.torch.exchange.links import Links
from odb_ref.torch.exchange.listener import MAX_PENDING, Listener, connect
from odb_ref.torch.exchange.process_table import read_status
from odb_ref.torch.exchange.rendezvous import _Arrival, _meet, _Meeting
from odb_ref.torch.exchange.roster import Roster
from tests.helpers.waiting import count_descriptors, is_in_time

SECRET = bytes(range(16))
IDENTITY = LoaderIdentity(name="train.py:20", made_at="train.py:20", ordinal=0, is_common=False)
T = TypeVar("T")
HEADER = struct.Struct("!BI")


def make_roster(rank: int, world_size: int) -> Roster:
    return Roster(processes=tuple(range(world_size)), index=rank)


def make_pair(timeout_s: float = 5.0) -> tuple[Links, Links]:
    one, other = socket.socketpair()
    return Links(0, {1: Link(1, one, None)}, timeout_s), Links(1, {0: Link(0, other, None)}, timeout_s)


@pytest.fixture
def pair() -> Iterator[tuple[Links, Links]]:
    found = make_pair()
    yield found
    for links in found:
        links.close()


@contextlib.contextmanager
def open_raw(peer: Endpoint | None = None, timeout_s: float = 5.0) -> Iterator[tuple[Links, socket.socket]]:
    """Yields the links of rank 0, and the other end of the only one, to rank 1, of which ``peer`` tells."""
    one, other = socket.socketpair()
    with contextlib.closing(Links(0, {1: Link(1, one, peer)}, timeout_s)) as links, contextlib.closing(other):
        yield links, other


@pytest.fixture
def raw() -> Iterator[tuple[Links, socket.socket]]:
    with open_raw() as found:
        yield found


def find_end(links: Links, rank: int = 1) -> PeerLost:
    with pytest.raises(EndedError) as caught:
        links.receive(rank, MessageKind.MAX)
    return caught.value.end.loss


# Messages --------------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order(pair: tuple[Links, Links]) -> None:
    payloads = [b"", b"x", os.urandom(3_000_000), b"last"]
    sender = threading.Thread(target=lambda: [pair[0].send(1, MessageKind.GATHER, payload) for payload in payloads])
    sender.start()
    assert [pair[1].receive(0, MessageKind.GATHER) for _ in payloads] == payloads
    sender.join()


def test_a_message_that_comes_byte_by_byte_is_one(raw: tuple[Links, socket.socket]) -> None:
    links, other = raw
    for byte in HEADER.pack(MessageKind.MAX, 3) + b"abc" + HEADER.pack(MessageKind.SUM, 1) + b"d":
        other.send(bytes([byte]))
        time.sleep(0.002)
    assert links.receive(1, MessageKind.MAX) == b"abc"
    assert links.receive(1, MessageKind.SUM) == b"d"


def test_another_collective_is_an_error(pair: tuple[Links, Links]) -> None:
    pair[0].send(1, MessageKind.SUM, b"")
    with pytest.raises(PeerError, match="another collective: SUM, expected MAX"):
        pair[1].receive(0, MessageKind.MAX)


def test_what_cannot_be_read_ends_the_exchange_and_names_who_sent_it() -> None:
    """It does not matter which thread reads it; the heartbeat thread must survive. Bad kinds, sizes, bytes and JSON."""
    sent = (
        b"\xff" * 5,
        HEADER.pack(MessageKind.MAX, 1 << 31),
        HEADER.pack(MessageKind.HEARTBEAT, 2) + b"\xff{",
        HEADER.pack(MessageKind.END, 1) + b"[",
    )
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(open_raw()) for _ in sent]
        for (_, other), data in zip(pairs, sent, strict=True):
            other.send(data)
        time.sleep(2 * links_module.HEARTBEAT_S)
        for (links, _), data in zip(pairs, sent, strict=True):
            assert find_end(links) == PeerLost(1, "what it has sent cannot be read"), data


def test_what_was_sent_before_an_end_is_still_received(raw: tuple[Links, socket.socket]) -> None:
    links, other = raw
    other.send(HEADER.pack(MessageKind.MAX, 1) + b"a")
    other.close()
    time.sleep(2 * links_module.HEARTBEAT_S)
    assert links.receive(1, MessageKind.MAX) == b"a"
    assert find_end(links) == PeerLost(1, links_module.GONE)


# Ends ------------------------------------------------------------------------------------------------------------------


def test_an_end_wakes_who_waits_on_both_sides(pair: tuple[Links, Links]) -> None:
    end = PeerLost(7, "it fell")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(find_end, pair[0], 1), pool.submit(find_end, pair[1], 0)]
        time.sleep(0.1)
        began = time.monotonic()
        pair[0].end(End(end))
        assert [item.result(2) for item in waiting] == [end, end]
        assert time.monotonic() - began < 0.3


@contextlib.contextmanager
def make_stuck(timeout_s: float) -> Iterator[tuple[Links, socket.socket]]:
    """Yields the links of rank 0 to rank 1, which reads nothing and whose buffer is full, and to rank 2, with its end."""
    one, stuck = socket.socketpair()
    two, other = socket.socketpair()
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(4096))
    links = Links(0, {1: Link(1, one, None), 2: Link(2, two, None)}, timeout_s)
    with contextlib.closing(stuck), contextlib.closing(other), contextlib.closing(links):
        yield links, other


def test_one_that_does_not_read_delays_no_heartbeat_to_the_others() -> None:
    with make_stuck(5.0) as (_, other):
        other.settimeout(3 * links_module.HEARTBEAT_S)
        for _ in range(3):
            assert other.recv(64)[0] == MessageKind.HEARTBEAT


def test_an_end_ends_a_message_that_nobody_reads() -> None:
    with make_stuck(60.0) as (links, _):
        sender = threading.Thread(target=links.send, args=(1, MessageKind.MAX, b"never"), daemon=True)
        sender.start()
        time.sleep(0.1)
        links.end(End(PeerLost(0, "over")))
        sender.join(2)
        assert not sender.is_alive()


def test_a_message_that_is_not_read_in_time_ends_the_exchange() -> None:
    """Part of it may be under way, so that later messages would be misread."""
    with make_stuck(0.3) as (links, _):
        links.send(1, MessageKind.MAX, b"never")
        end = find_end(links, 2)
        assert end.rank == 1
        assert "has not read what was sent to it" in end.cause


def test_links_that_close_while_an_end_is_told_wait_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank that is told last would take this process for the one that is gone."""
    one, other = socket.socketpair()
    two, last = socket.socketpair()
    links = Links(0, {1: Link(1, one, None), 2: Link(2, two, None)}, 5.0)
    try_send = links._try_send

    def send_slowly(link: Link, kind: MessageKind, payload: bytes, wait_s: float) -> bool:
        if kind is MessageKind.END and link.rank == 2:
            time.sleep(0.3)  # as on a busy machine
        return try_send(link, kind, payload, wait_s)

    monkeypatch.setattr(links, "_try_send", send_slowly)
    with contextlib.closing(other), contextlib.closing(Links(2, {0: Link(0, last, None)}, 5.0)) as peer:
        ending = threading.Thread(target=links.end, args=(End(PeerLost(1, "it fell")),))
        ending.start()
        time.sleep(0.1)
        links.close()
        ending.join()
        assert find_end(peer, 0) == PeerLost(1, "it fell")


def test_one_that_reads_is_told_of_an_end_at_once() -> None:
    with make_stuck(60.0) as (links, other):
        threading.Thread(target=links.end, args=(End(PeerLost(0, "over")),)).start()
        other.settimeout(links_module.NOTIFY_S / 2)
        while other.recv(1 << 16)[0] != MessageKind.END:
            pass


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example when no descriptor is left to look with."""
    look = read_status(os.getpid())
    assert look is not None
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        link = Link(1, one, Endpoint(address="", port=0, secret="", host="h", pid=os.getpid(), started=look.started))
        assert not link.find_process_end()

        def refuse(*_: object) -> str:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(process_table.Path, "read_text", refuse)
        assert not link.find_process_end()
    monkeypatch.undo()
    assert read_status(2**22 + 1) is None


GONE = Endpoint(address="", port=0, secret="", host="h", pid=2**22 + 1, started=0)
"""A process that does not exist."""


def test_what_a_rank_has_said_last_goes_before_that_its_process_is_gone() -> None:
    """A rank that was busy for long learns which rank was lost from one that has ended since."""
    with open_raw(GONE) as (links, other):
        with links._reading:  # keeps every thread from reading
            payload = b'[2, "it fell", false]'
            other.send(HEADER.pack(MessageKind.END, len(payload)) + payload)
            time.sleep(3 * links_module.HEARTBEAT_S)
        assert find_end(links) == PeerLost(2, "it fell")


def test_a_process_that_is_gone_while_its_link_stays_open_is_found() -> None:
    began = time.monotonic()
    with open_raw(GONE, 60.0) as (links, _):
        assert find_end(links) == PeerLost(1, links_module.GONE)
        assert time.monotonic() - began < 15  # two looks half a second apart, and not the timeout


def test_a_forked_child_keeps_no_link_open(pair: tuple[Links, Links]) -> None:
    pid = os.fork()
    if not pid:
        time.sleep(5)
        os._exit(0)
    try:
        pair[1].close()
        began = time.monotonic()
        assert find_end(pair[0]).rank == 1
        assert time.monotonic() - began < 2
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# The listener --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_listener(*ranks: int) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", [0], SECRET, ranks)
    with contextlib.closing(listener):
        yield listener


def accept_all(listener: Listener, seconds: float = 2.0) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    while listener.awaited and time.monotonic() < deadline:
        found |= dict(listener.accept(0.05))
    return found


def close_all(*sockets: socket.socket) -> None:
    for item in sockets:
        item.close()


def test_one_that_shows_the_secret_is_accepted_and_nothing_it_sends_is_lost() -> None:
    with open_listener(3, 4) as listener, ThreadPoolExecutor(1) as pool:

        def join(rank: int, address: str) -> socket.socket:
            connection = connect(address, listener.port, SECRET, rank, 2.0)
            connection.sendall(b"first bytes")
            return connection

        ours = pool.submit(join, 3, "127.0.0.1")
        accepted = accept_all(listener, 0.5)
        assert list(accepted) == [3]
        accepted[3].settimeout(1)
        assert accepted[3].recv(64, socket.MSG_PEEK)[:5] == b"first"
        assert listener.awaited == {4}
        close_all(ours.result(), *accepted.values())


@pytest.mark.parametrize(
    ("secret", "rank"), [(bytes(16), 3), (SECRET, 4)], ids=["a wrong secret", "a rank that is not awaited"]
)
def test_one_that_does_not_belong_is_refused(secret: bytes, rank: int) -> None:
    with open_listener(3) as listener, ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(connect, "127.0.0.1", listener.port, secret, rank, 2.0)
        assert not accept_all(listener, 0.3)
        with pytest.raises(OSError):
            stranger.result()
        assert listener.awaited == {3}


def test_a_rank_is_accepted_once() -> None:
    with open_listener(3, 4) as listener, ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect, "127.0.0.1", listener.port, SECRET, 3, 2.0)
        accepted = accept_all(listener, 0.3)
        second = pool.submit(connect, "127.0.0.1", listener.port, SECRET, 3, 2.0)
        assert not accept_all(listener, 0.3)
        with pytest.raises(OSError):
            second.result()
        close_all(first.result(), *accepted.values())


def test_strangers_who_say_nothing_keep_nobody_out() -> None:
    """More of them than handshakes can be in progress, as port scanners or health checks leave them."""
    with open_listener(3) as listener, ThreadPoolExecutor(1) as pool:
        strangers = []
        for number in range(MAX_PENDING + 20):
            strangers.append(socket.create_connection(("127.0.0.1", listener.port), 2.0))
            if number % 2:
                strangers[-1].sendall(b"GET / HTTP/1.0\r\n")
            listener.accept(0.01)
        ours = pool.submit(connect, "127.0.0.1", listener.port, SECRET, 3, 2.0)
        began = time.monotonic()
        accepted = accept_all(listener)
        assert time.monotonic() - began < 1
        assert list(accepted) == [3]
        close_all(ours.result(), *strangers, *accepted.values())


def test_a_connection_that_was_given_up_is_not_accepted() -> None:
    """A parent that is late at its listener finds connections that its children have given up in the meantime."""
    with open_listener(3) as listener, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            with pytest.raises(OSError):
                connect("127.0.0.1", listener.port, SECRET, 3, 0.05)
        ours = pool.submit(connect, "127.0.0.1", listener.port, SECRET, 3, 2.0)
        accepted = accept_all(listener)
        ours.result().sendall(b"here")
        accepted[3].settimeout(1)
        assert accepted[3].recv(4) == b"here"
        close_all(ours.result(), *accepted.values())


def test_a_greeting_in_pieces_is_one() -> None:
    with open_listener(3) as listener, socket.create_connection(("127.0.0.1", listener.port)) as peer:
        for byte in SECRET + struct.pack("!I", 3):
            peer.send(bytes([byte]))
            listener.accept(0.002)
        listener.accept(0.1)
        assert peer.recv(1) == b"+"
        peer.send(b"!")
        accepted = accept_all(listener)
        assert list(accepted) == [3]
        close_all(*accepted.values())


# Many ranks ------------------------------------------------------------------------------------------------------------


def meet(store: HashStore, rank: int, world_size: int, timeout_s: float, wait_s: float = 0.0) -> Links:
    time.sleep(wait_s)
    roster = make_roster(rank, world_size)
    with contextlib.closing(_Meeting(store, "here", roster, IDENTITY, timeout_s=timeout_s)) as meeting:
        return meeting.connect()


def run_ranks(world_size: int, function: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, range(world_size)))


@pytest.mark.parametrize("kind", [Transport, GatherTransport])
def test_a_hundred_ranks_meet_and_agree(kind: type[Transport]) -> None:
    store, world_size, before = HashStore(), 100, count_descriptors()
    together = threading.Barrier(world_size)

    def work(rank: int) -> tuple[list[int], list[int], int]:
        transport = kind(meet(store, rank, world_size, 30.0), make_roster(rank, world_size))
        found = transport.reduce_max([rank, -rank]), transport.reduce_sum([rank, 1])
        reports = [report for report, _ in transport.gather(Report(rank, "", 0, str(rank)))]
        together.wait(30)  # no rank leaves before all have everything
        transport.links.close()
        return *found, [report.config for report in reports] == [str(item) for item in range(world_size)]

    answers = run_ranks(world_size, work)
    assert all(answer == ([99, 0], [4950, 100], True) for answer in answers)
    assert count_descriptors() <= before


def fail_to_meet(store: Store, timeout_s: float) -> None:
    """Waits, as rank 1 of 2, for a rank 0 that does not come."""
    roster = make_roster(1, 2)
    with contextlib.closing(_Meeting(store, "here", roster, IDENTITY, timeout_s=timeout_s)) as meeting:
        _meet(meeting, "reduce", roster)


def test_a_store_whose_host_is_cut_off_is_waited_for_no_longer_than_allowed() -> None:
    """Its host accepts what is sent and never answers. The store's own timeout does not apply to that."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    if not (pid := os.fork()):
        kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(60)
        del kept
        os._exit(0)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(JobError, match=r"store of torch.distributed cannot be reached: its host may be cut off"):
            fail_to_meet(store, 0.5)
        assert time.monotonic() - began < 2 * LEAST_S
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_parent_that_cannot_be_reached_is_named_with_its_address() -> None:
    store, nobody = HashStore(), Endpoint(address="127.0.0.1", port=9, secret="00" * 16, host="", pid=0, started=0)
    store.set("odb_ref/here/0", _Arrival(endpoint=nobody, loader=IDENTITY).encode())
    with pytest.raises(JobError, match=r"0.2 s: rank 0 could not be reached at 127.0.0.1, port 9: .*refused"):
        fail_to_meet(store, 0.2)


def test_a_link_tries_again_every_second_after_an_outage() -> None:
    with open_listener(3) as listener, ThreadPoolExecutor(1) as pool:
        ours = pool.submit(connect, "127.0.0.1", listener.port, SECRET, 3, 2.0)
        for connection in (accept_all(listener)[3], ours.result()):
            with contextlib.closing(connection):
                try:
                    assert connection.getsockopt(socket.IPPROTO_TCP, 44) == 1000
                except OSError:
                    pytest.skip("this system has no TCP_RTO_MAX_MS")


def test_a_parent_that_comes_late_finds_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 0, and its own children for it, longer than one attempt to connect may take."""
    monkeypatch.setattr("odb_ref.torch.exchange.rendezvous.CONNECT_S", 0.1)
    store, world_size = HashStore(), 12
    together = threading.Barrier(world_size)

    def work(rank: int) -> list[int]:
        links = meet(store, rank, world_size, 20.0, wait_s=0.0 if rank else 1.0)
        transport = Transport(links, make_roster(rank, world_size))
        found = transport.reduce_sum([1])
        together.wait(20)
        transport.links.close()
        return found

    assert run_ranks(world_size, work) == [[12]] * world_size


# Leaving ---------------------------------------------------------------------------------------------------------------


def test_an_exchange_that_was_never_used_says_that_its_loader_is_closed() -> None:
    """It does not report that its process is gone."""
    pair = make_pair()
    exchange = Exchange(Transport(pair[1], make_roster(1, 2)), IDENTITY)
    with contextlib.closing(pair[0]):
        exchange.close()
        assert find_end(pair[0]) == PeerLost(1, "its loader is closed")


def test_a_consumer_is_told_of_a_loss_before_the_links_are_closed(
    raw: tuple[Links, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits for the other end. Until the consumer was told, its log said that it waited for itself."""
    links, other = raw
    order: list[str] = []
    monkeypatch.setattr(links, "close", lambda close=links.close: (order.append("closed"), close()))
    exchange = Exchange(Transport(links, make_roster(0, 2)), IDENTITY)
    exchange.open(lambda _: order.append("told"), str)
    payload = End(PeerLost(1, "it fell")).encode()
    other.sendall(HEADER.pack(MessageKind.END, len(payload)) + payload)
    assert exchange.join(5)
    assert order == ["told", "closed"]


def test_fifty_exchanges_in_one_process_leave_nothing() -> None:
    before, threads = count_descriptors(), threading.active_count()
    for _ in range(50):
        exchanges = [Exchange(Transport(links, make_roster(links.rank, 2)), IDENTITY) for links in make_pair()]
        for exchange in exchanges:
            assert exchange.open(lambda _: None, str) is None
        for exchange in exchanges:
            exchange.finish()
            exchange.close()
        for exchange in exchanges:
            assert exchange.join(5)
    assert is_in_time(lambda: threading.active_count() <= threads, 2)
    assert count_descriptors() <= before
