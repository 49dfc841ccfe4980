"""The samples one rank has read and not yet put into a step. Spec: R2.3, R5.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from odb_ref.trace.check.decode import Rows, Settings
from odb_ref.trace.check.own.draws import DrawnPlaces, RankDraws
from odb_ref.trace.check.own.offers import compare_window
from odb_ref.trace.check.own.updates import RankUpdates
from odb_ref.trace.check.verdict import Judgement, Property


class Input:
    """Follows the samples of one rank until they are in a step. ``places`` are those of a common order drawn by any rank."""

    def __init__(self, rank: int, settings: Settings, places: DrawnPlaces) -> None:
        self._settings = settings
        self.read_samples = 0
        self.seen_samples = 0
        """The samples read, or carried into a resumed epoch: all that this trace can emit."""
        self.is_ended = self._is_full = False
        self._open_samples = 0
        """The number of samples still to come from the last read."""
        self.held: dict[int, list[int]] = {}
        """The samples read and not yet in a step, by position, oldest first."""
        self.draws = RankDraws(rank, settings, places)
        self.updates = RankUpdates(rank, settings)
        self._skipped: list[range] = []
        """The positions that the reads left out; empty in a correct trace."""
        self._new_samples = self._asked_samples = 0
        """The samples read, and requested, since the last offer."""
        self.marks = Counter[int]()
        """``read_samples`` at the agreement of each round, or 0 if the trace does not have it."""

    @property
    def size(self) -> int:
        """How much is remembered, in samples and similar items. Spec: R9.5."""
        return len(self.held) + len(self._skipped) + len(self.marks)

    @property
    def is_open(self) -> bool:
        """True while a read is open."""
        return self._open_samples > 0

    @property
    def open_samples(self) -> int:
        """The number of samples still to come from the open read."""
        return self._open_samples

    def begin(self) -> None:
        """Begins an epoch."""
        self.draws.begin()
        self.is_ended = self.draws.has_ended

    def resume(self, rows: Rows, read_samples: int, marks: dict[int, int], *, is_ended: bool) -> Iterator[Judgement]:
        """Begins at a saved round, with the samples carried into it. Yields the judgements on them."""
        yield from self._judge_costs(rows)
        self.read_samples, self.is_ended = read_samples, is_ended or self.draws.has_ended
        self.seen_samples = len(rows)
        self.held = {row[1]: row for row in rows}
        self.marks = Counter(marks)

    def ask(self, count: int, first: int | None, round_: int) -> Iterator[Judgement]:
        """Notes a read request. Yields the judgements on it."""
        yield from self.updates.judge_read(count, first, round_)
        what = "reads while a read is open" if self.is_open else ""
        # The last share of a common order is read when its end is already known.
        if self.is_ended and not self.draws.is_shared:
            what = "reads, though its source has ended"
        yield Property.EXCHANGE, what
        self._open_samples = self._asked_samples = count
        yield from self.draws.note_read(count, first)

    def read(self, rows: Rows, *, is_ended: bool, is_full: bool) -> Iterator[Judgement]:
        """Notes samples that were read. Yields the judgements on them."""
        yield from self._judge_costs(rows)
        for row in rows:
            position = row[1]
            if position < self.read_samples:
                yield Property.ONCE, f"reads position {position} again"
                continue
            if position > self.read_samples:
                yield Property.CONSERVE, f"reads position {position} after {self.read_samples} samples: a gap"
                self._skipped.append(range(self.read_samples, position))
            self.read_samples = position + 1
            self.seen_samples += 1
            self._new_samples += 1
            self.held[position] = row
        left = self._open_samples - len(rows)
        what = "reads more samples than it asked for" if self.is_open else "reads, but has not asked"
        yield Property.CONSERVE, "" if self.is_open and left >= 0 else what
        self.is_ended, self._is_full = self.draws.has_ended if self.draws.is_shared else is_ended, is_full
        self._open_samples = 0 if is_ended or is_full else left

    def judge_window(self, round_: int) -> Iterator[Judgement]:
        """Yields the judgements on the window when it is offered."""
        yield from self.draws.judge_offer(len(self.held), self._open_samples)
        size: int | None = self._settings.compute_window_samples(round_)
        if self.updates.size is not None:
            size = len(self.updates.compute_places(round_))
        read = (self._new_samples, self._asked_samples, None if self.draws.is_shared else size)
        is_full = self._is_full and (bool(self.held) or self.updates.size is not None)
        if what := compare_window(len(self.held), *read, is_ended=self.is_ended, is_full=is_full):
            yield Property.REPLAY, what

    def offer(self) -> None:
        """Notes that the window is offered. Samples read from now on belong to the next."""
        self._new_samples = self._asked_samples = 0

    def mark(self, round_: int) -> None:
        """Notes that a round is agreed on."""
        self.marks[round_] = self.read_samples
        self.marks.pop(round_ - self._settings.max_age_rounds - 2, None)

    def get_mark(self, round_: int) -> int:
        """Returns the position before which samples are of ``round_`` or an older round; 0 in updates, which ignore age."""
        return self.marks[round_] if self.updates.size is None else 0

    def note_wants(self, wants: list[int], round_: int) -> Iterator[Judgement]:
        """Notes what all ranks want for a round. Yields the judgements on it."""
        yield from self.draws.note_wants(wants, round_)
        self.is_ended = self.draws.has_ended or self.is_ended

    def list_window(self, round_: int) -> Rows:
        """Returns the samples held from the window of ``round_``, from which groups are formed."""
        if not self.updates.forms_steps(round_):
            return []
        return [row for position, row in self.held.items() if position < self.marks[round_]]

    def was_read(self, position: int) -> bool:
        """Returns True when the sample at ``position`` was read, or lies before the start of a resumed epoch."""
        return position < self.read_samples and not any(position in gap for gap in self._skipped)

    def _judge_costs(self, rows: Rows) -> Iterator[Judgement]:
        limits = len(self._settings.limits)
        if not set(map(len, rows)) <= {4 + limits}:
            yield Property.BUDGET, f"has a sample with more or fewer costs than there are limits, {limits}"
