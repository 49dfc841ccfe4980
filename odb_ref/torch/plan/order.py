"""What a rank reads in an epoch, from its beginning or from a saved state on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

import torch

from odb_ref.core.batching.updates import compute_first_place, count_rounds
from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.sampler import list_keys
from odb_ref.torch.plan.settings import describe_changes
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import START, EpochProgress, EpochState, Generation, compute_digest, join_states
from odb_ref.torch.plan.updates import begin_inside
from odb_ref.torch.reading.quarantine import Quarantine
from odb_ref.torch.reading.seeding import Use, compute_seed
from odb_ref.torch.reading.service import ReadPlan
from odb_ref.trace.origin import Lot, make_lot


def compute_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Returns a permutation of so many keys, a function of seed and epoch. Spec: R12.4."""
    generator = torch.Generator()
    generator.manual_seed(compute_seed(Use.PERMUTATION, seed, epoch))
    order = array("q")
    order.frombytes(torch.randperm(count, generator=generator).view(torch.uint8).numpy().data)
    return order


def _pack(keys: Sequence[object]) -> Sequence[object]:
    """Returns the keys, as plain numbers where all are that: in a fifth of the memory, here and where they are read."""
    if isinstance(keys, array | range):
        return keys
    numbers = [key for key in keys if type(key) is int]
    try:
        return array("q", numbers) if len(numbers) == len(keys) else keys
    except OverflowError:
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the keys of an epoch come about; the same on all ranks but for data set and sampler."""

    dataset: object
    sampler: Iterable[object] | None
    is_iterable: bool
    is_auto: bool
    is_shuffled: bool
    seed: int
    seed_source: str = ""
    is_shared: bool = False
    """True when the ranks draw from one order, which is that of ``is_auto``. Spec: R14."""
    update_samples: int | None = None
    """How many samples an optimizer update holds, where that is fixed. Spec: R16."""
    drops_last: bool = False
    """True when an epoch ends with the last whole update."""

    @property
    def settings(self) -> dict[str, object]:
        """What all ranks must have in common of it, by the name it has for the user."""
        if not self.is_auto:
            return {"shard": "given"}
        return {
            "shard": self.shard,
            "shuffle": self.is_shuffled,
            f"seed{self.seed_source}": self.seed,
            "samples": self.count_samples(),
            **({"drop_last": True} if self.drops_last else {}),
        }

    @property
    def description(self) -> str:
        """What decides the order, as a JSON object: must be the same where a saved state is loaded."""
        own = {} if self.is_auto else {"shuffle": self.is_shuffled, f"seed{self.seed_source}": self.seed}
        return json.dumps(self.settings | own)

    @property
    def shard(self) -> str:
        """How the ranks share the data set, as the user names it."""
        if not self.is_auto:
            return "given"
        return "shared" if self.is_shared else "auto"

    def count_samples(self) -> int:
        """Returns how many samples the order of all ranks has, those that are dropped included.

        Raises: UsageError when neither data set nor sampler says.
        """
        return len(self._get_sized())

    def count_updates(self) -> int:
        """Returns how many updates an epoch has, by R16.1."""
        samples, size = self.count_samples(), self.update_samples or 1
        return samples // size if self.drops_last else -(-samples // size)

    def compute_first_place(self, progress: EpochProgress, rank: int, world_size: int) -> int:
        """Returns where in the order that the rank reads its next update begins; 0 in the free mode.

        Spec: R16.2, R16.6.
        """
        if self.update_samples is None or progress.checkpoint is None:
            return 0
        rounds = count_rounds(self.update_samples, world_size, is_shared=self.is_shared)
        update = progress.checkpoint.start.round // rounds
        if self.is_shared:
            return update * self.update_samples
        return compute_first_place(update, update_samples=self.update_samples, rank=rank, world_size=world_size)

    def _get_sized(self) -> Sized:
        source = self.dataset if self.sampler is None else self.sampler
        if not isinstance(source, Sized):
            raise UsageError("the data set has no length: pass a sampler, which must have one where all ranks share it")
        return source

    def compute_keys(
        self, epoch: int, rank: int, world_size: int, base: tuple[Generation, ...]
    ) -> tuple[Sequence[object], int | None, Lot, str]:
        """Returns this rank's keys in order, how many samples the epoch has (None when unknown), what was taken before (of keys
        that are no numbers without a digest), and of a sampler that all ranks have alike a digest of what it lists.
        """
        order: Sequence[object] = self._compute_order(epoch) if self.sampler is None else list_keys(self.sampler, epoch)
        if not self.is_auto:
            return _pack(order), len(order) if world_size == 1 else None, Lot(), ""
        listed = "" if self.sampler is None else compute_digest(order)
        if self.drops_last:
            order = order[: self.count_updates() * (self.update_samples or 1)]
        total, taken = len(order), Lot()
        for generation in base:
            rest = generation.compute_rest(order)
            taken += _make_lot(order) - _make_lot(rest) - _make_lot(generation.list_bad(order))
            order = rest
        own = order if self.is_shared or world_size == 1 else order[rank::world_size]
        return _pack(own), total, taken, listed

    def _compute_order(self, epoch: int) -> Sequence[int]:
        count = self.count_samples()
        return compute_order(count, self.seed, epoch) if self.is_shuffled else range(count)

    def compute_digest(self, start: EpochStart) -> str:
        """Returns what a saved state tells of the keys that are read: of all ranks, or where each is given its own, of this
        one.
        """
        if start.keys is None:
            return ""
        if start.listed:
            return start.listed  # a sampler may list other keys the second time
        return compute_digest(self._compute_order(start.epoch) if self.is_auto else start.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where an epoch begins on this rank."""

    start: EpochStart
    total_samples: int | None
    """Samples of the whole epoch, on all ranks, those set aside included; None when unknown."""
    emitted_before: int
    """Samples taken by the ranks before a change of their number."""

    @property
    def resume_step(self) -> int:
        """The number of the first step that the consumer is given."""
        return self.start.progress.steps


