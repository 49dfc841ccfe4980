"""What ranks post, and what they are answered: the combination of the posts of all ranks. Spec: R6.2 to R6.4."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from odb_ref.core.check.decode import Rows, get_offer
from odb_ref.core.check.verdict import Findings, Property
from odb_ref.core.offer import Offer
from odb_ref.core.trace import Json, JsonObject


class Kind(StrEnum):
    """The three exchanges of the protocol; each is numbered on its own."""

    OFFER = "offer"
    COUNTS = "counts"
    REPORT = "report"


class Exchange:
    """One exchange: who has posted, and what every rank must be answered."""

    __slots__ = ("agreement", "answer", "answered", "is_broken", "posted", "rows", "wire")

    def __init__(self) -> None:
        self.posted: dict[int, Json] = {}
        """Ranks that have posted; for a report, with it."""
        self.answered = 0
        self.is_broken = False
        """True when the posts do not fit together, so that no answer can be right."""
        self.answer: Json = None
        """The first answer; once it is known to be right, the others need only be equal to it."""
        self.agreement: Offer | None = None
        """The first answer to offers, decoded."""
        self.wire: tuple[int, ...] = ()
        self.rows: Rows = []


_EMPTY: Final = Exchange()


class Exchanges:
    """The exchanges under way. Forgets one when all ranks have their answer."""

    def __init__(self, world_size: int, findings: Findings) -> None:
        self._world_size = world_size
        self._findings = findings
        self._open: dict[tuple[Kind, int], Exchange] = {}
        self.first_round = 0
        """The round of the first exchange: not 0 in a resumed epoch. Exchanges are numbered from 0."""
        self.gone: set[int] = set()
        """Ranks whose trace has ended before they posted: their posts are unknown, not absent."""

    def get_missing(self, kind: Kind, number: int) -> set[int]:
        """The ranks, not known to be gone, that have not posted to an exchange."""
        return self._compute_missing(self._open.get((kind, number), _EMPTY))

    def post_offer(self, rank: int, number: int, offer: Offer) -> None:
        """Takes part in the reduction of offers."""
        exchange = self._post(Kind.OFFER, rank, number, None)
        wire = offer.to_wire()
        exchange.wire = tuple(map(max, exchange.wire, wire)) if exchange.wire else wire

    def post_counts(self, rank: int, number: int, rows: Rows) -> None:
        """Takes part in the sum of counts. ALIGN: all ranks post equally many."""
        exchange = self._post(Kind.COUNTS, rank, number, None)
        if len(exchange.posted) == 1:
            exchange.rows = [list(row) for row in rows]
            return
        self._findings.checked[Property.ALIGN] += 1
        if len(rows) != len(exchange.rows):
            exchange.is_broken = True
            what = f"posts counts of {len(rows)} steps, other ranks of {len(exchange.rows)}"
            self._findings.violate(Property.ALIGN, what, rank=rank, round_=self.first_round + number)
            return
        for total, row in zip(exchange.rows, rows, strict=True):
            total[0] += row[0]
            total[1] += row[1]
            total[2] += row[2]

    def post_report(self, rank: int, report: Json) -> None:
        """Takes part in the gathering of reports."""
        self._post(Kind.REPORT, rank, 0, report)

    def answer_offer(self, rank: int, number: int, event: JsonObject) -> tuple[Offer, bool]:
        """The agreement of ``event``; true when it is the combination of the offers of all ranks."""
        raw = event.get("agreement")
        exchange = self._open.setdefault((Kind.OFFER, number), Exchange())
        known = exchange.agreement if raw == exchange.answer else None
        agreement = known or get_offer(event, "agreement")
        is_right = self._answer(Kind.OFFER, rank, number, raw, lambda it: agreement.to_wire() == it.wire)
        exchange.agreement = agreement if raw == exchange.answer else exchange.agreement
        return agreement, is_right

    def answer_counts(self, rank: int, number: int, rows: Rows) -> bool:
        """True when ``rows`` is the sum of the counts of all ranks."""
        return self._answer(Kind.COUNTS, rank, number, rows, lambda it: rows == it.rows)

    def answer_reports(self, rank: int, reports: Json) -> bool:
        """True when ``reports`` are the reports of all ranks, by rank."""
        return self._answer(
            Kind.REPORT, rank, 0, reports, lambda it: reports == [report for _, report in sorted(it.posted.items())]
        )

    def _compute_missing(self, exchange: Exchange) -> set[int]:
        if len(exchange.posted) == self._world_size:
            return set()
        return set(range(self._world_size)) - exchange.posted.keys() - self.gone

    def _post(self, kind: Kind, rank: int, number: int, value: Json) -> Exchange:
        exchange = self._open.setdefault((kind, number), Exchange())
        exchange.posted[rank] = value
        return exchange

    def _answer(self, kind: Kind, rank: int, number: int, raw: Json, is_right: Callable[[Exchange], bool]) -> bool:
        exchange = self._open.setdefault((kind, number), Exchange())
        exchange.answered += 1
        if exchange.answered == self._world_size:
            del self._open[kind, number]
        missing = self._compute_missing(exchange)
        if missing:
            # An agreement without every rank's offer is a release without every rank's word that it is ready.
            property_ = Property.RELEASE if kind is Kind.OFFER else Property.EXCHANGE
            what = f"is answered exchange {number} of {kind}s before rank {min(missing)} has posted to it"
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
