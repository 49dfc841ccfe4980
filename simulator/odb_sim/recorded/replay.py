"""Replay: simulates a recorded run again from what its ranks read, and compares every decision.

The trace gives each rank's samples and the configuration. The simulator adds its own exchange, its own clock and its own
order of events. Every round's number of steps, every step's samples on every rank, and every step's global counts must come
out equal. The last rounds of a run that ended early (a failure, a stop, a truncated record) are not compared, because timing
decides when a run is cut short. Predicted times are reported beside the measurements, with their error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_ref.core.batching.rules import RULES
from odb_ref.core.effects import Collate, Effect, OutcomeKind
from odb_ref.core.errors import UsageError
from odb_ref.core.events import Event, StepTaken
from odb_ref.core.resume import Resumed
from odb_ref.core.types import Step
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.costs import INLINE_LOADER, Costs
from odb_sim.inputs.workload import LARGEST_WORKLOAD, Sharding, Workload
from odb_sim.recorded.runs import RankRecord, RecordedRun, RecordedStep
from odb_sim.studies.bands import CERTAIN, Band, compute_bands, list_uncertain
from odb_sim.studies.runs import Run, run

Round = tuple[RecordedStep, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, measured and predicted. ``step_error`` is the median over steps of the relative error of a step's time.

    A step's time runs from one step taken to the next, and includes waiting for data and for other ranks.
    """

    measured_s: float
    """From the first step taken to the last, on rank 0."""
    predicted_s: float
    total_error: float
    step_error: float
    steps: int
    low_s: float
    high_s: float
    """The bounds of the prediction in nine cases of ten, by the uncertainty of the cost model."""
    seconds: tuple[tuple[float, float], ...]
    """The measured and the predicted time of each step."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. ``difference`` is empty if every decision is equal."""

    name: str
    driver: str
    ranks: int
    outcome: str
    rounds: int
    """The rounds compared: those in which all ranks have formed steps."""
    decisions: int
    """The groups compared: one for each rank and step."""
    measured_steps: int
    """The steps of the compared rounds."""
    predicted_steps: int
    difference: str
    timing: Timing | None
    """None if the trace has no times."""

    @property
    def is_equal(self) -> bool:
        """True if the simulation makes every decision as the run did."""
        return not self.difference


def build_workload(recorded: RecordedRun) -> Workload:
    """Returns what the ranks read. A rank whose record ends before its source gets another window of one-token samples.

    Otherwise the simulator would take the end of the record for the end of the source, which the rules see. These samples
    affect only rounds that the record does not have.
    """
    if recorded.config.shared_samples is not None:
        return _build_shared_workload(recorded, recorded.config.shared_samples)
    filler = recorded.config.window_samples
    tokens: list[int] = []
    supervised: list[int] = []
    resources: list[tuple[int, ...]] = []
    offsets = [0]
    for rank in recorded.ranks:
        tokens.extend(sample.length for sample in rank.samples)
        supervised.extend(sample.supervised for sample in rank.samples)
        resources.extend(sample.costs for sample in rank.samples)
        if not rank.is_ended:
            tokens.extend([1] * filler)
            supervised.extend([1] * filler)
            resources.extend([(0,) * len(recorded.config.limits)] * filler)
        offsets.append(len(tokens))
    return Workload(
        name=recorded.name,
        ids=np.arange(len(tokens)),
        tokens=np.array(tokens, dtype=np.int64),
        supervised_tokens=np.array(supervised, dtype=np.int64),
        resources=np.array(resources, dtype=np.int64).reshape(len(tokens), len(recorded.config.limits)),
        offsets=np.array(offsets, dtype=np.int64),
    )


