"""What the parts of a simulated epoch share: the clock, what is simulated and under which conditions, and the record."""

from __future__ import annotations

import random

import numpy as np
import simpy

from odb_sim.engine.batches import Shelf
from odb_sim.engine.epoch import Epoch
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import Recorder
from odb_sim.engine.timeline import Timeline
from odb_sim.inputs.conditions import Fault
from odb_sim.inputs.lengths import Integers


class Stage:
    """Holds what ranks and trainers share; it knows neither."""

    def __init__(self, epoch: Epoch, *, recorder: Recorder, timeline: Timeline | None, fill: Fill | None) -> None:
        self.env = simpy.Environment(initial_time=0.0)
        self.epoch = epoch
        self.workload = epoch.workload
        self.costs = epoch.costs
        self.conditions = epoch.conditions
        self.recorder = recorder
        self.shelf = Shelf(epoch.workload.ranks)
        self.timeline = timeline
        self.fill = fill
        self._lengths: Integers | None = None
        """Of each sample, by id."""
        self._random = random.Random(epoch.seed)
        self.acted: set[Fault] = set()
        """The faults that have happened."""
        self.fault_s: float | None = None
        """When the first of them has; None without any."""
        self._finished_s = 0.0

    def stretch(self, seconds: float) -> float:
        """``seconds`` times the jitter of this occasion."""
        jitter = self.conditions.jitter
        return seconds * self._random.lognormvariate(0, jitter) if jitter else seconds

    def find_lengths(self, ids: Integers) -> Integers:
        """Returns how many tokens the samples have that these ids name."""
        if self._lengths is None:
            self._lengths = np.zeros(int(self.workload.ids.max()) + 1, dtype=np.int64)
            self._lengths[self.workload.ids] = self.workload.tokens
        lengths: Integers = self._lengths[ids]
        return lengths

    def note_fault(self, fault: Fault) -> None:
        """``fault`` acts now."""
        self.acted.add(fault)
        self.fault_s = self.env.now if self.fault_s is None else self.fault_s

    def note_finish(self) -> None:
        """A rank's loader has ended, or its trainer gives up."""
        self._finished_s = self.env.now

    @property
    def abort_s(self) -> float | None:
        """Seconds from the first fault to the moment the last surviving rank has ended; None without a fault.

        That is when its loader has, or its trainer, where that waits for a rank that is gone. 0 when all had ended before.
        """
        return None if self.fault_s is None else max(0.0, self._finished_s - self.fault_s)

    @property
    def ended_s(self) -> float:
        """When the last surviving rank had ended, after a fault; 0 without one."""
        return 0.0 if self.fault_s is None else self._finished_s
