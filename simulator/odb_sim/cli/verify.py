"""``odb-ref verify``: does the protocol still satisfy its properties with this target rule, or with this core?"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.cli.options import SAVED, add_number, add_save
from odb_sim.explore.scenario import write_scenario
from odb_sim.inputs.files import check_files, write_json
from odb_sim.reports.terminal import show_progress
from odb_sim.verify.core_copy import NOT_OF_THE_CORE, verify_core
from odb_sim.verify.language import load_judged
from odb_sim.verify.verdict import OF_THE_WORLD, Finding, Stage, compute_verdicts, encode_stage

HELP: Final = "judge a target rule by proof, or a changed core by its tests, worlds, model and proofs"
DESCRIPTION: Final = (
    "Judges the protocol with a target rule, your own or a shipped one, or with a changed copy of the core. Proves that a "
    "rule, which must be integer arithmetic, stays within its bounds; all else is proved for every such rule. Tries a core "
    "on worlds, tests and models. Prints a verdict for each property, as far as it was checked, what was not checked, and a "
    "case of each violation. Exit status: 0 everything holds, 1 something does not, 2 no such rule or core, or a rule that "
    "cannot be judged, 3 something was not judged, and nothing refuted."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--policy", default="odb", metavar="P", help="odb, paper, module:name or path.py:name (odb)")
    what.add_argument("--core", type=Path, metavar="DIR", help="a changed copy of odb_ref/core, instead of a rule")
    add_number(parser, "--seed", "S", "seed of a core's random worlds and workloads", 0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    add_save(parser, "save a schedule that refutes the core to this file, for odb-ref explore --replay")


def run_command(options: argparse.Namespace) -> int:
    """Returns 0 if every property holds as far as checked, 1 if one does not, and 3 if something was not judged.

    Raises: UsageError when there is no such rule or core.
    """
    check_files(options.json, options.save, reads=[options.policy])
    if options.core is not None:
        print(f"core {options.core}")
        stages = _show(verify_core(options.core, seed=options.seed))
        asked = {"core": str(options.core), "seed": options.seed}
        return _conclude(options, stages, compute_verdicts(stages, OF_THE_WORLD), asked, NOT_OF_THE_CORE)
    try:
        from odb_sim.verify.rule import NOT_LOOKED_AT, verify
    except ModuleNotFoundError as error:  # a core is verified without Z3
        raise UsageError(str(error)) from None
    for flag, given, default in (("--seed", options.seed, 0), ("--save", options.save, SAVED)):
        if given != default:
            raise UsageError(f"{flag} {given}: has no effect on a rule, only with --core")
    judged = load_judged(options.policy)
    print(f"rule {judged.rule.name!r} ({options.policy})")
    stages = _show(verify(judged))
    asked = {"rule": options.policy, "name": str(judged.rule.name)}
    status = _conclude(options, stages, compute_verdicts(stages), asked, NOT_LOOKED_AT)
    if status == 0:
        _print_item("", f"so {', '.join(OF_THE_WORLD)} hold, as proofs/README.md states them for every such rule")
        policies = ",".join(dict.fromkeys(("standard", "odb", options.policy)))
        print(f"how good the rule is: odb-ref compare mm_mix_real --policy {policies}")
    return status


def _show(stages: Iterator[Stage]) -> list[Stage]:
    """Prints each stage as soon as it is done."""
    done: list[Stage] = []
    while True:
        with show_progress(f"judging, {len(done)} stages done", 0):
            stage = next(stages, None)
        if stage is None:
            return done
        done.append(stage)
        verdict = "refuted" if stage.findings else ("not judged" if stage.skipped else "ok")
        print(f"  {stage.name:<13}{verdict:<11} {stage.covered:<34}{stage.seconds:6.1f} s", flush=True)


def _conclude(
    options: argparse.Namespace,
    stages: Sequence[Stage],
    verdicts: Mapping[str, tuple[str, str]],
    asked: Mapping[str, object],
    unseen: Sequence[str],
) -> int:
    print()
    for key, (word, where) in verdicts.items():
        said = f"{'by' if word == 'not shown' else 'in'} {where}" if where else ""
        print(f"  {key:<13}{word:<12}{said}".rstrip())
    if any(word == "not shown" for word, _ in verdicts.values()):
        print(f"\n{_NOT_SHOWN}")
    findings = [finding for stage in stages for finding in stage.findings]
    unjudged = [stage.name for stage in stages if stage.skipped]
    unjudged += [key for key, (word, _) in verdicts.items() if word == "not judged"]
    print("\nholds for:" if not findings and not unjudged else "\nchecked:")
    for stage in stages:
        if stage.ranges and not stage.skipped:
            _print_item(stage.name, stage.ranges)
    print("not checked:")
    for stage in stages:
        if stage.skipped:
            _print_item(stage.name, stage.skipped)
    for line in unseen:
        _print_item("", line)
    saved = 0
    for finding in findings:
        saved += finding.scenario is not None
        _print(finding, options.save if saved < 2 else options.save.with_stem(f"{options.save.stem}-{saved}"))
    if options.json is not None:
        payload: dict[str, object] = {
            **asked,
            "ok": not findings and not unjudged,
            "not_judged": unjudged,
            "properties": {key: {"verdict": word, "by": where} for key, (word, where) in verdicts.items()},
            "not_looked_at": list(unseen),
            "stages": list(map(encode_stage, stages)),
        }
        write_json(options.json, payload, indent=1)
    if findings:
        print(f"\nrefuted: {', '.join(dict.fromkeys(finding.property for finding in findings))}")
        return 1
    if unjudged:
        remedies = "".join(f"; {stage.name} can be judged after: {stage.remedy}" for stage in stages if stage.remedy)
        print(f"\nnot judged: {', '.join(unjudged)}{remedies}")
        return 3
    print("\neverything holds, as far as it was checked")
    return 0


def _print_item(name: str, text: str) -> None:
    head = f"  {name:<13}" if name else "  "
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 0)).columns)
    print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head)))


def _print(finding: Finding, path: Path) -> None:
    print(f"\n{finding.property} is violated: {finding.detail}\n  in {finding.case}")
    if finding.scenario is None:
        return
    for number, action in enumerate(
        finding.scenario.schedule[-_LAST:], max(0, len(finding.scenario.schedule) - _LAST) + 1
    ):
        print(f"  {number:4}  {action}")
    write_scenario(path, finding.scenario)
    print(f"  saved to {path}; odb-ref explore --replay shows what the shipped core does there")


_NOT_SHOWN: Final = (
    "not shown: this core is not the one that was specified, proved or modelled, or fails a test of the property.\n"
    "No stage found a case that violates the property, but what is known of that core is not known of this one."
)
_WIDEST: Final = 120
"""The largest width of running text, on any terminal."""
_LAST: Final = 30
"""The number of actions printed from the end of a longer schedule. The file holds all of them."""
