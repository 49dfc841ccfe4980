"""How the command ends when it is interrupted or the machine is too small: quickly, and with at most one line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from odb_sim.cli import demo
from odb_sim.cli.main import main

from odb_ref.core.errors import UsageError
from tests.helpers.capture import capture, start
from tests.helpers.waiting import is_in_time

RUN = ["simulate", "gsm8k", "--ranks", "2", "--samples", "20", "--token-budget", "2048"]


@pytest.mark.parametrize(("error", "status", "lines"), [(KeyboardInterrupt, 130, 0), (MemoryError, 2, 1)])
def test_an_interrupted_run_says_no_more_than_it_must(
    error: type[BaseException],
    status: int,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("odb_sim.cli.simulate.run", fail)
    assert main(RUN) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == lines


INTERRUPTED_START = """
import multiprocessing, os, time
from multiprocessing.popen_spawn_posix import Popen
launch = Popen._launch
def launch_and_interrupt(self, process):
    others = multiprocessing.active_children()
    launch(self, process)
    for pid in [other.pid for other in others] + [os.getpid()] * bool(others):
        os.kill(pid, signal.SIGINT)  # the one that starts has not heard of it
    time.sleep(bool(others))  # for the death of the others to be noticed
Popen._launch = launch_and_interrupt
"""


def test_ctrl_c_ends_a_sweep_and_its_workers_without_a_word_while_a_worker_starts(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = (
        "import signal, sys, pathlib, odb_sim.studies.sweep as sweep; from odb_sim.cli.main import main; own = sweep.run_grid\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without\n"
        f"{INTERRUPTED_START}\n"
        "def tell(study, points, runner):\n"
        "    runner.executor.submit(sum, [1]).result()\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    return own(study, points, runner)\n"
        "if __name__ == '__main__':\n"
        "    import odb_sim.cli.sweep as command; command.run_grid = tell; sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = "sweep sgd_dialogues --samples 2000000 --ranks 64,65 --token-budget 8192 --processes 2"
    with start([sys.executable, str(tmp_path / "program.py"), *command.split()]) as process:
        is_in_time(lambda: started.exists() or process.poll() is not None, 60)
        out, err = process.communicate(timeout=30)  # less than the simulations take
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_sweep_that_is_ended(sent: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import time; from odb_sim.studies.processes import make_executor\n"
        "if __name__ == '__main__':\n"
        "    with make_executor(2) as executor:\n"
        "        executor.submit(time.sleep, 0.1)\n"
        "        print(executor.submit(sum, [1]).result(), flush=True)\n"
        "        executor.submit(time.sleep, 600).result()\n"
    )
    (tmp_path / "program.py").write_text(program)
    with start([sys.executable, str(tmp_path / "program.py")]) as process:
        process.stdout.readline()
        process.send_signal(sent)
        process.communicate(timeout=30)  # ends when its output is closed


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_output_is_no_violation(closed: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = shlex.join([sys.executable, "-m", "odb_sim.cli.main", *RUN, "--json", str(figures)])
    done = capture(["sh", "-c", f"{command} {closed}>&-"])
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(figures.read_text())["outcome"] == "complete"


SLEEPY = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_a_broken_off_demo_has_started_ends_with_it(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    """The program starts another and ends it when asked to, as torchrun does with the ranks."""
    starter = (
        "import os, signal, subprocess, sys, pathlib\n"
        f"one = subprocess.Popen([sys.executable, '-c', {SLEEPY!r}])\n"
        "def end(*_): os.kill(one.pid, signal.SIGKILL); os.waitpid(one.pid, 0); os._exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(tmp_path / 'started')!r}).write_text(str(one.pid))\n"
        "one.wait()\n"
    )
    program = (
        "import signal, sys; from odb_sim.cli import demo; from odb_sim.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without\n"
        f"demo.run_command = lambda options: demo.run_whole([sys.executable, '-c', {starter!r}], 600)[0]\n"
        "sys.exit(main(['demo']))\n"
    )
    started = tmp_path / "started"
    with start([sys.executable, "-c", program]) as process:
        is_in_time(lambda: (started.exists() and started.read_text()) or process.poll() is not None, 60)
        process.send_signal(sent)
        assert process.wait(timeout=30) == status
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)


def test_a_demo_that_takes_too_long_says_so() -> None:
    with pytest.raises(UsageError, match=r"took more than 0\.5 s, and was stopped"):
        demo.run_whole([sys.executable, "-c", SLEEPY], 0.5)


def test_a_name_that_cannot_be_printed_is_escaped(tmp_path: Path) -> None:
    lengths = tmp_path / "l\u00e4nge.csv"
    lengths.write_text("total_tokens\n" + "5\n" * 40)
    command = [sys.executable, "-m", "odb_sim.cli.main", "simulate", str(lengths), *RUN[2:4], "--token-budget", "50"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = capture(command, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("odb on l\\xe4nge, 2 ranks")


def test_a_name_that_is_not_utf_8_is_escaped_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(lengths := "l\udcff.csv").write_text("total_tokens\n" + "5\n" * 40)
    command = ["compare", lengths, *RUN[2:4], "--policy", "odb,standard", "--html", "page", "--csv", "table"]
    assert main(command) == 0
    assert all("l\\udcff" in Path(name).read_text(encoding="utf-8") for name in ("page", "table"))
