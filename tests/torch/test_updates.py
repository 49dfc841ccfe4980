"""Updates of a fixed number of samples make the run that plain training is, for any ranks and memory. Spec: R16."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler

from odb_ref.torch import ODBDataLoader
from odb_ref.torch.reading.source import CHUNK_SAMPLES
from tests.helpers.waiting import is_in_time
from tests.torch import data
from tests.torch.data import Numbers, collate, make_sample
from tests.torch.models import check_gradient, compute_loss, compute_union_gradient, get_gradient, make_model
from tests.torch.ranks import CAN_SHARD, check_errors, get_values, run_each, run_ranks
from tests.torch.states import check_refused

SAMPLES = 103
UPDATE = 16
make_updates = partial(data.make_loader, update_samples=UPDATE, shuffle=True)
WHOLE = Numbers(0, SAMPLES)


def read(rank: int, settings: dict[str, Any], epochs: int = 1, **faults: Any) -> list[dict[int, list[int]]]:
    """Returns the sample numbers of each update of each epoch on this rank."""
    found = []
    with make_updates(Numbers(0, SAMPLES, **faults), **settings) as loader:
        for _ in range(epochs):
            updates: dict[int, list[int]] = defaultdict(list)
            for batch, info in loader.steps():
                if not info.is_idle:
                    updates[info.update] += batch["numbers"]
            found.append(dict(updates))
    return found


def join(results: list[Any], epoch: int = 0) -> list[list[int]]:
    """Returns the updates of all ranks together, each sorted."""
    assert not any(result.error for result in results), results
    numbers = sorted({update for result in results for update in result.value[epoch]})
    assert numbers == list(range(len(numbers)))
    return [sorted(n for result in results for n in result.value[epoch].get(u, [])) for u in numbers]


def list_expected(epoch: int = 0) -> list[list[int]]:
    """Returns the updates of the common order, from the plain loader of one process in that order."""
    options = {"token_budget": 10**6, "window": 10**6, "ramp_rounds": 0, "order": "sampler"}
    with data.make_loader(WHOLE, shuffle=True, **options) as loader:
        loader.set_epoch(epoch)
        order = data.read_numbers(loader)
    return [sorted(order[first : first + UPDATE]) for first in range(0, SAMPLES, UPDATE)]


PLACED: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {},
        {"shard": "shared", "num_workers": 2, "token_budget": 30},
        {"budget_schedule": lambda step, current: 60 - step % 20},
    ],
    3: [{"num_workers": 1}, {"shard": "shared", "order": "sampler"}],
    4: [{"shard": "shared"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", PLACED)
def test_an_update_holds_its_places_whoever_reads_them(world_size: int) -> None:
    """Checks: UPDATE, COVER."""
    for results in run_each(world_size, read, [(settings, 2) for settings in PLACED[world_size]]):
        for epoch in range(2):
            assert join(results, epoch) == list_expected(epoch)


def add_means(rank: int, options: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """For each update, its samples on this rank, and what this rank adds to means over labels, all tokens and samples."""
    found, numbers, sums = [], list[int](), torch.zeros(3, dtype=torch.float64)
    with data.make_loader(token_budget=40, **options) as loader:
        for batch, info in loader.steps():
            values = torch.tensor(batch["numbers"], dtype=torch.float64)
            counts = torch.stack(count_units(batch))
            labels, tokens, samples = (values * counts).sum(1) / counts.sum(1).clamp(min=1)
            if options.get("scaling") == "samples":
                labels = labels * info.local_supervised * info.world_size / max(1, info.update_supervised)
                samples = info.scale(samples)
            else:
                labels = info.scale(labels)
                samples = samples * info.local_samples * info.world_size / info.update_samples
            tokens = tokens * info.local_tokens * info.world_size / info.update_tokens
            sums += torch.stack((labels, tokens, samples)) / info.world_size
            numbers += [] if info.is_idle else batch["numbers"]
            if info.is_update_end:
                found.append((numbers, sums.tolist()))
                numbers, sums = [], torch.zeros_like(sums)
    return found


def count_units(batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The labels of each sample, its tokens, and the sample itself."""
    labels = (batch["labels"][:, 1:] != -100).sum(1)
    return labels, (batch["input_ids"] != 0).sum(1), torch.ones_like(labels)


