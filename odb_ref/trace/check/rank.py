"""Follows one rank through its trace: the samples it holds, and the steps it formed, handed out and took.

This is the checker's own bookkeeping of what the rank did. It does not depend on what the machine would do."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check import decode
from odb_ref.trace.check.account import Account
from odb_ref.trace.check.decode import Rows, Settings, TracedFinish, TracedReport, TracedStep
from odb_ref.trace.check.exchanges import ExchangeKind, Exchanges
from odb_ref.trace.check.known import check_fields
from odb_ref.trace.check.lineage import PlanDigest
from odb_ref.trace.check.outcomes import (
    Told,
    compute_target,
    find_blamed,
    is_broken_off,
    is_closing,
    is_ended_by,
    judge_outcome,
    judge_report,
)
from odb_ref.trace.check.own.groups import find_other_choice
from odb_ref.trace.check.own.input import Input
from odb_ref.trace.check.own.offers import Fingerprint, RankBudget, Seen, judge_offer
from odb_ref.trace.check.own.output import Output
from odb_ref.trace.check.own.phases import START, Phases
from odb_ref.trace.check.own.starts import judge_start
from odb_ref.trace.check.own.steps import find_disorder, judge_step
from odb_ref.trace.check.rounds import Rounds
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
        self.account = Account()
        self.planned = PlanDigest()
        self._has_begun = self.is_resumed = False
        self._first_round = 0
        self.input = Input(rank, settings, rounds.places)
        self._is_cut_short = False
        self._budget = RankBudget(settings)
        # Exchanges: the number of each kind posted and answered.
        self.posted = dict.fromkeys(ExchangeKind, 0)
        self.answered = dict.fromkeys(ExchangeKind, 0)
        self._fingerprint = Fingerprint(settings.fingerprint)
        self._posted_counts: Rows = []
        self._counted: Rows = []
        # Steps.
        self.planned_steps = 0
        self._collated_round = -1
        self.output = Output()
        # How it ends.
        self.failure = ""
        self.reported_cause = ""
        self._phases = Phases()
        self._answer = ""
        """The effect that the event requires, or an empty text."""
        self.lost_peers: set[int | None] = set()
        """The ranks whose loss this one was told of, even after its end; None stands for an unknown rank."""
        self._told = Told()
        self.is_complete = False
        """True when the rank finished COMPLETE, and its last agreement held neither a failure nor a stop."""

    @property
    def size(self) -> int:
        """How much is remembered of this rank, in samples and similar items. Spec: R9.5."""
        finish = self.output.finish
        texts = len(self.failure) + len(self.reported_cause) + (len(finish.cause) if finish else 0)
        kept = (self._posted_counts, self._counted, self.lost_peers, self.output.update_ends)
        return self.input.size + sum(map(len, kept)) + len(self.account) + texts // 64

    @property
    def round(self) -> int:
        """The rank's present round, which advances with each answer to its counts."""
        return self._first_round + self.answered[ExchangeKind.COUNTS]

    def close_account(self) -> Account:
        """Returns the account of what the rank has trained on, up to the end of the trace."""
        self.account.is_whole = self.is_complete and not self.settings.is_quota
        is_read = self.input.is_ended and not self.input.is_open
        self.account.close((row[0] for row in self.input.held.values()), self.planned_steps, is_read=is_read)
        return self.account

    def handle(self, record: Record) -> None:
        """Judges one record. Raises: TraceError when the record is malformed."""
        kinds = [check_fields(item) for item in record.effects]
        kind = START if record.event is None else check_fields(record.event)
        kind = START if kind == RESUMED else kind
        self._judge(self._phases.note_event(kind))
        self._answer = ""
        if not self._has_begun:
            self._begin(record.event)
        elif record.event is None:
            self._violate(Property.EXCHANGE, "begins again")
        else:
            self._handle_event(record.event)
        for effect in record.effects:
            self._handle_effect(effect)
        due = self._phases.note_effects(
            kind,
            kinds,
            answer=self._answer,
            is_ready=not self.input.is_open and self._collated_round == self.round - 1,
            must_offer=bool(self.failure) or self.output.stopped_after is not None,
            planned_steps=self.planned_steps - self.output.released_steps,
            held_back_steps=self.output.held_back_steps,
        )
        self._judge(due)
        self._judge(self.output.judge_queue())

    def _violate(self, property_: Property, what: str, step: int | None = None, round_: int | None = None) -> None:
        at = self.round if round_ is None else round_
        self._findings.violate(property_, what, rank=self.rank, round_=at, step=step)

    def _expect(
        self, is_true: bool, property_: Property, what: str, step: int | None = None, round_: int | None = None
    ) -> None:
        if is_true:
            self._findings.checked[property_] += 1
        else:
            self._violate(property_, what, step, round_)

    def _judge(self, judgements: Iterable[Judgement], step: int | None = None, round_: int | None = None) -> None:
        for property_, what in judgements:
            self._expect(not what, property_, what, step, round_)

    def _begin(self, event: JsonObject | None) -> None:
        self._has_begun = True
        if event is not None and decode.get_kind(event) == RESUMED:
            self._resume(event)
            return
        self._rounds.begin(0, 0, 0)
        self.input.begin()
        if event is not None:
            self._violate(Property.EXCHANGE, f"begins with {decode.get_kind(event)}")
            self._handle_event(event)

    def _resume(self, event: JsonObject) -> None:
        """Begins at a saved round. Samples before ``start`` count as emitted and taken, except for those carried."""
        self.is_resumed, self.account.is_placed = True, False
        start = decode_resumed(event).start
        rows = decode.get_samples(event)
        positions = [row[1] for row in rows]
        is_carried = positions == sorted({*start.carried}) and all(0 <= item < start.read_samples for item in positions)
        what = f"is resumed with the samples at {positions}; carried are {list(start.carried)} of {start.read_samples}"
        self._expect(is_carried and positions == list(start.carried), Property.CONSERVE, what)
        self._first_round = self._exchanges.first_round = start.round
        self._judge(judge_start(self.settings, start))
        self._judge(self.input.draws.resume(start.draw.first, start.draw.count, start.draw.end, start.round))
        marks = dict(enumerate(start.marks, start.round - len(start.marks)))
        self._judge(self.input.resume(rows, start.read_samples, marks, is_ended=start.is_ended))
        self._budget.resume(start.agreed_tokens, start.accepted_tokens)
        self._collated_round = start.round - 1
        self.planned_steps = start.planned_steps
        self.output.resume(start.planned_steps)
        is_same = self._rounds.begin(start.round, start.planned_steps, start.global_samples)
        what = f"is resumed at step {start.planned_steps}, {start.global_samples} samples planned, unlike another rank"
        self._expect(is_same, Property.ALIGN, what, start.planned_steps)

    def _handle_event(self, event: JsonObject) -> None:
        match decode.get_kind(event):
            case "resumed":
                self._violate(Property.EXCHANGE, "is resumed after it has begun")
            case "samples_read":
                is_full = decode.get_flag(event, "is_full") if "is_full" in event else False
                is_ended = decode.get_flag(event, "is_ended")
                rows = decode.get_samples(event)
                self.account.read(row[0] for row in rows)
                self._judge(self.input.read(rows, is_ended=is_ended, is_full=is_full))
            case "collated":
                number = decode.get_integer(event, "round")
                is_next = self._collated_round < number == self.round - 1
                self._expect(is_next, Property.RELEASE, f"collated round {number}, not the last one")
                self._collated_round = max(number, self._collated_round)
            case "agreed":
                self._agree(event)
            case "counted":
                self._count(decode.get_counts(event, self.settings.counts_width), decode.get_wants(event))
            case "reported":
                reports = decode.get_reports(event)
                is_right = self._exchanges.answer_reports(self.rank, reports)
                self._expect(is_right, Property.EXCHANGE, "is told other reports than the ranks have posted")
                self.answered[ExchangeKind.REPORT] += 1
                self._told.blamed = find_blamed(reports)
                self.output.limit(self.output.released_steps)
            case "step_taken":
                self.account.take(self.output.taken_steps)
                self._judge(self.output.take(), self.output.taken_steps)
            case "consumer_stopped":
                self.output.leave()
            case "local_failed":
                if not self._phases.is_ending and not self.failure:
                    self.failure = decode.get_text(event, "cause") or "unknown failure"
            case "peer_lost":
                self._lose(decode.get_rank(event), decode.get_text(event, "cause"))
            case "budget_accepted":
                self._budget.accept(decode.get_integer(event, "tokens"))
            case "set_aside":
                # With updates, a resumed epoch may begin at a later place than 0, which no header tells.
                is_bounded = not (self.is_resumed and self.settings.update_samples)
                self.account.set_one_aside(*decode.get_set_aside(event), is_bounded=is_bounded)
                self._expect(self.output.finish is None, Property.FREE, "sets a sample aside after it has finished")
            case kind if kind != "urged":
                raise TraceError(f"unknown event kind {kind!r}")

    def _lose(self, rank: int | None, cause: str) -> None:
        self.lost_peers.add(rank)
        if not self._phases.is_ending:
            self._answer = "finish"
            self._told.loss = rank, cause
            self.output.limit(self.output.taken_steps)

    def _handle_effect(self, effect: JsonObject) -> None:
        match decode.get_kind(effect):
            case "deliver":
                number = decode.get_integer(effect, "number")
                self._judge(self.output.deliver(number), number)
            case "read":
                read = (decode.get_integer(effect, "count"), decode.get_optional(effect, "first"))
                self.account.ask(read[1])
                self._judge(self.input.ask(*read, self._first_round + self.posted[ExchangeKind.OFFER]))
            case "collate":
                self._collate(
                    decode.get_integer(effect, "round"), list(decode.iterate_steps(effect, self.settings.counts_width))
                )
            case "post_offer":
                self._post_offer(decode.get_offer(effect, "offer"))
            case "post_counts":
                self._post_counts(
                    decode.get_counts(effect, self.settings.counts_width), decode.get_optional(effect, "wanted")
                )
            case "post_report":
                self._post_report(decode.get_report(effect.get("report")))
            case "finish":
                self._finish(decode.decode_finish(effect))
            case kind:
                raise TraceError(f"unknown effect kind {kind!r}")

    def _post_offer(self, offer: Offer) -> None:
        self._exchanges.post_offer(self.rank, self.posted[ExchangeKind.OFFER], offer)
        number = self._first_round + self.posted[ExchangeKind.OFFER]
        self.posted[ExchangeKind.OFFER] += 1
        is_of_round = offer.round_min == offer.round_max == number
        self._expect(is_of_round, Property.EXCHANGE, f"offers for round {offer.round_min}, in round {number}")
        offered, held = offer.samples_max, len(self.input.held)
        is_met = self._rounds.is_quota_met(number)
        if held and (is_met or (offered == 0 and self.settings.quota_samples is not None)):
            # A rank that offers no samples although it holds some declares the quota reached.
            what = f"offers {offered} of {held} samples; the quota {'has been' if is_met else 'is not'} reached"
            self._expect(is_met and offer.samples_min == offered == 0, Property.QUOTA, what)
        else:
            what = f"offers {offer.samples_min} to {offered} samples, but holds {held}"
            least = int(self.input.updates.size is not None and not self.input.is_ended)
            self._expect(offer.samples_min == offered == max(held, least), Property.CONSERVE, what)
        seen = Seen(
            rank=self.rank,
            rows=list(self.input.held.values()) if self.input.updates.forms_steps(number) else [],
            due_before=self.input.get_mark(number - self.settings.max_age_rounds),
            is_ended=self.input.is_ended,
            is_collated=self._collated_round == number - 1,
            wanted_samples=self.input.open_samples,
            has_failed=bool(self.failure),
            stopped_after=self.output.stopped_after,
            accepted_tokens=self._budget.accepted_tokens,
        )
        self._judge(judge_offer(offer, seen, self._budget.offer()))
        if not (is_met or self.failure or self.output.stopped_after is not None):
            self._judge(self.input.judge_window(number))
        self.input.offer()
        self._fingerprint.told = offer.fingerprint_min

    def _post_report(self, report: TracedReport) -> None:
        self._exchanges.post_report(self.rank, report)
        self.posted[ExchangeKind.REPORT] += 1
        self.reported_cause = report.cause
        self._judge(judge_report(report, (self.rank, self.failure, self.round), self._fingerprint.told))

    # Rounds --------------------------------------------------------------------------------------------------------

    def _agree(self, event: JsonObject) -> None:
        number = self.answered[ExchangeKind.OFFER]
        self.answered[ExchangeKind.OFFER] += 1
        agreement, is_right = self._exchanges.answer_offer(self.rank, number, event)
        self._expect(is_right, Property.EXCHANGE, "is told another agreement than the combination of all offers")
        self._told.agreement = agreement
        self._budget.agree(agreement)
        self._is_cut_short |= self.settings.is_quota and agreement.due_max > agreement.samples_min  # NP26
        self.input.mark(self._first_round + number)
        self._judge(self._fingerprint.judge(agreement))
        if is_broken_off(agreement):
            self._answer = "post_report"
        elif agreement.stop_rank != NONE:
            self.output.limit(agreement.stop_step)
        else:
            self._expect(agreement.ready_min == 1, Property.RELEASE, "is told to go on, and some rank is not ready")
            self.output.released_steps = self.planned_steps
            if is_closing(agreement, self.settings):
                self.output.limit(self.planned_steps)
            else:
                self._answer = "post_counts"

    def _post_counts(self, rows: Rows, wanted: int | None) -> None:
        number = self.posted[ExchangeKind.COUNTS]
        self.posted[ExchangeKind.COUNTS] += 1
        self._exchanges.post_counts(self.rank, number, rows, wanted)
        self._judge(self.input.draws.note_want(wanted))
        self._posted_counts = rows
        if (agreement := self._told.agreement) is None:
            return  # `Phases` reports counts that come too early
        steps, least, rule = len(rows), 1, self.settings.rule
        what = f"{steps} steps; expected 1 to {agreement.samples_max}, the most samples of a rank"
        if self.input.updates.size is not None:
            least = agreement.groups_max
            self._judge(self.input.updates.judge_steps(steps, least, self.round))
        self._expect(least <= steps <= agreement.samples_max, Property.TERM, what)
        if not self.settings.is_quota:
            self._expect(steps >= agreement.due_max, Property.AGE, f"{steps} steps for {agreement.due_max} due groups")
        if (target := compute_target(agreement, self.settings)) is not None:
            self._expect(steps == target, Property.REPLAY, f"{steps} steps; the rule {rule} says {target}")

    def _count(self, rows: Rows, wants: list[int]) -> None:
        is_right = self._exchanges.answer_counts(self.rank, self.answered[ExchangeKind.COUNTS], rows, wants)
        self._expect(is_right, Property.WEIGHT, "is told other counts than the sum over all ranks, or other wants")
        self._judge(self.input.note_wants(wants, self.round + 1))
        self._judge(self.input.updates.judge_round(rows))
        self._counted = rows
        self.answered[ExchangeKind.COUNTS] += 1
        for step, row in enumerate(rows, self.planned_steps):
            if not row[0]:
                self._violate(Property.TERM, "no rank has a sample in this step", step, self.round - 1)

    def _collate(self, number: int, steps: list[TracedStep]) -> None:
        said, number = number, self.round - 1
        what = f"collates round {said}, not round {number}, which was counted last"
        self._expect(said == number, Property.RELEASE, what, round_=number)
        self._judge_numbers(number, steps)
        due = number - self.settings.max_age_rounds
        emitted = [step.positions for step in steps]
        if {*chain(*emitted)} <= self.input.held.keys():  # otherwise `_judge_step` reports what is wrong
            whole, target = self.input.list_window(number), len(self._posted_counts)
            bounds = self._budget.in_force, self.input.get_mark(due)
            if what := find_other_choice(whole, emitted, target, *bounds):
                self._violate(Property.REPLAY, what, round_=number)
        window = list(self.input.held.values()) if self.input.draws.is_shared else []
        groups = [
            self._judge_step(number, offset, step, self.input.get_mark(due - 1)) for offset, step in enumerate(steps)
        ]
        if self.settings.peers > 1:
            self.planned.plan(number, ([step.number for step in steps], groups))
        if self.settings.update_samples is not None and steps:
            self.output.plan_update(self.planned_steps)
        self._judge(self.input.updates.judge_carried(self.input.held, self.input.marks[number], number), round_=number)
        late, what = find_disorder(groups, len(self._posted_counts), number, self.settings)
        self._expect(not what, Property.ORDER, what, steps[late].number if steps else None, number)
        if len(steps) == len(self._posted_counts):  # a cut round is the last, so its want does not matter
            self._judge(self.input.draws.judge_want(window, [*self.input.held.values()], number + 1), round_=number)
        judged = (Property.ONCE, Property.BUDGET, Property.SIZES, Property.WEIGHT, Property.AGE)
        self._findings.checked.update(dict.fromkeys(judged, len(steps)))
        if self.input.held and due >= 0 and not self.settings.is_quota:
            oldest = next(iter(self.input.held))
            if oldest < self.input.get_mark(due):
                what = f"position {oldest} is carried for more than {self.settings.max_age_rounds} rounds"
                self._violate(Property.AGE, what, round_=number)

    def _judge_numbers(self, number: int, steps: list[TracedStep]) -> None:
        first = self.planned_steps
        is_numbered = [step.number for step in steps] == list(range(first, first + len(steps)))
        self._expect(is_numbered, Property.ALIGN, f"steps are not numbered from {first} on", first, number)
        posted = len(self._posted_counts)
        is_whole = len(steps) == posted or (self.settings.quota_samples is not None and len(steps) < posted)
        self._expect(is_whole, Property.ALIGN, f"collates {len(steps)} steps, posted counts of {posted}", first, number)
        others = self._rounds.note_round(self.rank, number, self._counted, len(steps), self._findings)
        what = f"collates {len(steps)} steps, another rank {others}"
        self._expect(len(steps) == others, Property.ALIGN, what, first, number)
        # Continue as if missing steps were there, so that one mistake is not reported again in every later round.
        self.planned_steps = first + max(len(steps), others, 0 if self.settings.is_quota else posted)

    def _judge_step(self, number: int, offset: int, step: TracedStep, due_before: int) -> Rows:
        group: Rows = []
        for position in step.positions:
            row = self.input.held.pop(position, None)
            if row is not None:
                group.append(row)
                continue
            is_again = self.input.was_read(position)
            property_, what = (Property.ONCE, "is emitted again") if is_again else (Property.CONSERVE, "was never read")
            self._violate(property_, f"position {position} {what}", step.number, number)
        self.account.plan(step.number, (row[0] for row in group))
        rows = (self._posted_counts, self._counted)
        posted, told = (of_round[offset] if offset < len(of_round) else None for of_round in rows)
        oldest = 0 if self._is_cut_short else due_before
        for property_, what in judge_step(step, group, self._budget.in_force, due_before=oldest, counts=(posted, told)):
            self._violate(property_, what, step.number, number)
        if self.settings.is_quota and self.input.updates.size is None:
            self._expect(bool(step.positions), Property.QUOTA, "an idle step in quota mode", step.number, number)
        return group

    def _finish(self, finish: TracedFinish) -> None:
        if self.output.finish is not None:
            self._violate(Property.FREE, "finishes twice")
            return
        self._judge(self.output.end(finish))
        self.planned.is_ended = finish.kind != OutcomeKind.LOST
        self.is_complete = finish.kind == OutcomeKind.COMPLETE and not is_ended_by(self._told.agreement)
        self._judge(judge_outcome(finish, self._told))
