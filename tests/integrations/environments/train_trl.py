"""TRL's trainers on one or two ranks, with its own collators and losses: the samples of each update, and the weights.

torchrun --nproc-per-node 2 train_trl.py FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from odb_ref.integrations.trl import configure_trainer
from tests.helpers.options import nested
from tests.integrations.environments import resuming, tiny

FREE = {"update_samples": None, "window": 12, "timeout_s": 30}
"""Free mode, with updates that one process can train on again."""


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=tiny.WORDS, attn_implementation="eager", pad_token_id=0, **tiny.SIZES)
    )


def make_texts() -> Any:
    rows = []
    for number in range(tiny.COUNT):
        choose = random.Random(number)
        prompt, answer = tiny.draw(choose, 8), tiny.draw(choose, 12)
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return Dataset.from_list(rows)


def make_prompts() -> Any:
    """Returns texts whose labels TRL's own preparation, or its collator, chooses by a mask of the completion."""
    rows = [{name: row[name] for name in ("prompt", "chosen")} for row in make_pairs()]
    return Dataset.from_list(rows).rename_column("chosen", "completion")


def make_turns() -> Any:
    """Returns conversations whose labels a mask of the assistant's turns chooses."""
    roles = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [
            {"messages": [{"role": role, "content": row[name]} for role, name in zip(roles, PARTS, strict=True)]}
            for row in make_pairs()
        ]
    )


def make_pairs(count: int = tiny.COUNT) -> Any:
    rows = []
    for number in range(count):
        choose = random.Random(number)
        texts = {"prompt": tiny.draw(choose, 6), "chosen": tiny.draw(choose, 9), "rejected": tiny.draw(choose, 14)}
        rows.append({name: f" {tiny.write(words)}" for name, words in texts.items()})
    return Dataset.from_list(rows)


def train(make: Any, key: str, **options: Any) -> dict[str, Any]:
    trainer = tiny.record(configure_trainer(make(), **nested(evaluation={}, **FREE, **options)))
    trainer.train()
    numbers = list_samples(trainer, key)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "samples": sorted(show_sample(sample, trainer.args.max_length) for sample in trainer.train_dataset),
        "batches": numbers,
        "rows": [batch["input_ids"].numel() for info, batch in trainer.batches if not info.is_idle],
        "error": compare_weights(trainer, make(), tiny.join_updates(trainer, numbers)),
        "logs": logs[-1],
        "epoch": trainer.state.epoch,
        "failures": trainer.failures,
        "evaluated": trainer.evaluate() if trainer.eval_dataset is not None else {},
    }


def list_samples(trainer: Any, key: str) -> list[list[str]]:
    return [[] if info.is_idle else sorted(describe_batch(batch, key)) for info, batch in trainer.batches]


def resume(make: Any, folder: Path, key: str, **options: Any) -> dict[str, Any]:
    """Runs two epochs, and again from the middle of each. Returns the samples of each update."""

    def train(checkpoint: str | None) -> dict[str, Any]:
        trainer = tiny.record(configure_trainer(make(folder, **resuming.SETTINGS), **nested(**options)))
        trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
        return resuming.describe(trainer, tiny.join_updates(trainer, list_samples(trainer, key)))

    return resuming.go_on(train)


PARTS = ("prompt", "chosen", "prompt", "rejected")
TEMPLATE = (  # a mask of the assistant begins with a token, not with a space
    "{% for message in messages %} {% if message.role == 'assistant' %}{% generation %}{{ message.content.strip() }}"
    "{% endgeneration %}{% else %}{{ message.content.strip() }}{% endif %}{% endfor %}"
)
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "train_loss")
"""The logged values that concern updates. TRL's metrics are means over micro-batches, which differ here."""


def compare_plain(make: Any, **options: Any) -> list[Any]:
    """Returns what TRL's own trainer logs, and ours by default, with the final weights."""
    found = []
    for is_ours in (False, True):
        trainer = configure_trainer(make(), **options) if is_ours else make()
        trainer.train()
        logs = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
        found.append([logs, trainer.state.max_steps, tiny.get_weights(trainer.model).tolist()])
    return found


def compare_weights(trainer: Any, plain: Any, updates: list[list[str]]) -> float:
    """Returns how far the weights are from those of one process with TRL's own loss, see `tiny.compare`."""
    everybody = [updates]
    if dist.is_initialized():
        everybody *= dist.get_world_size()
        dist.all_gather_object(everybody, updates)
    rows = {show_sample(sample, plain.args.max_length): sample for sample in plain.train_dataset}

    def compute_loss(union: list[Any]) -> torch.Tensor:
        loss: torch.Tensor = plain.compute_loss(plain.model, plain.data_collator(union))
        return loss

    return tiny.compare(trainer, plain.model, compute_loss, rows, everybody)


def show_sample(sample: Any, max_length: int | None) -> str:
    """Returns a sample in the form of `describe_batch`."""
    if "input_ids" in sample:
        return tiny.show(sample["input_ids"])
    chosen, rejected = (sample.get("prompt_ids", []) + sample[name] for name in ("chosen_ids", "rejected_ids"))
    return tiny.show(chosen[:max_length] + rejected[:max_length])


def describe_batch(batch: Any, key: str) -> list[str]:
    """Returns the samples of a batch by their tokens, from rows or from concatenated samples."""
    ids = batch["input_ids"]
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        return tiny.describe([ids[0, start:end] for start, end in itertools.pairwise(starts)], is_paired=False)
    return tiny.describe([row[row > 0] for row in ids], is_paired=key == "pairs")


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "optim": "sgd",
    "learning_rate": tiny.RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "num_train_epochs": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
}


