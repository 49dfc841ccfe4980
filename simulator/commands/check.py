"""``odb-ref check``: do traces satisfy the properties?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from odb_ref.core.check import JobVerdict, Status, Verdict, check_traces

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``check``."""
    parser = subparsers.add_parser(
        "check",
        help="check traces against the properties",
        description="Checks traces of the simulator, of training jobs or of tests against the protocol's properties. "
        "Exit status: 0 every property holds or does not apply, 1 one is violated, 2 a file cannot be read.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a trace file; give all files of a job together")
    parser.add_argument("--replay", action="store_true", help="also ask the protocol core for each event (REPLAY)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the verdict; violations come first, one to a line."""
    verdict = check_traces(options.traces, is_replayed=options.replay)
    if options.json:
        print(json.dumps(compute_json(verdict), indent=2))
    else:
        for job in verdict.jobs:
            _print(job)
    return 0 if verdict.is_ok else 1


def _print(job: JobVerdict) -> None:
    for violation in job.violations:
        print(violation)
    print(
        f"{job.paths[0]}{f' and {len(job.paths) - 1} more' if job.paths[1:] else ''}: {job.driver}, epoch {job.epoch}, "
        f"{job.ranks} ranks, {job.rounds} rounds, {job.steps} steps, {job.samples} samples; outcome {job.outcome}"
    )
    for item in job.properties:
        what = f"{item.checked:>10} checks" if item.status is not Status.NOT_APPLICABLE else f"({item.reason})"
        print(f"  {item.property:<10}{item.status:<16}{what}")


def compute_json(verdict: Verdict) -> dict[str, object]:
    """The verdict as JSON: ``ok``, ``violations``, and for each job its size, its outcome and a status by property."""
    return {
        "ok": verdict.is_ok,
        "violations": [str(violation) for violation in verdict.violations],
        "jobs": [
            {
                "traces": list(job.paths),
                "driver": job.driver,
                "epoch": job.epoch,
                "ranks": job.ranks,
                "rounds": job.rounds,
                "steps": job.steps,
                "samples": job.samples,
                "outcome": job.outcome,
                "properties": {
                    item.property: {"status": item.status, "checked": item.checked, "reason": item.reason}
                    for item in job.properties
                },
                "violations": [
                    {
                        "property": violation.property,
                        "rank": violation.rank,
                        "round": violation.round,
                        "step": violation.step,
                        "what": violation.what,
                    }
                    for violation in job.violations
                ],
            }
            for job in verdict.jobs
        ],
    }
