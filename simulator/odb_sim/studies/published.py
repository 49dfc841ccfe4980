"""The paper's published speed-ups beside what the simulator predicts from stated inputs.

The paper (arXiv 2606.19989) and the README of its package give, for full fine-tuning of an 8-billion-parameter Qwen3-VL on
eight H20: the coefficient of variation of the lengths, the throughput of fixed batches and that of online dynamic batching.
Everything else a prediction needs is an assumption: it is named, has a value and a reason, and is moved down and up to show
how much hangs on it. Nothing is fitted to the published numbers, and a prediction that misses stays in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Workload, build_workload
from odb_sim.studies.runs import Run, run

SHORTEST_TOKENS: Final = 16
SAMPLES: Final = 12_000
POLICIES: Final = ("paper", "odb")
STANDARD: Final = "standard"


class Shape(StrEnum):
    """The distribution of lengths, given mean and coefficient of variation."""

    LOG_NORMAL = "log-normal"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of the paper: samples per second over all ranks, and the speed-up it states."""

    name: str
    length_cv: float
    standard_samples_per_s: float
    odb_samples_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a prediction is made from. ``length_cv``, ``ranks`` and ``budget_tokens`` are the paper's; the rest is assumed."""

    length_cv: float
    mean_tokens: int
    ranks: int = 8
    budget_tokens: int = 12_288
    shape: Shape = Shape.LOG_NORMAL
    cutoff_tokens: int = 12_288
    batch_size: int | None = None
    """Samples in a fixed batch; None: as many of the longest as fit the budget."""
    window_samples: int = 256
    per_token_s: float = 6.5e-4
    per_token2_s: float = 1.1e-8
    fixed_s: float = 0.3
    samples: int = SAMPLES
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Assumption:
    """An input that the paper does not give: why it has its value, and how it is moved down and up."""

    field: str
    reason: str
    lower: Callable[[Inputs], Inputs]
    higher: Callable[[Inputs], Inputs]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says: samples per second over all ranks, by policy."""

    inputs: Inputs
    samples_per_s: dict[str, float]
    samples_per_update: dict[str, float]
    """Over all ranks: every step is an update."""
    batch_size: int
    """Samples in a fixed batch."""
    mean_tokens: float
    """Of the lengths drawn, after the cut-off."""
    length_cv: float

    def compute_speedup(self, policy: str = "paper") -> float:
        """Returns the speed-up over fixed batches."""
        return self.samples_per_s[policy] / self.samples_per_s[STANDARD]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A prediction's speed-up (the paper's rule) with one assumption moved down and up."""

    assumption: Assumption
    values: tuple[str, str, str]
    """Low, assumed, high."""
    low_speedup: float
    high_speedup: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the paper beside its prediction."""

    published: Published
    prediction: Prediction
    sensitivities: tuple[Sensitivity, ...]

    @property
    def error(self) -> float:
        """Predicted over published speed-up, less 1."""
        return self.prediction.compute_speedup() / self.published.speedup - 1

    @property
    def span(self) -> tuple[float, float]:
        """The least and the greatest speed-up with one assumption moved."""
        speedups = [self.prediction.compute_speedup()]
        for item in self.sensitivities:
            speedups += [item.low_speedup, item.high_speedup]
        return min(speedups), max(speedups)


ROWS: Final = (
    Published(
        name="UltraChat 200K, 8B",
        length_cv=0.48,
        standard_samples_per_s=5.77,
        odb_samples_per_s=10.23,
        speedup=1.77,
    ),
    Published(
        name="LLaVA 150K, 8B",
        length_cv=0.29,
        standard_samples_per_s=14.38,
        odb_samples_per_s=24.87,
        speedup=1.73,
    ),
    Published(
        name="ShareGPT4o 57K, 8B",
        length_cv=1.00,
        standard_samples_per_s=2.37,
        odb_samples_per_s=5.83,
        speedup=2.46,
    ),
)
MEAN_TOKENS: Final = {"UltraChat 200K, 8B": 1250, "LLaVA 150K, 8B": 550, "ShareGPT4o 57K, 8B": 2000}
"""Assumed. UltraChat: 1.40 GB in 207,865 rows, a sixth of it the repeated prompt, 4.5 bytes to a token. LLaVA: a 640 x 480
picture at 32 x 32 pixels a token, and a conversation. ShareGPT4o: a large picture and a long description."""

ASSUMPTIONS: Final = (
    Assumption(
        "mean_tokens",
        "estimated from each data set's card and picture sizes",
        lambda it: replace(it, mean_tokens=it.mean_tokens // 2),
        lambda it: replace(it, mean_tokens=it.mean_tokens * 2),
    ),
    Assumption(
        "shape",
        "lengths of text are skewed; the paper gives the coefficient of variation alone",
        lambda it: it,
        lambda it: replace(it, shape=Shape.GAMMA),
    ),
    Assumption(
        "cutoff_tokens",
        "samples are cut at the budget",
        lambda it: replace(it, cutoff_tokens=4096),
        lambda it: replace(it, cutoff_tokens=8192),
    ),
    Assumption(
        "batch_size",
        "the largest that fits the budget whatever the samples; 4 may not fit",
        lambda it: replace(it, batch_size=1),
        lambda it: replace(it, batch_size=4),
    ),
    Assumption(
        "window_samples",
        "4 workers with 64 prefetched samples, as in the package's examples",
        lambda it: replace(it, window_samples=64),
        lambda it: replace(it, window_samples=1024),
    ),
    Assumption(
        "budget_tokens",
        "the paper's are near 12,288",
        lambda it: replace(it, budget_tokens=8192),
        lambda it: replace(it, budget_tokens=16_384),
    ),
    Assumption(
        "per_token_s",
        "6 x 8e9 FLOP at half of an H20's 148 TFLOP/s",
        lambda it: replace(it, per_token_s=it.per_token_s / 2),
        lambda it: replace(it, per_token_s=it.per_token_s * 2),
    ),
    Assumption(
        "per_token2_s",
        "causal attention of 32 layers, width 4,096, at the same rate",
        lambda it: replace(it, per_token2_s=0.0),
        lambda it: replace(it, per_token2_s=it.per_token2_s * 2),
    ),
    Assumption(
        "fixed_s",
        "optimizer, launches and gradient traffic of a sharded 8B model, for each step",
        lambda it: replace(it, fixed_s=0.0),
        lambda it: replace(it, fixed_s=it.fixed_s * 3),
    ),
)


def draw_lengths(inputs: Inputs) -> Lengths:
    """Lengths of the given mean and coefficient of variation, before the cut-off; the same for the same seed."""
    random = np.random.default_rng(inputs.seed)
    match inputs.shape:
        case Shape.LOG_NORMAL:
            variance = np.log1p(inputs.length_cv**2)
            drawn = random.lognormal(np.log(inputs.mean_tokens) - variance / 2, np.sqrt(variance), inputs.samples)
        case Shape.GAMMA:
            variance = inputs.length_cv**2
            drawn = random.gamma(1 / variance, inputs.mean_tokens * variance, inputs.samples)
    tokens = np.clip(np.rint(drawn), SHORTEST_TOKENS, inputs.cutoff_tokens).astype(np.int64)
    return Lengths(f"{inputs.shape} with CV {inputs.length_cv}", tokens, tokens)


def predict(inputs: Inputs) -> Prediction:
    """Throughputs by simulation of one pass over the drawn samples."""
    lengths = draw_lengths(inputs)
    workload = build_workload(lengths, ranks=inputs.ranks, seed=inputs.seed)
    gpu = GpuCost(fixed_s=inputs.fixed_s, per_token_s=inputs.per_token_s, per_token2_s=inputs.per_token2_s)
    costs = replace(Costs(), gpu=gpu, collective=NO_COLLECTIVE)
    standard = run(_build_standard(inputs, workload, costs)).summary
    speeds, updates = {STANDARD: standard.samples_per_s}, {STANDARD: standard.samples_per_update}
    for policy in POLICIES:
        what = Run(
            workload=workload,
            policy=policy,
            budget_tokens=inputs.budget_tokens,
            window_samples=inputs.window_samples,
            costs=costs,
        )
        summary = run(what).summary
        speeds[policy], updates[policy] = summary.samples_per_s, summary.samples_per_update
    mean = float(lengths.tokens.mean())
    return Prediction(inputs, speeds, updates, standard.batch_size or 0, mean, float(lengths.tokens.std()) / mean)


def _build_standard(inputs: Inputs, workload: Workload, costs: Costs) -> Run:
    # Fixed batches take as many of the longest samples as the budget holds: the budget says the batch size.
    longest = int(workload.tokens.max())
    budget = inputs.budget_tokens if inputs.batch_size is None else inputs.batch_size * longest
    return Run(workload=workload, policy=STANDARD, budget_tokens=budget, costs=costs)


def compare_published(
    executor: Executor, rows: Sequence[Published] = ROWS, *, samples: int = SAMPLES
) -> list[Comparison]:
    """Returns every row of the paper with its prediction and the prediction's sensitivities, each from ``samples`` lengths."""
    tasks: list[Inputs] = []
    for row in rows:
        base = Inputs(length_cv=row.length_cv, mean_tokens=MEAN_TOKENS[row.name], samples=samples)
        tasks.append(base)
        for assumption in ASSUMPTIONS:
            tasks += [assumption.lower(base), assumption.higher(base)]
    distinct = list(dict.fromkeys(tasks))
    found = dict(zip(distinct, executor.map(predict, distinct), strict=True))
    comparisons = []
    stride = 1 + 2 * len(ASSUMPTIONS)
    for number, row in enumerate(rows):
        base, *moved = tasks[number * stride : (number + 1) * stride]
        sensitivities = tuple(
            Sensitivity(
                assumption,
                (_show(low, assumption), _show(base, assumption), _show(high, assumption)),
                found[low].compute_speedup(),
                found[high].compute_speedup(),
            )
            for assumption, low, high in zip(ASSUMPTIONS, moved[::2], moved[1::2], strict=True)
        )
        comparisons.append(Comparison(row, found[base], sensitivities))
    return comparisons


def _show(inputs: Inputs, assumption: Assumption) -> str:
    value = getattr(inputs, assumption.field)
    if value is None:
        return "largest safe"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
