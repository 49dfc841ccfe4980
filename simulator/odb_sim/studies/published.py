"""The paper's published speed-ups beside what the simulator predicts from stated inputs.

The paper (arXiv 2606.19989) and the README of its package give, for full fine-tuning of an 8-billion-parameter Qwen3-VL on
eight H20: the coefficient of variation of the lengths, the throughput of fixed batches and that of online dynamic batching.
Everything else a prediction needs is an assumption. Each has a name, a value and a reason, and is moved down and up to show
how much depends on it. Nothing is fitted to the published numbers, and a prediction that misses stays in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.studies.runs import Run, run

SHORTEST_TOKENS: Final = 16
SAMPLES: Final = 12_000
POLICIES: Final = ("paper", "odb")
STANDARD: Final = "standard"


class Shape(StrEnum):
    """The distribution of lengths, given mean and coefficient of variation."""

    LOG_NORMAL = "log-normal"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the paper: samples per second over all ranks, and the speed-up it states."""

    name: str
    length_cv: float
    standard_samples_per_s: float
    odb_samples_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a prediction. ``length_cv``, ``ranks`` and ``budget_tokens`` are the paper's; the rest is assumed."""

    length_cv: float
    mean_tokens: int
    ranks: int = 8
    budget_tokens: int = 12_288
    shape: Shape = Shape.LOG_NORMAL
    cutoff_tokens: int = 12_288
    batch_size: int | None = None
    """The samples of a fixed batch. None means the number of longest samples that fit the budget."""
    window_samples: int = 256
    per_token_s: float = 6.5e-4
    per_token2_s: float = 1.1e-8
    fixed_s: float = 0.3
    samples: int = SAMPLES
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Assumption:
    """An input that the paper does not give: the reason for its value, and the values to which it is moved down and up."""

    field: str
    reason: str
    low: float | Shape
    high: float | Shape
    is_factor: bool = False
    """True if ``low`` and ``high`` are factors of the assumed value."""

    def move(self, inputs: Inputs) -> tuple[Inputs, Inputs]:
        """Returns the inputs with this one moved down, and up."""
        assumed = getattr(inputs, self.field)
        ends = [getattr(self, name) for name in ("low", "high")]
        if self.is_factor:
            ends = [type(assumed)(assumed * end) for end in ends]
        low, high = (replace(inputs, **{self.field: end}) for end in ends)
        return low, high


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of the simulator: samples per second over all ranks, by policy."""

    inputs: Inputs
    samples_per_s: dict[str, float]
    samples_per_update: dict[str, float]
    """The samples of an update over all ranks, where every step is an update."""
    batch_size: int
    """The samples of a fixed batch."""
    mean_tokens: float
    """The mean of the lengths drawn, after the cut-off."""
    length_cv: float

    def compute_speedup(self, policy: str = "paper") -> float:
        """Returns the speed-up over fixed batches."""
        return self.samples_per_s[policy] / self.samples_per_s[STANDARD]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A prediction's speed-up (the paper's rule) with one assumption moved down and up."""

    input: str
    reason: str
    values: tuple[str, str, str]
    """Low, assumed, high."""
    speedup_low: float
    speedup_high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the paper beside its prediction."""

    published: Published
    prediction: Prediction
    sensitivities: tuple[Sensitivity, ...]

    @property
    def error(self) -> float:
        """The predicted speed-up divided by the published one, minus 1."""
        return self.prediction.compute_speedup() / self.published.speedup - 1

    @property
    def span(self) -> tuple[float, float]:
        """The least and the greatest speed-up when one assumption is moved."""
        moved = [end for item in self.sensitivities for end in (item.speedup_low, item.speedup_high)]
        return min(self.prediction.compute_speedup(), *moved), max(self.prediction.compute_speedup(), *moved)

    def to_json(self) -> dict[str, object]:
        """Returns all figures."""
        low, high = self.span
        return {
            "published": asdict(self.published),
            "prediction": asdict(self.prediction),
            "predicted_speedup": self.prediction.compute_speedup(),
            "predicted_speedup_odb_rule": self.prediction.compute_speedup("odb"),
            "error": self.error,
            "speedup_low": low,
            "speedup_high": high,
            "assumptions": list(map(asdict, self.sensitivities)),
        }


ROWS: Final = (
    Published("UltraChat 200K, 8B", 0.48, 5.77, 10.23, 1.77),
    Published("LLaVA 150K, 8B", 0.29, 14.38, 24.87, 1.73),
    Published("ShareGPT4o 57K, 8B", 1.00, 2.37, 5.83, 2.46),
)
MEAN_TOKENS: Final = {"UltraChat 200K, 8B": 1250, "LLaVA 150K, 8B": 550, "ShareGPT4o 57K, 8B": 2000}
"""Assumed. UltraChat: 1.40 GB in 207,865 rows, a sixth of it the repeated prompt, 4.5 bytes to a token. LLaVA: a 640 x 480
picture at 32 x 32 pixels a token, and a conversation. ShareGPT4o: a large picture and a long description."""

ASSUMPTIONS: Final = (
    Assumption("mean_tokens", "estimated from each data set's card and picture sizes", 0.5, 2, is_factor=True),
    Assumption(
        "shape",
        "lengths of text are skewed; the paper gives the coefficient of variation alone",
        Shape.LOG_NORMAL,
        Shape.GAMMA,
    ),
    Assumption("cutoff_tokens", "samples are cut at the budget", 4096, 8192),
    Assumption("batch_size", "the largest that fits the budget whatever the samples; 4 may not fit", 1, 4),
    Assumption("window_samples", "4 workers with 64 prefetched samples, as in the package's examples", 64, 1024),
    Assumption("budget_tokens", "the paper's are near 12,288", 8192, 16_384),
    Assumption("per_token_s", "6 x 8e9 FLOP at half of an H20's 148 TFLOP/s", 0.5, 2, is_factor=True),
    Assumption("per_token2_s", "causal attention of 32 layers, width 4,096, at the same rate", 0, 2, is_factor=True),
    Assumption(
        "fixed_s",
        "optimizer, launches and gradient traffic of a sharded 8B model, for each step",
        0,
        3,
        is_factor=True,
    ),
)


def draw_lengths(inputs: Inputs) -> Lengths:
    """Returns lengths with the given mean and coefficient of variation before the cut-off, the same for the same seed."""
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
    """Predicts throughputs by simulating one pass over the drawn samples."""
    lengths = draw_lengths(inputs)
    gpu = GpuCost(fixed_s=inputs.fixed_s, per_token_s=inputs.per_token_s, per_token2_s=inputs.per_token2_s)
    what = Run(
        workload=build_workload(lengths, ranks=inputs.ranks, seed=inputs.seed),
        policy=STANDARD,
        budget_tokens=inputs.budget_tokens,
        batch_size=inputs.batch_size,
        window_samples=inputs.window_samples,
        costs=replace(Costs(), gpu=gpu, collective=NO_COLLECTIVE),
    )
    found = {policy: run(replace(what, policy=policy)).summary for policy in (STANDARD, *POLICIES)}
    mean = float(lengths.tokens.mean())
    return Prediction(
        inputs,
        samples_per_s={policy: summary.samples_per_s for policy, summary in found.items()},
        samples_per_update={policy: summary.samples_per_update for policy, summary in found.items()},
        batch_size=found[STANDARD].batch_size or 0,
        mean_tokens=mean,
        length_cv=float(lengths.tokens.std()) / mean,
    )


def compare_published(
    executor: Executor, rows: Sequence[Published] = ROWS, *, samples: int = SAMPLES
) -> list[Comparison]:
    """Returns every row of the paper with its prediction and the prediction's sensitivities, each from ``samples`` lengths."""
    bases = [Inputs(length_cv=row.length_cv, mean_tokens=MEAN_TOKENS[row.name], samples=samples) for row in rows]
    moved = {base: [assumption.move(base) for assumption in ASSUMPTIONS] for base in bases}
    distinct = list(dict.fromkeys([*bases, *(one for pairs in moved.values() for pair in pairs for one in pair)]))
    found = dict(zip(distinct, executor.map(predict, distinct), strict=True))
    return [
        Comparison(
            row,
            found[base],
            tuple(
                Sensitivity(
                    assumption.field,
                    assumption.reason,
                    (_show(low, assumption), _show(base, assumption), _show(high, assumption)),
                    found[low].compute_speedup(),
                    found[high].compute_speedup(),
                )
                for assumption, (low, high) in zip(ASSUMPTIONS, moved[base], strict=True)
            ),
        )
        for row, base in zip(rows, bases, strict=True)
    ]


def _show(inputs: Inputs, assumption: Assumption) -> str:
    value = getattr(inputs, assumption.field)
    if value is None:
        return "largest safe"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
