"""Numbers of samples that hardware likes: R2.8, and what of the other rules it concerns."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.grouping import compute_groups, compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Group, Mode, Sample
from tests.helpers.partitions import count_fewest
from tests.helpers.world import World, make_config, make_shards

FRIENDLY = {
    Sizes.EVEN: [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26],
    Sizes.THREES: [1, 2, 3, 4, 6, 8, 12, 16, 24],
    Sizes.POWERS: [1, 2, 4, 8, 16],
}

friendly = st.sampled_from(sorted(FRIENDLY))


def make_samples(lengths: list[int]) -> Group:
    return tuple(Sample(id=n, position=n, length=length, supervised=0) for n, length in enumerate(lengths))


@pytest.mark.parametrize("sizes", FRIENDLY)
def test_friendly_numbers(sizes: Sizes) -> None:
    """Spec: R2.8, R4.2. Checks: SIZES."""
    numbers = FRIENDLY[sizes]
    assert [size for size in range(1, 27) if sizes.is_friendly(size)] == numbers
    assert all(sizes.round_down(size) == max(n for n in numbers if n <= size) for size in range(1, 27))
    for size in numbers[1:]:
        middle = sizes.find_middle(size)
        assert middle == min(n for n in numbers if 2 * n >= size and size - n in numbers)


@given(st.lists(st.integers(1, 12), max_size=200), friendly, st.integers(1, 90))
def test_groups_are_friendly_and_as_those_of_any_size_begin(lengths: list[int], sizes: Sizes, budget: int) -> None:
    """Spec: R2.8, R2.2. Checks: SIZES, BUDGET."""
    samples = make_samples(lengths)
    groups = compute_sized_groups(samples, sizes, budget)
    assert {sample for group in groups for sample in group} == set(samples)
    assert sum(map(len, groups)) == len(samples)
    assert all(sizes.is_friendly(len(group)) for group in groups)
    assert all(len(group) == 1 or len(group) * group[0].length <= budget for group in groups)
    assert all(before[0].length <= after[-1].length for before, after in pairwise(groups))
    rest = list(samples)
    for group in groups:  # each is cut from what would come first, and to the largest number that it holds
        first = compute_groups(rest, budget)[0]
        assert set(group) <= set(first)
        assert len(group) == sizes.round_down(len(first))
        rest = [sample for sample in rest if sample not in group]


@given(st.lists(st.integers(1, 6), max_size=6), friendly, st.integers(1, 20))
def test_no_partition_of_a_small_window_into_friendly_groups_has_fewer(
    lengths: list[int], sizes: Sizes, budget: int
) -> None:
    """Spec: R2.8. Not claimed of windows of any size."""

    def fits(group: list[int]) -> bool:
        return sizes.is_friendly(len(group)) and len(group) * max(group) <= budget

    assert len(compute_sized_groups(make_samples(lengths), sizes, budget)) == count_fewest(lengths, fits)


@given(st.lists(st.integers(1, 12), max_size=40), friendly, st.integers(1, 60), st.integers(1, 50), st.integers(0, 30))
def test_what_is_aligned_is_friendly(lengths: list[int], sizes: Sizes, budget: int, target: int, due: int) -> None:
    """Spec: R4.2, R2.8. Checks: SIZES, CONSERVE."""
    samples = make_samples(lengths)
    groups = compute_sized_groups(samples, sizes, budget)
    steps, carried = align(groups, target, due, sizes=sizes)
    assert len(steps) == target
    assert all(sizes.is_friendly(len(step)) for step in steps)
    assert {*carried, *(sample for step in steps for sample in step)} == set(samples)
    assert len(carried) + sum(map(len, steps)) == len(samples)
    if len(groups) < target <= len(samples):
        assert all(steps)  # one is friendly: what can be split is


@given(
    st.lists(st.lists(st.integers(1, 10), max_size=30), min_size=1, max_size=4),
    friendly,
    st.sampled_from(Mode),
    st.data(),
)
def test_every_step_of_a_world_is_friendly(
    shards: list[list[int]], sizes: Sizes, mode: Mode, data: st.DataObject
) -> None:
    """Spec: R2.8. Checks: SIZES, COVER, ONCE."""
    config = make_config(
        sizes=sizes,
        mode=mode,
        budget_tokens=data.draw(st.integers(1, 60)),
        window_samples=data.draw(st.integers(1, 20)),
        max_age_rounds=data.draw(st.integers(1, 3)),
        ramp_rounds=data.draw(st.integers(0, 2)),
        quota_samples=data.draw(st.integers(1, 40)) if mode is Mode.QUOTA else None,
    )
    world = World(config, make_shards(shards), seed=data.draw(st.integers(0, 99))).run()
    for rank, shard in zip(world.nodes, shards, strict=True):
        taken = [sample.position for step in rank.taken for sample in step.group]
        assert all(sizes.is_friendly(len(step.group)) for step in rank.taken)
        assert len(set(taken)) == len(taken)
        assert mode is Mode.QUOTA or sorted(taken) == list(range(len(shard)))


@pytest.mark.parametrize("more", [{"layout": Layout.PACKED}, {"order": StepOrder.SAMPLER}])
def test_what_has_no_sizes_is_refused(more: dict[str, object]) -> None:
    """Spec: R2.8."""
    with pytest.raises(UsageError, match="sizes='even' needs layout='padded'"):
        make_config(sizes=Sizes.EVEN, **more)
    assert make_config(sizes=Sizes.ANY, **more)


def test_ranks_with_other_sizes_do_not_start_together() -> None:
    """Spec: R7.3. And those of any size have the fingerprint that they had before there was a choice."""
    fingerprints = {make_config(sizes=sizes).fingerprint for sizes in Sizes}
    assert len(fingerprints) == len(Sizes)
    assert "sizes" not in make_config().shared_json
