"""The packed layout: rows with transformers' field names, exact weights, and a model that trains as on single samples."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from odb_ref.torch import BoundedShapes, FlattenSamples
from odb_ref.torch.reading.tasks import SampleError
from odb_ref.trace.check import check_traces
from tests.torch import data
from tests.torch.data import Numbers, catch_texts, count_samples, take
from tests.torch.ranks import get_values, run_ranks
from tests.torch.states import check_fails

make_loader = partial(data.make_loader, layout="packed", window=12, collate_fn=None)
SIZES = [23, 8]
TOLERANCE = 1e-6
"""transformers computes attention and loss in float32, whatever the precision of the model."""


class Texts(Numbers):
    """Ids and labels, with masked prompts."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"input_ids": sample["input_ids"], "labels": sample["labels"]}


SAMPLES = [Texts(0, 7)[i] for i in range(7)]


def make_model(attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation=attention,
        use_cache=False,  # with a cache, transformers does not look for separate samples in a row
    )
    return transformers.LlamaForCausalLM(config).double()


def get_gradient(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def compute_single_gradient(samples: list[dict[str, Any]], model: Any) -> torch.Tensor:
    """Returns the gradient of the mean loss over the supervised tokens of all samples, each by itself."""
    model.zero_grad()
    supervised = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    for sample in samples:
        own = int((sample["labels"][1:] != -100).sum())
        if own:
            loss = model(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss
            (loss * own / supervised).backward()
    return get_gradient(model)


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("is_list", [True, False])
def test_a_row_is_what_transformers_makes_of_the_samples(has_labels: bool, is_list: bool) -> None:
    """Spec: R2.4."""
    transformers = pytest.importorskip("transformers")
    samples = [
        {name: value.tolist() if is_list else value for name, value in sample.items() if has_labels or name != "labels"}
        for sample in SAMPLES
    ]
    # Before transformers 5, theirs took tensors for lists, and failed.
    lists = [{name: torch.as_tensor(value).tolist() for name, value in sample.items()} for sample in samples]
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(lists)
    ours = FlattenSamples()(samples)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        else:
            assert ours[name] == value and type(ours[name]) is type(value), name


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_the_first_label_carries_no_loss_whatever_integers_the_tokens_are(kind: torch.dtype) -> None:
    """Checks: WEIGHT. -100 is 156 in a byte."""
    row = FlattenSamples()([{"input_ids": torch.ones(3, dtype=kind)}, {"input_ids": torch.ones(2, dtype=kind)}])
    assert row["labels"].tolist() == [[-100, 1, 1, -100, 1]]  # type: ignore[attr-defined]
    padded = BoundedShapes(token_budget=8, is_shifted=False)([{"input_ids": torch.ones(3, dtype=kind)}])
    assert padded["labels"][0, :3].tolist() == [1, 1, 1]
    values = FlattenSamples()([{"input_ids": torch.ones(2, dtype=kind), "labels": torch.tensor([0.5, 0.25])}])
    assert values["labels"].tolist() == [[-100.0, 0.25]]  # type: ignore[attr-defined]


def test_a_label_of_its_own_token_stays_and_samples_stay_as_they_were() -> None:
    before = [sample["labels"].clone() for sample in SAMPLES]
    row = FlattenSamples(is_shifted=False)(SAMPLES)
    assert torch.equal(row["labels"][0], torch.cat(before))
    FlattenSamples()(SAMPLES)
    assert all(torch.equal(sample["labels"], labels) for sample, labels in zip(SAMPLES, before, strict=True))


def test_further_fields_with_a_value_for_each_token_are_laid_end_to_end_too() -> None:
    samples = [
        {"input_ids": [1, 2], "token_type_ids": [0, 1], "attention_mask": [1, 1], "position_ids": [2, 3]},
        {"input_ids": [3, 4], "token_type_ids": [5, 6], "attention_mask": [1, 1], "position_ids": [2, 2]},
    ]
    row = FlattenSamples()(samples)
    assert row["token_type_ids"].tolist() == [[0, 1, 5, 6]]
    assert row["position_ids"].tolist() == [[2, 3, 2, 2]]
    assert "attention_mask" not in row


@pytest.mark.parametrize(
    ("sample", "what"),
    [
        # Attention that uses positions takes samples for one if their positions continue.
        ({"input_ids": [3, 4], "position_ids": [2, 3]}, "position_ids of a sample continue those of the sample before"),
        ({"input_ids": [3, 4], "completion_mask": [0, 1]}, "leaves out tokens, but the sample has no labels"),
        ({"input_ids": [3, 4], "attention_mask": [1]}, "attention_mask of a sample has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "number": 3}, r"number of a sample has the shape \[\]"),
        ({"input_ids": [1, 2], "text": "ab"}, "text of a sample does not have one value for each token"),
        ({"input_ids": [1, 2], "pixels": [[1, 2], [3, 4]]}, r"pixels of a sample has the shape \[2, 2\]"),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, "labels of a sample has 3 values for 2 tokens"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "attention_mask hides tokens"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 40]}, "position_ids of a sample do not go up by 1"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 1]}, "position_ids of a sample do not go up by 1"),
        ({"pixels": [1]}, "no input_ids"),
        ([1, 2], "no input_ids"),
        ({"input_ids": [2], "weights": [1.0]}, "fields"),
    ],
)
def test_what_cannot_be_laid_end_to_end_is_refused(sample: Any, what: str) -> None:
    """Checks: WEIGHT. Behind a sample of which nothing is wrong, and which has the same fields but for one case."""
    good = {"position_ids": [0, 1], "completion_mask": [1, 1], "attention_mask": [1, 1]}
    names = [name for name in good if name in sample]
    with pytest.raises(SampleError, match=what):
        FlattenSamples()([{"input_ids": [1, 2]} | {name: good[name] for name in names}, sample])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_keep_the_budget_and_hold_every_sample_once(num_workers: int, tmp_path: Path) -> None:
    """Checks: BUDGET, COVER."""
    # https://github.com/huggingface/trl/issues/3887
    # https://github.com/huggingface/trl/issues/4554
    path = tmp_path / "trace.ndjson"
    with make_loader(Texts(0, 40), num_workers=num_workers, trace=path) as loader:
        rows = list(loader.steps())
        metrics = loader.metrics()
    samples: list[list[int]] = []
    for batch, info in rows:
        ends = batch["cu_seq_lens_q"].tolist()
        assert batch["input_ids"].shape == (1, ends[-1]) == (1, info.padded_tokens)
        assert info.local_tokens == info.padded_tokens <= 60
        samples += [batch["input_ids"][0, begin:end].tolist() for begin, end in pairwise(ends)]
        assert batch["max_length_q"] == max(end - begin for begin, end in pairwise(ends))
    assert sorted(samples) == sorted(Texts(0, 40)[i]["input_ids"].tolist() for i in range(40))
    assert metrics["odb/padding_ratio"] == 0
    (job,) = check_traces([path]).jobs
    assert not job.violations, job


