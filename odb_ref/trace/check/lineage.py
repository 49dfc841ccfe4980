"""Compares jobs: a resumed epoch must continue where another stopped, none may begin twice, and peers must train alike.
Spec: R9.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from odb_ref.trace.check.account import NOTHING, Account
from odb_ref.trace.check.verdict import Judgement, Property
from odb_ref.trace.format import Header
from odb_ref.trace.origin import Lot, Origin, OwnedLot

_KEPT: Final = 8
"""The number of rounds kept. In a correct trace no peer is more than one ahead of another."""


class PlanDigest:
    """A digest of all that a rank has planned by the end of each of the last rounds, for comparison with its peers."""

    __slots__ = ("_digest", "is_ended", "rounds")

    def __init__(self) -> None:
        self._digest = b""
        self.rounds: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self.is_ended = False
        """True when the rank ended, and not by a loss."""

    def plan(self, round_: int, what: object) -> None:
        """Adds what a round has planned."""
        self._digest = blake2b(self._digest + repr(what).encode(), digest_size=16).digest()
        self.rounds.append((round_, self._digest))


@dataclass(slots=True)
class Lineage:
    """Where one job comes from and what it trained on, by its traces. A job is an epoch or a part of one."""

    header: Header
    files: list[tuple[set[int], Origin]] = field(default_factory=list)
    """The ranks of each file, and its origin."""
    accounts: dict[int, Account] = field(default_factory=dict)
    """The accounts of the ranks in these traces."""
    planned: dict[int, PlanDigest] = field(default_factory=dict)
    """By rank, if the ranks have peers."""
    is_resumed: bool = False
    """True when the first record of some rank is a resumption."""

    @property
    def inputs(self) -> dict[int | None, OwnedLot]:
        """The samples to train on, by rank, or under None those of all ranks together."""
        return {part.rank: part for _, origin in self.files for part in origin.inputs}

    @property
    def before(self) -> dict[int | None, OwnedLot]:
        """The samples trained on before, by rank, or under None those of all ranks together."""
        return {part.rank: part for _, origin in self.files for part in origin.before}

    @property
    def where(self) -> tuple[str, int, int]:
        """What the parts of one epoch have in common: driver, epoch, and the number of the peer that wrote them."""
        return self.header.driver, self.header.epoch, self.header.peer

    @property
    def run(self) -> str:
        """The run of the job, or an empty text if unknown."""
        return max(origin.run for _, origin in self.files)

    @property
    def is_rest(self) -> bool:
        """True when the job does not begin the epoch."""
        return self.is_resumed or bool(self.before)

    @property
    def steps_before(self) -> int:
        """The most steps of the epoch after which some rank resumes."""
        return max((part.steps for part in self.before.values()), default=0)

    def list_silent(self, get: Callable[[Origin], Sequence[OwnedLot]]) -> list[int]:
        """Returns the ranks for which their own file's header lacks the lots that ``get`` looks up."""
        told = [(ranks, {part.rank for part in get(origin)}) for ranks, origin in self.files]
        return sorted(rank for ranks, said in told for rank in ranks if not said & {rank, None})

    def sum_inputs(self) -> Lot:
        """Returns the samples to train on, summed over all ranks that state them."""
        return sum((part.lot for part in self.inputs.values()), NOTHING)

    @property
    def _others(self) -> Lot:
        """The samples that another number of ranks trained on before; the inputs are then only what was left."""
        before = self.before
        return before[None].lot if None in before else NOTHING

    def is_of_epoch(self, other: Lineage) -> bool:
        """Returns True when the job has the same samples to train on as ``other``, except for those set aside there."""
        missing = other.sum_inputs() + other._others - self.sum_inputs() - self._others
        bad = sum(account.set_aside.samples for account in other.accounts.values())
        return bool(other.inputs) and (missing == NOTHING or 0 < missing.samples <= bad)

    def compute_taken(self, rank: int | None, steps: int) -> Lot | None:
        """Returns what a rank (None: all ranks together) had trained on after ``steps`` steps, or None if unknown."""
        before = self.before
        ranks = range(self.header.world_size) if rank is None else (rank,)
        lot = sum(
            (before[number].lot for number in ranks if number in before), self._others if rank is None else NOTHING
        )
        for number in ranks:
            account = self.accounts.get(number)
            if account is None or steps not in account.found:
                return None
            lot += account.found[steps]
        return lot


def judge_lineage(job: Lineage, all_jobs: Sequence[Lineage]) -> Iterator[tuple[int | None, Judgement]]:
    """Yields the judgements on a job in the light of all jobs, by rank."""
    said = [part for _, origin in job.files for part in origin.inputs]
    for rank, part in job.inputs.items():
        if any(other.rank == rank and other != part for other in said):
            yield rank, (Property.COVER, "headers differ about the samples that it had to train on")
    for part in job.before.values():
        sources = _list_sources(part, job, all_jobs)
        if not sources:
            continue
        had = [source for source in sources if _has_same_samples(part, job, source)]
        is_known = any(source.compute_taken(part.rank, part.steps) == part.lot for source in had)
        what = (
            f"resumes after {part.steps} steps with {part.lot.samples} samples trained on, which no trace of the "
            "earlier part shows"
        )
        what = what if had else "is resumed with other samples than the earlier part had"
        if had or part.run:
            yield part.rank, (Property.RESUME, "" if is_known else what)
    if job.run and not job.is_rest:
        earlier = next(other for other in all_jobs if _is_begun_alike(other, job) and other.run == job.run)
        is_first = earlier is job
        yield None, (Property.ONCE, "" if is_first else f"begins epoch {job.header.epoch} of the run again")


