"""Loading what a rank saved, after each event of random worlds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from odb_sim.explore.driver import Core

from odb_ref.core.config import Config
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.machine import transition
from odb_ref.core.resume import RoundStart, compute_round_start, resume
from odb_ref.core.state import Phase, State
from tests.proofs.conftest import Model
from tests.proofs.wire import show_state, write_config
from tests.proofs.worlds import Rank, begin, run_world

AT_ONCE = 20
Save = Callable[[State], RoundStart]


def _show_loaded(config: Config, state: State, prints: dict[str, int], save: Save) -> str:
    loaded = "-"
    if state.phase in (Phase.FILL, Phase.OFFER):
        first = save(state)
        carried = tuple(sample for sample in state.window if sample.position in first.carried)
        try:
            loaded = show_state(*resume(config, first, carried), prints)
        except UsageError:  # what nobody can have saved (R10.6)
            loaded = "refused"
    return loaded


def _list_loaded(rank: Rank, prints: dict[str, int], save: Save = compute_round_start) -> list[str]:
    state, _ = begin(Core(), rank.config, rank.budgets)
    lines = [_show_loaded(rank.config, state, prints, save)]
    for event in rank.log:
        try:
            state, _ = transition(rank.config, state, event)
        except (UsageError, PeerError):
            lines.append("refused")
        else:
            lines.append(_show_loaded(rank.config, state, prints, save))
    return lines


def _write_case(rank: Rank) -> str:
    return " ".join(["loading", write_config(rank.config, rank.budgets), str(len(rank.events)), *rank.events])


@pytest.mark.parametrize("first", range(0, 60, AT_ONCE))
def test_the_model_loads_as_the_python_does(model: Model, first: int) -> None:
    """Checks: RESUME (the link from proof to code)."""
    worlds = [run_world(seed, most_events=600) for seed in range(first, first + AT_ONCE)]
    expected = [line for world in worlds for rank in world.ranks for line in _list_loaded(rank, world.prints)]
    found = model(" ".join(_write_case(rank) for world in worlds for rank in world.ranks))
    differing = [(mine, theirs) for mine, theirs in zip(expected, found, strict=True) if mine != theirs]
    assert not differing, differing[0]


def test_a_forgotten_mark_is_noticed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: these worlds carry samples into a round, and have marks when they are saved."""
    worlds = [run_world(seed, most_events=600) for seed in range(AT_ONCE)]
    found = model(" ".join(_write_case(rank) for world in worlds for rank in world.ranks))
    for forgotten in ("marks", "carried", "global_samples", "planned_steps"):
        empty = getattr(RoundStart(), forgotten)

        def save(state: State, name: str = forgotten, value: object = empty) -> RoundStart:
            return replace(compute_round_start(state), **{name: value})

        lines = [line for world in worlds for rank in world.ranks for line in _list_loaded(rank, world.prints, save)]
        assert sum(mine != theirs for mine, theirs in zip(lines, found, strict=True)) > 20, forgotten
