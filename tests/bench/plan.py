"""`odb_ref.plan` on every shipped trace, beside verl and TRL: how many steps, how long ranks wait for each other, how fast.

Each trace is dealt out to eight ranks, and planned where it lies, on eight ranks with as many samples each; by tokens,
and by the cost of attention. Where samples are dealt out, figures are held to what is promised: the least count there
can be, a wait of at most 1.02 by tokens and 1.03 by attention. What large plans take is also said in times of sorting
as many lengths.

verl and TRL want other versions than this project, so they run in an environment of their own, whose Python is named by
``ODB_PEERS_PYTHON`` (``python -m venv peers && peers/bin/pip install verl trl``). Without it ours stands alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.core.errors import UsageError
from odb_ref.plan import PlanReport, attention, plan_all, plan_ranks
from tests.bench.report import print_table

PEERS_PYTHON = os.environ.get("ODB_PEERS_PYTHON")
BUDGET_TOKENS = 16_384
RANKS = 8
SAMPLES = 2_048
MOST_WAIT = {"tokens": 1.02, "attention": 1.03}
COSTS = {"tokens": None, "attention": attention(hidden_size=4_096)}
LARGE = {"tokens": 1_000_000, "attention": 100_000}
"""How many lengths are planned at once to measure the speed."""
MOST_SECONDS = {"tokens": 20.0, "attention": 5.0}
"""Of the processor, not by the clock: plans are made by one thread, and machines are busy."""
PEER_RANKS = 4
PEER_TRACES = ("azure_llm_2023_conv", "mm_mix_real", "sgd_dialogues")
Lengths = list[list[int]]
Plan = Sequence[Sequence[Sequence[int]]]


def draw(name: str, number: int) -> list[int]:
    """Returns lengths drawn from a shipped trace, none beyond the budget: without repetition, unless there are too
    few."""
    lengths = [min(int(length), BUDGET_TOKENS) for length in load_lengths(name).tokens]
    generator = random.Random(name)
    return generator.sample(lengths, number) if number <= len(lengths) else generator.choices(lengths, k=number)


def deal(lengths: list[int], ranks: int) -> Lengths:
    """Returns the lengths of each rank, as a sampler deals them out."""
    return [lengths[rank::ranks] for rank in range(ranks)]


# Quality -----------------------------------------------------------------------------------------------------------------


def measure_quality(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what each way of planning makes of each trace, by trace, cost and way."""
    figures: dict[str, Any] = {}
    for name in list_bundled_names():
        say(name)
        lengths = draw(name, SAMPLES)
        for cost, function in COSTS.items():
            dealt = plan_all(lengths, ranks=RANKS, budget=BUDGET_TOKENS, cost=function).report
            stayed = plan_ranks(deal(lengths, RANKS), budget=BUDGET_TOKENS, cost=function).report
            figures.setdefault(name, {})[cost] = {"plan_all": asdict(dealt), "plan_ranks": asdict(stayed)}
    return figures


def is_good(report: dict[str, Any], cost: str) -> bool:
    """True when samples that are dealt out make as few steps, and wait as little, as is promised."""
    return bool(report["count"] == report["least"] and report["wait"] <= MOST_WAIT[cost])


def print_quality(figures: dict[str, Any]) -> bool:
    """Prints the table; True when it is good."""
    rows = []
    for name, by_cost in figures.items():
        for cost, by_way in by_cost.items():
            for way, report in by_way.items():
                verdict = ("" if is_good(report, cost) else "MISSED") if way == "plan_all" else ""
                count = f"{report['count']} of {report['least']}"
                rows.append([name, cost, way, count, f"{report['fill']:.3f}", f"{report['wait']:.4f}", verdict])
    title = f"{SAMPLES} samples, {RANKS} ranks, {BUDGET_TOKENS} tokens; least: no plan has fewer; wait: 1 is not at all"
    print_table(title, ["trace", "by", "", "steps of least", "fill", "wait", ""], rows)
    return all(is_good(by_way["plan_all"], cost) for by_cost in figures.values() for cost, by_way in by_cost.items())