def make_beginning(
    order: Order,
    epoch: int,
    rank: int,
    world_size: int,
    *,
    loaded: Sequence[EpochState],
    settings: str,
    quota: int | None,
    read_ahead: int,
    max_bad: float,
) -> Beginning:
    """Returns the beginning of ``epoch``, or where the ``loaded`` states stand in it.

    Raises: UsageError when the states do not fit.
    """
    progress = choose_progress(order, rank, world_size, loaded, settings)
    keys: Sequence[object] | None = None
    total, before, listed = None, Lot(), ""
    if not order.is_iterable:
        keys, total, before, listed = order.compute_keys(epoch, rank, world_size, progress.base)
        if quota is not None and before.samples >= quota:
            keys = []  # met before the number of ranks changed: there is nothing left to read

    beginning = Beginning(
        start=EpochStart(
            keys=keys,
            listed=listed,
            progress=progress,
            first_place=order.compute_first_place(progress, rank, world_size),
            seed=compute_seed(Use.EPOCH, order.seed, epoch, rank, len(progress.base)),
            # Ranks may have seeds of their own where each is given its samples. What is not shuffled is the same in each epoch.
            order_seed=compute_seed(
                Use.ORDER, order.seed if order.is_auto else 0, epoch if order.is_shuffled or not order.is_auto else 0
            ),
            read_ahead=read_ahead if order.update_samples is None else max(1, order.update_samples // world_size // 2),
            max_bad=max_bad,
            quota_samples=None if quota is None else max(1, quota - before.samples),
            epoch=epoch,
            is_shared=order.is_shared,
            taken_before=before,
        ),
        total_samples=total,
        emitted_before=before.samples,
    )
    _check_keys(order, beginning.start, rank, loaded)
    return beginning


def _make_lot(keys: Sequence[object]) -> Lot:
    """Returns the lot of what is listed; only numbers have a digest."""
    numbers = [key for key in keys if isinstance(key, int)]
    return make_lot(numbers) if len(numbers) == len(keys) else Lot(len(keys))


def _check_keys(order: Order, start: EpochStart, rank: int, loaded: Sequence[EpochState]) -> None:
    """Spec: R10.4. Preserves: RESUME.

    Raises: UsageError when other keys are listed than when the state was saved, or in another order.
    """
    if start.progress == START:
        return  # nothing was taken: any order will do
    saved = next((state.keys for state in loaded if order.is_auto or state.rank == rank), "")
    if saved and saved != (found := order.compute_digest(start)):
        whose = "the order of all ranks" if order.is_auto else "the sampler, or the data set's order,"
        raise UsageError(
            f"load_state_dict: {whose} is not what it was when the state was saved ({_describe_keys(saved)}, now "
            f"{_describe_keys(found)}), so samples would be repeated and others lost: list the same keys in the same order (a "
            "sampler that remembers something needs its own state back first), or begin an epoch without a state"
        )


def _describe_keys(keys: str) -> str:
    count, _, digest = keys.partition(":")
    return f"{count} keys with digest {digest}" if keys else "no keys"


def make_plan(start: EpochStart, quarantine: Quarantine) -> ReadPlan:
    """Returns what is left to read of the epoch: first what was carried into the round it resumes in, then what follows.

    With shared shards what follows is drawn later, round by round.
    """
    keys, progress = start.keys, start.progress
    round_start = None if progress.checkpoint is None else progress.checkpoint.start
    carried = () if round_start is None else tuple(map(quarantine.places.get_place, round_start.carried))
    if start.is_shared and keys is not None:
        return ReadPlan(keys=[keys[p] for p in carried], places=carried, seed=start.seed, is_drawn=True)
    read_samples = 0 if round_start is None else round_start.read_samples
    first = start.first_place or (quarantine.places.get_place(read_samples - 1) + 1 if read_samples else 0)
    bad = frozenset(progress.bad + progress.gone)
    if keys is None:
        return ReadPlan(keys=None, first=first, kept=frozenset(carried), dropped=bad, seed=start.seed)
    if not carried and all(place < first for place in bad):
        return ReadPlan(keys=keys[first:] if first else keys, places=range(first, len(keys)), seed=start.seed)
    places = array("q", (*carried, *(place for place in range(first, len(keys)) if place not in bad)))
    return ReadPlan(keys=_pack([keys[place] for place in places]), places=places, seed=start.seed)


def choose_progress(
    order: Order, rank: int, world_size: int, loaded: Sequence[EpochState], settings: str
) -> EpochProgress:
    """Returns where ``rank`` goes on.

    Raises: UsageError when the states do not fit.
    """
    if not loaded:
        return START
    first = loaded[0]
    mine = next((state for state in loaded if state.rank == rank), None)
    saved = mine or first
    if saved.order != order.description:
        what = "; ".join(describe_changes(saved.order, order.description))
        raise UsageError(f"load_state_dict: the order of samples is another than when the state was saved ({what})")
    changes = describe_changes(first.settings, settings)
    has_updates = order.is_auto and order.update_samples is not None
    is_between = has_updates and saved.progress.is_between_updates  # then all ranks' states are one
    if first.world_size == world_size and not changes:
        if mine is None and not is_between:
            raise UsageError(f"load_state_dict: the state of rank {first.rank} was given to rank {rank}")
        return saved.progress
    if first.world_size != world_size:
        changes.insert(0, f"ranks: saved {first.world_size}, now {world_size}")
    what = "; ".join(changes)
    if not order.is_auto:
        raise UsageError(
            "load_state_dict: where each rank is given its own samples, an epoch goes on only with as many ranks and the "
            f"settings it was saved with ({what})"
        )
    if has_updates and json.loads(first.settings).get("update_samples") != order.update_samples:
        raise UsageError(f"load_state_dict: the updates of an epoch cannot change inside it ({what})")
    if len(loaded) != first.world_size and not is_between:
        raise UsageError(
            f"load_state_dict: ranks or settings have changed ({what}), so the states of all ranks are needed, as a list"
        )
    if order.update_samples is not None:
        states = [saved] if is_between else loaded
        return begin_inside(states, order.update_samples, rank, world_size, is_shared=order.is_shared)
    return EpochProgress(base=join_states(loaded))
