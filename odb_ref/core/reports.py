"""What the reports of all ranks say went wrong: who failed, or whose configuration differs and how. Spec: R7.2, R7.3."""

from __future__ import annotations

import json

from odb_ref.core.effects import Outcome, OutcomeKind
from odb_ref.core.errors import PeerError
from odb_ref.core.events import Report


def compute_failure(reports: tuple[Report, ...]) -> Outcome:
    """Returns what the reports of all ranks say went wrong, the same on every rank. Spec: R7.2, R7.3."""
    for report in reports:
        if report.cause:
            return Outcome(OutcomeKind.FAILED, report.rank, report.cause)
    first = reports[0]
    for report in reports:
        if report.round != first.round:
            return Outcome(OutcomeKind.MISMATCH, report.rank, f"round {report.round}, rank 0 is in {first.round}")
        if report.config != first.config:
            return Outcome(OutcomeKind.MISMATCH, report.rank, _describe_difference(report.config, first.config))
    raise PeerError(f"reports of round {first.round}: no rank has failed and no configuration differs")


def _describe_difference(theirs: str, reference: str) -> str:
    other, base = _read_settings(theirs), _read_settings(reference)
    return "; ".join(
        f"{key} is {other.get(key)!r}, rank 0 has {base.get(key)!r}"
        for key in sorted(base.keys() | other.keys())
        if other.get(key) != base.get(key)
    )


def _read_settings(shared_json: str) -> dict[str, object]:
    """Returns the settings by name; those of a tag that is a JSON object count one by one."""
    try:
        settings: object = json.loads(shared_json)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"reports, field config: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise PeerError(f"reports, field config: not an object: {shared_json[:80]!r}")
    try:
        inner: object = json.loads(str(settings.get("tag")))
    except (ValueError, RecursionError):
        return settings
    if isinstance(inner, dict):
        del settings["tag"]
        settings |= inner
    return settings
