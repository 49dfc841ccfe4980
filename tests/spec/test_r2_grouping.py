"""R2: grouping and windows."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from odb_ref.core.batching.grouping import compute_groups, compute_rows
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Sample
from tests.helpers.partitions import count_fewest
from tests.helpers.world import World, make_config, make_shard

LENGTHS = st.lists(st.integers(1, 12), max_size=8)


@given(LENGTHS, st.integers(1, 20), st.sampled_from(Layout), st.randoms(use_true_random=False))
def test_groups_depend_on_the_set_of_samples_only(
    lengths: list[int], budget: int, layout: Layout, random: object
) -> None:
    """Spec: R2, R2.1, R2.5. Checks: REPLAY."""
    samples = list(make_shard(lengths))
    shuffled = samples[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert layout.compute_groups(samples, budget, ()) == layout.compute_groups(shuffled, budget, ())


@given(st.lists(st.integers(1, 12), max_size=6), st.integers(1, 20))
def test_no_partition_has_fewer_groups(lengths: list[int], budget: int) -> None:
    """Spec: R2.1. Checks: FEWEST."""
    groups = compute_groups(make_shard(lengths), budget)
    assert len(groups) == count_fewest(lengths, lambda group: len(group) * max(group) <= budget)


AMOUNTS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6), st.integers(0, 6)), max_size=12)


# A limit reached exactly; a sample over a limit by itself; room in tokens and one limit, but not in the other.
@example([(1, 3, 0), (1, 1, 0), (2, 0, 9), (2, 1, 0), (3, 1, 1), (3, 4, 0)], 8, 4, 5)
@given(AMOUNTS, st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_a_sample_begins_the_next_group_only_when_it_does_not_fit(
    items: list[tuple[int, int, int]], budget: int, first: int, second: int
) -> None:
    """Spec: R2.1, R2.2. Checks: BUDGET."""

    def fits(group: list[Sample]) -> bool:
        used = [sum(sample.costs[i] for sample in group) for i in range(2)]
        padded = len(group) * max(sample.length for sample in group)
        return padded <= budget and used[0] <= first and used[1] <= second

    samples = make_shard([length for length, *_ in items], costs=[(a, b) for _, a, b in items])
    groups = [list(group) for group in compute_groups(samples, budget, (first, second))]
    ordered = sorted(samples, key=lambda sample: (sample.length, sample.position))
    assert [sample for group in groups for sample in reversed(group)] == ordered
    assert all(len(group) == 1 or fits(group) for group in groups)
    assert not any(fits([*group, following[-1]]) for group, following in pairwise(groups))


def test_windows_ramp_up_and_are_refilled_to_their_size() -> None:
    """Spec: R2.3."""
    config = make_config(window_samples=10, ramp_rounds=2, budget_tokens=1000)
    assert [config.compute_window_samples(k) for k in range(4)] == [2, 5, 10, 10]
    assert make_config(window_samples=1, ramp_rounds=3).compute_window_samples(0) == 1
    world = World(config, [make_shard([1] * 30)]).run()
    assert [len(group) for group in world.get_groups(0)] == [2, 5, 10, 10, 3]


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 60))
def test_a_packed_group_fits_the_budget_in_sum_and_no_two_fit_together(lengths: list[int], budget: int) -> None:
    """Spec: R2.4, R2.5. Checks: BUDGET, FEWEST. The lemma ANY-FIT."""
    layout = Layout.PACKED
    groups = layout.compute_groups(make_shard(lengths), budget, ())
    assert sorted(sample.position for group in groups for sample in group) == list(range(len(lengths)))
    for group in groups:
        assert layout.compute_tokens(group) == sum(sample.length for sample in group)
        assert len(group) == 1 or layout.compute_tokens(group) <= budget
        assert [sample.length for sample in group] == sorted((sample.length for sample in group), reverse=True)
    assert not any(layout.compute_tokens(a + b) <= budget for a, b in combinations(groups, 2))


@pytest.mark.parametrize(
    ("limits", "positions"), [((2, 3), [[0], [1], [2]]), ((3, 3), [[0, 1], [2]]), ((2, 9), [[0, 2], [1]])]
)
def test_every_limit_of_a_row_is_kept_and_one_over_it_travels_alone(
    limits: tuple[int, int], positions: list[list[int]]
) -> None:
    """Spec: R2.5."""
    samples = make_shard([3, 2, 1], costs=[(2, 0), (1, 0), (0, 9)])
    assert [[sample.position for sample in row] for row in compute_rows(samples, 8, limits)] == positions
