"""The configuration of an epoch, which all ranks share except for a few fields of their own. Spec: R1.4."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Final, TypeVar

from odb_ref.core.batching.budgets import compute_bounds_in_force
from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import OdbRule, TargetRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.batching.updates import PADDING_SHARE, compute_first_place, count_rounds
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode, Sample

DEPTH_STEPS: Final = 8
MAX_AGE_ROUNDS: Final = 4
RAMP_ROUNDS: Final = 3
"""Defaults that other modules use too."""


def choose_ramp(window_samples: int, samples_per_rank: float | None) -> int:
    """Returns the default number of smaller windows at the start of an epoch. ``samples_per_rank`` is None if unknown.

    The poorly filled steps of these windows cost an epoch less than half a step on average. That would be more than one step
    in a hundred if a rank has fewer samples than two windows. Spec: R2.3.
    """
    return 1 if samples_per_rank is not None and samples_per_rank < 2 * window_samples else RAMP_ROUNDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings of an epoch beside budget, window and rule, defined in this one place.

    The checks, the fingerprint, the trace's header and the commands' options follow from the fields. A field's metadata holds
    its minimum as ``least`` and, if commands take it as an option, its ``help``. The header omits a field whose value is
    ``absent``. Every field added after the first trace format has one: the behaviour from before there was a choice.

    ``layout`` is how samples share a batch, and so decides how its tokens are counted. ``order`` is how batches follow each
    other, ``cost`` is the quantity by which the batches of a step are matched over ranks, and ``sizes`` restricts the number
    of samples in a batch. ``limits`` bounds the use of each further resource (``Sample.costs``) by a batch.
    With ``update_samples``, an optimizer update holds that number of samples over all ranks, and no sample is carried from one
    update to the next (R16). The settings for windows and carrying then have no effect. If it is None, windows hold
    ``window_samples``.
    ``max_age_rounds`` bounds for how many rounds a sample may be carried. The first ``ramp_rounds`` windows are smaller
    (halved once for each round of the ramp still to go), so that the first step comes early. None means `choose_ramp`'s
    default.
    """

    layout: Layout = field(
        default=Layout.PADDED,
        metadata={
            "absent": Layout.PADDED,
            "help": "how samples share a batch. padded: one row per sample; packed: one row, with samples laid end to end",
        },
    )
    order: StepOrder = field(
        default=StepOrder.SHUFFLED,
        metadata={
            "absent": StepOrder.FULLEST,
            "help": "order of a round's steps. shuffled: by seed and round; sampler: batches of neighbours, in the sampler's "
            "order; fullest: fullest first",
        },
    )
    cost: Cost = field(
        default=TOKENS,
        metadata={
            "absent": TOKENS,
            "help": "what the steps of ranks are balanced by. tokens; attention/Q: tokens + tokens**2 // Q of each sample",
        },
    )
    sizes: Sizes = field(
        default=Sizes.ANY,
        metadata={
            "absent": Sizes.ANY,
            "help": "sample counts that a padded batch may have, besides 1. powers: powers of two; threes: also three times "
            "these; even: even numbers",
        },
    )
    limits: tuple[int, ...] = field(default=(), metadata={"least": 1, "absent": ()})
    mode: Mode = field(
        default=Mode.JOIN, metadata={"help": "join: to the last sample of every rank; quota: to --quota samples"}
    )
    quota_samples: int | None = field(
        default=None, metadata={"least": 1, "help": "with --mode quota: number of samples, over all ranks, to stop at"}
    )
    update_samples: int | None = field(
        default=None,
        metadata={
            "least": 1,
            "absent": None,
            "flag": "--global-batch",
            "help": "samples of an optimizer update over all ranks: the protocol forms exactly the updates of plain training, "
            "in micro-batches grouped by length (update_samples); a baseline accumulates its steps up to this number",
        },
    )
    padding_share: int = field(
        default=PADDING_SHARE,
        metadata={
            "least": 1,
            "absent": PADDING_SHARE,
            "flag": "--padding-share",
            "help": "a padded batch of an update holds at most this part of the budget in padding: about the cost of an empty "
            "step as a part of a full one (16: a sixteenth)",
        },
    )
    max_age_rounds: int = field(
        default=MAX_AGE_ROUNDS, metadata={"least": 1, "help": "rounds for which a sample may be carried"}
    )
    ramp_rounds: int | None = field(
        default=None,
        metadata={"least": 0, "help": "rounds with a smaller window at the start (3, or 1 in a short epoch)"},
    )

    def apply(self, what: _HasTerms) -> _HasTerms:
        """Returns a copy of ``what`` with these terms. Raises: UsageError when the terms are not valid for ``what``."""
        return replace(what, **{item.name: getattr(self, item.name) for item in fields(Terms)})


