"""``python -m odb_ref.conformance run``: judges a planner, a Python function or any program."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from odb_ref.conformance.planners import Ask, Program, ask_function, ask_ranks
from odb_ref.conformance.running import describe, run_cases, write_html, write_junit
from odb_ref.conformance.vectors import VECTORS, decode, read_cases

_SEEDS = ("1", "2")


def main(arguments: list[str]) -> int:
    """Returns 0 when no property was broken, 1 otherwise."""
    arguments, command = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m odb_ref.conformance", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="judge a planner; a program may stand after --")
    run.add_argument(
        "--planner", metavar="MODULE:FUNCTION", help="a function of a problem, or with --ranks of each rank"
    )
    run.add_argument("--ranks", action="store_true", help="the function is of a problem, a rank and an all-gather")
    run.add_argument("--without", default="", metavar="TERMS", help="terms that the planner does not claim, by commas")
    run.add_argument("--vectors", type=Path, default=VECTORS, metavar="FOLDER")
    run.add_argument("--junit", type=Path, metavar="FILE")
    run.add_argument("--html", type=Path, metavar="FILE")
    serve = actions.add_parser("serve", help="be the program: answer problems on standard input with a function")
    serve.add_argument("--planner", required=True, metavar="MODULE:FUNCTION")
    serve.add_argument("--ranks", action="store_true")
    options = parser.parse_args(arguments)
    if options.action == "serve":
        return _serve(_find(options.planner, has_ranks=options.ranks))
    if (options.planner is None) == (not command):
        parser.error("one planner: --planner MODULE:FUNCTION, or -- COMMAND")
    if not any(options.vectors.glob("plan*.json")):
        parser.error(f"{options.vectors}: no cases there; they come with a checkout, as spec/vectors/v1")
    unclaimed = frozenset(filter(None, options.without.split(",")))
    if options.planner is not None:
        command = [sys.executable, "-m", "odb_ref.conformance", "serve", "--planner", options.planner]
        command += ["--ranks"] if options.ranks else []
    programs = [Program(command, os.environ | {"PYTHONHASHSEED": seed}) for seed in _SEEDS]
    asks: list[Ask] = [program.ask for program in programs]
    if options.planner is not None:
        asks = [_find(options.planner, has_ranks=options.ranks), *asks]
    try:
        verdicts = run_cases(read_cases(options.vectors), asks[0], asks[1:], unclaimed)
    finally:
        for program in programs:
            program.close()
    sys.stdout.write(describe(verdicts) + "\n")
    if options.junit is not None:
        options.junit.write_text(write_junit(verdicts), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(write_html(verdicts, options.planner or " ".join(command)), encoding="utf-8")
    return int(any(verdict.is_broken for verdict in verdicts))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns what stands before ``--``, and after it."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _find(name: str, *, has_ranks: bool) -> Ask:
    """Returns how to ask the function of that name."""
    module, _, function = name.partition(":")
    planner = getattr(import_module(module), function)
    return ask_ranks(planner) if has_ranks else ask_function(planner)


def _serve(ask: Ask) -> int:
    """Answers a line of JSON for each problem, until the input ends."""
    import json

    for line in sys.stdin:
        record = json.loads(line)
        answer = ask(decode(record, record["kind"]))
        found = {"plan": answer.plans} if answer.is_plan else {"refused": "; ".join(answer.refusals)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