def _list_sources(part: OwnedLot, job: Lineage, all_jobs: Sequence[Lineage]) -> list[Lineage]:
    """Returns the jobs from which a resumed one may continue: those of the same epoch, and of the run if ``part`` names one.
    If ``part`` is of all ranks together, jobs that were themselves resumed after it are left out.
    """
    found = [other for other in all_jobs if other is not job and other.where == job.where]
    found = [other for other in found if part.rank is not None or part not in other.before.values()]
    found = [other for other in found if part.run in ("", other.run)]
    return [other for other in found if part.rank is None or other.header.world_size == job.header.world_size]


def _has_same_samples(part: OwnedLot, job: Lineage, other: Lineage) -> bool:
    """Returns True when both jobs have the same samples to train on, for the rank of ``part`` or for all ranks together."""
    if part.rank is None:
        return job.is_of_epoch(other)
    ours, theirs = (side.get(part.rank, side.get(None)) for side in (job.inputs, other.inputs))
    return ours is not None and theirs is not None and ours.lot == theirs.lot


def _is_begun_alike(one: Lineage, other: Lineage) -> bool:
    return one.where == other.where and not one.is_rest


def _goes_on_alike(one: Lineage, other: Lineage) -> bool:
    """Returns True when both resume one epoch after the same steps. The first one's training may then have been lost."""
    return one.where == other.where and bool(one.before) and one.before == other.before


def judge_peers(job: Lineage, all_jobs: Sequence[Lineage]) -> Iterator[tuple[int | None, Judgement]]:
    """Yields, by rank, whether a job's ranks have planned the same as their peers, as far as both go. Spec: R17."""
    others = [other for other in all_jobs if _are_peers(job, other)]
    for rank, mine in job.planned.items() if others else ():
        known = [other.planned[rank] for other in others if rank in other.planned]
        is_right = (all if job.run else any)(_is_alike(mine, theirs) for theirs in known)
        yield rank, (Property.PEERS, "" if is_right else "plans other steps than its peer, or other samples in them")


def _are_peers(job: Lineage, other: Lineage) -> bool:
    mine, theirs = job.header, other.header
    is_same = (mine.driver, mine.epoch, mine.config, job.run) == (theirs.driver, theirs.epoch, theirs.config, other.run)
    starts = [{part.steps for part in side.before.values()} for side in (job, other)]
    return is_same and mine.peer != theirs.peer and starts[0] == starts[1]


def _is_alike(one: PlanDigest, other: PlanDigest) -> bool:
    """Returns True when two peers planned the same up to the last round both have, and ended in the same if both ended."""
    first, second = dict(one.rounds), dict(other.rounds)
    both = first.keys() & second.keys()
    is_same = all(first[round_] == second[round_] for round_ in both)
    ends = [max(rounds, default=None) for rounds in (first, second)]
    return is_same and (ends[0] == ends[1] or not (one.is_ended and other.is_ended))


def list_unsaid(job: Lineage, all_jobs: Sequence[Lineage]) -> Iterator[str]:
    """Yields the questions of lineage that the traces cannot answer, and why."""
    everybody = set[int]().union(*(ranks for ranks, _ in job.files))
    if silent := job.list_silent(lambda origin: origin.inputs):
        yield f"whether all samples were trained on: {_name(silent, everybody)} does not say how many there are"
    if job.is_resumed and (silent := job.list_silent(lambda origin: origin.before)):
        yield f"whether it resumed where it had stopped: {_name(silent, everybody)} does not say what had been trained on"
    elif any(not _list_sources(part, job, all_jobs) for part in job.before.values()):
        yield "whether it resumed where it had stopped: no trace of the earlier part is given"
    elif any(not part.run and not _list_same(part, job, all_jobs) for part in job.before.values()):
        yield "whether it resumed where it had stopped: the traces of that epoch are of other samples"
    elif begun := [other for other in all_jobs if other is not job and _goes_on_alike(other, job)]:
        what = f"whether epoch {job.header.epoch} was trained on {len(begun) + 1} times after step {job.steps_before}"
        yield f"{what}: other traces resume from there too"
    if job.planned and not any(_are_peers(job, other) for other in all_jobs):
        yield "whether the other peers of each rank train on the same: no trace of them is given"
    if not job.run:
        yield "whether an epoch was trained on twice, or left out: the header does not name its run"
        return
    if job.is_rest:
        return
    epoch, samples = job.header.epoch, job.sum_inputs()
    same = [other for other in all_jobs if other.where[::2] == job.where[::2]]
    if any(_is_begun_alike(other, job) and other.run != job.run and other.sum_inputs() == samples for other in same):
        yield f"whether epoch {epoch} was trained on twice: another run begins it with the same samples"
    if epoch and not any(other.header.epoch == epoch - 1 for other in same):
        yield f"whether epoch {epoch - 1} was trained on: no trace of it is given"
    for other in same:
        if (
            (other.run, other.header.epoch) == (job.run, epoch - 1)
            and not other.is_rest
            and other.sum_inputs() != samples
        ):
            yield f"whether epoch {epoch} was meant to have other samples than epoch {epoch - 1}"


def _list_same(part: OwnedLot, job: Lineage, all_jobs: Sequence[Lineage]) -> list[Lineage]:
    return [other for other in _list_sources(part, job, all_jobs) if _has_same_samples(part, job, other)]


def _name(ranks: Iterable[int], everybody: set[int]) -> str:
    """Returns the words for the headers of ``ranks``."""
    told = ", ".join(map(str, ranks))
    return "the header" if {*ranks} == everybody else f"the header of rank {told}"
