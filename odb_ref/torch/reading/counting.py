"""How a loader counts its samples: lengths, tokens that carry loss, further costs; and what ranks can compare of it."""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.torch.reading.costs import Resources
from odb_ref.torch.reading.labels import LabelCheck
from odb_ref.torch.reading.measure import LengthFn, Measure, SupervisedCounter, get_length
from odb_ref.torch.reading.quarantine import MeasureFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """What the functions of the user, or those in their place, come to."""

    measure: MeasureFn
    label_check: LabelCheck | None
    """None where no weight depends on it, or only the user knows what carries loss."""
    settings: dict[str, object]
    """What all ranks must have in common: functions cannot be compared, but whether there is one can."""


def make_counting(
    length_fn: LengthFn | None,
    supervised_fn: LengthFn | None,
    *,
    causal_shift: bool,
    resources: Resources,
    is_checked: bool,
    is_packing: bool,
) -> Counting:
    """Returns what the options of the loader say. ``is_checked`` when weights depend on what carries loss, ``is_packing``
    when samples go on to another process.
    """
    settings: dict[str, object] = {
        "length_fn": "default" if length_fn is None else "given",
        "supervised_fn": "default" if supervised_fn is None else "given",
        "cost_fn": "none" if resources.cost_fn is None else "given",
    }
    if supervised_fn is None:
        settings["causal_shift"] = causal_shift
    length = length_fn or get_length
    supervised = supervised_fn or SupervisedCounter(length, causal_shift)
    return Counting(
        measure=resources.make_measure(Measure(length, supervised, is_packing=is_packing)),
        label_check=LabelCheck(causal_shift) if is_checked and supervised_fn is None else None,
        settings=settings,
    )
