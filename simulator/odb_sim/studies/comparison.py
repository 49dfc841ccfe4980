"""Every policy on the same samples, memory limit and costs; for one trace of lengths or for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.baselines.plans import compute_batch_size
from odb_sim.engine.cautions import Caution
from odb_sim.engine.metrics import Summary
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.runs import Run, run

REFERENCE: Final = "standard"
FIXED_BATCH: Final = 4
"""Samples of the fixed batch whose memory is the limit, where none is given."""
LEAST_WINDOW: Final = 256
GROUPS_PER_WINDOW: Final = 16


def choose_budget(lengths: Lengths, batch_size: int = FIXED_BATCH) -> int:
    """Returns the token budget of ``batch_size`` samples as long as the longest: what a run with fixed batches of that size
    needs.

    Raises: UsageError when the size is not a batch.
    """
    if batch_size < 1:
        raise UsageError(f"a batch holds at least 1 sample, got {batch_size}")
    return batch_size * int(lengths.tokens.max())


def choose_window(lengths: Lengths, budget_tokens: int, *, shard_samples: int) -> int:
    """Returns the samples of a window: 256, doubled until it holds 16 batches of average samples, or a shard.

    How well a window groups depends on how many batches it holds: below about 15 the last, unfilled one shows.
    """
    window, mean = LEAST_WINDOW, float(lengths.tokens.mean())
    while window * mean < GROUPS_PER_WINDOW * budget_tokens and window < shard_samples:
        window *= 2
    return window


@dataclass(frozen=True, slots=True)
class Compared:
    """One trace: what every policy was given, and what came of it, in the order asked for."""

    what: Run
    summaries: tuple[Summary, ...]
    cautions: tuple[Caution, ...] = ()

    @property
    def batch_size(self) -> int:
        """Samples in a fixed batch: as asked for, or under the memory limit."""
        return self.what.batch_size or compute_batch_size(self.what.workload, self.what.budget_tokens)

    @property
    def reference(self) -> Summary:
        """What speed-ups are over: `standard` where it is among the policies, else the first."""
        return next((summary for summary in self.summaries if summary.policy == REFERENCE), self.summaries[0])

    def compute_speedup(self, summary: Summary) -> float:
        """Returns the samples per second over those of the reference; 0 when that has none."""
        rate = self.reference.samples_per_s
        return summary.samples_per_s / rate if rate else 0.0

    def to_json(self) -> list[dict[str, str | int | float | None]]:
        """Returns all figures: an object for each policy."""
        return [summary.to_json() | {"speedup": self.compute_speedup(summary)} for summary in self.summaries]


def compare(
    runs: Sequence[Run], policies: Sequence[str], on_progress: Callable[[int], None] | None = None
) -> list[Compared]:
    """Simulates each run with every policy. ``on_progress`` hears how many samples of all are done.

    Raises: UsageError when a policy does not exist, before any is run; InvariantError when a property does not hold.
    """
    todo = [[replace(what, policy=policy) for policy in policies] for what in runs]
    compared, done = [], 0
    for what, ones in zip(runs, todo, strict=True):
        summaries = []
        cautions: list[Caution] = []
        for one in ones:
            report = None if on_progress is None else _shift(on_progress, done)
            result = run(one, on_progress=report)
            summaries.append(result.summary)
            cautions += [Caution(caution.about, f"{what.workload.name}: {caution.text}") for caution in result.cautions]
            done += what.workload.samples_total
        compared.append(Compared(what, tuple(summaries), tuple(cautions)))
    return compared


def _shift(on_progress: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: on_progress(before + done)
