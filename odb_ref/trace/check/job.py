"""A job: its ranks together, and what must hold once all of them have ended. Spec: R9."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE
from odb_ref.trace.check.account import Account, judge_inputs
from odb_ref.trace.check.decode import TracedFinish
from odb_ref.trace.check.exchanges import ANSWERS, ExchangeKind, Exchanges
from odb_ref.trace.check.lineage import Lineage, judge_lineage, judge_peers, list_unsaid
from odb_ref.trace.check.rank import RankChecker
from odb_ref.trace.check.replay import Depths, Rules, replay
from odb_ref.trace.check.rounds import Rounds
from odb_ref.trace.check.scope import BY_CONFIGURATION, compute_not_applicable
from odb_ref.trace.check.stream import Stream, group_into_jobs, list_traces, merge
from odb_ref.trace.check.verdict import Findings, JobVerdict, Judgement, Property, Verdict, Violation
from odb_ref.trace.format import Record, TraceError


def check_traces(paths: Iterable[str | Path], *, is_replayed: bool = False, rules: Rules = ()) -> Verdict:
    """Returns the verdict on the traces at ``paths``: any number of jobs and epochs, with one file for a job or one for each
    rank. A folder stands for every ``*.ndjson`` and ``*.ndjson.gz`` in it.

    With ``is_replayed`` the machine also handles each event, and its effects are compared (REPLAY). It then needs the target
    ``rules`` that are not built in. Memory is bounded by what the ranks hold between reading a sample and forming its step,
    whatever the length of the trace.

    Raises: TraceError, with file and line, when a file is not a trace; UsageError when there are no traces. Spec: R9.
    """
    streams = [stream for path in paths for stream in open_traces(Path(path))]
    if not streams:
        raise UsageError("no trace to check")
    check_no_twice(Path(stream.path) for stream in streams)
    return judge(streams, is_replayed=is_replayed, rules=rules)


def check_no_twice(paths: Iterable[Path]) -> None:
    """Checks that no file is given twice, even under different names. Raises: UsageError naming the file."""
    given = Counter(path.resolve() for path in paths)
    if twice := [str(path) for path, times in given.items() if times > 1]:
        raise UsageError(f"{twice[0]}: given twice")


def open_traces(path: Path) -> list[Stream]:
    """Returns the trace in a file, or all traces in a folder. Raises: UsageError when a folder holds no trace."""
    if not path.is_dir():
        return [Stream(path)]
    traces = list_traces(path)
    if not traces:
        raise UsageError(f"{path}: a folder that holds no *.ndjson or *.ndjson.gz")
    return list(map(Stream, traces))


def judge(streams: Sequence[Stream], *, is_replayed: bool = False, rules: Rules = ()) -> Verdict:
    """Returns the verdict on open traces. Raises: the errors of `check_traces`."""
    sought = {part.steps for stream in streams for part in stream.header.origin.before}
    jobs = [Job(group, sought) for group in group_into_jobs(streams)]
    for job in jobs:
        for _ in job.follow():  # no file grows, so it never yields
            pass
    return judge_jobs(jobs, is_replayed=is_replayed, rules=rules)


def judge_jobs(jobs: Sequence[Job], *, is_replayed: bool, rules: Rules = ()) -> Verdict:
    """Returns the verdict on jobs that have been followed, each in the light of all."""
    lineages = [job.trace_back() for job in jobs]
    judged = [
        job.judge(own, lineages, is_replayed=is_replayed, rules=rules) for job, own in zip(jobs, lineages, strict=True)
    ]
    return Verdict(tuple(judged))


def compute_remembered(world_size: int) -> int:
    """Returns the most that the checker remembers of a job, in samples held and steps under way. Spec: R9.5."""
    return 2**20 + 2**14 * world_size


class Job:
    """One epoch of one job, judged record by record. ``streams`` may get more members while some of its files grow."""

    def __init__(self, streams: list[Stream], sought: Collection[int] = ()) -> None:
        self._streams = streams
        self._sought = sought
        """The numbers of steps after which other jobs say they resume."""
        self._header = streams[0].header
        self._findings = Findings()
        self._exchanges = Exchanges(self._header.world_size, self._findings, peers=streams[0].settings.peers)
        self._rounds = Rounds(streams[0].settings.quota_samples)
        self._ranks: dict[int, RankChecker] = {}
        self._files: dict[int, Stream] = {}
        """The file of each rank."""
        self._most = compute_remembered(self._header.world_size)
        self._remembered = 0
        self.records = 0
        """The number of records judged."""
        self._told = 0

    @property
    def is_done(self) -> bool:
        """True when every rank has ended, and its consumer has taken all it may or has left."""
        ranks = self._ranks.values()
        return len(ranks) == self._header.world_size and all(rank.output.is_done for rank in ranks)

    def take_news(self) -> tuple[Violation, ...]:
        """Returns the violations found since the last call."""
        is_one = all(stream.header.config == self._header.config for stream in self._streams)
        found = self._findings.get_violations(frozenset() if is_one else BY_CONFIGURATION)
        news, self._told = found[self._told :], len(found)
        return news

    def follow(self) -> Iterator[None]:
        """Judges all records. Yields when it must wait for a file to grow.

        Raises: TraceError when a record is malformed, or a trace would take too much memory.
        """
        for item in merge(self._streams, self):
            if item is None:
                yield
                continue
            stream, record = item
            if (file := self._files.setdefault(record.rank, stream)) is not stream:
                raise stream.locate(
                    f"rank {record.rank} has records in {file.path} too: those of an epoch belong in one file"
                )
            rank = self._ranks.get(record.rank)
            if rank is None:
                before = stream.header.origin.before
                rank = RankChecker(record.rank, stream.settings, self._exchanges, self._rounds, self._findings)
                rank.account = Account(next((p.steps for p in before if p.rank == record.rank), 0), self._sought)
                self._ranks[record.rank] = rank
            size = rank.size
            try:
                rank.handle(record)
            except TraceError as error:
                raise stream.locate(error) from error
            self.records += 1
            self._remembered += rank.size - size
            if self._remembered + len(self._rounds.places) > self._most:
                raise stream.locate(f"the ranks hold more than {self._most} samples and steps: too many to check")

    def trace_back(self) -> Lineage:
        """Returns the origin of the job, and what it has trained on."""
        ranks = self._ranks.values()
        return Lineage(
            self._header,
            [(stream.ranks, stream.header.origin) for stream in self._streams],
            {rank.rank: rank.close_account() for rank in ranks},
            {rank.rank: rank.planned for rank in ranks if rank.settings.peers > 1},
            is_resumed=any(rank.is_resumed for rank in ranks),
        )

    def judge(self, own: Lineage, lineages: Sequence[Lineage], *, is_replayed: bool, rules: Rules = ()) -> JobVerdict:
        """Returns the verdict on all records that `follow` has judged. ``own`` is the job's lineage, one of ``lineages``."""
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        finishes = [(rank, rank.output.finish) for rank in ranks if rank.output.finish is not None]
        self._judge_ends(ranks)
        self._judge_outcomes(finishes)
        self._judge_lockstep(ranks)
        for rank, finish in finishes:
            self._judge_finish(rank, finish)
        self._judge_rounds(ranks)
        self._judge_draws(ranks)
        self._judge_inputs(own)
        for number, judgement in chain(judge_lineage(own, lineages), judge_peers(own, lineages)):
            self._note(judgement, number)
        not_applicable = compute_not_applicable(ranks, finishes, self._streams)
        if not is_replayed:
            not_applicable[Property.REPLAY] = "not asked for (--replay)"
        elif Property.REPLAY not in not_applicable:
            depths: Depths = {rank.rank: max(1, rank.output.most_queued_steps) for rank in ranks}
            reason = replay([stream.path for stream in self._streams], depths, self._findings, rules)
            if reason:
                not_applicable[Property.REPLAY] = reason
        kinds = {finish.kind for _, finish in finishes}
        ignored = BY_CONFIGURATION if OutcomeKind.MISMATCH in kinds else frozenset[Property]()
        return JobVerdict(
            paths=tuple(str(stream.path) for stream in self._streams),
            driver=self._header.driver,
            epoch=self._header.epoch,
            ranks=self._header.world_size,
            rounds=self._rounds.count,
            steps=self._rounds.total_steps - self._rounds.steps_before,
            samples=self._rounds.total_samples - self._rounds.planned_samples_before,
            set_aside=sum(account.set_aside.samples for account in own.accounts.values()),
            outcome="; ".join(sorted({finish.outcome for _, finish in finishes})) or "unfinished",
            properties=self._findings.judge(not_applicable, ignored),
            violations=self._findings.get_violations(ignored),
            unsaid=(*list_unsaid(own, lineages), *self._list_doubts(ranks)),
        )

    def is_early(self, record: Record) -> bool:
        """Returns True when the record answers an exchange to which not all ranks have posted."""
        kind = None if record.event is None else ANSWERS.get(str(record.event.get("kind")))
        return kind is not None and self._exchanges.is_missing(kind, self._count_answered(kind, record.rank))

    def list_missing(self, record: Record) -> set[int]:
        """Returns the ranks that the record waits for."""
        kind = None if record.event is None else ANSWERS.get(str(record.event.get("kind")))
        if kind is None:
            return set()
        return self._exchanges.list_missing(kind, self._count_answered(kind, record.rank))

    def lose(self, ranks: set[int]) -> None:
        """Notes that the traces of ``ranks`` have ended, so that their missing posts count as unknown."""
        self._exchanges.gone |= ranks

    def _count_answered(self, kind: ExchangeKind, number: int) -> int:
        rank = self._ranks.get(number)
        return 0 if rank is None else rank.answered[kind]

    def _is_lost(self, number: int) -> bool:
        """Returns True when another rank was told that this one is gone, and it has not ended itself."""
        rank = self._ranks.get(number)
        if rank is not None and rank.output.finish is not None:
            return False
        lost = set[int | None]().union(*(other.lost_peers for other in self._ranks.values()))
        return number in lost or None in lost

    def _judge_ends(self, ranks: Sequence[RankChecker]) -> None:
        """Judges FREE: every rank must finish, except one whose loss the others report, or which waits for its consumer."""
        followed = {rank.rank: rank for rank in ranks}
        cut = [str(stream.path) for stream in self._streams if stream.is_cut]
        for number in range(self._header.world_size):
            self._findings.checked[Property.FREE] += 1
            rank = followed.get(number)
            if (rank is not None and rank.output.is_with_consumer) or self._is_lost(number):
                continue
            if rank is None:
                self._findings.violate(Property.FREE, "no trace of this rank", rank=number)
            else:
                where = f" ({', '.join(cut)} ends inside a line)" if cut else ""
                what = f"its trace ends without a finish: deadlocked or cut off{where}"
                self._findings.violate(
                    Property.FREE, what, rank=number, round_=rank.round, step=rank.output.taken_steps
                )

    def _judge_outcomes(self, finishes: Sequence[tuple[RankChecker, TracedFinish]]) -> None:
        """Judges ABORT: all ranks must have one outcome, in one round. Ranks that ended LOST may differ (R7.5)."""
        differing = [stream for stream in self._streams if stream.header.config != self._header.config]
        if differing and any(finish.kind == OutcomeKind.COMPLETE for _, finish in finishes):
            what = "completes with another configuration than other ranks"
            self._findings.violate(Property.ABORT, what, rank=min(differing[0].ranks, default=None))
        told = [pair for pair in finishes if pair[1].kind != OutcomeKind.LOST]
        for rank, finish in told[1:]:
            first, reference = told[0]
            if finish.outcome != reference.outcome:
                what = f"ends with {finish.outcome!r}, rank {first.rank} with {reference.outcome!r}"
                self._findings.violate(Property.ABORT, what, rank=rank.rank, round_=rank.round)
            elif rank.answered[ExchangeKind.OFFER] != first.answered[ExchangeKind.OFFER]:
                what = f"ends after {rank.answered[ExchangeKind.OFFER]} agreements, rank {first.rank} after "
                what += str(first.answered[ExchangeKind.OFFER])
                self._findings.violate(Property.ABORT, what, rank=rank.rank, round_=rank.round)
            self._findings.checked[Property.ABORT] += 1
        if told:
            self._judge_cause(told[0][1])

    def _judge_cause(self, finish: TracedFinish) -> None:
        origin = None if finish.rank is None else self._ranks.get(finish.rank)
        where = ""
        if self._streams[0].settings.peers > 1:
            where = f" (on its peer {self._header.peer})"
            if not finish.cause.endswith(where):
                return  # the trace of another peer would show it
        if finish.kind == OutcomeKind.FAILED and (origin is None or origin.failure + where != finish.cause):
            what = f"the outcome is {finish.outcome!r}, but that did not happen there"
            self._findings.violate(Property.ABORT, what, rank=finish.rank)
        lower = [rank for rank, checker in self._ranks.items() if checker.reported_cause and rank < (finish.rank or 0)]
        if finish.kind == OutcomeKind.FAILED and lower:
            what = f"the outcome is {finish.outcome!r}, but rank {min(lower)} has reported a failure too"
            self._findings.violate(Property.ABORT, what, rank=finish.rank)
        if finish.kind == OutcomeKind.STOPPED and (origin is None or origin.output.stopped_after is None):
            what = f"the outcome is {finish.outcome!r}, but its consumer has not left"
            self._findings.violate(Property.STOP, what, rank=finish.rank)

    def _judge_lockstep(self, ranks: Sequence[RankChecker]) -> None:
        """Judges STOP: consumers take steps together (A5), so none begins two more than one that has left or ended LOST. With
        updates this counts updates, because a trainer may not synchronise inside one.
        """
        out = [rank for rank in ranks if rank.output.is_out]
        if not out:
            return
        first = min(out, key=lambda rank: rank.output.taken_steps)
        fewest = first.output.taken_steps
        for rank in ranks:
            is_right = rank.output.begun_updates <= first.output.taken_updates + 1
            what = f"takes {rank.output.taken_steps} steps, though that of rank {first.rank} was out after {fewest}: "
            what = "" if is_right else what + "not in lockstep"
            self._note((Property.STOP, what), rank.rank, rank.round, fewest + 1)

    def _judge_finish(self, rank: RankChecker, finish: TracedFinish) -> None:
        """Judges a rank that has ended."""

        def expect(is_true: bool, property_: Property, what: str) -> None:
            if is_true:
                self._findings.checked[property_] += 1
            else:
                self._findings.violate(property_, what, rank=rank.rank, round_=rank.round, step=rank.output.taken_steps)

        if not rank.output.has_left and finish.kind != OutcomeKind.LOST:
            what = f"finishes with {rank.output.delivered_steps} of {finish.step_limit} steps handed out"
            expect(rank.output.delivered_steps >= finish.step_limit, Property.FREE, what)
        if not rank.is_complete or rank.output.stopped_after is not None:
            return
        what = f"may take {finish.step_limit} steps, the ranks have planned {self._rounds.total_steps}"
        expect(finish.step_limit == self._rounds.total_steps, Property.ALIGN, what)
        property_ = Property.QUOTA if rank.settings.is_quota else Property.COVER
        what = f"closes with {rank.output.delivered_steps} of {rank.planned_steps} steps handed out"
        expect(rank.output.delivered_steps == rank.planned_steps, property_, what)
        if not rank.settings.is_quota:
            expect(rank.input.is_ended, Property.COVER, "closes before its source has ended")
            some = ", ".join(str(position) for position in list(rank.input.held)[:5])
            expect(
                not rank.input.held,
                Property.COVER,
                f"closes with {len(rank.input.held)} samples not emitted: position {some}",
            )

    def _judge_rounds(self, ranks: Sequence[RankChecker]) -> None:
        """Judges TERM: every round with a step emits a sample, which bounds the rounds. Judges QUOTA: why the epoch ended."""
        total = sum(rank.input.seen_samples for rank in ranks)
        rounds = self._rounds.count - self._rounds.empty_count
        if rounds > total:
            self._findings.violate(Property.TERM, f"{rounds} rounds for {total} samples")
        settings = self._streams[0].settings
        complete = [rank for rank in ranks if rank.is_complete]
        if not settings.is_quota or not complete or len(complete) < self._header.world_size:
            return
        is_met = self._rounds.is_quota_met(self._rounds.first_round + self._rounds.count)
        is_dry = any(rank.input.is_ended and not rank.input.held for rank in ranks)
        if is_met or is_dry:
            self._findings.checked[Property.QUOTA] += 1
        else:
            what = f"closes at {self._rounds.total_samples} samples: no quota is reached and no rank has run dry"
            self._findings.violate(Property.QUOTA, what, round_=self._rounds.count)

    def _judge_draws(self, ranks: Sequence[RankChecker]) -> None:
        """Judges COVER of the job: if all ranks draw from one order, each place of it must be drawn."""
        settings = self._streams[0].settings
        total, complete = settings.shared_samples, [rank for rank in ranks if rank.is_complete]
        if total is None or settings.is_quota or len(complete) < self._header.world_size:
            return
        missing = self._rounds.places.find_missing(min(rank.input.draws.first for rank in ranks), total)
        if missing is None:
            self._findings.checked[Property.COVER] += 1
        else:
            self._findings.violate(Property.COVER, f"closes, and no rank has read place {missing} of the common order")

    def _judge_inputs(self, lineage: Lineage) -> None:
        """Judges COVER and ONCE against the samples there were to train on, if the headers state them. Spec: R9.6."""
        shared = {part for _, origin in lineage.files for part in origin.inputs if part.rank is None}
        if len(shared) > 1:
            self._findings.violate(Property.DEAL, "the ranks draw from a common order of different samples")
        before = {number: part.lot for number, part in lineage.before.items()}
        inputs = [part for part in lineage.inputs.values() if part.rank in lineage.accounts or part.rank is None]
        is_quota = self._streams[0].settings.is_quota
        for number, judgement in judge_inputs(
            inputs, before, lineage.accounts, self._header.world_size, is_quota=is_quota
        ):
            self._note(judgement, number)

    def _list_doubts(self, ranks: Sequence[RankChecker]) -> Iterator[str]:
        """Yields the losses that no trace can confirm, and the questions that an early end leaves open. Spec: R7.5."""
        told = {lost: rank.rank for rank in reversed(ranks) for lost in rank.lost_peers}
        most = max((rank.output.taken_steps for rank in ranks), default=0)
        for rank in ranks:
            if rank.rank in told and rank.output.finish is not None:
                yield f"whether rank {rank.rank} was gone, as rank {told[rank.rank]} was told: it has ended by itself"
            elif None in told and rank.output.finish is None:
                yield f"whether rank {rank.rank} was gone: rank {told[None]} was told of a loss, but not which rank was lost"
            if rank.output.finish is None and rank.output.taken_steps + 1 < most:
                yield f"whether rank {rank.rank} took more than {rank.output.taken_steps} steps: its trace has no finish"
        left = (rank.output.taken_steps for rank in ranks if rank.output.is_out or self._is_lost(rank.rank))
        fewest_left = min(left, default=NONE)  # a trainer whose peer has left waits in its own collective
        for rank in sorted(ranks, key=lambda rank: rank.output.taken_steps):
            taken, handed_out = rank.output.taken_steps, rank.output.delivered_steps
            if rank.output.is_with_consumer and taken < min(handed_out, fewest_left):
                what = f"of the {handed_out} steps that rank {rank.rank}'s loader handed out, its trace shows {taken} as taken"
                yield f"whether a trainer was killed or is stuck: {what}"
                break  # the others wait for it
        if all(rank.output.is_with_consumer for rank in ranks):
            for stream in self._streams:
                if stream.is_cut:
                    yield f"whether anything followed: {stream.path} ends inside a line"

    def _note(self, judgement: Judgement, rank: int | None, round_: int | None = None, step: int | None = None) -> None:
        property_, what = judgement
        if what:
            self._findings.violate(property_, what, rank=rank, round_=round_, step=step)
        else:
            self._findings.checked[property_] += 1
