"""The exchanges of other frameworks, as in the how-to: torch on any device, MPI and Ray. Spec: R13.11."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from odb_ref.plan import plan_ranks
from tests.helpers.capture import capture

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "known-lengths.md"
LENGTHS = [[60, 60, 9], [5]]
PLANNED = [rank.micro_batches for rank in plan_ranks(LENGTHS, budget=60).ranks]


def find_snippet(text: str) -> str:
    """Returns the page's code block that contains the text."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if text in block]
    return str(found)


def test_the_batches_of_the_page_keep_its_budget() -> None:
    """Its example pads, so its plan must be one for padded batches."""
    pytest.importorskip("torch")
    from examples.toy import collate, dataset, lengths

    names: dict[str, Any] = {"lengths": lengths}
    exec(find_snippet("import collate, dataset"), names)
    batches = [collate([dataset[index] for index in indices]) for indices in names["plan"].micro_batches]
    assert [batch["input_ids"].numel() <= 16_384 for batch in batches] == [True] * len(batches)


MPI_PROGRAM = """
from mpi4py import MPI
from odb_ref.plan import plan_rank
{snippet}
rank = MPI.COMM_WORLD.Get_rank()
for longest in (60, 99):
    try:
        found = plan_rank({lengths}[rank][:-1] + [longest], budget=60, exchange=exchange).micro_batches
    except ValueError as error:
        found = str(error)
    print(rank, found)
"""


def test_mpi_ranks_plan_as_one_place_does(tmp_path: Path) -> None:
    folder = Path(pytest.importorskip("mpi4py").__file__).parents[1]
    program = tmp_path / "program.py"
    program.write_text(MPI_PROGRAM.format(snippet=find_snippet("# mpi4py"), lengths=[[*own, 60] for own in LENGTHS]))
    launchers = [
        path for path in (folder / "bin" / "mpiexec", Path(sys.executable).with_name("mpiexec")) if path.exists()
    ]
    launcher = str(launchers[0]) if launchers else "mpiexec"
    done = capture([launcher, "-n", "2", sys.executable, str(program)], check=True, timeout=120)
    planned = [rank.micro_batches for rank in plan_ranks([[*own, 60] for own in LENGTHS], budget=60).ranks]
    refused = "rank 0: sample 3 has 99 tokens, more than the budget of 60: raise the budget, or say oversize='alone'"
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{rank} {found}" for rank in range(2) for found in (planned[rank], refused)
    )


@pytest.mark.deep
def test_ray_tasks_plan_as_one_place_does_again_and_again() -> None:
    ray = pytest.importorskip("ray")
    names: dict[str, Any] = {"ray": ray, "asyncio": __import__("asyncio")}
    board_class, _, _ = find_snippet("@ray.remote").partition("def exchange")
    exec(board_class, names)

    def plan(rank: int, board: Any, lengths: list[list[int]]) -> list[object]:
        import ray

        from odb_ref.plan import plan_rank

        def exchange(message: list[int]) -> list[list[int]]:
            return list(ray.get(board.gather.remote(rank, message)))

        return [plan_rank(lengths[rank], budget=60, exchange=exchange).micro_batches for _ in range(3)]

    ray.init(
        num_cpus=3,
        include_dashboard=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(PAGE.parents[2])}},
    )
    try:
        board = names["Board"].remote(2)
        found = ray.get([ray.remote(plan).remote(rank, board, LENGTHS) for rank in range(2)], timeout=120)
    finally:
        ray.shutdown()
    assert found == [[own] * 3 for own in PLANNED]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo", ("cpu", "gloo")),
        ("cuda:nccl", ("cuda", "nccl")),
        ("cpu:gloo,cuda:nccl", ("cpu", "gloo")),
        ("npu:hccl", ("npu", "hccl")),
        ("xpu:xccl", ("xpu", "xccl")),
    ],
)
def test_torch_gathers_where_the_process_group_can(config: str, expected: tuple[str, str]) -> None:
    pytest.importorskip("torch")
    from odb_ref.torch.gathering import choose_device

    assert choose_device(config) == expected


def gather_over_an_unknown_backend(rank: int, lengths: list[list[int]]) -> Any:
    """Plans over a third-party backend, with tensors on a device that only this backend serves."""
    import torch.distributed as dist

    from odb_ref.plan import plan_rank
    from odb_ref.torch.gathering import gather_integers

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("oddball", make, devices=["cpu"])
    group = dist.new_group(backend="oddball")
    config = dist.get_backend_config(group)
    return config, plan_rank(lengths[rank], budget=60, exchange=lambda own: gather_integers(own, group)).micro_batches


def test_torch_ranks_plan_over_a_backend_of_another_project() -> None:
    pytest.importorskip("torch")
    from tests.torch.ranks import run_ranks

    results = run_ranks(2, gather_over_an_unknown_backend, LENGTHS)
    assert [result.value for result in results] == [("cpu:oddball", own) for own in PLANNED], results
