"""Saved epochs: what ``state_dict`` holds, and what is left of an epoch when another number of ranks resumes it.

A rank's state is the start of the round of its last taken step and the positions taken of it: a few integers, and one for
each sample carried into that round or taken of it, so at most two for each sample of the window; and one for each sample that
was set aside. Going on with the same world size and configuration, a rank forms that round again, identically, and skips the
steps it took. Otherwise what all ranks had taken or set aside is subtracted from the epoch's order, and the ranks start anew on
what is left (`Generation`). Spec: R10, R11.3.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Final

import numpy as np
import torch

from odb_ref.core.batching.shards import NOTHING_DRAWN, Draw
from odb_ref.core.errors import UsageError, read_integer
from odb_ref.core.offer import NONE
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from odb_ref.torch.reading.quarantine import Places

StateDict = dict[str, object]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank had taken of its part of an epoch, and the places it had set aside."""

    checkpoint: Checkpoint
    bad: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    """With shared shards: where the samples carried stood in the order of all ranks."""
    gone: tuple[int, ...] = ()
    """The places left out because other ranks had trained on them: see `EpochProgress.gone`."""

    @classmethod
    def of(cls, progress: EpochProgress) -> Part:
        """Returns what a rank had taken that stood at ``progress``, which is not a beginning."""
        if progress.checkpoint is None:
            raise UsageError("load_state_dict: a rank at its beginning has taken no part")
        return cls(progress.checkpoint, progress.bad, progress.places, progress.gone)

    def list_taken(self, begin: int) -> set[int]:
        """Returns the places of what was taken of an update that begins at a place, with a shard of its own."""
        places = Places(self.checkpoint.start.read_samples, begin, left_out=self.bad + self.gone)
        return set(map(places.get_place, self.checkpoint.taken))

    def list_drawn(self) -> tuple[list[int], list[int]]:
        """Returns the places that a rank had drawn by the round saved and not taken before it, and those of them it had taken.

        Spec: R14.6.
        """
        draw, bad = self.checkpoint.start.draw, frozenset(self.bad + self.gone)
        good = [place for place in range(draw.first, draw.first + draw.count) if place not in bad]
        held = dict(zip(self.checkpoint.start.carried, self.places, strict=True))
        held |= dict(enumerate(good, self.checkpoint.start.read_samples))
        return list(held.values()), [held[position] for position in self.checkpoint.taken]

    def compute_rest(self, places: range) -> list[int]:
        """Returns those of ``places`` that were neither taken nor set aside; positions count places that were not set aside."""
        bad = frozenset(self.bad)
        good = [item for place, item in enumerate(places) if place not in bad]
        taken = frozenset(self.checkpoint.taken)
        start = self.checkpoint.start
        rest = [good[p] for p in start.carried if not self.checkpoint.is_taken(p)]
        return rest + [good[p] for p in range(start.read_samples, len(good)) if p not in taken]


@dataclass(frozen=True, slots=True)
class Generation:
    """An interrupted part of an epoch, by rank."""

    parts: tuple[Part, ...]

    def compute_rest(self, order: Sequence[object]) -> list[object]:
        """Returns the part of ``order`` that is left, still in order.

        Place p of rank r was item ``r + p * len(parts)``; or the ranks shared the order.
        """
        drawn = max(part.checkpoint.start.draw.end for part in self.parts)
        if drawn:
            held, taken = (
                set(chain(*places)) for places in zip(*(part.list_drawn() for part in self.parts), strict=True)
            )
            return [order[place] for place in (*sorted(held - taken), *range(drawn, len(order)))]
        world_size = len(self.parts)
        rest: list[int] = []
        for rank, part in enumerate(self.parts):
            rest += part.compute_rest(range(rank, len(order), world_size))
        return [order[item] for item in sorted(rest)]

    def list_bad(self, order: Sequence[object]) -> list[object]:
        """Returns what of ``order`` was set aside and is not left."""
        is_shared = any(part.checkpoint.start.draw.end for part in self.parts)
        world_size = len(self.parts)
        rows = [order if is_shared else order[rank::world_size] for rank in range(world_size)]
        return [row[place] for row, part in zip(rows, self.parts, strict=True) for place in part.bad]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochProgress:
    """Where one rank stands in an epoch: at its beginning, or after a step."""

    checkpoint: Checkpoint | None = None
    update_counts: StepCounts = ZERO_COUNTS
    """Global counts of what was taken of the update that the checkpoint lies in."""
    bad: tuple[int, ...] = ()
    """The places set aside among the ``known`` ones, with updates those of the one that the checkpoint lies in."""
    known: int = 0
    """So many places of the rank's order decide the steps taken: each is set aside, or must be read again alike."""
    digest: str = ""
    """Of the positions and measures of all samples in the round of the last taken step: read again, they must be the same."""
    base: tuple[Generation, ...] = ()
    """What earlier ranks had taken."""
    places: tuple[int, ...] = ()
    """With shared shards: the places of the samples that were carried into the checkpoint's round. Spec: R14.6."""
    gone: tuple[int, ...] = ()
    """The places of the update in which this number of ranks began that others had trained on before. Spec: R16.6."""
    gone_counts: StepCounts = ZERO_COUNTS
    """Their global counts, which are a part of that update's."""

    @property
    def is_between_updates(self) -> bool:
        """True where no update was begun that is not complete: only round and steps count of what is saved. Spec: R16.6."""
        return self.checkpoint is None or not (self.checkpoint.taken_steps or self.update_counts.samples)

    @property
    def steps(self) -> int:
        """Steps of the epoch so far, without those of ``base``."""
        return 0 if self.checkpoint is None else self.checkpoint.start.planned_steps + self.checkpoint.taken_steps


