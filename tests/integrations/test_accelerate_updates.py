"""Accelerate with ``update_samples`` runs like plain Accelerate with fixed batches, with the same weights and schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from odb_ref.integrations.accelerate import PlainOrder, accumulate, find_order, find_prepared_order
from odb_ref.torch import JobState, ODBDataLoader, UsageError
from tests.helpers.options import nested
from tests.integrations.common import Model, get_weights, run_ranks
from tests.torch.data import Numbers, Stream, collate
from tests.torch.ranks import get_values

RANKS, SAMPLES, PER_RANK, ACCUMULATED, EPOCHS = 2, 40, 4, 2, 3
UPDATE = RANKS * PER_RANK * ACCUMULATED
UPDATES = EPOCHS * -(-SAMPLES // UPDATE)
"""The last update of an epoch holds half of the samples."""


def prepare(is_split: bool, **settings: Any) -> tuple[Any, ...]:
    """Prepares a training. With ``split_batches``, which divides each batch among ranks, the schedule makes one step with
    an update, otherwise one for each rank.
    """
    torch.manual_seed(7)
    configuration = DataLoaderConfiguration(split_batches=is_split, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration, **settings)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return accelerator, model, *accelerator.prepare(model, optimizer, schedule)


def make_plain(is_split: bool) -> DataLoader[Any]:
    """Returns the loader of a plain training."""
    size = RANKS * PER_RANK if is_split else PER_RANK
    return DataLoader(Numbers(0, SAMPLES), batch_size=size, collate_fn=collate, shuffle=True)


def step(updates: list[list[float]], is_update_end: bool, model: Any, optimizer: Any, schedule: Any) -> None:
    """Calls everything in each micro-step, as in Accelerate's guides, and records rate and weights of an update."""
    rate = schedule.get_last_lr()[0]
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if is_update_end:
        updates.append([rate, *get_weights(model)])


def train_plain(is_split: bool) -> list[list[float]]:
    """Trains with the token mean over an update, as in Accelerate's guide to gradient accumulation."""
    accelerator, model, wrapped, optimizer, schedule = prepare(is_split, gradient_accumulation_steps=ACCUMULATED)
    # Each time one of them is read is an epoch, in its own order.
    loader, ahead = accelerator.prepare(make_plain(is_split), make_plain(is_split))
    updates: list[list[float]] = []
    for _ in range(EPOCHS):
        lengths = [(batch["labels"][:, 1:] != -100).sum() for batch in ahead]
        for number, batch in enumerate(loader):
            first = number // ACCUMULATED * ACCUMULATED
            tokens = accelerator.gather(sum(lengths[first : first + ACCUMULATED])).sum()
            own = (batch["labels"][:, 1:] != -100).sum()
            with accelerator.accumulate(wrapped):
                loss = wrapped(batch["input_ids"], batch["labels"])["loss"] * own
                accelerator.backward(loss * RANKS * ACCUMULATED / tokens)
                step(updates, accelerator.sync_gradients, model, optimizer, schedule)
    return updates


def train_ours(
    folder: Path, is_split: bool, *, save_at: int = 0, resume: bool = False, **options: Any
) -> list[list[float]]:
    accelerator, model, wrapped, optimizer, schedule = prepare(is_split)
    settings = {
        "token_budget": 60,
        "update_samples": UPDATE,
        "sampler": find_order(accelerator, make_plain(is_split)),
        "shard": "shared",
        "timeout_s": 30,
    }
    updates: list[list[float]] = []
    with ODBDataLoader(Numbers(0, SAMPLES), **nested(collate_fn=collate, **settings | options)) as loader:
        accelerator.register_for_checkpointing(JobState(loader))
        if resume:
            accelerator.load_state(str(folder))
        assert len(loader) == UPDATES // EPOCHS
        for _ in range(loader.epoch, EPOCHS):
            for batch, info in loader.steps():
                with accumulate(accelerator, wrapped, info):
                    accelerator.backward(info.scale(wrapped(batch["input_ids"], batch["labels"])["loss"]))
                    step(updates, info.is_update_end, model, optimizer, schedule)
                if info.is_update_end and len(updates) == save_at:
                    accelerator.save_state(str(folder))
    return updates


def train_both(rank: int, folder: Path, is_split: bool) -> Any:
    ours = train_ours(folder, is_split, save_at=4)
    resumed = train_ours(folder, is_split, resume=True, token_budget=45, num_workers=1)
    return train_plain(is_split), ours, resumed


