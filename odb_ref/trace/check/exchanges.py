"""Checks that every answer of an exchange is the combination of the posts of all ranks. Spec: R6.2, R6.3, R6.4."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from itertools import count
from operator import ge
from typing import Final

from odb_ref.core.offer import Offer
from odb_ref.trace.check.decode import Rows, TracedReport, get_offer
from odb_ref.trace.check.verdict import Findings, Property
from odb_ref.trace.format import JsonObject


class ExchangeKind(StrEnum):
    """The three kinds of exchange, each numbered separately."""

    OFFER = "offer"
    COUNTS = "counts"
    REPORT = "report"


ANSWERS: Final = {"agreed": ExchangeKind.OFFER, "counted": ExchangeKind.COUNTS, "reported": ExchangeKind.REPORT}
"""The events that answer an exchange."""


class OneExchange:
    """One exchange: the posts so far, and the answer that every rank must get."""

    __slots__ = ("answer", "answered", "is_broken", "posted", "rows", "wants", "wire")

    def __init__(self) -> None:
        self.posted: dict[int, bytes] = {}
        """The ranks that have posted; a report's digest is the value."""
        self.answered = 0
        self.is_broken = False
        """True when the posts do not fit together, so that no answer can be right."""
        self.answer: Offer | Rows | bytes | None = None
        """The first right answer, which the others only need to equal."""
        self.wire: tuple[int, ...] = ()
        self.rows: Rows = []
        self.wants: dict[int, int] = {}


_EMPTY: Final = OneExchange()
_KEPT: Final = 8
"""The number of exchanges kept of each kind. In a correct trace no rank is more than one ahead of another."""


