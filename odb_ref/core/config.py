"""The configuration of an epoch: shared by all ranks but for the rank's own number. Spec: R1.4."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Final, TypeVar

from odb_ref.core.errors import UsageError
from odb_ref.core.rules import OdbRule, TargetRule
from odb_ref.core.types import Mode, Sample

DEPTH_STEPS: Final = 8
MAX_AGE_ROUNDS: Final = 4
RAMP_ROUNDS: Final = 3
"""The defaults, for whoever passes them on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an epoch's end, carrying and limits depend on, beside budget, window and rule: written once, here.

    ``limits`` bounds, beside the padded tokens, what a batch may use of each further resource (``Sample.costs``).
    ``max_age_rounds`` bounds for how many rounds a sample may be carried. The first ``ramp_rounds`` windows are smaller
    (halved once for each round still to go), so that the first step comes early.
    """

    limits: tuple[int, ...] = ()
    mode: Mode = Mode.JOIN
    quota_samples: int | None = None
    max_age_rounds: int = MAX_AGE_ROUNDS
    ramp_rounds: int = RAMP_ROUNDS

    def apply(self, what: _HasTerms) -> _HasTerms:
        """Returns ``what`` on these terms.

        Raises: UsageError when they make no sense for it.
        """
        return replace(what, **{item.name: getattr(self, item.name) for item in fields(Terms)})


_HasTerms = TypeVar("_HasTerms", bound=Terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Terms):
    """What a rank must know before an epoch. All but ``rank`` enters the fingerprint that the ranks compare.

    ``window_samples`` is how many samples a rank holds when it forms groups. ``depth_steps`` bounds the queue between the
    loader and its consumer. ``tag`` holds whatever else must be equal on all ranks (seed, epoch, loss scaling ...).

    Raises: UsageError when a value makes no sense.
    """

    rank: int
    world_size: int
    budget_tokens: int
    window_samples: int
    depth_steps: int = DEPTH_STEPS
    rule: TargetRule = field(default_factory=OdbRule)
    tag: str = ""
    shared_json: str = field(init=False, repr=False, compare=False)
    """What must be equal on all ranks, as canonical JSON."""
    fingerprint: int = field(init=False, repr=False, compare=False)
    """A 56-bit hash of ``shared_json``: equal on all ranks, or the epoch ends with MISMATCH. Spec: R7.3."""

    def __post_init__(self) -> None:
        self._check()
        shared: dict[str, object] = {
            "world_size": self.world_size,
            "budget_tokens": self.budget_tokens,
            "window_samples": self.window_samples,
            "mode": str(self.mode),
            "quota_samples": self.quota_samples,
            "max_age_rounds": self.max_age_rounds,
            "ramp_rounds": self.ramp_rounds,
            "rule": self.rule.name,
            "tag": self.tag,
        }
        if self.limits:
            shared["limits"] = self.limits
        shared_json = json.dumps(shared, sort_keys=True)
        digest = hashlib.blake2b(shared_json.encode(), digest_size=7).digest()
        object.__setattr__(self, "shared_json", shared_json)
        object.__setattr__(self, "fingerprint", int.from_bytes(digest, "big"))

    def _check(self) -> None:
        for name in ("world_size", "budget_tokens", "window_samples", "depth_steps", "max_age_rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.limits, default=1) < 1:
            raise UsageError(f"limits must be at least 1 each, got {self.limits}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank must lie in 0..{self.world_size - 1}, got {self.rank}")
        if self.ramp_rounds < 0:
            raise UsageError(f"ramp_rounds must not be negative, got {self.ramp_rounds}")
        if self.quota_samples is not None and self.mode is not Mode.QUOTA:
            raise UsageError("quota_samples needs mode='quota'")
        if self.quota_samples is not None and self.quota_samples < 1:
            raise UsageError(f"quota_samples must be at least 1, got {self.quota_samples}")

    def check_samples(self, samples: Iterable[Sample]) -> None:
        """Checks that this configuration can group every sample.

        Raises: UsageError when a length or a cost makes no sense, or there is not one cost for each limit. Spec: R1.1.
        """
        costs = len(self.limits)
        for sample in samples:
            if sample.length < 1 or not 0 <= sample.supervised <= sample.length:
                raise UsageError(f"sample {sample.id}: length {sample.length}, supervised {sample.supervised}")
            if len(sample.costs) != costs or (costs and min(sample.costs) < 0):
                raise UsageError(f"sample {sample.id}: costs {sample.costs}, expected {costs}, none negative")

    def compute_window_samples(self, round_: int) -> int:
        """Returns the size of the window of ``round_``, at least 1. Spec: R2.3."""
        return max(1, self.window_samples >> max(0, self.ramp_rounds - round_))
