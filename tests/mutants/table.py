"""The mutants: defects that an implementation of this protocol could have, each with the property it breaks."""

from __future__ import annotations

from dataclasses import asdict, replace

from odb_sim.explore.bounds import Bounds, compute_lengths

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Mode
from tests.mutants.defects import read_defects
from tests.mutants.loader import Mutant


def _mixed(*shards: int, failures: int = 0, losses: int = 0) -> Bounds:
    return Bounds(lengths=compute_lengths(shards, (3, 1, 2)), window_samples=2, failures=failures, losses=losses)


def _singles(*shards: int, stops: int = 0, window: int = 3) -> Bounds:
    """Returns bounds in which every sample fills a step, so that steps wait for room in the queue."""
    lengths = compute_lengths(shards, (1,))
    return Bounds(lengths=lengths, budget_tokens=1, window_samples=window, stops=stops)


PLAIN = _mixed(5, 2)
FULL = Bounds(lengths=compute_lengths((4, 3), (3, 1, 2)), window_samples=3, window_bytes=4)
FAILURE = _mixed(3, 2, failures=1)
STOP = _singles(4, 3, stops=1)
STOP_AND_FAILURE = replace(_mixed(2, 2, failures=1), stops=1)
ODD = Bounds(lengths=((1,), (1,)), odd_rank=1)
LOSS = _mixed(3, 1, losses=1)
SPLIT = Bounds(lengths=((1, 1, 1, 1), (4, 4, 4, 4)), budget_tokens=4, window_samples=4, rule=PaperRule())
QUOTA = Bounds(
    lengths=compute_lengths((6, 6), (1,)), budget_tokens=1, window_samples=3, mode=Mode.QUOTA, quota_samples=3
)
DRY = Bounds(lengths=((4, 4, 4), (4,)), window_samples=3, mode=Mode.QUOTA)
# Rank 1 makes one group of a window, so one step each round. Rank 0 carries most of what it reads, until it is due.
CARRY = Bounds(lengths=((4,) * 5, (1,) * 8), budget_tokens=4, window_samples=3, max_age_rounds=1)
# Rank 0's short sample never makes the fullest group. Only its age gets it out.
AGED = Bounds(lengths=((1, 9, 9, 9), (1,) * 8), budget_tokens=9, window_samples=2, max_age_rounds=1)
# Samples use 0, 1, 2, 0 ... of the further resource.
LIMITS = Bounds(lengths=((1, 1, 1), (1,)), limits=(2,), window_samples=3)
# The oldest sample, longer than the budget, is alone. The others are packed by their length.
ROWS = Bounds(lengths=((5, 3, 1, 2, 2, 1, 3), (2, 3)), layout=Layout.PACKED, window_samples=5)
# The longest sample leaves the least room and uses up the resource. The shortest fits only into the second row.
ROW_LIMITS = Bounds(
    lengths=((9, 9, 9, 5, 1, 6), (1, 2)), budget_tokens=8, layout=Layout.PACKED, limits=(2,), window_samples=6
)
LOADER = replace(PLAIN, lengths=compute_lengths((4, 2), (3, 1, 2)), lost_loaders=1)
LOADER_WAITS = replace(STOP, stops=0, lost_loaders=1)
SHARED = Bounds(lengths=compute_lengths((5, 2), (3, 1, 2)), is_shared=True)
# Rank 0 makes three groups from its part of an update, rank 1 one.
UPDATES = Bounds(lengths=((4,) * 5, (1,) * 4), update_samples=6)
DEALT = Bounds(lengths=((4,) * 5, (1,) * 4), update_samples=6, is_shared=True)
# The second update has no good sample, and the first none on rank 1.
BAD_UPDATES = Bounds(lengths=compute_lengths((6, 6), (3, 1, 2)), update_samples=4, bad=(2, 3, 6, 7, 8, 9))
SHARED_PARTS = replace(SHARED, is_single_reads=True, is_eager_end=True)
# Neighbours of different lengths, including a short one that would fill a later group.
NEIGHBOURS = Bounds(lengths=((1, 3, 1, 2, 2, 1), (2, 1, 1)), order=StepOrder.SAMPLER, window_samples=4)
# Four steps in a window, each filled to a different level.
DEARER = Bounds(
    lengths=((3, 3, 5), (5, 3, 3)),
    budget_tokens=6,
    layout=Layout.PACKED,
    cost=get_cost("attention/1"),
    window_samples=3,
)
"""The row of one long sample has fewer tokens than the row of two, and costs more."""
DEAREST = replace(DEARER, lengths=((4, 4, 5), (5, 4, 4)), budget_tokens=8)
"""The row of two samples costs more than the row of one that is longer than either."""
UNLIKE = Bounds(lengths=((6, 5, 4, 3), (3, 6, 4, 5)), budget_tokens=6, window_samples=4)
# Windows of 1, 2 and 4. With a budget of 12 rank 0 makes one group, less than half full, then two, one of them half full.
KEPT_BACK = Bounds(lengths=((3, 6, 12, 2, 2, 5, 7, 9), (12, 12)), budget_tokens=12, window_samples=4, ramp_rounds=2)
KEPT_ONE = replace(KEPT_BACK, lengths=((2, 2, 5, 7, 9), (12, 12)), ramp_rounds=0)
"""Three groups of 4, 5 and 7 tokens. Two are less than half full."""
RAMPED = Bounds(lengths=((4,) * 9, (4,) * 9), budget_tokens=4, window_samples=24, ramp_rounds=3, max_age_rounds=1)
"""Several groups in each of the first windows. Groups left once are due in the next round."""
# A row of 3 tokens, which would take 4 with padding, half of the budget.
KEPT_ROW = Bounds(lengths=((8, 2, 1, 8), (8,)), budget_tokens=8, layout=Layout.PACKED, window_samples=3, ramp_rounds=0)
HALVED = Bounds(
    lengths=((1,) * 7, (4,) * 3), sizes=Sizes.EVEN, budget_tokens=7, window_samples=7, ramp_rounds=0, rule=PaperRule()
)
IDLE = Bounds(lengths=((4,) * 4, (4,)), budget_tokens=4, window_samples=2)
TOLD = Bounds(lengths=((1,) * 9, (1,) * 6), window_samples=3, accepted=((2, 4), (3,)))
"""Rank 0 lowers its budget and raises it again, rank 1 lowers its own by less. Groups are as large as the budget in force."""
TIMED = replace(TOLD, accepted=((3,),), budget_schedule=((0, 2), (1, 3), (2, 4), (3, 1), (4, 3), (5, 2)))
PAIRS = Bounds(lengths=((3, 1), (3, 1)), budget_tokens=4)
FEW = Bounds(lengths=((1, 1), (1,)))
CARRY_LONG = replace(CARRY, lengths=((4,) * 8, (1,) * 16), max_age_rounds=4)
UNLIKE_TWICE = replace(UNLIKE, lengths=((6, 5, 4, 3) * 2,))
UNLIKE_IDLE = replace(UNLIKE, lengths=((6, 5, 4, 3), (6, 5, 4)))
QUOTA_CUT = replace(QUOTA, quota_samples=4)
QUOTA_AGED = replace(QUOTA, max_age_rounds=9)
PARTS = Bounds(lengths=((3, 1, 2), (3,)), is_single_reads=True)
HALVED_ODD = replace(HALVED, lengths=((1,) * 7, (4,)))
POWERS = replace(HALVED, sizes=Sizes.POWERS)
URGED = replace(_singles(4, 4, window=2), is_urged_freely=True)
SHARED_SINGLES = replace(SHARED, lengths=((1, 1, 1), (1, 1)), budget_tokens=1)
UPDATES_PADDED = replace(UPDATES, lengths=((1, 2), (2, 1)))

