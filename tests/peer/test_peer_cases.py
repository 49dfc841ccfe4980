"""Jobs that the released peer gets wrong, or got wrong when it was measured. Ours gets them right.

The peer's behaviour is often a race, so only its arithmetic is asserted, and the rest is printed (``pytest -rP``).
``python -m tests.bench --peer-cases`` prints all cases as measured at the time.
"""

from __future__ import annotations

import pytest

from tests.bench.cases import CASES, get_case, has_peer

IN_DEPTH = (
    "unequal_exact_3", "empty_shard", "masked_gradient", "strict_collate", "early_breaks", "leaver",
    "getitem_raises", "collate_raises",
)  # fmt: skip
MORE = [pytest.param(name, marks=pytest.mark.deep) for name in IN_DEPTH]
BESIDE = ("masked_gradient", "unequal_join", "unequal_exact_3")
PEER_LIMIT_S = 20.0


@pytest.mark.parametrize("name", ["unequal_join", *MORE])
def test_ours_is_right(name: str) -> None:
    outcome = get_case(name).run("ours")
    print(f"ours: {outcome.text}")
    assert outcome.is_right, outcome.text


@pytest.mark.deep
@pytest.mark.skipif(not has_peer(), reason="the peer is not installed: pip install online-dynamic-batching==0.1.2")
@pytest.mark.parametrize("name", BESIDE)
def test_the_peer_beside_it(name: str) -> None:
    outcome = get_case(name).run("peer", PEER_LIMIT_S)
    print(f"peer: {outcome.text}")
    if name == "masked_gradient":
        assert not outcome.is_right, "the peer now counts supervised tokens: mend the comparison"


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
