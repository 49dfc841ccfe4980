"""Ranks that are alike change places: the verdict of the whole graph, from fewer worlds, and only where they are alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from odb_sim.cli.main import main
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core
from odb_sim.explore.rank import ExploredRank
from odb_sim.explore.scenario import compute_scenario, replay
from odb_sim.explore.search import Search, explore
from odb_sim.explore.symmetry import AlikeSpace, find_alike, list_orders, rename
from odb_sim.explore.world import Space, World

from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, Outcome, OutcomeKind, PostOffer
from odb_ref.core.events import Event, LocalFailed, PeerLost, Report, Reported
from odb_ref.core.machine import transition
from odb_ref.core.offer import NONE
from odb_ref.core.state import State
from odb_ref.core.types import Mode
from tests.mutants.loader import Mutant, load
from tests.mutants.table import MUTANTS

PAIR = Bounds(lengths=((1, 1),) * 2, budget_tokens=1, failures=1, stops=1, losses=1)
THREE = Bounds(lengths=((2,),) * 3, failures=1, stops=1)
WORLDS = {
    "pair": PAIR,
    "three": THREE,
    "three, a loss": Bounds(lengths=((1,),) * 3, losses=1, stops=1),
    "two of three": Bounds(lengths=((1,), (2,), (1,)), stops=1, failures=1),
    "two and two": Bounds(lengths=((1,), (2, 1), (1,), (2, 1))),
    "quota": Bounds(lengths=((1, 2),) * 3, mode=Mode.QUOTA, quota_samples=4, stops=1),
    "a lost loader": Bounds(lengths=((1,),) * 2, lost_loaders=1, stops=1, losses=1),
    "another configuration": Bounds(lengths=((1,),) * 3, odd_rank=2, stops=1, losses=1),
    "inside": replace(PAIR, is_left_inside=True, losses=0),
}


def list_whole(bounds: Bounds, core: Core | None = None) -> tuple[AlikeSpace, set[World]]:
    """Every world of the whole graph."""
    space = AlikeSpace(bounds, core)
    waiting = [space.begin()]
    worlds = set(waiting)
    for world in waiting:
        for code in space.enabled(world):
            place = Space.apply(space, world, code)
            if place not in worlds:
                worlds.add(place)
                waiting.append(place)
    return space, worlds


def list_ends(search: Search) -> set[tuple[tuple[OutcomeKind | None, int, int], ...]]:
    """How ranks end, whichever they are: outcome, steps taken and causes."""
    ends = set()
    assert search.space is not None
    for world in search.iterate_worlds():
        if search.space.is_over(world, search.space.enabled(world)):
            ranks = search.space.get_ranks(world)
            ends.add(tuple(sorted(map(describe, ranks), key=str)))
    return ends


def describe(rank: ExploredRank) -> tuple[OutcomeKind | None, int, int]:
    kind = None if rank.finish is None else rank.finish.outcome.kind
    return kind, len(rank.taken), len(rank.causes)


@pytest.mark.parametrize("name", list(WORLDS))
def test_each_world_of_the_whole_graph_has_one_that_stands_for_it(name: str) -> None:
    """Nothing else left out, the worlds that are followed are the orbits of the whole graph, each once."""
    space, whole = list_whole(WORLDS[name])
    assert space.alike
    waiting = [space.begin()]
    followed = set(waiting)
    for world in waiting:
        for code in space.enabled(world):
            place = space.apply(world, code)
            if place not in followed:
                followed.add(place)
                waiting.append(place)
    orbits = {min(space._reorder(world, order) for order in space._orders) for world in whole}
    assert {min(space._reorder(world, order) for order in space._orders) for world in followed} == orbits
    assert len(followed) == len(orbits) < len(whole)
    assert all(space._find_order(world) is None for world in followed)


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_verdict_and_the_ends_are_those_of_the_whole_graph(name: str) -> None:
    whole, reduced = Search(WORLDS[name]), Search(WORLDS[name], is_reduced=True)
    full, few = whole.run(), reduced.run()
    assert full.counterexample is None and few.counterexample is None
    assert full.is_complete and few.is_complete
    assert list_ends(whole) == list_ends(reduced)
    assert few.reduction is not None and few.reduction.alike and not few.reduction.asymmetry
    assert few.states < 0.6 * full.states


def draw_bounds(draw: random.Random) -> Bounds:
    """A small world in which at least two ranks are alike."""
    shard = tuple(draw.randint(1, 3) for _ in range(draw.randint(0, 2)))
    other = tuple(draw.randint(1, 3) for _ in range(draw.randint(0, 2)))
    lengths = [shard, shard, *draw.choice(([], [], [shard], [other]))]
    draw.shuffle(lengths)
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    is_few = len(lengths) == 2
    return Bounds(
        lengths=tuple(lengths),
        budget_tokens=draw.randint(1, 4),
        window_samples=draw.randint(1, 2),
        depth_steps=draw.randint(1, 2),
        max_age_rounds=draw.randint(1, 2),
        mode=mode,
        quota_samples=draw.choice((None, draw.randint(1, 4))) if mode is Mode.QUOTA else None,
        limits=draw.choice(((), (2,))),
        rule=draw.choice((PaperRule(), Bounds(lengths=((),)).rule)),
        failures=draw.randint(0, 1),
        stops=draw.randint(0, is_few or not mode),
        losses=draw.randint(0, is_few),
        is_single_reads=draw.random() < 0.3,
        is_eager_end=draw.random() < 0.5,
        is_left_inside=draw.random() < 0.3,
        is_inline=draw.random() < 0.2,
        odd_rank=draw.choice((None, None, None, len(lengths) - 1)),
    )


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_in_random_small_worlds_the_verdict_is_that_of_the_whole_graph(first: int) -> None:
    reduced = 0
    for seed in range(first, first + 10):
        bounds = draw_bounds(random.Random(seed))
        whole, few = Search(bounds), Search(bounds, is_reduced=True)
        assert whole.run().counterexample is None, seed
        result = few.run()
        assert result.counterexample is None and result.is_complete, seed
        assert list_ends(whole) == list_ends(few), seed
        reduced += bool(result.reduction and result.reduction.alike)
    assert reduced >= 5


# Defects -----------------------------------------------------------------------------------------------------------


def make_alike(mutant: Mutant) -> Mutant:
    """The mutant in a world whose ranks are alike, with the samples of its first rank, and few faults."""
    bounds = mutant.bounds
    shard = max(bounds.lengths, key=len)[:3]
    few = {name: min(1, getattr(bounds, name)) for name in ("failures", "stops", "losses", "lost_loaders")}
    few["failures"] = min(few["failures"], 1 - few["lost_loaders"])
    return replace(
        mutant, bounds=replace(bounds, lengths=(shard, shard), accepted=bounds.accepted[:1] * 2, odd_rank=None, **few)
    )


OF_SOME_RANKS = ("the target depends on the rank", "the failure of a rank is put down to another")
"""Defects that treat ranks differently."""


@pytest.mark.parametrize("mutant", [make_alike(item) for item in MUTANTS], ids=lambda mutant: mutant.name)
def test_a_defect_is_found_among_ranks_that_are_alike_when_it_is_found_at_all(mutant: Mutant) -> None:
    """And what is found is a schedule of ranks that keep their places."""
    with load(mutant, has_invariants=False) as (core, bounds):
        full = explore(bounds, core=core, max_states=20_000)
        few = explore(bounds, core=core, max_states=20_000, is_reduced=True)
        assert (full.counterexample is None) == (few.counterexample is None)
        if few.counterexample is not None and not mutant.prelude:
            *before, last = replay(compute_scenario(bounds, few.counterexample), core)
            assert all(moment.violation is None for moment in before)
            assert last.violation is not None and last.violation.property == few.counterexample.property
            assert few.reduction is not None
            keeps_places = mutant.name in OF_SOME_RANKS or bounds.is_shared or bounds.update_samples is not None
            assert bool(few.reduction.alike) != keeps_places, few.reduction


def on_rank(rank: int, change: Callable[[tuple[State, tuple[Effect, ...]]], tuple[State, tuple[Effect, ...]]]) -> Core:
    """A core that goes wrong on one rank."""

    def step(config: Config, state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
        done = transition(config, state, event)
        return change(done) if config.rank == rank else done

    return Core(transition=step)


def blame_nobody(done: tuple[State, tuple[Effect, ...]]) -> tuple[State, tuple[Effect, ...]]:
    """An offer never says that this rank failed."""
    state, effects = done
    return state, tuple(
        PostOffer(replace(item.offer, failed_rank=NONE)) if isinstance(item, PostOffer) else item for item in effects
    )


def urge_oneself(done: tuple[State, tuple[Effect, ...]]) -> tuple[State, tuple[Effect, ...]]:
    """No property is broken: the rank is as if it had been urged."""
    state, effects = done
    return (replace(state, is_urged=True), effects) if state.round == 1 else done


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_defect_of_one_rank_number_is_found(rank: int) -> None:
    core = on_rank(rank, blame_nobody)
    full, few = explore(THREE, core=core), explore(THREE, core=core, is_reduced=True)
    assert full.counterexample is not None and few.counterexample is not None
    assert few.counterexample.property == full.counterexample.property
    assert few.reduction is not None and not few.reduction.alike and few.reduction.asymmetry


def test_ranks_that_the_core_treats_differently_keep_their_places_and_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = on_rank(1, urge_oneself)
    few = explore(PAIR, core=core, is_reduced=True)
    assert few.counterexample is None and few.is_complete and few.reduction is not None
    assert not few.reduction.alike and "rank 1 does not do what rank 0 does" in few.reduction.asymmetry
    monkeypatch.setattr("odb_sim.explore.world.Core", lambda: core)
    arguments = [
        "explore",
        "--shard-sizes",
        "2,2",
        "--lengths",
        "1",
        "--token-budget",
        "1",
        "--stops",
        "1",
        "--reduced",
    ]
    assert main(arguments) == 0
    assert "not alike, though their inputs are: rank" in capsys.readouterr().out


def test_an_exchange_that_looks_at_who_said_what_is_noticed() -> None:
    """The agreement of the first rank's offer with the others' failures forgotten."""
    core = Core(reduce=lambda offers: replace(offers[0], round_max=offers[0].round_max))
    full, few = explore(THREE, core=core), explore(THREE, core=core, is_reduced=True)
    assert full.counterexample is not None and few.counterexample is not None
    assert few.reduction is not None and "exchange" in few.reduction.asymmetry


# Which ranks, and what becomes of them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({}, ((0, 1, 2),)),
        ({"lengths": ((2,), (1,), (2,))}, ((0, 2),)),
        ({"lengths": ((1, 2), (2, 1), (1, 1, 1))}, ()),
        ({"lengths": ((), (), (2,), (2,))}, ((0, 1), (2, 3))),
        ({"is_uneven_depth": True}, ()),
        ({"odd_rank": 1}, ((0, 2),)),
        ({"odd_rank": 0}, ()),
        ({"failures": 2}, ()),
        ({"stops": 2}, ()),
        ({"losses": 2}, ()),
        ({"lost_loaders": 1}, ()),
        ({"lost_loaders": 1, "failures": 0, "losses": 1}, ((0, 1, 2),)),
    ],
)
def test_ranks_are_alike_that_read_the_same_and_of_which_one_at_most_is_at_fault(
    changes: dict[str, object], alike: tuple[tuple[int, ...], ...]
) -> None:
    assert find_alike(replace(THREE, **changes)) == alike  # type: ignore[arg-type]


def test_orders_are_those_of_each_set_of_alike_ranks() -> None:
    assert list_orders(((0, 2),), 3) == [(0, 1, 2), (2, 1, 0)]
    assert len(list_orders(((0, 1), (2, 3, 4)), 5)) == 2 * 6
    assert list_orders((), 2) == [(0, 1)]


def test_whatever_names_a_rank_is_renamed() -> None:
    order = (2, 0, 1)
    outcome = Outcome(OutcomeKind.FAILED, 1, "sample 0 of rank 1 is broken")
    assert rename(outcome, order) == Outcome(OutcomeKind.FAILED, 0, "sample 0 of rank 0 is broken")
    assert rename(Outcome(OutcomeKind.COMPLETE), order) == Outcome(OutcomeKind.COMPLETE)
    assert rename(PeerLost(2, "gone"), order) == PeerLost(1, "gone")
    assert rename((LocalFailed("the loader of rank 0 is gone"),), order) == (
        LocalFailed("the loader of rank 2 is gone"),
    )
    reports = tuple(Report(rank, "", 3, "{}") for rank in range(3))
    assert rename(Reported(reports), order) == Reported(reports)
    state = State(outcome=outcome, round=1)
    assert rename(state, order) == replace(state, outcome=rename(outcome, order))
