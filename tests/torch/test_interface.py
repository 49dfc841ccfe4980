"""The exchange listens at one address of one interface, on ports that may be named."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from odb_ref.core.errors import UsageError
from odb_ref.torch.exchange import interface
from odb_ref.torch.exchange.interface import choose_address, find_master, list_ports
from odb_ref.torch.exchange.listener import Listener
from tests.torch.data import make_loader
from tests.torch.ranks import get_values, run_ranks

SECRET = bytes(16)


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (interface.INTERFACE_VARIABLE, interface.PORTS_VARIABLE, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_a_master_that_is_this_host_alone_is_reached_by_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", name)
        assert choose_address(HashStore()) in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("sources", "of_host", "address"),
    [
        ({"node0": "10.1.0.7", interface._ELSEWHERE[0]: "192.168.1.7"}, [], "10.1.0.7"),
        # Debian writes a name of loopback for the host itself into /etc/hosts.
        ({"node0": "127.0.1.1", interface._ELSEWHERE[0]: "192.168.1.7"}, [], "192.168.1.7"),
        ({"node0": "127.0.1.1"}, ["fe80::1%eth0", "10.1.0.7"], "10.1.0.7"),
        ({"node0": "127.0.1.1", interface._ELSEWHERE[1]: "fd00::7"}, [], "fd00::7"),
        ({"node0": "127.0.1.1"}, [], "10.1.0.8"),
        ({}, [], "127.0.0.1"),
    ],
    ids=["that reaches the master", "that others reach", "of this host", "of IPv6", "of an interface", "loopback"],
)
def test_the_address_is_the_first_that_others_can_reach(
    sources: dict[str, str], of_host: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sources`` is the address from which this host would send to each target."""
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr(interface, "_find_source_of", lambda target: sources.get(target, ""))
    monkeypatch.setattr(interface, "_find_addresses_of_host", lambda: of_host)
    read = {"lo": "127.0.0.1"} | ({"eth0": "10.1.0.8"} if sources else {})
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: list(enumerate(read, 1)))
    monkeypatch.setattr(interface, "_read_address", read.__getitem__)
    assert choose_address(HashStore()) == address


def test_the_store_knows_the_master() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    store = TCPStore("localhost", port, 1, is_master=True)
    assert find_master(PrefixStore("a", PrefixStore("b", store))) == "localhost"
    assert find_master(HashStore()) == ""


def test_the_interface_that_gloo_is_told_of_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_find_source_of", lambda target: "192.168.1.7")
    monkeypatch.setenv(interface.INTERFACE_VARIABLE, " lo")
    assert choose_address(HashStore()) == "127.0.0.1"


@pytest.mark.parametrize("names", ["none0", "none0,lo"])
def test_an_interface_that_is_not_there_is_named(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo refuses it too. It used to be skipped, and the loader listened on another."""
    monkeypatch.setenv(interface.INTERFACE_VARIABLE, names)
    with pytest.raises(UsageError, match=r"GLOO_SOCKET_IFNAME names 'none0', but this host has only .*\blo\b"):
        choose_address(HashStore())


def test_a_rank_without_the_interface_says_so_and_the_others_name_it() -> None:
    def listen_at(rank: int) -> None:
        os.environ[interface.INTERFACE_VARIABLE] = ("lo", "none0")[rank]
        next(iter(make_loader(timeout_s=1.5)))

    first, second = run_ranks(2, listen_at)
    assert (second.error, "names 'none0'" in second.text) == ("UsageError", True), second
    assert (first.error, "rank 1 has not" in first.text) == ("JobError", True), first


@pytest.mark.parametrize(
    ("text", "ports"), [("", [0]), ("29600", [29600]), ("29600-29602", [29600, 29601, 29602]), ("1-65535", None)]
)
def test_ports_may_be_named(monkeypatch: pytest.MonkeyPatch, text: str, ports: list[int] | None) -> None:
    monkeypatch.setenv(interface.PORTS_VARIABLE, text)
    assert list(list_ports()) == (list(range(1, 1 << 16)) if ports is None else ports)


@pytest.mark.parametrize("text", ["x", "0", "5-4", "29600-", "-1", "1-65536", "1-2-3"])
def test_ports_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(interface.PORTS_VARIABLE, text)
    with pytest.raises(UsageError, match="must be a port or a range"):
        list_ports()


def test_a_listener_is_at_its_address_alone() -> None:
    with contextlib.closing(Listener("127.0.0.1", [0], SECRET, [1])) as listener:
        socket.create_connection(("127.0.0.1", listener.port), 1).close()
        with pytest.raises(OSError):  # if it listened on all interfaces, it would be there too
            socket.create_connection(("127.0.0.2", listener.port), 1)


def test_a_listener_takes_the_first_port_that_is_free() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        first = taken.getsockname()[1]
        with contextlib.closing(Listener("127.0.0.1", range(first, first + 20), SECRET, [1])) as listener:
            assert first < listener.port < first + 20
        with pytest.raises(OSError):
            Listener("127.0.0.1", [first], SECRET, [1])


def list_listening() -> set[tuple[str, int]]:
    """Returns the IPv4 addresses, in hexadecimal digits, and ports at which a process of this host's network listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {(address, int(port, 16)) for address, port in local}


def test_loaders_one_after_another_get_on_with_a_port_for_each_process() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        first = probe.getsockname()[1]

    def read_on_ports(rank: int) -> list[tuple[str, int]]:
        os.environ[interface.PORTS_VARIABLE] = f"{first}-{first + 1}"
        os.environ["MASTER_ADDR"] = "localhost"
        for _ in range(3):  # a port can be reused while connections made there before are open
            assert list(make_loader())
        return [item for item in list_listening() if item[1] in (first, first + 1)]

    assert get_values(run_ranks(2, read_on_ports)) == [[], []], "once all have met, nothing listens"
