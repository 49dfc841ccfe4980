"""What ranks draw from a common order, by the Python and by the proved deal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.shards import compute_shares
from odb_ref.core.batching.updates import compute_portion
from tests.proofs.conftest import UNSHRUNK, Model
from tests.proofs.wire import write_integers


def ask(model: Model, wants: list[int], left: int) -> list[str]:
    return model(f"shares {write_integers(wants)} {left}")


@UNSHRUNK
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 150))
def test_the_model_shares_out_as_the_python_does(model: Model, wants: list[int], left: int) -> None:
    """Spec: R14.3. Checks: DEAL (the link from proof to code)."""
    assert ask(model, wants, left) == [f"[{' '.join(map(str, compute_shares(wants, left)))}]"]


def test_a_sample_that_goes_to_another_rank_is_noticed(model: Model) -> None:
    """The comparison can fail: of two ranks that want the same, the lower one draws the odd sample."""
    assert ask(model, [2, 2], 3) == ["[2 1]"] != ["[1 2]"]


def deal_update(loads: list[list[int]], begin: int, end: int) -> list[tuple[int, list[int]]]:
    """Returns for each portion of an update its first place and the number of places each rank draws, by the Python."""
    portions, drawn = [], begin
    for k, told in enumerate(loads):
        draws = [
            compute_portion(rank, told, drawn, begin=begin, end=end, is_last=k == len(loads) - 1)
            for rank in range(len(told))
        ]
        firsts = [drawn + sum(draw.count for draw in draws[:rank]) for rank in range(len(told))]
        assert [draw.first for draw in draws] == firsts
        assert len({draw.end for draw in draws}) == 1
        portions.append((drawn, [draw.count for draw in draws]))
        drawn = draws[0].end
    return portions


@UNSHRUNK
@given(
    st.integers(1, 5).flatmap(
        lambda ranks: st.lists(st.lists(st.integers(0, 99), min_size=ranks, max_size=ranks), min_size=1, max_size=6)
    ),
    st.integers(0, 4),
    st.integers(1, 80),
    st.integers(0, 300),
)
def test_the_model_deals_an_update_as_the_python_does(
    model: Model, loads: list[list[int]], update: int, size: int, total: int
) -> None:
    """Spec: R16.4. Checks: UPDATE, DEAL (the link from proof to code)."""
    told = " ".join(write_integers(load) for load in loads)
    begin, end = min(total, update * size), min(total, (update + 1) * size)
    portions = [f"{drawn} [{' '.join(map(str, counts))}]" for drawn, counts in deal_update(loads, begin, end)]
    assert model(f"portions {size} {total} {update} {len(loads)} {told}") == portions


def test_a_portion_by_other_loads_is_noticed(model: Model) -> None:
    """The comparison can fail: the heavier rank draws less of the rest."""
    assert model("portions 8 8 0 2 2 0 0 2 30 10") == ["0 [3 3]", "6 [0 2]"]
    assert model("portions 8 8 0 2 2 0 0 2 10 30") == ["0 [3 3]", "6 [2 0]"]
