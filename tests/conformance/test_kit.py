"""The kit: its cases are well formed, our planner is right in all, and each planted defect is identified."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from odb_ref.conformance.answers import Answer, JudgedPlan
from odb_ref.conformance.asking import PlannerEndedError, Program, ask_here, ask_ranks
from odb_ref.conformance.judge import RULES, compute_least, find_false_words, find_faults
from odb_ref.conformance.reports import describe, write_json
from odb_ref.conformance.running import NOT_ASKED, CaseVerdict, Judging, judge, run_cases
from odb_ref.conformance.vectors import PLANNED, VECTORS, Problem, decode, encode, make_case, read_cases
from tests.conformance import planted
from tests.conformance.best import find_best
from tests.conformance.ours import plan_here, plan_there
from tests.helpers.capture import capture
from tests.proofs.vectors import RULES_OF

CASES = [*read_cases()]
BY_ID = {case.id: case for case in CASES}
PLANS = [case for case in CASES if case.kind in PLANNED and not case.problem.is_online]
FILES = [path for path in sorted(VECTORS.glob("*.json")) if path.name != "schema.json"]
NOT_HELD = "not-the-best"
ONLINE = {*RULES_OF}


def test_the_cases_are_as_their_schema_says() -> None:
    schema = json.loads((VECTORS / "schema.json").read_text())
    records = [record for path in FILES for record in json.loads(path.read_text())]
    jsonschema.validate(records, schema)
    assert len({record["id"] for record in records}) == len(records)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([records[0] | {"expect": "hang"}], schema)
    assert all(bool({*record["flags"]} - {NOT_HELD}) == (record["expect"] == "either") for record in records)
    planned = {record["id"] for record in records if record["expect"] == "plan"}
    assert all(record["twin"] in planned for record in records if "twin" in record)
    for case in CASES:
        if case.kind in PLANNED:
            assert decode(encode(case.problem), case.kind) == case.problem


def test_every_term_is_asked_for() -> None:
    asked = frozenset().union(*(case.terms for case in CASES))
    assert {"plan_all", "plan_ranks", "together", "limits", "pad_to", "multiple_of", "at_least", "at_most"} <= asked
    assert {"layout", "cost", "within", "oversize", "short", "order", "mean", "changes"} <= asked


def test_what_is_said_to_be_best_is_the_best() -> None:
    """It tries all divisions of the small problems."""
    known = [case for case in CASES if case.kind in PLANNED and "count" in case.exact]
    assert len(known) > 50
    for case in known:
        # A lower bound that is reached is the best.
        best = find_best(case.problem) or {"count": compute_least(case.problem)}
        assert best == {name: case.exact[name] for name in ("count", "wait") if name in case.exact}
        assert case.exact.get("least_wait", best.get("wait")) == best.get("wait"), case.id  # a bound that is reached


def run_all(ask: Any, *, has_ranks: bool = False, is_exact: bool = False) -> list[CaseVerdict]:
    return run_cases(PLANS, Judging(ask=ask, has_ranks=has_ranks, is_exact=is_exact))


def test_ours_keep_everything() -> None:
    """Spec: R13. In one place, and on ranks that exchange, of which each fails once."""
    verdicts = run_all(ask_here(plan_here), is_exact=True)
    assert [(verdict.case.id, verdict.faults) for verdict in verdicts if verdict.is_broken] == []
    assert all(verdict.is_asked for verdict in verdicts if not verdict.case.record.get("changes"))
    verdicts = run_all(ask_ranks(lambda _: plan_there), has_ranks=True)
    assert [(verdict.case.id, verdict.faults) for verdict in verdicts if verdict.is_broken] == []
    assert len(PLANS) < sum(verdict.is_asked for verdict in verdicts)
    judged = frozenset().union(*(verdict.judged for verdict in verdicts))
    assert {"AGREE", "TERMINATION", "WEIGHT", "ORDER", "RESTORE", "REPORT"} <= judged
    verdicts = run_cases(CASES, Judging(ask=ask_here(plan_here), unclaimed=frozenset({"plan_all", "plan_ranks"})))
    assert {verdict.case.kind for verdict in verdicts if verdict.is_asked} == ONLINE
    assert not any(verdict.is_broken for verdict in verdicts)


def test_a_wrong_answer_of_the_online_protocol_is_not_the_models() -> None:
    """It emits nothing that is split: at most one step for each group."""

    def answer(question: Any) -> Any:
        if question["kind"] == "align":
            question = {**question, "target": min(question["target"], len(question["groups"]))}
        return plan_here(question)

    verdicts = run_cases(CASES, Judging(ask=ask_here(answer), unclaimed=frozenset({"plan_all", "plan_ranks"})))
    assert list_broken(verdicts) == {"EXACT"}
    assert {verdict.case.kind for verdict in verdicts if verdict.is_broken} == {"align"}


PLANTED = [(name, defect) for name, defects in planted.IN_ONE_PLACE.items() for defect in defects]
ON_RANKS = [(name, defect) for name, defects in planted.ON_RANKS.items() for defect in defects]


def list_broken(verdicts: Sequence[CaseVerdict]) -> set[str]:
    return {name for verdict in verdicts for name in verdict.faults}


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "planner"), [item for item in PLANTED if item[0] != "DETERMINISM"])
def test_a_planted_planner_breaks_its_property_and_no_other(wanted: str, planner: Callable[[Any], Any]) -> None:
    assert list_broken(run_all(ask_here(planner), is_exact=wanted == "EXACT")) == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "planner"), ON_RANKS)
def test_planted_ranks_break_their_property_and_no_other(wanted: str, planner: Callable[[Any, Any], Any]) -> None:
    assert list_broken(run_all(ask_ranks(lambda _: planner), has_ranks=True)) == {wanted}


def test_every_property_is_planted() -> None:
    """A defect for each property of the judge tests the judge."""
    assert {*planted.IN_ONE_PLACE, *planted.ON_RANKS} == set(RULES)


def test_who_always_refuses_is_right_in_nothing() -> None:
    verdicts = run_all(ask_here(planted.refuse_all))
    right = [verdict.case.id for verdict in verdicts if verdict.is_asked and not verdict.is_broken]
    assert set(right) == {case.id for case in CASES if case.expect == "either" and case.kind in PLANNED}


def sort_in_place(question: Any) -> Any:
    """Sorts its input in place, and returns places in the sorted input."""
    for own in question.get("lengths", []):
        own.sort()
    return plan_here(question)


def test_a_planner_that_changes_what_it_is_asked_is_judged_by_what_was_asked() -> None:
    cases = [case for case in CASES if case.kind == "plan_ranks"]
    lengths = [[[*own] for own in case.problem.lengths] for case in cases]
    assert "BUDGET" in list_broken(run_all(ask_here(sort_in_place)))
    assert [[[*own] for own in case.problem.lengths] for case in cases] == lengths


@pytest.mark.parametrize("planner", [planted.say_something_else, planted.end_the_process, planted.say_no_json])
def test_what_is_no_answer_is_a_verdict_and_ends_nobody(planner: Callable[[Any], Any]) -> None:
    ask = ask_here(planner)
    assert "ANSWER" in list_broken(run_cases(PLANS, Judging(ask=ask, elsewhere=(ask,))))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odb_ref.conformance", "run", *arguments]
    return capture(command, timeout=120)


@pytest.mark.deep
def test_the_command_judges_a_function() -> None:
    found = run("--planner", "tests.conformance.ours:plan_here", "--level", "exact")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "DETERMINISM  kept in" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("only", ["verl", ""], ids=["some cases", "all"])
def test_the_command_finds_what_depends_on_the_hash_seed(only: str, tmp_path: Path) -> None:
    page, report = tmp_path / "page.html", tmp_path / "junit.xml"
    planner = "tests.conformance.planted:order_by_hash"
    claimed = ["--without", "online", "--only", only]
    found = run("--planner", planner, "--html", str(page), "--junit", str(report), *claimed)
    assert found.returncode == 1
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines if " broken in " in line] == ["DETERMINISM"]
    suite = ElementTree.fromstring(report.read_text())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert suite.get("failures") == str(len(failed))
    assert len(suite) == sum(only in case.id for case in CASES)
    assert page.read_text().count("#fbb") == len(failed) > 0


PROGRAM = """
import json, sys
for line in sys.stdin:
    problem = json.loads(line)
    budget = problem["terms"]["budget"]
    if any(length > budget for own in problem["lengths"] for length in own):
        print(json.dumps({"refused": "too long"}), flush=True)
    else:  # one sample a micro-batch, as many for all
        count = max([1, *map(len, problem["lengths"])])
        plan = [[[index] for index in range(len(own))] + [[]] * (count - len(own)) for own in problem["lengths"]]
        print(json.dumps({"plan": plan}), flush=True)
