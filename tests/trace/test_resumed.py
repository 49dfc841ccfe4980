"""Traces of resumed epochs are accepted when right, from the round in which they begin, and refused when not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odb_ref.core.effects import PostReport
from odb_ref.core.events import Agreed, Reported, SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.offer import reduce_offers
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Mode
from odb_ref.trace.check import Property, Status, Violation, check_traces
from odb_ref.trace.check.own.starts import judge_start
from odb_ref.trace.origin import Origin
from odb_ref.trace.writing import TraceWriter
from tests.core.test_resume import IMPOSSIBLE, START
from tests.helpers.schema import VALIDATOR
from tests.helpers.tamper import Tampered
from tests.helpers.world import AnyOrder, Shard, World, make_config, make_shards, write_trace
from tests.trace.said import check_said, show

SHARDS = make_shards(
    [
        [7, 7, 1, 5, 9, 8, 7, 5, 8, 6, 4, 9, 3, 5, 3, 2],
        [5, 9, 3, 5, 2, 2, 6, 8, 9],
        [2, 6, 7, 6, 4, 9, 8, 8, 9, 5, 1],
        [9, 1, 2, 7, 1, 8, 6, 4, 6, 2, 4, 4, 4],
    ]
)
CONFIGS = {
    "join": make_config(),
    "ramp and age": make_config(depth_steps=1, ramp_rounds=2, window_samples=6, max_age_rounds=1),
    "limits": make_config(limits=(9, 4), budget_tokens=16),
    "quota": make_config(mode=Mode.QUOTA, window_samples=2),
    "quota cut": make_config(mode=Mode.QUOTA, quota_samples=22, window_samples=3),
}


def get_shards(name: str) -> tuple[Shard, ...]:
    """Returns the samples of the epoch. With limits, each uses its length modulo 4 of every further resource."""
    resources = len(CONFIGS[name].limits)
    return tuple(tuple(replace(sample, costs=(sample.length % 4,) * resources) for sample in shard) for shard in SHARDS)


def write_rest(folder: Path, name: str, count: int, schedule: type[AnyOrder] = AnyOrder) -> list[Path]:
    """Writes the traces, one for each rank, of an epoch resumed after ``count`` steps."""
    config, shards = CONFIGS[name], get_shards(name)
    stops = dict.fromkeys(range(len(shards)), count)
    begun = World(config, shards, schedule=schedule(count), stops=stops).run()
    saved = begun.save()
    rest = World(config, shards, schedule=schedule(7), checkpoints=saved).run()
    paths = []
    for rank, (node, checkpoint) in enumerate(zip(rest.nodes, saved, strict=True)):
        paths.append(folder / f"{rank}.ndjson")
        write_trace(paths[-1], node, Origin(), checkpoint)
    return paths


def find_carrying(folder: Path, schedule: type[AnyOrder] = AnyOrder) -> list[Path]:
    """Writes traces of an epoch in which rank 0 continues with samples carried into a later round."""
    for count in range(20):
        paths = write_rest(folder, "join", count, schedule=schedule)
        start = Tampered(paths[0]).records[0]["event"]["start"]
        if start["carried"] and start["round"] > 0:
            return paths
    raise AssertionError("nothing is carried")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_rest_of_an_epoch_is_accepted_after_any_step(name: str, tmp_path: Path) -> None:
    """Spec: R9.4, R10.2."""
    total = len(World(CONFIGS[name], get_shards(name)).run().nodes[0].taken)
    assert total > 1
    rounds = set()
    for count in range(total + 1):
        paths = write_rest(tmp_path, name, count)
        job = check_traces(paths, is_replayed=True).jobs[0]
        assert job.violations == ()
        assert job.get_status(Property.REPLAY) is Status.HOLDS
        assert job.get_status(Property.QUOTA if "quota" in name else Property.COVER) is Status.HOLDS
        first = json.loads(paths[0].read_text().splitlines()[1])
        VALIDATOR.validate(first)
        start = first["event"]["start"]
        assert job.steps == total - start["planned_steps"]
        rounds.add(start["round"])
    assert max(rounds) > 0


def increase_start(field: str) -> Callable[[Tampered], None]:
    def change(trace: Tampered) -> None:
        trace.records[0]["event"]["start"][field] += 1

    return change


def drop_carried(trace: Tampered) -> None:
    event = trace.records[0]["event"]
    gone = event["start"]["carried"].pop()
    event["samples"] = [row for row in event["samples"] if row[1] != gone]


def drop_row(trace: Tampered) -> None:
    trace.records[0]["event"]["samples"].pop()


def resume_again(trace: Tampered) -> None:
    trace.records.insert(1, {**trace.records[0], "effects": []})


def lose_start(trace: Tampered) -> None:
    trace.records[0]["event"] = None


TAMPERED: dict[str, tuple[Callable[[Tampered], None], Property]] = {
    "other steps": (increase_start("planned_steps"), Property.ALIGN),
    "other global samples": (increase_start("global_samples"), Property.ALIGN),
    "another round": (increase_start("round"), Property.EXCHANGE),
    "more read": (increase_start("read_samples"), Property.ONCE),
    "a carried sample is forgotten": (drop_carried, Property.CONSERVE),
    "carried, but not read again": (drop_row, Property.CONSERVE),
    "resumed twice": (resume_again, Property.EXCHANGE),
    "no start": (lose_start, Property.EXCHANGE),
}


def tamper_start(name: str, folder: Path) -> tuple[Violation, ...]:
    """Returns the violations in a trace whose start is changed."""
    paths = find_carrying(folder)
    trace = Tampered(paths[0])
    TAMPERED[name][0](trace)
    trace.write(paths[0])
    return check_traces(paths).violations


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_start_is_found(name: str, tmp_path: Path) -> None:
    """Spec: R9.4."""
    found = tamper_start(name, tmp_path)
    assert TAMPERED[name][1] in {item.property for item in found}
    check_said(f"a start: {name}", [str(item) for item in found])


def test_a_resumed_trace_is_told_how_often_each_property_was_checked(tmp_path: Path) -> None:
    """Spec: R9.4."""
    (job,) = check_traces(find_carrying(tmp_path), is_replayed=True).jobs
    assert job.is_ok
    check_said("resumed", show(job))


def test_what_was_taken_before_is_not_emitted_again(tmp_path: Path) -> None:
    """Spec: R9.4. Checks: ONCE."""
    paths = find_carrying(tmp_path)
    trace = Tampered(paths[0])
    start = trace.records[0]["event"]["start"]
    taken = next(item for item in range(start["read_samples"]) if item not in start["carried"])
    step = next(step for effect in trace.effects("collate") for step in effect["steps"] if step["positions"])
    step["positions"][0] = taken
    trace.write(paths[0])
    assert {Property.ONCE, Property.COVER} <= {item.property for item in check_traces(paths).violations}


def test_a_rank_that_goes_on_from_another_round_is_a_mismatch(tmp_path: Path) -> None:
    """Spec: R7.3, R10.2. The trace is right, but the job was started wrongly."""
    config = make_config(world_size=2)
    start = RoundStart(round=1, read_samples=1, is_ended=True, marks=(1,), planned_steps=1, global_samples=2)
    with TraceWriter(tmp_path / "t", config, driver="test") as writer:
        first, second = (Machine(replace(config, rank=rank), writer.record) for rank in range(2))
        (late,) = first.begin(start)
        second.begin()
        (early,) = second.handle(SamplesRead((), True))
        agreed = Agreed(reduce_offers([late.offer, early.offer]))
        posts = [effect for machine in (first, second) for effect in machine.handle(agreed)]
        reported = Reported(tuple(effect.report for effect in posts if isinstance(effect, PostReport)))
        for machine in (first, second):
            machine.handle(reported)
    job = check_traces([tmp_path / "t"], is_replayed=True).jobs[0]
    assert job.outcome == "mismatch by rank 1: round 0, rank 0 is in 1"
    assert job.violations == ()


def test_the_checker_refuses_each_start_that_the_core_refuses() -> None:
    """Checks: RESUME. Each in its own words: they share no code."""
    settings: Any = SimpleNamespace(update_samples=None, shared_samples=None)
    for name, (start, _) in IMPOSSIBLE.items():
        assert {broken for broken, _ in judge_start(settings, start)} == {Property.RESUME}, name
    assert not list(judge_start(settings, START))
    inside = RoundStart(planned_steps=2, global_samples=2)
    assert not list(judge_start(SimpleNamespace(**vars(settings) | {"update_samples": 9}), inside))  # type: ignore[arg-type]
