"""R8: three kinds of error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core import machine as machine_module
from odb_ref.core.errors import InvariantError, JobError, OdbError, PeerError, RuleError, UsageError
from odb_ref.core.events import Agreed, SamplesRead, StepTaken
from odb_ref.core.machine import Machine
from tests.helpers.world import make_config, make_shard


def _machine_in_offer() -> Machine:
    machine = Machine(make_config())
    machine.begin()
    machine.handle(SamplesRead(make_shard([1]), True))
    return machine


def test_the_kinds_are_never_mixed() -> None:
    """Spec: R8."""
    kinds = (UsageError, PeerError, InvariantError, JobError)
    for kind in kinds:
        assert issubclass(kind, OdbError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
    assert issubclass(RuleError, InvariantError)


def test_a_misuse_leaves_the_state_unchanged() -> None:
    """Spec: R8."""
    machine = _machine_in_offer()
    before = machine.state
    with pytest.raises(UsageError):
        machine.handle(StepTaken())
    assert machine.state is before


def test_a_bad_message_names_round_and_field_and_leaves_the_state_unchanged() -> None:
    """Spec: R8, R5.3."""
    machine = _machine_in_offer()
    before = machine.state
    own = Machine(make_config())
    own.begin()
    (offered,) = own.handle(SamplesRead(make_shard([1]), True))
    with pytest.raises(PeerError, match="round 0, field ready_min"):
        machine.handle(Agreed(replace(offered.offer, ready_min=0)))  # type: ignore[union-attr]
    assert machine.state is before


def test_a_defect_names_the_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R8, I1."""
    machine = Machine(make_config())
    machine.begin()
    real = machine_module.transition
    monkeypatch.setattr(
        machine_module,
        "transition",
        lambda config, state, event: (replace(real(config, state, event)[0], window=()), ()),
    )
    before = machine.state
    with pytest.raises(InvariantError, match="I1: CONSERVE") as caught:
        machine.handle(SamplesRead(make_shard([1])))
    assert caught.value.invariant == "I1"
    assert machine.state is before
