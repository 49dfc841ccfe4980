"""What a rank accepts as its token budget: what it was told, and what its schedule says. Spec: R15.2, R15.4.

Not a part of the machine, which is told by `BudgetAccepted`: every driver holds one of these, and asks it at the same two
moments, so that what a schedule says is in the same offer whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable

from odb_ref.core.batching.budgets import compute_offered
from odb_ref.core.config import Config
from odb_ref.core.errors import RuleError
from odb_ref.core.events import BudgetAccepted
from odb_ref.core.offer import NONE
from odb_ref.core.state import State

BudgetSchedule = Callable[[int, int], int]
"""Returns a token budget, told how many steps are planned and which budget is in force: a pure function. Spec: R15.4."""


class Acceptance:
    """What one rank accepts: the least of what it was told last and of what its schedule has answered last.

    Steps are counted from ``steps_before`` on, for a schedule that goes over several epochs. Preserves: REPLAY.
    """

    __slots__ = ("_budget_tokens", "_schedule", "_scheduled_tokens", "_steps_before", "_told_tokens")

    def __init__(
        self,
        config: Config,
        schedule: BudgetSchedule | None = None,
        *,
        told_tokens: int | None = None,
        steps_before: int = 0,
    ) -> None:
        self._budget_tokens = self._scheduled_tokens = config.budget_tokens
        self._told_tokens = config.budget_tokens if told_tokens is None else told_tokens
        self._schedule = schedule
        self._steps_before = steps_before

    def compute_first(self) -> int:
        """Returns the budget of an epoch's first round, as `RoundStart.agreed_tokens` has it.

        Raises: as `find_change`. Spec: R15.1.
        """
        self._ask(0, NONE)
        return compute_offered(self._accepted_tokens, self._budget_tokens)

    def tell(self, tokens: int) -> BudgetAccepted:
        """Notes what the rank is told; returns what to tell its machine."""
        self._told_tokens = tokens
        return BudgetAccepted(self._accepted_tokens)

    def find_change(self, state: State) -> BudgetAccepted | None:
        """Asks the schedule, and returns what the machine in this ``state`` must be told; None when it knows.

        To be called when the machine has begun, and each time it has handled ``Counted``, before anything is collated.

        Raises: RuleError when the schedule does not answer with a number of tokens. Spec: R15.4.
        """
        self._ask(state.planned_steps, state.agreed_tokens)
        is_known = compute_offered(self._accepted_tokens, self._budget_tokens) == state.accepted_tokens
        return None if is_known else BudgetAccepted(self._accepted_tokens)

    @property
    def _accepted_tokens(self) -> int:
        return min(self._budget_tokens, self._told_tokens, self._scheduled_tokens)

    def _ask(self, planned_steps: int, agreed_tokens: int) -> None:
        if self._schedule is None:
            return
        step, current = self._steps_before + planned_steps, min(agreed_tokens, self._budget_tokens)
        answer = self._schedule(step, current)
        if type(answer) is not int or answer < 1:
            raise RuleError(f"the budget schedule answered {answer!r}, at step {step} and {current} tokens")
        self._scheduled_tokens = answer
