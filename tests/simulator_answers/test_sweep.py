"""Sweeps give the same answers in the same order with any executor."""

from __future__ import annotations

import csv
import json
import sys
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.engine.cautions import say_amount
from odb_sim.engine.updates import GlobalBatch
from odb_sim.reports.tables import SWEEP
from odb_sim.studies.cells import Runner
from odb_sim.studies.clusters import open_executor
from odb_sim.studies.processes import Local
from odb_sim.studies.runs import run
from odb_sim.studies.sweep import Study, build_points, run_grid

from odb_ref.core.errors import InvariantError, UsageError
from tests.helpers.commands import get_figures, refuse, tell
from tests.simulator_answers.helpers import make_lengths

POINTS = build_points(policies=["odb", "standard"], ranks=[2, 4], budgets=[2048], windows=[16, 64], depths=[2])
STUDY = Study(lengths=make_lengths(), seed=1)


def test_no_combination_repeats_another() -> None:
    """A baseline has neither window nor depth. With fixed updates only the peer's windows differ."""
    assert len(POINTS) == 6
    assert [point.window_samples for point in POINTS if point.policy == "standard"] == [16, 16]
    assert [point.ranks for point in POINTS] == [2, 2, 2, 4, 4, 4]
    policies = ["odb", "peer", "standard"]
    points = build_points(policies=policies, ranks=[2], budgets=[9], windows=[16, 64], depths=[2, 4], update_samples=32)
    found = [[(at.window_samples, at.depth_steps) for at in points if at.policy == policy] for policy in policies]
    assert found == [[(16, 2), (16, 4)], [(16, 2), (64, 2)], [(16, 2)]]


def test_the_table_shows_the_budget_and_the_seconds_of_the_figures() -> None:
    """A global batch makes the budget smaller."""
    point = replace(POINTS[-1], budget_tokens=20_000)
    (answer,) = run_grid(
        replace(STUDY, global_batch=GlobalBatch(samples=4)), [replace(point, policy="packing")], Runner(Local())
    )
    figures = answer.to_json()
    assert figures["token_budget"] != 20_000
    assert [SWEEP[name](answer) for name in ("budget", "sim s")] == [
        f"{figures['token_budget']:,}",
        say_amount(answer.summary.sim_time_s),
    ]