START: Final = EpochProgress()
"""The beginning of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """One rank's place in an epoch."""

    epoch: int
    world_size: int
    rank: int
    settings: str
    """The configuration that decides the batches, to know whether rounds can be formed again."""
    order: str
    """What decides the order of the samples; must not change."""
    keys: str = ""
    """How many keys the order lists, and their digest (`compute_digest`); empty where no epoch is under way."""
    progress: EpochProgress = START

    def to_dict(self) -> StateDict:
        """Returns the state as plain integers, strings, lists and dicts."""
        return {
            "epoch": self.epoch,
            "world_size": self.world_size,
            "rank": self.rank,
            "settings": self.settings,
            "order": self.order,
            "keys": self.keys,
            "place": None if self.progress.checkpoint is None else _encode_checkpoint(self.progress.checkpoint),
            "window": self.progress.update_counts.to_row(),
            "bad": list(self.progress.bad),
            "known": self.progress.known,
            "digest": self.progress.digest,
            "base": [[_encode_part(part) for part in generation.parts] for generation in self.progress.base],
            **_encode_places(self.progress.places),
            **_encode_gone(self.progress),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> EpochState:
        """Returns the state that `to_dict` wrote; `check_seal` has seen to it that it did.

        Raises: UsageError.
        """
        match data:
            case {
                "epoch": int(epoch),
                "world_size": int(world_size),
                "rank": int(rank),
                "settings": str(settings),
                "order": str(order),
                "keys": str(keys),
                "place": place,
                "window": [int(), int(), int(), *_] as update,
                "bad": [*bad],
                "known": int(known),
                "digest": str(digest),
                "base": [*base],
            }:
                gone, gone_counts = _decode_gone(data.get("gone"))
                return cls(
                    epoch=epoch,
                    world_size=world_size,
                    rank=rank,
                    settings=settings,
                    order=order,
                    keys=keys,
                    progress=EpochProgress(
                        checkpoint=None if place is None else _decode_checkpoint(place),
                        update_counts=StepCounts.from_row(_decode_places(update)),
                        bad=_decode_places(bad),
                        known=known,
                        digest=digest,
                        base=tuple(map(_decode_generation, base)),
                        places=_decode_places(data.get("places", ())),
                        gone=gone,
                        gone_counts=gone_counts,
                    ),
                )
        raise _make_error()


def _encode_checkpoint(place: Checkpoint) -> StateDict:
    start: StateDict = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(place.start).items()
    }
    for name, absent in (("draw", NOTHING_DRAWN), ("agreed_tokens", NONE), ("accepted_tokens", NONE)):
        if getattr(place.start, name) == absent:
            del start[name]
    return {"start": start, "taken_steps": place.taken_steps, "taken": list(place.taken)}


def _encode_part(part: Part) -> StateDict:
    return _encode_checkpoint(part.checkpoint) | {"bad": list(part.bad), **_encode_places(part.places)}


def _encode_places(places: tuple[int, ...]) -> StateDict:
    """Returns the places as a part of a state; nothing where there are none."""
    return {"places": list(places)} if places else {}


def _decode_places(values: object) -> tuple[int, ...]:
    if not isinstance(values, list | tuple):
        raise _make_error()
    places = tuple(value for value in values if type(value) is int)
    if len(places) != len(values):
        raise _make_error()
    return places


