"""Subtle defects, planted in a copy of the repository one by one: which test of the fast loop catches each, and how fast.

``python -m tests.mutants.planted`` prints the table; ``--only TEXT`` takes those whose name holds it. Other tables have the
defects of a protocol (`table`) and those that show deep in a run only (`deep`); these are slips of the hand: a sign, a bound, a
wrong name in a message, a number cut to so many bits, one field of several forgotten, in the core and in the trace checker.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("odb_ref", "simulator", "tests", "spec", "examples", "pyproject.toml")
OF_THE_CORE = ("tests/core/test_wide_numbers.py", "tests/core", "tests/spec")
OF_THE_ADAPTER = ("tests/torch/test_budget.py",)
OF_THE_SIMULATOR = ("tests/simulator/test_budgets.py",)
OF_THE_TRACE = ("tests/trace/test_slips.py", "tests/spec/test_r15_budgets.py", "tests/core", "tests/trace")
"""What is made for such slips first."""
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A defect: ``old``, which occurs once in the file, becomes ``new``."""

    name: str
    path: str
    old: str
    new: str

    @property
    def tests(self) -> tuple[str, ...]:
        """Where a test of the fast loop must fail."""
        for place, tests in (("/trace/", OF_THE_TRACE), ("/torch/", OF_THE_ADAPTER), ("odb_sim/", OF_THE_SIMULATOR)):
            if place in self.path:
                return tests
        return OF_THE_CORE


