"""Budgets that change during an epoch. Spec: R15.

The configuration's token budget is the maximum. Each rank offers the largest budget that it accepts, and the minimum over all
ranks becomes the budget of the next round's groups on every rank. A rank may accept another budget because it ran out of
memory (or has less than the others), because the user asked for it, or because a schedule does. The protocol need not know
why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from odb_ref.core.errors import RuleError, UsageError, read_integer
from odb_ref.core.offer import NONE

BudgetSchedule = Callable[[int, int], int]
"""A pure function from the number of planned steps and the budget in force to a token budget. Spec: R15.4."""


def compute_bounds_in_force(
    budget_tokens: int, limits: tuple[int, ...], agreed_tokens: int
) -> tuple[int, tuple[int, ...]]:
    """Returns the budget and the limits of a round's groups, given the largest ones and the agreed budget.

    A batch shrinks as a whole: every limit shrinks in proportion to the budget, rounded down, but not below 1. Spec: R15.1.
    """
    if agreed_tokens >= budget_tokens:
        return budget_tokens, limits
    return agreed_tokens, tuple([max(1, limit * agreed_tokens // budget_tokens) for limit in limits])


def compute_offered(tokens: int, budget_tokens: int) -> int:
    """Returns the offer of a rank that accepts ``tokens``, which is NONE if they are not below the largest budget.

    Raises: UsageError when ``tokens`` is less than 1. Spec: R15.2.
    """
    if tokens < 1:
        raise UsageError(f"a token budget must be at least 1, got {tokens}")
    return tokens if tokens < budget_tokens else NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What one rank accepts: the lesser of the last budget it was told and the last answer of its schedule. A value.

    A driver holds it, asks the schedule when R15.4 says so, and passes the result to the machine as `BudgetAccepted`. So a
    schedule's answer enters the same offer whatever the timing. The schedule's steps start at ``steps_before``, so that it can
    span several epochs. Spec: R15.2. Preserves: REPLAY.
    """

    budget_tokens: int
    """The configuration's budget, the largest possible."""
    schedule: BudgetSchedule | None = None
    told_tokens: int = NONE
    scheduled_tokens: int = NONE
    """The schedule's last answer. Without a schedule, what the rank accepted when resumed, until it is told otherwise."""
    steps_before: int = 0

    @property
    def tokens(self) -> int:
        """The budget that the rank accepts."""
        return min(self.budget_tokens, self.told_tokens, self.scheduled_tokens)

    @property
    def offered_tokens(self) -> int:
        """The same as the rank offers it, and as the machine holds it in ``accepted_tokens``."""
        return compute_offered(self.tokens, self.budget_tokens)

    def tell(self, tokens: int) -> Acceptance:
        """Returns the acceptance after the rank was told to accept ``tokens``."""
        scheduled = NONE if self.schedule is None else self.scheduled_tokens
        return replace(self, told_tokens=tokens, scheduled_tokens=scheduled)

    def ask(self, planned_steps: int, agreed_tokens: int) -> Acceptance:
        """Returns the acceptance after its schedule was asked, in a round with the agreed budget.

        Raises: RuleError when the schedule's answer is not an integer of at least 1. Spec: R15.4.
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
        """Returns the budget of an epoch's first round and the one accepted for the next, in the form `RoundStart` holds them.

        Raises: RuleError, as `ask` does. Spec: R15.1, R15.4.
        """
        first = self.ask(0, self.budget_tokens)
        return first.offered_tokens, first.ask(0, first.tokens).offered_tokens

    def begin(self, accepted_tokens: int) -> Acceptance:
        """Returns the acceptance at the start of an epoch, or of a resumed round, with ``accepted_tokens``. Spec: R15.5."""
        return replace(self, scheduled_tokens=accepted_tokens)
