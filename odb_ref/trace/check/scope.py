"""The properties that do not apply to a job, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from odb_ref.core.effects import OutcomeKind
from odb_ref.trace.check.decode import TracedFinish
from odb_ref.trace.check.rank import RankChecker
from odb_ref.trace.check.stream import Stream
from odb_ref.trace.check.verdict import Property

BY_CONFIGURATION: Final = frozenset(
    {
        Property.BUDGET,
        Property.SIZES,
        Property.FEWEST,
        Property.AGE,
        Property.ORDER,
        Property.QUOTA,
        Property.CONSERVE,
        Property.REPLAY,
        Property.UPDATE,
    }
)
"""The properties judged by the header's configuration, which is not possible if the ranks have different ones."""


def compute_not_applicable(
    ranks: Sequence[RankChecker], finishes: Sequence[tuple[RankChecker, TracedFinish]], streams: Sequence[Stream]
) -> dict[Property, str]:
    """Returns the properties that do not apply to this job, each with the reason."""
    reasons: dict[Property, str] = {}
    settings = streams[0].settings
    kinds = {finish.kind for _, finish in finishes}
    is_complete = kinds == {OutcomeKind.COMPLETE} and len(finishes) == settings.world_size
    if OutcomeKind.MISMATCH in kinds:
        reasons.update(dict.fromkeys(BY_CONFIGURATION, "the ranks have different configurations"))
    if settings.limits:
        reasons[Property.FEWEST] = "several resources"
    if settings.is_packed:
        reasons[Property.FEWEST] = "packed layout"
    if settings.sizes == "any":
        reasons[Property.SIZES] = "any number of samples"
    else:
        reasons[Property.FEWEST] = "friendly sizes"
    if settings.order == "sampler":
        reasons[Property.FEWEST] = "sampler order"
    elif settings.attention_tokens is None:
        reasons[Property.ORDER] = "a cost that does not ship"
    if settings.is_quota:
        reasons[Property.COVER] = "quota mode"
    else:
        reasons[Property.QUOTA] = "join mode"
    if settings.shared_samples is None:
        reasons[Property.DEAL] = "each rank has its own source"
    if settings.peers == 1:
        reasons[Property.PEERS] = "each rank is one process"
    if settings.update_samples is None:
        reasons[Property.UPDATE] = "free mode"
    if not is_complete:
        reasons[Property.COVER] = reasons[Property.QUOTA] = "the epoch was not completed"
    if kinds <= {OutcomeKind.COMPLETE}:
        reasons[Property.ABORT] = "nothing failed"
    if not any(stream.header.origin.before for stream in streams):
        reasons[Property.RESUME] = "does not go on from another trace"
    if not any(rank.output.has_left for rank in ranks):
        reasons[Property.STOP] = "no consumer left"
    return reasons
