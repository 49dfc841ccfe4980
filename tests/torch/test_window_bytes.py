"""A window bounded in bytes: the same batches with any reader, nothing lost, and no more held than the bound allows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odb_sim.recorded.replay import replay
from odb_sim.recorded.runs import RecordedRun, load_runs

from odb_ref.core.events import SamplesRead
from odb_ref.torch import ODBDataLoader
from odb_ref.torch.reading.serialization import count_bytes
from odb_ref.trace.check import check_traces
from odb_ref.trace.format import decode_event
from odb_ref.trace.reading import read_trace
from tests.torch import data
from tests.torch.data import check_goes_on
from tests.torch.ranks import get_values, run_ranks

SAMPLES = 150
HUGE = 77
"""A sample larger than a whole window may be."""


def make_image(index: int) -> dict[str, Any]:
    """Returns a sample whose bytes have little to do with its tokens."""
    size = 50_000 if index == HUGE else 100 + index * 7919 % 4000
    return {"input_ids": torch.ones(1 + index % 13, dtype=torch.int64), "pixels": np.zeros(size, np.uint8), "n": index}


IMAGES = [make_image(index) for index in range(SAMPLES)]


def combine(samples: list[Any]) -> list[int]:
    return [sample["n"] for sample in samples]


make_loader = partial(data.make_loader, IMAGES, collate_fn=combine, shuffle=True, window=32, window_bytes=20_000)


def read(**options: Any) -> list[list[int]]:
    with make_loader(**options) as loader:
        return list(loader)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_same_batches_whoever_reads_and_other_ones_than_without_a_bound() -> None:
    """Spec: R2.3. Checks: REPLAY, COVER."""
    batches = read()
    assert sorted(number for batch in batches for number in batch) == list(range(SAMPLES))
    assert read(num_workers=1) == batches
    assert read(num_workers=2, prefetch_factor=1) == batches
    assert read(window_bytes=None) != batches


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_window_holds_no_more_than_it_may_but_for_one_sample(tmp_path: Path) -> None:
    """Spec: R2.3, R5.1, R9.2."""
    path = tmp_path / "run.ndjson"
    read(trace=path, num_workers=1)
    _, records = read_trace(path)
    held: dict[int, int] = {}
    fulls = 0
    for record in records:
        if record.event is not None and record.event["kind"] == "samples_read":
            event = decode_event(record.event)
            assert isinstance(event, SamplesRead)
            held |= {sample.position: count_bytes(IMAGES[sample.id]) for sample in event.samples}
            fulls += event.is_full
        for effect in record.effects:
            match effect:
                case {"kind": "collate", "steps": list(steps)}:
                    for step in steps:
                        for position in step["positions"]:
                            del held[position]
                case {"kind": "post_offer"}:  # the window is complete, and the previous steps are not in it
                    assert sum(held.values()) <= 20_000 or len(held) == 1
    assert fulls > 5
    assert check_traces([path], is_replayed=True).is_ok
    (run,) = load_runs([path])
    replayed = replay(run)
    assert replayed.is_equal, replayed.difference
    assert not replay(replace_full_reads(run)).is_equal  # the replay depends on the bound


def replace_full_reads(run: RecordedRun) -> RecordedRun:
    ranks = tuple(replace(rank, full_reads={}) for rank in run.ranks)
    return replace(run, ranks=ranks)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranks_take_the_same_steps() -> None:
    """Checks: ALIGN."""
    first, second = get_values(run_ranks(2, lambda rank: len(read(window_bytes=9_000, num_workers=rank))))
    assert first == second


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_saved_epoch_goes_on_with_the_same_batches() -> None:
    """Checks: RESUME."""

    def take(loader: ODBDataLoader, limit: int | None = None) -> list[Any]:
        return list(islice(loader, limit))

    workers = cycle((0, 1))  # alternate between what saves and what goes on
    check_goes_on(lambda: make_loader(num_workers=next(workers)), (1, 9, len(read()) - 2), take)


def test_bytes_are_those_of_the_content() -> None:
    sample = {"a": np.zeros((3, 5), np.float32), "b": [torch.zeros(7), "four", b"12"], "c": (1, None, 2.5)}
    assert count_bytes(sample) == 60 + 28 + 4 + 2 + 24 + 3
    assert count_bytes(torch.zeros(1000)[:3]) == 12
    assert count_bytes(range(3)) > 0
