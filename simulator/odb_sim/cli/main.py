"""The ``odb-ref`` command, with one module of `odb_sim.cli` for each subcommand."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread
from types import FrameType, ModuleType
from typing import Final, NoReturn

from odb_ref import __version__
from odb_ref.core.errors import InvariantError, RuleError, UsageError

EXAMPLES: Final = {
    "demo": "odb-ref demo --out demo-out",
    "lengths": "odb-ref lengths data.jsonl --tokenizer tokenizer.json --out lengths.csv",
    "simulate": "odb-ref simulate azure_llm_2023_conv --ranks 64 --token-budget 16384 --window 512 --html run.html",
    "compare": "odb-ref compare gsm8k --ranks 8 --policy odb,paper,standard --json -",
    "sweep": "odb-ref sweep mm_mix_real --ranks 8,64 --token-budget 8192,16384 --window 256,1024 --csv sweep.csv",
    "tune": "odb-ref tune mm_mix_real --ranks 8 --memory-tokens 8192 --html tune.html",
    "plan": "odb-ref plan gsm8k --model llama-3-8b --gpu h100 --gpus 64 --strategy fsdp --global-batch 512 --epochs 3",
    "micro-batches": "odb-ref micro-batches gsm8k --ranks 16 --budget 8192 --step-samples 1024",
    "replay": "odb-ref replay trace-rank0.ndjson trace-rank1.ndjson",
    "calibrate": "odb-ref calibrate cal/run*.ndjson --out costs.json",
    "published": "odb-ref published --json published.json",
    "check": "odb-ref check trace-rank0.ndjson trace-rank1.ndjson --replay",
    "view": "odb-ref view trace-rank0.ndjson trace-rank1.ndjson --step 812",
    "explore": "odb-ref explore --shard-sizes 3,1 --failures 1 --graph explored.graphml",
    "verify": "odb-ref verify --policy my_rules.py:GreedyRule",
}
"""The example at the top of each command's help. A test parses them."""
_MODULES: Final = {
    "lengths": "planning.lengths",
    "plan": "planning.plan",
    "micro-batches": "planning.micro_batches",
    "replay": "recorded.replay",
    "calibrate": "recorded.calibrate",
    "view": "recorded.view",
}
"""The modules of commands that are not in the module of their name."""


class _Parser(argparse.ArgumentParser):
    example = ""

    def error(self, message: str) -> NoReturn:
        """Exits with one line, as every other kind of bad input does. ``--help`` shows the usage."""
        self.exit(2, f"{self.prog}: {message}\n")

    def format_help(self) -> str:
        """Returns the help, with an example before it."""
        text = super().format_help()
        return f"example: {self.example}\n\n{text}" if self.example else text


INSTALL: Final = "pip install 'odb-ref[sim]'"


def load_command(name: str) -> ModuleType | None:
    """Returns the module of a subcommand, or None if it needs a package of the extra [sim] that is not installed."""
    try:
        return import_module(f"odb_sim.cli.{_MODULES.get(name, name)}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("odb_"):
            raise
        return None


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = _Parser(prog="odb-ref", description="Online dynamic batching: simulate, check and explore its protocol.")
    parser.add_argument("--version", action="version", version=f"odb-ref {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, example in EXAMPLES.items():
        command = load_command(name)
        if command is None:
            subparsers.add_parser(name, help=f"not here: {INSTALL}")
            continue
        own = subparsers.add_parser(name, help=command.HELP, description=command.DESCRIPTION)
        own.example = example
        command.add_options(own)
        own.set_defaults(run=command.run_command)
    return parser


@contextmanager
def _json_to_stdout(options: argparse.Namespace) -> Iterator[None]:
    """With ``--json -`` only the JSON goes to standard output, and everything else that a command prints to standard error."""
    path = getattr(options, "json", None)
    if path is None or str(path) != "-":
        yield
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        options.json = file if isinstance(path, Path) else str(file)
        with redirect_stdout(sys.stderr):
            yield
        if file.exists():
            print(file.read_text(encoding="utf-8"), end="")


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the command as Ctrl-C does, so that every part stops what it has started."""


@contextmanager
def _heed_sigterm() -> Iterator[None]:
    def end(number: int, _: FrameType | None) -> NoReturn:
        raise _Terminated

    if current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand, and returns its exit status: 0 for success, 1 if a property does not hold, 2 for unusable arguments
    or input. If broken off, it is 130 (by Ctrl-C), 143 (by SIGTERM) or 141 (because the reader of the output has gone).
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # at any time, also while modules are loaded
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str] | None) -> int:
    _make_printable()
    wanted = next((item for item in (sys.argv[1:] if arguments is None else arguments) if not item.startswith("-")), "")
    if wanted in EXAMPLES and load_command(wanted) is None:
        print(f"odb-ref {wanted}: needs the simulator: {INSTALL}", file=sys.stderr)
        return 2
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.said = shlex.join(["odb-ref", *(sys.argv[1:] if arguments is None else arguments)])
    if options.command is None:
        parser.print_help()
        return 0
    try:
        with _heed_sigterm(), _json_to_stdout(options):
            status: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"odb-ref {options.command}: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print(
            f"odb-ref {options.command}: this machine does not have enough memory for a run of this size",
            file=sys.stderr,
        )
        return 2
    except _Terminated:
        return 128 + signal.SIGTERM
    except (RuleError, InvariantError) as error:  # raised by a rule of the user's
        print(f"odb-ref {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has gone. It wants nothing more, and may not have received the findings.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        # A traceback would exit with status 1, which means that a property does not hold.
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"odb-ref {options.command}: {where}{error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 2
    return status


def _make_printable() -> None:
    """Lets anything be printed: if the parent has closed standard output or standard error, and if the encoding lacks a
    character of a path.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Keeps the interpreter from trying, and failing, to write the remaining output again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
