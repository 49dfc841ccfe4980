"""If the system is not Linux, or shows less of itself, loaders work with what exists, or report what they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_ref.torch import UsageError, arguments
from odb_ref.torch.exchange import process_table
from odb_ref.torch.reading import serialization
from odb_ref.torch.reading.serialization import LARGE_BYTES
from tests.torch.data import Numbers
from tests.torch.ranks import get_values, run_ranks
from tests.torch.test_stuck import check_blamed, make_loader, read_raising


class Images(Numbers):
    """Samples that each have a large tensor."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"image": torch.full((LARGE_BYTES,), index, dtype=torch.uint8)}


def collate_images(samples: list[Any]) -> Any:
    return [sample["number"] for sample in samples], torch.stack([sample["image"] for sample in samples])


def read_images(rank: int, num_workers: int) -> list[int]:
    numbers: list[int] = []
    options = {"collate_fn": collate_images, "on_idle": "none", "num_workers": num_workers}
    with make_loader(Images(40 * rank, 40), **options) as loader:
        for found, images in filter(None, loader):
            assert [int(image[-1]) + 40 * rank for image in images] == found
            numbers += found
    return numbers


def hide(monkeypatch: pytest.MonkeyPatch, what: str, tmp_path: Path) -> None:
    """Removes a facility from the system."""
    match what:
        case "files of memory":
            monkeypatch.delattr(os, "memfd_create")
        case "descriptors":
            monkeypatch.setattr(serialization, "_DESCRIPTORS", tmp_path / "fd")
        case "processes":
            monkeypatch.setattr(process_table, "_PROC", tmp_path)
        case "all of Linux":
            for part in ("files of memory", "descriptors", "processes"):
                hide(monkeypatch, part, tmp_path)
            monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize("what", ["files of memory", "descriptors", "processes", "all of Linux"])
def test_what_the_system_does_not_show_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    hide(monkeypatch, what, tmp_path)
    values = get_values(run_ranks(2, read_images, 2))
    assert sorted(values[0] + values[1]) == list(range(80))


def test_a_killed_process_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, "all of Linux", tmp_path)
    check_blamed(run_ranks(2, read_raising, "collate", "os._exit", 1, timeout_s=30), 1)


def test_workers_are_refused_where_processes_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "os", type("os", (), {"name": "nt"}))
    with pytest.raises(UsageError, match="num_workers=2 needs Linux or macOS"):
        make_loader(num_workers=2)
    with make_loader(Numbers(0, 4), collate_fn=len) as loader:
        assert sum(loader) == 4