MEANS: list[dict[str, Any]] = [
    {"update_samples": 7},
    {"update_samples": 7, "layout": "packed", "shard": "shared"},
    {"update_samples": 7, "scaling": "samples"},
    {"window": 12, "accumulation_steps": 3},
    {"window": 12, "accumulation_steps": 3, "layout": "packed", "scaling": "samples"},
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_means_over_labels_tokens_and_samples_can_be_added(world_size: int) -> None:
    """Checks: WEIGHT. As docs/howto/frameworks/plain.md says, also in the last update, which is smaller."""
    for results in run_each(world_size, add_means, [(options,) for options in MEANS]):
        updates = list(zip(*get_values(results), strict=True))
        assert len(updates) > 2
        for update in updates:
            numbers = [number for part, _ in update for number in part]
            units = count_units(collate([make_sample(number) for number in numbers]))
            values = torch.tensor(numbers, dtype=torch.float64)
            expected = [float((values * unit).sum() / unit.sum().clamp(min=1)) for unit in units]
            assert [sum(sums) for sums in zip(*(sums for _, sums in update), strict=True)] == pytest.approx(
                expected, rel=1e-12
            )
        assert sorted(number for update in updates for part, _ in update for number in part) == list(range(40))


def train_on_two(rank: int) -> list[tuple[list[list[int]], list[float]]]:
    """For each update, its samples of two loaders on this rank, and the gradient."""
    model = DistributedDataParallel(make_model())
    found = []
    with make_updates(Numbers(0, 60)) as first, make_updates(Numbers(60, 30), update_samples=8) as second:
        parts = first.steps(), second.steps()
        assert len(first) == len(second)
        for _ in range(len(first)):
            numbers: list[list[int]] = [[], []]
            for steps, own in zip(parts, numbers, strict=True):
                for batch, info in steps:
                    own.extend([] if info.is_idle else batch["numbers"])
                    info.scale(compute_loss(model, batch)).backward()
                    if info.is_update_end:
                        break
            found.append((numbers, get_gradient(model)))
            model.zero_grad()
        assert [next(steps, None) for steps in parts] == [None, None]
    return found


def test_two_loaders_share_an_update() -> None:
    """Checks: WEIGHT, COVER. As docs/howto/frameworks/plain.md says: each is taken to the end of its own."""
    seen: list[int] = []
    for update in zip(*get_values(run_ranks(2, train_on_two)), strict=True):
        of_both = [[number for numbers, _ in update for number in numbers[i]] for i in range(2)]
        seen += [number for numbers in of_both for number in numbers]
        expected = sum(map(compute_union_gradient, of_both), torch.zeros(()))
        for _, gradient in update:
            check_gradient(gradient, expected)
    assert sorted(seen) == list(range(90))


def test_the_last_update_may_be_dropped() -> None:
    def read_dropping(rank: int, shard: str) -> list[dict[int, list[int]]]:
        with make_updates(WHOLE, shard=shard, drop_last=True) as loader:
            assert len(loader) == loader.updates_per_epoch == SAMPLES // UPDATE
        return read(rank, {"shard": shard, "drop_last": True})

    for results in run_each(2, read_dropping, [("auto",), ("shared",)]):
        assert join(results) == list_expected()[:-1]


def test_a_last_update_for_which_a_rank_has_nothing_is_not_counted_in_quota_mode() -> None:
    """Spec: R16.7."""

    def count_updates(rank: int, samples: int) -> tuple[int, int]:
        with make_updates(WHOLE, sampler=range(samples), shuffle=False, mode="quota") as loader:
            return len(loader), len({info.update for _, info in loader.steps()})

    results = run_each(2, count_updates, [(UPDATE,), (UPDATE + 1,), (UPDATE + 2,)])
    assert [get_values(own) for own in results] == [[(1, 1)] * 2, [(1, 1)] * 2, [(2, 2)] * 2]


def test_a_sample_set_aside_leaves_its_update_smaller() -> None:
    """No other sample is read in its place. Checks: UPDATE."""
    settings = {"on_bad_sample": "quarantine"}
    cases = [(settings | {"shard": shard, "num_workers": n},) for shard in ("auto", "shared") for n in (0, 1)]
    for results in run_each(2, partial(read, bad=41, fault="raise"), cases):
        assert join(results) == [[n for n in update if n != 41] for update in list_expected()]


def test_the_order_may_be_that_of_a_sampler_which_ranks_must_share() -> None:
    """Each sample comes once, whether or not the ranks are told to share the order that each of them lists."""

    def make_sampler(seed: int) -> RandomSampler:
        return RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(seed))

    def read_sampler(rank: int, kind: str) -> list[dict[int, list[int]]]:
        sampler = make_sampler(5 + (rank if kind == "different" else 0))
        return read(rank, {"sampler": sampler, "shard": "auto" if kind == "unsaid" else "shared", "shuffle": False})

    order = list(make_sampler(5))
    expected = [sorted(order[first : first + UPDATE]) for first in range(0, SAMPLES, UPDATE)]
    alone = run_each(1, read_sampler, [("random",), ("unsaid",)])
    *together, different = run_each(2, read_sampler, [("random",), ("unsaid",), ("different",)])
    for results in (*alone, *together):
        assert join(results) == expected
    check_errors(different, "sampler")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "of_replicas"), [(2, (None, 1)), (3, (None,)), (1, (1,))])
