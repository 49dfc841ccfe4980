"""Ranks that draw from a common order (R14): the Python beside the proved model, transition by transition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import pytest
from odb_sim.explore.driver import Core

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.shards import Draw
from odb_ref.core.effects import Effect, Post, PostCounts, Read
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.events import Counted, Event, SamplesRead
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode
from tests.mutants.loader import Mutant, load
from tests.proofs.conftest import Model
from tests.proofs.wire import show_list, show_state, write_config, write_event, write_integers
from tests.proofs.worlds import Rank, Rates, World, make_mutants, make_world

WORLDS = 240
AT_ONCE = 40
LEAST = {
    "quota": 20,
    "packed": 20,
    "complete": 20,
    "stopped": 5,
    "failed": 5,
    "mismatch": 2,
    "a draw after the first": 40,
    "nothing is drawn": 20,
}
"""The minimum number of worlds that must meet each case."""


class SharedWorld(World):
    """Ranks that draw their input from one order. No peer is lost, because the model has no losses with drawing ranks."""

    def __init__(self, world: World, update_samples: int | None = None) -> None:
        self.order = [sample for rank in world.ranks for sample in rank.source]
        self.places: dict[int, list[int]] = {}
        updates = {} if update_samples is None else {
            "update_samples": update_samples, "mode": Mode.JOIN, "quota_samples": None, "padding_share": update_samples,
        }  # fmt: skip
        configs = [replace(rank.config, shared_samples=len(self.order), **updates) for rank in world.ranks]
        rates: Rates = replace(world.rates, lose=0.0, full=0.0)
        super().__init__(configs, [()] * len(configs), rates, world.rng, world.core)
        for index, rank in enumerate(self.ranks):
            draw = rank.state.draw
            self.places[index] = list(range(draw.first, draw.first + draw.count))
            rank.lines[0] += self._show_books(index, ())

    def _show_books(self, index: int, effects: Sequence[Effect]) -> str:
        """Returns what the rank wants, how far the order is drawn, and what the rank has drawn from it."""
        want = next((effect.wanted for effect in effects if isinstance(effect, PostCounts)), None)
        return (
            f" | {'-' if want is None else want} | {self.ranks[index].state.draw.end} | {show_list(self.places[index])}"
        )

    def handle(self, index: int, event: Event) -> None:
        """Makes the event happen. Sums at the wrong time, or wrong ones, still contain what all want."""
        rank = self.ranks[index]
        if isinstance(event, Counted):
            event = replace(event, wants=event.wants or (1,) * len(self.ranks))
        wants = f" {write_integers(event.wants)}" if isinstance(event, Counted) else ""
        rank.events.append(write_event(event, self.prints) + wants)
        before = rank.state
        try:
            rank.state, effects = self.core.transition(rank.config, before, event)
        except (UsageError, PeerError):
            rank.lines.append("refused")
            return
        for effect in effects:
            if isinstance(effect, Post):
                rank.waiting = effect
            if isinstance(effect, Read) and effect.first is not None:
                self.places[index].extend(range(effect.first, effect.first + effect.count))
        rank.lines.append(show_state(rank.state, effects, self.prints) + self._show_books(index, effects))
        self._note_shared(rank, before.draw)
        if rank.state.outcome is not None and before.outcome is None:
            self._reach(str(rank.state.outcome.kind), True)

    def _note_shared(self, rank: Rank, before: Draw) -> None:
        config, draw = rank.config, rank.state.draw
        self._reach("quota", config.quota_samples is not None)
        self._reach("packed", config.layout is Layout.PACKED)
        self._reach("a draw after the first", draw is not before and draw.count > 0)
        self._reach("nothing is drawn", draw is not before and not draw.count)
        is_waiting = rank.state.phase is Phase.COUNT and not rank.state.aligned
        self._reach("samples wait for their update", is_waiting and bool(rank.state.window))

    def _read(self, index: int, state: State) -> SamplesRead:
        """Returns a part of what was drawn."""
        places = self.places[index][state.read_samples :][: self.rng.randint(1, state.wanted_samples)]
        read = tuple(replace(self.order[p], position=i) for i, p in enumerate(places, state.read_samples))
        return SamplesRead(read, is_ended=False)


def run_shared_world(
    seed: int, core: Core | None = None, layouts: type[Layout] = Layout, *, is_update: bool = False
) -> SharedWorld:
    """Runs the world of a seed whose ranks share an order, also in updates of one to five portions."""
    world = make_world(seed, core or Core(), layouts)
    ranks = len(world.ranks)
    update_samples = random.Random(f"{seed}: updates").choice((1, 2, 3, 10, 30, 90)) * ranks + seed % ranks
    return SharedWorld(world, update_samples if is_update else None).run()


def find_shared_difference(model: Model, worlds: Sequence[SharedWorld]) -> str | None:
    """Returns the first line that differs from the model's, with the Python's. All worlds are one question."""
    asked, expected = [], []
    for world in worlds:
        for rank in world.ranks:
            config = rank.config
            update, is_packed = config.update_samples or 0, int(config.layout is Layout.PACKED)
            head = f"shared {config.world_size} {config.shared_samples} {update} {is_packed}"
            asked.append(f"{head} {write_config(config, rank.budgets)} {len(rank.events)} {' '.join(rank.events)}")
            expected += rank.lines
    said = model(" ".join(asked))
    for number, (python, answer) in enumerate(zip_longest(expected, said, fillvalue="nothing")):
        if python != answer:
            return f"line {number}:\n before {expected[number - 1]}\n python {python}\n model  {answer}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, WORLDS, AT_ONCE))
def test_ranks_that_draw_make_the_same_transitions_as_the_model(model: Model, first: int) -> None:
    """Spec: R14.2, R14.3, R14.4, R14.5. Checks: DEAL, ALIGN, CONSERVE, ABORT, STOP, QUOTA (the link from proof to code)."""
    worlds = [run_shared_world(seed) for seed in range(first, first + AT_ONCE)]
    assert (difference := find_shared_difference(model, worlds)) is None, difference


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, WORLDS, AT_ONCE))
def test_in_updates_ranks_that_draw_make_the_same_transitions_as_the_model(model: Model, first: int) -> None:
    """Spec: R16.3, R16.4. Checks: UPDATE, DEAL, ALIGN, CONSERVE, ABORT, STOP (the link from proof to code)."""
    worlds = [run_shared_world(seed, is_update=True) for seed in range(first, first + AT_ONCE)]
    assert (difference := find_shared_difference(model, worlds)) is None, difference
    reached = sum((world.reached for world in worlds), Counter[str]())
    cases = ("a draw after the first", "nothing is drawn", "samples wait for their update", "complete")
    assert all(reached[case] >= AT_ONCE // 8 for case in cases), reached


@pytest.mark.deep
def test_random_worlds_of_shared_shards_reach_what_they_must() -> None:
    """The comparison above is only worth as much as it visits."""
    reached = sum((run_shared_world(seed).reached for seed in range(WORLDS)), Counter[str]())
    missed = {case: (reached[case], least) for case, least in LEAST.items() if reached[case] < least}
    assert not missed, f"met in too few of {WORLDS} worlds, (found, least): {missed}"


MUTANTS = make_mutants(
    "DEAL",
    (
        "asks in the round before",
        "rounds",
        "compute_shared_window(round_, state",
        "compute_shared_window(round_ - 1, state",
    ),
    ("the carried are not counted", "rounds", "carried_tokens=carried_tokens)", "carried_tokens=0)"),
    (
        "the end is one place early",
        "rounds",
        "draw.end == config.shared_samples",
        "draw.end >= config.shared_samples - 1",
    ),
)
UPDATE_MUTANTS = make_mutants(
    "DEAL",
    (
        "the first round draws",
        "rounds",
        "state.round % config.update_rounds == 0",
        "state.round % config.update_rounds < 0",
    ),
    ("a portion keeps a half", "batching.updates", "KEPT_SHARE: Final = 3", "KEPT_SHARE: Final = 2"),
    ("what is held is not told", "rounds", "return 0, carried_tokens", "return 0, 0"),
    ("a rank without a sample is dry", "rounds", "held = max(1, held)", "held = max(0, held)"),
    ("what is read is lost in a round without a step", "rounds", "return (), state.window", "return (), ()"),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS + UPDATE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_rank_that_draws_otherwise_is_noticed(model: Model, mutant: Mutant) -> None:
    is_update = mutant in UPDATE_MUTANTS
    with load(mutant, has_invariants=False) as (core, bounds):
        layouts = type(bounds.layout)
        runs = ([run_shared_world(seed, core, layouts, is_update=is_update)] for seed in range(WORLDS))
        assert any(find_shared_difference(model, worlds) for worlds in runs), "survives"
