"""Breadth-first search through every interleaving, with the shortest schedule to a violation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core
from odb_sim.explore.measure import compute_bound
from odb_sim.explore.rank import ACTS, Act
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Space, World, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """The shortest schedule after which a property does not hold."""

    property: str
    detail: str
    schedule: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What a search has covered. ``depth`` is the greatest distance of a world from the start, in transitions."""

    states: int
    edges: int
    depth: int
    ends: int
    """The number of worlds in which nothing has to happen any more. All are proper ends unless there is a counterexample."""
    rank_states: int
    transition_bound: int
    seconds: float
    is_complete: bool
    """False when the search met a violation or its limit."""
    counterexample: Counterexample | None

    @property
    def states_per_s(self) -> float:
        """The number of worlds per second."""
        return self.states / self.seconds if self.seconds else 0.0


_PROGRESS_STATES: Final = 20_000
_NO_ACTION: Final = -1


def make_space(bounds: Bounds, core: Core | None = None) -> tuple[Space, World]:
    """Returns a space and its first world, after running one schedule without faults, so that the space knows its steps.

    Any other schedule must form the same steps (REPLAY). So the same schedule is always judged in the same way.
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
            break  # the search will meet it too, with its schedule
    return start


def explore(bounds: Bounds, *, core: Core | None = None, max_states: int | None = None) -> Exploration:
    """Checks every world that any schedule can reach, and each transition, once. Returns what was covered and found.

    A world in which nothing has to happen any more must be a proper end (FREE). The measure falls on every transition
    (TERM), so the graph has no cycle, and every schedule ends.
    """
    return Search(bounds, core=core, max_states=max_states).run()


class Search:
    """A breadth-first search; `run` it once. Afterwards it can list the worlds and edges of the graph it has walked."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        core: Core | None = None,
        max_states: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """``on_progress`` is called now and then with the number of worlds met."""
        self._bounds = bounds
        self._core = core
        self._max_states = max_states
        self._on_progress = on_progress
        self._parents: dict[World, World | None] = {}
        self._edges = 0
        self._depth = 0
        self._ends = 0
        self._is_complete = False
        self.space: Space | None = None

    def run(self) -> Exploration:
        """Returns the exploration."""
        began = time.perf_counter()
        self.space = space = Space(self._bounds, self._core)
        try:
            found = self._walk(space, _begin(space))
        except Breach as violation:
            found = Counterexample(property=violation.property, detail=violation.detail, schedule=())
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
                self._on_progress(len(parents))
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
        # The edge was walked, so no earlier action of the same world can raise.
        return decode(next(code for code in space.enabled(parent) if space.apply(parent, code) == world))

    def iterate_edges(self) -> Iterator[tuple[World, Action, World]]:
        """Yields the edges of the walked graph, in the order their worlds were met."""
        if self.space is not None:
            for world in self._parents:
                for code in self.space.enabled(world):
                    yield world, decode(code), self.space.apply(world, code)

    def iterate_worlds(self) -> Iterator[World]:
        """Returns an iterator over the worlds, in the order they were met."""
        return iter(self._parents)