def test_the_page_names_the_budget_of_the_figures(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    arguments = (
        "sweep gsm8k --samples 400 --ranks 2 --token-budget 20000 --policy packing --global-batch 32 --processes 1"
    )
    (figures,) = get_figures(arguments, "--html", str(page))
    assert f"packing on 2 ranks, budget {figures['token_budget']:,}" in page.read_text()


def test_the_fastest_is_named_and_updates_of_other_sizes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "sweep gsm8k --ranks 2,4 --token-budget 1024,2048 --samples 256 --processes 1"
    said = tell(capsys, f"{asked} --window 64")
    assert "The fastest by tokens a second and rank (odb on 2 ranks, budget 2,048, window 64, depth 8): Nine" in said
    assert "every step is an update here, of 9 to 32 samples: with --global-batch N all" in said
    assert "every step is an update" not in tell(capsys, f"{asked} --global-batch 64")


def test_any_executor_gives_the_same_answers_in_the_order_of_the_grid() -> None:
    def figures(executor: Executor) -> list[dict[str, object]]:
        heard: list[int] = []
        with executor:
            answers = run_grid(STUDY, POINTS, Runner(executor, on_done=heard.append))
        assert [answer.point for answer in answers] == list(POINTS)
        assert sorted(heard) == [1, 2, 3, 4, 5, 6]
        return [dict(answer.to_json()) for answer in answers]

    here = figures(Local())
    assert figures(ThreadPoolExecutor(3)) == here
    assert figures(ProcessPoolExecutor(2, mp_context=get_context("spawn"))) == here


@pytest.mark.slow
def test_a_cluster_gives_the_same_answers(address: str) -> None:
    heard: list[int] = []
    with open_executor(address, 1) as executor:
        answers = run_grid(STUDY, POINTS, Runner(executor, on_done=heard.append))
        with pytest.raises(InvariantError, match="FREE"):
            executor.submit(raise_invariant).result()
    assert [answer.to_json() for answer in answers] == [
        answer.to_json() for answer in run_grid(STUDY, POINTS, Runner())
    ]
    assert sorted(heard) == [1, 2, 3, 4, 5, 6]


def raise_invariant() -> None:
    raise InvariantError("FREE", "nothing can happen")


@pytest.mark.deep
def test_the_commands_run_on_a_cluster(address: str, tmp_path: Path) -> None:
    written = []
    for number, where in enumerate((["--processes", "1"], ["--executor", address])):
        path = tmp_path / f"{number}.json"
        grid = ["gsm8k", "--samples", "200", "--ranks", "2,3", "--token-budget", "1024", "--window", "16"]
        assert main(["sweep", *grid, "--json", str(path), *where]) == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    question = ["gsm8k", "--samples", "60", "--ranks", "2", "--memory-tokens", "512", "--window-max", "16"]
    alone = ["--layout", "packed", "--shards", "shared"]  # and little beside it, to save some hundred simulations
    assert main(["tune", *question, *alone, "--executor", address]) == 0


def test_an_address_where_nobody_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed: pip install 'odb-ref[dask]'")
    monkeypatch.setattr("odb_sim.studies.clusters._CONNECT_S", 1)
    with pytest.raises(UsageError, match="no answer"), open_executor("dask://127.0.0.1:9", 1):
        pass


@pytest.mark.parametrize(("scheme", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_without_the_library_the_message_says_what_to_install(
    scheme: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    wanted = rf"pip install 'odb-ref\[{scheme}\]'"
    with pytest.raises(UsageError, match=wanted), open_executor(f"{scheme}://127.0.0.1:9", 1):
        pass


def test_an_answer_is_that_of_the_run(tmp_path: Path) -> None:
    answer = run_grid(STUDY, POINTS, Runner())[1]
    result = run(STUDY.build_run(POINTS[1]))
    assert answer.summary.critical_tokens == result.summary.critical_tokens
    assert answer.first_step_s == pytest.approx(result.rows[0].data_wait_s / 2)


def test_a_point_that_makes_no_sense_is_refused_before_any_is_run() -> None:
    points = build_points(policies=["odb"], ranks=[2, 4000], budgets=[2048], windows=[16], depths=[2])
    with pytest.raises(UsageError, match="4000 ranks, but only 400 samples"):
        Study(lengths=make_lengths()).check(points)


def test_the_command_writes_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    for name in ("a", "b"):
        paths = {kind: tmp_path / f"{name}.{kind}" for kind in ("json", "csv")}
        arguments = ["gsm8k", "--samples", "150", "--ranks", "2,3", "--token-budget", "1024", "--window", "16,32"]
        options = [f"--{kind}={path}" for kind, path in paths.items()]
        assert main(["sweep", *arguments, "--policy", "odb,paper", "--processes", "1", *options]) == 0
        written.append([path.read_bytes() for path in paths.values()])
    assert written[0] == written[1]
    figures = json.loads(written[0][0])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["steps"]) for row in rows] == [entry["steps"] for entry in figures]
    assert len(rows) == 8
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "values"),
    {
        "--ranks": ["two", "2,2", "2,"],
        "--window": ["0"],
        "--depth": ["0"],
        "--policy": ["mine"],
        "--processes": ["0"],
        "--executor": ["ray://", "dask://", "somewhere"],
        "--samples": ["0"],
        "--cost-model": ["none.json"],
        "--json": ["none/x.json"],
    }.items(),
)
def test_bad_input_is_one_line_and_status_2(option: str, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for value in values:
        said = refuse(capsys, ["sweep", "gsm8k", "--ranks", "2", "--token-budget", "1024", option, value])
        assert said.startswith("odb-ref sweep: ")
        assert option != "--processes" or "--processes must be at least 1, got 0" in said
