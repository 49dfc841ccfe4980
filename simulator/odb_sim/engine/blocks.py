"""The ranks of a round-synchronous run, one block at a time: what they hold, read, offer and emit, as arrays.

A block is small enough for its windows to stay in a processor's cache. It keeps only the windows and how far each rank has
read; the contents of its steps are passed on round by round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from odb_ref.arrays.twins import (
    HUGE,
    Booleans,
    Runs,
    align_windows,
    arrange_runs,
    compute_block_offer,
    compute_group_bounds,
    compute_shared_wants,
    compute_wanted,
    count_groups,
    count_groups_to_emit,
    find_due,
    line_up_windows,
    pack_windows,
)
from odb_ref.arrays.windows import (
    Windows,
    accumulate_rows,
    compute_ragged,
    decode_positions,
    encode_samples,
    sort_windows,
)
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.config import Config
from odb_ref.core.errors import InvariantError
from odb_ref.core.offer import Offer
from odb_ref.core.resume import RoundStart
from odb_sim.engine.fill import Fill
from odb_sim.engine.loading import OrderReader, WindowReader
from odb_sim.engine.metrics import StepSums, count_steps, merge_sums, sum_moves
from odb_sim.inputs.conditions import Conditions, list_factors
from odb_sim.inputs.costs import Costs, Seconds
from odb_sim.inputs.lengths import Integers
from odb_sim.inputs.workload import Workload


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the steps of one round, one number per step, and the seconds that the slowest rank takes to collate them."""

    sums: StepSums
    compute_s: Seconds
    ranks_s: Seconds
    """The seconds that each rank computes each step, in shape (ranks, steps)."""
    collate_s: float


def merge_figures(parts: Sequence[Figures]) -> Figures:
    """Returns the figures of several blocks merged into those of all their ranks."""
    return Figures(
        sums=merge_sums([part.sums for part in parts]),
        compute_s=np.sum([part.compute_s for part in parts], axis=0),
        ranks_s=np.concatenate([part.ranks_s for part in parts]),
        collate_s=max(part.collate_s for part in parts),
    )


