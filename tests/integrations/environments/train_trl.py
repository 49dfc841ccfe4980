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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from odb_ref.integrations.trl import configure_trainer
from tests.helpers.options import nested
from tests.integrations.environments import resuming

WORDS = 40
COUNT = 31
RATE = 0.3
FREE = {"update_samples": None, "window": 12, "timeout_s": 30}
"""Free mode, with updates that one process can train on again."""
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def make_tokenizer() -> Any:
    names = {f"word{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(names, "word2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="word0", eos_token="word1")


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, attn_implementation="eager", pad_token_id=0, **SIZES))


def draw(choose: random.Random, high: int) -> list[int]:
    return [choose.randrange(3, WORDS) for _ in range(choose.randint(2, high))]


def make_texts() -> Any:
    rows = []
    for number in range(COUNT):
        choose = random.Random(number)
        prompt, answer = draw(choose, 8), draw(choose, 12)
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return Dataset.from_list(rows)


def make_pairs(count: int = COUNT) -> Any:
    rows = []
    for number in range(count):
        choose = random.Random(number)
        texts = {"prompt": draw(choose, 6), "chosen": draw(choose, 9), "rejected": draw(choose, 14)}
        rows.append({name: " " + " ".join(f"word{word}" for word in words) for name, words in texts.items()})
    return Dataset.from_list(rows)


class Recorder:
    """Records the batches of a Trainer before each step, for any order of its classes."""

    failures = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "odb_step_info" in inputs:  # and not a whole update
            self.batches.append((inputs["odb_step_info"], {k: v for k, v in inputs.items() if torch.is_tensor(v)}))
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs out of memory on the last rank, if that should be survived, after TRL has gathered for its metrics."""
        is_last = self.args.process_index == self.args.world_size - 1
        is_full = "odb_step_info" in inputs and len(inputs["input_ids"]) > 2
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self.odb.survives_out_of_memory and is_last and is_full:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return found


def record(trainer: Any) -> Any:
    trainer.__class__ = type("Recorded", (Recorder, type(trainer)), {})
    trainer.batches = []
    return trainer


def get_weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def train(make: Any, key: str, **options: Any) -> dict[str, Any]:
    trainer = record(configure_trainer(make(), **nested(evaluation={}, **FREE, **options)))
    trainer.train()
    numbers = list_samples(trainer, key)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "samples": sorted(show(sample, trainer.args.max_length) for sample in trainer.train_dataset),
        "batches": numbers,
        "rows": [batch["input_ids"].numel() for info, batch in trainer.batches if not info.is_idle],
        "oversize": [info.local_samples == 1 for info, _ in trainer.batches if not info.is_idle],
        "error": compare(
            trainer,
            make(),
            [(info.is_update_end, batch) for (info, _), batch in zip(trainer.batches, numbers, strict=True)],
        ),
        "losses": [entry["loss"] for entry in logs],
        "logs": logs[-1],
        "epoch": trainer.state.epoch,
        "failures": trainer.failures,
        "evaluated": trainer.evaluate() if trainer.eval_dataset is not None else {},
    }


def list_samples(trainer: Any, key: str) -> list[list[str]]:
    return [[] if info.is_idle else sorted(describe(batch, key)) for info, batch in trainer.batches]


def resume(make: Any, folder: Path, key: str, **options: Any) -> dict[str, Any]:
    """Runs two epochs, and again from the middle of each. Returns the samples of each update."""

    def train(checkpoint: str | None) -> dict[str, Any]:
        trainer = record(configure_trainer(make(folder, **resuming.SETTINGS), **nested(**options)))
        trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
        updates: list[list[str]] = [[]]
        for (info, _), samples in zip(trainer.batches, list_samples(trainer, key), strict=True):
            updates[-1] += samples
            updates += [[]] if info.is_update_end else []
        return resuming.describe(trainer, updates[:-1])

    return resuming.go_on(train)


LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "train_loss")
"""The logged values that concern updates. TRL's metrics are means over micro-batches, which differ here."""


def compare_plain(make: Any, **options: Any) -> list[Any]:
    """Returns what TRL's own trainer logs, and ours by default, with the final weights."""
    found = []
    for is_ours in (False, True):
        trainer = configure_trainer(make(), **options) if is_ours else make()
        trainer.train()
        logs = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
        found.append([logs, trainer.state.max_steps, get_weights(trainer.model).tolist()])
    return found


