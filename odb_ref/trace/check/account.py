"""What the ranks train on, against what there was: dropped tails, and samples that a resume repeats or skips. Spec: R9.6."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from odb_ref.trace.check.verdict import Judgement, Property
from odb_ref.trace.origin import Lot, OwnedLot, make_lot

NOTHING: Final = Lot()


class Account:
    """The samples that one rank trains on, those of the steps before ``first_step`` left out: they were trained on before."""

    __slots__ = ("_planned", "_sought", "first_step", "found", "planned", "set_aside", "taken")

    def __init__(self, first_step: int, sought: Iterable[int]) -> None:
        self.first_step = first_step
        self.planned = NOTHING
        """What is in the steps planned."""
        self.taken = NOTHING
        """What is in the steps taken."""
        self.set_aside = NOTHING
        self._planned: deque[Lot] = deque()
        """What is in each step planned and not taken."""
        self._sought = frozenset(sought)
        self.found: dict[int, Lot] = {}
        """What was taken when so many steps were, of those numbers that resumed traces go on from."""

    def __len__(self) -> int:
        return len(self._planned)

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

    def set_one_aside(self, id_: int) -> None:
        """Notes a sample that is set aside."""
        self.set_aside += make_lot((id_,))


def judge_inputs(
    inputs: Iterable[OwnedLot], before: Mapping[int | None, Lot], accounts: Mapping[int, Account]
) -> Iterator[tuple[int | None, Judgement]]:
    """Yields what is judged of an epoch that is complete in join mode, by rank: all there was is trained on, and once."""
    for part in inputs:
        ranks = accounts if part.rank is None else [rank for rank in accounts if rank == part.rank]
        lot = sum((accounts[rank].planned + accounts[rank].set_aside for rank in ranks), NOTHING)
        lot += sum((before.get(rank, NOTHING) for rank in ranks), NOTHING)
        whose = "the ranks have" if part.rank is None else "it has"
        if lot.samples > part.lot.samples:
            yield part.rank, (Property.ONCE, f"{whose} trained on {lot.samples} samples of {part.lot.samples}")
        elif lot.samples < part.lot.samples:
            yield part.rank, (Property.COVER, f"{whose} trained on {lot.samples} samples of {part.lot.samples}")
        else:
            what = f"{whose} trained on {lot.samples} samples, but others than there were"
            yield part.rank, (Property.COVER, what if lot != part.lot else "")
