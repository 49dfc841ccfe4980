"""About how many steps an epoch takes, from the lengths of some of its samples: for schedules and progress bars only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """What one rank has measured: lengths with further costs, and the samples they stand for."""

    sizes: tuple[tuple[int, tuple[int, ...]], ...]
    samples: float


def measure_some(order: Order, measure: MeasureFn, rank: int, world_size: int, count: int) -> Reading:
    """Reads about ``count`` samples, spread over the data set, of which each rank of a shared one reads its part.

    What cannot be read is left out: the loader will say so in its own way. Nobody else's drawing is disturbed. Spec: R12.2.

    Raises: UsageError when the data set has no length, or is read in an order of the caller's.
    """
    if order.is_iterable or order.sampler is not None:
        raise UsageError("the steps of an epoch are estimated for map-style data sets without your own sampler")
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
                sizes.append((found.length, tuple(getattr(found, "costs", ()))))
    return Reading(sizes=tuple(sizes), samples=total / world_size if order.is_auto else total)


def compute_steps(readings: Sequence[Reading], config: Config, *, is_shared: bool) -> float | None:
    """Returns about how many steps the longest rank's samples make, grouped in windows; None when nothing was measured."""
    if is_shared:
        sizes = tuple(size for reading in readings for size in reading.sizes)
        readings = [Reading(sizes=sizes, samples=readings[0].samples)]
    steps = [_compute_groups_of(reading, config) for reading in readings if reading.sizes and reading.samples]
    return max(steps, default=None)


def _compute_groups_of(reading: Reading, config: Config) -> float:
    # A whole window, since a larger one makes fuller groups: what was measured stands for its like.
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
    """Returns about how many steps an epoch takes, the same on every rank; a collective of all ranks.

    Raises: UsageError as `measure_some`, when ``count`` is not a number of samples, and when none could be measured.
    """
    count = check_integer(count, "samples", 1)
    own = measure_some(order, measure, config.rank, config.world_size, count)
    readings = gather(own)
    steps = compute_steps(readings, config, is_shared=order.is_auto)
    if steps is None:
        raise UsageError("the steps of an epoch cannot be estimated: not one of the samples tried could be measured")
    return max(1, round(steps))
