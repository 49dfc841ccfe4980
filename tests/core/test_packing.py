"""Packed grouping: fewer than twice the fewest groups in any order, and within every limit.

`tests/spec/test_rules_as_written.py` tests it group by group.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.grouping import compute_rows
from odb_ref.core.types import Sample
from tests.helpers.partitions import count_fewest
from tests.helpers.world import make_shard

LENGTHS = st.lists(st.integers(1, 20), max_size=30)


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 30))
def test_there_are_fewer_than_twice_the_fewest_groups(lengths: list[int], budget: int) -> None:
    groups = len(compute_rows(make_shard(lengths), budget))
    fewest = count_fewest(lengths, lambda group: sum(group) <= budget)
    assert fewest <= groups < 2 * fewest or groups == fewest == 0


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_the_order_in_which_samples_come_does_not_matter(lengths: list[int], budget: int, rng: random.Random) -> None:
    samples = make_shard(lengths)
    shuffled = list(samples)
    rng.shuffle(shuffled)
    assert compute_rows(shuffled, budget) == compute_rows(samples, budget)


def test_every_limit_is_kept_and_one_over_it_travels_alone() -> None:
    samples = [
        Sample(p, p, length, 0, costs) for p, (length, costs) in enumerate([(3, (2, 0)), (2, (1, 0)), (1, (0, 9))])
    ]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (2, 3))] == [[0], [1], [2]]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (3, 3))] == [[0, 1], [2]]
    assert [[s.position for s in group] for group in compute_rows(samples, 8, (2, 9))] == [[0, 2], [1]]
