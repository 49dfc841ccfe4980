"""One rank with everything it owns, as a value: the core's state, the driver's books, the queue and the consumer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from odb_ref.core.batching.budgets import Acceptance
from odb_ref.core.effects import Finish, Post
from odb_ref.core.state import State
from odb_ref.core.types import Sample, Step


class Act(IntEnum):
    """The things that can happen next to a rank."""

    READ = 0
    COLLATE = 1
    ANSWER = 2
    """The answer of an exchange arrives."""
    TAKE = 3
    URGE = 4
    LOSE = 5
    """The rank learns that a peer's process is gone."""
    STOP = 6
    FAIL_READ = 7
    FAIL_COLLATE = 8
    DIE = 9
    """The rank's own process is gone."""
    ABANDON = 10
    """The consumer leaves in the middle of the last step it took."""
    LOSE_LOADER = 11
    """The process that reads and collates is gone, and the rank fails."""
    ACCEPT = 12
    """The rank accepts the next of its ``coming`` budgets."""


ACTS: Final = len(Act)


@dataclass(frozen=True, slots=True)
class ExploredRank:
    """A rank in its surroundings; a value."""

    state: State
    acceptance: Acceptance
    """The budget that the driver makes the machine accept (R15.4)."""
    coming: tuple[int, ...] = ()
    """The budgets that the rank will accept later."""
    budgets: tuple[tuple[int, int], ...] = ()
    """History: each budget that came into force, with its first round. Before the first, the largest budget is in force."""
    reading: int = 0
    """The samples of a ``Read`` that is not answered yet."""
    is_exhausted: bool = False
    """The source has reported its end."""
    collating: int | None = None
    """The round being collated."""
    post: Post | None = None
    """The rank's post to the exchange, until it is answered."""
    queue: tuple[Step, ...] = ()
    taken: tuple[Step, ...] = ()
    """History: the steps that the consumer has taken."""
    drawn: tuple[Sample, ...] = ()
    """History: the samples requested from the common order, or with updates also from the rank's own source."""
    read_end: int = 0
    """With updates: the place after the last one requested."""
    windows: tuple[int, ...] = ()
    """History: the number of samples read by the end of each window."""
    finish: Finish | None = None
    causes: tuple[str, ...] = ()
    """The failures injected on this rank."""
    is_left: bool = False
    """The consumer has left."""
    is_inside: bool = False
    """The consumer has left in the middle of a step."""
    is_urged: bool = False
    is_lost: bool = False
    """The rank has learnt that a peer's process is gone."""
    is_gone: bool = False
    is_loader_lost: bool = False
    """The process that reads and collates is gone, so present and later requests are not answered."""
    is_due: bool = False
    """History: the rank has failed, and posts an offer after that, which has to say so."""

    @property
    def has_step(self) -> bool:
        """True when the consumer can take a step at once."""
        limit = self.finish.step_limit if self.finish is not None else None
        return bool(self.queue) and (limit is None or self.queue[0].number < limit)

    @property
    def entered_steps(self) -> int:
        """The steps whose collectives the consumer has entered: all it has taken, except one it left in the middle."""
        return len(self.taken) - self.is_inside

    def get_budgets(self, round_: int) -> tuple[tuple[int, int], ...]:
        """Returns the history of budgets up to a round."""
        return tuple(change for change in self.budgets if change[0] <= round_)

    @property
    def is_done(self) -> bool:
        """True when the rank has finished or its process is gone."""
        return self.finish is not None or self.is_gone


def compute_acts(rank: ExploredRank) -> tuple[Act, ...]:
    """Returns the acts that this rank's own state allows next. The world restricts most of them further."""
    if rank.is_gone:
        return ()
    acts: list[Act] = []
    if rank.finish is None:
        if rank.reading:
            acts += [Act.READ, Act.FAIL_READ]
        if rank.collating is not None:
            acts += [Act.COLLATE, Act.FAIL_COLLATE]
        if not rank.is_loader_lost:
            acts.append(Act.LOSE_LOADER)
        if rank.post is not None:
            acts.append(Act.ANSWER)
        if not rank.is_urged:
            acts.append(Act.URGE)
        if not rank.is_lost:
            acts.append(Act.LOSE)
        acts.append(Act.DIE)
        if rank.coming:
            acts.append(Act.ACCEPT)
    if not rank.is_left:
        if rank.has_step:
            acts.append(Act.TAKE)
        if rank.has_step or rank.finish is None:
            acts.append(Act.STOP)
            if rank.taken:
                acts.append(Act.ABANDON)
    return tuple(sorted(acts))
