"""Lies: changes to a true trace, with the properties that each breaks. The checker must see them without ``--replay``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_ref.core.types import Mode
from odb_ref.trace.check import Property, check_traces
from odb_ref.trace.check.verdict import JobVerdict, PropertyVerdict
from tests.helpers.tamper import Tampered
from tests.helpers.world import Fault, make_configs, run_by_arrival

Change = Callable[[Tampered], None]

SHARDS = [[(i * i + 5 * rank) % 23 + 1 for i in range(40 - 9 * rank)] for rank in range(3)]
LIMITS: dict[str, Any] = {"limits": (20, 5)}
QUOTA: dict[str, Any] = {"mode": Mode.QUOTA, "quota_samples": 50}
FAIL = Fault("fail", 1, 120)
STOP = Fault("stop", 2, 120)
KILL = Fault("kill", 0, 60)

_TRUE: dict[str, bytes] = {}
"""The true traces that were already judged, by faults and settings, because many lies share one."""


def run(path: Path, *faults: Fault, **settings: Any) -> Tampered:
    """Writes a true trace to ``path``, and returns it. By default, samples may be carried for three rounds."""
    configs = make_configs(len(SHARDS), **(settings or {"max_age_rounds": 3}))
    run_by_arrival(SHARDS, configs, seed=3, faults=faults, trace=path)
    return Tampered(path)


def tell(*paths: Path, is_replayed: bool = False) -> list[str]:
    """Returns the violations in these traces, each beginning with the property."""
    return [str(item) for item in check_traces(paths, is_replayed=is_replayed).violations]


def find_broken(*paths: Path, is_replayed: bool = False) -> set[str]:
    """Returns the properties that these traces break."""
    return {line.split()[0] for line in tell(*paths, is_replayed=is_replayed)}


def get_verdict(job: JobVerdict, property_: Property) -> PropertyVerdict:
    return next(item for item in job.properties if item.property is property_)


@dataclass(frozen=True)
class Lie:
    """A change that breaks these ``properties`` of the trace of a job with these ``faults`` and ``settings``."""

    name: str
    change: Change
    properties: frozenset[str]
    faults: tuple[Fault, ...]
    settings: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def check(self, path: Path) -> list[str]:
        """Checks that it breaks these properties and the true trace none. Returns the violations."""
        told = repr((self.faults, self.settings))
        if told not in _TRUE:
            run(path, *self.faults, **self.settings)
            assert tell(path, is_replayed=True) == []
            _TRUE[told] = path.read_bytes()
        path.write_bytes(_TRUE[told])
        trace = Tampered(path)
        self.change(trace)
        said = tell(trace.write(path))
        assert {line.split()[0] for line in said} == self.properties, said
        return said


class Lies(list[Lie]):
    """The lies of a file, in order. A call returns a decorator that adds one."""

    def __call__(self, properties: str, *faults: Fault, name: str = "", **settings: Any) -> Callable[[Change], Change]:
        def add(change: Change) -> Change:
            self.append(Lie(name or change.__name__, change, frozenset(properties.split()), faults, settings))
            return change

        return add


def configure(**changes: Any) -> Change:
    """Changes the configuration, in the offers too."""
    return lambda trace: trace.configure(**changes)
