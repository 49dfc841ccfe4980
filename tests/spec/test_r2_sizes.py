"""Numbers of samples that hardware likes: R2.8, and its effect on the other rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.grouping import compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.errors import UsageError
from tests.helpers.partitions import count_fewest
from tests.helpers.sizes import draw_size
from tests.helpers.world import make_config, make_shard

FRIENDLY = {
    Sizes.EVEN: [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26],
    Sizes.THREES: [1, 2, 3, 4, 6, 8, 12, 16, 24],
    Sizes.POWERS: [1, 2, 4, 8, 16],
}

friendly = st.sampled_from(sorted(FRIENDLY))


@pytest.mark.parametrize("sizes", FRIENDLY)
def test_friendly_numbers(sizes: Sizes) -> None:
    """Spec: R2.8, R4.2. Checks: SIZES."""
    numbers = FRIENDLY[sizes]
    assert [size for size in range(1, 27) if sizes.is_friendly(size)] == numbers
    assert all(sizes.round_down(size) == max(n for n in numbers if n <= size) for size in range(1, 27))
    for size in numbers[1:]:
        middle = sizes.find_middle(size)
        assert middle == min(n for n in numbers if 2 * n >= size and size - n in numbers)


@pytest.mark.parametrize("sizes", FRIENDLY)
def test_friendly_numbers_of_any_size(sizes: Sizes) -> None:
    """Spec: R2.8. Checks: SIZES."""
    draw = random.Random(sizes)
    powers = {2**k for k in range(42)}
    numbers = powers | {3 * power for power in powers} if sizes is Sizes.THREES else powers
    for number in (draw_size(draw, 2**40, 1) for _ in range(300)):
        for size in {number, 3 * number // 2, max(1, 3 * number // 2 - 1)}:
            found = max(n for n in numbers if n <= size)
            assert sizes.round_down(size) == (size - size % 2 or 1 if sizes is Sizes.EVEN else found), size
            assert sizes.is_friendly(size) == (sizes.round_down(size) == size)


@given(st.lists(st.integers(1, 6), max_size=6), friendly, st.integers(1, 20))
def test_no_partition_of_a_small_window_into_friendly_groups_has_fewer(
    lengths: list[int], sizes: Sizes, budget: int
) -> None:
    """Spec: R2.8. This is not claimed for windows of any size."""

    def fits(group: list[int]) -> bool:
        return sizes.is_friendly(len(group)) and len(group) * max(group) <= budget

    assert len(compute_sized_groups(make_shard(lengths), sizes, budget)) == count_fewest(lengths, fits)


@pytest.mark.parametrize("more", [{"layout": Layout.PACKED}, {"order": StepOrder.SAMPLER}])
def test_what_has_no_sizes_is_refused(more: dict[str, object]) -> None:
    """Spec: R2.8."""
    with pytest.raises(UsageError, match="sizes='even' needs layout='padded'"):
        make_config(sizes=Sizes.EVEN, **more)
    assert make_config(sizes=Sizes.ANY, **more)


def test_ranks_with_other_sizes_do_not_start_together() -> None:
    """Spec: R7.3. Ranks with groups of any size keep the fingerprint from before there was a choice."""
    fingerprints = {make_config(sizes=sizes).fingerprint for sizes in Sizes}
    assert len(fingerprints) == len(Sizes)
    assert "sizes" not in make_config().shared_json
