"""R1: types and configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from odb_ref.core import events
from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.events import SamplesRead
from odb_ref.core.state import State
from odb_ref.core.types import Mode, Sample, Step, StepCounts
from tests.helpers.world import World, make_config, run


def test_values_are_immutable() -> None:
    """Spec: R1."""
    for value in (Sample(0, 0, 1, 1), Step(0, 0, (), StepCounts(0, 0, 0)), State(), events.StepTaken()):
        assert dataclasses.is_dataclass(value)
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            value.anything = 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sample",
    [Sample(7, 1, 1, 0), Sample(7, 0, 0, 0), Sample(7, 0, 2, 3), Sample(7, 0, 2, -1), Sample(7, 0, 2, 1, (1,))],
)
def test_a_sample_has_the_next_position_and_sensible_lengths(sample: Sample) -> None:
    """Spec: R1.1, R5.1."""
    world = run([[1]], make_config())
    fresh = type(world)(make_config(), [()])
    with pytest.raises(UsageError, match="sample 7"):
        fresh.send(0, SamplesRead((sample,)))


@pytest.mark.parametrize("costs", [(), (1,), (1, 2, 3), (1, -1)])
def test_a_sample_has_one_cost_for_each_limit_and_none_is_negative(costs: tuple[int, ...]) -> None:
    """Spec: R1.1, R5.1."""
    world = World(make_config(limits=(5, 5)), [()])
    state = world.nodes[0].machine.state
    with pytest.raises(UsageError, match=r"sample 7: costs .*, expected 2, none negative"):
        world.send(0, SamplesRead((Sample(7, 0, 2, 1, costs),)))
    assert world.nodes[0].machine.state is state
    world.send(0, SamplesRead((Sample(7, 0, 2, 1, (0, 9)),)))


def test_steps_are_numbered_from_zero_and_alike_on_all_ranks() -> None:
    """Spec: R1.3. Checks: ALIGN."""
    world = run([[3, 3, 3, 9, 1], [2]], make_config())
    numbers = [[(step.number, step.round) for step in node.taken] for node in world.nodes]
    assert numbers[0] == numbers[1]
    assert [number for number, _ in numbers[0]] == list(range(len(numbers[0])))
    assert [step.is_idle for step in world.nodes[1].taken] == [not step.group for step in world.nodes[1].taken]


@pytest.mark.parametrize(
    "bad",
    [
        {"world_size": 0}, {"budget_tokens": 0}, {"window_samples": 0}, {"depth_steps": 0}, {"max_age_rounds": 0},
        {"limits": (3, 0)}, {"rank": 1}, {"rank": -1}, {"ramp_rounds": -1}, {"quota_samples": 3},
        {"quota_samples": 0, "mode": Mode.QUOTA},
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_sense_is_refused(bad: dict[str, object]) -> None:
    """Spec: R1.4."""
    with pytest.raises(UsageError, match=next(iter(bad))):
        make_config(**bad)


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
    assert make_config(world_size=2, limits=(3,)).fingerprint != base.fingerprint
    assert make_config(world_size=2, layout=Layout.PACKED).fingerprint != base.fingerprint
    assert make_config(world_size=2, order=StepOrder.SAMPLER).fingerprint != base.fingerprint
    assert make_config(world_size=2, cost=get_cost("attention/8")).fingerprint != base.fingerprint
    assert make_config(world_size=2, sizes=Sizes.POWERS).fingerprint != base.fingerprint
    assert make_config(world_size=2, order_seed=1).fingerprint != base.fingerprint
    assert make_config(world_size=2, rank=1).fingerprint == base.fingerprint
    assert make_config(world_size=2, tag="epoch 1").fingerprint != base.fingerprint


def test_the_mode_says_when_an_epoch_ends() -> None:
    """Spec: R1.5. Checks: COVER, QUOTA."""
    shards = [[8, 8, 8], [8]]
    join = run(shards, make_config())
    assert [len(node.taken) for node in join.nodes] == [3, 3]
    quota = run(shards, make_config(mode=Mode.QUOTA))
    assert [len(node.taken) for node in quota.nodes] == [1, 1]
    assert not any(step.is_idle for node in quota.nodes for step in node.taken)
