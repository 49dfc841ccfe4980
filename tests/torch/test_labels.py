"""A batch must carry the loss that was counted in its samples. Otherwise the epoch ends, with advice on what to pass."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from odb_ref.torch import JobError, UsageError
from odb_ref.torch.reading.counting import LabelCheck, LabelError, count_supervised
from odb_ref.torch.reading.measure import SupervisedCounter
from odb_ref.torch.reading.tasks import SampleError, get_length
from tests.torch.data import (
    catch_texts,
    collate,
    count_samples,
    make_loader,
    make_sample,
    take,
    take_apart,
)
from tests.torch.ranks import check_errors, run_ranks
from tests.torch.states import check_fails

COUNT = 40


def mask(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Masks tokens as a collator for masked language models does."""
    batch = collate(samples)
    batch["labels"][torch.rand(batch["labels"].shape) > 0.3] = -100
    return batch


def truncate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value if key == "numbers" else value[:, :8] for key, value in collate(samples).items()}


def drop(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": collate(samples)["input_ids"]}


def read(collate_fn: Any, data: Any = None, **options: Any) -> list[str]:
    """Returns the warnings of two epochs."""
    with catch_texts() as caught, make_loader(data, collate_fn=collate_fn, **options) as loader:
        for _ in range(2):
            list(loader.steps())
    return caught


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [mask, truncate])
def test_a_collate_fn_that_changes_what_carries_loss_ends_the_epoch(collate_fn: Any, num_workers: int) -> None:
    """Spec: R4.7. Checks: WEIGHT."""
    with pytest.raises(JobError) as caught:
        read(collate_fn, num_workers=num_workers)
    for advice in ("without the first of each row", "supervised_fn=", "causal_shift=False", "Loss(scaling='samples')"):
        assert advice in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scaling": "none"},
        {"loss_scaling": "samples"},
        {"supervised_fn": lambda sample: count_from(1, sample, end=8)},
        {"supervised_fn": lambda sample: len(sample["input_ids"]), "causal_shift": False},
        {"supervised_fn": lambda sample: len(sample["input_ids"]), "loss_scaling": "samples"},
    ],
)
def test_where_no_weight_depends_on_it_or_the_user_counts_the_same_nothing_is_said(options: dict[str, Any]) -> None:
    """Spec: R4.7."""
    assert read(truncate, **options) == []


def count_from(first: int, sample: dict[str, Any], end: int | None = None) -> int:
    return int((sample["labels"][first:end] != -100).sum())


@pytest.mark.parametrize("options", [{}, {"causal_shift": False}, {"num_workers": 1}, {"on_bad_sample": "quarantine"}])
def test_batches_that_carry_what_was_counted_pass(options: dict[str, Any]) -> None:
    """Spec: R4.7."""
    for collate_fn in (collate, take_apart):
        assert read(collate_fn, **options) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropped_labels_are_warned_of_once(num_workers: int) -> None:
    """Spec: R4.7. Checks: WEIGHT."""
    (told,) = read(drop, num_workers=num_workers)
    assert "the batches that collate_fn makes do not" in told


def label(labels: str) -> list[dict[str, torch.Tensor]]:
    """Returns samples whose labels are a copy of the input, token classes, the next tokens, or classes without the first."""
    ids = [torch.arange(20, 24 + number % 5) for number in range(COUNT)]
    made = {"copy": lambda row: row.clone(), "classes": lambda row: row % 3, "next": lambda row: row + 1}
    rows = [made.get(labels, made["classes"])(row) for row in ids]
    for row in rows if labels == "behind" else ():
        row[0] = -100
    return [{"input_ids": row, "labels": marked} for row, marked in zip(ids, rows, strict=True)]


