"""``odb-ref demo``: the main job on real input, from simulation through training to the checker, in one report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import odb_sim
from odb_ref.core.errors import UsageError
from odb_ref.trace.check import Property, Status, Verdict, check_traces
from odb_ref.trace.format import Json
from odb_sim.cli.options import build_source
from odb_sim.engine.fill import Fill, FillMap
from odb_sim.engine.metrics import Summary
from odb_sim.inputs.files import write_json
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import build_workload
from odb_sim.reports.recorded_report import (
    SIMULATED,
    TRAINED,
    Curves,
    list_simulated_rows,
    list_training_rows,
    write_demo_report,
)
from odb_sim.reports.terminal import print_table, show_progress
from odb_sim.studies.runs import Run, run

LENGTHS: Final = "azure_llm_2023_conv"
BUDGET_TOKENS: Final = 16_384
WINDOW_SAMPLES: Final = 512
SAMPLES_PER_RANK: Final = 1_500
RANKS: Final = (8, 64)
POLICIES: Final = ("standard", "paper", "odb")
TRAINING_RANKS: Final = 2
TRAINING_S: Final = 600
_GRACE_S: Final = 35
"""torchrun waits 30 s for its ranks to end."""
SCRIPT: Final = "demo_train.py"
HELP: Final = "simulate a real trace, train on real text, check both, write a report"
DESCRIPTION: Final = (
    "Simulates a real length trace at 8 and 64 ranks against fixed batches, trains two ranks on real "
    "text with the same optimizer updates both ways, checks every trace, and writes a page."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--out", default="demo-out", metavar="DIR", help="folder of the report (demo-out)")
    parser.add_argument("--text", metavar="PATH", help="train on these JSON lines, instead of Python's own docstrings")


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0 when every property holds on every trace, else 1."""
    if find_spec("torch") is None:
        raise UsageError("needs torch: pip install 'odb-ref[torch]'")
    if options.text is not None and not Path(options.text).exists():
        raise UsageError(f"--text {options.text}: no such file or directory")
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror}") from error
    begin_s = time.perf_counter()
    summaries, drawn, traces = _simulate(out)
    title = f"{LENGTHS}, {SAMPLES_PER_RANK} samples a rank, budget {BUDGET_TOKENS}"
    print_table(title, SIMULATED, list_simulated_rows(summaries))
    train = _train(out, options.text)
    curves: Curves = json.loads((out / "train.json").read_text(encoding="utf-8"))["curves"]
    print_table("trained", ["", *TRAINED], list_training_rows(train))
    train_traces = [out / f"train-rank{rank}.ndjson" for rank in range(TRAINING_RANKS)]
    verdict = check_traces([*traces, *train_traces])
    _print_verdict(verdict)
    figures: dict[str, Json] = {
        "simulation": [summary.to_json() for summary in summaries],
        "training": train,
        "check": {"is_ok": verdict.is_ok, "violations": [str(item) for item in verdict.violations]},
        "wall_time_s": round(time.perf_counter() - begin_s, 1),
    }
    write_json(out / "summary.json", figures)
    source = build_source(options, [LENGTHS])
    write_demo_report(
        out / "report.html",
        drawn=drawn,
        summaries=summaries,
        train=train,
        curves=curves,
        train_traces=train_traces,
        verdict=verdict,
        source=source,
    )
    print(f"\n{out / 'report.html'} is the page, {out / 'summary.json'} holds all figures.")
    return 0 if verdict.is_ok else 1


def _simulate(out: Path) -> tuple[list[Summary], dict[str, list[FillMap]], list[Path]]:
    summaries: list[Summary] = []
    drawn: dict[str, list[FillMap]] = {}
    traces: list[Path] = []
    lengths = load_lengths(LENGTHS)
    for ranks in RANKS:
        workload = build_workload(lengths, ranks=ranks, samples=ranks * SAMPLES_PER_RANK)
        for policy in POLICIES:
            what = Run(workload=workload, policy=policy, budget_tokens=BUDGET_TOKENS, window_samples=WINDOW_SAMPLES)
            with show_progress(f"{policy}, {ranks} ranks", workload.samples_total) as on_progress:
                fill = Fill(ranks)
                if what.is_protocol:
                    traces.append(out / f"simulated-{policy}-{ranks}.ndjson.gz")
                    with what.open_trace(traces[-1]) as writer:
                        result = run(what, observer=writer.record, fill=fill, on_progress=on_progress)
                else:
                    result = run(what, fill=fill, on_progress=on_progress)
                summaries.append(result.summary)
                label = {"standard": "fixed batches"}.get(policy, policy)
                drawn.setdefault(f"simulated, {ranks} ranks", []).append(fill.build(label, BUDGET_TOKENS))
    return summaries, drawn, traces


def find_script() -> Path:
    """Returns the training script, from the examples of a checkout or the copy in a wheel.

    Raises: UsageError when there is neither.
    """
    package = Path(odb_sim.__file__).parent
    for folder in (package.parents[1] / "examples" / "demo", package / "demo"):
        if (folder / SCRIPT).is_file():
            return folder / SCRIPT
    raise UsageError(f"{SCRIPT} is missing: neither in a checkout's examples/demo nor in {package / 'demo'}")


def _train(out: Path, text: str | None) -> dict[str, Json]:
    """Returns the figures of the training run, from ``train.json``.

    Raises: UsageError with the end of its output when the run fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TRAINING_RANKS)]
    command += [str(find_script()), "--out", str(out), *([] if text is None else ["--text", text])]
    with show_progress("training two ranks", 0):
        status, printed, complained = run_whole(command, TRAINING_S)
    (out / "train.log").write_text(printed + complained, encoding="utf-8")
    if status:
        cause = next((line for line in reversed(complained.splitlines()) if "Error:" in line), "no error line")
        raise UsageError(f"the training run failed ({cause.strip()}); its output is in {out / 'train.log'}")
    figures: dict[str, Json] = json.loads((out / "train.json").read_text(encoding="utf-8"))
    return figures


def run_whole(command: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Runs a program that starts others, and returns its exit status, output and errors. An interruption ends all of them.

    Raises: UsageError when it takes longer than ``limit_s``.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, complained = process.communicate(timeout=limit_s)
        except BaseException as error:
            process.terminate()  # torchrun passes the signal to the ranks; killing it would leave them running
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise UsageError(f"the training run took more than {limit_s:g} s, and was stopped") from None
            raise
        return process.returncode, printed, complained


def _print_verdict(verdict: Verdict) -> None:
    rows = []
    for job in verdict.jobs:
        held = sum(item.status is Status.HOLDS for item in job.properties)
        absent = sum(item.status is Status.NOT_APPLICABLE for item in job.properties)
        name = (
            Path(job.paths[0]).name
            if len(job.paths) == 1
            else f"{Path(job.paths[0]).name} and {len(job.paths) - 1} more"
        )
        rows.append([name, f"{job.steps:,}", str(held), str(absent), str(len(job.violations))])
    print_table(f"checked against {len(Property)} properties", ["trace", "steps", "hold", "n/a", "violated"], rows)
    for violation in verdict.violations:
        print(violation)
