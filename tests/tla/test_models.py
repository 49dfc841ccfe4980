"""Every configuration of spec/tla: those that must hold do, and those that must fail do, for the reason they state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tla.tlc import TLA, run_tlc

CONFIGS = sorted(path.stem for path in TLA.glob("*.cfg") if not path.stem.startswith("graph_"))
REASONS = {
    "deadlock": "Deadlock reached.",
    "EndsAtLast": "Temporal properties were violated.",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_holds_or_fails_as_it_says(name: str, tmp_path: Path) -> None:
    """Each header says `Must fail: why`, or does not."""
    text = (TLA / f"{name}.cfg").read_text()
    expected = re.search(r"^\\\* Must fail: (\w+)", text, re.MULTILINE)
    arguments = re.search(r"^\\\* Arguments: (.*)$", text, re.MULTILINE)
    result = run_tlc(TLA / f"{name}.cfg", tmp_path, arguments=tuple(arguments[1].split()) if arguments else ())
    if expected is None:
        assert result.error == "", result.output[-4000:]
        assert result.states > 10
    else:
        reason = REASONS.get(expected[1], f"Invariant {expected[1]} is violated.")
        assert result.error == reason, result.output[-4000:]


def test_the_counterexamples_are_all_there() -> None:
    """The refutations that are expected, so that a check that cannot fail is noticed."""
    must_fail = {name for name in CONFIGS if "Must fail:" in (TLA / f"{name}.cfg").read_text()}
    assert must_fail >= {
        "idle_uses_slot", "shared_communicator", "close_on_first_dry", "no_failure_agreement", "release_early", "no_urge",
        "loader_silent", "own_budget", "alike_draws", "only_group_kept",
    }  # fmt: skip
