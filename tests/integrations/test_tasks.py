"""The usual tasks with transformers' own collators and models: the samples' counts are what the model's loss averages over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    default_data_collator,
)

from odb_ref.integrations.hf import ODBOptions, ODBTrainer, enable
from odb_ref.integrations.hf.data import CollatedLength, predicts_next_token
from odb_ref.torch import Batching, JobError, Loss, ODBDataLoader
from tests.helpers.options import nested
from tests.integrations.arguments import make_arguments
from tests.integrations.test_hf_updates import collate as pad

COUNT = 24
PAD, MASK = 0, 1
WORDS = 40
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def make_tokenizer() -> Any:
    names = {f"word{number}": number for number in range(WORDS)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(names, "word2")), pad_token="word0", mask_token="word1"
    )


TOKENIZER = make_tokenizer()


def make_bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(BertConfig(vocab_size=WORDS, **SIZES, **options)).double().eval()


def make_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=WORDS, attn_implementation="eager", use_cache=False, pad_token_id=PAD, **SIZES)
    return LlamaForCausalLM(config).double().eval()


class OwnLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A user's class, whose name tells transformers nothing."""


def make_own_llama() -> Any:
    return OwnLlama(make_llama().config).double()


def make_gpt2() -> Any:
    """Returns a model whose class has a name that tells transformers nothing."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, **sizes)).double()


def make_t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=PAD, pad_token_id=PAD, **sizes)).double().eval()


def draw(choose: random.Random, low: int = 2, high: int = 12) -> list[int]:
    return [choose.randrange(3, WORDS) for _ in range(choose.randint(low, high))]


def make_samples(add: Callable[[random.Random, list[int]], dict[str, Any]]) -> list[dict[str, Any]]:
    samples = []
    for number in range(COUNT):
        choose = random.Random(number)
        ids = draw(choose)
        samples.append({"input_ids": ids, "attention_mask": [1] * len(ids)} | add(choose, ids))
    return samples


def make_choices(choose: random.Random, ids: list[int]) -> dict[str, Any]:
    rows = [draw(choose) for _ in range(3)]
    return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], "label": choose.randrange(3)}


def mask_some(choose: random.Random, ids: list[int]) -> list[int]:
    return [-100 if choose.random() < 0.5 else choose.randrange(5) for _ in ids]


def mask_one(choose: random.Random, ids: list[int]) -> dict[str, Any]:
    """Returns a sample as a collator for masked models makes it. Some samples have no masked token."""
    made = DataCollatorForLanguageModeling(TOKENIZER, seed=choose.randrange(100))([{"input_ids": ids}])
    return {name: made[name][0].tolist() for name in ("input_ids", "labels")}


TASKS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    # model, collator, additional fields of a sample, and the loader's options
    "causal": (
        make_llama,
        DataCollatorForSeq2Seq(TOKENIZER),
        lambda choose, ids: {"labels": [-100 if choose.random() < 0.3 else word for word in ids]},
        {},
    ),
    "causal without labels": (make_llama, DataCollatorForLanguageModeling(TOKENIZER, mlm=False), lambda *_: {}, {}),
    "padding-free": (make_llama, DataCollatorWithFlattening(), lambda *_: {}, {"layout": "packed"}),
    "padding-free with labels": (
        make_llama,
        DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
        lambda choose, ids: {"labels": [-100 if choose.random() < 0.3 else word for word in ids]},
        {"layout": "packed"},
    ),
    "classes": (
        lambda: make_bert(BertForSequenceClassification, num_labels=3),
        DataCollatorWithPadding(TOKENIZER),
        lambda choose, ids: {"label": choose.randrange(3)},
        {},
    ),
    "classes, as labels": (
        lambda: make_bert(BertForSequenceClassification, num_labels=3),
        DataCollatorWithPadding(TOKENIZER),
        lambda choose, ids: {"labels": choose.randrange(3)},
        {},
    ),
    "several classes at once": (
        lambda: make_bert(BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        DataCollatorWithPadding(TOKENIZER),
        lambda choose, ids: {"labels": [float(choose.randrange(2)) for _ in range(3)]},
        {},
    ),
    "values": (
        lambda: make_bert(BertForSequenceClassification, num_labels=1),
        DataCollatorWithPadding(TOKENIZER),
        lambda choose, ids: {"label": choose.random()},
        {},
    ),
    "several choices": (
        lambda: make_bert(BertForMultipleChoice),
        DataCollatorForMultipleChoice(TOKENIZER),
        make_choices,
        {},
    ),
    "token classes": (
        lambda: make_bert(BertForTokenClassification, num_labels=5),
        DataCollatorForTokenClassification(TOKENIZER),
        lambda choose, ids: {"labels": mask_some(choose, ids)},
        {"causal_shift": False},
    ),
    "masked, where samples are read": (
        lambda: make_bert(BertForMaskedLM),
        DataCollatorForTokenClassification(TOKENIZER),
        mask_one,
        {"causal_shift": False},
    ),
    "encoder and decoder": (
        make_t5,
        DataCollatorForSeq2Seq(TOKENIZER),
        lambda choose, ids: {"labels": draw(choose, 2, 20)},
        {"causal_shift": False},
    ),
}


def make_loader(task: str, **options: Any) -> Any:
    _, collate, add, needed = TASKS[task]
    settings = {"token_budget": 60, "window": 8, "collate_fn": collate, "accumulation_steps": 64, **needed, **options}
    return ODBDataLoader(make_samples(add), **nested(**settings))  # type: ignore[arg-type]


def in_double(batch: Any) -> dict[str, Any]:
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_weighed_losses_add_up_to_that_of_all_samples(task: str) -> None:
    """Spec: R1.1. Checks: WEIGHT, BUDGET. One batch of all samples involves neither weights nor counting."""
    make_model, collate, add, _ = TASKS[task]
    model = make_model()
    whole = model(**in_double(collate(make_samples(add)))).loss
    added, steps = torch.zeros((), dtype=torch.float64), 0
    with make_loader(task) as loader, torch.no_grad():
        for batch, info in loader.steps():
            added += info.scale(model(**in_double(batch)).loss)
            steps += 1
            # On each side of the model.
            for side in ("input_ids", "labels"):
                if side in batch and batch[side].ndim > 1 and info.local_samples > 1:
                    assert batch[side].numel() <= 60, side
    assert steps > 3
    # Causal models of transformers compute their loss in single precision, and T5 before transformers 5 a part of its layers.
    is_single = isinstance(model, LlamaForCausalLM | T5ForConditionalGeneration)
    assert float(added) == pytest.approx(float(whole.detach()), rel=1e-6 if is_single else 1e-12)


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    # of a task: the message for a user who passes nothing
    "masked": (
        "causal without labels",
        r"pass Loss\(scaling='samples'\)",
        {"collate_fn": DataCollatorForLanguageModeling(TOKENIZER)},
    ),
    "decoder": ("encoder and decoder", "pass Loss\\(causal_shift=False\\)", {"causal_shift": True}),
    "image": ("classes", "pass Batching\\(length_fn=\\)", {"without": "input_ids"}),
    "boxes": ("causal", "pass Loss\\(supervised_fn=\\)", {"labels": {"boxes": [1]}}),
    "tokens of a class": (
        "classes",
        "pass Loss\\(supervised_fn=\\) to count",
        {"collate_fn": DataCollatorForLanguageModeling(TOKENIZER, mlm=False)},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_told_is_refused_with_the_argument_to_pass(name: str) -> None:
    task, message, changes = WRONG[name]
    options = dict(changes)
    without, labels = options.pop("without", None), options.pop("labels", None)
    loader = make_loader(task, **options)
    for sample in loader.dataset:
        sample.pop(without, None)
        if labels is not None:
            sample["labels"] = labels
    with loader, pytest.raises(JobError, match=message):
        list(loader.steps())


def test_a_masked_model_trains_with_the_argument_it_is_told() -> None:
    collate = DataCollatorForLanguageModeling(TOKENIZER, seed=1, mlm_probability=0.8)
    model = make_bert(BertForMaskedLM)
    options = {"loss_scaling": "samples", "accumulation_steps": 1}
    with make_loader("causal without labels", collate_fn=collate, **options) as loader:
        samples = 0
        for batch, info in loader.steps():
            assert torch.isfinite(info.scale(model(**batch).loss))
            assert info.loss_scale == 1
            samples += info.local_samples
    assert samples == COUNT


@pytest.mark.parametrize(
    ("make_model", "is_shifted"),
    [
        (make_llama, True),
        (make_own_llama, True),
        (make_t5, False),
        (lambda: make_bert(BertForMaskedLM), False),
        (lambda: make_bert(BertForTokenClassification), False),
        (make_gpt2, True),
        (lambda: nn.Linear(1, 1), None),
    ],
)
def test_a_model_says_whether_it_shifts_labels(make_model: Any, is_shifted: bool | None) -> None:
    assert predicts_next_token(make_model()) is is_shifted


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("make_model", [make_llama, make_own_llama, make_gpt2])
def test_any_class_trains_as_with_the_plain_trainer(make_model: Any, smoothing: float, tmp_path: Any) -> None:
    """Checks: WEIGHT. A Trainer that does not know the name also divides by first labels. For a user's class it also smooths
    without a shift.
    """
    found = []
    rows = [[token % 7 + 1 for token in range(size)] for size in range(2, 32)]
    samples = [{"input_ids": row, "labels": row} for row in rows]
    settings = {"label_smoothing_factor": smoothing, "max_steps": 3, "per_device_train_batch_size": 6}
    for is_plain in (True, False):
        model = make_model()
        arguments = make_arguments(tmp_path, optim="sgd", learning_rate=0.5, max_grad_norm=0, **settings)
        trainer = Trainer(model, arguments, train_dataset=samples, data_collator=pad)
        if not is_plain:
            enable(trainer, ODBOptions(token_budget=60))
        trainer.train()
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("task", ["causal", "classes", "token classes", "encoder and decoder"])
def test_the_trainer_needs_to_be_told_nothing(task: str, tmp_path: Any) -> None:
    """Checks: WEIGHT. The logged loss of the only update is that of all samples."""
    make_model, collate, add, _ = TASKS[task]
    settings = {"learning_rate": 0, "logging_steps": 1, "max_steps": 1, "max_grad_norm": 0}
    args = make_arguments(tmp_path, gradient_accumulation_steps=64, **settings)
    odb = ODBOptions(update_samples=None, token_budget=60, loader=nested(**{"window": 8}))
    trainer = ODBTrainer(model=make_model(), args=args, train_dataset=make_samples(add), data_collator=collate, odb=odb)
    trainer.model.train = lambda mode=True: trainer.model  # without dropout
    trainer.train()
    with torch.no_grad():
        whole = float(make_model()(**in_double(collate(make_samples(add)))).loss)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(whole, rel=1e-3)


def collate_speech(samples: list[dict[str, Any]]) -> dict[str, Any]:
    ones = [torch.ones(len(sample["input_values"]), dtype=torch.int64) for sample in samples]
    labels = pad_sequence([torch.tensor(sample["labels"]) for sample in samples], True, -100)
    waves = pad_sequence([sample["input_values"] for sample in samples], True)
    return {"input_values": waves, "attention_mask": pad_sequence(ones, True), "labels": labels}


def test_speech_with_a_ctc_loss_trains_as_with_the_plain_trainer(tmp_path: Any) -> None:
    """Checks: WEIGHT. Its mean over samples was weighed by labels, because the model shifts none: a gradient off by 17 %."""
    found = []
    waves = [torch.randn(150 + 37 * number % 400, generator=torch.manual_seed(number)) for number in range(COUNT)]
    samples = [{"input_values": wave, "labels": draw(random.Random(n), 2, 2 + n % 7)} for n, wave in enumerate(waves)]
    sizes = {"num_feat_extract_layers": 1, "conv_dim": (8,), "conv_stride": (8,), "conv_kernel": (10,)} | SIZES
    convolution = {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "feat_extract_norm": "layer",
    }
    config = Wav2Vec2Config(vocab_size=WORDS, ctc_loss_reduction="mean", **sizes, **convolution, mask_time_prob=0)
    for odb in (None, ODBOptions(token_budget=900, loader={"batching": Batching(length_fn=count_values)})):
        torch.manual_seed(0)
        model = Wav2Vec2ForCTC(config).eval()
        model.train = lambda mode=True, model=model: model
        settings = {"remove_unused_columns": False, "per_device_train_batch_size": 8, "max_steps": 2}
        arguments = make_arguments(tmp_path, optim="sgd", learning_rate=0.01, max_grad_norm=0, **settings)
        trainer = Trainer(model, arguments, train_dataset=samples, data_collator=collate_speech)
        if odb is not None:
            enable(trainer, odb)
        trainer.train()
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


def count_values(sample: dict[str, Any]) -> int:
    return len(sample["input_values"])


def lay_image(sample: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns what the processor of a vision-language model makes, with a token for each remaining patch."""
    grid = torch.tensor([[1, 2, 2 * (1 + number % 3)]])
    return {
        **{name: torch.tensor([values]) for name, values in sample.items()},
        "pixel_values": torch.zeros(int(grid.prod()), 5),
        "image_grid_thw": grid,
    }


