"""``odb-ref verify --core`` judges a changed core by everything that links it to spec, proofs and model."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from odb_sim.cli.main import main
from odb_sim.explore.weights import WeightJudge
from odb_sim.verify import core_copy
from odb_sim.verify.core_copy import verify_core
from odb_sim.verify.verdict import OF_THE_WORLD, Finding, Stage, compute_verdicts

from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.effects import Deliver
from odb_ref.core.types import Sample, Step, StepCounts
from tests.helpers.waiting import is_in_time
from tests.mutants.fresh import DEFECTS, plant

CORE = Path(__file__).parents[2] / "odb_ref" / "core"


@pytest.fixture
def core(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CORE, tmp_path / "core", ignore=shutil.ignore_patterns("__pycache__")))


def change(core: Path, module: str, old: str, new: str) -> None:
    path = core / f"{module}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def copy_with_defect(folder: Path, name: str) -> core_copy._Copy:
    (defect,) = (defect for defect in DEFECTS if defect.name.startswith(name))
    return core_copy._copy_repository(folder, plant(defect, folder / "planted"))


def get(stages: list[Stage], name: str) -> Stage:
    return next(stage for stage in stages if stage.name == name)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts each suite of tests down to one file, to test what surrounds them."""
    suites = {suite.name: suite for suite in core_copy._SUITES}
    unit, differential, model_check = (suites[name] for name in ("unit", "differential", "TLC"))
    short = (
        replace(unit, tests=("tests/spec/test_r4_alignment.py", "tests/spec/test_r4_order.py")),
        replace(differential, needs=Path("proofs/no-such-file")),
        replace(model_check, tests=("tests/no-such-test",)),
    )
    monkeypatch.setattr(core_copy, "_SUITES", short)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_changed_core_is_refuted_with_a_schedule_and_what_cannot_run_is_said(core: Path) -> None:
    change(core, "batching/alignment", "), tuple(carried)", "), ()")
    stages = list(verify_core(core))
    names = [stage.name for stage in stages]
    assert names == ["large", "properties", "exploration", "unit", "differential", "TLC"]
    assert all(get(stages, name).findings for name in ("large", "unit", "exploration", "properties"))
    (found,) = get(stages, "exploration").findings
    assert found.property == "CONSERVE" and found.scenario is not None and len(found.scenario.schedule) < 12
    assert "test_r4_alignment" in get(stages, "unit").findings[0].case
    assert "CONSERVE" in get(stages, "unit").doubted
    assert "not built" in get(stages, "differential").skipped
    assert "the repository" in get(stages, "TLC").skipped


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_core_that_cannot_be_imported_is_refuted(core: Path) -> None:
    change(core, "batching/alignment", "import heapq\n", "import heapqueue\n")
    stages = list(verify_core(core))
    assert "heapqueue" in get(stages, "exploration").findings[0].detail
    assert get(stages, "unit").findings


@pytest.mark.usefixtures("brief")
def test_stages_for_which_there_is_no_time_are_skipped(core: Path) -> None:
    began = time.monotonic()
    stages = list(verify_core(core, limit_s=0.5))
    assert time.monotonic() - began < 30
    assert [bool(stage.skipped) for stage in stages] == [True] * 6
    assert "no time left" in get(stages, "exploration").skipped


