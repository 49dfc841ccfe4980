"""Recorded runs are behaviours of the TLA+ model; tampered ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from odb_ref import Batching
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.offer import NONE
from odb_ref.core.types import Mode
from odb_ref.trace.format import Record
from odb_ref.trace.writing import TraceWriter
from tests.helpers.world import World, make_config, make_shards
from tests.tla.tlc import Result, require_tlc, run_tlc
from tests.tla.traces import merge, read_records, write_trace_data

REFUSED = "Deadlock reached."
SHARDS = [[3, 4, 1, 9, 2, 8, 8, 1, 1], [2, 2], [5, 1] * 6]
CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "join": ({}, {}),
    "ramp and age": ({"ramp_rounds": 2, "max_age_rounds": 1, "window_samples": 6}, {}),
    "quota": ({"mode": Mode.QUOTA, "quota_samples": 7}, {}),
    "failure": ({}, {"fails": {2: ("collate", 1)}}),
    "stop": ({"depth_steps": 1}, {"stops": {0: 1}}),
    "budgets": ({}, {"budgets": [lambda step, _: 3 if step in (3, 4, 5) else 8, None, lambda step, _: 8 - step % 3]}),
}


def _record(path: Path, name: str, seed: int) -> Path:
    """Records a run of real machines under a random schedule, in the order of events."""
    config, options = CASES[name]
    world = World(make_config(order=StepOrder.FULLEST, **config), make_shards(SHARDS), seed=seed, **options)  # type: ignore[arg-type]
    with TraceWriter(path, world.nodes[0].machine.config, driver="test") as writer:
        for rank, node in enumerate(world.nodes):
            writer.record(rank, None, node.begun)
        seen = [0] * len(world.nodes)
        while world.step():
            for rank, node in enumerate(world.nodes):
                for event, effects in node.events[seen[rank] :]:
                    writer.record(rank, event, effects)
                seen[rank] = len(node.events)
    return path


def _check(paths: list[Path], work: Path) -> Result:
    header, records = read_records(paths)
    return run_tlc(write_trace_data(header, records, work), work)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_of_the_core_is_a_behaviour_of_the_model(name: str, tmp_path: Path) -> None:
    """Checks: ALIGN, CONSERVE, RELEASE."""
    path = _record(tmp_path / "t.ndjson", name, seed=len(name))
    result = _check([path], tmp_path)
    assert result.error == "", result.output[-3000:]
    assert result.states == sum(1 for _ in path.open())  # one state for each line and one before it, without the header


@pytest.mark.deep
def test_a_simulated_run_on_real_lengths_is_a_behaviour_of_the_model(tmp_path: Path) -> None:
    """Checks: ALIGN, CONSERVE, RELEASE, COVER."""
    require_tlc()
    cli = pytest.importorskip("odb_sim.cli.main")
    path = tmp_path / "t.ndjson"
    options = "--ranks 3 --token-budget 4096 --window 8 --depth 2 --samples 60 --shards uneven --seed 5 --json"
    code = cli.main(["simulate", "gsm8k", *options.split(), str(tmp_path / "s.json"), "--trace", str(path)])
    assert code in (0, None)
    assert json.loads((tmp_path / "s.json").read_text())["samples_emitted"] == 60
    result = _check([path], tmp_path)
    assert result.error == "", result.output[-3000:]


def test_a_budget_that_a_rank_was_not_told_of_is_refused(tmp_path: Path) -> None:
    """Spec: R15.2. A rank offers what it accepts."""
    header, records = read_records([_record(tmp_path / "t.ndjson", "budgets", seed=7)])
    told = [i for i, record in enumerate(records) if record.event and record.event["kind"] == "budget_accepted"]
    assert told
    del records[told[0]]
    result = run_tlc(write_trace_data(header, records, tmp_path), tmp_path)
    assert result.error == REFUSED, result.output[-2000:]


def test_files_of_one_rank_each_are_merged(tmp_path: Path) -> None:
    """The order within a rank is kept, and every answer comes after all posts."""
    header, records = read_records([_record(tmp_path / "t.ndjson", "join", seed=1)])
    by_rank = [record for rank in range(header.world_size) for record in records if record.rank == rank]
    merged = merge(header.world_size, by_rank)
    assert merged != by_rank
    for rank in range(header.world_size):
        assert [r for r in merged if r.rank == rank] == [r for r in records if r.rank == rank]
    result = run_tlc(write_trace_data(header, merged, tmp_path), tmp_path)
    assert result.error == "", result.output[-3000:]


def _find(records: list[Record], kind: str) -> int:
    """Returns the place of the last record with an effect or event of that kind."""
    return max(
        i
        for i, record in enumerate(records)
        if (record.event or {}).get("kind") == kind or any(effect["kind"] == kind for effect in record.effects)
    )


def _count_samples(record: Record) -> int:
    """Returns the number of samples in the first step that the record collates, or 0 if it collates none."""
    steps = record.effects[0].get("steps", []) if record.effects else []
    return len(steps[0]["positions"]) if steps else 0  # type: ignore[index, arg-type, call-overload]


def _change(record: Record, kind: str, field: str, value: object) -> Record:
    effects = tuple({**effect, field: value} if effect["kind"] == kind else effect for effect in record.effects)
    return replace(record, effects=effects)  # type: ignore[arg-type]


def _offer_otherwise(record: Record, emit: Callable[[int], int]) -> Record:
    """Changes the number of groups to emit in the offer of a rank that reads on, and in the agreement."""

    def change(item: dict[str, object]) -> dict[str, object]:
        return (
            item | {"groups_min": emit(cast(int, item["groups_max"]))} if item.get("groups_min", NONE) != NONE else item
        )

    event, effects = json.loads(json.dumps([record.event, record.effects]), object_hook=change)
    return replace(record, event=event, effects=tuple(effects))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "drop a line",
        "swap deliveries",
        "lose a sample",
        "finish early",
        "read more",
        "other sum",
        "emit none",
        "keep two",
    ],
)
def test_a_tampered_trace_is_refused(way: str, tmp_path: Path) -> None:
    """The validation must be able to fail."""
    header, records = read_records([_record(tmp_path / "t.ndjson", "join", seed=3)])
    match way:
        case "drop a line":
            del records[_find(records, "collated")]
        case "swap deliveries":
            i = _find(records, "deliver")
            records[i] = _change(records[i], "deliver", "number", 0)
        case "lose a sample":
            held = [record for record in records if _count_samples(record)]
            i = records.index(held[-1])
            steps = [dict(step) for step in records[i].effects[0]["steps"]]  # type: ignore[union-attr, arg-type]
            steps[0]["positions"] = steps[0]["positions"][1:]
            records[i] = _change(records[i], "collate", "steps", steps)
        case "finish early":
            i = _find(records, "finish")
            records[i] = _change(records[i], "finish", "step_limit", 1)
        case "read more":
            i = _find(records, "read")
            records[i] = _change(records[i], "read", "count", 99)
        case "other sum":
            i = _find(records, "counted")
            event = {"kind": "counted", "counts": [[9, 9, 9]] * len(records[i].event["counts"])}  # type: ignore[index, arg-type]
            records[i] = replace(records[i], event=event)
        case "emit none":
            records = [_offer_otherwise(record, lambda _: 0) for record in records]
        case "keep two":
            records = [_offer_otherwise(record, lambda groups: max(1, groups - 2)) for record in records]
    result = run_tlc(write_trace_data(header, records, tmp_path), tmp_path)
    assert result.error == REFUSED, result.output[-3000:]


def _train(rank: int, folder: str) -> int:
    from odb_ref.torch import ODBDataLoader
    from tests.torch.data import Numbers

    data = Numbers(0, 24) if rank == 0 else Numbers(24, 9)
    steps = 0
    path = str(Path(folder) / "rank{rank}.ndjson")
    with ODBDataLoader(
        data,
        token_budget=60,
        shard="given",
        collate_fn=list,
        num_workers=1,
        trace=path,
        batching=Batching(window=8, depth=2),
    ) as loader:
        for _ in loader:
            steps += 1
    return steps


def test_a_run_of_two_real_processes_is_a_behaviour_of_the_model(tmp_path: Path) -> None:
    """Checks: ALIGN, CONSERVE, RELEASE, COVER."""
    pytest.importorskip("torch")
    require_tlc()
    from tests.torch.ranks import run_ranks

    results = run_ranks(2, _train, str(tmp_path))
    assert [result.text for result in results] == ["", ""]
    assert results[0].value == results[1].value > 3
    result = _check(sorted(tmp_path.glob("rank*.ndjson")), tmp_path)
    assert result.error == "", result.output[-3000:]
    assert result.states > 50
