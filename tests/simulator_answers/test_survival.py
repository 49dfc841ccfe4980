"""Studies survive: a killed worker costs one try of one cell, finished work is kept, and a signal ends everything soon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from odb_sim.cli.main import main
from odb_sim.studies.cells import (
    FILE,
    Cell,
    CellAnswer,
    CellFailure,
    ClusterGone,
    Point,
    Runner,
    Store,
    WatchedExecutor,
    compute_key,
    compute_program_digest,
)
from odb_sim.studies.clusters import open_executor
from odb_sim.studies.processes import Processes, WorkerDied
from odb_sim.studies.sweep import Study, build_points, run_grid, simulate_point

from odb_ref.core.errors import UsageError
from tests.helpers.capture import capture, start
from tests.helpers.commands import get_figures
from tests.helpers.waiting import is_in_time
from tests.simulator_answers.helpers import make_lengths

POINTS = build_points(policies=["odb"], ranks=[2], budgets=[2048], windows=[8, 16, 32, 64], depths=[2])
STUDY = Study(lengths=make_lengths(), seed=1)
SWEEP = ["sweep", "gsm8k", "--samples", "200", "--ranks", "2", "--token-budget", "1024", "--window", "8,16,32"]
ENDS_S = 5.0


def die(folder: Path, times: int, point: Point) -> CellAnswer:
    """Is killed ``times`` times, then answers."""
    tries = folder / f"{point.window_samples}.tries"
    tried = tries.read_text() if tries.exists() else ""
    tries.write_text(tried + "x")
    if len(tried) < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return simulate_point(STUDY, point)


def make_cells(folder: Path, times: dict[int, int]) -> list[Cell]:
    return [
        Cell(point, f"key {point.window_samples}", partial(die, folder, times.get(point.window_samples, 0), point))
        for point in POINTS
    ]


def check_survivors(found: list[CellAnswer | CellFailure], killed: int) -> None:
    whole = run_grid(STUDY, POINTS, Runner())
    for point, answer, expected in zip(POINTS, found, whole, strict=True):
        if point.window_samples == killed:
            assert isinstance(answer, CellFailure)
            assert answer.point == point
        else:
            assert isinstance(answer, CellAnswer)
            assert isinstance(expected, CellAnswer)
            assert answer.to_json() == expected.to_json()


def test_a_killed_worker_costs_a_try_of_its_cell_and_twice_the_cell(tmp_path: Path) -> None:
    heard: list[int] = []
    with Processes(2) as executor:
        found = Runner(executor, on_done=heard.append).run(make_cells(tmp_path, {16: 1, 32: 9}))
    check_survivors(found, 32)
    assert "signal 9" in str(found[2])
    assert [len((tmp_path / f"{window}.tries").read_text()) for window in (8, 16, 32, 64)] == [1, 2, 2, 1]
    assert heard[-1] == 4


class Blaming(Executor):
    """Blames everything in progress if a worker dies, as a cluster blames all tasks of that worker."""

    def __init__(self) -> None:
        self.pending: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending.append(future)
        if fn.args[-1].window_samples == 32:
            for other in self.pending:
                if not other.done():
                    other.set_exception(WorkerDied("signal 9"))
        else:
            Timer(0.1, lambda: future.done() or future.set_result(fn())).start()
        return future


def test_a_cell_that_kills_its_workers_takes_no_other_with_it(tmp_path: Path) -> None:
    check_survivors(Runner(Blaming()).run(make_cells(tmp_path, {})), 32)


@pytest.mark.deep
def test_a_cluster_survives_likewise(address: str, tmp_path: Path) -> None:
    """A cluster itself retries a few times. In the end the cell fails and the others do not."""
    with open_executor(address, 1) as executor:
        found = Runner(executor).run(make_cells(tmp_path, {16: 1, 32: 99}))
    check_survivors(found, 32)


class Vanishing(WatchedExecutor):
    """Answers one simulation, then disappears: later futures are never done."""

    def __init__(self) -> None:
        self._futures: list[Future[CellAnswer]] = []

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._futures.append(Future())
        if len(self._futures) == 1:
            self._futures[0].set_result(fn(*args, **kwargs))
        return self._futures[-1]

    def check(self) -> None:
        raise ClusterGone("somewhere is gone")


def test_a_cluster_that_is_gone_ends_the_study_and_what_is_done_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odb_sim.studies.cells._LOOK_EVERY_S", 0.01)
    with (
        closing(Store(tmp_path)) as store,
        pytest.raises(UsageError, match="gone; 1 of 4 simulations are kept, and the same"),
    ):
        run_grid(STUDY, POINTS, Runner(Vanishing(), store))
    assert len((tmp_path / FILE).read_text().splitlines()) == 1
    with pytest.raises(UsageError, match="1 of 4 simulations are lost"):
        run_grid(STUDY, POINTS, Runner(Vanishing()))


@pytest.mark.deep
@pytest.mark.parametrize("is_killed", [True, False], ids=["scheduler killed", "no worker"])
def test_a_dask_cluster_without_anybody_is_said(is_killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr("odb_sim.studies.cells._LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("odb_sim.studies.clusters._WORKERLESS_S", 1.0)
    monkeypatch.setattr("odb_sim.studies.clusters._CONNECT_S", 4)  # how long a client looks for a missing cluster
    with distributed.LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        with pytest.raises(UsageError, match="is gone" if is_killed else "has had no worker for 1 s"):  # noqa: SIM117
            with open_executor(address, 1) as executor:
                if is_killed:
                    monkeypatch.setattr("odb_sim.studies.clusters._WORKERLESS_S", 99.0)
                    Timer(0.5, cluster.close).start()
                run_grid(STUDY, POINTS, Runner(executor))


@pytest.mark.deep
def test_sigterm_ends_a_study_on_ray_with_its_own_status() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    arguments = [*SWEEP[:2], "--samples", "3000000", "--ranks", "64,65", *SWEEP[6:8], "--executor", "ray://local"]
    program = f"import sys; from odb_sim.cli.main import main; sys.exit(main({arguments!r}))"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    is_in_time(lambda: list_running("ray::_call") or process.poll() is not None, 60)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")


def list_running(name: str) -> list[str]:
    shown = capture(["ps", "-eo", "args"], check=True).stdout
    return [line for line in shown.splitlines() if line.startswith(name)]


def test_a_worker_that_is_killed_between_tasks_is_replaced() -> None:
    with Processes(1) as executor:
        first = executor.submit(os.getpid).result()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="signal 9"):
            executor.submit(os.getpid).result()
        assert executor.submit(os.getpid).result() != first
        assert executor.submit(partial(int, "x")).exception() is not None


def test_what_is_done_is_kept_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, whole, again = tmp_path / "kept", tmp_path / "whole.json", tmp_path / "again.json"
    assert main([*SWEEP, "--processes", "1", "--json", str(whole)]) == 0
    asked: list[Point] = []
    own = simulate_point

    def simulate(study: Study, point: Point) -> CellAnswer:
        asked.append(point)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return own(study, point)

    monkeypatch.setattr("odb_sim.studies.sweep.simulate_point", simulate)
    command = [*SWEEP, "--processes", "1", "--out", str(out), "--json", str(again)]
    assert main(command) == 130
    assert len((out / FILE).read_text().splitlines()) == 2
    with (out / FILE).open("a") as file:
        file.write('{"key": "cut o')
    assert main(command) == 0
    assert [point.window_samples for point in asked] == [8, 16, 32, 32]
    assert again.read_bytes() == whole.read_bytes()
    assert main(command) == 0
    assert main([*command[:-4], "--out", str(out), "--seed", "1"]) == 0, "other settings are other cells"
    assert len(asked) == 7


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "tune"])
def test_the_other_studies_keep_theirs(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {
        "compare": ["gsm8k", "--samples", "200", "--ranks", "2", "--policy", "odb,standard"],
        "tune": ["gsm8k", "--samples", "80", "--ranks", "2", "--memory-tokens", "1024", "--layout", "packed"],
    }[command]
    said = []
    for _ in range(2):
        assert main([command, *arguments, "--processes", "1", "--out", str(tmp_path)]) == 0
        said.append(capsys.readouterr().out)
        kept = len((tmp_path / FILE).read_text().splitlines())
    assert said[0] == said[1]
    assert len({json.loads(line)["key"] for line in (tmp_path / FILE).read_text().splitlines()}) == kept


RULE = """
from odb_ref.core.batching.rules import {0}
class Own:
    name = "own"
    def compute_target(self, agreement):
        return {0}().compute_target(agreement)
