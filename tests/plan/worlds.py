"""Ranks that plan by exchange, in one process: a thread each, in the world of the conformance kit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from odb_ref.conformance.asking import World
from odb_ref.conformance.vectors import sum_groups
from odb_ref.plan import RankPlan, plan_rank
from tests.plan.judge import Problem, get_columns

Planner = Callable[..., RankPlan]


def plan_in_world(problem: Problem, planner: Planner = plan_rank, changes: Sequence[dict[str, Any]] = ()) -> list[Any]:
    """What each rank gets, or the exception that it raises. ``changes`` are other arguments for some ranks."""
    world = World(len(problem.lengths))
    found: list[Any] = [None] * len(problem.lengths)

    def run(rank: int) -> None:
        arguments = get_columns(problem, rank) | {**problem.terms}
        if problem.terms.get("within") == "step" and problem.together is not None:
            arguments["group_supervised"] = sum_groups(problem)
        arguments |= changes[rank] if changes else {}
        try:
            found[rank] = planner(arguments.pop("lengths"), exchange=world.make_exchange(rank), **arguments)
        except Exception as error:
            found[rank] = error
        world.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
