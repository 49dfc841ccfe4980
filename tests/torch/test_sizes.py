"""Batches with friendly numbers of samples, or of similar cost, in real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from odb_ref.trace.check import Property, Status, check_traces
from tests.torch.data import Numbers, make_loader
from tests.torch.ranks import get_values, run_each

SHARDS = (90, 37)
FRIENDLY = {
    "even": (0, 1, *range(2, 64, 2)),
    "threes": (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    "powers": (0, 1, 2, 4, 8, 16, 32),
}


def read(rank: int, options: dict[str, Any]) -> list[list[int]]:
    """Returns what each batch holds."""
    settings = {"token_budget": 150, "window": 24, "shard": "given", "shuffle": True}
    with make_loader(Numbers(1000 * rank, SHARDS[rank]), **settings, **options) as loader:
        found = []
        for batch, info in loader.steps():
            assert info.is_idle == (info.local_samples == 0)
            found.append([] if info.is_idle else batch["numbers"])
        return found


def square(tokens: int) -> int:
    return tokens**2


Job = tuple[dict[str, Any], Property, Status]
"""The loader's options, and the checker's verdict on the traces."""
SOME: list[Job] = [
    ({"sizes": "even"}, Property.SIZES, Status.HOLDS),
    ({"sizes": "powers", "num_workers": 2}, Property.SIZES, Status.HOLDS),
    ({"cost": "attention/20"}, Property.ORDER, Status.HOLDS),
    ({"cost": square}, Property.ORDER, Status.NOT_APPLICABLE),  # a trace does not record which function it was
]
OTHERS: list[Job] = [
    ({"sizes": sizes, "num_workers": workers}, Property.SIZES, Status.HOLDS)
    for sizes, workers in (("even", 2), ("threes", 0), ("threes", 2), ("powers", 0))
]


@pytest.mark.parametrize("jobs", [SOME, pytest.param(OTHERS, marks=pytest.mark.deep)], ids=["some", "others"])
def test_every_batch_of_a_job_is_friendly_or_meets_others_of_its_cost(jobs: list[Job], tmp_path: Path) -> None:
    """Spec: R2.7, R2.8. Checks: SIZES, ORDER, COVER, ALIGN. Shards have unequal sizes, and there are idle steps."""
    cases = [options | {"trace": tmp_path / str(number) / "run.ndjson"} for number, (options, *_) in enumerate(jobs)]
    for case in cases:
        case["trace"].parent.mkdir()
    found = run_each(2, read, [(case,) for case in cases], timeout_s=120)
    for (options, checked, status), case, results in zip(jobs, cases, found, strict=True):
        steps = get_values(results)
        assert len(steps[0]) == len(steps[1])
        counts = [len(numbers) for rank in steps for numbers in rank]
        assert set(counts) <= set(FRIENDLY.get(options.get("sizes", ""), counts)), options
        assert max(counts) > 3
        for rank, (own, samples) in enumerate(zip(steps, SHARDS, strict=True)):
            assert sorted(n for numbers in own for n in numbers) == list(range(1000 * rank, 1000 * rank + samples))
        verdict = check_traces(sorted(case["trace"].parent.iterdir()), is_replayed=status is Status.HOLDS)
        assert not verdict.violations
        assert verdict.jobs[0].get_status(checked) is status
