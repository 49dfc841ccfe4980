"""Random draws of samples and batches depend only on seed, epoch, rank and number, and affect no other generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from odb_ref.torch import ODBDataLoader
from odb_ref.torch.plan.order import compute_order
from tests.torch import data
from tests.torch.data import Augmented, AugmentedStream, Numbers, collate, draw, make_sample, read_numbers, take
from tests.torch.ranks import get_values, run_each, run_ranks

COUNT = 40


def collate_at_random(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return collate(samples) | {"samples": [sample["drawn"] for sample in samples], "batch": draw()}


Row = tuple[list[int], list[tuple[float, ...]], tuple[float, ...]]


def read(loader: ODBDataLoader, limit: int | None = None) -> list[Row]:
    rows: list[Row] = []
    for batch, _ in loader.steps():
        rows.append((batch["numbers"], batch["samples"], batch["batch"]))
        if len(rows) == limit:
            break
    return rows


make_loader = partial(data.make_loader, Augmented(0, COUNT), collate_fn=collate_at_random, window=10, shuffle=True)


def read_epochs(**options: Any) -> list[list[Row]]:
    with make_loader(**options) as loader:
        return [read(loader), read(loader)]


@pytest.fixture(scope="module")
def expected() -> list[list[Row]]:
    return read_epochs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 1},
        {"num_workers": 3},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.deep),
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 2, "on_bad_sample": "quarantine"},
        pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, marks=pytest.mark.deep),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_is_drawn_depends_on_no_worker_and_no_start_method(
    options: dict[str, Any], expected: list[list[Row]]
) -> None:
    """Spec: R12.1. Checks: REPLAY."""
    seed_by_time()
    assert read_epochs(**options) == expected


def seed_by_time() -> None:
    random.seed()
    np.random.seed()
    torch.seed()


def test_every_sample_and_every_batch_draws_its_own_numbers(expected: list[list[Row]]) -> None:
    """Spec: R12.1."""
    samples = [drawn for epoch in expected for _, of_samples, _ in epoch for drawn in of_samples]
    batches = [drawn for epoch in expected for _, _, drawn in epoch]
    for numbers in zip(*samples, *batches, strict=False):
        assert len(set(numbers)) == len(numbers)
    assert len({number for drawn in samples + batches for number in drawn}) == 3 * len(samples + batches)
    assert read_epochs(seed=1) != expected


def test_ranks_draw_different_numbers_those_of_idle_steps_too() -> None:
    """Spec: R12.1."""
    values = get_values(run_ranks(2, lambda rank: take(make_loader(num_workers=rank), read)))
    drawn = [drawn for value in values for _, _, drawn in value]
    assert len(set(drawn)) == len(drawn)


def test_what_is_read_for_idle_steps_draws_by_the_step() -> None:
    """Spec: R12.1. Checks: REPLAY. Rank 1 has no samples, and reads the data set's first for each idle step."""

    def read_without_samples(rank: int, num_workers: int) -> list[Row]:
        seed_by_time()
        sampler = [] if rank else range(COUNT)
        return take(make_loader(shuffle=False, sampler=sampler, num_workers=num_workers), read)

    first, second = map(get_values, run_each(2, read_without_samples, [(0,), (1,)]))
    assert first == second
    drawn = [drawn for _, of_samples, _ in first[1] for drawn in of_samples]
    assert len(set(drawn)) == len(drawn) > 1


@pytest.mark.parametrize(("num_workers", "limits"), [(0, (1, 9)), (2, (5,))])
def test_an_epoch_that_goes_on_draws_what_it_would_have_drawn(
    num_workers: int, limits: tuple[int, ...], expected: list[list[Row]]
) -> None:
    """Spec: R10.2, R12.1. Checks: REPLAY, RESUME."""
    for limit in limits:
        before, state = data.save(make_loader(num_workers=num_workers), limit, read)
        assert before + take(make_loader(num_workers=2 - num_workers, state=state), read) == expected[0]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_reading_in_the_trainers_process_leaves_its_generators_alone(kind: str) -> None:
    """Spec: R12, R12.2. Checks: REPLAY. Dropout, for example, is the same as without this loader."""

    def train(loader: ODBDataLoader | range) -> list[tuple[float, float, float]]:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        return [draw() for _ in loader]

    samples: Any = Augmented(0, COUNT) if kind == "map" else AugmentedStream(0, COUNT)
    with data.make_loader(samples, collate_fn=collate_at_random, shuffle=kind == "map") as loader:
        for _ in range(2):
            found = train(loader)
            assert found == train(range(len(found)))


def test_an_interrupt_in_user_code_leaves_the_generators_alone_too() -> None:
    """Spec: R12.2."""

    def draw_and_raise(index: int) -> None:
        draw()
        if index == 7:
            raise KeyboardInterrupt

    torch.manual_seed(7)
    torn = Numbers(0, COUNT, bad=range(8), fault=draw_and_raise)
    with data.make_loader(torn) as loader:
        batches = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            list(batches)
        found = torch.rand(())
    assert found == torch.rand((), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "persistent_workers": True}])
def test_a_stream_draws_the_same_in_the_same_epoch_of_as_many_workers(options: dict[str, Any]) -> None:
    """Spec: R12.1. Checks: REPLAY."""
    with data.make_loader(AugmentedStream(0, COUNT), collate_fn=collate_at_random, **options) as loader:
        epochs = [read(loader), read(loader)]
        loader.set_epoch(0)
        again = read(loader)
    assert epochs[0] == again != epochs[1]
    drawn = [numbers for epoch in epochs for _, of_samples, _ in epoch for numbers in of_samples]
    assert len(set(drawn)) == len(drawn)  # from any worker
    assert len({row[2] for epoch in epochs for row in epoch}) == sum(map(len, epochs))


class Named(IterableDataset[Any]):
    """Each worker yields what its name assigns to it."""

    parts: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker.dataset is self
        return map(make_sample, range(self.parts[worker.id], COUNT, len(self.parts)))


def share_out(worker_id: int) -> None:
    """The function shown in the documentation of IterableDataset."""
    data = get_worker_info().dataset
    assert type(data) is Named
    data.parts = (0, 1)


def test_a_worker_init_fn_finds_the_data_set_of_the_user() -> None:
    """Checks: COVER."""
    loader = data.make_loader(Named(), worker_init_fn=share_out, num_workers=2)
    assert sorted(take(loader)) == list(range(COUNT))


# The order of a shuffled epoch ------------------------------------------------------------------------------------------


def test_different_seeds_and_epochs_have_different_orders() -> None:
    """Spec: R12.4. This includes those with the same sum, product or last 32 bits."""
    seeds = (0, 1, 2, 7, -1, 1_000_003, 2_000_006, 2**31, 2**32, 2**32 + 1, 2**63, 2**63 + 1, 2**64 - 1, -(2**63))
    orders = {tuple(compute_order(30, seed, epoch)) for seed in seeds for epoch in range(20)}
    assert len(orders) == 20 * len(seeds)
    assert all(sorted(order) == list(range(30)) for order in orders)


def test_the_loader_reads_in_that_order() -> None:
    """Spec: R12.4."""
    for seed, epoch in ((0, 1), (1_000_003, 0), (5, 0), (5 + 2**32, 0)):
        with data.make_loader(shuffle=True, seed=seed, order="sampler") as loader:
            loader.set_epoch(epoch)
            assert read_numbers(loader) == list(compute_order(COUNT, seed, epoch))
