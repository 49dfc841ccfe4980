"""What is true of a rank after every transition. Each predicate carries the id of the property it keeps. Spec: I1 to I9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import le
from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.errors import InvariantError
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Mode, Step, compute_padded_tokens


@dataclass(frozen=True, slots=True)
class Invariant:
    """A predicate over a transition: ``holds(config, before, after)``."""

    id: str
    property: str
    statement: str
    holds: Callable[[Config, State, State], bool]


def _held(steps: tuple[Step, ...]) -> int:
    return sum(len(step.group) for step in steps)


def _is_conserved(_config: Config, _before: State, after: State) -> bool:
    held = (
        len(after.window) + sum(map(len, after.aligned)) + _held(after.plan) + _held(after.outbox) + _held(after.queue)
    )
    return after.read_samples == held + after.taken_samples


def _is_same_samples(_config: Config, before: State, after: State) -> bool:
    if before.phase is not Phase.OFFER or after.phase is not Phase.COUNT:
        return True
    emitted = [sample for group in after.aligned for sample in group]
    return sorted(sample.position for sample in (*emitted, *after.window)) == [
        sample.position for sample in before.window
    ]


def _is_window_in_order(_config: Config, before: State, after: State) -> bool:
    if after.window is before.window:
        return True
    positions = [sample.position for sample in after.window]
    return all(left < right for left, right in pairwise(positions))


def _is_numbered(_config: Config, _before: State, after: State) -> bool:
    numbers = [step.number for steps in (after.queue, after.outbox, after.plan) for step in steps]
    return numbers == list(range(after.taken_steps, after.planned_steps))


def _is_released_after_commit(_config: Config, before: State, after: State) -> bool:
    if before.plan is after.plan or not before.plan:
        return True
    return before.is_collated and before.phase is Phase.OFFER and after.plan == ()


def _is_within_budget(config: Config, before: State, after: State) -> bool:
    def fits(group: Group) -> bool:
        return len(group) <= 1 or compute_padded_tokens(group) <= config.budget_tokens

    def is_within_limits(group: Group) -> bool:
        used = [sum(costs) for costs in zip(*(sample.costs for sample in group), strict=True)]
        return len(group) <= 1 or all(map(le, used, config.limits))

    if after.aligned is before.aligned:
        return True
    return all(map(fits, after.aligned)) and (not config.limits or all(map(is_within_limits, after.aligned)))


def _is_young(config: Config, before: State, after: State) -> bool:
    if before.phase is not Phase.OFFER or after.phase is not Phase.COUNT or not after.window:
        return True
    # A quota round that a short rank cuts is the last: what it leaves is never emitted, so it cannot be late.
    if config.mode is Mode.QUOTA or len(before.marks) < config.max_age_rounds:
        return True
    return after.window[0].position >= before.marks[0]


def _is_queue_bounded(config: Config, _before: State, after: State) -> bool:
    return len(after.queue) <= config.depth_steps


def _is_phase_consistent(_config: Config, _before: State, after: State) -> bool:
    return (
        (after.phase in (Phase.DRAIN, Phase.DONE)) == (after.outcome is not None)
        and (not after.groups or after.phase is Phase.OFFER)
        and bool(after.aligned) == (after.phase is Phase.COUNT)
    )


INVARIANTS: Final = (
    Invariant("I1", "CONSERVE", "read = window + aligned + plan + outbox + queue + taken", _is_conserved),
    Invariant("I2", "ONCE", "an alignment emits and carries exactly the window", _is_same_samples),
    Invariant("I3", "REPLAY", "the window is in sampler order, each position once", _is_window_in_order),
    Invariant("I4", "ALIGN", "queue, outbox and plan are numbered from taken to planned, without a gap", _is_numbered),
    Invariant("I5", "RELEASE", "a plan leaves only whole, collated, and on an agreement", _is_released_after_commit),
    Invariant("I6", "BUDGET", "a group of two or more fits the budget and every limit", _is_within_budget),
    Invariant("I7", "AGE", "nothing due is carried", _is_young),
    Invariant("I8", "FREE", "the queue holds at most depth_steps", _is_queue_bounded),
    Invariant("I9", "TERM", "the phase says which fields are in use", _is_phase_consistent),
)


def check_transition(config: Config, before: State, after: State) -> None:
    """Nothing when every invariant holds.

    Raises: InvariantError naming the first that does not.
    """
    for invariant in INVARIANTS:
        if not invariant.holds(config, before, after):
            raise InvariantError(
                invariant.id,
                f"{invariant.property}: not true that {invariant.statement}, rank {config.rank} "
                f"round {after.round} phase {after.phase}",
            )
