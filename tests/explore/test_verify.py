"""Target rules: the language, the proof of their bounds, wrong ones, and ``odb-ref verify``."""

from __future__ import annotations

import ast
import json
import operator
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import z3
from hypothesis import given
from hypothesis import strategies as st
from odb_sim.cli.main import main
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.sampling import Sampled, run_random_schedule, shrink
from odb_sim.explore.scenario import read_scenario
from odb_sim.explore.search import explore
from odb_sim.inputs.rules import load_rule
from odb_sim.inputs.scattered import ScatteredRule
from odb_sim.verify import symbolic
from odb_sim.verify.language import OutsideError, check_language, load_judged
from odb_sim.verify.rule import check_bounds
from odb_sim.verify.symbolic import Number, Paths, Truth
from odb_sim.verify.verdict import OF_THE_WORLD, Finding, Stage, compute_verdicts

from odb_ref.core.batching.rules import RULES
from odb_ref.core.errors import UsageError
from tests.explore.wrong_rules import BOUNDS, REFUSED, TABLE, find
from tests.helpers.commands import get_figures, refuse

RULES_FOLDER = Path(__file__).parents[2] / "examples" / "rules"
HASTY, SMOOTH, EAGER = (f"{RULES_FOLDER / name}.py:{name.capitalize()}Rule" for name in ("hasty", "smooth", "eager"))


@pytest.mark.parametrize("title", list(TABLE))
def test_a_wrong_rule_is_refuted_or_refused_and_a_right_one_is_not(title: str) -> None:
    expected, text = TABLE[title]
    outcome, found = find(text)
    assert outcome == expected, found
    if expected == REFUSED:
        assert f"{Path('rule.py')}:Rule': line " in str(found)


SCATTERED = f"{ScatteredRule.__module__}:{ScatteredRule.__name__}"


@pytest.mark.parametrize("policy", [*RULES, EAGER, SCATTERED])
def test_a_right_rule_is_proved_to_stay_within_its_bounds(policy: str) -> None:
    stage = check_bounds(load_judged(policy))
    assert not stage.findings and not stage.skipped and "by a proof" in stage.ranges


def test_hasty_rule_is_refuted_by_a_small_agreement() -> None:
    (found,) = check_bounds(load_judged(HASTY)).findings
    assert found.property == BOUNDS and "samples_max=3" in found.case and "outside" in found.detail


_BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, divmod, max, min),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(lambda one, other: (one < other) + one, lambda one, other: one in (other, 7), lambda one, other: one and other),
    *(lambda one, other: sum((one, other)), lambda one, other: -(one < other), lambda one, other: +(one == other)),
)
_UNARY = (
    *(abs, operator.neg, operator.pos, operator.invert, operator.not_, lambda one: one.bit_length()),
    *(lambda one: one**3, lambda one: one << 5, lambda one: one >> 2, lambda one: one is None, lambda one: one == None),  # noqa: E711
)
_INTEGERS = st.integers(-(2**70), 2**70) | st.integers(-9, 9)


def compute(function: Callable[..., object], *numbers: object) -> object:
    """Returns the value, in which truth values are told from numbers, or the name of the exception."""
    try:
        found = function(*numbers)
    except ZeroDivisionError:
        return "ZeroDivisionError"
    parts = found if isinstance(found, tuple) else (found,)
    return [
        (z3.simplify(part.term).as_long(), isinstance(part, Truth))
        if isinstance(part, Number)
        else (int(part), isinstance(part, bool))
        for part in parts
    ]


@given(one=_INTEGERS, other=_INTEGERS)
def test_a_number_computes_as_an_int_does(one: int, other: int) -> None:
    first, second = (Number(Paths(), z3.IntVal(value)) for value in (one, other))
    for unary in _UNARY:
        assert compute(unary, first) == compute(unary, one)
    for binary in _BINARY:
        for numbers in ((first, other), (one, second), (first, second)):
            assert compute(binary, *numbers) == compute(binary, one, other)


