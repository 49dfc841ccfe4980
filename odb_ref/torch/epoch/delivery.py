"""The consumer's side of an epoch: a training loop takes one step after another, each with its batch, until the end."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Final

from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import JobError, OdbError, UsageError
from odb_ref.core.events import ConsumerStopped, Event, PeerLost, Urged
from odb_ref.core.state import Phase, State
from odb_ref.core.types import compute_counts
from odb_ref.torch.epoch.driver import CHANGED, EpochDriver
from odb_ref.torch.epoch.info import StepInfo
from odb_ref.torch.epoch.metrics import EpochMetrics
from odb_ref.torch.exchange.roster import Roster
from odb_ref.torch.reading.description import describe

logger: Final = logging.getLogger("odb_ref")

POLL_S: Final = 0.2
"""How often the thread that substitutes for an absent consumer checks whether it is needed."""

ABSENCE_S: Final = 2.0
"""After another rank has urged this one, a thread waits this long, and then reads and collates whenever the consumer is not
asking for a step (A3): the consumer may be waiting for a rank that has left."""

_EARLY: Final = "its consumer left before the samples that it had read before its state was saved were read again"

_IN_ROUND: Final = re.compile(r"\bround \d+, rank 0 ")
"""Matches a cause that reports ranks in different rounds."""

_HELD: Final = re.compile(r"in round \d+ its peer ")
"""Matches a cause that reports peers with different samples."""

_PEER: Final = re.compile(r"\bits peer (\d+)")
"""Finds the process that a cause names, one of those that form the outcome's rank."""


