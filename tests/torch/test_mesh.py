"""Meshes over gloo: the peers of a data-parallel rank train on the same batches, whatever happens to one of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from odb_ref.torch import ODBDataLoader, UsageError, gather_samples
from odb_ref.torch.checkpoint import JobState
from odb_ref.trace.check import check_traces
from tests.torch import data
from tests.torch.data import Numbers, Stream, make_sample, take
from tests.torch.ranks import Result, check_errors, get_values, run_each, run_ranks
from tests.torch.states import check_refused

COUNT = 61
make_unmeshed = partial(data.make_loader, Numbers(0, COUNT), shuffle=True, timeout_s=8)


def make_mesh(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp")) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def make_loader(mesh: Any = None, dataset: Any = None, **options: Any) -> Any:
    settings = {"device_mesh": mesh or make_mesh(), "shuffle": True, "timeout_s": 8} | options
    return data.make_loader(dataset or Numbers(0, COUNT), **settings)


def read(loader: Any, steps: int | None = None) -> list[tuple[bool, list[int]]]:
    """Returns what each step holds. Each has the model's collective, so peers that diverge would hang, or sum other numbers."""
    found = []
    for batch, info in loader.steps():
        numbers = batch["numbers"]
        alike = [None] * dist.get_world_size()
        dist.all_gather_object(alike, (info.step, info.global_tokens))
        assert len(set(alike)) == 1, alike
        found.append((info.is_idle, numbers))
        if len(found) == steps:
            break
    else:
        assert info.emitted_samples == COUNT - len(loader.dataset.bad)  # each rank's once
    return found


def check_peers(results: list[Result], ranks: list[list[int]]) -> list[Any]:
    """Checks that the processes of each rank read the same, and returns what each rank read."""
    assert not any(result.error for result in results), results
    for peers in ranks:
        assert all(results[peer].value == results[peers[0]].value for peer in peers)
    return [results[peers[0]].value for peers in ranks]


def check_complete(parts: list[Any], missing: int | None = None) -> None:
    numbers = sorted(number for part in parts for is_idle, numbers in part for number in numbers if not is_idle)
    assert numbers == [number for number in range(COUNT) if number != missing]


PAIRS = [[0, 1], [2, 3]]


Shape = tuple[tuple[int, ...], tuple[str, ...], dict[str, Any], list[list[int]]]
"""A mesh: its shape, its names, the loader's options, and the peers of each rank."""
OF_FOUR: list[Shape] = [
    ((2, 2), ("dp", "tp"), {}, PAIRS),
    ((2, 2), ("dp", "tp"), {"transport": "gather"}, PAIRS),
    ((2, 2), ("tp", "dp"), {"num_workers": 1}, [[0, 2], [1, 3]]),
    ((2, 2), ("pp", "data"), {"mesh_dims": "data", "shard": "shared"}, [[0, 2], [1, 3]]),
    ((2, 2), ("dp_replicate", "dp_shard"), {}, [[0], [1], [2], [3]]),
    ((2, 2), ("dp_replicate", "dp_shard"), {"mesh_dims": ("dp_shard",)}, [[0, 2], [1, 3]]),
    ((1, 4), ("dp", "tp"), {}, [[0, 1, 2, 3]]),
    ((4,), ("world",), {}, [[0], [1], [2], [3]]),
]
OF_EIGHT: list[Shape] = [((2, 2, 2), ("dp_shard", "cp", "tp"), {}, [[0, 1, 2, 3], [4, 5, 6, 7]])]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shapes"), [(4, OF_FOUR), (8, OF_EIGHT)], ids=["4", "8"])
def test_peers_read_the_same_and_ranks_share_the_data_set(processes: int, shapes: list[Shape]) -> None:
    def read_all(rank: int, shape: Any, names: Any, options: dict[str, Any], _: object) -> Any:
        return take(make_loader(make_mesh(shape, names), **options), read)

    for results, (*_, ranks) in zip(run_each(processes, read_all, shapes), shapes, strict=True):
        check_complete(check_peers(results, ranks))


def test_a_budget_that_one_peer_accepts_holds_on_all() -> None:
    """For example after an allocation that failed on only one process."""

    def accept_on(rank: int, told: int) -> Any:
        with make_loader() as loader:
            found = []
            for batch, info in loader.steps():
                if info.step == 1 and rank == told:
                    loader.accept_budget(31)
                found.append((info.is_idle, batch["numbers"]))
            return found

    for results in run_each(4, accept_on, [(1,), (2,)]):
        parts = check_peers(results, PAIRS)
        check_complete(parts)
        for part in parts:
            lengths = [[len(make_sample(number)["input_ids"]) for number in numbers] for _, numbers in part[-6:]]
            assert all(len(sizes) == 1 or len(sizes) * max(sizes) <= 31 for sizes in lengths)


def make_bad(ranks: tuple[int, ...]) -> Numbers:
    """Returns samples of which one raises, on some ranks of the job."""

    def fail(index: int) -> None:
        if dist.get_rank() in ranks:
            raise OSError("no such file")

    return Numbers(0, COUNT, bad=30, fault=fail)


