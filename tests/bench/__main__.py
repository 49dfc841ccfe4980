"""Benchmarks beside the released peer and a plain DataLoader.

    python -m tests.bench                 # about three minutes on an idle machine of two cores
    python -m tests.bench --peer-cases    # what a training job may meet, ours and the peer's answer, tried now
    python -m tests.bench --only process  # what the loader costs the process that trains: the lock, waiting, the first step
    python -m tests.bench --only edges    # samples that are tiny, large, slow or many, beside a plain DataLoader
    python -m tests.bench --only model    # the simulator's model of a loader beside real loaders, 1 to 4 workers
    python -m tests.bench --only quality  # how full the batches are, beside the peer, fixed batches and oracles
    python -m tests.bench --only core     # grouping, alignment and state machine of one rank, checks on
    python -m tests.bench --only training # packed rows beside padded and fixed batches and the peer, two ranks, real text
    python -m tests.bench --only plan     # known lengths: steps, waiting, speed; beside verl and TRL where they are
    python -m tests.bench --only gpu      # a plan beside the training that it plans, on one GPU
    python -m tests.bench --only updates  # how evenly updates are dealt, and what they cost beside the free mode
    python -m tests.bench --full          # more repetitions, and window 1,024
    python -m tests.bench.scale           # the simulator's time and memory by ranks

The loaders run in turn, each in its own processes, and ratios compare runs that followed one another. Absolute figures hold
only for this machine at its present load. The peer is the PyPI package online-dynamic-batching. Without it (the extra ``bench``
installs it) its columns are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from odb_sim.inputs.lengths import list_bundled_names

from tests.bench import cases, core, edges, gpu, model, plan, process, quality, speed, training, updates

PARTS = ("loader", "core", "edges", "process", "gpu", "model", "plan", "quality", "training", "updates")


def main() -> int:
    """Returns 0 if all of our runs were right."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="more repetitions, a second window")
    parser.add_argument("--repetitions", type=int, help="of each loader (3; with --full 5)")
    parser.add_argument("--trace", choices=list_bundled_names(), default=speed.TRACE, help="with loader (%(default)s)")
    parser.add_argument(
        "--samples", type=int, default=speed.SAMPLES_PER_RANK, help="of each rank with loader (%(default)s)"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="(repeatable)",
    )
    parser.add_argument("--peer-cases", action="store_true", help="the table of cases instead of benchmarks")
    names = [case.name for case in cases.CASES]
    parser.add_argument("--case", action="append", choices=names, help="with --peer-cases: only this one (repeatable)")
    parser.add_argument(
        "--edge", action="append", choices=list(edges.EDGES), help="with --only edges: only this line (repeatable)"
    )
    parser.add_argument(
        "--rule",
        default=quality.RULE,
        help="with --only quality: another target rule, as --policy has it (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    if options.repetitions is not None and options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {options.repetitions}")
    if options.samples < 1000:
        parser.error(f"--samples must be at least 1,000, for several windows, got {options.samples}")
    machine = describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if not cases.has_peer():
        print("the peer is not installed (pip install online-dynamic-batching==0.1.2): ours alone")
    began = time.monotonic()
    if options.peer_cases:
        figures, status = run_cases(options.case)
    else:
        figures, status = run_benchmarks(options)
    print(f"\n{time.monotonic() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n")
    return status


def describe_machine() -> dict[str, Any]:
    """Returns a description of the machine that the figures come from."""
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }


def run_benchmarks(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns all figures, and 1 if one of our runs failed."""
    parts, is_full = options.only or ["loader"], options.full
    repetitions = options.repetitions or (5 if is_full else 3)
    samples, trace = options.samples, options.trace
    figures: dict[str, Any] = {}
    kinds = speed.list_kinds()
    dynamic = [kind for kind in kinds if kind != "plain"]
    found: list[speed.Runs] = []
    if "loader" in parts:
        for ranks in (1, 2):
            runs = speed.measure(ranks, kinds, repetitions, samples, speed.WINDOW_SAMPLES, trace)
            found += runs.values()
            speed.say("")
            speed.print_speed(runs, samples, trace)
        optimum = speed.compute_optimum(2, samples, trace)
        speed.print_quality(runs, optimum, speed.WINDOW_SAMPLES, trace)
        if is_full:
            wide = speed.measure(2, dynamic, 1, samples, 1024, trace)
            found += wide.values()
            speed.print_quality(wide, optimum, 1024, trace)
    if "core" in parts:
        figures["core"] = core.measure_core(repetitions, speed.say)
        speed.say("")
        core.print_core(figures["core"])
    status = 0
    if "process" in parts:
        figures["process"] = process.measure_process((256, 1024, 8192), speed.say)
        speed.say("")
        status |= process.print_process(figures["process"])
    if "edges" in parts:
        found_edges = edges.measure_edges(options.edge or list(edges.EDGES), options.repetitions, speed.say)
        memories = {} if options.edge else edges.measure_memory(speed.say)
        speed.say("")
        figures["edges"] = found_edges | {"memory": memories}
        status |= edges.print_edges(found_edges, memories)
    if "gpu" in parts:
        figures["gpu"] = gpu.measure_gpu(repetitions, speed.say)
        speed.say("")
        status |= int(not gpu.print_gpu(figures["gpu"]))
    if "model" in parts:
        compared = model.compare_with_model(model.list_cases(), repetitions, speed.say)
        speed.say("")
        model.print_findings(compared)
        figures["model"] = model.encode(compared)
        status |= int(any(finding.verdict == "WRONG" for finding in compared))
    if "plan" in parts:
        figures["plan"] = plan.measure_plans(speed.say)
        speed.say("")
        status |= int(not plan.print_plans(figures["plan"]))
    if "quality" in parts:
        measured_quality = quality.measure_quality(speed.say, is_full=is_full, rule=options.rule)
        speed.say("")
        figures["quality"] = quality.encode(measured_quality)
        status |= int(not quality.print_quality(measured_quality, rule=options.rule))
    if "training" in parts:
        trained = training.measure_training(repetitions, speed.say)
        speed.say("")
        figures["training"] = {kind: asdict(item) for kind, item in trained.items()}
        status |= int(not training.print_training(trained))
    if "updates" in parts:
        measured_updates = updates.measure_updates(repetitions, speed.say)
        speed.say("")
        figures["updates"] = updates.encode(measured_updates)
        status |= int(not updates.print_updates(measured_updates))
    figures["loaders"] = [asdict(runs) for runs in found]
    return figures, status | int(any(runs.troubles for runs in found if runs.kind == "ours"))


def run_cases(names: list[str] | None) -> tuple[dict[str, Any], int]:
    """Returns the outcome of every case, and 1 if ours was wrong in one."""
    kinds = ["ours", "peer"] if cases.has_peer() else ["ours"]
    figures: dict[str, Any] = {}
    chosen = [cases.get_case(name) for name in names] if names else cases.CASES
    for case in chosen:
        print(f"\n{case.title}  [{case.name}]", flush=True)
        for kind in kinds:
            speed.say(f"{case.name}, {kind}")
            outcome = case.run(kind)
            speed.say("")
            print(f"  {kind}: {'right' if outcome.is_right else 'WRONG'}: {outcome.text}", flush=True)
            figures.setdefault(case.name, {})[kind] = asdict(outcome)
    wrong = [name for name, found in figures.items() if not found["ours"]["is_right"]]
    beaten = sum(1 for found in figures.values() if "peer" in found and not found["peer"]["is_right"])
    print(f"\nours right in {len(figures) - len(wrong)} of {len(figures)} cases", end="")
    print(f", the peer in {len(figures) - beaten}" if "peer" in kinds else "")
    return {"cases": figures}, int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
