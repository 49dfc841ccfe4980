"""Budgets over several resources: what a sample costs, and that no batch of several samples exceeds any limit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_ref.torch import JobError, count_patches
from odb_ref.torch.reading.tasks import SampleError
from odb_ref.trace.check import check_traces
from tests.torch import data
from tests.torch.data import Numbers, check_goes_on, read_numbers
from tests.torch.data import read as read_steps
from tests.torch.ranks import get_values, run_each

make_loader = partial(data.make_loader, token_budget=120, window=16)
COUNT = 60


@pytest.mark.parametrize(
    ("sample", "patches"),
    [
        ({"input_ids": [1]}, 0),
        ({"pixel_values": None}, 0),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [2, 2, 2]]), "pixel_values": torch.ones(7, 3)}, 32),
        ({"image_grid_thw": torch.tensor([1, 4, 6])}, 24),
        ({"image_grid_thw": [(1, 2, 3)]}, 6),
        ({"image_grid_thw": [torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])]}, 7),
        ({"image_grid_thw": []}, 0),
        ({"image_grid_thw": [list(torch.tensor([1, 2, 3]).numpy())]}, 6),
        ({"video_grid_thw": torch.tensor([[4, 2, 2]]), "pixel_values": torch.ones(5, 3)}, 21),
        ({"pixel_values_videos": torch.ones(6, 3)}, 6),
        ({"pixel_values": torch.ones(5, 3, 2, 2)}, 5),
        ({"pixel_values": [[0.5], [0.5], [0.5]]}, 3),
        (SimpleNamespace(pixel_values=torch.ones(2, 3)), 2),
    ],
)
def test_patches_are_those_of_the_grid_or_the_first_dimension_of_the_pixels(sample: object, patches: int) -> None:
    assert count_patches(sample) == patches


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"image_grid_thw": [[1, 2]]}, "image_grid_thw is"),
        ({"image_grid_thw": 4}, "expected rows of three integers"),
        ({"image_grid_thw": [[1.5, 2, 3]]}, "image_grid_thw is"),
        ({"video_grid_thw": [[1, 2]]}, "video_grid_thw is"),
        ({"pixel_values": 7}, "pixel_values is int"),
        ({"pixel_values": "pixels"}, "pixel_values is str"),
    ],
)
def test_patches_of_an_unknown_kind_are_refused(sample: object, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        count_patches(sample)


def compute_patches(number: int) -> int:
    return 0 if number % 3 == 0 else number * 7 % 40 + 1


class Pictures(Numbers):
    """Samples of which two in three have an image."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        patches = compute_patches(sample["number"])
        if patches:
            sample["pixel_values"] = torch.zeros(patches, 2)
        return sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_batch_of_several_samples_exceeds_the_patches(num_workers: int) -> None:
    """Checks: BUDGET, COVER."""
    with make_loader(Pictures(0, COUNT), max_patches=45, num_workers=num_workers) as loader:
        numbers, sums = [], []
        for batch, info in loader.steps():
            patches = sum(map(compute_patches, batch["numbers"]))
            assert info.local_costs == info.global_costs == (patches,)
            assert len(batch["numbers"]) == 1 or (patches <= 45 and info.padded_tokens <= 120)
            numbers += batch["numbers"]
            sums.append(patches)
        metrics = loader.metrics()
    assert sorted(numbers) == list(range(COUNT))
    assert metrics["odb/patches"] == sum(sums) == sum(map(compute_patches, range(COUNT)))
    with make_loader(Pictures(0, COUNT)) as loader:
        unbound = [sum(map(compute_patches, batch["numbers"])) for batch in loader]
        assert "odb/patches" not in loader.metrics()
    assert max(unbound) > 45


def count_two(sample: dict[str, Any]) -> list[int]:
    """Counts as a cost_fn might, with one amount as a tensor and one as an int."""
    return [torch.tensor(sample["number"] % 5), compute_patches(sample["number"])]


Used = list[tuple[tuple[int, ...], tuple[int, ...]]]


def read(rank: int, options: dict[str, Any]) -> tuple[list[list[int]], int, Used]:
    """Returns the batches, a sum, and what each step uses on this rank and on all ranks."""
    rows, used = [], []
    with make_loader(Pictures(0, COUNT), cost_fn=count_two, limits=(9, 60), shuffle=True, **options) as loader:
        for batch, info in loader.steps():
            rows.append([] if info.is_idle else batch["numbers"])
            used.append((info.local_costs, info.global_costs))
            if info.is_idle:
                assert info.local_costs == (0, 0)
        return rows, loader.metrics()["odb/cost_0"], used


def test_several_limits_hold_on_every_rank_with_and_without_workers(tmp_path: Path) -> None:
    """Checks: BUDGET, COVER, REPLAY. The traces, which hold the costs, pass the checker."""
    variants: list[dict[str, Any]] = [{"trace": tmp_path / "run.ndjson"}, {"num_workers": 2}]
    found = [get_values(results) for results in run_each(2, read, [(options,) for options in variants])]
    assert found[0] == found[1]
    batches = [batch for rows, _, _ in found[0] for batch in rows]
    assert sorted(number for batch in batches for number in batch) == list(range(COUNT))
    for batch in batches:
        costs = [sum(number % 5 for number in batch), sum(map(compute_patches, batch))]
        assert len(batch) < 2 or (costs[0] <= 9 and costs[1] <= 60)
    assert sum(cost for _, cost, _ in found[0]) == sum(number % 5 for number in range(COUNT))
    for steps in zip(*(used for _, _, used in found[0]), strict=True):
        (total,) = {of_all for _, of_all in steps}
        assert total == tuple(map(sum, zip(*(own for own, _ in steps), strict=True)))
    verdict = check_traces(sorted(map(str, tmp_path.glob("*.ndjson"))))
    assert not verdict.violations


def test_an_epoch_with_limits_goes_on_identically() -> None:
    """Checks: RESUME."""
    make = partial(make_loader, Pictures(0, COUNT), max_patches=45, shuffle=True)
    whole = check_goes_on(make, (7,), read_steps)
    with make() as loader:
        assert read_steps(loader, 7) == whole[:7]
        state = loader.state_dict()
    with make(max_patches=50) as loader:
        loader.load_state_dict([state])
        after = read_steps(loader)
    assert sorted(number for _, numbers, _ in whole[:7] + after for number in numbers) == list(range(COUNT))


@pytest.mark.parametrize("costs", [7, (1,), (1, 2, 3), (1, -1), (1, 0.5), (True, 1), ("1", 1), None])
def test_nonsense_from_cost_fn_ends_the_epoch_with_its_cause(costs: object) -> None:
    with (
        make_loader(Numbers(0, 9), cost_fn=lambda sample: costs, limits=(4, 4)) as loader,
        pytest.raises(JobError, match=r"rank 0 failed: SampleError: (a cost that )?cost_fn returned .*, expected"),
    ):
        list(loader)


@pytest.mark.filterwarnings("ignore::odb_ref.torch.BadSampleWarning")
def test_nonsense_from_cost_fn_may_be_set_aside() -> None:
    options = {"cost_fn": lambda sample: (-(sample["number"] == 4),), "limits": [3], "on_bad_sample": "quarantine"}
    with make_loader(Numbers(0, 9), **options) as loader:
        assert sorted(read_numbers(loader)) == [0, 1, 2, 3, 5, 6, 7, 8]
        assert [item.index for item in loader.quarantined] == [4]
