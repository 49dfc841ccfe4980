"""``odb-ref verify``: a right rule passes, wrong ones are refuted with a small case, and each stage can refute."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.sampling import Sampled, run_random_schedule, shrink
from odb_sim.explore.scenario import read_scenario
from odb_sim.explore.search import explore
from odb_sim.inputs.rules import load_rule
from odb_sim.verify import stages, verdict
from odb_sim.verify.agreements import (
    GROUPS,
    describe_agreement,
    is_possible,
    iterate_around,
    iterate_grid,
    iterate_large,
    iterate_rounds,
    iterate_sizes,
    make_agreement,
)
from odb_sim.verify.alone import check_bounds
from odb_sim.verify.rule_client import Answer, RuleProcesses
from odb_sim.verify.stages import PROPERTIES, Finding, Stage
from odb_sim.verify.verdict import compute_verdicts, list_not_looked_at, verify

from odb_ref.core.batching.rules import OdbRule, PaperRule, compute_bounds
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE, Offer
from tests.explore.wrong_rules import BOUNDS, HOLDS, NAME, PURE, TABLE, find
from tests.helpers.commands import get_figures, refuse

RULES = Path(__file__).parents[2] / "examples" / "rules"
HASTY, SMOOTH, EAGER = (f"{RULES / name}.py:{name.capitalize()}Rule" for name in ("hasty", "smooth", "eager"))


@dataclass(frozen=True)
class Answers:
    """A rule that returns given answers."""

    answer: object
    name: str = "answers"

    def compute_target(self, agreement: Offer) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(agreement) if callable(self.answer) else self.answer  # type: ignore[return-value]


def ask(rule: object) -> Callable[[Sequence[Offer]], list[Answer]]:
    """Returns a function for the rule's answers in this process."""

    def answer(agreement: Offer) -> Answer:
        try:
            return rule.compute_target(agreement)  # type: ignore[no-any-return, attr-defined]
        except Exception as error:
            return f"raises {error!r}"

    return lambda agreements: [answer(agreement) for agreement in agreements]


def refute(rule: object, agreements: Sequence[Offer]) -> Finding | None:
    return check_bounds(ask(rule), agreements, ask(rule)(agreements))


def test_agreements_are_possible_and_differ() -> None:
    grid = list(iterate_grid())
    assert len(set(grid)) == len(grid) > 10_000
    for agreements in (grid, list(iterate_rounds()), list(iterate_sizes()), list(iterate_around([4, 5_000], 0))):
        assert all(map(is_possible, agreements))
        assert all(low <= high for low, high in map(compute_bounds, agreements))
    assert {agreement.round_max for agreement in iterate_rounds()} == set(range(10_000))
    assert {agreement.samples_max for agreement in iterate_sizes()} == set(range(1, 20_001))


@pytest.mark.parametrize("is_reading", [True, False])
def test_windows_of_all_sizes_have_all_numbers_of_groups(is_reading: bool) -> None:
    """Nearly all had one group."""
    times = Counter(one.groups_max for one in iterate_sizes() if (one.groups_min != NONE) is is_reading)
    assert min(times[groups] for groups in range(1, GROUPS + 1)) >= 4
    assert max(times.values()) < 0.01 * times.total()


@pytest.mark.parametrize("name", ["round_max", "samples_max", "samples_min", "groups_max", "groups_min", "due_max"])
def test_each_number_is_tried_around_each_constant(name: str) -> None:
    tried = {getattr(agreement, name) for agreement in iterate_around([77], 1)}
    assert tried >= {76, 77, 78, 154}


def test_large_agreements_are_possible_and_depend_on_the_seed_alone() -> None:
    large = list(iterate_large(500, seed=3))
    assert large == list(iterate_large(500, seed=3)) != list(iterate_large(500, seed=4))
    assert all(map(is_possible, large))
    assert max(agreement.samples_max for agreement in large) > 2**38


