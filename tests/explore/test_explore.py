"""The explorer itself: what it counts, what it finds, and the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
from odb_sim.cli.main import main
from odb_sim.explore.bounds import Bounds, compute_lengths
from odb_sim.explore.checks import compute_fewest_groups
from odb_sim.explore.driver import Core
from odb_sim.explore.graph import build_graph, find_sinks, measure_graph, name_action
from odb_sim.explore.measure import compute_bound
from odb_sim.explore.rank import ACTS, Act
from odb_sim.explore.scenario import Scenario, compute_scenario, read_scenario, replay, write_scenario
from odb_sim.explore.search import Search, explore, make_space
from odb_sim.explore.suites import FULL, SMALL
from odb_sim.explore.world import Action, Space, World, decode
from odb_sim.verify.core_worlds import MOST_STATES

from odb_ref.core.batching.rules import OdbRule
from odb_ref.core.config import Config
from odb_ref.core.effects import OutcomeKind
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Event, SamplesRead
from odb_ref.core.machine import transition
from odb_ref.core.offer import NONE
from odb_ref.core.rounds import Transition
from odb_ref.core.state import Phase, State
from tests.helpers.commands import get_figures, refuse
from tests.mutants.loader import Mutant, load
from tests.mutants.table import MUTANTS


def walk_slowly(bounds: Bounds) -> tuple[set[World], int, int]:
    """Returns worlds, edges and depth, from the simplest search possible."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one rank", "uneven", "depth 1, failures and stops", "quota without a number"])
def test_search_covers_what_a_plain_search_covers(name: str) -> None:
    worlds, edges, depth = walk_slowly(SMALL[name])
    result = explore(SMALL[name])
    assert (result.states, result.edges, result.depth) == (len(worlds), edges, depth)
    assert result.depth <= result.transition_bound


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FULL))
def test_every_property_holds_in_every_interleaving(name: str) -> None:
    """Checks: ALIGN, CONSERVE, COVER, ONCE, QUOTA, FREE, TERM, ABORT, RELEASE, STOP, BUDGET, AGE, ORDER, DEAL,
    WEIGHT, UPDATE.
    """
    result = explore(FULL[name])
    assert result.counterexample is None
    assert result.is_complete
    assert name not in SMALL or result.states < MOST_STATES, "odb-ref verify would not judge it"


def test_graph_has_no_cycle_and_one_start() -> None:
    search = Search(SMALL["depth 1, failures and stops"])
    result = search.run()
    graph = build_graph(search)
    assert networkx.is_directed_acyclic_graph(graph)
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (result.states, result.edges)
    assert [world for world, degree in graph.in_degree() if degree == 0] == [0]
    shape = measure_graph(graph)
    assert shape.sinks <= result.ends
    assert shape.shortest <= result.depth <= shape.longest <= result.transition_bound


def test_the_shortest_schedules_to_the_sinks_lead_there() -> None:
    """The graph shows what the space does. Without faults a world without a successor is a proper end."""
    bounds = Bounds(lengths=compute_lengths((2, 1), (3, 1)), budget_tokens=4, window_samples=2)
    search = Search(bounds)
    result = search.run()
    assert search.space is not None
    graph, worlds = build_graph(search), list(search.iterate_worlds())
    sinks = find_sinks(graph)
    assert len(sinks) == result.ends
    for sink in sinks:
        path = networkx.shortest_path(graph, 0, sink)
        schedule = [min(graph[a][b].items())[1]["action"] for a, b in pairwise(path)]
        world = worlds[0]
        for name in schedule:
            codes = search.space.enabled(world)
            code = next(code for code in codes if name_action(decode(code)) == name)
            world = search.space.apply(world, code)
        assert world == worlds[sink]
        assert len(schedule) == result.depth


def test_measure_of_the_start_is_the_bound() -> None:
    for bounds in FULL.values():
        space, start = make_space(bounds)
        # Every rank begins with a read, unless its first window is offered at once.
        measure, bound = space.compute_measure(start), compute_bound(bounds)
        if bounds.update_samples is not None:
            assert measure == bound - 2 * bounds.ranks  # in the first round nothing is read, or kept in FILL
        else:  # A common order may end with its first draws, which all ranks know at once.
            assert bound - bounds.ranks <= measure <= bound if bounds.is_shared else measure == bound


def test_a_rank_that_waits_for_a_fault_is_a_deadlock() -> None:
    space, start = make_space(Bounds(lengths=((1,),), failures=1, stops=1))
    faults = [int(Act.STOP), int(Act.FAIL_READ)]
    assert space.is_over(start, faults)
    assert not space.is_over(start, [*faults, int(Act.READ)])


