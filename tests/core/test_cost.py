"""Costs align and split steps. The budget, and what is carried, depend on tokens. Spec: R2.7."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import TOKENS, Cost, choose_cost, get_cost, make_attention_cost, make_own_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Group, Sample
from tests.helpers.sizes import draw_size
from tests.helpers.world import make_config, make_shard

SQUARE = get_cost("attention/1")


def square(tokens: int) -> int:
    return tokens**2


def test_costs_are_found_by_name() -> None:
    """Spec: R2.7."""
    assert get_cost("tokens") == TOKENS
    assert [TOKENS.of_tokens(tokens) for tokens in (1, 7)] == [1, 7]
    attention = get_cost("attention/10")
    assert attention == make_attention_cost(10)
    assert [attention.of_tokens(tokens) for tokens in (1, 9, 10, 25)] == [1, 17, 20, 87]
    assert attention.of_tokens(10**9) == 10**9 + 10**17
    wrong = "tokens/1 attention attention/ attention/0 attention/-1 attention/x square"
    for name in (*wrong.split(), "attention/" + "9" * 5000):
        with pytest.raises(UsageError):
            get_cost(name)


def test_a_cost_of_ones_own_has_a_name_that_tells_its_values() -> None:
    """Spec: R2.7, R1.4."""
    own = choose_cost(square)
    assert own.name.startswith("square/")
    assert own == make_own_cost(square) == pickle.loads(pickle.dumps(own))
    assert make_own_cost(lambda tokens: tokens + 1).name != make_own_cost(lambda tokens: tokens + 2).name
    assert make_config(cost=own).fingerprint != make_config().fingerprint
    assert make_config(cost=TOKENS).fingerprint == make_config().fingerprint
    for wrong in (lambda _: 0, lambda tokens: -tokens, lambda tokens: tokens / 2, lambda _: True):
        with pytest.raises(UsageError, match="cost gives"):
            choose_cost(wrong)
    with pytest.raises(UsageError, match="cost must be"):
        choose_cost(5)  # type: ignore[arg-type]


def test_costs_that_part_from_any_length_to_100000_on_have_other_names() -> None:
    """Spec: R2.7, R1.4."""
    draw = random.Random(7)
    for _ in range(100):
        first, more = draw_size(draw, 100_000, 1), draw_size(draw, 2**40, 1)
        other = make_own_cost(lambda tokens, first=first, more=more: tokens + more * (tokens >= first))
        assert other.name.partition("/")[2] != make_own_cost(lambda tokens: tokens).name.partition("/")[2], (
            first,
            more,
        )


def test_a_sample_that_costs_nothing_is_refused() -> None:
    """Spec: R2.7. Two of them would never be split."""
    config = make_config(cost=Cost("free below 4", lambda tokens: max(0, tokens - 3)))
    config.check_samples(make_shard([4]))
    with pytest.raises(UsageError, match="free below 4 gives 3 tokens a cost below 1"):
        config.check_samples(make_shard([4, 3]))


@given(st.lists(st.integers(1, 30), max_size=12), st.sampled_from(Layout), st.integers(1, 40))
def test_a_group_costs_what_its_layout_makes_of_it(lengths: list[int], layout: Layout, equal_tokens: int) -> None:
    """Spec: R2.7."""
    cost = make_attention_cost(equal_tokens)
    group = make_shard(lengths)
    costs = [n + n * n // equal_tokens for n in lengths]
    expected = sum(costs) if layout is Layout.PACKED else len(costs) * max(costs, default=0)
    assert layout.compute_cost(group, cost) == expected
    assert layout.compute_cost(group, TOKENS) == layout.compute_tokens(group)


def line_up(rows: Sequence[Group], target: int, cost: Cost) -> list[list[int]]:
    """Returns the lengths in each step, and of what is carried."""
    steps, carried = align(tuple(rows), target, 0, Layout.PACKED, cost=cost)
    return [[sample.length for sample in samples] for samples in (*steps, carried)]


def test_steps_are_lined_up_by_cost_and_carried_by_tokens() -> None:
    """Spec: R4.1. The cheapest of three rows is the fullest, so it leaves last, and the most costly row stays."""
    rows = Layout.PACKED.compute_groups(make_shard([5, 2, 2, 2, 4, 1]), 6)
    assert line_up(rows, 3, SQUARE) == [[5, 1], [4, 2], [2, 2], []]
    rows = (make_shard([2, 2, 2]), make_shard([5]), make_shard([1, 3]))
    assert line_up(rows, 2, SQUARE) == [[5], [2, 2, 2], [1, 3]]
    assert line_up(rows, 2, TOKENS) == [[2, 2, 2], [5], [1, 3]]


def test_the_most_costly_group_is_split_where_half_of_its_cost_is() -> None:
    """Spec: R4.2."""
    groups = (make_shard([3, 3, 3]), make_shard([6, 1, 1]))
    assert line_up(groups, 3, SQUARE) == [[6], [3, 3, 3], [1, 1], []]
    assert line_up(groups, 3, TOKENS) == [[6, 1, 1], [3, 3], [3], []]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 40))
def test_units_of_as_many_rows_each_are_counted_right(longest: list[int], rows: int, equal_tokens: int) -> None:
    """Spec: R2.7. A pair, for example, is one sample of twice its longer sequence. Its batch has the right padded tokens, and
    its attention costs what its rows cost, except for rounding.
    """
    units = tuple(Sample(place, place, rows * length, 1) for place, length in enumerate(longest))
    batch_rows = len(units) * rows
    assert Layout.PADDED.compute_tokens(units) == batch_rows * max(longest)
    of_row = make_attention_cost(equal_tokens).of_tokens(max(longest))
    of_units = Layout.PADDED.compute_cost(units, make_attention_cost(rows * equal_tokens))
    assert batch_rows * of_row <= of_units < batch_rows * (of_row + 1)
    emitted, carried = align((units,), 2 * len(units), 0)
    assert sorted(sample.id for step in emitted for sample in step) == list(range(len(units)))
    assert not carried


def test_sampler_order_does_not_ask_for_costs() -> None:
    """Spec: R4.1."""
    groups = (make_shard([1])[:1], (Sample(1, 1, 9, 9),))
    steps, _ = align(groups, 2, 0, Layout.PADDED, StepOrder.SAMPLER, cost=SQUARE)
    assert [step[0].position for step in steps] == [0, 1]
