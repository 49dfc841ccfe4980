"""Saved epochs: what ``state_dict`` holds, and what is left of an epoch when another number of ranks goes on with it.

A rank's state is the start of the round of its last taken step and the positions taken of it: a few integers, and one for
each sample carried into that round or taken of it, so at most two for each sample of the window. Going on with the same world
size and configuration, a rank forms that round again, identically, and skips the steps it took. Otherwise what all ranks had
taken is subtracted from the epoch's order, and the ranks start anew on what is left (`Generation`). Spec: R10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.types import ZERO_COUNTS, StepCounts

VERSION: Final = 1

StateDict = dict[str, object]


@dataclass(frozen=True, slots=True)
class Generation:
    """An interrupted part of an epoch: what each rank of it had taken when it ended, by rank."""

    places: tuple[Checkpoint, ...]

    def compute_rest(self, order: Sequence[int]) -> list[int]:
        """What of ``order`` was not taken, still in order. Position p of rank r was item ``r + p * len(places)``."""
        world_size = len(self.places)
        rest: list[int] = []
        for rank, place in enumerate(self.places):
            mine = range(rank, len(order), world_size)
            taken = frozenset(place.taken)
            rest += [mine[p] for p in place.start.carried if not place.is_taken(p)]
            rest += [mine[p] for p in range(place.start.read_samples, len(mine)) if p not in taken]
        return [order[item] for item in sorted(rest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """One rank's place in an epoch. ``place`` is None before its first step."""

    epoch: int
    world_size: int
    rank: int
    settings: str
    """The configuration that decides the batches, to know whether rounds can be formed again."""
    order: str
    """What decides the order of the samples; must not change."""
    place: Checkpoint | None = None
    window: StepCounts = ZERO_COUNTS
    base: tuple[Generation, ...] = ()

    def to_dict(self) -> StateDict:
        """Plain integers, strings, lists and dicts."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "rank": self.rank,
            "settings": self.settings,
            "order": self.order,
            "place": None if self.place is None else _encode_place(self.place),
            "window": list(asdict(self.window).values()),
            "base": [[_encode_place(place) for place in generation.places] for generation in self.base],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> EpochState:
        """The state that `to_dict` wrote.

        Raises: UsageError when it did not.
        """
        if data.get("version") != VERSION:
            raise UsageError(f"load_state_dict: version {data.get('version')!r}, this library reads {VERSION}")
        match data:
            case {
                "epoch": int(epoch),
                "world_size": int(world_size),
                "rank": int(rank),
                "settings": str(settings),
                "order": str(order),
                "place": place,
                "window": [int(samples), int(tokens), int(supervised)],
                "base": [*base],
            }:
                return cls(
                    epoch=epoch,
                    world_size=world_size,
                    rank=rank,
                    settings=settings,
                    order=order,
                    place=None if place is None else _decode_place(place),
                    window=StepCounts(samples, tokens, supervised),
                    base=tuple(map(_decode_generation, base)),
                )
        raise _make_error()


def _encode_place(place: Checkpoint) -> StateDict:
    start: StateDict = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(place.start).items()
    }
    return {"start": start, "taken_steps": place.taken_steps, "taken": list(place.taken)}


def _decode_generation(data: object) -> Generation:
    if not isinstance(data, Sequence):
        raise _make_error()
    return Generation(tuple(map(_decode_place, data)))


def _decode_place(data: object) -> Checkpoint:
    match data:
        case {
            "start": {
                "round": int(round_),
                "read_samples": int(read_samples),
                "is_ended": bool(is_ended),
                "carried": [*carried],
                "marks": [*marks],
                "planned_steps": int(planned_steps),
                "global_samples": int(global_samples),
            },
            "taken_steps": int(taken_steps),
            "taken": [*taken],
        }:
            start = RoundStart(
                round=round_,
                read_samples=read_samples,
                is_ended=is_ended,
                carried=tuple(carried),
                marks=tuple(marks),
                planned_steps=planned_steps,
                global_samples=global_samples,
            )
            return Checkpoint(start=start, taken_steps=taken_steps, taken=tuple(taken))
    raise _make_error()


def _make_error() -> UsageError:
    return UsageError("load_state_dict: this is no state of an ODBDataLoader")


def join_states(states: Sequence[EpochState]) -> tuple[Generation, ...]:
    """All ranks' states as the base of a new start, their own base before it.

    Raises: UsageError when they are not the states of one moment.
    """
    first = states[0]
    if [state.rank for state in states] != list(range(first.world_size)):
        ranks = [state.rank for state in states]
        raise UsageError(f"load_state_dict: states of ranks {ranks}, expected one of each of {first.world_size} ranks")
    for state in states:
        if (state.epoch, state.order, state.base) != (first.epoch, first.order, first.base):
            raise UsageError(f"load_state_dict: the states of ranks 0 and {state.rank} are not of the same epoch")
        if _count_steps(state) != _count_steps(first):
            raise UsageError(
                f"load_state_dict: rank 0 was saved after {_count_steps(first)} steps, rank {state.rank} after "
                f"{_count_steps(state)}"
            )
    if first.place is None:
        return first.base
    return (*first.base, Generation(tuple(state.place for state in states if state.place is not None)))


def _count_steps(state: EpochState) -> int:
    return 0 if state.place is None else state.place.start.planned_steps + state.place.taken_steps
