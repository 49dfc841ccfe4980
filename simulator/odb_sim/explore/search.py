"""Breadth-first search through every interleaving, and the shortest schedule to what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core
from odb_sim.explore.measure import compute_bound
from odb_sim.explore.rank import ACTS, Act
from odb_sim.explore.symmetry import AlikeSpace, Asymmetry, find_alike
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Space, World, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """The shortest schedule after which a property does not hold."""

    property: str
    detail: str
    schedule: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReduction:
    """What a search has left out."""

    ordered: int
    """Worlds of which one rank's actions were followed, not all."""
    forgotten: int
    """States of a rank in which nothing can happen to it any more and that nobody can tell from another."""
    alike: tuple[tuple[int, ...], ...]
    """The sets of ranks that have changed places."""
    exchanged: int
    """Transitions to a world with its ranks in another order than the one that stands for it."""
    asymmetry: str
    """Why ranks with equal inputs did not change places: the core does not treat them alike. Empty when it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What a search has covered. ``depth`` is the most transitions any world is away from the start."""

    states: int
    edges: int
    depth: int
    ends: int
    """Worlds in which nothing has to happen any more: all of them proper ends, unless there is a counterexample."""
    rank_states: int
    transition_bound: int
    seconds: float
    is_complete: bool
    """False when the search met a violation or its limit."""
    counterexample: Counterexample | None
    reduction: SearchReduction | None = None
    """What was left out, by a search that leaves something out."""

    @property
    def states_per_s(self) -> float:
        """Worlds a second."""
        return self.states / self.seconds if self.seconds else 0.0


OnProgress = Callable[[int, int, int], None]
"""Called now and then with states, edges and depth."""

_PROGRESS_STATES: Final = 20_000
_NO_ACTION: Final = -1


def make_space(bounds: Bounds, core: Core | None = None) -> tuple[Space, World]:
    """Returns a space and its first world, after one undisturbed schedule: what its steps hold is then known.

    Any other schedule must form the same steps (REPLAY); so the same schedule is always judged in the same way.
    Raises: Breach.
    """
    space = Space(bounds, core)
    return space, _begin(space)


def _begin(space: Space) -> World:
    start = world = space.begin()
    while codes := [code for code in space.enabled(world) if code % ACTS < Act.URGE]:
        try:
            world = space.apply(world, codes[0])
        except Breach:
            break  # The search meets it too, and knows the way.
    return start


def _find_violation(bounds: Bounds, core: Core | None, schedule: tuple[Action, ...]) -> Breach | None:
    """Returns what the last action of the schedule shows not to hold; None when all does, or the schedule is not possible."""
    done = 0
    try:
        space, world = make_space(bounds, core)
        for action in schedule:
            done += 1
            if action.code not in space.enabled(world):
                return None
            world = space.apply(world, action.code)
            space.check(world)
        if space.is_over(world, space.enabled(world)):
            space.check_over(world)
    except Breach as violation:
        return violation if done == len(schedule) else None
    return None


def explore(
    bounds: Bounds,
    *,
    core: Core | None = None,
    max_states: int | None = None,
    on_progress: OnProgress | None = None,
    is_reduced: bool = False,
) -> Exploration:
    """Returns every world that any schedule can reach, each checked once, and each transition.

    A world in which nothing has to happen any more must be a proper end (FREE). The measure falls on every transition
    (TERM), so the graph has no cycle and no schedule goes on for ever. With ``is_reduced``, where the actions of several ranks
    commute, one order of them is followed, see `Space.reduce`, and of worlds that differ only in which of several alike ranks
    is which one stands for all, see `AlikeSpace`: the same verdict from fewer worlds, and not always by the shortest schedule.
    """
    return Search(bounds, core=core, max_states=max_states, on_progress=on_progress, is_reduced=is_reduced).run()


