"""Micro-batches of known lengths, as in reinforcement learning: how long ranks wait for one another, how much of that dealing
out the samples would save, and how much only other data would.

`odb_ref.plan` divides a step's samples in two ways (R13): staying on their ranks, which have equal parts of the step in order,
and dealt out to all ranks. A collective ends the step. Ranks meet before it only if the cost model has `each_step`, as in a
simulation. Both are compared with a lower bound of any plan: the work of all samples divided by the ranks, in no more
micro-batches than any plan has, or the costliest group that must stay together if that takes longer, with every micro-batch at
its least possible time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from odb_ref.core.batching.cost import Cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.plan.outcome import Plan
from odb_ref.plan.planning import plan_all, plan_ranks
from odb_ref.plan.terms import Options, Within
from odb_sim.engine.batches import measure_batches
from odb_sim.inputs.costs import Costs, Seconds
from odb_sim.inputs.lengths import Integers, Lengths

STAY: Final = "samples stay"
DEALT: Final = "dealt out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The figures of one way to divide: means over the optimizer steps, and seconds of one step."""

    way: str
    micro_batches: float
    """The number on each rank."""
    least: float
    """A lower bound of that number, for any plan."""
    fill: float
    """The samples' tokens divided by the budgets of all micro-batches."""
    wait: float
    """The time of the steps without the collective, divided by the mean seconds that a rank computes."""
    step_s: float
    wait_s: float
    """The part of ``step_s`` that the mean rank waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysToDivide:
    """Both ways to divide, and the lower bound."""

    steps: int
    samples: int
    balanced_by: str
    stay: Divided
    dealt: Divided
    bound_s: float
    """The lower bound of the seconds of a step, for plans that keep groups together."""
    split_groups: float
    """The mean number of a step's groups that are on several ranks if the samples stay."""

    @property
    def saved_s(self) -> float:
        """The seconds of a step that dealing out the samples saves."""
        return self.stay.step_s - self.dealt.step_s

    @property
    def left_s(self) -> float:
        """The seconds of a step above the bound that are left then. A perfect plan, if there is one, would save them."""
        return self.dealt.step_s - self.bound_s


