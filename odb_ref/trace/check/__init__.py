"""The trace checker: does what ranks did satisfy the properties? Judges by events and effects only.

It is independent of the machine: it shares the types, the offer's reduction and the trace format with it, and recomputes
everything else. Only `replay`, which asks whether the machine would have done the same, drives the machine.

==============  =======================================================================================================
`check_traces`  the verdict on any number of trace files
`Follower`      the verdict on a job while it runs
`verdict`       properties, violations, verdicts
`stream`        files into jobs, a job's files into one causal order
`decode`        lines into values
`known`         which fields a line may have
`exchanges`     what is posted against what is answered
`rank`          one rank's record, by its parts in `own`
`own`           what it reads and draws (`input`, `draws`), must offer (`offers`, `groups`), forms (`steps`, `updates`),
                hands out (`output`), and when (`phases`)
`outcomes`      how a rank may end
`rounds`        what every rank must see alike in a round
`job`           the ranks together, and what must be true when all have ended
`scope`         which properties say nothing about a job
`account`       what is trained on, against what there was
`lineage`       resumed epochs and the parts before them
`replay`        the machine, asked again
==============  =======================================================================================================
"""

from __future__ import annotations

from odb_ref.trace.check.follow import Follower
from odb_ref.trace.check.job import check_traces
from odb_ref.trace.check.verdict import JobVerdict, Property, PropertyVerdict, Status, Verdict, Violation

__all__ = ["Follower", "JobVerdict", "Property", "PropertyVerdict", "Status", "Verdict", "Violation", "check_traces"]
