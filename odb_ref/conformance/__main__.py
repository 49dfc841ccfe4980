"""``python -m odb_ref.conformance run``: judges an implementation, a Python function or any program."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TextIO

from odb_ref.conformance.asking import START_S, Ask, Program, Programs, ask_here, ask_ranks
from odb_ref.conformance.reports import describe, write_html, write_json, write_junit
from odb_ref.conformance.running import Judging, run_cases
from odb_ref.conformance.vectors import VECTORS, make_case, read_cases

_SEEDS = ("1", "2")


def main(arguments: list[str]) -> int:
    """Returns 0 when no property was broken, 1 otherwise."""
    arguments, command = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m odb_ref.conformance", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="judge a planner; a program may stand after --")
    run.add_argument(
        "--planner", metavar="MODULE:FUNCTION", help="a function of a question, or with --ranks of a rank's"
    )
    run.add_argument("--ranks", action="store_true", help="each rank plans alone, and has an all-gather")
    run.add_argument("--level", choices=("property", "exact"), default="property")
    run.add_argument(
        "--without",
        default="",
        metavar="NAMES",
        help="kinds, terms and cases that are not claimed, by commas; online: all kinds of the online protocol",
    )
    run.add_argument("--only", default="", metavar="TEXT", help="cases whose id holds it")
    run.add_argument("--vectors", type=Path, default=VECTORS, metavar="FOLDER")
    run.add_argument("--junit", type=Path, metavar="FILE")
    run.add_argument("--html", type=Path, metavar="FILE")
    run.add_argument("--json", type=Path, metavar="FILE")
    serve = actions.add_parser("serve", help="be the program: answer questions on standard input with a function")
    serve.add_argument("--planner", required=True, metavar="MODULE:FUNCTION")
    serve.add_argument("--ranks", action="store_true")
    options = parser.parse_args(arguments)
    if options.action == "serve":
        answers, sys.stdout = sys.stdout, sys.stderr  # so that a planner's own output is not taken for an answer
        return _serve(_find(options.planner, has_ranks=options.ranks), answers)
    if (options.planner is None) == (not command):
        parser.error("one planner: --planner MODULE:FUNCTION, or -- COMMAND")
    cases = [case for case in read_cases(options.vectors) if options.only in case.id]
    if not cases:
        parser.error(f"{options.vectors}: no such cases there: no case whose id holds {options.only!r}")
    programs: list[Program] | list[Programs]
    if options.planner is not None:
        ask = _find(options.planner, has_ranks=options.ranks)
        serving = [sys.executable, "-m", "odb_ref.conformance", "serve", "--planner", options.planner]
        programs = [Program(serving + ["--ranks"] * options.ranks, _SEEDS[1])]
        asks = [ask, ask, ask_here(programs[0].answer, 2 * START_S)]
    elif options.ranks:
        programs = [Programs(command, seed) for seed in _SEEDS]
        asks = [ask_ranks(item.get, START_S) for item in (programs[0], *programs)]
    else:
        programs = [Program(command, seed) for seed in _SEEDS]
        asks = [ask_here(item.answer, 2 * START_S) for item in (programs[0], *programs)]
    judging = Judging(
        ask=asks[0],
        elsewhere=asks[1:],
        unclaimed=frozenset(filter(None, options.without.split(","))),
        has_ranks=options.ranks,
        is_exact=options.level == "exact",
    )
    try:
        verdicts = run_cases(cases, judging)
    finally:
        for item in programs:
            item.close()
    sys.stdout.write(describe(verdicts) + "\n")
    if options.junit is not None:
        options.junit.write_text(write_junit(verdicts), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(write_html(verdicts, options.planner or " ".join(command)), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(write_json(verdicts), encoding="utf-8")
    return int(any(verdict.is_broken for verdict in verdicts))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before ``--`` and those after it."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _find(name: str, *, has_ranks: bool) -> Ask:
    """Returns the `Ask` for the function called ``MODULE:FUNCTION``."""
    module, _, function = name.partition(":")
    planner = getattr(import_module(module), function)
    return ask_ranks(lambda _: planner) if has_ranks else ask_here(planner)


def _serve(ask: Ask, answers: TextIO) -> int:
    """Answers each question with a line of JSON until the input ends."""
    for line in sys.stdin:
        answer = ask(make_case(json.loads(line)))
        found: object = {"refused": "; ".join((*answer.refusals, answer.problem))}
        if answer.is_plan:
            found = answer.said if isinstance(answer.said, dict) and "plan" in answer.said else {"answer": answer.said}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
