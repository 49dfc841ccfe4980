"""Saving an epoch after any taken step, and resuming from there. Spec: R10.

A batch depends only on the samples and the agreements, never on timing (REPLAY). So a checkpoint holds only where the
*round* of the last taken step began, and how many of its steps were taken. On resuming, the round is formed again,
identically, and those steps are skipped. Samples that were read ahead, collated or queued are not saved; they are read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from odb_ref.core.batching.shards import NOTHING_DRAWN, Draw
from odb_ref.core.config import Config
from odb_ref.core.effects import Read
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE
from odb_ref.core.rounds import Transition, compute_wanted_samples, draw_samples, make_read, post_when_ready, read_draw
from odb_ref.core.state import State, replace
from odb_ref.core.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """The start of a round on one rank: a few integers, and the positions of the samples carried into it."""

    round: int = 0
    read_samples: int = 0
    is_ended: bool = False
    carried: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    planned_steps: int = 0
    global_samples: int = 0
    draw: Draw = field(default=NOTHING_DRAWN, metadata={"absent": NOTHING_DRAWN})
    """With shared shards: what the rank has drawn for the round's window. Spec: R14.6."""
    agreed_tokens: int = field(default=NONE, metadata={"absent": NONE})
    """The budget of the round's groups, if it is below the configuration's; else NONE. Spec: R15.5."""
    accepted_tokens: int = field(default=NONE, metadata={"absent": NONE})
    """The budget the rank accepts for the next round, with NONE as above."""

    def find_fault(self, *, shared_samples: int | None, update_samples: int | None) -> str:
        """Returns why no rank with these settings can have saved this start, or an empty text. Spec: R10.6."""
        read, planned, emitted = self.read_samples, self.planned_steps, self.global_samples
        if min(self.round, read, planned) < 0:
            return f"round {self.round}, {read} samples read and {planned} steps planned; none of these is below 0"
        if self.round == 0 and read:
            return f"{read} samples are read before round 0"
        is_inside = self.round > 0 or update_samples is not None  # an epoch may go on inside its first update (R16.6)
        if not is_inside and (planned or emitted):
            return f"{planned} steps and {emitted} samples are planned before round 0"
        if emitted < planned:
            return f"{planned} steps are planned with {emitted} samples, but each step holds one"
        if len(self.marks) > self.round:
            return f"round {self.round} has {len(self.marks)} marks, one for each round before it at most"
        if self.marks and (list(self.marks) != sorted(self.marks) or self.marks[0] < 0 or self.marks[-1] != read):
            return f"the marks {list(self.marks[:8])} do not rise to {read}, the number of samples read"
        if self.draw != NOTHING_DRAWN and shared_samples is None:
            return "a draw is named, but each rank has its own source"
        return ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Takes an event's place when an observer learns of a resumed epoch; ``samples`` are those at ``start.carried``.
    Spec: R9.4.
    """

    start: RoundStart
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One rank's progress in an epoch: the start of a round, and the part of it that was taken.

    The first ``taken_steps`` steps of the round were taken; they held the samples at positions ``taken``. Every position
    below ``start.read_samples`` that is not in ``start.carried`` was taken in an earlier round.
    """

    start: RoundStart
    taken_steps: int = 0
    taken: tuple[int, ...] = ()

    def is_taken(self, position: int) -> bool:
        """Returns True when the sample at ``position`` was taken: a job of another size must not repeat it (ONCE)."""
        if position >= self.start.read_samples or position in self.start.carried:
            return position in self.taken
        return True

    def compute_rest(self, samples: int) -> list[int]:
        """Returns the positions below ``samples`` that are not taken: first those carried, then those not read."""
        taken = frozenset(self.taken)
        places = (*self.start.carried, *range(self.start.read_samples, samples))
        return [position for position in places if position not in taken]


