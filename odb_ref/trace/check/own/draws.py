"""What ranks draw from a common order, recomputed from what all ranks want by their traces. Spec: R14."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from odb_ref.trace.check.decode import Rows, Settings
from odb_ref.trace.check.own.updates import share_portion
from odb_ref.trace.check.verdict import Judgement, Property


class DrawnPlaces:
    """The places of the common order drawn by any rank, as merged ranges."""

    __slots__ = ("_begins", "_ends")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int) -> bool:
        """Adds the places from ``begin`` to ``end``. Returns False when some were there already."""
        index = bisect_right(self._begins, begin)
        is_new = (index == 0 or self._ends[index - 1] <= begin) and (
            index == len(self._begins) or end <= self._begins[index]
        )
        last = index
        if index and self._ends[index - 1] >= begin:
            index -= 1
            begin = self._begins[index]
        while last < len(self._begins) and self._begins[last] <= end:
            last += 1
        end = max([end, *self._ends[index:last]])
        self._begins[index:last], self._ends[index:last] = [begin], [end]
        return is_new

    def find_missing(self, begin: int, end: int) -> int | None:
        """Returns the first missing place from ``begin`` to ``end``, or None if all are there."""
        index = bisect_right(self._begins, begin)
        covered = self._ends[index - 1] if index else begin
        return None if covered >= end else max(begin, covered)


class RankDraws:
    """What one rank draws. ``places`` are those drawn by all ranks. If the rank has its own source, it draws nothing."""

    def __init__(self, rank: int, settings: Settings, places: DrawnPlaces) -> None:
        self._rank = rank
        self._settings = settings
        self._places = places
        self._total = settings.shared_samples
        self._wanted: int | None = None
        self._left = 0
        """The number of places left when the want was posted."""
        self.first = 0
        """The first place of the common order that may be drawn in this trace."""
        self.drawn = 0
        """The number of places all ranks have drawn so far."""
        self._expected: tuple[int, int] | None = None
        """The read that must come next: the first place, and the number of places."""

    @property
    def is_shared(self) -> bool:
        """True when the ranks share an order."""
        return self._total is not None

    @property
    def has_ended(self) -> bool:
        """True when the common order has ended."""
        return self.drawn == self._total

    def begin(self, round_: int = 0) -> None:
        """Begins an epoch, or an update of it. All ranks want the first window, and none holds a sample."""
        if self._total is not None:
            self.first = self.drawn = min(
                self._total, round_ // self._settings.rounds * (self._settings.update_samples or 0)
            )
            self._draw([self._settings.compute_window_samples(0)] * self._settings.world_size, self._total, round_)

    def resume(self, first: int, count: int, drawn: int, round_: int) -> Iterator[Judgement]:
        """Begins ``round_`` with the rank's draw for it; all ranks have drawn ``drawn`` places. Yields the judgement.
        Spec: R14.6.
        """
        if self._total is None:
            return
        is_begin = round_ == 0 or (self._settings.update_samples and round_ % self._settings.rounds == 0)
        is_first = first == count == drawn == 0 and bool(is_begin)
        is_possible = 0 <= first <= first + count <= drawn <= self._total and (drawn > 0 or is_first)
        what = f"is resumed in round {round_} with {count} places from {first} on, {drawn} of {self._total} drawn"
        yield Property.DEAL, "" if is_possible else what
        if is_first:
            self.begin(round_)
        else:
            self._expected, self.drawn, self.first = (first, count) if count else None, drawn, first

    def note_want(self, wanted: int | None) -> Iterator[Judgement]:
        """Notes the want that the rank posts. Yields a violation if a want is missing or out of place."""
        self._wanted, self._left = wanted, (self._total or 0) - self.drawn
        if (wanted is not None) != self.is_shared:
            yield Property.DEAL, f"posts that it wants {wanted}, but the ranks share {self._total} samples"

    def judge_want(self, window: Rows, carried: Rows, round_: int) -> Iterator[Judgement]:
        """Yields the judgement on the posted want, once the rows of ``window`` ``carried`` into ``round_`` are known.
        Spec: R14.2.
        """
        if self._total is None:
            return
        tokens, kept = (sum(row[2] for row in rows) for rows in (window, carried))
        held = -(-len(window) * kept // tokens) if tokens else 0
        size = self._settings.compute_window_samples(round_)
        if self._settings.is_packed:
            for_each = -(-self._left // self._settings.world_size)
            size = size if for_each >= size else max(for_each, size - size // 2)
        wanted = max(0, size - held) if self._left else 0
        what = f"wants {self._wanted} samples; what it carries leaves room for {wanted}"
        if self._settings.update_samples is not None:
            wanted = kept if self._left else 0
            what = f"says that it has {self._wanted} tokens of the update, but has {wanted}"
        yield Property.DEAL, what if self._wanted != wanted else ""

    def note_wants(self, wants: list[int], round_: int) -> Iterator[Judgement]:
        """Notes what all ranks want for a round, and hence the draw. Yields the judgements. Spec: R14.3."""
        if self._total is None:
            yield Property.DEAL, f"is told of wants {wants}, but each rank has its own source" if wants else ""
            return
        if len(wants) != self._settings.world_size or min(wants) < 0:
            yield Property.DEAL, f"is told of {len(wants)} wants, of {self._settings.world_size} ranks"
            return
        what = f"is told that it wants {wants[self._rank]}, but has said {self._wanted}"
        yield Property.DEAL, what if wants[self._rank] != self._wanted else ""
        if not self.has_ended:
            self._draw(wants, self._total, round_)

    def _draw(self, wants: Sequence[int], total: int, round_: int) -> None:
        left = total - self.drawn
        if self._settings.update_samples is not None:
            if round_ % self._settings.rounds == 0:
                return  # the first round of an update draws nothing
            wants, left = share_portion(wants, self.drawn, total, round_, self._settings)
        shares = share_out(wants, left)
        first = self.drawn + sum(shares[: self._rank])
        self.drawn += sum(shares)
        self._expected = (first, shares[self._rank]) if shares[self._rank] else None

    def note_read(self, count: int, first: int | None) -> Iterator[Judgement]:
        """Notes a read request. Yields the judgements on it. Spec: R14.4."""
        expected, self._expected = self._expected, None
        if first is None or self._total is None:
            if (first is None) == (self.is_shared or self._settings.update_samples is not None):
                yield Property.DEAL, f"reads {count} samples from {first} on, but the ranks share {self._total}"
            return
        share = "nothing" if expected is None else f"{expected[1]} from {expected[0]} on"
        yield (
            Property.DEAL,
            "" if (first, count) == expected else f"reads {count} places from {first} on; its share is {share}",
        )
        is_new = self._places.add(first, first + count)
        yield (
            Property.ONCE,
            "" if is_new else f"reads places of the common order that are drawn: {first} to {first + count}",
        )

    def judge_offer(self, held: int, left: int) -> Iterator[Judgement]:
        """Yields the judgements when the rank offers ``held`` samples, with ``left`` of its draw unread. Spec: R14.4, R14.5."""
        if not self.is_shared:
            return
        share = self._expected
        yield Property.DEAL, "" if share is None else f"has not read its share, {share[1]} from {share[0]} on"
        is_possible = left <= 0 and (held > 0 or self.has_ended or self._settings.update_samples is not None)
        yield (
            Property.DEAL,
            "" if is_possible else f"offers {held} samples with {left} of its share unread, but the order continues",
        )


def share_out(wants: Sequence[int], left: int) -> list[int]:
    """Returns how many of ``left`` places each rank draws. Spec: R14.3.

    It is independent of the core's code: it lowers the greatest wants to one level until enough is cut off.
    """
    if sum(wants) <= left:
        return list(wants)
    level, taken = 0, 0
    ordered = sorted(wants, reverse=True)
    for count, (want, lower) in enumerate(zip(ordered, [*ordered[1:], 0], strict=True), 1):
        if taken + count * (want - lower) > left:
            level = want - (left - taken) // count
            break
        taken += count * (want - lower)
    shares = [max(0, want - level) for want in wants]
    spare = left - sum(shares)
    for rank in [rank for rank, want in enumerate(wants) if want >= level][:spare]:
        shares[rank] += 1
    return shares
