"""Jobs together: does a resumed epoch go on where one had stopped, and is an epoch begun twice? Spec: R9.6."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from odb_ref.trace.check.account import NOTHING, Account
from odb_ref.trace.check.verdict import Judgement, Property
from odb_ref.trace.format import Header
from odb_ref.trace.origin import Lot, Origin, OwnedLot


@dataclass(slots=True)
class Lineage:
    """What one job's traces say of where it comes from and what it left behind: ``job`` is an epoch, or a part of one."""

    header: Header
    origins: list[Origin] = field(default_factory=list)
    """Of each file."""
    accounts: dict[int, Account] = field(default_factory=dict)
    """By rank, where something is counted."""
    is_resumed: bool = False
    """True when a rank's first record says so."""

    @property
    def inputs(self) -> dict[int | None, OwnedLot]:
        """What there was to train on, by whose it is."""
        return {part.rank: part for origin in self.origins for part in origin.inputs}

    @property
    def before(self) -> dict[int | None, OwnedLot]:
        """What had been trained on before, by whose it is."""
        return {part.rank: part for origin in self.origins for part in origin.before}

    @property
    def where(self) -> tuple[str, int, int]:
        """What the parts of one epoch have in common: its driver and number, and which of a rank's peers wrote it."""
        return self.header.driver, self.header.epoch, self.header.peer

    @property
    def run(self) -> str:
        """The run that it is of; empty where that is not known."""
        return self.origins[0].run

    def sum_inputs(self) -> Lot:
        """Returns what there was to train on, on all ranks that say so."""
        return sum((part.lot for part in self.inputs.values()), NOTHING)

    def compute_taken(self, rank: int | None, steps: int) -> Lot | None:
        """Returns what a rank, or all together, had trained on after so many steps; None where that is not known."""
        before = self.before
        lot = before[rank].lot if rank in before else NOTHING
        for number in range(self.header.world_size) if rank is None else (rank,):
            account = self.accounts.get(number)
            if account is None or steps not in account.found:
                return None
            lot += account.found[steps]
            if rank is None and number in before:
                lot += before[number].lot
        return lot


def judge_lineage(job: Lineage, all_jobs: Sequence[Lineage]) -> Iterator[tuple[int | None, Judgement]]:
    """Yields what is judged of a job among all that are given, by rank."""
    for part in job.before.values():
        sources = _list_sources(part, job, all_jobs)
        if sources:
            is_known = any(source.compute_taken(part.rank, part.steps) == part.lot for source in sources)
            what = f"goes on after {part.steps} steps with {part.lot.samples} samples trained on, which no trace of it shows"
            yield part.rank, (Property.RESUME, "" if is_known else what)
    if job.run and not job.before and not job.is_resumed:
        earlier = next(
            other for other in all_jobs if _is_same_epoch(job, other) and not other.before and not other.is_resumed
        )
        is_first = earlier is job or earlier.run != job.run
        yield None, (Property.ONCE, "" if is_first else f"begins epoch {job.header.epoch} of the run again")


def list_unsaid(job: Lineage, all_jobs: Sequence[Lineage]) -> Iterator[str]:
    """Yields what of that cannot be said, and why."""
    if not job.inputs:
        yield "whether all samples were trained on: the header does not say how many there are"
    if job.is_resumed and not job.before:
        yield "whether it goes on where it had stopped: the header does not say what had been trained on"
    elif any(not _list_sources(part, job, all_jobs) for part in job.before.values()):
        yield "whether it goes on where it had stopped: no trace of the part before is given"
    if not job.run:
        yield "whether an epoch was trained on twice, or left out: the header does not say of which run it is"
        return
    epochs = {other.header.epoch for other in all_jobs if other.run == job.run}
    if job.header.epoch > min(epochs) and job.header.epoch - 1 not in epochs:
        yield f"whether epoch {job.header.epoch - 1} was trained on: no trace of it is given"


def _is_same_epoch(job: Lineage, other: Lineage) -> bool:
    return job.where == other.where and (other is job or job.run == other.run)


def _list_sources(part: OwnedLot, job: Lineage, all_jobs: Sequence[Lineage]) -> list[Lineage]:
    """Returns the jobs that a resumed one may go on from: of the same epoch, with the same samples."""
    found = []
    for other in all_jobs:
        if other is job or other.where != job.where or not other.accounts:
            continue
        if part.rank is not None:
            is_same = other.inputs.get(part.rank, other.inputs.get(None)) == job.inputs.get(
                part.rank, job.inputs.get(None)
            )
        else:
            earlier = other.before.get(None)
            had = other.sum_inputs() + (earlier.lot if earlier else NOTHING)
            is_same = had == job.sum_inputs() + part.lot
        if is_same and other.inputs:
            found.append(other)
    return found