"""


@pytest.mark.deep
def test_an_own_rule_that_has_changed_is_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, kept = tmp_path / "own_rule.py", tmp_path / "kept"
    command = [*SWEEP, "--processes", "1", "--policy", f"{rule}:Own", "--out", str(kept)]
    steps = []
    for shipped in ("OdbRule", "PaperRule", "PaperRule", "OdbRule"):
        rule.write_text(RULE.format(shipped))
        steps.append([entry["steps"] for entry in get_figures(command)])
    assert steps[0] == steps[3] != steps[1] == steps[2]
    assert len((kept / FILE).read_text().splitlines()) == 2 * len(steps[0]), "each is kept under its own key"


def test_what_an_own_rule_imports_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rule, helper = tmp_path / "own_rule.py", tmp_path / "a_helper_of_a_rule.py"
    rule.write_text("from a_helper_of_a_rule import SHARE\n" + RULE.format("OdbRule"))
    helper.write_text("SHARE = 2\n")
    arrays, name = [STUDY.lengths.tokens], f"{rule}:Own"
    key = compute_key(arrays, [name], POINTS[0])
    assert key == compute_key(arrays, [name], POINTS[0])
    helper.write_text("SHARE = 3\n")
    assert compute_key(arrays, [name], POINTS[0]) != key


def test_another_program_of_the_same_version_answers_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [STUDY.lengths.tokens]
    key = compute_key(arrays, ["odb"], POINTS[0])
    assert key == compute_key(arrays, ["odb"], POINTS[0]) != compute_key(arrays, ["odb"], POINTS[1])
    monkeypatch.setattr("odb_sim.studies.cells.compute_program_digest", lambda: "another checkout")
    assert compute_key(arrays, ["odb"], POINTS[0]) != key


def test_the_digest_of_the_program_moves_with_any_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    own, read = compute_program_digest(), Path.read_bytes
    compute_program_digest.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == "grouping.py" else b""))
    try:
        assert compute_program_digest() != own
    finally:
        compute_program_digest.cache_clear()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    for text in (b"a\nb\n", b"\xff\n\xff\n"):
        (tmp_path / FILE).write_bytes(text)
        with pytest.raises(UsageError, match="no answers"):
            Store(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        Store(tmp_path / "file")


def list_group(group: int) -> list[str]:
    shown = capture(["ps", "-eo", "pgid,args"], check=True).stdout
    living = [line for line in shown.splitlines() if "<defunct>" not in line]
    return [line for line in living if re.match(rf"\s*{group}\s", line)]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
@pytest.mark.parametrize(
    "command",
    ["sweep --ranks 64,65,66 --token-budget 8192", "tune --ranks 64 --memory-tokens 8192", "compare --ranks 64"],
    ids=lambda text: text.split()[0],
)
def test_a_signal_ends_a_study_and_its_workers_soon(sent: signal.Signals, command: str) -> None:
    name, *options = command.split()
    arguments = [name, "sgd_dialogues", "--samples", "3000000", *options, "--processes", "2"]
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from odb_sim.cli.main import main; sys.exit(main({arguments!r}))"
    )
    with start([sys.executable, "-c", program]) as process:
        is_in_time(lambda: len(list_group(process.pid)) >= 3 or process.poll() is not None, 60)
        time.sleep(1.0)  # well into the simulations
        assert process.poll() is None
        begin_s = time.monotonic()
        os.killpg(process.pid, sent) if sent is signal.SIGINT else process.send_signal(sent)
        out, err = process.communicate(timeout=30)
        took_s = time.monotonic() - begin_s
        assert (process.returncode, out, err) == (128 + sent, "", "")
        assert took_s < ENDS_S
        # A process that is ending is still listed for a moment.
        assert is_in_time(lambda: not list_group(process.pid), 5.0), list_group(process.pid)
