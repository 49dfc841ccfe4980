"""The bounds of an exploration: the ranks' inputs, the configuration of the core, and how much may go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from odb_ref.core.batching.rules import OdbRule, TargetRule
from odb_ref.core.config import Config, Terms
from odb_ref.core.errors import MOST, UsageError
from odb_ref.core.types import Sample
from odb_sim.inputs.conditions import BudgetTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(Terms):
    """A small world. ``lengths`` holds, for each rank, the token counts of its samples in sampler order.

    All tokens of a sample carry loss, or all but one, or none, or one.
    With ``limits``, a sample uses 0 to 2 of each further resource. ``failures``, ``stops`` and ``losses`` bound how
    many reads or collations fail, how many consumers leave early and how many processes are killed. ``lost_loaders`` bounds
    how many processes that read and collate are lost, each at any time; its rank then fails. A read is answered whole, or
    sample by sample with ``is_single_reads``. The source reports its end with its last sample if ``is_eager_end`` is true,
    and otherwise when asked for more than it has. A rank is urged at any time after another's consumer has left, or with
    ``is_urged_freely`` at any time, for no reason. A consumer leaves between two steps, or with ``is_left_inside`` also in the
    middle of one, whose collective then never ends. With ``is_inline`` a rank reads and collates in its consumer's thread
    (A3): not while that is in a step that another rank has not entered yet, unless it is urged, and not once it has left.
    If ``window_bytes`` is not 0, it bounds the bytes of a window; a token has one byte. With ``is_uneven_depth`` the queue of
    rank r holds r steps more. The rank ``odd_rank`` has another configuration.
    Rank r accepts the token budgets ``accepted[r]`` one after the other, each at any time. Ranks without an entry accept the
    configuration's. A ``budget_schedule`` holds on all ranks: pairs of planned steps and the tokens accepted from there on.
    With ``is_shared`` all ranks draw from one order, which holds the samples of rank 0, then those of rank 1, and so on.
    With updates (R16) samples whose ids, counted over all ranks, are in ``bad`` are set aside.

    Raises: UsageError when a value is not valid.
    """

    lengths: tuple[tuple[int, ...], ...]
    budget_tokens: int = 4
    window_samples: int = 2
    depth_steps: int = 1
    max_age_rounds: int = 2
    ramp_rounds: int = 0
    rule: TargetRule = field(default_factory=OdbRule)
    failures: int = 0
    stops: int = 0
    losses: int = 0
    lost_loaders: int = field(default=0, metadata={"absent": 0})
    is_single_reads: bool = False
    is_eager_end: bool = False
    is_urged_freely: bool = False
    is_left_inside: bool = False
    is_inline: bool = field(default=False, metadata={"absent": False})
    window_bytes: int = field(default=0, metadata={"absent": 0})
    is_uneven_depth: bool = False
    odd_rank: int | None = None
    is_shared: bool = field(default=False, metadata={"absent": False})
    accepted: tuple[tuple[int, ...], ...] = field(default=(), metadata={"absent": ()})
    budget_schedule: tuple[tuple[int, int], ...] = field(default=(), metadata={"absent": ()})
    bad: tuple[int, ...] = field(default=(), metadata={"absent": ()})

    def __post_init__(self) -> None:
        if not self.lengths:
            raise UsageError("an exploration needs at least one rank")
        for name in ("failures", "stops", "losses", "lost_loaders", "window_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}")
        for rank, shard in enumerate(self.lengths):
            if any(length < 1 for length in shard):
                raise UsageError(f"rank {rank}: a length must be at least 1, got {min(shard)}")
        if self.odd_rank is not None and (self.ranks < 2 or not 0 <= self.odd_rank < self.ranks):
            raise UsageError(f"odd_rank must be one of at least 2 ranks, got {self.odd_rank} of {self.ranks}")
        if len(self.accepted) > self.ranks or min(chain(*self.accepted), default=1) < 1:
            raise UsageError(
                f"accepted holds budgets of at least 1 for each of {self.ranks} ranks, got {self.accepted}"
            )
        if self.budget_tokens > MOST:
            raise UsageError(
                f"budget_tokens must be at most {MOST}, got {self.budget_tokens}: more cannot be exchanged"
            )
        if self.is_shared and self.window_bytes:
            raise UsageError(
                "with is_shared what is drawn is read, whatever its bytes: window_bytes means nothing (R14.4)"
            )
        if self.bad and self.update_samples is None:
            raise UsageError("bad samples are set aside in updates only: their places say which they are")
        self.make_schedule()
        self.compute_config(0)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.lengths)

    @property
    def longest_shard(self) -> int:
        """The most samples that any rank can get, which is all of them with shared shards."""
        return self.total_samples if self.is_shared else max(map(len, self.lengths))

    @property
    def total_samples(self) -> int:
        """The samples of all ranks together."""
        return sum(map(len, self.lengths))

    def compute_config(self, rank: int) -> Config:
        """Returns the core's configuration of ``rank``."""
        config = Config(
            rank=rank,
            world_size=self.ranks,
            budget_tokens=self.budget_tokens,
            window_samples=self.window_samples,
            depth_steps=self.depth_steps + (rank if self.is_uneven_depth else 0),
            rule=self.rule,
            tag="odd" if rank == self.odd_rank else "",
            shared_samples=self.total_samples if self.is_shared else None,
        )
        return self.apply(config)

    def get_accepted(self, rank: int) -> tuple[int, ...]:
        """Returns the budgets that ``rank`` accepts, in order."""
        return self.accepted[rank] if rank < len(self.accepted) else ()

    def make_schedule(self) -> BudgetTable | None:
        """Returns the schedule of all ranks, if there is one."""
        return BudgetTable(self.budget_schedule) if self.budget_schedule else None

    def compute_order(self) -> tuple[Sample, ...]:
        """Returns the samples of all ranks, rank by rank, which is the common order if they share one."""
        return tuple(chain.from_iterable(map(self.compute_shard, range(self.ranks))))

    def compute_shard(self, rank: int) -> tuple[Sample, ...]:
        """Returns the samples of ``rank``. Ids count places over all ranks where ranks are told places: with a common order or
        updates. In other worlds two neighbours share an id, as they may (R1.1).
        """
        first = sum(map(len, self.lengths[:rank]))
        is_place = self.is_shared or self.update_samples is not None
        return tuple(
            Sample(
                id=number if is_place else number // 2,
                position=position,
                length=length,
                supervised=(length, length - 1, 0, 1)[position % 4],
                costs=tuple((position + i) % 3 for i in range(len(self.limits))),
            )
            for position, (number, length) in enumerate(enumerate(self.lengths[rank], first))
        )


def compute_lengths(shards: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the lengths of each rank. Shards have the sizes ``shards`` and take their lengths in turn from ``lengths``,
    which repeats.

    Raises: UsageError when a shard is negative, or there is no length to take.
    """
    if any(size < 0 for size in shards):
        raise UsageError(f"a shard must not be negative, got {min(shards)}")
    if not lengths:
        raise UsageError("no lengths given")
    firsts = [sum(shards[:rank]) for rank in range(len(shards))]
    return tuple(
        tuple(lengths[(first + i) % len(lengths)] for i in range(size))
        for first, size in zip(firsts, shards, strict=True)
    )
