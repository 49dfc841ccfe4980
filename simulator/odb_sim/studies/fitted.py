"""Fits batches to a global batch: makes them smaller if a policy's steps would hold more than an update should."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from odb_sim.engine.cautions import About, Caution
from odb_sim.engine.updates import EVERY_STEP, TOLERATED
from odb_sim.studies.runs import Run, run

_MOST_TRIES: Final = 6


def fit_batches(what: Run) -> Run:
    """Returns the run with batches small enough that steps hold at most its global batch on average, or unchanged if they do.

    The protocol's own updates of a fixed number of samples (R16) need no fitting, because a step is only a part of one.
    """
    goal, is_tokens = what.global_batch.goal, what.global_batch.tokens is not None
    if goal is None or what.forms_updates:
        return what
    for _ in range(_MOST_TRIES):
        own = run(replace(what, global_batch=EVERY_STEP)).summary
        held = own.tokens_per_update if is_tokens else own.samples_per_update
        if held <= TOLERATED * goal or own.batch_size == 1 or what.budget_tokens == 1:
            break
        if own.batch_size is not None:
            what = replace(what, batch_size=max(1, int(own.batch_size * goal / held)))
        else:
            what = replace(what, budget_tokens=max(1, int(what.budget_tokens * goal / held)))
    return what


def describe_fit(asked: Run, fitted: Run) -> tuple[Caution, ...]:
    """Returns a caution about what was made smaller, if anything was."""
    goal = asked.global_batch.goal or 0
    unit = "samples" if asked.global_batch.tokens is None else "tokens"
    if fitted.batch_size != asked.batch_size:
        smaller = f"fixed batches hold {fitted.batch_size:,} samples"
    elif fitted.budget_tokens != asked.budget_tokens:
        smaller = f"the token budget is {fitted.budget_tokens:,}, not {asked.budget_tokens:,}"
    else:
        return ()
    text = f"policy {asked.policy}: {smaller}, because steps would otherwise hold more than the global batch of {goal:,} {unit}"
    return (Caution(About.FITTED, text),)
