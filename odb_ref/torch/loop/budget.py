"""Finds a token budget from the memory that training steps really take, and runs the hardest batches it allows in advance.

A step's memory has a part that does not depend on the batch (weights, gradients, the optimizer's state) and a part that grows
with its tokens. So a line is fitted through a few steps. The budget is the largest batch that was measured and fits, so nothing
rests on extrapolation alone. Longer samples may take more memory per token (attention), so the longest length is probed first,
and then the median.

With several ranks, all run the same probes, and the line is that of the rank that needs most, because steps may contain
collectives and the budget is the same everywhere. Spec: R1.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median_high

import torch.distributed as dist

from odb_ref.core.errors import JobError, UsageError, check_integer
from odb_ref.torch.gathering import name_rank
from odb_ref.torch.loop.memory import get_available_bytes, is_out_of_memory, measure_peak, release_memory
from odb_ref.torch.loop.ranks import gather_results

Step = Callable[[int, int], object]
"""Runs a training step on a made-up batch: takes the number of samples, and the length of each in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """One measured step."""

    samples: int
    length: int
    """The length of each sample, in tokens."""
    peak_bytes: int | None
    """The peak on the rank that took most, or None if a rank ran out of memory."""

    @property
    def tokens(self) -> int:
        """The tokens of the batch, including padding."""
        return self.samples * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """The measurements, the line through them, and the resulting budget. Print it to see everything."""

    points: tuple[MemoryPoint, ...]
    base_bytes: float
    """The memory that a step takes even with the smallest batch."""
    bytes_per_token: float
    limit_bytes: int
    threshold: float
    """The share of ``limit_bytes`` that a step may take."""
    token_budget: int

    def predict_bytes(self, tokens: int) -> int:
        """Returns the predicted memory of a step on a batch of this many tokens, including padding."""
        return round(self.base_bytes + self.bytes_per_token * tokens)

    @property
    def headroom_bytes(self) -> int:
        """How much of the limit a full batch leaves free."""
        return self.limit_bytes - self.predict_bytes(self.token_budget)

    def __str__(self) -> str:
        lines = [
            f"token budget {self.token_budget}: {_show(self.predict_bytes(self.token_budget))} of {_show(self.limit_bytes)}, "
            f"{_show(self.headroom_bytes)} to spare (threshold {self.threshold:.0%})",
            f"line: {_show(self.base_bytes)} + {self.bytes_per_token:.0f} bytes a token",
        ]
        for point in self.points:
            peak = "out of memory" if point.peak_bytes is None else _show(point.peak_bytes)
            lines.append(f"  {point.samples:6} samples of {point.length:6} tokens: {peak}")
        return "\n".join(lines)


def _show(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.2f} MiB"


def fit_token_budget(
    step: Step,
    lengths: Sequence[int],
    *,
    limit_bytes: int | None = None,
    threshold: float = 0.9,
    growth: float = 2.0,
    multiple_of: int = 1,
    group: dist.ProcessGroup | None = None,
) -> MemoryFit:
    """Returns the largest budget whose steps take at most ``threshold`` of ``limit_bytes``, on all ranks. A collective.

    ``step(samples, length)`` must run everything that a training step runs, including backward, on a made-up batch. Use a copy
    of the model, because changes to it remain. ``lengths`` are the lengths of some samples, including the longest.
    ``limit_bytes`` defaults to the accelerator's memory for this process. Without an accelerator it is required, and memory is
    counted from tensors, also under a ``FakeTensorMode``, where nothing is allocated. Each probe has at most ``growth`` times
    the samples of the previous one. The budget is rounded down to a multiple of ``multiple_of``.

    Raises: UsageError when an argument is invalid or a batch of one sample takes too much; what ``step`` raises. If only one
    rank raises that, the others raise JobError.
    """

    def read() -> tuple[int, int, int, tuple[float, float, int]]:
        if not lengths or not 0 < threshold <= 1 or growth <= 1:
            raise UsageError("lengths must not be empty, threshold lie above 0 and at most at 1, growth above 1")
        check_integer(multiple_of, "multiple_of", 1)
        own = [check_integer(length, "a length", 1) for length in lengths]
        limit = get_available_bytes() if limit_bytes is None else check_integer(limit_bytes, "limit_bytes", 1)
        if limit is None:
            raise UsageError("without an accelerator nobody knows how much memory a step may take: pass limit_bytes=")
        return limit, max(own), median_high(own), (threshold, growth, multiple_of)

    limits, longests, medians, settings = zip(*gather_results(read, group), strict=True)
    if len({*settings}) > 1:
        raise UsageError("threshold, growth and multiple_of must be the same on all ranks")
    limit = min(limits)
    measure = _Measure(step, group)
    fits = []
    for length in sorted({max(longests), max(medians)}, reverse=True):
        found = _probe(measure, length, limit * threshold, growth)
        base, slope = _fit_line(found)
        budget = max(point.tokens for point in found if _fits(point, limit * threshold))
        fits.append((budget, base, slope))
    budget, base, slope = min(fits)
    if budget < multiple_of:
        raise UsageError(f"{budget} tokens fit into memory, less than multiple_of={multiple_of}")
    return MemoryFit(
        points=tuple(measure.points),
        base_bytes=base,
        bytes_per_token=slope,
        limit_bytes=limit,
        threshold=threshold,
        token_budget=budget // multiple_of * multiple_of,
    )