"""
UNKNOWN = "online,plan_all,multiple_of,at_most,at_least,short,oversize,together,pad_to,limits,order"


def test_the_command_judges_any_program(tmp_path: Path) -> None:
    """A simple planner is right in everything that it claims, but has low scores."""
    program = tmp_path / "planner.py"
    program.write_text(PROGRAM)
    found = run("--without", UNKNOWN, "--", sys.executable, str(program))
    broken = [line for line in found.stdout.splitlines() if ": EXPECT" in line]
    assert found.returncode == 1
    names = ["length-0", "length-negative", "one-length-too-few", "supervised-beyond", "supervised-negative"]
    assert sorted(line.partition(":")[0] for line in broken) == names
    found = run("--only", "length", "--", sys.executable, "-c", "print('no JSON')")
    assert found.returncode == 1
    assert "ANSWER       broken" in found.stdout


def test_a_program_that_ended_before_it_was_asked_has_refused_nothing() -> None:
    """A broken pipe would be taken for a refusal, and for a right one where a refusal is expected."""
    program = Program([sys.executable, "-c", ""], "0")
    program._start()
    program._process.wait()
    with pytest.raises(PlannerEndedError, match="takes no question"):
        program.answer({"lengths": [3]})


TALKATIVE = """
import json, sys
for number, line in enumerate(sys.stdin):
    plan = [[[index] for index in range(len(own))] for own in json.loads(line)["lengths"]]
    answer = json.dumps({"plan": plan}).encode() + b"\\n"
    sys.stdout.buffer.write(SAID if number == 1 else answer)
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('b"\\xff\\xfe\\n"', [None, "an answer is a line with a JSON object, got", None]),
        ('answer + b"debug\\n"', [None, None, "printed a line that nobody asked for: 'debug'", None]),
        ("answer * 2", [None, None, 'printed a line that nobody asked for: \'{"plan": ', None]),
        ('b"[" * 100_000 + b"\\n"', [None, "an answer is a line with a JSON object, got", None]),
    ],
    ids=["not UTF-8", "a debug print", "twice", "deep"],
)
def test_a_program_that_prints_what_it_should_not_is_told_and_asked_anew(said: str, words: list[str | None]) -> None:
    """A line too many would be taken for the next answer, and each answer for that of the case before."""
    program = Program([sys.executable, "-c", TALKATIVE.replace("SAID", said)], "0", limit_s=5)
    for size, expected in enumerate(words, 1):
        question = {"lengths": [[5] * size]}
        if expected is None:
            assert program.answer(question) == {"plan": [[[index] for index in range(size)]]}
        else:
            with pytest.raises(PlannerEndedError) as caught:
                program.answer(question)
            assert expected in str(caught.value)
    program.close()


