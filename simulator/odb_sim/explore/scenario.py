"""A schedule as a file: what went wrong, in which bounds, and every action that leads there. ``odb-ref explore --replay``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.core.rules import RULES
from odb_ref.core.types import Mode
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import Act, Core, Rank, Violation
from odb_sim.explore.search import Counterexample, make_space
from odb_sim.explore.world import Action, Space, World
from odb_sim.inputs.rules import load_rule

FORMAT: Final = "odb-scenario"
VERSION: Final = 1

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A schedule within some bounds. ``property`` is what does not hold after it; empty when all does."""

    bounds: Bounds
    schedule: tuple[Action, ...]
    property: str = ""
    detail: str = ""
    rule: str = "odb"
    """How the target rule is found again: a shipped one's name, or ``module:name``."""


def write_scenario(path: str | Path, scenario: Scenario) -> None:
    """Writes the scenario as JSON."""
    Path(path).write_text(json.dumps(encode_scenario(scenario), indent=1) + "\n", encoding="utf-8")


def encode_scenario(scenario: Scenario) -> dict[str, Json]:
    """Returns the scenario as JSON."""
    bounds = scenario.bounds
    return {
        "format": FORMAT,
        "version": VERSION,
        "property": scenario.property,
        "detail": scenario.detail,
        "bounds": {
            **{item.name: getattr(bounds, item.name) for item in fields(Bounds)},
            "lengths": [list(shard) for shard in bounds.lengths],
            "limits": list(bounds.limits),
            "mode": str(bounds.mode),
            "rule": scenario.rule,
        },
        "schedule": [[action.rank, action.act.name.lower()] for action in scenario.schedule],
    }


def read_scenario(path: str | Path) -> Scenario:
    """Returns the scenario in the file.

    Raises: UsageError when it is none.
    """
    try:
        data: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    match data:
        case {
            "format": "odb-scenario",
            "version": 1,
            "property": str(property_),
            "detail": str(detail),
            "bounds": dict(bounds),
            "schedule": list(schedule),
        }:
            try:
                return Scenario(
                    bounds=_decode_bounds(bounds),
                    schedule=tuple(Action(int(rank), Act[str(act).upper()]) for rank, act in schedule),
                    property=property_,
                    detail=detail,
                    rule=str(bounds.get("rule")),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}: not a scenario: {error}") from error
        case _:
            raise UsageError(f"{path}: not an {FORMAT} of version {VERSION}")


def _decode_bounds(data: Mapping[str, Json]) -> Bounds:
    def integer(key: str) -> int:
        value = data[key]
        if type(value) is not int:
            raise UsageError(f"bounds, field {key}: expected an integer, got {value!r}")
        return value

    lengths, limits = data["lengths"], data.get("limits", [])
    if not isinstance(lengths, list):
        raise UsageError("bounds, field lengths: expected a list for each rank")
    if not isinstance(limits, list):
        raise UsageError("bounds, field limits: expected a list")
    return Bounds(
        lengths=tuple(tuple(int(str(length)) for length in shard) for shard in lengths if isinstance(shard, list)),
        budget_tokens=integer("budget_tokens"),
        limits=tuple(int(str(limit)) for limit in limits),
        window_samples=integer("window_samples"),
        depth_steps=integer("depth_steps"),
        mode=Mode(str(data["mode"])),
        quota_samples=None if data["quota_samples"] is None else integer("quota_samples"),
        max_age_rounds=integer("max_age_rounds"),
        ramp_rounds=integer("ramp_rounds"),
        rule=load_rule(str(data["rule"])),
        failures=integer("failures"),
        stops=integer("stops"),
        losses=integer("losses"),
        lost_loaders=integer("lost_loaders") if "lost_loaders" in data else 0,
        is_single_reads=data["is_single_reads"] is True,
        is_eager_end=data["is_eager_end"] is True,
        is_urged_freely=data["is_urged_freely"] is True,
        is_left_inside=data["is_left_inside"] is True,
        is_inline=data.get("is_inline") is True,
        is_uneven_depth=data["is_uneven_depth"] is True,
        odd_rank=None if data["odd_rank"] is None else integer("odd_rank"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One action of a replay, and the rank it happened to, before and after; no rank after what the core refuses."""

    action: Action
    before: Rank
    after: Rank | None
    violation: Violation | None


def replay(scenario: Scenario, core: Core | None = None) -> Iterator[Moment]:
    """Yields each action of the schedule in turn, to its end or to the first property that does not hold.

    Raises: UsageError when an action is not possible where the schedule has it, Violation when the start is wrong.
    """
    space, world = make_space(scenario.bounds, core)
    for number, action in enumerate(scenario.schedule, 1):
        if not 0 <= action.rank < scenario.bounds.ranks:
            raise UsageError(f"action {number} ({action}): there are {scenario.bounds.ranks} ranks")
        moment, world = _step(space, world, action, number, is_last=number == len(scenario.schedule))
        yield moment
        if moment.violation is not None:
            return


def _step(space: Space, world: World, action: Action, number: int, *, is_last: bool) -> tuple[Moment, World]:
    before = space.get_ranks(world)[action.rank]
    if action.code not in space.enabled(world):
        raise UsageError(f"action {number} ({action}) is not possible")
    after: Rank | None = None
    violation: Violation | None = None
    try:
        world = space.apply(world, action.code)
        after = space.get_ranks(world)[action.rank]
        space.check(world)
        if is_last and space.is_over(world, space.enabled(world)):
            space.check_over(world)
    except Violation as error:
        violation = error
    return Moment(action=action, before=before, after=after, violation=violation), world


def compute_scenario(bounds: Bounds, counterexample: Counterexample, rule: str | None = None) -> Scenario:
    """Returns the counterexample as a scenario; ``rule`` as in `Scenario`, by default the name of a shipped one."""
    name = rule or (bounds.rule.name if bounds.rule.name in RULES else "odb")
    return Scenario(
        bounds=bounds,
        schedule=counterexample.schedule,
        property=counterexample.property,
        detail=counterexample.detail,
        rule=name,
    )
