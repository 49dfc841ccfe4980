"""`JobState`, saved with a model's checkpoint by one of several ranks, and resumed on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from odb_ref.torch import JobState, UsageError
from tests.torch import data
from tests.torch.data import Numbers, list_numbers, read
from tests.torch.ranks import get_values, run_each

COUNT = 47
make_loader = partial(data.make_loader, Numbers(0, COUNT), window=10, shuffle=True)


def save(rank: int, folder: Path, steps: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns what is read before the checkpoint, and after it from the handed-over and from the loaded state."""
    model = nn.Linear(3, 2)
    with make_loader() as loader:
        before = read(loader, steps)
        dcp.save({"model": model, "loader": JobState(loader)}, checkpoint_id=folder)
        with make_loader() as other:
            JobState(other).load_state_dict(JobState(loader).state_dict())
            return before, read(other), go_on(rank, folder)


def go_on(rank: int, folder: Path) -> list[Any]:
    model = nn.Linear(3, 2)
    with make_loader() as loader:
        dcp.load({"model": model, "loader": JobState(loader)}, checkpoint_id=folder)
        return read(loader)


@pytest.mark.filterwarnings("ignore")
def test_torch_saves_it_with_a_model_and_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """Spec: R10.3. Checks: RESUME, ONCE, COVER."""
    folders = [(tmp_path / str(steps), steps) for steps in (0, 4)]
    saved = [get_values(results) for results in run_each(2, save, folders)]
    wider, alone = (run_each(ranks, go_on, [(folder,) for folder, _ in folders]) for ranks in (3, 1))
    for values, *others in zip(saved, wider, alone, strict=True):
        assert all(after == loaded for _, after, loaded in values)
        before = list_numbers(*(rows for rows, _, _ in values))
        for rest in ([after for _, after, _ in values], *map(get_values, others)):
            assert sorted(before + list_numbers(*rest)) == list(range(COUNT))


def test_a_loader_alone_is_saved_likewise(tmp_path: Path) -> None:
    """Spec: R10.3. Checks: RESUME."""
    with make_loader() as loader:
        assert isinstance(JobState(loader), Stateful)
        before = read(loader, 3)
        dcp.save({"loader": JobState(loader)}, checkpoint_id=tmp_path, no_dist=True)
        after = read(loader, 0)
    with make_loader() as loader:
        dcp.load({"loader": JobState(loader)}, checkpoint_id=tmp_path, no_dist=True)
        after += read(loader)
    assert sorted(list_numbers(before, after)) == list(range(COUNT))


@pytest.mark.parametrize(
    "state", [{}, {"odb_ranks": "3"}, {"odb_ranks": "[3]"}, {"odb_ranks": ["{}"]}, {"odb_ranks": "{"}, [{}]]
)
def test_what_is_no_such_state_is_refused(state: Any) -> None:
    with make_loader() as loader, pytest.raises(UsageError, match="not a state that a JobState saved"):
        JobState(loader).load_state_dict(state)
