"""The stages of a verification that run worlds: every interleaving of small ones, random large ones, real traces.

Each takes a target rule, an instance of its own for each rank where there is one (`inputs.rules.PerRank`).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import OdbError
from odb_ref.core.types import Mode
from odb_ref.trace.check import Status, check_traces
from odb_ref.trace.format import TraceWriter
from odb_sim.explore.sampling import SHRINK_S, Sampled, make_random_bounds, run_random_schedule, shrink
from odb_sim.explore.scenario import Scenario, compute_scenario
from odb_sim.explore.search import explore
from odb_sim.explore.suites import SMALL
from odb_sim.explore.violation import name_property
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run, run

OF_THE_RULE: Final = ("RULE-BOUNDS", "RULE-PURE", "RULE-NAME")
OF_THE_WORLD: Final = (
    *("ALIGN", "CONSERVE", "COVER", "ONCE", "QUOTA", "FREE", "TERM", "ABORT"),
    *("RELEASE", "STOP", "BUDGET", "FEWEST", "AGE", "WEIGHT", "REPLAY"),
)
PROPERTIES: Final = (*OF_THE_RULE, *OF_THE_WORLD)
"""Everything that is judged. RESUME is not: a checkpoint holds nothing that a pure rule could make depend on it."""

WORLDS: Final = 150
TRACES: Final = ("azure_llm_2023_conv", "gsm8k", "mm_mix_real")
RANKS: Final = 8
SAMPLES: Final = 1_500
MOST_STATES: Final = 60_000
"""Of one exploration. A right rule reaches fewer; one that remembers makes ever new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What does not hold, and the smallest case that shows it."""

    property: str
    detail: str
    case: str
    scenario: Scenario | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what it covered, which properties it speaks of, and what it found.

    ``ranges`` says in full what it looked at; ``skipped`` why it did not, and then it speaks of nothing.
    """

    name: str
    covered: str
    ranges: str = ""
    properties: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    skipped: str = ""