def test_what_is_broken_off_ends_soon(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def list_stages(copy: core_copy._Copy, seed: int) -> list[Callable[[], object]]:
        copies.append(copy)
        return [lambda: "done", *[partial(copy.run, ["-c", "import time; time.sleep(60)"])] * 3]

    monkeypatch.setattr(core_copy, "_list_stages", list_stages)
    stages = cast("Generator[object, None, None]", verify_core(core))
    assert next(stages) == "done"
    assert is_in_time(lambda: len(copies[0]._processes) == 2, 20)
    begin_s = time.monotonic()
    stages.close()
    assert time.monotonic() - begin_s < 20
    assert not copies[0]._processes


@pytest.mark.usefixtures("brief")
def test_what_is_not_judged_is_no_pass(
    core: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exit code and the last line report a stage for which there was no time, or no tool."""
    monkeypatch.setattr("odb_sim.cli.verify.verify_core", lambda core, seed: verify_core(core, seed=seed, limit_s=0.5))
    assert main(["verify", "--core", str(core), "--save", str(tmp_path / "c.json")]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not judged: large, properties, exploration, unit, differential, TLC, ")
    assert last.endswith("; differential can be judged after: make proofs")


def test_what_strikes_in_pytest_itself_is_what_is_said() -> None:
    """A time limit may strike there, and the last line printed does not show it."""
    said = "Failed: Timeout (>1s) from pytest-timeout."
    printed = f"INTERNALERROR>   File x, line 1\nINTERNALERROR> {said}\n\n1 warning in 0.35s\n"
    assert core_copy._read_failure(printed, "") == (said, "the collection of the tests")


@pytest.mark.usefixtures("brief")
def test_the_property_that_a_failing_test_checks_is_not_shown(tmp_path: Path) -> None:
    """It was said to hold where no other stage had refuted it, and later to be violated, which no case had shown."""
    copy = copy_with_defect(tmp_path, "an update of one token")
    suite = replace(core_copy._SUITES[0], tests=("tests/core/test_weighting.py",))
    holding = Stage(name="large", covered="", properties=("WEIGHT", "ALIGN"), seconds=0, findings=())
    verdicts = compute_verdicts([holding, core_copy._run_suite(copy, suite)])
    assert verdicts["AS-TESTED"] == ("VIOLATED", "unit")
    assert verdicts["WEIGHT"] == ("not shown", "unit; no violation in large")
    assert verdicts["ALIGN"] == ("holds", "large")


@pytest.mark.parametrize("name", ["second", "differential", "TLC"])
def test_a_core_that_is_another_than_the_proved_one_violates_no_property_by_that(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the one failing test happened to check was VIOLATED, and all else held."""
    (suite,) = (suite for suite in core_copy._SUITES if suite.name == name)
    test = tmp_path / "tests" / "test_twins.py"
    test.parent.mkdir()
    test.write_text('def test_both():\n    """Checks: ALIGN, TERM, PEERS."""\n    assert 4 == 3\n')
    suite = replace(suite, tests=("tests/test_twins",), needs=None)
    holding = Stage(name="large", covered="", properties=("ALIGN", "AGE"), seconds=0, findings=())
    found = Finding(property="REPLAY", detail="", case="")
    refuted = replace(holding, name="properties", findings=(found,))
    stages = [holding, refuted, core_copy._run_suite(core_copy._Copy(tmp_path, time.monotonic() + 60), suite)]
    verdicts = compute_verdicts(stages)
    assert verdicts[suite.property] == ("VIOLATED", name)
    assert verdicts["REPLAY"] == ("VIOLATED", "properties")
    assert verdicts["ALIGN"] == verdicts["AGE"] == ("not shown", f"{name}; no violation in large")
    assert verdicts["TERM"] == verdicts["RESUME"] == verdicts["PEERS"] == ("not shown", name)
    monkeypatch.setattr("odb_sim.cli.verify.verify_core", lambda core, seed: iter(stages))
    assert main(["verify", "--core", str(tmp_path), "--save", str(tmp_path / "c.json")]) == 1
    printed = capsys.readouterr().out
    assert f"ALIGN        not shown   by {name}; no violation in large" in printed
    assert "not shown: " in printed
    assert printed.splitlines()[-1] == f"refuted: REPLAY, {suite.property}"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("assert (Violation(property=<Property.WEIGHT: 'WEIGHT'>, what='holds", ["WEIGHT"]),
        ("odb_ref.core.errors.InvariantError: I11: DEAL: not true that a draw lies", ["DEAL"]),
        ("odb_ref.core.errors.InvariantError: ALIGN: the ranks post the counts", ["ALIGN"]),
        ("odb_sim.explore.violation.Breach: FEWEST: rank 0: 2 groups of (1, 1)", ["FEWEST"]),
        (
            "['RESUME rank 3 round 2047 step -: keeps', 'ORDER rank - round 1 step 2: x', 'RESUME rank",
            ["RESUME", "ORDER"],
        ),
        ("assert 1 == 0", []),
    ],
)
def test_a_failure_violates_the_properties_that_it_names(said: str, named: list[str]) -> None:
    assert core_copy._list_named(f">   assert ABORT rank 1 round 2\nE       {said}\n") == named


