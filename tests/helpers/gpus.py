"""Hides the GPUs from the tests: most fork ranks, and a process that has used a GPU cannot be forked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final
from unittest import mock

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_KEPT: Final = "ODB_TEST_GPUS"
_ALL: Final = "all"


def hide_gpus() -> None:
    os.environ.setdefault(_KEPT, os.environ.get(_VISIBLE, _ALL))  # pytest-xdist's workers inherit it
    os.environ[_VISIBLE] = ""


@contextlib.contextmanager
def show_gpus() -> Iterator[None]:
    """Lets processes that are spawned inside use the GPUs."""
    with mock.patch.dict(os.environ):
        kept = os.environ.get(_KEPT, _ALL)
        if kept == _ALL:
            os.environ.pop(_VISIBLE, None)
        else:
            os.environ[_VISIBLE] = kept
        yield