@pytest.mark.parametrize("is_split", [False, True])
def test_weights_and_rates_are_those_of_plain_accelerate(tmp_path: Path, is_split: bool) -> None:
    """Checks: UPDATE, WEIGHT, RESUME. After every update, to 1e-9. The last of an epoch is smaller. Resumed from a checkpoint
    inside an epoch, under another budget."""
    values = get_values(run_ranks(RANKS, train_both, tmp_path, is_split))
    for plain, ours, resumed in values:
        assert len(plain) == UPDATES
        for found, expected in ((ours, plain), (resumed, plain[4:])):
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def read_both(rank: int, count: int, **settings: Any) -> tuple[list[list[int]], list[object]]:
    """Returns the batches of a rank in an epoch of a prepared loader, and the order found for all ranks."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    plain = DataLoader(range(count), batch_size=PER_RANK)  # type: ignore[arg-type]
    order, prepared = list(find_order(accelerator, plain)), accelerator.prepare(plain)
    assert list(find_prepared_order(prepared, RANKS)) == order  # as in a Trainer
    return [batch.tolist() for batch in prepared], order


@pytest.mark.parametrize("count", [40, 33, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split_batches": True},
        {"even_batches": False},
        {"dispatch_batches": True},
        {"dispatch_batches": True, "split_batches": True},
    ],
)
def test_the_order_is_what_the_prepared_ranks_read(settings: dict[str, Any], count: int) -> None:
    """Also in the last update, which each kind of loader fills up in its own way, or not at all."""
    if "dispatch_batches" in settings and torch.__version__.startswith("2.6."):
        pytest.skip("after it gloo's destructor in torch 2.6 may wait for its own thread without an end")
    values = get_values(run_ranks(RANKS, functools.partial(read_both, **settings), count))
    updates = itertools.zip_longest(*(batches for batches, _ in values), fillvalue=[])
    read = [sorted(itertools.chain.from_iterable(update)) for update in updates]
    for _, order in values:
        rest = iter(order)
        assert [sorted(itertools.islice(rest, len(update))) for update in read] == read
        assert not list(rest)


class Halves(BatchSampler):
    """Forms other batches than its base class."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*range(0, SAMPLES, 2)], [*range(1, SAMPLES, 2)]])


class Short(SequentialSampler):
    """Lists fewer samples than its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shuffle": True}, "use_seedable_sampler=True"),
        ({"batch_sampler": [[0, 1], [2, 3]]}, "forms batches with list"),
        ({"batch_sampler": Halves(SequentialSampler(range(SAMPLES)), 2, drop_last=False)}, "forms batches with Halves"),
        ({"sampler": Short(range(SAMPLES))}, f"Short lists {SAMPLES - 1} samples, but its length is {SAMPLES}"),
    ],
)
def test_an_order_that_cannot_be_told_is_refused(settings: dict[str, Any], said: str) -> None:
    """The order is the state of torch's generator, batches are drawn in a special way, or updates are counted wrongly."""
    with pytest.raises(UsageError, match=said):
        list(find_order(Accelerator(cpu=True), DataLoader(Numbers(0, SAMPLES), **settings)))


def test_a_sampler_may_be_a_list() -> None:
    assert list(find_order(Accelerator(cpu=True), DataLoader(Numbers(0, SAMPLES), sampler=[5, 3, 4]))) == [5, 3, 4]


def test_a_stream_has_no_order() -> None:
    with pytest.raises(UsageError, match=r"Leave out sampler= and shard=, and let the stream yield on each rank"):
        find_order(Accelerator(cpu=True), DataLoader(Stream(0, SAMPLES)))


def test_an_epoch_ends_with_the_length_that_it_was_begun_with_and_the_next_has_its_own() -> None:
    """Checks: RESUME. A plain loader extends an order, or cuts it, to whole batches. Spec: R10.5."""

    def make(batch: int, *, drops_last: bool) -> ODBDataLoader[Any]:
        order = PlainOrder(SequentialSampler(range(45)), batch, whole=batch, drops_last=drops_last)
        return ODBDataLoader(
            Numbers(0, 45), token_budget=200, update_samples=12, sampler=order, shard="shared", collate_fn=collate
        )

    def count(loader: ODBDataLoader[Any]) -> int:
        return sum(info.local_samples for _, info in loader.steps())

    for drops_last, begun, own in ((False, 48, 46), (True, 42, 44)):
        first, second = make(6, drops_last=drops_last), make(2, drops_last=drops_last)
        with first, second:
            for _, info in first.steps():
                if (info.update, info.is_update_end) == (1, True):
                    break
            second.load_state_dict(first.state_dict())
            assert [count(second), count(second)] == [begun - 24, own]
            first.load_state_dict(second.state_dict())  # saved between two epochs
            assert count(first) == begun
