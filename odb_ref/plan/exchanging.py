"""Planning on one rank: after one all-gather of a few integers, each rank divides its own samples. Spec: R13.11.

A rank's message holds the number of micro-batches it needs, its part of the totals, and the settings on which all must agree.
A rank that cannot plan reports the reason in the same message. Then every rank refuses with the same words, and none is left
waiting.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, SupportsIndex, TypeAlias, Unpack

from odb_ref.core.errors import PeerError, UsageError
from odb_ref.plan.division import Division, make_division
from odb_ref.plan.outcome import RankPlan, Totals, compute_totals, sum_totals
from odb_ref.plan.planning import list_indices, make_rank_plan
from odb_ref.plan.quality import compute_least_wait_of_ranks, make_report, sum_costs
from odb_ref.plan.terms import SETTINGS, Options, PlanTerms, Within, digest, make_terms, word_setting
from odb_ref.plan.units import Key, Samples, Units, make_samples, make_units, read_sums

Exchange: TypeAlias = Callable[[list[int]], Sequence[Sequence[int]]]
"""An all-gather: returns the list of each rank, by rank. All ranks pass lists of the same number of 64-bit integers."""

_FORMAT: Final = 4
"""The version of the message, so that ranks with different releases do not misread each other."""
_HEAD: Final = 8
"""The format, 1 if the rank cannot plan, the need, the least, the number of units, their cost, and two fingerprints."""
MESSAGE_SIZE: Final = 40
"""The number of integers in a message, which is always the same. A rank that cannot plan writes the reason after the second."""
_LARGEST: Final = 2**63 - 1
_BYTES: Final = 7
"""The bytes of text that an integer holds."""
_PRIME: Final = 2**61 - 1
"""Fingerprints are less than this."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank knows before the exchange."""

    terms: PlanTerms
    samples: Samples
    division: Division
    totals: Totals
    sums: Mapping[Key, int]
    """The supervised tokens of each key, over all ranks if its samples may be on several."""
    fingerprints: tuple[int, int]
    """If they may, that of ``sums``, and that of the keys' supervised tokens on this rank alone."""

    def to_message(self) -> list[int]:
        division = self.division
        cost = sum_costs(division.units, self.terms)
        head = [_FORMAT, 0, division.need, division.least, len(division.units), cost, *self.fingerprints]
        found = [*head, *self.totals.to_row(), *self.terms.to_row()]
        if max(map(abs, found)) > _LARGEST:
            raise UsageError("a number of this plan exceeds 64 bits")
        return found + [0] * (MESSAGE_SIZE - len(found))


def plan_rank(
    lengths: Iterable[SupportsIndex],
    *,
    exchange: Exchange | None = None,
    supervised: Iterable[SupportsIndex] | None = None,
    together: Iterable[Key] | None = None,
    group_supervised: Mapping[Key, int] | None = None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None = None,
    **terms: Unpack[Options],
) -> RankPlan:
    """Returns this rank's micro-batches. Every rank must call it, and gets the same number of them.

    ``exchange`` is called once with `MESSAGE_SIZE` integers and returns those of all ranks, by rank. Without it, this rank is
    the only one. The other arguments, and the result, are those of `plan_ranks` for this rank alone. If keys of ``together``
    may be on several ranks (``within="step"``), ``group_supervised`` maps every key of the step to its supervised tokens over
    all ranks, and is the same on all. Ranks compare its keys by their ``repr``.

    Raises: UsageError, on every rank and with the same message, when one rank's values are not valid, two ranks' terms differ,
    or the terms cannot be met. PeerError when the exchange returns anything but the ranks' messages. Spec: R13.11.
    """
    own: _Own | None = None
    error: Exception | None = None
    try:
        own = _prepare(lengths, (supervised, together, uses), group_supervised, terms)
        message = own.to_message()
    except Exception as raised:  # also from a user's cost function, because the other ranks wait for this message
        error = raised
        why = str(raised) if isinstance(raised, UsageError) else f"{type(raised).__name__}: {raised}"
        message = [_FORMAT, 1, *_write_text(why)]
    messages = [message] if exchange is None else _read_messages(exchange([*message]), message)
    failed = next(((rank, row) for rank, row in enumerate(messages) if row[1]), None)
    if failed is not None or own is None:
        rank, row = failed or (0, message)
        raise UsageError(f"rank {rank}: {_read_text(row[2:])}") from error
    _check_terms(messages)
    count = own.terms.round_up(max(row[2] for row in messages))
    own.terms.check_spares([row[4] for row in messages])
    own.terms.check_count(count, [row[4] for row in messages])
    totals = sum_totals(Totals.from_row(row[_HEAD : _HEAD + 6]) for row in messages)
    if own.terms.within is Within.STEP:
        _check_groups(messages)
        totals = replace(totals, groups=own.totals.groups)
    least = own.terms.round_up(max(row[3] for row in messages))
    least_wait = compute_least_wait_of_ranks([row[5] for row in messages])
    return make_rank_plan(
        (own.samples, own.division.units),
        list_indices(own.division.units, own.division.divide(count), own.terms.order),
        totals,
        make_report(own.terms, totals, (count, least), (None, least_wait)),
        own.sums,
    )


