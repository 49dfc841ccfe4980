"""One rank, followed through its trace: which samples it holds, which steps it formed, handed out and took.

The checker's own bookkeeping, from what the rank did; nothing here knows what the machine would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check.decode import (
    Rows,
    Settings,
    TracedFinish,
    TracedReport,
    TracedStep,
    decode_finish,
    get_counts,
    get_flag,
    get_integer,
    get_kind,
    get_offer,
    get_optional,
    get_report,
    get_reports,
    get_samples,
    get_wants,
    iterate_steps,
)
from odb_ref.trace.check.draws import RankDraws
from odb_ref.trace.check.exchanges import Exchanges, Kind
from odb_ref.trace.check.offers import Fingerprint, RankBudget, Seen, compare_window, judge_offer
from odb_ref.trace.check.outcomes import is_broken_off, is_ended_by, judge_outcome, judge_report
from odb_ref.trace.check.rounds import Rounds
from odb_ref.trace.check.steps import find_disorder, judge_step
from odb_ref.trace.check.verdict import Findings, Judgement, Property
from odb_ref.trace.format import RESUMED, JsonObject, Record, TraceError, decode_resumed


class RankChecker:
    """Judges one rank's records; `Exchanges` and `Rounds` hold what it shares with the other ranks."""

    def __init__(self, rank: int, settings: Settings, exchanges: Exchanges, rounds: Rounds, findings: Findings) -> None:
        self.rank = rank
        self.settings = settings
        self._exchanges = exchanges
        self._rounds = rounds
        self._findings = findings
        self._has_begun = False
        self._first_round = 0
        # Input.
        self.read_samples = 0
        self.seen_samples = 0
        """Samples read or carried into a resumed epoch: all that this trace can emit."""
        self.is_ended = self._is_full = self._is_cut_short = False
        self._wanted_samples = 0
        self.held: dict[int, list[int]] = {}
        """Samples read and in no step yet, by position, oldest first."""
        self.draws = RankDraws(rank, settings, rounds.places)
        self._budget = RankBudget(settings)
        self._skipped: list[range] = []
        """Positions left out by the reads: none, in a right trace."""
        self._new_samples = self._asked_samples = 0
        """Samples read and asked for since the offer before."""
        self._marks = Counter[int]()
        """``read_samples`` at the agreement of each round, 0 where the trace does not say."""
        # Exchanges: how many of each kind have been posted and answered.
        self.posted = dict.fromkeys(Kind, 0)
        self.answered = dict.fromkeys(Kind, 0)
        self._agreement: Offer | None = None
        self._fingerprint = Fingerprint(settings.fingerprint)
        self._posted_counts: Rows = []
        self._counted: Rows = []
        # Steps.
        self.planned_steps = 0
        self._collated_round = -1
        self._released_steps = 0
        self.delivered_steps = 0
        self.taken_steps = 0
        self.most_queued_steps = 0
        """The fullest the queue has been: what its depth was, as far as it mattered."""
        # How it ends.
        self.failure = ""
        self.reported_cause = ""
        self.lost_peers: set[int | None] = set()
        """Ranks whose loss this one was told of, even after its end; None when it was not said which."""
        self.stopped_after: int | None = None
        """Steps taken when the consumer left while the rank was still running."""
        self.has_left = False
        self.finish: TracedFinish | None = None
        self.is_complete = False
        """True when it finished COMPLETE, and its last agreement spoke of nothing else."""

    @property
    def size(self) -> int:
        """How much is remembered of this rank, in samples or the like. Spec: R9.5."""
        texts = len(self.failure) + len(self.reported_cause) + (len(self.finish.cause) if self.finish else 0)
        kept = (self.held, self._posted_counts, self._counted, self._marks, self._skipped, self.lost_peers)
        return sum(map(len, kept)) + texts // 64

    @property
    def is_done(self) -> bool:
        """True when it has ended, and its consumer has taken all it may or has left."""
        return self.finish is not None and (self.has_left or self.taken_steps >= self.finish.step_limit)

    @property
    def round(self) -> int:
        """The round the rank is in: one further with each that it has counted."""
        return self._first_round + self.answered[Kind.COUNTS]

    def handle(self, record: Record) -> None:
        """Judges one record.

        Raises: TraceError when it is malformed.
        """
        if not self._has_begun:
            self._begin(record.event)
        elif record.event is None:
            self._violate(Property.EXCHANGE, "begins again")
        else:
            self._handle_event(record.event)
        for effect in record.effects:
            self._handle_effect(effect)

    def _violate(self, property_: Property, what: str, step: int | None = None, round_: int | None = None) -> None:
        at = self.round if round_ is None else round_
        self._findings.violate(property_, what, rank=self.rank, round_=at, step=step)

    def _expect(self, is_true: bool, property_: Property, what: str, step: int | None = None) -> None:
        if is_true:
            self._findings.checked[property_] += 1
        else:
            self._violate(property_, what, step)

    def _judge(self, judgements: Iterable[Judgement]) -> None:
        for property_, what in judgements:
            self._expect(not what, property_, what)

    def _begin(self, event: JsonObject | None) -> None:
        self._has_begun = True
        if event is not None and get_kind(event) == RESUMED:
            self._resume(event)
            return
        self._rounds.begin(0, 0, 0)
        self.draws.begin()
        self.is_ended = self.draws.has_ended
        if event is not None:
            self._handle_event(event)

    def _resume(self, event: JsonObject) -> None:
        """Begins at a saved round: what lies before ``start`` counts as emitted, but for the samples carried, and as taken."""
        start = decode_resumed(event).start
        rows = get_samples(event)
        self._judge_costs(rows)
        positions = [row[1] for row in rows]
        is_carried = positions == sorted({*start.carried}) and all(0 <= item < start.read_samples for item in positions)
        what = f"is resumed with the samples at {positions}; carried are {list(start.carried)} of {start.read_samples}"
        self._expect(is_carried and positions == list(start.carried), Property.CONSERVE, what)
        self._first_round = self._exchanges.first_round = start.round
        self._judge(self.draws.resume(start.draw.first, start.draw.count, start.draw.end, start.round))
        self._budget.resume(start.agreed_tokens, start.accepted_tokens)
        self.read_samples, self.is_ended = start.read_samples, start.is_ended or self.draws.has_ended
        self.seen_samples = len(rows)
        self.held = {row[1]: row for row in rows}
        self._marks = Counter(dict(enumerate(start.marks, start.round - len(start.marks))))
        self._collated_round = start.round - 1
        self.planned_steps = self._released_steps = self.delivered_steps = self.taken_steps = start.planned_steps
        is_same = self._rounds.begin(start.round, start.planned_steps, start.global_samples)
        what = (
            f"is resumed at step {start.planned_steps} with {start.global_samples} samples planned, unlike another rank"
        )
        self._expect(is_same, Property.ALIGN, what, start.planned_steps)

    def _handle_event(self, event: JsonObject) -> None:
        match get_kind(event):
            case "resumed":
                self._violate(Property.EXCHANGE, "is resumed after it has begun")
            case "samples_read":
                self._read(get_samples(event), get_flag(event, "is_ended"), event.get("is_full") is True)
            case "collated":
                number = get_integer(event, "round")
                is_next = self._collated_round < number == self.round - 1
                self._expect(is_next, Property.RELEASE, f"collated round {number}, not the last one")
                self._collated_round = max(number, self._collated_round)
            case "agreed":
                self._agree(event)
            case "counted":
                self._count(get_counts(event, self.settings.counts_width), get_wants(event))
            case "reported":
                is_right = self._exchanges.answer_reports(self.rank, get_reports(event))
                self._expect(is_right, Property.EXCHANGE, "is told other reports than the ranks have posted")
                self.answered[Kind.REPORT] += 1
            case "step_taken":
                self._take()
            case "consumer_stopped":
                self.has_left = True
                if self.finish is None and self.stopped_after is None:
                    self.stopped_after = self.taken_steps
            case "local_failed":
                cause = event.get("cause")
                if self.finish is None and not self.failure:
                    self.failure = cause if isinstance(cause, str) and cause else "unknown failure"
            case "peer_lost":
                self.lost_peers.add(None if event.get("rank") is None else get_integer(event, "rank"))
            case "budget_accepted":
                self._budget.accept(get_integer(event, "tokens"))
            case kind if kind != "urged":
                raise TraceError(f"unknown event kind {kind!r}")

    def _handle_effect(self, effect: JsonObject) -> None:
        match get_kind(effect):
            case "deliver":
                self._deliver(get_integer(effect, "number"))
            case "read":
                self._wanted_samples = self._asked_samples = get_integer(effect, "count")
                self._judge(self.draws.note_read(self._wanted_samples, get_optional(effect, "first")))
            case "collate":
                self._collate(get_integer(effect, "round"), list(iterate_steps(effect, self.settings.counts_width)))
            case "post_offer":
                self._post_offer(get_offer(effect, "offer"))
            case "post_counts":
                self._post_counts(get_counts(effect, self.settings.counts_width), get_optional(effect, "wanted"))
            case "post_report":
                self._post_report(get_report(effect.get("report")))
            case "finish":
                self._finish(decode_finish(effect))
            case kind:
                raise TraceError(f"unknown effect kind {kind!r}")

    # Samples -------------------------------------------------------------------------------------------------------

    def _read(self, rows: Rows, is_ended: bool, is_full: bool) -> None:
        self._judge_costs(rows)
        for row in rows:
            position = row[1]
            if position < self.read_samples:
                self._violate(Property.ONCE, f"reads position {position} again")
                continue
            if position > self.read_samples:
                self._violate(Property.CONSERVE, f"reads position {position} after {self.read_samples} samples: a gap")
                self._skipped.append(range(self.read_samples, position))
            self.read_samples = position + 1
            self.seen_samples += 1
            self._new_samples += 1
            self.held[position] = row
        left = self._wanted_samples - len(rows)
        self._expect(left >= 0, Property.CONSERVE, "reads more samples than it asked for")
        self.is_ended, self._is_full = self.draws.has_ended if self.draws.is_shared else is_ended, is_full
        self._wanted_samples = 0 if is_ended or is_full else left

    def _judge_costs(self, rows: Rows) -> None:
        limits = len(self.settings.limits)
        if not set(map(len, rows)) <= {4 + limits}:
            self._violate(Property.BUDGET, f"has a sample with more or fewer costs than there are limits, {limits}")

    def _post_offer(self, offer: Offer) -> None:
        self._exchanges.post_offer(self.rank, self.posted[Kind.OFFER], offer)
        number = self._first_round + self.posted[Kind.OFFER]
        self.posted[Kind.OFFER] += 1
        is_of_round = offer.round_min == offer.round_max == number
        self._expect(is_of_round, Property.EXCHANGE, f"offers for round {offer.round_min}, in round {number}")
        offered, held = offer.samples_max, len(self.held)
        is_met = self._rounds.is_quota_met(number)
        if held and (is_met or (offered == 0 and self.settings.quota_samples is not None)):
            # Offering none although some are held says: the quota is reached.
            what = f"offers {offered} of {held} samples; the quota {'has been' if is_met else 'is not'} reached"
            self._expect(is_met and offer.samples_min == offered == 0, Property.QUOTA, what)
        else:
            what = f"offers {offer.samples_min} to {offered} samples, but holds {held}"
            self._expect(offer.samples_min == offered == held, Property.CONSERVE, what)
        seen = Seen(
            rank=self.rank,
            rows=list(self.held.values()),
            due_before=self._marks[number - self.settings.max_age_rounds],
            is_ended=self.is_ended,
            is_collated=self._collated_round == number - 1,
            wanted_samples=self._wanted_samples,
            has_failed=bool(self.failure),
            stopped_after=self.stopped_after,
            accepted_tokens=self._budget.accepted_tokens,
        )
        self._judge(judge_offer(offer, seen, self._budget.offer()))
        if not (is_met or self.failure or self.stopped_after is not None):
            self._judge(self.draws.judge_offer(held, self._wanted_samples))
            size = None if self.draws.is_shared else self.settings.compute_window_samples(number)
            read = (self._new_samples, self._asked_samples, size)
            if what := compare_window(held, *read, is_ended=self.is_ended, is_full=self._is_full):
                self._violate(Property.REPLAY, what)
        self._new_samples = self._asked_samples = 0
        self._fingerprint.told = offer.fingerprint_min

    def _post_report(self, report: TracedReport) -> None:
        self._exchanges.post_report(self.rank, report)
        self.posted[Kind.REPORT] += 1
        self.reported_cause = report.cause
        self._judge(judge_report(report, (self.rank, self.failure, self.round), self._fingerprint.told))

    # Rounds --------------------------------------------------------------------------------------------------------

    def _agree(self, event: JsonObject) -> None:
        number = self.answered[Kind.OFFER]
        self.answered[Kind.OFFER] += 1
        agreement, is_right = self._exchanges.answer_offer(self.rank, number, event)
        self._expect(is_right, Property.EXCHANGE, "is told another agreement than the combination of all offers")
        self._agreement = agreement
        self._budget.agree(agreement)
        self._is_cut_short |= self.settings.is_quota and agreement.due_max > agreement.samples_min  # NP26
        self._marks[self._first_round + number] = self.read_samples
        self._marks.pop(self._first_round + number - self.settings.max_age_rounds - 2, None)
        self._judge(self._fingerprint.judge(agreement))
        if not is_broken_off(agreement) and agreement.stop_rank == NONE and agreement.ready_min == 1:
            self._released_steps = self.planned_steps

    def _post_counts(self, rows: Rows, wanted: int | None) -> None:
        number = self.posted[Kind.COUNTS]
        self.posted[Kind.COUNTS] += 1
        self._exchanges.post_counts(self.rank, number, rows, wanted)
        self._judge(self.draws.note_want(wanted))
        self._posted_counts = rows
        most = 0 if self._agreement is None else self._agreement.samples_max
        what = f"{len(rows)} steps from at most {most} samples of a rank: not from 1 to that many"
        self._expect(1 <= len(rows) <= most, Property.TERM, what)
        due = 0 if self._agreement is None or self.settings.is_quota else self._agreement.due_max
        if len(rows) < due:
            self._violate(Property.AGE, f"{len(rows)} steps for {due} due groups")

    def _count(self, rows: Rows, wants: list[int]) -> None:
        is_right = self._exchanges.answer_counts(self.rank, self.answered[Kind.COUNTS], rows, wants)
        self._expect(is_right, Property.WEIGHT, "is told other counts than the sum over all ranks, or other wants")
        self._judge(self.draws.note_wants(wants))
        self.is_ended = self.draws.has_ended or self.is_ended
        self._counted = rows
        self.answered[Kind.COUNTS] += 1
        for step, row in enumerate(rows, self.planned_steps):
            if not row[0]:
                self._violate(Property.TERM, "no rank has a sample in this step", step, self.round - 1)

    def _collate(self, number: int, steps: list[TracedStep]) -> None:
        what = f"collates round {number}, not round {self.round - 1}, which was counted last"
        self._expect(number == self.round - 1, Property.RELEASE, what)
        number = self.round - 1
        self._judge_numbers(number, steps)
        due = number - self.settings.max_age_rounds
        window = list(self.held.values()) if self.draws.is_shared else []
        groups = [self._judge_step(number, offset, step, self._marks[due - 1]) for offset, step in enumerate(steps)]
        late, what = find_disorder(groups, len(self._posted_counts), number, self.settings)
        self._expect(not what, Property.ORDER, what, steps[late].number if steps else None)
        if len(steps) == len(self._posted_counts):  # a round that is cut is the last
            self._judge(self.draws.judge_want(window, list(self.held.values()), number + 1))
        judged = (Property.ONCE, Property.BUDGET, Property.SIZES, Property.WEIGHT, Property.AGE)
        self._findings.checked.update(dict.fromkeys(judged, len(steps)))
        if self.held and due >= 0 and not self.settings.is_quota:
            oldest = next(iter(self.held))
            if oldest < self._marks[due]:
                what = f"position {oldest} is carried for more than {self.settings.max_age_rounds} rounds"
                self._violate(Property.AGE, what, round_=number)

    def _judge_numbers(self, number: int, steps: list[TracedStep]) -> None:
        first = self.planned_steps
        is_numbered = [step.number for step in steps] == list(range(first, first + len(steps)))
        self._expect(is_numbered, Property.ALIGN, f"steps are not numbered from {first} on", first)
        posted = len(self._posted_counts)
        is_whole = len(steps) == posted or (self.settings.quota_samples is not None and len(steps) < posted)
        self._expect(is_whole, Property.ALIGN, f"collates {len(steps)} steps, posted counts of {posted}", first)
        others = self._rounds.note_round(self.rank, number, self._counted, len(steps), self._findings)
        what = f"collates {len(steps)} steps, another rank {others}"
        self._expect(len(steps) == others, Property.ALIGN, what, first)
        # One mistake is enough: go on as if the steps were there, so that it is not found again in every later round.
        self.planned_steps = first + max(len(steps), others, 0 if self.settings.is_quota else posted)

    def _judge_step(self, number: int, offset: int, step: TracedStep, due_before: int) -> Rows:
        group: Rows = []
        for position in step.positions:
            row = self.held.pop(position, None)
            if row is not None:
                group.append(row)
            elif position < self.read_samples and not any(position in gap for gap in self._skipped):
                self._violate(Property.ONCE, f"position {position} is emitted again", step.number, number)
            else:
                self._violate(Property.CONSERVE, f"position {position} was never read", step.number, number)
        rows = (self._posted_counts, self._counted)
        posted, told = (of_round[offset] if offset < len(of_round) else None for of_round in rows)
        oldest = 0 if self._is_cut_short else due_before
        for property_, what in judge_step(step, group, self._budget.in_force, due_before=oldest, counts=(posted, told)):
            self._violate(property_, what, step.number, number)
        if self.settings.is_quota:
            self._expect(bool(step.positions), Property.QUOTA, "an idle step in quota mode", step.number)
        return group

    # Output --------------------------------------------------------------------------------------------------------

    def _deliver(self, number: int) -> None:
        self._expect(number == self.delivered_steps, Property.ALIGN, "is not the next step to deliver", number)
        what = "is delivered before all ranks have said that they are ready for it"
        self._expect(number < self._released_steps, Property.RELEASE, what, number)
        if self.stopped_after is not None:
            self._expect(number < self.stopped_after, Property.STOP, "is delivered after the consumer left", number)
        self.delivered_steps = max(self.delivered_steps, number + 1)
        self.most_queued_steps = max(self.most_queued_steps, self.delivered_steps - self.taken_steps)

    def _take(self) -> None:
        number = self.taken_steps
        self._expect(number < self.delivered_steps, Property.RELEASE, "is taken before it is delivered", number)
        if self.has_left:
            self._violate(Property.STOP, "is taken by a consumer that has left", number)
        elif self.finish is not None and number >= self.finish.step_limit:
            self._violate(Property.STOP, f"is taken, but the limit is {self.finish.step_limit}", number)
        self.taken_steps += 1

    def _finish(self, finish: TracedFinish) -> None:
        if self.finish is not None:
            self._violate(Property.FREE, "finishes twice")
            return
        self.finish = finish
        self.is_complete = finish.kind == OutcomeKind.COMPLETE and not is_ended_by(self._agreement)
        self._judge(judge_outcome(finish, self._agreement, self.lost_peers))
