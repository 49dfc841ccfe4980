"""What ranks draw of a common order, as the Python has it and as the proved deal does."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from odb_ref.core.batching.shards import compute_shares
from tests.proofs.conftest import Model
from tests.proofs.wire import write_integers

SETTINGS = settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def ask(model: Model, wants: list[int], left: int) -> list[str]:
    return model(f"shares {write_integers(wants)} {left}")


@SETTINGS
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 150))
def test_the_model_shares_out_as_the_python_does(model: Model, wants: list[int], left: int) -> None:
    """Spec: R14.3. Checks: DEAL (the link from proof to code)."""
    assert ask(model, wants, left) == [f"[{' '.join(map(str, compute_shares(wants, left)))}]"]


def test_a_sample_that_goes_to_another_rank_is_noticed(model: Model) -> None:
    """The comparison can fail: of two ranks that want alike, the lower one draws the odd sample."""
    assert ask(model, [2, 2], 3) == ["[2 1]"] != ["[1 2]"]
