"""The explorer itself: what it counts, what it finds, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import networkx
import pytest

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Agreed, Collated, ConsumerStopped, Counted, PeerLost, Reported, StepTaken, Urged
from odb_ref.core.machine import transition
from odb_ref.core.rules import OdbRule
from odb_ref.core.state import Phase
from simulator.cli import main
from simulator.explore.bounds import Bounds, compute_lengths
from simulator.explore.checks import compute_fewest_groups
from simulator.explore.measure import compute_bound
from simulator.explore.rank import ACTS, Act
from simulator.explore.scenario import Scenario, read_scenario, replay, write_scenario
from simulator.explore.search import Search, explore, make_space
from simulator.explore.suites import FULL, SMALL
from simulator.explore.world import Action, Space, World, decode
from tests.mutants.loader import load
from tests.mutants.table import MUTANTS


def walk_slowly(bounds: Bounds) -> tuple[set[World], int, int]:
    """Worlds, edges and depth by the plainest search there is."""
    space = Space(bounds)
    depths = {space.begin(): 0}
    waiting = list(depths)
    edges = 0
    for world in waiting:
        for code in space.enabled(world):
            edges += 1
            place = space.apply(world, code)
            if place not in depths:
                depths[place] = depths[world] + 1
                waiting.append(place)
    return set(depths), edges, max(depths.values())


@pytest.mark.parametrize("name", ["one rank", "uneven", "depth 1, failures and stops", "quota without a number"])
def test_search_covers_what_a_plain_search_covers(name: str) -> None:
    worlds, edges, depth = walk_slowly(SMALL[name])
    result = explore(SMALL[name])
    assert (result.states, result.edges, result.depth) == (len(worlds), edges, depth)
    assert result.depth <= result.transition_bound


@pytest.mark.parametrize("name", list(SMALL))
def test_every_property_holds_in_every_interleaving(name: str) -> None:
    """Checks: ALIGN, CONSERVE, COVER, ONCE, QUOTA, FREE, TERM, ABORT, RELEASE, STOP, BUDGET, AGE, WEIGHT."""
    result = explore(SMALL[name])
    assert result.counterexample is None
    assert result.is_complete


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FULL if name not in SMALL])
def test_every_property_holds_in_every_interleaving_of_large_worlds(name: str) -> None:
    """Checks: ALIGN, CONSERVE, COVER, ONCE, QUOTA, FREE, TERM, ABORT, RELEASE, STOP, BUDGET, AGE, WEIGHT."""
    result = explore(FULL[name])
    assert result.counterexample is None
    assert result.is_complete


def test_graph_has_no_cycle_and_one_start() -> None:
    search = Search(SMALL["depth 1, failures and stops"])
    result = search.run()
    graph = networkx.DiGraph((world, place) for world, _, place in search.iterate_edges())
    assert networkx.is_directed_acyclic_graph(graph)
    assert graph.number_of_nodes() == result.states
    assert [world for world, degree in graph.in_degree() if degree == 0] == [next(iter(search.iterate_worlds()))]
    assert networkx.dag_longest_path_length(graph) <= result.transition_bound


def test_measure_of_the_start_is_the_bound() -> None:
    for bounds in FULL.values():
        space, start = make_space(bounds)
        # Every rank begins by reading, unless its first window is offered at once.
        assert space.compute_measure(start) == compute_bound(bounds)


def test_a_rank_that_waits_for_a_fault_is_a_deadlock() -> None:
    space, start = make_space(Bounds(lengths=((1,),), failures=1, stops=1))
    faults = [int(Act.STOP), int(Act.FAIL_READ)]
    assert space.is_over(start, faults)
    assert not space.is_over(start, [*faults, int(Act.READ)])


def test_loaders_are_lost_in_every_phase_and_with_every_event_unanswered() -> None:
    """Spec: R7.6. Checks: ABORT, RELEASE."""
    search = Search(replace(SMALL["lost loaders and killed processes"], failures=1))
    result = search.run()
    assert result.counterexample is None and result.is_complete
    assert search.space is not None
    phases, events, kinds = set(), set(), set()
    for world in search.iterate_worlds():
        for rank in search.space.get_ranks(world):
            if rank.is_cut and not rank.is_replaced:
                phases.add(rank.state.phase)
                events |= {type(event) for event in rank.unanswered}
            if rank.is_replaced and rank.finish is not None:
                kinds.add(rank.finish.outcome.kind)
    assert phases == set(Phase) - {Phase.DONE}
    assert events == {StepTaken, Agreed, Counted, Reported, Collated, Urged, PeerLost, ConsumerStopped}
    assert kinds == set(OutcomeKind) - {OutcomeKind.MISMATCH}


def test_a_stand_in_asks_for_nothing_and_hands_out_what_its_rank_held() -> None:
    """Spec: R7.6. Checks: RELEASE."""
    search = Search(Bounds(lengths=((1,) * 4, (1,) * 4), budget_tokens=1, window_samples=2, lost_loaders=1))
    search.run()
    assert search.space is not None
    handed_out = 0
    for world in search.iterate_worlds():
        for rank in search.space.get_ranks(world):
            if rank.is_replaced:
                assert rank.reading == 0 and rank.collating is None
                steps = (*rank.taken, *rank.queue)
                assert [len(step.group) for step in steps] == [1] * len(steps)
                handed_out += any(step in rank.held for step in steps)
    assert handed_out > 0


def test_fewest_groups_tries_every_partition() -> None:
    assert compute_fewest_groups((), 4) == 0
    assert compute_fewest_groups((9,), 4) == 1
    assert compute_fewest_groups((1, 1, 2, 2), 4) == 2
    assert compute_fewest_groups((1, 1, 1, 1, 4), 4) == 2
    assert compute_fewest_groups((2, 2, 3), 6) == 2


def test_actions_are_numbers_and_back() -> None:
    for rank in range(3):
        for act in Act:
            assert decode(Action(rank, act).code) == Action(rank, act)
            assert Action(rank, act).code == rank * ACTS + act


def find_scenario(tmp_path: Path) -> tuple[Path, str]:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "an urge is ignored")
    with load(mutant) as (core, bounds):
        found = explore(bounds, core=core).counterexample
    assert found is not None
    path = tmp_path / "scenario.json"
    scenario = Scenario(
        bounds=mutant.bounds, schedule=found.schedule, property=found.property, detail=found.detail, rule="odb"
    )
    write_scenario(path, scenario)
    assert read_scenario(path) == scenario
    return path, found.property


def test_a_counterexample_is_a_file_that_the_command_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = find_scenario(tmp_path)
    assert main(["explore", "--replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("every property holds\n")
    assert "rank 0: stop" in printed


def test_the_shortest_schedule_is_found(tmp_path: Path) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "a lost peer is waited for")
    with load(mutant) as (core, bounds):
        found = explore(bounds, core=core).counterexample
        assert found is not None
        # A process dies at the start, and its peer reads, posts and learns of it in vain.
        assert [str(action) for action in found.schedule][-1].endswith(("read", "lose"))
        assert len(found.schedule) <= 4
        *_, last = replay(Scenario(bounds=bounds, schedule=found.schedule), core)
        assert last.violation is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "3", "--shards", "1,2"], "--ranks is 3, but --shards names 2"),
        (["--shards", "2,-1"], "must not be negative"),
        (["--lengths", "0"], "a length must be at least 1"),
        (["--budget", "0"], "budget_tokens must be at least 1"),
        (["--quota", "3"], "quota_samples needs mode='quota'"),
        (["--policy", "none"], "no target rule 'none'"),
        (["--policy", "no.such:rule"], "cannot import"),
        (["--policy", "odb_ref.core.rules:nothing"], "has no 'nothing'"),
        (["--policy", "odb_ref.core.rules:NONE"], "needs a name and compute_target"),
        (["--failures", "-1"], "failures must not be negative"),
        (["--max-states", "0"], "--max-states must be at least 1"),
        (["--odd-rank", "2"], "odd_rank must be one of at least 2 ranks"),
        (["--ranks", "1", "--odd-rank", "0"], "odd_rank must be one of at least 2 ranks"),
        (["--replay", "no-such-file"], "no-such-file"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "odb-scenario", "version": 2}'])
def test_what_is_no_scenario_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(text, encoding="utf-8")
    assert main(["explore", "--replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_schedule_that_is_not_possible_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    bounds = Bounds(lengths=((1,), (1,)))
    write_scenario(path, Scenario(bounds=bounds, schedule=(Action(0, Act.READ), Action(0, Act.TAKE))))
    assert main(["explore", "--replay", str(path)]) == 2
    assert "action 2 (rank 0: take) is not possible" in capsys.readouterr().err
    write_scenario(path, Scenario(bounds=bounds, schedule=(Action(7, Act.READ),)))
    assert main(["explore", "--replay", str(path)]) == 2
    assert "there are 2 ranks" in capsys.readouterr().err


def test_figures_and_graph_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, graph = tmp_path / "explore.json", tmp_path / "explore.dot"
    arguments = ["--shards", "2,1", "--failures", "1", "--json", str(figures), "--dot", str(graph)]
    assert main(["explore", *arguments]) == 0
    assert "all hold" in capsys.readouterr().out
    data = json.loads(figures.read_text(encoding="utf-8"))
    assert data["is_complete"] and data["counterexample"] is None
    lines = graph.read_text(encoding="utf-8").splitlines()
    assert sum(" -> " in line for line in lines) == data["edges"]
    assert sum("[label=" in line and " -> " not in line for line in lines) == data["states"]
    assert '[label="FailRead(0)"]' in "".join(lines)


def test_a_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--shards", "3,2", "--failures", "1", "--max-states", "20"]) == 0
    assert "not complete" in capsys.readouterr().out


def test_a_violation_is_printed_saved_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OdbRule, "compute_target", lambda self, agreement: 0)
    path = tmp_path / "found.json"
    assert main(["explore", "--save", str(path)]) == 1
    assert "RULE-BOUNDS DOES NOT HOLD" in capsys.readouterr().out
    assert main(["explore", "--replay", str(path)]) == 1
    assert "RULE-BOUNDS" in capsys.readouterr().out


def test_limits_are_written_and_read_and_a_file_without_them_has_none(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    scenario = Scenario(bounds=Bounds(lengths=((1, 1), (1,)), limits=(3, 1)), schedule=(Action(0, Act.READ),))
    write_scenario(path, scenario)
    assert read_scenario(path) == scenario
    data = json.loads(path.read_text())
    del data["bounds"]["limits"]
    path.write_text(json.dumps(data))
    assert read_scenario(path).bounds == Bounds(lengths=((1, 1), (1,)))
    data["bounds"]["limits"] = 3
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="field limits: expected a list"):
        read_scenario(path)


def test_bounds_take_lengths_in_turn() -> None:
    assert compute_lengths((2, 0, 3), (5, 6)) == ((5, 6), (), (5, 6, 5))


def test_the_world_runs_the_real_core() -> None:
    assert Space(Bounds(lengths=((1,),)))._core.transition is transition