class Delivery:
    """The consumer's side of one epoch on one rank. Only one thread may call `take`; all else is safe from any thread."""

    def __init__(self, driver: EpochDriver, weighting: Weighting, *, log_wait_s: float) -> None:
        self.driver = driver
        self.metrics = EpochMetrics(driver.start.started_s)
        self._weighting = weighting
        self._log_wait_s = log_wait_s
        self._condition = driver.condition
        self._pid = os.getpid()
        self._has_left = False
        self._lost_to = ""
        """Why the consumer lost the epoch, or empty."""
        self.lost = ""
        """Names the step that was taken but never handed out, or empty."""
        self.is_exhausted = False
        """True once the epoch is complete and the consumer has learned of it."""
        self._is_asking = False
        self._substitute: threading.Thread | None = None
        """Reads and collates when that is the consumer's job and the consumer stays away."""

    def begin(self, failure: BaseException | None = None) -> None:
        """Starts the epoch. With ``failure`` the epoch fails at once, because this rank could not begin it."""
        with self._condition:
            end = self.driver.exchange.open(self._on_answer, self.describe)
            if failure is None:
                self.driver.begin()
            else:
                self.driver.on_error(describe(failure), failure)
            if end is not None:
                self.driver.submit(end)

    def _on_answer(self, event: Event) -> None:
        """Passes an answer from the exchange to the machine. On return the machine's next message has been posted."""
        self.driver.submit(event)
        if isinstance(event, Urged) and self.driver.service.is_inline and self._substitute is None:
            self._substitute = threading.Thread(target=self._work_unasked, name="odb-substitute", daemon=True)
            self._substitute.start()
        if isinstance(event, PeerLost) and not (self._is_asking or self._has_left):
            self._log_loss()

    def _log_loss(self) -> None:
        """Logs a loss of which the consumer, inside a step, would learn only with the next one."""
        exchange = self.driver.exchange
        logger.warning(
            "%s (%s holds step %d: in a collective with the lost rank it waits until its process group gives up)",
            make_error(self.driver.state.outcome, exchange.roster, exchange.notes),
            exchange.roster.name_process(exchange.roster.index),
            self.driver.state.taken_steps - 1,
        )

    # Taking ----------------------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The number of the step to take next."""
        return max(self.driver.cursor.next_step, self.driver.cursor.first_step)

    def take(self) -> tuple[object, StepInfo] | None:
        """Waits for the next batch and returns it with its `StepInfo`. None if the epoch is complete, or its consumer has left.

        Raises: JobError when the epoch has ended early, on this rank or another; UsageError when the consumer has lost it.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"this iterator belongs to process {self._pid}, from which this process was forked: make another loader in "
                "this process"
            )
        began_s, is_served = time.monotonic(), False
        self._is_asking = True
        try:
            while True:
                with self._condition:
                    if self._is_available() and (is_served or not self.driver.service.has_work):
                        self.metrics.note_wait(began_s, time.monotonic())
                        return self._take()
                    if self._is_over():
                        break
                # Repeats if an answer from the exchange has lowered the limit in the meantime.
                with self.driver.exchange.waiting():
                    self._work()
                is_served = True
        finally:
            self._is_asking = False
        self._check_ending()
        return None

    def _take(self) -> tuple[object, StepInfo]:
        config, start, cursor = self.driver.config, self.driver.start, self.driver.cursor
        is_update_end = cursor.is_update_end(cursor.next_step)
        step, batch, update_counts = self.driver.take()
        local, counts = compute_counts(step.group, len(config.limits)), step.global_counts
        is_last = self._is_last(step.number)
        emitted, total = len(start.taken_before) + cursor.emitted_samples, start.total_samples
        info = StepInfo(
            loss_scale=self._weighting.compute_scale(local, update_counts, config.world_size),
            step=step.number,
            round=step.round,
            epoch=start.epoch,
            is_idle=step.is_idle,
            is_last=is_last,
            is_update_end=is_last or is_update_end,
            update=cursor.compute_update(step),
            local_samples=local.samples,
            local_tokens=local.tokens,
            local_supervised=local.supervised,
            padded_tokens=config.layout.compute_tokens(step.group),
            local_costs=local.costs,
            global_samples=counts.samples,
            global_tokens=counts.tokens,
            global_supervised=counts.supervised,
            global_costs=counts.costs,
            update_supervised=update_counts.supervised,
            update_samples=update_counts.samples,
            update_tokens=update_counts.tokens,
            emitted_samples=emitted,
            progress=emitted / total if total else None,
            world_size=config.world_size,
            sample_ids=tuple([sample.id for sample in step.group]),
            weighting=self._weighting,
            quarantined_samples=self.driver.quarantine.count,
        )
        self.metrics.count(info, cursor.budget_tokens)
        return batch, info

    def _work(self) -> None:
        """Waits until a step is available, or none will be. If this thread reads and collates, it does so meanwhile. If a step
        was available at once, the thread does only its share of the work for the round's next steps.

        Raises: exceptions of user code that do not derive from Exception.
        """
        service, is_first, waited_s = self.driver.service, True, 0.0
        while True:
            with self._condition:
                while not self._condition.wait_for(
                    lambda: self._is_available() or self._is_over() or service.has_work, self._log_wait_s
                ):
                    waited_s += self._log_wait_s
                    self._log_wait(waited_s)
                is_available = self._is_available()
                if (is_available and not is_first) or not service.has_work or self._is_over():
                    return
                steps = self._count_ready() if is_available else 1
            service.work(steps, None if is_available else self._is_worth_a_look)
            is_first = False

    def _work_unasked(self) -> None:
        """Reads and collates while the consumer stays away, from some time after an urge until the end of the epoch."""
        with self._condition:
            self._condition.wait_for(self._is_quiet, ABSENCE_S)
        service = self.driver.service
        while True:
            with self._condition:
                # Polls, because nothing signals that the consumer has stopped asking.
                is_needed = self._condition.wait_for(
                    lambda: self._is_quiet() or (service.has_work and not self._is_asking), POLL_S
                )
                if self._is_quiet():
                    return
            if is_needed:
                service.work(1, lambda: self._is_asking or self._is_quiet())

    def _is_quiet(self) -> bool:
        return self._is_over() or self.driver.is_closed

    def _is_available(self) -> bool:
        """Returns True if the next step may be taken: delivered, with its update's counts, and known to be the last or not."""
        driver = self.driver
        number = driver.cursor.next_step
        needed = driver.cursor.compute_last_needed(number)
        is_planned = driver.state.planned_steps > needed or driver.state.outcome is not None
        return not self._has_left and number < driver.taking_limit and is_planned

    def _is_last(self, number: int) -> bool:
        """Returns True if the epoch ends with this step, on all ranks.

        An aborted epoch has no last step: a rank that takes the step early cannot know, and ranks would differ. Spec: R7.1.
        """
        state = self.driver.state
        return _is_complete(state) and number + 1 >= state.planned_steps

    @property
    def has_given_all(self) -> bool:
        """True if the epoch is complete and the consumer has its last step."""
        return self._is_last(self.driver.cursor.next_step - 1)

    def _count_ready(self) -> int:
        """Returns how many steps may be taken before more must be planned, at least 1."""
        state = self.driver.state
        return max(1, state.planned_steps - len(state.plan) - self.driver.cursor.next_step - 1)

    def _is_worth_a_look(self) -> bool:
        """Returns True if the waiting consumer can stop waiting: a step is available, or none will come."""
        with self._condition:
            return self._is_available() or self._is_over()

    def _is_over(self) -> bool:
        """Returns True if no more steps will come."""
        return self._has_left or self.driver.is_finished

    def _log_wait(self, waited_s: float) -> None:
        """Logs which rank this one waits for, and what that rank is doing."""
        roster, awaited = self.driver.exchange.roster, self.driver.exchange.find_awaited()
        who, whom = roster.name_process(roster.index), "itself"
        text = self.describe()
        if awaited is not None and awaited.rank != roster.index:
            whom, text = roster.name_process(awaited.rank), awaited.text
        note = ""
        if self.driver.start.follows_break and self.driver.cursor.next_step == 0:
            note = (
                f". {who} left the epoch before early: others may wait for it there, in a collective of the model (NP2)"
            )
        logger.warning("%s waits for %s, which %s (for %.0f s)%s", who, whom, text, waited_s, note)

    def describe(self) -> str:
        """Returns what this rank is doing. Does not wait."""
        driver, state = self.driver, self.driver.state
        if not driver.has_begun:
            return f"is beginning its epoch: {driver.service.describe()}"
        is_held = driver.service.is_inline and not self._is_asking  # the thread that reads and collates is busy
        doing = "" if is_held else driver.service.describe()
        if state.failure:
            return f"has failed: {state.failure}"
        if doing and state.phase is Phase.FILL:
            return f"is {doing}"
        if is_held or (state.phase is Phase.FILL and state.planned_steps - len(state.plan) > state.taken_steps):
            return f"is waiting for its trainer, which holds step {state.taken_steps - 1}"
        return f"is in phase {state.phase} of round {state.round}"

    # Ending ----------------------------------------------------------------------------------------------------------

    def _check_ending(self) -> None:
        if self._lost_to:
            raise UsageError(f"epoch {self.driver.start.epoch} of this iterator was cut short: {self._lost_to}")
        if self._has_left:
            return
        self.driver.close_trace()
        if self.driver.defect is not None:
            raise self.driver.defect
        if not _is_complete(self.driver.state):
            exchange, has_left = self.driver.exchange, bool(self.driver.start.follows_break)
            error = make_error(self.driver.state.outcome, exchange.roster, exchange.notes, has_left=has_left)
            raise error from self.driver.failure
        if self.driver.state.planned_steps < self.driver.cursor.first_step:
            raise JobError(CHANGED, rank=None, cause=CHANGED)  # all ranks raise this: they count the same steps
        self.is_exhausted = True

    def check_whole(self) -> None:
        """Raises: UsageError when a step was taken but never handed out."""
        if self.lost:
            raise UsageError(f"{self.lost}: resume from the last saved state")

    def leave(self, lost_to: str = "") -> None:
        """Ends the consumer's part: it takes no more steps. Does not wait. ``lost_to`` names what took the epoch away."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            if self._has_left:
                return
            # A consumer that has the last step of a complete epoch loses nothing.
            self._has_left, self._lost_to = True, "" if self.has_given_all else lost_to
            self.driver.drop_batches()
            if self.driver.has_begun:
                self.driver.submit(ConsumerStopped())
            else:  # its round is not known to the machine yet, so this rank can only fail
                self.driver.on_error(_EARLY, OdbError(_EARLY))
        self.driver.exchange.urge()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the epoch has finished on this rank, and returns whether it has."""
        with self._condition:
            return self._condition.wait_for(lambda: self.driver.is_finished, timeout_s)

    def leave_and_close(self, timeout_s: float, lost_to: str = "") -> None:
        """Leaves the epoch, waits until all ranks know or the timeout has passed, and closes it."""
        self.leave(lost_to)
        self.wait(timeout_s)
        self.driver.close()


