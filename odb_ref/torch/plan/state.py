"""Saved epochs: the contents of ``state_dict``, and what remains of an epoch when another number of ranks resumes it.

A rank's state is the start of the round of its last taken step, and the positions it has taken of this round. That is a few
integers, plus one for each sample that was carried into the round or taken of it, so at most two for each sample of the window,
plus one for each sample set aside. With the same world size and configuration, a rank forms that round again, identically, and
skips the steps it took. Otherwise everything that the ranks had taken or set aside is subtracted from the epoch's order, and
the ranks start anew on what remains (`Generation`), or with updates of a fixed size on what remains of the present one
(`begin_inside`). Spec: R10, R11.3.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Final, TypeVar, get_args, get_type_hints

import numpy as np
import torch

from odb_ref.core.batching.updates import compute_first_place, count_rounds
from odb_ref.core.errors import UsageError, read_integer
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from odb_ref.torch.reading.quarantine import Places

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

StateDict = dict[str, object]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank had taken of its part of an epoch, and the places it had set aside."""

    checkpoint: Checkpoint
    bad: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    """With shared shards: the places of the carried samples in the order of all ranks."""
    gone: tuple[int, ...] = ()
    """The places left out because other ranks had trained on them: see `EpochProgress.gone`."""

    def list_taken(self, begin: int) -> set[int]:
        """With a shard of its own: returns the places that the rank had taken of the update that begins at place ``begin``."""
        places = Places(self.checkpoint.start.read_samples, begin, left_out=self.bad + self.gone)
        return set(map(places.get_place, self.checkpoint.taken))

    def list_drawn(self) -> tuple[list[int], list[int]]:
        """Returns the places that a rank held in the saved round, carried or drawn, and those of them that it had taken.

        Spec: R14.6.
        """
        draw, bad = self.checkpoint.start.draw, frozenset(self.bad + self.gone)
        good = [place for place in range(draw.first, draw.first + draw.count) if place not in bad]
        held = dict(zip(self.checkpoint.start.carried, self.places, strict=True))
        held |= dict(enumerate(good, self.checkpoint.start.read_samples))
        return list(held.values()), [held[position] for position in self.checkpoint.taken]

    def compute_rest(self, places: range) -> list[int]:
        """Returns the items of ``places`` that were neither taken nor set aside. Positions count those not set aside."""
        bad = frozenset(self.bad)
        good = [item for place, item in enumerate(places) if place not in bad]
        return [good[position] for position in self.checkpoint.compute_rest(len(good))]


@dataclass(frozen=True, slots=True)
class Generation:
    """An interrupted part of an epoch, by rank."""

    parts: tuple[Part, ...]

    def compute_rest(self, order: Sequence[object]) -> list[object]:
        """Returns the remaining part of ``order``, still in order.

        Place p of rank r was item ``r + p * len(parts)``, unless the ranks shared the order.
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

    def list_taken(self, order: Sequence[object]) -> list[object]:
        """Returns the part of ``order`` that was trained on: what neither remains nor was set aside."""
        places, world_size = range(len(order)), len(self.parts)
        is_shared = any(part.checkpoint.start.draw.end for part in self.parts)
        rows = [places if is_shared else places[rank::world_size] for rank in range(world_size)]
        bad = {row[place] for row, part in zip(rows, self.parts, strict=True) for place in part.bad}
        kept = bad.union(self.compute_rest(places))
        return [order[place] for place in places if place not in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochProgress:
    """The position of one rank in an epoch: at its beginning, or after a step."""

    checkpoint: Checkpoint | None = None
    update_counts: StepCounts = ZERO_COUNTS
    """Global counts of what was taken of the checkpoint's update."""
    bad: tuple[int, ...] = ()
    """The places set aside among the ``known`` ones; with updates, only those in the checkpoint's update."""
    known: int = 0
    """The number of places that determine the steps taken. Each is set aside, or must yield the same sample when read again."""
    digest: str = ""
    """A digest of positions and measures of all samples in the round of the last taken step. Read again, they must match."""
    base: tuple[Generation, ...] = ()
    """What earlier jobs, with other ranks or settings, had taken of the epoch."""
    places: tuple[int, ...] = ()
    """With shared shards: the places of the samples carried into the checkpoint's round. Spec: R14.6."""
    gone: tuple[int, ...] = ()
    """The places that others had trained on before, in the update in which the present ranks began. Spec: R16.6."""
    gone_counts: StepCounts = ZERO_COUNTS
    """The global counts of the samples in ``gone``. They are a part of that update's counts."""

    @property
    def is_between_updates(self) -> bool:
        """True if no update is incomplete. Only the round and steps of the saved state matter then. Spec: R16.6."""
        return self.checkpoint is None or not (self.checkpoint.taken_steps or self.update_counts.samples)

    @property
    def steps(self) -> int:
        """Steps of the epoch so far, without those of ``base``."""
        return 0 if self.checkpoint is None else self.checkpoint.start.planned_steps + self.checkpoint.taken_steps


