"""The coupled system as a pure transition relation: W ranks, the exchange between them, and trainers in lock-step.

- The exchange answers once all ranks have posted; each rank gets the answer at any later time.
- A trainer takes step n only when every trainer has taken step n - 1, because each step holds a collective.
- At any time a read or a collation ends or fails, a consumer leaves between steps or inside one, or a process is killed.
  At any time after another's consumer has left, a rank is urged. At any time after a process was killed, a rank learns of it.
- If a rank reads and collates in its consumer's thread (``Bounds.is_inline``), it does neither while that is in a step, unless
  the rank is urged, nor after the consumer has left.
- At any time a rank accepts another token budget, as often as the bounds allow.
- At any time a process that only reads and collates for a rank is lost. The rank has then failed, and its requests are not
  answered.

A world is a short tuple of small integers. They number the states of ranks and of the exchange that `Space` has met before.
The real core runs once for each different state of a rank and each event, so a world costs only a few look-ups.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

from odb_ref.core.effects import Post
from odb_ref.core.exchange import Answer
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.checks import (
    RankChecks,
    RankProgress,
    check_end,
    check_stillness,
    check_together,
    compute_progress,
)
from odb_sim.explore.driver import Core, RankDriver, answer_posts
from odb_sim.explore.measure import compute_measure
from odb_sim.explore.rank import ACTS, Act, ExploredRank, compute_acts
from odb_sim.explore.violation import Breach

World = tuple[int, ...]
"""The number of the shared state, then the number of each rank's state, in a `Space`."""


class Action(NamedTuple):
    """What happens next, and the rank it happens to."""

    rank: int
    act: Act

    @property
    def code(self) -> int:
        """The action as a number."""
        return self.rank * ACTS + self.act

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.act.name.lower().replace('_', ' ')}"


def decode(code: int) -> Action:
    """Returns the action with this number."""
    rank, act = divmod(code, ACTS)
    return Action(rank, Act(act))


class Shared(NamedTuple):
    """The state that belongs to no single rank. Sets of ranks are bit masks."""

    answer: int = 0
    """The number of the answer that some ranks still wait for; 0 if there is none."""
    owed: int = 0
    """The ranks that the answer has not reached."""
    failures: int = 0
    stops: int = 0
    losses: int = 0
    lost_loaders: int = 0
    """These four count what has gone wrong so far."""
    left: int = 0
    """The ranks whose consumers have left, which is a reason to urge the others."""
    gone: int = 0


T = TypeVar("T")