def test_a_sample_that_peers_cannot_read_is_set_aside_by_all_or_an_error_on_all_that_names_who() -> None:
    """If only one peer set it aside, the two would form different batches from then on."""

    def read_bad(rank: int, ranks: tuple[int, ...], options: dict[str, Any]) -> Any:
        return take(make_loader(dataset=make_bad(ranks), **options), read)

    aside = {"on_bad_sample": "quarantine"}
    # Whichever rank has drawn the sample, one of its peers cannot read it.
    some = [(bad, aside | {"transport": kind}) for bad in ((1, 3), (0, 2)) for kind in ("reduce", "gather")]
    whole, failed, *differing = run_each(4, read_bad, [((0, 1, 2, 3), aside), ((3, 1), {}), *some])
    check_complete(check_peers(whole, PAIRS), missing=30)
    assert len({result.text for result in failed}) == 1
    told = r"failed: .*no such file.*\(on its peer 1 \[rank \1\]\)"
    holds = (
        r"does not hold the samples of its peer: in round \d its peer 1 \[rank \1\] holds .* tokens.*, its peer 0 \[rank "
        r"[02]\] .* but rank [0-3] \(rank [01] of its mesh\) has set aside the sample 30: OSError: no such file"
    )
    for results, said in ((failed, told), *((results, holds) for results in differing)):
        assert {result.error for result in results} == {"JobError"}, results
        for result in results:
            assert re.search(rf"rank ([13]) \(rank [01] of its mesh\) {said}", result.text), result.text


def test_a_consumer_that_leaves_on_one_peer_ends_all() -> None:
    results = run_ranks(4, end_on_the_last, lambda: "left")
    assert results[3].value == "left"
    check_errors(results[:3], "one of ranks 2, 3 (rank 1 of its mesh) left the loop")


def end_on_the_last(rank: int, end: Callable[[], str]) -> str:
    with make_loader() as loader:
        for _, info in loader.steps():
            if info.step == 3 and rank == 3:
                return end()
    return "complete"


def test_a_process_that_dies_is_named_as_peer_and_by_its_rank_in_the_job() -> None:
    results = run_ranks(4, end_on_the_last, lambda: os._exit(1))
    assert results[3].is_gone
    check_errors(results[:3], "rank 3 (rank 1 of its mesh) is lost: its process is gone (on its peer 1 [rank 3])")


def test_a_resume_goes_on_with_the_same_batches() -> None:
    def resume(rank: int) -> Any:
        before, state = data.save(make_loader(), 4, read)
        return before + take(make_loader(state=state), read)

    check_complete(check_peers(run_ranks(4, resume), PAIRS))


def test_the_states_of_all_processes_are_those_of_all_ranks() -> None:
    """Those of peers are equal. They were counted, and refused as incomplete."""

    def resume_with_another_budget(rank: int) -> Any:
        before, state = data.save(make_loader(), 4, read)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        check_refused(make_loader(token_budget=50, state=2 * states[:2]), "the states of all ranks are needed")
        return [*before, (False, take(make_loader(token_budget=50, state=states)))]

    check_complete(check_peers(run_ranks(4, resume_with_another_budget), PAIRS))


def test_a_peer_that_resumes_elsewhere_is_named_on_all() -> None:
    def resume_from_another_step(rank: int) -> Any:
        with make_loader() as loader:
            states = []
            for _, info in loader.steps():
                states.append(loader.state_dict())
                if info.step == 6:
                    break
        take(make_loader(state=states[2 if rank == 3 else 5]), read)

    results = run_ranks(4, resume_from_another_step)
    assert {result.error for result in results} == {"JobError"}, results
    what = r"rank 3 .* its peer 1 \[rank 3\] is in round 2, rank 0 \(rank 0 of its mesh\) is in 4"
    assert all(re.search(what, result.text) for result in results), results


def test_the_state_of_a_job_has_that_of_each_rank_once() -> None:
    def save_job(rank: int, names: Any) -> Any:
        mesh = make_mesh((2, 2), names)
        with make_loader(mesh) as loader:
            before = read(loader, steps=3)
            state = JobState(loader).state_dict()
            estimate = loader.estimate_steps()
        with make_loader(mesh) as loader:
            JobState(loader).load_state_dict(state)
            return before + read(loader), estimate

    shapes = ((("dp", "tp"), PAIRS), (("dp_replicate", "dp_shard"), [[0], [1], [2], [3]]))
    saved = run_each(4, save_job, [(names,) for names, _ in shapes])
    for (_, ranks), results in zip(shapes, saved, strict=True):
        found = check_peers(results, ranks)
        check_complete([part for part, _ in found])
        assert len({estimate for _, estimate in found}) == 1


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, r"mesh_dims.*\('x', 'y'\)|\('x', 'y'\).*mesh_dims"),
    ({"mesh_dims": "z"}, "'z'"),
    ({"mesh_dims": ("x", "z")}, r"\('x', 'z'\)"),
    ({"mesh_dims": "x", "is_apart": True}, "is_apart needs process_group"),
]