START: Final = EpochProgress()
"""The beginning of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """The position of one rank in an epoch, to be saved."""

    epoch: int
    world_size: int
    rank: int
    settings: str
    """The configuration that determines the batches. If it is unchanged, rounds can be formed again."""
    order: str
    """What determines the order of samples. It must not change."""
    keys: str = ""
    """The number of keys in the order, and their digest (`compute_digest`). Empty between epochs."""
    steps: int = 0
    """Steps taken since training began."""
    accepted_tokens: int | None = None
    """The token budget set by `accept_budget`, or None for the loader's. Spec: R15.3."""
    progress: EpochProgress = START

    def to_dict(self) -> StateDict:
        """Returns the state as plain integers, strings, lists and dicts, with the fields of ``progress`` among its own."""
        own = _encode_fields(self)
        del own["progress"]
        return own | _encode_fields(self.progress)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> EpochState:
        """Returns the state that `to_dict` wrote, after `check_seal` has checked it. Raises: UsageError."""
        own, progress = (
            {item.name: data[item.name] for item in fields(kind) if item.name in data} for kind in (cls, EpochProgress)
        )
        return _decode_fields(cls, own | {"progress": progress})


def _encode(value: object) -> object:
    """Leaves integers, strings and None alone. Converts tuples to lists, and dataclasses to dicts of their fields."""
    if isinstance(value, tuple):
        return list(map(_encode, value))
    return _encode_fields(value) if is_dataclass(value) and not isinstance(value, type) else value


def _encode_fields(value: DataclassInstance) -> StateDict:
    return {item.name: _encode(getattr(value, item.name)) for item in fields(value)}


def _decode_fields(kind: type[Value], data: object) -> Value:
    hints = get_type_hints(kind)
    if not isinstance(data, Mapping) or not data.keys() <= hints.keys():
        raise _make_error()
    try:
        return kind(**{name: _decode(hints[name], field) for name, field in data.items()})
    except TypeError:  # a field is missing
        raise _make_error() from None


def _decode(hint: object, data: object) -> object:
    """Returns the value of a field of this type that `_encode` was given."""
    match get_args(hint):
        case (inner, last) if last is NoneType:
            return None if data is None else _decode(inner, data)
        case (inner, last) if last is Ellipsis and isinstance(data, list | tuple):
            return tuple(_decode(inner, item) for item in data)
    if isinstance(hint, type) and is_dataclass(hint):
        return _decode_fields(hint, data)
    if type(data) is not hint:
        raise _make_error()
    return data


def _make_error() -> UsageError:
    return UsageError("load_state_dict: this is not a state of an ODBDataLoader")


def compute_digest(keys: Sequence[object]) -> str:
    """Returns the number of keys and a digest of them in order. Equal integers of different libraries count as equal. A key
    that is neither a plain value nor a container of these enters by its type only.
    """
    try:
        is_packed = isinstance(keys, array | range)
        numbers = keys if is_packed else [key if type(key) is int else read_integer(key) for key in keys]
        data = np.asarray(numbers, dtype=np.int64).tobytes()
    except (OverflowError, TypeError):  # a number of more than 64 bits, or None for a key that is not an integer
        data = json.dumps(list(map(_describe_key, keys))).encode()
    return f"{len(keys)}:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


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
            return f"<{type(key).__name__}>"  # its repr may contain a memory address