def test_each_path_has_an_agreement_that_takes_it() -> None:
    rule, paths = load_rule(EAGER), Paths()
    found = [paths.find_agreement(answer == 7) for answer in paths.follow(rule.compute_target)]
    assert len(found) >= 3 and all(agreement is not None and rule.compute_target(agreement) == 7 for agreement in found)


def test_what_cannot_be_followed_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "LIMIT_S", 0.05)
    for body, said in (
        ("return (1, 2, 3)[a.due_max]", "as an index"),
        ("return (((NONE << 64) ** 4) ** 4) ** 4 if a.due_max else 1", "a number of 8,065 bits"),
        ("return len(f'{a.due_max}')", "writes a number"),
        ("return 1 if 'x' * a.due_max else 2", "not an integer"),
        (
            "return 1 if a.due_max**4 * a.samples_max - a.samples_max**3 * 7 == 123_456_789_012_345_679 else a.samples_max",
            "Z3 does not decide",
        ),
    ):
        path = tmp_path / "rule.py"
        path.write_text(
            "from odb_ref.core.offer import NONE\nclass Rule:\n    name = 'mine'\n"
            f"    def compute_target(self, a):\n        {body}\n"
        )
        stage = check_bounds(load_judged(f"{path}:Rule"))
        assert not stage.findings and said in stage.skipped


def test_a_rule_with_too_many_paths_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "MOST_PATHS", 2)
    assert "more than 2 paths" in check_bounds(load_judged("odb")).skipped


def test_a_rule_that_takes_long_to_follow_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function calls the one above it twice, so the last one takes a million calls, and ends."""
    monkeypatch.setattr(symbolic, "MOST_S", 0.5)
    functions = "".join(f"def f{i}(n): return f{i - 1}(n) + f{i - 1}(n)\n" for i in range(1, 21))
    body = "        return max(1, a.due_max) + 0 * f20(a.due_max)\n"
    text = f"def f0(n): return n\n{functions}class Rule:\n    name = 'mine'\n    def compute_target(self, a):\n{body}"
    assert find(text) == ("not judged", "it takes more than 0.5 s to follow it")


def test_what_z3_finds_is_asked_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong `Number` refutes no rule."""
    monkeypatch.setattr(Number, "__floordiv__", lambda self, other: self - self)
    stage = check_bounds(load_judged(EAGER))
    assert not stage.findings and "Z3 and Python disagree" in stage.skipped


def test_lines_that_no_agreement_leads_to_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rule.py"
    path.write_text(
        "class Rule:\n    name = 'mine'\n    def compute_target(self, a):\n        if a.due_max > a.groups_max:\n"
        "            return a.samples_max\n        return max(1, a.due_max)\n"
    )
    monkeypatch.chdir(tmp_path)
    for policy in (f"{path}:Rule", "rule.py:Rule"):
        assert "none leads to line 5" in check_bounds(load_judged(policy)).ranges


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(0)", "line 1: an import of a whole module"),
        ("while True: pass", "line 1: a loop"),
        ("1 +", "cannot read its file: SyntaxError"),
        ("X = " + "-" * 100_000 + "1", "cannot read its file|nested too deeply"),
        ("", "has no 'Rule'"),
        (
            "class Rule:\n    n = 1\n\n    def go(self):\n        return (\n            id(self)\n        )",
            "line 6: a call of id",
        ),
        ("class Rule:\n    n = 1\n    n = 2", "line 3: another meaning of n"),
        (
            "def go(\n    n,\n    *more,\n):\n    return 1\n\nclass Rule:\n    n = 1",
            "line 1: a function of any arguments",
        ),
    ],
)
def test_a_file_that_cannot_be_judged_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_judged(f"{path}:Rule")
    assert "\n" not in str(caught.value)


def test_a_module_of_the_current_directory_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(TABLE["at most 64 steps"][1])
    monkeypatch.chdir(tmp_path)
    assert load_judged("my_rules:Rule").rule.name == "mine"
    with pytest.raises(UsageError, match="there is no module 'our_rules'"):
        load_judged("our_rules:Rule")


