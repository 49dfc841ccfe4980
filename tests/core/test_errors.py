"""Errors cross process boundaries intact, because a pool or a spawned rank sends them back pickled."""

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
    assert copy.args == error.args


def test_the_kinds_are_never_mixed() -> None:
    """Spec: R8."""
    kinds = (UsageError, PeerError, InvariantError, JobError)
    for kind in kinds:
        assert issubclass(kind, OdbError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
    assert issubclass(RuleError, InvariantError)


def test_a_job_error_says_its_message_and_holds_rank_and_cause() -> None:
    """Spec: R8."""
    error = JobError("rank 1 failed: no such file", 1, "no such file")
    assert str(error) == "rank 1 failed: no such file"
    assert (error.rank, error.cause) == (1, "no such file")
    assert error.args == ("rank 1 failed: no such file", 1, "no such file"), "what pickle calls the class with"


def test_a_broken_invariant_says_its_id_first() -> None:
    """Spec: R8."""
    error = InvariantError("I1", "a sample is lost")
    assert str(error) == "I1: a sample is lost"
    assert error.args == (error.invariant, error.detail) == ("I1", "a sample is lost")
    assert str(RuleError("rule 'x' answered 0")) == "RULE-BOUNDS: rule 'x' answered 0"
