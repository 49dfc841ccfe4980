"""Budgets that change: what bounds the groups of a round. Spec: R15.

The configuration's token budget is the largest there is. Below it, each rank offers the largest that it accepts, and the least
of all ranks' is the budget of the next round's groups, on every rank: an agreement, as the number of steps is one. A rank says
that it accepts another budget because it ran out of memory (or has less than the others), because somebody tells it to, or
because a schedule says so; the protocol need not know why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from odb_ref.core.errors import RuleError, UsageError, read_integer
from odb_ref.core.offer import NONE

BudgetSchedule = Callable[[int, int], int]
"""Returns a token budget, told how many steps are planned and which budget is in force: a pure function. Spec: R15.4."""


def compute_bounds_in_force(
    budget_tokens: int, limits: tuple[int, ...], agreed_tokens: int
) -> tuple[int, tuple[int, ...]]:
    """Returns the budget and the limits of a round's groups, of the largest there are, when so many tokens are agreed on.

    A batch shrinks as a whole: every limit in the proportion of the budget, rounded down, but to 1 at least. Spec: R15.1.
    """
    if agreed_tokens >= budget_tokens:
        return budget_tokens, limits
    return agreed_tokens, tuple([max(1, limit * agreed_tokens // budget_tokens) for limit in limits])


def compute_offered(tokens: int, budget_tokens: int) -> int:
    """Returns what a rank offers that accepts so many tokens: NONE where that is no less than the largest budget there is.

    Raises: UsageError when it is not a number of tokens. Spec: R15.2.
    """
    if tokens < 1:
        raise UsageError(f"a token budget must be at least 1, got {tokens}")
    return tokens if tokens < budget_tokens else NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What one rank accepts: the least of what it was told last and of what its schedule has answered last. A value.

    The machine is told by `BudgetAccepted`; a driver holds this, and asks it at the moments of R15.4, so that what a schedule
    says is in the same offer whatever the timing. Steps are counted from ``steps_before`` on, for a schedule that goes over
    several epochs. Spec: R15.2. Preserves: REPLAY.
    """

    budget_tokens: int
    """The largest budget there is."""
    schedule: BudgetSchedule | None = None
    told_tokens: int = NONE
    scheduled_tokens: int = NONE
    """What the schedule has answered; without one, what the rank accepted where it was resumed, until it is told otherwise."""
    steps_before: int = 0

    @property
    def tokens(self) -> int:
        """The budget that the rank accepts."""
        return min(self.budget_tokens, self.told_tokens, self.scheduled_tokens)

    @property
    def offered_tokens(self) -> int:
        """The same as the rank offers it, and as its machine's ``accepted_tokens`` have it."""
        return compute_offered(self.tokens, self.budget_tokens)

    def tell(self, tokens: int) -> Acceptance:
        """Returns it of a rank that is told what to accept."""
        scheduled = NONE if self.schedule is None else self.scheduled_tokens
        return replace(self, told_tokens=tokens, scheduled_tokens=scheduled)

    def ask(self, planned_steps: int, agreed_tokens: int) -> Acceptance:
        """Returns it after its schedule was asked, in a round whose groups are of the budget agreed on.

        Raises: RuleError when the schedule does not answer with a number of tokens. Spec: R15.4.
        """
        if self.schedule is None:
            return self
        step, current = self.steps_before + planned_steps, min(agreed_tokens, self.budget_tokens)
        answer = self.schedule(step, current)
        tokens = read_integer(answer)
        if tokens is None or tokens < 1:
            raise RuleError(
                f"the budget schedule returned {answer!r} at step {step}, with a budget of {current} tokens"
            )
        return replace(self, scheduled_tokens=tokens)

    def compute_first(self) -> tuple[int, int]:
        """Returns the budget of an epoch's first round, and what the rank accepts for the next, as `RoundStart` has them.

        Raises: as `ask`. Spec: R15.1, R15.4.
        """
        first = self.ask(0, self.budget_tokens)
        return first.offered_tokens, first.ask(0, first.tokens).offered_tokens

    def begin(self, accepted_tokens: int) -> Acceptance:
        """Returns it where a round began with ``accepted_tokens``: at the start of an epoch, or resumed. Spec: R15.5."""
        return replace(self, scheduled_tokens=accepted_tokens)
