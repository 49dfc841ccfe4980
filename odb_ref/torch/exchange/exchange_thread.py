"""The exchange: one thread per loader that carries out the posts of one rank, and keeps the ranks in touch in between. A
process alone needs no such thread.

A rank that has nothing to post yet still takes part, at least every ``TICK_S``, and says so. An agreement is valid only when
every rank has posted; until then each collective is a *tick*. Ticks carry news that must not wait for a slow trainer: some rank
has stopped or failed (the others are then urged, R5.9), and which rank has not posted yet. So no collective takes longer than a
tick plus a machine's response time, however long a trainer takes for a step, an evaluation or a checkpoint. When all ranks are
ready, an agreement takes a single collective. The links under the collectives find out which rank is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, assert_never

from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.events import Agreed, Counted, Event, PeerLost, Reported, Urged
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer
from odb_ref.core.peers import POST_SIZE, to_wire
from odb_ref.core.types import StepCounts
from odb_ref.torch.exchange.blocked import Wait, add, end_all, find_other, remove
from odb_ref.torch.exchange.collectives import Transport
from odb_ref.torch.exchange.identity import LoaderIdentity, describe_crossed
from odb_ref.torch.exchange.link import Activity, End, EndedError

TICK_S: Final = 0.2
IDLE_TICK_S: Final = 0.5
FAILED_S: Final = 2.0
"""How long a failed rank waits for the others to agree. One of them may never post again, because its data set blocks."""

LEFT: Final = "it has closed its loader, or ended"

Submit = Callable[[Event], None]

_LOWEST: Final = -(2**63) + 1
_NOTHING: Final = (_LOWEST,) * POST_SIZE


class Exchange:
    """The exchange of one loader, for all its epochs. Its thread starts with the first epoch."""

    def __init__(self, transport: Transport, identity: LoaderIdentity, timeout_s: float = 60.0) -> None:
        self._transport: Transport | None = transport
        self.roster = transport.roster
        self.run = transport.run
        self.identity = identity
        self._is_alone = len(self.roster.processes) == 1
        """True if no other process takes part, so that a post is answered by `take_answer` and no thread is needed."""
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._post: Post | None = None
        self._submit: Submit | None = None
        self._is_urgent = False
        self._is_closing = False
        self._end: PeerLost | None = None
        self._thread: threading.Thread | None = None
        self._describe: Callable[[], str] | None = None
        self._missing: int | None = None
        """The first process that had not posted at the last tick."""
        self._failed_s: float | None = None
        self._failure = self._note = ""
        self.notes: tuple[str, ...] = ()
        """The notes that came with the reports of all processes, once there were reports."""
        self._waits = 0
        """How many threads of the consumer wait for a step."""
        self._crossed_s: float | None = None
        """When it became known that the rank that this one waits for waits, in another loader, for this one."""
        self._wait = Wait(identity, self._find_awaited_rank, self._end_crossed)
        transport.links.describe = self._describe_activity
        self.exchange_s = 0.0
        """Seconds spent in collectives that brought an answer."""
        self.exchanges = 0

    def open(self, submit: Submit, describe: Callable[[], str]) -> PeerLost | None:
        """Begins an epoch. Answers go to ``submit``, which returns only after making the next post, if the answer leads to one.
        ``describe`` returns what this rank is doing, for other ranks that wait for it.

        Returns the loss if the exchange has already ended, otherwise None.
        """
        with self._condition:
            self._submit, self._post, self._is_urgent = submit, None, False
            self._describe, self._missing, self._failed_s = describe, None, None
            end = self._end
            if end is None and self._thread is None and not self._is_alone:
                add(self._wait)
                self._thread = threading.Thread(target=self._run, name="odb-exchange", daemon=True)
                self._thread.start()
            return end

    def post(self, post: Post, failure: str = "", note: str = "") -> None:
        """Takes part in the next exchange with ``post``. Does not wait. ``failure`` says why this rank has failed, if so.
        ``note`` goes to all processes with a report.
        """
        with self._condition:
            self._post, self._note = post, note
            if isinstance(post, PostOffer):
                has_failed = post.offer.failed_rank != NONE
                self._is_urgent = self._is_urgent or has_failed or post.offer.stop_rank != NONE
                self._failed_s = time.monotonic() if has_failed else None
                self._failure = failure
            self._condition.notify_all()

    def urge(self) -> None:
        """Urges the other ranks from the next tick to the epoch's end, because this rank's consumer has left. Spec: A6, R5.9.

        Urging cannot wait for the next offer: the open one may not mention it, and may be waiting for a rank whose consumer's
        thread is the one that reads.
        """
        with self._condition:
            self._is_urgent = self._submit is not None
            self._condition.notify_all()

    def take_answer(self) -> Event | None:
        """Returns the answer to the last post if no other process takes part, otherwise None."""
        transport, post = self._transport, self._post
        if not self._is_alone or transport is None or post is None:
            return None
        answer = self._compute_answer(transport, post)
        self._post = None
        return answer

    def finish(self) -> None:
        """Ends an epoch on this rank."""
        with self._condition:
            self._submit = self._post = self._missing = self._failed_s = self._describe = None
            self._is_urgent = False

    def find_awaited(self) -> Activity | None:
        """Returns the process that the exchange waits for, by its index in the roster, and what it reports to be doing.

        Returns None if the exchange waits for no process.
        """
        transport, missing = self._transport, self._missing
        activity = transport.links.find_awaited() if transport is not None else None
        return activity or (None if missing is None else Activity(missing, "has not said what it is doing"))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the consumer as waiting while the body runs, for ranks in other loaders that wait for it. Spec: R18.2."""
        with self._condition:
            self._waits += 1
            self._wait.since_s = self._wait.since_s or time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                self._waits -= 1
                self._wait.since_s = self._wait.since_s if self._waits else None

    def _find_awaited_rank(self) -> int:
        missing = self._missing
        return -1 if missing is None or self._post is None else self.roster.processes[missing]

    def _describe_activity(self) -> Activity:
        loader, awaited = find_other(self.identity)
        describe = self._describe
        text = "has not begun its epoch" if describe is None else describe()
        return Activity(self.roster.index, f"{text}: it waits in {loader}" if loader else text, 0, loader, awaited)

    def _check_crossed(self, transport: Transport) -> None:
        """Ends the exchange if this process and the one it waits for wait for each other in different loaders. Spec: R18.2."""
        activity = transport.links.find_awaited()
        own = self.roster.processes[self.roster.index]
        if activity is None or activity.awaited != own or not self._waits:
            self._crossed_s = None
            return
        now_s = time.monotonic()
        self._crossed_s = self._crossed_s or now_s
        # If threads begin loaders in no fixed order, the other rank may still arrive, so this waits a while.
        if now_s - self._crossed_s > self._timeout_s / 2:
            ours, theirs = map(self.roster.name_process, (self.roster.index, activity.rank))
            cause = describe_crossed(ours, self.identity, theirs, activity.loader)
            end_all(self.roster.processes[activity.rank], cause, activity.loader)

    def _end_crossed(self, rank: int, cause: str) -> None:
        index = self.roster.processes.index(rank) if rank in self.roster.processes else None
        self._end_all(End(PeerLost(index, cause), is_crossed=True))

    def close(self) -> None:
        """Says goodbye to the other ranks at the next tick. Does not wait; `join` does."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            has_begun = self._thread is not None
        if not has_begun and self._transport is not None:
            self._give_up(End(self._name_own("its loader is closed")))

    def join(self, timeout_s: float) -> bool:
        """Waits until the exchange has ended and its connections are closed; forces its end after ``timeout_s``. Returns
        whether it has ended.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            # Do not abandon the thread: if it woke while the interpreter shuts down, it would crash the process.
            self._end_all(End(self._name_own(LEFT)))
            thread.join(timeout_s)
        return not thread.is_alive()

    def abort(self, cause: str) -> None:
        """Ends the exchange on all ranks, because this one cannot continue."""
        end = self._name_own(cause)
        with self._condition:
            self._end = self._to_event(end)
            self._submit = self._post = None
        self._end_all(End(end))
        self.close()

    def _name_own(self, cause: str) -> PeerLost:
        return PeerLost(self.roster.index, cause)

    def _to_event(self, loss: PeerLost) -> PeerLost:
        """Converts the loss of a process to that of its rank."""
        if loss.rank is None or self.roster.peers == 1:
            return loss
        return PeerLost(loss.rank // self.roster.peers, f"{loss.cause} (on its peer {loss.rank % self.roster.peers})")

    def _end_all(self, end: End) -> None:
        transport = self._transport
        if transport is not None:
            transport.links.end(end)

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (transport := self._transport) is not None:
                self._exchange(transport)
        except EndedError as error:
            del transport
            self._give_up(error.end)
        except BaseException as error:  # for example, a message that violates the protocol
            del transport
            text = str(error).strip().splitlines()
            end = End(self._name_own(f"its exchange broke: {text[0] if text else repr(error)}"))
            self._end_all(end)
            self._give_up(end)

    def _count(self, transport: Transport, counts: tuple[StepCounts, ...], wanted: int | None) -> Counted:
        """Returns the sums of all ranks' counts. What they want travels along, one slot per rank."""
        own = [] if wanted is None else [wanted * (rank == self.roster.rank) for rank in range(self.roster.world_size)]
        values = [*chain.from_iterable(item.to_row() for item in counts), *own]
        # A rank's steps count once. Its other peers have formed the same steps, or the next agreement reports it (R17.3).
        sums = transport.reduce_sum([0] * len(values) if self.roster.peer else values)
        end = len(sums) - len(own)
        width = end // max(1, len(counts))  # some rounds of an update have no steps, hence no counts
        rows = (sums[first : first + width] for first in range(0, end, width or 1))
        return Counted(tuple(map(StepCounts.from_row, rows)), tuple(sums[end:]))

    def _exchange(self, transport: Transport) -> None:
        post = self._wait_for_post()
        answer = self._compute_answer(transport, post)
        if answer is None:
            return
        with self._condition:
            if self._post is post:
                self._post = None
            submit = self._submit
            self._missing = self._crossed_s = None
        transport.links.ask(None)
        if submit is not None:
            submit(answer)

    def _compute_answer(self, transport: Transport, post: Post | None) -> Event | None:
        """Returns the answer to a post, or None if some process has not posted yet."""
        began = time.monotonic()
        match post:
            case PostCounts(counts, wanted):
                answer: Event = self._count(transport, counts, wanted)
            case PostReport(report):
                reports, self.notes = zip(*transport.gather(report, self._note), strict=True)
                answer = Reported(reports)
            case PostOffer() | None:
                agreement = self._tick(transport, post)
                if agreement is None:
                    return None
                answer = Agreed(agreement)
            case _:
                assert_never(post)
        self.exchange_s += time.monotonic() - began
        self.exchanges += 1
        return answer

    def _wait_for_post(self) -> Post | None:
        with self._condition:
            if self._post is None and not self._is_closing:
                self._condition.wait(TICK_S if self._submit is not None else IDLE_TICK_S)
            return self._post

    def _tick(self, transport: Transport, post: PostOffer | None) -> Offer | None:
        """Returns the agreement, or None if some rank has not posted yet."""
        with self._condition:
            is_leaving = self._is_closing and self._submit is None
            flags = (
                -self.roster.index if post is None else _LOWEST,
                int(self._is_urgent),
                -self.roster.index if is_leaving else _LOWEST,
            )
        answer = transport.reduce_offers((*(to_wire(post) if post is not None else _NOTHING), *flags))
        missing, is_urgent, leaving = answer[POST_SIZE:]
        if leaving != _LOWEST:
            self._give_up(End(PeerLost(-leaving, LEFT)))
            return None
        if missing == _LOWEST:
            return Offer.from_wire(answer[:WIRE_SIZE])
        self._missing = -missing
        transport.links.ask(self._missing)
        if is_urgent and post is None:
            with self._condition:
                submit = self._submit
            if submit is not None:
                submit(Urged())
        if self._failed_s is not None and time.monotonic() - self._failed_s > FAILED_S:
            self._end_all(End(self._name_own(self._failure)))
        if post is not None:
            self._check_crossed(transport)
        return None

    def _give_up(self, end: End) -> None:
        with self._condition:
            self._end = self._end or self._to_event(end.loss)
            transport, self._transport = self._transport, None
            submit, event = self._submit, self._end
        remove(self._wait)
        if transport is not None:
            # Otherwise a rank that sees the connection close before it learns why would report this process as gone.
            transport.links.end(end)
        if submit is not None:
            submit(event)
        if transport is not None:
            transport.links.close()  # takes a moment, for which the consumer need not wait
        if end.is_crossed:
            end_all(-1 if end.loss.rank is None else self.roster.processes[end.loss.rank], end.loss.cause)