def _build_shared_workload(recorded: RecordedRun, total: int) -> Workload:
    """Returns the common order as far as the ranks have read it, with samples of one token in place of the rest.

    Raises: UsageError when samples were set aside, or the order exceeds the largest workload.
    """
    if any(rank.has_gaps for rank in recorded.ranks) or total > LARGEST_WORKLOAD:
        raise UsageError("the trace does not hold the order that its ranks have shared")
    tokens, supervised = np.ones(total, dtype=np.int64), np.ones(total, dtype=np.int64)
    resources = np.zeros((total, len(recorded.config.limits)), dtype=np.int64)
    for rank in recorded.ranks:
        for place, sample in zip(rank.places, rank.samples, strict=False):  # the last one may not have been read
            if not 0 <= place < total:
                raise UsageError(f"rank {rank.rank} draws place {place} of {total}")
            tokens[place], supervised[place], resources[place] = sample.length, sample.supervised, sample.costs
    return Workload(
        name=recorded.name,
        ids=np.arange(total),
        tokens=tokens,
        supervised_tokens=supervised,
        resources=resources,
        offsets=np.linspace(0, total, len(recorded.ranks) + 1).astype(np.int64),
    )


def _set_workers(costs: Costs, workers: int | None) -> Costs:
    """Returns ``costs`` with the job's workers. With 0 workers the training thread reads and collates: that time is part of a
    step, as `calibrate` fits it, and the loader costs nothing.
    """
    if workers is None:
        return costs
    return replace(costs, loader=replace(costs.loader, workers=workers) if workers else INLINE_LOADER)


def describe_inline(recorded: RecordedRun, costs: Costs, workers: int | None) -> str:
    """Returns a warning if the time to read is not priced; empty if it is, or if a loader process reads."""
    is_inline = (recorded.workers if workers is None else workers) == 0
    if not is_inline or replace(costs.loader, workers=INLINE_LOADER.workers) == INLINE_LOADER:
        return ""
    return (
        f"{recorded.name}: the thread that trains reads and collates (0 workers), and this cost model was not fitted to that: "
        "what it takes is left out of the predicted times (odb-ref calibrate --workers 0)"
    )


def build_run(
    recorded: RecordedRun,
    costs: Costs | None = None,
    workers: int | None = None,
    global_batch: GlobalBatch = EVERY_STEP,
) -> Run:
    """Returns the simulation of ``recorded``, with ``workers`` of each rank if given, otherwise the trace's number.

    ``global_batch`` is the global batch to which the job accumulated its steps, which a trace does not record.

    Raises: UsageError when its rule does not ship or nothing was read.
    """
    config = recorded.config
    if config.rule.name not in RULES:
        raise UsageError(f"the rule {config.rule.name!r} does not ship, so it cannot be replayed")
    if not any(rank.samples for rank in recorded.ranks):
        raise UsageError("no rank has read a sample, so there is nothing to replay")
    what = Run(
        workload=build_workload(recorded),
        policy=config.rule.name,
        budget_tokens=config.budget_tokens,
        global_batch=global_batch,
        window_samples=config.window_samples,
        depth_steps=config.depth_steps,
        costs=_set_workers(costs or Costs(), recorded.workers if workers is None else workers),
        sharding=Sharding.EVEN if config.shared_samples is None else Sharding.SHARED,
        order_seed=config.order_seed,
        starts=recorded.starts,
        budget_schedule=recorded.budget_schedule,
        full_reads=recorded.full_reads,
    )
    return config.apply(what)


def replay(
    recorded: RecordedRun,
    *,
    costs: Costs | None = None,
    workers: int | None = None,
    global_batch: GlobalBatch = EVERY_STEP,
    on_progress: Callable[[int], None] | None = None,
) -> Replay:
    """Simulates ``recorded`` and compares. ``costs``, ``workers`` and ``global_batch`` affect the predicted times, but no
    decision.

    Raises: UsageError when the run cannot be replayed, InvariantError when the simulation breaks a property.
    """
    what = build_run(recorded, costs, workers, global_batch)
    simulated = [_Simulated() for _ in recorded.ranks]

    def observe(rank: int, event: Event | Resumed | None, effects: Sequence[Effect], time_s: float) -> None:
        simulated[rank].note(event, effects, time_s)

    run(what, observer=observe, on_progress=on_progress)
    sure = list_uncertain(what.costs) if costs is not None else []
    band = compute_bands([what], sure, draws=0, is_whole=True).combine(1.0) if sure else CERTAIN
    outcome = recorded.ranks[0].outcome
    is_whole = outcome == OutcomeKind.COMPLETE
    rounds = recorded.rounds
    predicted = simulated[0].rounds if is_whole else simulated[0].rounds[:rounds]
    return Replay(
        name=recorded.name,
        driver=recorded.driver,
        ranks=len(recorded.ranks),
        outcome=outcome or "unknown: the record breaks off",
        rounds=rounds,
        decisions=sum(len(steps) for rank in recorded.ranks for steps in rank.rounds[:rounds]),
        measured_steps=sum(map(len, recorded.ranks[0].rounds[:rounds])),
        predicted_steps=sum(map(len, predicted)),
        difference=find_difference(recorded.ranks, [rank.rounds for rank in simulated], is_whole=is_whole),
        timing=_compare_times(recorded, simulated[0].taken_s, band),
    )