def test_a_collate_fn_that_packs_by_itself_is_used_as_it_is_and_checked() -> None:
    """Checks: WEIGHT. Labels that reach across samples are a loss that was not counted."""

    def pack(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: torch.cat([sample[name] for sample in samples])[None] for name in ("input_ids", "labels")}

    transformers = pytest.importorskip("transformers")
    collator = transformers.DataCollatorWithFlattening()

    def collate(samples: list[dict[str, Any]]) -> Any:
        return collator([{name: value.tolist() for name, value in sample.items()} for sample in samples])

    assert take(make_loader(Texts(0, 12), collate_fn=collate), count_samples) == 12
    check_fails(make_loader(Texts(0, 12), collate_fn=pack), "carry loss")


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_that_pads_is_warned_of(num_workers: int) -> None:
    options = {"collate_fn": pad, "supervised_fn": len, "num_workers": num_workers}
    with pytest.warns(RuntimeWarning, match="a row for each sample, so its batches hold more than token_budget"):
        assert take(make_loader(Texts(0, 12), **options), count_samples) == 12


def nest(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": torch.nested.nested_tensor([sample["input_ids"] for sample in samples], layout=torch.jagged)}


def test_a_nested_batch_has_no_padding_to_warn_of() -> None:
    with warnings.catch_warnings(action="error"):
        assert take(make_loader(Texts(0, 12), collate_fn=nest, supervised_fn=len), count_samples) == 12


JOINED: list[tuple[bool, Any]] = [
    (True, lambda row: {}),
    (True, lambda row: {"attention_mask": torch.ones_like(row["input_ids"])}),
    (True, lambda row: {"position_ids": torch.arange(row["input_ids"].numel())[None]}),
    (False, lambda row: {"position_ids": row["position_ids"]}),
    (False, lambda row: {"position_ids": row["position_ids"].to(torch.uint8)}),
    (False, lambda row: {"attention_mask": 1 + (row["position_ids"] == 0).cumsum(1)}),
]


@pytest.mark.parametrize(("is_warned_of", "add"), JOINED)
def test_a_collate_fn_that_joins_samples_and_does_not_tell_them_apart_is_warned_of(
    is_warned_of: bool, add: Any
) -> None:
    def pack(samples: list[Any]) -> dict[str, Any]:
        row = FlattenSamples()(samples)
        return {"input_ids": row["input_ids"], "labels": row["labels"]} | add(row)

    with catch_texts() as caught:
        assert take(make_loader(Texts(0, 12), collate_fn=pack), count_samples) == 12
    assert ["samples end to end, and neither" in text for text in caught] == [True] * is_warned_of


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_sees_every_sample_of_a_row_by_itself(attention: str) -> None:
    """Checks: WEIGHT. Logits, and so losses, of every token, and the gradient of their mean."""
    # https://github.com/google/grain/issues/1000
    model = make_model(attention)
    row = FlattenSamples()(SAMPLES)
    out = model(**row)
    alone = torch.cat([model(input_ids=sample["input_ids"][None]).logits[0] for sample in SAMPLES])
    assert torch.allclose(out.logits[0], alone, atol=TOLERANCE)
    out.loss.backward()
    packed = get_gradient(model)
    assert torch.allclose(packed, compute_single_gradient(SAMPLES, model), atol=TOLERANCE)
    # The check can fail: without positions that restart, each sample would see those before it.
    model.config.use_cache = True
    assert not torch.allclose(model(**row).logits[0], alone, atol=1e-3)
    model.config.use_cache = False
    row["position_ids"] = torch.arange(row["input_ids"].shape[1])[None]
    assert not torch.allclose(model(**row).logits[0], alone, atol=1e-3)


def list_samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns samples as lists, which can be sent to another process."""
    ends = row["cu_seq_lens_q"].tolist()
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    return [{name: row[name][0, span].tolist() for name in ("input_ids", "labels")} for span in spans]


def train(rank: int) -> list[tuple[list[dict[str, Any]], list[float]]]:
    """Returns this rank's samples in each update, and the gradient."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    shard = Texts(sum(SIZES[:rank]), SIZES[rank])
    updates = []
    samples: list[dict[str, Any]] = []
    with make_loader(shard, shard="given", accumulation_steps=2) as loader:
        for batch, info in loader.steps():
            info.scale(wrapped(**batch).loss).backward()
            samples += [] if info.is_idle else list_samples(batch)
            if info.is_update_end:
                updates.append((samples, get_gradient(model).tolist()))
                samples = []
                wrapped.zero_grad()
    return updates


def test_two_ranks_of_uneven_shards_get_the_gradient_of_single_samples() -> None:
    """Checks: WEIGHT, ALIGN, COVER."""
    pytest.importorskip("transformers")  # a rank that skips has failed
    values = get_values(run_ranks(2, train, timeout_s=120))
    model = make_model()
    seen = 0
    for (samples, gradient), (others, same) in zip(values[0], values[1], strict=True):
        both = [{name: torch.tensor(ids) for name, ids in sample.items()} for sample in samples + others]
        expected = compute_single_gradient(both, model)
        for found in (gradient, same):
            assert torch.linalg.norm(
                torch.tensor(found, dtype=torch.float64) - expected
            ) <= TOLERANCE * torch.linalg.norm(expected)
        seen += len(both)
    assert seen == sum(SIZES) and len(values[0]) > 2
