"""The budget in force, as a rank's trace tells it: what was agreed on for a round, and what the rank accepts. Spec: R15."""

from __future__ import annotations

from dataclasses import replace

from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check.decode import Settings


class RankBudget:
    """Follows one rank's budget."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.in_force = settings
        """The settings of the groups that were offered last: with the budget and the limits of their round."""
        self._agreed_tokens = NONE
        self.accepted_tokens = NONE
        """What its offer must say; NONE when that is no less than the header's budget."""

    def resume(self, agreed_tokens: int) -> None:
        """Begins at a saved round, or with a budget of its own."""
        self._agreed_tokens = self.accepted_tokens = agreed_tokens

    def accept(self, tokens: int) -> None:
        """The rank is told what it accepts."""
        self.accepted_tokens = tokens if tokens < self._settings.budget_tokens else NONE

    def offer(self) -> Settings:
        """Returns the settings of the groups that are offered now."""
        self.in_force = shrink(self._settings, self._agreed_tokens)
        return self.in_force

    def agree(self, agreement: Offer) -> None:
        """The ranks agree on the budget of the next round."""
        self._agreed_tokens = agreement.budget_min


def shrink(settings: Settings, tokens: int) -> Settings:
    """Returns the settings under a budget of so many tokens, if that is less: with each limit in proportion. Spec: R15.1."""
    whole = settings.budget_tokens
    if tokens >= whole:
        return settings
    limits = tuple(max(1, limit * max(0, tokens) // whole) for limit in settings.limits)
    return replace(settings, budget_tokens=max(1, tokens), limits=limits)
