"""``odb-ref check``: do traces satisfy the properties?"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import UsageError
from odb_ref.trace.check import Follower, JobVerdict, Status, Verdict, Violation, check_traces
from odb_sim.inputs.files import check_files, write_json
from odb_sim.inputs.rules import load_policy_rule

_PAUSE_S: Final = 0.2
"""The pause between looks at growing traces."""
TRACES_HELP: Final = "a trace file; give all files of a job together, or their folder"
HELP: Final = "check traces against the properties"
DESCRIPTION: Final = (
    "Checks traces of the simulator, of training jobs or of tests against the protocol's properties. "
    "Exit status: 0 every property holds or does not apply, 1 one is violated, 2 a file cannot be read."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=TRACES_HELP)
    parser.add_argument("--replay", action="store_true", help="also compare each event with the protocol core (REPLAY)")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="check a job while it runs: print each violation as it happens, and the verdict at the end; TRACE may "
        "name files that do not exist yet",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="with --follow: give up after this many seconds without new data (default: 600)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="RULE",
        help="with --replay: module:name or path.py:name of a target rule of your own (repeatable)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the verdict")


def run_command(options: argparse.Namespace) -> int:
    """Prints the verdict; violations come first, one to a line.

    Raises: UsageError when a file is not a trace, or there is no such rule.
    """
    if not options.patience >= 0:
        raise UsageError(f"--patience must be at least 0, got {options.patience:g}")
    if options.policy and not options.replay:
        raise UsageError("--policy needs --replay: only a replay uses a target rule")
    check_files(options.json, reads=[*options.traces, *options.policy])
    rules = [load_policy_rule(name) for name in options.policy]
    told: Counter[Violation] = Counter()
    if options.follow:
        verdict = _follow(options, rules, told)
    else:
        verdict = check_traces(options.traces, is_replayed=options.replay, rules=rules)
    if options.json is not None:
        write_json(options.json, compute_json(verdict))
    for job in verdict.jobs:
        _print(job, told)
    return 0 if verdict.is_ok else 1


def _follow(options: argparse.Namespace, rules: Sequence[TargetRule], told: Counter[Violation]) -> Verdict:
    """Returns the verdict at the end of the job. The violations printed before that are counted in ``told``."""

    def tell(violation: Violation) -> None:
        told[violation] += 1
        _say(str(violation))

    follower = Follower(options.traces, tell)
    last_s = time.monotonic()
    while not follower.is_done and time.monotonic() - last_s < options.patience:
        if follower.advance():
            last_s = time.monotonic()
        else:
            time.sleep(min(_PAUSE_S, options.patience))
    return follower.end(is_replayed=options.replay, rules=rules)


def _say(text: str) -> None:
    """Prints one line, and escapes line breaks and characters that cannot be printed."""
    encoding = sys.stdout.encoding or "utf-8"
    line = "".join(item if item.isprintable() else item.encode("unicode_escape").decode() for item in text)
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _print(job: JobVerdict, told: Counter[Violation]) -> None:
    for violation in job.violations:
        if told[violation]:
            told[violation] -= 1
        else:
            _say(str(violation))
    set_aside = f", {job.set_aside} set aside" if job.set_aside else ""
    _say(
        f"{job.paths[0]}{f' and {len(job.paths) - 1} more' if job.paths[1:] else ''}: {job.driver}, epoch {job.epoch}, "
        f"{job.ranks} ranks, {job.rounds} rounds, {job.steps} steps, {job.samples} samples{set_aside}; outcome {job.outcome}"
    )
    for item in job.properties:
        what = f"{item.checked:>10} checks" if item.status is not Status.NOT_APPLICABLE else f"({item.reason})"
        print(f"  {item.property:<10}{item.status:<16}{what}")
    for what in job.unsaid:
        print(f"  not known: {what}")


def compute_json(verdict: Verdict) -> dict[str, object]:
    """Returns the verdict as JSON: ``ok``, ``violations``, and for each job its size, its outcome and a status by property."""
    jobs = []
    for found in map(asdict, verdict.jobs):
        properties = {item.pop("property"): item for item in found["properties"]}
        jobs.append({"traces": found.pop("paths"), **found, "properties": properties})
    return {"ok": verdict.is_ok, "violations": list(map(str, verdict.violations)), "jobs": jobs}