NEEDS_INVARIANTS = {
    "the carried samples lose their order",
    "in the ramp a round may form no step",
    "a taken step's samples are not booked",
}
"""Defects that only the core's own invariants can see: wrong bookkeeping without effect on a driver."""

PRELUDES = {
    "ties are broken by how often the rank has been asked": """
_original, _calls = align, 0


def align(
    groups: tuple[Group, ...], target: int, due_before: int, layout: Layout, step_order: StepOrder, **terms: object
) -> tuple[tuple[Group, ...], Group]:
    global _calls
    _calls += 1
    return _original(groups, target, due_before, layout, step_order, **terms)
"""
}
"""Text to append to the module, for a defect with a memory."""

MUTANTS = tuple(
    Mutant(
        **asdict(defect),
        property=broken,
        bounds=globals()[bounds],
        needs_invariants=defect.name in NEEDS_INVARIANTS,
        prelude=PRELUDES.get(defect.name, ""),
    )
    for defect, (broken, bounds) in read_defects("protocol.txt")
)
"""Each with the property that it breaks, and the bounds above that show it."""

PLANTED = (
    "what is carried is dropped",
    "an idle step uses up the slot of a group",
    "the epoch closes when the first rank runs dry",
    "a rank says that it is ready before it has collated",
    "a failure is not agreed on: the rank ends alone",
)
"""The defects that random schedules must also find, within seconds."""
