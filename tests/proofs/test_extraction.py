"""The Python core against the proved model, extracted to OCaml: same groups, alignments, targets and whole transitions.

The proofs are about the model, and these tests link it to the Python.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.explore.driver import Core

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import TOKENS, Cost, make_attention_cost, make_own_cost
from odb_ref.core.batching.grouping import compute_groups, compute_rows
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.offer import NONE, Offer, combine
from tests.helpers.effort import few
from tests.mutants.deep import DEEP
from tests.mutants.loader import Mutant, load
from tests.proofs.conftest import UNSHRUNK, Model
from tests.proofs.smallest import LIMIT_S, describe, explain, find_differences, find_smallest
from tests.proofs.wire import (
    Stairs,
    show_group,
    show_groups,
    write_cost,
    write_integers,
    write_offer,
    write_samples,
)
from tests.proofs.worlds import LEAST, find_difference, make_mutants, make_samples, make_update_world, run_world

SETTINGS = settings(UNSHRUNK, max_examples=few(150))


lengths = st.lists(st.integers(1, 40), max_size=40)
some_limits = st.lists(st.integers(1, 30), max_size=3).map(tuple)
some_padding = st.none() | st.integers(0, 60)
"""The most padding in tokens that a group may hold. Without updates there is no bound (R16.3)."""


def write_padding(budget: int, most: int | None) -> int:
    """Returns the bound, which is the budget if there is none, because no group's padding exceeds it."""
    return budget if most is None else most


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 120), some_padding, some_limits, lengths), min_size=20, max_size=20))
def test_the_model_groups_as_the_python_does(
    model: Model, cases: list[tuple[int, int | None, tuple[int, ...], list[int]]]
) -> None:
    """Spec: R2.1, R16.3. Checks: FEWEST, BUDGET (the link from proof to code)."""
    asked, expected = [], []
    for budget, most, limits, items in cases:
        samples = make_samples(items, len(limits))
        words = f"groups {budget} {write_padding(budget, most)}"
        asked.append(f"{words} {write_integers(limits)} {write_samples(samples)}")
        expected.append(show_groups(compute_groups(samples, budget, limits, most)))
    assert model(" ".join(asked)) == expected


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 120), some_limits, lengths), min_size=20, max_size=20))
def test_the_model_packs_as_the_python_does(model: Model, cases: list[tuple[int, tuple[int, ...], list[int]]]) -> None:
    """Spec: R2.5. Checks: BUDGET (the link from proof to code)."""
    asked, expected = [], []
    for budget, limits, items in cases:
        samples = make_samples(items, len(limits))
        asked.append(f"rows {budget} {write_integers(limits)} {write_samples(samples)}")
        expected.append(show_groups(compute_rows(samples, budget, limits)))
    assert model(" ".join(asked)) == expected


@SETTINGS
@given(
    st.sampled_from(Layout),
    st.lists(st.tuples(st.integers(0, 120), some_limits, lengths, st.randoms()), min_size=20, max_size=20),
)
def test_the_model_makes_runs_as_the_python_does(
    model: Model, layout: Layout, cases: list[tuple[int, tuple[int, ...], list[int], Random]]
) -> None:
    """Spec: R2.6. Checks: BUDGET, ORDER (the link from proof to code), of a window in any order."""
    asked, expected = [], []
    for budget, limits, items, rng in cases:
        samples = make_samples(items, len(limits))
        samples = tuple(rng.sample(samples, len(samples)))
        asked.append(f"runs {layout} {budget} {write_integers(limits)} {write_samples(samples)}")
        expected.append(show_groups(StepOrder.SAMPLER.compute_groups(samples, layout, budget, limits)))
    assert model(" ".join(asked)) == expected