@pytest.mark.parametrize(
    ("case", "checked"),
    [
        (
            "tests/spec/test_r4_alignment.py::test_alignment_makes_exactly_the_target_and_loses_nothing[0]",
            ["ALIGN", "CONSERVE", "BUDGET"],
        ),
        ("the collection of the tests", []),
        ("tests/core/test_errors.py::no_such_test", []),
    ],
)
def test_what_a_failing_test_checks_is_read_from_it(case: str, checked: list[str]) -> None:
    assert core_copy._list_checked(CORE.parents[1], case) == checked


def test_each_property_has_its_row() -> None:
    """PEERS had none, and UPDATE only if something else failed. PLAN is not of the core."""
    named = re.findall(r"^### (\S+)$", (CORE.parents[1] / "spec" / "properties.md").read_text(), re.MULTILINE)
    tested = {name: [suite.name for suite in core_copy._SUITES if name in suite.judges] for name in named}
    assert {name for name, by in tested.items() if not by} == {*OF_THE_WORLD, "PLAN"}
    assert tested["RESUME"] == tested["PEERS"] == ["unit", "magnitudes"]
    assert any(text.startswith("PLAN: ") for text in core_copy.NOT_OF_THE_CORE)


def test_resuming_is_judged_and_named() -> None:
    finding = Finding(property="RESUME", detail="", case="")
    stage = Stage(name="magnitudes", covered="", properties=("AS-JUDGED",), seconds=0, findings=(finding,))
    assert compute_verdicts([stage])["RESUME"] == ("VIOLATED", "magnitudes")


def test_a_test_that_takes_too_long_refutes_nothing(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (suite,) = (suite for suite in core_copy._SUITES if suite.name == "unit")
    monkeypatch.setattr(core_copy, "_SUITES", (suite,))
    monkeypatch.setattr(core_copy, "_TEST_S", 0.001)
    monkeypatch.setattr(core_copy, "_run_worlds", lambda *_: None)
    stage = next(stage for stage in verify_core(core) if stage is not None)
    assert stage.findings == ()
    assert "did not end in 0.001 s" in stage.skipped


def test_weights_that_make_another_mean_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: WEIGHT."""
    judge = WeightJudge(2, lambda *_: None)
    for rank, supervised in enumerate((3, 5)):
        step = Step(0, 0, (Sample(rank, 0, 9, supervised),), StepCounts(2, 18, 8))
        judge.observe(rank, None, (Deliver(step),), 0.0)
    assert not judge.find_wrong()
    monkeypatch.setattr(Weighting, "compute_scale", lambda *_: 1.0)
    assert judge.find_wrong().endswith("make 1.5, the mean is 1.625")


@pytest.mark.parametrize("name", ["every token counts", "a sample alone counts", "an update of one token"])
@pytest.mark.parametrize("stage", ["exploration", pytest.param("properties", marks=pytest.mark.slow), "large"])
def test_counts_are_not_judged_by_the_core_that_made_them(stage: str, name: str, tmp_path: Path) -> None:
    """Checks: WEIGHT."""
    found = core_copy._run_worlds(copy_with_defect(tmp_path, name), stage, 0)
    assert {finding.property for finding in found.findings} == {"WEIGHT"}


@pytest.mark.parametrize("stage", ["exploration", "properties", "large"])
def test_samples_that_share_an_id_are_two(stage: str, core: Path, tmp_path: Path) -> None:
    """Checks: CONSERVE. Spec: R1.1. No world had an id twice."""
    carried = "chain.from_iterable(groups[i] for i in order[target:])"
    change(core, "batching/alignment", carried, f"{{one.id: one for one in {carried}}}.values()")
    (finding,) = core_copy._run_worlds(core_copy._copy_repository(tmp_path, core), stage, 0).findings
    assert finding.property == "CONSERVE", finding.detail


def test_what_is_no_core_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--core", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "is not a copy of odb_ref/core" in printed and printed.count("\n") == 1


def test_every_test_that_a_stage_names_is_there() -> None:
    for suite in core_copy._SUITES:
        assert all(list(CORE.parents[1].glob(f"{test}*")) for test in suite.tests), suite.name
