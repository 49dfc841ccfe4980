"""A rank's place in the protocol without its samples, and a machine that ends the epoch in its place. Spec: R7.6.

A driver may keep the machine where the samples are read and the exchange where the model is trained: in two processes. The
summary is what the second one knows of the machine's state: enough to hand out steps, and enough to go on when the first is
lost. Steps are numbered without a gap (I4), so a few counters say where each of them is.
"""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.core.effects import Outcome
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase, State
from odb_ref.core.types import ZERO_COUNTS, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """A `State` as counters: of the steps below ``planned_steps``, how many are released, delivered, taken."""

    phase: Phase = Phase.FILL
    round: int = 0
    aligned_steps: int = 0
    """Steps of ``round`` whose counts are not known yet."""
    planned_steps: int = 0
    released_steps: int = 0
    delivered_steps: int = 0
    taken_steps: int = 0
    is_collated: bool = True
    global_samples: int = 0
    failure: str = ""
    is_stopped: bool = False
    is_urged: bool = False
    step_limit: int = NONE
    outcome: Outcome | None = None

    @property
    def is_ending(self) -> bool:
        """True when no further step will be planned."""
        return self.outcome is not None


def compute_summary(state: State) -> StateSummary:
    """Returns the state without its samples."""
    released_steps = state.planned_steps - len(state.plan)
    return StateSummary(
        phase=state.phase,
        round=state.round,
        aligned_steps=len(state.aligned),
        planned_steps=state.planned_steps,
        released_steps=released_steps,
        delivered_steps=released_steps - len(state.outbox),
        taken_steps=state.taken_steps,
        is_collated=state.is_collated,
        global_samples=state.global_samples,
        failure=state.failure,
        is_stopped=state.is_stopped,
        is_urged=state.is_urged,
        step_limit=state.step_limit,
        outcome=state.outcome,
    )


def make_stand_in(summary: StateSummary) -> State:
    """Returns the state of a machine that goes on from ``summary``: at the same place, with idle steps and nothing left to
    read.

    It must be told `LocalFailed` before anything else. Spec: R7.6. Preserves: ABORT, RELEASE, ALIGN.
    """

    def make_steps(first: int, end: int) -> tuple[Step, ...]:
        return tuple(Step(number, summary.round - 1, (), ZERO_COUNTS) for number in range(first, end))

    return State(
        phase=summary.phase,
        round=summary.round,
        is_ended=True,
        aligned=((),) * summary.aligned_steps,
        plan=make_steps(summary.released_steps, summary.planned_steps),
        is_collated=summary.is_collated,
        planned_steps=summary.planned_steps,
        global_samples=summary.global_samples,
        outbox=make_steps(summary.delivered_steps, summary.released_steps),
        queue=make_steps(summary.taken_steps, summary.delivered_steps),
        taken_steps=summary.taken_steps,
        failure=summary.failure,
        is_stopped=summary.is_stopped,
        is_urged=summary.is_urged,
        step_limit=summary.step_limit,
        outcome=summary.outcome,
    )