def _prepare(
    lengths: Iterable[SupportsIndex],
    columns: tuple[Iterable[SupportsIndex] | None, Iterable[Key] | None, Mapping[str, Iterable[SupportsIndex]] | None],
    group_supervised: Mapping[Key, int] | None,
    options: Options,
) -> _Own:
    terms = make_terms(options)
    samples = make_samples(lengths, *columns, terms)
    sums: Mapping[Key, int] = samples.sum_by_key()
    totals = compute_totals(samples)
    fingerprints = (0, 0)
    if (terms.within is Within.STEP) != (group_supervised is not None):
        raise UsageError("group_supervised and within='step' need each other: it says what the keys have on all ranks")
    if group_supervised is not None:
        told = read_sums("group_supervised", group_supervised)
        for key, tokens in sums.items():
            if not tokens <= told.get(key, -1):
                raise UsageError(f"key {key!r} has {tokens} supervised tokens here, more than group_supervised says")
        fingerprints = (_make_fingerprint(told), _make_fingerprint(sums))
        sums = told
        totals = replace(totals, groups=sum(map(bool, sums.values())))
    units: Units = make_units(samples, range(len(samples.lengths)), terms)
    return _Own(terms, samples, make_division(units, terms), totals, sums, fingerprints)


def _make_fingerprint(sums: Mapping[Key, int]) -> int:
    """Returns a number for the tokens of each key. If the sums of ranks are added up, so are their numbers, modulo `_PRIME`."""
    return sum(digest(repr(key)) * tokens for key, tokens in sums.items()) % _PRIME


def _read_messages(given: Sequence[Sequence[int]], own: Sequence[int]) -> list[list[int]]:
    try:
        messages = [[*map(operator.index, row)] for row in given]  # numbers of a library would overflow in weights
    except TypeError:
        messages = []  # no list of lists of integers
    if own not in messages:
        raise PeerError(
            "the exchange did not give back what this rank gave: it must return the message of each rank, by rank"
        )
    for rank, row in enumerate(messages):
        if len(row) != MESSAGE_SIZE or row[0] != _FORMAT:
            raise PeerError(
                f"rank {rank} sent no message of a plan of this format ({_FORMAT}): one release on all ranks"
            )
    return messages


def _check_groups(messages: Sequence[Sequence[int]]) -> None:
    """Raises UsageError if the ``group_supervised`` of a rank is not the sum of what the ranks' samples have, key by key."""
    whole = sum(row[7] for row in messages) % _PRIME
    for rank, row in enumerate(messages):
        if row[6] != whole:
            raise UsageError(
                f"group_supervised of rank {rank} is not the sum of what the samples of all ranks have, key by key (keys are "
                "compared by their repr)"
            )


def _write_text(text: str) -> list[int]:
    """Returns a text as integers, as much of it as there is room for."""
    room = _BYTES * (MESSAGE_SIZE - 2)
    data = text.encode(errors="replace")[:room].ljust(room, b"\0")
    return [int.from_bytes(data[place : place + _BYTES], "big") for place in range(0, room, _BYTES)]


def _read_text(row: Sequence[int]) -> str:
    data = b"".join(value.to_bytes(_BYTES, "big") for value in row)
    return data.rstrip(b"\0").decode(errors="ignore")


def _check_terms(messages: Sequence[Sequence[int]]) -> None:
    for place, name in enumerate(SETTINGS, _HEAD + 6):
        first = messages[0][place]
        for rank, row in enumerate(messages):
            if row[place] != first:
                here, there = word_setting(name, first), word_setting(name, row[place])
                raise UsageError(f"{name} differs: {here} on rank 0, {there} on rank {rank}")
