"""One stage of worlds with the core that this process imports: ``python -m odb_sim.verify.core_worlds NAME SEED LIMIT_S FILE``.

A stage is every interleaving of small worlds, random schedules of larger ones, or simulated runs of real traces. `core_copy`
starts it in a copy of the repository with a changed core.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref.core.batching.cost import TOKENS, get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.errors import OdbError
from odb_ref.core.types import Mode
from odb_ref.trace.check import Status, check_traces
from odb_sim.explore.sampling import ALL_RULES, SHRINK_S, Sampled, make_random_bounds, run_random_schedule, shrink
from odb_sim.explore.scenario import Scenario, compute_scenario
from odb_sim.explore.search import explore
from odb_sim.explore.suites import SMALL
from odb_sim.explore.violation import name_property
from odb_sim.explore.weights import WeightJudge
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.runs import Driver, Run, run
from odb_sim.verify.verdict import BOUNDS, OF_THE_WORLD, Finding, Stage, encode_stage

WORLDS: Final = 150
LARGE_WORLDS: Final = 40
LARGE_RANKS: Final = 48
TRACES: Final = ("azure_llm_2023_conv", "gsm8k", "mm_mix_real")
MOST_STATES: Final = 150_000
"""The most states of one exploration. A wrong core may make ever new ones; the shipped core makes half of this number."""


def explore_small_worlds(seed: int, limit_s: float) -> Stage:
    """Tries every interleaving of the small suite, up to the first violation. ``seed`` changes nothing."""
    began = time.perf_counter()
    states = deepest = walked = 0
    findings: list[Finding] = []
    skipped: list[str] = []
    for title, bounds in SMALL.items():
        if time.perf_counter() - began > limit_s:
            skipped.append(title)
            continue
        result = explore(bounds, max_states=MOST_STATES)
        states += result.states
        walked += 1
        deepest = max(deepest, result.depth)
        if result.counterexample is not None:
            findings.append(describe_scenario(compute_scenario(bounds, result.counterexample)))
            break
        if not result.is_complete:
            skipped.append(f"the rest of {title!r}")
    suite = SMALL.values()
    ranges = (
        f"every interleaving of {walked} worlds of 1 to {max(bounds.ranks for bounds in suite)} ranks, at most "
        f"{max(bounds.longest_shard for bounds in suite)} samples a rank and {max(b.window_samples for b in suite)} a window, "
        f"faults as in odb-ref explore --suite small; {states:,} states, at most {deepest} transitions deep"
    )
    return Stage(
        name="exploration",
        covered=f"{walked} worlds, {states:,} states",
        ranges=ranges,
        properties=(BOUNDS, *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=tuple(findings),
        skipped=f"not explored: {', '.join(skipped)}" if skipped else "",
    )


def describe_scenario(scenario: Scenario) -> Finding:
    """Returns a schedule that violates a property as a finding."""
    bounds = scenario.bounds
    case = f"{len(scenario.schedule)} transitions of ranks with lengths {[list(shard) for shard in bounds.lengths]}"
    case += (
        f", budget {bounds.budget_tokens}, window {bounds.window_samples}, depth {bounds.depth_steps}, {bounds.mode}"
    )
    return Finding(property=scenario.property, detail=scenario.detail, case=case, scenario=scenario)


def run_random_worlds(seed: int, limit_s: float) -> Stage:
    """Tries random worlds under random schedules, up to the first violation, and shrinks the world that shows it."""
    began = time.perf_counter()
    sampled: list[Sampled] = []
    for number in range(WORLDS):
        if time.perf_counter() - began > limit_s:
            break
        draw = random.Random(seed * WORLDS + number)
        sampled.append(run_random_schedule(make_random_bounds(draw), draw))
        if sampled[-1].counterexample is not None:
            break
    findings: list[Finding] = []
    small = shrink(sampled[-1], min(SHRINK_S, limit_s))
    if small.counterexample is not None:
        findings.append(describe_scenario(compute_scenario(small.bounds, small.counterexample)))
    transitions = sum(one.transitions for one in sampled)
    rounds = sorted(one.rounds for one in sampled)
    all_bounds = [one.bounds for one in sampled]
    ranges = (
        f"{len(sampled)} random worlds under one random schedule each: 1 to {max(what.ranks for what in all_bounds)} ranks, "
        f"at most {max(what.longest_shard for what in all_bounds)} samples a rank, budgets to "
        f"{max(what.budget_tokens for what in all_bounds):,} tokens, {sum(what.is_shared for what in all_bounds)} with shared "
        f"shards, {sum(what.update_samples is not None for what in all_bounds)} with updates; {transitions:,} transitions; "
        f"they end in round 0 to {rounds[-1]}, half of them in round {statistics.median_low(rounds)} or later"
    )
    return Stage(
        name="properties",
        covered=f"{len(sampled)} worlds, {transitions:,} transitions",
        ranges=ranges,
        properties=tuple(item for item in (BOUNDS, *OF_THE_WORLD) if item != "SIZES"),  # no world has any
        seconds=time.perf_counter() - began,
        findings=tuple(findings),
        skipped="" if findings or len(sampled) == WORLDS else f"time for {len(sampled)} worlds of {WORLDS} only",
    )


def run_large_worlds(seed: int, limit_s: float) -> Stage:
    """Tries simulated runs of real length traces with large windows, many ranks and random settings, up to the first that is
    refuted. The trace checker judges what the ranks did, and `WeightJudge` what their losses would add up to.
    """
    began = time.perf_counter()
    findings: list[Finding] = []
    judged: set[str] = set()
    steps = runs = rounds = largest = 0
    skipped = ""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(LARGE_WORLDS):
            if time.perf_counter() - began > limit_s:
                skipped = f"time for {runs} runs of {LARGE_WORLDS} only"
                break
            what = make_large_run(random.Random(f"{seed}/{number}"))
            largest = max(largest, what.window_samples)
            case = _describe_run(what)
            path = Path(folder) / "trace.ndjson"
            try:
                with what.open_trace(path) as writer:
                    weights = WeightJudge(what.workload.ranks, writer.record)
                    summary = run(what, observer=weights.observe).summary
            except Exception as error:
                # Ranks that disagree may break the simulation in any way.
                property_ = name_property(error) if isinstance(error, OdbError) else "ALIGN"
                detail = f"the simulation ends in {type(error).__name__}: {error}"
                findings.append(Finding(property=property_, detail=detail, case=case))
                break
            runs, steps, rounds = runs + 1, steps + summary.steps, max(rounds, summary.rounds)
            (job,) = check_traces([path]).jobs
            judged |= {str(item.property) for item in job.properties if item.status is not Status.NOT_APPLICABLE}
            findings += [Finding(property=item.property, detail=str(item), case=case) for item in job.violations[:1]]
            if wrong := weights.find_wrong():
                findings.append(Finding(property="WEIGHT", detail=wrong, case=case))
            if findings:
                break
    return Stage(
        name="large",
        covered=f"{runs} runs, {steps:,} steps",
        ranges=f"{runs} simulated runs with windows of up to {largest:,} samples on up to {LARGE_RANKS} ranks, at most "
        f"{rounds} rounds",
        properties=tuple(item for item in OF_THE_WORLD if item in judged),
        seconds=time.perf_counter() - began,
        findings=tuple(findings),
        skipped=skipped,
    )


def _describe_run(what: Run) -> str:
    case = f"{what.workload.name} at {what.workload.ranks} ranks, {what.sharding} shards, {what.mode}"
    case += f", windows of {what.window_samples}, budget {what.budget_tokens}"
    return f"{case}, {what.layout}, {what.order}, {what.sizes} sizes, {what.cost.name}"


@dataclass(frozen=True, slots=True)
class _Waves:
    """A schedule of budgets that fall, and come back every third step."""

    part: float

    def __call__(self, steps: int, tokens: int) -> int:
        """Returns the budget accepted after ``steps`` steps."""
        return max(1, int(tokens * self.part ** (steps % 3)))


def make_large_run(draw: random.Random) -> Run:
    """Returns a run whose windows form up to some hundred groups, or with up to 48 ranks."""
    lengths = load_lengths(draw.choice(TRACES))
    window = draw.choice((16, 64, 300, 1_000))
    ranks = draw.choice((1, 2, 3, 5, 17, LARGE_RANKS)) if window < 300 else draw.choice((1, 2, 3))
    samples = min(6_000, ranks * window * 4)
    sharding = draw.choice((Sharding.EVEN, Sharding.UNEVEN, Sharding.SHARED))
    layout = draw.choice((Layout.PADDED, Layout.PADDED, Layout.PACKED))
    order = draw.choice((StepOrder.SHUFFLED, StepOrder.FULLEST, StepOrder.SAMPLER))
    is_sized = layout is Layout.PADDED and order is not StepOrder.SAMPLER and draw.random() < 0.3
    mean, budget = lengths.tokens.mean(), draw.choice((1.3, 3, 12, 400))
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    changes = draw.choice((None, None, draw.uniform(0.2, 0.9)))
    workload = build_workload(lengths, ranks=ranks, sharding=sharding, samples=samples, seed=draw.getrandbits(20))
    return Run(
        workload=_choose_ids_and_labels(draw.getrandbits(20), workload, window),
        policy="odb",
        rule=draw.choice(ALL_RULES),
        budget_tokens=max(1, int(budget * mean)),
        window_samples=window,
        depth_steps=draw.choice((1, 2, 7)),
        max_age_rounds=draw.choice((1, 2, 5)),
        ramp_rounds=draw.choice((0, 3)),
        layout=layout,
        order=order,
        sizes=draw.choice((Sizes.EVEN, Sizes.THREES, Sizes.POWERS)) if is_sized else Sizes.ANY,
        cost=draw.choice((TOKENS, get_cost(f"attention/{max(1, int(mean))}"))),
        mode=mode,
        quota_samples=samples // 2 if mode is Mode.QUOTA and draw.random() < 0.5 else None,
        budget_schedule=None if changes is None else _Waves(changes),
        sharding=sharding,
        order_seed=draw.getrandbits(30),
        driver=Driver.EVENTS,
    )


def _choose_ids_and_labels(seed: int, workload: Workload, window: int) -> Workload:
    """Returns the workload with loss on all tokens, on one of half of the samples, or on one for each window of all ranks.

    Groups, steps and updates then count none, or one. In half of the workloads some samples share an id (R1.1).
    """
    rng = np.random.default_rng(seed)
    share = (1.0, 1.0, 0.5, 1 / (window * workload.ranks))[rng.integers(4)]
    supervised = workload.supervised_tokens
    if share < 1.0:
        supervised = (rng.random(workload.samples_total) < share).astype(np.int64)
    return replace(workload, ids=workload.ids // (1, 1, 2, window)[rng.integers(4)], supervised_tokens=supervised)


_STAGES: Final = {"large": run_large_worlds, "properties": run_random_worlds, "exploration": explore_small_worlds}


def main(arguments: Sequence[str]) -> int:
    """Runs the stage and writes what it found."""
    name, seed, limit_s, path = arguments
    stage = _STAGES[name](int(seed), float(limit_s))
    Path(path).write_text(json.dumps({**encode_stage(stage), "properties": stage.properties}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
