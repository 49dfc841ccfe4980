"""What can happen to a rank. A driver turns reality into these and nothing else. Spec: R5."""

from __future__ import annotations

from dataclasses import dataclass, field

from odb_ref.core.offer import Offer
from odb_ref.core.types import Sample, StepCounts


@dataclass(frozen=True, slots=True)
class SamplesRead:
    """The answer to ``Read``: samples in sampler order, and whether the source has ended. Spec: R5.1.

    May answer a read in parts; a part is short of the request only when more follow or ``is_ended`` or ``is_full`` is true,
    and holds no sample only when one of these is true. With shared shards ``is_ended`` speaks of the places drawn: no more
    comes of them, and what is drawn is read whatever its bytes. Spec: R14.4.
    """

    samples: tuple[Sample, ...]
    is_ended: bool = False
    is_full: bool = False
    """The reader stops below what was asked for: it holds all the bytes it may. Depends on nothing but samples."""


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
    """The answer to ``PostCounts``: per step of the round, the sum over all ranks. Spec: R5.4.

    With shared shards also how many samples each rank wants next, by rank; else ``wants`` is empty. Spec: R14.2.
    """

    counts: tuple[StepCounts, ...]
    wants: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank adds to a failure: its cause (empty when it did not fail), its round and its shared configuration.

    Where a rank is several processes, each says which of the peers it is, and what samples it holds. Spec: R17.4.
    """

    rank: int
    cause: str
    round: int
    config: str
    peer: int = field(default=0, metadata={"absent": 0})
    held: str = field(default="", metadata={"absent": ""})


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to ``PostReport``: all ranks' reports, by rank. Happens at most once, on failure only. Spec: R5.5."""

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
    """Another rank is known to have stopped: go on to the exchange that says so without waiting for this consumer.

    Sent by a driver that watches its peers; needed where this rank's consumer may wait for ever for one that has left.
    Harmless when it comes early or for nothing: the rank then runs further ahead of its consumer. Spec: R5.9.
    """


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The exchange is broken: a process is gone or the deadline has passed. ``rank`` is None when unknown. Spec: R5.10."""

    rank: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class BudgetAccepted:
    """From now on this rank accepts batches of so many tokens, of fewer or of more than before. Spec: R5.11, R15.2."""

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
