"""A trace of updates of a fixed number of samples is judged: right ones hold, and each planted defect is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import odb_ref.core.machine as machine_module
import odb_ref.core.rounds as rounds_module
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.config import Config
from odb_ref.core.errors import InvariantError, OdbError
from odb_ref.core.offer import Offer
from odb_ref.core.types import Mode
from odb_ref.trace.check.job import check_traces
from odb_ref.trace.check.verdict import Property, Status
from odb_ref.trace.writing import TraceWriter
from tests.helpers.tamper import Tampered
from tests.helpers.world import AnyOrder, Fault, World, make_configs, make_shard, run_by_arrival
from tests.trace.lies import find_broken

LENGTHS = [(7 * i * i) % 23 + 1 for i in range(50)]
SHARDS = [LENGTHS[rank::3] for rank in range(3)]
OWN: dict[str, Any] = {"update_samples": 14}
SHARED: dict[str, Any] = {**OWN, "shared_samples": 50}
QUOTA: dict[str, Any] = {**OWN, "mode": Mode.QUOTA}
BAD = (1, 2, 3, 17, *range(28, 42))


def run(path: Path, settings: dict[str, Any], *, bad: tuple[int, ...] = (), seed: int = 3) -> Path:
    """Writes the trace of a job whose third update, with ``bad``, has no good sample."""
    configs = make_configs(3, **settings)
    order = make_shard(LENGTHS)
    is_shared = configs[0].shared_samples is not None
    shards = [() if is_shared else order[rank::3] for rank in range(3)]
    with TraceWriter(path, configs[0], driver="test") as writer:
        World(
            configs, shards, order=order, schedule=AnyOrder(seed), bad=bad,
            make_machine=lambda config: machine_module.Machine(config, writer.record),
        ).run()  # fmt: skip
    return path


@pytest.mark.parametrize("bad", [(), BAD])
@pytest.mark.parametrize(
    "settings",
    [
        OWN,
        SHARED,
        QUOTA,
        {**OWN, "layout": Layout.PACKED},
        {**SHARED, "order": StepOrder.SAMPLER},
        {**SHARED, "limits": ()},
        {**OWN, "update_samples": 3},
        {**SHARED, "update_samples": 100},
    ],
)
def test_a_right_trace_holds(settings: dict[str, Any], bad: tuple[int, ...], tmp_path: Path) -> None:
    """Checks: UPDATE, COVER, TERM, DEAL, REPLAY."""
    verdict = check_traces([run(tmp_path / "t", settings, bad=bad)], is_replayed=True)
    assert not verdict.violations
    assert verdict.jobs[0].get_status(Property.UPDATE) is Status.HOLDS
    run_by_arrival(SHARDS, make_configs(3, **settings), faults=(Fault("fail", 1, 40),), trace=tmp_path / "fault")
    assert not check_traces([tmp_path / "fault"], is_replayed=True).violations


# Wrong protocols: the machine itself is changed, and its trace is honest. Its own invariants are turned off. ----------------


def carry_a_group(patch: pytest.MonkeyPatch) -> None:
    """A sample slips into the next update, because the target is below the most groups, as in free mode."""

    def below(config: Config, agreement: Offer) -> int:
        return max(1, agreement.groups_max - 1) if agreement.groups_max and agreement.samples_max else 0

    patch.setattr(machine_module, "compute_round_target", below)


def close_when_a_part_is_bad(patch: pytest.MonkeyPatch) -> None:
    """A rank without a good sample offers that it holds none. If all ranks do, the epoch closes early."""
    right = rounds_module._compute_offer

    def of_what_is_held(config: Any, state: Any, *rest: Any) -> Offer:
        held = len(state.window)
        return replace(right(config, state, *rest), samples_min=held, samples_max=held)

    patch.setattr(rounds_module, "_compute_offer", of_what_is_held)


def read_on_after_a_bad_sample(patch: pytest.MonkeyPatch) -> None:
    """A short read draws from the next update, because only good samples count as places."""
    right = rounds_module.make_read

    def by_good(config: Config, round_: int, count: int) -> Any:
        return right(config, round_, count + 1)

    patch.setattr(machine_module, "make_read", by_good)


def emit_a_portion(patch: pytest.MonkeyPatch) -> None:
    """Each portion is emitted by itself, so one update becomes several smaller ones."""
    patch.setattr(Config, "has_steps", lambda *_: True)


def deal_by_rank(patch: pytest.MonkeyPatch) -> None:
    """A rank reports an empty load, and so draws more than its share."""
    patch.setattr(rounds_module, "compute_real_tokens", lambda _: 0)


@pytest.mark.parametrize(
    ("plant", "settings", "bad", "seen"),
    [
        (carry_a_group, OWN, (), "UPDATE"),
        (carry_a_group, SHARED, (), "UPDATE"),
        (close_when_a_part_is_bad, OWN, BAD, "COVER"),
        (read_on_after_a_bad_sample, OWN, BAD, "UPDATE"),
        (emit_a_portion, SHARED, (), "UPDATE"),
        (deal_by_rank, SHARED, (), "DEAL"),
    ],
)
def test_a_planted_defect_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    settings: dict[str, Any],
    bad: tuple[int, ...],
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Checks: UPDATE."""
    monkeypatch.setattr(machine_module, "check_transition", lambda *_: None)
    plant(monkeypatch)
    with contextlib.suppress(OdbError, AssertionError):  # the world, or the machine, may also see it
        run(tmp_path / "t", settings, bad=bad)
    assert seen in find_broken(tmp_path / "t")


@pytest.mark.parametrize("plant", [carry_a_group, read_on_after_a_bad_sample])
def test_the_machine_sees_it_too(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spec: I13. Checks: UPDATE."""
    plant(monkeypatch)
    with pytest.raises((InvariantError, OdbError)):
        run(tmp_path / "t", OWN)


# Lies of a driver or of a trace -------------------------------------------------------------------------------------------


def test_a_driver_that_reads_a_place_too_far_is_seen(tmp_path: Path) -> None:
    """Checks: UPDATE."""
    trace = Tampered(run(tmp_path / "t", OWN))
    trace.effects("read", 1)[2]["first"] += 1
    assert find_broken(trace.write(tmp_path / "u")) == {"UPDATE"}


def test_the_weight_of_a_step_is_not_that_of_another(tmp_path: Path) -> None:
    """Checks: WEIGHT. The counts of an update are sums of these."""
    trace = Tampered(run(tmp_path / "t", OWN))
    steps = list(chain.from_iterable(effect["steps"] for effect in trace.effects("collate", 1)))
    steps[1]["counts"][2] -= 1
    assert find_broken(trace.write(tmp_path / "u")) == {"WEIGHT"}


def test_an_update_of_another_size_is_not_that_of_the_header(tmp_path: Path) -> None:
    """Checks: UPDATE."""
    path = run(tmp_path / "t", OWN)
    text = path.read_text()
    assert text.count('"update_samples":14') == 1
    (tmp_path / "u").write_text(text.replace('"update_samples":14', '"update_samples":13'))
    assert "UPDATE" in find_broken(tmp_path / "u")
