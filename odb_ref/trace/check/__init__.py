"""The trace checker: decides from events and effects alone whether the ranks of a job kept the properties.

It is independent of the machine. It shares the types, the offer's reduction and the trace format with it, and recomputes
everything else. Only `replay`, which checks whether the machine would have done the same, drives the machine.

==============  =======================================================================================================
`check_traces`  the verdict on any number of trace files
`Follower`      the verdict on a job while it runs
`verdict`       properties, violations, verdicts
`stream`        groups files into jobs, and merges a job's files into one causal order
`decode`        turns lines into values
`known`         the fields a line may have
`exchanges`     compares answers with posts
`rank`          one rank's record, judged by the parts in `own`
`own`           what a rank reads and draws (`input`, `draws`), must offer (`offers`, `groups`), forms (`steps`,
                `updates`) and hands out (`output`), and when (`phases`)
`outcomes`      how a rank may end
`rounds`        what every rank must see alike in a round
`job`           the ranks together, and what must hold when all have ended
`scope`         the properties that say nothing about a job
`account`       compares the samples trained on with those there were
`lineage`       resumed epochs and the parts before them
`replay`        repeats a trace with the machine
==============  =======================================================================================================
"""

from __future__ import annotations

from odb_ref.trace.check.follow import Follower
from odb_ref.trace.check.job import check_traces
from odb_ref.trace.check.verdict import JobVerdict, Property, PropertyVerdict, Status, Verdict, Violation

__all__ = ["Follower", "JobVerdict", "Property", "PropertyVerdict", "Status", "Verdict", "Violation", "check_traces"]
