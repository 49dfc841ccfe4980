"""Budgets that change: what bounds the groups of a round. Spec: R15.

The configuration's token budget is the largest there is. Below it, each rank offers the largest that it accepts, and the least
of all ranks' is the budget of the next round's groups, on every rank: an agreement, as the number of steps is one. A rank says
that it accepts another budget because it ran out of memory (or has less than the others), because somebody tells it to, or
because a schedule says so; the protocol need not know why.
"""

from __future__ import annotations

from collections.abc import Callable

from odb_ref.core.errors import RuleError, UsageError
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


class Acceptance:
    """What one rank accepts: the least of what it was told last and of what its schedule has answered last.

    The machine is told by `BudgetAccepted`; a driver holds this, and asks it at the moments of R15.4, so that what a schedule
    says is in the same offer whatever the timing. Steps are counted from ``steps_before`` on, for a schedule that goes over
    several epochs. Spec: R15.2. Preserves: REPLAY.
    """

    __slots__ = ("_budget_tokens", "_schedule", "_scheduled_tokens", "_steps_before", "_told_tokens")

    def __init__(
        self,
        budget_tokens: int,
        schedule: BudgetSchedule | None = None,
        *,
        told_tokens: int | None = None,
        steps_before: int = 0,
    ) -> None:
        self._budget_tokens = self._scheduled_tokens = budget_tokens
        self._told_tokens = budget_tokens if told_tokens is None else told_tokens
        self._schedule = schedule
        self._steps_before = steps_before

    @property
    def tokens(self) -> int:
        """The budget that the rank accepts."""
        return min(self._budget_tokens, self._told_tokens, self._scheduled_tokens)

    def tell(self, tokens: int) -> int:
        """Notes what the rank is told; returns what it accepts."""
        self._told_tokens = tokens
        return self.tokens

    def compute_first(self) -> tuple[int, int]:
        """Returns the budget of an epoch's first round, and what the rank accepts for the next, as `RoundStart` has them.

        Raises: as `find_change`. Spec: R15.1, R15.4.
        """
        first = self._ask(0, self._budget_tokens)
        return compute_offered(first, self._budget_tokens), compute_offered(self._ask(0, first), self._budget_tokens)

    def begin(self, accepted_tokens: int) -> int | None:
        """Goes on where a round began with ``accepted_tokens``: returns what the rank accepts, None where it is that."""
        self._scheduled_tokens = accepted_tokens
        return self._find(accepted_tokens)

    def find_change(self, planned_steps: int, agreed_tokens: int, accepted_tokens: int) -> int | None:
        """Asks the schedule, and returns what the rank accepts now; None when its machine knows, by its ``accepted_tokens``.

        Raises: RuleError when the schedule does not answer with a number of tokens. Spec: R15.4.
        """
        self._ask(planned_steps, min(agreed_tokens, self._budget_tokens))
        return self._find(accepted_tokens)

    def _find(self, accepted_tokens: int) -> int | None:
        return None if compute_offered(self.tokens, self._budget_tokens) == accepted_tokens else self.tokens

    def _ask(self, planned_steps: int, current: int) -> int:
        if self._schedule is not None:
            step = self._steps_before + planned_steps
            answer = self._schedule(step, current)
            if type(answer) is not int or answer < 1:
                raise RuleError(f"the budget schedule answered {answer!r}, at step {step} and {current} tokens")
            self._scheduled_tokens = answer
        return self.tokens
