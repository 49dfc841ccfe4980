"""Costs in simulated seconds of the GPU, the network and the loader: small linear models with all numbers visible.

The defaults are assumptions: a rounded description of an 8-billion-parameter model with one H100 per rank, trained in bf16 at
400 TFLOP/s, on 10-gigabit Ethernet. Then 6 FLOPs per parameter and token are 1.2e-4 s/token, and causal attention over 32
layers of width 4,096 adds 2e-9 s per token and token of context.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import ceil, inf, log2
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from odb_ref.core.batching.cost import TOKENS, Cost, make_attention_cost
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.core.offer import WIRE_SIZE

Seconds = NDArray[np.float64]
Squares = NDArray[np.int64] | NDArray[np.float64]
"""Sums of squared lengths, which for long rows may exceed 64 bits."""
Number = TypeVar("Number", float, NDArray[np.float64])
"""One quantity or many at once, priced by the same formula."""
LARGEST_S: Final = 86_400.0
"""The greatest single cost, a day."""
_HUGE: Final = 1e300
"""Finite numbers are smaller, and an integer may be too large for a float."""
_MOST_EQUAL: Final = 1e12
"""In a sample of this many tokens attention takes no time that shows."""
_BACKWARD: Final = 2 / 3
"""The share of a micro-batch's time that its backward pass takes."""
_INTEGER_BYTES = 8
_COUNT_INTEGERS = 3  # samples, tokens, supervised tokens
_REPORT_BYTES = 1024


class PricedTransport(StrEnum):
    """How the ranks exchange offers and counts. The decisions are the same."""

    REDUCE = "reduce"
    """A reduction, whose cost grows with the logarithm of the number of ranks."""
    GATHER = "gather"
    """All ranks receive all messages, as in the paper; the cost grows with the number of ranks."""


class Algorithm(StrEnum):
    """The algorithm of the trainers' collective, which decides which messages wait for others."""

    TREE = "tree"
    """Up a tree and down again: the latency grows with the logarithm of the ranks."""
    RING = "ring"
    """Around a ring, twice: the latency grows with the ranks."""