class Block:
    """Some of the ranks. A round is `ask` or `draw`, `read`, `compute_offer`, `align`, `emit`; the next asks before `emit`.

    A sample is named by its place in the workload. Within a rank's own shard, places and positions have the same order.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        costs: Costs,
        conditions: Conditions,
        ranks: range,
        *,
        starts: Sequence[RoundStart],
        seen: Booleans,
    ) -> None:
        self._config = config
        self._first_rank = ranks.start
        self._is_packed = config.layout is Layout.PACKED
        self._workload = workload
        self._costs = costs
        self._seen = seen
        """Marks the samples of the whole workload that are emitted."""
        offsets = workload.offsets[ranks.start : ranks.stop]
        self._ends = workload.offsets[ranks.start + 1 : ranks.stop + 1]
        """Where in the workload each rank's own shard ends."""
        self._trainer_factors = list_factors(conditions.slow_ranks, ranks)
        self._loader_factors = list_factors(conditions.slow_loaders, ranks)
        own = [starts[rank] if starts else RoundStart() for rank in ranks]
        self._known = offsets + np.array([start.read_samples for start in own])
        """The place below which each rank has read all its samples. A mark is such a place."""
        self._is_ended = np.array([start.is_ended for start in own])
        self._marks = [offsets + np.array(marks) for marks in zip(*(start.marks for start in own), strict=True)]
        self._held_counts = np.array([len(start.carried) for start in own])
        carried = np.array(list(chain.from_iterable(start.carried for start in own)), dtype=np.int64)
        carried += np.repeat(offsets, self._held_counts)
        self._held = encode_samples(workload.tokens[carried], carried)
        window = min(config.window_samples, HUGE)
        shards = zip(self._known.tolist(), self._ends.tolist(), strict=True)
        self._readers = [
            WindowReader(costs.loader, workload.tokens[first:end], window)
            if config.shared_samples is None
            else OrderReader(costs.loader, workload.tokens)
            for first, end in shards
        ]
        self.wants = compute_wanted(config, starts[0].round if starts else 0, self._held_counts, self._is_ended)
        """The number of samples for which each rank has room."""
        self.rank_tokens: Integers = np.zeros(len(ranks), dtype=np.int64)
        """The real tokens that each rank has trained on."""
        self._asked_before = self._known - offsets
        self._runs_read = [(offsets, np.zeros_like(offsets))]
        """For the last runs that each rank has read: the first place and the first position."""
        self._emitted = self._asked_before - self._held_counts
        self.moved_places = 0

    def ask(self) -> None:
        """Lets each rank request the samples it wants from its own shard."""
        self._first, self._asked = self._known, np.minimum(self.wants, self._ends - self._known)
        self._known = self._known + self._asked
        self._is_ended = self._is_ended | ((self.wants > 0) & (self._known == self._ends))

    def draw(self, firsts: Integers, counts: Integers, drawn: int) -> None:
        """Lets each rank request its draw from the common order, of which all ranks have ``drawn`` places so far."""
        self._first, self._asked = firsts, counts
        # Older runs are emitted (AGE), except for a rank that draws nothing, whose run is that of the next draw.
        self._runs_read = [*self._runs_read, (firsts, self._asked_before)][-self._config.max_age_rounds - 3 :]
        self._asked_before = self._asked_before + counts
        self._known = np.full_like(self._known, drawn)
        self._is_ended = np.full_like(self._is_ended, drawn == self._config.shared_samples)

    def read(self, asked_s: float, agreed_tokens: int) -> float:
        """Fills the windows and forms their groups under the agreed budget. Returns when the slowest rank has read."""
        counts = self._asked
        answer_s = max(self._compute_answers_s(asked_s), default=asked_s)
        places = compute_ragged(self._first, counts)
        tokens = self._workload.tokens[places]
        windows = sort_windows((self._held, self._held_counts), (encode_samples(tokens, places), counts))
        self._windows = replace(windows, used=self._accumulate_resources(windows)) if self._config.limits else windows
        budget_tokens, limits = self._config.compute_round_bounds(agreed_tokens)
        layout = self._config.layout
        if self._config.order is StepOrder.SAMPLER:
            self._windows, self._bounds = line_up_windows(self._windows, layout, min(budget_tokens, HUGE), limits)
        elif self._is_packed:
            self._windows, self._bounds = pack_windows(self._windows, budget_tokens, limits)
        else:
            self._bounds = compute_group_bounds(self._windows, budget_tokens, limits, sizes=self._config.sizes)
        self._to_emit = count_groups_to_emit(self._windows, self._bounds, layout, budget_tokens)
        return answer_s

    def _compute_answers_s(self, asked_s: float) -> Iterator[float]:
        """Yields when the samples of each rank that requests any are there."""
        asked = zip(self._first.tolist(), self._asked.tolist(), self._loader_factors.tolist(), strict=True)
        for rank, (first, count, slowness) in enumerate(asked):
            if count:
                yield self._readers[rank].read(count, asked_s, slowness, first)

    def _accumulate_resources(self, windows: Windows) -> tuple[Integers, ...]:
        places = np.minimum(windows.positions, self._workload.samples_total - 1)
        return tuple(
            accumulate_rows(self._workload.resources[places, resource]) for resource in range(len(self._config.limits))
        )

    @property
    def held_samples(self) -> int:
        """The samples that all ranks of the block hold in their windows."""
        return int(self._windows.counts.sum())

    def compute_offer(self, round_: int, *, is_quota_met: bool) -> Offer:
        """Returns the reduced offer of all ranks of the block."""
        config, counts = self._config, self._windows.counts
        # As in `odb_ref.core.rounds.compute_due_before`, nothing is due until ``max_age_rounds`` marks are kept.
        has_due = len(self._marks) == config.max_age_rounds
        due_before = self._marks[0] if has_due else np.zeros_like(counts)
        self._due = find_due(self._windows, self._bounds, due_before)
        return compute_block_offer(
            config,
            round_,
            held=np.zeros_like(counts) if is_quota_met else counts,
            groups=count_groups(self._bounds),
            to_emit=self._to_emit,
            due=self._due,
            is_ended=self._is_ended,
        )

    def align(self, round_: int, target: int) -> Integers:
        """Forms ``target`` steps on each rank. Returns how many samples the block's ranks have in each step."""
        config = self._config
        self._runs = align_windows(
            self._windows,
            self._bounds,
            target,
            self._due,
            layout=config.layout,
            step_order=config.order,
            cost=config.cost,
            sizes=config.sizes,
        )
        if config.order is StepOrder.SHUFFLED:
            self._runs = arrange_runs(self._runs, config.order_seed, round_)
        self._marks = [*self._marks, self._known][-self._config.max_age_rounds :]
        sizes = self._runs.sizes
        carried = self._windows.counts - sizes.sum(axis=1)
        if self._config.shared_samples is None:
            self.wants = compute_wanted(self._config, round_ + 1, carried, self._is_ended)
        else:
            carried_tokens = self._windows.tokens - self._runs.compute_sums(self._windows.sums).sum(axis=1)
            drawn = int(self._known[0])  # drawn by all ranks together, so the same for each
            self.wants = compute_shared_wants(self._config, round_ + 1, self._windows, carried_tokens, drawn)
        samples: Integers = sizes.sum(axis=0)
        return samples

    def emit(self, steps: int, fill: Fill | None = None) -> Figures:
        """Returns the figures of the first ``steps`` steps of the round, and tells ``fill``. These steps are trained on; all
        other samples stay in the windows.

        Raises: InvariantError when a sample is emitted twice.
        """
        windows = self._windows
        runs = Runs(self._runs.begins[:, :steps], self._runs.ends[:, :steps])
        sizes, real = runs.sizes, runs.compute_sums(windows.sums)
        padded = runs.compute_tokens(windows, self._config.layout)
        emitted = self._keep_others(runs, sizes)
        if fill is not None:
            fill.add(self._first_rank, sizes, real, padded, self._workload.tokens[emitted])
        del emitted  # as large as the window
        self.rank_tokens += real.sum(axis=1)
        row_pairs = (
            runs.compute_squares(windows)
            if self._is_packed
            else padded.astype(np.float64) * runs.compute_longest(windows)
        )
        compute_s = self._costs.compute_steps_s(padded, row_pairs) * self._trainer_factors[:, None]
        collate_s = self._costs.loader.compute_collate_s(
            np.full(len(padded), float(steps)),
            padded.sum(axis=1).astype(np.float64),
            self._asked.astype(np.float64),
        )
        return Figures(
            sums=count_steps(sizes, real, padded, self._config.budget_tokens),
            compute_s=compute_s.sum(axis=0),
            ranks_s=compute_s,
            collate_s=float((collate_s * self._loader_factors).max()),
        )

    def _find_positions(self, ids: Integers, counts: Integers) -> Integers:
        """Returns the position of each sample in its rank's input. ``ids`` holds ``counts`` samples of each rank in turn."""
        positions = np.zeros_like(ids)
        for firsts, numbers in self._runs_read:
            is_later = ids >= np.repeat(firsts, counts)
            np.add(ids, np.repeat(numbers - firsts, counts), out=positions, where=is_later)
        return positions

    def _keep_others(self, runs: Runs, sizes: Integers) -> Integers:
        """Returns the samples that the steps emit. The others stay held, in any order, because windows are sorted later."""
        samples = self._windows.samples.reshape(-1)
        ranks, width = self._windows.samples.shape
        begins = runs.begins + np.arange(ranks)[:, None] * width
        places = compute_ragged(begins.reshape(-1), sizes.reshape(-1))
        is_held = (np.arange(width) < self._windows.counts[:, None]).reshape(-1)
        is_held[places] = False
        emitted = sizes.sum(axis=1)
        ids = decode_positions(samples[places])
        before = self._emitted[:, None] + accumulate_rows(sizes)[:, :-1]
        self.moved_places += sum_moves(before.reshape(-1), sizes.reshape(-1), self._find_positions(ids, emitted))
        self._emitted = self._emitted + emitted
        self._held, self._held_counts = samples[is_held], self._windows.counts - emitted
        if len(self._held) != self._held_counts.sum() or self._seen[ids].any():
            raise InvariantError("ONCE", "a sample is emitted twice")
        self._seen[ids] = True
        return ids
