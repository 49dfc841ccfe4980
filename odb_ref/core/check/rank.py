"""One rank, followed through its trace: which samples it holds, which steps it formed, handed out and took.

The checker's own bookkeeping, from what the rank did; nothing here knows what the machine would do.
"""

from __future__ import annotations

from typing import Final

from odb_ref.core.check.decode import (
    Ending,
    Rows,
    Settings,
    TracedStep,
    decode_ending,
    get_counts,
    get_integer,
    get_kind,
    get_offer,
    get_samples,
    iterate_steps,
)
from odb_ref.core.check.exchanges import Exchanges, Kind
from odb_ref.core.check.rounds import Rounds
from odb_ref.core.check.verdict import Findings, Property
from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.trace import RESUMED, JsonObject, Record, TraceError, decode_resumed

ANSWERS: Final = {"agreed": Kind.OFFER, "counted": Kind.COUNTS, "reported": Kind.REPORT}
"""Events that answer an exchange."""


def compute_fewest_groups(lengths: list[int], budget_tokens: int) -> int:
    """The fewest groups of any partition in which a group of two or more fits the budget, padded. Spec: R2.1.

    Some group holds the longest sample, and fits no more samples than that length allows; giving it the next longest ones
    leaves the shortest to the rest. (The grouping under test sweeps from the other end.)
    """
    ordered = sorted(lengths, reverse=True)
    groups = start = 0
    while start < len(ordered):
        start += max(1, budget_tokens // ordered[start])
        groups += 1
    return groups


class RankChecker:
    """Judges one rank's records, one by one; `Exchanges` and `Rounds` hold what it shares with the other ranks."""

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
        self.is_ended = False
        self._wanted_samples = 0
        self.held: dict[int, list[int]] = {}
        """Samples read and in no step yet, by position, oldest first."""
        self._skipped: set[int] = set()
        """Positions left out by the reads: none, in a right trace."""
        self._marks: dict[int, int] = {}
        """``read_samples`` at the agreement of each round, as far back as the trace says."""
        # Exchanges: how many of each kind have been posted and answered.
        self.posted = dict.fromkeys(Kind, 0)
        self.answered = dict.fromkeys(Kind, 0)
        self._agreement: Offer | None = None
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
        # Ending.
        self.failure = ""
        self.lost_peers: set[int | None] = set()
        """Ranks whose loss this one was told of, even after its end; None when it was not said which."""
        self.stopped_after: int | None = None
        """Steps taken when the consumer left while the rank was still running."""
        self.has_left = False
        self.ending: Ending | None = None
        self.is_complete = False
        """True when it finished COMPLETE, and its last agreement spoke of nothing else."""

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
        elif record.event is not None:
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

    def _begin(self, event: JsonObject | None) -> None:
        self._has_begun = True
        if event is not None and get_kind(event) == RESUMED:
            self._resume(event)
            return
        self._rounds.begin(0, 0, 0)
        if event is not None:
            self._handle_event(event)

    def _resume(self, event: JsonObject) -> None:
        """What lies before ``start`` is taken as done: its samples are emitted, but for those carried; its steps taken."""
        start = decode_resumed(event).start
        rows = get_samples(event)
        self._judge_costs(rows)
        positions = [row[1] for row in rows]
        is_carried = positions == sorted({*start.carried}) and all(0 <= item < start.read_samples for item in positions)
        what = f"is resumed with the samples at {positions}; carried are {list(start.carried)} of {start.read_samples}"
        self._expect(is_carried and positions == list(start.carried), Property.CONSERVE, what)
        self._first_round = self._exchanges.first_round = start.round
        self.read_samples, self.is_ended = start.read_samples, start.is_ended
        self.seen_samples = len(rows)
        self.held = {row[1]: row for row in rows}
        self._marks = dict(enumerate(start.marks, start.round - len(start.marks)))
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
                self._read(get_samples(event), event.get("is_ended") is True)
            case "collated":
                number = get_integer(event, "round")
                self._expect(number == self.round - 1, Property.RELEASE, f"collated round {number}, not the last one")
                self._collated_round = max(number, self._collated_round)
            case "agreed":
                self._agree(event)
            case "counted":
                self._count(get_counts(event))
            case "reported":
                is_right = self._exchanges.answer_reports(self.rank, event.get("reports"))
                self._expect(is_right, Property.EXCHANGE, "is told other reports than the ranks have posted")
                self.answered[Kind.REPORT] += 1
            case "step_taken":
                self._take()
            case "consumer_stopped":
                self.has_left = True
                if self.ending is None and self.stopped_after is None:
                    self.stopped_after = self.taken_steps
            case "local_failed":
                cause = event.get("cause")
                if self.ending is None and not self.failure:
                    self.failure = cause if isinstance(cause, str) and cause else "unknown failure"
            case "peer_lost":
                rank = event.get("rank")
                self.lost_peers.add(rank if isinstance(rank, int) else None)
            case "urged":
                pass
            case kind:
                raise TraceError(f"unknown event kind {kind!r}")

    def _handle_effect(self, effect: JsonObject) -> None:
        match get_kind(effect):
            case "deliver":
                self._deliver(get_integer(effect, "number"))
            case "read":
                self._wanted_samples = get_integer(effect, "count")
            case "collate":
                self._collate(get_integer(effect, "round"), list(iterate_steps(effect)))
            case "post_offer":
                self._post_offer(get_offer(effect, "offer"))
            case "post_counts":
                self._post_counts(get_counts(effect))
            case "post_report":
                self._exchanges.post_report(self.rank, effect.get("report"))
                self.posted[Kind.REPORT] += 1
            case "finish":
                self._finish(decode_ending(effect))
            case kind:
                raise TraceError(f"unknown effect kind {kind!r}")

    # Samples -------------------------------------------------------------------------------------------------------

    def _read(self, rows: Rows, is_ended: bool) -> None:
        self._judge_costs(rows)
        for row in rows:
            position = row[1]
            if position < self.read_samples:
                self._violate(Property.ONCE, f"reads position {position} again")
                continue
            if position > self.read_samples:
                self._violate(Property.CONSERVE, f"reads position {position} after {self.read_samples} samples: a gap")
                self._skipped.update(range(self.read_samples, position))
            self.read_samples = position + 1
            self.seen_samples += 1
            self.held[position] = row
        self._wanted_samples -= len(rows)
        self._expect(self._wanted_samples >= 0, Property.CONSERVE, "reads more samples than it asked for")
        self.is_ended = is_ended
        if is_ended:
            self._wanted_samples = 0

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
            self._expect(is_met and offered == 0, Property.QUOTA, what)
        else:
            what = f"offers {offer.samples_min} to {offered} samples, but holds {held}"
            self._expect(offer.samples_min == offered == held, Property.CONSERVE, what)
        if not self.settings.limits:
            fewest = compute_fewest_groups([row[2] for row in self.held.values()], self.settings.budget_tokens)
            what = f"offers {offer.groups_max} groups of {held} samples, which make {fewest}"
            self._expect(offer.groups_max == fewest, Property.FEWEST, what)
        if offer.ready_min:
            is_ready = self._collated_round == number - 1
            self._expect(is_ready, Property.RELEASE, f"says it is ready, but round {number - 1} is not collated")
        if self.failure or offer.failed_rank != NONE:
            is_said = offer.failed_rank == (self.rank if self.failure else NONE)
            self._expect(is_said, Property.ABORT, "its offer and its failure differ")
        if self.stopped_after is not None or offer.stop_rank != NONE:
            is_said = (offer.stop_rank, offer.stop_step) == (self.rank, self.stopped_after)
            self._expect(is_said, Property.STOP, "its offer and what its consumer did differ")

    # Rounds --------------------------------------------------------------------------------------------------------

    def _agree(self, event: JsonObject) -> None:
        number = self.answered[Kind.OFFER]
        self.answered[Kind.OFFER] += 1
        agreement, is_right = self._exchanges.answer_offer(self.rank, number, event)
        self._expect(is_right, Property.EXCHANGE, "is told another agreement than the combination of all offers")
        self._agreement = agreement
        self._marks[self._first_round + number] = self.read_samples
        if is_broken_off(agreement) or agreement.stop_rank != NONE:
            return
        if agreement.ready_min == 1:
            self._released_steps = self.planned_steps

    def _post_counts(self, rows: Rows) -> None:
        number = self.posted[Kind.COUNTS]
        self.posted[Kind.COUNTS] += 1
        self._exchanges.post_counts(self.rank, number, rows)
        self._posted_counts = rows
        most = 0 if self._agreement is None else self._agreement.samples_max
        what = f"{len(rows)} steps from at most {most} samples of a rank: not from 1 to that many"
        self._expect(1 <= len(rows) <= most, Property.TERM, what)

    def _count(self, rows: Rows) -> None:
        is_right = self._exchanges.answer_counts(self.rank, self.answered[Kind.COUNTS], rows)
        self._expect(is_right, Property.WEIGHT, "is told other counts than the sum over all ranks")
        self._counted = rows
        self.answered[Kind.COUNTS] += 1
        for offset, row in enumerate(rows):
            if not row[0]:
                what = "no rank has a sample in this step"
                self._violate(Property.TERM, what, self.planned_steps + offset, self.round - 1)

    def _collate(self, number: int, steps: list[TracedStep]) -> None:
        what = f"collates round {number}, not round {self.round - 1}, which was counted last"
        self._expect(number == self.round - 1, Property.RELEASE, what)
        number = self.round - 1
        self._judge_numbers(number, steps)
        due = number - self.settings.max_age_rounds
        for offset, step in enumerate(steps):
            self._judge_step(number, offset, step, self._get_mark(due - 1))
        checked = self._findings.checked
        for item in (Property.ONCE, Property.BUDGET, Property.WEIGHT, Property.AGE):
            checked[item] += len(steps)
        if self.held and due >= 0 and not self.settings.is_quota:
            oldest = next(iter(self.held))
            if oldest < self._get_mark(due):
                what = f"position {oldest} is carried for more than {self.settings.max_age_rounds} rounds"
                self._violate(Property.AGE, what, round_=number)

    def _get_mark(self, number: int) -> int:
        """The samples read when round ``number`` was agreed on; 0 for a round of which that is not known."""
        return self._marks.get(number, 0)

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

    def _judge_step(self, number: int, offset: int, step: TracedStep, due_position: int) -> None:
        group: Rows = []
        for position in step.positions:
            row = self.held.pop(position, None)
            if row is not None:
                group.append(row)
            elif position < self.read_samples and position not in self._skipped:
                self._violate(Property.ONCE, f"position {position} is emitted again", step.number, number)
            else:
                self._violate(Property.CONSERVE, f"position {position} was never read", step.number, number)
        if step.positions and min(step.positions) < due_position and len(group) == len(step.positions):
            what = f"position {min(step.positions)} was carried for more than {self.settings.max_age_rounds} rounds"
            self._violate(Property.AGE, what, step.number, number)
        if len(group) > 1:
            padded = len(group) * max(row[2] for row in group)
            if padded > self.settings.budget_tokens:
                what = f"{len(group)} samples, {padded} padded tokens, over {self.settings.budget_tokens}"
                self._violate(Property.BUDGET, what, step.number, number)
            for place, limit in enumerate(self.settings.limits, 4):
                used = sum(row[place] for row in group if place < len(row))
                if used > limit:
                    what = f"{len(group)} samples use {used} of resource {place - 4}, over {limit}"
                    self._violate(Property.BUDGET, what, step.number, number)
        if self.settings.is_quota:
            self._expect(bool(step.positions), Property.QUOTA, "an idle step in quota mode", step.number)
        if len(group) == len(step.positions) and offset < len(self._posted_counts):
            counts = [len(group), sum(row[2] for row in group), sum(row[3] for row in group)]
            if counts != self._posted_counts[offset]:
                what = f"holds {counts}, but posted {self._posted_counts[offset]} (samples, tokens, supervised)"
                self._violate(Property.WEIGHT, what, step.number, number)
        if offset < len(self._counted) and step.counts != self._counted[offset]:
            what = f"carries the counts {step.counts}, but was told {self._counted[offset]}"
            self._violate(Property.WEIGHT, what, step.number, number)

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
        elif self.ending is not None and number >= self.ending.step_limit:
            self._violate(Property.STOP, f"is taken, but the limit is {self.ending.step_limit}", number)
        self.taken_steps += 1

    def _finish(self, ending: Ending) -> None:
        if self.ending is not None:
            self._violate(Property.FREE, "finishes twice")
            return
        self.ending = ending
        agreement = self._agreement
        if ending.kind == OutcomeKind.LOST:
            self._expect(
                ending.rank in self.lost_peers, Property.ABORT, f"finishes with {ending.outcome}, but was not told so"
            )
        elif agreement is not None and is_broken_off(agreement):
            is_abort = ending.kind in (OutcomeKind.FAILED, OutcomeKind.MISMATCH)
            self._expect(is_abort, Property.ABORT, f"finishes with {ending.outcome} after a failure was agreed")
        elif agreement is not None and agreement.stop_rank != NONE:
            is_stop = (ending.kind, ending.rank) == (OutcomeKind.STOPPED, agreement.stop_rank)
            what = f"finishes with {ending.outcome} after the stop of rank {agreement.stop_rank} was agreed"
            self._expect(is_stop, Property.STOP, what)
            is_limited = ending.step_limit <= agreement.stop_step
            what = f"may take {ending.step_limit} steps, though a consumer left after {agreement.stop_step}"
            self._expect(is_limited, Property.STOP, what)
        else:
            self.is_complete = ending.kind == OutcomeKind.COMPLETE
            self._expect(self.is_complete, Property.ABORT, f"finishes with {ending.outcome}, which no agreement says")


def is_broken_off(agreement: Offer) -> bool:
    """True when the agreement says that a rank failed, or that the ranks do not fit together."""
    return (
        agreement.failed_rank != NONE
        or agreement.round_min != agreement.round_max
        or agreement.fingerprint_min != agreement.fingerprint_max
    )
