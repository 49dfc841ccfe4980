"""Every configuration of spec/tla: those that must hold do, and those that must fail do, for the reason they state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tla.tlc import Configuration, read_configurations, run_tlc

SECTIONS = read_configurations()
CONFIGURATIONS = {name: one for section in ("holds", "ends", "fails") for name, one in SECTIONS[section].items()}
REASONS = {
    "": "",
    "deadlock": "Deadlock reached.",
    "EndsAtLast": "Temporal properties were violated.",
}


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_configuration_holds_or_fails_as_it_says(configuration: Configuration, tmp_path: Path) -> None:
    result = run_tlc(configuration, tmp_path)
    reason = configuration.reason
    assert result.error == REASONS.get(reason, f"Invariant {reason} is violated."), result.output[-4000:]
    assert reason or result.states > 10


def test_the_counterexamples_are_all_there() -> None:
    """The refutations that are expected, so that a check that cannot fail is noticed."""
    assert all(one.reason for one in SECTIONS["fails"].values())
    assert SECTIONS["fails"].keys() >= {
        "idle_uses_slot", "shared_communicator", "close_on_first_dry", "no_failure_agreement", "release_early", "no_urge",
        "loader_silent", "own_budget", "alike_draws", "only_group_kept",
    }  # fmt: skip