@pytest.mark.parametrize("rule", [OdbRule(), PaperRule()])
def test_shipped_rules_lie_within_their_bounds(rule: OdbRule) -> None:
    assert refute(rule, [*iterate_grid(), *iterate_large(2_000, seed=1)]) is None


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (0, "answers 0, outside 1..1"),
        (lambda agreement: agreement.samples_max + (agreement.samples_max > 1000), "answers 1002, outside 1..1001"),
        (lambda agreement: agreement.groups_max - (agreement.due_max == 5), "answers 4, outside 5..5"),
        (lambda agreement: agreement.groups_max + (agreement.round_max > 9), "answers 2, outside 1..1"),
        (ZeroDivisionError("by zero"), "raises ZeroDivisionError('by zero')"),
    ],
)
def test_a_breach_of_the_bounds_is_found_and_made_small(answer: object, detail: str) -> None:
    refuted = refute(Answers(answer), [*iterate_grid(), *iterate_large(5_000, seed=0)])
    assert refuted.property == "RULE-BOUNDS"
    assert detail in refuted.detail


def test_hasty_rule_is_refuted_by_the_smallest_agreement() -> None:
    refuted = refute(load_rule(HASTY), list(iterate_grid()))
    expected = make_agreement(samples=(1, 3), groups=(3, 3), due=0, round_=0, budget=1)
    assert refuted.case == f"agreement {describe_agreement(expected)}"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks fewer questions, but enough for rules that are wrong on many."""
    asked = [*list(iterate_grid())[::5], *iterate_large(1_000, seed=0)]
    monkeypatch.setattr(verdict, "compute_agreements", lambda constants, seed: asked)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "title", [title for title, (property_, _) in TABLE.items() if property_ in (PURE, NAME, HOLDS)]
)
def test_a_rule_that_is_no_function_of_the_agreement_or_has_no_name_of_its_own_is_refuted(title: str) -> None:
    property_, text = TABLE[title]
    _, finding = find(text)
    assert ("" if finding is None else finding.property) == property_


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title, (property_, _) in TABLE.items() if property_ == BOUNDS])
def test_a_rule_that_leaves_its_bounds_ends_its_process_or_hangs_is_refuted(title: str) -> None:
    stage, finding = find(TABLE[title][1])
    assert stage == "bounds" and finding is not None and finding.property == BOUNDS


@pytest.mark.deep
@pytest.mark.usefixtures("few")
def test_a_rule_file_called_as_a_library_is_judged_as_any_other() -> None:
    assert find(TABLE["prints"][1], file="random.py") == ("", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("while True: pass", "not loaded within|while it is loaded"),
        ("1 +", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        RuleProcesses(f"{path}:Rule", limit_s=0.2)


def test_lines_that_no_agreement_led_to_are_said(tmp_path: Path, few: None) -> None:
    path = tmp_path / "rule.py"
    path.write_text(
        "class Rule:\n    name = 'mine'\n    def compute_target(self, a):\n        if a.round_max == 2**40 + 1:\n"
        "            return a.samples_max\n        return max(1, a.due_max)\n"
    )
    with closing(RuleProcesses(f"{path}:Rule")) as rule:
        assert not next(verify(rule, f"{path}:Rule")).findings
        assert "lines of the rule that no agreement led to: 5" in list_not_looked_at(rule)


def test_a_violation_of_a_random_world_is_made_small() -> None:
    rule = load_rule(HASTY)
    large = Bounds(
        lengths=((9,) * 20, (7,) * 3, (8,) * 20), budget_tokens=5, window_samples=10, failures=1, stops=2, rule=rule
    )
    found = explore(large, max_states=3_000).counterexample
    small = shrink(Sampled(large, len(found.schedule), 0, found))
    assert small.counterexample is not None
    assert small.bounds.total_samples <= 4 and small.bounds.ranks == 2
    assert small.bounds.failures == small.bounds.stops == 0


def test_what_holds_is_left_as_it_is() -> None:
    sampled = run_random_schedule(Bounds(lengths=((1, 2), (3,))), random.Random(0))
    assert sampled.counterexample is None and sampled.transitions > 10
    assert shrink(sampled) is sampled


def test_a_stage_that_found_something_is_no_evidence_for_the_rest() -> None:
    finding = Finding(property="ALIGN", detail="", case="")
    done = [
        Stage(name="bounds", covered="", properties=("RULE-BOUNDS",), seconds=0, findings=()),
        Stage(name="exploration", covered="", properties=PROPERTIES, seconds=0, findings=(finding,)),
    ]
    verdicts = compute_verdicts(done)
    assert verdicts["ALIGN"] == ("VIOLATED", "exploration")
    assert verdicts["RULE-BOUNDS"] == ("holds", "bounds")
    assert verdicts["COVER"] == ("not judged", "")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    """Makes stages few and small, which is enough to test the command's own behaviour."""
    monkeypatch.setattr(
        stages, "SMALL", {"three": Bounds(lengths=((9, 9, 9), (9,)), budget_tokens=9, window_samples=3)}
    )
    monkeypatch.setattr(stages.run_random_worlds, "__kwdefaults__", {"worlds": 4, "limit_s": 60.0})
    monkeypatch.setattr(stages, "TRACES", ("gsm8k",))
    monkeypatch.setattr(stages, "SAMPLES", 200)


