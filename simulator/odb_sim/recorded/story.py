"""An epoch round by round, as its trace records it: what each rank held, offered, trained on, carried and idled, and why.

Nothing is simulated or decided again. The trace does not hold the groups before they are split or carried, so the core
(`odb_ref.core.batching`) computes them. They are shown only if their number is the one that the rank offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.types import Sample
from odb_ref.trace.check.decode import (
    TracedFinish,
    TracedStep,
    decode_finish,
    get_counts,
    get_flag,
    get_integer,
    get_kind,
    get_offer,
    get_rank,
    get_samples,
    get_text,
    iterate_steps,
)
from odb_ref.trace.check.job import open_traces
from odb_ref.trace.check.stream import Stream, group_into_jobs
from odb_ref.trace.format import (
    Header,
    JsonObject,
    Record,
    TraceError,
    decode_config,
    decode_resumed,
    decode_sample,
)


@dataclass(slots=True)
class RankRound:
    """What one rank does in one round."""

    window: list[Sample]
    """In order of position. The first ``carried_in`` were carried over from the previous round."""
    carried_in: int
    offer: Offer
    is_ended: bool
    """True if the rank had read its whole input."""
    agreed_tokens: int
    """The budget for the groups of this round, as agreed in the round before."""
    agreement: Offer | None = None
    target: int = 0
    """The number of steps agreed on, or 0 if the agreement ends the epoch or the trace ends first."""
    steps: list[TracedStep] = field(default_factory=list)
    times_s: dict[str, float] = field(default_factory=dict)
    """Times on the rank's own clock: window asked for and read, offer posted and agreed on, counts received, steps collated."""

    @property
    def carried(self) -> int:
        """The number of samples kept for the next round."""
        return len(self.window) - sum(len(step.positions) for step in self.steps)

    @property
    def idle_steps(self) -> list[int]:
        """The numbers of the steps for which the rank has no samples."""
        return [step.number for step in self.steps if not step.positions]


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure, or an early end of an epoch, on one rank."""

    round: int
    """Counted from the first round of the trace: the next one that the rank begins, or its last if there is none."""
    rank: int
    text: str


@dataclass(slots=True)
class Teller:
    """Reads the records of one rank in order."""

    rank: int
    config: Config | None
    limits: int
    parts: list[RankRound] = field(default_factory=list)
    taken_steps: int = 0
    taken_s: list[float] = field(default_factory=list)
    """The time of each, if the trace has times."""
    first_step: int = 0
    """The number of the first step delivered."""
    finish: TracedFinish | None = None
    first_round: int = 0
    incidents: list[Incident] = field(default_factory=list)
    read_samples: int = 0
    is_ended: bool = False
    _held: list[Sample] = field(default_factory=list)
    _arrived: list[Sample] = field(default_factory=list)
    _troubles: list[str] = field(default_factory=list)
    _times_s: dict[str, float] = field(default_factory=dict)
    _agreed_tokens: int = NONE
    _delivered_steps: int = 0
    _is_told: bool = False
    """True once the consumer has left or this rank knows that another has. Its own exit is then not an incident."""

    def read(self, record: Record) -> None:
        """Processes one record. Raises: TraceError when it is malformed."""
        if record.event is not None:
            self._note_event(record.event, record.time_s)
        elif record.time_s is not None:
            self._times_s["asked"] = record.time_s
        for effect in record.effects:
            self._note_effect(effect, record.time_s)

    def find_budget(self, part: RankRound) -> int | None:
        """Returns the token budget in force in a round, or None if the configuration is unknown."""
        return None if self.config is None else self.config.compute_round_bounds(part.agreed_tokens)[0]

    def find_groups(self, part: RankRound) -> list[list[int]] | None:
        """Returns the groups of a window, as places in it, or None if they are unknown or the rank offered another number."""
        if self.config is None:
            return None
        budget, limits = self.config.compute_round_bounds(part.agreed_tokens)
        window, order, layout = tuple(part.window), self.config.order, self.config.layout
        padding = self.config.compute_most_padding(budget)
        groups = order.compute_groups(window, layout, budget, limits, sizes=self.config.sizes, most_padding=padding)
        places = {sample.position: place for place, sample in enumerate(window)}
        found = [[places[sample.position] for sample in group] for group in groups]
        return found if len(found) == part.offer.groups_max else None

    def end(self) -> None:
        """Marks the end of the trace."""
        if self.finish is None:
            self._troubles.append("its trace ends here")
        elif self.finish.kind == "complete" and self.taken_steps < self._delivered_steps and not self._is_told:
            self._troubles.append(f"its consumer has taken {self.taken_steps} of {self._delivered_steps} steps")
        self._tell_troubles()

    def _mark(self, name: str, now_s: float | None) -> None:
        if now_s is not None:
            (self.parts[-1].times_s if self.parts else self._times_s)[name] = now_s

    def _note_event(self, event: JsonObject, now_s: float | None) -> None:
        match get_kind(event):
            case "resumed":
                resumed = decode_resumed(event)
                self._held = list(resumed.samples)
                self.first_round, self.read_samples = resumed.start.round, resumed.start.read_samples
                self._agreed_tokens, self.is_ended = resumed.start.agreed_tokens, resumed.start.is_ended
            case "samples_read":
                samples = [decode_sample(row) for row in get_samples(event)]
                self._arrived += samples
                self.read_samples += len(samples)
                self.is_ended = get_flag(event, "is_ended")
                if now_s is not None:
                    self._times_s["read"] = now_s
            case "agreed":
                self._mark("agreed", now_s)
                agreement = get_offer(event, "agreement")
                self._agreed_tokens = agreement.budget_min
                if self.parts:
                    self.parts[-1].agreement = agreement
            case "counted":
                self._mark("counted", now_s)
            case "collated":
                self._mark("collated", now_s)
            case "step_taken":
                self.taken_steps += 1
                self.taken_s += [] if now_s is None else [now_s]
            case "local_failed":
                self._troubles.append(f"fails: {get_text(event, 'cause')}")
            case "peer_lost":
                who = get_rank(event)
                lost = "a rank" if who is None else f"rank {who}"
                self._troubles.append(f"has lost {lost}: {get_text(event, 'cause')}")
                self._is_told = True
            case "urged":
                self._is_told = True
            case "consumer_stopped" if not self._is_told:
                self._troubles.append(f"its consumer leaves after {self.taken_steps} steps")
                self._is_told = True
            case _:
                pass

    def _note_effect(self, effect: JsonObject, now_s: float | None) -> None:
        match get_kind(effect):
            case "read" if now_s is not None:
                self._times_s.setdefault("asked", now_s)
            case "post_offer":
                self._begin_round(get_offer(effect, "offer"), now_s)
            case "post_counts" if self.parts:
                self.parts[-1].target = len(get_counts(effect, 3 + self.limits))
            case "collate" if self.parts:
                self._form_steps(effect)
            case "deliver":
                self.first_step = self.first_step if self._delivered_steps else get_integer(effect, "number")
                self._delivered_steps += 1
            case "finish":
                self.finish = decode_finish(effect)
            case _:
                pass

    def _begin_round(self, offer: Offer, now_s: float | None) -> None:
        window = sorted([*self._held, *self._arrived], key=lambda sample: sample.position)
        part = RankRound(window, len(self._held), offer, self.is_ended, self._agreed_tokens, times_s=self._times_s)
        self.parts.append(part)
        self._held, self._arrived, self._times_s = window, [], {}
        self._mark("posted", now_s)
        self._tell_troubles()

    def _tell_troubles(self) -> None:
        number = max(0, len(self.parts) - 1)
        self.incidents += [Incident(number, self.rank, text) for text in self._troubles]
        self._troubles = []

    def _form_steps(self, effect: JsonObject) -> None:
        part = self.parts[-1]
        part.steps = list(iterate_steps(effect, 3 + self.limits))
        named = [position for step in part.steps for position in step.positions]
        emitted = set(named)
        self._held = [sample for sample in part.window if sample.position not in emitted]
        if len(emitted) < len(named) or not emitted <= {sample.position for sample in part.window}:
            raise TraceError(
                f"rank {self.rank} collates samples that it does not hold, in round {get_integer(effect, 'round')}"
            )


@dataclass(frozen=True, slots=True)
class Story:
    """One epoch of a job."""

    paths: tuple[str, ...]
    header: Header
    ranks: tuple[Teller, ...]
    """In order of rank, without ranks whose file is missing."""

    @property
    def rounds(self) -> int:
        """The number of rounds that at least one rank has begun."""
        return max((len(rank.parts) for rank in self.ranks), default=0)

    @property
    def first_round(self) -> int:
        """The number of the first round of the trace."""
        return self.ranks[0].first_round

    @property
    def outcome(self) -> TracedFinish | None:
        """How the epoch ended, according to the first rank that recorded it."""
        return next((rank.finish for rank in self.ranks if rank.finish is not None), None)

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, in the order of rounds."""
        return sorted([item for rank in self.ranks for item in rank.incidents], key=lambda item: item.round)

    def list_parts(self, round_: int) -> list[tuple[int, RankRound]]:
        """Returns the number of each rank in round ``round_`` (counted from the first of the trace), and what it does."""
        return [(rank.rank, rank.parts[round_]) for rank in self.ranks if round_ < len(rank.parts)]

    def find_round(self, step: int) -> int:
        """Returns the round of a step. Raises: UsageError when there is no such step."""
        for round_ in range(self.rounds):
            if any(item.number == step for _, part in self.list_parts(round_) for item in part.steps):
                return round_
        raise UsageError(f"step {step} is not in the trace: {self.paths[0]}")

    def explain_target(self, round_: int) -> str:
        """Returns in words why a round has its number of steps: the part of the agreement that decides it, and whose it is."""
        parts = self.list_parts(round_)
        agreement = next((part.agreement for _, part in parts if part.agreement is not None), None)
        if agreement is None:
            return "the offers of all ranks never met"
        for what, told in (("failed_rank", "rank {} has failed"), ("stop_rank", "the consumer of rank {} has left")):
            if (who := getattr(agreement, what)) != NONE:
                return f"{told.format(who)}, so the epoch ends here"
        target = max(part.target for _, part in parts)
        if not target:
            return "nobody holds a sample, so the epoch ends" if not agreement.samples_max else "the epoch ends"
        ramp = self.header.config.get("ramp_rounds")
        is_free = self.header.config.get("update_samples") is None and agreement.groups_min != NONE
        if isinstance(ramp, int) and agreement.round_min < ramp and is_free and target != agreement.due_max:
            return "the first windows are small: one in four of the steps is formed, and the rest is carried"
        reasons = {
            "groups_min": "rank {} would emit {}, the fewest of those that read on",
            "due_max": "rank {} has {} that may not be carried again",
            "groups_max": "rank {} has {}, the most",
            "samples_min": "rank {} holds only {}",
        }
        if self.header.config.get("rule") == PaperRule().name:
            reasons = {"groups_max": reasons["groups_max"], **reasons}
        for name, told in reasons.items():
            if getattr(agreement, name) == target:
                who = next((rank for rank, part in parts if getattr(part.offer, name) == target), None)
                what = "sample" if name == "samples_min" else "group"
                return told.format("?" if who is None else who, f"{target} {what}{'' if target == 1 else 's'}")
        return f"so the rule {self.header.config.get('rule')!s} says"

    def explain_idle(self, round_: int, rank: int) -> str:
        """Returns in words why a rank idles in a round, or an empty string if it does not."""
        part = dict(self.list_parts(round_))[rank]
        if not part.idle_steps:
            return ""
        held = len(part.window)
        why = "its input had ended" if part.is_ended else "its window was small"
        return (
            f"{why}, and it held {held} sample{'' if held == 1 else 's'}; the round has {len(part.steps)} steps, since "
            f"{self.explain_target(round_)}"
        )


