"""The events of a rank. A driver reports everything that happens to the rank as one of these. Spec: R5."""

from __future__ import annotations

from dataclasses import dataclass, field

from odb_ref.core.offer import Offer
from odb_ref.core.types import Sample, StepCounts


@dataclass(frozen=True, slots=True)
class SamplesRead:
    """The answer to ``Read``: samples in sampler order, and whether the source has ended. Spec: R5.1.

    A read may be answered in parts. A part falls short of the request only if more parts follow, or ``is_ended`` or
    ``is_full`` is true; an empty part needs one of these two to be true. With shared shards ``is_ended`` refers to the places
    drawn: no more samples come from them. ``is_full`` is then illegal, because drawn samples are read whatever their size in
    bytes. Spec: R14.4.
    """

    samples: tuple[Sample, ...]
    is_ended: bool = False
    is_full: bool = False
    """True if the reader stopped early because it holds all the bytes it may. This depends on the samples alone."""


@dataclass(frozen=True, slots=True)
class Collated:
    """The answer to ``Collate``: every batch of ``round`` is ready to train on. Spec: R5.2."""

    round: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The answer to ``PostOffer``: the combination of all ranks' offers. Spec: R5.3."""

    agreement: Offer


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to ``PostCounts``: for each step of the round, the sum over all ranks. Spec: R5.4.

    With shared shards, ``wants`` holds what each rank posted as ``wanted``, by rank; otherwise it is empty. Spec: R14.2.
    """

    counts: tuple[StepCounts, ...]
    wants: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's report on a failure: its cause (empty if the rank did not fail), its round and its shared configuration.

    If a rank is several processes, each also reports its peer number and a description of the samples it holds. Spec: R17.4.
    """

    rank: int
    cause: str
    round: int
    config: str
    peer: int = field(default=0, metadata={"absent": 0})
    held: str = field(default="", metadata={"absent": ""})


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to ``PostReport``: all ranks' reports, by rank. It comes at most once, after a failure or mismatch.
    Spec: R5.5.
    """

    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The consumer took the next delivered step from the queue. Spec: R5.6."""


@dataclass(frozen=True, slots=True)
class ConsumerStopped:
    """The consumer has left and takes no further step. Spec: R5.7."""


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """Reading or collating failed on this rank. Spec: R5.8."""

    cause: str


@dataclass(frozen=True, slots=True)
class Urged:
    """Another rank has stopped: proceed to the exchange that says so, without waiting for this rank's consumer.

    A driver that watches its peers sends this event, because this rank's consumer may be waiting for one that has left. An
    early or needless `Urged` is harmless: the rank only runs further ahead of its consumer. Spec: R5.9.
    """


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The exchange is broken: a process is gone or the deadline has passed. ``rank`` is None when unknown. Spec: R5.10."""

    rank: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class BudgetAccepted:
    """From now on this rank accepts a budget of ``tokens``, which may be lower or higher than before. Spec: R5.11, R15.2."""

    tokens: int


Event = (
    SamplesRead
    | Collated
    | Agreed
    | Counted
    | Reported
    | StepTaken
    | ConsumerStopped
    | LocalFailed
    | Urged
    | PeerLost
    | BudgetAccepted
)
