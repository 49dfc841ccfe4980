"""Traces of real ranks record what there was to train on, and what was trained on before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from odb_ref.trace.check import Property, Status, check_traces
from tests.helpers.tamper import tamper
from tests.torch import data
from tests.torch.data import Numbers
from tests.torch.ranks import get_values, run_each, run_ranks
from tests.trace.lies import find_broken

BAD = {"on_bad_sample": "quarantine", "max_bad_samples": 3}
SAMPLES = Numbers(0, 60, bad=7, fault="raise")
make_loader = partial(data.make_loader, SAMPLES, token_budget=40, loss_scaling="none", shuffle=True, **BAD)


def train_and_resume(rank: int, folder: Path, options: dict[str, Any]) -> None:
    """Runs an epoch that is left after some steps, its rest with another loader, and a second epoch."""
    make = partial(make_loader, trace=folder / "run.ndjson", **options)
    _, state = data.save(make(), 4)
    with make(state=state) as loader:
        for _ in range(2):
            data.read(loader)


TRAINED: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"shard": "shared"}, {"update_samples": 16}]


def test_true_traces_are_accepted(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: COVER, ONCE, RESUME."""
    cases = [(tmp_path / str(number), options) for number, options in enumerate(TRAINED)]
    for folder, _ in cases:
        folder.mkdir()
    for (folder, options), results in zip(cases, run_each(2, train_and_resume, cases), strict=True):
        get_values(results)
        verdict = check_traces(sorted(folder.glob("*.ndjson")), is_replayed=True)
        assert verdict.is_ok, [str(item) for item in verdict.violations]
        statuses = [(job.get_status(Property.COVER), job.get_status(Property.RESUME)) for job in verdict.jobs]
        is_known = options.get("shard") != "shared"  # otherwise no rank knows what the others had drawn
        resumed = Status.HOLDS if is_known else Status.NOT_APPLICABLE
        silent = Status.NOT_APPLICABLE
        assert sorted(statuses) == sorted([(silent, silent), (Status.HOLDS, resumed), (Status.HOLDS, silent)]), options
        assert sum(len(job.unsaid) for job in verdict.jobs) == (0 if is_known else 2)


def train_a_part(rank: int, steps: int | None, states: list[Any], options: dict[str, Any]) -> Any:
    """Runs ``steps`` steps of the rest of an epoch, or all of it, and returns what to continue from."""
    with make_loader(state=states, **options) as loader:
        data.read(loader, steps)
        state = loader.state_dict()
        dist.barrier()  # a rank that leaves before another has had its steps would end that one's epoch
        return state


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({}, (2, 3, 3, 1)), ({"shard": "shared"}, (2, 1)), ({"update_samples": 16, "shard": "shared"}, (2, 1))],
    ids=str,
)
def test_parts_of_an_epoch_by_other_numbers_of_ranks_are_linked(
    options: dict[str, Any], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Spec: R9.6, R10.3. Checks: COVER, RESUME."""
    states: list[Any] = []
    for part, count in enumerate(ranks):
        steps = 3 if part + 1 < len(ranks) else None
        traced = options | {"trace": tmp_path / f"part{part}.ndjson"}
        states = get_values(run_ranks(count, train_a_part, steps, states, traced))
    paths = sorted(tmp_path.glob("*.ndjson"))
    verdict = check_traces(paths, is_replayed=True)
    assert verdict.is_ok, [str(item) for item in verdict.violations]
    assert [job.get_status(Property.RESUME) for job in verdict.jobs[1:]] == [Status.HOLDS] * (len(ranks) - 1)
    for path in tmp_path.glob("part1*"):
        tamper(path, lambda trace: trace.header["before"][-1].update(steps=2))
    assert find_broken(*paths) == {"RESUME"}
