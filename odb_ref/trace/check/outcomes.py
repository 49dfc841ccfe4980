"""How a rank may end, by what its last agreement says. Spec: R7."""

from __future__ import annotations

from collections.abc import Iterator, Set

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check.decode import TracedFinish, TracedReport, compute_fingerprint
from odb_ref.trace.check.verdict import Judgement, Property


def is_broken_off(agreement: Offer) -> bool:
    """Returns True when the agreement says that a rank failed, or that the ranks do not fit together."""
    return (
        agreement.failed_rank != NONE
        or agreement.round_min != agreement.round_max
        or agreement.fingerprint_min != agreement.fingerprint_max
    )


def is_ended_by(agreement: Offer | None) -> bool:
    """Returns True when the agreement ends the epoch otherwise than by its completion."""
    return agreement is not None and (is_broken_off(agreement) or agreement.stop_rank != NONE)


def judge_report(report: TracedReport, own: tuple[int, str, int], fingerprint: int) -> Iterator[Judgement]:
    """Yields what is judged of a report: it must be of its ``own`` rank, failure and round, and of the offered fingerprint."""
    is_own = (report.rank, report.cause, report.round) == own
    yield Property.ABORT, "" if is_own else "its report differs from what happened to it"
    is_same = compute_fingerprint(report.config) == fingerprint
    yield Property.ABORT, "" if is_same else "reports a configuration of another fingerprint than it offered"


def judge_outcome(finish: TracedFinish, agreement: Offer | None, lost_peers: Set[int | None]) -> Iterator[Judgement]:
    """Yields what is judged of a finish: the property, and how it is violated; no words when it is not."""
    if finish.kind == OutcomeKind.LOST:
        what = f"finishes with {finish.outcome}, but was not told so"
        yield Property.ABORT, "" if finish.rank in lost_peers else what
    elif agreement is not None and is_broken_off(agreement):
        what = f"finishes with {finish.outcome} after a failure was agreed"
        yield Property.ABORT, "" if finish.kind in (OutcomeKind.FAILED, OutcomeKind.MISMATCH) else what
    elif agreement is not None and agreement.stop_rank != NONE:
        is_stop = (finish.kind, finish.rank) == (OutcomeKind.STOPPED, agreement.stop_rank)
        what = f"finishes with {finish.outcome} after the stop of rank {agreement.stop_rank} was agreed"
        yield Property.STOP, "" if is_stop else what
        what = f"may take {finish.step_limit} steps, though a consumer left after {agreement.stop_step}"
        yield Property.STOP, "" if finish.step_limit <= agreement.stop_step else what
    else:
        what = f"finishes with {finish.outcome}, which no agreement says"
        yield Property.ABORT, "" if finish.kind == OutcomeKind.COMPLETE else what
