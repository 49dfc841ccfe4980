"""Where an epoch begins on one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.config import Config
from odb_ref.core.offer import NONE
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.rounds import foresee_draw
from odb_ref.torch.plan.state import START, EpochProgress
from odb_ref.torch.reading.quarantine import Places, Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """Where an epoch begins on this rank, and its other parameters."""

    keys: Sequence[object] | None
    """The keys of the rank's samples in the whole epoch, in sampler order; None for an iterable data set.

    With shared shards they are the keys of all ranks, of which this one draws some.
    """
    is_shared: bool = False
    samples: int = 0
    """The length of the order of all ranks when the epoch began, including dropped samples; 0 with ``shard="given"``."""
    listed: str = ""
    """The digest of a sampler's keys, if all ranks share its order."""
    first_place: int = 0
    """With updates: the first place of the first update in the order that the rank reads. Spec: R16.6."""
    progress: EpochProgress = START
    seed: int = 0
    order_seed: int = 0
    """The seed for the order of steps, the same on all ranks."""
    read_ahead: int = 1
    max_bad: float = 0
    tag: str = ""
    quota_samples: int | None = None
    accepted_tokens: int = NONE
    """The token budget set by `accept_budget`, or NONE for the loader's."""
    first: RoundStart = field(default_factory=RoundStart)
    """The start of the epoch's first round, with the budgets in force and accepted for the next round. Spec: R15.1."""
    taken_before: tuple[object, ...] = ()
    """The keys of the epoch that a job with another number of ranks had trained on."""
    steps_before: int = 0
    """Steps of earlier epochs, and of this one with another number of ranks. Used to count the steps of the whole training."""
    trace: Path | None = None
    run: str = ""
    """Identifies the run in the trace. Spec: R9.6."""
    workers: int = 0
    """The number of reading processes, for the trace."""
    epoch: int = 0
    follows_break: bool | None = None
    """True if this rank left the epoch before early, or could not begin it; None if there was none."""
    total_samples: int | None = None
    """Samples of the whole epoch on all ranks, including those set aside; None if unknown."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """None at the very beginning of an epoch."""
        return self.progress.checkpoint

    @property
    def round_start(self) -> RoundStart | None:
        """Where the machine resumes. None at the very beginning of an epoch, if its budgets are the loader's."""
        if self.checkpoint is not None:
            return self.checkpoint.start
        return None if self.first == RoundStart() else self.first

    def make_acceptance(self, budget_tokens: int, schedule: BudgetSchedule | None) -> Acceptance:
        """Returns what the rank accepts, by `accept_budget` and by a schedule that counts the steps of the whole training."""
        return Acceptance(
            budget_tokens=budget_tokens,
            schedule=schedule,
            told_tokens=self.accepted_tokens,
            steps_before=self.steps_before,
        )

    def make_config(self, base: Config) -> Config:
        """Returns the configuration of the epoch."""
        shared_samples = len(self.keys) if self.is_shared and self.keys is not None else None
        return replace(
            base,
            tag=self.tag,
            order_seed=self.order_seed,
            quota_samples=self.quota_samples,
            shared_samples=shared_samples,
        )

    def make_quarantine(self) -> Quarantine:
        """Returns a quarantine that knows what was set aside before."""
        start, first = RoundStart() if self.checkpoint is None else self.checkpoint.start, self.first_place
        left_out = self.progress.bad + self.progress.gone
        places = Places(start.read_samples if first else 0, first, left_out=left_out)
        if self.is_shared:
            places = Places.resume(start, self.progress.places, left_out)
        return Quarantine(
            self.get_key,
            max_bad=self.max_bad,
            total_samples=None if self.keys is None else len(self.keys),
            bad=self.progress.bad,
            known_places=self.progress.known,
            places=places,
        )

    def get_key(self, place: int) -> object:
        """Returns the key of the sample at a place; for an iterable data set, the place itself."""
        return place if self.keys is None else self.keys[place]

    def get_id(self, place: int) -> int:
        """Returns the key if it is an integer, otherwise the place."""
        key = self.get_key(place)
        return key if isinstance(key, int) else place


class Drawing:
    """Lists what a rank reads of a shared order: what it has drawn, and ahead what it will draw. Spec: R14.4, R16.4."""

    def __init__(self, start: EpochStart, config: Config) -> None:
        self._start = start
        self._config = config
        self._left_out = frozenset(start.progress.bad + start.progress.gone)
        self._ahead = range(0)

    def list_items(self, drawn: range, round_: int) -> tuple[list[tuple[int, object]], int]:
        """Returns the places and keys to read after places were ``drawn`` for a round, and how many samples ``drawn`` has.

        Includes the next draw if it is known already, and excludes places that were included before.
        """
        before, self._ahead = self._ahead, range(0)
        if self._config.update_samples is not None and self._config.has_steps(round_):
            draw = foresee_draw(self._config, round_)
            self._ahead = range(draw.first, draw.first + draw.count)
        items = [place for place in chain(drawn, self._ahead) if place not in self._left_out and place not in before]
        count = sum(place not in self._left_out for place in drawn)
        return [(place, self._start.get_key(place)) for place in items], count