def compare(trainer: Any, plain: Any, steps: list[tuple[bool, list[str]]]) -> float:
    """Returns the distance of the weights from those of one process with TRL's own loss over the union of the ranks' batches,
    relative to the distance trained.
    """
    everybody = [steps]
    if dist.is_initialized():
        everybody *= dist.get_world_size()
        dist.all_gather_object(everybody, steps)
    rows = {show(sample, plain.args.max_length): sample for sample in plain.train_dataset}
    model, union = plain.model, []
    start, optimizer = get_weights(model), torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for ranks in zip(*everybody, strict=True):
        union += [rows[text] for _, texts in ranks for text in texts]
        if ranks[0][0]:
            plain.compute_loss(model, plain.data_collator(union)).backward()
            optimizer.step()
            optimizer.zero_grad()
            union = []
    change = get_weights(model) - start
    return float(torch.linalg.norm(get_weights(trainer.model) - start - change) / torch.linalg.norm(change))


def show(sample: Any, max_length: int | None) -> str:
    """Returns a sample in the form of `describe`."""
    if "input_ids" in sample:
        return " ".join(map(str, sample["input_ids"]))
    rows = [(sample.get("prompt_ids", []) + sample[name])[:max_length] for name in ("chosen_ids", "rejected_ids")]
    return " ".join(map(str, rows[0] + rows[1]))


def describe(batch: Any, key: str) -> list[str]:
    """Returns the samples of a batch by their tokens, from rows or from concatenated samples."""
    ids = batch["input_ids"]
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        rows = [ids[0, start:end] for start, end in itertools.pairwise(starts)]
    else:
        rows = [row[row > 0] for row in ids]
        if key == "pairs":
            half = len(rows) // 2
            rows = [torch.cat([rows[i], rows[half + i]]) for i in range(half)]
    return [" ".join(map(str, row.tolist())) for row in rows]


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "num_train_epochs": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
}


def make_sft(folder: Path, *, steps: int = 1, **settings: Any) -> Any:
    texts = make_texts()
    args = SFTConfig(output_dir=str(folder), gradient_accumulation_steps=steps, **(COMMON | settings))
    return SFTTrainer(make_model(), args, train_dataset=texts, eval_dataset=texts, processing_class=make_tokenizer())


def make_dpo(folder: Path, *, count: int = COUNT, **settings: Any) -> Any:
    args = DPOConfig(output_dir=str(folder), **(COMMON | settings))
    pairs = make_pairs(count)
    return DPOTrainer(
        make_model(), make_model(), args, train_dataset=pairs, eval_dataset=pairs, processing_class=make_tokenizer()
    )


def make_reward(folder: Path, **settings: Any) -> Any:
    settings = COMMON | {"max_length": None, "center_rewards_coefficient": 0.1} | settings
    args = RewardConfig(output_dir=str(folder), **settings)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=WORDS, num_labels=1, attn_implementation="eager", pad_token_id=0, **SIZES)
    )
    return RewardTrainer(model, args, train_dataset=make_pairs(), processing_class=make_tokenizer())


def make_kto(folder: Path) -> Any:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in make_pairs()]
    args = KTOConfig(output_dir=str(folder), max_length=20, **COMMON)
    data = Dataset.from_list(rows)
    return KTOTrainer(make_model(), make_model(), args, train_dataset=data, processing_class=make_tokenizer())


def read_stream(folder: Path) -> list[str]:
    """Returns the samples that this rank trains on in the first epoch of a stream that all ranks open alike."""
    args = SFTConfig(output_dir=str(folder), max_steps=20, max_length=20, **COMMON)
    texts = make_texts().to_iterable_dataset(num_shards=3)
    made = SFTTrainer(make_model(), args, train_dataset=texts, processing_class=make_tokenizer())
    trainer = record(configure_trainer(made, **nested(**FREE)))
    trainer.train()
    first = [batch for info, batch in trainer.batches if info.epoch == 0 and not info.is_idle]
    return [text for batch in first for text in describe(batch, "texts")]


def train_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["sft"] = train(lambda: make_sft(folder, max_length=20), "texts")
    found["guarded"] = train(lambda: make_sft(folder, max_length=20), "texts", survives_out_of_memory=True)
    free = {"steps": 2, "max_length": None, "padding_free": True}
    found["padding_free"] = train(lambda: make_sft(folder, **free), "texts", token_budget=60)
    found["dpo"] = train(lambda: make_dpo(folder, max_length=20, pad_to_multiple_of=4), "pairs")
    found["guarded_dpo"] = train(
        lambda: make_dpo(folder, max_length=20, gradient_accumulation_steps=2),
        "pairs",
        survives_out_of_memory=True,
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
    return {
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