def test_where_the_consumers_thread_reads_an_urged_rank_must_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: TERM. A3 requires it: the consumer may be in a step that another rank has left halfway."""
    bounds = SMALL["read by the consumer's thread"]
    monkeypatch.setattr(Space, "_is_away", lambda space, number, least: space._taken[number] != least)
    found = explore(bounds).counterexample
    assert found is not None and found.property in ("FREE", "TERM")
    assert Act.ABANDON in {action.act for action in found.schedule}


def test_loaders_are_lost_in_every_phase_and_their_ranks_end_alike() -> None:
    """Checks: ABORT, RELEASE."""
    search = Search(replace(SMALL["lost loaders and killed processes"], failures=1))
    result = search.run()
    assert result.counterexample is None and result.is_complete
    assert search.space is not None
    phases, kinds = set(), set()
    for world in search.iterate_worlds():
        codes = map(decode, search.space.enabled(world))
        losing = {action.rank for action in codes if action.act is Act.LOSE_LOADER}
        for number, rank in enumerate(search.space.get_ranks(world)):
            phases |= {rank.state.phase} if number in losing else set()
            if rank.is_loader_lost:
                assert rank.reading == 0 and rank.collating is None
                kinds |= {rank.finish.outcome.kind} if rank.finish is not None else set()
    assert phases == set(Phase) - {Phase.DONE}
    assert kinds == set(OutcomeKind) - {OutcomeKind.MISMATCH}


def test_budgets_change_at_any_moment_and_come_to_be_in_force() -> None:
    """Spec: R15.2, R15.3. The worlds include each budget in every round in which it can come into force."""
    search = Search(SMALL["budgets lowered and raised"])
    assert search.run().counterexample is None
    assert search.space is not None
    begun: dict[int, set[int]] = {}
    phases = set()
    for world in search.iterate_worlds():
        for rank in search.space.get_ranks(world):
            phases |= {rank.state.phase} if rank.coming else set()
            for round_, tokens in rank.budgets:
                begun.setdefault(tokens, set()).add(round_)
    assert phases == set(Phase) - {Phase.REPORT}
    assert set(begun) == {2, 3, 4}
    assert begun[2] >= {1, 2} and begun[3] >= {1, 2} and begun[4] >= {2}


def test_an_offer_must_say_what_its_rank_accepts() -> None:
    """Spec: R15.2. Checks: BUDGET."""

    def forget(config: Config, state: State, event: Event) -> Transition:
        state, effects = transition(config, state, event)
        return (replace(state, accepted_tokens=NONE) if isinstance(event, SamplesRead) else state), effects

    found = explore(SMALL["budgets lowered and raised"], core=Core(transition=forget)).counterexample
    assert found is not None and found.property == "BUDGET"


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


def get_mutant(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def test_a_counterexample_is_a_file_that_the_command_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant, path = get_mutant("an urge is ignored"), tmp_path / "scenario.json"
    with load(mutant) as (core, bounds):
        found = explore(bounds, core=core).counterexample
    scenario = replace(compute_scenario(mutant.bounds, found), rule="odb")
    write_scenario(path, scenario)
    assert read_scenario(path) == scenario
    assert main(["explore", "--replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("every property holds\n")
    assert "rank 0: stop" in printed


def test_the_shortest_schedule_is_found() -> None:
    with load(get_mutant("a lost peer is waited for")) as (core, bounds):
        found = explore(bounds, core=core).counterexample
        # A process dies at the start, and its peer reads, posts and learns of it in vain.
        assert [str(action) for action in found.schedule][-1].endswith(("read", "lose"))
        assert len(found.schedule) <= 4
        *_, last = replay(Scenario(bounds=bounds, schedule=found.schedule), core)
        assert last.violation is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "3", "--shard-sizes", "1,2"], "--ranks is 3, but --shard-sizes names 2"),
        (["--shard-sizes", "2,-1"], "must not be negative"),
        (["--lengths", "0"], "a length must be at least 1"),
        (["--token-budget", "0"], "budget_tokens must be at least 1"),
        (["--quota", "3"], "--quota needs --mode quota"),
        (["--policy", "none"], "unknown target rule 'none'"),
        (["--policy", "no.such:rule"], "cannot read its file"),
        (["--policy", "examples/rules/eager.py:nothing"], "has no 'nothing'"),
        (["--policy", "examples/rules/eager.py:NONE"], "needs a name and compute_target"),
        (["--failures", "-1"], "failures must not be negative"),
        (["--max-states", "0"], "--max-states must be at least 1"),
        (["--accept", "2:3"], "--accept: expected a rank of 0 to 1 and tokens of at least 1, got 2:3"),
        (["--accept", "0:0"], "--accept: expected a rank of 0 to 1 and tokens of at least 1"),
        (["--accept", "3"], "expected RANK:TOKENS"),
        (["--accept=-1:2"], "--accept: expected a rank of 0 to 1"),
        (["--budget-schedule", "1:4"], "from step 0 on"),
        (["--odd-rank", "2"], "odd_rank must be one of at least 2 ranks"),
        (["--ranks", "1", "--odd-rank", "0"], "odd_rank must be one of at least 2 ranks"),
        (["--replay", "no-such-file"], "no-such-file"),
        (["--graph", "graph.svg"], "graph.svg: the name must end in .graphml or .dot or .gv"),
        (["--graph", "no/such/a.dot"], "no/such/a.dot: cannot be written"),
        (["--graph", "a.dot", "--suite", "small"], "leave out --suite"),
        (["--ranks", "1000000", "--max-states", "10"], "a world of 1000000 ranks has more states than can be walked"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refuse(capsys, ["explore", *arguments])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("[]", ""),
        ("{}", ""),
        ('{"format": "odb-scenario", "version": 2}', ""),
        ('{"format": "odb-trace"}\n{"event": "begun"}\n', ": not a saved schedule: Extra data"),
    ],
)
def test_what_is_no_scenario_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(text, encoding="utf-8")
    assert f"{path}{said}" in refuse(capsys, ["explore", "--replay", str(path)])


def test_a_rule_that_raises_leaves_its_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, saved = tmp_path / "rule.py", str(tmp_path / "found.json")
    path.write_text(
        "class Rule:\n    name = 'mine'\n    def compute_target(self, a):\n        raise ValueError('no')\n"
    )
    for arguments in (["--policy", f"{path}:Rule", "--save", saved], ["--replay", saved]):
        assert main(["explore", *arguments]) == 1
        assert "RULE-BOUNDS: rule 'mine' raised ValueError: no" in capsys.readouterr().out


def test_a_rule_that_may_not_end_is_not_explored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rule.py"
    path.write_text("class Rule:\n    name = 'mine'\n    def compute_target(self, a):\n        while True: pass\n")
    assert "line 4: a loop" in refuse(capsys, ["explore", "--policy", f"{path}:Rule"])


def test_a_rule_with_the_name_of_another_is_not_explored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rule.py"
    path.write_text("class Rule:\n    name = 'odb'\n    def compute_target(self, a):\n        return 1\n")
    assert "of a shipped rule" in refuse(capsys, ["explore", "--policy", f"{path}:Rule"])


def test_a_schedule_that_is_not_possible_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    for schedule, said in (
        ((Action(0, Act.READ), Action(0, Act.TAKE)), "action 2 (rank 0: take) is not possible"),
        ((Action(7, Act.READ),), "there are 2 ranks"),
    ):
        write_scenario(path, Scenario(bounds=Bounds(lengths=((1,), (1,))), schedule=schedule))
        assert main(["explore", "--replay", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_figures_and_graph_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "explore.dot"
    data = get_figures(f"explore --shard-sizes 2,1 --failures 1 --graph {graph}")
    shown = capsys.readouterr().out
    assert "all hold" in shown
    assert re.search(r"explore.dot: \d+ sinks, \d+ to \d+ transitions from the start", shown)
    assert data["is_complete"] and data["counterexample"] is None
    lines = graph.read_text(encoding="utf-8").splitlines()
    assert sum(" -> " in line for line in lines) == data["edges"]
    assert sum("[label=" in line and " -> " not in line for line in lines) == data["states"]
    assert '[label="FailRead(0)"]' in "".join(lines)


def test_budgets_that_change_are_named_on_the_command_line() -> None:
    """Spec: R15. The worlds are those of the bounds that the options describe."""
    figures = get_figures("explore --shard-sizes 3,2 --accept 1:2 --accept 1:4 --budget-schedule 0:3,2:4")
    bounds = Bounds(lengths=compute_lengths((3, 2), (3, 1, 2)), accepted=((), (2, 4)), budget_schedule=((0, 3), (2, 4)))
    assert figures["states"] == explore(bounds).states


def test_the_graph_is_written_as_graphml_too(tmp_path: Path) -> None:
    path = tmp_path / "explore.graphml"
    assert main(["explore", "--shard-sizes", "2,1", "--graph", str(path)]) == 0
    bounds = Bounds(lengths=compute_lengths((2, 1), (3, 1, 2)), budget_tokens=4, window_samples=2)
    search = Search(bounds)
    search.run()
    expected = build_graph(search)
    found = networkx.read_graphml(path)
    assert sorted(found.edges(data="action")) == sorted(
        (str(a), str(b), action) for a, b, action in expected.edges(data="action")
    )
    assert found.nodes["0"]["label"] == expected.nodes[0]["label"]


def test_a_limit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--shard-sizes", "3,2", "--failures", "1", "--max-states", "20"]) == 3
    assert "stopped at the limit" in capsys.readouterr().out


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
    with pytest.raises(UsageError, match="expected a list of integers, got 3"):
        read_scenario(path)


def test_bounds_take_lengths_in_turn() -> None:
    assert compute_lengths((2, 0, 3), (5, 6)) == ((5, 6), (), (5, 6, 5))


def test_the_world_runs_the_real_core() -> None:
    assert Space(Bounds(lengths=((1,),)))._core.transition is transition
