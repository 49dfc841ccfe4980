"""Nothing is left behind: no threads, processes, descriptors or shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers.waiting import count_descriptors, is_in_time
from tests.torch.data import Numbers, collate, make_loader
from tests.torch.ranks import get_values, run_ranks


def count_children() -> int:
    count = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended in the meantime
            count += len(path.read_text().split())
    return count


def take_stock() -> dict[str, int]:
    gc.collect()
    return {
        "threads": threading.active_count(),
        "children": count_children(),
        "descriptors": count_descriptors(),
    }


def list_shared() -> set[str]:
    """Returns torch's shared-memory files."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def settle(limit: dict[str, int]) -> dict[str, int]:
    """Returns what exists once it is at most ``limit``, or after half a minute. Dropped loaders are closed one by one."""
    is_in_time(lambda: all(stock <= limit.get(key, stock) for key, stock in take_stock().items()), 30)
    return take_stock()


def break_early(rank: int, options: dict[str, Any], is_closed: bool, epochs: int) -> tuple[dict[str, int], ...]:
    """Returns what exists after early breaks of a plain DataLoader, after the first of ours, and after the last."""
    # A first pass of each kind, for what torch and the standard library set up only once.
    for _ in range(2):
        for _ in DataLoader(Numbers(0, 300), batch_size=4, collate_fn=collate, **options):
            break
    plain = settle({"children": int("multiprocessing_context" in options)})
    first: dict[str, int] = {}
    for _ in range(1 + epochs):
        loader = make_loader(Numbers(0, 300), window=16, **options)
        for step, _ in enumerate(loader):
            if step == 2:
                break
        if is_closed:
            loader.close()
        del loader
        if not first:
            time.sleep(1)  # for threads and connections that are about to end
            first = settle({"children": plain["children"]})
    return plain, first, settle(first)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SPAWN = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "options", "is_closed", "epochs"),
    [
        (2, {}, False, 5),
        (2, {"num_workers": 1}, True, 5),
        (2, {"num_workers": 1}, False, 5),
        (2, PERSISTENT, True, 5),
        (2, PERSISTENT, False, 5),
        # Fewer epochs, because each process takes seconds to import torch. What an epoch leaves behind shows after one.
        pytest.param(1, SPAWN, False, 2, marks=pytest.mark.deep),
    ],
)
def test_fast_epochs_with_early_breaks_leave_nothing_behind(
    world_size: int, options: dict[str, Any], is_closed: bool, epochs: int
) -> None:
    """A new loader for each epoch leaves no more threads, processes, descriptors or shared-memory files than the first."""
    before = list_shared()
    values = get_values(run_ranks(world_size, break_early, options, is_closed, epochs, timeout_s=150))
    for value in values:
        plain, first, last = value
        assert all(last[key] <= first[key] for key in first), value
        assert last["children"] <= plain["children"]  # one if processes are spawned, which Python keeps for the next
    # Files exist briefly on their way between processes, including those of other jobs on this machine.
    assert is_in_time(lambda: not list_shared() - before), list_shared() - before