def _is_complete(state: State) -> bool:
    return state.outcome is not None and state.outcome.kind is OutcomeKind.COMPLETE


def make_error(
    outcome: Outcome | None, roster: Roster, notes: Sequence[str] = (), *, has_left: bool = False
) -> Exception:
    """Returns the consumer's error for an epoch that is not complete. It names the rank and the cause.

    ``notes`` are the samples that processes have set aside. ``has_left`` says that this rank has not finished the epoch before.
    """
    if outcome is None:
        return OdbError("the epoch has ended without an outcome")
    found = _PEER.search(outcome.cause) if roster.peers > 1 else None
    peer = None if found is None else int(found[1])
    who = "an unknown rank" if outcome.rank is None else roster.name(outcome.rank, peer)
    cause = outcome.cause
    if found is not None and outcome.rank is not None:
        first = outcome.rank * roster.peers
        cause = _PEER.sub(lambda match: f"{match[0]} [rank {roster.processes[first + int(match[1])]}]", cause)
    match outcome.kind:
        case OutcomeKind.STOPPED:
            what = "left the loop before its end"
        case OutcomeKind.FAILED:
            what = "failed"
        case OutcomeKind.MISMATCH:
            what = "is configured differently"
            cause = cause.replace("rank 0 ", f"{roster.name(0, 0)} ")  # the rank it is compared with
            if _IN_ROUND.search(outcome.cause):
                what = "resumes from another step"
                cause += ": load states that all ranks saved after the same step"
            if _HELD.match(outcome.cause) and outcome.rank is not None:
                what, first = "does not hold the samples of its peer", outcome.rank * roster.peers
                cause += _describe_aside(
                    [first + int(number) for number in _PEER.findall(outcome.cause)], roster, notes
                )
            if cause.startswith("sampler is "):
                cause += (
                    ": the ranks share one order, so a sampler must list all of it, with the same seed on every rank"
                )
        case _:
            what = "is lost"
            if has_left:
                cause += (
                    ". This process did not finish the epoch before: if it left by itself, that has ended the others"
                )
    return JobError(f"{who} {what}: {cause}", rank=outcome.rank, cause=outcome.cause)


def _describe_aside(processes: Sequence[int], roster: Roster, notes: Sequence[str]) -> str:
    """Returns which samples two peers have set aside, if these differ, as the likely reason why they hold different samples."""
    aside = {process: notes[process] for process in processes} if notes else {}
    if len(set(aside.values())) < 2:
        return ""
    told = [
        f"{roster.name_process(process)} has set aside the sample {note}" for process, note in aside.items() if note
    ]
    return f". Samples that one peer sets aside must be bad on all peers, but {', '.join(told)}"