@pytest.mark.parametrize(
    ("labels", "first", "options", "is_told"),
    [
        # No function counts. If the first label carries loss, an assumption decides whether it counts.
        ("copy", None, {}, False),
        ("behind", None, {}, False),
        ("classes", None, {}, True),
        ("next", None, {"num_workers": 1}, True),
        ("next", None, {"layout": "packed"}, True),
        ("classes", None, {"causal_shift": False}, False),
        ("classes", None, {"causal_shift": True}, False),
        ("classes", None, {"loss_scaling": "samples"}, False),
        # A function counts from the first label, or from the second.
        ("copy", 0, {}, True),
        ("copy", 0, {"num_workers": 1}, True),
        ("copy", 0, {"layout": "packed"}, True),
        ("copy", 0, {"causal_shift": True}, True),
        ("copy", 1, {}, False),
        ("copy", 1, {"layout": "packed"}, False),
        ("copy", 0, {"causal_shift": False}, False),
        ("behind", 0, {}, False),
        ("classes", 0, {}, False),
        ("next", 0, {}, False),
    ],
)
def test_labels_or_counts_that_do_not_suit_how_a_causal_model_shifts_are_warned_of_once(
    labels: str, first: int | None, options: dict[str, Any], is_told: bool
) -> None:
    """Spec: R4.7. Checks: WEIGHT."""
    counting = {} if first is None else {"supervised_fn": partial(count_from, first)}
    told = read(None if "layout" in options else pad_labels, label(labels), **options, **counting)
    said = "causal_shift=False" if first is None else "do not count the first label"
    assert [said in text for text in told] == [True] * is_told


def test_samples_without_labels_that_a_function_counts_are_not_compared() -> None:
    data = [{"input_ids": torch.arange(1, 5)} for _ in range(COUNT)]
    for collate_fn in (stack, lambda samples: {"labels": torch.stack(stack(samples))}):
        with (
            warnings.catch_warnings(action="error"),
            make_loader(data, collate_fn=collate_fn, supervised_fn=get_length) as loader,
        ):
            assert sum(info.local_supervised for _, info in loader.steps()) == 4 * COUNT


def test_rows_of_labels_are_not_compared_with_their_input() -> None:
    rows = {"input_ids": [[7, 8], [9]], "labels": [[1, 2], [3]]}
    told: list[str] = []
    check = LabelCheck(True, is_assumed=True, has_own_length=False)
    assert check.collate(lambda samples: samples[0], [rows], 1, told.append) is rows
    assert told == []


@pytest.mark.parametrize("options", [{}, {"length_fn": lambda sample: 2 * len(sample["input_ids"])}])
def test_a_second_text_that_no_length_counts_is_warned_of(options: dict[str, Any]) -> None:
    """Checks: BUDGET."""
    data = [sample | {"positive_input_ids": sample["input_ids"]} for sample in label("copy")]
    told = read(pad_labels, data, **options)
    assert ["do not include positive_input_ids" in text for text in told] == [True] * (not options)


