"""``odb-ref verify``: a right rule passes, wrong ones are refuted with a small case, and each stage is able to."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from odb_ref.core.offer import NONE, Offer
from odb_ref.core.rules import OdbRule, PaperRule, compute_bounds
from simulator.cli import main
from simulator.explore.bounds import Bounds
from simulator.explore.sampling import Sampled, run_random_schedule, shrink
from simulator.explore.scenario import load_rule, read_scenario
from simulator.explore.search import explore
from simulator.verify import verdict
from simulator.verify.bounds_grid import check_bounds, check_purity, iterate_grid, iterate_large, make_agreement
from simulator.verify.verdict import PROPERTIES, Finding, Guarded, Stage, compute_verdicts

RULES = Path(__file__).parents[2] / "examples" / "rules"
HASTY, SMOOTH, EAGER = (f"{RULES / name}.py:{name.capitalize()}Rule" for name in ("hasty", "smooth", "eager"))


@dataclass(frozen=True)
class Answers:
    """A rule that answers what it is told to."""

    answer: object
    name: str = "answers"

    def compute_target(self, agreement: Offer) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(agreement) if callable(self.answer) else self.answer  # type: ignore[return-value]


def test_grid_holds_each_small_agreement_once_and_all_have_an_answer() -> None:
    grid = list(iterate_grid())
    assert len(set(grid)) == len(grid) > 5_000
    assert all(low <= high for low, high in map(compute_bounds, grid))


def test_large_agreements_are_possible_and_depend_on_the_seed_alone() -> None:
    large = list(iterate_large(500, seed=3))
    assert large == list(iterate_large(500, seed=3)) != list(iterate_large(500, seed=4))
    for agreement in large:
        low, high = compute_bounds(agreement)
        assert 1 <= low <= agreement.groups_max <= high
        assert agreement.groups_min == NONE or agreement.groups_min <= agreement.groups_max


@pytest.mark.parametrize("rule", [OdbRule(), PaperRule()])
def test_shipped_rules_lie_within_their_bounds(rule: OdbRule) -> None:
    agreements = [*iterate_grid(), *iterate_large(2_000, seed=1)]
    assert check_bounds(rule, agreements) is None
    assert check_purity(rule, rule.name, agreements) is None


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (0, "answers 0, outside 1..1"),
        (lambda agreement: agreement.samples_max + (agreement.samples_max > 1000), "answers 1002, outside 1..1001"),
        (1.0, "answers 1.0, which is no int"),
        (True, "answers True, which is no int"),
        (ZeroDivisionError("by zero"), "raises ZeroDivisionError: by zero"),
        (lambda agreement: agreement.groups_max - (agreement.due_max == 5), "answers 4, outside 5..5"),
    ],
)
def test_a_breach_of_the_bounds_is_found_and_made_small(answer: object, detail: str) -> None:
    refuted = check_bounds(Answers(answer), [*iterate_grid(), *iterate_large(5_000, seed=0)])  # type: ignore[arg-type]
    assert refuted is not None
    assert refuted.property == "RULE-BOUNDS"
    assert detail in refuted.detail


def test_hasty_rule_is_refuted_by_the_smallest_agreement() -> None:
    refuted = check_bounds(load_rule(HASTY), list(iterate_grid()))
    assert refuted is not None
    expected = make_agreement(samples_min=1, samples_max=3, groups_min=3, groups_max=3, due_max=0, round_=0)
    assert refuted.agreement == expected


def test_a_rule_that_remembers_is_refuted() -> None:
    grid = list(iterate_grid())
    assert check_bounds(load_rule(SMOOTH), grid) is None
    refuted = check_purity(load_rule(SMOOTH), SMOOTH, grid)
    assert refuted is not None and refuted.property == "RULE-PURE"


def test_a_rule_that_depends_on_the_process_is_refuted(tmp_path: Path) -> None:
    path = tmp_path / "process.py"
    path.write_text(
        "import os\n\n\nclass Rule:\n    name = 'process'\n    pid = os.getpid()\n\n"
        "    def compute_target(self, agreement):\n"
        "        return max(agreement.due_max, 1 + self.pid % agreement.samples_max)\n",
        encoding="utf-8",
    )
    name = f"{path}:Rule"
    rule = load_rule(name)
    rule.pid = 10**9 + 7  # type: ignore[attr-defined]
    refuted = check_purity(rule, name, list(iterate_grid()))
    assert refuted is not None
    assert "in another process" in refuted.detail


def test_a_violation_of_a_random_world_is_made_small() -> None:
    rule = Guarded(load_rule(HASTY))
    large = Bounds(
        lengths=((9,) * 20, (7,) * 3, (8,) * 20), budget_tokens=5, window_samples=10, failures=1, stops=2, rule=rule
    )
    found = explore(large, max_states=3_000).counterexample
    assert found is not None
    small = shrink(Sampled(large, len(found.schedule), found))
    assert small.counterexample is not None
    assert small.bounds.total_samples <= 4 and small.bounds.ranks == 2
    assert small.bounds.failures == small.bounds.stops == 0


def test_what_holds_is_left_as_it_is() -> None:
    sampled = run_random_schedule(Bounds(lengths=((1, 2), (3,))), random.Random(0))
    assert sampled.counterexample is None and sampled.transitions > 10
    assert shrink(sampled) is sampled


def test_a_stage_that_found_something_is_no_evidence_for_the_rest() -> None:
    finding = Finding(property="ALIGN", detail="", case="")
    stages = [
        Stage(name="bounds", covered="", properties=("RULE-BOUNDS",), seconds=0, findings=()),
        Stage(name="exploration", covered="", properties=PROPERTIES, seconds=0, findings=(finding,)),
    ]
    verdicts = compute_verdicts(stages)
    assert verdicts["ALIGN"] == ("VIOLATED", "exploration")
    assert verdicts["RULE-BOUNDS"] == ("holds", "bounds")
    assert verdicts["COVER"] == ("not judged", "")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small stages: the command's own behaviour needs no more."""
    monkeypatch.setattr(
        verdict, "SMALL", {"three": Bounds(lengths=((9, 9, 9), (9,)), budget_tokens=9, window_samples=3)}
    )
    monkeypatch.setattr(verdict, "WORLDS", 10)
    monkeypatch.setattr(verdict, "TRACES", ("gsm8k",))
    monkeypatch.setattr(verdict, "SAMPLES", 200)


