"""What only large windows, long samples and many bounds show: the limits of shortcuts."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from odb_ref.core.batching.cost import make_attention_cost
from odb_ref.core.batching.grouping import compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.shards import compute_shares
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.batching.updates import compute_portion_shares
from odb_ref.core.offer import reduce_offers
from odb_ref.core.resume import Checkpoint, Ledger, RoundStart
from odb_ref.core.types import Sample
from tests.helpers.sizes import draw_size
from tests.helpers.world import make_offer


@pytest.mark.parametrize("samples", [65, 130, 300, 1_000])
def test_a_friendly_group_is_found_among_any_number(samples: int) -> None:
    """Spec: R2.8."""
    window = [Sample(i, i, 1, 0) for i in range(samples)]
    for sizes in (Sizes.EVEN, Sizes.THREES, Sizes.POWERS):
        (first, *_) = compute_sized_groups(window, sizes, 10_000)
        assert len(first) == sizes.round_down(samples)


def test_any_number_of_samples_is_split_in_the_middle() -> None:
    """Spec: R4.2."""
    assert [Sizes.ANY.find_middle(size) for size in range(2, 1_000)] == [-(-size // 2) for size in range(2, 1_000)]


def test_attention_grows_with_the_square_of_any_length() -> None:
    """Spec: R2.7."""
    cost = make_attention_cost(7)
    for tokens in (1, 999, 2_001, 10**5, 10**9):
        assert cost.of_tokens(tokens) == tokens + tokens * tokens // 7


def test_the_lightest_ranks_are_filled_to_one_level() -> None:
    """Spec: R16.4. A place counts the mean tokens of samples drawn, rounded down for each rank."""
    draw = random.Random(0)
    for _ in range(500):
        loads = [draw.randint(0, 50) for _ in range(draw.randint(2, 9))]
        places, portion = draw.randint(1, 40), draw.randint(1, 30)
        held = [load * places // sum(loads) if sum(loads) else 0 for load in loads]
        expected = compute_shares([max(held) - own + portion for own in held], portion)
        assert compute_portion_shares(loads, places, portion) == expected


def test_an_agreement_is_of_all_ranks_however_many() -> None:
    """Spec: R3.2."""
    offers = [make_offer(samples=rank) for rank in range(100)]
    agreement = reduce_offers(offers)
    assert (agreement.samples_min, agreement.samples_max) == (0, 99)
    assert reduce_offers(offers[::-1]) == agreement


def test_a_checkpoint_knows_what_is_taken_however_much_that_is() -> None:
    """Spec: R10.3. Checks: ONCE, RESUME. Many carried samples, steps of many samples, rounds of many steps."""
    draw = random.Random(9)
    for _ in range(30):
        read, ahead = draw_size(draw, 2**14), draw_size(draw, 2**14)
        carried = sorted(draw.sample(range(read), draw_size(draw, read)))
        start = RoundStart(round=5, read_samples=read, carried=tuple(carried), planned_steps=7)
        window = [*carried, *range(read, read + ahead)]
        taken = draw.sample(window, draw_size(draw, len(window)))
        ledger = Ledger()
        for round_ in range(draw_size(draw, 40)):
            ledger.note_round(RoundStart(round=round_))
        ledger.note_round(start)
        cuts = sorted(draw_size(draw, len(taken)) for _ in range(draw_size(draw, 200)))
        for number, (begin, end) in enumerate(pairwise((0, *cuts, len(taken))), 7):
            ledger.note_taken(number, taken[begin:end])
        point = ledger.compute_checkpoint()
        assert point == Checkpoint(start=start, taken_steps=len(cuts) + 1, taken=tuple(taken))
        rest = set(range(read + ahead + 9)) - set(range(read)).difference(carried) - set(taken)
        assert point.compute_rest(read + ahead + 9) == sorted(rest)
        places = draw.choices(range(read + ahead + 9), k=20)
        assert [point.is_taken(place) for place in places] == [place not in rest for place in places]


def test_a_row_of_odd_cost_is_split_behind_its_middle() -> None:
    """Spec: R4.2. The first part has the fewest samples with at least half of the cost."""
    group = tuple(Sample(i, i, length, 0) for i, length in enumerate((3, 3, 3, 3, 1)))
    assert Layout.PACKED.find_middle(group) == 3
