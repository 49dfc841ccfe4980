"""What there was to train on, and parts of one epoch: dropped tails, repeats, gaps, exchanged ids. Spec: R9.6."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.resume import Checkpoint
from odb_ref.core.types import Mode
from odb_ref.trace.check import Property, Status, check_traces
from odb_ref.trace.format import TraceError
from odb_ref.trace.origin import DIGEST_BITS, Lot, Origin, OwnedLot, digest_ids, make_lot, place_lot
from odb_ref.trace.reading import read_trace
from odb_ref.trace.writing import TraceWriter
from tests.helpers.tamper import Tampered, tamper
from tests.helpers.world import (
    AnyOrder,
    Fault,
    Node,
    World,
    list_paths,
    make_config,
    make_configs,
    make_input,
    run_by_arrival,
    write_trace,
)
from tests.trace.lies import find_broken, get_verdict
from tests.trace.test_resumed import SHARDS

STEPS = 6


def write(
    paths: Sequence[Path], nodes: Sequence[Node], origins: Sequence[Origin], saved: Sequence[Checkpoint] = ()
) -> None:
    for rank, (path, node) in enumerate(zip(paths, nodes, strict=True)):
        write_trace(path, node, origins[rank], saved[rank] if saved else None)


def write_begun(folder: Path) -> tuple[list[Path], World]:
    """Writes an epoch that stops after some steps."""
    ranks, paths = range(len(SHARDS)), list_paths(folder / "a", len(SHARDS))
    world = World(make_config(), SHARDS, schedule=AnyOrder(5), stops=dict.fromkeys(ranks, STEPS)).run()
    write(paths, world.nodes, [Origin(run="r1", inputs=(make_input(rank, SHARDS[rank]),)) for rank in ranks])
    return paths, world


def write_job(folder: Path, lost: int | None = None) -> list[Path]:
    """Writes such an epoch, and its rest. The rest has one sample of ``lost`` less, and says so."""
    (first, begun), second = write_begun(folder), list_paths(folder / "b", len(SHARDS))
    saved = begun.save()
    shards = [shard[:-1] if rank == lost else shard for rank, shard in enumerate(SHARDS)]
    rest = World(make_config(), shards, schedule=AnyOrder(7), checkpoints=saved).run()
    origins = []
    for rank, (node, shard) in enumerate(zip(begun.nodes, shards, strict=True)):
        taken = make_lot(sample.id for sample in node.trained)
        before = OwnedLot(rank=rank, lot=taken, steps=STEPS, run="r1")
        origins.append(Origin(run="r2", inputs=(make_input(rank, shard),), before=(before,)))
    write(second, rest.nodes, origins, saved)
    return [*first, *second]


def write_fewer_ranks(folder: Path) -> list[Path]:
    """Writes an epoch of four ranks that stops, and its rest on two."""
    (first, begun), second = write_begun(folder), list_paths(folder / "b", 2)
    gone = {sample.id for node in begun.nodes for sample in node.trained}
    left = [sample for shard in SHARDS for sample in shard if sample.id not in gone]
    halves = [tuple(replace(sample, position=i) for i, sample in enumerate(left[rank::2])) for rank in range(2)]
    rest = World(make_config(), halves, schedule=AnyOrder(7)).run()
    before = OwnedLot(lot=make_lot(gone), steps=STEPS, run="r1")
    origins = [Origin(run="r2", inputs=(make_input(rank, half),), before=(before,)) for rank, half in enumerate(halves)]
    write(second, rest.nodes, origins)
    return [*first, *second]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Returns the trace of a few samples."""
    run_by_arrival([[3, 5], [4]], make_configs(2), trace=tmp_path / "t")
    return tmp_path / "t"


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
    assert job.unsaid == ("whether it resumed where it had stopped: no trace of the earlier part is given",)


def test_an_epoch_that_is_gone_on_with_twice_is_said(tmp_path: Path) -> None:
    """Spec: R9.6. What was trained on the first time may have been undone since then: no trace shows the model."""
    paths = write_job(tmp_path)
    again = [Path(shutil.copy(path, tmp_path / f"again-{path.name}")) for path in paths[4:]]
    said = f"whether epoch 0 was trained on 2 times after step {STEPS}: other traces resume from there too"
    assert [list(job.unsaid) for job in check_traces([*paths, *again]).jobs] == [[], [said], [said]]


def drop_the_tail(trace: Tampered) -> None:
    """A rank's input is shorter than the data: the header has more samples than the rank reads."""
    trace.header["inputs"][0]["samples"] += 1


