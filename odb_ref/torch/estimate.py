"""Estimates the number of steps in an epoch from some samples' lengths, for schedules and progress bars only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.core.types import Sample
from odb_ref.torch.plan.order import Order
from odb_ref.torch.reading.measure import Measured
from odb_ref.torch.reading.quarantine import MeasureFn
from odb_ref.torch.reading.seeding import Use, compute_seed, isolate, seed_generators


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The measurements of one rank: lengths with further costs, and the number of samples they represent."""

    sizes: tuple[tuple[int, tuple[int, ...]], ...]
    samples: float


def measure_some(order: Order, measure: MeasureFn, rank: int, world_size: int, count: int) -> Reading:
    """Reads about ``count`` samples, spread over the data set. If the ranks share the data set, each reads its part of them.

    Skips samples that cannot be read; the loader will report them. Does not disturb the random generators. Spec: R12.2.

    Raises: UsageError when the data set is iterable, or has a sampler of the user's own, or no length.
    """
    if order.is_iterable or order.sampler is not None:
        raise UsageError(
            "the steps of an epoch can be estimated only for a map-style data set without a sampler of your own"
        )
    total = order.count_samples()
    places = [place * total // count for place in range(count)] if total > count else list(range(total))
    if order.is_auto:
        places = places[rank::world_size]
    sizes = []
    with isolate():
        for place in places:
            seed_generators(compute_seed(Use.SAMPLE, order.seed, place))
            try:
                (found,) = measure([order.dataset[place]])  # type: ignore[index]  # a map-style data set
            except Exception:
                continue
            if isinstance(found, Measured):
                sizes.append((found.length, found.costs))
    return Reading(sizes=tuple(sizes), samples=total / world_size if order.is_auto else total)


def _compute_groups_of(reading: Reading, config: Config) -> float:
    # Use a whole window, because larger windows make fuller groups. The measured samples are repeated to fill it.
    count = max(1, min(config.window_samples, round(reading.samples)))
    copies = -(-count // len(reading.sizes))
    sizes = (reading.sizes * copies)[:: max(1, len(reading.sizes) * copies // count)][:count]
    samples = [Sample(i, i, length, 0, costs) for i, (length, costs) in enumerate(sizes)]
    groups = config.order.compute_groups(
        samples, config.layout, config.budget_tokens, config.limits, sizes=config.sizes
    )
    return len(groups) * reading.samples / len(samples)


def estimate_steps(
    order: Order, measure: MeasureFn, config: Config, count: int, gather: Callable[[Reading], list[Reading]]
) -> int:
    """Estimates the number of steps in an epoch. The same on every rank; a collective of all ranks.

    Raises: UsageError like `measure_some`, when ``count`` is not a positive integer, and when no sample could be measured.
    """
    count = check_integer(count, "samples", 1)
    readings = gather(measure_some(order, measure, config.rank, config.world_size, count))
    if order.is_auto:  # each rank has read a part
        sizes = tuple(size for reading in readings for size in reading.sizes)
        readings = [Reading(sizes=sizes, samples=readings[0].samples)]
    steps = [_compute_groups_of(reading, config) for reading in readings if reading.sizes and reading.samples]
    if not steps:
        raise UsageError("the steps of an epoch cannot be estimated: none of the samples tried could be measured")
    return max(1, round(max(steps)))
