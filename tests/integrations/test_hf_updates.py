"""The Hugging Face Trainer with its own updates: log, rates, weights and resume of the plain Trainer. Spec: R16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from odb_ref.integrations.hf import ODBOptions, enable  # noqa: E402
from odb_ref.torch import UsageError  # noqa: E402
from tests.integrations.common import set_environment  # noqa: E402
from tests.torch.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime"}
TIMES |= {"eval_samples_per_second", "eval_steps_per_second", "total_flos"}


class Texts(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        choose = random.Random(index)
        ids = [choose.randint(1, 31) for _ in range(choose.randint(3, 40))]
        labels = [-100] * choose.randint(1, 2) + ids
        return {"input_ids": ids, "labels": labels[: len(ids)]}


def collate(samples: list[Any]) -> Any:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def pad(name: str, value: int) -> Any:
        return torch.tensor([list(s[name]) + [value] * (longest - len(s[name])) for s in samples])

    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": torch.tensor(mask)}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, attn_implementation="eager", **sizes)).double()


def train(
    rank: int, world_size: int, folder: Path, odb: ODBOptions | None, resume: str, settings: dict[str, Any]
) -> Any:
    set_environment(rank, world_size)
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "warmup_steps": 3,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
    }
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **(defaults | settings)
    )
    data = Texts(settings.pop("samples", 45))
    trainer: Any = Trainer(model=make_model(), args=args, train_dataset=data, data_collator=collate)
    if odb is not None:
        trainer = enable(trainer, odb)
    trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    weights = [float(value) for p in trainer.model.parameters() for value in p.detach().flatten()]
    return trainer.state.log_history, trainer.state.global_step, trainer.state.max_steps, weights


def compare(tmp_path: Path, world_size: int, resume: str = "", before: int = 0, **settings: Any) -> None:
    """Trains twice, plainly and with ours, and compares all that is logged but for times, and the weights."""
    found = []
    for name, odb in (("plain", None), ("ours", ODBOptions(token_budget=80))):
        folder = tmp_path / name
        if resume:
            first = settings | {"save_strategy": "steps", "save_steps": before, "max_steps": before}
            first |= {"lr_scheduler_type": "constant"}
            results = run_ranks(world_size, train, world_size, folder, odb, "", first, timeout_s=120)
            assert not any(result.error for result in results), results
        options = settings | ({"lr_scheduler_type": "constant"} if resume else {})
        results = run_ranks(world_size, train, world_size, folder, odb, resume, options, timeout_s=120)
        assert not any(result.error for result in results), results
        found.append(results[0].value)
    (plain_log, *plain_steps, plain_weights), (our_log, *our_steps, our_weights) = found
    assert our_steps == plain_steps
    assert len(our_log) == len(plain_log)
    for ours, plain in zip(our_log, plain_log, strict=True):
        assert ours.keys() == plain.keys()
        for key in ours.keys() - TIMES:
            assert ours[key] == pytest.approx(plain[key], rel=1e-6, abs=1e-9), key
    # Losses are of float32 in transformers, and AdamW takes gradients near 0 up.
    assert our_weights == pytest.approx(plain_weights, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {}),
        (2, {"dataloader_drop_last": True}),
        (2, {"max_steps": 7, "gradient_accumulation_steps": 1}),
        (2, {"lr_scheduler_type": "cosine", "data_seed": 5, "dataloader_num_workers": 1, "logging_steps": 2}),
    ],
)
def test_the_log_and_the_weights_are_those_of_the_plain_trainer(
    tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    """Checks: UPDATE, WEIGHT. One line changed: the same losses, rates, epochs and weights."""
    compare(tmp_path, world_size, **settings)


def test_a_checkpoint_goes_on_as_the_plain_trainers(tmp_path: Path) -> None:
    """Checks: UPDATE, RESUME."""
    compare(tmp_path, 2, resume="checkpoint-3", before=3)


def test_a_collator_that_flattens_is_not_counted_as_one_that_pads() -> None:
    class DataCollatorWithFlattening:
        def __call__(self, samples: Any) -> Any:
            return samples

    from odb_ref.integrations.hf.data import choose_layout

    assert choose_layout(DataCollatorWithFlattening(), {}) == {"layout": "packed"}
    assert choose_layout(collate, {}) == {}
    with pytest.raises(UsageError, match="lays samples end to end"):
        choose_layout(DataCollatorWithFlattening(), {"layout": "padded"})


def test_what_an_update_holds_is_a_number_or_plain() -> None:
    with pytest.raises(UsageError, match="update_samples must be a number"):
        ODBOptions(token_budget=1, update_samples="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="update_samples must be at least 1"):
        ODBOptions(token_budget=1, update_samples=0)
