"""The fields that events and effects may have. An unknown field makes a trace malformed. Spec: R9."""

from __future__ import annotations

from typing import Final

from odb_ref.trace.check.decode import get_kind, get_object
from odb_ref.trace.format import JsonObject, TraceError

_FIELDS: Final = {
    "resumed": {"start", "samples"},
    "samples_read": {"samples", "is_ended", "is_full"},
    "collated": {"round"},
    "agreed": {"agreement"},
    "counted": {"counts", "wants"},
    "reported": {"reports"},
    "local_failed": {"cause"},
    "peer_lost": {"rank", "cause"},
    "budget_accepted": {"tokens"},
    "set_aside": {"id", "place"},
    "start": {
        "round", "read_samples", "is_ended", "carried", "marks", "planned_steps", "global_samples", "draw", "agreed_tokens",
        "accepted_tokens",
    },
    "read": {"count", "first"},
    "post_offer": {"offer"},
    "post_counts": {"counts", "wanted"},
    "post_report": {"report"},
    "collate": {"round", "steps"},
    "deliver": {"number"},
    "finish": {"outcome", "step_limit"},
}  # fmt: skip
"""By kind, the fields of events and effects beside the kind itself, and of a start. A kind not listed has none."""

_NO_FIELDS: Final = frozenset[str]()


def check_fields(data: JsonObject) -> str:
    """Returns the kind of an event or effect after checking its fields.

    Raises: TraceError when it has an unknown field or no kind.
    """
    kind = get_kind(data)
    if kind == "resumed":
        check_fields({"kind": "start", **get_object(data, "start")})
    if others := sorted(data.keys() - _FIELDS.get(kind, _NO_FIELDS) - {"kind"}):
        raise TraceError(f"{kind!r:.80} has the unknown field {others[0]!r:.80}")
    return kind
