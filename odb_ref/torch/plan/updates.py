"""Going on with an epoch of updates (R16) on another number of ranks, or with other settings.

An update holds the same samples whoever reads them, so nothing is shared out anew: the ranks begin with the update in which the
state was saved, and leave out what was trained on of it. Spec: R16.5, R16.6. Preserves: UPDATE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odb_ref.core.batching.updates import compute_first_place, count_portions
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.torch.plan.state import START, EpochProgress, EpochState, Part, check_moment


def begin_inside(
    states: Sequence[EpochState], update_samples: int, rank: int, world_size: int, *, is_shared: bool
) -> EpochProgress:
    """Returns where ``rank`` begins, of so many, after all ranks of another number have saved these states.

    Raises: UsageError when they are not the states of one moment.
    """
    check_moment(states)
    parts = [Part.of(state.progress) for state in states if state.progress.checkpoint is not None]
    if len(parts) < len(states):
        return START  # nothing was trained on
    first, begun = states[0].progress, parts[0].checkpoint.start
    update = begun.round // (count_portions(update_samples, len(states)) if is_shared else 1)
    taken, bad = set[int](), set[int]()
    for saved_rank, part in enumerate(parts):
        own = set(part.list_drawn()[1]) if is_shared else part.list_taken()
        taken |= _to_common(own.union(part.gone), saved_rank, len(states), is_shared=is_shared)
        bad |= _to_common(part.bad, saved_rank, len(states), is_shared=is_shared)
    left_out = {place for place in taken if place >= update * update_samples}
    begin = 0
    if not is_shared:
        begin = compute_first_place(update, update_samples=update_samples, rank=rank, world_size=world_size)
        left_out, bad = (
            {place // world_size for place in places if place % world_size == rank} for places in (left_out, bad)
        )
    start = RoundStart(
        round=update * (count_portions(update_samples, world_size) if is_shared else 1),
        read_samples=begin - sum(place < begin for place in bad),
        planned_steps=first.steps,
        global_samples=begun.global_samples + first.window.samples - first.gone_counts.samples,
    )
    return EpochProgress(
        checkpoint=Checkpoint(start=start),
        window=first.window,
        bad=tuple(sorted(bad)),
        gone=tuple(sorted(left_out)),
        gone_counts=first.window,
    )


def _to_common(places: Iterable[int], rank: int, world_size: int, *, is_shared: bool) -> set[int]:
    """Returns places of a rank as places of the common order. Spec: R16.2."""
    return set(places) if is_shared else {rank + place * world_size for place in places}
