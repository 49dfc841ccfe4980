"""How good a rule is, beside whether it is right: its steps, excess and ages, beside the shipped rules'."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from odb_ref.core.batching.rules import RULES, TargetRule
from odb_ref.core.effects import Collate, Effect, PostOffer
from odb_ref.core.events import Event, SamplesRead
from odb_ref.core.resume import Resumed
from odb_ref.core.types import Mode
from odb_sim.studies.runs import run
from odb_sim.verify.stages import list_runs


@dataclass(slots=True)
class Ages:
    """For how many rounds samples were carried: an observer of a simulation."""

    rounds: Counter[int] = field(default_factory=Counter)
    """How many samples were emitted so many rounds after the one they were read for."""
    _read: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _windows: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def record(self, rank: int, event: Event | Resumed | None, effects: Sequence[Effect], time_s: float) -> None:
        """Notes what is read, when windows end, and what is planned."""
        if isinstance(event, SamplesRead):
            self._read[rank] += len(event.samples)
        for effect in effects:
            if isinstance(effect, Collate):
                windows = self._windows[rank]
                for step in effect.steps:
                    for sample in step.group:
                        self.rounds[step.round - bisect_right(windows, sample.position)] += 1
        for effect in effects:
            if isinstance(effect, PostOffer):
                self._windows[rank].append(self._read[rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The figures of one rule on one run; ages in rounds."""

    trace: str
    shards: str
    rule: str
    steps: int
    excess: float
    padding_ratio: float
    idle_steps: int
    mean_age: float
    most_age: int


def measure_quality(rule: TargetRule, seed: int) -> Iterator[Quality]:
    """Yields the rule and the shipped ones, run by run in join mode; a rule called as a shipped one stands for it."""
    rules = {**RULES, rule.name: rule}
    for what in list_runs(rule, seed):
        if what.mode is not Mode.JOIN:
            continue
        for one in rules.values():
            ages = Ages()
            summary = run(replace(what, rule=one), observer=ages.record).summary
            emitted = max(1, ages.rounds.total())
            yield Quality(
                trace=what.workload.name,
                shards=str(what.sharding),
                rule=one.name,
                steps=summary.steps,
                excess=summary.excess,
                padding_ratio=summary.padding_ratio,
                idle_steps=summary.idle_steps,
                mean_age=sum(age * count for age, count in ages.rounds.items()) / emitted,
                most_age=max(ages.rounds, default=0),
            )
