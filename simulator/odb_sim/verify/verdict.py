"""The stages of the verification of a rule, and the verdict on each property.

===========  ========================================================================================================
bounds       for a grid of agreements and many random ones, the target lies within the bounds of R3.3
purity       asked in another order, in the processes of other ranks, the rule gives the same answers and keeps nothing
name         the name distinguishes the rule from shipped ones and from itself with other parameters
exploration  every interleaving of small worlds, with failures, stops and killed processes
properties   large random worlds under random schedules
simulation   real length traces at 8 ranks, their protocol traces checked
===========  ========================================================================================================

The rule runs in separate processes, one for each rank. In the worlds, each rank asks its own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.core.offer import Offer
from odb_sim.explore.scenario import replay
from odb_sim.verify.agreements import (
    GROUPS,
    LARGE,
    LARGEST_ROUND,
    LARGEST_SAMPLES,
    MOST_CONSTANTS,
    ROUNDS,
    SIZES,
    SMALL_SAMPLES,
    iterate_around,
    iterate_grid,
    iterate_large,
    iterate_rounds,
    iterate_sizes,
)
from odb_sim.verify.alone import (
    BOUNDS,
    NAME,
    PURE,
    SHUFFLED,
    check_bounds,
    check_name,
    check_purity,
    check_state,
    is_within,
)
from odb_sim.verify.rule_client import PROCESSES, Answer, RuleProcesses
from odb_sim.verify.stages import (
    PROPERTIES,
    Finding,
    Stage,
    explore_small_worlds,
    run_random_worlds,
    simulate_traces,
)


def verify(rule: RuleProcesses, name: str, *, seed: int = 0) -> Iterator[Stage]:
    """Yields the stages in order, each as soon as it is done. ``name`` is how to find the rule, for saved schedules."""
    constants = rule.description.constants
    began = time.perf_counter()
    asked = compute_agreements(constants, seed)
    first = rule.get_process(0)
    answers: list[Answer] = []
    while len(answers) < len(asked) and all(map(is_within, asked, answers)):
        answers += first.ask(asked[len(answers) : len(answers) + _PART], is_traced=True)
    agreements = asked[: len(answers)]
    covered = f"{len(agreements):,} agreements"
    seconds = time.perf_counter() - began
    ranges = (
        f"every agreement on up to {SMALL_SAMPLES} samples a rank in two rounds; every round up to {ROUNDS - 1:,} in three "
        f"shapes; every window up to {SIZES:,} samples in two, with each number of groups up to {GROUPS:,} in both; {LARGE:,} "
        f"drawn, up to 2^{LARGEST_SAMPLES.bit_length() - 1} samples and round 2^{LARGEST_ROUND.bit_length() - 1}"
    )
    if constants:
        ranges += f"; more around {min(len(constants), MOST_CONSTANTS)} of {len(constants)} numbers in the rule's file"
    yield _judge(
        "bounds", covered, ranges, BOUNDS, lambda: check_bounds(first.ask, agreements, answers), seconds=seconds
    )
    if any(_is_fatal(answer) for answer in answers):
        reason = "a rule that ends its process or does not answer is not asked further"
        for stage in ("purity", "name", "exploration", "properties", "simulation"):
            yield Stage(name=stage, covered="", properties=(), seconds=0, findings=(), skipped=reason)
        return
    pure = _judge("purity", covered, "", PURE, lambda: check_purity(rule, agreements, answers))
    ranges = (
        f"rank 1 of {PROCESSES} asked all of them backwards, each further rank {SHUFFLED:,} in another order, rank 0 "
        "some again; the processes differ in rank variables, host name and hash seed, and keep nothing of what is asked; "
        f"{rule.seeds} hash seeds"
    )
    pure = replace(pure, ranges=ranges)
    yield pure
    ranges = (
        "against the shipped rules on all of them; the other classes of its file, and its own with each parameter changed "
        "(numbers by 1, by a thousandth or a millionth, to some multiples) or two numbers at once, on 3,000"
    )
    named = _judge("name", covered, ranges, NAME, lambda: check_name(rule, agreements, answers))
    unvaried = ", ".join(first.unvaried)
    yield replace(named, skipped=f"no other value was tried of its parameters: {unvaried}" if unvaried else "")
    for run in (partial(explore_small_worlds, rule, name), partial(run_random_worlds, [rule], name, seed)):
        found = run()
        yield replace(found, findings=tuple(map(_keep_what_replays, found.findings)))
    simulated = simulate_traces(rule, seed)
    kept = None if pure.findings else check_state(rule)
    yield replace(simulated, findings=(*simulated.findings, kept)) if kept else simulated


def _keep_what_replays(finding: Finding) -> Finding:
    """Returns the finding, without its schedule if nothing is violated there by a rule that was not asked before."""
    if finding.scenario is None:
        return finding
    # A UsageError says that the schedule is no longer possible.
    with closing(RuleProcesses(finding.scenario.rule)) as fresh, suppress(UsageError):
        bounds = replace(finding.scenario.bounds, rule=fresh)
        if any(moment.violation for moment in replay(replace(finding.scenario, bounds=bounds))):
            return finding
    case = f"{finding.case}; not saved, because it depends on what the rule was asked before"
    return replace(finding, case=case, scenario=None)


def compute_agreements(constants: Sequence[int], seed: int) -> list[Offer]:
    """Returns the agreements to ask a rule about, small ones first. ``constants`` are the numbers in its file."""
    agreements = [*iterate_grid(), *iterate_rounds(), *iterate_sizes(), *iterate_large(LARGE, seed)]
    return agreements + list(iterate_around(constants, seed))


_PART: Final = 5_000
"""The number of agreements after which to check whether one has refuted the rule."""


def _is_fatal(answer: int | str) -> bool:
    return isinstance(answer, str) and answer.startswith(("does not answer", "ends its process"))


def list_not_looked_at(rule: RuleProcesses) -> list[str]:
    """Returns the things about which no verdict says anything."""
    missed = rule.get_process(0).list_missed_lines()
    lines = f"lines of the rule that no agreement led to: {_join(missed)}"
    return [
        *([lines] if missed else []),
        "agreements beyond these ranges",
        "what a rule takes from threads, from C, or from hosts that differ in hardware or in installed versions",
        "how long a rule takes, beyond its limit for one answer",
    ]


def _join(numbers: Sequence[int]) -> str:
    """Returns the numbers, which ascend, as a text with a dash for each run of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def compute_verdicts(stages: Sequence[Stage]) -> dict[str, tuple[str, str]]:
    """Returns for each property the verdict (holds, VIOLATED, not shown or not judged), and the stages it comes from.

    "Holds" applies only as far as those stages looked. A stage that has found something has not looked at everything. A
    property is "not shown" of a core that differs from the one proved or fails a test of it, if no case violates it.
    """
    verdicts: dict[str, tuple[str, str]] = {}
    spoken_of = (
        name
        for stage in stages
        for name in (*stage.properties, *(item.property for item in stage.findings), *stage.doubted)
    )
    for name in dict.fromkeys((*PROPERTIES, *spoken_of)):
        refuting = ", ".join(stage.name for stage in stages if any(item.property == name for item in stage.findings))
        doubting = ", ".join(stage.name for stage in stages if name in stage.doubted)
        resting = ", ".join(
            stage.name for stage in stages if name in stage.properties and not (stage.findings or stage.skipped)
        )
        if refuting:
            verdicts[name] = "VIOLATED", refuting
        elif doubting:
            verdicts[name] = "not shown", f"{doubting}; no violation in {resting}" if resting else doubting
        else:
            verdicts[name] = "holds" if resting else "not judged", resting
    return verdicts


def _judge(
    name: str, covered: str, ranges: str, property_: str, work: Callable[[], Finding | None], *, seconds: float = 0
) -> Stage:
    began = time.perf_counter() - seconds
    found = work()
    findings = () if found is None else (found,)
    seconds = time.perf_counter() - began
    return Stage(name=name, covered=covered, ranges=ranges, properties=(property_,), seconds=seconds, findings=findings)
