"""The phase of a rank, which decides the events that may come and the effects that must follow. Spec: R3.4, R5, R6.

Only the kinds of events and effects count here; other modules judge their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

from odb_ref.trace.check.verdict import Judgement, Property


class RankPhase(StrEnum):
    """What a rank waits for."""

    FILL = "fill"
    OFFER = "offer"
    COUNT = "count"
    REPORT = "report"
    DRAIN = "drain"
    DONE = "done"


START: Final = "start"
"""The kind used here for the start of an epoch, resumed or not."""

_ANSWERED: Final = {"agreed": RankPhase.OFFER, "counted": RankPhase.COUNT, "reported": RankPhase.REPORT}
_POSTED: Final = {
    "post_offer": RankPhase.OFFER,
    "post_counts": RankPhase.COUNT,
    "post_report": RankPhase.REPORT,
    "collate": RankPhase.FILL,
    "finish": RankPhase.DONE,
}
"""The effects that change the phase, with the new phase."""

_MAY_FOLLOW: Final = {"read": (START, "agreed", "counted"), "deliver": ("agreed", "reported", "step_taken")}
"""The other effects, with the events they may follow."""


class Phases:
    """Follows one rank's phase."""

    __slots__ = ("_is_urged", "phase")

    def __init__(self) -> None:
        self.phase = RankPhase.FILL
        self._is_urged = False

    @property
    def is_ending(self) -> bool:
        """True when the outcome is known."""
        return self.phase in (RankPhase.DRAIN, RankPhase.DONE)

    def note_event(self, kind: str) -> Iterator[Judgement]:
        """Yields the judgement on an event before its effects: an answer needs an open exchange."""
        self._is_urged |= kind == "urged"
        if kind in _ANSWERED:
            what = f"is told {kind} in the phase {self.phase}"
            yield Property.EXCHANGE, "" if self.phase is _ANSWERED[kind] else what

    def note_effects(
        self,
        kind: str,
        effects: Sequence[str],
        *,
        answer: str,
        is_ready: bool,
        must_offer: bool,
        planned_steps: int,
        held_back_steps: int,
    ) -> Iterator[Judgement]:
        """Yields the judgements on the effects of an event: all that must follow it did, and no others.

        ``answer`` is the effect that an agreement or a loss requires, or "" if the rank must only drain. ``must_offer`` is true
        if the rank has failed or its consumer has left. ``planned_steps`` counts the steps that wait for their release, and
        ``held_back_steps`` those that wait for room.
        """
        for name in effects:
            if kind not in _MAY_FOLLOW.get(name, (kind,)):
                yield Property.EXCHANGE, f"answers {kind} with {name}"
        if self.phase is RankPhase.DONE and effects:
            yield Property.FREE, f"acts after it has finished: {effects[0]}"
        must = self._list_due(kind, answer)
        if self.phase is RankPhase.DRAIN and not held_back_steps:
            must = ["finish"]
        if self.phase is RankPhase.FILL or must == ["collate"]:
            is_ready = is_ready and not must and (self._is_urged or not held_back_steps or not planned_steps)
            must += ["post_offer"] if is_ready or must_offer else []
        done = list(dict.fromkeys(name for name in effects if name in _POSTED))
        what = f"answers {kind} with {', '.join(done) or 'nothing'} in the phase {self.phase}; it is time for "
        property_ = Property.RELEASE if {*done} - {*must} else Property.FREE
        if kind == "peer_lost":
            property_ = Property.ABORT
        yield property_, "" if done == must else what + (", ".join(must) or "nothing")
        for name in done:
            self.phase = _POSTED[name]

    def _list_due(self, kind: str, answer: str) -> list[str]:
        """Returns the effects that the event itself requires. Enters DRAIN if an answer requires none."""
        if kind in _ANSWERED and self.phase is _ANSWERED[kind]:
            if kind == "counted":
                return ["collate"]
            if not answer:
                self.phase = RankPhase.DRAIN
        return [answer] if answer else []
