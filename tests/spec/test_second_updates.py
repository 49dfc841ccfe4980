"""R16, implemented a second time from the page, update by update, with the groups and steps of the second implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from tests.helpers.world import AnyOrder, World, make_config, make_shard
from tests.spec.test_second_implementation import (
    SCHEDULES,
    Item,
    Taken,
    _align,
    _deal,
    _group,
    _list_taken,
    _lower,
    _order,
)


def _list_draws(config: Config, update: int, lengths: list[int], bad: set[int]) -> list[list[list[int]]]:
    """R16.2, R16.4: for each round of an update, the places that each rank reads, including those set aside."""
    size, ranks = config.update_samples or 0, range(config.world_size)
    places = [place for place in range(update * size, (update + 1) * size) if place < len(lengths)]
    if config.shared_samples is None:
        return [[[] for _ in ranks], [[place for place in places if place % config.world_size == r] for r in ranks]]
    portions = next(digits for digits in range(1, 6) if digits == 5 or 3**digits > size // config.world_size)
    draws: list[list[list[int]]] = [[[] for _ in ranks]]
    drawn = 0
    for portion in range(portions):
        left = len(places) - drawn
        count = left if portion == portions - 1 else math.ceil(Fraction(2 * left, 3))
        held = [[place for draw in draws for place in draw[r] if place not in bad] for r in ranks]
        loads = [sum(lengths[place] for place in own) for own in held]
        h = [math.floor(Fraction(load * drawn, sum(loads))) if sum(loads) else 0 for load in loads]
        shares = _deal([max(h) - own + count for own in h], count)
        firsts = [drawn + sum(shares[:r]) for r in ranks]
        draws.append([places[first : first + share] for first, share in zip(firsts, shares, strict=True)])
        drawn += count
    return draws


def _run(
    config: Config, lengths: list[int], bad: set[int], schedules: Sequence[BudgetSchedule] = ()
) -> list[list[Taken]]:
    ranks = range(config.world_size)
    steps: list[list[Taken]] = [[] for _ in ranks]
    read = [0] * len(ranks)
    budget = config.budget_tokens
    in_force = [min(budget, schedule(0, budget)) for schedule in schedules]
    for update in range(math.ceil(Fraction(len(lengths), config.update_samples or 1))):
        draws = _list_draws(config, update, lengths, bad)
        round_ = (update + 1) * len(draws) - 1
        for _ in draws:
            bounds = _lower(config, in_force[0]) if schedules else config
            accepted = [schedule(len(steps[0]), tokens) for schedule, tokens in zip(schedules, in_force, strict=True)]
            in_force = [min([budget, *accepted])] * len(in_force)
        windows: list[list[Item]] = []
        for r in ranks:
            good = [place for draw in draws for place in draw[r] if place not in bad]
            windows.append([(read[r] + i, lengths[place], ()) for i, place in enumerate(good)])
            read[r] += len(good)
        groups = [_group(window, bounds) for window in windows]
        target = max(map(len, groups))
        aligned = [_order(_align(own, target, 0, config)[0], round_, config) for own in groups]
        for j in range(target):
            items = [item for emitted in aligned for item in emitted[j]]
            counts = (len(items), sum(length for _, length, _ in items))
            for r in ranks:
                steps[r].append((round_, [position for position, _, _ in aligned[r][j]], counts))
    return steps


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from(Layout),
    st.sampled_from(StepOrder),
    st.sampled_from(sorted(RULES)),
    st.booleans(),
    st.lists(SCHEDULES, min_size=5, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_updates_are_those_of_the_page(
    count: int,
    ranks: int,
    more: int,
    is_shared: bool,
    layout: Layout,
    order: StepOrder,
    rule: str,
    is_friendly: bool,
    schedules: list[BudgetSchedule],
    rng: object,
) -> None:
    """Spec: R15.4, R16.2, R16.3, R16.4, R16.5. Checks: UPDATE, DEAL, REPLAY, BUDGET."""
    seed = rng.randint(0, 9999)  # type: ignore[attr-defined]
    lengths = [rng.randint(1, 12) for _ in range(count)]  # type: ignore[attr-defined]
    bad = {place for place in range(count) if rng.random() < 0.2}  # type: ignore[attr-defined]
    budgets = schedules[:ranks] if seed % 2 else []
    is_sized = is_friendly and layout is Layout.PADDED and order is not StepOrder.SAMPLER
    config = make_config(
        world_size=ranks, budget_tokens=60 if budgets else 20, update_samples=ranks + more, layout=layout, order=order,
        rule=RULES[rule], shared_samples=count if is_shared else None, order_seed=seed,
        sizes=Sizes.POWERS if is_sized else Sizes.ANY, padding_share=(1, 4, 16)[seed % 3],
    )  # fmt: skip
    samples = make_shard(lengths)
    shards = [() if is_shared else samples[rank::ranks] for rank in range(ranks)]
    world = World(config, shards, order=samples, schedule=AnyOrder(seed), bad=bad, budgets=budgets).run()
    assert _list_taken(world) == _run(config, lengths, bad, budgets)