costs = st.one_of(
    st.just(TOKENS),
    st.integers(1, 200).map(make_attention_cost),
    st.integers(1, 50).map(lambda width: make_own_cost(Stairs(width))),
)
alignments = st.tuples(
    st.integers(1, 120),
    lengths,
    st.integers(1, 60),
    st.integers(0, 40),
    st.sampled_from(Layout),
    costs,
    st.sampled_from((StepOrder.FULLEST, StepOrder.SAMPLER)),
)


@SETTINGS
@given(st.lists(alignments, min_size=20, max_size=20))
def test_the_model_aligns_as_the_python_does(
    model: Model, cases: list[tuple[int, list[int], int, int, Layout, Cost, StepOrder]]
) -> None:
    """Spec: R4.1, R4.2. Checks: CONSERVE, AGE (the link from proof to code), in either layout, by any cost, and in
    the sampler's order."""
    asked, expected = [], []
    for budget, items, target, due, layout, cost, order in cases:
        groups = order.compute_groups(make_samples(items), layout, budget)
        words = [
            f"align {target} {due} {layout} {write_cost(cost)} {order} 0 {len(groups)}",
            *map(write_samples, groups),
        ]
        asked.append(" ".join(words))
        emitted, carried = align(groups, target, due, layout, order, cost=cost)
        expected.append(f"{show_groups(emitted)} {show_group(carried)}")
    assert model(" ".join(asked)) == expected


def test_another_cost_is_noticed(model: Model) -> None:
    """The comparison can fail: five samples of 7 tokens have more tokens than one of 30, but cost less with attention."""
    groups = Layout.PADDED.compute_groups(make_samples([7, 7, 7, 7, 7, 30]), 35)
    words = f"{len(groups)} {' '.join(map(write_samples, groups))}"
    emitted, _ = align(groups, len(groups), 0, cost=make_attention_cost(2))
    assert [show_groups(emitted)] == [
        line.removesuffix(" []") for line in model(f"align 2 0 padded attention 2 fullest 0 {words}")
    ]
    assert [show_groups(emitted)] != [
        line.removesuffix(" []") for line in model(f"align 2 0 padded tokens fullest 0 {words}")
    ]


small = st.integers(0, 9)
maybe = st.one_of(st.just(NONE), small)
offers = st.builds(
    Offer,
    round_min=small, round_max=small, fingerprint_min=small, fingerprint_max=small, ready_min=st.integers(0, 1),
    failed_rank=maybe, stop_step=maybe, stop_rank=maybe, samples_min=small, samples_max=small,
    groups_min=maybe, groups_max=small, due_max=small, budget_min=maybe,
)  # fmt: skip


@SETTINGS
@given(st.lists(st.tuples(offers, offers), min_size=4, max_size=4))
def test_the_model_combines_offers_and_applies_rules_as_the_python_does(
    model: Model, cases: list[tuple[Offer, Offer]]
) -> None:
    """Checks: ALIGN (the link from proof to code)."""
    asked, expected = [], []
    for left, right in cases:
        asked.append(f"combine {write_offer(left)} {write_offer(right)}")
        expected.append(write_offer(combine(left, right)))
        for name, rule in RULES.items():
            asked.append(f"rule {name} {write_offer(left)}")
            expected.append(str(rule.compute_target(left)))
    assert model(" ".join(asked)) == expected


