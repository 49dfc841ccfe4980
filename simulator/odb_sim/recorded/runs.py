"""Recorded runs: the trace files of a job as typed values, with times if the driver wrote them.

They hold samples, rounds and steps by rank, which can be compared with a simulation (`odb_sim.recorded.replay`), and the spans
between effects and their answers, to which a cost model can be fitted (`odb_sim.recorded.calibrate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import file_digest
from itertools import accumulate
from pathlib import Path

from odb_ref.core.batching.budgets import compute_offered
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Sample
from odb_ref.trace.check.decode import (
    Settings,
    get_counts,
    get_integer,
    get_kind,
    get_object,
    get_optional,
    get_samples,
    iterate_steps,
)
from odb_ref.trace.check.job import open_traces
from odb_ref.trace.check.stream import Stream, group_into_jobs
from odb_ref.trace.format import (
    JsonObject,
    Record,
    TraceError,
    decode_config,
    decode_offer,
    decode_resumed,
    decode_sample,
)
from odb_sim.inputs.conditions import BudgetTable
from odb_sim.inputs.workload import LARGEST_WORKLOAD


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of one rank: the positions of its samples, and the counts of all ranks together."""

    number: int
    positions: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """``seconds`` between an effect, at ``asked_s``, and its answer, for ``items`` samples or steps of ``tokens`` tokens."""

    items: int
    tokens: int
    seconds: float
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """``seconds`` between a post and its answer. ``steps`` is the number of steps counted, or None for an offer."""

    steps: int | None
    seconds: float


@dataclass(slots=True)
class RankRecord:
    """What one rank did. Times are empty if the trace has none."""

    rank: int
    samples: list[Sample] = field(default_factory=list)
    """The samples in the order read: position 0, 1, 2 ... A trace of a resumed epoch lacks those trained on before. Samples of
    one token with id -1 take their places, which no step can hold (ONCE)."""
    places: list[int] = field(default_factory=list)
    """With shared shards: the places of the requested samples in the common order."""
    has_gaps: bool = False
    """True when fewer were read than drawn, because some were set aside, and the trace does not say which."""
    start: RoundStart = field(default_factory=RoundStart)
    """Where the epoch was resumed, or usually its beginning."""
    is_ended: bool = False
    """True when the rank has read its whole source."""
    full_reads: dict[int, int] = field(default_factory=dict)
    """By number of the read: the samples of reads that ended because the window was full in bytes."""
    rounds: list[tuple[RecordedStep, ...]] = field(default_factory=list)
    """The steps of each round that was collated."""
    budgets: list[int] = field(default_factory=list)
    """The budget of the next round agreed on in each round; NONE if it is the configuration's."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """For each step: its padded tokens, and its row pairs, as `odb_sim.engine.batches.Batches` has them."""
    longest: int = 0
    """The tokens of the longest sample in any step."""
    taken_steps: int = 0
    outcome: str = ""
    """How the epoch ended; empty if the record breaks off."""
    records: int = 0
    reads: list[Span] = field(default_factory=list)
    collations: list[Span] = field(default_factory=list)
    exchanges: list[Answered] = field(default_factory=list)
    """Exchanges of offers and of counts, in the order they were answered."""
    delivered_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    last_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One epoch of a job: its configuration (of rank 0) and the record of every rank, by rank."""

    paths: tuple[str, ...]
    driver: str
    config: Config
    ranks: tuple[RankRecord, ...]
    workers: int | None = None
    """The reader processes of each rank, 0 if the training thread reads, or None if the trace does not say."""

    @property
    def has_times(self) -> bool:
        """True when every record carries the driver's clock."""
        return all(len(rank.taken_s) == rank.taken_steps for rank in self.ranks) and self.ranks[0].last_s > 0

    @property
    def rounds(self) -> int:
        """The rounds in which every rank has formed steps."""
        return min(len(rank.rounds) for rank in self.ranks)

    @property
    def steps(self) -> int:
        """The steps that every rank's trainer has taken."""
        return min(rank.taken_steps for rank in self.ranks)

    @property
    def budgets(self) -> Sequence[int]:
        """The agreed budget of the next round, round by round. Spec: R15.3."""
        return max((rank.budgets for rank in self.ranks), key=len)

    @property
    def budget_schedule(self) -> BudgetTable | None:
        """A schedule that gives every rank the agreed budgets, or None if they were never below the largest budget.

        The budget agreed on in the first round is what each rank begins with (`starts`), because no schedule is asked before.
        """
        if not any(budget < self.config.budget_tokens for budget in self.budgets):
            return None
        rank = max(self.ranks, key=lambda rank: len(rank.rounds))
        planned = accumulate(map(len, rank.rounds), initial=rank.start.planned_steps)
        changes = dict(zip(planned, self.budgets, strict=False))
        return BudgetTable(tuple({0: self.config.budget_tokens, **changes}.items()))

    @property
    def starts(self) -> tuple[RoundStart, ...]:
        """Where each rank begins, or resumes a saved epoch; empty if all begin with the defaults."""
        starts = [rank.start for rank in self.ranks]
        if self.budget_schedule is not None:
            accepted = compute_offered(self.budgets[0], self.config.budget_tokens)
            starts = [replace(start, accepted_tokens=accepted) for start in starts]
        return tuple(starts) if any(start != RoundStart() for start in starts) else ()

    @property
    def full_reads(self) -> tuple[Mapping[int, int], ...]:
        """Where the windows of each rank were full in bytes; empty if none was."""
        full_reads = tuple(rank.full_reads for rank in self.ranks)
        return full_reads if any(full_reads) else ()

    @property
    def name(self) -> str:
        """The name of the first file, and the number of further ones."""
        return self.paths[0] + (f" and {len(self.paths) - 1} more" if self.paths[1:] else "")