def rehearse(
    step: Step, lengths: Sequence[int], token_budget: int, *, count: int = 1, group: dist.ProcessGroup | None = None
) -> tuple[MemoryPoint, ...]:
    """Runs the hardest ``count`` batches that the budget allows, made up, and returns what each took. A collective.

    The hardest batches fill the budget with the longest samples. For each length this is the largest number of samples that
    fits, or one longer sample alone. Run it before an epoch to see at once if memory would run out. It cannot know which
    samples will share a step.

    Raises: JobError, on every rank, when one runs out of memory; UsageError when an argument is invalid; other errors that
    ``step`` raises. If only one rank raises those, the others raise JobError.
    """

    def read() -> tuple[set[int], tuple[int, int]]:
        own = {check_integer(length, "a length", 1) for length in lengths}
        return own, (check_integer(token_budget, "token_budget", 1), check_integer(count, "count", 1))

    parts, settings = zip(*gather_results(read, group), strict=True)
    if len({*settings}) > 1:
        raise UsageError("token_budget and count must be the same on all ranks")
    everywhere = set[int]().union(*parts)
    shapes = [(max(1, token_budget // length), length) for length in everywhere]
    shapes.sort(key=lambda shape: (shape[0] * shape[1], shape[1]), reverse=True)
    measure = _Measure(step, group)
    for samples, length in shapes[:count]:
        if measure(samples, length).peak_bytes is None:
            raise JobError(
                f"a batch of {samples} samples of {length} tokens, which token_budget={token_budget} allows, does not fit: "
                f"{name_rank(measure.rank_without or 0, group)} ran out of memory",
                measure.rank_without,
                "out of memory",
            )
    return tuple(measure.points)


class _Measure:
    """Measures steps on all ranks at once."""

    def __init__(self, step: Step, group: dist.ProcessGroup | None) -> None:
        self.points: list[MemoryPoint] = []
        self.rank_without: int | None = None
        """The first rank that ran out of memory in the last step, or None."""
        self._step = step
        self._group = group

    def __call__(self, samples: int, length: int) -> MemoryPoint:
        peaks = gather_results(lambda: self._measure_own(samples, length), self._group)
        self.rank_without = peaks.index(None) if None in peaks else None
        peak = max(peak for peak in peaks if peak is not None) if self.rank_without is None else None
        found = MemoryPoint(samples=samples, length=length, peak_bytes=peak)
        self.points.append(found)
        return found

    def _measure_own(self, samples: int, length: int) -> int | None:
        """Returns the peak on this rank, or None if it ran out of memory."""
        try:
            return measure_peak(lambda: self._step(samples, length))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # here the error no longer holds its frames, which hold tensors
        return None


def _probe(measure: _Measure, length: int, allowed_bytes: float, growth: float) -> list[MemoryPoint]:
    """Measures steps with samples of one length. The largest that fits is as large as possible."""
    found = [measure(1, length)]
    if not _fits(found[0], allowed_bytes):
        peak = found[0].peak_bytes
        takes = "runs out of memory" if peak is None else f"takes {_show(peak)}"
        raise UsageError(f"a batch of one sample of {length} tokens {takes}, and {_show(allowed_bytes)} are allowed")
    good, bad = 1, 0
    while True:
        wanted = max(good + 1, int(good * growth))
        measured = [point for point in found if point.peak_bytes is not None]
        if len(measured) > 1:
            base, slope = _fit_line(found)
            wanted = min(wanted, int((allowed_bytes - base) / slope / length))
        if bad:
            # A step that ran out of memory adds no point to the line.
            wanted = min(wanted, bad - 1 if found[-1].peak_bytes is not None else (good + bad) // 2)
        if wanted <= good:
            return found
        found.append(measure(wanted, length))
        if _fits(found[-1], allowed_bytes):
            good = wanted
        else:
            bad = wanted


def _fits(point: MemoryPoint, allowed_bytes: float) -> bool:
    return point.peak_bytes is not None and point.peak_bytes <= allowed_bytes


def _fit_line(points: Sequence[MemoryPoint]) -> tuple[float, float]:
    """Returns base and slope of the line. Raises: UsageError when memory does not grow with the batch."""
    measured = [(point.tokens, point.peak_bytes) for point in points if point.peak_bytes is not None]
    if len(measured) == 1:
        return 0.0, measured[0][1] / measured[0][0]
    slope, base = linear_regression(*zip(*measured, strict=True))
    if slope <= 0:
        raise UsageError(
            "more samples do not take more memory: step(samples, length) must run a whole training step on them"
        )
    return base, slope
