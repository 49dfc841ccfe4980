"""Planning on one rank: one all-gather of a few integers, after which each rank divides its own samples. Spec: R13.11.

The message says how many micro-batches the rank needs, what all ranks' totals are made of, and what all must agree on.
A rank that cannot plan says so, and why, in the same message: every rank then refuses, with the same words, and none is
left waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeAlias, Unpack

from odb_ref.core.errors import PeerError, UsageError
from odb_ref.plan.division import Division, make_division
from odb_ref.plan.outcome import RankPlan, Totals, compute_totals, sum_totals
from odb_ref.plan.planning import list_indices, make_rank_plan
from odb_ref.plan.terms import SETTINGS, Options, PlanTerms, Reason, Refusal, Within, make_terms, word_setting
from odb_ref.plan.units import Key, Samples, Units, make_samples, make_units

Exchange: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]
"""Returns what each rank gave, by rank: an all-gather of equally many integers of 64 bits from each."""

_FORMAT: Final = 1
"""What the message looks like: ranks with different releases must not misread each other."""
_REASONS: Final = (None, *Reason)
_HEAD: Final = 8
"""The format, the reason with its three values, the need, the least, and the number of units."""
MESSAGE_SIZE: Final = _HEAD + 6 + len(SETTINGS)
"""Integers of a message: always as many."""
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank knows before it hears of the others."""

    terms: PlanTerms
    samples: Samples
    division: Division
    totals: Totals

    def to_message(self) -> list[int]:
        head = [_FORMAT, 0, 0, 0, 0, self.division.need, self.division.least, len(self.division.units)]
        return [*head, *self.totals.to_row(), *self.terms.to_row()]


def plan_rank(
    lengths: Iterable[SupportsIndex],
    *,
    exchange: Exchange | None = None,
    supervised: Iterable[SupportsIndex] | None = None,
    together: Iterable[Key] | None = None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None = None,
    **terms: Unpack[Options],
) -> RankPlan:
    """Returns this rank's micro-batches, as many as every other rank has; all ranks must call it.

    ``exchange`` is called once, with `MESSAGE_SIZE` integers, and returns those of all ranks, by rank; without it this
    rank is the only one. The other arguments are those of `plan_ranks`, of this rank alone, and so is what comes back.

    Raises: on every rank, and with the same message, UsageError when one rank's values make no sense, two ranks' terms
    differ, or they cannot be met: PeerError when the exchange answers anything but messages. Spec: R13.11.
    """
    own: _Own | None = None
    error: Exception | None = None
    message = [_FORMAT, 1, *[0] * (MESSAGE_SIZE - 2)]
    try:
        own = _prepare(lengths, supervised, together, uses, terms)
        found = own.to_message()
        if max(map(abs, found)) > _LARGEST:
            raise UsageError("a number of this plan exceeds 64 bits")
        message = found
    except Refusal as raised:
        error = raised
        values = (*raised.values, 0, 0, 0)[:3]
        if max(map(abs, values)) <= _LARGEST:
            message[1:5] = [_REASONS.index(raised.reason), *values]
    except Exception as raised:  # also what a cost function raises: the others wait for this message
        error = raised
    messages = [message] if exchange is None else [[*row] for row in exchange([*message])]
    _check_messages(messages, message)
    failed = next(((rank, row) for rank, row in enumerate(messages) if row[1]), None)
    if failed is not None or own is None:
        raise UsageError(_word_failure(*failed) if failed is not None else str(error)) from error
    _check_terms(messages)
    count = own.terms.round_up(max(row[5] for row in messages))
    own.terms.check_count(count, [row[7] for row in messages])
    return make_rank_plan(
        own.samples,
        list_indices(own.division.units, own.division.divide(count), own.terms.order),
        sum_totals(Totals.from_row(row[_HEAD : _HEAD + 6]) for row in messages),
        own.terms.round_up(max(row[6] for row in messages)),
        own.samples.sum_by_key(),
    )


def _prepare(
    lengths: Iterable[SupportsIndex],
    supervised: Iterable[SupportsIndex] | None,
    together: Iterable[Key] | None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None,
    options: Options,
) -> _Own:
    terms = make_terms(options)
    if together is not None and terms.within is Within.STEP:
        raise UsageError("within='step' needs one place that knows all keys: plan_all or plan_ranks")
    samples = make_samples(lengths, supervised, together, uses, terms)
    units: Units = make_units(samples, range(len(samples.lengths)), terms)
    return _Own(terms, samples, make_division(units, terms), compute_totals(samples))


def _check_messages(messages: Sequence[Sequence[int]], own: Sequence[int]) -> None:
    if own not in messages:
        raise PeerError(
            "the exchange did not give back what this rank gave: it must return the message of each rank, by rank"
        )
    for rank, row in enumerate(messages):
        if len(row) != MESSAGE_SIZE or row[0] != _FORMAT:
            raise PeerError(
                f"rank {rank} sent no message of a plan of this format ({_FORMAT}): one release on all ranks"
            )


def _word_failure(rank: int, message: Sequence[int]) -> str:
    reason = _REASONS[message[1]] or Reason.OTHER
    return f"rank {rank}: {reason.format(*message[2:5])}"


def _check_terms(messages: Sequence[Sequence[int]]) -> None:
    for place, name in enumerate(SETTINGS, MESSAGE_SIZE - len(SETTINGS)):
        first = messages[0][place]
        for rank, row in enumerate(messages):
            if row[place] != first:
                here, there = word_setting(name, first), word_setting(name, row[place])
                raise UsageError(f"{name} differs: {here} on rank 0, {there} on rank {rank}")