def find_workers(runs: Sequence[RecordedRun]) -> int:
    """Returns the number of workers that every rank of ``runs`` had, or 1 if the traces do not say.

    Raises: UsageError when runs differ.
    """
    said = {run.workers: run.name for run in runs}
    if len(said) > 1:
        shown = ", ".join(f"{name} with {workers}" for workers, name in said.items())
        raise UsageError(f"the runs had different numbers of workers ({shown}): say --workers, or calibrate them apart")
    (workers,) = said
    return 1 if workers is None else workers


def load_runs(paths: Sequence[str | Path], *, depth_steps: int | None = None) -> list[RecordedRun]:
    """Returns the runs in trace files or folders, in the order given. Files of one job may each hold some of its ranks.

    ``depth_steps`` is the depth of the queue between loader and trainer, which a trace does not record. If it is left out, it
    is the most steps that any rank ever had in its queue.

    Raises: UsageError (TraceError), naming the file, when one cannot be read or is not complete.
    """
    return [
        _load_run(job, depth_steps)
        for job in group_into_jobs([stream for path in paths for stream in open_traces(Path(path))])
    ]


def check_no_copies(paths: Sequence[str | Path]) -> None:
    """Checks that no trace file is given twice, even as a copy. Raises: UsageError naming the file."""
    names: dict[bytes, str] = {}
    for stream in (stream for path in paths for stream in open_traces(Path(path))):
        with open(stream.path, "rb") as file:
            digest = file_digest(file, "sha256").digest()
        if digest in names:
            raise UsageError(f"{stream.path}: holds the same as {names[digest]}: give each trace once")
        names[digest] = str(stream.path)


def _load_run(job: Sequence[Stream], depth_steps: int | None) -> RecordedRun:
    header = job[0].header
    paths = tuple(str(stream.path) for stream in job)
    readers: dict[int, _Reader] = {}
    for stream in job:
        while stream.next is not None:
            reader = readers.setdefault(stream.next.rank, _Reader(stream.next.rank, stream.settings))
            try:
                reader.read(stream.next)
            except TraceError as error:
                raise stream.locate(error) from error
            stream.advance()
    missing = [rank for rank in range(header.world_size) if rank not in readers]
    if missing:
        raise UsageError(
            f"{paths[0]}: no record of rank {missing[0]}: give all {header.world_size} ranks' files together"
        )
    depth = depth_steps or max(1, *(reader.fullest_queue for reader in readers.values()))
    try:
        config = decode_config(header.config, rank=0, depth_steps=depth)
    except UsageError as error:
        raise UsageError(f"{paths[0]}:1: {error}") from error
    return RecordedRun(
        paths, header.driver, config, tuple(readers[rank].record for rank in sorted(readers)), header.workers
    )