@pytest.mark.usefixtures("short")
def test_a_right_rule_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "verdict.json"
    assert main(["verify", "--rule", EAGER, "--json", str(figures)]) == 0
    assert "VIOLATED" not in capsys.readouterr().out
    data = json.loads(figures.read_text(encoding="utf-8"))
    assert data["ok"] and data["name"] == "eager"
    assert {entry["verdict"] for entry in data["properties"].values()} == {"holds"}
    assert set(data["properties"]) == set(PROPERTIES)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("rule", "properties"), [(HASTY, {"RULE-BOUNDS"}), (SMOOTH, {"RULE-PURE", "ALIGN"})])
def test_a_wrong_rule_is_refuted_in_under_a_minute_with_a_schedule(
    rule: str, properties: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, figures = tmp_path / "found.json", tmp_path / "verdict.json"
    began = time.monotonic()
    assert main(["verify", "--rule", rule, "--save", str(saved), "--json", str(figures)]) == 1
    assert time.monotonic() - began < 60
    printed = capsys.readouterr().out
    data = json.loads(figures.read_text(encoding="utf-8"))
    violated = {name for name, entry in data["properties"].items() if entry["verdict"] == "VIOLATED"}
    assert properties <= violated
    assert all(f"{name} is violated" in printed for name in properties)
    assert read_scenario(saved).rule == rule
    assert main(["explore", "--replay", str(saved)]) in (0, 1)  # A rule that remembers may act otherwise.


def test_no_such_rule_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--rule", "examples/rules/none.py:Rule"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
