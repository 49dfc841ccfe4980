"""The trainer's side of a loader: hands out the steps that are ready, and takes part in the exchange.

It decides nothing. The machine is with the samples (`Driver`), perhaps in another process; every event of the exchange and
the consumer goes to it, and its state is known here as a summary. The parts, all under one lock::

    RemoteMachine   the machine as it is known here, and its stand-in should it be lost (R7.6)
    Position        the planned rounds, the next step, what to save
    StepQueue       the batches that are ready
    BadSampleLog    the samples set aside
    Ending          what the consumer raises at the end

Spec: R7.6.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.errors import JobError, OdbError, UsageError
from odb_ref.core.events import (
    Agreed,
    BudgetAccepted,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    Reported,
    StepTaken,
    Urged,
)
from odb_ref.core.state import Phase
from odb_ref.torch.backend.messages import Backend, Update
from odb_ref.torch.backend.notes import Taken
from odb_ref.torch.exchange.exchange import Exchange, Status
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import Progress
from odb_ref.torch.reading.description import describe
from odb_ref.torch.trainer.bad_samples import BadSampleLog
from odb_ref.torch.trainer.ending import Ending
from odb_ref.torch.trainer.metrics import EpochMetrics
from odb_ref.torch.trainer.position import Position
from odb_ref.torch.trainer.remote_machine import RemoteMachine
from odb_ref.torch.trainer.step_queue import StepQueue

logger: Final = logging.getLogger("odb_ref")

_CHANGED: Final = "the samples are not what they were when the state was saved: the steps taken would be others"
_CLOSED: Final = "its consumer left, and its loader was closed before all ranks knew"

WORK_S: Final = 0.05
"""While it has no step, the consumer's thread looks for one after each sample or batch that ends later than this."""

LOOK_S: Final = 0.2
"""How often whoever reads and collates for an absent consumer looks whether it is needed."""

ABSENCE_S: Final = 2.0
"""An urged rank whose consumer does not ask for a step for so long reads and collates without it (A3): it may wait for one that
has left."""


