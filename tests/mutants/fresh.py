"""Defects that `odb-ref verify --core` was not made for: beyond 64 groups, on rank 33, at the end of a shared order.

``python -m tests.mutants.fresh`` plants each in a copy of the core, and prints which stage refutes it first, and when.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from odb_sim.verify.core_copy import refute_core

import odb_ref.core

CORE = Path(odb_ref.core.__file__).parent


@dataclass(frozen=True, slots=True)
class Defect:
    """A text of a module of the core, and what stands there instead."""

    name: str
    module: str
    old: str
    new: str


DEFECTS = (
    Defect(
        "no more than 96 groups are made by splitting",
        "batching/alignment",
        "len(heap) < target and",
        "len(heap) < min(target, 96) and",
    ),
    Defect(
        "beyond 100 groups the first are chosen",
        "batching/alignment",
        "not is_due(groups[i], due_before), fills[i]",
        "not is_due(groups[i], due_before), fills[i] if len(groups) < 100 else i",
    ),
    Defect(
        "a friendly group is never found among more than 256",
        "batching/grouping",
        "begin + reach < len(ordered):\n            reach",
        "begin + reach < len(ordered) and reach < 256:\n            reach",
    ),
    Defect(
        "attention is linear beyond 2,000 tokens",
        "batching/cost",
        "return tokens + tokens**2 //",
        "return tokens + tokens * min(tokens, 2_000) //",
    ),
    Defect(
        "a large group is split below its middle",
        "batching/sizes",
        "middle = (size + 1) // 2",
        "middle = (size + (size < 40)) // 2",
    ),
    Defect(
        "a limit does not shrink to one",
        "batching/budgets",
        "max(1, limit * agreed_tokens // budget_tokens)",
        "limit * agreed_tokens // budget_tokens or limit",
    ),
    Defect("what is left of an order goes to the first", "batching/shards", "want >= low and spare > 0", "spare > 0"),
    Defect(
        "what is carried counts rounded down",
        "batching/shards",
        "-(-samples * carried_tokens // tokens)",
        "(samples * carried_tokens // tokens)",
    ),
    Defect(
        "an update that fills its portions has one fewer",
        "batching/updates",
        "(update_samples // world_size).bit_length()",
        "((update_samples - 1) // world_size).bit_length()",
    ),
    Defect(
        "loads are rounded up",
        "batching/updates",
        "[load * places // tokens for load in loads]",
        "[-(-load * places // tokens) for load in loads]",
    ),
    Defect("the hash of an order has 63 bits", "batching/order", "(1 << 64) - 1", "(1 << 63) - 1"),
    Defect(
        "the lowest age is two rounds", "machine", "[-config.max_age_rounds :]", "[-max(2, config.max_age_rounds) :]"
    ),
    Defect(
        "what is queued is trained on after a loss",
        "machine",
        "limit = min(state.step_limit, state.taken_steps)",
        "limit = min(state.step_limit, state.taken_steps + len(state.queue))",
    ),
    Defect("a checkpoint forgets its round a step late", "resume", "planned_steps <= number", "planned_steps < number"),
    Defect(
        "a row of odd cost is split early",
        "batching/layouts",
        "(self.compute_cost(group, cost) + 1) // 2",
        "self.compute_cost(group, cost) // 2",
    ),
    Defect("a shared window of rows is halved rounded down", "batching/layouts", "(size + 1) // 2", "size // 2"),
    Defect(
        "what ranks beyond 32 offer is left out",
        "offer",
        "tuple(map(max, *wires)) if",
        "tuple(map(max, *wires[:32])) if",
    ),
    Defect(
        "a quota is met one sample late",
        "rounds",
        "state.global_samples >= config.quota_samples",
        "state.global_samples > config.quota_samples",
    ),
    Defect(
        "the first schedule is asked about its second step",
        "batching/budgets",
        "first.ask(0, first.tokens)",
        "first.ask(1, first.tokens)",
    ),
)


def plant(defect: Defect, folder: Path) -> Path:
    """A copy of the core with the defect in it.

    Raises: AssertionError when the text is not there, or more than once.
    """
    core = Path(shutil.copytree(CORE, folder / "core", ignore=shutil.ignore_patterns("__pycache__")))
    path = core / f"{defect.module}.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(defect.old) == 1, defect.name
    path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
    return core


def refute(defect: Defect) -> Iterator[tuple[str, str]]:
    """The stages that refute it: the first alone, and what was not judged before it."""
    with tempfile.TemporaryDirectory() as folder:
        for stage in refute_core(plant(defect, Path(folder))):
            if stage.findings:
                yield stage.name, f"{stage.findings[0].property}: {stage.findings[0].detail}"
                return
            if stage.skipped:
                yield stage.name, f"not judged: {stage.skipped}"


def main() -> int:
    """Prints the table; 1 when one survives."""
    survivors = 0
    for defect in DEFECTS:
        if sys.argv[1:] and not any(word in defect.name for word in sys.argv[1:]):
            continue
        began = time.perf_counter()
        said = list(refute(defect))
        is_refuted = bool(said) and not said[-1][1].startswith("not judged")
        survivors += not is_refuted
        stage, what = said[-1] if said else ("", "")
        verdict = f"refuted by {stage}" if is_refuted else "SURVIVES"
        print(f"{verdict:<24} {time.perf_counter() - began:6.1f} s  {defect.name}: {what[:100]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
