"""`python -m odb_ref`: the ``odb-ref`` command."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main() -> int:
    """Runs the command that the distribution installs, found by its entry point."""
    (command,) = entry_points(group="console_scripts", name="odb-ref")
    status: int = command.load()()
    return status


if __name__ == "__main__":
    sys.exit(main())
