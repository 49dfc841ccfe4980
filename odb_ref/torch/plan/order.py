"""What a rank reads in an epoch, from its beginning or from a saved state on."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.sampler import ShardSampler
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import START, EpochState, Generation, Progress, compute_digest, join_states
from odb_ref.torch.reading.quarantine import Quarantine
from odb_ref.torch.reading.seeding import Use, compute_seed
from odb_ref.torch.reading.source import DrawFeed, ReadPlan


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

    @property
    def settings(self) -> dict[str, object]:
        """What all ranks must have in common of it, by the name it has for the user."""
        if not self.is_auto:
            return {"shard": "given"}
        seed = f"seed{self.seed_source.removesuffix(',')}"
        return {"shard": self.shard, "shuffle": self.is_shuffled, seed: self.seed, "samples": self.count_samples()}

    @property
    def description(self) -> str:
        """What decides the order, in words: must be equal on all ranks, and in a saved state."""
        if not self.is_auto:
            return "given"
        return (
            f"{self.shard} shuffle={self.is_shuffled} seed={self.seed}{self.seed_source} samples={self.count_samples()}"
        )

    @property
    def shard(self) -> str:
        """How the ranks share the data set, as the user names it."""
        if not self.is_auto:
            return "given"
        return "shared" if self.is_shared else "auto"

    def count_samples(self) -> int:
        """Returns the samples of the data set.

        Raises: UsageError when it does not say.
        """
        return len(self._get_sized())

    def _get_sized(self) -> Sized:
        if not isinstance(self.dataset, Sized):
            raise UsageError("the data set has no length: pass a sampler")
        return self.dataset

    def compute_keys(
        self, epoch: int, rank: int, world_size: int, base: tuple[Generation, ...]
    ) -> tuple[Sequence[object], int | None, int]:
        """Returns this rank's keys in order, how many samples the epoch has (None when unknown), and how many were taken
        before.
        """
        if self.sampler is not None:
            set_epoch = getattr(self.sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            keys = list(self.sampler)
            if isinstance(self.sampler, Sized) and len(keys) != (told := len(self.sampler)):
                raise UsageError(f"the sampler says that it has {told} keys, and listed {len(keys)} for epoch {epoch}")
            return keys, len(keys) if world_size == 1 else None, 0
        if not self.is_auto:
            own = self._compute_order(epoch)
            return own, len(own) if world_size == 1 else None, 0
        order = self._compute_order(epoch)
        total = len(order)
        bad = 0
        for generation in base:
            order = generation.compute_rest(order)
            bad += sum(len(part.bad) for part in generation.parts)
        # All are sent to the process that reads: as plain numbers, which is a quarter of what a list of them takes.
        shard = array("q", order) if self.is_shared else order[rank::world_size]
        return shard, total, total - len(order) - bad

    def _compute_order(self, epoch: int) -> list[int]:
        return ShardSampler(self._get_sized(), 0, 1, self.is_shuffled, self.seed, epoch).compute_order()

    def compute_digest(self, start: EpochStart) -> str:
        """Returns what a saved state tells of the keys that are read: of all ranks, or where each is given its own, of this
        one.
        """
        if start.keys is None:
            return ""
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
    total, before = None, 0
    if not order.is_iterable:
        keys, total, before = order.compute_keys(epoch, rank, world_size, progress.base)
        if quota is not None and before >= quota:
            keys = []  # met before the number of ranks changed: there is nothing left to read

    beginning = Beginning(
        start=EpochStart(
            keys=keys,
            progress=progress,
            seed=compute_seed(Use.EPOCH, order.seed, epoch, rank, len(progress.base)),
            # Ranks may have seeds of their own where each is given its samples. What is not shuffled is the same in each epoch.
            order_seed=compute_seed(
                Use.ORDER, order.seed if order.is_auto else 0, epoch if order.is_shuffled or not order.is_auto else 0
            ),
            read_ahead=read_ahead,
            max_bad=max_bad,
            quota_samples=None if quota is None else max(1, quota - before),
            epoch=epoch,
            is_shared=order.is_shared,
        ),
        total_samples=total,
        emitted_before=before,
    )
    _check_keys(order, beginning.start, rank, loaded)
    return beginning


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
    carried = () if round_start is None else tuple(map(quarantine.get_place, round_start.carried))
    if start.is_shared and keys is not None:
        return ReadPlan(keys=[keys[p] for p in carried], places=carried, seed=start.seed, draws=DrawFeed())
    read_samples = 0 if round_start is None else round_start.read_samples
    first = quarantine.get_place(read_samples - 1) + 1 if read_samples else 0
    bad = frozenset(progress.bad)
    if keys is None:
        return ReadPlan(keys=None, first=first, kept=frozenset(carried), dropped=bad, seed=start.seed)
    places = (*carried, *(p for p in range(first, len(keys)) if p not in bad))
    return ReadPlan(keys=[keys[p] for p in places], places=places, seed=start.seed)


def choose_progress(order: Order, rank: int, world_size: int, loaded: Sequence[EpochState], settings: str) -> Progress:
    """Returns where ``rank`` goes on.

    Raises: UsageError when the states do not fit.
    """
    if not loaded:
        return START
    first = loaded[0]
    if first.order != order.description:
        raise UsageError(f"load_state_dict: saved with order {first.order!r}, this loader has {order.description!r}")
    mine = next((state for state in loaded if state.rank == rank), None)
    if first.world_size == world_size and first.settings == settings:
        if mine is None:
            raise UsageError(f"load_state_dict: the state of rank {first.rank} was given to rank {rank}")
        return mine.progress
    if not order.is_auto:
        raise UsageError(
            "load_state_dict: shards given by the caller can only be resumed with the same world size and settings; "
            f"saved with world size {first.world_size} and {first.settings}, now {world_size} and {settings}"
        )
    if len(loaded) != first.world_size:
        raise UsageError(
            f"load_state_dict: world size or settings have changed (saved: {first.world_size} ranks, now {world_size}), "
            "so the states of all ranks are needed, as a list"
        )
    return Progress(base=join_states(loaded))
