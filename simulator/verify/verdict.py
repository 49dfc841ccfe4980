"""The stages of a verification, and the verdict on each property.

===========  ========================================================================================================
bounds       every small agreement, and many large ones: the target lies within the bounds of R3.3
purity       the same agreements asked in another order, of a copy, in another process: the same answers
exploration  every interleaving of small worlds, with failures, stops and killed processes
properties   large random worlds under random schedules
simulation   real length traces at 8 ranks, their protocol traces checked
===========  ========================================================================================================
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from odb_ref.core.check import Status, check_traces
from odb_ref.core.errors import OdbError, RuleError
from odb_ref.core.offer import Offer
from odb_ref.core.rules import TargetRule
from odb_ref.core.trace import TraceWriter
from odb_ref.core.types import Mode
from simulator.explore.rank import name_property
from simulator.explore.sampling import Sampled, make_random_bounds, run_random_schedule, shrink
from simulator.explore.scenario import Scenario, compute_scenario
from simulator.explore.search import explore
from simulator.explore.suites import SMALL
from simulator.lengths import load_lengths
from simulator.runs import Run, run
from simulator.verify.bounds_grid import (
    Refutation,
    check_bounds,
    check_purity,
    describe_agreement,
    iterate_grid,
    iterate_large,
)
from simulator.workload import Sharding, build_workload

OF_THE_RULE: Final = ("RULE-BOUNDS", "RULE-PURE")
OF_THE_WORLD: Final = (
    *("ALIGN", "CONSERVE", "COVER", "ONCE", "QUOTA", "FREE", "TERM", "ABORT"),
    *("RELEASE", "STOP", "BUDGET", "FEWEST", "AGE", "WEIGHT", "REPLAY"),
)
PROPERTIES: Final = (*OF_THE_RULE, *OF_THE_WORLD)
"""Everything that is judged. RESUME is not: a checkpoint holds nothing that a pure rule could make depend on it."""

LARGE_AGREEMENTS: Final = 20_000
WORLDS: Final = 150
TRACES: Final = ("azure_llm_2023_conv", "gsm8k", "mm_mix_real")
RANKS: Final = 8
SAMPLES: Final = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What does not hold, and the smallest case that shows it."""

    property: str
    detail: str
    case: str
    scenario: Scenario | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what it covered, which properties it speaks of, and what it found."""

    name: str
    covered: str
    properties: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Guarded:
    """The rule as the world sees it: whatever else it does wrong comes out as a breach of its bounds."""

    rule: TargetRule

    @property
    def name(self) -> str:
        """The rule's own name."""
        return self.rule.name

    def compute_target(self, agreement: Offer) -> int:
        """The rule's own answer.

        Raises: RuleError when it raises.
        """
        try:
            return self.rule.compute_target(agreement)
        except Exception as error:
            raise RuleError(f"rule {self.name!r} raises {type(error).__name__}: {error}") from error


def verify(rule: TargetRule, name: str, *, seed: int = 0) -> Iterator[Stage]:
    """The stages, one after the other, each as soon as it is done. ``name`` is how the rule is found, for other processes."""
    agreements = [*iterate_grid(), *iterate_large(LARGE_AGREEMENTS, seed)]
    covered = f"{len(agreements):,} agreements"
    yield _time("bounds", covered, OF_THE_RULE[:1], lambda: _say(check_bounds(rule, agreements)))
    yield _time("purity", covered, OF_THE_RULE[1:], lambda: _say(check_purity(rule, name, agreements)))
    yield _explore(Guarded(rule), name)
    yield _sample(Guarded(rule), name, seed)
    yield _simulate(Guarded(rule), seed)


def compute_verdicts(stages: Sequence[Stage]) -> dict[str, tuple[str, str]]:
    """For each property the verdict (holds, VIOLATED or not judged), and the stages it comes from.

    "Holds" is meant as far as those stages looked. A stage that has found something has not looked at all of the rest.
    """
    verdicts: dict[str, tuple[str, str]] = {}
    for name in PROPERTIES:
        refuting = [stage.name for stage in stages if any(item.property == name for item in stage.findings)]
        resting = [stage.name for stage in stages if name in stage.properties and not stage.findings]
        verdict = "VIOLATED" if refuting else ("holds" if resting else "not judged")
        verdicts[name] = (verdict, ", ".join(refuting or resting))
    return verdicts


