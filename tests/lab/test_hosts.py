"""Ranks on several hosts with one name, where no host sees the processes of another. A lost rank is named nevertheless."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from odb_ref.core.errors import JobError
from odb_ref.torch import ODBDataLoader
from odb_ref.torch.exchange.process_table import compute_host
from tests.helpers.options import nested
from tests.lab.hosts import Lab, find_obstacle
from tests.torch.data import Numbers, collate, listen
from tests.torch.ranks import Result

SETTINGS: dict[str, Any] = {"token_budget": 60, "window": 8, "collate_fn": collate, "shard": "given", "timeout_s": 4}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with Lab(3) as found:
        yield found


def check_named(results: list[Result], rank: int, cause: str) -> None:
    assert {(result.error, result.rank) for result in results} == {("JobError", rank)}, results
    assert len({result.text for result in results}) == 1, results
    assert cause in results[0].text, results


def read(rank: int, culprit: int, sign: int, options: dict[str, Any]) -> int:
    steps = 0
    with ODBDataLoader(Numbers(0, 300), **nested(**(SETTINGS | options))) as loader:
        for _ in loader:
            if rank == culprit and steps == 3:
                os.kill(os.getpid(), sign)
            time.sleep(0.02)
            steps += 1
    return steps


def see(_rank: int) -> tuple[str, str]:
    return os.uname().nodename, compute_host()


def test_the_hosts_have_one_name_and_are_several(lab: Lab) -> None:
    results = lab.run([0, 1, 1, 2], see)
    names, hosts = zip(*(result.value for result in results), strict=True)
    assert set(names) == {"node"}
    assert hosts[1] == hosts[2]
    assert len(set(hosts)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_killed_on_any_host_is_named(lab: Lab, culprit: int) -> None:
    results = lab.run([0, 1, 2], read, culprit, signal.SIGKILL, {})
    assert results.pop(culprit).is_gone
    check_named(results, culprit, "its process is gone")
    assert max(result.seconds for result in results) < 6


def test_a_loader_killed_with_its_rank_among_many_is_named(lab: Lab) -> None:
    """Ranks that are not neighbours in the tree learn of it too, and workers keep no link open."""
    results = lab.run([0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1], read, 10, signal.SIGKILL, {"num_workers": 1})
    assert results.pop(10).is_gone
    check_named(results, 10, "its process is gone")


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_stopped_on_any_host_is_named(lab: Lab, culprit: int) -> None:
    results = lab.run([0, 1, 2], read, culprit, signal.SIGSTOP, {}, without=[culprit])
    results.pop(culprit)
    check_named(results, culprit, "it has not answered for 4 s")


@pytest.mark.slow
def test_a_rank_stopped_on_this_host_is_said_to_be(lab: Lab) -> None:
    results = lab.run([0, 0], read, 1, signal.SIGSTOP, {}, without=[1])
    check_named(results[:1], 1, "its process is stopped")


def cut(host: int, after_s: float, for_s: float) -> Callable[[Lab], None]:
    def act(lab: Lab) -> None:
        time.sleep(after_s)
        lab.set_link(host, is_up=False)
        time.sleep(for_s)
        lab.set_link(host, is_up=True)

    return act


@pytest.mark.slow
def test_a_link_that_is_cut_and_heals_is_waited_for(lab: Lab) -> None:
    results = lab.run([0, 1, 2], read, -1, 0, {"timeout_s": 20}, meanwhile=cut(1, 2, 4))
    assert not any(result.error for result in results), results
    assert len({result.value for result in results}) == 1


@pytest.mark.deep
def test_a_link_that_is_cut_for_long_names_who_is_behind_it(lab: Lab) -> None:
    results = lab.run([0, 1, 2], read, -1, 0, {}, meanwhile=cut(2, 2, 9))
    check_named(results[:2], 2, "its host cannot be reached")
    check_named(results[2:], 0, "its host cannot be reached")


def begin_later(rank: int) -> int:
    time.sleep(2)
    return read(rank, -1, 0, {})


@pytest.mark.slow
def test_a_host_cut_off_before_a_loader_begins_waits_no_longer_than_allowed_for_the_store(lab: Lab) -> None:
    """The store is on the other host. What is asked of it then has no answer, and no end of its own."""
    results = lab.run([0, 1], begin_later, meanwhile=cut(1, 1, 9))
    check_named(results[:1], 1, "rank 1 has not")
    assert (results[1].error, "its host may be cut off" in results[1].text) == ("JobError", True), results
    assert max(result.seconds for result in results) < 2 + 4 + 3


def start_late(rank: int, late: int, delay_s: float) -> list[str]:
    """Returns what this rank logged while it waited."""
    lines = listen()
    if rank == late:
        time.sleep(delay_s)
    try:
        with ODBDataLoader(Numbers(0, 30), **nested(log_wait_s=1, **SETTINGS)) as loader:
            for _ in loader:
                pass
    except JobError:
        time.sleep(5 if rank == 0 else 0)  # the store of this job is in this process
        raise
    return lines


def test_a_late_rank_is_waited_for_and_said_to_be(lab: Lab) -> None:
    results = lab.run([0, 1, 2], start_late, 2, 2.6)
    assert not any(result.error for result in results), results
    assert any("waits for rank 2, which has not started its loader" in line for line in results[1].value), results


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named_and_one_that_comes_too_late_hears_of_it(lab: Lab) -> None:
    results = lab.run([0, 1, 2], start_late, 1, 7)
    check_named(results, 1, "within 4 s: rank 1 has not")


def read_in_subgroup(rank: int) -> int:
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0
    with ODBDataLoader(Numbers(0, 30 + rank), **nested(process_group=group, is_apart=True, **SETTINGS)) as loader:
        return sum(1 for _ in loader)


def test_a_loader_over_a_subgroup_needs_only_that_subgroup(lab: Lab) -> None:
    results = lab.run([0, 1, 2], read_in_subgroup)
    assert not any(result.error for result in results), results
    assert results[0].value == results[2].value > 0
