"""Packed grouping and layouts against brute force: within the budget, no two fit together, fewer than twice the fewest."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.grouping import compute_rows
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Sample, compute_real_tokens
from tests.helpers.partitions import count_fewest

LENGTHS = st.lists(st.integers(1, 20), max_size=30)


def make_samples(lengths: list[int]) -> list[Sample]:
    return [Sample(7 * position, position, length, 0) for position, length in enumerate(lengths)]


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 30))
def test_there_are_fewer_than_twice_the_fewest_groups(lengths: list[int], budget: int) -> None:
    groups = len(compute_rows(make_samples(lengths), budget))
    fewest = count_fewest(lengths, lambda group: sum(group) <= budget)
    assert fewest <= groups < 2 * fewest or groups == fewest == 0


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_the_order_in_which_samples_come_does_not_matter(lengths: list[int], budget: int, rng: random.Random) -> None:
    samples = make_samples(lengths)
    shuffled = samples.copy()
    rng.shuffle(shuffled)
    assert compute_rows(shuffled, budget) == compute_rows(samples, budget)


@given(LENGTHS, st.integers(1, 60))
def test_what_is_as_old_as_fits_together_is_in_one_group(lengths: list[int], budget: int) -> None:
    count = max((n for n in range(2, len(lengths) + 1) if sum(lengths[:n]) <= budget), default=1)
    assert set(range(len(lengths))[:count]) <= {
        sample.position for group in compute_rows(make_samples(lengths), budget)[:1] for sample in group
    }


def test_of_equally_full_groups_the_one_begun_first_is_joined_and_of_equal_samples_the_first_goes_first() -> None:
    groups = compute_rows(make_samples([2, 6, 2, 6, 2]), 8)
    assert [[sample.position for sample in group] for group in groups] == [[1, 0], [3, 2], [4]]


def test_a_sample_longer_than_the_budget_travels_alone() -> None:
    groups = compute_rows(make_samples([3, 50, 10, 50, 7]), 10)
    assert [[sample.length for sample in group] for group in groups] == [[7, 3], [50], [50], [10]]
    groups = compute_rows(make_samples([50, 3, 10, 50, 7]), 10)
    assert [[sample.length for sample in group] for group in groups] == [[50], [50], [10], [7, 3]]


def test_every_limit_is_kept_and_one_over_it_travels_alone() -> None:
    samples = [
        Sample(p, p, length, 0, costs) for p, (length, costs) in enumerate([(3, (2, 0)), (2, (1, 0)), (1, (0, 9))])
    ]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (2, 3))] == [[0], [1], [2]]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (3, 3))] == [[0, 1], [2]]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (2, 9))] == [[0, 2], [1]]


def test_no_samples_make_no_group() -> None:
    assert compute_rows([], 10) == ()
    assert Layout.PACKED.compute_tokens(()) == 0


@given(LENGTHS, st.integers(1, 60), st.integers(1, 30), st.integers(0, 30))
def test_an_alignment_of_rows_has_its_target_fullest_first_and_loses_nothing(
    lengths: list[int], budget: int, target: int, due_before: int
) -> None:
    groups = compute_rows(make_samples(lengths), budget)
    due = sum(any(sample.position < due_before for sample in group) for group in groups)
    aligned, carried = align(groups, max(target, due), due_before, Layout.PACKED)
    assert len(aligned) == max(target, due)
    assert sorted(s.position for group in (*aligned, carried) for s in group) == list(range(len(lengths)))
    tokens = [compute_real_tokens(group) for group in aligned]
    assert tokens == sorted(tokens, reverse=True)
    assert all(len(group) <= 1 or compute_real_tokens(group) <= budget for group in aligned)
    assert not any(sample.position < due_before for sample in carried)
    if len(groups) <= target:
        assert sum(map(bool, aligned)) == min(target, len(lengths)), "split until there are enough, or only singles"


def test_a_row_is_halved_by_tokens_not_by_samples() -> None:
    (row,) = compute_rows(make_samples([1, 1, 7, 1, 3]), 13)
    assert Layout.PACKED.find_middle(row) == 1
    aligned, _ = align((row,), 2, 0, Layout.PACKED)
    assert [[sample.length for sample in group] for group in aligned] == [[7], [3, 1, 1, 1]]
    assert Layout.PADDED.find_middle(row) == 3


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12))
def test_neither_half_of_a_row_is_empty(lengths: list[int]) -> None:
    (row,) = compute_rows(make_samples(lengths), 1000)
    assert 1 <= Layout.PACKED.find_middle(row) < len(row)