def give_one_sample_another_id(trace: Tampered) -> None:
    [event for event in trace.events("samples_read") if event["samples"]][-1]["samples"][0][0] += 10**6


def say_that_more_was_trained_on(trace: Tampered) -> None:
    """Consistently, the header claims that a sample was trained on before, although this part trains on it."""
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
    tamper(paths[4], forge)
    assert set(REST[forge].split()) <= find_broken(*paths)


def test_ids_exchanged_between_ranks_are_found(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: COVER."""
    paths = write_job(tmp_path)
    first, second = (Tampered(path) for path in paths[4:6])
    rows = [next(e["samples"] for e in reversed(t.events("samples_read")) if e["samples"]) for t in (first, second)]
    rows[0][0][0], rows[1][0][0] = rows[1][0][0], rows[0][0][0]
    first.write(paths[4])
    second.write(paths[5])
    assert find_broken(*paths) == {"COVER"}


def test_a_rest_on_fewer_ranks_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    """Spec: R9.6, R10.3. Checks: RESUME."""
    paths = write_fewer_ranks(tmp_path)
    for path in paths[4:]:
        tamper(path, lambda trace: trace.header["before"][0].update(steps=STEPS - 1))
    assert find_broken(*paths) == {"RESUME"}


def test_an_epoch_that_a_run_begins_again_is_refused(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: ONCE."""
    for name in ("a", "b"):
        run_by_arrival([[3, 5], [4]], make_configs(2), trace=tmp_path / name, run="the same")
    assert find_broken(tmp_path / "a", tmp_path / "b") == {"ONCE"}
    tamper(tmp_path / "b", lambda trace: trace.header.update(run="another"))
    assert find_broken(tmp_path / "a", tmp_path / "b") == set()


def write_epochs(folder: Path, *epochs: tuple[int, str, list[list[int]]]) -> list[Path]:
    """Writes small jobs with these epochs, runs and lengths."""
    paths = [folder / f"{number}" for number in range(len(epochs))]
    for path, (epoch, run, lengths) in zip(paths, epochs, strict=True):
        run_by_arrival(lengths, make_configs(2), trace=path, run=run)
        tamper(path, lambda trace, epoch=epoch: trace.header.update(epoch=epoch))
    return paths


def list_unsaid(paths: Sequence[Path]) -> list[str]:
    verdict = check_traces(paths)
    assert verdict.is_ok
    return [text for job in verdict.jobs for text in job.unsaid]


SOME, OTHER = [[3, 5], [4]], [[3, 5], [4, 4]]


@pytest.mark.parametrize(
    ("epochs", "unsaid"),
    [
        ([(0, "r", SOME), (1, "r", SOME)], []),
        ([(0, "r", SOME), (2, "r", SOME)], ["whether epoch 1 was trained on: no trace of it is given"]),
        ([(3, "r", SOME)], ["whether epoch 2 was trained on: no trace of it is given"]),
        (
            [(0, "r", SOME), (0, "s", SOME)],
            ["whether epoch 0 was trained on twice: another run begins it with the same samples"] * 2,
        ),
        ([(0, "r", SOME), (0, "s", OTHER)], []),
        ([(0, "r", SOME), (1, "r", OTHER)], ["whether epoch 1 was meant to have other samples than epoch 0"]),
    ],
)
def test_what_epochs_do_not_tell_of_each_other_is_said(
    epochs: list[tuple[int, str, list[list[int]]]], unsaid: list[str], tmp_path: Path
) -> None:
    """Spec: R9.6."""
    assert list_unsaid(write_epochs(tmp_path, *epochs)) == unsaid


def test_files_of_two_runs_are_two_jobs_in_whatever_order(tmp_path: Path) -> None:
    """Spec: R9.6."""
    for name in "ab":
        run_by_arrival(SOME, make_configs(2), trace=tmp_path / name, run=name, is_one_file=False)
    files = [tmp_path / name for name in ("a.0", "b.1", "a.1", "b.0")]
    assert [len(job.paths) for job in check_traces(files).jobs] == [2, 2]
    assert check_traces(files).is_ok
    # Rank 1 of run a is missing, and that of b does not replace it.
    assert find_broken(*files[:2], *files[3:]) == {"FREE"}


SAMPLES = "whether all samples were trained on: the header of rank 1 does not say how many there are"
BEFORE = "whether it resumed where it had stopped: the header of rank 0 does not say what had been trained on"


def test_a_header_that_is_silent_for_one_rank_is_said(tmp_path: Path) -> None:
    """Spec: R9.6."""
    paths = write_job(tmp_path)
    assert list_unsaid(paths) == []
    tamper(paths[1], lambda trace: trace.header.pop("inputs"))
    tamper(paths[4], lambda trace: trace.header.pop("before"))
    verdict = check_traces(paths)
    assert SAMPLES in verdict.jobs[0].unsaid
    assert BEFORE in verdict.jobs[1].unsaid


def test_headers_that_contradict_each_other_are_refused_in_any_order(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: COVER. The last file used to be believed."""
    paths = write_job(tmp_path)
    more = Tampered(paths[1]).header["inputs"][0] | {"samples": 999}
    tamper(paths[0], lambda trace: trace.header["inputs"].append(more))
    for given in (paths, paths[::-1]):
        found = [item for item in check_traces(given).violations if item.property is Property.COVER]
        assert [item.rank for item in found if "headers differ about the samples" in str(item)] == [1]


def test_a_rest_that_skips_a_sample_and_says_so_is_refused(tmp_path: Path) -> None:
    """Spec: R9.6. Checks: RESUME. If no run is named, the other traces of the epoch may belong to another training."""
    paths = write_job(tmp_path, lost=0)
    assert find_broken(*paths) == {"RESUME"}
    for path in paths[4:]:
        tamper(path, lambda trace: trace.header["before"][0].pop("run"))
    assert "whether it resumed where it had stopped: the traces of that epoch are of other samples" in list_unsaid(
        paths
    )


def train_on_more_than_there_is(trace: Tampered) -> None:
    trace.header["inputs"][0]["samples"] = 1


def say_that_the_source_has_ended_early(trace: Tampered) -> None:
    trace.header["inputs"][0]["samples"] += 5


@pytest.mark.parametrize(
    ("settings", "faults", "forge", "broken"),
    [
        ({"mode": Mode.QUOTA, "quota_samples": 12}, (), train_on_more_than_there_is, "ONCE"),
        ({}, (Fault("fail", 1, 60),), train_on_more_than_there_is, "ONCE"),
        ({}, (Fault("kill", 1, 60),), train_on_more_than_there_is, "ONCE"),
        ({"mode": Mode.QUOTA}, (), say_that_the_source_has_ended_early, "QUOTA"),
        ({"window_samples": 30}, (Fault("fail", 1, 12),), say_that_the_source_has_ended_early, "CONSERVE"),
    ],
)
def test_what_there_was_bounds_epochs_that_are_not_complete(
    settings: dict[str, Any], faults: tuple[Fault, ...], forge: Callable[[Tampered], None], broken: str, tmp_path: Path
) -> None:
    """Spec: R9.6. Checks: ONCE, QUOTA, CONSERVE."""
    path = tmp_path / "t"
    run_by_arrival([[3, 5, 7, 2] * 5, [4, 9] * 9], make_configs(2, **settings), seed=3, faults=faults, trace=path)
    assert find_broken(path) == set()
    tamper(path, forge)
    assert find_broken(path) == {broken}


def exchange_ids(trace: Tampered, rank: int, other: int) -> None:
    """Exchanges the ids of the first sample of a rank and the last of another."""
    first = next(event["samples"] for event in trace.events("samples_read", rank) if event["samples"])
    last = next(event["samples"] for event in reversed(trace.events("samples_read", other)) if event["samples"])
    first[0][0], last[-1][0] = last[-1][0], first[0][0]


@pytest.mark.parametrize(
    ("settings", "other"), [({}, 0), ({"shared_samples": 38}, 1), ({"shared_samples": 38, "update_samples": 8}, 1)]
)
def test_ids_exchanged_within_a_rank_or_in_a_common_order_are_found(
    settings: dict[str, Any], other: int, tmp_path: Path
) -> None:
    """Spec: R9.6. Checks: COVER."""
    path = tmp_path / "t"
    run_by_arrival([[3, 5, 7, 2] * 5, [4, 9] * 9], make_configs(2, **settings), seed=3, trace=path)
    assert find_broken(path) == set()
    tamper(path, lambda trace: exchange_ids(trace, 0, other))
    assert find_broken(path) == {"COVER"}


def set_aside(trace: Tampered, place: int) -> dict[str, Any]:
    """Makes rank 0, which reads samples 0 and 1, set sample 77 aside. The header counts it at that place. Returns the event."""
    placed = place_lot([0]) + place_lot([1], 2 if place == 1 else 1) + place_lot([77], place)
    trace.header["inputs"][0] |= {"samples": 3, "digest": digest_ids([0, 1, 77]), "order": placed.digest}
    event = {"kind": "set_aside", "id": 77, "place": place}
    trace.records.insert(2, {"rank": 0, "event": event, "effects": []})
    return event


def test_a_sample_set_aside_is_accounted_for(small: Path) -> None:
    """Spec: R9.6, R11.1."""
    tamper(small, drop_the_tail)
    assert find_broken(small) == {"COVER"}
    trace = Tampered(small)
    event = set_aside(trace, 1)
    assert check_traces([trace.write(small)], is_replayed=True).is_ok
    event["place"] = 0
    assert find_broken(trace.write(small)) == {"COVER"}
    del event["place"]  # as in older traces
    assert check_traces([trace.write(small)]).is_ok


def test_a_sample_set_aside_is_at_one_of_the_places_there_were(small: Path) -> None:
    """Spec: R9.6. The header counts the sample, and even its digest of places is the one of this place."""
    trace = Tampered(small)
    event = set_aside(trace, 9)
    assert find_broken(trace.write(small)) == {"COVER"}
    event["place"] = -1
    with pytest.raises(TraceError, match="a sample is set aside at place -1"):
        check_traces([trace.write(small)])


def test_nothing_is_set_aside_after_the_finish(small: Path) -> None:
    """Spec: R9.6."""
    trace = Tampered(small)
    set_aside(trace, 2)
    assert find_broken(trace.write(small)) == set()
    trace.records.append(trace.records.pop(2))
    assert find_broken(trace.write(small)) == {"FREE"}


def test_the_records_of_a_rank_stand_in_one_file(small: Path, tmp_path: Path) -> None:
    """Spec: R9. A job that was cut into two files, as by a log that was rotated, is not judged."""
    parts = [Tampered(small), Tampered(small)]
    first = parts[0].records[0]["rank"]
    cut = next(index for index, record in enumerate(parts[0].records) if index > 5 and record["rank"] != first)
    parts[0].records, parts[1].records = parts[0].records[:cut], parts[1].records[cut:]
    paths = [part.write(tmp_path / f"part{number}") for number, part in enumerate(parts)]
    for is_replayed in (False, True):
        with pytest.raises(TraceError, match=r"part1:\d+: rank 1 has records in .*part0 too"):
            check_traces(paths, is_replayed=is_replayed)


def test_a_trace_of_version_1_is_judged_and_what_cannot_be_said_is_said(small: Path) -> None:
    """Spec: R9.6."""
    trace = Tampered(small)
    trace.header["version"] = 1
    with pytest.raises(TraceError, match="the header has the unknown field 'inputs'"):
        check_traces([trace.write(small)])
    del trace.header["inputs"]
    (job,) = check_traces([trace.write(small)], is_replayed=True).jobs
    assert job.violations == ()
    assert job.unsaid == (
        "whether all samples were trained on: the header does not say how many there are",
        "whether an epoch was trained on twice, or left out: the header does not name its run",
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
        {"before": [PART | {"run": 5}]},
        {"inputs": [{"rank": 0, "samples": 1, "digest": 1, "order": -1}]},
        {"inputs": [PART]},
    ],
)
def test_a_malformed_origin_is_refused(origin: dict[str, Any], small: Path) -> None:
    trace = Tampered(small)
    trace.header |= origin
    with pytest.raises(TraceError, match="t:1: the header has"):
        check_traces([trace.write(small)])


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    inputs = OwnedLot(rank=0, lot=Lot(3, 7), order=5)
    origin = Origin(run="r", inputs=(inputs,), before=(OwnedLot(lot=Lot(2, 9), steps=4, run="q"),))
    with TraceWriter(tmp_path / "t", make_config(), driver="test", origin=origin) as writer:
        writer.set_aside(0, 5, 3)
    header, records = read_trace(tmp_path / "t")
    assert header.origin == origin
    assert [record.event for record in records] == [json.loads('{"kind": "set_aside", "id": 5, "place": 3}')]


def test_a_round_of_the_ramp_has_the_target_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R3.3, R9. Checks: REPLAY."""
    monkeypatch.setattr("odb_ref.core.rounds.RAMP_SHARE", 1)
    path = tmp_path / "t"
    run_by_arrival([[9] * 40], make_configs(1, budget_tokens=9, window_samples=32, ramp_rounds=2), trace=path)
    monkeypatch.undo()
    assert find_broken(path) == {"REPLAY"}
    trace = Tampered(path)
    trace.header["version"] = 1
    del trace.header["inputs"]
    (job,) = check_traces([trace.write(path)], is_replayed=True).jobs
    assert job.violations == ()
    assert "a trace of version 1" in get_verdict(job, Property.REPLAY).reason
