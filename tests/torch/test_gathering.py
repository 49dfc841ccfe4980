"""What ranks gather, and that a job may end right after gathering."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_ref import gather_objects
from odb_ref.torch.loop.ranks import average, reduce
from tests.torch.ranks import get_values, run_ranks


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_knows_what_each_has_however_large(world_size: int) -> None:
    def list_own(rank: int) -> list[Any]:
        return [rank, None, {"numbers": list(range(1000 * rank))}, b"\0" * rank]

    expected = [list(of_all) for of_all in zip(*map(list_own, range(world_size)), strict=True)]
    for found in get_values(run_ranks(world_size, lambda rank: list(map(gather_objects, list_own(rank))))):
        assert found == expected


def add_up(group: dist.ProcessGroup) -> None:
    assert reduce([1], dist.ReduceOp.SUM, torch.device("cpu"), group) == [2]


LAST: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "gather": lambda group: gather_objects({"numbers": list(range(50))}, group),
    "add up": add_up,
    "average": lambda group: average([torch.ones(3)], group),
}
"""How a script may end."""


SILENT: Final = {"init_sync": False} if "init_sync" in signature(DistributedDataParallel.__init__).parameters else {}
"""Lets DDP send nothing itself. Without this option, as in torch 2.6, it sends what no Python object holds."""


def end_often(rank: int, last: str) -> int:
    """Drops the process group and the model over it right after the collective, as at the end of a script."""
    for _ in range(ENDINGS):
        group = dist.new_group()
        model = DistributedDataParallel(nn.Linear(8, 8), process_group=group, **SILENT)
        LAST[last](group)
        dist.destroy_process_group(group)
        del group, model
    return rank


ENDINGS = 30
"""With torch's own `all_gather_object` the first to fourth attempt never returned, with its `all_reduce` the first to
fourteenth.
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", LAST)
def test_a_process_may_end_right_after_it(last: str) -> None:
    assert get_values(run_ranks(2, end_often, last)) == [0, 1]
