"""What the scripts for TRL and LLaMA-Factory share: a tiny vocabulary, a record of batches, and one process to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 40
COUNT = 31
"""The samples of a data set."""
RATE = 0.3
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def make_tokenizer() -> Any:
    names = {f"word{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(names, "word2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="word0", eos_token="word1", unk_token="word2")


def draw(choose: random.Random, high: int) -> list[int]:
    """Returns the words of a text of 2 to ``high``."""
    return [choose.randrange(3, WORDS) for _ in range(choose.randint(2, high))]


def write(words: Sequence[int]) -> str:
    return " ".join(f"word{word}" for word in words)


class Recorder:
    """Records the batches of a Trainer before each step, for any order of its classes."""

    failures = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "odb_step_info" in inputs:  # and not a whole update
            self.batches.append((inputs["odb_step_info"], {k: v for k, v in inputs.items() if torch.is_tensor(v)}))
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs out of memory on the last rank, if that should be survived, after the framework has gathered its metrics."""
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


def join_updates(trainer: Any, batches: Sequence[list[str]]) -> list[list[str]]:
    """Returns the samples of each update, of those of each batch."""
    updates: list[list[str]] = [[]]
    for (info, _), samples in zip(trainer.batches, batches, strict=True):
        updates[-1] += samples
        updates += [[]] if info.is_update_end else []
    return updates[:-1]


def show(words: Sequence[int]) -> str:
    return " ".join(map(str, words))


def describe(rows: Sequence[torch.Tensor], *, is_paired: bool) -> list[str]:
    """Returns the samples of a batch by their tokens. The second rows of pairs follow all the first."""
    if is_paired:
        half = len(rows) // 2
        rows = [torch.cat([rows[i], rows[half + i]]) for i in range(half)]
    return [show(row.tolist()) for row in rows]


def get_weights(model: Any) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def compare(
    trainer: Any,
    model: Any,
    compute_loss: Callable[[Any], torch.Tensor],
    rows: dict[str, Any],
    everybody: Sequence[Sequence[list[str]]],
) -> float:
    """Returns the distance of the trainer's weights from those of one process that trains ``model`` on the union of the ranks'
    batches, relative to the distance trained.

    ``everybody`` are the samples of each update on each rank, and ``rows`` what ``compute_loss`` gets for each.
    """
    start, optimizer = get_weights(model), torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for parts in zip(*everybody, strict=True):
        compute_loss([rows[text] for texts in parts for text in texts]).backward()
        optimizer.step()
        optimizer.zero_grad()
    change = get_weights(model) - start
    return float(torch.linalg.norm(get_weights(trainer.model) - start - change) / torch.linalg.norm(change))
