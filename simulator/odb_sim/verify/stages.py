"""The stages of a verification that run worlds: every interleaving of small ones, random large ones, real traces."""

from __future__ import annotations

import json
import random
import statistics
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
from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.errors import OdbError
from odb_ref.core.types import Mode
from odb_ref.trace.check import Status, check_traces
from odb_sim.explore.sampling import SHRINK_S, Sampled, make_random_bounds, run_random_schedule, shrink
from odb_sim.explore.scenario import Scenario, compute_scenario, decode_scenario, encode_scenario
from odb_sim.explore.search import explore
from odb_sim.explore.suites import SMALL
from odb_sim.explore.violation import name_property
from odb_sim.explore.weights import WeightJudge
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, Workload, build_workload
from odb_sim.studies.runs import Driver, Run, run

OF_THE_RULE: Final = ("RULE-BOUNDS", "RULE-PURE", "RULE-NAME")
OF_THE_WORLD: Final = (
    *("ALIGN", "CONSERVE", "COVER", "ONCE", "QUOTA", "FREE", "TERM", "ABORT"),
    *("RELEASE", "STOP", "BUDGET", "SIZES", "FEWEST", "AGE", "ORDER", "WEIGHT", "REPLAY", "UPDATE", "DEAL"),
)
PROPERTIES: Final = (*OF_THE_RULE, *OF_THE_WORLD)
"""All properties judged of a rule. RESUME and PEERS are not among them: nothing in a checkpoint, and nothing that a peer
does for itself, depends on a pure rule.
"""

