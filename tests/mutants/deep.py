"""Defects that only show deep in a run: on rank 17, beyond 16 bits, when something is due, when a quota cuts a round.

``python -m tests.mutants.deep`` prints what the comparison with the extracted model says to each, and after how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from odb_sim.explore.bounds import Bounds

from tests.mutants.loader import Mutant, load
from tests.proofs.worlds import find_difference, run_world

AT_ONCE = 40
MOST_WORLDS = 600
_ANYWHERE = Bounds(lengths=((1,),))


def _mutant(name: str, module: str, old: str, new: str, property_: str) -> Mutant:
    return Mutant(name=name, module=module, old=old, new=new, property=property_, bounds=_ANYWHERE)


DEEP = (
    _mutant("failed_rank % 16", "rounds", "failed_rank=config.rank if", "failed_rank=config.rank % 16 if", "ABORT"),
    _mutant("stop_rank % 16", "rounds", "stop_rank=config.rank if", "stop_rank=config.rank % 16 if", "STOP"),
    _mutant("padded tokens of 16 bits choose", "batching.alignment", "fills[i])", "-(-fills[i] & 0xFFFF))", "REPLAY"),
    _mutant(
        "padded tokens of 16 bits order the steps",
        "batching.alignment",
        "key=lambda group: step_order.compute_rank(group, layout, cost)",
        "key=lambda group: -(layout.compute_tokens(group) & 0xFFFF)",
        "REPLAY",
    ),
    _mutant(
        "carried by cost",
        "batching.alignment",
        "fills = ranks if cost == TOKENS else [",
        "fills = ranks if cost else [",
        "AGE",
    ),
    _mutant(
        "split by tokens",
        "batching.alignment",
        "layout.compute_cost(group, cost) if len(group) > 1 else 0",
        "layout.compute_tokens(group) if len(group) > 1 else 0",
        "ORDER",
    ),
    _mutant(
        "a row is halved by tokens",
        "batching.layouts",
        "accumulate(cost.of_tokens(sample.length) for",
        "accumulate(sample.length for",
        "ORDER",
    ),
    _mutant(
        "the budget of the round before",
        "machine",
        "agreed_tokens=agreement.budget_min",
        "agreed_tokens=state.agreed_tokens",
        "BUDGET",
    ),
    _mutant(
        "what was agreed on is offered again",
        "rounds",
        "budget_min=state.accepted_tokens",
        "budget_min=min(state.agreed_tokens, state.accepted_tokens)",
        "BUDGET",
    ),
    _mutant(
        "half of a row is rounded down",
        "batching.layouts",
        "(self.compute_cost(group, cost) + 1) // 2",
        "self.compute_cost(group, cost) // 2",
        "ORDER",
    ),
    _mutant(
        "padded tokens of 17 bits fit",
        "batching.grouping",
        "padded + sample.length > budget_tokens",
        "(padded + sample.length) & 0x1FFFF > budget_tokens",
        "BUDGET",
    ),
    _mutant(
        "what is due is counted in samples",
        "rounds",
        "sum(is_due(group, due_before) for group in groups)",
        "sum(sample.position < due_before for group in groups for sample in group)",
        "AGE",
    ),
    _mutant(
        "only the longest sample makes a group due",
        "batching.alignment",
        "for sample in group:",
        "for sample in group[:1]:",
        "AGE",
    ),
    _mutant(
        "due one sample too early",
        "batching.alignment",
        "sample.position < due_before",
        "sample.position <= due_before",
        "AGE",
    ),
    _mutant(
        "two marks at most",
        "machine",
        "[-config.max_age_rounds :]",
        "[-min(2, config.max_age_rounds) :]",
        "AGE",
    ),
    _mutant(
        "no marks after round 50",
        "machine",
        "(*advanced.marks, advanced.read_samples)",
        "(*advanced.marks, advanced.read_samples if advanced.round < 50 else advanced.marks[-1])",
        "AGE",
    ),
    _mutant(
        "what is due goes first only when all of it fits",
        "batching.alignment",
        "(not is_due(groups[i], due_before),",
        "(not is_due(groups[i], due_before) or i >= target,",
        "AGE",
    ),
    _mutant("a round of 6 bits", "machine", "round=state.round + 1", "round=(state.round + 1) & 0x3F", "ALIGN"),
    _mutant(
        "step numbers of 7 bits",
        "machine",
        "planned_steps=state.planned_steps + steps",
        "planned_steps=(state.planned_steps + steps) & 0x7F",
        "ALIGN",
    ),
    _mutant(
        "samples are counted up to 255",
        "machine",
        "global_samples=totals[steps]",
        "global_samples=min(255, totals[steps])",
        "QUOTA",
    ),
    _mutant(
        "cut one step late", "rounds", "if total >= config.quota_samples", "if total > config.quota_samples", "QUOTA"
    ),
    _mutant(
        "a quota met exactly is not met",
        "rounds",
        "state.global_samples >= config.quota_samples",
        "state.global_samples > config.quota_samples",
        "QUOTA",
    ),
    _mutant(
        "held with the quota met",
        "rounds",
        "0 if is_quota_met(config, state) else len(state.window)",
        "len(state.window)",
        "QUOTA",
    ),
    _mutant(
        "of a cut round one step returns",
        "machine",
        "state.aligned[steps:])",
        "state.aligned[steps : steps + 1])",
        "CONSERVE",
    ),
    _mutant(
        "what a cut returns loses its order",
        "machine",
        "tuple(sorted(chain(window, *groups), key=lambda sample: sample.position))",
        "tuple(chain(window, *groups))",
        "REPLAY",
    ),
    _mutant(
        "the stop is counted in samples",
        "rounds",
        "state.taken_steps if state.is_stopped",
        "state.taken_samples if state.is_stopped",
        "STOP",
    ),
    _mutant(
        "of two failures the last is named",
        "exchange",
        "for report in reports:\n        if report.cause",
        "for report in reversed(reports):\n        if report.cause",
        "ABORT",
    ),
    _mutant(
        "a report drops what waits for room",
        "machine",
        "replace(state, phase=Phase.REPORT, groups=())",
        "replace(state, phase=Phase.REPORT, groups=(), released=())",
        "ABORT",
    ),
    _mutant(
        "the limit after a failure leaves out what waits for room",
        "machine",
        "state.planned_steps - len(state.plan))",
        "state.planned_steps - len(state.plan) - len(state.released))",
        "ABORT",
    ),
    _mutant(
        "a loss in COUNT drops what is aligned",
        "machine",
        "window=_return_samples(state.window, state.aligned),",
        "window=state.window,",
        "CONSERVE",
    ),
    _mutant(
        "two steps at most wait in the queue",
        "machine",
        "config.depth_steps - len(state.queue)",
        "min(2, config.depth_steps) - len(state.queue)",
        "FREE",
    ),
    _mutant("equal groups: the last first", "batching.alignment", "fills[i])", "fills[i], -i)", "REPLAY"),
    _mutant("the smaller half first", "batching.layouts", "sizes.find_middle(len(group))", "len(group) // 2", "REPLAY"),
    _mutant(
        "an equal part that was made last is split first",
        "batching.alignment",
        "heapq.heappush(heap, (-_compute_splittable_cost(half, layout, cost), order, half))",
        "heapq.heappush(heap, (-_compute_splittable_cost(half, layout, cost), -order, half))",
        "REPLAY",
    ),
    _mutant(
        "a limit forgets all but the last sample",
        "batching.grouping",
        "tuple(map(sub, room, sample.costs))",
        "tuple(map(sub, limits, sample.costs))",
        "BUDGET",
    ),
    _mutant(
        "an ended rank with many groups still counts",
        "rounds",
        "NONE if is_all else count",
        "NONE if state.is_ended and len(groups) < 5 else count",
        "REPLAY",
    ),
    _mutant(
        "a group that is half full is kept back",
        "batching.alignment",
        "layout.compute_tokens(group) < budget_tokens for",
        "layout.compute_tokens(group) <= budget_tokens for",
        "FEWEST",
    ),
    _mutant(
        "half of the budget of the configuration",
        "rounds",
        "config.layout, budget_tokens)",
        "config.layout, config.budget_tokens)",
        "FEWEST",
    ),
    _mutant(
        "what is kept back is looked for in padded groups",
        "rounds",
        "count_groups_to_emit(groups, config.layout,",
        "count_groups_to_emit(groups, type(config.layout).PADDED,",
        "FEWEST",
    ),
    _mutant("a group is kept back of one", "batching.alignment", "if len(groups) < 2:", "if not groups:", "FEWEST"),
    _mutant(
        "every group that is less than half full is kept back",
        "batching.alignment",
        "return len(groups) - any(2",
        "return len(groups) - sum(2",
        "FEWEST",
    ),
    _mutant(
        "ready while a read is open", "rounds", "ready_min=int(is_ready)", "ready_min=int(state.is_collated)", "RELEASE"
    ),
    _mutant(
        "an urge outside FILL is forgotten",
        "machine",
        "replace(state, is_urged=True)",
        "replace(state, is_urged=state.phase is Phase.FILL)",
        "FREE",
    ),
    _mutant(
        "the last cause stays, not the first",
        "machine",
        "if state.phase in _ENDING or state.failure:",
        "if state.phase in _ENDING:",
        "ABORT",
    ),
    _mutant(
        "a carried sample of a wide group is left behind",
        "batching.alignment",
        "for i in order[target:]), key",
        "for i in order[target : target + 9]), key",
        "CONSERVE",
    ),
)


def find(mutant: Mutant, model: Callable[[str], list[str]]) -> tuple[int, str] | None:
    """In which batch of worlds the mutant was caught, and what was said; None when it survives."""
    with load(mutant, has_invariants=False) as (core, bounds):
        for first in range(0, MOST_WORLDS, AT_ONCE):
            worlds = []
            for seed in range(first, first + AT_ONCE):
                try:
                    worlds.append(run_world(seed, core, type(bounds.layout)))
                except Exception as error:  # Whatever the mutant runs into.
                    return first, f"seed {seed}: {type(error).__name__}: {error}"
            difference = find_difference(model, worlds)
            if difference is not None:
                return first, difference
    return None


def main() -> None:
    """Prints the table."""
    from tests.proofs.conftest import ask_model

    print("| defect | breaks | caught in world | after |\n|---|---|--:|--:|")
    for mutant in DEEP:
        began = time.perf_counter()
        found = find(mutant, ask_model)
        where = "survives" if found is None else f"{found[0]} to {found[0] + AT_ONCE - 1}"
        print(f"| {mutant.name} | {mutant.property} | {where} | {time.perf_counter() - began:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
