"""Meshes over gloo: the peers of a data-parallel rank train on the same batches, whatever happens to one of them."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from odb_ref.torch import ODBDataLoader, UsageError, gather_samples
from odb_ref.torch.checkpoint import JobState
from odb_ref.trace.check import check_traces
from tests.helpers.options import nested
from tests.torch.data import Numbers, Stream, collate, make_sample
from tests.torch.ranks import Result, get_values, run_each, run_ranks

COUNT = 61
SETTINGS: dict[str, Any] = {
    "token_budget": 60,
    "window": 8,
    "collate_fn": collate,
    "shuffle": True,
    "timeout_s": 8,
}


def make_mesh(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp")) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def make_loader(mesh: Any = None, dataset: Any = None, **options: Any) -> Any:
    dataset = Numbers(0, COUNT) if dataset is None else dataset
    return ODBDataLoader(dataset, **nested(device_mesh=mesh or make_mesh(), **(SETTINGS | options)))


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


def read_all(rank: int, shapes: list[Shape]) -> Any:
    """Returns what this process reads with each mesh, one after another."""
    del rank
    found = []
    for shape, names, options, _ in shapes:
        with make_loader(make_mesh(shape, names), **options) as loader:
            found.append(read(loader))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shapes"), [(4, OF_FOUR), (8, OF_EIGHT)], ids=["4", "8"])
def test_peers_read_the_same_and_ranks_share_the_data_set(processes: int, shapes: list[Shape]) -> None:
    values = get_values(run_ranks(processes, read_all, shapes))
    for found, (*_, ranks) in zip(zip(*values, strict=True), shapes, strict=True):
        check_complete(check_peers([Result(value) for value in found], ranks))


def accept_on(rank: int, told: int) -> Any:
    with make_loader() as loader:
        sizes = []
        for batch, info in loader.steps():
            if info.step == 1 and rank == told:
                loader.accept_budget(31)
            sizes.append((info.step, info.is_idle, batch["numbers"]))
        return sizes


def test_a_budget_that_one_peer_accepts_holds_on_all() -> None:
    """For example after an allocation that failed on only one process."""
    for results in run_each(4, accept_on, [(1,), (2,)]):
        first, second = check_peers(results, PAIRS)
        check_complete([[(is_idle, numbers) for _, is_idle, numbers in part] for part in (first, second)])
        for part in (first, second):
            last = part[-6:]
            lengths = [[len(make_sample(number)["input_ids"]) for number in numbers] for _, _, numbers in last]
            assert all(len(sizes) == 1 or len(sizes) * max(sizes) <= 31 for sizes in lengths)


def make_bad(ranks: tuple[int, ...]) -> Numbers:
    """Returns samples of which one raises, on some ranks of the job."""

    def fail(index: int) -> None:
        if dist.get_rank() in ranks:
            raise OSError("no such file")

    return Numbers(0, COUNT, bad=30, fault=fail)


def read_bad(rank: int, ranks: tuple[int, ...], options: dict[str, Any]) -> Any:
    del rank
    with make_loader(dataset=make_bad(ranks), **options) as loader:
        return read(loader)


def test_a_sample_that_peers_cannot_read_is_set_aside_by_all_or_an_error_on_all_that_names_who() -> None:
    """If only one peer set it aside, the two would form different batches from then on."""
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


def leave_on(rank: int, told: int) -> Any:
    with make_loader() as loader:
        for _, info in loader.steps():
            if info.step == 3 and rank == told:
                return "left"
    return "complete"


def test_a_consumer_that_leaves_on_one_peer_ends_all() -> None:
    results = run_ranks(4, leave_on, 3)
    assert results[3].value == "left"
    assert {result.error for result in results[:3]} == {"JobError"}, results
    assert all("one of ranks 2, 3 (rank 1 of its mesh) left the loop" in result.text for result in results[:3]), results


def die_on(rank: int, told: int) -> Any:
    with make_loader() as loader:
        for _, info in loader.steps():
            if info.step == 2 and rank == told:
                os._exit(1)


def test_a_process_that_dies_is_named_as_peer_and_by_its_rank_in_the_job() -> None:
    results = run_ranks(4, die_on, 3)
    assert results[3].is_gone
    for result in results[:3]:
        assert result.error == "JobError"
        assert "rank 3 (rank 1 of its mesh) is lost: its process is gone (on its peer 1 [rank 3])" in result.text, (
            result.text
        )


def resume(rank: int) -> Any:
    del rank
    with make_loader() as loader:
        before = read(loader, steps=4)
        state = loader.state_dict()
    with make_loader() as loader:
        loader.load_state_dict(state)
        return before + read(loader)


def test_a_resume_goes_on_with_the_same_batches() -> None:
    check_complete(check_peers(run_ranks(4, resume), PAIRS))


def resume_with_another_budget(rank: int) -> Any:
    with make_loader() as loader:
        before = read(loader, steps=4)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, loader.state_dict())
    with make_loader(token_budget=50) as loader:
        loader.load_state_dict([*states[:2], *states[:2]])
        with pytest.raises(UsageError, match="the states of all ranks are needed"):
            iter(loader)
    with make_loader(token_budget=50) as loader:
        loader.load_state_dict(states)
        return before, [batch["numbers"] for batch, info in loader.steps() if not info.is_idle]


def test_the_states_of_all_processes_are_those_of_all_ranks() -> None:
    """Those of peers are equal. They were counted, and refused as incomplete."""
    found = check_peers(run_ranks(4, resume_with_another_budget), PAIRS)
    check_complete([[*before, *((False, numbers) for numbers in after)] for before, after in found])


def resume_from_another_step(rank: int) -> Any:
    with make_loader() as loader:
        states = []
        for _, info in loader.steps():
            states.append(loader.state_dict())
            if info.step == 6:
                break
    with make_loader() as loader:
        loader.load_state_dict(states[2 if rank == 3 else 5])
        read(loader)


def test_a_peer_that_resumes_elsewhere_is_named_on_all() -> None:
    results = run_ranks(4, resume_from_another_step)
    assert {result.error for result in results} == {"JobError"}, results
    what = r"rank 3 .* its peer 1 \[rank 3\] is in round 2, rank 0 \(rank 0 of its mesh\) is in 4"
    assert all(re.search(what, result.text) for result in results), results


def save_job(rank: int, names: Any) -> Any:
    del rank
    mesh = make_mesh((2, 2), names)
    with make_loader(mesh) as loader:
        before = read(loader, steps=3)
        state = JobState(loader).state_dict()
        estimate = loader.estimate_steps()
    with make_loader(mesh) as loader:
        JobState(loader).load_state_dict(state)
        return before + read(loader), estimate


def test_the_state_of_a_job_has_that_of_each_rank_once() -> None:
    shapes = ((("dp", "tp"), PAIRS), (("dp_replicate", "dp_shard"), [[0], [1], [2], [3]]))
    saved = run_each(4, save_job, [(names,) for names, _ in shapes])
    for (_, ranks), results in zip(shapes, saved, strict=True):
        found = check_peers(results, ranks)
        check_complete([part for part, _ in found])
        assert len({estimate for _, estimate in found}) == 1


def make_badly(rank: int) -> list[str]:
    mesh = make_mesh((2, 2), ("x", "y"))
    texts = []
    for options in ({}, {"mesh_dims": "z"}, {"mesh_dims": ("x", "z")}, {"process_group": dist.group.WORLD}):
        with pytest.raises(UsageError) as caught:
            make_loader(mesh, **options)
        texts.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        ODBDataLoader(Numbers(0, 3), **nested(mesh_dims="dp", **SETTINGS))
    texts.append(str(caught.value))
    with pytest.raises(UsageError, match="is_apart needs process_group"):
        make_loader(mesh, mesh_dims="x", is_apart=True)
    for names, what in (
        (("tp",), "none is named .*one of size 1"),
        (("dp", "fsdp"), "it is not known whether 'fsdp' is data-parallel"),
    ):
        with pytest.raises(UsageError, match=what):
            make_loader(make_mesh((4,) if len(names) == 1 else (2, 2), names))
    alone = dist.new_group([0])
    if rank:
        loader = ODBDataLoader(Numbers(0, 3), **nested(process_group=alone, is_apart=True, **SETTINGS))
        for use in (iter, ODBDataLoader.state_dict, ODBDataLoader.estimate_steps, lambda loader: loader.gather(0)):
            with pytest.raises(UsageError, match=f"rank {rank} is not a member of the loader's process_group"):
                use(loader)
    dist.barrier()
    return texts


def test_what_makes_no_sense_of_a_mesh_is_refused() -> None:
    for result in run_ranks(2 * 2, make_badly):
        assert not result.error, result
        unnamed, unknown, half, both, without = result.value
        assert "mesh_dims" in unnamed
        assert "('x', 'y')" in unnamed
        assert "'z'" in unknown
        assert "('x', 'z')" in half
        assert both == "process_group and mesh exclude each other"
        assert "needs mesh" in without


def read_apart(rank: int, kind: str) -> None:
    mesh = make_mesh()
    options: dict[str, Any] = {
        "stream": {"shuffle": False},
        "sampler": {"shuffle": False, "sampler": range(COUNT)},
    }.get(kind, {})
    data = Stream(0, COUNT) if kind == "stream" else Numbers(0, COUNT)
    with pytest.raises(UsageError, match=r"mesh has 2 of the job's 4 ranks\. .*pass the whole mesh as mesh="):
        make_loader(mesh["dp"])
    group = mesh["dp"].get_group()
    dist.barrier()
    with ODBDataLoader(data, **nested(process_group=group, **(SETTINGS | options))) as loader:
        for step, _ in enumerate(loader):
            if step == 1 and rank == 1:
                loader.accept_budget(31)


def test_data_parallel_groups_beside_each_other_are_refused_on_every_rank() -> None:
    """Peers diverged silently once one of them accepted another budget. Spec: R17.1."""
    for result in chain.from_iterable(run_each(4, read_apart, [("common",), ("stream",), ("sampler",)])):
        assert result.error == "UsageError", result
        assert "process_group has 2 of the job's 4 ranks. " in result.text
        assert "pass the whole mesh as mesh=" in result.text
        assert "is_apart=True" in result.text


def read_in_part(rank: int, groups: list[list[int]]) -> Any:
    group, _ = dist.new_subgroups_by_enumeration(groups)
    if not any(rank in ranks for ranks in groups):
        with pytest.raises(UsageError, match="process_group does not contain this process, rank 2 of the job"):
            ODBDataLoader(Numbers(0, COUNT), **nested(process_group=dist.new_group([0, 1]), **SETTINGS))
        return []
    if len(groups) == 1:
        dist.new_group([0, 1])
    with ODBDataLoader(Numbers(0, COUNT), **nested(process_group=group, is_apart=True, **SETTINGS)) as loader:
        return [number for batch, info in loader.steps() for number in batch["numbers"] if not info.is_idle]


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [2, 3]]])
def test_groups_that_are_said_to_be_apart_read_apart(groups: list[list[int]]) -> None:
    values = get_values(run_ranks(3 if len(groups) == 1 else 4, read_in_part, groups))
    for ranks in groups:
        assert sorted(number for rank in ranks for number in values[rank]) == list(range(COUNT))


def write_traces(rank: int, folder: Path, told: int, failing: tuple[int, ...]) -> Any:
    with make_loader(dataset=make_bad(failing), trace=folder / "run.ndjson") as loader:
        for _, info in loader.steps():
            if info.step == 1 and rank == told:
                loader.accept_budget(31)


def test_the_traces_of_a_mesh_pass_the_checker(tmp_path: Path) -> None:
    """What only one peer reported is in all agreements, but only in its own trace.

    Spec: R17.5.
    """
    cases: list[tuple[Path, int, tuple[int, ...]]] = [
        (tmp_path / str(number), 3, failing) for number, failing in enumerate(((), (3, 1), (0, 2)))
    ]
    for folder, *_ in cases:
        folder.mkdir()
    for (folder, _, failing), results in zip(cases, run_each(4, write_traces, cases), strict=True):
        assert {result.error for result in results} == {"JobError" if failing else ""}, results
        check_traces_of_peers(folder)


def check_traces_of_peers(folder: Path) -> None:
    paths = sorted(folder.glob("*.ndjson"))
    assert [path.name for path in paths] == [
        f"run-rank{rank}{peer}.ndjson" for rank in range(2) for peer in ("-peer1", "")
    ]
    verdict = check_traces(paths, is_replayed=True)
    assert not verdict.violations
    assert len(verdict.jobs) == 2


def gather_on_a_mesh(rank: int) -> tuple[str, list[int]]:
    text, found = "", []
    with make_loader(make_mesh((1, 2))) as loader:
        for batch, info in loader.steps():
            with pytest.raises(UsageError) as caught:
                gather_samples(batch["numbers"], info)
            text = str(caught.value)
            found += gather_samples(batch["numbers"], info, loader.process_group)
            assert found[-info.local_samples :] == [*chain(*loader.gather(batch["numbers"]))]
    return text, found


def test_a_group_of_peers_does_not_gather_samples_twice() -> None:
    """Checks: ONCE."""
    for text, found in get_values(run_ranks(2, gather_on_a_mesh)):
        assert "these 2 ranks are not the 1 among which the loader divides samples" in text
        assert sorted(found) == list(range(COUNT))