def test_a_program_that_closes_its_output_and_lives_on_has_ended() -> None:
    program = Program([sys.executable, "-c", "import os, time; os.close(1); time.sleep(60)"], "0")
    with pytest.raises(PlannerEndedError, match="the program has closed its output"):
        program.answer({"lengths": [3]})


@pytest.mark.parametrize(
    ("again", "fault", "words"),
    [
        (Answer(problem="said nothing"), "ANSWER", "asked again: said nothing"),
        (Answer(refusals=("no answer in 10 s",), is_stuck=True), "TERMINATION", "asked again: no answer in 10 s"),
        (
            Answer(refusals=("too long",)),
            "DETERMINISM",
            'first {"plan": [[[0]], [[0]], [[0]]]}, and asked again "too long"',
        ),
    ],
)
def test_what_is_no_answer_when_asked_again_is_called_that(again: Answer, fault: str, words: str) -> None:
    once = Answer(said={"plan": [[[0]], [[0]], [[0]]]})
    verdict = judge(BY_ID["uneven-needs"], Judging(ask=lambda _: once, elsewhere=(lambda _: once, lambda _: again)))
    assert fault in verdict.faults
    assert words in verdict.says


def test_the_summary_says_that_no_more_was_asked() -> None:
    verdicts = run_cases(PLANS, Judging(ask=lambda _: Answer(refusals=("no answer in 10 s",), is_stuck=True)))
    asked = sum(verdict.is_asked for verdict in verdicts)
    left = sum(verdict.says == NOT_ASKED for verdict in verdicts)
    assert (asked, left) == (3, len([case for case in PLANS if case.problem.changes is None]) - 3)
    assert f"{left} cases not asked: too many answers did not come in time" in describe(verdicts)


