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
    """What a rank waits for; see the table at the top of `machine`. Spec: R5."""

    FILL = "fill"
    OFFER = "offer"
    COUNT = "count"
    REPORT = "report"
    DRAIN = "drain"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One rank's state, an immutable value: each transition returns a new one. `invariants` checks it."""

    phase: Phase = Phase.FILL
    round: int = 0
    """The round whose window is being filled, offered or counted."""
    # Input. Every sample read is in the window, in a step not yet taken, or in a step that was taken (CONSERVE).
    read_samples: int = 0
    is_ended: bool = False
    wanted_samples: int = 0
    """Samples requested but not yet read."""
    draw: Draw = NOTHING_DRAWN
    """With shared shards: what this rank has drawn for the window, and how much of the order all ranks have drawn (DEAL)."""
    window: Group = ()
    """Samples held that are not in a step, ordered by position."""
    marks: tuple[int, ...] = ()
    """``read_samples`` at the end of each of the last ``max_age_rounds`` windows. When there are that many marks, a sample
    positioned before the first is due (AGE)."""
    groups: tuple[Group, ...] = ()
    """The groups formed from the window; only between the offer and its agreement."""
    agreed_tokens: int = NONE
    """The budget the previous round agreed on for this round's groups, if it is below the configuration's; else NONE."""
    accepted_tokens: int = NONE
    """The largest budget this rank accepts, which it offers for the next round."""
    # Steps pass through aligned, plan, released and queue before they are taken. All ranks number them alike (ALIGN).
    aligned: tuple[Group, ...] = ()
    """The steps of ``round`` whose global counts are not known yet; only in COUNT."""
    plan: tuple[Step, ...] = ()
    """The steps of ``round - 1`` until they are released."""
    is_collated: bool = True
    """True when ``plan`` is ready to train on."""
    planned_steps: int = 0
    """Steps planned so far in the epoch, which is also the number of the next one."""
    global_samples: int = 0
    """Samples planned so far by all ranks together."""
    released: tuple[Step, ...] = ()
    """Released steps waiting for room in the queue (RELEASE)."""
    queue: tuple[Step, ...] = ()
    """Delivered steps the consumer has not taken: at most ``depth_steps``."""
    taken_steps: int = 0
    taken_samples: int = 0
    # Ending.
    failure: str = ""
    is_stopped: bool = False
    is_urged: bool = False
    step_limit: int = NONE
    """No step with this number or a higher one is handed out."""
    outcome: Outcome | None = None
    """Set from DRAIN on."""


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 (what a type checker takes for an export)
else:
    replace = make_replace(State)
