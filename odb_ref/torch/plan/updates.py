"""Resumes an epoch of updates (R16) with another number of ranks or other settings.

An update holds the same samples whatever the ranks are, so nothing is divided anew. The ranks begin with the update in which
the state was saved, and leave out what was trained on of it. Between two updates this is nothing, and all states are equal.
Spec: R16.5, R16.6. Preserves: UPDATE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odb_ref.core.batching.updates import compute_first_place, count_rounds
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.torch.plan.state import START, EpochProgress, EpochState, check_all_ranks, list_parts


def begin_inside(
    states: Sequence[EpochState], update_samples: int, rank: int, world_size: int, *, is_shared: bool
) -> EpochProgress:
    """Returns where ``rank`` begins, given the states of another number of ranks; between two updates any one is enough.

    Spec: R15.5, R16.6.
    Raises: UsageError when these are not the states of all ranks.
    """
    if not states[0].progress.is_between_updates:
        check_all_ranks(states)
    parts = list_parts(states)
    if len(parts) < len(states):
        return START  # nothing was trained on
    first, begun, ranks = states[0].progress, parts[0].checkpoint.start, states[0].world_size
    update = begun.round // count_rounds(update_samples, ranks, is_shared=is_shared)
    taken, bad = set[int](), set[int]()
    for saved_rank, part in enumerate(parts):
        begin = 0
        if not is_shared:
            begin = compute_first_place(update, update_samples=update_samples, rank=saved_rank, world_size=ranks)
        own = set(part.list_drawn()[1]) if is_shared else part.list_taken(begin)
        taken |= _to_common(own.union(part.gone), saved_rank, ranks, is_shared=is_shared)
        bad |= _to_common(part.bad, saved_rank, ranks, is_shared=is_shared)
    if not is_shared:
        taken, bad = (
            {place // world_size for place in places if place % world_size == rank} for places in (taken, bad)
        )
    start = RoundStart(
        round=update * count_rounds(update_samples, world_size, is_shared=is_shared),
        planned_steps=first.steps,
        global_samples=begun.global_samples + first.update_counts.samples - first.gone_counts.samples,
        agreed_tokens=begun.agreed_tokens,
        # A new rank accepts the lowest budget that any earlier rank accepted.
        accepted_tokens=min(part.checkpoint.start.accepted_tokens for part in parts),
    )
    return EpochProgress(
        checkpoint=Checkpoint(start=start),
        update_counts=first.update_counts,
        bad=tuple(sorted(bad)),
        gone=tuple(sorted(taken)),
        gone_counts=first.update_counts,
    )


def _to_common(places: Iterable[int], rank: int, world_size: int, *, is_shared: bool) -> set[int]:
    """Converts places of a rank to places in the common order. Spec: R16.2."""
    return set(places) if is_shared else {rank + place * world_size for place in places}
