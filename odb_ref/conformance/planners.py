"""Asking a planner: a function of the whole problem, one of each rank in a virtual world, or a program. Spec: R13.11."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from odb_ref.conformance.judge import Plans, Problem
from odb_ref.conformance.vectors import encode
from odb_ref.core.errors import OdbError
from odb_ref.plan import RankPlan, plan_all, plan_rank, plan_ranks

WAIT_S: Final = 10.0
"""How long a rank waits in an exchange, at most: a rank that has ended is noticed at once."""


class StuckError(OdbError, RuntimeError):
    """A rank waited in an exchange for others that never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a planner made of a problem."""

    plans: Plans = ()
    refusals: tuple[str, ...] = ()
    """What it said, where it refused: of each rank that did."""
    is_stuck: bool = False
    is_divided: bool = False
    """True when some ranks planned and others refused."""

    @property
    def is_plan(self) -> bool:
        """True when all ranks planned."""
        return not (self.refusals or self.is_stuck)


Ask: TypeAlias = Callable[[Problem], Answer]
Planner: TypeAlias = Callable[[Problem], Plans]
"""Plans for all ranks, or raises."""
Exchange: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]
RankPlanner: TypeAlias = Callable[[Problem, int, Exchange], Sequence[Sequence[int]]]
"""Plans for one rank, which has an all-gather; or raises."""


def ask_function(planner: Planner) -> Ask:
    """Returns how to ask a function of the whole problem."""

    def ask(problem: Problem) -> Answer:
        try:
            return Answer(plans=planner(problem))
        except Exception as error:
            return Answer(refusals=(str(error),))

    return ask


class World:
    """An all-gather between threads, which tells who is left in it."""

    def __init__(self, ranks: int) -> None:
        self._given: list[list[list[int]]] = [[] for _ in range(ranks)]
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def make_exchange(self, rank: int) -> Exchange:
        """Returns the all-gather of one rank."""

        def exchange(message: list[int]) -> Sequence[Sequence[int]]:
            with self._changed:
                self._given[rank].append([*message])
                self._changed.notify_all()
                number = len(self._given[rank])
                self._changed.wait_for(lambda: self._is_over(number), WAIT_S)
                if any(len(given) < number for given in self._given):
                    raise StuckError(f"rank {rank} is left in the exchange")
                return [[*given[number - 1]] for given in self._given]

        return exchange

    def leave(self, rank: int) -> None:
        """Notes that a rank has ended."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def _is_over(self, number: int) -> bool:
        late = {rank for rank, given in enumerate(self._given) if len(given) < number}
        return not late or bool(late & self._ended)


def ask_ranks(planner: RankPlanner) -> Ask:
    """Returns how to ask a function of each rank, in a world of threads."""

    def ask(problem: Problem) -> Answer:
        world = World(len(problem.lengths))
        found: list[Sequence[Sequence[int]] | Exception] = [()] * len(problem.lengths)

        def run(rank: int) -> None:
            try:
                found[rank] = planner(problem, rank, world.make_exchange(rank))
            except Exception as error:
                found[rank] = error
            world.leave(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refusals = tuple(str(item) for item in found if isinstance(item, Exception))
        return Answer(
            plans=[item for item in found if not isinstance(item, Exception)],
            refusals=refusals,
            is_stuck=any(isinstance(item, StuckError) for item in found),
            is_divided=0 < len(refusals) < len(found),
        )

    return ask


class Program:
    """A planner in a process of its own: a line of JSON for each problem, and a line for each answer.

    An answer is ``{"plan": [...]}``, for each rank its micro-batches, or ``{"refused": "why"}``.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, problem: Problem) -> Answer:
        """Returns its answer; a program that has ended, or says something else, refuses."""
        if self._process.stdin is None or self._process.stdout is None:
            return Answer(refusals=("the program has no pipes",))
        try:
            self._process.stdin.write(json.dumps(encode(problem)) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            return Answer(refusals=(f"no answer: {error}",))
        if "plan" in answer:
            return Answer(plans=answer["plan"])
        return Answer(refusals=(str(answer.get("refused")),))

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.communicate()


def plan_here(problem: Problem) -> Plans:
    """Plans with `plan_all` or `plan_ranks`."""
    if problem.is_dealt:
        whole = [index for own in problem.lengths for index in own]
        plan = plan_all(
            whole,
            ranks=len(problem.lengths),
            supervised=None if problem.supervised is None else [value for own in problem.supervised for value in own],
            together=None if problem.together is None else [key for own in problem.together for key in own],
            uses={name: [value for own in column for value in own] for name, column in problem.uses.items()},
            **problem.terms,
        )
    else:
        plan = plan_ranks(
            problem.lengths,
            supervised=problem.supervised,
            together=problem.together,
            uses=problem.uses,
            **problem.terms,
        )
    return [rank.micro_batches for rank in plan.ranks]


def plan_there(problem: Problem, rank: int, exchange: Exchange) -> Sequence[Sequence[int]]:
    """Plans one rank with `plan_rank`."""
    plan: RankPlan = plan_rank(
        problem.lengths[rank],
        exchange=exchange,
        supervised=None if problem.supervised is None else problem.supervised[rank],
        together=None if problem.together is None else problem.together[rank],
        uses={name: column[rank] for name, column in problem.uses.items()},
        **problem.terms,
    )
    return plan.micro_batches