def explore_small_worlds(rule: TargetRule | None, name: str, limit_s: float = 1e9) -> Stage:
    """Returns every interleaving of the small suite, with ``rule`` in each world, or, without one, the world's own."""
    began = time.perf_counter()
    states = 0
    smallest: Finding | None = None
    suite = list(SMALL.values())
    if rule is not None:
        suite = [replace(bounds, rule=rule) for bounds in suite]
    deepest = walked = 0
    skipped: list[str] = []
    for title, bounds in zip(SMALL, suite, strict=True):
        if time.perf_counter() - began > limit_s:
            skipped.append(title)
            continue
        result = explore(bounds, max_states=MOST_STATES)
        states += result.states
        walked += 1
        deepest = max(deepest, result.depth)
        found = result.counterexample
        if found is None:
            if not result.is_complete:
                skipped.append(f"the rest of {title!r}")
            continue
        finding = describe_scenario(compute_scenario(bounds, found, name if rule is not None else None))
        if smallest is None or _length(finding) < _length(smallest):
            smallest = finding
    ranges = (
        f"every interleaving of {walked} worlds of 1 to {max(bounds.ranks for bounds in suite)} ranks, at most "
        f"{max(bounds.longest_shard for bounds in suite)} samples a rank and {max(b.window_samples for b in suite)} a window, "
        f"faults as in odb-ref explore --suite small; {states:,} states, at most {deepest} transitions deep"
    )
    if skipped:
        ranges += f"; not complete: {', '.join(skipped)}"
    return Stage(
        name="exploration",
        covered=f"{walked} worlds, {states:,} states",
        ranges=ranges,
        properties=() if skipped else (OF_THE_RULE[0], *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
    )


def describe_scenario(scenario: Scenario) -> Finding:
    """Returns a schedule in which something does not hold, as a finding."""
    bounds = scenario.bounds
    case = f"{len(scenario.schedule)} transitions of ranks with lengths {[list(shard) for shard in bounds.lengths]}"
    case += (
        f", budget {bounds.budget_tokens}, window {bounds.window_samples}, depth {bounds.depth_steps}, {bounds.mode}"
    )
    return Finding(property=scenario.property, detail=scenario.detail, case=case, scenario=scenario)


def _length(finding: Finding) -> int:
    return len(finding.scenario.schedule) if finding.scenario is not None else 0


def run_random_worlds(
    rules: Sequence[TargetRule], name: str, seed: int, *, worlds: int = WORLDS, limit_s: float = 1e9
) -> Stage:
    """Tries random worlds under random schedules, each with one of ``rules``; what is found is made small."""
    began = time.perf_counter()
    sampled: list[Sampled] = []
    for number in range(worlds):
        if time.perf_counter() - began > limit_s:
            break
        draw = random.Random(seed * worlds + number)
        sampled.append(run_random_schedule(make_random_bounds(draw, lambda draw: draw.choice(rules)), draw))
    found = min((one for one in sampled if one.counterexample), key=lambda one: one.transitions, default=None)
    smallest: Finding | None = None
    if found is not None:
        found = shrink(found, min(SHRINK_S, limit_s))
        if found.counterexample is not None:
            smallest = describe_scenario(compute_scenario(found.bounds, found.counterexample, name or None))
    transitions = sum(one.transitions for one in sampled)
    rounds = sorted(one.rounds for one in sampled)
    ranges = (
        f"{len(sampled)} random worlds under one random schedule each: 1 to {max(one.bounds.ranks for one in sampled)} ranks, "
        f"at most {max(one.bounds.longest_shard for one in sampled)} samples a rank, budgets to "
        f"{max(one.bounds.budget_tokens for one in sampled):,} tokens; {transitions:,} transitions; they end in round 0 to "
        f"{rounds[-1]}, half of them in round {statistics.median_low(rounds)} or later"
    )
    return Stage(
        name="properties",
        covered=f"{len(sampled)} worlds, {transitions:,} transitions",
        ranges=ranges,
        properties=(OF_THE_RULE[0], *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
    )


def simulate_traces(rule: TargetRule, seed: int) -> Stage:
    """Tries real length traces, their protocol traces checked."""
    began = time.perf_counter()
    findings: list[Finding] = []
    judged: set[str] = set()
    steps = runs = rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        for what in list_runs(rule, seed):
            case = f"{what.workload.name} at {RANKS} ranks, {what.sharding} shards, {what.mode}"
            path = Path(folder) / "trace.ndjson"
            try:
                with TraceWriter(path, what.build_config(), driver="simulator") as writer:
                    summary = run(what, observer=writer.record).summary
            except Exception as error:
                # Ranks whose rule disagrees may break the simulation in any way.
                property_ = name_property(error) if isinstance(error, OdbError) else "ALIGN"
                detail = f"the simulation ends in {type(error).__name__}: {error}"
                findings.append(Finding(property=property_, detail=detail, case=case))
                break
            runs, steps, rounds = runs + 1, steps + summary.steps, max(rounds, summary.rounds)
            (job,) = check_traces([path]).jobs
            judged |= {str(item.property) for item in job.properties if item.status is not Status.NOT_APPLICABLE}
            findings += [Finding(property=item.property, detail=str(item), case=case) for item in job.violations[:1]]
    return Stage(
        name="simulation",
        covered=f"{runs} runs, {steps:,} steps",
        ranges=f"{runs} simulated runs of {', '.join(TRACES)} at {RANKS} ranks, {SAMPLES:,} samples, at most {rounds} rounds",
        properties=tuple(name for name in PROPERTIES if name in judged),
        seconds=time.perf_counter() - began,
        findings=tuple(findings),
    )


def list_runs(rule: TargetRule, seed: int) -> list[Run]:
    """Returns the runs of `simulate_traces`."""
    runs: list[Run] = []
    for trace in TRACES:
        lengths = load_lengths(trace)
        for sharding, mode in ((Sharding.EVEN, Mode.JOIN), (Sharding.UNEVEN, Mode.JOIN), (Sharding.EVEN, Mode.QUOTA)):
            runs.append(
                Run(
                    workload=build_workload(lengths, ranks=RANKS, sharding=sharding, samples=SAMPLES, seed=seed),
                    policy="odb",
                    rule=rule,
                    budget_tokens=max(1, int(4 * lengths.tokens.mean())),
                    window_samples=32,
                    mode=mode,
                    quota_samples=SAMPLES // 2 if mode is Mode.QUOTA else None,
                    sharding=sharding,
                    seed=seed,
                )
            )
    return runs
