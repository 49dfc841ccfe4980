"""Budgets over several resources: what a sample costs, and that no batch of several samples exceeds any limit. Batches with
friendly numbers of samples, or of similar cost.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_ref.torch import count_patches
from odb_ref.torch.reading.tasks import SampleError
from odb_ref.trace.check import Property, Status, check_traces
from tests.torch import data
from tests.torch.data import Numbers, check_goes_on, list_numbers, make_sample, read_numbers, save, take
from tests.torch.ranks import get_values, run_each
from tests.torch.states import check_fails

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


PICTURES = [
    make_sample(number) | ({"pixel_values": torch.zeros(patches, 2)} if patches else {})
    for number, patches in enumerate(map(compute_patches, range(COUNT)))
]
"""Samples of which two in three have an image."""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_batch_of_several_samples_exceeds_the_patches(num_workers: int) -> None:
    """Checks: BUDGET, COVER."""
    with make_loader(PICTURES, max_patches=45, num_workers=num_workers) as loader:
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
    with make_loader(PICTURES) as loader:
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
    with make_loader(PICTURES, cost_fn=count_two, limits=(9, 60), shuffle=True, **options) as loader:
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
    make = partial(make_loader, PICTURES, max_patches=45, shuffle=True)
    whole = check_goes_on(make, (7,))
    before, state = save(make(), 7)
    assert before == whole[:7]
    assert sorted(list_numbers(before) + take(make(max_patches=50, state=[state]))) == list(range(COUNT))


@pytest.mark.parametrize("costs", [7, (1,), (1, 2, 3), (1, -1), (1, 0.5), (True, 1), ("1", 1), None])
def test_nonsense_from_cost_fn_ends_the_epoch_with_its_cause(costs: object) -> None:
    loader = make_loader(Numbers(0, 9), cost_fn=lambda sample: costs, limits=(4, 4))
    check_fails(loader, r"rank 0 failed: SampleError: (a cost that )?cost_fn returned .*, expected")


@pytest.mark.filterwarnings("ignore::odb_ref.torch.BadSampleWarning")
def test_nonsense_from_cost_fn_may_be_set_aside() -> None:
    options = {"cost_fn": lambda sample: (-(sample["number"] == 4),), "limits": [3], "on_bad_sample": "quarantine"}
    with make_loader(Numbers(0, 9), **options) as loader:
        assert sorted(read_numbers(loader)) == [0, 1, 2, 3, 5, 6, 7, 8]
        assert [item.index for item in loader.quarantined] == [4]


# Friendly numbers of samples, and batches of similar cost --------------------------------------------------------------

SHARDS = (90, 37)
FRIENDLY = {
    "even": (0, 1, *range(2, 64, 2)),
    "threes": (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    "powers": (0, 1, 2, 4, 8, 16, 32),
}


def read_shard(rank: int, options: dict[str, Any]) -> list[list[int]]:
    """Returns what each batch holds."""
    settings = {"token_budget": 150, "window": 24, "shard": "given", "shuffle": True}
    with data.make_loader(Numbers(1000 * rank, SHARDS[rank]), **settings, **options) as loader:
        found = []
        for batch, info in loader.steps():
            assert info.is_idle == (info.local_samples == 0)
            found.append([] if info.is_idle else batch["numbers"])
        return found


def square(tokens: int) -> int:
    return tokens**2


Job = tuple[dict[str, Any], Property, Status]
"""The loader's options, and the checker's verdict on the traces."""
SOME: list[Job] = [
    ({"sizes": "even"}, Property.SIZES, Status.HOLDS),
    ({"sizes": "powers", "num_workers": 2}, Property.SIZES, Status.HOLDS),
    ({"cost": "attention/20"}, Property.ORDER, Status.HOLDS),
    ({"cost": square}, Property.ORDER, Status.NOT_APPLICABLE),  # a trace does not record which function it was
]
OTHERS: list[Job] = [
    ({"sizes": sizes, "num_workers": workers}, Property.SIZES, Status.HOLDS)
    for sizes, workers in (("even", 2), ("threes", 0), ("threes", 2), ("powers", 0))
]


@pytest.mark.parametrize("jobs", [SOME, pytest.param(OTHERS, marks=pytest.mark.deep)], ids=["some", "others"])
def test_every_batch_of_a_job_is_friendly_or_meets_others_of_its_cost(jobs: list[Job], tmp_path: Path) -> None:
    """Spec: R2.7, R2.8. Checks: SIZES, ORDER, COVER, ALIGN. Shards have unequal sizes, and there are idle steps."""
    cases = [options | {"trace": tmp_path / str(number) / "run.ndjson"} for number, (options, *_) in enumerate(jobs)]
    for case in cases:
        case["trace"].parent.mkdir()
    found = run_each(2, read_shard, [(case,) for case in cases], timeout_s=120)
    for (options, checked, status), case, results in zip(jobs, cases, found, strict=True):
        steps = get_values(results)
        assert len(steps[0]) == len(steps[1])
        counts = [len(numbers) for rank in steps for numbers in rank]
        assert set(counts) <= set(FRIENDLY.get(options.get("sizes", ""), counts)), options
        assert max(counts) > 3
        for rank, (own, samples) in enumerate(zip(steps, SHARDS, strict=True)):
            assert sorted(n for numbers in own for n in numbers) == list(range(1000 * rank, 1000 * rank + samples))
        verdict = check_traces(sorted(case["trace"].parent.iterdir()), is_replayed=status is Status.HOLDS)
        assert not verdict.violations
        assert verdict.jobs[0].get_status(checked) is status
