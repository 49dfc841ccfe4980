"""What a rank must offer, recomputed from what its trace shows it held, did and was told. Spec: R2.3, R3.1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from odb_ref.core.offer import NONE, Offer
from odb_ref.trace.check.decode import Rows, Settings
from odb_ref.trace.check.own.groups import count_groups
from odb_ref.trace.check.verdict import Judgement, Property


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a rank's trace shows of the rank when it posts an offer."""

    rank: int
    rows: Rows
    """The samples it holds."""
    due_before: int
    """The position before which a sample is due. Spec: R4.3."""
    is_ended: bool
    is_collated: bool
    """True when the steps of the previous round are ready."""
    wanted_samples: int
    has_failed: bool
    stopped_after: int | None
    accepted_tokens: int
    """The budget the rank accepts, or NONE for the header's. Spec: R15.2."""


class Fingerprint:
    """The fingerprint a rank offers, compared with ``own``, that of its header."""

    def __init__(self, own: int) -> None:
        self._own = self.told = own
        self._is_other = False

    def judge(self, agreement: Offer) -> Iterator[Judgement]:
        """Judges ABORT: a rank that continues must have the header's configuration. Yields the judgement."""
        if not self._is_other and agreement.fingerprint_min == agreement.fingerprint_max:
            self._is_other = self.told != self._own
            what = f"continues with the fingerprint {self.told}, but its configuration's is {self._own}"
            yield Property.ABORT, what if self._is_other else ""


class RankBudget:
    """Follows one rank's budget."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.in_force = settings
        """The settings for the groups offered last, with the budget and the limits of their round."""
        self._agreed_tokens = NONE
        self.accepted_tokens = NONE
        """The budget the rank must offer, or NONE if it is not below the header's."""

    def resume(self, agreed_tokens: int, accepted_tokens: int) -> None:
        """Begins at a saved round, or with a budget of the rank's own. Spec: R15.5."""
        self._agreed_tokens, self.accepted_tokens = agreed_tokens, accepted_tokens

    def accept(self, tokens: int) -> None:
        """Notes the budget that the rank is told to accept."""
        self.accepted_tokens = tokens if tokens < self._settings.budget_tokens else NONE

    def offer(self) -> Settings:
        """Returns the settings for the groups offered now."""
        self.in_force = shrink(self._settings, self._agreed_tokens)
        return self.in_force

    def agree(self, agreement: Offer) -> None:
        """Notes the agreed budget of the next round."""
        self._agreed_tokens = agreement.budget_min


def shrink(settings: Settings, tokens: int) -> Settings:
    """Returns the settings with the budget lowered to ``tokens``, and each limit in proportion. Spec: R15.1."""
    whole = settings.budget_tokens
    if tokens >= whole:
        return settings
    limits = tuple(max(1, limit * max(0, tokens) // whole) for limit in settings.limits)
    return replace(settings, budget_tokens=max(1, tokens), limits=limits)


def judge_offer(offer: Offer, seen: Seen, settings: Settings) -> Iterator[Judgement]:
    """Yields the judgements on an offer. Spec: R3.1."""
    counted = count_groups(seen.rows, settings, seen.due_before)
    what = f"offers {offer.groups_max} groups of {len(seen.rows)} samples, which make {counted.groups}"
    yield Property.FEWEST, what if offer.groups_max != counted.groups else ""
    is_all = seen.is_ended or settings.update_samples is not None
    to_emit = NONE if is_all else counted.to_emit
    what = f"offers {offer.groups_min} groups to emit of {offer.groups_max}, but "
    what += "would emit all" if is_all and not seen.is_ended else ""
    what += "its source has ended" if seen.is_ended else "" if is_all else f"would emit {to_emit}"
    yield Property.FEWEST, what if offer.groups_min != to_emit else ""
    what = f"offers {offer.due_max} due groups, but {counted.due} hold a sample that is due"
    yield Property.AGE, what if offer.due_max != counted.due else ""
    what = f"offers to accept {offer.budget_min} tokens, but accepts {seen.accepted_tokens}"
    yield Property.BUDGET, what if offer.budget_min != seen.accepted_tokens else ""
    is_ready = seen.is_collated and seen.wanted_samples <= 0
    what = "says that it is ready" if offer.ready_min else "does not say that it is ready"
    what += f"; the round before is {'' if seen.is_collated else 'not '}collated, a read is "
    what += "open" if seen.wanted_samples > 0 else "not open"
    yield Property.RELEASE, what if offer.ready_min != is_ready else ""
    yield Property.EXCHANGE, "offers two fingerprints" if offer.fingerprint_min != offer.fingerprint_max else ""
    if seen.has_failed or offer.failed_rank != NONE:
        is_said = offer.failed_rank == (seen.rank if seen.has_failed else NONE)
        yield Property.ABORT, "" if is_said else "its offer and its failure differ"
    if seen.stopped_after is not None or (offer.stop_rank, offer.stop_step) != (NONE, NONE):
        is_said = (offer.stop_rank, offer.stop_step) == (seen.rank, seen.stopped_after)
        yield Property.STOP, "" if is_said else "its offer and what its consumer did differ"


def compare_window(held: int, new: int, asked: int, size: int | None, *, is_ended: bool, is_full: bool = False) -> str:
    """Returns how a window differs from R2.3, or an empty text if it does not.

    ``held`` samples are in the window; ``new`` of them were read, and ``asked`` were requested. ``size`` is the configured size
    of the window, or None if the draws decide it (R14.3). With ``is_full`` any smaller window is accepted, because a trace does
    not record the bytes of a sample.
    """
    if size is None:
        return ""
    carried = held - new
    wanted = max(0, size - carried)
    # A source that ended in an earlier round gets no further read.
    if new == asked == wanted or (is_ended and new <= asked == wanted) or (is_ended and new == asked == 0):
        return ""
    if is_full and new < asked == wanted:
        return ""
    return f"has a window of {held} samples, {new} of them new, {asked} asked for; the configuration's size is {size}"