def pad_labels(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return collate([sample | {"number": 0} for sample in samples])


def test_labels_of_another_name_are_not_missed() -> None:
    def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
        starts = torch.tensor([sample["start_positions"] for sample in samples])
        return {"input_ids": torch.stack(stack(samples)), "start_positions": starts}

    data = [{"input_ids": torch.arange(1, 5), "start_positions": 2} for _ in range(9)]
    with warnings.catch_warnings(action="error"), make_loader(data, collate_fn=pad) as loader:
        assert sum(info.local_supervised for _, info in loader.steps()) == 9


def test_every_rank_says_whose_batches_carry_another_loss() -> None:
    """Spec: R4.7. Checks: WEIGHT, ABORT."""
    results = run_ranks(2, lambda rank: read(truncate if rank else collate, shard="given"))
    check_errors(results, "so its weight would be wrong", rank=1)


LABELS = torch.tensor([[1, -100, 3, -100], [-100, 5, 6, 7]])


@pytest.mark.parametrize(
    ("labels", "whole", "shifted"),
    [
        (LABELS, 5, 4),
        (LABELS.numpy(), 5, 4),
        (LABELS.tolist(), 5, 4),
        (list(LABELS), 5, 4),
        (LABELS[0], 2, 1),
        (LABELS[0].tolist(), 2, 1),
        ([np.array([4, -100]), [3, 3, 3]], 4, 2),
        (torch.zeros(2, 2, 2), 8, 4),
        (np.array([[156, 1]], dtype=np.uint8), 2, 1),
        (torch.tensor([[156, 1]], dtype=torch.uint8), 2, 1),
        (torch.tensor([[65_436, 1]], dtype=torch.uint16), 2, 1),
        (torch.nested.nested_tensor([LABELS[0], LABELS[1][:3]], layout=torch.jagged), 4, 3),
        ([], None, None),
        ("text", None, None),
        ([[1, "a"]], None, None),
        (None, None, None),
    ],
)
def test_labels_of_any_kind_are_counted_or_left_alone(labels: Any, whole: int | None, shifted: int | None) -> None:
    """Spec: R4.7."""
    assert count_supervised(labels, is_shifted=False) == whole
    assert count_supervised(labels, is_shifted=True) == shifted


def test_a_sample_counts_as_its_batch_of_one_does() -> None:
    """Spec: R1.1, R4.7."""
    for number in range(COUNT):
        sample = make_sample(number)
        assert count_supervised(collate([sample])["labels"], is_shifted=True) == int(
            (sample["labels"][1:] != -100).sum()
        )


def test_values_of_tokens_are_not_taken_for_values_of_samples() -> None:
    """Spec: R4.7. Checks: WEIGHT. One value for each token differs from several of a sample only in that their numbers vary."""
    samples = [sample | {"labels": sample["labels"].float()} for sample in map(make_sample, range(COUNT))]
    assert take(make_loader(samples, loss_scaling="samples"))
    said = r"as if each token had one.* pass Loss\(supervised_fn=\)"
    check_fails(make_loader(samples), said)


def test_a_loader_that_was_read_first_without_gradients_is_read_with_them() -> None:
    with make_loader() as loader:
        with torch.inference_mode():
            first = count_samples(loader)
        assert first == count_samples(loader) == COUNT


def test_a_data_set_that_lists_its_classes_in_turn_shows_several() -> None:
    """Spec: R4.7. Samples at equal distances could be of one class, for which this loss is always 0, and tells nothing."""
    data = [{"kind": number % 4} for number in range(32)]
    options: dict[str, Any] = {"length_fn": lambda sample: 3, "loss_scaling": "samples"}
    collate_fn = lambda samples: torch.tensor([sample["kind"] for sample in samples])  # noqa: E731
    with make_loader(data, collate_fn=collate_fn, **options) as loader:
        assert not loader.check_loss(lambda batch: torch.zeros(()))
        assert loader.check_loss(lambda batch: batch.double().mean())
        with pytest.raises(UsageError, match="it needs fixed batches"):
            loader.check_loss(lambda batch: batch.double().var(correction=0))


def test_labels_beside_no_row_of_their_length_are_refused_until_the_shift_is_said() -> None:
    """Spec: R1.1. Checks: WEIGHT. As in speech recognition. The first label of each sample was left out without a word."""
    speech = [
        {"input_features": torch.zeros(4, 30), "labels": sample["labels"]} for sample in map(make_sample, range(COUNT))
    ]
    texts = [{"tokens": sample["labels"], "labels": sample["labels"]} for sample in speech]
    counting = {"length_fn": lambda sample: len(sample["labels"]), "collate_fn": lambda samples: {"numbers": [0]}}
    check_fails(make_loader(speech, **counting), r"no row of as many tokens.* pass Loss\(causal_shift=False\)")
    for data, options in ((speech, {"causal_shift": False}), (speech, {"causal_shift": True}), (texts, {})):
        assert take(make_loader(data, **counting, **options))


def test_labels_that_nobody_counts_may_be_anything() -> None:
    """They were refused with Loss(scaling='samples') too, which needs no count."""
    images = [{"pixels": torch.zeros(3, 4), "labels": {"boxes": torch.zeros(2, 4)}} for _ in range(COUNT)]
    options = {"length_fn": lambda sample: 4, "collate_fn": lambda samples: {"numbers": [0] * len(samples)}}
    assert len(take(make_loader(images, loss_scaling="samples", **options))) > 1
    check_fails(make_loader(images, **options), r"labels is dict.*or Loss\(scaling='samples'\)")


@pytest.mark.parametrize("is_padded", [True, False])
def test_spans_in_samples_that_the_collator_pads_are_warned_of(is_padded: bool) -> None:
    """Spec: R4.7. Checks: WEIGHT. The gradient of transformers' models was off by half."""
    ids = [torch.ones(9 if is_padded else 3 + number % 7, dtype=torch.int64) for number in range(COUNT)]
    spans = lambda samples: {"start_positions": torch.ones(len(samples))}  # noqa: E731
    told = read(spans, [{"input_ids": row, "start_positions": 1, "end_positions": 2} for row in ids])
    assert ["start_positions differ in length" in text for text in told] == [True] * (not is_padded)


class Uniterable(dict[str, Any]):
    """A mapping that names its fields only if asked for its keys, as a TensorDict does."""

    def __iter__(self) -> Any:
        raise TypeError("use keys()")

    def __contains__(self, name: object) -> bool:
        raise NotImplementedError


@pytest.mark.parametrize("options", [{}, {"length_fn": get_length}])
def test_a_mapping_is_asked_for_its_keys(options: dict[str, Any]) -> None:
    samples = [Uniterable(make_sample(number)) for number in range(COUNT)]
    assert read(collate, samples, **options) == []


def make_masked(name: str, first: int) -> list[dict[str, Any]]:
    """Returns samples without labels, whose mask excludes the first token, or none."""
    texts = [make_sample(number)["input_ids"] for number in range(COUNT)]
    return [{"input_ids": ids, name: [first, *[1] * (len(ids) - 1)]} for ids in texts]


def stack(samples: list[dict[str, Any]]) -> list[Any]:
    return [sample["input_ids"] for sample in samples]


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.int64), "labels": [2]}, "a list of 1 label for 3 tokens"),
        (
            {"input_ids": torch.ones(3, dtype=torch.int64), "labels": torch.tensor([[2]])},
            "a list of 1 label for 3 tokens",
        ),
        ({"pixel_values": torch.ones(3), "labels": torch.tensor([2])}, "a list of 1 label for 3 tokens"),
        ({"input_features": torch.ones(3), "labels": [1, 2]}, "2 labels for 3 tokens"),
        ({"input_ids": torch.ones(3, dtype=torch.int64), "labels": [1, 2]}, "2 labels for 3 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": torch.ones((3, 2), dtype=torch.int64)}, "2 labels for 3 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [[1, 2]] * 3}, "2 labels for 3 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [0.5, -100.0, -100.0]}, "float labels, some of them -100"),
        ({"input_ids": [1, 2, 3], "labels": torch.tensor([0.5, -100.0])}, "float labels, some of them -100"),
        (
            {"input_ids": [1, 2, 3], "labels": torch.tensor([0.5, float("nan")])},
            "float labels, some of them -100 or NaN",
        ),
        (
            {"labels": [[1, 2, 3]], "loss_mask": [0, 1, 1], "input_ids": [[1, 2, 3]]},
            "the loss_mask of a sample leaves out",
        ),
        (np.zeros(1, [("tokens", np.int64, 3), ("targets_", np.int64, 3)])[0], "cannot tell which tokens"),
        ({"text": {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}}, "cannot tell which tokens"),
    ],
)
def test_labels_that_are_not_one_for_each_token_are_refused_where_weights_depend_on_them(
    sample: Any, count: str
) -> None:
    """Spec: R1.1. Checks: WEIGHT."""
    with pytest.raises(SampleError, match=count):
        SupervisedCounter(lambda _: 3, is_checked=True)(sample)


