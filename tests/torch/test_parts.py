"""The adapter's small parts: weights, packing, measures, and conversion of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.types import StepCounts
from odb_ref.torch import Batching, ODBDataLoader, UsageError, apply
from odb_ref.torch.epoch.trace import compute_trace_path
from odb_ref.torch.reading.collator import Collator, OnIdle
from odb_ref.torch.reading.datasets import KeyFeed
from odb_ref.torch.reading.measure import Measure, Measured, SupervisedCounter
from odb_ref.torch.reading.serialization import LARGE_BYTES, pack, unpack
from odb_ref.torch.reading.service import BatchRequest, ReadPlan
from odb_ref.torch.reading.source import CHUNK_SAMPLES, LARGEST_CHUNK_HERE, LoaderOptions, Source
from odb_ref.torch.reading.tasks import SampleError, get_length, is_pair, is_whole
from tests.helpers.options import nested
from tests.torch.data import AtOnce, Numbers, Stream, collate, make_loader, read, take


def test_a_mean_over_samples_asks_for_no_token_that_carries_loss() -> None:
    """The number of tokens that carry loss is then irrelevant. A sum over no token is 0."""
    counts, total = StepCounts(2, 2, 0), StepCounts(8, 40, 30)
    by_mean, by_sum = (Weighting(scaling=LossScaling.SAMPLES, reduction=reduction) for reduction in LossReduction)
    assert by_mean.compute_scale(counts, total, 2) == 2 * 2 / 8
    assert by_sum.compute_scale(counts, total, 2) == 0
    with make_loader(Numbers(0, 4)) as loader:
        info = replace(next(loader.steps())[1], loss_scale=0.5, local_supervised=0)
    assert float(info.scale(torch.tensor(3.0))) == 1.5
    assert float(info.scale(torch.tensor(float("nan")))) == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(5),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.ones(3, 4, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e5m2),
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(LARGE_BYTES, dtype=torch.uint8),
        torch.tensor([True, False]),
    ],
)
def test_packing_keeps_tensors_as_they_are(value: torch.Tensor) -> None:
    sample = {"input_ids": value, "other": [value, "text", 7]}
    packed = pack(sample)
    assert bool(packed.large) == (value.nbytes >= LARGE_BYTES)
    found: Any = packed.unpack()
    for tensor in (found["input_ids"], found["other"][0]):
        assert tensor.dtype == value.dtype
        assert tensor.shape == value.shape
        assert torch.equal(tensor.float(), value.float())
    assert found["other"][1:] == ["text", 7]


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": [[1, 2, 3, 4]]}, 4),
        ({"input_ids": torch.ones(1, 6)}, 6),
        ({"input_ids": torch.ones(7).numpy()}, 7),
        ({"input_ids": [[1, 2, 3], [1], [1, 2]], "label": 1}, 9),  # several choices
        ({"input_ids": torch.ones(4, 6), "labels": torch.tensor(1)}, 24),
        ({"input_ids": [1, 2], "labels": [1, 2, 3, 4, 5]}, 5),  # an encoder and a decoder
        ({"input_ids": [1, 2], "labels": 7}, 2),
        ({"input_ids": [], "labels": [1, 2]}, 0),
        ({"prompt_ids": [1, 2], "chosen_ids": [1, 2, 3], "rejected_ids": [1]}, 10),
        ({"chosen_input_ids": torch.ones(3), "rejected_input_ids": torch.ones(4)}, 8),
    ],
)
def test_the_length_is_what_a_sample_takes_in_a_batch(sample: dict[str, Any], length: int) -> None:
    assert get_length(sample) == length


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        ({"label": 3}, 1),
        ({"labels": -100}, 0),
        ({"label_ids": torch.tensor(2)}, 1),
        ({"labels": torch.tensor(-100)}, 0),
        ({"label": 0.5}, 1),
        ({"labels": [0.0, 1.0]}, 1),
        ({"labels": torch.tensor([0.0, 1.0]).numpy()}, 1),
        ({"label": torch.tensor([3]).numpy()[0]}, 1),
        ({"label": "a name", "labels": None}, 2),
    ],
)
def test_a_sample_with_one_label_counts_once(labels: dict[str, Any], count: int) -> None:
    """Spec: R1.1."""
    sample = {"input_ids": [1, 2, 3], **labels}
    assert is_whole(sample) is not isinstance(labels.get("label"), str)
    assert SupervisedCounter(get_length)(sample) == count


def test_a_pair_counts_once() -> None:
    """Spec: R1.1. A sample with input_ids is a text, whatever else it has."""
    pair = {"chosen_ids": [1, 2], "rejected_ids": [3]}
    assert (is_pair(pair), is_whole(pair), SupervisedCounter(get_length)(pair)) == (True, True, 1)
    text = {**pair, "input_ids": [1, 2]}
    assert (is_pair(text), get_length(text)) == (False, 2)


def test_labels_of_another_length_than_the_input_are_those_of_a_decoder() -> None:
    """Spec: R1.1. They count if the caller says so; otherwise the error says what to pass."""
    for kind in (list, torch.tensor):
        sample = {"input_ids": kind([1, 2]), "labels": kind([3, 4, -100])}
        assert SupervisedCounter(get_length, is_shifted=False)(sample) == 2
        with pytest.raises(SampleError, match=r"3 labels for 2 input_ids.*: pass Loss\(causal_shift=False\)"):
            SupervisedCounter(get_length)(sample)


@pytest.mark.parametrize(("sample"), [{}, {"input_ids": 3}, {"input_ids": "text"}, 7])
def test_a_sample_without_a_length_is_refused(sample: Any) -> None:
    with pytest.raises(SampleError):
        get_length(sample)


@pytest.mark.parametrize(
    ("labels", "shifted", "plain"),
    [
        (torch.tensor([4, -100, 6]), 1, 2),
        (torch.tensor([4, 5, 6]).numpy(), 2, 3),
        ([-100, 5, 6], 2, 2),
        ([4, 5, 6], 2, 3),
        (torch.tensor([[4, -100, 6]]), 1, 2),
        (None, 2, 3),
        ([-100] * 3, 0, 0),
    ],
)
def test_supervised_tokens_are_the_labels_a_causal_model_predicts(labels: Any, shifted: int, plain: int) -> None:
    sample = {"input_ids": [1, 2, 3]} | ({} if labels is None else {"labels": labels})
    assert SupervisedCounter(get_length)(sample) == shifted
    assert SupervisedCounter(get_length, is_shifted=False)(sample) == plain


@dataclass
class Fields:
    features: list[int]
    answers: list[int]


class Slots:
    __slots__ = ("answers", "features")


class OneSlot:
    __slots__ = "tokens"  # noqa: PLC0205  # what Python takes for a name


@pytest.mark.parametrize(
    "sample",
    [
        (torch.ones(3), torch.ones(3)),
        {"features": [1, 2, 3], "answers": [1, 2, 3]},
        Fields([1, 2, 3], [1, 2, 3]),
        [[1, 2, 3], [0, 1, 1]],
        [torch.ones(3), torch.ones(3)],
        torch.tensor([[1, 2, 3], [0, 1, 1]]),
        np.array([[1, 2, 3], [0, 1, 1]]),
        SimpleNamespace(features=[1, 2, 3], answers=[1, 2, 3]),
        Slots(),
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"input_ids": torch.ones(3), "labels": torch.ones(3, dtype=torch.int64), "loss_mask": torch.tensor([0, 1, 1])},
    ],
)
def test_what_nobody_says_carries_loss_is_not_guessed_where_weights_depend_on_it(sample: Any) -> None:
    def length(_: object) -> int:
        return 3

    with pytest.raises(SampleError, match=r"pass Loss\(supervised_fn=\) .* or Loss\(scaling='samples'\)"):
        SupervisedCounter(length, is_checked=True)(sample)
    assert SupervisedCounter(length)(sample) == 2
    for more in ({"loss_mask": [0, 1, 1]}, {"target_ids": [0, 0, 0]}):
        kept = {"input_ids": [1, 2, 3], "labels": [-100, 1, 2]} | more
        assert Measure(get_length, SupervisedCounter(get_length, is_checked=True))([kept])[0][:2] == (3, 2)
    masked = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    Measure(get_length, SupervisedCounter(get_length))([masked])
    with pytest.raises(SampleError, match="it has loss_mask but no labels"):
        Measure(get_length, SupervisedCounter(get_length, is_checked=True))([masked])
    texts: list[Any] = [(1, 2, 3), [1, 2, 3], [np.int64(1), np.int64(2)], [0.5, 0.25], "one two"]
    texts += [torch.ones(3), torch.ones((3, 8, 8)), SimpleNamespace(tokens=[1, 2, 3]), OneSlot()]
    for text in (*texts, {"tokens": [1, 2, 3]}, {"input_ids": [1, 2, 3], "target": "web"}):
        assert SupervisedCounter(length, is_checked=True)(text) == 2


def test_a_trace_has_a_name_for_each_rank_and_epoch() -> None:
    assert compute_trace_path("a/run.ndjson", 0, 1, 0) == Path("a/run.ndjson")
    assert compute_trace_path("a/run.ndjson.gz", 1, 2, 0) == Path("a/run-rank1.ndjson.gz")
    assert compute_trace_path("run-{epoch}-{rank}.ndjson", 1, 2, 3) == Path("run-3-1.ndjson")
    assert compute_trace_path("run.ndjson", 0, 1, 3) == Path("run-epoch3.ndjson")
    assert compute_trace_path("run.ndjson", 1, 2, 3) == Path("run-rank1-epoch3.ndjson")
    assert compute_trace_path("run.ndjson", 1, 2, 0, 36) == Path("run-rank1-step36.ndjson")


def read_in_order(loader: ODBDataLoader) -> list[list[int]]:
    return [numbers for _, numbers, _ in take(loader, read)]


def test_what_seeds_the_shuffling_is_taken_over_and_options_come_first() -> None:
    data, options = Numbers(0, 31), {"token_budget": 60, "window": 8}

    def make(**arguments: Any) -> Any:
        return DataLoader(data, 4, collate_fn=collate, **arguments)

    def make_generator() -> torch.Generator:
        return torch.Generator().manual_seed(9)

    expected = read_in_order(make_loader(data, shuffle=True, generator=make_generator()))
    assert read_in_order(apply(make(shuffle=True, generator=make_generator()), **nested(**options))) == expected
    seeded = read_in_order(make_loader(data, shuffle=True, seed=5))
    sampler = DistributedSampler(data, 2, 0, seed=4)
    for adopted in (make(shuffle=True, generator=make_generator()), make(sampler=sampler)):
        assert read_in_order(apply(adopted, **nested(seed=5, **options))) == seeded
    assert read_in_order(apply(make(sampler=sampler), **nested(**options))) != seeded


def test_a_sampler_that_repeats_samples_is_kept() -> None:
    repeated = RandomSampler(Numbers(0, 31), replacement=True, num_samples=9)
    assert len(take(apply(DataLoader(Numbers(0, 31), 4, sampler=repeated, collate_fn=collate), token_budget=60))) == 9


class Odd(SequentialSampler):
    """Leaves every second sample out."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self.data_source), 2))

    def __len__(self) -> int:
        return len(self.data_source) // 2