class _Reader:
    """Reads the records of one rank in order."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.record = RankRecord(rank)
        self._resources = len(settings.limits)
        self._is_packed = settings.is_packed
        self.fullest_queue = 0
        self._wanted = self._reads = 0
        self._asked_s = self._posted_s = self._collating_s = 0.0
        self._read: list[Sample] = []

    def read(self, record: Record) -> None:
        """Reads one record. Raises: TraceError when it is malformed or out of order."""
        now = record.time_s if record.time_s is not None else -1.0
        self.record.records += 1
        self.record.last_s = max(self.record.last_s, now)
        if record.event is not None:
            self._note_event(record.event, now)
        for effect in record.effects:
            self._note_effect(effect, now)

    def _note_event(self, event: JsonObject, now: float) -> None:
        rank = self.record
        match get_kind(event):
            case "resumed":
                self._note_start(event)
            case "samples_read":
                self._note_samples(event, now)
            case "collated" if now >= 0 and rank.rounds:
                steps = len(rank.rounds[-1])
                padded = sum(tokens for tokens, _ in rank.sizes[len(rank.sizes) - steps :])
                rank.collations.append(Span(steps, padded, now - self._collating_s, self._collating_s))
            case "agreed":
                self._note_agreement(event)
                if now >= 0:
                    rank.exchanges.append(Answered(None, now - self._posted_s))
            case "counted" if now >= 0:
                rank.exchanges.append(Answered(len(get_counts(event, 3 + self._resources)), now - self._posted_s))
            case "step_taken":
                if rank.taken_steps >= len(rank.delivered_s):
                    raise TraceError(f"rank {rank.rank} takes a step that was not delivered to it")
                rank.taken_steps += 1
                if now >= 0:
                    rank.taken_s.append(now)
            case _:
                pass

    def _note_agreement(self, event: JsonObject) -> None:
        budget = decode_offer(event.get("agreement")).budget_min
        if budget < 1:
            raise TraceError(f"rank {self.record.rank} agrees on a budget of {budget} tokens")
        self.record.budgets.append(budget)

    def _note_start(self, event: JsonObject) -> None:
        rank = self.record
        if rank.records > 1:
            raise TraceError(f"rank {rank.rank} is resumed in the midst of its epoch")
        resumed = decode_resumed(event)
        if not 0 <= resumed.start.read_samples <= LARGEST_WORKLOAD:
            raise TraceError(f"rank {rank.rank} is resumed after {resumed.start.read_samples} samples")
        carried = {sample.position: sample for sample in resumed.samples}
        if tuple(carried) != resumed.start.carried:
            raise TraceError(f"rank {rank.rank} is resumed without the samples it carries")
        rank.start, rank.is_ended = resumed.start, resumed.start.is_ended
        rank.samples = [
            carried.get(place, Sample(-1, place, 1, 0, (0,) * self._resources))
            for place in range(resumed.start.read_samples)
        ]

    def _note_samples(self, event: JsonObject, now: float) -> None:
        rank = self.record
        for row in get_samples(event):
            sample = decode_sample(row)
            if len(sample.costs) != self._resources:
                raise TraceError(
                    f"rank {rank.rank} reads a sample with {len(sample.costs)} costs, not {self._resources}"
                )
            if sample.position != len(rank.samples):
                raise TraceError(
                    f"rank {rank.rank} reads position {sample.position}, not {len(rank.samples)}: samples are missing, or "
                    "the record of where a resumed epoch goes on"
                )
            rank.samples.append(sample)
            self._read.append(sample)
        rank.is_ended = event.get("is_ended") is True
        is_full = event.get("is_full") is True
        if is_full:
            rank.full_reads[self._reads - 1] = len(self._read)
        if now >= 0 and (rank.is_ended or is_full or len(self._read) >= self._wanted):
            tokens = sum(sample.length for sample in self._read)
            rank.reads.append(Span(len(self._read), tokens, now - self._asked_s, self._asked_s))
            self._read.clear()

    def _note_effect(self, effect: JsonObject, now: float) -> None:
        rank = self.record
        match get_kind(effect):
            case "read":
                self._asked_s, self._wanted = now, get_integer(effect, "count")
                self._read.clear()
                if (first := get_optional(effect, "first")) is not None:
                    rank.has_gaps |= len(rank.places) > len(rank.samples)
                    rank.places.extend(range(first, first + min(self._wanted, LARGEST_WORKLOAD)))
                self._reads += 1
            case "post_offer" | "post_counts":
                self._posted_s = now
            case "collate":
                self._collating_s = now
                rank.rounds.append(self._decode_steps(effect))
            case "deliver":
                rank.delivered_s.append(now)
                self.fullest_queue = max(self.fullest_queue, len(rank.delivered_s) - rank.taken_steps)
            case "finish":
                rank.outcome = str(get_object(effect, "outcome").get("kind"))
            case _:
                pass

    def _decode_steps(self, effect: JsonObject) -> tuple[RecordedStep, ...]:
        steps, rank = [], self.record
        for step in iterate_steps(effect, 3 + self._resources):
            if step.positions and not 0 <= min(step.positions) <= max(step.positions) < len(rank.samples):
                raise TraceError(f"rank {rank.rank} collates a position it has not read, in step {step.number}")
            lengths = [rank.samples[position].length for position in step.positions]
            longest = max(lengths, default=0)
            rank.longest = max(rank.longest, longest)
            rows = lengths if self._is_packed else [longest] * len(lengths)
            rank.sizes.append((sum(rows), sum(row * row for row in rows)))
            steps.append(RecordedStep(step.number, tuple(step.positions), tuple(step.counts)))
        return tuple(steps)
