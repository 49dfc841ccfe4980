"""R15: budgets that change, taking effect at the same step on all ranks."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.budgets import Acceptance, compute_bounds_in_force, compute_offered
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.errors import RuleError, UsageError
from odb_ref.core.events import Agreed, BudgetAccepted, SamplesRead
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Group
from odb_ref.trace.check import check_traces
from tests.helpers.sizes import draw_size
from tests.helpers.world import Fault, World, make_config, make_configs, make_shard, make_shards, run_by_arrival

LENGTHS = st.lists(st.lists(st.integers(1, 10), max_size=16), min_size=1, max_size=4)


def test_a_budget_bounds_everything_in_proportion() -> None:
    """Spec: R15.1."""
    assert compute_bounds_in_force(100, (10, 3, 1), 100) == (100, (10, 3, 1))
    assert compute_bounds_in_force(100, (10, 3, 1), NONE) == (100, (10, 3, 1))
    assert compute_bounds_in_force(100, (10, 3, 1), 50) == (50, (5, 1, 1))
    assert compute_bounds_in_force(100, (10, 3, 1), 1) == (1, (1, 1, 1))


def test_what_is_accepted_is_a_number_of_tokens_below_the_largest() -> None:
    """Spec: R15.2, R5.11."""
    assert compute_offered(8, 8) == compute_offered(9, 8) == NONE
    assert compute_offered(7, 8) == 7
    machine = Machine(make_config())
    machine.begin()
    before = machine.state
    with pytest.raises(UsageError, match="at least 1"):
        machine.handle(BudgetAccepted(0))
    assert machine.state is before
    assert machine.handle(BudgetAccepted(3)) == ()
    assert replace(machine.state, accepted_tokens=NONE) == before


def _follow(world: World, budget: int) -> dict[int, set[int]]:
    """Returns for each round the budgets that the ranks agreed on, according to the agreements."""
    budgets = defaultdict(set)
    for node in world.nodes:
        for event, _ in node.events:
            if isinstance(event, Agreed):
                budgets[event.agreement.round_max + 1].add(min(budget, event.agreement.budget_min))
    return budgets


def _is_within(group: Group, budget: int, limits: tuple[int, ...], layout: Layout) -> bool:
    used = [sum(costs) for costs in zip(*(sample.costs for sample in group), strict=True)]
    is_kept = all(use <= limit for use, limit in zip(used, limits, strict=False))
    return len(group) < 2 or (layout.compute_tokens(group) <= budget and is_kept)


@given(LENGTHS, st.sampled_from(Layout), st.sampled_from(StepOrder), st.integers(0, 999))
def test_all_ranks_keep_the_least_budget_that_any_has_offered_the_round_before(
    lengths: list[list[int]], layout: Layout, order: StepOrder, seed: int
) -> None:
    """Spec: R15, R15.1, R15.2, R15.3. Checks: BUDGET, ALIGN, COVER."""
    draw = random.Random(seed)
    limits = draw.choice(((), (4,)))
    faults = [Fault("accept", draw.randrange(len(lengths)), draw.randrange(60), draw.randint(1, 30)) for _ in range(4)]
    configs = make_configs(len(lengths), window_samples=5, layout=layout, order=order, limits=limits, budget_tokens=24)
    world = run_by_arrival(lengths, configs, seed=seed, faults=faults)
    budgets = _follow(world, 24)
    for node in world.nodes:
        assert len(node.taken) == len(world.nodes[0].taken)
        assert sorted(sample.position for sample in node.trained) == list(range(len(node.shard)))
        for step in node.taken:
            (budget,) = budgets[step.round] or {24}
            assert _is_within(step.group, budget, compute_bounds_in_force(24, limits, budget)[1], layout)


def test_a_budget_lowered_on_one_rank_holds_on_all_from_the_next_round() -> None:
    """Spec: R15.3. Checks: BUDGET."""
    world = World(make_config(), make_shards([[2] * 40, [2] * 40]), seed=3)
    while world.nodes[1].machine.state.round < 2:
        assert world.step()
    world.accept(1, 4)
    world.run()
    offered = [event.agreement.budget_min for event, _ in world.nodes[0].events if isinstance(event, Agreed)]
    lowered = offered.index(4)
    sizes = [{len(step.group) for step in node.taken if step.round <= lowered} for node in world.nodes]
    assert sizes == [{4}, {4}]
    assert all({len(step.group) for step in node.taken if step.round > lowered} == {2} for node in world.nodes)


def test_a_budget_may_rise_again() -> None:
    """Spec: R15.2."""
    world = World(make_config(), make_shards([[2] * 60]), budgets=[lambda step, _: 4 if step < 6 else 8])
    world.run()
    sizes = [len(step.group) for step in world.nodes[0].taken]
    assert sizes[:6] == [2] * 6
    assert sizes[-3:] == [4] * 3


@given(LENGTHS, st.integers(0, 99), st.integers(0, 99))
def test_a_schedule_gives_the_same_steps_in_any_order_of_events(lengths: list[list[int]], one: int, other: int) -> None:
    """Spec: R15.4. Checks: REPLAY."""
    budgets = [lambda step, current, rank=rank: 3 + (step * (rank + 2) + current) % 9 for rank in range(len(lengths))]
    worlds = [World(make_config(), make_shards(lengths), seed=seed, budgets=budgets).run() for seed in (one, other)]
    first, second = ([node.taken for node in world.nodes] for world in worlds)
    assert first == second
    assert _follow(worlds[0], 8) == _follow(worlds[1], 8)


@given(st.lists(st.lists(st.integers(1, 8), min_size=6, max_size=20), min_size=1, max_size=3), st.data())
def test_an_epoch_is_resumed_with_the_budget_of_its_round(lengths: list[list[int]], data: st.DataObject) -> None:
    """Spec: R15.5. Checks: RESUME."""
    budgets = [lambda step, current: 2 + (step + current) % 7] * len(lengths)
    shards = make_shards(lengths)
    whole = World(make_config(), shards, budgets=budgets).run()
    total = len(whole.nodes[0].taken)
    saved = data.draw(st.integers(0, total - 1))
    cut = World(make_config(), shards, budgets=budgets, seed=1)
    while any(len(node.taken) < saved for node in cut.nodes):
        choices = [
            choice for choice in cut.compute_choices() if choice[0] != "take" or len(cut.nodes[choice[1]].taken) < saved
        ]
        cut.do(*choices[0])
    checkpoints = cut.save()
    rest = World(make_config(), shards, budgets=budgets, checkpoints=checkpoints).run()
    for node, again, checkpoint in zip(whole.nodes, rest.nodes, checkpoints, strict=True):
        assert again.taken[checkpoint.taken_steps :] == node.taken[saved:]


def test_a_schedule_that_answers_no_budget_ends_the_rank() -> None:
    """Spec: R15.4, R8."""
    for answer in (0, -1, 2.5, None):
        with pytest.raises(RuleError, match="budget schedule"):
            World(make_config(), make_shards([[1]]), budgets=[lambda _step, _current, answer=answer: answer])


def test_a_rank_that_resumed_accepts_more_when_it_is_told_so() -> None:
    """Spec: R15.5."""
    resumed = Acceptance(budget_tokens=8).begin(3)
    assert (resumed.tokens, resumed.tell(6).tokens, resumed.ask(5, 3).tokens) == (3, 6, 3)
    scheduled = replace(resumed, schedule=lambda _step, current: current + 2)
    assert (scheduled.tell(6).tokens, scheduled.tell(6).ask(5, 3).tokens) == (3, 5)


def test_a_rank_accepts_the_least_of_what_it_was_told_and_what_its_schedule_said() -> None:
    """Spec: R15.2, R15.5. The last value of each counts, at any time. An epoch that begins forgets nothing that it was told."""
    draw = random.Random(6)
    for number in range(200):
        said = told = NONE
        answers, asked = [NONE], [(0, 0)]
        say = lambda *told, answers=answers, asked=asked: asked.append(told) or answers[-1]  # noqa: E731
        own = Acceptance(budget_tokens=2**40, schedule=say if number % 2 else None, steps_before=3)
        for _ in range(draw_size(draw, 20)):
            tokens = draw_size(draw, 2**41, 1)
            match draw.choice(("told", "asked", "begins")):
                case "told":
                    own, told = own.tell(tokens), tokens
                    said = said if number % 2 else NONE
                case "asked":
                    answers.append(tokens)
                    agreed = draw_size(draw, 2**41, 1)
                    own = own.ask(4, agreed)
                    said = tokens if number % 2 else said
                    assert asked[-1] == ((7, min(2**40, agreed)) if number % 2 else (0, 0))
                case _:
                    said = draw.choice((tokens, NONE))
                    own = own.begin(said)
            assert own.tokens == min(2**40, told, said)


def test_a_schedule_counts_the_steps_before_too() -> None:
    """Spec: R15.4."""
    acceptance = Acceptance(budget_tokens=8, schedule=lambda step, _current: 1 + step, steps_before=3)
    assert acceptance.compute_first() == (4, 4)
    assert acceptance.ask(2, NONE).tokens == 6


def test_what_a_rank_accepts_it_need_be_told_once() -> None:
    """Spec: R5.11, R15.2."""
    world = World(make_config(), make_shards([[2] * 40]))
    world.accept(0, 4)
    world.run()
    (node,) = world.nodes
    assert [event for event, _ in node.events if isinstance(event, BudgetAccepted)] == [BudgetAccepted(4)]
    assert [event.agreement.budget_min for event, _ in node.events if isinstance(event, Agreed)].count(4) > 5


def test_a_sample_over_the_lowered_budget_travels_alone() -> None:
    """Spec: R15.1. Checks: BUDGET."""
    world = World(make_config(), make_shards([[6, 1, 1, 6]]), budgets=[lambda _step, _current: 3]).run()
    assert sorted(tuple(s.length for s in step.group) for step in world.nodes[0].taken) == [(1, 1), (6,), (6,)]


def test_the_first_round_goes_by_what_the_rank_itself_accepts() -> None:
    """Spec: R15.1, R15.5."""
    machine = Machine(make_config())
    machine.begin(RoundStart(agreed_tokens=3, accepted_tokens=5))
    (post,) = machine.handle(SamplesRead(make_shard([1, 1, 1, 1])))
    assert (post.offer.groups_max, post.offer.budget_min) == (2, 5)


@pytest.mark.parametrize("seed", range(12))
def test_traces_tell_the_budgets_and_the_checker_judges_by_them(seed: int, tmp_path: Path) -> None:
    """Spec: R15.1, R15.2, R15.3, R9.2. Checks: BUDGET, REPLAY."""
    draw = random.Random(seed)
    lengths = [[draw.randint(1, 14) for _ in range(30)] for _ in range(3)]
    faults = [Fault("accept", draw.randrange(3), draw.randrange(150), draw.randint(4, 50)) for _ in range(5)]
    limits = ((), (5, 3))[seed % 2]
    layout, order = tuple(Layout)[seed // 2 % 2], tuple(StepOrder)[seed // 4 % 3]
    configs = make_configs(3, limits=limits, layout=layout, order=order)
    run_by_arrival(lengths, configs, seed=seed, faults=faults, trace=tmp_path / "trace.ndjson")
    verdict = check_traces([tmp_path / "trace.ndjson"], is_replayed=True)
    assert verdict.is_ok, verdict
    assert "budget_accepted" in (tmp_path / "trace.ndjson").read_text()


def test_a_group_of_the_old_budget_in_a_round_of_the_new_one_is_found(tmp_path: Path) -> None:
    """Spec: R15.1, R15.3. Checks: BUDGET. The checker must be able to fail."""
    path = tmp_path / "trace.ndjson"
    configs = make_configs(2)
    run_by_arrival([[5] * 60] * 2, configs, faults=[Fault("accept", 0, 20, 20)], trace=path)
    assert check_traces([path]).is_ok
    text = path.read_text()
    assert '"budget_min":20' in text
    path.write_text(text.replace('"budget_min":20', '"budget_min":10').replace('"tokens":20', '"tokens":10'))
    assert "BUDGET" in {str(item.property) for item in check_traces([path]).violations}
    path.write_text(text.replace('"tokens":20', '"tokens":21'))
    assert not check_traces([path]).is_ok
