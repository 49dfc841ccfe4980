"""Budgets that change: what bounds the groups of a round. Spec: R15.

The configuration's token budget is the largest there is. Below it, each rank offers the largest that it accepts, and the least
of all ranks' is the budget of the next round's groups, on every rank: an agreement, as the number of steps is one. A rank says
that it accepts another budget because it ran out of memory (or has less than the others), because somebody tells it to, or
because a schedule says so; the protocol need not know why.
"""

from __future__ import annotations

from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE


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
