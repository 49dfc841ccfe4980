"""What makes large worlds affordable. `python -m tests.bench.scale` measures their speed, which is not tested."""

from __future__ import annotations

import pytest
from odb_sim.studies.runs import Driver

from tests.bench.scale import measure_apart


@pytest.mark.slow
@pytest.mark.parametrize("driver", [Driver.EVENTS, Driver.ROUNDS])
def test_memory_does_not_grow_with_samples_that_are_not_held(driver: Driver) -> None:
    few, many = (measure_apart(4, samples, driver)["peak_bytes"] for samples in (10_000, 80_000))
    # 70,000 samples take 1.7 MB as arrays (twice that for a moment). As objects they would take 7 MB or more.
    assert many - few < 6e6
