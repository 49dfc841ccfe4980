"""Simulates a whole epoch one round at a time. Without faults and jitter it gives the figures of `world`, which goes by events.

How a run goes
--------------
Without faults and jitter the ranks are in step: an agreement, and the steps it releases, reach all of them at once, and a step
begins when all have ended the previous one. So a round is one pass over all ranks (`blocks`), and its times are a handful of
numbers. The ranks post their offers once the slowest has read and collated, and the queues have room, which depends on the
steps taken.

This module decides nothing about the protocol. The agreement, the target, the window sizes and the cut of a quota come from
the core's own functions, and the rest from their twins (`odb_ref.arrays`). The world with the real machine stays the authority:
for any settings both must give the same steps, tokens and times, which a test checks. One figure may differ, if an agreement
and the start of a step happen to coincide: whether the steps it releases are already in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import numpy as np

from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.batching.shards import compute_shares
from odb_ref.core.config import Config
from odb_ref.core.errors import InvariantError
from odb_ref.core.offer import reduce_offers
from odb_ref.core.resume import RoundStart
from odb_ref.core.rounds import compute_round_target, count_planned_steps, is_quota_met
from odb_ref.core.state import State
from odb_ref.core.types import Mode
from odb_sim.engine.blocks import Block, Figures, merge_figures
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import RunRecord, StepRow
from odb_sim.engine.stage import Epoch
from odb_sim.engine.updates import Accumulation, Booleans, compute_mean
from odb_sim.inputs.costs import CollectiveCost, Seconds
from odb_sim.inputs.workload import Workload

_BLOCK_SAMPLES: Final = 1 << 19
"""About the number of samples in the windows of a block, so that an array has a few megabytes."""
_FORGOTTEN: Final = np.zeros((0, 0))
"""Replaces the seconds that each rank computes, once the steps are over."""


class Clock:
    """When agreements and steps happen, in simulated seconds: the world's order of events as a recurrence.

    Ranks that wait for one another after every step are always at the same time, so one number stands for all of them. If
    updates hold several steps, the ranks drift apart inside one, and each has its own number (``lanes``).
    """

    def __init__(self, *, depth_steps: int, collective: CollectiveCost, ranks: int, lanes: int = 1) -> None:
        self._depth_steps = depth_steps
        self._collective = collective
        self._ranks = ranks
        self.lanes = lanes
        self._agreed_s: list[float] = []
        self._waited_for: list[int] = []
        """The step that had to be taken before the offers of each agreement could be posted."""
        self._released: list[int] = [0, 0]
        """The steps released up to each agreement; the first one releases none."""
        self._free_s: Seconds = np.zeros(lanes)
        """When each rank is done with its last step."""
        self._computes_s: Seconds = np.zeros(lanes)
        """How long each rank computes its last step."""
        self._takes_s: list[Seconds] = []
        self._is_open = False
        """True inside an update."""
        self.updates = 0
        self.starts_s: list[float] = []
        """The mean time at which the ranks begin each step."""
        self.ends_s: list[float] = []
        """The mean time at which the ranks end each step."""
        self.waits_s: list[float] = []
        """The mean wait of the ranks for the batches of each step."""
        self.slowest_s: list[float] = []
        """When the slowest rank has computed each step, or inside an update the mean time over ranks."""

    def agree(self, ready_s: float, exchange_s: float) -> float:
        """Returns when the ranks agree. All have read and collated at ``ready_s``; all released steps must have room too."""
        last = self._released[-1] - self._depth_steps - 1
        posted_s = max(ready_s, float(self._takes_s[last].max())) if last >= 0 else ready_s
        self._waited_for.append(last)
        self._agreed_s.append(posted_s + exchange_s)
        return self._agreed_s[-1]

    def release(self, seconds: Seconds, ends_update: Booleans) -> Seconds:
        """Returns when each of the steps that the last agreement releases is computed. A rank takes a step once it is released
        and the rank has ended the previous one.

        ``seconds`` and the result have shape (lanes, steps).
        """
        ready_s = np.empty_like(seconds)
        for step, (lanes_s, is_end) in enumerate(zip(seconds.T, ends_update.tolist(), strict=True)):
            take_s = np.maximum(self._free_s, self._agreed_s[-1])
            ready_s[:, step] = computed_s = take_s + lanes_s
            self.starts_s.append(compute_mean(self._free_s))
            self.waits_s.append(compute_mean(take_s - self._free_s))
            self._takes_s.append(take_s)
            self._free_s, self._computes_s = computed_s, lanes_s
            self.slowest_s.append(compute_mean(computed_s))
            self.ends_s.append(self.slowest_s[-1])
            self._is_open = True
            if is_end:
                self.end_update()
        self._released.append(len(self._takes_s))
        return ready_s

    def end_update(self) -> None:
        """Lets the ranks meet in the collective that ends the update, if they are inside one."""
        if not self._is_open:
            return
        take_s, slowest_s = float(self._takes_s[-1].max()), float(self._free_s.max())
        # In the order in which the world computes its sleep, so that rounding is the same.
        end_s = take_s + (self._collective.compute_end_s(self._free_s, self._computes_s, self._ranks) - take_s)
        self.slowest_s[-1], self.ends_s[-1] = slowest_s, end_s
        self._free_s = np.full(self.lanes, end_s)
        self.updates += 1
        self._is_open = False

    def count_queued(self, ranks: int) -> list[int]:
        """Returns, for each step, how many steps are in the ranks' queues when it is taken, itself included."""
        if not self._takes_s:
            return []
        takes_s = np.stack(self._takes_s, axis=1)
        steps = np.arange(takes_s.shape[1])
        # An agreement whose offers waited for a step to be taken comes after it, even if at the same time.
        seen = np.minimum(
            np.searchsorted(self._agreed_s, takes_s, side="right"),
            np.searchsorted(self._waited_for, steps, side="left"),
        )
        ahead = np.minimum(min(self._depth_steps, len(steps)), np.array(self._released)[seen] - steps)
        queued: list[int] = (ahead.sum(axis=0) * ranks // self.lanes).tolist()
        return queued


class _Budgets:
    """The budget in force if all ranks follow one schedule. Spec: R15."""

    __slots__ = ("_acceptance", "_accepted_tokens", "_planned_steps", "agreed_tokens")

    def __init__(self, config: Config, schedule: BudgetSchedule | None, starts: Sequence[RoundStart]) -> None:
        self._acceptance = Acceptance(budget_tokens=config.budget_tokens, schedule=schedule)
        self._planned_steps = starts[0].planned_steps if starts else 0
        if starts:
            self.agreed_tokens = starts[0].agreed_tokens
            self._accepted_tokens = min(start.accepted_tokens for start in starts)
            self._acceptance = self._acceptance.begin(self._accepted_tokens)
        else:
            self.agreed_tokens, self._accepted_tokens = self._acceptance.compute_first()

    def plan(self, steps: int) -> None:
        """Notes that ``steps`` more steps are planned, and the next round begins."""
        self._planned_steps += steps
        self.agreed_tokens = self._accepted_tokens
        self._acceptance = self._acceptance.ask(self._planned_steps, self.agreed_tokens)
        self._accepted_tokens = self._acceptance.offered_tokens


def simulate_rounds(
    epoch: Epoch,
    config: Config,
    *,
    fill: Fill | None = None,
    on_progress: Callable[[int], None] | None = None,
    block_samples: int = _BLOCK_SAMPLES,
) -> RunRecord:
    """Returns the record of an epoch, which ends complete.

    Raises: as the world does, when the target rule leaves its bounds or a property of the protocol does not hold.
    """
    workload, costs, starts, global_batch = epoch.workload, epoch.costs, epoch.starts, epoch.global_batch
    seen = np.zeros(workload.samples_total, dtype=np.bool_)
    blocks = [
        Block(config, workload, costs, epoch.conditions, ranks, starts=starts, seen=seen)
        for ranks in _split_ranks(config, workload, block_samples)
    ]
    clock = Clock(
        depth_steps=config.depth_steps,
        collective=costs.collective,
        ranks=workload.ranks,
        lanes=1 if global_batch.goal is None or costs.collective.each_step else workload.ranks,
    )
    accumulation = Accumulation(global_batch)
    start = starts[0] if starts else RoundStart()
    round_, global_samples = start.round, start.global_samples
    rounds: list[Figures] = []
    forming: Figures | None = None
    counted_s = collated_s = exchange_s = 0.0
    drawn = _ask(config, blocks, 0)
    budgets = _Budgets(config, epoch.budget_schedule, starts)
    read_s = max([block.read(0.0, budgets.agreed_tokens) for block in blocks])
    while True:
        is_met = is_quota_met(config, State(global_samples=global_samples))
        agreement = reduce_offers([block.compute_offer(round_, is_quota_met=is_met) for block in blocks])
        latency_s = costs.network.compute_offer_s(workload.ranks)
        exchange_s += latency_s
        agreed_s = clock.agree(max(counted_s, read_s, collated_s), latency_s)
        if forming is not None:
            _release(
                clock, forming, accumulation.find_ends(forming.sums.samples, forming.sums.real_tokens), round_ - 1, fill
            )
        target = compute_round_target(config, agreement)
        if target == 0:
            break
        counts = np.sum([block.align(round_, target) for block in blocks], axis=0).tolist()
        drawn = _ask(config, blocks, drawn)
        totals = list(accumulate(counts, initial=global_samples))[1:]
        steps = count_planned_steps(config, totals)
        global_samples = totals[steps - 1]
        forming = merge_figures([block.emit(steps, fill) for block in blocks])
        rounds.append(replace(forming, ranks_s=_FORGOTTEN))
        is_shared = config.shared_samples is not None
        latency_s = costs.network.compute_counts_s(
            workload.ranks, target, resources=len(config.limits), wants=workload.ranks if is_shared else 0
        )
        exchange_s += latency_s
        counted_s = agreed_s + latency_s
        collated_s = counted_s + forming.collate_s
        asked_s = counted_s if is_shared else agreed_s
        budgets.plan(steps)
        read_s = asked_s + (max([block.read(asked_s, budgets.agreed_tokens) for block in blocks]) - asked_s)
        round_ += 1
        if on_progress is not None:
            on_progress(global_samples)
    clock.end_update()
    carried = sum(block.held_samples for block in blocks)
    if config.mode is Mode.JOIN and carried:
        raise InvariantError("COVER", f"the epoch is over, and {carried} samples are not emitted")
    ids = np.zeros(workload.samples_total, dtype=np.bool_)
    ids[workload.ids[seen]] = True
    return RunRecord(
        rows=_build_rows(rounds, clock, first_round=start.round, ranks=workload.ranks),
        rank_tokens=np.concatenate([block.rank_tokens for block in blocks]),
        samples_unique=int(ids.sum()),
        moved_places=sum(block.moved_places for block in blocks),
        rounds=len(rounds),
        updates=clock.updates,
        exchange_s=exchange_s,
    )


def _release(clock: Clock, forming: Figures, ends_update: Booleans, round_: int, fill: Fill | None) -> None:
    """Releases the steps of ``round_`` by the last agreement, and tells ``fill`` when each rank computes them."""
    if clock.lanes > 1:
        ready_s = clock.release(forming.ranks_s, ends_update)
    else:  # the ranks begin each step together
        clock.release(forming.ranks_s.max(axis=0, keepdims=True), ends_update)
        ready_s = forming.ranks_s
    if fill is not None:
        fill.end(round_, ready_s, ends_update)


def _ask(config: Config, blocks: Sequence[Block], drawn: int) -> int:
    """Requests the samples of the next windows. Returns how many places of the common order are then drawn."""
    if config.shared_samples is None:
        for block in blocks:
            block.ask()
        return 0
    wants = [block.wants for block in blocks]
    shares = np.array(compute_shares(np.concatenate(wants).tolist(), config.shared_samples - drawn), dtype=np.int64)
    firsts = drawn + np.cumsum(shares) - shares
    drawn += int(shares.sum())
    begin = 0
    for block, size in zip(blocks, map(len, wants), strict=True):
        block.draw(firsts[begin : begin + size], shares[begin : begin + size], drawn)
        begin += size
    return drawn


def _split_ranks(config: Config, workload: Workload, block_samples: int) -> list[range]:
    largest_shard = int(np.diff(workload.offsets).max())
    size = max(1, block_samples // max(1, min(config.window_samples, largest_shard)))
    return [range(first, min(first + size, workload.ranks)) for first in range(0, workload.ranks, size)]


def _build_rows(rounds: Sequence[Figures], clock: Clock, *, first_round: int, ranks: int) -> list[StepRow]:
    rows: list[StepRow] = []
    queued = clock.count_queued(ranks)
    for round_, figures in enumerate(rounds, first_round):
        for place in range(len(figures.compute_s)):
            step = len(rows)
            start_s, end_s = clock.starts_s[step], clock.ends_s[step]
            data_wait_s = ranks * clock.waits_s[step]
            compute_s = float(figures.compute_s[place])
            rows.append(
                StepRow(
                    step=step,
                    round=round_,
                    start_s=start_s,
                    end_s=end_s,
                    **figures.sums.select(place),
                    queued_steps=queued[step],
                    data_wait_s=data_wait_s,
                    compute_s=compute_s,
                    sync_wait_s=max(0.0, ranks * (clock.slowest_s[step] - start_s) - data_wait_s - compute_s),
                    collective_s=ranks * (end_s - clock.slowest_s[step]),
                )
            )
    return rows
