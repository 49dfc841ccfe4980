"""The invariants of a rank, checked after every transition. Each names the property it keeps.

Spec: I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import ge, le, lt
from typing import Final

from odb_ref.core.batching.cost import TOKENS
from odb_ref.core.batching.order import StepOrder, permute
from odb_ref.core.config import Config
from odb_ref.core.errors import InvariantError
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Group, Mode, Step

# Looked up once: the lookup takes as long as all checks of a transition in which the consumer takes a step.
_OFFER, _COUNT = Phase.OFFER, Phase.COUNT
_ENDING: Final = (Phase.DRAIN, Phase.DONE)
Moved = tuple[tuple[Step, ...], tuple[Step, ...], tuple[int, ...]]
"""The steps that left, the steps that came, and the tokens of each newly aligned group."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A predicate over a transition. ``judge`` gets both states, and what has moved between them."""

    id: str
    property: str
    statement: str
    judge: Callable[[Config, State, State, Moved], bool]

    def holds(self, config: Config, before: State, after: State) -> bool:
        """Returns True when the transition keeps the invariant."""
        return self.judge(config, before, after, _compute_moved(config, before, after))


def _compute_moved(config: Config, before: State, after: State) -> Moved:
    """Returns the steps that are no longer queued, released or planned, and the new ones. Steps that stay were checked when
    they came. Newly aligned groups come with their tokens, which several invariants use.

    Steps leave at the front when they are taken, and come at the back when they are planned. If anything else has happened,
    all old steps count as gone and all present ones as new.
    """
    is_aligned = after.aligned is not before.aligned
    tokens = tuple(map(config.layout.compute_tokens, after.aligned)) if is_aligned else ()
    taken = after.taken_steps - before.taken_steps
    delivered = len(before.released) - len(after.released)
    # Most transitions plan and release nothing. Queue and released steps are compared separately, because joining them would
    # copy hundreds of steps when steps hold few samples.
    if (
        after.plan is before.plan
        and 0 <= taken <= len(before.queue)
        and (after.released is before.released or after.released == before.released[delivered:])
        and after.queue == before.queue[taken:] + before.released[:delivered]
    ):
        return before.queue[:taken], (), tokens
    old = before.queue + before.released + before.plan
    new = after.queue + after.released + after.plan
    kept = len(old) - taken
    if 0 <= taken <= len(old) and new[:kept] == old[taken:]:
        return old[:taken], new[kept:], tokens
    return old, new, tokens


def _is_conserved(_config: Config, before: State, after: State, moved: Moved) -> bool:
    gone, come, _ = moved
    # The samples of an unchanged tuple need no counting: they are on both sides of the sum.
    held = len(after.window) - len(before.window)
    for step in come:
        held += len(step.group)
    for step in gone:
        held -= len(step.group)
    if after.aligned is not before.aligned:
        held += sum(map(len, after.aligned)) - sum(map(len, before.aligned))
    return after.read_samples - before.read_samples == held + after.taken_samples - before.taken_samples


def _is_same_samples(_config: Config, before: State, after: State, _moved: Moved) -> bool:
    if before.phase is not _OFFER or after.phase is not _COUNT:
        return True
    positions = [sample.position for group in (*after.aligned, after.window) for sample in group]
    # The same positions, each once: the window holds none twice (I3).
    return len(positions) == len(before.window) and set(positions) == {sample.position for sample in before.window}


def _is_window_in_order(_config: Config, before: State, after: State, _moved: Moved) -> bool:
    if after.window is before.window:
        return True
    positions = [sample.position for sample in after.window]
    return all(map(lt, positions, positions[1:]))


def _is_numbered(_config: Config, before: State, after: State, moved: Moved) -> bool:
    _, come, _ = moved
    first = after.planned_steps - len(come)
    for number, step in enumerate(come, first):
        if step.number != number:
            return False
    is_all = len(come) == len(after.queue) + len(after.released) + len(after.plan)
    return first == (after.taken_steps if is_all else before.planned_steps)


def _is_released_after_commit(_config: Config, before: State, after: State, _moved: Moved) -> bool:
    if before.plan is after.plan or not before.plan:
        return True
    return before.is_collated and before.phase is _OFFER and after.plan == ()


def _is_within_budget(config: Config, before: State, after: State, moved: Moved) -> bool:
    if after.aligned is before.aligned:
        return True
    budget_tokens, limits = config.compute_round_bounds(before.agreed_tokens)
    _, _, tokens = moved

    def is_within_limits(group: Group) -> bool:
        used = [sum(costs) for costs in zip(*(sample.costs for sample in group), strict=True)]
        return all(map(le, used, limits))

    over = [group for group, count in zip(after.aligned, tokens, strict=True) if count > budget_tokens]
    return max(map(len, over), default=0) <= 1 and (
        not limits or all(len(group) <= 1 or is_within_limits(group) for group in after.aligned)
    )


def _is_friendly(config: Config, before: State, after: State, _moved: Moved) -> bool:
    return after.aligned is before.aligned or all(map(config.sizes.is_friendly, set(map(len, after.aligned))))


