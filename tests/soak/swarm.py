"""A swarm of long random runs. The seed of each run decides its faults and settings.

``python -m tests.soak.swarm --seed S --runs N`` runs the seeds S to S + N - 1 and prints what each expanded to. Three kinds:

simulator  the simulator with thousands of rounds, faults, jitter and slow ranks; its trace is checked and replayed
memory     machines in memory under a random schedule, with faults; their trace is checked and replayed
model      machines in memory against the extracted Coq model, event by event (left out if that is not built)

Exit status: 0 if every run is right, 1 if one is not; its line says what is wrong, and its seed runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from odb_sim.inputs.conditions import Conditions, parse_factor, parse_fault
from odb_sim.inputs.lengths import Lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run, run

from odb_ref.core.types import Mode
from odb_ref.trace.check import check_traces
from odb_ref.trace.writing import TraceWriter
from tests.helpers.world import Fault, make_configs, run_by_arrival
from tests.proofs.conftest import PROOFS, ask_model
from tests.proofs.worlds import find_difference, make_long_world

Draw = random.Random


class Failure(Exception):
    """A run is wrong."""


def _check(path: Path) -> str:
    """Returns how the run of a trace ended.

    Raises: Failure when a property does not hold.
    """
    verdict = check_traces([path], is_replayed=True)
    if not verdict.is_ok:
        raise Failure("; ".join(map(str, verdict.violations[:3])))
    (job,) = verdict.jobs
    return f"{job.outcome} in round {job.rounds}, {job.steps} steps"


def _draw_quota(draw: Draw, mode: Mode, samples: int) -> int | None:
    return draw.randint(1, samples) if mode is Mode.QUOTA and draw.random() < 0.7 else None


def _draw_faults(draw: Draw, ranks: int, kinds: Sequence[str], share: float) -> list[str]:
    """Returns some kinds of faults. An only rank is not killed: no other would report it, so its trace would violate FREE."""
    return [kind for kind in kinds if draw.random() < share and (kind != "kill" or ranks > 1)]


def simulate(draw: Draw, folder: Path) -> tuple[str, Callable[[], str]]:
    ranks = draw.choice((1, 2, 3, 4, 8, 20))
    window = draw.choice((1, 2, 4, 16, 64))
    samples = min(24_000, ranks * window * draw.choice((20, 200, 2_000)))
    longest = draw.choice((20, 4_096, 100_000))
    budget = max(1, int(longest * draw.choice((0.3, 1, 4))))
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    tokens = np.array([draw.randint(1, longest) for _ in range(2_000)], dtype=np.int64)
    faults = [
        f"{kind}:{draw.randrange(ranks)}:{draw.randrange(samples) if kind == 'read' else draw.randrange(1, 1_000)}"
        for kind in _draw_faults(draw, ranks, ("read", "collate", "stop", "kill"), 0.12)
    ]
    slow = [f"{draw.randrange(ranks)}:{draw.choice((2, 10))}" for _ in range(draw.choice((0, 0, 1)))]
    what = Run(
        workload=build_workload(
            Lengths("soak", tokens, tokens // 2),
            ranks=ranks,
            sharding=draw.choice(list(Sharding)),
            samples=samples,
            seed=draw.getrandbits(32),
        ),
        policy=draw.choice(("odb", "odb", "paper")),
        budget_tokens=budget,
        window_samples=window,
        depth_steps=draw.choice((1, 2, 8)),
        mode=mode,
        quota_samples=_draw_quota(draw, mode, samples),
        max_age_rounds=draw.choice((1, 2, 4, 30)),
        ramp_rounds=draw.choice((0, 0, 3)),
        seed=draw.getrandbits(32),
        conditions=Conditions(
            jitter=draw.choice((0.0, 0.3, 1.5)),
            slow_ranks=tuple(map(parse_factor, slow)),
            faults=tuple(map(parse_fault, faults)),
        ),
    )
    text = (
        f"simulator: {ranks} ranks, {samples} samples of up to {longest}, budget {budget}, window {window}, depth "
        f"{what.depth_steps}, {mode} {what.quota_samples or ''}, {what.policy}, age {what.max_age_rounds}, ramp "
        f"{what.ramp_rounds}, jitter {what.conditions.jitter}, slow {slow}, faults {faults}"
    )

    def go() -> str:
        path = folder / "simulator.ndjson"
        with TraceWriter(path, what.build_config(), driver="soak") as writer:
            run(what, observer=writer.record)
        return _check(path)

    return text, go


def run_in_memory(draw: Draw, folder: Path) -> tuple[str, Callable[[], str]]:
    ranks = draw.choice((1, 2, 3, 5, 18))
    size = draw.choice((30, 300, 1_500)) if ranks < 18 else 40
    longest = draw.choice((5, 60, 90_000))
    shards = [[draw.randint(1, longest) for _ in range(draw.choice((size, size // 2, 0)))] for _ in range(ranks)]
    total = sum(map(len, shards))
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    settings: dict[str, object] = {
        "budget_tokens": max(1, int(longest * draw.choice((0.3, 1, 4)))),
        "window_samples": draw.choice((1, 2, 6, 30)),
        "depth_steps": draw.choice((1, 2, 5)),
        "ramp_rounds": draw.choice((0, 2)),
        "max_age_rounds": draw.choice((1, 2, 4)),
        "limits": draw.choice(((), (), (5,), (9, 3))),
        "mode": mode,
        "quota_samples": _draw_quota(draw, mode, max(1, total)),
    }
    rule = draw.choice(("odb", "odb", "paper"))
    faults = [
        Fault(kind, draw.randrange(ranks), draw.randrange(20 * max(1, total)))
        for kind in _draw_faults(draw, ranks, ("fail", "stop", "kill", "urge", "urge"), 0.15)
    ]
    seed = draw.getrandbits(32)
    shown = ", ".join(f"{key} {value}" for key, value in settings.items())
    text = f"memory: shards {[len(shard) for shard in shards]}, samples of up to {longest}, {rule}, {shown}, faults {faults}"

    def go() -> str:
        path = folder / "memory.ndjson"
        run_by_arrival(shards, make_configs(ranks, rule, **settings), seed=seed, faults=faults, trace=path)
        return _check(path)

    return text, go


def compare(draw: Draw, folder: Path) -> tuple[str, Callable[[], str]]:
    """Prepares a comparison of a world with the model."""
    seed, samples = draw.getrandbits(32), draw.choice((200, 600, 1_500))

    def go() -> str:
        world = make_long_world(seed, samples)
        while not world.is_over() and sum(len(rank.events) for rank in world.ranks) < 40 * samples:
            world.one_event()
        difference = find_difference(ask_model, [world])
        if difference is not None:
            raise Failure(difference)
        return f"equal to round {max(rank.state.round for rank in world.ranks)}; reached {', '.join(sorted(world.reached))}"

    return f"model: up to {samples} samples on each of 1 to 3 ranks, seed {seed}", go


def swarm(seed: int) -> bool:
    """Runs one seed and prints it. Returns False if something is wrong."""
    draw = random.Random(seed)
    kinds = [simulate, simulate, run_in_memory, run_in_memory]
    kinds += [compare] if (PROOFS / "extracted" / "model").exists() else [run_in_memory]
    with tempfile.TemporaryDirectory() as folder:
        text, go = draw.choice(kinds)(draw, Path(folder))
        print(f"seed {seed}: {text}", flush=True)
        began = time.perf_counter()
        try:
            said, is_right = go(), True
        except Exception as error:
            said, is_right = f"FAILED: {type(error).__name__}: {error}", False
    print(f"seed {seed}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every run is right, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first (0)")
    parser.add_argument("--runs", type=int, default=100, help="how many (100)")
    options = parser.parse_args(arguments)
    failed = [seed for seed in range(options.seed, options.seed + options.runs) if not swarm(seed)]
    print(f"{options.runs} runs, {len(failed)} failed{': seeds ' + ', '.join(map(str, failed)) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