class TrainerSide:
    """One epoch of one rank. `take` is what the training process calls; the rest happens by itself."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        exchange: Exchange,
        start: EpochStart,
        *,
        accumulation_steps: int = 1,
        log_wait_s: float = 30.0,
    ) -> None:
        self._backend = backend
        self._exchange = exchange
        self._start = start
        self._log_wait_s = log_wait_s
        self._condition = threading.Condition(threading.RLock())
        self._closing = threading.Lock()
        self._is_closed = False
        self._has_left = False
        self._lost_to = ""
        """Who has taken the epoch from its consumer, if anybody has."""
        self._is_exhausted = False
        self._is_asking = False
        self._substitute: threading.Thread | None = None
        """Does the consumer's work for it, if that is reading and collating, and the consumer does not come."""
        self._machine = RemoteMachine(config, backend.submit)
        self._position = Position(config, start, accumulation_steps)
        self._queue = StepQueue(self._position.first_step)
        self._ending = Ending()
        self.bad_samples = BadSampleLog(start)
        """What was set aside."""
        self.doubts: deque[str] = deque()
        """What the user is still to be warned of."""
        self.metrics = EpochMetrics(start.started_s)

    def begin(self) -> None:
        """Starts the epoch."""
        with self._condition:
            end = self._exchange.open(self.on_answer, self.describe)
            try:
                self._backend.begin(self._start, self)
            except Exception as error:  # a data set that cannot be sent to a worker, say
                self.on_lost(describe(error), error)
            except BaseException as error:  # Ctrl-C, or what the data set raises while it is sent
                self.on_lost(describe(error), error)
                raise
            if end is not None:
                self._submit(end)

    def refuse(self, error: BaseException) -> None:
        """Starts the epoch as one that has failed on this rank before it could begin."""
        with self._condition:
            end = self._exchange.open(self.on_answer, self.describe)
            self.on_lost(describe(error), error)
            if end is not None:
                self._submit(end)

    # What the machine's side reports ---------------------------------------------------------------------------------

    def on_update(self, update: Update) -> None:
        """Hears that the machine has handled an event."""
        with self._condition:
            self._machine.note(update)
            if update.planned is not None:
                self._position.plan(update.planned)
            self._skip()
            if update.post is not None:
                self._exchange.post(update.post)
            if update.is_finished:
                self._exchange.finish()
            self._condition.notify_all()

    def _skip(self) -> None:
        """Takes the steps that were trained on before the state was saved."""
        while self._position.is_skipping and self._may_take():
            self._position.advance()
            self._submit(StepTaken())
            if self._position.next_step == self._position.first_step and not self._position.is_as_saved:
                self._ending.note_failure(OdbError(_CHANGED))
                self._submit(LocalFailed(_CHANGED))

    def on_batch(self, number: int, batch: object) -> None:
        """The batch of a step is here."""
        with self._condition:
            self._queue.add(number, batch)

    def on_collated(self, round_: int) -> None:
        """The batches of a round are here, and ready to train on."""
        with self._condition:
            self._submit(Collated(round_))

    def on_doubt(self, text: str) -> None:
        """Hears that the user is to be warned."""
        with self._condition:
            self.doubts.append(text)

    def on_bad(self, place: int, cause: str) -> None:
        """Hears that a sample is set aside."""
        with self._condition:
            self.bad_samples.add(place, cause)

    def on_error(self, error: BaseException) -> None:
        """Hears that reading or collating has failed."""
        with self._condition:
            self._ending.note_failure(error)

    def on_broken(self, error: Exception) -> None:
        """Hears that the machine cannot go on."""
        with self._condition:
            self._ending.note_defect(error)
            self._exchange.abort(describe(error))
            self._condition.notify_all()

    def on_lost(self, cause: str, error: BaseException) -> None:
        """Hears that the machine is gone: a stand-in hears of that, and then of what it has not answered. Spec: R7.6."""
        with self._condition:
            self._ending.note_failure(error)
            self._machine.stand_in(cause, self)

    # Events ----------------------------------------------------------------------------------------------------------

    def _submit(self, event: Event, at_s: float | None = None) -> None:
        if self._is_closed and self.is_finished:
            return  # it comes late, and the backend may have begun another epoch
        self._machine.submit(event, at_s)

    def on_answer(self, event: Event) -> None:
        """Hears that the exchange has an answer. Waits until the next post is made, if the answer leads to one."""
        with self._condition:
            self._submit(event)
            if isinstance(event, Urged) and self._backend.is_inline and self._substitute is None:
                self._substitute = threading.Thread(target=self._work_unasked, name="odb-substitute", daemon=True)
                self._substitute.start()
            if isinstance(event, Agreed | Counted | Reported):
                self._condition.wait_for(
                    lambda: self.is_finished or self._is_closed or self._machine.is_answered(event)
                )

    def accept_budget(self, tokens: int) -> None:
        """This rank accepts another token budget from now on. Spec: R15.2."""
        with self._condition:
            if not self.is_finished:
                self._submit(BudgetAccepted(tokens))

    # The consumer ----------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True when nothing more happens on this rank by itself."""
        return self._ending.is_broken or self._machine.is_done

    @property
    def is_exhausted(self) -> bool:
        """True when the epoch is complete and the consumer has been told."""
        return self._is_exhausted

    @property
    def next_step(self) -> int:
        """The number of the step that is taken next."""
        return max(self._position.next_step, self._position.first_step)

    def take(self) -> Taken | None:
        """Returns the next step; None when the epoch is complete, or its consumer has left it. Waits for it.

        Raises: JobError when the epoch has ended early, on this rank or another; UsageError when its consumer has lost it.
        """
        began_s = time.monotonic()
        self._is_asking = True
        try:
            while True:
                self._work()
                with self._condition:
                    if self._is_available():
                        now_s = time.monotonic()
                        self.metrics.note_wait(began_s, now_s)
                        return self._take(now_s)
                    if self._is_over():
                        break
                # An answer of the exchange came in between, which may lower the limit: the machine has to say.
        finally:
            self._is_asking = False
        self._check_ending()
        return None

    def _work(self) -> None:
        """Waits until a step is available, or none will be. Where it is this thread that reads and collates, does that
        meanwhile; and if a step was there at once, its share of what the round's next steps need.

        Raises: what user code raises that is not an Exception.
        """
        is_first, waited_s = True, 0.0
        while True:
            with self._condition:
                while not self._condition.wait_for(
                    lambda: self._is_available() or self._is_over() or self._backend.has_work, self._log_wait_s
                ):
                    waited_s += self._log_wait_s
                    self._log_wait(waited_s)
                is_available = self._is_available()
                if (is_available and not is_first) or not self._backend.has_work or self._is_over():
                    return
                steps = self._machine.count_ready(self._position.next_step) if is_available else 1
            self._backend.work(steps, None if is_available else WORK_S)
            is_first = False

    def _work_unasked(self) -> None:
        """Reads and collates for a consumer that does not ask, from a while after an urge to the end of the epoch."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_quiet, ABSENCE_S)
        while True:
            with self._condition:
                # Looks again now and then: nobody says that the consumer has stopped asking.
                is_needed = self._condition.wait_for(
                    lambda: self._is_quiet or (self._backend.has_work and not self._is_asking), LOOK_S
                )
                if self._is_quiet:
                    return
            if is_needed:
                self._backend.work(1, WORK_S)

    @property
    def _is_quiet(self) -> bool:
        return self.is_finished or self._has_left or self._is_closed

    def _log_wait(self, waited_s: float) -> None:
        """Says which rank is waited for, and what that one is doing."""
        rank, awaited = self._exchange.rank, self._exchange.find_awaited()
        if awaited is None or awaited[0] == rank:
            logger.warning("rank %s waits for itself, which %s (for %.0f s)", rank, self.describe().text, waited_s)
        else:
            logger.warning("rank %s waits for rank %s, which %s (for %.0f s)", rank, *awaited[:2], waited_s)

    def describe(self) -> Status:
        """Returns what this rank is doing, and why it has failed, if it has. Does not wait."""
        summary = self._machine.summary
        if summary is None:
            return Status(f"is beginning its epoch: {self._backend.describe()}")
        is_held = self._backend.is_inline and not self._is_asking  # who would read or collate is busy
        doing = "" if is_held else self._backend.describe()
        if summary.failure:
            text = f"has failed: {summary.failure}"
        elif doing and summary.phase is Phase.FILL:
            text = f"is {doing}"
        elif is_held or (summary.phase is Phase.FILL and summary.released_steps > summary.taken_steps):
            text = f"is waiting for its trainer, which holds step {summary.taken_steps - 1}"
        else:
            text = f"is in phase {summary.phase} of round {summary.round}"
        return Status(text, summary.failure)

    def _is_over(self) -> bool:
        """Returns True when no step comes any more; at the end of an epoch once the machine knows of all that were taken."""
        return self._has_left or self._ending.is_broken or (self.is_finished and self._machine.is_silent)

    def _is_available(self) -> bool:
        """Returns True when a step may be handed out: it is delivered, and its window's counts and whether it is the last
        are known.
        """
        number = self._position.next_step
        last_needed = max(self._position.compute_window(number)[-1], number + 1)
        return self._may_take() and self._machine.is_planned(last_needed)

    def _may_take(self) -> bool:
        """Returns True when the machine has delivered the next step and lets it be taken."""
        return not self._has_left and not self._ending.is_broken and self._position.next_step < self._machine.limit

    def _take(self, now_s: float) -> Taken:
        number = self._position.next_step
        counts = self._position.sum_counts(self._position.compute_window(number))
        step = self._position.advance()
        batch = self._queue.pop(number)
        self.metrics.count(step)
        self._submit(StepTaken(), now_s)
        return Taken(step, batch, counts, self._position.emitted_samples, self._machine.is_last(number))

    def _check_ending(self) -> None:
        if self._lost_to:
            raise UsageError(f"this iterator has lost epoch {self._start.epoch} before its end: {self._lost_to}")
        if self._has_left:
            return
        if not self._is_closed:
            self._backend.close_trace()
        summary = self._machine.summary
        self._ending.check(summary)
        if summary is not None and summary.planned_steps < self._position.first_step:
            raise JobError(_CHANGED, rank=None, cause=_CHANGED)  # on all ranks: they count the same steps
        self._is_exhausted = True

    def leave(self, lost_to: str = "") -> None:
        """Ends the consumer's part: it takes no further step. Does not wait. ``lost_to`` says who does this in its place."""
        with self._condition:
            if self._has_left:
                return
            # One that has had the last step of a complete epoch loses nothing.
            has_had_all = self._machine.is_last(self._position.next_step - 1)
            self._has_left, self._lost_to = True, "" if has_had_all else lost_to
            self._queue.close()
            self._submit(ConsumerStopped())
            self._condition.notify_all()
        self._exchange.urge()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the epoch has finished on this rank, and returns whether it has."""
        with self._condition:
            return self._condition.wait_for(lambda: self.is_finished, timeout_s)

    def close(self) -> None:
        """Ends the backend's epoch, at the end or after `leave`. A stand-in tells the other ranks if they do not know yet."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._backend.end()
            with self._condition:
                self._queue.close()
                if not self.is_finished:
                    self.on_lost(_CLOSED, OdbError(_CLOSED))
                self._condition.notify_all()

    def leave_and_close(self, timeout_s: float, lost_to: str = "") -> None:
        """Leaves, waits until all ranks know, or for so long, and closes."""
        self.leave(lost_to)
        self.wait(timeout_s)
        self.close()

    def compute_progress(self) -> Progress:
        """Returns where the epoch stands after the last taken step."""
        with self._condition:
            return self._position.compute_progress(self.bad_samples)
