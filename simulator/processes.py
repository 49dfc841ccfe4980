"""SimPy processes whose exceptions arrive as they were raised.

SimPy makes a new exception of the same type and arguments when a process fails, which not every type allows and which loses
the traceback's end; so a failing process hands its exception over in an envelope.
"""

from __future__ import annotations

from collections.abc import Generator

import simpy

Process = Generator[simpy.Event, object, None]


class _Envelope(Exception):
    """Holds the exception of a process, its only argument."""


def start(env: simpy.Environment, process: Process) -> None:
    """Starts ``process`` in ``env``."""
    env.process(_wrap(process))


def _wrap(process: Process) -> Process:
    try:
        yield from process
    except Exception as error:
        raise _Envelope(error) from error


def run(env: simpy.Environment) -> None:
    """Runs ``env`` until nothing is left to happen.

    Raises: what a process raised.
    """
    try:
        env.run()
    except _Envelope as envelope:
        (error,) = envelope.args
        raise error from None
