"""Target rules: how many steps a round has. Spec: R3.3.

A rule is any deterministic function of the agreement that stays within its bounds: at least one step, at least the most due
groups of any rank (AGE), and at most the most samples any rank holds (so some rank always has work, hence TERM). Every
property is proved for every such rule; `odb-ref verify` checks a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from odb_ref.core.errors import RuleError, UsageError, describe_given, read_integer
from odb_ref.core.offer import NONE, Offer


@runtime_checkable
class TargetRule(Protocol):
    """A target rule. ``name`` enters the configuration's fingerprint, so ranks with different rules refuse to start."""

    @property
    def name(self) -> str:
        """Identifies the rule and its parameters."""

    def compute_target(self, agreement: Offer) -> int:
        """Returns the number of steps of the round, within `compute_bounds`. Called only when some rank holds a sample."""


def compute_bounds(agreement: Offer) -> tuple[int, int]:
    """Returns the least and the greatest target a rule may return. Spec: R3.3."""
    return max(1, agreement.due_max), agreement.samples_max


def compute_checked_target(rule: TargetRule, agreement: Offer) -> int:
    """Returns the rule's target.

    Raises: RuleError when the rule raises, or its answer is not an integer within the bounds.
    """
    try:
        answer = rule.compute_target(replace(agreement))  # a copy, so that the rule cannot change ours
    except Exception as error:
        told = f"{type(error).__name__}: {describe_given(error)}"
        raise RuleError(f"rule {rule.name!r} raised {told}, for {agreement}") from error
    target = read_integer(answer)
    low, high = compute_bounds(agreement)
    if target is None or not low <= target <= high:
        raise RuleError(f"rule {rule.name!r} returned {describe_given(answer)}, outside {low}..{high}, for {agreement}")
    return target


@dataclass(frozen=True, slots=True)
class PaperRule:
    """Max-based, as published (arXiv 2606.19989): every rank makes the steps of the rank with most groups, by splitting."""

    name: str = "paper"

    def compute_target(self, agreement: Offer) -> int:
        """Returns the most groups any rank has formed."""
        return agreement.groups_max


@dataclass(frozen=True, slots=True)
class OdbRule:
    """The default: the most steps that every rank still reading can fill; the rest is carried.

    No rank that still reads splits a good group to keep up with another. Groups due by age are always emitted. Once no rank
    reads any more, everything left is emitted, because there is nothing to wait for.
    """

    name: str = "odb"

    def compute_target(self, agreement: Offer) -> int:
        """Returns the fewest groups that any rank still reading would emit, but no fewer than are due."""
        wanted = agreement.groups_max if agreement.groups_min == NONE else agreement.groups_min
        return max(wanted, agreement.due_max)


RULES: Final[dict[str, TargetRule]] = {rule.name: rule for rule in (OdbRule(), PaperRule())}


def get_rule(name: str) -> TargetRule:
    """Returns the shipped rule called ``name``. Raises: UsageError when no rule has that name."""
    try:
        return RULES[name]
    except KeyError:
        raise UsageError(f"unknown target rule {name!r}; choose from {', '.join(sorted(RULES))}") from None