def test_rows_of_labels_for_rows_of_tokens_are_counted_each() -> None:
    """As with several codebooks. Spec: R1.1."""
    ids = torch.ones((4, 3), dtype=torch.int64)
    labels = ids.clone()
    labels[0, 1] = -100
    for kind in (lambda it: it, torch.Tensor.numpy, torch.Tensor.tolist):
        sample = {"input_ids": kind(ids), "labels": kind(labels)}
        assert SupervisedCounter(get_length, is_checked=True)(sample) == 4 * 2 - 1
        assert SupervisedCounter(get_length, is_shifted=False, is_checked=True)(sample) == 4 * 3 - 1
    # An image, on which nothing depends.
    assert SupervisedCounter(lambda _: 5)({"pixels": ids, "labels": labels}) == 5


@pytest.mark.parametrize("kind", [lambda it: [it], lambda it: torch.tensor([it]), lambda it: torch.tensor(it).float()])
def test_a_mask_of_any_kind_that_leaves_out_tokens_is_seen(kind: Any) -> None:
    """Checks: WEIGHT."""
    samples = [{"input_ids": kind([1, 1, 1]), "attention_mask": kind([1, 1, 0])} for _ in range(2)]
    with pytest.raises(LabelError, match="attention_mask of some samples leaves out tokens"):
        LabelCheck(is_shifted=True).collate(stack, samples, 4, pytest.fail)
    added = {"input_ids": torch.ones(3), "attention_mask": torch.tensor([0.0, 0.0, float("-inf")])}
    LabelCheck(is_shifted=True).collate(stack, [added], 2, pytest.fail)


