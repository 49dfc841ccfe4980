"""What ranks post, and what they are answered: the combination of the posts of all ranks. Spec: R6.2 to R6.4."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from itertools import count
from typing import Final

from odb_ref.core.offer import Offer
from odb_ref.trace.check.decode import Rows, TracedReport, get_offer
from odb_ref.trace.check.verdict import Findings, Property
from odb_ref.trace.format import JsonObject


class Kind(StrEnum):
    """The three exchanges of the protocol; each is numbered on its own."""

    OFFER = "offer"
    COUNTS = "counts"
    REPORT = "report"


ANSWERS: Final = {"agreed": Kind.OFFER, "counted": Kind.COUNTS, "reported": Kind.REPORT}
"""Events that answer an exchange."""


class Exchange:
    """One exchange: who has posted, and what every rank must be answered."""

    __slots__ = ("answer", "answered", "is_broken", "posted", "rows", "wants", "wire")

    def __init__(self) -> None:
        self.posted: dict[int, bytes] = {}
        """Ranks that have posted; for a report, with its digest."""
        self.answered = 0
        self.is_broken = False
        """True when the posts do not fit together, so that no answer can be right."""
        self.answer: Offer | Rows | bytes | None = None
        """The first answer; once it is known to be right, the others need only be equal to it."""
        self.wire: tuple[int, ...] = ()
        self.rows: Rows = []
        self.wants: dict[int, int] = {}


_EMPTY: Final = Exchange()
_KEPT: Final = 8
"""How many exchanges of a kind are kept: in a right trace no rank is more than one ahead of another."""


class Exchanges:
    """The exchanges under way. Forgets one when all ranks have their answer, and those that were left behind."""

    def __init__(self, world_size: int, findings: Findings) -> None:
        self._world_size = world_size
        self._findings = findings
        self._open: dict[tuple[Kind, int], Exchange] = {}
        self.first_round = 0
        """The round of the first exchange: not 0 in a resumed epoch. Exchanges are numbered from 0."""
        self.gone: set[int] = set()
        """Ranks whose trace has ended before they posted: their posts are unknown, not absent."""

    def is_missing(self, kind: Kind, number: int) -> bool:
        """Returns True when a rank that is not known to be gone has not posted to an exchange."""
        return self._is_missing(self._open.get((kind, number), _EMPTY))

    def list_missing(self, kind: Kind, number: int) -> set[int]:
        """Returns the ranks, not known to be gone, that have not posted to an exchange."""
        return set(range(self._world_size)) - self._open.get((kind, number), _EMPTY).posted.keys() - self.gone

    def post_offer(self, rank: int, number: int, offer: Offer) -> None:
        """Takes part in the reduction of offers."""
        exchange = self._post(Kind.OFFER, rank, number)
        wire = offer.to_wire()
        exchange.wire = tuple(map(max, exchange.wire, wire)) if exchange.wire else wire

    def post_counts(self, rank: int, number: int, rows: Rows, wanted: int | None) -> None:
        """Takes part in the sum of counts. ALIGN: all ranks post equally many."""
        exchange = self._post(Kind.COUNTS, rank, number)
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
        """Takes part in the gathering of reports."""
        self._post(Kind.REPORT, rank, 0, _digest(report))

    def answer_offer(self, rank: int, number: int, event: JsonObject) -> tuple[Offer, bool]:
        """Returns the agreement of ``event``; true when it is the combination of the offers of all ranks."""
        # Decoded each time: JSON's false is equal to 0, and is not an integer.
        agreement = get_offer(event, "agreement")
        is_right = self._answer(Kind.OFFER, rank, number, agreement, lambda it: agreement.to_wire() == it.wire)
        return agreement, is_right

    def answer_counts(self, rank: int, number: int, rows: Rows, wants: list[int]) -> bool:
        """Returns True when ``rows`` is the sum of the counts of all ranks, and ``wants`` what they want, by rank."""
        answer = [*rows, wants]
        return self._answer(
            Kind.COUNTS, rank, number, answer, lambda it: rows == it.rows and wants == _list_by_rank(it.wants)
        )

    def answer_reports(self, rank: int, reports: list[TracedReport]) -> bool:
        """Returns True when ``reports`` are the reports of all ranks, by rank."""
        answer = b"".join(map(_digest, reports))
        return self._answer(
            Kind.REPORT, rank, 0, answer, lambda it: answer == b"".join(item for _, item in sorted(it.posted.items()))
        )

    def _get(self, kind: Kind, number: int) -> Exchange:
        exchange = self._open.get((kind, number))
        if exchange is None:
            exchange = self._open[kind, number] = Exchange()
            self._open.pop((kind, number - _KEPT), None)
        return exchange

    def _is_missing(self, exchange: Exchange) -> bool:
        if len(exchange.posted) == self._world_size:
            return False
        return not self.gone or len(exchange.posted.keys() | self.gone) < self._world_size

    def _post(self, kind: Kind, rank: int, number: int, value: bytes = b"") -> Exchange:
        exchange = self._get(kind, number)
        exchange.posted[rank] = value
        return exchange

    def _answer(
        self, kind: Kind, rank: int, number: int, raw: Offer | Rows | bytes, is_right: Callable[[Exchange], bool]
    ) -> bool:
        exchange = self._get(kind, number)
        exchange.answered += 1
        if exchange.answered == self._world_size:
            del self._open[kind, number]
        if self._is_missing(exchange):
            # An agreement without every rank's offer is a release without every rank's word that it is ready.
            property_ = Property.RELEASE if kind is Kind.OFFER else Property.EXCHANGE
            first = next(item for item in count() if item not in exchange.posted and item not in self.gone)
            what = f"is answered exchange {number} of {kind}s before rank {first} has posted to it"
            self._findings.violate(property_, what, rank=rank, round_=self.first_round + number)
            return True
        if exchange.is_broken:
            return True
        if exchange.answer is not None and exchange.answer == raw:
            return True
        if len(exchange.posted) < self._world_size:
            # A rank is gone, so what it posted is unknown; the others must still be told the same.
            is_same = exchange.answer is None
            exchange.answer = raw if is_same else exchange.answer
            return is_same
        if not is_right(exchange):
            return False
        exchange.answer = raw
        return True


def _list_by_rank(wants: dict[int, int]) -> list[int]:
    return [want for _, want in sorted(wants.items())]


def _digest(report: TracedReport) -> bytes:
    """Returns a digest: a cause may be long, and the reports of all ranks are kept."""
    return hashlib.blake2b(repr(report).encode(), digest_size=16).digest()