def test_what_is_judged_is_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes a compiled file that is as long and as old as the rule's, and a module's package runs before it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError\n")
    text = TABLE["at most 64 steps"][1]
    for written, is_right in (
        (text, True),
        (text.replace("64", " 0").replace("max(1, a.due_max", "max(0, a.due_max"), False),
    ):
        for path in (tmp_path / "rule.py", package / "rule.py"):
            path.write_text(written)
            os.utime(path, (1e9, 1e9))
        load_rule("rule.py:Rule")  # writes what it compiled
        for policy in ("rule.py:Rule", "my_package.rule:Rule"):
            assert bool(check_bounds(load_judged(policy)).findings) is not is_right


@given(st.text("abcdefg()[]{}=:., \n_+*@", max_size=60))
def test_no_text_is_judged_that_does_something_when_it_is_read(text: str) -> None:
    """Names, calls and definitions at random. Only the language gets as far as to run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    try:
        check_language(tree)
    except OutsideError:
        return
    assert not any(isinstance(node, ast.Call | ast.Import | ast.List) for node in ast.walk(tree))


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
        Stage(name="exploration", covered="", properties=("ALIGN", "COVER"), seconds=0, findings=(finding,)),
    ]
    verdicts = compute_verdicts(done)
    assert verdicts["ALIGN"] == ("VIOLATED", "exploration")
    assert verdicts["RULE-BOUNDS"] == ("holds", "bounds")
    assert verdicts["COVER"] == ("not judged", "")
    assert "DEAL" not in verdicts and compute_verdicts(done, ["DEAL"])["DEAL"] == ("not judged", "")


def test_a_right_rule_passes(capsys: pytest.CaptureFixture[str]) -> None:
    data = get_figures(["verify", "--policy", EAGER])
    printed = capsys.readouterr().out
    assert f"odb-ref compare mm_mix_real --policy standard,odb,{EAGER}" in printed.splitlines()[-1]
    assert "holds for:" in printed and "not checked:" in printed
    assert f"so {', '.join(OF_THE_WORLD)} hold" in " ".join(printed.split())  # it is broken into lines
    assert data["ok"] and data["name"] == "eager"
    assert data["properties"] == {
        "RULE-PURE": {"verdict": "holds", "by": "language"},
        "RULE-BOUNDS": {"verdict": "holds", "by": "bounds"},
        "RULE-NAME": {"verdict": "holds", "by": "name"},
    }


def test_a_wrong_rule_is_refuted_and_a_world_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, figures = tmp_path / "found.json", tmp_path / "verdict.json"
    assert main(["verify", "--policy", HASTY, "--json", str(figures)]) == 1
    printed = capsys.readouterr().out
    data = json.loads(figures.read_text(encoding="utf-8"))
    assert data["properties"]["RULE-BOUNDS"]["verdict"] == "VIOLATED" and "RULE-BOUNDS is violated" in printed
    assert "ALIGN" not in printed
    world = ["--shard-sizes", "3,1", "--lengths", "9", "--token-budget", "9", "--window", "3"]
    assert main(["explore", "--policy", HASTY, *world, "--save", str(saved)]) == 1
    assert read_scenario(saved).rule == HASTY
    assert main(["explore", "--replay", str(saved)]) == 1


def test_what_z3_does_not_decide_is_not_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic, "MOST_PATHS", 1)
    assert main(["verify", "--policy", EAGER]) == 3
    assert "not judged: bounds" in capsys.readouterr().out


def test_no_such_rule_and_no_rule_to_judge_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refuse(capsys, ["verify", "--policy", "examples/rules/none.py:Rule"])
    assert ": a change of self._last" in refuse(capsys, ["verify", "--policy", SMOOTH])
    assert "--seed 3: has no effect on a rule" in refuse(capsys, ["verify", "--policy", EAGER, "--seed", "3"])
