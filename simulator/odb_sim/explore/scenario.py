"""A schedule as a file: the violation, the bounds, and every action that leads to it. See ``odb-ref explore --replay``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from odb_ref.core.batching.rules import RULES, TargetRule
from odb_ref.core.errors import UsageError
from odb_ref.trace.format import Json, JsonObject, decode_fields
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core
from odb_sim.explore.rank import Act, ExploredRank
from odb_sim.explore.search import Counterexample, make_space
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Space, World
from odb_sim.inputs.files import write_json
from odb_sim.inputs.rules import load_rule

FORMAT: Final = "odb-scenario"
VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A schedule within some bounds. ``property`` is the one violated after it, or empty if none is."""

    bounds: Bounds
    schedule: tuple[Action, ...]
    property: str = ""
    detail: str = ""
    rule: str = "odb"
    """How to find the target rule: the name of a shipped one, or ``module:name``."""


def write_scenario(path: str | Path, scenario: Scenario) -> None:
    """Writes the scenario as JSON."""
    write_json(path, encode_scenario(scenario), indent=1)


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
            "bad": list(bounds.bad),
            "layout": str(bounds.layout),
            "cost": bounds.cost.name,
            "mode": str(bounds.mode),
            "rule": scenario.rule,
        },
        "schedule": [[action.rank, action.act.name.lower()] for action in scenario.schedule],
    }


def read_scenario(path: str | Path, load: Callable[[str], TargetRule] = load_rule) -> Scenario:
    """Returns the scenario in the file; ``load`` finds its rule. Raises: UsageError when it holds no scenario."""
    try:
        return decode_scenario(json.loads(Path(path).read_text(encoding="utf-8")), load)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, not JSON or not a scenario
        raise UsageError(f"{path}: not a saved schedule: {error}") from error


def decode_scenario(data: object, load: Callable[[str], TargetRule] = load_rule) -> Scenario:
    """Returns the scenario that `encode_scenario` made. Raises: UsageError when the data is not a scenario."""
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
                    bounds=_decode_bounds(bounds, load(str(bounds["rule"]))),
                    schedule=tuple(Action(int(rank), Act[str(act).upper()]) for rank, act in schedule),
                    property=property_,
                    detail=detail,
                    rule=str(bounds["rule"]),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"not a scenario: {error}") from error
        case _:
            raise UsageError(f"not an {FORMAT} of version {VERSION}")


def _decode_bounds(data: JsonObject, rule: TargetRule) -> Bounds:
    return decode_fields(
        Bounds,
        data,
        lengths=_decode_rows(data, "lengths"),
        accepted=_decode_rows(data, "accepted"),
        budget_schedule=tuple((step, tokens) for step, tokens in _decode_rows(data, "budget_schedule")),
        rule=rule,
    )


def _decode_rows(data: JsonObject, name: str) -> tuple[tuple[int, ...], ...]:
    """Returns rows of integers; empty if an older file lacks the field."""
    rows = data.get(name, [])
    if not isinstance(rows, list):
        raise UsageError(f"bounds, field {name}: expected a list of rows")
    return tuple(tuple(int(str(number)) for number in row) for row in rows if isinstance(row, list))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One action of a replay, with its rank before and after. ``after`` is None if the action could not be applied."""

    action: Action
    before: ExploredRank
    after: ExploredRank | None
    violation: Breach | None


def replay(scenario: Scenario, core: Core | None = None) -> Iterator[Moment]:
    """Yields each action of the schedule in turn, up to its end or the first violation.

    Raises: UsageError when an action is not possible at its place in the schedule, Breach when the start violates a property.
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
    after: ExploredRank | None = None
    violation: Breach | None = None
    try:
        world = space.apply(world, action.code)
        after = space.get_ranks(world)[action.rank]
        space.check(world)
        if is_last and space.is_over(world, space.enabled(world)):
            space.check_over(world)
    except Breach as error:
        violation = error
    return Moment(action=action, before=before, after=after, violation=violation), world


def compute_scenario(bounds: Bounds, counterexample: Counterexample, rule: str | None = None) -> Scenario:
    """Returns the counterexample as a scenario. ``rule`` is as in `Scenario`, by default where the rule's class is found."""
    kind = type(bounds.rule)
    name = rule or (bounds.rule.name if bounds.rule.name in RULES else f"{kind.__module__}:{kind.__name__}")
    return Scenario(
        bounds=bounds,
        schedule=counterexample.schedule,
        property=counterexample.property,
        detail=counterexample.detail,
        rule=name,
    )