def check_moment(states: Sequence[EpochState]) -> None:
    """Raises: UsageError when the states were not saved after the same step."""
    first = states[0]
    for state in states[1:]:
        if state.epoch != first.epoch:
            what = f"in epoch {first.epoch}, rank {state.rank} in epoch {state.epoch}"
        elif state.progress.steps != first.progress.steps:
            what = f"after {first.progress.steps} steps, rank {state.rank} after {state.progress.steps}"
        else:
            continue
        raise UsageError(
            f"load_state_dict: rank {first.rank} was saved {what}: load states that every rank saved after the same step"
        )


def check_all_ranks(states: Sequence[EpochState]) -> None:
    """Raises: UsageError when these are not the states of all ranks of one job."""
    first = states[0]
    if [state.rank for state in states] != list(range(first.world_size)):
        ranks = [state.rank for state in states]
        raise UsageError(
            f"load_state_dict: got the states of ranks {ranks}, expected one state from each of {first.world_size} ranks"
        )
    for state in states:
        if (state.order, state.keys, state.progress.base) != (first.order, first.keys, first.progress.base):
            raise UsageError(f"load_state_dict: the states of ranks 0 and {state.rank} are not of the same epoch")


def join_states(states: Sequence[EpochState]) -> tuple[Generation, ...]:
    """Returns the base for a new start: the states' own base, followed by the states of all ranks.

    Raises: UsageError when these are not the states of all ranks.
    """
    check_all_ranks(states)
    base = states[0].progress.base
    parts = list_parts(states)
    # Before the first step no rank has a checkpoint that adds anything to the base.
    return (*base, Generation(tuple(parts))) if len(parts) == len(states) else base


def list_parts(states: Sequence[EpochState]) -> list[Part]:
    """Returns what each rank had taken, for ranks that have a checkpoint."""
    found = [(state.progress.checkpoint, state.progress) for state in states]
    return [Part(checkpoint, at.bad, at.places, at.gone) for checkpoint, at in found if checkpoint is not None]


def begin_inside(
    states: Sequence[EpochState], update_samples: int, rank: int, world_size: int, *, is_shared: bool
) -> EpochProgress:
    """Returns where ``rank`` begins, given the states of another number of ranks; between two updates any one is enough.

    An update holds the same samples whatever the ranks are, so nothing is divided anew. The ranks begin with the update in
    which the state was saved, and leave out what was trained on of it. Between two updates this is nothing, and all states are
    equal. Spec: R15.5, R16.5, R16.6. Preserves: UPDATE.

    Raises: UsageError when these are not the states of all ranks.
    """
    if not states[0].progress.is_between_updates:
        check_all_ranks(states)
    parts = list_parts(states)
    if len(parts) < len(states):
        return START  # nothing was trained on
    first, begun, ranks = states[0].progress, parts[0].checkpoint.start, states[0].world_size
    update = begun.round // count_rounds(update_samples, ranks, is_shared=is_shared)
    taken, bad = set[int](), set[int]()
    for saved_rank, part in enumerate(parts):
        begin = 0
        if not is_shared:
            begin = compute_first_place(update, update_samples=update_samples, rank=saved_rank, world_size=ranks)
        own = set(part.list_drawn()[1]) if is_shared else part.list_taken(begin)
        taken |= _to_common(own.union(part.gone), saved_rank, ranks, is_shared=is_shared)
        bad |= _to_common(part.bad, saved_rank, ranks, is_shared=is_shared)
    if not is_shared:
        taken, bad = (
            {place // world_size for place in places if place % world_size == rank} for places in (taken, bad)
        )
    start = RoundStart(
        round=update * count_rounds(update_samples, world_size, is_shared=is_shared),
        planned_steps=first.steps,
        global_samples=begun.global_samples + first.update_counts.samples - first.gone_counts.samples,
        agreed_tokens=begun.agreed_tokens,
        # A new rank accepts the lowest budget that any earlier rank accepted.
        accepted_tokens=min(part.checkpoint.start.accepted_tokens for part in parts),
    )
    return EpochProgress(
        checkpoint=Checkpoint(start=start),
        update_counts=first.update_counts,
        bad=tuple(sorted(bad)),
        gone=tuple(sorted(taken)),
        gone_counts=first.update_counts,
    )


def _to_common(places: Iterable[int], rank: int, world_size: int, *, is_shared: bool) -> set[int]:
    """Converts places of a rank to places in the common order. Spec: R16.2."""
    return set(places) if is_shared else {rank + place * world_size for place in places}