def compute_round_start(state: State) -> RoundStart:
    """Returns the start of the present round. Valid from `start` or ``Counted`` until the round's agreement. Spec: R10.1."""
    read_samples = state.marks[-1] if state.marks else 0
    return RoundStart(
        round=state.round,
        read_samples=read_samples,
        is_ended=state.is_ended and state.read_samples == read_samples and not state.wanted_samples,
        carried=tuple(sample.position for sample in state.window if sample.position < read_samples),
        marks=state.marks,
        planned_steps=state.planned_steps,
        global_samples=state.global_samples,
        draw=state.draw,
        agreed_tokens=state.agreed_tokens,
        accepted_tokens=state.accepted_tokens,
    )


def resume(config: Config, start: RoundStart, carried: tuple[Sample, ...]) -> Transition:
    """Returns the state at the start of a round, and its effects. ``carried`` holds the samples at ``start.carried``, which
    the caller has read again.

    Step numbers continue from ``start.planned_steps``; the driver takes and drops the steps already trained on.
    Raises: UsageError when no rank can have saved ``start``, or when ``carried`` does not match or holds an invalid sample.
    Spec: R10.2, R10.6. Preserves: REPLAY, RESUME.
    """
    if fault := start.find_fault(shared_samples=config.shared_samples, update_samples=config.update_samples):
        raise UsageError(f"resume: no rank can have saved this start: {fault}")
    if tuple(sample.position for sample in carried) != start.carried:
        raise UsageError(f"resume: expected the samples at positions {start.carried}")
    config.check_samples(carried)
    state = State(
        round=start.round,
        read_samples=start.read_samples,
        is_ended=start.is_ended,
        window=carried,
        marks=start.marks,
        planned_steps=start.planned_steps,
        taken_steps=start.planned_steps,
        taken_samples=start.read_samples - len(carried),
        global_samples=start.global_samples,
        agreed_tokens=start.agreed_tokens,
        accepted_tokens=start.accepted_tokens,
    )
    state, reads = _read_first(config, state, start)
    return (state, reads) if reads else post_when_ready(config, state)


def _read_first(config: Config, state: State, start: RoundStart) -> tuple[State, tuple[Read, ...]]:
    """Spec: R2.3, R10.2, R14.2, R14.6, R16.6."""
    wanted = compute_wanted_samples(config, start.round, len(state.window), is_ended=start.is_ended)
    if config.shared_samples is None:
        return replace(state, wanted_samples=wanted), ((make_read(config, start.round, wanted),) if wanted else ())
    if start.is_ended:  # the draw belongs to an earlier round
        return replace(state, draw=start.draw), ()
    if start.draw.end:
        return read_draw(config, state, start.draw)
    return draw_samples(
        config, state, (wanted,) * config.world_size
    )  # every rank knows that all begin with an empty window


class Ledger:
    """Follows an epoch and gives a checkpoint after any taken step. It holds only the few rounds in flight. Spec: R10.3."""

    __slots__ = ("_starts", "_taken", "_taken_steps")

    def __init__(self, start: RoundStart | None = None) -> None:
        self._starts = [start or RoundStart()]
        self._taken: list[int] = []
        self._taken_steps = self._starts[0].planned_steps

    def note_round(self, start: RoundStart) -> None:
        """Notes a planned round. Call it after each ``Counted``, with `compute_round_start` of the new state."""
        self._starts.append(start)

    def note_taken(self, number: int, positions: Iterable[int]) -> None:
        """Notes a step that the consumer takes. Call it in order, with the positions of the step's samples."""
        self._taken_steps = number + 1
        while len(self._starts) > 1 and self._starts[1].planned_steps <= number:
            del self._starts[0]
            self._taken.clear()
        self._taken.extend(positions)

    def compute_checkpoint(self) -> Checkpoint:
        """Returns the checkpoint after the last taken step."""
        start = self._starts[0]
        return Checkpoint(start=start, taken_steps=self._taken_steps - start.planned_steps, taken=tuple(self._taken))
