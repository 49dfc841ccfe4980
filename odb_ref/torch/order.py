"""What a rank reads in an epoch, from its beginning or from a saved state on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

from odb_ref.core.errors import UsageError
from odb_ref.core.resume import Checkpoint
from odb_ref.core.types import ZERO_COUNTS, StepCounts
from odb_ref.torch.driver import EpochStart
from odb_ref.torch.engine import ReadPlan
from odb_ref.torch.sampler import ShardSampler
from odb_ref.torch.state import EpochState, Generation, join_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the keys of an epoch come about; the same on all ranks but for data set and sampler."""

    dataset: object
    sampler: Iterable[object] | None
    is_iterable: bool
    is_auto: bool
    is_shuffled: bool
    seed: int

    @property
    def description(self) -> str:
        """What decides the order, in words: must be equal on all ranks, and in a saved state."""
        if not self.is_auto:
            return "given"
        return f"auto shuffle={self.is_shuffled} seed={self.seed} samples={len(self._get_sized())}"

    def _get_sized(self) -> Sized:
        if not isinstance(self.dataset, Sized):
            raise UsageError("the data set has no length: pass a sampler")
        return self.dataset

    def compute_keys(
        self, epoch: int, rank: int, world_size: int, base: tuple[Generation, ...]
    ) -> tuple[Sequence[object], int | None, int]:
        """This rank's keys in order, how many samples the epoch has (None when unknown), and how many were taken before."""
        if self.sampler is not None:
            set_epoch = getattr(self.sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            keys = list(self.sampler)
            return keys, len(keys) if world_size == 1 else None, 0
        if not self.is_auto:
            own = ShardSampler(self._get_sized(), 0, 1, self.is_shuffled, self.seed, epoch)
            return own.compute_order(), len(own) if world_size == 1 else None, 0
        order = ShardSampler(self._get_sized(), 0, 1, self.is_shuffled, self.seed, epoch).compute_order()
        total = len(order)
        for generation in base:
            order = generation.compute_rest(order)
        return order[rank::world_size], total, total - len(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where an epoch begins on this rank."""

    epoch: int
    start: EpochStart
    base: tuple[Generation, ...]
    total_samples: int | None
    """Samples of the whole epoch, on all ranks; None when unknown."""
    emitted_before: int
    """Samples taken by the ranks of ``base``."""
    resume_step: int


def make_beginning(
    order: Order,
    epoch: int,
    rank: int,
    world_size: int,
    *,
    loaded: Sequence[EpochState],
    settings: str,
    read_ahead: int,
) -> Beginning:
    """The beginning of ``epoch``, or where the ``loaded`` states stand in it.

    Raises: UsageError when the states do not fit.
    """
    place, window, base = choose_place(order, rank, world_size, loaded, settings)
    seed = order.seed + 1_000_003 * epoch + 7_919 * rank
    read_samples = place.start.read_samples if place else 0
    carried = place.start.carried if place else ()
    total, before = None, 0
    if order.is_iterable:
        plan = ReadPlan(keys=None, read_samples=read_samples, kept=frozenset(carried), seed=seed)
        keys: Sequence[object] = ()
    else:
        keys, total, before = order.compute_keys(epoch, rank, world_size, base)
        positions = (*carried, *range(read_samples, len(keys)))
        plan = ReadPlan(keys=[keys[position] for position in positions], positions=positions, seed=seed)

    def get_id(position: int) -> int:
        key = keys[position] if keys else position
        return key if isinstance(key, int) else position

    return Beginning(
        epoch=epoch,
        start=EpochStart(plan=plan, get_id=get_id, read_ahead=read_ahead, checkpoint=place, window=window),
        base=base,
        total_samples=total,
        emitted_before=before,
        resume_step=place.start.planned_steps + place.taken_steps if place else 0,
    )


def choose_place(
    order: Order, rank: int, world_size: int, loaded: Sequence[EpochState], settings: str
) -> tuple[Checkpoint | None, StepCounts, tuple[Generation, ...]]:
    """Where ``rank`` goes on: its checkpoint, what was taken of its accumulation window, and what earlier ranks had taken.

    Raises: UsageError when the states do not fit.
    """
    if not loaded:
        return None, ZERO_COUNTS, ()
    first = loaded[0]
    if first.order != order.description:
        raise UsageError(f"load_state_dict: saved with order {first.order!r}, this loader has {order.description!r}")
    mine = next((state for state in loaded if state.rank == rank), None)
    if first.world_size == world_size and first.settings == settings:
        if mine is None:
            raise UsageError(f"load_state_dict: the state of rank {first.rank} was given to rank {rank}")
        return mine.place, mine.window, mine.base
    if not order.is_auto:
        raise UsageError(
            "load_state_dict: shards given by the caller can only go on with the same world size and settings; "
            f"saved with world size {first.world_size} and {first.settings}, now {world_size} and {settings}"
        )
    if len(loaded) != first.world_size:
        raise UsageError(
            f"load_state_dict: world size or settings have changed (saved: {first.world_size} ranks, now {world_size}), "
            "so the states of all ranks are needed, as a list"
        )
    return None, ZERO_COUNTS, join_states(loaded)