def make_sft(folder: Path, *, steps: int = 1, texts: Any = None, **settings: Any) -> Any:
    texts = make_texts() if texts is None else texts
    args = SFTConfig(output_dir=str(folder), gradient_accumulation_steps=steps, **(COMMON | settings))
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return SFTTrainer(make_model(), args, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer)


def make_dpo(folder: Path, *, count: int = tiny.COUNT, **settings: Any) -> Any:
    args = DPOConfig(output_dir=str(folder), **(COMMON | settings))
    pairs = make_pairs(count)
    return DPOTrainer(
        make_model(),
        make_model(),
        args,
        train_dataset=pairs,
        eval_dataset=pairs,
        processing_class=tiny.make_tokenizer(),
    )


def make_reward(folder: Path, **settings: Any) -> Any:
    settings = COMMON | {"max_length": None, "center_rewards_coefficient": 0.1} | settings
    args = RewardConfig(output_dir=str(folder), **settings)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=tiny.WORDS, num_labels=1, attn_implementation="eager", pad_token_id=0, **tiny.SIZES)
    )
    return RewardTrainer(model, args, train_dataset=make_pairs(), processing_class=tiny.make_tokenizer())


def make_kto(folder: Path) -> Any:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in make_pairs()]
    args = KTOConfig(output_dir=str(folder), max_length=20, **COMMON)
    data = Dataset.from_list(rows)
    return KTOTrainer(make_model(), make_model(), args, train_dataset=data, processing_class=tiny.make_tokenizer())


def read_stream(folder: Path) -> list[str]:
    """Returns the samples that this rank trains on in the first epoch of a stream that all ranks open alike."""
    args = SFTConfig(output_dir=str(folder), max_steps=20, max_length=20, **COMMON)
    texts = make_texts().to_iterable_dataset(num_shards=3)
    made = SFTTrainer(make_model(), args, train_dataset=texts, processing_class=tiny.make_tokenizer())
    trainer = tiny.record(configure_trainer(made, **nested(**FREE)))
    trainer.train()
    first = [batch for info, batch in trainer.batches if info.epoch == 0 and not info.is_idle]
    return [text for batch in first for text in describe_batch(batch, "texts")]


def train_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["sft"] = train(lambda: make_sft(folder, max_length=20), "texts")
    found["guarded"] = train(lambda: make_sft(folder, max_length=20), "texts", survives_out_of_memory=True)
    free = {"steps": 2, "max_length": None, "padding_free": True}
    found["padding_free"] = train(lambda: make_sft(folder, **free), "texts", token_budget=60)
    found["dpo"] = train(lambda: make_dpo(folder, max_length=20, pad_to_multiple_of=4), "pairs")
    found["guarded_dpo"] = train(
        lambda: make_dpo(folder, max_length=20, gradient_accumulation_steps=2), "pairs", survives_out_of_memory=True
    )
    found["guarded_reward"] = train(lambda: make_reward(folder), "pairs", token_budget=160, survives_out_of_memory=True)
    found["stream"] = read_stream(folder)
    found["refused"] = []
    for make, budget in (
        (partial(make_sft, packing=True, max_length=20), 60),
        (partial(make_sft, max_length=None), None),
        (partial(make_dpo, max_length=20, loss_type=["sigmoid", "sft"]), 60),
        (make_kto, 60),
    ):
        try:
            configure_trainer(make(folder), token_budget=budget)
        except Exception as error:
            found["refused"].append(f"{type(error).__name__}: {error}")
    return found


def resume_all(folder: Path) -> dict[str, Any]:
    sft, dpo = partial(make_sft, max_length=20), partial(make_dpo, max_length=20)
    free = partial(make_sft, steps=2, max_length=None, padding_free=True)
    return {
        "sft": resume(sft, folder / "sft", "texts"),
        "padding_free": resume(free, folder / "free", "texts", token_budget=60, **FREE),
        "dpo": resume(dpo, folder / "dpo", "pairs"),
    }


def compare_all(folder: Path) -> dict[str, Any]:
    settings = {"num_train_epochs": 2, "learning_rate": 0.05, "lr_scheduler_type": "linear"}
    packed = {"steps": 2, "max_length": None, "padding_free": True}
    windows = {"max_length": 20, "gradient_accumulation_steps": 2}
    masked = {"steps": 2, "max_length": 16, **settings}  # which cuts some
    kinds = {
        "prompts": {"texts": make_prompts()},
        "prompts that count": {"texts": make_prompts(), "completion_only_loss": False},
        "turns": {"texts": make_turns(), "assistant_only_loss": True},
    }
    return {kind: compare_plain(partial(make_sft, folder, **masked, **options)) for kind, options in kinds.items()} | {
        "sft": compare_plain(lambda: make_sft(folder, steps=2, max_length=20, **settings)),
        "padding_free": compare_plain(lambda: make_sft(folder, **packed, **settings), token_budget=60),
        "reward": compare_plain(lambda: make_reward(folder, **settings), token_budget=160),
        "dpo": compare_plain(lambda: make_dpo(folder, count=32, **windows, **settings)),
        "dpo, an uneven end": compare_plain(lambda: make_dpo(folder, **windows, **settings)),
    }


TASKS = {"resume": resume_all, "compare": compare_all}


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = TASKS.get(os.environ.get("ODB_TASK", ""), train_all)(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
