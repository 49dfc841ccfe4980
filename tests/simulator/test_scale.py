"""Large worlds are affordable: the bounds that the README states, with room for a slow machine."""

from __future__ import annotations

import pytest

from simulator.bench_scale import measure_apart


@pytest.mark.slow
def test_1024_ranks_with_200_000_samples_take_less_than_15_seconds() -> None:
    figures = measure_apart(1024, 200_000)
    # Processor time: what other tests do at the same time on the same machine is not this one's cost.
    assert figures["cpu_time_s"] < 15
    assert figures["peak_bytes"] < 500e6


def test_memory_does_not_grow_with_samples_that_are_not_held() -> None:
    few, many = (measure_apart(4, samples)["peak_bytes"] for samples in (10_000, 80_000))
    # 70,000 samples are 1.7 MB as arrays (and as much again for a moment); as objects they would be 7 MB or more.
    assert many - few < 6e6
