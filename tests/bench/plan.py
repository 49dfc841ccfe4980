"""`odb_ref.plan` on every shipped trace, beside other planners: the number of steps, the wait between ranks, and the speed.

Each trace is dealt out to eight ranks, and also planned where it lies, on eight ranks with equal numbers of samples; by tokens,
and by the cost of attention. Plans of dealt samples must keep what is promised: the smallest possible count, and a wait of at
most 1.02 by tokens and 1.03 by attention. The time of large plans is also given relative to sorting the same number of lengths.

The other planners are those of `tests.conformance.scoreboard`, which installs them below ``build/peers``.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from typing import Any

from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.conformance.answers import read_plan
from odb_ref.conformance.asking import Program
from odb_ref.conformance.judge import compute_least, compute_wait_of, find_faults
from odb_ref.conformance.vectors import decode
from odb_ref.core.errors import OdbError
from odb_ref.plan import attention, plan_all, plan_ranks
from tests.bench.report import print_table, say
from tests.conformance import scoreboard

BUDGET_TOKENS = 16_384
RANKS = 8
SAMPLES = 2_048
MOST_WAIT = {"tokens": 1.02, "attention": 1.03}
COSTS = {"tokens": None, "attention": attention(hidden_size=4_096)}
LARGE = {"tokens": 1_000_000, "attention": 100_000}
"""The number of lengths planned at once to measure the speed."""
MOST_SECONDS = {"tokens": 20.0, "attention": 5.0}
"""In processor time, because one thread makes plans, and machines are busy."""
COST = "attention/24576"
"""The cost by which the traces are planned: attention with a hidden size of 4,096."""
PATIENCE_S = 600.0
Lengths = list[list[int]]


def draw(name: str, number: int) -> list[int]:
    """Returns lengths drawn from a shipped trace, none over the budget, without repetition unless there are too few."""
    lengths = [min(int(length), BUDGET_TOKENS) for length in load_lengths(name).tokens]
    generator = random.Random(name)
    return generator.sample(lengths, number) if number <= len(lengths) else generator.choices(lengths, k=number)


def deal(lengths: list[int], ranks: int) -> Lengths:
    """Returns the lengths of each rank, dealt out as by a sampler."""
    return [lengths[rank::ranks] for rank in range(ranks)]


# Quality -----------------------------------------------------------------------------------------------------------------


def judge_quality() -> bool:
    """Prints the result of each way of planning, by trace and cost. Returns True if plans of dealt samples make the promised
    number of steps, and wait no longer than promised.
    """
    rows = []
    for name in list_bundled_names():
        say(name)
        lengths = draw(name, SAMPLES)
        for cost, function in COSTS.items():
            dealt = plan_all(lengths, ranks=RANKS, budget=BUDGET_TOKENS, cost=function).report
            stayed = plan_ranks(deal(lengths, RANKS), budget=BUDGET_TOKENS, cost=function).report
            is_good = dealt.count == dealt.least and dealt.wait <= MOST_WAIT[cost]
            for way, report, verdict in (("plan_all", dealt, "" if is_good else "MISSED"), ("plan_ranks", stayed, "")):
                count = f"{report.count} of {report.least}"
                rows.append([name, cost, way, count, f"{report.fill:.3f}", f"{report.wait:.4f}", verdict])
    title = f"{SAMPLES} samples, {RANKS} ranks, {BUDGET_TOKENS} tokens; least: no plan has fewer; wait: 1 is not at all"
    print_table(title, ["trace", "by", "", "steps of least", "fill", "wait", ""], rows)
    return all(row[-1] != "MISSED" for row in rows)


# Speed -------------------------------------------------------------------------------------------------------------------


def judge_speed() -> bool:
    """Prints by cost the seconds of large plans, and their ratio to sorting the same number of lengths. Returns True if
    planning is fast enough.
    """
    rows = []
    for cost, number in LARGE.items():
        say(f"{number:,} lengths by {cost}")
        lengths = draw("azure_llm_2023_conv", number)
        began = time.process_time()
        sorted(range(number), key=lengths.__getitem__)
        sorting = time.process_time() - began
        began = time.process_time()
        report = plan_all(lengths, ranks=64, budget=BUDGET_TOKENS, cost=COSTS[cost]).report
        seconds = time.process_time() - began
        verdict = "" if seconds <= MOST_SECONDS[cost] else "MISSED"
        row = [f"{number:,}", cost, f"{seconds:.1f} s", f"{seconds / sorting:.0f}"]
        rows.append([*row, f"{report.count} of {report.least}", f"{report.wait:.4f}", verdict])
    print_table("plan_all, 64 ranks", ["lengths", "by", "", "x sorting", "steps of least", "wait", ""], rows)
    return all(row[-1] != "MISSED" for row in rows)


# Beside others -----------------------------------------------------------------------------------------------------------


def measure_peers() -> dict[str, Any]:
    """Returns the results of all planners of the scoreboard, by where samples may go, planner and trace.

    The wait is by attention, as in the first table. Broken is what the kit finds wrong with the plan.
    """
    figures: dict[str, Any] = {"dealt out": {}, "stay": {}}
    draws = {name: deal(draw(name, SAMPLES), RANKS) for name in list_bundled_names()}
    for peer in scoreboard.PEERS:
        if peer.name == "the model":
            continue  # its plans are the same as ours, and take a minute each
        say(peer.name)
        folder = scoreboard.install(peer)
        command = [sys.executable, "-m", "odb_ref.conformance", "serve", "--planner", peer.planner]
        program = Program(command + ["--ranks"] * peer.has_ranks, "1", PATIENCE_S, scoreboard.list_paths(folder))
        for kind, way in (("plan_all", "dealt out"), ("plan_ranks", "stay")):
            if kind in peer.without.split(",") or (peer.has_ranks and kind == "plan_all"):
                continue
            entries = figures[way].setdefault(peer.name, {})
            for name, lengths in draws.items():
                question = {"kind": kind, "lengths": lengths, "terms": {"budget": BUDGET_TOKENS, "cost": COST}}
                try:
                    plans = read_plan(program.answer(question)).plans
                except OdbError as error:
                    entries[name] = {"refused": str(error)}
                    continue
                problem = decode(question, kind)
                count = max(map(len, plans))
                broken = find_faults(problem, plans)
                plans = [[*own, *[[]] * (count - len(own))] for own in plans]  # ranks with fewer steps wait
                entries[name] = {
                    "count": count,
                    "least": compute_least(problem),
                    "wait": compute_wait_of(problem, plans),
                    "broken": sorted(broken),
                }
        program.close()
    return figures


def print_peers(figures: dict[str, Any]) -> bool:
    """Prints a table for each way. Returns True if our plans broke nothing."""
    is_right = True
    for way, by_planner in figures.items():
        rows = []
        for planner, by_trace in by_planner.items():
            found = [entry for entry in by_trace.values() if "count" in entry]
            waits = [entry["wait"] for entry in found]
            broken = {
                name: sum(name in entry["broken"] for entry in found) for entry in found for name in entry["broken"]
            }
            broken |= {"refuses": len(by_trace) - len(found)} if len(found) < len(by_trace) else {}
            rows.append(
                [
                    planner,
                    f"{sum(entry['count'] for entry in found)} of {sum(entry['least'] for entry in found)}",
                    f"{sum(waits) / len(waits):.3f}" if waits else "",
                    f"{max(waits):.3f}" if waits else "",
                    ", ".join(f"{name} {number}" for name, number in sorted(broken.items())),
                ]
            )
            is_right &= not (planner.startswith("odb-ref") and broken)
        title = f"all traces, samples {way}: {SAMPLES} each, {RANKS} ranks; wait by attention"
        print_table(title, ["planner", "steps of least", "mean wait", "most", "breaks, in traces"], rows)
    return is_right


def run(_options: Namespace) -> bool:
    """Prints all tables. Returns True if our plans keep what is promised."""
    return all([judge_quality(), judge_speed(), print_peers(measure_peers())])
