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
        "world_size * KEPT_SHARE**before <= update_samples",
        "world_size * KEPT_SHARE**before < update_samples",
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


BY_A_STRANGER = (
    Defect(
        "a group of half the budget is left over",
        "batching/alignment",
        "2 * layout.compute_tokens(group) < budget_tokens",
        "2 * layout.compute_tokens(group) <= budget_tokens",
    ),
    Defect(
        "what is left of an order goes to 12 ranks at most",
        "batching/shards",
        "more = int(want >= low and spare > 0)",
        "more = int(want >= low and spare > 0 and len(shares) < 12)",
    ),
    Defect(
        "the last portion of an update has 100 places at most",
        "batching/updates",
        "portion = left if is_last else left",
        "portion = min(left, 100) if is_last else left",
    ),
    Defect(
        "the orders of rounds repeat after 128",
        "batching/order",
        "key = mix(mix(seed) ^ round_)",
        "key = mix(mix(seed) ^ round_ % 128)",
    ),
    Defect(
        "what a rank accepts is saved as agreed on",
        "resume",
        "agreed_tokens=state.agreed_tokens,\n        accepted",
        "agreed_tokens=min(state.agreed_tokens, state.accepted_tokens),\n        accepted",
    ),
    Defect(
        "a checkpoint passes one round at a time",
        "resume",
        "        while len(self._starts) > 1 and",
        "        if len(self._starts) > 1 and",
    ),
    Defect(
        "an urged rank may take one more step after a loss",
        "machine",
        "    limit = min(state.step_limit, state.taken_steps)\n",
        "    limit = min(state.step_limit, state.taken_steps + (state.is_urged and len(state.queue) > 1))\n",
    ),
    Defect(
        "what is collated may be trained on after a failure",
        "machine",
        "compute_failure(reports), state.planned_steps - len(state.plan))",
        "compute_failure(reports), state.planned_steps - len(state.plan) * (not state.is_collated))",
    ),
    Defect(
        "a quota begins again where nothing was carried",
        "resume",
        "        global_samples=start.global_samples,\n        agreed",
        "        global_samples=start.global_samples if start.carried else 0,\n        agreed",
    ),
    Defect(
        "limits shrink rounded up",
        "batching/budgets",
        "max(1, limit * agreed_tokens // budget_tokens)",
        "-(-limit * agreed_tokens // budget_tokens)",
    ),
    Defect(
        "a budget that was lowered never comes back",
        "machine",
        "accepted_tokens=compute_offered(event.tokens, config.budget_tokens))",
        "accepted_tokens=compute_offered(event.tokens, config.budget_tokens) % NONE or state.accepted_tokens)",
    ),
    Defect(
        "peers compare 100 samples",
        "peers",
        'item.supervised}" for item in window]',
        'item.supervised}" for item in window[:100]]',
    ),
    Defect(
        "no age is more than 12 rounds", "machine", "[-config.max_age_rounds :]", "[-min(config.max_age_rounds, 12) :]"
    ),
    Defect(
        "the step at the limit is delivered",
        "machine",
        "    return tuple([step for step in steps if step.number < state.step_limit])",
        "    return tuple([step for step in steps if step.number <= state.step_limit])",
    ),
    Defect(
        "beyond 40 rows no limit is looked at",
        "batching/grouping",
        "while limits and place < len(rooms) and not",
        "while limits and place < min(len(rooms), 40) and not",
    ),
    Defect("the padding of all groups is one", "batching/grouping", "begin, held = end, 0\n", "begin = end\n"),
    Defect(
        "the lowest rank that failed is the first by its digits",
        "exchange",
        "    for report in reports:\n        if report.cause:",
        "    for report in sorted(reports, key=lambda report: str(report.rank)):\n        if report.cause:",
    ),
    Defect(
        "the supervised tokens of 32 ranks are summed",
        "exchange",
        "sum([count.supervised for count in step])",
        "sum([count.supervised for count in step[:32]])",
    ),
    Defect(
        "configurations are compared in two rounds",
        "machine",
        "or agreement.fingerprint_min != agreement.fingerprint_max\n",
        "or (state.round < 2 and agreement.fingerprint_min != agreement.fingerprint_max)\n",
    ),
    Defect(
        "a rank without a share draws from the beginning",
        "resume",
        "    if start.draw.end:\n",
        "    if start.draw.count:\n",
    ),
)
"""By somebody who had not read `odb-ref verify`; ``python -m tests.mutants.fresh`` runs them first."""


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
    for defect in (*BY_A_STRANGER, *DEFECTS):
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
