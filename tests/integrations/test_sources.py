"""Streams of the libraries that people read their data with, as `docs/howto/sources.md` names them.

Only `datasets` is installed by `make setup`. The others are tested by hand:
``pip install webdataset litdata mosaicml-streaming``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_ref import Faults, Loss, ODBDataLoader
from tests.torch.ranks import get_values, run_ranks

SAMPLES, RANKS = 240, 2
BREAK_AFTER = 4


def get_length(number: int) -> int:
    return 1 + number * 7 % 31


def make_sample(row: Any) -> dict[str, Any]:
    """Returns a sample, with its number, from a row of any of the libraries."""
    number = int((row[0] if isinstance(row, tuple) else row)["number"])
    return {"input_ids": torch.zeros(get_length(number), dtype=torch.long), "number": number}


@dataclass(frozen=True, slots=True)
class Source:
    """How a library's stream is written to a folder, read by one rank, and set to an epoch."""

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    set_epoch: Callable[[Any, int], object] = lambda data, epoch: None


def write_webdataset(folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "%02d.tar"), maxcount=20, verbose=0) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06}", "json": {"number": number}})


def read_webdataset(folder: Path) -> Any:
    import webdataset

    shards = f"{folder}/{{00..{SAMPLES // 20 - 1:02}}}.tar"
    stream = webdataset.WebDataset(shards, shardshuffle=12, seed=1, nodesplitter=webdataset.split_by_node)
    return stream.shuffle(30, seed=3).decode().to_tuple("json").map(make_sample)


def read_datasets(folder: Path) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rows = Dataset.from_list([{"number": number} for number in range(SAMPLES)])
    stream = rows.to_iterable_dataset(num_shards=12).shuffle(seed=1, buffer_size=30)
    return split_dataset_by_node(stream, dist.get_rank(), RANKS).map(make_sample)


def read_litdata(folder: Path) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False, transform=make_sample)


def write_litdata(folder: Path) -> None:
    import litdata

    litdata.optimize(_make_row, list(range(SAMPLES)), str(folder), chunk_size=20, num_workers=1)


def _make_row(number: int) -> dict[str, int]:
    return {"number": number}


def write_streaming(folder: Path) -> None:
    import streaming

    with streaming.MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=500) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})


def read_streaming(folder: Path) -> Any:
    import streaming

    rank = str(dist.get_rank())  # it reads what a launcher sets
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))

    class Stream(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> dict[str, Any]:
            return make_sample(super().__getitem__(at))

    return Stream(local=str(folder), shuffle=True, batch_size=1)


SOURCES = {
    "datasets": Source(lambda folder: None, read_datasets, lambda data, epoch: data.set_epoch(epoch)),
    "webdataset": Source(write_webdataset, read_webdataset),
    "litdata": Source(write_litdata, read_litdata, lambda data, epoch: data.set_epoch(epoch + 1)),
    "streaming": Source(write_streaming, read_streaming, lambda data, epoch: setattr(data, "next_epoch", epoch)),
}


def collate(samples: Sequence[dict[str, Any]]) -> list[int]:
    return [sample["number"] for sample in samples]


def read_epoch(
    data: Any, source: Source, epoch: int, options: dict[str, Any], state: Any = None
) -> tuple[list[int], Any, int]:
    """Returns what an epoch trained on, a state saved inside it, and how many samples were trained on before that."""
    numbers: list[int] = []
    saved, taken = None, 0
    faults = Faults(timeout_s=20)
    with ODBDataLoader(data, token_budget=128, collate_fn=collate, faults=faults, **options) as loader:
        source.set_epoch(data, epoch)
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        for place, (batch, info) in enumerate(loader.steps(), 1):
            numbers += [] if info.is_idle else batch
            if place == BREAK_AFTER:
                saved, taken = loader.state_dict(), len(numbers)
    return numbers, saved, taken


def read_epochs(rank: int, name: str, folder: Path, options: dict[str, Any]) -> list[list[int]]:
    """Returns what each of two epochs trained on, and the second again, from a state inside it on."""
    source = SOURCES[name]
    data = source.read(folder)
    first, _, _ = read_epoch(data, source, 0, options)
    second, state, taken = read_epoch(data, source, 1, options)
    rest, _, _ = read_epoch(source.read(folder), source, 1, options, state)
    return [first, second, second[:taken] + rest]


@pytest.mark.parametrize("updates", [None, 32])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_each_sample_of_a_stream_is_trained_on_once_in_each_epoch_and_after_a_resume(
    name: str, workers: int, updates: int | None, tmp_path: Path
) -> None:
    """Checks: COVER, ONCE, RESUME."""
    pytest.importorskip(name)
    SOURCES[name].write(tmp_path)
    options = {"num_workers": workers, "update_samples": updates, "loss": Loss(scaling="none")}
    ranks = get_values(run_ranks(RANKS, read_epochs, name, tmp_path, options))
    for epoch in zip(*ranks, strict=True):
        assert sorted(number for numbers in epoch for number in numbers) == list(range(SAMPLES))
    assert [rank[2] for rank in ranks] == [rank[1] for rank in ranks]