def _core(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/core/{module.replace('.', '/')}.py", old=old, new=new)


def _torch(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/torch/{module}.py", old=old, new=new)


def _simulator(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"simulator/odb_sim/{module}.py", old=old, new=new)


def _trace(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/trace/{module}.py", old=old, new=new)


PLANTED = (
    _core("an invariant names the rank after", "invariants", "rank {config.rank} ", "rank {config.rank + 1} "),
    _core(
        "a take may change the outbox as it likes",
        "invariants",
        "(after.outbox is before.outbox or after.outbox == before.outbox[delivered:])",
        "delivered >= 0",
    ),
    _core(
        "tokens are summed in 32 bits",
        "exchange",
        "sum([count.tokens for count in step])",
        "sum([count.tokens for count in step]) & 0xFFFFFFFF",
    ),
    _core(
        "what is carried is in order up to 256 only",
        "batching.alignment",
        'key=attrgetter("position"))',
        "key=lambda sample: min(sample.position, 256))",
    ),
    _core(
        "groups are chosen by cost",
        "batching.alignment",
        "(not is_due(groups[i], due_before), fills[i])",
        "(not is_due(groups[i], due_before), ranks[i])",
    ),
    _core(
        "a row is halved by its tokens",
        "batching.layouts",
        "accumulate(cost.of_tokens(sample.length) for sample in group[:-2])",
        "accumulate(sample.length for sample in group[:-2])",
    ),
    # Budgets that change.
    _core(
        "a round is grouped by what its own rank accepts",
        "rounds",
        "config.compute_round_bounds(state.agreed_tokens)",
        "config.compute_round_bounds(state.accepted_tokens)",
    ),
    _core(
        "limits stay while the budget shrinks",
        "batching.budgets",
        "max(1, limit * agreed_tokens // budget_tokens)",
        "limit",
    ),
    _core("a resumed rank forgets what it accepts", "resume", "        accepted_tokens=start.accepted_tokens,\n", ""),
    _core("a resumed round is grouped anew", "resume", "        agreed_tokens=start.agreed_tokens,\n", ""),
    _core(
        "a budget is accepted for one round only",
        "machine",
        "        agreed_tokens=agreement.budget_min,\n",
        "        agreed_tokens=agreement.budget_min,\n        accepted_tokens=NONE,\n",
    ),
    _core(
        "a budget of one token less than the largest is the largest",
        "batching.budgets",
        "return tokens if tokens < budget_tokens else NONE",
        "return tokens if tokens < budget_tokens - 1 else NONE",
    ),
    _core(
        "a rank that resumed never accepts more",
        "batching.budgets",
        "NONE if self.schedule is None else self.scheduled_tokens",
        "self.scheduled_tokens",
    ),
    _core(
        "a schedule forgets the epochs before",
        "batching.budgets",
        "self.steps_before + planned_steps, min",
        "planned_steps, min",
    ),
    _core(
        "a schedule is told the largest budget, not the one in force",
        "batching.budgets",
        "min(agreed_tokens, self.budget_tokens)",
        "self.budget_tokens",
    ),
    _torch(
        "a schedule goes by the rank's own steps",
        "backend/driver",
        "self._acceptance.ask(state.planned_steps,",
        "self._acceptance.ask(state.taken_steps,",
    ),
    _torch(
        "a schedule is asked after the offer",
        "backend/driver",
        "                    self._ask_schedule()\n"
        "                    planned = self._make_round_note(effects)\n"
        "                self._perform(effects, planned, is_answer=entry.is_answered)\n",
        "                    planned = self._make_round_note(effects)\n"
        "                    self._ask_schedule()\n"
        "                self._perform(effects, planned, is_answer=entry.is_answered)\n",
    ),
    _torch(
        "a lowered budget ends with its epoch", "plan/start", "told_tokens=self.accepted_tokens", "told_tokens=NONE"
    ),
    _torch(
        "a saved round forgets the budget of its groups",
        "plan/state",
        '_decode_tokens(more.get("agreed_tokens", NONE))',
        "NONE",
    ),
    _torch(
        "a saved round forgets what was accepted",
        "plan/state",
        '_decode_tokens(more.get("accepted_tokens", NONE))',
        "NONE",
    ),
    _torch(
        "a loaded state forgets what its rank accepts",
        "epochs",
        "self._accepted_tokens = min(accepted, default=None)",
        "self._accepted_tokens = None",
    ),
    _torch(
        "a schedule begins anew with every epoch",
        "plan/start",
        "steps_before=self.steps_before,\n        )\n",
        "steps_before=0,\n        )\n",
    ),
    _simulator(
        "a schedule goes by the rank's own steps, in events",
        "engine/rank",
        "self._acceptance.ask(state.planned_steps,",
        "self._acceptance.ask(state.taken_steps,",
    ),
    _simulator(
        "a simulated budget holds at once",
        "engine/rounds",
        "        self.agreed_tokens = self._accepted_tokens\n        self._acceptance = self._acceptance.ask",
        "        self._acceptance = self._acceptance.ask",
    ),
    _trace(
        "a budget is judged by what its own rank accepts",
        "check/offers",
        "shrink(self._settings, self._agreed_tokens)",
        "shrink(self._settings, self.accepted_tokens)",
    ),
    _trace(
        "limits are judged as if the budget had not changed",
        "check/offers",
        "max(1, limit * max(0, tokens) // whole)",
        "limit",
    ),
    _trace(
        "what a rank offers to accept may be anything",
        "check/offers",
        "what if offer.budget_min != seen.accepted_tokens else",
        "what if False else",
    ),
    _core(
        "the third resource is not looked at",
        "batching.grouping",
        "any(map(gt, sample.costs, room))",
        "any(map(gt, sample.costs[:2], room))",
    ),
    _core(
        "the invariant looks at two resources",
        "invariants",
        "zip(*(sample.costs for sample in group), strict=True)",
        "zip(*(sample.costs[:2] for sample in group), strict=True)",
    ),
    _core(
        "a ramp of more than 8 rounds has the fingerprint of 8",
        "config",
        "            item.name: value\n",
        '            item.name: min(value, 8) if item.name == "ramp_rounds" else value\n',
    ),
    _core(
        "the position read last counts as taken",
        "resume",
        "if position >= self.start.read_samples",
        "if position > self.start.read_samples",
    ),
    _core(
        "a stand-in's steps are of the next round",
        "summary",
        "Step(number, summary.round - 1,",
        "Step(number, summary.round,",
    ),
    _core(
        "the cause of a stop counts one step more",
        "machine",
        "after {agreement.stop_step} steps",
        "after {agreement.stop_step + 1} steps",
    ),
    _core(
        "reports of the ranks in any order will do",
        "machine",
        "if [report.rank for report in reports] != list(range(config.world_size)):",
        "if {report.rank for report in reports} != set(range(config.world_size)):",
    ),
    _core(
        "a window of a ramp is never less than 2",
        "config",
        "return max(1, self.window_samples >>",
        "return max(min(2, self.window_samples), self.window_samples >>",
    ),
    _core(
        "the agreed round is not compared",
        "machine",
        "if agreement.round_min != state.round:",
        "if agreement.round_min > state.round:",
    ),
    _core(
        "a resumed epoch has taken what it carries",
        "resume",
        "taken_samples=start.read_samples - len(carried),",
        "taken_samples=start.read_samples,",
    ),
    _core(
        "windows near the end of a common order stay as large",
        "batching/layouts",
        "return min(size, max(left, (size + 1) // 2))",
        "return size",
    ),
    _core(
        "half a window is rounded down",
        "batching/layouts",
        "return min(size, max(left, (size + 1) // 2))",
        "return min(size, max(left, size // 2))",
    ),
    _core(
        "what is left for each rank is what is left for all",
        "config",
        "-(-((self.shared_samples or 0) - drawn) // self.world_size)",
        "(self.shared_samples or 0) - drawn",
    ),
    _core(
        "the oldest samples of a row are not the longest first",
        "batching/grouping",
        '        group.sort(key=attrgetter("length"), reverse=True)\n',
        "",
    ),
    _trace(
        "windows of packed rows stay as large",
        "check/draws",
        "size = size if for_each >= size else max(for_each, size - size // 2)",
        "size = max(for_each, size)",
    ),
    _trace(
        "the oldest are packed as all others are",
        "check/groups",
        "return line[:count] + sorted(line[count:],",
        "return sorted(line,",
    ),
    _trace(
        "of a due group one sample later", "check/groups", "sum(any(row[1] < due_before", "sum(any(row[1] <= due_before"
    ),
    _trace(
        "a window whose first sample is due has no due group",
        "check/groups",
        "min(map(itemgetter(1), rows)) < due_before",
        "max(map(itemgetter(1), rows)) < due_before",
    ),
    _trace(
        "the third number of a count is not summed",
        "check/exchanges",
        "total[place] += value",
        "total[place] += value * (place != 2)",
    ),
    _trace(
        "a resource is called by the number after",
        "check/groups",
        "resource {place - 4}, over",
        "resource {place - 3}, over",
    ),
    _trace(
        "the last resource has no limit",
        "check/groups",
        "enumerate(settings.limits, 4)",
        "enumerate(settings.limits[:2], 4)",
    ),
    _trace(
        "reports are compared in the order of their coming",
        "check/exchanges",
        "for _, item in sorted(it.posted.items())",
        "for _, item in it.posted.items()",
    ),
    _trace(
        "a stop is believed one step late",
        "check/outcomes",
        "finish.step_limit <= agreement.stop_step",
        "finish.step_limit <= agreement.stop_step + 1",
    ),
    _trace(
        "a quota is met one sample late",
        "check/rounds",
        "if total >= self._quota_samples:",
        "if total > self._quota_samples:",
    ),
    _trace(
        "a window may be read in part",
        "check/offers",
        "if new == asked == wanted or",
        "if new <= asked == wanted or",
    ),
    _trace(
        "whose failure it is does not matter",
        "check/offers",
        "offer.failed_rank == (seen.rank if seen.has_failed else NONE)",
        "(offer.failed_rank != NONE) == seen.has_failed",
    ),
    _trace(
        "an agreement without the offer of the last rank will do",
        "check/exchanges",
        "        if len(exchange.posted) == self._world_size:\n            return False\n",
        "        if len(exchange.posted) >= self._world_size - 1:\n            return False\n",
    ),
    _trace("a time has three digits", "format", "round(time_s, 6)", "round(time_s, 3)"),
)


def plant(planted: Planted, folder: Path) -> None:
    """Makes a copy of the repository with the defect in it.

    Raises: ValueError when the text to change is not there once.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(source, folder / name)
    path = folder / planted.path
    text = path.read_text()
    if text.count(planted.old) != 1:
        raise ValueError(
            f"{planted.name!r}: its text occurs {text.count(planted.old)} times in {planted.path}, not once"
        )
    path.write_text(text.replace(planted.old, planted.new))


def catch(planted: Planted) -> tuple[str, float]:
    """The test that fails first, empty when the defect survives, and after how many seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(planted, folder)
        began = time.perf_counter()
        path = os.pathsep.join([str(folder), str(folder / "simulator")])
        arguments = ["-x", "-rfE", "-p", "no:cacheprovider", "-m", "not slow", "--tb=no", *planted.tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        seconds = time.perf_counter() - began
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S+/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1], seconds
    return "" if done.returncode == 0 else f"pytest ends with {done.returncode}", seconds


def main() -> int:
    """Prints the table; 1 when a defect survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="defects whose name holds it")
    chosen = [planted for planted in PLANTED if parser.parse_args().only in planted.name]
    print("| defect | in | caught by | after |\n|---|---|---|--:|")
    survivors = 0
    for planted in chosen:
        caught, seconds = catch(planted)
        survivors += not caught
        print(f"| {planted.name} | `{planted.path}` | {caught or 'SURVIVES'} | {seconds:.0f} s |", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
