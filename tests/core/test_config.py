"""The configuration: invalid settings are refused, and those that ranks must share are in the fingerprint."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import get_rule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode, Sample
from tests.helpers.errors import refused

GOOD: dict[str, Any] = {"rank": 1, "world_size": 4, "budget_tokens": 100, "window_samples": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"budget_tokens": 0}, "budget_tokens must be at least 1, got 0"),
        ({"window_samples": -3}, "window_samples must be at least 1, got -3"),
        ({"depth_steps": 0}, "depth_steps must be at least 1, got 0"),
        ({"max_age_rounds": 0}, "max_age_rounds must be at least 1, got 0"),
        ({"limits": (9, 0)}, "limits must be at least 1 each, got (9, 0)"),
        ({"shared_samples": -1}, "shared_samples must not be negative, got -1"),
        ({"ramp_rounds": -1}, "ramp_rounds must not be negative, got -1"),
        ({"order_seed": -1}, "order_seed must not be negative, got -1"),
        ({"rank": 4}, "rank must lie in 0..3, got 4"),
        ({"rank": -1}, "rank must lie in 0..3, got -1"),
        ({"peers": 2, "peer": 2}, "peer must lie in 0..1, got 2"),
        ({"peers": 0}, "peers must be at least 1, got 0"),
        ({"quota_samples": 5}, "quota_samples needs mode='quota'"),
        ({"mode": Mode.QUOTA, "quota_samples": 0}, "quota_samples must be at least 1, got 0"),
        ({"rule": None}, "rule needs a name and compute_target(agreement), as a TargetRule has: None"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    """Spec: R1.4."""
    with refused(UsageError, message):
        Config(**(GOOD | changes))


CHANGES: dict[str, Any] = {
    "world_size": 5,
    "budget_tokens": 101,
    "layout": Layout.PACKED,
    "cost": get_cost("attention/7"),
    "order": StepOrder.SAMPLER,
    "sizes": Sizes.EVEN,
    "order_seed": 1,
    "limits": (7,),
    "window_samples": 17,
    "shared_samples": 0,
    "mode": Mode.QUOTA,
    "max_age_rounds": 5,
    "ramp_rounds": 1,
    "rule": get_rule("paper"),
    "tag": "seed 2",
    "peers": 2,
    "update_samples": 64,
    "padding_share": 4,
}
LOCAL = {"rank": 2, "depth_steps": 3}


@pytest.mark.parametrize("name", CHANGES)
def test_what_must_be_shared_is_in_the_fingerprint(name: str) -> None:
    """Spec: R1.4, R7.3."""
    assert Config(**(GOOD | {name: CHANGES[name]})).fingerprint != Config(**GOOD).fingerprint


@pytest.mark.parametrize("name", LOCAL)
def test_what_a_rank_may_choose_for_itself_is_not(name: str) -> None:
    assert Config(**(GOOD | {name: LOCAL[name]})).fingerprint == Config(**GOOD).fingerprint


def test_every_field_is_either_shared_or_local() -> None:
    given = {item.name for item in fields(Config) if item.init}
    assert given == CHANGES.keys() | LOCAL.keys() | {"quota_samples", "peer"}


def test_the_peers_of_a_rank_have_one_fingerprint() -> None:
    assert Config(**GOOD, peers=2, peer=1).fingerprint == Config(**GOOD, peers=2).fingerprint
    assert "peers" not in json.loads(Config(**GOOD).shared_json)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(7, 0, 0, 0, (1, 1)), "sample 7: length 0, supervised 0"),
        (Sample(7, 0, -1, 0, (1, 1)), "sample 7: length -1, supervised 0"),
        (Sample(7, 0, 2, 3, (1, 1)), "sample 7: length 2, supervised 3"),
        (Sample(7, 0, 2, -1, (1, 1)), "sample 7: length 2, supervised -1"),
        (Sample(7, 0, 2, 1), "sample 7: costs (), expected 2, none negative"),
        (Sample(7, 0, 2, 1, (1, 2, 3)), "sample 7: costs (1, 2, 3), expected 2, none negative"),
        (Sample(7, 0, 2, 1, (1, -1)), "sample 7: costs (1, -1), expected 2, none negative"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(sample: Sample, message: str) -> None:
    """Spec: R1.1."""
    good = Sample(6, 0, 1, 1, (0, 9))
    config = Config(**GOOD, limits=(3, 3))
    config.check_samples([good])
    with refused(UsageError, message):
        config.check_samples([good, sample])


def test_each_cost_of_any_number_of_them_is_looked_at() -> None:
    """Spec: R1.1."""
    for size, place in ((most, i) for most in range(1, 13) for i in range(most)):
        costs = tuple(-1 if i == place else 1 for i in range(size))
        with pytest.raises(UsageError, match="none negative"):
            Config(**GOOD, limits=(9,) * size).check_samples([Sample(7, 0, 2, 1, costs)])


def test_without_limits_a_sample_has_no_costs() -> None:
    """Spec: R1.1."""
    Config(**GOOD).check_samples([Sample(0, 0, 1, 0), Sample(1, 1, 5, 5)])
    with refused(UsageError, "sample 0: costs (0,), expected 0, none negative"):
        Config(**GOOD).check_samples([Sample(0, 0, 5, 0, (0,))])
