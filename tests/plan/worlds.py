"""Ranks that plan by exchange in one process, with a thread each, in the world of the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from odb_ref.conformance.asking import World
from odb_ref.conformance.vectors import sum_groups
from odb_ref.plan import RankPlan, plan_rank
from tests.plan.judge import Problem, get_columns

Planner = Callable[..., RankPlan]


def plan_in_world(problem: Problem, planner: Planner = plan_rank, changes: Sequence[dict[str, Any]] = ()) -> list[Any]:
    """Returns what each rank gets, or the exception that it raises. ``changes`` are other arguments for some ranks."""
    world = World(len(problem.lengths))

    def run(rank: int) -> Any:
        arguments = get_columns(problem, rank) | {**problem.terms}
        if problem.terms.get("within") == "step" and problem.together is not None:
            arguments["group_supervised"] = sum_groups(problem)
        arguments |= changes[rank] if changes else {}
        try:
            return planner(arguments.pop("lengths"), exchange=world.make_exchange(rank), **arguments)
        except Exception as error:
            return error
        finally:
            world.leave(rank)

    with ThreadPoolExecutor(len(problem.lengths)) as threads:
        return [*threads.map(run, range(len(problem.lengths)))]
