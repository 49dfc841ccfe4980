"""Golden scenarios: the machine's answers, printed and compared. See `tests.core.script` for the language."""

from __future__ import annotations

import pytest

from tests.core.script import FOLDER, run_script

SCENARIOS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", [path.stem for path in SCENARIOS])
def test_the_machine_answers_as_written(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert run_script(text.splitlines()) == text, "if the change is wanted: python -m tests.core.script"


def test_every_kind_of_effect_and_ending_is_in_a_scenario() -> None:
    text = "".join(path.read_text() for path in SCENARIOS)
    for word in (
        "Read", "PostOffer", "PostCounts", "PostReport", "Collate", "Deliver", "Finish complete", "Finish stopped",
        "Finish failed", "Finish mismatch", "Finish lost", "UsageError",
    ):  # fmt: skip
        assert f" {word}" in text, word