def _is_young(config: Config, before: State, after: State, _moved: Moved) -> bool:
    if before.phase is not _OFFER or after.phase is not _COUNT or not after.window:
        return True
    # A quota round cut short by a rank with few samples is the last: what it carries is never emitted, so it cannot be late.
    is_ageless = (
        config.mode is Mode.QUOTA or config.update_samples is not None
    )  # an update's samples wait for its last round
    if is_ageless or len(before.marks) < config.max_age_rounds:
        return True
    return after.window[0].position >= before.marks[0]


def _is_in_order(config: Config, before: State, after: State, moved: Moved) -> bool:
    if before.phase is not _OFFER or after.phase is not _COUNT:
        return True
    filled = [group for group in after.aligned if group]
    if config.order == StepOrder.SAMPLER:
        positions = [sample.position for group in (*filled, after.window) for sample in group]
        return all(map(lt, positions, positions[1:]))
    _, _, tokens = moved
    if config.cost == TOKENS:
        costs = [count for group, count in zip(after.aligned, tokens, strict=True) if group]
    else:
        costs = [config.layout.compute_cost(group, config.cost) for group in filled]
    if config.order == StepOrder.SHUFFLED:
        places = permute(len(after.aligned), config.order_seed, before.round)
        lined = dict(zip([place for place in places if place < len(filled)], costs, strict=True))
        costs = [lined[place] for place in range(len(filled))]
    return all(map(ge, costs, costs[1:])) and not any(after.aligned[len(filled) :])


def _is_queue_bounded(config: Config, _before: State, after: State, _moved: Moved) -> bool:
    return len(after.queue) <= config.depth_steps


def _is_drawn_in_order(config: Config, before: State, after: State, _moved: Moved) -> bool:
    draw = after.draw
    if draw is before.draw or config.shared_samples is None:
        return draw is before.draw
    first, end = draw.first, draw.first + draw.count
    return before.draw.end <= first <= end <= draw.end <= config.shared_samples


def _is_phase_consistent(config: Config, _before: State, after: State, _moved: Moved) -> bool:
    is_counting = after.phase is _COUNT
    return (
        (after.phase in _ENDING) == (after.outcome is not None)
        and (not after.groups or after.phase is _OFFER)
        and (bool(after.aligned) == is_counting or (is_counting and config.update_samples is not None))
    )


def _is_update_whole(config: Config, before: State, after: State, _moved: Moved) -> bool:
    if config.update_samples is None or after.phase in _ENDING:
        return True
    if before.phase is _OFFER and after.phase is _COUNT:
        return not (after.window if config.has_steps(before.round) else after.aligned)
    # In COUNT ``round`` is still the round being counted, but the window is already that of the next.
    size = config.compute_window_samples(after.round + (after.phase is _COUNT))
    return config.shared_samples is not None or len(after.window) + after.wanted_samples <= size


INVARIANTS: Final = (
    Invariant("I1", "CONSERVE", "read = window + aligned + plan + released + queue + taken", _is_conserved),
    Invariant("I2", "ONCE", "an alignment emits and carries exactly the window", _is_same_samples),
    Invariant("I3", "REPLAY", "the window is in sampler order, each position once", _is_window_in_order),
    Invariant(
        "I4",
        "ALIGN",
        "queued, released and planned steps are numbered from taken to planned, without a gap",
        _is_numbered,
    ),
    Invariant("I5", "RELEASE", "a plan leaves only whole, collated, and on an agreement", _is_released_after_commit),
    Invariant("I6", "BUDGET", "a group of two or more fits the budget in force and every limit", _is_within_budget),
    Invariant("I7", "AGE", "nothing due is carried", _is_young),
    Invariant("I8", "FREE", "the queue holds at most depth_steps", _is_queue_bounded),
    Invariant("I9", "TERM", "the phase says which fields are in use", _is_phase_consistent),
    Invariant("I10", "ORDER", "the steps of a round follow each other as the order says", _is_in_order),
    Invariant("I11", "DEAL", "a draw lies behind all draws before it, and in the common order", _is_drawn_in_order),
    Invariant("I12", "SIZES", "a group has a friendly number of samples", _is_friendly),
    Invariant("I13", "UPDATE", "an update is emitted whole, and holds no more than its places", _is_update_whole),
)

_LASTING: Final = tuple(invariant for invariant in INVARIANTS if invariant.id in ("I1", "I4", "I8", "I9"))
"""The invariants to check when phase, window, aligned steps and plan are all unchanged, as in most of the consumer's takes. The
others hold trivially then.
"""


def check_transition(config: Config, before: State, after: State) -> None:
    """Checks every invariant. Raises: InvariantError naming the first one that does not hold."""
    moved = _compute_moved(config, before, after)
    is_same = (
        after.phase is before.phase
        and after.window is before.window
        and after.aligned is before.aligned
        and after.plan is before.plan
    )
    for invariant in _LASTING if is_same else INVARIANTS:
        if not invariant.judge(config, before, after, moved):
            raise InvariantError(
                invariant.id,
                f"{invariant.property}: not true that {invariant.statement}, rank {config.rank} "
                f"round {after.round} phase {after.phase}",
            )
