"""LLaMA-Factory on one or two ranks, with its own settings: the samples trained on, and the distance of the weights from those
of one process with its own loss.

    torchrun --nproc-per-node 2 train_llamafactory.py FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from llamafactory.train import tuner
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from odb_ref.integrations.hf import ODBTrainer
from odb_ref.integrations.llamafactory import run_exp
from odb_ref.torch import UsageError
from tests.integrations.common import restore_on_processors
from tests.integrations.environments import resuming, tiny


def make_files(folder: Path) -> None:
    """Makes a model with random weights, its tokenizer, and a data set for each stage."""
    torch.manual_seed(0)
    tiny.make_tokenizer().save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=tiny.WORDS, pad_token_id=0, eos_token_id=1, **tiny.SIZES)).save_pretrained(
        folder / "model"
    )
    rows: dict[str, list[Any]] = {"sft": [], "pt": [], "dpo": []}
    for number in range(tiny.COUNT):
        choose = random.Random(number)
        prompt, answer, worse = (tiny.write(tiny.draw(choose, high)) for high in (8, 12, 14))
        rows["sft"].append({"instruction": prompt, "output": answer})
        rows["pt"].append({"text": answer})
        rows["dpo"].append({"instruction": prompt, "chosen": answer, "rejected": worse})
    columns = {
        "sft": {"columns": {"prompt": "instruction", "response": "output"}},
        "pt": {"columns": {"prompt": "text"}},
        "dpo": {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
    }
    info = {name: {"file_name": f"{name}.json", **extra} for name, extra in columns.items()}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for name, items in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(items))


class Keeper(TrainerCallback):
    """Keeps the trainer that LLaMA-Factory makes. Its loop passes the loader to callbacks, which leads to the trainer."""

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (trainer,) = [item for item in gc.get_objects() if isinstance(item, Trainer) and item.state is state]
        Keeper.trainer = tiny.record(trainer) if isinstance(trainer, ODBTrainer) else trainer


def train(folder: Path, stage: str, **settings: Any) -> dict[str, Any]:
    args = {
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder),
        "dataset": stage,
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "template": "empty",
        "cutoff_len": 24,
        "output_dir": str(folder.parent / f"out-{stage}"),
        "per_device_train_batch_size": 4,
        "learning_rate": tiny.RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1.0,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "flash_attn": "disabled",
        "disable_gradient_checkpointing": True,
        "overwrite_cache": True,
        **settings,
    }
    if os.environ.get("ODB_PLAIN"):
        tuner.run_exp(args, [Keeper()])
    else:
        run_exp(args, [Keeper()])
    trainer = Keeper.trainer
    if "ODB_PLAIN" in os.environ:
        return resuming.describe(trainer, []) | {"steps": trainer.state.max_steps}
    sampled = [[] if info.is_idle else describe_batch(batch, stage) for info, batch in trainer.batches]
    updates, state = tiny.join_updates(trainer, sampled), trainer.state
    if args["save_strategy"] != "no":
        return resuming.describe(trainer, updates)
    return {
        "samples": sorted(show_sample(sample) for sample in trainer.train_dataset),
        "batches": sampled,
        "rows": [batch["input_ids"].numel() for info, batch in trainer.batches if not info.is_idle],
        "epoch": state.epoch,
        "failures": [trainer.failures, state.log_history[-1].get("out_of_memory", 0)],
        "error": compare_weights(folder, trainer, updates),
    }


def compare_weights(folder: Path, trainer: Any, updates: list[list[str]]) -> float:
    """Returns how far the weights are from those of one process with the loss of the trainer's class, see `tiny.compare`."""
    rows = {show_sample(sample): dict(sample) for sample in trainer.train_dataset}
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    kind = next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("llamafactory"))

    def compute_loss(union: list[Any]) -> torch.Tensor:
        loss: torch.Tensor = kind.compute_loss(trainer, model, dict(trainer.data_collator(union)))
        return loss

    return tiny.compare(trainer, model, compute_loss, rows, exchange(folder, updates))


def exchange(folder: Path, updates: Any) -> list[Any]:
    """Gathers from all ranks through files, because LLaMA-Factory has ended the process group. Its store allows no other."""
    names = [folder.parent / f"updates-{rank}.json" for rank in range(int(os.environ["WORLD_SIZE"]))]
    half = folder / "updates.json"
    half.write_text(json.dumps(updates))
    half.rename(names[int(os.environ["RANK"])])
    while not all(name.exists() for name in names):
        time.sleep(0.1)
    return [json.loads(name.read_text()) for name in names]


def show_sample(sample: Any) -> str:
    if "input_ids" in sample:
        return tiny.show(sample["input_ids"])
    return tiny.show(sample["chosen_input_ids"] + sample["rejected_input_ids"])


def describe_batch(batch: Any, stage: str) -> list[str]:
    return tiny.describe([row[row > 0] for row in batch["input_ids"]], is_paired=stage == "dpo")


def main() -> None:
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    restore_on_processors()
    own = folder / f"rank-{rank}"  # the ranks do not wait for one another to write
    own.mkdir(exist_ok=True)
    make_files(own)
    stage = os.environ["ODB_STAGE"]
    if stage == "refused":
        found: Any = []
        for attempt in (
            lambda: run_exp({"stage": "sft", "packing": True}),
            lambda: run_exp({"stage": "pt"}),
            lambda: run_exp({"stage": "rm"}),
            lambda: train(own, "dpo", pref_bco_weight=0.1),
        ):
            try:
                attempt()
                found.append("nothing")
            except UsageError as error:
                found.append(str(error))
    else:
        found = train(own, stage, **json.loads(os.environ["ODB_SETTINGS"]))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
