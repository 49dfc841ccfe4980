"""Subtle defects, planted in a copy of the repository one by one: which test of the fast loop catches each, and how fast.

``python -m tests.mutants.planted`` prints the table; ``--only TEXT`` takes those whose name holds it, ``--by-vectors`` asks the
conformance kit alone, of the planner and of the pure rules of the core. Other tables have the
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
OF_THE_ADAPTER = ("tests/torch/test_budget.py", "tests/torch/test_updates.py")
OF_THE_EXCHANGE = ("tests/torch/test_identity.py", "tests/torch/test_mesh.py")
OF_THE_SIMULATOR = ("tests/simulator/test_budgets.py",)
OF_THE_PLANNER = ("tests/plan", "tests/conformance")
OF_THE_TRACE = ("tests/trace/test_slips.py", "tests/spec/test_r15_budgets.py", "tests/core", "tests/trace")
"""What is made for such slips first."""
LIMIT_S = 900
PURE = (
    "odb_ref/plan/",
    *(
        f"odb_ref/core/batching/{name}.py"
        for name in ("alignment", "layouts", "grouping", "rules", "shards", "weighting")
    ),
    "odb_ref/core/offer.py",
)
"""What the conformance cases are about."""


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
        for place, tests in (
            ("ref/plan/", OF_THE_PLANNER),
            ("/trace/", OF_THE_TRACE),
            ("/torch/exchange/", OF_THE_EXCHANGE),
            ("/torch/", OF_THE_ADAPTER),
            ("odb_sim/", OF_THE_SIMULATOR),
        ):
            if place in self.path:
                return tests
        return OF_THE_CORE


def _core(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/core/{module.replace('.', '/')}.py", old=old, new=new)


def _plan(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/plan/{module}.py", old=old, new=new)


def _torch(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/torch/{module}.py", old=old, new=new)


def _simulator(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"simulator/odb_sim/{module}.py", old=old, new=new)


def _trace(name: str, module: str, old: str, new: str) -> Planted:
    return Planted(name=name, path=f"odb_ref/trace/{module}.py", old=old, new=new)


PLANTED = (
    _core("an invariant names the rank after", "invariants", "rank {config.rank} ", "rank {config.rank + 1} "),
    _core(
        "a take may change the released steps as it likes",
        "invariants",
        "(after.released is before.released or after.released == before.released[delivered:])",
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
    _core("weights are for one rank", "batching.weighting", "world_size / update.supervised", "1 / update.supervised"),
    _core(
        "a sum weighs as a mean does",
        "batching.weighting",
        "(local.supervised if self.reduction is LossReduction.MEAN else 1)",
        "local.supervised",
    ),
    _core(
        "a rest forgets what was carried",
        "resume",
        "(*self.start.carried, *range(",
        "(*self.start.carried[1:], *range(",
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
        "loaders of one line are not told apart by what they read",
        "exchange/identity",
        "facts = list_facts(self._data, is_sized=is_common) if is_told else {}",
        "facts: dict[str, str] = {}",
    ),
    _torch(
        "a loader that began without a process group goes on under one",
        "exchange/identity",
        "not (self._has_begun or self._generation.world is not None)",
        "self._generation.world is None",
    ),
    _torch(
        "why an earlier generation ended is told to the next",
        "exchange/rendezvous",
        "return end if self._own.endpoint.secret in come else None",
        "return end if come else None",
    ),
    _torch("a part of the job is taken for all of it", "exchange/roster", "if size < job_size:", "if size < 1:"),
    _torch(
        "the weight of an update is that of a micro-step",
        "epoch/cursor",
        "self._sum_update(self._find_round(update.start).steps)",
        "self._sum_update(self._find_round(update.start).steps[:1])",
    ),
    _torch(
        "an update that is resumed forgets what was trained on of it",
        "epoch/cursor",
        "self._start.gone_counts if is_resumed else ZERO_COUNTS)",
        "ZERO_COUNTS)",
    ),
    _torch(
        "a schedule goes by the rank's own steps",
        "epoch/driver",
        "self._acceptance.ask(self.state.planned_steps,",
        "self._acceptance.ask(self.state.taken_steps,",
    ),
    _torch(
        "a schedule is asked after the offer",
        "epoch/driver",
        "            self._ask_schedule()\n            self._note_round(effects)\n        self._perform(effects)\n",
        "            self._note_round(effects)\n        self._perform(effects)\n"
        "        if isinstance(event, Counted):\n            self._ask_schedule()\n",
    ),
    _torch(
        "a lowered budget ends with its epoch", "plan/start", "told_tokens=self.accepted_tokens", "told_tokens=NONE"
    ),
    _torch(
        "a saved round forgets the budget of its groups",
        "plan/state",
        "for item in fields(value)}",
        'for item in fields(value) if item.name != "agreed_tokens"}',
    ),
    _torch(
        "a saved round forgets what was accepted",
        "plan/state",
        "for name, field in data.items()}",
        'for name, field in data.items() if kind.__name__ != "RoundStart" or name != "accepted_tokens"}',
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
        "check/own/offers",
        "shrink(self._settings, self._agreed_tokens)",
        "shrink(self._settings, self.accepted_tokens)",
    ),
    _trace(
        "limits are judged as if the budget had not changed",
        "check/own/offers",
        "max(1, limit * max(0, tokens) // whole)",
        "limit",
    ),
    _trace(
        "what a rank offers to accept may be anything",
        "check/own/offers",
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
        "the cause of a stop counts one step more",
        "machine",
        "after {agreement.stop_step} steps",
        "after {agreement.stop_step + 1} steps",
    ),
    _core(
        "reports of the ranks in any order will do",
        "machine",
        "if [(report.rank, report.peer) for report in reports] != expected:",
        "if {(report.rank, report.peer) for report in reports} != set(expected):",
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
        "check/own/draws",
        "size = size if for_each >= size else max(for_each, size - size // 2)",
        "size = max(for_each, size)",
    ),
    _trace(
        "the oldest are packed as all others are",
        "check/own/groups",
        "return line[:count] + sorted(line[count:],",
        "return sorted(line,",
    ),
    _trace(
        "of a due group one sample later",
        "check/own/groups",
        "sum(any(row[1] < due_before",
        "sum(any(row[1] <= due_before",
    ),
    _trace(
        "a window whose first sample is due has no due group",
        "check/own/groups",
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
        "check/own/groups",
        "resource {place - 4}, over",
        "resource {place - 3}, over",
    ),
    _trace(
        "the last resource has no limit",
        "check/own/groups",
        "enumerate(settings.limits, 4)",
        "enumerate(settings.limits[:2], 4)",
    ),
    _trace(
        "reports are compared in the order of their coming",
        "check/exchanges",
        "for _, item in sorted(exchange.posted.items())",
        "for _, item in exchange.posted.items()",
    ),
    _trace(
        "a stop is believed one step late",
        "check/rank",
        "self.output.limit(agreement.stop_step)",
        "self.output.limit(agreement.stop_step + 1)",
    ),
    _trace(
        "a quota is met one sample late",
        "check/rounds",
        "if total >= self._quota_samples:",
        "if total > self._quota_samples:",
    ),
    _trace(
        "a window may be read in part",
        "check/own/offers",
        "if new == asked == wanted or",
        "if new <= asked == wanted or",
    ),
    _trace(
        "whose failure it is does not matter",
        "check/own/offers",
        "offer.failed_rank == (seen.rank if seen.has_failed else NONE)",
        "(offer.failed_rank != NONE) == seen.has_failed",
    ),
    _trace(
        "an agreement without the offer of the last rank will do",
        "check/exchanges",
        "        return len(exchange.posted) < self._world_size\n",
        "        return len(exchange.posted) < self._world_size - 1\n",
    ),
    _trace("a time has three digits", "writing", "round(time_s, 6)", "round(time_s, 3)"),
    # Plans of known lengths.
    _plan(
        "a budget is one more token",
        "packing",
        "place = bisect_left(rooms, size)",
        "place = bisect_left(rooms, size - 1)",
    ),
    _plan("an even division goes a token beyond", "packing", "if rooms[batch] < size:", "if rooms[batch] < size - 1:"),
    _plan(
        "a full micro-batch never comes back", "packing", "while waiting and -waiting[0][0] >= size:", "while not size:"
    ),
    _plan(
        "a limit is passed by what is passed over",
        "packing",
        "            heapq.heappush(active, (loads[other], other))\n    return",
        "            break\n    return",
    ),
    _plan(
        "a limit is reached one early", "packing", "mine + column[unit] <= bound for", "mine + column[unit] < bound for"
    ),
    _plan(
        "a padded run is as long as its first",
        "padding",
        "rows * self._longest[end - 1] <= self._budget",
        "rows * self._longest[begin] <= self._budget",
    ),
    _plan(
        "a padded run forgets the limits",
        "padding",
        "            and all(used[end]",
        "            and True or all(used[end]",
    ),
    _plan(
        "a padded run is bounded by tokens where a cost is",
        "padding",
        "rows * self._row_costs[end - 1] <= bound",
        "rows * self._longest[end - 1] <= bound",
    ),
    _plan(
        "nothing is set apart where rows are padded",
        "padding",
        "apart, beyond = 0, min(whole, count)",
        "apart, beyond = 0, 0",
    ),
    _plan(
        "too few runs stay too few",
        "padding",
        "len(heap) < count and heap[0][0]",
        "len(heap) < count - 1 and heap[0][0]",
    ),
    _plan(
        "nothing is settled",
        "division",
        "[(units.tokens, budget), *bounds], starts).run()",
        "[(units.tokens, budget), *bounds], starts)",
    ),
    _plan("nothing is exchanged", "settling", "EXCHANGED: Final = 32_768", "EXCHANGED: Final = 0"),
    _plan(
        "an exchange exceeds what is bounded",
        "settling",
        "self._used[target][place] + more > bound or",
        "self._used[target][place] + more > bound + 1 or",
    ),
    _plan(
        "the source of an exchange exceeds what is bounded",
        "settling",
        "self._used[source][place] - more > bound",
        "False",
    ),
    _plan("the last of a micro-batch is given away", "settling", "least = 0 if is_one else -1", "least = -1"),
    _plan(
        "the first exchange that helps is made",
        "settling",
        "                        worst, found = after, (target, unit, other)\n                        break\n",
        "                        return target, unit, other\n",
    ),
    _plan("of two exchanges as good the lesser fall", "settling", "more + less <= gap):", "more + less < gap):"),
    _plan(
        "an exchange looks at the cheapest alone", "settling", "islice(self._rising, self._near)", "self._rising[:1]"
    ),
    _plan(
        "a step has no level",
        "packing",
        "    return [levels[0] - level for level in levels for _ in range(ranks)]",
        "    return [0 for level in levels for _ in range(ranks)]",
    ),
    _plan(
        "what begins with a cost may stay empty",
        "division",
        "if found is None or not all(found):",
        "if found is None:",
    ),
    _plan("steps have levels beside units alone", "division", "if ranks > 1 and not self.alone:", "if ranks > 1:"),
    _plan(
        "an exchange raises the other by all that there is",
        "settling",
        "least = 1 if self._has_exchange else sum(costs)",
        "least = sum(costs)",
    ),
    _plan("nothing is evened out", "division", "    if bounds or len(numbers) > EXCHANGED:", "    if numbers:"),
    _plan(
        "one that is alone is counted among the others", "division", "left = count - len(self.alone)", "left = count"
    ),
    _plan(
        "fewer are not sought than best fit finds", "division", "    while low < high:", "    while low < high - 10**9:"
    ),
    _plan("a division among ranks is that of one", "division", "terms.multiple_of * ranks\n", "terms.multiple_of\n"),
    _plan(
        "the least is more than it is",
        "division",
        "sum([2 * column[unit] > bound for",
        "sum([2 * column[unit] >= bound for",
    ),
    _plan(
        "a run is halved by its units",
        "padding",
        "middle = min(max(bisect_left(self._rows, half, begin, end), begin + 1), end - 1)",
        "middle = min(max((begin + end + 1) // 2, begin + 1), end - 1)",
    ),
    _plan(
        "the runs found when setting apart are forgotten", "padding", "apart, ends = middle, found", "apart = middle"
    ),
    _plan("small ones at one end", "division", "return batches[::2][::-1] + batches[1::2]", "return batches[::-1]"),
    _plan(
        "a count is rounded down",
        "terms",
        "return -(-max(need, self.at_least) // self.multiple_of)",
        "return max(1, max(need, self.at_least) // self.multiple_of)",
    ),
    _plan("the least count is forgotten", "terms", "max(need, self.at_least)", "max(need, 1)"),
    _plan("one too many is not refused", "terms", "count > self.at_most:", "count > self.at_most + 1:"),
    _plan(
        "an idle rank is never refused",
        "terms",
        "self.short is Short.REFUSE and number < count",
        "self.short is Short.REFUSE and number < 0",
    ),
    _plan("lengths are rounded down", "units", "-(-length // terms.pad_to)", "(length // terms.pad_to)"),
    _plan(
        "a unit is its first two samples",
        "units",
        "return tuple(map(tuple, found.values()))",
        "return tuple([tuple(unit[:2]) for unit in found.values()])",
    ),
    _plan(
        "groups are counted by what they train on alone",
        "units",
        "sums[key] = sums.get(key, 0) + supervised",
        "sums[key] = supervised",
    ),
    _plan(
        "samples without loss are sequences",
        "outcome",
        "sequences=sum(map(bool, samples.supervised))",
        "sequences=len(samples.supervised)",
    ),
    _plan("weights are for two ranks", "outcome", "float(weight * self.totals.ranks)", "float(weight * 2)"),
    _plan("outputs come back as they were run", "outcome", "for index in sorted(found)]", "for index in found]"),
    _plan("outputs of what is idle come back", "outcome", "if batch and len(own)", "if len(own)"),
    _plan("the wait is that of the first rank", "quality", "sum(map(max, zip(*costs, strict=True)))", "sum(costs[0])"),
    _plan(
        "the costliest goes to the rank with most",
        "planning",
        "order = sorted(range(ranks), key=sums.__getitem__)",
        "order = sorted(range(ranks), key=sums.__getitem__, reverse=True)",
    ),
    _plan(
        "keys have no home",
        "planning",
        "        homes[rank] += found[key]\n",
        "        for index in found[key]:\n            homes[index % ranks].append(index)\n",
    ),
    _plan(
        "a rank that cannot plan says nothing",
        "exchanging",
        "    except Exception as raised:  # also",
        "    except ZeroDivisionError as raised:  # also",
    ),
    _plan(
        "each rank plans its own count",
        "exchanging",
        "own.terms.round_up(max(row[5] for row in messages))",
        "own.terms.round_up(own.division.need)",
    ),
    _plan(
        "what keys have on all ranks is believed",
        "exchanging",
        "        if (row[9], row[_HEAD + 5]) != (",
        "        if not row and (row[9], row[_HEAD + 5]) != (",
    ),
    _plan("a wait could be less than it can", "quality", "(ranks - 1) * min(most, fullest)", "ranks * fullest"),
    _plan(
        "a rank that idles is refused where it is",
        "exchanging",
        "[row[7] for row in messages]",
        "[len(own.division.units)]",
    ),
    _plan(
        "terms may differ",
        "exchanging",
        "            if row[place] != first:",
        "            if row[place] > 2 * first:",
    ),
    _plan(
        "a number of any size is sent",
        "exchanging",
        "if max(map(abs, found)) > _LARGEST:",
        "if max(map(abs, found)) > _LARGEST**3:",
    ),
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


def catch_by_vectors(planted: Planted) -> tuple[str, float]:
    """The properties that the cases of ``spec/vectors`` find broken, in one place or on ranks; and after how many seconds."""
    run = [sys.executable, "-m", "odb_ref.conformance", "run", "--level", "exact", "--planner"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(planted, folder)
        for arguments in (["tests.conformance.ours:plan_here"], ["tests.conformance.ours:plan_there", "--ranks"]):
            environment = {**os.environ, "PYTHONPATH": name}
            done = subprocess.run(
                [*run, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            if done.returncode:
                broken = [line.split()[0] for line in done.stdout.splitlines() if " broken in " in line]
                if not broken:
                    raise RuntimeError(f"{planted.name}: the kit itself fails: {done.stderr[-2000:]}")
                return ", ".join(broken), time.perf_counter() - began
    return "", time.perf_counter() - began


def main() -> int:
    """Prints the table; 1 when a defect survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="defects whose name holds it")
    parser.add_argument("--by-vectors", action="store_true", help="what the conformance cases find")
    options = parser.parse_args()
    chosen = [planted for planted in PLANTED if options.only in planted.name]
    if options.by_vectors:
        chosen = [planted for planted in chosen if planted.path.startswith(PURE)]
    print("| defect | in | caught by | after |\n|---|---|---|--:|")
    survivors = 0
    for planted in chosen:
        caught, seconds = catch_by_vectors(planted) if options.by_vectors else catch(planted)
        survivors += not caught
        print(f"| {planted.name} | `{planted.path}` | {caught or 'SURVIVES'} | {seconds:.0f} s |", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
