"""Tries whether a loss is the mean that the weights assume, on a few samples: in one batch, and in two.

A weight makes the mean over an update from the means of its batches. No weight can do that for a loss that compares the samples
of a batch, is a sum, divides by anything but what was counted, or depends on padding. Spec: R4.7. Preserves: WEIGHT.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import torch

from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Sample
from odb_ref.torch.plan.order import Order
from odb_ref.torch.reading.collator import CollateFn
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.quarantine import MeasureFn
from odb_ref.torch.reading.seeding import isolate

_COUNT: Final = 8
"""How many samples are tried."""
_SHARE: Final = 0.05
_LEAST: Final = 0.01
"""A difference above this share of the loss, plus this number, is not one of rounding, even in half precision."""

_ADVICE: Final = (
    "If it compares samples (in-batch negatives), it needs fixed batches: train with a plain loader. If it divides by "
    "something else (class weights, boxes, rows), divide by what supervised_fn= counts. If padding changes it, mask the "
    "padding, or pad samples to one length when they are read"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """Compares the loss of a batch with those of its two halves. The same on every rank that reads the same data set."""

    order: Order
    measure: MeasureFn
    collate: CollateFn
    weighting: Weighting
    config: Config

    def run(self, compute: Callable[[object], torch.Tensor]) -> bool:
        """Returns whether the loss could be tried: not for a stream, without weights, or if it is random or raises an error.

        ``compute`` returns the loss of a batch. The process's random generators are left as they were.

        Raises: UsageError when the weighted losses of the halves are not that of all samples together.
        """
        if self.order.is_iterable or self.weighting.scaling is LossScaling.NONE:
            return False
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        try:
            with isolate(), torch.random.fork_rng(devices), torch.no_grad():
                found = self._read()
                half = len(found) // 2
                parts = (found, found, found[:half], found[half:]) if half else ()
                losses = [float(compute(self.collate(copy.deepcopy([sample for _, sample in part])))) for part in parts]
        except Exception:  # whatever it is, training will raise it too, or the loss needs what only training provides
            return False
        if not losses or not all(map(math.isfinite, losses)) or _differ(losses[0], losses[1], 0.01):
            return False
        first, second = (sum(one.supervised for one, _ in part) for part in parts[2:])
        self._judge(losses[0], losses[2:], (first, second), (half, len(found) - half))
        return True

    def _read(self) -> list[tuple[Measured, object]]:
        """Returns some samples, as measured and as they are, shortest first. All fit into one batch."""
        dataset = cast(list[object], self.order.dataset)  # or anything with a length and numbered samples
        total = len(dataset)
        found: list[tuple[Measured, object]] = []
        for place in sorted({number * total // _COUNT for number in range(_COUNT)}):
            sample = dataset[place]
            (measured,) = self.measure([copy.deepcopy(sample)])
            # The mean loss of a batch without a supervised token is not a number.
            if isinstance(measured, Measured) and (measured.supervised or not self.weighting.needs_supervised):
                found.append((measured, sample))
        found.sort(key=lambda pair: pair[0].length)
        while found:
            group = [Sample(number, number, one.length, 0, one.costs) for number, (one, _) in enumerate(found)]
            used = zip(*(one.costs for one, _ in found), strict=True)
            is_within = all(sum(amounts) <= limit for amounts, limit in zip(used, self.config.limits, strict=True))
            if is_within and self.config.layout.compute_tokens(tuple(group)) <= self.config.budget_tokens:
                break
            found.pop()
        return found

    def _judge(self, whole: float, halves: list[float], supervised: tuple[int, int], samples: tuple[int, int]) -> None:
        is_exact, total = self.weighting.scaling is LossScaling.EXACT, sum(halves)
        expected = total
        if self.weighting.reduction is LossReduction.MEAN:
            expected = _average(halves, supervised if is_exact else samples)
        if not _differ(whole, expected, _SHARE):
            return
        said = (
            f"the loss of {sum(samples)} samples is {whole:.5g} in one batch, but {expected:.5g} if it is put together from "
            f"those of their halves ({halves[0]:.5g} and {halves[1]:.5g}), so it depends on how an update is divided"
        )
        # A mean over the tokens of all samples, for example, which are not counted.
        is_near = min(halves) < whole < max(halves)
        if self.weighting.scaling is LossScaling.SAMPLES and is_near:
            what = (
                "It is not a mean over samples, or padding changes it: the gradient is then only near that of one batch"
            )
            warnings.warn(f"{said}. {what}", RuntimeWarning, stacklevel=4)
            return
        if not _differ(whole, total, 0.01):
            advice = "It is a sum: pass Loss(reduction='sum'), or return the mean"
        elif not _differ(whole, _average(halves, samples), 0.01):
            advice = "It is a mean over samples: pass Loss(scaling='samples')"
        else:
            advice = _ADVICE
        raise UsageError(f"{said}. {advice}")


def _average(values: list[float], weights: tuple[int, int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1, sum(weights))


def _differ(one: float, other: float, share: float) -> bool:
    return abs(one - other) > share * max(abs(one), abs(other)) + (_LEAST if share == _SHARE else 0)
