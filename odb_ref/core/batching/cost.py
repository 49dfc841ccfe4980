"""Costs: what training on a sample takes, in time, where its tokens say what it takes in memory. Spec: R2.7.

A cost is a parameter, as the target rule is. The budget bounds tokens, whatever the cost: it stands for memory. What meets in a
step should take equally long, so steps are lined up, and groups split, by cost.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, TypeAlias

from odb_ref.core.errors import UsageError, read_integer

CostOfLength: TypeAlias = Callable[[int], int]
"""What a sample of so many tokens costs: an integer, no less for a longer one."""

PROBES: Final = (1, 2, 1_000, 100_000)
"""Lengths by whose costs two ranks tell that their cost functions differ."""

_ATTENTION: Final = "attention/"
_LONGEST_NUMBER: Final = 18
"""Digits of a number in a name: Python refuses to read some thousands of them."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sample costs, by its tokens, at least 1; its name enters the fingerprint, so ranks with different costs refuse to
    start.
    """

    name: str
    of_tokens: CostOfLength = field(compare=False, repr=False)


def _count(tokens: int) -> int:
    return tokens


def _attend(equal_tokens: int, tokens: int) -> int:
    return tokens + tokens**2 // equal_tokens


def _ask(function: CostOfLength, tokens: int) -> int:
    """Returns the cost as one of Python's integers, for those of other libraries overflow."""
    return operator.index(function(tokens))


TOKENS: Final = Cost("tokens", _count)
"""A sample costs its tokens."""


def make_attention_cost(equal_tokens: int) -> Cost:
    """Returns what a model with attention costs: ``tokens + tokens**2 // equal_tokens``, so that attention takes as long as all
    the rest in a sample of ``equal_tokens``.

    Raises: UsageError when that is less than 1.
    """
    if equal_tokens < 1:
        raise UsageError(f"cost '{_ATTENTION}Q' needs a Q of at least 1, got {equal_tokens}")
    return Cost(f"{_ATTENTION}{equal_tokens}", partial(_attend, equal_tokens))


def make_own_cost(function: CostOfLength) -> Cost:
    """Returns the cost that ``function`` gives; its name ends in a digest of some of its values, so that it tells what differs.

    Raises: UsageError when a value makes no sense.
    """
    try:
        answers = [function(tokens) for tokens in PROBES]
    except Exception as error:
        raise UsageError(f"cost must give integers for {PROBES} tokens: {type(error).__name__}: {error}") from error
    costs = [cost for answer in answers if (cost := read_integer(answer)) is not None]
    if len(costs) < len(PROBES) or costs[0] < 1 or any(more < less for less, more in pairwise(costs)):
        raise UsageError(
            f"cost gives {answers} for {PROBES} tokens: expected integers of at least 1 that do not decrease"
        )
    own = function if all(type(answer) is int for answer in answers) else partial(_ask, function)
    digest = hashlib.blake2b(repr(costs).encode(), digest_size=7).hexdigest()
    return Cost(f"{getattr(function, '__name__', type(function).__name__)}/{digest}", own)


def get_cost(name: str) -> Cost:
    """Returns the cost that ships under ``name``: ``tokens``, or ``attention/Q`` with a number Q.

    Raises: UsageError when there is none.
    """
    if name == TOKENS.name:
        return TOKENS
    equal_tokens = name.removeprefix(_ATTENTION)
    if name.startswith(_ATTENTION) and equal_tokens.isdecimal() and len(equal_tokens) <= _LONGEST_NUMBER:
        return make_attention_cost(int(equal_tokens))
    raise UsageError(f"unknown cost {name!r}; use 'tokens' or 'attention/Q', with a number Q")


def choose_cost(cost: str | CostOfLength) -> Cost:
    """Returns the cost of a name, or of a user's function.

    Raises: UsageError when it is neither, or a value makes no sense.
    """
    if isinstance(cost, str):
        return get_cost(cost)
    if not callable(cost):
        raise UsageError(f"cost must be 'tokens', 'attention/Q' or a function of the tokens, got {cost!r}")
    return make_own_cost(cost)
