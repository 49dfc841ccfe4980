"""What a rank asks of its driver. Effects are performed in order; those with an answer say which event it is. Spec: R6."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from odb_ref.core.events import Report
from odb_ref.core.offer import Offer
from odb_ref.core.types import Step, StepCounts
from odb_ref.core.values import make_draft


@dataclass(frozen=True, slots=True)
class Read:
    """Read ``count`` samples in sampler order, or to the end of the source. Answer: ``SamplesRead``. Spec: R6.1.

    With shared shards, what lies at ``count`` places of the common order from ``first`` on. Spec: R14.4.
    """

    count: int
    first: int | None = None


@dataclass(frozen=True, slots=True)
class PostOffer:
    """Take part in the reduction of offers. Answer: ``Agreed``. Spec: R6.2."""

    offer: Offer
    digest: int | None = None
    """The digest of what a rank's peers must have alike; None when there is none, or it no longer matters. Spec: R17.3."""


@dataclass(frozen=True, slots=True)
class PostCounts:
    """Take part in the sum of per-step counts; all ranks post equally many. Answer: ``Counted``. Spec: R6.3.

    With shared shards also in the gathering of what the ranks want, a number each. Spec: R14.2.
    """

    counts: tuple[StepCounts, ...]
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class PostReport:
    """Take part in the gathering of reports. Answer: ``Reported``. Spec: R6.4."""

    report: Report


@dataclass(frozen=True, slots=True)
class Collate:
    """Make the batches of ``steps``, all of one round, ready to train on. Answer: ``Collated``. Spec: R6.5."""

    round: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Put ``step`` into the consumer's queue, which has room. Answer, when the consumer takes it: ``StepTaken``. Spec: R6.6."""

    step: Step


make_deliver = make_draft(Deliver)
"""`Deliver`, for who makes many."""


class OutcomeKind(StrEnum):
    """How an epoch ended. Spec: R7.1."""

    COMPLETE = "complete"
    """Join mode: everything is emitted. Quota mode: the quota is met or a rank has run dry."""
    STOPPED = "stopped"
    """A consumer left early; an error for every consumer that goes on."""
    FAILED = "failed"
    """Reading or collating failed on a rank."""
    MISMATCH = "mismatch"
    """The ranks do not run the same configuration or the same round."""
    LOST = "lost"
    """The exchange broke: a process is gone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the epoch ended, the same on every rank: the rank it began with (None when nobody's or unknown) and why."""

    kind: OutcomeKind
    rank: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """The epoch is over for this rank. No answer. Spec: R6.7.

    The driver hands out no step numbered ``step_limit`` or higher, not even one already delivered; then, asked for more,
    it ends the iteration (COMPLETE) or raises what ``outcome`` says.
    """

    outcome: Outcome
    step_limit: int


Post = PostOffer | PostCounts | PostReport
"""What takes part in an exchange. Spec: R6.2, R6.3, R6.4."""

Effect = Read | Post | Collate | Deliver | Finish
