"""What there was to train on, and parts of one epoch: dropped tails, repeats, gaps, exchanged ids. Spec: R9.6."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.resume import Checkpoint, Resumed
from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.format import TraceError
from odb_ref.trace.origin import DIGEST_BITS, Lot, Origin, OwnedLot, digest_ids, make_lot
from odb_ref.trace.reading import read_trace
from odb_ref.trace.writing import TraceWriter
from tests.helpers.tamper import Tampered
from tests.helpers.world import AnyOrder, Node, Shard, World, make_config, make_configs, make_shards, run_by_arrival

SHARDS = make_shards(
    [
        [7, 7, 1, 5, 9, 8, 7, 5, 8, 6, 4, 9, 3, 5, 3, 2],
        [5, 9, 3, 5, 2, 2, 6, 8, 9],
        [2, 6, 7, 6, 4, 9, 8, 8, 9, 5, 1],
        [9, 1, 2, 7, 1, 8, 6, 4, 6, 2, 4, 4, 4],
    ]
)
INPUTS = [make_lot(sample.id for sample in shard) for shard in SHARDS]
STEPS = 6


def write(
    paths: Sequence[Path], nodes: Sequence[Node], origins: Sequence[Origin], saved: Sequence[Checkpoint] = ()
) -> None:
    for rank, (path, node) in enumerate(zip(paths, nodes, strict=True)):
        with TraceWriter(path, node.machine.config, driver="test", origin=origins[rank]) as writer:
            event = None
            if saved:
                start = saved[rank].start
                event = Resumed(start, tuple(node.shard[position] for position in start.carried))
            writer.record(rank, event, node.begun)
            for item, effects in node.events:
                writer.record(rank, item, effects)


def list_paths(folder: Path, name: str, ranks: int = len(SHARDS)) -> list[Path]:
    return [folder / f"{name}{rank}.ndjson" for rank in range(ranks)]


def write_job(folder: Path, run: str = "r") -> list[Path]:
    """An epoch that is stopped after some steps, and its rest."""
    config, ranks = make_config(), range(len(SHARDS))
    begun = World(config, SHARDS, schedule=AnyOrder(5), stops=dict.fromkeys(ranks, STEPS)).run()
    saved = [node.ledger.compute_checkpoint() for node in begun.nodes]
    rest = World(config, SHARDS, schedule=AnyOrder(7), checkpoints=saved).run()
    inputs = [OwnedLot(rank=rank, lot=INPUTS[rank]) for rank in ranks]
    taken = [make_lot(sample.id for step in node.taken for sample in step.group) for node in begun.nodes]
    first, second = list_paths(folder, "a"), list_paths(folder, "b")
    write(first, begun.nodes, [Origin(run=f"{run}1", inputs=(inputs[rank],)) for rank in ranks])
    before = [OwnedLot(rank=rank, lot=taken[rank], steps=STEPS) for rank in ranks]
    write(second, rest.nodes, [Origin(run=f"{run}2", inputs=(inputs[r],), before=(before[r],)) for r in ranks], saved)
    return [*first, *second]


def write_fewer_ranks(folder: Path) -> list[Path]:
    """An epoch of four ranks that is stopped, and its rest on two."""
    begun = World(make_config(), SHARDS, schedule=AnyOrder(5), stops=dict.fromkeys(range(4), STEPS)).run()
    gone = {sample.id for node in begun.nodes for step in node.taken for sample in step.group}
    left = [sample for shard in SHARDS for sample in shard if sample.id not in gone]
    halves: list[Shard] = [
        tuple(type(sample)(sample.id, i, sample.length, sample.supervised) for i, sample in enumerate(left[rank::2]))
        for rank in range(2)
    ]
    rest = World(make_config(), tuple(halves), schedule=AnyOrder(7)).run()
    first, second = list_paths(folder, "a"), list_paths(folder, "b", 2)
    write(first, begun.nodes, [Origin(inputs=(OwnedLot(rank=rank, lot=INPUTS[rank]),)) for rank in range(4)])
    before = OwnedLot(lot=make_lot(gone), steps=STEPS)
    lots = [make_lot(sample.id for sample in half) for half in halves]
    write(second, rest.nodes, [Origin(inputs=(OwnedLot(rank=r, lot=lots[r]),), before=(before,)) for r in range(2)])
    return [*first, *second]


def tell(paths: Sequence[Path]) -> set[str]:
    return {str(item.property) for item in check_traces(paths).violations}


def change(path: Path, what: Callable[[Tampered], None]) -> None:
    trace = Tampered(path)
    what(trace)
    trace.write(path)


@pytest.mark.parametrize("make", [write_job, write_fewer_ranks])
def test_a_job_and_its_rest_are_accepted(make: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    """Spec: R9.6, R10.2, R10.3."""
    verdict = check_traces(make(tmp_path), is_replayed=True)
    assert verdict.is_ok, [str(item) for item in verdict.violations]
    assert [job.get_status(Property.RESUME) for job in verdict.jobs] == [Status.NOT_APPLICABLE, Status.HOLDS]


def test_a_rest_alone_is_judged_by_its_header_and_says_what_is_missing(tmp_path: Path) -> None:
    """Spec: R9.6."""
    (job,) = check_traces(write_job(tmp_path)[4:]).jobs
    assert job.violations == ()
    assert job.get_status(Property.RESUME) is Status.NOT_APPLICABLE
    assert job.unsaid == ("whether it goes on where it had stopped: no trace of the part before is given",)


def drop_the_tail(trace: Tampered) -> None:
    """A rank's input is shorter than there were samples: the header says more than it reads."""
    trace.header["inputs"][0]["samples"] += 1


