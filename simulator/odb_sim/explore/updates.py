"""What must hold of updates of a fixed number of samples, in one rank and in a complete job. Spec: R16."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from odb_ref.core.config import Config
from odb_ref.core.types import Step
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import ExploredRank
from odb_sim.explore.violation import Breach


def check_steps_of_updates(config: Config, rank: ExploredRank, steps: Sequence[Step]) -> None:
    """Checks that each step holds only samples read for its update, and that no update is emitted in two rounds.

    Raises: Breach. Spec: R16.
    """
    rounds_each = config.update_rounds
    for step in steps:
        for sample in step.group:
            arrival = bisect_right(rank.windows, sample.position)
            if step.round // rounds_each != arrival // rounds_each:
                detail = f"position {sample.position} came in round {arrival} and is emitted in round {step.round}"
                raise Breach("UPDATE", f"rank {config.rank}: {detail}, of another update")
    rounds = sorted({step.round for step in steps})
    if len({round_ // rounds_each for round_ in rounds}) < len(rounds):
        raise Breach("UPDATE", f"rank {config.rank}: an update is emitted in several of the rounds {rounds}")


def check_whole_updates(bounds: Bounds, ranks: Sequence[ExploredRank]) -> None:
    """Checks that every update trained on holds, over all ranks, exactly the samples at its places.

    Raises: Breach. Spec: R16.1.
    """
    size = bounds.update_samples or 0
    rounds_each = bounds.compute_config(0).update_rounds
    updates: dict[int, list[int]] = {}
    for rank in ranks:
        for step in rank.taken:
            updates.setdefault(step.round // rounds_each, []).extend(sample.id for sample in step.group)
    shards = [[sample.id for sample in bounds.compute_shard(i)] for i in range(bounds.ranks)]
    for update, ids in updates.items():
        places = range(update * size, (update + 1) * size)
        if bounds.is_shared:
            expected = {place for place in places if place < bounds.total_samples}
        else:  # place p is sample p // W of rank p % W, if it has one
            of_ranks = ((shards[place % bounds.ranks], place // bounds.ranks) for place in places)
            expected = {shard[i] for shard, i in of_ranks if i < len(shard)}
        if sorted(ids) != sorted(expected - set(bounds.bad)):
            raise Breach("UPDATE", f"update {update} holds samples {sorted(ids)}, of {sorted(expected)}")
