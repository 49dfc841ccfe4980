"""`plan` beside verl's and TRL's own ways with known lengths: what each makes of what breaks jobs, how even it is, how fast.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_sim.inputs.lengths import load_lengths

from odb_ref.core.batching.known_lengths import plan
from odb_ref.core.errors import UsageError
from tests.bench.report import print_table

PEERS_PYTHON = os.environ.get("ODB_PEERS_PYTHON")
BUDGET_TOKENS = 16_384
RANKS = 4
SAMPLES_PER_RANK = 256
TRACES = ("azure_llm_2023_conv", "mm_mix_real", "sgd_dialogues")
Lengths = list[list[int]]
Plan = Sequence[Sequence[Sequence[int]]]


def compute_cost(tokens: int) -> int:
    """verl's estimate of what a sample of so many tokens costs: attention beside the rest, for a hidden size of 4,096."""
    return 24_576 * tokens + tokens**2


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
}


def draw(name: str) -> Lengths:
    """Returns lengths of `RANKS` ranks, drawn from a shipped trace; none beyond the budget."""
    lengths = [min(int(length), BUDGET_TOKENS) for length in load_lengths(name).tokens]
    generator = random.Random(name)
    return [generator.choices(lengths, k=SAMPLES_PER_RANK) for _ in range(RANKS)]


def run_ours(lengths: Lengths) -> Answer:
    """Plans all ranks here; the seconds are of one rank."""
    began = time.perf_counter()
    try:
        found = plan(lengths, budget_tokens=BUDGET_TOKENS, cost=compute_cost)
    except UsageError as error:
        return Answer(error=str(error))
    return Answer(plan=found, seconds=(time.perf_counter() - began) / len(lengths))


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
    """Returns the cost of all steps, each that of its most expensive rank, over the most that one rank's samples cost: no
    division can do better, and 1 means that nobody waits for a costlier step than that rank has anyway.
    """
    costs = [
        [sum(compute_cost(own[index]) for index in batch) for batch in batches]
        for own, batches in zip(lengths, found, strict=True)
    ]
    return sum(map(max, zip(*costs, strict=True))) / max(map(sum, costs))


def measure_plans(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns all figures."""
    draws = {name: draw(name) for name in TRACES}
    cases = CASES | draws
    say("ours")
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


def print_plans(figures: dict[str, Any]) -> bool:
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
        for name in TRACES
        for way, entry in figures[name].items()
    ]
    title = f"{RANKS} ranks, {SAMPLES_PER_RANK} samples each; cost of the steps over the costliest rank's samples; ms a rank"
    print_table(title, ["trace", "by", "cost", "ms", ""], rows)
    return all(" 0 samples lost" in figures[name]["ours"]["says"] for name in (*TRACES, *list(CASES)[:2]))