def test_the_order_may_be_that_of_distributed_sampler(ranks: int, of_replicas: tuple[int | None, ...]) -> None:
    """Its repeated samples are at the end, and its epoch is set. One with one replica is an order for any number of ranks."""

    def read_replicas(rank: int, settings: dict[str, Any], replicas: int | None) -> Any:
        """Returns the updates of two epochs, and the loader's number of updates."""
        sampler = DistributedSampler(range(SAMPLES), replicas, None if replicas is None else 0, seed=5)
        settings = settings | {"sampler": sampler, "shuffle": False}
        with make_updates(WHOLE, **settings) as loader:
            count = len(loader)
        return read(rank, settings, 2), count

    options: list[dict[str, Any]] = [{}, {"shard": "shared"}, {"drop_last": True}]
    cases = [(settings, replicas) for settings in options for replicas in of_replicas]
    for (settings, replicas), results in zip(cases, run_each(ranks, read_replicas, cases), strict=True):
        values = get_values(results)
        for epoch in range(2):
            count = replicas or ranks
            samplers = [DistributedSampler(range(SAMPLES), count, r, seed=5) for r in range(count)]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            order = [number for places in zip(*samplers, strict=True) for number in places]
            ends = range(UPDATE, len(order) + (1 if "drop_last" in settings else UPDATE), UPDATE)
            expected = [sorted(order[end - UPDATE : end]) for end in ends]
            found = [sorted(n for v, _ in values for n in v[epoch].get(u, [])) for u in range(len(expected))]
            assert found == expected, (settings, replicas)
            seen = set().union(*(v[epoch] for v, _ in values))
            assert {said for _, said in values} == {len(expected)} == {len(seen)}


