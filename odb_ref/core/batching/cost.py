"""Costs: the time that training on a sample takes, while its tokens stand for the memory. Spec: R2.7.

A cost is a parameter, like the target rule. The budget stands for memory, so it bounds tokens, whatever the cost. The batches
of a step should take equally long, so steps are lined up, and groups split, by cost.
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
"""Maps a sample's tokens to its cost: an integer, which must not fall as the tokens rise."""

PROBES: Final = (1, 2, 1_000, 100_000)
"""Lengths whose costs enter the name of a user's cost, so that ranks notice when their functions differ."""

_ATTENTION: Final = "attention/"
_LONGEST_NUMBER: Final = 18
"""The most digits of a number in a name, because Python refuses to convert thousands of digits."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sample costs, given its tokens: at least 1. ``name`` enters the fingerprint, so ranks with different costs refuse
    to start.
    """

    name: str
    of_tokens: CostOfLength = field(compare=False, repr=False)


def _count(tokens: int) -> int:
    return tokens


def _attend(equal_tokens: int, tokens: int) -> int:
    return tokens + tokens**2 // equal_tokens


def _ask(function: CostOfLength, tokens: int) -> int:
    """Returns the cost as a Python ``int``, because integers of other libraries may overflow."""
    return operator.index(function(tokens))


TOKENS: Final = Cost("tokens", _count)
"""A sample costs as much as it has tokens."""


def make_attention_cost(equal_tokens: int) -> Cost:
    """Returns the cost ``tokens + tokens**2 // equal_tokens`` of a model with attention: in a sample of ``equal_tokens``,
    attention takes as long as all the rest.

    Raises: UsageError when ``equal_tokens`` is less than 1.
    """
    if equal_tokens < 1:
        raise UsageError(f"cost '{_ATTENTION}Q' needs a Q of at least 1, got {equal_tokens}")
    return Cost(f"{_ATTENTION}{equal_tokens}", partial(_attend, equal_tokens))


def make_own_cost(function: CostOfLength) -> Cost:
    """Returns the cost computed by ``function``. Its name ends in a digest of the function's values at `PROBES`.

    Raises: UsageError when the function raises, or its values are not integers of at least 1 that do not fall.
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
    """Returns the built-in cost called ``name``: ``tokens``, or ``attention/Q`` with a number Q.

    Raises: UsageError when no cost has that name.
    """
    if name == TOKENS.name:
        return TOKENS
    equal_tokens = name.removeprefix(_ATTENTION)
    if name.startswith(_ATTENTION) and equal_tokens.isdecimal() and len(equal_tokens) <= _LONGEST_NUMBER:
        return make_attention_cost(int(equal_tokens))
    raise UsageError(f"unknown cost {name!r}; use 'tokens' or 'attention/Q', with a number Q")


def choose_cost(cost: str | CostOfLength) -> Cost:
    """Returns the cost for a name or a user's function.

    Raises: UsageError when it is neither, or the function's values are not valid.
    """
    if isinstance(cost, str):
        return get_cost(cost)
    if not callable(cost):
        raise UsageError(f"cost must be 'tokens', 'attention/Q' or a function of the tokens, got {cost!r}")
    return make_own_cost(cost)
