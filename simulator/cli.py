"""The ``odb-ref`` command: one module of `simulator.commands` for each subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from odb_ref.core.errors import UsageError
from simulator import commands


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other kind of bad input; the usage is a ``--help`` away."""
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="odb-ref", description="Online dynamic batching: simulate, check and explore the DGAP protocol."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands.ALL:
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Exit status: 0 as asked, 1 a property does not hold, 2 unusable arguments or input."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"odb-ref {options.command}: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"odb-ref {options.command}: this machine has not enough memory for so large a run", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; nothing more is wanted, not even a complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
