"""Compares all policies with the same samples, memory limit and costs, for one or many traces of lengths.

A policy whose steps hold more samples makes fewer optimizer updates per epoch. So every policy is simulated twice: with an
update for each of its steps, and with steps accumulated to one global batch, the same for all. Only the second compares like
with like; `Compared.compute_speedup` returns its ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.baselines.plans import compute_batch_size
from odb_sim.engine.cautions import About, Caution
from odb_sim.engine.metrics import Summary
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.bands import CERTAIN, Band, Bands, compute_bands, is_quick, list_uncertain
from odb_sim.studies.cells import Cell, CellAnswer, CellFailure, Point, Runner, compute_key, split_failed
from odb_sim.studies.fitted import fit_batches
from odb_sim.studies.runs import Run
from odb_sim.studies.settings import list_costly
from odb_sim.studies.sweep import simulate_run

REFERENCE: Final = "standard"
FIXED_BATCH: Final = 4
"""The default size of the fixed batch whose memory is the limit."""
LEAST_WINDOW: Final = 256
GROUPS_PER_WINDOW: Final = 16
_OTHER_LENGTHS: Final = 1.03
"""The ratio of mean lengths from which samples are a poor measure."""


def choose_budget(lengths: Lengths, batch_size: int = FIXED_BATCH) -> int:
    """Returns the token budget of ``batch_size`` samples as long as the longest, which fixed batches of that size need.

    Raises: UsageError when the size is not valid.
    """
    if batch_size < 1:
        raise UsageError(f"a batch must hold at least 1 sample, got {batch_size}")
    return batch_size * int(lengths.tokens.max())


def choose_window(lengths: Lengths, budget_tokens: int, *, shard_samples: int) -> int:
    """Returns the samples of a window: 256, doubled until it holds 16 batches of average samples, or a shard.

    A window groups better the more batches it holds. With fewer than about 15 the last, unfilled one makes a difference.
    """
    window, mean = LEAST_WINDOW, float(lengths.tokens.mean())
    while window * mean < GROUPS_PER_WINDOW * budget_tokens and window < shard_samples:
        window *= 2
    return window


@dataclass(frozen=True, slots=True)
class Compared:
    """One trace: the inputs of every policy, and the results in the order requested."""

    what: Run
    summaries: tuple[Summary, ...]
    """One summary for each policy, with an update for each of its steps."""
    accumulated: tuple[Summary, ...]
    """One summary for each policy, at one global batch."""
    cautions: tuple[Caution, ...] = ()
    bands: Bands | None = None
    """The bands of the times at one global batch, or None if they would take too long to compute."""

    @property
    def batch_size(self) -> int:
        """The samples of a fixed batch: as requested, or under the memory limit."""
        return self.what.batch_size or compute_batch_size(self.what.workload, self.what.budget_tokens)

    @property
    def global_batch(self) -> GlobalBatch:
        """The size of an update in the accumulated runs."""
        return self.what.global_batch

    @property
    def reference(self) -> Summary:
        """The baseline of speed-ups: `standard` if it is among the policies, else the first."""
        return next((summary for summary in self.summaries if summary.policy == REFERENCE), self.summaries[0])

    @property
    def chosen(self) -> Summary:
        """The first policy other than the reference, with which it is compared first."""
        return next((summary for summary in self.summaries if summary is not self.reference), self.reference)

    def find_accumulated(self, summary: Summary) -> Summary:
        """Returns the same policy at one global batch."""
        return self.accumulated[self.summaries.index(summary)]

    def compute_speedup(self, summary: Summary) -> float:
        """Returns the samples per second over those of the reference, both at one global batch; 0 if the reference has none."""
        return _divide(self.find_accumulated(summary), self.find_accumulated(self.reference))

    def find_band(self, summary: Summary) -> Band | None:
        """Returns the band of `compute_speedup`, or None if it is unknown, or for the reference."""
        if self.bands is None or summary is self.reference:
            return None
        return self.bands.combine(
            *[float(one is self.reference) - float(one is summary) for one in self.summaries],
        )

    def compute_own_speedup(self, summary: Summary) -> float:
        """Returns the speed-up with an update for each step, whatever it holds."""
        return _divide(summary, self.reference)

    def to_json(self) -> list[dict[str, str | int | float | None]]:
        """Returns all figures as an object for each policy."""
        return [
            own.to_json()
            | {
                "global_batch": one.global_batch,
                "global_tokens": one.global_tokens,
                "speedup": self.compute_speedup(own),
                "own_speedup": self.compute_own_speedup(own),
                **self._encode_band(own),
                "accumulated_samples_per_s": one.samples_per_s,
                "accumulated_samples_per_update": one.samples_per_update,
                "accumulated_tokens_per_update": one.tokens_per_update,
                "accumulated_steps_per_update": one.steps_per_update,
                "accumulated_token_budget": one.token_budget,
                "accumulated_batch_size": one.batch_size,
            }
            for own, one in zip(self.summaries, self.accumulated, strict=True)
        ]

    def _encode_band(self, summary: Summary) -> dict[str, float | None]:
        band, speedup = self.find_band(summary), self.compute_speedup(summary)
        if summary is self.reference:
            band = CERTAIN
        return {
            "speedup_low": None if band is None else speedup * band.low,
            "speedup_high": None if band is None else speedup * band.high,
        }


def _divide(summary: Summary, reference: Summary) -> float:
    rate = reference.samples_per_s
    return summary.samples_per_s / rate if rate else 0.0


def compare(
    runs: Sequence[Run],
    policies: Sequence[str],
    runner: Runner | None = None,
    *,
    has_bands: bool = False,
) -> tuple[list[Compared], list[CellFailure]]:
    """Simulates each run twice with every policy. Simulations that fail twice are left out, and returned separately.

    With ``has_bands`` speed-ups have bands however long these take; otherwise only if they are quick to compute.

    A run without a global batch gets the largest that any policy has by itself, so that no policy is put at a disadvantage.

    Raises: UsageError when a policy does not exist, before any is run, or a global batch leaves a rank without a sample;
    InvariantError when a property does not hold.
    """
    runner, count = runner or Runner(), len(policies)
    every = [replace(what, policy=policy) for what in runs for policy in policies]
    own = runner.run([_make_cell(replace(one, global_batch=EVERY_STEP), _simulate_own) for one in every])
    at = []
    for number, what in enumerate(runs):
        answers, _ = split_failed(own[number * count : (number + 1) * count])
        most = max(answer.summary.samples_per_update for answer in answers)
        fitted = replace(what, global_batch=GlobalBatch(samples=ceil(max(1.0, most))))
        at.append(fitted if what.global_batch.goal is None else what)
    todo = [replace(what, policy=policy) for what in at for policy in policies]
    accumulated = runner.run([_make_cell(one, simulate_run) for one in todo])
    compared = []
    for number, what in enumerate(at):
        part = slice(number * count, (number + 1) * count)
        found = {
            policy: (first, second)
            for policy, first, second in zip(policies, own[part], accumulated[part], strict=True)
            if isinstance(first, CellAnswer) and isinstance(second, CellAnswer)
        }
        if not found:
            raise UsageError(f"{what.workload.name}: every policy has failed")
        reference = REFERENCE if REFERENCE in found else next(iter(found))
        cautions = [
            Caution(
                # What was changed of the baseline changes every ratio, so it is a caution of its own.
                About.BASELINE if (policy, caution.about) == (reference, About.FITTED) else caution.about,
                f"{what.workload.name}: {caution.text}",
            )
            for policy, (first, second) in found.items()
            for caution in (
                *first.cautions,
                *[item for item in second.cautions if item.about in (About.UPDATE, About.FITTED)],
            )
        ]
        summaries, ends = (tuple([one.summary for one in answers]) for answers in zip(*found.values(), strict=True))
        runs_at = [fit_batches(replace(what, policy=policy)) for policy in found]
        is_asked = has_bands or all(map(is_quick, runs_at))
        bands = compute_bands(runs_at, list_uncertain(what.costs), runner=Runner(runner.executor)) if is_asked else None
        one = Compared(what, summaries, ends, tuple(cautions), bands)
        compared.append(replace(one, cautions=(*cautions, *_list_length_cautions(one))))
    return compared, [answer for answer in (*own, *accumulated) if isinstance(answer, CellFailure)]


def _list_length_cautions(compared: Compared) -> tuple[Caution, ...]:
    """Returns a caution if policies trained on samples of different mean lengths, as they may in quota mode. Speed-ups count
    samples, so those of tokens differ.
    """
    means = {one.policy: one.real_tokens / max(1, one.samples_emitted) for one in compared.accumulated}
    if max(means.values()) <= _OTHER_LENGTHS * min(means.values()):
        return ()
    own = means[compared.reference.policy]
    ratios = [
        f"{one.policy} {compared.compute_speedup(one) * means[one.policy] / own:.2f} (samples of {means[one.policy]:,.0f})"
        for one in compared.summaries
    ]
    text = (
        "the samples that policies trained on differ in mean length, and speed-ups are of samples; the speed-ups of "
        "tokens are "
    )
    return (Caution(About.LENGTHS, f"{compared.what.workload.name}: {text}{', '.join(ratios)}"),)


def _make_cell(what: Run, simulate: Callable[[Run, Point], CellAnswer]) -> Cell:
    workload = what.workload
    point = Point(
        policy=what.policy,
        ranks=workload.ranks,
        budget_tokens=what.budget_tokens,
        window_samples=what.window_samples,
        depth_steps=what.depth_steps,
    )
    arrays = [workload.ids, workload.tokens, workload.supervised_tokens, workload.resources, workload.offsets]
    return Cell(point, compute_key(arrays, [what.policy], simulate.__name__, what), partial(simulate, what, point))


def _simulate_own(what: Run, point: Point) -> CellAnswer:
    """Returns the answer of a run, with the cautions about its settings."""
    answer = simulate_run(what, point)
    costly = [replace(caution, text=f"{what.policy}, {caution.text}") for caution in list_costly(what, answer.summary)]
    return replace(answer, cautions=(*answer.cautions, *costly))