OF_UPDATES = make_mutants(
    "UPDATE",
    ("a rank waits for its consumer with nothing to release", "rounds", " or not state.plan)", ")"),
    ("every round forms groups", "rounds", "if config.has_steps(state.round) else ()", "if True else ()"),
    ("what is due goes first", "rounds", "if config.update_samples is not None:\n        return 0\n    mark", "mark"),
    ("all may be padding", "rounds", "most_padding=padding", "most_padding=None"),
    (
        "a rank keeps a group back",
        "rounds",
        "is_all = state.is_ended or config.update_samples is not None",
        "is_all = state.is_ended",
    ),
)
WORLDS = 600
UPDATE_WORLDS = 240
AT_ONCE = 40
FIRST_SEED = int(os.environ.get("ODB_SEED", "0"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + WORLDS, AT_ONCE))
def test_the_model_makes_the_same_transitions_as_the_python(model: Model, first: int) -> None:
    """Checks: ALIGN, CONSERVE, COVER, ONCE, QUOTA, TERM, ABORT, RELEASE, STOP, FREE (the link from proof to code)."""
    worlds = [run_world(seed) for seed in range(first, first + AT_ONCE)]
    assert (difference := explain(model, Core(), worlds)) is None, difference


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + UPDATE_WORLDS, AT_ONCE))
def test_in_updates_the_model_makes_the_same_transitions_as_the_python(model: Model, first: int) -> None:
    """Spec: R16.2, R16.3. Checks: UPDATE, ALIGN, CONSERVE, COVER, ABORT, RELEASE, STOP, TERM (the link from proof to code)."""
    worlds = [make_update_world(seed, Core()).run() for seed in range(first, first + AT_ONCE)]
    assert (difference := find_difference(model, worlds)) is None, difference
    reached = sum((world.reached for world in worlds), Counter[str]())
    assert min(reached["a round without a step"], reached["a step of an update"], reached["complete"]) >= AT_ONCE // 4


@pytest.mark.slow
@pytest.mark.parametrize("mutant", OF_UPDATES, ids=lambda mutant: mutant.name)
def test_an_update_that_is_formed_otherwise_is_noticed(model: Model, mutant: Mutant) -> None:
    with load(mutant, has_invariants=False) as (core, bounds):
        layouts = type(bounds.layout)
        runs = ([make_update_world(seed, core, layouts).run()] for seed in range(UPDATE_WORLDS))
        assert any(find_difference(model, worlds) for worlds in runs), "survives"


@pytest.mark.deep
def test_random_worlds_reach_what_they_must() -> None:
    """The comparison above is only worth as much as it visits. It fails if too few of its worlds meet a case."""
    reached = sum((run_world(seed).reached for seed in range(FIRST_SEED, FIRST_SEED + WORLDS)), Counter[str]())
    missed = {case: (reached[case], least) for case, least in LEAST.items() if reached[case] < least}
    assert not missed, f"met in too few of {WORLDS} worlds, (found, least): {missed}"


def test_a_changed_configuration_is_noticed(model: Model) -> None:
    """The comparison can fail: a model with another budget does not answer like the Python."""
    worlds = [run_world(seed, most_events=400) for seed in range(20)]
    differing = sum(find_difference(model, [world], budget_tokens=1) is not None for world in worlds)
    assert differing > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most_events", "said"),
    [
        ("failed_rank % 16", 1, "LocalFailed"),
        ("what is due is counted in samples", 12, "read lengths"),
        ("held with the quota met", 30, "quota of "),
    ],
)
def test_what_differs_is_told_by_a_small_case(model: Model, name: str, most_events: int, said: str) -> None:
    """A hundred events or more are reduced to a few with the same two different answers, within the time limit."""
    (mutant,) = (mutant for mutant in DEEP if mutant.name == name)
    with load(mutant, has_invariants=False) as (core, _):
        worlds = next(
            worlds
            for first in range(0, WORLDS, AT_ONCE)
            if find_difference(model, worlds := [run_world(seed, core) for seed in range(first, first + AT_ONCE)])
        )
        began = time.monotonic()
        found = find_smallest(model, core, worlds, limit_s=6 * LIMIT_S)
        assert time.monotonic() - began < 12 * LIMIT_S
        assert found is not None and len(found.case.events) == found.place <= most_events
        assert said in describe(found)
        # The defect causes the difference, and not the reduction of the case.
        assert len(find_differences(model, core, [found.case], {})) == 1
    assert find_differences(model, Core(), [found.case], {}) == []


def test_where_nothing_differs_nothing_is_made_small(model: Model) -> None:
    worlds = [run_world(seed, most_events=200) for seed in range(10)]
    assert find_smallest(model, Core(), worlds) is None
    assert explain(model, Core(), worlds) is None