RANK_PROGRAM = """
import json, sys
for line in sys.stdin:
    problem = json.loads(line)
    lengths, budget = problem["lengths"], problem["terms"]["budget"]
    if max(lengths, default=0) > budget:
        print(json.dumps({"refused": "too long"}), flush=True)
        continue  # the others wait
    print(json.dumps({"exchange": [len(lengths)]}), flush=True)
    count = max(1, max(row[0] for row in json.loads(sys.stdin.readline())["gathered"]))
    print(json.dumps({"plan": [[index] for index in range(len(lengths))] + [[]] * (count - len(lengths))}), flush=True)
"""


def test_the_command_judges_the_ranks_of_any_program(tmp_path: Path) -> None:
    """A rank that raises before the exchange is found, in any language."""
    program = tmp_path / "planner.py"
    program.write_text(RANK_PROGRAM)
    found = run("--ranks", "--only", "one", "--without", UNKNOWN, "--", sys.executable, str(program))
    assert found.returncode == 1
    assert "one-beyond-the-budget: TERMINATION" in found.stdout
    assert "one-rank-empty" not in found.stdout.replace("one-rank-empty-failing", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "one planner"),
        ("--planner tests.conformance.ours:plan_here --vectors no/such", "no such cases"),
        ("--planner tests.conformance.ours:plan_here --only dressing", "no case whose id holds 'dressing'"),
    ],
)
def test_a_command_needs_one_planner_and_cases(arguments: str, said: str) -> None:
    found = run(*arguments.split())
    assert found.returncode == 2
    assert said in found.stderr


def test_the_examples_of_the_page_are_right() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "conformance.md"
    rows = [
        json.loads(row)
        for block in page.read_text().split("```json\n")[1:]
        for row in block.split("```")[0].splitlines()
    ]
    assert [row["kind"] for row in rows[::2]] == ["plan_ranks", "plan_all"]
    for question, answer in zip(rows[::2], rows[1::2], strict=True):
        (verdict,) = run_cases([make_case(question)], Judging(ask=lambda _, answer=answer: Answer(said=answer)))
        assert verdict.faults == ()
        assert {"REPORT", "RESTORE"} <= verdict.judged
        ours = dict(plan_here(question))  # type: ignore[arg-type]
        assert answer == json.loads(
            json.dumps({**ours, "report": {name: ours["report"][name] for name in answer["report"]}})
        )
    assert "WEIGHT" in run_cases([make_case(rows[0])], Judging(ask=lambda _: Answer(said=rows[1])))[0].judged


def test_all_of_the_online_protocol_is_left_out_by_one_name() -> None:
    verdicts = run_cases(CASES, Judging(ask=lambda _: Answer(said=[]), unclaimed=frozenset({"online"})))
    assert {verdict.case.kind for verdict in verdicts if verdict.is_asked} == {"plan_all", "plan_ranks"}
    assert {verdict.case.kind for verdict in verdicts if not verdict.is_asked} >= ONLINE