def collate_images(samples: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        {name: sample[name][0].tolist() for name in ("input_ids", "attention_mask", "labels")} for sample in samples
    ]
    batch = dict(DataCollatorForSeq2Seq(TOKENIZER)(rows))
    for name in ("pixel_values", "image_grid_thw"):
        batch[name] = torch.cat([sample[name] for sample in samples])
    return batch


def test_the_samples_of_a_vision_language_model_are_counted_by_tokens_and_patches() -> None:
    samples = [lay_image(sample, number) for number, sample in enumerate(make_samples(TASKS["causal"][2]))]
    model = make_llama()
    with ODBDataLoader(
        samples,
        token_budget=60,
        collate_fn=collate_images,
        batching=Batching(window=8, max_patches=20),
        loss=Loss(accumulation_steps=64),
    ) as loader:
        added, patches = torch.zeros(()), 0
        for batch, info in loader.steps():
            assert info.local_costs == (len(batch["pixel_values"]) if not info.is_idle else 0,)
            assert len(batch["pixel_values"]) <= 20
            patches += len(batch["pixel_values"])
            text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
            added = added + info.scale(model(**text).loss)
    assert patches == sum(len(sample["pixel_values"]) for sample in samples)
    whole = {
        name: value for name, value in collate_images(samples).items() if name not in ("pixel_values", "image_grid_thw")
    }
    assert float(added.detach()) == pytest.approx(float(model(**whole).loss.detach()), rel=1e-6)


