"""Compares the samples that ranks train on with those there were, to find dropped tails, exchanged ids, and samples that a
resumed epoch repeats or skips.

Spec: R9.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from odb_ref.trace.check.verdict import Judgement, Property
from odb_ref.trace.origin import Lot, OwnedLot, make_lot, place_lot

NOTHING: Final = Lot()


class Account:
    """The samples that one rank trains on, without the steps before ``first_step``, which were trained on before."""

    def __init__(self, first_step: int = 0, sought: Iterable[int] = ()) -> None:
        self.first_step = first_step
        self.planned = NOTHING
        """The samples in planned steps, taken or not."""
        self.taken = NOTHING
        """The samples in steps taken."""
        self.set_aside = NOTHING
        self.furthest = -1
        """The furthest place set aside, of those that the number of samples bounds, or -1."""
        self.held = NOTHING
        """The samples read but not in a step when the trace ends."""
        self.is_ended = False
        """True when, at the end of the trace, all samples are read and the steps trained on before are planned again."""
        self.is_whole = False
        """True when the rank has completed the epoch."""
        self.placed = NOTHING
        """The samples read or set aside, by place."""
        self.is_placed = True
        """False when some of these places are not known."""
        self._next_place = 0
        self._bad: set[int] = set()
        """The places set aside that reading has not passed yet."""
        self._planned: deque[Lot] = deque()
        """The samples of each step planned but not taken."""
        self._sought = frozenset(sought)
        self.found: dict[int, Lot] = {}
        """The samples taken after each number of steps from which another trace resumes."""

    def __len__(self) -> int:
        return len(self._planned) + len(self._bad)

    def ask(self, first: int | None) -> None:
        """Notes a read request, and the first place if it names one."""
        self._next_place = self._next_place if first is None else first

    def read(self, ids: Iterable[int]) -> None:
        """Notes samples that were read. They are at the next places not set aside."""
        for id_ in ids:
            while self._next_place in self._bad:
                self._bad.remove(self._next_place)
                self._next_place += 1
            self.placed += place_lot((id_,), self._next_place)
            self._next_place += 1

    def plan(self, number: int, ids: Iterable[int]) -> None:
        """Notes a step that is planned."""
        lot = make_lot(ids) if number >= self.first_step else NOTHING
        self.planned += lot
        self._planned.append(lot)

    def take(self, number: int) -> None:
        """Notes that the step is taken."""
        if self._planned:
            self.taken += self._planned.popleft()
        if number + 1 in self._sought:
            self.found[number + 1] = self.taken

    def set_one_aside(self, id_: int, place: int | None, *, is_bounded: bool = True) -> None:
        """Notes a sample that is set aside. If ``is_bounded``, its place must be below the number of samples."""
        self.set_aside += make_lot((id_,))
        if place is None:
            self.is_placed = False
            return
        self._bad.add(place)
        self.furthest = max(self.furthest, place) if is_bounded else self.furthest
        self.placed += place_lot((id_,), place)

    def close(self, held: Iterable[int], planned_steps: int, *, is_read: bool) -> None:
        """Notes the end of the trace: the ids held but not in a step, and whether the source was read to its end."""
        self.is_ended = self.is_whole or (is_read and planned_steps >= self.first_step)
        if not self.is_whole:  # if it is whole, samples still held are missing from its steps
            self.held = make_lot(held)


def judge_inputs(
    inputs: Iterable[OwnedLot],
    before: Mapping[int | None, Lot],
    accounts: Mapping[int, Account],
    world_size: int,
    *,
    is_quota: bool,
) -> Iterator[tuple[int | None, Judgement]]:
    """Yields the judgements on an epoch, by rank: no more samples were trained on than there were. If all were read, they must
    be the samples there were, each at its place.
    """
    for part in inputs:
        ranks = [rank for rank in accounts if part.rank in (rank, None)]
        own = [accounts[rank] for rank in ranks]
        used = sum((before.get(rank, NOTHING) for rank in ranks), NOTHING)
        used += sum((account.planned + account.set_aside for account in own), NOTHING)
        found = used + sum((account.held for account in own), NOTHING)
        whose = "the ranks have" if part.rank is None else "it has"
        is_whole = all(account.is_whole for account in own)
        furthest = max((account.furthest for account in own), default=-1)
        if furthest >= part.lot.samples:
            what = f"{whose} set a sample aside at place {furthest} of {part.lot.samples}"
            yield part.rank, (Property.COVER, what)
        if used.samples > part.lot.samples:
            yield (
                part.rank,
                (Property.ONCE, (f"{whose} trained on {used.samples} samples, but there are only {part.lot.samples}")),
            )
        elif len(own) < (world_size if part.rank is None else 1) or not all(account.is_ended for account in own):
            continue
        else:
            what = f"{whose} {'trained on' if is_whole else 'read'} {found.samples} samples"
            placed = sum((account.placed for account in own), NOTHING)
            is_placed = part.order is not None and all(account.is_placed for account in own)
            if found.samples != part.lot.samples:
                what += f" of {part.lot.samples}"
            elif found != part.lot:
                what += ", but not the ones that there were"
            elif is_placed and placed.digest != part.order:
                what += ", but some of them at other places than their own"
            else:
                what = ""
            rest = Property.QUOTA if is_quota else Property.CONSERVE
            yield part.rank, (Property.COVER if is_whole else rest, what)
