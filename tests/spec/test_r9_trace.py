"""R9: the trace format, against its schema."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path

import pytest

from odb_ref.core.config import Config
from odb_ref.core.events import LocalFailed, PeerLost, Urged
from odb_ref.trace.format import TraceError, decode_config, encode_event
from odb_ref.trace.reading import read_trace
from odb_ref.trace.writing import TraceWriter
from tests.helpers.schema import SCHEMA, VALIDATOR
from tests.helpers.world import World, make_config, make_shards, run

SHARDS = [[3, 4, 1, 9, 2, 8, 8], [2], [], [5] * 7]
COSTS = [[(length % 4, length // 2) for length in shard] for shard in SHARDS]
CASES: list[dict[str, object]] = [
    {}, {"stops": {0: 1}}, {"fails": {1: ("collate", 0)}}, {"fails": {0: ("read", 1)}},
]  # fmt: skip


def _write(world: World, path: Path) -> None:
    with TraceWriter(path, world.nodes[0].machine.config, driver="test") as writer:
        for rank, node in enumerate(world.nodes):
            writer.record(rank, None, ())
            for event, effects in node.events:
                writer.record(rank, event, effects, time_s=0.5)


@pytest.mark.parametrize("case", CASES)
def test_every_line_of_a_trace_has_the_schema(case: dict[str, object], tmp_path: Path) -> None:
    """Spec: R9, R9.2, R9.3."""
    _write(run(SHARDS, make_config(), **case), tmp_path / "t.ndjson")
    lines = (tmp_path / "t.ndjson").read_text().splitlines()
    kinds = set()
    for line in lines:
        data = json.loads(line)
        VALIDATOR.validate(data)
        kinds |= {effect["kind"] for effect in data.get("effects", ())}
    assert kinds >= {"read", "post_offer", "finish"}
    assert ("post_report" in kinds) == ("fails" in case)


def test_the_schema_names_every_shared_setting() -> None:
    """Spec: R1.4. So no new setting is forgotten. The required ones are those that existed in the first version."""
    shared = [item for item in fields(Config) if item.init and not item.metadata.get("is_own")]
    config = SCHEMA["$defs"]["config"]
    assert set(config["properties"]) == {item.name for item in shared}
    assert set(config["required"]) == {item.name for item in shared if "absent" not in item.metadata}


def test_the_times_of_a_rank_never_fall(tmp_path: Path) -> None:
    """Spec: R9. Those of two ranks are of two clocks."""
    with TraceWriter(tmp_path / "t", make_config(world_size=2), driver="test") as writer:
        for rank, time_s in ((0, 5.0), (1, 2.0), (1, None), (0, 5.0), (1, 2.5), (1, 2.25)):
            writer.record(rank, Urged(), (), time_s=time_s)
    _, records = read_trace(tmp_path / "t")
    assert [next(records).time_s for _ in range(5)] == [5.0, 2.0, None, 5.0, 2.5]
    with pytest.raises(TraceError, match=r"t:7: a time of rank 1 falls from 2\.5 to 2\.25 s"):
        next(records)


def test_costs_and_limits_are_written_where_there_are_any(tmp_path: Path) -> None:
    """Spec: R9.2, R1.4."""
    _write(World(make_config(limits=(4, 6)), make_shards(SHARDS, COSTS)).run(), tmp_path / "limits")
    _write(run(SHARDS, make_config()), tmp_path / "none")
    for name, limits, width in (("limits", [4, 6], 6), ("none", None, 4)):
        header, *records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert header["config"].get("limits") == limits
        assert decode_config(header["config"], rank=2, depth_steps=2) == make_config(
            world_size=4, rank=2, limits=tuple(limits or ())
        )
        rows = [row for record in records if record["event"] for row in record["event"].get("samples", ())]
        assert {len(row) for row in rows} == {width}
        for line in (header, *records):
            VALIDATOR.validate(line)
    rows[0].append(-1)
    assert not all(map(VALIDATOR.is_valid, records))


def test_a_simulated_trace_has_the_schema(tmp_path: Path) -> None:
    """Spec: R9."""
    cli = pytest.importorskip("odb_sim.cli.main")
    path = tmp_path / "t.ndjson"
    options = "--ranks 2 --token-budget 4096 --window 8 --samples 40 --seed 5 --trace"
    assert cli.main(["simulate", "gsm8k", *options.split(), str(path)]) in (0, None)
    lines = path.read_text().splitlines()
    for line in lines:
        VALIDATOR.validate(json.loads(line))
    assert len(lines) > 40


def test_the_schema_knows_events_no_run_above_holds() -> None:
    """Spec: R9.2."""
    for event in (LocalFailed("x"), PeerLost(None, "x"), PeerLost(2, "x"), Urged()):
        VALIDATOR.validate({"rank": 0, "event": encode_event(event), "effects": []})


def test_a_tampered_line_is_refused(tmp_path: Path) -> None:
    """Spec: R9. The schema must be able to fail."""
    _write(run(SHARDS, make_config()), tmp_path / "t.ndjson")
    header, *records = [json.loads(line) for line in (tmp_path / "t.ndjson").read_text().splitlines()]
    collate = next(r for r in records if any(e["kind"] == "collate" for e in r["effects"]))

    def tamper(record: dict[str, object], path: list[object], value: object) -> object:
        changed = copy.deepcopy(record)
        place: object = changed
        for key in path[:-1]:
            place = place[key]  # type: ignore[index]
        place[path[-1]] = value  # type: ignore[index]
        return changed

    for record, path, value in (
        (header, ["version"], 3),
        (header, ["config", "mode"], "both"),
        (collate, ["rank"], -1),
        (collate, ["effects", 0, "kind"], "collates"),
        (collate, ["effects", 0, "steps", 0, "number"], "0"),
        (collate, ["effects", 0, "steps", 0, "extra"], 0),
        (collate, ["effects", 0, "steps"], []),
    ):
        assert not VALIDATOR.is_valid(tamper(record, path, value)), path