def test_what_is_wrong_is_said() -> None:
    """Where it is, with both numbers."""
    problem = Problem(lengths=[[50, 9, 60], [54, 50]], uses={"patches": [[9, 9, 0], [0, 0]]}, terms={"budget": 100})
    good = [[[0, 1], [2]], [[0], [1]]]
    assert find_faults(problem, good) == {}
    assert find_faults(problem, [[[0]]]) == {"ANSWER": "ranks in the plan: 1, not 2"}
    assert find_faults(problem, [[[0, 1], [0, 2]], [[0], []]]) == {
        "ONCE": "sample 0 of rank 0 is in rank 0, micro-batch 0 and in rank 0, micro-batch 1",
        "BUDGET": "rank 0, micro-batch 1: 110 of 100 tokens",
        "COVER": "sample 1 of rank 1 is in no micro-batch",
    }
    assert find_faults(problem, [[[0, 1], [2], [3]], [[0], [1]]]) == {
        "HOME": "rank 0, micro-batch 2: there is no sample 3 of rank 0, which has 3"
    }
    assert find_faults(problem, [[[0, 1], [2]], [[1, 0]]]) == {
        "EQUAL": "rank 0 has 2 micro-batches, rank 1 has 1",
        "BUDGET": "rank 1, micro-batch 0: 104 of 100 tokens",
    }
    assert find_faults(problem, [[[0, 1, 2], []], [[0], [1]]])["NONEMPTY"] == (
        "rank 0: 1 of 2 micro-batches are empty, of 3 units"
    )
    problem.terms |= {"order": "costliest_first", "limits": {"patches": 10}}
    assert find_faults(problem, good) == {
        "BUDGET": "rank 0, micro-batch 0: 18 of 10 patches",
        "ORDER": "rank 0: micro-batches that cost [59, 60], not [60, 59]",
    }
    said = JudgedPlan(plans=good, restored=[[0, 1, 2], [1, 0]], report={"count": 3})
    assert find_false_words(problem, said, {}) == {
        "RESTORE": "[[0, 1, 2], [1, 0]], not [[0, 1, 2], [0, 1]]",
        "REPORT": "count 3, not 2",
    }
    dealt = Problem(lengths=[[5], [5]], is_dealt=True, terms={"budget": 60})
    assert find_faults(dealt, [[[0]], [[0]]]) == {
        "ONCE": "sample 0 is in rank 0, micro-batch 0 and in rank 1, micro-batch 0",
        "COVER": "sample 1 is in no micro-batch",
    }


def test_a_verdict_has_the_question_the_answer_and_what_is_wrong() -> None:
    cases = [BY_ID[name] for name in ("uneven-needs", "one-beyond-the-budget", "trl-4554")]
    answers = cycle(range(2))
    wrong = ask_here(lambda _: [[[0]], [[next(answers)]], [[0, 0]]])
    verdicts = run_cases(cases, Judging(ask=wrong, elsewhere=(wrong,)))
    found = {row["id"]: row for row in json.loads(write_json(verdicts))}
    row = found["uneven-needs"]
    assert row["question"] == {"kind": "plan_ranks", "lengths": [[9, 9], [40, 40], [31] * 3], "terms": {"budget": 60}}
    assert row["answer"][2] == [[0, 0]]
    assert "sample 0 of rank 2 is in rank 2, micro-batch 0 and in rank 2, micro-batch 0" in row["says"]
    assert row["says"].startswith("first [[[0]], [[0]], [[0, 0]]], and asked again [[[0]], [[1]], [[0, 0]]]; sample ")
    assert row["says"] in describe(verdicts)
    (verdict,) = run_cases(cases[:1], Judging(ask=ask_here(planted.refuse_all)))
    assert verdict.answer == {"refused": "no"}


def test_the_answer_names_what_is_too_long() -> None:
    said = judge(BY_ID["one-beyond-the-budget"], Judging(ask=ask_here(plan_here))).says
    assert said.startswith("rank 1: sample 1 has 61 tokens")
