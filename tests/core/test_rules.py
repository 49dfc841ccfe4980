"""Target rules stay within their bounds, and a rule that does not is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.rules import RULES, TargetRule, compute_bounds, compute_checked_target, get_rule
from odb_ref.core.errors import InvariantError, RuleError, UsageError
from odb_ref.core.offer import NONE, Offer, reduce_offers
from tests.helpers.errors import refused
from tests.helpers.world import make_offer


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    """Draws what one rank can offer: due <= groups <= samples, no samples without groups, a reading rank holds some."""
    is_ended = draw(st.booleans())
    samples = draw(st.integers(0 if is_ended else 1, 20))
    groups = draw(st.integers(min(1, samples), samples))
    due, least = draw(st.integers(0, groups)), NONE if is_ended else groups
    return make_offer(samples=samples, groups=groups, groups_min=least, due_max=due)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(ranks=st.lists(offers(), min_size=1, max_size=5))
def test_a_shipped_rule_stays_within_its_bounds(rule: TargetRule, ranks: list[Offer]) -> None:
    """Spec: R3.3. Checks: TERM, AGE."""
    agreement = reduce_offers(ranks)
    if agreement.samples_max == 0:
        return  # then no target is computed
    low, high = compute_bounds(agreement)
    assert low <= high
    assert low <= compute_checked_target(rule, agreement) <= high


@dataclass(frozen=True)
class Always:
    answer: int
    name: str = "always"

    def compute_target(self, agreement: Offer) -> int:
        return self.answer


@dataclass(frozen=True)
class Raising(Always):
    error: Exception = TypeError("no such answer")  # noqa: RUF009

    def compute_target(self, agreement: Offer) -> int:
        raise self.error


class Meddling:
    name = "meddling"

    def compute_target(self, agreement: Offer) -> int:
        object.__setattr__(agreement, "samples_max", 99)
        return 6


def test_a_rule_changes_no_bound_and_no_agreement() -> None:
    """Spec: R3.3."""
    agreement = make_offer(samples=5, groups=3)
    with pytest.raises(RuleError, match=r"outside 1\.\.5"):
        compute_checked_target(Meddling(), agreement)
    assert agreement == make_offer(samples=5, groups=3)


@pytest.mark.parametrize(("due", "answer"), [(0, -1), (0, 0), (0, 6), (2, 1), (2, 6)])
def test_a_rule_outside_its_bounds_is_named(due: int, answer: int) -> None:
    """Spec: R3.3, R8."""
    with pytest.raises(RuleError, match=rf"'always' returned {answer}, outside {max(1, due)}\.\.5") as caught:
        compute_checked_target(Always(answer), make_offer(samples=5, groups=3, due_max=due))
    assert isinstance(caught.value, InvariantError)
    assert caught.value.invariant == "RULE-BOUNDS"


@pytest.mark.parametrize("answer", [3.0, True, None])
def test_an_answer_that_is_no_integer_is_named(answer: int) -> None:
    """Spec: R3.3."""
    with pytest.raises(RuleError, match=rf"'always' returned {answer}"):
        compute_checked_target(Always(answer), make_offer(samples=5, groups=3))


def test_a_rule_that_raises_is_named() -> None:
    """Spec: R3.3, R8."""
    with pytest.raises(RuleError, match="'always' raised TypeError: no such answer, for Offer") as caught:
        compute_checked_target(Raising(0), make_offer(samples=5, groups=3))
    assert isinstance(caught.value.__cause__, TypeError)


class Unwritable(Exception):
    def __str__(self) -> str:
        raise LookupError

    __index__ = __str__  # type: ignore[assignment]


def test_what_a_rule_makes_is_named_even_if_it_cannot_be_written() -> None:
    """Spec: R3.3, R8."""
    for answer in (10**6000, Unwritable()):
        with pytest.raises(
            RuleError, match=rf"returned a value of type {type(answer).__name__} that cannot be written"
        ):
            compute_checked_target(Always(answer), make_offer(samples=5, groups=3))  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="raised Unwritable: a value of type Unwritable that cannot be written"):
        compute_checked_target(Raising(0, error=Unwritable()), make_offer(samples=5, groups=3))


def test_an_unknown_rule_is_refused_with_the_ones_there_are() -> None:
    with refused(UsageError, "unknown target rule 'best'; choose from odb, paper"):
        get_rule("best")


def test_rules_are_target_rules_with_the_name_they_are_found_by() -> None:
    for name, rule in RULES.items():
        assert isinstance(rule, TargetRule)
        assert rule.name == name
