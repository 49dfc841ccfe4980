"""Errors that are expected, word for word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind: type[Exception], words: str) -> Iterator[None]:
    """Expects an error of this kind, which says these words and no others."""
    with pytest.raises(kind) as caught:
        yield
    assert str(caught.value) == words
