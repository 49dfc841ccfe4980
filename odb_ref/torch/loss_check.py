"""Tries whether a loss is the mean that the weights assume, on a few samples: in one batch, and in two.

A weight makes the mean over an update from the means of its batches. No weight can do that for a loss that compares the samples
of a batch, is a sum, divides by anything but what was counted, or depends on padding. The gradients of some parameters tell,
also for a model that has not learned anything: its losses are nearly the same for all samples. Spec: R4.7. Preserves: WEIGHT.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Sample
from odb_ref.torch.plan.order import Order
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.seeding import isolate

_COUNT: Final = 8
"""How many samples are tried."""
_MOST_VALUES: Final = 2**20
"""How many values of a gradient are compared, except in a parameter that has more."""
_SHARE: Final = 0.02
_SHARE_IN_HALF: Final = 0.1
"""A difference above this share of a gradient is not one of rounding, in single and in half precision."""
_REFUSED_SHARE: Final = 0.1
"""If the losses differ by more, the loss compares samples, or divides by something else. If only the gradients do, padding may
be the cause, which plain training bears too, so that is only warned of."""
_FACTOR: Final = 2.0**10
"""Keeps small gradients from becoming 0 in half precision."""

_ADVICE: Final = (
    "If it compares samples (in-batch negatives), it needs fixed batches: train with a plain loader. If it divides by "
    "something else (class weights, boxes, rows), divide by what supervised_fn= counts. If padding changes it, mask the "
    "padding, or pad samples to one length when they are read"
)

Pair = tuple[Measured, object]


class _Tried(NamedTuple):
    """What was found for a batch."""

    samples: int
    supervised: int
    loss: float
    gradient: Tensor
    """The gradient of some parameters, or the loss if there is none, as a vector in double precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """Compares the gradient of a batch with those of its two halves. The same on every rank that reads the same data set."""

    order: Order
    spec: PipelineSpec
    weighting: Weighting
    config: Config

    def run(self, compute: Callable[[object], Tensor]) -> bool:
        """Returns whether the loss could be tried: not for a stream, without weights, or if it is random or raises an error.

        ``compute`` returns the loss of a batch. If it has no gradient, losses are compared. No parameter's ``grad`` is changed,
        and the process's random generators are left as they were.

        Raises: UsageError when the weighted gradients of the halves are not that of all samples together.
        """
        if self.order.is_iterable or self.weighting.scaling is LossScaling.NONE:
            return False
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        for is_graded in dict.fromkeys((torch.is_grad_enabled(), False)):
            try:
                with isolate(), torch.random.fork_rng(devices), torch.set_grad_enabled(is_graded):
                    return self._compare(compute)
            except UsageError:
                raise
            except Exception:  # training raises it again, if it is not for lack of what only training provides
                continue
        return False

    def _compare(self, compute: Callable[[object], Tensor]) -> bool:
        found = self._read()
        if len(found) < 2:
            return False
        loss = compute(self._make(found))
        chosen, is_wide = _choose_parameters(loss)
        least = _SHARE if is_wide else _SHARE_IN_HALF

        def note(part: list[Pair], loss: Tensor) -> _Tried:
            supervised = sum(one.supervised for one, _ in part)
            return _Tried(len(part), supervised, float(loss.detach()), _compute_gradient(loss, chosen))

        def attempt(part: list[Pair]) -> _Tried:
            return note(part, compute(self._make(part)))

        whole, again = note(found, loss), attempt(found)
        halves = [(attempt(first), attempt(second)) for first, second in _halve(found)]
        scale = max(float(one.gradient.norm()) for one in (whole, *(one for pair in halves for one in pair)))
        if not 0 < scale < math.inf or float((whole.gradient - again.gradient).norm()) > 0.1 * least * scale:
            return False
        said = [self._judge(whole, first, second, scale, least) for first, second in halves]
        if text := next(filter(None, said), ""):
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return True

    def _read(self) -> list[Pair]:
        """Returns some samples, as measured and as they are, shortest first. All fit into one batch."""
        dataset = cast(list[object], self.order.dataset)  # or anything with a length and numbered samples
        total = len(dataset)
        found: list[Pair] = []
        # Neighbours too: a data set that lists its classes in turn would show one of them.
        apart = [number * total // (_COUNT // 2) for number in range(_COUNT // 2)]
        for place in sorted({place + more for place in apart for more in (0, 1) if place + more < total}):
            sample = dataset[place]
            (measured,) = self.spec.measure([copy.deepcopy(sample)])
            # The mean loss of a batch without a supervised token is not a number.
            if isinstance(measured, Measured) and (measured.supervised or not self.weighting.needs_supervised):
                found.append((measured, sample))
        found.sort(key=lambda pair: pair[0].length)
        while len(found) > 1 and self._count_groups(found) > 1:
            found.pop()
        return found

    def _count_groups(self, found: list[Pair]) -> int:
        samples = [Sample(number, number, one.length, 0, one.costs) for number, (one, _) in enumerate(found)]
        config = self.config
        groups = config.order.compute_groups(
            samples, config.layout, config.budget_tokens, config.limits, sizes=config.sizes
        )
        return len(groups)

    def _make(self, part: list[Pair]) -> object:
        """Returns a batch. Raises: LabelError, which the loader itself raises again, and what ``collate_fn`` raises."""
        samples = copy.deepcopy([sample for _, sample in part])
        if self.spec.label_check is None:
            return self.spec.collate_fn(samples)
        counted = sum(one.supervised for one, _ in part)
        return self.spec.label_check.collate(self.spec.collate_fn, samples, counted, lambda text: None)

    def _judge(self, whole: _Tried, first: _Tried, second: _Tried, scale: float, least: float) -> str:
        """Returns what to warn of, or an empty string. Raises: UsageError when the loss differs, or a setting is right."""
        is_sum, is_each = self.weighting.reduction is LossReduction.SUM, self.weighting.scaling is LossScaling.SAMPLES
        pair = first, second
        expected = _combine(pair, is_sum=is_sum, is_each=is_each)

        def differs(other: Tensor) -> bool:
            return float((whole.gradient - other).norm()) > least * scale

        if not differs(expected.gradient):
            return ""
        said = (
            f"the gradient of {whole.samples} samples in one batch differs from that of two batches (by "
            f"{float((whole.gradient - expected.gradient).norm()) / scale:.0%}; the losses: {whole.loss:.5g}, and "
            f"{first.loss:.5g} with {second.loss:.5g}), so it depends on how an update is divided"
        )
        way = second.gradient - first.gradient
        share = float((whole.gradient - first.gradient) @ way) / max(float(way @ way), 1e-300)
        if is_each and not is_sum and 0 < share < 1 and not differs(first.gradient + share * way):
            return (
                f"{said}. The loss is not a mean over samples, so the weights are only near, as for a mean over tokens"
            )
        if not differs(_combine(pair, is_sum=True, is_each=False).gradient):
            raise UsageError(f"{said}. The loss is a sum: pass Loss(reduction='sum'), or return the mean")
        if not differs(_combine(pair, is_sum=False, is_each=True).gradient):
            raise UsageError(f"{said}. The loss is a mean over samples: pass Loss(scaling='samples')")
        if abs(whole.loss - expected.loss) > _REFUSED_SHARE * max(abs(whole.loss), abs(expected.loss)):
            raise UsageError(f"{said}. {_ADVICE}")
        return f"{said}. {_ADVICE}"


def _halve(found: list[Pair]) -> list[tuple[list[Pair], list[Pair]]]:
    """Returns the samples in halves: the shorter and the longer ones, every second one, and the outer and the inner ones."""
    half, quarter = len(found) // 2, len(found) // 4
    outer, inner = found[:quarter] + found[quarter + half :], found[quarter : quarter + half]
    return [(found[:half], found[half:]), (found[::2], found[1::2]), (outer, inner)]


def _combine(pair: tuple[_Tried, _Tried], *, is_sum: bool, is_each: bool) -> _Tried:
    """Returns what one batch of both would give if its loss were a sum, or a mean over samples or supervised tokens."""
    counts = [part.samples if is_each else part.supervised for part in pair]
    one, two = (1.0, 1.0) if is_sum else (count / sum(counts) for count in counts)
    first, second = pair
    return _Tried(
        first.samples + second.samples,
        first.supervised + second.supervised,
        one * first.loss + two * second.loss,
        one * first.gradient + two * second.gradient,
    )


def _walk(loss: Tensor) -> Iterator[Node]:
    """Yields each node of a loss's graph once."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
        yield node


def find_parameters(loss: Tensor) -> list[nn.Parameter]:
    """Returns the parameters that a loss trains, each once."""
    leaves = (getattr(node, "variable", None) for node in _walk(loss))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Parameter)}.values())


def _choose_parameters(loss: Tensor) -> tuple[list[nn.Parameter], bool]:
    """Returns those parameters that have the fewest values, and whether all is computed at least in single precision."""
    chosen, values, wide = list[nn.Parameter](), 0, (torch.float32, torch.float64)
    found = sorted(find_parameters(loss), key=lambda parameter: parameter.numel())
    for parameter in found:
        values += parameter.numel()
        if not chosen or values <= _MOST_VALUES:
            chosen.append(parameter)
    casts = any("ToCopy" in type(node).__name__ for node in _walk(loss))  # also those of an autocast
    return chosen, not casts and all(parameter.dtype in wide for parameter in found)


def _compute_gradient(loss: Tensor, chosen: Sequence[nn.Parameter]) -> Tensor:
    if not chosen:
        return loss.detach().reshape(1).cpu().double()
    found = torch.autograd.grad(loss * _FACTOR, chosen, allow_unused=True)
    rows = [one.new_zeros(one.shape) if own is None else own for one, own in zip(chosen, found, strict=True)]
    return torch.cat([row.detach().flatten().cpu().double() for row in rows])
