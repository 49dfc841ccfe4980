"""The effects a rank asks its driver to perform, in order. Each docstring names the event that answers it. Spec: R6."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from odb_ref.core.events import Report
from odb_ref.core.offer import Offer
from odb_ref.core.types import Step, StepCounts
from odb_ref.core.values import make_draft


@dataclass(frozen=True, slots=True)
class Read:
    """Read ``count`` samples in sampler order, or up to the end of the source. Answer: ``SamplesRead``. Spec: R6.1.

    With shared shards or updates, ``first`` is the first of the ``count`` places to read. Spec: R14.4, R16.2.
    """

    count: int
    first: int | None = None


@dataclass(frozen=True, slots=True)
class PostOffer:
    """Take part in the reduction of offers. Answer: ``Agreed``. Spec: R6.2."""

    offer: Offer
    digest: int | None = None
    """A digest of the samples that all peers of the rank must hold; None if it has no other peers, or ends the epoch.
    Spec: R17.3.
    """


@dataclass(frozen=True, slots=True)
class PostCounts:
    """Take part in the sum of per-step counts; all ranks post the same number of steps. Answer: ``Counted``. Spec: R6.3.

    With shared shards, ``wanted`` is gathered from all ranks in the same exchange. Spec: R14.2.
    """

    counts: tuple[StepCounts, ...]
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class PostReport:
    """Take part in the gathering of reports. Answer: ``Reported``. Spec: R6.4."""

    report: Report


@dataclass(frozen=True, slots=True)
class Collate:
    """Collate the batches of ``steps``, all of one round. Answer, once they are ready to train on: ``Collated``. Spec: R6.5."""

    round: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Put ``step`` into the consumer's queue, which has room. Answer, once the consumer takes it: ``StepTaken``. Spec: R6.6."""

    step: Step


make_deliver = make_draft(Deliver)
"""A faster constructor of `Deliver`."""


class OutcomeKind(StrEnum):
    """How an epoch ended. Spec: R7.1."""

    COMPLETE = "complete"
    """Join mode: every sample was emitted. Quota mode: the quota was met, or a rank ran dry."""
    STOPPED = "stopped"
    """A consumer left early, which is an error for every other consumer."""
    FAILED = "failed"
    """Reading or collating failed on a rank."""
    MISMATCH = "mismatch"
    """The ranks differ in configuration or round, or the peers of a rank hold different samples."""
    LOST = "lost"
    """The exchange broke: a process is gone or the deadline has passed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How and why the epoch ended, the same on every rank (see R7.5 for LOST). ``rank`` is where it began, None if unknown
    or if no rank caused the end.
    """

    kind: OutcomeKind
    rank: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """The epoch is over for this rank. No answer. Spec: R6.7.

    The driver hands out no step numbered ``step_limit`` or higher, not even one already delivered. When the consumer then
    asks for another step, the driver ends the iteration (COMPLETE) or raises the error that ``outcome`` describes.
    """

    outcome: Outcome
    step_limit: int


Post = PostOffer | PostCounts | PostReport
"""An effect that takes part in an exchange. Spec: R6.2, R6.3, R6.4."""

Effect = Read | Post | Collate | Deliver | Finish