def _time(name: str, covered: str, properties: tuple[str, ...], work: Callable[[], tuple[Finding, ...]]) -> Stage:
    began = time.perf_counter()
    findings = work()
    seconds = time.perf_counter() - began
    return Stage(name=name, covered=covered, properties=properties, seconds=seconds, findings=findings)


def _say(refutation: Refutation | None) -> tuple[Finding, ...]:
    if refutation is None:
        return ()
    case = f"agreement {describe_agreement(refutation.agreement)}"
    return (Finding(property=refutation.property, detail=refutation.detail, case=case),)


def _explore(rule: TargetRule, name: str) -> Stage:
    began = time.perf_counter()
    states = 0
    smallest: Finding | None = None
    suite = [replace(bounds, rule=rule) for bounds in SMALL.values()]
    for bounds in suite:
        result = explore(bounds)
        states += result.states
        found = result.counterexample
        if found is None:
            continue
        finding = _describe(compute_scenario(bounds, found, name))
        if smallest is None or _length(finding) < _length(smallest):
            smallest = finding
    return Stage(
        name="exploration",
        covered=f"{len(suite)} worlds, {states:,} states",
        properties=(OF_THE_RULE[0], *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
    )


def _describe(scenario: Scenario) -> Finding:
    bounds = scenario.bounds
    case = f"{len(scenario.schedule)} transitions of ranks with lengths {[list(shard) for shard in bounds.lengths]}"
    case += (
        f", budget {bounds.budget_tokens}, window {bounds.window_samples}, depth {bounds.depth_steps}, {bounds.mode}"
    )
    return Finding(property=scenario.property, detail=scenario.detail, case=case, scenario=scenario)


def _length(finding: Finding) -> int:
    return len(finding.scenario.schedule) if finding.scenario is not None else 0


def _sample(rule: TargetRule, name: str, seed: int) -> Stage:
    began = time.perf_counter()
    transitions = 0
    found: Sampled | None = None
    for number in range(WORLDS):
        draw = random.Random(seed * WORLDS + number)
        sampled = run_random_schedule(make_random_bounds(draw, lambda _: rule), draw)
        transitions += sampled.transitions
        if sampled.counterexample is not None and (found is None or sampled.transitions < found.transitions):
            found = sampled
    smallest: Finding | None = None
    if found is not None:
        found = shrink(found)
        if found.counterexample is not None:
            smallest = _describe(compute_scenario(found.bounds, found.counterexample, name))
    return Stage(
        name="properties",
        covered=f"{WORLDS} worlds, {transitions:,} transitions",
        properties=(OF_THE_RULE[0], *OF_THE_WORLD),
        seconds=time.perf_counter() - began,
        findings=() if smallest is None else (smallest,),
    )


def _simulate(rule: TargetRule, seed: int) -> Stage:
    began = time.perf_counter()
    findings: list[Finding] = []
    judged: set[str] = set()
    steps = 0
    with tempfile.TemporaryDirectory() as folder:
        for what in _list_runs(rule, seed):
            case = f"{what.workload.name} at {RANKS} ranks, {what.sharding} shards, {what.mode}"
            path = Path(folder) / "trace.ndjson"
            try:
                with TraceWriter(path, what.build_config(), driver="simulator") as writer:
                    steps += run(what, observer=writer.record).summary.steps
            except Exception as error:
                # Ranks whose rule disagrees may break the simulation in any way.
                property_ = name_property(error) if isinstance(error, OdbError) else "ALIGN"
                detail = f"the simulation ends in {type(error).__name__}: {error}"
                findings.append(Finding(property=property_, detail=detail, case=case))
                break
            (job,) = check_traces([path]).jobs
            judged |= {str(item.property) for item in job.properties if item.status is not Status.NOT_APPLICABLE}
            findings += [Finding(property=item.property, detail=str(item), case=case) for item in job.violations[:1]]
    return Stage(
        name="simulation",
        covered=f"{3 * len(TRACES)} runs, {steps:,} steps",
        properties=tuple(name for name in PROPERTIES if name in judged),
        seconds=time.perf_counter() - began,
        findings=tuple(findings),
    )


def _list_runs(rule: TargetRule, seed: int) -> list[Run]:
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