# Speed -------------------------------------------------------------------------------------------------------------------


def measure_speed(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the seconds of large plans, and how many times what sorting as many lengths takes, by cost."""
    figures = {}
    for cost, number in LARGE.items():
        say(f"{number:,} lengths by {cost}")
        lengths = draw("azure_llm_2023_conv", number)
        began = time.process_time()
        sorted(range(number), key=lengths.__getitem__)
        sorting = time.process_time() - began
        began = time.process_time()
        report: PlanReport = plan_all(lengths, ranks=64, budget=BUDGET_TOKENS, cost=COSTS[cost]).report
        seconds = time.process_time() - began
        figures[cost] = {"lengths": number, "seconds": seconds, "sorts": seconds / sorting, **asdict(report)}
    return figures


def print_speed(figures: dict[str, Any]) -> bool:
    """Prints the table; True when it is fast enough."""
    rows = [
        [
            f"{entry['lengths']:,}",
            cost,
            f"{entry['seconds']:.1f} s",
            f"{entry['sorts']:.0f}",
            f"{entry['count']} of {entry['least']}",
            f"{entry['wait']:.4f}",
            "" if entry["seconds"] <= MOST_SECONDS[cost] else "MISSED",
        ]
        for cost, entry in figures.items()
    ]
    print_table("plan_all, 64 ranks", ["lengths", "by", "", "x sorting", "steps of least", "wait", ""], rows)
    return all(entry["seconds"] <= MOST_SECONDS[cost] for cost, entry in figures.items())


# Beside others -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What one way made of one case."""

    plan: Plan = ()
    error: str = ""
    seconds: float = 0.0


CASES: dict[str, Lengths] = {
    "a rank has fewer samples than micro-batches": [[16_000, 16_000, 16_000], [500]],
    "no balanced division keeps the cap": [[9_000, 9_000, 9_000, 5_000], [8_000, 8_000, 8_000, 8_000]],
    "a sample is longer than the cap": [[20_000, 100], [100, 100]],
    "a sample is as long as the cap": [[16_384, *[3_000] * 6], [16_384, 16_384, 16_384]],
}


def run_ours(lengths: Lengths) -> Answer:
    """Plans all ranks here; the seconds are of one rank."""
    began = time.perf_counter()
    try:
        found = plan_ranks(lengths, budget=BUDGET_TOKENS, cost=COSTS["attention"])
    except UsageError as error:
        return Answer(error=str(error))
    seconds = (time.perf_counter() - began) / len(lengths)
    return Answer(plan=[rank.micro_batches for rank in found.ranks], seconds=seconds)


def run_verl(cases: Sequence[Lengths]) -> list[Answer]:
    """Runs the real package in real gloo ranks, for each case anew where one has failed."""
    answers: list[Answer] = []
    while len(answers) < len(cases):
        request = {"budget_tokens": BUDGET_TOKENS, "cases": cases[len(answers) :]}
        by_rank = _ask("plan_peer.py", request)
        for found in zip(*by_rank, strict=False):
            errors = [item["error"] for item in found if "error" in item]
            seconds = max((item.get("seconds", 0.0) for item in found), default=0.0)
            answers.append(
                Answer(error=errors[0]) if errors else Answer([item["micro_batches"] for item in found], "", seconds)
            )
    return answers


def count_tokens_trl_keeps(lengths: list[int]) -> int:
    """Returns how many tokens TRL's packing keeps of samples of these lengths."""
    request = {"budget_tokens": BUDGET_TOKENS, "lengths": lengths}
    return int(_ask("plan_trl.py", request))


def _ask(script: str, request: dict[str, Any]) -> Any:
    """Returns what a script answers, run by the peers' Python."""
    assert PEERS_PYTHON is not None
    done = subprocess.run(
        [PEERS_PYTHON, str(Path(__file__).with_name(script))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{script} failed in {PEERS_PYTHON}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def describe(lengths: Lengths, answer: Answer) -> str:
    """Returns in words what became of a case."""
    if answer.error:
        return f"refused: {answer.error[:70]}"
    tokens = max(sum(lengths[rank][index] for index in batch) for rank, own in enumerate(answer.plan) for batch in own)
    lost = sum(map(len, lengths)) - sum(len(batch) for own in answer.plan for batch in own)
    return f"{len(answer.plan[0])} micro-batches, largest {tokens:,} tokens, {lost} samples lost"


def compute_unevenness(lengths: Lengths, found: Plan) -> float:
    """Returns the cost of all steps, each that of its most expensive rank, over the most that one rank's samples cost:
    no
    division can do better, and 1 means that nobody waits for a costlier step than that rank has anyway.
    """
    cost = attention(hidden_size=4_096)
    costs = [
        [sum(cost(own[index]) for index in batch) for batch in batches]
        for own, batches in zip(lengths, found, strict=True)
    ]
    return sum(map(max, zip(*costs, strict=True))) / max(map(sum, costs))


def measure_peers(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what ours, verl and TRL make of the cases, and of traces where samples stay on their ranks."""
    draws = {name: deal(draw(name, 256 * PEER_RANKS), PEER_RANKS) for name in PEER_TRACES}
    cases = CASES | draws
    answers: dict[str, list[Answer]] = {"ours": [run_ours(lengths) for lengths in cases.values()]}
    if PEERS_PYTHON is not None:
        say("verl")
        answers["verl"] = [item for lengths in CASES.values() for item in run_verl([lengths])] + run_verl(
            [*draws.values()]
        )
    figures: dict[str, Any] = {}
    for way, found in answers.items():
        for (name, lengths), answer in zip(cases.items(), found, strict=True):
            entry: dict[str, Any] = {"says": describe(lengths, answer), "seconds": answer.seconds}
            if name in draws and not answer.error:
                entry["unevenness"] = compute_unevenness(lengths, answer.plan)
            figures.setdefault(name, {})[way] = entry
    if PEERS_PYTHON is not None:
        say("trl")
        kept = count_tokens_trl_keeps([20_000, 100])
        figures["a sample is longer than the cap"]["trl"] = {"says": f"keeps {kept:,} of 20,100 tokens"}
    return figures


def print_peers(figures: dict[str, Any]) -> bool:
    """Prints both tables; True when ours kept what it promises."""
    for name, lengths in CASES.items():
        print(f"\n{name}: {lengths}")
        for way, entry in figures[name].items():
            print(f"  {way}: {entry['says']}")
    rows = [
        [
            name if way == "ours" else "",
            way,
            f"{entry.get('unevenness', 0):.3f}",
            f"{1e3 * entry['seconds']:.1f}",
            entry["says"],
        ]
        for name in PEER_TRACES
        for way, entry in figures[name].items()
    ]
    title = f"{PEER_RANKS} ranks, 256 samples each; cost of the steps over the costliest rank's samples; ms a rank"
    print_table(title, ["trace", "by", "cost", "ms", ""], rows)
    kept = [name for name in (*PEER_TRACES, *CASES) if name != "a sample is longer than the cap"]
    return all(" 0 samples lost" in figures[name]["ours"]["says"] for name in kept)


def measure_plans(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns all figures."""
    return {"quality": measure_quality(say), "speed": measure_speed(say), "peers": measure_peers(say)}


def print_plans(figures: dict[str, Any]) -> bool:
    """Prints all tables; True when ours kept what it promises."""
    verdicts = [
        print_quality(figures["quality"]),
        print_speed(figures["speed"]),
        print_peers(figures["peers"]),
    ]
    return all(verdicts)