_HasTerms = TypeVar("_HasTerms", bound=Terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Terms):
    """What a rank must know before an epoch. All fields but those marked ``is_own`` enter the fingerprint that ranks compare.

    ``window_samples`` is the number of samples a rank holds when it forms groups. ``depth_steps`` bounds the queue between
    the loader and its consumer. ``shared_samples`` is the number of samples in the common order that all ranks draw from
    (R14), or None if each rank has its own source. A rank consists of ``peers`` processes, and this one has the number
    ``peer`` (R17). ``order_seed`` decides how steps are shuffled. ``tag`` holds anything else that must be equal on all ranks
    (epoch, loss scaling ...).

    Spec: R1.4, R14.1, R16.
    Raises: UsageError when a value is not valid.
    """

    rank: int = field(metadata={"is_own": True})
    world_size: int = field(metadata={"least": 1})
    peer: int = field(default=0, metadata={"is_own": True, "least": 0})
    peers: int = field(default=1, metadata={"least": 1, "absent": 1})
    budget_tokens: int = field(metadata={"least": 1})
    window_samples: int = field(metadata={"least": 1})
    ramp_rounds: int = field(default=RAMP_ROUNDS, metadata={"least": 0})
    depth_steps: int = field(default=DEPTH_STEPS, metadata={"least": 1, "is_own": True})
    shared_samples: int | None = field(default=None, metadata={"least": 0, "absent": None})
    rule: TargetRule = field(default_factory=OdbRule)
    order_seed: int = field(default=0, metadata={"least": 0, "absent": 0})
    tag: str = ""
    shared_json: str = field(init=False, repr=False, compare=False)
    """The settings that must be equal on all ranks, as canonical JSON."""
    fingerprint: int = field(init=False, repr=False, compare=False)
    """A 56-bit hash of ``shared_json``: equal on all ranks, or the epoch ends with MISMATCH. Spec: R7.3."""

    def __post_init__(self) -> None:
        values = [(item, getattr(self, item.name)) for item in fields(self) if item.init]
        for item, value in values:
            _check_least(item.name, value, item.metadata.get("least"))
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank must lie in 0..{self.world_size - 1}, got {self.rank}")
        if self.peer >= self.peers:
            raise UsageError(f"peer must lie in 0..{self.peers - 1}, got {self.peer}")
        if not isinstance(self.rule, TargetRule):
            raise UsageError(f"rule needs a name and compute_target(agreement), as a TargetRule has: {self.rule!r}")
        if self.quota_samples is not None and self.mode is not Mode.QUOTA:
            raise UsageError("quota_samples needs mode='quota'")
        self._check_updates()
        if self.sizes != Sizes.ANY and (self.layout != Layout.PADDED or self.order == StepOrder.SAMPLER):
            raise UsageError(
                f"sizes='{self.sizes}' needs layout='padded', where a batch has a row for each sample, and an order other than "
                "'sampler', which keeps neighbours together"
            )
        shared = {
            item.name: value
            for item, value in values
            if not item.metadata.get("is_own") and not ("absent" in item.metadata and value == item.metadata["absent"])
        }
        shared_json = json.dumps(
            shared, sort_keys=True, default=attrgetter("name")
        )  # costs and rules are written by name
        digest = hashlib.blake2b(shared_json.encode(), digest_size=7).digest()
        object.__setattr__(self, "shared_json", shared_json)
        object.__setattr__(self, "fingerprint", int.from_bytes(digest, "big"))

    def _check_updates(self) -> None:
        """Spec: R16.1, R16.7."""
        if self.update_samples is None:
            return
        if self.update_samples < self.world_size:
            raise UsageError(
                f"update_samples={self.update_samples} is less than one sample for each of {self.world_size} ranks"
            )
        if self.quota_samples is not None:
            raise UsageError("quota_samples would cut an update: with update_samples, count updates instead")
        if self.mode is Mode.QUOTA and self.shared_samples is not None:
            raise UsageError("with update_samples and one order for all ranks, ranks end together: use mode='join'")

    def check_samples(self, samples: Iterable[Sample]) -> None:
        """Checks that this configuration can group every sample.

        Raises: UsageError when a length or a cost is not valid, or a sample does not have one cost for each limit. Spec: R1.1.
        """
        costs = len(self.limits)
        is_priced = self.cost != TOKENS
        for sample in samples:
            if sample.length < 1 or not 0 <= sample.supervised <= sample.length:
                raise UsageError(f"sample {sample.id}: length {sample.length}, supervised {sample.supervised}")
            if len(sample.costs) != costs or (costs and min(sample.costs) < 0):
                raise UsageError(f"sample {sample.id}: costs {sample.costs}, expected {costs}, none negative")
            if is_priced and self.cost.of_tokens(sample.length) < 1:
                raise UsageError(f"sample {sample.id}: {self.cost.name} gives {sample.length} tokens a cost below 1")

    def compute_round_bounds(self, agreed_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Returns the token budget and the limits of a round whose agreed budget is ``agreed_tokens``. Spec: R15.1."""
        return compute_bounds_in_force(self.budget_tokens, self.limits, agreed_tokens)

    def compute_window_samples(self, round_: int) -> int:
        """Returns the size of the window of ``round_``: at least 1, except in updates. Spec: R2.3, R16.2."""
        if self.update_samples is not None:
            update = round_ // self.update_rounds
            is_reading = self.has_steps(round_)
            return self.compute_update_place(update + 1) - self.compute_update_place(update) if is_reading else 0
        return max(1, self.window_samples >> max(0, self.ramp_rounds - round_))

    def compute_shared_window(self, round_: int, drawn: int) -> int:
        """Returns the size of the window of ``round_`` once ``drawn`` places of the common order are drawn. Spec: R14.2."""
        left = -(-((self.shared_samples or 0) - drawn) // self.world_size)
        return self.layout.compute_shared_window(self.compute_window_samples(round_), left)

    def compute_update_place(self, update: int) -> int:
        """Returns the place in the rank's own source at which ``update`` begins; 0 without updates. Spec: R16.2."""
        size = self.update_samples or 0
        return compute_first_place(update, update_samples=size, rank=self.rank, world_size=self.world_size)

    @property
    def update_rounds(self) -> int:
        """The number of rounds in an update, or 1 without ``update_samples``. Only the last round of an update forms steps.
        Spec: R16.3, R16.4.
        """
        if self.update_samples is None:
            return 1
        return count_rounds(self.update_samples, self.world_size, is_shared=self.shared_samples is not None)

    def has_steps(self, round_: int) -> bool:
        """Returns True when ``round_`` forms steps: with updates only the last of each, otherwise every round. Spec: R16.3."""
        return (round_ + 1) % self.update_rounds == 0

    def compute_most_padding(self, budget_tokens: int) -> int:
        """Returns how many tokens of padding a group may hold under a budget. Spec: R16.3."""
        return budget_tokens if self.update_samples is None else budget_tokens // self.padding_share


def _check_least(name: str, value: int | tuple[int, ...] | None, least: int | None) -> None:
    if least is None or value is None or value == ():
        return
    if isinstance(value, tuple) and min(value) < least:
        raise UsageError(f"{name} must be at least {least} each, got {value}")
    if isinstance(value, int) and value < least:
        wanted = f"be at least {least}" if least else "not be negative"
        raise UsageError(f"{name} must {wanted}, got {value}")