class Search:
    """A breadth-first search; `run` once. Afterwards it can tell the edges of the graph it has walked."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        core: Core | None = None,
        max_states: int | None = None,
        on_progress: OnProgress | None = None,
        is_reduced: bool = False,
    ) -> None:
        self._bounds = bounds
        self._is_reduced = is_reduced
        self._core = core
        self._max_states = max_states
        self._on_progress = on_progress
        self._parents: dict[World, World | None] = {}
        self._edges = 0
        self._depth = 0
        self._ends = 0
        self._ordered = 0
        self._is_complete = False
        self.space: Space | None = None

    def run(self) -> Exploration:
        """Returns the exploration."""
        began = time.perf_counter()
        asymmetry = ""
        if self._is_reduced and find_alike(self._bounds):
            try:
                space = AlikeSpace(self._bounds, self._core, is_forgetful=True)
                found = self._place(space, self._explore(space))
                return self._conclude(found, space, asymmetry, began)
            except Asymmetry as error:
                asymmetry = str(error)
        whole = Space(self._bounds, self._core, is_forgetful=self._is_reduced)
        return self._conclude(self._explore(whole), whole, asymmetry, began)

    def _explore(self, space: Space) -> Counterexample | None:
        self.space = space
        self._parents = {}
        self._edges = self._depth = self._ends = self._ordered = 0
        try:
            start = _begin(space)
        except Breach as violation:
            return Counterexample(property=violation.property, detail=violation.detail, schedule=())
        return self._walk(space, start)

    def _place(self, space: AlikeSpace, found: Counterexample | None) -> Counterexample | None:
        """Returns what was found with the schedule of ranks that keep their places.

        Raises: Asymmetry when that schedule does not show it.
        """
        if found is None:
            return None
        placed = space.place(found.schedule)
        shown = _find_violation(self._bounds, self._core, placed)
        if shown is None or shown.property != found.property:
            raise Asymmetry(f"{found.property} is broken only when ranks have changed places")
        return replace(found, detail=shown.detail, schedule=placed)

    def _conclude(self, found: Counterexample | None, space: Space, asymmetry: str, began: float) -> Exploration:
        reduction = SearchReduction(
            ordered=self._ordered,
            forgotten=space.forgotten,
            alike=space.alike if isinstance(space, AlikeSpace) else (),
            exchanged=space.exchanged if isinstance(space, AlikeSpace) else 0,
            asymmetry=asymmetry,
        )
        return Exploration(
            states=len(self._parents),
            edges=self._edges,
            depth=self._depth,
            ends=self._ends,
            rank_states=space.count_rank_states(),
            transition_bound=compute_bound(self._bounds),
            seconds=time.perf_counter() - began,
            is_complete=self._is_complete,
            counterexample=found,
            reduction=reduction if self._is_reduced else None,
        )

    def _walk(self, space: Space, start: World) -> Counterexample | None:
        parents = self._parents
        enabled, apply, check, is_over = space.enabled, space.apply, space.check, space.is_over
        parents[start] = None
        layer = [start]
        limit = self._max_states or 2**62
        next_report = _PROGRESS_STATES
        while layer:
            following: list[World] = []
            for world in layer:
                code = _NO_ACTION
                try:
                    codes = enabled(world)
                    if is_over(world, codes):
                        self._ends += 1
                        space.check_over(world)
                    if self._is_reduced:
                        possible = len(codes)
                        codes = space.reduce(world, codes)
                        self._ordered += len(codes) < possible
                    self._edges += len(codes)
                    for code in codes:
                        place = apply(world, code)
                        if place not in parents:
                            check(place)
                            parents[place] = world
                            following.append(place)
                except Breach as violation:
                    schedule = self._find_schedule(space, world)
                    if code != _NO_ACTION:
                        schedule = (*schedule, decode(code))
                    return Counterexample(property=violation.property, detail=violation.detail, schedule=schedule)
            if len(parents) > limit:
                return None
            if self._on_progress is not None and len(parents) >= next_report:
                next_report = len(parents) + _PROGRESS_STATES
                self._on_progress(len(parents), self._edges, self._depth)
            self._depth += bool(following)
            layer = following
        self._is_complete = True
        return None

    def _find_schedule(self, space: Space, world: World) -> tuple[Action, ...]:
        """Returns the shortest schedule to ``world``."""
        actions: list[Action] = []
        while (parent := self._parents[world]) is not None:
            actions.append(self._find_action(space, parent, world))
            world = parent
        return tuple(reversed(actions))

    def _find_action(self, space: Space, parent: World, world: World) -> Action:
        # A way that was walked: an earlier action of the same world cannot be in the way.
        return decode(next(code for code in self._follow(space, parent) if space.apply(parent, code) == world))

    def _follow(self, space: Space, world: World) -> list[int]:
        """Returns the actions that were followed from ``world``."""
        codes = space.enabled(world)
        return space.reduce(world, codes) if self._is_reduced else codes

    def iterate_edges(self) -> Iterator[tuple[World, Action, World]]:
        """Yields the edges of the walked graph, in the order in which the worlds were met."""
        if self.space is not None:
            for world in self._parents:
                for code in self._follow(self.space, world):
                    yield world, decode(code), self.space.apply(world, code)

    def iterate_worlds(self) -> Iterator[World]:
        """Returns the worlds, in the order in which they were met."""
        return iter(self._parents)