@pytest.mark.parametrize("name", ["attention_mask", "completion_mask", "assistant_masks"])
def test_a_mask_that_leaves_out_tokens_and_makes_no_labels_is_not_passed_over(name: str) -> None:
    """Checks: WEIGHT."""
    for options, first in (({}, 1), ({"loss_scaling": "samples"}, 0), ({"supervised_fn": len}, 0)):
        assert take(make_loader(make_masked(name, first), collate_fn=stack, **options), count_samples) == COUNT
    said = rf"the {name} of some samples leaves out tokens.*Pass Loss\(supervised_fn=\)"
    check_fails(make_loader(make_masked(name, 0), collate_fn=stack), said)


def choose_labels(samples: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Makes labels by masks, as TRL's collator does."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    kept = [torch.tensor([sample[name] for sample in samples]).bool() for name in names]
    return {"input_ids": ids, "labels": ids.where(torch.stack(kept).all(0), -100)}


def test_labels_that_a_collate_fn_makes_by_masks_are_counted() -> None:
    """Checks: WEIGHT."""
    masks = {"completion_mask": [1, 1, 1, 0], "assistant_masks": [1, 0, 1, 1]}
    data = [{"input_ids": torch.arange(1, 5)} | masks for _ in range(COUNT)]
    for shift, each in ((True, 1), (False, 2)):
        loader = make_loader(data, collate_fn=partial(choose_labels, names=[*masks]), causal_shift=shift)
        assert sum(info.local_supervised for _, info in loader.steps()) == each * COUNT
    said = "labels others than their completion_mask and assistant_masks choose"
    check_fails(make_loader(data, collate_fn=partial(choose_labels, names=["assistant_masks"])), said)


def test_a_collate_fn_that_leaves_samples_out_is_warned_of() -> None:
    def leave_out(samples: list[dict[str, Any]]) -> dict[str, Any]:
        kept = samples[:-1] if len(samples) > 2 else samples
        return {"input_ids": torch.stack(stack(kept))}

    data = [{"input_ids": torch.arange(1, 5)} for _ in range(COUNT)]
    for scaling in ("samples", "exact"):
        with pytest.warns(RuntimeWarning, match="fewer rows than samples"):
            assert take(make_loader(data, collate_fn=leave_out, scaling=scaling), count_samples) == COUNT
