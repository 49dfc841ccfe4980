"""The exchange: one thread per loader that performs the posts of one rank, and keeps the ranks in touch meanwhile.

A rank with nothing to post yet still takes part, at least every ``TICK_S``, saying so. An agreement counts only when every
rank has posted; until then it is a *tick*. Ticks carry what must not wait for a slow trainer: that some rank has stopped or
failed (the others are then urged, R5.9), and which rank has not posted yet. So no collective lasts longer than a tick and the
moment that a machine takes to answer, however long a trainer takes for a step, an evaluation or a checkpoint. When all ranks
are ready, an agreement is a single collective. Which rank is gone, the links say on which the collectives run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final, assert_never

from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.events import Agreed, Counted, Event, PeerLost, Reported, Urged
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer
from odb_ref.core.types import StepCounts
from odb_ref.torch.exchange.collectives import Transport
from odb_ref.torch.exchange.links import EndedError, Word

TICK_S: Final = 0.2
IDLE_TICK_S: Final = 0.5
FAILED_S: Final = 2.0
"""How long a rank that has failed waits for the others to agree: one may never post again, its data set blocks."""

LEFT: Final = "it has closed its loader, or ended"

Submit = Callable[[Event], None]

_LOWEST: Final = -(2**63) + 1
_NOTHING: Final = (_LOWEST,) * WIRE_SIZE


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is doing, and why it has failed, if it has."""

    text: str = "has not begun its epoch"
    failure: str = ""