class Counted(Numbers):
    """Counts how often it is read, in any process."""

    def __init__(self, count: int) -> None:
        super().__init__(0, count)
        self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "ahead"), [("auto", UPDATE // 2), ("shared", -(-2 * UPDATE // 3))])
def test_a_part_of_an_update_is_read_ahead_while_two_are_held(shard: str, ahead: int) -> None:
    """Spec: R16.4. This is its first portion if samples are dealt, so no worker idles during a long step. No more is read."""
    samples = Counted(SAMPLES)
    settings: dict[str, Any] = {"shuffle": False, "num_workers": 1, "prefetch_factor": 1, "depth": 1}
    with make_updates(samples, shard=shard, **settings) as loader:
        steps = loader.steps()
        next(steps)
        expected = 2 * UPDATE + ahead
        is_in_time(lambda: int(samples.reads.sum()) >= expected, 20)
        time.sleep(0.2)
        found = int(samples.reads.sum())
        assert expected <= found <= expected + (0 if shard == "shared" else 3 * CHUNK_SAMPLES)
        for _ in steps:
            pass
    assert samples.reads.tolist() == [1] * SAMPLES


def test_a_first_step_waits_for_one_sample_more_than_its_update() -> None:
    """However many fast samples are read at once by then."""
    samples = Counted(SAMPLES)
    with make_updates(samples) as loader:
        for _ in loader.steps():
            pass
        next(loader.steps())
    assert int(samples.reads.sum()) == SAMPLES + UPDATE + 1


# State --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["auto", "shared"])
def test_what_is_saved_between_updates_is_a_few_numbers(shard: str) -> None:
    """Spec: R16.6. This holds for any number of samples in an update, and for any that are set aside."""
    options = {"update_samples": 48, "shard": shard, "on_bad_sample": "quarantine"}
    sizes = []
    with make_updates(Numbers(0, SAMPLES, bad=41, fault="raise"), **options) as loader:
        for _, info in loader.steps():
            sizes.append((info.is_update_end, len(str(loader.state_dict()))))
    between = [size for is_end, size in sizes if is_end][:-1]  # after the last update the next epoch begins
    assert len(between) == 2
    assert max(between) - min(between) <= 4  # their numbers may differ in digits
    assert max(between) < min(size for is_end, size in sizes if not is_end)


def test_another_size_of_updates_cannot_go_on() -> None:
    _, state = data.save(make_updates(WHOLE), 1)
    check_refused(make_updates(WHOLE, update_samples=8, state=state), "update_samples: saved 16, now 8")


# Training -----------------------------------------------------------------------------------------------------------------


def pack(samples: list[Any]) -> Any:
    """Makes one row without padding. The first label of a sample is not predicted."""
    labels = [torch.cat([torch.tensor([-100]), s["labels"][1:]]) for s in samples]
    return {"input_ids": torch.cat([s["input_ids"] for s in samples])[None], "labels": torch.cat(labels)[None]}


TRAINED, EPOCHS = 58, 3
UPDATES = -(-TRAINED // UPDATE)
RESUMED = UPDATES + 2


def get_weights(model: Any) -> list[float]:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(value) for parameter in full for value in parameter.detach().flatten()]


@pytest.fixture(scope="module")
def plain() -> list[list[float]]:
    """Trains in one process with fixed updates of the common order, with the mean over an update's supervised tokens."""
    samples, model = Numbers(0, TRAINED), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights = []
    for epoch in range(EPOCHS):
        sampler = DistributedSampler(samples, 1, 0, seed=7)
        sampler.set_epoch(epoch)
        order = list(sampler)
        for first in range(0, TRAINED, UPDATE):
            update = [samples[i] for i in order[first : first + UPDATE]]
            count = sum(int((s["labels"][1:] != -100).sum()) for s in update)
            for start in range(0, len(update), 4):  # gradient accumulation
                (compute_loss(model, collate(update[start : start + 4]), "sum") / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(get_weights(model))
    return weights


class SeededOrder(DistributedSampler[Any]):
    """The order of a `DistributedSampler`, on every rank."""


def make_loader(sampler: type[DistributedSampler[Any]], **settings: Any) -> ODBDataLoader:
    samples = Numbers(0, TRAINED)
    options = {"token_budget": 64, "loss_reduction": "sum", "shard": "shared"} | settings
    return data.make_loader(samples, sampler=sampler(samples, 1, 0, seed=7), update_samples=UPDATE, **options)


def train(loader: ODBDataLoader, model: Any, optimizer: Any, updates: int) -> list[list[float]]:
    """Runs ``updates`` updates, and returns the weights after each."""
    weights: list[list[float]] = []
    while True:
        for batch, info in loader.steps():
            info.scale(compute_loss(model, batch, "sum")).backward()
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()
                weights.append(get_weights(model))
                if len(weights) == updates:
                    return weights


def train_ours(rank: int, settings: dict[str, Any], fsdp: bool = False) -> list[list[float]]:
    model: Any = fully_shard(make_model()) if fsdp else DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights: list[list[float]] = []
    state: Any = None
    for updates in (RESUMED, EPOCHS * UPDATES - RESUMED):  # saved in the second epoch, and continued by another loader
        with make_loader(SeededOrder, state=state, **settings) as loader:
            weights += train(loader, model, optimizer, updates)
            state = loader.state_dict()
    return weights


SHARDED = pytest.mark.skipif(not CAN_SHARD, reason="fully_shard of torch 2.6 does not run on processors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "settings", "fsdp"),
    [
        (1, {}, False),
        (2, {}, False),
        (4, {"num_workers": 1}, False),
        (3, {"token_budget": 25}, False),
        (2, {"layout": "packed", "collate_fn": pack}, False),
        pytest.param(2, {}, True, marks=SHARDED),
        pytest.param(4, {"layout": "packed", "collate_fn": pack}, True, marks=SHARDED),
    ],
)
def test_the_weights_are_those_of_plain_training_after_every_update(
    world_size: int, settings: dict[str, Any], fsdp: bool, plain: list[list[float]]
) -> None:
    """Checks: UPDATE, WEIGHT, RESUME. Float64, three epochs of uneven updates, across a resume, 1e-9."""
    for result in run_ranks(world_size, train_ours, settings, fsdp, timeout_s=120):
        assert not result.error, result
        assert len(result.value) == len(plain) == EPOCHS * UPDATES
        for ours, theirs in zip(result.value, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11)


def train_part(rank: int, saved: bytes | None, updates: int, shard: str) -> tuple[list[list[float]], bytes]:
    """Resumes for some updates, with a `DistributedSampler` of one replica. Returns their weights, and what is saved."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    with make_loader(DistributedSampler, shard=shard) as loader:
        parts = (model, optimizer, loader)
        if saved is not None:
            for part, state in zip(parts, pickle.loads(saved), strict=True):
                part.load_state_dict(state)
        weights = train(loader, wrapped, optimizer, updates)
        # As bytes, because a tensor would be sent in a file of this process, which ends.
        return weights, pickle.dumps([part.state_dict() for part in parts])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["auto", "shared"])
@pytest.mark.parametrize("ranks", [(2, 3, 1), (1, 4, 2)], ids=str)
def test_the_weights_are_those_of_plain_training_whatever_ranks_go_on(
    shard: str, ranks: tuple[int, ...], plain: list[list[float]]
) -> None:
    """Saved twice between two updates, by one rank, for any number of ranks. Checks: UPDATE, WEIGHT, RESUME."""
    saved, done = None, 0
    for world_size, end in zip(ranks, (RESUMED - 3, RESUMED, EPOCHS * UPDATES), strict=True):
        values = get_values(run_ranks(world_size, train_part, saved, end - done, shard, timeout_s=120))
        for value in values:
            for ours, theirs in zip(value[0], plain[done:end], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11)
        saved, done = values[-1][1], end


def read_padded(rank: int, world_size: int, count: int, states: list[Any], updates: int) -> tuple[list[int], Any]:
    """Returns samples of some updates of a `DistributedSampler` with a replica for each rank, and the state after them."""
    samples, numbers = Numbers(0, count), list[int]()
    sampler: Any = DistributedSampler(samples, world_size, rank, seed=7)
    with make_updates(samples, sampler=sampler, shuffle=False, state=states) as loader:
        if states:
            loader.load_state_dict(loader.state_dict())  # saved again before the first step
        for batch, info in loader.steps():
            numbers += batch["numbers"] if not info.is_idle else []
            if info.is_update_end and info.update + 1 == updates:
                break
        return numbers, loader.state_dict()


@pytest.mark.parametrize("count", [45, 46])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_an_order_that_is_filled_up_for_as_many_ranks_goes_on_on_others(ranks: tuple[int, int], count: int) -> None:
    """45 samples become 46 for two ranks, and an epoch keeps the order it began with. Checks: COVER, RESUME."""
    before, after = ranks
    first = get_values(run_ranks(before, read_padded, before, count, [], 2))
    states = [state for _, state in first]
    rest = get_values(run_ranks(after, read_padded, after, count, states, 10**9))
    whole = get_values(run_ranks(before, read_padded, before, count, [], 10**9))
    read = [number for part in (first, rest) for numbers, _ in part for number in numbers]
    assert sorted(read) == sorted(number for numbers, _ in whole for number in numbers)
    with pytest.raises(AssertionError, match="order of samples has changed"):
        get_values(run_ranks(after, read_padded, after, count + 20, states, 1))