@pytest.mark.usefixtures("short")
def test_a_right_rule_passes(capsys: pytest.CaptureFixture[str]) -> None:
    data = get_figures(["verify", "--policy", EAGER])
    printed = capsys.readouterr().out
    assert "VIOLATED" not in printed
    assert f"odb-ref compare mm_mix_real --policy standard,odb,{EAGER}" in printed.splitlines()[-1]
    assert "holds for:" in printed and "not checked:" in printed
    assert "half of them in round" in " ".join(printed.split())  # it is broken into lines
    assert data["ok"] and data["name"] == "eager"
    assert {entry["verdict"] for entry in data["properties"].values()} == {"holds"}
    assert set(data["properties"]) == set(PROPERTIES)


@pytest.mark.usefixtures("short")
def test_what_a_rule_comes_to_keep_in_the_worlds_refutes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [agreement for agreement in iterate_grid() if agreement.samples_max == 1]
    monkeypatch.setattr(verdict, "compute_agreements", lambda constants, seed: asked)
    path = tmp_path / "rule.py"
    path.write_text(
        "class Rule:\n    name, n = 'mine', 0\n    def compute_target(self, a):\n        if a.samples_max > 1: self.n += 1\n"
        "        return a.samples_max\n"
    )
    with closing(RuleProcesses(f"{path}:Rule")) as rule:
        done = {stage.name: stage.findings for stage in verify(rule, f"{path}:Rule")}
    assert [name for name, findings in done.items() if findings] == ["simulation"]
    (found,) = done["simulation"]
    assert (
        found.property == "RULE-PURE" and "self.n was nothing and is " in found.detail and "lru_cache" in found.detail
    )


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("rule", "properties"), [(HASTY, {"RULE-BOUNDS"}), (SMOOTH, {"RULE-PURE", "ALIGN"})])
def test_a_wrong_rule_is_refuted_in_under_a_minute_with_a_schedule(
    rule: str, properties: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, figures = tmp_path / "found.json", tmp_path / "verdict.json"
    began = time.monotonic()
    assert main(["verify", "--policy", rule, "--save", str(saved), "--json", str(figures)]) == 1
    assert time.monotonic() - began < 60
    printed = capsys.readouterr().out
    data = json.loads(figures.read_text(encoding="utf-8"))
    violated = {name for name, entry in data["properties"].items() if entry["verdict"] == "VIOLATED"}
    assert properties <= violated
    assert all(f"{name} is violated" in printed for name in properties)
    assert read_scenario(saved).rule == rule
    assert main(["explore", "--replay", str(saved)]) == 1


@pytest.mark.usefixtures("short")
def test_a_case_that_a_rule_asked_for_the_first_time_does_not_repeat_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was, and the replay said that every property holds."""
    rule, saved = tmp_path / "rule.py", tmp_path / "found.json"
    rule.write_text(
        "class Rule:\n    name = 'mine'\n    def compute_target(self, a, past=[0]):\n        past[0] += 1\n"
        "        return a.samples_max if past[0] > 2000 else max(1, a.due_max)\n"
    )
    assert main(["verify", "--policy", f"{rule}:Rule", "--save", str(saved)]) == 1
    printed = capsys.readouterr().out
    assert (
        "ALIGN is violated" in printed and "not saved, because it depends on what the rule was asked before" in printed
    )
    assert "replay" not in printed and not saved.exists()


def test_no_such_rule_and_no_such_time_limit_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refuse(capsys, ["verify", "--policy", "examples/rules/none.py:Rule"])
    for limit in ("0", "nan", "inf", "1e10"):
        said = refuse(capsys, ["verify", "--policy", "odb", "--time-limit", limit])
        assert "--time-limit must be more than 0 and at most 86400" in said