class _Simulated:
    """Listens to one simulated rank."""

    __slots__ = ("rounds", "taken_s")

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.taken_s: list[float] = []

    def note(self, event: Event | Resumed | None, effects: Sequence[Effect], time_s: float) -> None:
        if isinstance(event, StepTaken):
            self.taken_s.append(time_s)
        for effect in effects:
            if isinstance(effect, Collate):
                self.rounds.append(tuple(map(_record_step, effect.steps)))


def _record_step(step: Step) -> RecordedStep:
    positions = tuple(sample.position for sample in step.group)
    return RecordedStep(step.number, positions, tuple(step.global_counts.to_row()))


def find_difference(recorded: Sequence[RankRecord], simulated: Sequence[Sequence[Round]], *, is_whole: bool) -> str:
    """Returns the first decision that differs, by round, step and rank, or an empty string.

    Rounds missing from a rank's record are not compared, except if the run ``is_whole``: then any such round is a difference.
    """
    rounds = min(len(rank.rounds) for rank in recorded)
    for number in range(rounds):
        if number >= len(simulated[0]):
            return f"round {number}: recorded with {len(recorded[0].rounds[number])} steps, not simulated"
        for rank in recorded:
            ours, theirs = simulated[rank.rank][number], rank.rounds[number]
            if len(ours) != len(theirs):
                return f"round {number}, rank {rank.rank}: {len(theirs)} steps recorded, {len(ours)} simulated"
        for step in range(len(simulated[0][number])):
            for rank in recorded:
                ours_, theirs_ = simulated[rank.rank][number][step], rank.rounds[number][step]
                if ours_ != theirs_:
                    place = f"round {number}, step {theirs_.number}, rank {rank.rank}"
                    return f"{place}: {_describe(theirs_, ours_)}"
    most = max(*(len(rank.rounds) for rank in recorded), len(simulated[0])) if is_whole else rounds
    if most > rounds:
        return f"round {rounds}: {rounds} rounds recorded on every rank, {len(simulated[0])} simulated"
    return ""


def _describe(theirs: RecordedStep, ours: RecordedStep) -> str:
    for what in ("number", "positions", "counts"):
        recorded, simulated = getattr(theirs, what), getattr(ours, what)
        if recorded != simulated:
            return f"{what} {_shorten(recorded)} recorded, {_shorten(simulated)} simulated"
    return ""


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _compare_times(recorded: RecordedRun, simulated_s: Sequence[float], band: Band) -> Timing | None:
    """Returns rank 0's times from step to step. They come from one clock, so the ranks' clocks need not agree."""
    measured = np.diff(recorded.ranks[0].taken_s)
    predicted = np.diff(simulated_s[: len(measured) + 1])
    if not recorded.has_times or not len(measured) or len(measured) != len(predicted) or measured.min() <= 0:
        return None
    total_s, predicted_s = float(measured.sum()), float(predicted.sum())
    return Timing(
        measured_s=total_s,
        predicted_s=predicted_s,
        total_error=predicted_s / total_s - 1,
        step_error=float(np.median(np.abs(predicted - measured) / measured)),
        steps=len(measured),
        low_s=predicted_s * band.low,
        high_s=predicted_s * band.high,
        seconds=tuple(zip(measured.tolist(), predicted.tolist(), strict=True)),
    )
