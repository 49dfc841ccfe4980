"""Cautions: what a planner must know before believing a run's figures, in one sentence each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

import numpy as np

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Mode
from odb_sim.engine.metrics import COMPLETE, SHORT, Summary
from odb_sim.engine.updates import TOLERATED
from odb_sim.inputs.conditions import Fault
from odb_sim.inputs.costs import FittedTo
from odb_sim.inputs.lengths import Integers
from odb_sim.inputs.workload import Workload


class About(StrEnum):
    """The subject of a caution."""

    MEMORY = "memory"
    BATCH_SIZE = "batch_size"
    WINDOW = "window"
    QUOTA = "quota"
    LOST = "lost"
    LENGTHS = "lengths"
    COST_MODEL = "cost_model"
    LARGER = "larger"
    LONGER = "longer"
    FAULT = "fault"
    SMALL_WINDOW = "small_window"
    SETTING = "setting"
    UNTRIED = "untried"
    UPDATE = "update"
    FITTED = "fitted"
    BASELINE = "baseline"


_FEW_BATCHES: Final = 8
"""A window of fewer batches loses enough to notice: 3 % or more on every bundled trace, and a third with two batches."""
_ENOUGH_BATCHES: Final = 16
ALIKE: Final = 0.2
"""Lengths with a smaller coefficient of variation fill batches in any window."""


@dataclass(frozen=True, slots=True)
class Caution:
    """One sentence."""

    about: About
    text: str


def list_cautions(
    workload: Workload,
    summary: Summary,
    fitted: FittedTo,
    *,
    is_steady: bool,
    faults: Sequence[Fault],
    acted: Collection[Fault],
) -> tuple[Caution, ...]:
    """Returns the cautions that the figures of ``summary`` do not show by themselves; most runs have none.

    ``is_steady`` is False if the budget changes during the run. ``acted`` are those of the ``faults`` that happened.
    """
    found: list[Caution] = []
    budget, largest = summary.token_budget, summary.largest_batch_tokens
    if text := describe_long(workload.tokens, budget):
        found.append(Caution(About.MEMORY, text))
    if summary.over_budget_groups:
        text = (
            f"{say_count(summary.over_budget_groups, 'fixed batch is', 'fixed batches are')} over the budget of {budget:,} "
            f"tokens: the largest of policy {summary.policy} needs memory for {largest:,} padded tokens, "
            f"{say_amount(largest / budget)} times the budget"
        )
        found.append(Caution(About.BATCH_SIZE, text))
    shard = int(np.diff(workload.offsets).max())
    if summary.window is not None and summary.window > shard:
        text = (
            f"a window of {summary.window:,} is larger than any shard, of {shard:,} samples at most: it holds an epoch"
        )
        found.append(Caution(About.WINDOW, text))
    if is_steady and summary.layout == Layout.PADDED and (text := _describe_small_window(workload, summary)):
        found.append(Caution(About.SMALL_WINDOW, text))
    if text := _describe_large_update(summary):
        found.append(Caution(About.UPDATE, text))
    if summary.outcome == SHORT:
        found.append(Caution(About.QUOTA, f"policy {summary.policy}: {summary.outcome_cause}"))
    lost = workload.samples_total - summary.samples_emitted
    if lost and summary.depth is None and summary.mode == Mode.JOIN:
        text = (
            f"policy {summary.policy} loses {say_count(lost, 'sample', 'samples')} of {workload.samples_total:,}: those left "
            "over when a rank has no new ones"
        )
        found.append(Caution(About.LOST, text))
    if missed := [fault for fault in faults if fault not in acted]:
        named = ", ".join(map(str, missed))
        text = f"{say_count(len(missed), 'fault', 'faults')} asked for never happened, the run ended before: {named}"
        found.append(Caution(About.FAULT, text))
    harmless = [fault for fault in faults if fault in acted]
    if harmless and summary.outcome in (COMPLETE.kind, SHORT):
        named = ", ".join(map(str, harmless))
        text = f"{say_count(len(harmless), 'fault', 'faults')} struck after the last step, and changed nothing: {named}"
        found.append(Caution(About.FAULT, text))
    if fitted.ranks and fitted.ranks != summary.ranks:
        text = (
            f"the cost model was fitted to runs of {fitted.ranks:,} ranks, and {summary.ranks:,} are simulated: exchanges are "
            "extrapolated, and collectives and steps, which send weights if these are sharded, are taken to cost what they "
            f"cost there: make one for {summary.ranks:,} ranks (odb-ref calibrate, or plan --write-costs)"
        )
        found.append(Caution(About.COST_MODEL, text))
    if fitted.padded_tokens and largest > fitted.padded_tokens:
        text = (
            f"the cost model was fitted to batches of at most {fitted.padded_tokens:,} padded tokens, and the largest here has "
            f"{largest:,}: its time is extrapolated"
        )
        found.append(Caution(About.LARGER, text))
    longest = int(workload.tokens.max())
    if fitted.longest and longest > fitted.longest:
        text = (
            f"the cost model was fitted to rows of at most {fitted.longest:,} tokens, and the longest sample here has "
            f"{longest:,}: its attention, whose time grows with the square of the length, is extrapolated"
        )
        found.append(Caution(About.LONGER, text))
    return tuple(found)


def describe_long(tokens: Integers, budget: int) -> str:
    """Returns a caution about the samples that are longer than the budget, or an empty text if none is."""
    over, longest = int((tokens > budget).sum()), int(tokens.max())
    if not over:
        return ""
    return (
        f"{say_count(over, 'sample is', 'samples are')} longer than the budget of {budget:,} tokens: each travels alone, "
        f"and a rank needs memory for the longest of {longest:,} padded tokens, {say_amount(longest / budget)} times the budget"
    )


def _describe_large_update(summary: Summary) -> str:
    """Returns a caution that updates hold more than the requested global batch, or an empty text."""
    asked, held, unit = summary.global_batch, summary.samples_per_update, "samples"
    if summary.global_tokens is not None:
        asked, held, unit = summary.global_tokens, summary.tokens_per_update, "tokens"
    if asked is None or held <= TOLERATED * asked:
        return ""
    return (
        f"policy {summary.policy}: an update holds {held:,.0f} {unit} in the mean, more than the {asked:,} asked for, because "
        f"it ends with a step, and a step of all ranks holds {held * summary.updates / summary.steps:,.0f}"
    )


def _describe_small_window(workload: Workload, summary: Summary) -> str:
    """Returns why a larger window would do better, or an empty text if that is not certain. A small window is as good if other
    limits bound a batch, or the lengths are all alike.
    """
    if summary.window is None:
        return ""
    mean, shard = float(workload.tokens.mean()), int(np.diff(workload.offsets).max())
    enough = min(ceil(_ENOUGH_BATCHES * summary.token_budget / mean), shard)
    held, would_hold = (window * mean / summary.token_budget for window in (summary.window, enough))
    is_alike = float(workload.tokens.std()) < ALIKE * mean
    if workload.resources.shape[1] or is_alike or held >= _FEW_BATCHES or would_hold < _FEW_BATCHES:
        return ""
    return (
        f"a window of {summary.window:,} holds {held:.1f} batches of average samples, too few to group them by length: batches "
        f"are padded more, or less full, than a window of {enough:,} would make them, which holds {would_hold:.0f}"
    )


def summarize_cautions(cautions: Iterable[Caution]) -> list[str]:
    """Returns a line for each kind of caution: the first run's text, and how many other texts there are."""
    by_kind: dict[tuple[About, str], list[str]] = {}
    for caution in cautions:
        # Cautions about settings are grouped by the option they name.
        option = next((word for word in caution.text.split() if word.startswith("--")), "")
        texts = by_kind.setdefault((caution.about, option if caution.about is About.SETTING else ""), [])
        if caution.text not in texts:
            texts.append(caution.text)
    return [
        texts[0] + (f" (and so on, in {len(texts) - 1} more runs)" if texts[1:] else "") for texts in by_kind.values()
    ]


def say_amount(value: float) -> str:
    """Returns an amount with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def say_count(number: int, one: str, many: str) -> str:
    """Returns a number with its noun, in the singular or the plural."""
    return f"{number:,} {one if number == 1 else many}"
