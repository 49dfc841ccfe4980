"""All answers of a rule at once: it is run on symbols in place of numbers, once along each path through it.

A rule in the `language` only computes with numbers and compares them. So it can be given `Number`s, which record what is
computed. A comparison takes one of its outcomes that an agreement can lead to, and the other in a later run. What holds of the
recorded expressions under the conditions of each path then holds of every agreement, and Z3 proves it or finds an agreement of
which it does not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from odb_ref.core.offer import NONE, Offer
from odb_ref.extras import require

require("judging a rule", "z3", extra="verify")
import z3  # noqa: E402  # the line above says how to install it

MOST_PATHS: Final = 1_000
LIMIT_S: Final = 20.0
"""The time for one question to Z3, in seconds. Only those about products and quotients of unknown numbers take long."""
MOST_S: Final = 60.0
"""The time for all paths through one computation, in seconds."""
_MOST_BITS: Final = 4_096
_FIELDS: Final = tuple(item.name for item in fields(Offer))
_SMALL: Final = ("samples_max", "groups_max", "samples_min", "groups_min", "due_max", "round_max", "budget_min")
"""The fields whose numbers are made small, in this order."""
VARIABLES: Final = {name: z3.Int(name) for name in _FIELDS}


class UndecidedError(Exception):
    """Z3 did not decide a question, or something cannot be followed. The message says what."""


def list_conditions() -> list[z3.BoolRef]:
    """Returns what holds of every agreement about which a rule is asked: some rank holds a sample, and none has failed.

    The most groups are at most the most samples, the fewest groups of ranks that still read are at most the most groups, and no
    more groups are due than there are.
    """
    of = VARIABLES
    return [
        *(
            of[name] == value
            for name, value in (("ready_min", 1), ("failed_rank", NONE), ("stop_step", NONE), ("stop_rank", NONE))
        ),
        *(of["round_min"] == of["round_max"], of["fingerprint_min"] == of["fingerprint_max"]),
        *(of[name] >= 0 for name in ("round_min", "fingerprint_min", "samples_min", "due_max")),
        *(of[name] >= 1 for name in ("groups_max", "budget_min")),
        *(of[name] < NONE for name in ("round_max", "fingerprint_max", "samples_max")),
        *(
            of["samples_min"] <= of["samples_max"],
            of["groups_max"] <= of["samples_max"],
            of["due_max"] <= of["groups_max"],
        ),
        z3.Or(of["groups_min"] == NONE, z3.And(of["groups_min"] >= 1, of["groups_min"] <= of["groups_max"])),
        of["budget_min"] <= NONE,
    ]


class Paths:
    """The paths through a computation on an agreement, in turn."""

    def __init__(self) -> None:
        self._conditions: list[z3.BoolRef] = []
        """What holds of every agreement that leads along the path."""
        self._taken: list[tuple[bool, bool]] = []
        """For each comparison of this run, its outcome, and whether the other one is still to be followed."""
        self._place = 0
        self._end_s = time.monotonic() + MOST_S

    def check_time(self) -> None:
        """Raises: UndecidedError when all of this takes too long."""
        if time.monotonic() > self._end_s:
            raise UndecidedError(f"it takes more than {MOST_S:g} s to follow it")

    def _solve(self, *more: z3.BoolRef, limit_s: float | None = None) -> tuple[z3.CheckSatResult, z3.Solver]:
        # A new solver each time, because one that can take conditions back reasons less about products.
        solver = z3.Solver()
        solver.set("timeout", int(1_000 * (limit_s or LIMIT_S)))
        solver.add(*self._conditions, *more)
        return solver.check(), solver

    def decide(self, condition: z3.BoolRef) -> bool:
        """Returns an outcome of a comparison that some agreement leads to, and adds it to the conditions of the path."""
        if self._place == len(self._taken):
            self.check_time()
            can_hold, can_fail = (self._solve(one)[0] != z3.unsat for one in (condition, z3.Not(condition)))
            self._taken.append((can_hold, can_hold and can_fail))
        outcome, _ = self._taken[self._place]
        self._place += 1
        self._conditions.append(condition if outcome else z3.Not(condition))
        return outcome

    def follow(self, compute: Callable[[Offer], object]) -> Iterator[object]:
        """Yields what each path computes, or the exception that it raises.

        Raises: UndecidedError when there are too many, or a path does what cannot be followed.
        """
        agreement = Offer(**{name: Number(self, term) for name, term in VARIABLES.items()})  # type: ignore[arg-type]
        for _ in range(MOST_PATHS):
            self._place = 0
            self._conditions = list_conditions()
            try:
                yield compute(agreement)
            except UndecidedError:
                raise
            except Exception as error:  # what the rule raises
                yield error
            while self._taken and not self._taken[-1][1]:
                self._taken.pop()
            if not self._taken:
                return
            self._taken[-1] = not self._taken[-1][0], False
        raise UndecidedError(f"it has more than {MOST_PATHS:,} paths")

    def find_agreement(self, *wanted: Truth | bool, is_small: bool = False) -> Offer | None:
        """Returns an agreement that leads along this path and meets one of the conditions. If ``is_small``, each of its numbers
        is the least, given those before it.

        Raises: UndecidedError when there may be one.
        """
        conditions = [z3.Or(*(z3.BoolVal(one) if isinstance(one, bool) else one.condition for one in wanted))]
        found, solver = self._solve(*conditions)
        if found == z3.unknown:
            raise UndecidedError(f"Z3 does not decide within {LIMIT_S:g} s whether some agreement leads there")
        if found == z3.unsat:
            return None
        numbers = _read_numbers(solver)
        for name in _SMALL if is_small else ():
            low = 0
            while low < numbers[name] and time.monotonic() < self._end_s:
                middle = (low + numbers[name]) // 2
                found, solver = self._solve(*conditions, VARIABLES[name] <= middle, limit_s=1.0)
                if found == z3.sat:
                    numbers = _read_numbers(solver)
                else:
                    low = middle + 1
            conditions.append(VARIABLES[name] == numbers[name])
        return Offer(**numbers)


def _read_numbers(solver: z3.Solver) -> dict[str, int]:
    model = solver.model()
    return {name: model.eval(term, model_completion=True).as_long() for name, term in VARIABLES.items()}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Number:  # noqa: PLW1641  # equality is recorded, not known
    """An integer that depends on the agreement."""

    paths: Paths
    term: z3.ArithRef

    def _lift(self, other: object) -> z3.ArithRef:
        match other:
            case Number(_, term):
                return term
            case int() if other.bit_length() <= _MOST_BITS:
                return z3.IntVal(int(other))
            case int():
                raise UndecidedError(f"it computes with a number of {other.bit_length():,} bits")
        raise UndecidedError(f"it computes with {other!r}, which is not an integer")

    def _make(self, term: z3.ArithRef) -> Number:
        self.paths.check_time()
        return Number(self.paths, term)

    def __add__(self, other: object) -> Number:
        return self._make(self.term + self._lift(other))

    def __sub__(self, other: object) -> Number:
        return self._make(self.term - self._lift(other))

    def __rsub__(self, other: object) -> Number:
        return self._make(self._lift(other) - self.term)

    def __mul__(self, other: object) -> Number:
        return self._make(self.term * self._lift(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __divmod__(self, other: object) -> tuple[Number, Number]:
        divisor = self._lift(other)
        if self.paths.decide(divisor == 0):
            raise ZeroDivisionError("division by zero")
        # Z3 rounds so that the remainder is not negative, Python so that it has the divisor's sign.
        quotient = z3.If(divisor > 0, self.term / divisor, (-self.term) / (-divisor))
        return self._make(quotient), self._make(self.term - divisor * quotient)

    def __rdivmod__(self, other: object) -> tuple[Number, Number]:
        return self._make(self._lift(other)).__divmod__(self)

    def __floordiv__(self, other: object) -> Number:
        return self.__divmod__(other)[0]

    def __mod__(self, other: object) -> Number:
        return self.__divmod__(other)[1]

    def __rfloordiv__(self, other: object) -> Number:
        return self.__rdivmod__(other)[0]

    def __rmod__(self, other: object) -> Number:
        return self.__rdivmod__(other)[1]

    def __pow__(self, exponent: int) -> Number:
        power = self._make(z3.IntVal(1))
        for _ in range(exponent):
            power = power * self
        return power

    def __lshift__(self, bits: int) -> Number:
        return self * (1 << bits)

    def __rshift__(self, bits: int) -> Number:
        return self // (1 << bits)

    def bit_length(self) -> int:
        """Returns the number of bits, which is another one on each path."""
        low, high = 0, _MOST_BITS
        while low < high:
            middle = (low + high) // 2
            if abs(self) < 1 << middle:
                high = middle
            else:
                low = middle + 1
        if low == _MOST_BITS:
            raise UndecidedError("it asks for the bit_length() of a large number")
        return low

    def __neg__(self) -> Number:
        return self._make(-self.term)

    def __pos__(self) -> Number:
        return self._make(self.term)

    def __invert__(self) -> Number:
        return self._make(-self.term - 1)

    def __abs__(self) -> Number:
        return self._make(z3.If(self.term < 0, -self.term, self.term))

    def _compare(self, condition: z3.BoolRef) -> Truth:
        return Truth(self.paths, z3.If(condition, z3.IntVal(1), z3.IntVal(0)), condition)

    def __lt__(self, other: object) -> Truth:
        return self._compare(self.term < self._lift(other))

    def __le__(self, other: object) -> Truth:
        return self._compare(self.term <= self._lift(other))

    def __gt__(self, other: object) -> Truth:
        return self._compare(self.term > self._lift(other))

    def __ge__(self, other: object) -> Truth:
        return self._compare(self.term >= self._lift(other))

    def __eq__(self, other: object) -> Truth | bool:  # type: ignore[override]  # a comparison is decided later
        return self._compare(self.term == self._lift(other)) if isinstance(other, int | Number) else False

    def __ne__(self, other: object) -> Truth | bool:  # type: ignore[override]
        return self._compare(self.term != self._lift(other)) if isinstance(other, int | Number) else True

    def __bool__(self) -> bool:
        return self.paths.decide(self.term != 0)

    def __index__(self) -> int:
        raise UndecidedError("it uses a number of the agreement as an index")

    def __repr__(self) -> str:
        raise UndecidedError("it writes a number of the agreement")

    def __format__(self, form: str) -> str:
        raise UndecidedError("it writes a number of the agreement")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Truth(Number):
    """A truth value that depends on the agreement. As in Python, it is a number too."""

    condition: z3.BoolRef

    def __bool__(self) -> bool:
        return self.paths.decide(self.condition)

    def __index__(self) -> int:
        return int(bool(self))