def give_one_sample_another_id(trace: Tampered) -> None:
    [event for event in trace.events("samples_read") if event["samples"]][-1]["samples"][0][0] += 10**6


def say_that_more_was_trained_on(trace: Tampered) -> None:
    """Consistently: of one sample that this part trains on, the header says that it was trained on before."""
    part, lot = trace.header["before"][0], make_lot([SHARDS[0][-1].id])
    new = Lot(part["samples"], part["digest"]) + lot
    part |= {"samples": new.samples, "digest": new.digest}


def say_that_less_was_trained_on(trace: Tampered) -> None:
    part, lot = trace.header["before"][0], make_lot([SHARDS[0][0].id])
    new = Lot(part["samples"], part["digest"]) - lot
    part |= {"samples": new.samples, "digest": new.digest}


def go_on_after_another_step(trace: Tampered) -> None:
    trace.header["before"][0]["steps"] -= 1


REST: dict[Callable[[Tampered], None], str] = {
    drop_the_tail: "COVER",
    give_one_sample_another_id: "COVER",
    say_that_more_was_trained_on: "ONCE RESUME",
    say_that_less_was_trained_on: "COVER RESUME",
    go_on_after_another_step: "ONCE",
}


@pytest.mark.parametrize("forge", REST, ids=[item.__name__ for item in REST])
def test_a_forged_rest_is_refused(forge: Callable[[Tampered], None], tmp_path: Path) -> None:
    """Spec: R9.6. Checks: COVER, ONCE, RESUME."""
    paths = write_job(tmp_path)
    change(paths[4], forge)
    assert set(REST[forge].split()) <= tell(paths)