def _check_not_negative(model: object, name: str, value: float) -> None:
    if not 0 <= value < inf:
        raise UsageError(f"{type(model).__name__}.{name} must be a number of at least 0, got {value}")
    if value > LARGEST_S:
        raise UsageError(f"{type(model).__name__}.{name} is {value!s:.40}: more than a day")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCost:
    """Seconds of one training step on one rank, without its collective.

    Every step costs ``fixed_s``, even an idle one, every padded token ``per_token_s``, and every pair of a padded token and a
    token of its own row ``per_token2_s``, the quadratic part of attention. No step takes less than ``floor_s``: the time to
    launch its kernels, or to send sharded parameters, which overlap the computation.

    Raises: UsageError when a number is negative or not finite.
    """

    fixed_s: float = 0.05
    per_token_s: float = 1.2e-4
    per_token2_s: float = 2e-9
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_not_negative(self, item.name, getattr(self, item.name))

    def compute_steps_s(self, padded_tokens: NDArray[np.int64], row_pairs: Squares) -> Seconds:
        """Returns the seconds for many batches at once. ``row_pairs`` sums the squared lengths of the rows with padding; where
        each sample attends only to itself, the squared lengths of the samples.
        """
        return np.maximum(self.floor_s, self.fixed_s + self.per_token_s * padded_tokens + self.per_token2_s * row_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Seconds of the trainers' collective that ends a step (gradients), after the slowest rank.

    Time that no computation hides: ``fixed_s`` whatever the number of ranks, ``latency_s`` for each message that has to wait
    for another, and ``transfer_s`` to send all of the data once over a rank's link. ``hidden_s``, also to send it once, is
    hidden behind the backward pass of a rank's last micro-batch, as far as that lasts. With ``each_step`` ranks also meet
    after every micro-batch inside an update, as they must with sharded parameters; this costs only the wait.

    Raises: UsageError when a number is negative or not finite.
    """

    fixed_s: float = 2e-3
    latency_s: float = 2e-5
    transfer_s: float = 0.01
    hidden_s: float = 0.0
    algorithm: Algorithm = Algorithm.TREE
    each_step: bool = False

    def __post_init__(self) -> None:
        for name in ("fixed_s", "latency_s", "transfer_s", "hidden_s"):
            _check_not_negative(self, name, getattr(self, name))

    def compute_s(self, ranks: int) -> float:
        """Returns the seconds of one collective of ``ranks`` ranks that no computation hides.

        With either algorithm each rank sends and receives 2 (W - 1) / W of the data, once to reduce and once to spread it. They
        differ in how many messages wait for one another: 2 (W - 1) around a ring, 2 ceil(log2 W) up a tree and down.
        """
        match self.algorithm:
            case Algorithm.RING:
                messages = 2 * (ranks - 1)
            case Algorithm.TREE:
                messages = 2 * ceil(log2(ranks))
        return self.fixed_s + messages * self.latency_s + 2 * (ranks - 1) / ranks * self.transfer_s

    def compute_end_s(self, ready_s: Seconds, computed_s: Seconds, ranks: int) -> float:
        """Returns when the collective of ``ranks`` ranks ends, given when each has computed its last micro-batch, and how long
        it computed that. Ranks that are alike in both may be given as one.
        """
        late_s = np.maximum(0.0, 2 * (ranks - 1) / ranks * self.hidden_s - _BACKWARD * computed_s)
        return float((ready_s + late_s).max()) + self.compute_s(ranks)


NO_COLLECTIVE: Final = CollectiveCost(fixed_s=0, latency_s=0, transfer_s=0)
"""The collective for step times that already include it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured seconds of a training step, by padded tokens: ``rows`` of (tokens, seconds), with ascending tokens.

    Values are linear between rows, constant below the first, and continue the line of the last two above them. Without rows
    the table is not used.

    Raises: UsageError naming a row that is not valid.
    """

    rows: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.rows) == 1:
            raise UsageError("StepTable.rows: one row, but a table needs at least two")
        previous = 0.0
        rows: tuple[object, ...] = self.rows
        for number, row in enumerate(rows, 1):
            match row:
                case (int() | float() as tokens, int() | float() as seconds) if max(abs(tokens), abs(seconds)) < _HUGE:
                    if tokens <= previous or not 0 <= seconds <= LARGEST_S:
                        raise UsageError(
                            f"StepTable.rows: row {number} is {row}; tokens must increase, and seconds lie between 0 and a day"
                        )
                    previous = tokens
                case _:
                    raise UsageError(f"StepTable.rows: row {number} is {row!r:.60}, expected tokens and seconds")

    def compute_step_s(self, tokens: float) -> float:
        """Returns the seconds of a step of ``tokens`` padded tokens."""
        if tokens <= self.rows[0][0]:
            return self.rows[0][1]
        above = min(bisect.bisect_left(self.rows, tokens, key=lambda row: row[0]), len(self.rows) - 1)
        (left, left_s), (right, right_s) = self.rows[above - 1], self.rows[above]
        return max(0.0, left_s + (right_s - left_s) * (tokens - left) / (right - left))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCost:
    """Seconds of one exchange, by an alpha-beta model: ``alpha_s`` per message, ``beta_s`` per byte.

    Raises: UsageError when a number is negative or not finite.
    """

    alpha_s: float = 5e-5
    beta_s: float = 1e-9
    transport: PricedTransport = PricedTransport.REDUCE

    def __post_init__(self) -> None:
        _check_not_negative(self, "alpha_s", self.alpha_s)
        _check_not_negative(self, "beta_s", self.beta_s)

    def compute_offer_s(self, ranks: int) -> float:
        """Returns the seconds from the last rank's offer to the agreement."""
        return self._compute_exchange_s(ranks, WIRE_SIZE * _INTEGER_BYTES)

    def compute_counts_s(self, ranks: int, steps: int, *, resources: int = 0, wants: int = 0) -> float:
        """Returns the seconds from the last rank's counts to their sums. The message also holds the counts of ``resources``
        further resources and ``wants`` integers for what the ranks want.
        """
        return self._compute_exchange_s(ranks, (steps * (_COUNT_INTEGERS + resources) + wants) * _INTEGER_BYTES)

    def compute_reports_s(self, ranks: int) -> float:
        """Returns the seconds to gather all reports, which happens only after a failure."""
        return (ranks - 1) * (self.alpha_s + self.beta_s * _REPORT_BYTES)

    def _compute_exchange_s(self, ranks: int, size_bytes: int) -> float:
        message_s = self.alpha_s + self.beta_s * size_bytes
        match self.transport:
            case PricedTransport.REDUCE:  # up a binary tree and down again
                return 2 * ceil(log2(ranks)) * message_s
            case PricedTransport.GATHER:  # around a ring
                return (ranks - 1) * message_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCost:
    """Seconds of reading (decoding, templating, tokenizing) and of collating. `odb_sim.engine.loading` explains who does what.

    A rank's DataLoader has ``workers`` processes and fetches ``prefetch_factor`` items ahead for each. A worker takes
    ``sample_s`` for each sample and ``per_token_s`` for each token. In a plain DataLoader a worker collates, in ours the loader
    process does. That also takes ``receive_sample_s`` to receive each sample from its worker and to group it; the default is
    about what a core of a small virtual machine needs.

    Raises: UsageError when a number is negative or not finite, or there is no worker or nothing fetched ahead.
    """

    workers: int = 4
    prefetch_factor: int = 2
    sample_s: float = 1e-3
    per_token_s: float = 2e-6
    collate_step_s: float = 1e-3
    collate_per_token_s: float = 2e-8
    receive_sample_s: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("workers", "prefetch_factor"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for item in fields(self):
            _check_not_negative(self, item.name, getattr(self, item.name))

    def compute_plain_s(
        self, samples: NDArray[np.int64], real: NDArray[np.int64], padded: NDArray[np.int64]
    ) -> Seconds:
        """Returns the seconds that a worker of a plain DataLoader takes for each batch; 0 for a batch without samples."""
        read_s = self.sample_s * samples + self.per_token_s * real
        collate_s = self.collate_step_s + self.collate_per_token_s * padded
        seconds: Seconds = np.where(samples > 0, read_s + collate_s, 0.0)
        return seconds

    def compute_collate_s(self, steps: Number, padded_tokens: Number, received_samples: Number) -> Number:
        """Returns the seconds that our loader process takes to collate ``steps`` batches that hold ``padded_tokens`` tokens
        together.

        Meanwhile it receives ``received_samples`` samples of the next window.
        """
        collate_s = self.collate_step_s * steps + self.collate_per_token_s * padded_tokens
        return collate_s + self.receive_sample_s * received_samples


INLINE_LOADER: Final = LoaderCost(
    workers=1, sample_s=0, per_token_s=0, collate_step_s=0, collate_per_token_s=0, receive_sample_s=0
)
"""The loader of a job without workers. Its training thread reads and collates, which is part of the time of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTo:
    """The runs to which the numbers were fitted: their ``ranks``, the ``padded_tokens`` of their largest batch, and the tokens
    of their ``longest`` row. 0 means that the numbers are assumed, or that the row is unknown.
    """

    ranks: int = 0
    padded_tokens: int = 0
    longest: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            check_integer(getattr(self, item.name), f"FittedTo.{item.name}", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """The uncertainty of the numbers: ``rows`` of (name, low, high), a range that holds nine times out of ten. A name is one
    like ``gpu.per_token_s``, or ``error``, a factor on step times for everything that the model leaves out.

    Raises: UsageError naming a row that is not valid.
    """

    rows: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        rows: tuple[object, ...] = self.rows
        for number, row in enumerate(rows, 1):
            match row:
                case (str() as name, int() | float() as low, int() | float() as high) if (
                    (name in RANGED or name == ERROR) and 0 <= low <= high <= LARGEST_S and (low > 0 or name != ERROR)
                ):
                    pass
                case _:
                    raise UsageError(
                        f"Ranges.rows: row {number} is {row!r:.60}, expected a name such as gpu.per_token_s, and two numbers"
                    )
        names = [name for name, *_ in self.rows]
        if len(set(names)) < len(names):
            raise UsageError(f"Ranges.rows: {next(name for name in names if names.count(name) > 1)} appears twice")


RANGED: Final = tuple(
    f"{section}.{item.name}"
    for section, kind in (
        ("gpu", GpuCost),
        ("collective", CollectiveCost),
        ("network", NetworkCost),
        ("loader", LoaderCost),
    )
    for item in fields(kind)
    if item.type == "float"
)
"""The numbers that may have a range."""
ERROR: Final = "error"
ASSUMED: Final = Ranges(
    rows=(
        ("gpu.fixed_s", 0.025, 0.1),
        ("gpu.per_token_s", 9e-5, 1.6e-4),
        ("gpu.per_token2_s", 1e-9, 4e-9),
        ("collective.transfer_s", 0.005, 0.02),
        ("network.alpha_s", 2.5e-5, 1e-4),
        ("loader.sample_s", 5e-4, 2e-3),
    )
)
"""Ranges of the defaults, which are assumed as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All cost models of a run. A step table replaces the GPU's formula for steps that are not idle."""

    gpu: GpuCost = field(default_factory=GpuCost)
    collective: CollectiveCost = field(default_factory=CollectiveCost)
    network: NetworkCost = field(default_factory=NetworkCost)
    loader: LoaderCost = field(default_factory=LoaderCost)
    step_table: StepTable = field(default_factory=StepTable)
    fitted: FittedTo = field(default_factory=FittedTo)
    ranges: Ranges = ASSUMED

    @property
    def balance(self) -> Cost:
        """The cost to balance by: tokens, with the time of attention if these numbers tell it."""
        gpu = self.gpu
        equal = gpu.per_token_s / gpu.per_token2_s if gpu.per_token2_s and not self.step_table.rows else 0.0
        return make_attention_cost(round(equal)) if 1 <= equal < _MOST_EQUAL else TOKENS

    def compute_steps_s(self, padded_tokens: NDArray[np.int64], row_pairs: Squares) -> Seconds:
        """Returns the seconds for many batches at once, without the step's collective, with ``row_pairs`` as in
        `GpuCost.compute_steps_s`. A batch of 0 tokens is an idle step.
        """
        if not self.step_table.rows:
            return self.gpu.compute_steps_s(padded_tokens, row_pairs)
        distinct, places = np.unique(padded_tokens, return_inverse=True)
        seconds = [self.step_table.compute_step_s(size) if size else self.gpu.fixed_s for size in distinct.tolist()]
        return np.array(seconds)[places].reshape(padded_tokens.shape)
