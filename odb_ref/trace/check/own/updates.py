"""What an optimizer update of a fixed number of samples must hold, recomputed from the configuration. Spec: R16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from odb_ref.trace.check.decode import Rows, Settings
from odb_ref.trace.check.verdict import Judgement, Property


class RankUpdates:
    """What one rank reads and emits of each update. Without updates it judges nothing."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self._rank = rank
        self._settings = settings
        self.size = settings.update_samples
        """The number of samples of an update, or None without updates."""

    def forms_steps(self, round_: int) -> bool:
        """Returns True when a round is the last of its update, or without updates. Spec: R16.3."""
        return (round_ + 1) % self._settings.rounds == 0

    def compute_places(self, round_: int) -> range:
        """Returns the places of the rank's own source that it reads for a round. Spec: R16.2."""
        size, ranks, update = self.size or 0, self._settings.world_size, round_ // self._settings.rounds
        begin, end = (len(range(self._rank, end * size, ranks)) for end in (update, update + 1))
        return range(begin, end if self.forms_steps(round_) else begin)

    def judge_read(self, count: int, first: int | None, round_: int) -> Iterator[Judgement]:
        """Yields the judgement on a read from the rank's own source."""
        if self.size is None or self._settings.shared_samples is not None:
            return
        places = self.compute_places(round_)
        is_right = (first, count) == (places.start, len(places))
        what = (
            f"reads {count} places from {first} on for round {round_}; its part is {len(places)} from {places.start} on"
        )
        yield Property.UPDATE, "" if is_right else what

    def judge_steps(self, posted: int, most_groups: int, round_: int) -> Iterator[Judgement]:
        """Yields the judgements on the number of steps of a round in which no rank has more than ``most_groups`` groups."""
        is_right = posted >= most_groups and (posted > 0) == (most_groups > 0)
        yield (
            Property.UPDATE,
            "" if is_right else f"{posted} steps for {most_groups} groups: an update is emitted whole",
        )
        is_early = posted and not self.forms_steps(round_)
        yield Property.UPDATE, "an update is emitted before all of it is drawn" if is_early else ""

    def judge_carried(self, held: Iterable[int], read_samples: int, round_: int) -> Iterator[Judgement]:
        """Yields the judgement on the positions still held after a round, at whose agreement ``read_samples`` were read."""
        if self.size is None or not self.forms_steps(round_):
            return
        late = [position for position in held if position < read_samples]
        what = f"carries {len(late)} samples over the end of an update: position {', '.join(map(str, late[:5]))}"
        yield Property.UPDATE, what if late else ""

    def judge_round(self, counted: Rows) -> Iterator[Judgement]:
        """Yields the judgement on a round's sums over all ranks."""
        samples = sum(row[0] for row in counted)
        if self.size is not None:
            yield Property.UPDATE, "" if samples <= self.size else f"an update of {samples} samples, not of {self.size}"


def share_portion(
    loads: Sequence[int], drawn: int, total: int, round_: int, settings: Settings
) -> tuple[list[int], int]:
    """Returns what the ranks want of the portion drawn for a round, and the size of the portion. Spec: R16.4."""
    size = settings.update_samples or 0
    begin = min(total, round_ // settings.rounds * size)
    left = min(begin + size, total) - drawn
    portion = left if (round_ + 1) % settings.rounds == 0 else -(-2 * left // 3)
    tokens = sum(loads)
    held = [load * (drawn - begin) // tokens if tokens else 0 for load in loads]
    return [max(held) - own + portion for own in held], portion
