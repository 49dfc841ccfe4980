"""The figures of a run, counted from the batches the trainers took, not from what the protocol reports.

Every figure of a `Summary` has its formula in GLOSSARY.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

import numpy as np

from odb_ref.arrays.windows import compute_ragged
from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import InvariantError
from odb_sim.engine.batches import Batches
from odb_sim.inputs.conditions import Fault
from odb_sim.inputs.lengths import Integers

SHORT: Final = "short"
"""The outcome of a run that ends in order but before its quota is met."""
COMPLETE: Final = Outcome(OutcomeKind.COMPLETE)
_POSITION_BITS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step over all ranks. Seconds are sums over ranks, except start and end."""

    step: int
    round: int
    start_s: float
    end_s: float
    samples: int
    real_tokens: int
    padded_tokens: int
    critical_tokens: int
    idle_ranks: int
    oversize_groups: int
    over_budget_groups: int
    queued_steps: int
    data_wait_s: float
    compute_s: float
    sync_wait_s: float
    collective_s: float


@dataclass(frozen=True, slots=True)
class StepSums:
    """What all ranks together train on in some steps: the numbers that a `StepRow` has under the same names, step by step."""

    samples: Integers
    real_tokens: Integers
    padded_tokens: Integers
    critical_tokens: Integers
    idle_ranks: Integers
    oversize_groups: Integers
    over_budget_groups: Integers

    def select(self, place: int) -> dict[str, int]:
        """Returns the numbers of one step."""
        return {item.name: int(getattr(self, item.name)[place]) for item in fields(self)}


def count_steps(samples: Integers, real: Integers, padded: Integers, budget_tokens: int) -> StepSums:
    """Returns the sums over ranks, from the samples and tokens of each batch in shape (ranks, steps)."""
    is_over = padded > budget_tokens
    return StepSums(
        samples.sum(axis=0),
        real.sum(axis=0),
        padded.sum(axis=0),
        padded.max(axis=0),
        (samples == 0).sum(axis=0),
        (is_over & (samples == 1)).sum(axis=0),
        (is_over & (samples > 1)).sum(axis=0),
    )