def test_ids_exchanged_between_ranks_are_found(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: COVER."""
    paths = write_job(tmp_path)
    first, second = (Tampered(path) for path in paths[4:6])
    rows = [next(e["samples"] for e in reversed(t.events("samples_read")) if e["samples"]) for t in (first, second)]
    rows[0][0][0], rows[1][0][0] = rows[1][0][0], rows[0][0][0]
    first.write(paths[4])
    second.write(paths[5])
    assert tell(paths) == {"COVER"}


def test_a_rest_on_fewer_ranks_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    """Spec: R9.6, R10.3. Checks: RESUME."""
    paths = write_fewer_ranks(tmp_path)
    for path in paths[4:]:
        change(path, lambda trace: trace.header["before"][0].update(steps=STEPS - 1))
    assert tell(paths) == {"RESUME"}


def test_an_epoch_that_a_run_begins_again_is_refused(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: ONCE."""
    for name in ("a", "b"):
        run_by_arrival([[3, 5], [4]], make_configs(2), trace=tmp_path / name, run="the same")
    assert tell([tmp_path / "a", tmp_path / "b"]) == {"ONCE"}
    change(tmp_path / "b", lambda trace: trace.header.update(run="another"))
    assert tell([tmp_path / "a", tmp_path / "b"]) == set()


def test_a_gap_between_epochs_is_said(tmp_path: Path) -> None:
    """Spec: R9.6."""
    for epoch in (0, 2):
        path = tmp_path / str(epoch)
        run_by_arrival([[3, 5], [4]], make_configs(2), trace=path, run="r")
        change(path, lambda trace, epoch=epoch: trace.header.update(epoch=epoch))
    first, second = check_traces([tmp_path / "0", tmp_path / "2"]).jobs
    assert first.unsaid == ()
    assert second.unsaid == ("whether epoch 1 was trained on: no trace of it is given",)


def test_a_sample_set_aside_is_accounted_for(tmp_path: Path) -> None:
    """Spec: R9.6, R11.1."""
    path = tmp_path / "t"
    run_by_arrival([[3, 5], [4]], make_configs(2), trace=path)
    change(path, drop_the_tail)
    assert tell([path]) == {"COVER"}
    trace = Tampered(path)
    lot = Lot(2, trace.header["inputs"][0]["digest"]) + make_lot([77])
    trace.header["inputs"][0] |= {"samples": lot.samples, "digest": lot.digest}
    trace.records.insert(2, {"rank": 0, "event": {"kind": "set_aside", "id": 77}, "effects": []})
    assert check_traces([trace.write(path)], is_replayed=True).is_ok


def test_a_trace_of_version_1_is_judged_and_what_cannot_be_said_is_said(tmp_path: Path) -> None:
    """Spec: R9.6."""
    path = tmp_path / "t"
    run_by_arrival([[3, 5], [4]], make_configs(2), trace=path)
    trace = Tampered(path)
    trace.header["version"] = 1
    with pytest.raises(TraceError, match="the header has the unknown field 'inputs'"):
        check_traces([trace.write(path)])
    del trace.header["inputs"]
    (job,) = check_traces([trace.write(path)], is_replayed=True).jobs
    assert job.violations == ()
    assert job.unsaid == (
        "whether all samples were trained on: the header does not say how many there are",
        "whether an epoch was trained on twice, or left out: the header does not say of which run it is",
    )


def test_lots_add_up_in_any_order() -> None:
    """Spec: R9.6."""
    ids = [5, -3, 2**62, 5, 0]
    assert make_lot(ids[:2]) + make_lot(ids[2:]) == make_lot(reversed(ids))
    assert make_lot(ids) - make_lot(ids[:2]) == make_lot(ids[2:])
    assert digest_ids(ids) != digest_ids([5, -3, 2**62, 6, -1])
    assert 0 <= digest_ids(range(1000)) < 2**DIGEST_BITS


PART = {"rank": 0, "samples": 1, "digest": 1, "steps": 0}


@pytest.mark.parametrize(
    "origin",
    [
        {"run": 5},
        {"inputs": 5},
        {"inputs": [{"rank": 0}]},
        {"inputs": [PART, PART]},
        {"inputs": [PART, PART | {"rank": None}]},
        {"before": [PART | {"rank": 2}]},
        {"before": [PART | {"rank": True}]},
        {"before": [PART | {"samples": -1}]},
        {"before": [PART | {"digest": 2**DIGEST_BITS}]},
        {"before": [PART | {"more": 1}]},
        {"inputs": [PART]},
    ],
)
def test_a_malformed_origin_is_refused(origin: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t"
    run_by_arrival([[3, 5], [4]], make_configs(2), trace=path)
    trace = Tampered(path)
    trace.header |= origin
    with pytest.raises(TraceError, match="t:1: the header has"):
        check_traces([trace.write(path)])


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    origin = Origin(run="r", inputs=(OwnedLot(rank=0, lot=Lot(3, 7)),), before=(OwnedLot(lot=Lot(2, 9), steps=4),))
    with TraceWriter(tmp_path / "t", make_config(), driver="test", origin=origin) as writer:
        writer.set_aside(0, 5)
    header, records = read_trace(tmp_path / "t")
    assert header.origin == origin
    assert [record.event for record in records] == [json.loads('{"kind": "set_aside", "id": 5}')]


def test_a_round_of_the_ramp_has_the_target_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R3.3, R9. Checks: REPLAY."""
    monkeypatch.setattr("odb_ref.core.rounds.RAMP_SHARE", 1)
    path = tmp_path / "t"
    run_by_arrival([[9] * 40], make_configs(1, budget_tokens=9, window_samples=32, ramp_rounds=2), trace=path)
    monkeypatch.undo()
    assert tell([path]) == {"REPLAY"}
    trace = Tampered(path)
    trace.header["version"] = 1
    del trace.header["inputs"]
    (job,) = check_traces([trace.write(path)], is_replayed=True).jobs
    assert job.violations == ()
    (replayed,) = (item for item in job.properties if item.property is Property.REPLAY)
    assert "a trace of version 1" in replayed.reason
