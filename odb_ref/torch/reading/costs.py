"""Measures costs of a sample beside its tokens: patches, or the results of a ``cost_fn``. Runs where samples are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from odb_ref.core.errors import UsageError, check_integer
from odb_ref.torch.reading.tasks import SampleError, check_measure, get_field

CostFn = Callable[[object], Sequence[int]]


def _to_list(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def _count_grid(grid: object, name: str) -> int:
    values = _to_list(grid)
    match [_to_list(value) for value in values] if isinstance(values, list | tuple) else values:
        case [int(frames), int(height), int(width)]:
            return frames * height * width
        case [*rows] if all(isinstance(row, list | tuple) for row in rows):
            return sum(_count_grid(row, name) for row in rows)
        case _:
            raise SampleError(f"{name} is {values!r}, expected rows of three integers")


def _count_pixels(pixels: object, name: str) -> int:
    shape = getattr(pixels, "shape", None)
    if isinstance(shape, Sequence) and shape:
        return int(shape[0])
    if isinstance(pixels, Sequence) and not isinstance(pixels, str):
        return len(pixels)
    raise SampleError(f"{name} is {type(pixels).__name__}, expected a tensor, an array or a sequence")


def count_patches(sample: object) -> int:
    """Returns the number of patches in a sample's images and videos: the sum over the rows of ``image_grid_thw`` and
    ``video_grid_thw`` of their products. A kind without its field counts by the first dimension of ``pixel_values`` or
    ``pixel_values_videos``, or else as 0.

    Raises: SampleError when a field has an unknown format.
    """
    patches = 0
    for grid_name, pixels_name in (("image_grid_thw", "pixel_values"), ("video_grid_thw", "pixel_values_videos")):
        grid, pixels = get_field(sample, grid_name), get_field(sample, pixels_name)
        if grid is not None:
            patches += _count_grid(grid, grid_name)
        elif pixels is not None:
            patches += _count_pixels(pixels, pixels_name)
    return patches


def _count_patches_only(sample: object) -> tuple[int]:
    return (count_patches(sample),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a batch beside its tokens: their ``limits``, and their ``names`` in metrics."""

    cost_fn: CostFn | None = None
    limits: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def measure(self, sample: object) -> tuple[int, ...]:
        """Returns what a sample uses of each resource. Raises: SampleError when that is invalid."""
        costs = () if self.cost_fn is None else _to_list(self.cost_fn(sample))
        if not isinstance(costs, list | tuple) or len(costs) != len(self.limits):
            raise SampleError(f"cost_fn returned {costs!r}, expected {len(self.limits)} integers")
        return tuple([check_measure(cost, "a cost that cost_fn returned", 0) for cost in costs])


def make_resources(max_patches: int | None, cost_fn: CostFn | None, limits: Sequence[int]) -> Resources:
    """Combines the three options of the loader.

    Raises: UsageError when they exclude each other or the limits are not positive integers.
    """
    if not isinstance(limits, Iterable):
        raise UsageError(f"limits must be a sequence of integers, got {limits!r}")
    limits = tuple(limits)
    if max_patches is not None:
        if cost_fn is not None or limits:
            raise UsageError(
                "max_patches and cost_fn with limits exclude each other: let cost_fn count the patches too"
            )
        return Resources(
            cost_fn=_count_patches_only, limits=(check_integer(max_patches, "max_patches", 1),), names=("patches",)
        )
    if (cost_fn is None) != (not limits):
        raise UsageError("cost_fn and limits must be given together: cost_fn returns one amount for each limit")
    checked = tuple(check_integer(limit, f"limits[{index}]", 1) for index, limit in enumerate(limits))
    return Resources(cost_fn=cost_fn, limits=checked, names=tuple(f"cost_{index}" for index in range(len(checked))))
