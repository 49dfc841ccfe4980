"""How a rank may end, given its last agreement. Spec: R7."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check.decode import Settings, TracedFinish, TracedReport, compute_fingerprint
from odb_ref.trace.check.verdict import Judgement, Property


def is_broken_off(agreement: Offer) -> bool:
    """Returns True when the agreement shows that a rank failed, or that the ranks differ in round or configuration."""
    return (
        agreement.failed_rank != NONE
        or agreement.round_min != agreement.round_max
        or agreement.fingerprint_min != agreement.fingerprint_max
    )


def is_ended_by(agreement: Offer | None) -> bool:
    """Returns True when the agreement ends the epoch before its completion."""
    return agreement is not None and (is_broken_off(agreement) or agreement.stop_rank != NONE)


def judge_report(report: TracedReport, own: tuple[int, str, int], fingerprint: int) -> Iterator[Judgement]:
    """Yields the judgements on a report: it must have its ``own`` rank, failure and round, and the offered fingerprint."""
    is_own = (report.rank, report.cause, report.round) == own
    yield Property.ABORT, "" if is_own else "its report differs from what happened to it"
    is_same = compute_fingerprint(report.config) == fingerprint
    yield Property.ABORT, "" if is_same else "reports a configuration of another fingerprint than it offered"


@dataclass(slots=True)
class Told:
    """What a rank has been told, which decides how it may end."""

    agreement: Offer | None = None
    """The last agreement."""
    blamed: tuple[int, str | None] | None = None
    """The rank to blame by the reports, and its cause, which is None if any text is allowed."""
    loss: tuple[int | None, str] | None = None
    """The loss that ended the rank: the rank that was lost, and the cause."""


def find_blamed(reports: Sequence[TracedReport]) -> tuple[int, str | None] | None:
    """Returns the rank that the reports blame, and the cause: the lowest rank that failed, else the lowest that differs from
    rank 0, else the lowest whose peers hold different samples. Spec: R7.2, R7.3, R17.4.
    """
    for report in reports:
        if report.cause:
            return report.rank, report.cause + (f" (on its peer {report.peer})" if report.held else "")
    first = reports[0] if reports else None
    for report in reports:
        if first is not None and (report.round, report.config) != (first.round, first.config):
            return report.rank, None
    held = {report.rank: report.held for report in reversed(reports)}  # by each rank's first peer
    other = next((report for report in reports if report.held != held[report.rank]), None)
    return None if other is None else (other.rank, None)


def judge_outcome(finish: TracedFinish, told: Told) -> Iterator[Judgement]:
    """Yields the judgement on a finish."""
    agreement = told.agreement
    if finish.kind == OutcomeKind.LOST or told.loss is not None:
        what = f"finishes with {finish.outcome}, but was not told so"
        is_told = finish.kind == OutcomeKind.LOST and (finish.rank, finish.cause) == told.loss
        yield Property.ABORT, "" if is_told else what
    elif agreement is not None and is_broken_off(agreement):
        yield Property.ABORT, _find_wrong_blame(finish, told)
    elif agreement is not None and agreement.stop_rank != NONE:
        is_stop = (finish.kind, finish.rank) == (OutcomeKind.STOPPED, agreement.stop_rank)
        what = f"finishes with {finish.outcome} after the stop of rank {agreement.stop_rank} was agreed"
        yield Property.STOP, "" if is_stop else what
    else:
        what = f"finishes with {finish.outcome}, which no agreement says"
        is_complete = (finish.kind, finish.rank, finish.cause) == (OutcomeKind.COMPLETE, None, "")
        yield Property.ABORT, "" if is_complete else what


def _find_wrong_blame(finish: TracedFinish, told: Told) -> str:
    if finish.kind not in (OutcomeKind.FAILED, OutcomeKind.MISMATCH):
        return f"finishes with {finish.outcome} after a failure was agreed"
    rank, cause = told.blamed or (finish.rank, None)
    kind = OutcomeKind.MISMATCH if cause is None else OutcomeKind.FAILED
    if (finish.kind, finish.rank, finish.cause) == (kind, rank, finish.cause if cause is None else cause):
        return ""
    return (
        f"finishes with {finish.outcome}, but by the reports it is {TracedFinish(kind, rank, cause or '', 0).outcome}"
    )


def is_closing(agreement: Offer, settings: Settings) -> bool:
    """Returns True when an agreement without failure or stop completes the epoch. Spec: R3.5."""
    return agreement.samples_max == 0 or (settings.is_quota and agreement.samples_min == 0)


def compute_target(agreement: Offer, settings: Settings) -> int | None:
    """Returns the number of steps of the round by a shipped rule, or None for another rule. Spec: R3.3, R16.3."""
    if settings.update_samples is not None and not agreement.groups_max:
        return 0
    if settings.rule not in ("odb", "paper"):
        return None
    target = agreement.groups_max
    if settings.rule == "odb" and agreement.groups_min != NONE:
        target = agreement.groups_min
    if settings.rule == "odb":
        target = max(target, agreement.due_max)
    if settings.update_samples is not None:  # Spec: R16.3
        return target
    if agreement.round_max < settings.ramp_rounds and agreement.groups_min != NONE:
        target = max(1, agreement.due_max, target // settings.ramp_share)
    return min(target, agreement.samples_min) if settings.is_quota else target
