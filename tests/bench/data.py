"""The data sets and collate functions of the jobs, the same for every loader."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from odb_sim.inputs.lengths import load_lengths
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def compute_shards(trace: str, sizes: Sequence[int]) -> list[list[int]]:
    """Returns each rank's sample lengths: rows of a bundled trace, shuffled, repeated only after all were used."""
    tokens = load_lengths(trace).tokens
    rows = np.resize(np.random.default_rng(0).permutation(len(tokens)), sum(sizes))
    firsts = np.concatenate(([0], np.cumsum(sizes)))
    return [tokens[rows[first : first + size]].tolist() for first, size in zip(firsts, sizes, strict=False)]


class Texts(Dataset[dict[str, Any]]):
    """Token sequences of given lengths. ``masked`` is the average share of each that is prompt, without loss. Reading one takes
    ``read_s``, but no processor.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        first: int,
        *,
        masked: float = 0.0,
        fault: dict[str, Any] | None = None,
        read_s: float = 0.0,
    ):
        self.lengths, self.first, self.masked, self.fault = list(lengths), first, masked, fault or {}
        self.read_s = read_s

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fault.get("at") == index:
            return self._fail(index)
        if self.read_s:
            time.sleep(self.read_s)
        number = self.first + index
        ids = torch.arange(number, number + self.lengths[index]) % 31 + 1
        labels = ids.clone()
        if self.masked:
            share = np.random.default_rng(number).uniform(0, 2 * self.masked)
            labels[: int(share * len(ids))] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "number": number}

    def _fail(self, index: int) -> dict[str, Any]:
        match self.fault["kind"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "empty":
                nothing = torch.zeros(0, dtype=torch.int64)
                return {"input_ids": nothing, "labels": nothing, "attention_mask": nothing, "number": index}
            case "no_input_ids":
                return {"tokens": torch.zeros(3, dtype=torch.int64), "number": index}
        raise ValueError(f"sample {index} is broken")


class Stream(IterableDataset[dict[str, Any]]):
    """The same samples in order, without random access. Each worker reads its part."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.texts[index] for index in range(first, len(self.texts), step))


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads sequences, and makes a tensor of every other key, including those that a loader added."""
    batch = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        if key in PADDING:
            batch[key] = pad_sequence(values, batch_first=True, padding_value=PADDING[key])
        else:
            batch[key] = torch.as_tensor(values)
    return batch


def collate_known(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes only what a model needs, as many collate functions do, and drops what a loader added to the samples."""
    return collate([{key: sample[key] for key in (*PADDING, "number")} for sample in samples])


class BrokenCollate:
    """Raises for the batch that holds a certain sample."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if any(sample["number"] == self.number for sample in samples):
            raise RuntimeError(f"sample {self.number} cannot be collated")
        return collate(samples)