def divide(
    lengths: Lengths,
    *,
    ranks: int,
    costs: Costs,
    options: Options,
    balance: Cost,
    step_samples: int | None = None,
    groups: Integers | None = None,
    on_done: Callable[[int], None] | None = None,
) -> WaysToDivide:
    """Divides the samples of each optimizer step of ``step_samples``, or of one step with all, and returns the figures.

    ``groups`` has a key for each sample; ``options["within"]`` says where samples of one key must be together (on a rank).
    ``on_done`` gets the number of samples divided.

    Raises: UsageError when the terms are not valid or cannot be met, or a step has fewer samples than ranks.
    """
    size = len(lengths) if step_samples is None else step_samples
    if not 1 <= ranks <= size:
        raise UsageError(f"{size:,} samples of a step, and {ranks:,} ranks: each needs at least one")
    layout = Layout(options.get("layout", Layout.PACKED))
    within = Within(options.get("within", Within.RANK))
    if within is Within.STEP:  # the samples of a key may be anywhere
        groups = None
    within = Within.MICRO_BATCH if groups is None else within  # the others are refused without keys
    terms: Options = {**options, "cost": balance.of_tokens, "within": within}
    stay: list[Divided] = []
    dealt: list[Divided] = []
    bounds, split = [], []
    for begin in range(0, len(lengths) - size + 1, size):
        part = slice(begin, begin + size)
        tokens = lengths.tokens[part]
        keys = None if groups is None else groups[part]
        shares = np.array_split(np.arange(size), ranks)
        together = None if keys is None else [keys[share].tolist() for share in shares]
        kept = plan_ranks([tokens[share].tolist() for share in shares], together=together, **terms)
        moved = plan_all(tokens.tolist(), ranks=ranks, together=None if keys is None else keys.tolist(), **terms)
        own = [
            [share[list(batch)] for batch in rank.micro_batches] for share, rank in zip(shares, kept.ranks, strict=True)
        ]
        new = [[np.array(batch, dtype=np.int64) for batch in rank.micro_batches] for rank in moved.ranks]
        pad_to = options.get("pad_to", 1)
        padded = -(-tokens // pad_to) * pad_to
        largest = options["budget"]
        for divided, way, plan, rows in ((stay, STAY, kept, own), (dealt, DEALT, moved, new)):
            figures = [
                measure_batches(padded[np.concatenate(row)], np.array(list(map(len, row))), layout) for row in rows
            ]
            _, batches, row_pairs = map(np.stack, zip(*figures, strict=True))
            divided.append(_measure(way, plan, costs.compute_steps_s(batches, row_pairs), costs))
            largest = max(largest, int(batches.max()))
        bounds.append(
            _compute_bound_s(
                padded,
                keys,
                least=moved.report.least,
                ranks=ranks,
                costs=costs,
                largest=largest,
            )
        )
        if keys is not None:
            _, places = np.unique(np.concatenate([np.unique(keys[share]) for share in shares]), return_counts=True)
            split.append(int((places > 1).sum()))
        if on_done is not None:
            on_done(begin + size)
    return WaysToDivide(
        steps=len(stay),
        samples=len(stay) * size,
        balanced_by=balance.name,
        stay=_average(stay),
        dealt=_average(dealt),
        bound_s=float(np.mean(bounds)),
        split_groups=float(np.mean(split)) if split else 0.0,
    )


def _measure(way: str, plan: Plan, seconds: Seconds, costs: Costs) -> Divided:
    """Returns the figures of one step. ``seconds`` has shape (ranks, micro-batches)."""
    # If ranks meet after each micro-batch, each takes as long as on the slowest rank. Otherwise only the sums count.
    before_s, last_s = seconds[:, :-1], seconds[:, -1]
    ready_s = (before_s.max(axis=0).sum() if costs.collective.each_step else before_s.sum(axis=1)) + last_s
    compute_s, mean_s = float(ready_s.max()), float(seconds.sum(axis=1).mean())
    report = plan.report
    return Divided(
        way=way,
        micro_batches=report.count,
        least=report.least,
        fill=report.fill,
        wait=compute_s / mean_s if mean_s else 1.0,
        step_s=costs.collective.compute_end_s(ready_s, last_s, len(seconds)),
        wait_s=compute_s - mean_s,
    )


def _compute_bound_s(
    tokens: Integers, keys: Integers | None, *, least: int, ranks: int, costs: Costs, largest: int
) -> float:
    """Returns a lower bound of the seconds of any plan, without the padding of rows, whatever the layout.

    The slowest rank has at least the mean work of a rank, and one of the ranks has the costliest group.
    """
    sizes = tokens.astype(np.float64)
    bounds = []
    for each_s, token_s, pair_s in _list_minorants(costs, largest):
        alone_s = token_s * sizes + pair_s * sizes**2
        groups = alone_s if keys is None else np.bincount(np.unique(keys, return_inverse=True)[1], alone_s)
        bounds.append(least * each_s + max(float(alone_s.sum()) / ranks, float(groups.max())))
    return max(bounds) + costs.collective.compute_s(ranks)


def _list_minorants(costs: Costs, largest: int) -> list[tuple[float, float, float]]:
    """Returns triples of seconds per micro-batch, per token and per squared token. By each, no micro-batch of at most
    ``largest`` tokens takes less, not even an idle one.

    Linear functions add up, whichever micro-batches the samples are in.
    """
    gpu, table = costs.gpu, costs.step_table
    if not table.rows:
        return [(gpu.floor_s, 0.0, 0.0), (gpu.fixed_s, gpu.per_token_s, gpu.per_token2_s)]
    # Between these sizes a table is linear.
    sizes = [1.0, *(size for size, _ in table.rows if 1 < size < largest), float(largest)]
    points = [(size, table.compute_step_s(size)) for size in sizes]
    cheapest_s = min(gpu.fixed_s, *(seconds for _, seconds in points))
    return [(each_s, min((seconds - each_s) / size for size, seconds in points), 0.0) for each_s in (0.0, cheapest_s)]


def _average(parts: Sequence[Divided]) -> Divided:
    names = [item.name for item in fields(Divided) if item.name != "way"]
    return Divided(
        way=parts[0].way, **{name: float(np.mean([getattr(part, name) for part in parts])) for name in names}
    )