class Exchange:
    """The exchange of one loader, over all its epochs. Its thread starts with the first epoch."""

    def __init__(self, transport: Transport) -> None:
        self._transport: Transport | None = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._condition = threading.Condition()
        self._post: Post | None = None
        self._submit: Submit | None = None
        self._is_urgent = False
        self._is_closing = False
        self._end: PeerLost | None = None
        self._thread: threading.Thread | None = None
        self._describe: Callable[[], Status] = Status
        self._missing: int | None = None
        """The lowest rank that had not posted at the last tick."""
        self._failed_s: float | None = None
        transport.set_describe(lambda: self._describe().text)
        self.exchange_s = 0.0
        """Seconds spent in collectives that brought an answer."""
        self.exchanges = 0

    def open(self, submit: Submit, describe: Callable[[], Status]) -> PeerLost | None:
        """Begins an epoch: answers go to ``submit``, which returns when the next post is made, if the answer leads to one.
        ``describe`` says what this rank is doing, for others that wait for it.

        What comes back is not None when the exchange has ended before.
        """
        with self._condition:
            self._submit, self._post, self._is_urgent = submit, None, False
            self._describe, self._missing, self._failed_s = describe, None, None
            end = self._end
            if end is None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="odb-exchange", daemon=True)
                self._thread.start()
            return end

    def post(self, post: Post) -> None:
        """Takes part in the next exchange with ``post``. Does not wait."""
        with self._condition:
            self._post = post
            if isinstance(post, PostOffer):
                has_failed = post.offer.failed_rank != NONE
                self._is_urgent = self._is_urgent or has_failed or post.offer.stop_rank != NONE
                self._failed_s = time.monotonic() if has_failed else None
            self._condition.notify_all()

    def urge(self) -> None:
        """Urges the other ranks from the next tick to the end of the epoch: this rank's consumer has left. Spec: A6, R5.9.

        Not only once an offer says so: the offer that is open may say nothing of it, and wait for a rank whose consumer's
        thread is the one that reads.
        """
        with self._condition:
            self._is_urgent = self._submit is not None
            self._condition.notify_all()

    def finish(self) -> None:
        """Ends an epoch on this rank."""
        with self._condition:
            self._submit = self._post = self._missing = self._failed_s = None
            self._is_urgent = False
            self._describe = Status

    def find_awaited(self) -> Word | None:
        """Returns which rank the exchange waits for, and what that rank says it is doing; None when it waits for none."""
        transport, missing = self._transport, self._missing
        word = transport.find_awaited() if transport is not None else None
        return word or (None if missing is None else (missing, "has not said what it is doing", 0))

    def close(self) -> None:
        """Takes leave of the other ranks with the next tick. Does not wait; `join` does."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            transport = self._transport if self._thread is None else None
        if transport is not None:
            self._give_up(None)

    def join(self, timeout_s: float) -> bool:
        """Returns True when the exchange has ended and its connections are closed; it is made to end when it has not by
        then.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            # Not left to itself: one that comes back while the interpreter ends would take the process down with it.
            self._end_all(PeerLost(self.rank, LEFT))
            thread.join(timeout_s)
        return not thread.is_alive()

    def abort(self, cause: str) -> None:
        """Ends the exchange on all ranks, because this one cannot go on."""
        end = PeerLost(self.rank, cause)
        with self._condition:
            self._end = end
            self._submit = self._post = None
        self._end_all(end)
        self.close()

    def _end_all(self, end: PeerLost) -> None:
        transport = self._transport
        if transport is not None:
            transport.end(end)

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (transport := self._transport) is not None:
                self._exchange(transport)
        except EndedError as error:
            del transport
            self._give_up(error.end)
        except BaseException as error:  # a message that contradicts the protocol, say
            del transport
            text = str(error).strip().splitlines()
            end = PeerLost(self.rank, f"its exchange broke: {text[0] if text else repr(error)}")
            self._end_all(end)
            self._give_up(end)

    def _count(self, transport: Transport, counts: tuple[StepCounts, ...], wanted: int | None) -> Counted:
        """Returns the sums of all ranks' counts; what they want goes with them, each rank's in a place of its own."""
        own = [] if wanted is None else [0] * transport.world_size
        if wanted is not None:
            own[transport.rank] = wanted
        sums = transport.reduce_sum([*flatten(counts), *own])
        end = len(sums) - len(own)
        width = end // len(counts)
        rows = (sums[first : first + width] for first in range(0, end, width))
        return Counted(tuple(map(StepCounts.from_row, rows)), tuple(sums[end:]))

    def _exchange(self, transport: Transport) -> None:
        post = self._wait_for_post()
        began = time.monotonic()
        match post:
            case PostCounts(counts, wanted):
                answer: Event = self._count(transport, counts, wanted)
            case PostReport(report):
                answer = Reported(transport.gather(report))
            case PostOffer() | None:
                agreement = self._tick(transport, post)
                if agreement is None:
                    return
                answer = Agreed(agreement)
            case _:
                assert_never(post)
        self.exchange_s += time.monotonic() - began
        self.exchanges += 1
        with self._condition:
            if self._post is post:
                self._post = None
            submit = self._submit
            self._missing = None
        transport.want(None)
        if submit is not None:
            submit(answer)

    def _wait_for_post(self) -> Post | None:
        with self._condition:
            if self._post is None and not self._is_closing:
                self._condition.wait(TICK_S if self._submit is not None else IDLE_TICK_S)
            return self._post

    def _tick(self, transport: Transport, post: PostOffer | None) -> Offer | None:
        """Returns the agreement, or None when some rank has not posted yet."""
        with self._condition:
            is_leaving = self._is_closing and self._submit is None
            flags = (
                -self.rank if post is None else _LOWEST,
                int(self._is_urgent),
                -self.rank if is_leaving else _LOWEST,
            )
        wire = post.offer.to_wire() if post is not None else _NOTHING
        answer = transport.reduce_max((*wire, *flags))
        missing, is_urgent, leaving = answer[WIRE_SIZE:]
        if leaving != _LOWEST:
            self._give_up(PeerLost(-leaving, LEFT))
            return None
        if missing == _LOWEST:
            return Offer.from_wire(answer[:WIRE_SIZE])
        self._missing = -missing
        transport.want(self._missing)
        if is_urgent and post is None:
            with self._condition:
                submit = self._submit
            if submit is not None:
                submit(Urged())
        if self._failed_s is not None and time.monotonic() - self._failed_s > FAILED_S:
            self._end_all(PeerLost(self.rank, self._describe().failure))
        return None

    def _give_up(self, end: PeerLost | None) -> None:
        with self._condition:
            self._end = self._end or end or PeerLost(self.rank, "its loader is closed")
            transport, self._transport = self._transport, None
            submit, end = self._submit, self._end
        if transport is not None:
            # Or whoever sees the connection end before all have heard would say that this process is gone.
            transport.end(end)
            transport.close()
        if submit is not None:
            submit(end)


def flatten(counts: tuple[StepCounts, ...]) -> list[int]:
    """Counts as integers: three for each step, and one for each further resource."""
    return list(chain.from_iterable(item.to_row() for item in counts))
