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
import os
import platform
import sys
import time

import torch
from odb_sim.inputs.lengths import list_bundled_names

from tests.bench import cases, core, edges, gpu, model, plan, process, quality, speed, training, updates
from tests.bench.report import say

PARTS = {
    "loader": speed, "core": core, "process": process, "edges": edges, "gpu": gpu, "model": model, "plan": plan,
    "quality": quality, "training": training, "updates": updates,
}  # fmt: skip


def main() -> int:
    """Returns 0 if all of our runs were right."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="more repetitions, a second window")
    parser.add_argument("--repetitions", type=int, help="of each loader (3; with --full 5)")
    parser.add_argument("--trace", choices=list_bundled_names(), default=speed.TRACE, help="with loader (%(default)s)")
    parser.add_argument(
        "--samples", type=int, default=speed.SAMPLES_PER_RANK, help="of each rank with loader (%(default)s)"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="one part (repeatable; default: loader)")
    parser.add_argument("--peer-cases", action="store_true", help="the table of cases instead of benchmarks")
    names = [case.name for case in cases.CASES]
    parser.add_argument("--case", action="append", choices=names, help="with --peer-cases: only this one (repeatable)")
    parser.add_argument(
        "--edge", action="append", choices=list(edges.EDGES), help="with --only edges: only this line (repeatable)"
    )
    options = parser.parse_args()
    if options.repetitions is not None and options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {options.repetitions}")
    if options.samples < 1000:
        parser.error(f"--samples must be at least 1,000, for several windows, got {options.samples}")
    options.times = options.repetitions or (5 if options.full else 3)
    load, versions = round(os.getloadavg()[0], 1), f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"cores {os.cpu_count()}, load {load}, {versions}")
    if not cases.has_peer():
        print("the peer is not installed (pip install online-dynamic-batching==0.1.2): ours alone")
    began = time.monotonic()
    if options.peer_cases:
        is_right = run_cases(options.case or names)
    else:
        is_right = all([module.run(options) for part, module in PARTS.items() if part in (options.only or ["loader"])])
    print(f"\n{time.monotonic() - began:.0f} s")
    return int(not is_right)


def run_cases(names: list[str]) -> bool:
    """Prints the outcome of every case. Returns True if ours was right in all."""
    right = {kind: 0 for kind in (["ours", "peer"] if cases.has_peer() else ["ours"])}
    for case in map(cases.get_case, names):
        print(f"\n{case.title}  [{case.name}]", flush=True)
        for kind in right:
            say(f"{case.name}, {kind}")
            outcome = case.run(kind)
            say("")
            print(f"  {kind}: {'right' if outcome.is_right else 'WRONG'}: {outcome.text}", flush=True)
            right[kind] += outcome.is_right
    beside = f", the peer in {right['peer']}" if "peer" in right else ""
    print(f"\nours right in {right['ours']} of {len(names)} cases{beside}")
    return right["ours"] == len(names)


if __name__ == "__main__":
    sys.exit(main())
