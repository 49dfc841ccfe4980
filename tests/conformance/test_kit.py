"""The kit for planners: its cases are well formed, ours are right in all, and each planted defect is found for what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from odb_ref.conformance.judge import RULES, Problem, find_faults
from odb_ref.conformance.planners import ask_function, ask_ranks, plan_here, plan_there
from odb_ref.conformance.running import judge, run_cases
from odb_ref.conformance.vectors import VECTORS, decode, encode, read_cases
from tests.conformance.planted import IN_ONE_PLACE, ON_RANKS

CASES = [*read_cases()]
ON_RANKS_ONLY = frozenset({"plan_all"})


def test_the_cases_are_as_their_schema_says() -> None:
    schema = json.loads((VECTORS / "schema.json").read_text())
    records = json.loads((VECTORS / "plan.json").read_text())
    jsonschema.validate(records, schema)
    assert len({record["id"] for record in records}) == len(records)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([records[0] | {"expect": "hang"}], schema)
    assert all(bool(record["flags"]) == (record["expect"] == "either") for record in records)
    for case, record in zip(CASES, records, strict=True):
        assert decode(encode(case.problem), record["kind"]) == case.problem


def test_every_term_is_asked_for() -> None:
    asked = frozenset().union(*(case.terms for case in CASES))
    assert {"plan_all", "plan_ranks", "together", "limits", "pad_to", "multiple_of", "at_least", "at_most"} <= asked
    assert {"layout", "cost", "within", "oversize", "short"} <= asked


def test_ours_keep_everything() -> None:
    """Spec: R13. In one place, and on ranks that exchange."""
    assert [verdict.faults for verdict in run_cases(CASES, ask_function(plan_here))] == [()] * len(CASES)
    verdicts = run_cases(CASES, ask_ranks(plan_there), unclaimed=ON_RANKS_ONLY)
    assert [verdict.faults for verdict in verdicts] == [()] * len(CASES)
    assert 0 < sum(verdict.is_claimed for verdict in verdicts) < len(CASES)


@pytest.mark.parametrize("wanted", [name for name in IN_ONE_PLACE if name != "DETERMINISM"])
def test_a_planted_planner_breaks_its_property_and_no_other(wanted: str) -> None:
    verdicts = run_cases(CASES, ask_function(IN_ONE_PLACE[wanted]))
    assert {name for verdict in verdicts for name in verdict.faults} == {wanted}


@pytest.mark.parametrize("wanted", ON_RANKS)
def test_planted_ranks_break_their_property_and_no_other(wanted: str) -> None:
    verdicts = run_cases(CASES, ask_ranks(ON_RANKS[wanted]), unclaimed=ON_RANKS_ONLY)
    assert {name for verdict in verdicts for name in verdict.faults} == {wanted}


def test_every_property_is_planted() -> None:
    """The judge is judged: by a defect for each property that it has."""
    assert {*IN_ONE_PLACE, *ON_RANKS} == set(RULES)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odb_ref.conformance", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_judges_a_function() -> None:
    found = run("--planner", "odb_ref.conformance.planners:plan_here")
    assert found.returncode == 0, found.stderr
    assert f"{len(CASES)} of {len(CASES)} cases right, 0 not claimed" in found.stdout


def test_the_command_finds_what_depends_on_the_hash_seed(tmp_path: Path) -> None:
    page, report = tmp_path / "page.html", tmp_path / "junit.xml"
    planner = "tests.conformance.planted:order_by_hash"
    found = run("--planner", planner, "--html", str(page), "--junit", str(report))
    assert found.returncode == 1
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines if " broken in " in line] == ["DETERMINISM"]
    suite = ElementTree.fromstring(report.read_text())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert suite.get("failures") == str(len(failed))
    assert len(suite) == len(CASES)
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


def test_the_command_judges_any_program(tmp_path: Path) -> None:
    """A simple one is right in all that it claims, and poor by the scores."""
    program = tmp_path / "planner.py"
    program.write_text(PROGRAM)
    terms = "plan_all,multiple_of,at_most,at_least,short,oversize,together,pad_to,limits"
    found = run("--without", terms, "--", sys.executable, str(program))
    broken = [line for line in found.stdout.splitlines() if ": EXPECT" in line]
    assert found.returncode == 1
    assert sorted(line.partition(":")[0] for line in broken) == ["length-0", "length-negative"]
    assert " broken in 2" in found.stdout
    assert "18 of 20 cases right, 30 not claimed" in found.stdout
    found = run("--", sys.executable, "-c", "print('no JSON')")
    assert found.returncode == 1
    assert "no answer" in found.stdout


def test_a_command_needs_one_planner(tmp_path: Path) -> None:
    found = run()
    assert found.returncode == 2
    assert "one planner" in found.stderr
    found = run("--planner", "odb_ref.conformance.planners:plan_here", "--vectors", str(tmp_path))
    assert found.returncode == 2
    assert "no cases there" in found.stderr


def test_another_number_of_ranks_is_no_home() -> None:
    problem = Problem(lengths=[[5], [5]], terms={"budget": 60})
    assert find_faults(problem, [[[0]]]) == {"HOME"}
    case = next(case for case in CASES if case.id == "one-beyond-the-budget")
    assert judge(case, ask_function(plan_here)).says.startswith("rank 1: sample 1 has 61 tokens")
