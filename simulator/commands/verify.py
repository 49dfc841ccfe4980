"""``odb-ref verify``: is the protocol with this target rule still what the properties say?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simulator.explore.scenario import encode_scenario, load_rule, write_scenario
from simulator.verify.verdict import Finding, Stage, compute_verdicts, verify


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="judge a target rule: bounds, every interleaving, random worlds, real traces",
        description="Judges the protocol with a target rule, your own or a shipped one: a verdict for each property, and the "
        "smallest case found for what does not hold. Exit status: 0 everything holds, 1 something does not, 2 no such rule.",
    )
    parser.add_argument(
        "--rule", default="odb", metavar="RULE", help="odb, paper, module:name or path.py:name (default odb)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random agreements, worlds and workloads (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    parser.add_argument(
        "--save",
        type=Path,
        default=Path("odb-counterexample.json"),
        metavar="FILE",
        help="where a schedule that refutes the rule goes, for odb-ref explore --replay",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0 when every property holds as far as was looked, else 1."""
    rule = load_rule(options.rule)
    print(f"rule {rule.name!r} ({options.rule})")
    stages: list[Stage] = []
    for stage in verify(rule, options.rule, seed=options.seed):
        stages.append(stage)
        verdict = "refuted" if stage.findings else "ok"
        print(f"  {stage.name:<12}{verdict:<8} {stage.covered:<34}{stage.seconds:6.1f} s", flush=True)
    verdicts = compute_verdicts(stages)
    print()
    for name, (word, where) in verdicts.items():
        print(f"  {name:<12}{word:<12}{where}".rstrip())
    findings = [finding for stage in stages for finding in stage.findings]
    saved = 0
    for finding in findings:
        saved += finding.scenario is not None
        _print(finding, options.save if saved < 2 else options.save.with_stem(f"{options.save.stem}-{saved}"))
    if options.json is not None:
        payload = {
            "rule": options.rule,
            "name": rule.name,
            "seed": options.seed,
            "ok": not findings,
            "properties": {name: {"verdict": word, "by": where} for name, (word, where) in verdicts.items()},
            "stages": [_to_json(stage) for stage in stages],
        }
        options.json.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return 1 if findings else 0


def _print(finding: Finding, path: Path) -> None:
    print(f"\n{finding.property} is violated: {finding.detail}\n  in {finding.case}")
    if finding.scenario is None:
        return
    for number, action in enumerate(
        finding.scenario.schedule[-_LAST:], max(0, len(finding.scenario.schedule) - _LAST) + 1
    ):
        print(f"  {number:4}  {action}")
    write_scenario(path, finding.scenario)
    print(f"  saved; replay with: odb-ref explore --replay {path}")


_LAST = 30
"""A longer schedule is printed from its end; the file has it all."""


def _to_json(stage: Stage) -> dict[str, object]:
    return {
        "name": stage.name,
        "covered": stage.covered,
        "wall_time_s": round(stage.seconds, 3),
        "findings": [
            {
                "property": finding.property,
                "detail": finding.detail,
                "case": finding.case,
                "scenario": None if finding.scenario is None else encode_scenario(finding.scenario),
            }
            for finding in stage.findings
        ],
    }
