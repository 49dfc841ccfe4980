"""Errors cross process boundaries whole: a pool or a spawned rank sends them back pickled."""

from __future__ import annotations

import pickle

import pytest

from odb_ref.core.errors import InvariantError, JobError, OdbError, PeerError, RuleError, UsageError


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no such rule"),
        PeerError("field counts"),
        InvariantError("I1", "lost"),
        RuleError("answered 0"),
        JobError("rank 1 failed: x", rank=1, cause="x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: OdbError) -> None:
    """Spec: R8. Message and fields are the same on the other side."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
