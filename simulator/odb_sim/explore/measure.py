"""The termination measure: a number that falls on every transition, so that every schedule ends. Spec: TERM."""

from __future__ import annotations

from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.state import Phase
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import ExploredRank

_PHASE_WEIGHT: Final = {
    Phase.FILL: 4,
    Phase.OFFER: 3,
    Phase.COUNT: 1,
    Phase.REPORT: 1,
    Phase.DRAIN: 0,
    Phase.DONE: 0,
}


def compute_measure(bounds: Bounds, config: Config, rank: ExploredRank) -> int:
    """Returns the rank's share of the termination measure: a natural number that falls whenever something happens to it.

    A world's measure is the sum over its ranks, and every transition of the world happens to one rank, so it falls on
    every transition. With n the samples of the longest shard and S those of all ranks together it is the sum of

    - 5 (n + 1 - round) + 4 in FILL, 3 in OFFER, 1 in COUNT or REPORT; 0 when ending. In each round every rank that holds
      samples emits one, so no rank passes round n + 1. With shared shards n is S, and a round counts 6, because a read begins
      with it. With updates (R16) n is the number of their rounds, over an order of S samples, or of n for each rank;
    - S - taken steps, because each step holds at least one sample on some rank;
    - the samples not read (of all ranks, with shared shards), and 1 until the source has reported its end;
    - 1 while a read, and 1 while a collation is under way;
    - 1 each until the consumer has left, the rank has been urged, has lost a peer, and is gone;
    - 1 for each budget that the rank will still accept;
    - 1 until its loader process is lost, if the bounds allow that.

    `compute_bound` is the world's measure at the start. Spec: TERM.
    """
    state = rank.state
    total = bounds.total_samples
    weight = _PHASE_WEIGHT[state.phase]
    return (
        (_count_a_round(bounds) * (_count_rounds(bounds, config) - state.round) + weight if weight else 0)
        + (total - len(rank.taken))
        + (_count_readable(bounds, config.rank) - state.read_samples)
        + (not state.is_ended)
        + (rank.reading > 0)
        + (rank.collating is not None)
        + (not rank.is_left)
        + (not rank.is_urged)
        + (not rank.is_lost)
        + (not rank.is_gone)
        + len(rank.coming)
        + (bounds.lost_loaders > 0 and not rank.is_loader_lost)
    )


def _count_rounds(bounds: Bounds, config: Config) -> int:
    if bounds.update_samples is None:
        return bounds.longest_shard + 1
    samples = bounds.total_samples if bounds.is_shared else bounds.longest_shard * bounds.ranks
    return (samples // bounds.update_samples + 1) * config.update_rounds + 1


def _count_a_round(bounds: Bounds) -> int:
    return 6 if bounds.is_shared else 5


def _count_readable(bounds: Bounds, rank: int) -> int:
    return bounds.total_samples if bounds.is_shared else len(bounds.lengths[rank])


def compute_bound(bounds: Bounds) -> int:
    """Returns a bound on the transitions of any schedule: W (5 n + S + 15) + S for W ranks with up to n samples, S in all.

    It is W more if loader processes may be lost, W (8 S + 16) with shared shards, and 1 more for each budget that a rank will
    accept.

    Spec: TERM.
    """
    a_round = _count_a_round(bounds)
    each = (
        a_round * _count_rounds(bounds, bounds.compute_config(0))
        + bounds.total_samples
        + 10
        + (bounds.lost_loaders > 0)
    )
    own = (_count_readable(bounds, rank) + len(bounds.get_accepted(rank)) for rank in range(bounds.ranks))
    return bounds.ranks * each + sum(own)
