"""The exchange: one thread per loader that performs the posts of one rank, and keeps the ranks in touch meanwhile.

A rank with nothing to post yet still takes part, at least every ``TICK_S``, saying so. An agreement counts only when every
rank has posted; until then it is a *tick*. Ticks carry what must not wait for a slow trainer: that some rank has stopped or
failed (the others are then urged, R5.9), and that a process is alive. So no collective lasts longer than a tick and the moment
that a machine takes to answer, however long a trainer takes for a step, an evaluation or a checkpoint; one that outlasts the
timeout means that a process is gone. When all ranks are ready, an agreement is a single collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Final, assert_never

from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.errors import PeerError
from odb_ref.core.events import Agreed, Counted, Event, PeerLost, Reported, Urged
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer
from odb_ref.core.types import StepCounts
from odb_ref.torch.transport import Transport

TICK_S: Final = 0.2
IDLE_TICK_S: Final = 0.5
LINGER_S: Final = 0.5
"""How long a rank that has found out who is gone stays itself, for the others to find out the same."""

Submit = Callable[[Event], None]

_LOWEST: Final = -(2**63) + 1
_NOTHING: Final = (_LOWEST,) * WIRE_SIZE


class Channel:
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
        self.exchange_s = 0.0
        """Seconds spent in collectives that brought an answer."""
        self.exchanges = 0

    def open(self, submit: Submit) -> PeerLost | None:
        """Begins an epoch: answers go to ``submit``, which returns when the next post is made, if the answer leads to one.

        What comes back is not None when the exchange has ended before.
        """
        with self._condition:
            self._submit, self._post, self._is_urgent = submit, None, False
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
                self._is_urgent = post.offer.failed_rank != NONE or post.offer.stop_rank != NONE
            self._condition.notify_all()

    def finish(self) -> None:
        """Ends an epoch on this rank."""
        with self._condition:
            self._submit = self._post = None
            self._is_urgent = False

    def close(self) -> None:
        """Takes leave of the other ranks with the next tick. Does not wait; `join` does."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            transport = self._transport if self._thread is None else None
        if transport is not None:
            self._give_up(None)

    def join(self, timeout_s: float) -> bool:
        """True when the exchange has ended and its connections are closed."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    def abort(self, cause: str) -> None:
        """Ends the exchange with the next tick as one that is broken, because this rank cannot go on."""
        with self._condition:
            self._end = PeerLost(self.rank, cause)
            self._submit = self._post = None
        self.close()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (transport := self._transport) is not None:
                self._exchange(transport)
        except Exception as error:  # whatever gloo raises
            del transport
            self._lose(error)

    def _exchange(self, transport: Transport) -> None:
        post = self._wait_for_post()
        began = time.monotonic()
        match post:
            case PostCounts(counts):
                sums = iter(transport.reduce_sum(flatten(counts)))
                answer: Event = Counted(tuple(StepCounts(*row) for row in zip(sums, sums, sums, strict=True)))
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
        if submit is not None:
            submit(answer)

    def _wait_for_post(self) -> Post | None:
        with self._condition:
            if self._post is None and not self._is_closing:
                self._condition.wait(TICK_S if self._submit is not None else IDLE_TICK_S)
            return self._post

    def _tick(self, transport: Transport, post: PostOffer | None) -> Offer | None:
        """The agreement, or None when some rank has not posted yet."""
        with self._condition:
            is_leaving = self._is_closing and self._submit is None
            flags = (int(post is None), int(self._is_urgent), -self.rank if is_leaving else _LOWEST)
        wire = post.offer.to_wire() if post is not None else _NOTHING
        answer = transport.reduce_max((*wire, *flags))
        is_missing, is_urgent, leaving = answer[WIRE_SIZE:]
        if leaving != _LOWEST:
            self._give_up(PeerLost(-leaving, "it has closed its loader, or ended"))
            return None
        if not is_missing:
            return Offer.from_wire(answer[:WIRE_SIZE])
        if is_urgent and post is None:
            with self._condition:
                submit = self._submit
            if submit is not None:
                submit(Urged())
        return None

    def _lose(self, error: Exception) -> None:
        transport = self._transport
        rank = None
        if transport is not None and not isinstance(error, PeerError):
            # The operating system may need a moment to end a process whose connections it has already closed.
            deadline = time.monotonic() + 1.0
            while (rank := transport.find_gone()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if rank is not None:
                # The others look for it too: whoever knows may end its own process next, and must not be taken for it.
                time.sleep(LINGER_S)
        text = str(error).strip().splitlines()
        cause = "its process is gone" if rank is not None else f"the exchange broke: {text[0] if text else error!r}"
        self._give_up(PeerLost(rank, cause))

    def _give_up(self, end: PeerLost | None) -> None:
        with self._condition:
            self._end = self._end or end or PeerLost(self.rank, "its loader is closed")
            transport, self._transport = self._transport, None
            submit, end = self._submit, self._end
        if transport is not None:
            transport.close()
        if submit is not None:
            submit(end)


def flatten(counts: tuple[StepCounts, ...]) -> list[int]:
    """Counts as integers, three for each step."""
    return list(chain.from_iterable((item.samples, item.tokens, item.supervised) for item in counts))
