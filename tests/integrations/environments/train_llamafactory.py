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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback

from odb_ref.integrations.hf import ODBTrainer
from odb_ref.integrations.llamafactory import run_exp
from odb_ref.torch import UsageError
from tests.integrations.common import restore_on_processors
from tests.integrations.environments import resuming

WORDS = 40
COUNT = 31
RATE = 0.3
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def make_files(folder: Path) -> None:
    """Makes a model with random weights, its tokenizer, and a data set for each stage."""
    torch.manual_seed(0)
    names = {f"word{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(names, "word2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="word0", eos_token="word1", unk_token="word2")
    made.save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=1, **SIZES)).save_pretrained(
        folder / "model"
    )
    rows: dict[str, list[Any]] = {"sft": [], "pt": [], "dpo": []}
    for number in range(COUNT):
        choose = random.Random(number)

        def draw(high: int, choose: Any = choose) -> str:
            return " ".join(f"word{choose.randrange(3, WORDS)}" for _ in range(choose.randint(2, high)))

        prompt, answer, worse = draw(8), draw(12), draw(14)
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


class Recorder:
    """Records the batches of a Trainer before each step. Passes over several pairs run out of memory on the last rank, if a
    run should survive that.
    """

    failures = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "odb_step_info" in inputs:  # and not a whole update
            self.batches.append((inputs["odb_step_info"], inputs["input_ids"].clone()))
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_full = self.args.process_index == self.args.world_size - 1 and len(inputs["input_ids"]) > 2
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self.odb.survives_out_of_memory and is_full:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return found


class Keeper(TrainerCallback):
    """Keeps the trainer that LLaMA-Factory makes. Its loop passes the loader to callbacks, which leads to the trainer."""

    trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (trainer,) = [item for item in gc.get_objects() if isinstance(item, Trainer) and item.state is state]
        trainer.batches = []
        if isinstance(trainer, ODBTrainer):
            trainer.__class__ = type("Recorded", (Recorder, type(trainer)), {})
        Keeper.trainer = trainer


def get_weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


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
        "learning_rate": RATE,
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
    sampled = [[] if info.is_idle else describe(ids, stage) for info, ids in trainer.batches]
    state = trainer.state
    if args["save_strategy"] != "no":
        updates: list[list[str]] = [[]]
        for (info, _), samples in zip(trainer.batches, sampled, strict=True):
            updates[-1] += samples
            updates += [[]] if info.is_update_end else []
        return resuming.describe(trainer, updates[:-1])
    return {
        "samples": sorted(show(sample) for sample in trainer.train_dataset),
        "batches": sampled,
        "rows": [ids.numel() for info, ids in trainer.batches if not info.is_idle],
        "losses": [entry["loss"] for entry in state.log_history if "loss" in entry],
        "epoch": state.epoch,
        "failures": [trainer.failures, state.log_history[-1].get("out_of_memory", 0)],
        "error": compare(folder, trainer, sampled),
    }


def compare(folder: Path, trainer: Any, sampled: list[list[str]]) -> float:
    """Returns the distance of the weights from those of one process on the union of the ranks' batches, relative to the way
    they have gone, with the loss of the trainer's own class.
    """
    steps = [(info.is_update_end, texts) for (info, _), texts in zip(trainer.batches, sampled, strict=True)]
    everybody = exchange(folder, steps)
    rows = {show(sample): sample for sample in trainer.train_dataset}
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    kind = next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("llamafactory"))
    start, optimizer = get_weights(model), torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    union: list[Any] = []
    for ranks in zip(*everybody, strict=True):
        union += [dict(rows[text]) for _, texts in ranks for text in texts]
        if ranks[0][0]:
            kind.compute_loss(trainer, model, dict(trainer.data_collator(union))).backward()
            optimizer.step()
            optimizer.zero_grad()
            union = []
    change = get_weights(model) - start
    return float(torch.linalg.norm(get_weights(trainer.model) - start - change) / torch.linalg.norm(change))


def exchange(folder: Path, steps: Any) -> list[Any]:
    """Gathers from all ranks through files, because LLaMA-Factory has ended the process group. Its store allows no other."""
    names = [folder.parent / f"steps-{rank}.json" for rank in range(int(os.environ["WORLD_SIZE"]))]
    half = folder / "steps.json"
    half.write_text(json.dumps(steps))
    half.rename(names[int(os.environ["RANK"])])
    while not all(name.exists() for name in names):
        time.sleep(0.1)
    return [json.loads(name.read_text()) for name in names]


def show(sample: Any) -> str:
    if "input_ids" in sample:
        return " ".join(map(str, sample["input_ids"]))
    return " ".join(map(str, sample["chosen_input_ids"] + sample["rejected_input_ids"]))


def describe(ids: Any, stage: str) -> list[str]:
    """Returns the samples of a batch by their tokens."""
    rows = [row[row > 0] for row in ids]
    if stage == "dpo":
        half = len(rows) // 2
        rows = [torch.cat([rows[i], rows[half + i]]) for i in range(half)]
    return [" ".join(map(str, row.tolist())) for row in rows]


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