class Numbers(Generic[T]):
    """Numbers values in the order in which they are first met."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._known: dict[T, int] = {}

    def find(self, value: T) -> int | None:
        """Returns the number of a value, or None if it has not been met."""
        return self._known.get(value)

    def number(self, value: T) -> int:
        """Returns the number of a value, which is a new one if the value has not been met."""
        number = self._known.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


_NEW: Final = -1
# Plain integers, because the walk compares them millions of times.
_READ: Final = int(Act.READ)
_ANSWER: Final = int(Act.ANSWER)
_TAKE: Final = int(Act.TAKE)
_COLLATE: Final = int(Act.COLLATE)
_URGE: Final = int(Act.URGE)
_LOSE: Final = int(Act.LOSE)
_STOP: Final = int(Act.STOP)
_DIE: Final = int(Act.DIE)
_ABANDON: Final = int(Act.ABANDON)
_LOSE_LOADER: Final = int(Act.LOSE_LOADER)
_ACCEPT: Final = int(Act.ACCEPT)
_FAILURES: Final = (int(Act.FAIL_READ), int(Act.FAIL_COLLATE))
_WORK: Final = frozenset((_READ, _COLLATE, *_FAILURES))


class Space:
    """All worlds within some bounds, made when they are first met.

    ``begin``, ``enabled`` and ``apply`` are the whole transition relation. Equal worlds are equal tuples.
    """

    def __init__(self, bounds: Bounds, core: Core | None = None) -> None:
        self.bounds = bounds
        core = core or Core()
        self._core = core
        self._count = bounds.ranks
        self._configs = [bounds.compute_config(rank) for rank in range(bounds.ranks)]
        self._drivers = [
            RankDriver(bounds, config, bounds.compute_order() if bounds.is_shared else bounds.compute_shard(rank), core)
            for rank, config in enumerate(self._configs)
        ]
        self._checks = RankChecks(bounds)
        self._full = (1 << bounds.ranks) - 1
        self._states = Numbers[tuple[int, ExploredRank]]()
        """Which rank, and its state."""
        # What the walk needs to know of each of them.
        self._acts: list[tuple[int, ...]] = []
        self._taken: list[int] = []
        self._entered: list[int] = []
        self._posts: list[int] = []
        self._progress: list[int] = []
        self._next: list[list[int]] = []
        self._told: dict[tuple[int, int], int] = {}
        self._shared = Numbers[Shared]()
        self._shared_next: dict[tuple[int, int], int] = {}
        self._all_posts = Numbers[Post | None]()
        self._all_posts.number(None)
        self._answers = Numbers[Answer | None]()
        self._answers.number(None)
        self._answers_to: dict[tuple[int, ...], int] = {}
        """The number of the answer to the posts of all ranks."""
        self._all_progress = Numbers[RankProgress]()
        self._together: set[tuple[int, ...]] = set()

    def begin(self) -> World:
        """Returns the world at the start of an epoch. Raises: Breach."""
        ranks = [self._number_rank(i, driver.begin()) for i, driver in enumerate(self._drivers)]
        world = (self._settle(self._shared.number(Shared()), ranks), *ranks)
        self.check(world)
        return world

    def enabled(self, world: World) -> list[int]:
        """Returns every possible action, as ``rank * ACTS + act`` (see `decode`)."""
        shared = self._shared.values[world[0]]
        taken, bounds = self._taken, self.bounds
        ranks = world[1:]
        entered = self._entered
        least = min([entered[rank] for rank in ranks])
        most = max([taken[rank] for rank in ranks])
        codes: list[int] = []
        for i, rank in enumerate(ranks):
            others = ~(1 << i)
            is_away = bounds.is_inline and self._is_away(rank, least)
            for act in self._acts[rank]:
                if is_away and act in _WORK:
                    continue
                if act < _ANSWER:
                    pass
                elif act == _ANSWER:
                    if not shared.owed & ~others:
                        continue
                elif act == _TAKE:
                    if taken[rank] != least:
                        continue
                elif act == _URGE:
                    if not (shared.left & others or bounds.is_urged_freely):
                        continue
                elif act == _LOSE:
                    if not shared.gone & others:
                        continue
                elif act == _STOP:
                    if shared.stops == bounds.stops or taken[rank] != least:
                        continue
                elif act == _ABANDON:
                    # If another rank has taken the next step, this one is over.
                    if shared.stops == bounds.stops or not bounds.is_left_inside or taken[rank] != most:
                        continue
                elif act == _DIE:
                    if shared.losses == bounds.losses:
                        continue
                elif act == _LOSE_LOADER:
                    if shared.lost_loaders == bounds.lost_loaders:
                        continue
                elif act == _ACCEPT:
                    pass
                elif shared.failures == bounds.failures:
                    continue
                codes.append(i * ACTS + act)
        return codes

    def _is_away(self, number: int, least: int) -> bool:
        """Returns True when the consumer's thread, which reads and collates, is not free to do so, and no other thread does it
        instead.
        """
        _, rank = self._states.values[number]
        return rank.is_left or (self._taken[number] != least and not rank.is_urged)

    def apply(self, world: World, code: int) -> World:
        """Returns the world after a possible action.

        Raises: Breach when the core refuses it, or a rank by itself breaks a property.
        """
        i, act = divmod(code, ACTS)
        number, rank = world[0], world[i + 1]
        if act in (_ANSWER, _LOSE):
            # The news comes from outside the rank: the answer, or the rank that is gone.
            shared = self._shared.values[number]
            news = shared.answer if act == _ANSWER else -1 - self._find_gone(shared, i)
            after = self._told.get((rank, news), _NEW)
            if after < 0:
                after = self._told[rank, news] = self._advance(i, rank, act, shared)
        else:
            after = self._next[rank][act]
            if after < 0:
                after = self._next[rank][act] = self._advance(i, rank, act, self._shared.values[number])
        ranks = [*world[1:]]
        ranks[i] = after
        if act >= _STOP or act == _ANSWER or self._posts[after] != self._posts[rank]:
            if act >= _STOP or act == _ANSWER:
                following = self._shared_next.get((number, code), _NEW)
                if following < 0:
                    following = self._shared.number(self._share(self._shared.values[number], 1 << i, act))
                    self._shared_next[number, code] = following
                number = following
            number = self._settle(number, ranks)
        return (number, *ranks)

    def check(self, world: World) -> None:
        """Checks everything that must hold of the ranks together. Raises: Breach."""
        key = tuple([self._progress[rank] for rank in world[1:]])
        if key not in self._together:
            check_together([self._all_progress.values[number] for number in key])
            self._together.add(key)

    def is_over(self, world: World, codes: list[int]) -> bool:
        """Returns True when nothing *has* to happen any more; ``codes`` are the actions that can happen.

        A fault may happen but need not, so a world in which ranks wait for a fault is a deadlock.
        """
        for code in codes:
            i, act = divmod(code, ACTS)
            if act < _URGE or act == _LOSE or (act == _URGE and self._shared.values[world[0]].left & ~(1 << i)):
                return False
        return True

    def check_over(self, world: World) -> None:
        """Checks that a world in which nothing has to happen any more is a proper end.

        Raises: Breach when it is a deadlock, or not an end that the properties promise.
        """
        check_stillness([self._all_progress.values[self._progress[rank]] for rank in world[1:]])
        check_end(self.bounds, self.get_ranks(world))

    def get_ranks(self, world: World) -> tuple[ExploredRank, ...]:
        """Returns the ranks of a world."""
        return tuple(self._states.values[rank][1] for rank in world[1:])

    def get_shared(self, world: World) -> Shared:
        """Returns the shared state of a world."""
        return self._shared.values[world[0]]

    def get_answer(self, world: World) -> Answer | None:
        """Returns the answer that some ranks still wait for."""
        return self._answers.values[self.get_shared(world).answer]

    def compute_measure(self, world: World) -> int:
        """Returns the termination measure of a world; see `measure.compute_measure`."""
        return sum(
            compute_measure(self.bounds, config, rank)
            for config, rank in zip(self._configs, self.get_ranks(world), strict=True)
        )

    def count_rank_states(self) -> int:
        """Returns how many different states of a rank have been met."""
        return len(self._states.values)

    def _advance(self, i: int, number: int, act: int, shared: Shared) -> int:
        """Returns the number of rank ``i`` after ``act``. After `begin`, ranks' cores run only in this method."""
        _, before = self._states.values[number]
        lost = self._find_gone(shared, i) if act == _LOSE else None
        after = self._drivers[i].act(before, Act(act), self._answers.values[shared.answer], lost)
        old, new = (compute_measure(self.bounds, self._configs[i], rank) for rank in (before, after))
        if not 0 <= new < old:
            raise Breach("TERM", f"rank {i}: the measure goes from {old} to {new}")
        return self._number_rank(i, after)

    def _find_gone(self, shared: Shared, i: int) -> int:
        """Returns the lowest rank other than ``i`` whose process is gone."""
        return next(rank for rank in range(self._count) if rank != i and shared.gone >> rank & 1)

    def _number_rank(self, i: int, rank: ExploredRank) -> int:
        if (known := self._states.find((i, rank))) is not None:
            return known
        self._checks.check(self._configs[i], rank)
        self._acts.append(tuple(int(act) for act in compute_acts(rank)))
        self._taken.append(len(rank.taken))
        self._entered.append(rank.entered_steps)
        self._next.append([_NEW] * ACTS)
        self._posts.append(self._all_posts.number(rank.post))
        self._progress.append(self._all_progress.number(compute_progress(rank)))
        return self._states.number((i, rank))

    def _share(self, shared: Shared, bit: int, act: int) -> Shared:
        """Returns the shared state after ``act`` of the rank with ``bit``."""
        if act == _ANSWER:
            owed = shared.owed & ~bit
            return shared._replace(owed=owed, answer=shared.answer if owed else 0)
        if act in (_STOP, _ABANDON):
            return shared._replace(stops=shared.stops + 1, left=shared.left | bit)
        if act == _DIE:
            return shared._replace(losses=shared.losses + 1, gone=shared.gone | bit)
        if act == _LOSE_LOADER:
            return shared._replace(lost_loaders=shared.lost_loaders + 1)
        if act in _FAILURES:
            return shared._replace(failures=shared.failures + 1)
        return shared

    def _settle(self, number: int, ranks: list[int]) -> int:
        """Returns the number of the shared state after the exchange has answered, if all ranks have posted."""
        shared = self._shared.values[number]
        if shared.owed:
            return number
        posts = tuple([self._posts[rank] for rank in ranks])
        if not all(posts):
            return number
        return self._shared.number(shared._replace(owed=self._full, answer=self._answer(posts)))

    def _answer(self, posts: tuple[int, ...]) -> int:
        number = self._answers_to.get(posts)
        if number is None:
            known = [post for post in (self._all_posts.values[post] for post in posts) if post is not None]
            number = self._answers_to[posts] = self._answers.number(answer_posts(self._core, tuple(known)))
        return number
