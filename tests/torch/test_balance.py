"""The loader's ``cost``: by what the batches that meet in a step are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from odb_ref.torch import ODBDataLoader
from odb_ref.trace.check import Property, Status, check_traces
from tests.helpers.options import nested
from tests.torch.data import Numbers, collate
from tests.torch.ranks import get_values, run_ranks

COUNT = 60


def square(tokens: int) -> int:
    return tokens**2


def read(rank: int, cost: Any, trace: Path) -> list[list[int]]:
    settings: dict[str, Any] = {"token_budget": 120, "window": 16, "collate_fn": collate, "timeout_s": 20}
    with ODBDataLoader(Numbers(0, COUNT), **nested(cost=cost, trace=trace, shuffle=True, **settings)) as loader:
        return [[] if info.is_idle else batch["numbers"] for batch, info in loader.steps()]


@pytest.mark.parametrize(("cost", "status"), [("attention/20", Status.HOLDS), (square, Status.NOT_APPLICABLE)])
def test_batches_meet_by_cost_and_hold_every_sample_once(cost: object, status: Status, tmp_path: Path) -> None:
    """Spec: R2.7. Checks: COVER, ORDER."""
    values = get_values(run_ranks(2, read, cost, tmp_path / "run.ndjson", timeout_s=120))
    assert sorted(number for value in values for batch in value for number in batch) == list(range(COUNT))
    (job,) = check_traces(sorted(map(str, tmp_path.glob("*.ndjson")))).jobs
    assert not job.violations
    assert {item.property: item.status for item in job.properties}[Property.ORDER] is status
