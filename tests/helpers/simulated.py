"""Simulated epochs of bundled traces, or of lengths made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from odb_sim.inputs.lengths import Integers, Lengths, load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run


def make_run(
    lengths: str | Lengths | Sequence[int] | Integers,
    ranks: int,
    samples: int | None = None,
    *,
    draw: int = 0,
    **settings: Any,
) -> Run:
    """Returns an epoch of a bundled trace, or of lengths whose tokens all carry loss, in the protocol unless ``settings`` say
    otherwise. ``draw`` is the seed by which the samples are shuffled, or drawn if their number is given.
    """
    if isinstance(lengths, str):
        lengths = load_lengths(lengths)
    elif not isinstance(lengths, Lengths):
        lengths = Lengths("test", np.array(lengths), np.array(lengths))
    sharding = settings.setdefault("sharding", Sharding.EVEN)
    workload = build_workload(lengths, ranks=ranks, samples=samples, sharding=sharding, seed=draw)
    return Run(workload=workload, **{"policy": "odb", **settings})
