"""R1: types and configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from odb_ref.core import events
from odb_ref.core.config import Config
from odb_ref.core.state import State
from odb_ref.core.types import Mode, Sample, Step, StepCounts
from tests.helpers.world import make_config, run


def test_values_are_immutable() -> None:
    """Spec: R1."""
    for value in (Sample(0, 0, 1, 1), Step(0, 0, (), StepCounts(0, 0, 0)), State(), events.StepTaken()):
        assert dataclasses.is_dataclass(value)
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            value.anything = 1  # type: ignore[union-attr]


def test_the_fingerprint_covers_everything_shared() -> None:
    """Spec: R1.4, R7.3."""
    base = make_config(world_size=2)
    shared = json.loads(base.shared_json)
    digest = hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=7).digest()
    assert base.fingerprint == int.from_bytes(digest, "big") < 2**56
    names = {field.name for field in dataclasses.fields(Config) if field.init}
    assert names - set(shared) == {
        "rank", "depth_steps", "layout", "limits", "cost", "sizes", "order_seed", "shared_samples",
        "update_samples", "padding_share", "peer", "peers",
    }  # fmt: skip
    assert json.loads(make_config(limits=(3, 5)).shared_json)["limits"] == [3, 5]


def test_the_mode_says_when_an_epoch_ends() -> None:
    """Spec: R1.5. Checks: COVER, QUOTA."""
    shards = [[8, 8, 8], [8]]
    join = run(shards, make_config())
    assert [len(node.taken) for node in join.nodes] == [3, 3]
    quota = run(shards, make_config(mode=Mode.QUOTA))
    assert [len(node.taken) for node in quota.nodes] == [1, 1]
    assert not any(step.is_idle for node in quota.nodes for step in node.taken)