class Exchanges:
    """The exchanges under way. An exchange is forgotten once all ranks have their answer, or when it is far behind."""

    def __init__(self, world_size: int, findings: Findings, *, peers: int = 1) -> None:
        self._world_size = world_size
        self._has_others = peers > 1
        """True when each rank has peers whose traces are not among these. Spec: R17.5."""
        self._findings = findings
        self._open: dict[tuple[ExchangeKind, int], OneExchange] = {}
        self.first_round = 0
        """The round of the first exchange, which a resumed epoch does not begin at 0. Exchanges are numbered from 0."""
        self.gone: set[int] = set()
        """Ranks whose traces ended before they posted, so that their missing posts count as unknown."""

    def is_missing(self, kind: ExchangeKind, number: int) -> bool:
        """Returns True when a rank not known to be gone has not posted to an exchange."""
        return self._is_missing(self._open.get((kind, number), _EMPTY))

    def list_missing(self, kind: ExchangeKind, number: int) -> set[int]:
        """Returns the ranks, not known to be gone, that have not posted to an exchange."""
        return set(range(self._world_size)) - self._open.get((kind, number), _EMPTY).posted.keys() - self.gone

    def post_offer(self, rank: int, number: int, offer: Offer) -> None:
        """Adds a rank's offer to the reduction."""
        exchange = self._post(ExchangeKind.OFFER, rank, number)
        wire = offer.to_wire()
        exchange.wire = tuple(map(max, exchange.wire, wire)) if exchange.wire else wire

    def post_counts(self, rank: int, number: int, rows: Rows, wanted: int | None) -> None:
        """Adds a rank's counts to the sum. Judges ALIGN: all ranks must post the same number of steps."""
        exchange = self._post(ExchangeKind.COUNTS, rank, number)
        if wanted is not None:
            exchange.wants[rank] = wanted
        if len(exchange.posted) == 1:
            exchange.rows = [list(row) for row in rows]
            return
        self._findings.checked[Property.ALIGN] += 1
        if list(map(len, rows)) != list(map(len, exchange.rows)):
            exchange.is_broken = True
            what = f"posts counts of {len(rows)} steps, other ranks of {len(exchange.rows)}"
            if len(rows) == len(exchange.rows):
                what = "posts counts of other resources than other ranks"
            self._findings.violate(Property.ALIGN, what, rank=rank, round_=self.first_round + number)
            return
        for total, row in zip(exchange.rows, rows, strict=True):
            for place, value in enumerate(row):
                total[place] += value

    def post_report(self, rank: int, report: TracedReport) -> None:
        """Adds a rank's report to those gathered."""
        self._post(ExchangeKind.REPORT, rank, 0, _digest(report))

    def answer_offer(self, rank: int, number: int, event: JsonObject) -> tuple[Offer, bool]:
        """Returns the agreement in ``event``, and whether it is the combination of the offers of all ranks."""
        # Decoded for each rank, because JSON's false equals 0 but is not an integer.
        agreement = get_offer(event, "agreement")
        wire = agreement.to_wire()

        def is_combination(exchange: OneExchange) -> bool:
            if self._has_others or self._is_partial(exchange):
                return all(
                    map(ge, wire, exchange.wire)
                )  # unknown posts can only raise it: offers are a join-semilattice
            return wire == exchange.wire

        is_right = self._answer(ExchangeKind.OFFER, rank, number, agreement, is_combination)
        return agreement, is_right

    def answer_counts(self, rank: int, number: int, rows: Rows, wants: list[int]) -> bool:
        """Returns True when ``rows`` is the sum of the counts of all ranks, and ``wants`` holds what each posted, by rank."""
        answer = [*rows, wants]

        def is_sum(exchange: OneExchange) -> bool:
            if not self._is_partial(exchange):
                return rows == exchange.rows and wants == [want for _, want in sorted(exchange.wants.items())]
            is_whole = len(wants) == (self._world_size if exchange.wants else 0)
            return (
                list(map(len, rows)) == list(map(len, exchange.rows))
                and all(all(map(ge, *both)) for both in zip(rows, exchange.rows, strict=True))
                and is_whole
                and all(wants[poster] == want for poster, want in exchange.wants.items())
            )

        return self._answer(ExchangeKind.COUNTS, rank, number, answer, is_sum)

    def answer_reports(self, rank: int, reports: list[TracedReport]) -> bool:
        """Returns True when ``reports`` are the reports of all ranks, by rank."""
        digests = list(map(_digest, reports))

        def is_complete(exchange: OneExchange) -> bool:
            posted = [item for _, item in sorted(exchange.posted.items())]
            is_partial = self._has_others or self._is_partial(exchange)
            return set(posted) <= set(digests) if is_partial else posted == digests

        return self._answer(ExchangeKind.REPORT, rank, 0, b"".join(digests), is_complete)

    def _get(self, kind: ExchangeKind, number: int) -> OneExchange:
        exchange = self._open.get((kind, number))
        if exchange is None:
            exchange = self._open[kind, number] = OneExchange()
            self._open.pop((kind, number - _KEPT), None)
        return exchange

    def _is_partial(self, exchange: OneExchange) -> bool:
        """Returns True when a rank's post is unknown because the rank is gone. The known posts still bound the answer."""
        return len(exchange.posted) < self._world_size

    def _is_missing(self, exchange: OneExchange) -> bool:
        if not self._is_partial(exchange):
            return False
        return not self.gone or len(exchange.posted.keys() | self.gone) < self._world_size

    def _post(self, kind: ExchangeKind, rank: int, number: int, value: bytes = b"") -> OneExchange:
        exchange = self._get(kind, number)
        exchange.posted[rank] = value
        return exchange

    def _answer(
        self,
        kind: ExchangeKind,
        rank: int,
        number: int,
        raw: Offer | Rows | bytes,
        is_right: Callable[[OneExchange], bool],
    ) -> bool:
        exchange = self._get(kind, number)
        exchange.answered += 1
        if exchange.answered == self._world_size:
            del self._open[kind, number]
        if self._is_missing(exchange):
            # An agreement without every rank's offer would release steps that some rank has not declared ready.
            property_ = Property.RELEASE if kind is ExchangeKind.OFFER else Property.EXCHANGE
            first = next(item for item in count() if item not in exchange.posted and item not in self.gone)
            what = f"is answered exchange {number} of {kind}s before rank {first} has posted to it"
            self._findings.violate(property_, what, rank=rank, round_=self.first_round + number)
            return True
        if exchange.is_broken:
            return True
        if exchange.answer is not None:
            return exchange.answer == raw  # all ranks must get the same answer
        if not is_right(exchange):
            return False
        exchange.answer = raw
        return True


def _digest(report: TracedReport) -> bytes:
    """Returns a digest to keep instead of the report, whose cause may be long."""
    return hashlib.blake2b(repr(report).encode(), digest_size=16).digest()