class Twice(RandomSampler):
    """Lists half of the samples, each twice."""

    def __iter__(self) -> Iterator[int]:
        return (place // 2 for place in range(len(self)))


class Few(DistributedSampler[int]):
    """Lists three samples, on any rank."""

    def __iter__(self) -> Iterator[int]:
        return iter((4, 5, 6))

    def __len__(self) -> int:
        return 3


DATA = Numbers(0, 31)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(31)),
        ({"shuffle": True, "num_workers": 1, "prefetch_factor": 3}, range(31)),
        ({"sampler": DistributedSampler(DATA, 2, 0)}, range(31)),
        ({"dataset": Stream(0, 20)}, range(20)),
        # Samplers for part of the data set, and the user's own, are kept.
        ({"sampler": SequentialSampler(range(5))}, range(5)),
        ({"sampler": RandomSampler(range(5))}, range(5)),
        ({"sampler": DistributedSampler(range(5), 1, 0)}, range(5)),
        ({"sampler": Odd(DATA)}, range(1, 31, 2)),
        ({"sampler": Twice(DATA)}, [place // 2 for place in range(31)]),
        ({"sampler": Few(DATA, 1, 0)}, range(4, 7)),
        ({"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6])}, [1, 2, 3, 4, 6, 9, 15]),
        ({"sampler": WeightedRandomSampler([0.0] * 30 + [1.0], 5)}, [30] * 5),
    ],
)
def test_a_data_loader_is_taken_over_whole(options: dict[str, Any], expected: Sequence[int]) -> None:
    plain = DataLoader(**({"dataset": DATA, "batch_size": 4, "collate_fn": collate} | options))
    assert sorted(take(apply(plain, token_budget=60, batching=Batching(window=8)))) == list(expected)


def test_a_samplers_own_generator_is_taken_over() -> None:
    def make(seed: int) -> DataLoader[Any]:
        sampler = RandomSampler(Numbers(0, 31), generator=torch.Generator().manual_seed(seed))
        return DataLoader(Numbers(0, 31), 4, sampler=sampler, collate_fn=collate)

    first, second, again = (read_in_order(apply(make(seed), token_budget=60)) for seed in (1, 2, 1))
    assert first == again != second


def test_a_data_loader_that_does_not_batch_needs_a_collate_fn() -> None:
    plain = DataLoader(Numbers(0, 9), batch_size=None)
    with pytest.raises(UsageError, match="batch_size=None"):
        apply(plain, token_budget=60)
    assert len(take(apply(plain, token_budget=60, collate_fn=collate))) == 9


@pytest.mark.parametrize(
    ("dataset", "count", "largest"),
    [
        (Numbers(0, 4000), 4000, range(2, LARGEST_CHUNK_HERE + 1)),
        (Numbers(0, 80, delay_s=0.005), 80, range(1, 2)),
        (AtOnce(0, 2000), 2000, range(CHUNK_SAMPLES, CHUNK_SAMPLES + 1)),
    ],
    ids=["quick", "slow", "read at once"],
)
def test_quick_samples_come_in_larger_chunks_unless_they_draw_together(
    dataset: Numbers, count: int, largest: range
) -> None:
    """What a data set draws for a chunk must not depend on the clock. Spec: R12.1. Preserves: REPLAY."""
    sizes: list[int] = []

    def measure(samples: list[Any]) -> list[Any]:
        sizes.append(len(samples))
        return samples

    source = Source(dataset, measure, LoaderOptions(), is_guarded=False)
    plan = ReadPlan(keys=range(count), places=range(count))
    chunks = source.open(plan, KeyFeed(plan), print)
    assert [place for chunk in chunks for place, _ in chunk] == list(range(count))
    assert sizes[0] in (1, largest[0])
    assert max(sizes) in largest


@pytest.mark.parametrize("size", [3, LARGE_BYTES])
@pytest.mark.parametrize("is_packed", [False, True])
def test_what_a_collate_fn_does_to_a_sample_no_idle_step_sees(size: int, is_packed: bool) -> None:
    sample = {"input_ids": torch.ones(size, dtype=torch.uint8)}
    collator = Collator(OnIdle.REPLAY, None)
    collator.put({0: Measured(3, 3, pack(sample) if is_packed else sample)})
    for places in ((0,), (), ()):
        task = collator.take(BatchRequest(0, places))
        found: Any = unpack(task.samples[0])
        assert found["input_ids"].sum() == size
        found["input_ids"] += 1
