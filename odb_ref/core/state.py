"""The state of one rank. Spec: R5."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from odb_ref.core.batching.shards import NOTHING_DRAWN, Draw
from odb_ref.core.effects import Outcome
from odb_ref.core.offer import NONE
from odb_ref.core.types import Group, Step
from odb_ref.core.values import make_replace


class Phase(StrEnum):
    """What a rank waits for; the table is at the top of `machine`. Spec: R5."""

    FILL = "fill"
    OFFER = "offer"
    COUNT = "count"
    REPORT = "report"
    DRAIN = "drain"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One rank's state: a value, of which a transition makes a new one. `invariants` holds what is true of it."""

    phase: Phase = Phase.FILL
    round: int = 0
    """The round whose window is being filled, offered or counted."""
    # Input. Every sample read is in the window, in a step that is not taken, or taken (CONSERVE).
    read_samples: int = 0
    is_ended: bool = False
    wanted_samples: int = 0
    """Samples asked for and not yet read."""
    draw: Draw = NOTHING_DRAWN
    """With shared shards: what this rank has drawn for the window, and how far the common order is drawn by all (DEAL)."""
    window: Group = ()
    """Samples held and in no step, by position."""
    marks: tuple[int, ...] = ()
    """``read_samples`` at the end of each of the last ``max_age_rounds`` windows; what precedes the first is due (AGE)."""
    groups: tuple[Group, ...] = ()
    """The window as groups, from the offer to its agreement."""
    agreed_tokens: int = NONE
    """The budget that the round before has agreed on for the groups of this one, where it is below the configuration's."""
    accepted_tokens: int = NONE
    """The largest budget that this rank accepts; what it offers for the next round."""
    # Steps, from formed to taken: aligned, plan, released, queue. Numbered alike on all ranks (ALIGN).
    aligned: tuple[Group, ...] = ()
    """The steps of ``round`` whose global counts are not known yet; only in COUNT."""
    plan: tuple[Step, ...] = ()
    """The steps of ``round - 1``, not released."""
    is_collated: bool = True
    """True when ``plan`` is ready to train on."""
    planned_steps: int = 0
    """Steps planned so far in the epoch: the number of the next one."""
    global_samples: int = 0
    """Samples planned so far, by all ranks together."""
    released: tuple[Step, ...] = ()
    """Released steps that wait for room in the queue (RELEASE)."""
    queue: tuple[Step, ...] = ()
    """Delivered steps the consumer has not taken: at most ``depth_steps``."""
    taken_steps: int = 0
    taken_samples: int = 0
    # Ending.
    failure: str = ""
    is_stopped: bool = False
    is_urged: bool = False
    step_limit: int = NONE
    """No step numbered this or higher is handed out."""
    outcome: Outcome | None = None
    """Set from DRAIN on."""


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 (what a type checker takes for an export)
else:
    replace = make_replace(State)