def _encode_gone(progress: EpochProgress) -> StateDict:
    """Returns what other ranks had trained on of an update, as a part of a state; nothing where they had of none."""
    is_inside = bool(progress.gone_counts.samples)
    return {"gone": [list(progress.gone), progress.gone_counts.to_row()]} if is_inside else {}


def _decode_gone(data: object) -> tuple[tuple[int, ...], StepCounts]:
    match data:
        case None:
            return (), ZERO_COUNTS
        case [[*places], [int(), int(), int(), *_] as counts]:
            return _decode_places(places), StepCounts.from_row(_decode_places(counts))
    raise _make_error()


def _decode_generation(data: object) -> Generation:
    if not isinstance(data, Sequence):
        raise _make_error()
    return Generation(tuple(map(_decode_part, data)))


def _decode_part(data: object) -> Part:
    match data:
        case {"bad": [*bad], **more}:
            return Part(_decode_checkpoint(data), _decode_places(bad), _decode_places(more.get("places", ())))
    raise _make_error()


def _decode_checkpoint(data: object) -> Checkpoint:
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
                **more,
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
                draw=_decode_draw(more.get("draw")),
                agreed_tokens=_decode_tokens(more.get("agreed_tokens", NONE)),
                accepted_tokens=_decode_tokens(more.get("accepted_tokens", NONE)),
            )
            return Checkpoint(start=start, taken_steps=taken_steps, taken=tuple(taken))
    raise _make_error()


def _decode_draw(data: object) -> Draw:
    match data:
        case None:
            return NOTHING_DRAWN
        case {"first": int(first), "count": int(count), "end": int(end)}:
            return Draw(first, count, end)
    raise _make_error()


def _decode_tokens(data: object) -> int:
    if type(data) is int and data > 0:
        return data
    raise _make_error()


def _make_error() -> UsageError:
    return UsageError("load_state_dict: this is not a state of an ODBDataLoader")


def compute_digest(keys: Sequence[object]) -> str:
    """Returns the number of keys, and a digest of them in their order; of a key that is neither a plain value nor made of such
    its type only. Numbers are the same in every library.
    """
    try:
        numbers = keys if isinstance(keys, array | range) else list(map(_read_number, keys))
        data = np.asarray(numbers, dtype=np.int64).tobytes()
    except (OverflowError, TypeError):
        data = json.dumps(list(map(_describe_key, keys))).encode()
    return f"{len(keys)}:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _read_number(key: object) -> int:
    """Returns the key. Raises: TypeError when it is not an integer."""
    if type(key) is int:
        return key
    if (number := read_integer(key)) is None:
        raise TypeError
    return number


def _describe_key(key: object) -> object:
    if (number := read_integer(key)) is not None:
        return repr(number)
    match key:
        case np.ndarray() | np.generic() | torch.Tensor():
            return _describe_key(key.tolist())
        case None | bool() | float() | str() | bytes():
            return repr(key)
        case tuple() | list():
            return [_describe_key(item) for item in key]
        case dict():
            return {str(name): _describe_key(value) for name, value in key.items()}
        case _:
            return f"<{type(key).__name__}>"  # what it prints may name its place in memory


def check_moment(states: Sequence[EpochState]) -> None:
    """Raises: UsageError when they are not the states of all ranks at one moment."""
    first = states[0]
    if [state.rank for state in states] != list(range(first.world_size)):
        ranks = [state.rank for state in states]
        raise UsageError(f"load_state_dict: states of ranks {ranks}, expected one of each of {first.world_size} ranks")
    for state in states:
        if (state.epoch, state.order, state.keys, state.progress.base) != (
            first.epoch,
            first.order,
            first.keys,
            first.progress.base,
        ):
            raise UsageError(f"load_state_dict: the states of ranks 0 and {state.rank} are not of the same epoch")
        if state.progress.steps != first.progress.steps:
            raise UsageError(
                f"load_state_dict: rank 0 was saved after {first.progress.steps} steps, rank {state.rank} after "
                f"{state.progress.steps}"
            )


def join_states(states: Sequence[EpochState]) -> tuple[Generation, ...]:
    """Returns all ranks' states as the base of a new start, after their own base.

    Raises: UsageError when they are not the states of one moment.
    """
    check_moment(states)
    base = states[0].progress.base
    parts = tuple(Part.of(state.progress) for state in states if state.progress.checkpoint is not None)
    # Before the first step none has a checkpoint that says more than the base does.
    return (*base, Generation(parts)) if len(parts) == len(states) else base