def merge_sums(parts: Sequence[StepSums]) -> StepSums:
    """Returns the sums over all ranks, from those over some ranks each."""
    names = [item.name for item in fields(StepSums)]
    sums = {name: np.sum([getattr(part, name) for part in parts], axis=0) for name in names}
    return StepSums(**sums | {"critical_tokens": np.max([part.critical_tokens for part in parts], axis=0)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run: the part of a summary that is not measured."""

    lengths: str
    policy: str
    mode: str
    shards: str
    layout: str
    cost: str
    order: str
    sizes: str
    ranks: int
    window: int | None
    """None if the policy has no windows, or if updates are fixed."""
    depth: int | None
    """None for baselines."""
    token_budget: int
    budget_schedule: str | None
    batch_size: int | None
    quota: int | None
    global_batch: int | None
    global_tokens: int | None
    seed: int
    samples_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(RunSettings):
    """The figures of one run, which are the keys of ``--json``."""

    samples_emitted: int
    samples_unique: int
    real_tokens: int
    padded_tokens: int
    steps: int
    updates: int
    samples_per_update: float
    tokens_per_update: float
    steps_per_update: float
    rounds: int
    idle_steps: int
    oversize_groups: int
    over_budget_groups: int
    largest_batch_tokens: int
    padding_ratio: float
    critical_tokens: int
    efficiency: float
    excess: float
    length_autocorrelation: float
    displacement_samples: float
    compute_share: float
    data_wait_share: float
    trainer_wait_share: float
    collective_share: float
    ending_share: float
    exchange_s: float
    sim_time_s: float
    wall_time_s: float
    driver: str
    samples_per_s: float
    tokens_per_s: float
    outcome: str
    outcome_rank: int | None
    outcome_cause: str
    fault_s: float | None
    abort_s: float | None

    def to_json(self) -> dict[str, str | int | float | None]:
        """Returns the keys and values of ``--json``."""
        return asdict(self)


class Recorder:
    """Records a run step by step. Every rank takes part in each step (ALIGN)."""

    def __init__(self, *, ranks: int, samples_total: int, budget_tokens: int, emitted: Sequence[int] = ()) -> None:
        self._budget_tokens = budget_tokens
        self._emitted: Integers = np.array(emitted or [0] * ranks)
        """The samples that each rank has emitted, including those before a resumed epoch."""
        self.moved_places = 0
        self._rank_tokens: Integers = np.zeros(ranks, dtype=np.int64)
        self._seen = np.zeros(samples_total, dtype=np.bool_)
        self.rows: list[StepRow] = []
        self.samples_emitted = 0

    def end_step(
        self,
        batches: Batches,
        *,
        round_: int,
        start_s: float,
        end_s: float,
        queued_steps: int,
        data_wait_s: float,
        compute_s: float,
        sync_wait_s: float,
        collective_s: float,
    ) -> None:
        """Records a step that all ranks have done, with one batch for each in ``batches``."""
        columns = (batches.samples[:, None], batches.real[:, None], batches.padded[:, None])
        self._rank_tokens += batches.real
        self._seen[batches.ids] = True
        self.moved_places += sum_moves(self._emitted, batches.samples, batches.positions)
        self._emitted += batches.samples
        self.samples_emitted += len(batches.ids)
        self.rows.append(
            StepRow(
                step=len(self.rows),
                round=round_,
                start_s=start_s,
                end_s=end_s,
                **count_steps(*columns, self._budget_tokens).select(0),
                queued_steps=queued_steps,
                data_wait_s=data_wait_s,
                compute_s=compute_s,
                sync_wait_s=sync_wait_s,
                collective_s=collective_s,
            )
        )

    def end(self) -> RunRecord:
        """Returns the record of the steps.

        Raises: InvariantError when the tokens of the steps do not add up to those of the ranks.
        """
        if (tokens := sum(row.real_tokens for row in self.rows)) != self._rank_tokens.sum():
            raise InvariantError("CONSERVE", f"steps hold {tokens} tokens, ranks {self._rank_tokens.sum()}")
        return RunRecord(
            rows=self.rows,
            rank_tokens=self._rank_tokens,
            samples_unique=int(self._seen.sum()),
            moved_places=self.moved_places,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the trainers have taken: each step, totals that the steps alone do not give, and how the run ended."""

    rows: list[StepRow]
    rank_tokens: Integers
    """The real tokens that each rank has trained on."""
    samples_unique: int
    moved_places: int
    rounds: int = 0
    updates: int = 0
    exchange_s: float = 0.0
    outcome: Outcome = COMPLETE
    fault_s: float | None = None
    abort_s: float | None = None
    ended_s: float = 0.0
    """When the last surviving rank had ended after a fault, since ranks that wait for a lost one train on nothing."""
    acted: frozenset[Fault] = frozenset()
    """The faults that have happened."""


def compute_summary(
    settings: RunSettings,
    record: RunRecord,
    *,
    wall_time_s: float,
    driver: str,
    expected_samples: int,
) -> Summary:
    """Returns the figures of a run; their formulas are in GLOSSARY.md. A ratio whose denominator is 0 is 0.

    ``expected_samples`` is the number of samples of a complete epoch.

    Raises: InvariantError when a run ends COMPLETE without having trained on all of them.
    """
    rows, outcome = record.rows, record.outcome
    emitted, real, padded, critical = (
        sum(getattr(row, name) for row in rows)
        for name in ("samples", "real_tokens", "padded_tokens", "critical_tokens")
    )
    if outcome.kind is OutcomeKind.COMPLETE and emitted < expected_samples:
        raise InvariantError("COVER", f"complete, with {emitted} of {expected_samples} samples trained on")
    asked = {item.name: getattr(settings, item.name) for item in fields(settings)}
    last_s = rows[-1].end_s if rows else 0.0
    sim_time_s = max(last_s, record.ended_s)
    rank_seconds = len(record.rank_tokens) * sim_time_s
    largest_rank_tokens = int(record.rank_tokens.max())
    lack = ""
    if outcome.kind is OutcomeKind.COMPLETE and settings.quota is not None and emitted < settings.quota:
        lack = f"the quota of {settings.quota:,} samples is not met: a rank has none left after {emitted:,}"
    return Summary(
        **asked,
        samples_emitted=emitted,
        samples_unique=record.samples_unique,
        real_tokens=real,
        padded_tokens=padded,
        steps=len(rows),
        updates=record.updates,
        samples_per_update=_ratio(emitted, record.updates),
        tokens_per_update=_ratio(real, record.updates),
        steps_per_update=_ratio(len(rows), record.updates),
        rounds=record.rounds,
        idle_steps=sum(row.idle_ranks for row in rows),
        oversize_groups=sum(row.oversize_groups for row in rows),
        over_budget_groups=sum(row.over_budget_groups for row in rows),
        largest_batch_tokens=max((row.critical_tokens for row in rows), default=0),
        padding_ratio=_ratio(padded - real, padded),
        critical_tokens=critical,
        efficiency=_ratio(real, len(record.rank_tokens) * critical),
        excess=_ratio(critical - largest_rank_tokens, largest_rank_tokens),
        length_autocorrelation=compute_autocorrelation([row.real_tokens / row.samples for row in rows if row.samples]),
        displacement_samples=_ratio(record.moved_places, emitted),
        compute_share=_ratio(sum(row.compute_s for row in rows), rank_seconds),
        data_wait_share=_ratio(sum(row.data_wait_s for row in rows), rank_seconds),
        trainer_wait_share=_ratio(sum(row.sync_wait_s for row in rows), rank_seconds),
        collective_share=_ratio(sum(row.collective_s for row in rows), rank_seconds),
        ending_share=_ratio(sim_time_s - last_s, sim_time_s),
        exchange_s=record.exchange_s,
        sim_time_s=sim_time_s,
        wall_time_s=wall_time_s,
        driver=driver,
        samples_per_s=_ratio(emitted, sim_time_s),
        tokens_per_s=_ratio(real, sim_time_s),
        outcome=SHORT if lack else str(outcome.kind),
        outcome_rank=outcome.rank,
        outcome_cause=lack or outcome.cause,
        fault_s=record.fault_s,
        abort_s=record.abort_s,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


UPDATE_COLUMNS: Final = ("samples an update", "tokens an update", "micro-batches an update")
"""The columns about updates in every table, so that different trainings are not compared by mistake."""


def list_update_values(summary: Summary) -> list[str]:
    """Returns the cells under `UPDATE_COLUMNS`, means over updates: samples and tokens without padding over all ranks, and the
    micro-batches that a rank accumulates.
    """
    return [
        f"{summary.samples_per_update:,.0f}",
        f"{summary.tokens_per_update:,.0f}",
        f"{summary.steps_per_update:,.1f}",
    ]


def describe_update(summary: Summary) -> str:
    """Returns the values of `list_update_values` as a phrase."""
    samples, tokens, steps = list_update_values(summary)
    return f"{samples} samples, {tokens} tokens in {steps} micro-batches"


# How far training deviates from the sampler's choice: the places samples are moved by, and the lengths from step to step.


def sum_moves(emitted: Integers, counts: Integers, positions: Integers) -> int:
    """Returns by how many places the samples of some batches are moved in total.

    Before batch b its rank has emitted ``emitted[b]`` samples. The batch holds ``counts[b]`` samples; ``positions`` has those
    of all batches, one after the other. Samples have no order inside a batch, so they count as if in the sampler's order.
    """
    # In place, because a large simulation needs the most memory at this point.
    moves = np.repeat(np.arange(len(counts)) << _POSITION_BITS, counts)
    moves |= positions
    moves.sort()
    moves &= (1 << _POSITION_BITS) - 1
    moves -= compute_ragged(emitted, counts)
    return int(np.abs(moves, out=moves).sum())


def compute_autocorrelation(values: Sequence[float]) -> float:
    """Returns the autocorrelation of successive values: near 1 if they change slowly, near 0 if they are mixed. It is 0 for
    fewer than two values, or equal ones.
    """
    deviations = np.array(values) - np.mean(values) if values else np.zeros(0)
    square = float((deviations**2).sum())
    return float((deviations[1:] * deviations[:-1]).sum()) / square if square else 0.0
