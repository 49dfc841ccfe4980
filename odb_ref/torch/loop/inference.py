"""Computes a model's output for each sample of a data set, once, in the data set's order, over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.core.errors import UsageError
from odb_ref.torch import ODBDataLoader
from odb_ref.torch.batches import Batch
from odb_ref.torch.gathering import check_outputs, own_memory
from odb_ref.torch.loop.memory import attempt, release_memory
from odb_ref.torch.loop.ranks import gather_results
from odb_ref.torch.settings import Batching, Loss, Protocol

_LOG: Final = logging.getLogger("odb_ref")

Element = TypeVar("Element")
Output = TypeVar("Output")


def generate(
    run: Callable[[Batch], Iterable[Output]],
    dataset: Dataset[Element],
    *,
    token_budget: int,
    length_fn: Callable[[Element], int],
    collate_fn: Callable[[list[Element]], Batch],
    window: int = 1024,
    num_workers: int = 0,
    group: dist.ProcessGroup | None = None,
) -> list[Output]:
    """Returns ``run``'s output for each sample of a map-style data set, in its order, on every rank. A collective.

    ``run(batch)`` returns one output per sample: a list, or a tensor, whose rows are moved to the CPU. ``length_fn`` returns
    how much of the budget a sample takes: for text generation, the prompt plus the text that may follow. ``window`` and
    ``num_workers`` are those of the `ODBDataLoader` that reads. If memory runs out, a batch is collated again in halves.
    ``run`` must not contain collectives, because ranks run different numbers of batches, for example after a split.

    Raises: what ``run`` raises, and OutOfMemoryError for a sample that does not fit alone; then JobError on the other ranks.
    """
    numbered = _Numbered(dataset)

    def run_own() -> dict[int, Output]:
        found: dict[int, Output] = {}
        loader = ODBDataLoader[list[tuple[int, Element]]](
            numbered,
            token_budget=token_budget,
            collate_fn=_keep,
            num_workers=num_workers,
            batching=Batching(length_fn=partial(_measure, length_fn), window=window),
            loss=Loss(scaling="none", supervised_fn=_count_nothing),
            protocol=Protocol(process_group=group, is_apart=group is not None),
        )
        with loader, torch.no_grad():  # not inference mode: its tensors could not be used in training
            for samples, info in loader.steps():
                if not info.is_idle:
                    found |= _run(run, collate_fn, samples)
        return found

    outputs = {number: output for part in gather_results(run_own, group) for number, output in part.items()}
    return [outputs[number] for number in range(len(numbered))]


class _Numbered(Dataset[tuple[int, Element]]):
    """A data set with numbered samples. Hides attributes that may differ between ranks, such as a folder, from `list_facts`."""

    def __init__(self, dataset: Dataset[Element]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, number: int) -> tuple[int, Element]:
        return number, self._dataset[number]


def _measure(length_fn: Callable[[Element], int], numbered: tuple[int, Element]) -> int:
    return length_fn(numbered[1])


def _count_nothing(_: object) -> int:
    return 0


def _keep(samples: list[tuple[int, Element]]) -> list[tuple[int, Element]]:
    """Leaves the samples uncollated, so that fewer of them can be collated if memory runs out."""
    return samples


def _run(
    run: Callable[[Batch], Iterable[Output]],
    collate_fn: Callable[[list[Element]], Batch],
    samples: list[tuple[int, Element]],
) -> dict[int, Output]:
    found: dict[int, Output] = {}
    parts = [samples]
    while parts:
        part = parts.pop(0)
        outputs, text = attempt(partial(_compute, run, collate_fn, [sample for _, sample in part]))
        if outputs is not None:
            if len(outputs) != len(part):
                raise UsageError(f"run gave {len(outputs)} outputs for a batch of {len(part)} samples")
            found |= {number: output for (number, _), output in zip(part, outputs, strict=True)}
            continue
        if len(part) == 1:
            raise torch.OutOfMemoryError(f"sample {part[0][0]} does not fit alone: {text}")
        _LOG.warning("out of memory: a batch of %d samples goes in halves", len(part))
        release_memory()
        half = (len(part) + 1) // 2
        parts = [part[:half], part[half:], *parts]
    return found


def _compute(
    run: Callable[[Batch], Iterable[Output]], collate_fn: Callable[[list[Element]], Batch], samples: list[Element]
) -> list[Output]:
    outputs = run(collate_fn(samples))
    check_outputs(outputs)
    return [*map(own_memory, outputs.cpu() if isinstance(outputs, torch.Tensor) else outputs)]
