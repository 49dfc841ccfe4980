"""What each rank trains on in each step, kept on request for a few ranks, so that a page can draw it.

`Fill` listens to a run, whichever way it is simulated. `Fill.build` then returns a `FillMap` of bounded size: at most
`MOST_RANKS` ranks, at most `MOST_CELLS` batches, and at most `MOST_LENGTHS` lengths of each. A longer epoch shows its
beginning, its middle and its end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from odb_sim.engine.updates import Booleans
from odb_sim.inputs.costs import Seconds
from odb_sim.inputs.lengths import Integers

MOST_RANKS: Final = 64
MOST_CELLS: Final = 6_000
MOST_LENGTHS: Final = 10
_STRETCHES: Final = 3
_MILLISECONDS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBatch:
    """The batch of one rank in one step. All fields of an idle one are 0."""

    samples: int
    real: int
    padded: int
    lengths: tuple[int, ...]
    """The longest lengths, at most `MOST_LENGTHS`, falling."""
    wait_ms: float = 0.0
    """How long the rank waits for the slowest after it has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One step."""

    step: int
    round: int
    waited_for: int | None
    """The rank that all others wait for, or None if they do not wait or it is unknown."""
    cells: tuple[FilledBatch, ...]
    """One for each rank of the map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillMap:
    """Some batches of a run, by rank and step, with the size of the whole run."""

    label: str
    budget_tokens: int
    is_lowered: bool
    """True if another budget was in force at times."""
    ranks: tuple[int, ...]
    columns: tuple[Column, ...]
    ranks_total: int
    steps_total: int

    def shorten(self, cells: int) -> FillMap:
        """Returns the map with at most ``cells`` cells, but at least one column."""
        kept = choose_steps(len(self.columns), max(1, cells // len(self.ranks)))
        return replace(self, columns=tuple(self.columns[place] for place in kept))


def choose_ranks(ranks: int, most: int = MOST_RANKS, also: Collection[int] = ()) -> tuple[int, ...]:
    """Returns at most ``most`` ranks: those in ``also``, and others evenly spread."""
    if ranks <= most:
        return tuple(range(ranks))
    wanted = sorted(also)[:most]
    spread = [place * (ranks - 1) // max(1, most - 1) for place in range(most)]
    others = [rank for rank in spread if rank not in wanted]
    return tuple(sorted([*wanted, *others[: most - len(wanted)]]))


def choose_steps(steps: int, most: int) -> list[int]:
    """Returns at most ``most`` of ``steps`` steps: all, or some at the start, in the middle and at the end."""
    if steps <= most:
        return list(range(steps))
    part = most // _STRETCHES
    if not part:
        return list(range(steps - most, steps))
    middle = (steps - part) // 2
    return [*range(part), *range(middle, middle + part), *range(steps - part, steps)]


@dataclass(frozen=True, slots=True)
class _Row:
    """What one rank trains on in some steps: an integer for each step, and the lengths of all samples, step by step."""

    samples: Integers
    real: Integers
    padded: Integers
    lengths: Integers

    def build_cell(self, step: int, wait_s: float) -> FilledBatch:
        begin = int(self.samples[:step].sum())
        count = int(self.samples[step])
        return FilledBatch(
            samples=count,
            real=int(self.real[step]),
            padded=int(self.padded[step]),
            lengths=tuple(sorted(self.lengths[begin : begin + count].tolist(), reverse=True)[:MOST_LENGTHS]),
            wait_ms=round(wait_s * _MILLISECONDS, 2),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some steps of the ranks kept."""

    round: int
    rows: dict[int, _Row]
    waits_s: Seconds
    """Has shape (ranks, steps)."""
    waited_for: Integers


class Fill:
    """Listens to a run of ``ranks`` ranks: `add` takes what ranks train on in the next steps, `end` when they computed it."""

    def __init__(self, ranks: int, also: Collection[int] = ()) -> None:
        self.ranks: Final = choose_ranks(ranks, also=also)
        self._all = ranks
        self._kept = set(self.ranks)
        self._open: dict[int, _Row] = {}
        self._parts: list[_Part] = []

    def add(self, first_rank: int, samples: Integers, real: Integers, padded: Integers, lengths: Integers) -> None:
        """Takes what the ranks from ``first_rank`` on train on in the next steps.

        ``samples``, ``real`` and ``padded`` have shape (ranks, steps). ``lengths`` has all samples, rank by rank, and step by
        step within a rank.
        """
        ends = np.cumsum(samples.sum(axis=1))
        for place, (begin, end) in enumerate(zip(np.append(0, ends), ends, strict=False)):
            if first_rank + place in self._kept:
                row = _Row(samples[place], real[place], padded[place], lengths[begin:end])
                self._open[first_rank + place] = row

    def end(self, round_: int, ready_s: Seconds, ends_update: Booleans) -> None:
        """Takes when each rank has computed each of the added steps, in shape (all ranks, steps). Any origin of time will do.

        Ranks wait for one another only after steps that ``ends_update`` marks.
        """
        waits_s = np.where(ends_update, ready_s.max(axis=0) - ready_s, 0.0)[list(self.ranks)]
        waited_for = np.where(ends_update & (self._all > 1), ready_s.argmax(axis=0), -1)
        self._parts.append(_Part(round_, self._open, waits_s, waited_for))
        self._open = {}

    def build(self, label: str, budget_tokens: int, *, is_lowered: bool = False, first_step: int = 0) -> FillMap:
        """Returns the map of the run so far, within the bounds stated at the top of the module."""
        places = [(part, step) for part in self._parts for step in range(len(part.waited_for))]
        kept = choose_steps(len(places), MOST_CELLS // len(self.ranks))
        columns = tuple(self._build_column(first_step + number, *places[number]) for number in kept)
        return FillMap(
            label=label,
            budget_tokens=budget_tokens,
            is_lowered=is_lowered,
            ranks=self.ranks,
            columns=columns,
            ranks_total=self._all,
            steps_total=len(places),
        )

    def _build_column(self, number: int, part: _Part, step: int) -> Column:
        waited_for = int(part.waited_for[step])
        waits_s = part.waits_s[:, step].tolist()
        return Column(
            step=number,
            round=part.round,
            waited_for=None if waited_for < 0 else waited_for,
            cells=tuple(
                part.rows[rank].build_cell(step, wait_s) for rank, wait_s in zip(self.ranks, waits_s, strict=True)
            ),
        )