WORLDS: Final = 150
TRACES: Final = ("azure_llm_2023_conv", "gsm8k", "mm_mix_real")
RANKS: Final = 8
SAMPLES: Final = 1_500
_UNLIMITED: Final = 1e9
LARGE_WORLDS: Final = 40
LARGE_RANKS: Final = 48
MOST_STATES: Final = 150_000
"""The most states of one exploration. A rule with state makes ever new ones; the shipped rules reach half of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A property that does not hold, and a case that shows it: the smallest found for a rule, the first for a core."""

    property: str
    detail: str
    case: str
    scenario: Scenario | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what it covered, the properties it judges, and what it found.

    ``doubted`` lists the properties that what it found leaves open: other stages cannot show them of this core. ``ranges``
    describes in full what it looked at. ``skipped`` says why it did not look at all of it; its properties then count
    as not judged. ``remedy`` is the command after which the stage can run.
    """

    name: str
    covered: str
    ranges: str = ""
    properties: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    doubted: tuple[str, ...] = ()
    skipped: str = ""
    remedy: str = ""


def encode_stage(stage: Stage) -> dict[str, object]:
    """Returns the stage as JSON."""
    return {
        "name": stage.name,
        "covered": stage.covered,
        "ranges": stage.ranges,
        "skipped": stage.skipped,
        "wall_time_s": round(stage.seconds, 3),
        "findings": [
            {
                "property": finding.property,
                "detail": finding.detail,
                "case": finding.case,
                "scenario": finding.scenario and encode_scenario(finding.scenario),
            }
            for finding in stage.findings
        ],
    }


def decode_stage(text: str) -> Stage:
    """Returns the stage from the JSON of `encode_stage` with its ``properties`` added."""
    found = json.loads(text)
    findings = (
        Finding(**item | {"scenario": item["scenario"] and decode_scenario(item["scenario"])})
        for item in found["findings"]
    )
    return Stage(
        name=found["name"],
        covered=found["covered"],
        ranges=found["ranges"],
        properties=tuple(found["properties"]),
        seconds=found["wall_time_s"],
        findings=tuple(findings),
        skipped=found["skipped"],
    )


def explore_small_worlds(rule: TargetRule | None, name: str, limit_s: float = _UNLIMITED) -> Stage:
    """Tries every interleaving of the small suite, with ``rule`` in each world, or if it is None with the world's own. An
    empty ``name`` means that a core is judged.
    """
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
        finding = describe_scenario(compute_scenario(bounds, found, name or None))
        if smallest is None or _length(finding) < _length(smallest):
            smallest = finding
        if not name:
            break  # one case refutes a core; for a rule, the smallest case is sought
    ranges = (
        f"every interleaving of {walked} worlds of 1 to {max(bounds.ranks for bounds in suite)} ranks, at most "
        f"{max(bounds.longest_shard for bounds in suite)} samples a rank and {max(b.window_samples for b in suite)} a window, "
        f"faults as in odb-ref explore --suite small; {states:,} states, at most {deepest} transitions deep"
    )
    return Stage(
        name="exploration",
        covered=f"{walked} worlds, {states:,} states",
        ranges=ranges,
        properties=(OF_THE_RULE[0], *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
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


def _length(finding: Finding) -> int:
    return len(finding.scenario.schedule) if finding.scenario is not None else 0


def run_random_worlds(
    rules: Sequence[TargetRule], name: str, seed: int, *, worlds: int = WORLDS, limit_s: float = _UNLIMITED
) -> Stage:
    """Tries random worlds under random schedules, each with one of ``rules``, and shrinks what it finds. An empty ``name``
    means that a core is judged.
    """
    began = time.perf_counter()
    sampled: list[Sampled] = []
    for number in range(worlds):
        if time.perf_counter() - began > limit_s:
            break
        draw = random.Random(seed * worlds + number)
        sampled.append(run_random_schedule(make_random_bounds(draw, lambda draw: draw.choice(rules)), draw))
        if sampled[-1].counterexample is not None and not name:
            break  # one case refutes a core; for a rule, the smallest case is sought
    found = min((one for one in sampled if one.counterexample), key=lambda one: one.transitions, default=None)
    smallest: Finding | None = None
    if found is not None:
        found = shrink(found, min(SHRINK_S, limit_s))
        if found.counterexample is not None:
            smallest = describe_scenario(compute_scenario(found.bounds, found.counterexample, name or None))
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
        properties=tuple(item for item in (OF_THE_RULE[0], *OF_THE_WORLD) if item != "SIZES"),  # no world has any
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
        skipped="" if found or len(sampled) == worlds else f"time for {len(sampled)} worlds of {worlds} only",
    )


def simulate_traces(rule: TargetRule, seed: int) -> Stage:
    """Simulates real length traces, and checks their protocol traces."""
    told = f"runs of {', '.join(TRACES)} at {RANKS} ranks, {SAMPLES:,} samples"
    return check_runs("simulation", list_runs(rule, seed), told)


def check_runs(name: str, whats: Sequence[Run], told: str, limit_s: float = _UNLIMITED) -> Stage:
    """Tries simulated runs, up to the first that is refuted. The trace checker judges what the ranks did, and `WeightJudge`
    what their losses would add up to.
    """
    began = time.perf_counter()
    findings: list[Finding] = []
    judged: set[str] = set()
    steps = runs = rounds = 0
    skipped = ""
    with tempfile.TemporaryDirectory() as folder:
        for what in whats:
            if time.perf_counter() - began > limit_s:
                skipped = f"time for {runs} runs of {len(whats)} only"
                break
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
        name=name,
        covered=f"{runs} runs, {steps:,} steps",
        ranges=f"{runs} simulated {told}, at most {rounds} rounds",
        properties=tuple(item for item in PROPERTIES if item in judged),
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


def run_large_worlds(rules: Sequence[TargetRule], seed: int, *, worlds: int = LARGE_WORLDS, limit_s: float) -> Stage:
    """Tries simulated runs of real length traces with large windows, many ranks, and random settings."""
    whats = [make_large_run(random.Random(f"{seed}/{number}"), rules) for number in range(worlds)]
    told = f"runs with windows of up to {max(what.window_samples for what in whats):,} samples on up to {LARGE_RANKS} ranks"
    return check_runs("large", whats, told, limit_s)


def make_large_run(draw: random.Random, rules: Sequence[TargetRule]) -> Run:
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
        rule=draw.choice(rules),
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