def make_badly(rank: int) -> None:
    mesh = make_mesh((2, 2), ("x", "y"))
    for options, said in (
        *MISTAKES,
        ({"process_group": dist.group.WORLD}, "^process_group and mesh exclude each other$"),
    ):
        with pytest.raises(UsageError, match=said):
            make_loader(mesh, **options)
    with pytest.raises(UsageError, match="needs mesh"):
        make_unmeshed(mesh_dims="dp")
    with pytest.raises(UsageError, match=r"none is named .*one of size 1"):
        make_loader(make_mesh((4,), ("tp",)))
    with pytest.raises(UsageError, match="it is not known whether 'fsdp' is data-parallel"):
        make_loader(make_mesh((2, 2), ("dp", "fsdp")))
    alone = dist.new_group([0])
    if rank:
        loader = make_unmeshed(process_group=alone, is_apart=True)
        for use in (iter, ODBDataLoader.state_dict, ODBDataLoader.estimate_steps, lambda loader: loader.gather(0)):
            with pytest.raises(UsageError, match=f"rank {rank} is not a member of the loader's process_group"):
                use(loader)
    dist.barrier()


def test_what_makes_no_sense_of_a_mesh_is_refused() -> None:
    get_values(run_ranks(4, make_badly))


def read_apart(rank: int, dataset: Any, options: dict[str, Any]) -> None:
    mesh = make_mesh()
    with pytest.raises(UsageError, match=r"mesh has 2 of the job's 4 ranks\. .*pass the whole mesh as mesh="):
        make_loader(mesh["dp"])
    group = mesh["dp"].get_group()
    dist.barrier()
    with data.make_loader(dataset, process_group=group, **options) as loader:
        for step, _ in enumerate(loader):
            if step == 1 and rank == 1:
                loader.accept_budget(31)


def test_data_parallel_groups_beside_each_other_are_refused_on_every_rank() -> None:
    """Peers diverged silently once one of them accepted another budget. Spec: R17.1."""
    samples = Numbers(0, COUNT)
    cases = [(samples, {"shuffle": True}), (Stream(0, COUNT), {}), (samples, {"sampler": range(COUNT)})]
    texts = "process_group has 2 of the job's 4 ranks. ", "pass the whole mesh as mesh=", "is_apart=True"
    for results in run_each(4, read_apart, cases):
        check_errors(results, *texts, error="UsageError")


def read_in_part(rank: int, groups: list[list[int]]) -> Any:
    group, _ = dist.new_subgroups_by_enumeration(groups)
    if not any(rank in ranks for ranks in groups):
        with pytest.raises(UsageError, match="process_group does not contain this process, rank 2 of the job"):
            make_unmeshed(process_group=dist.new_group([0, 1]))
        return []
    if len(groups) == 1:
        dist.new_group([0, 1])
    return take(make_unmeshed(process_group=group, is_apart=True))


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [2, 3]]])
def test_groups_that_are_said_to_be_apart_read_apart(groups: list[list[int]]) -> None:
    values = get_values(run_ranks(3 if len(groups) == 1 else 4, read_in_part, groups))
    for ranks in groups:
        assert sorted(number for rank in ranks for number in values[rank]) == list(range(COUNT))


def test_the_traces_of_a_mesh_pass_the_checker(tmp_path: Path) -> None:
    """What only one peer reported is in all agreements, but only in its own trace.

    Spec: R17.5.
    """

    def write_traces(rank: int, folder: Path, failing: tuple[int, ...]) -> None:
        with make_loader(dataset=make_bad(failing), trace=folder / "run.ndjson") as loader:
            for _, info in loader.steps():
                if info.step == 1 and rank == 3:
                    loader.accept_budget(31)

    cases = [(tmp_path / str(number), failing) for number, failing in enumerate(((), (3, 1), (0, 2)))]
    for folder, _ in cases:
        folder.mkdir()
    names = [f"run-rank{rank}{peer}.ndjson" for rank in range(2) for peer in ("-peer1", "")]
    for (folder, failing), results in zip(cases, run_each(4, write_traces, cases), strict=True):
        assert {result.error for result in results} == {"JobError" if failing else ""}, results
        paths = sorted(folder.glob("*.ndjson"))
        assert [path.name for path in paths] == names
        verdict = check_traces(paths, is_replayed=True)
        assert not verdict.violations
        assert len(verdict.jobs) == 2


def test_a_group_of_peers_does_not_gather_samples_twice() -> None:
    """Checks: ONCE."""

    def gather_on_a_mesh(rank: int) -> list[int]:
        found = []
        with make_loader(make_mesh((1, 2))) as loader:
            for batch, info in loader.steps():
                with pytest.raises(UsageError, match="these 2 ranks are not the 1 among which the loader divides"):
                    gather_samples(batch["numbers"], info)
                found += gather_samples(batch["numbers"], info, loader.process_group)
                assert found[-info.local_samples :] == [*chain(*loader.gather(batch["numbers"]))]
        return found

    for found in get_values(run_ranks(2, gather_on_a_mesh)):
        assert sorted(found) == list(range(COUNT))
