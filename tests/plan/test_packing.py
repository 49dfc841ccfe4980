"""The two ways of packing, and runs of padded rows, by examples to the token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.plan import plan_all, plan_rank
from odb_ref.plan.packing import pack, pack_either_way, spread
from odb_ref.plan.units import Units


def make_units(lengths: list[int], costs: list[int] | None = None, uses: list[int] | None = None) -> Units:
    numbers = range(len(lengths))
    return Units(
        members=tuple((number,) for number in numbers),
        longest=tuple(lengths),
        tokens=tuple(lengths),
        costs=tuple(lengths if costs is None else costs),
        uses=() if uses is None else (tuple(uses),),
    )


def list_lengths(units: Units, batches: list[list[int]]) -> list[list[int]]:
    return [[units.tokens[unit] for unit in batch] for batch in batches]


def test_each_goes_where_the_least_room_is_left() -> None:
    units = make_units([6, 5, 4, 3, 1])
    assert list_lengths(units, pack(units, range(5), 10)) == [[6, 4], [5, 3, 1]]


def test_each_goes_to_the_one_that_costs_least_and_a_full_one_comes_back_for_less() -> None:
    """The 7 leaves no room for the 4 in the first, which is the cheapest when the 2 comes."""
    units = make_units([7, 6, 4, 2], costs=[1, 5, 4, 2])
    assert spread(units, range(4), 2, 10) is not None
    assert list_lengths(units, spread(units, range(4), 2, 10) or []) == [[7, 2], [6, 4]]
    assert spread(units, range(4), 1, 18) is None
    assert list_lengths(units, spread(units, range(4), 1, 19) or []) == [[7, 6, 4, 2]]


def test_who_is_full_of_something_else_is_passed_over_until_one_needs_less() -> None:
    units = make_units([5, 4, 3, 2], uses=[2, 1, 2, 0])
    bounds = [(units.uses[0], 2)]
    assert list_lengths(units, pack(units, range(4), 10, bounds)) == [[5, 2], [4], [3]]
    assert list_lengths(units, spread(units, range(4), 3, 10, bounds) or []) == [[5], [4], [3, 2]]
    units = make_units([6, 5, 4, 3], costs=[1, 5, 5, 1], uses=[2, 1, 1, 0])
    assert list_lengths(units, spread(units, range(4), 2, 10, [(units.uses[0], 2)]) or []) == [[6, 3], [5, 4]]
    assert spread(units, range(4), 1, 100, [(units.uses[0], 3)]) is None


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["packed", "padded"]))
def test_a_limit_may_be_reached(limit: int, number: int, layout: str) -> None:
    """Spec: R13.2, R13.4. As many samples as the limit has, again and again."""
    plan = plan_rank([1] * (limit * number), budget=99, limits={"samples": limit}, layout=layout)
    assert plan.count == number
    assert {len(batch) for batch in plan.micro_batches} == {limit}


def test_padded_rows_are_balanced_by_cost() -> None:
    """Spec: R13.6. By tokens 2 x 9 and 3 x 4 are the best; where long ones cost more, the longest is alone."""
    assert _list_padded([2, 2, 4, 6, 9], None) == [[6, 9], [2, 2, 4]]
    assert _list_padded([2, 2, 4, 6, 9], "attention/1") == [[2, 2, 4, 6], [9]]
    batches = plan_rank([3, 3, 11, 13], budget=60, layout="padded", at_least=2, cost="attention/4").micro_batches
    assert batches == ((2, 3), (0, 1))  # 2 rows of 55, which is less than 3 of 41


def _list_padded(lengths: list[int], cost: str | None) -> list[list[int]]:
    plan = plan_rank(lengths, budget=60, layout="padded", at_least=2, cost=cost)
    return [[lengths[index] for index in batch] for batch in plan.micro_batches]


def test_too_few_runs_are_halved() -> None:
    """Spec: R13.5. Equal lengths: a bound that gives three runs of six gives no four."""
    plan = plan_rank([5] * 6, budget=60, layout="padded", at_least=4)
    assert sorted(len(batch) for batch in plan.micro_batches) == [1, 1, 2, 2]
    plan = plan_rank([5] * 6, budget=60, layout="padded", at_least=5)
    assert sorted(len(batch) for batch in plan.micro_batches) == [1, 1, 1, 1, 2]


def test_what_best_fit_does_not_find_an_even_division_may() -> None:
    """Spec: R13.4."""
    lengths = [14, 14, 9, 8, 4, 4, 4, 3]
    assert len(pack(make_units(lengths), range(8), 30)) == 3
    assert plan_rank(lengths, budget=30).count == 2
    assert plan_all(lengths, ranks=2, budget=30).count == 1


def test_two_halves_share_one() -> None:
    """Spec: R13.10."""
    plan = plan_rank([30, 30], budget=60)
    assert (plan.count, plan.report.least) == (1, 1)


def test_what_exceeds_a_limit_travels_alone_where_that_is_said() -> None:
    """Spec: R13.3."""
    plan = plan_rank([5, 5, 5], budget=60, limits={"patches": 10}, uses={"patches": [4, 11, 4]}, oversize="alone")
    assert sorted(plan.micro_batches) == [(0, 2), (1,)]


def test_what_needs_most_of_a_limit_comes_first_where_that_gives_fewer() -> None:
    """Spec: R13.4. Long samples without patches go beside short ones with many, if these are placed before."""
    lengths, patches = [6, 6, 5, 5, 2, 2, 2, 2], [1, 1, 1, 1, 9, 9, 9, 9]
    units = make_units(lengths, uses=patches)
    bounds = [(units.uses[0], 10)]
    assert len(pack(units, range(8), 11, bounds)) == 6
    assert len(pack_either_way(units, range(8), 11, bounds)) == 4
    assert len(pack_either_way(units, range(8), 11, [])) == 3