def read_story(paths: Sequence[str | Path], *, epoch: int | None = None) -> Story:
    """Returns the epoch in trace files, given as the files of all ranks or as their folder.

    Raises: UsageError (TraceError), naming the file, when one is not a trace, or they hold several epochs or runs.
    """
    jobs = group_into_jobs([stream for path in paths for stream in open_traces(Path(path))])
    if epoch is not None:
        jobs = [job for job in jobs if job[0].header.epoch == epoch]
        if not jobs:
            raise UsageError(f"{paths[0]} and the others hold no epoch {epoch}")
    if len(jobs) > 1:
        epochs = {job[0].header.epoch for job in jobs}
        if len(epochs) == len(jobs):
            raise UsageError(f"the traces are of epochs {', '.join(map(str, sorted(epochs)))}: choose one with --epoch")
        first, second, *_ = (job[0].path for job in jobs)
        raise UsageError(f"the traces are of {len(jobs)} runs, {first} and {second} of two: give the files of one")
    return _read_job(jobs[0])


def _read_job(job: Sequence[Stream]) -> Story:
    header = job[0].header
    try:
        name = str(header.config.get("rule"))
        rule = PaperRule(name)  # only its name is used
        config = decode_config(header.config, rank=0, depth_steps=1, rules={name: rule})
    except UsageError:
        config = None  # a user's own cost function: the core cannot form its groups
    tellers: dict[int, Teller] = {}
    for stream in job:
        while stream.next is not None:
            record = stream.next
            teller = tellers.setdefault(record.rank, Teller(record.rank, config, len(stream.settings.limits)))
            try:
                teller.read(record)
            except TraceError as error:
                raise stream.locate(error) from error
            stream.advance()
        stream.close()
    if not tellers:
        raise UsageError(f"{job[0].path}: holds a header, and no record of any rank")
    for teller in tellers.values():
        teller.end()
    return Story(tuple(str(stream.path) for stream in job), header, tuple(tellers[rank] for rank in sorted(tellers)))