def test_default_collation_of_transformers_keeps_one_label_each() -> None:
    samples = [{"input_ids": [1, 2, 3], "label": number % 2} for number in range(9)]
    with ODBDataLoader(samples, token_budget=12, collate_fn=default_data_collator) as loader:  # type: ignore[arg-type]
        assert sum(info.local_supervised for _, info in loader.steps()) == 9


def test_what_a_collator_pads_to_counts() -> None:
    """Checks: BUDGET. The Trainer asks its collator. The supervised tokens of a causal sample stay its own."""
    length = CollatedLength(8, max_length=20)
    assert length({"input_ids": [1, 2]}) == 8
    assert length({"input_ids": [[1] * 9, [1]]}) == 32
    assert length({"prompt_ids": [1] * 3, "chosen_ids": [1] * 30, "rejected_ids": [1]}) == 48
    collate = DataCollatorForLanguageModeling(TOKENIZER, mlm=False, pad_to_multiple_of=8)
    added = 0
    with make_loader("causal without labels", collate_fn=collate, length_fn=CollatedLength(8)) as loader:
        for batch, info in loader.steps():
            assert batch["input_ids"].numel() == info.padded_tokens <= 60
            assert int((batch["labels"][:, 1:] != -100).sum()) == info.local_supervised
            added += 1
    assert added > 3
