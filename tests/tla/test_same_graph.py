"""The TLA+ model and the code, explored within the same bounds, have the same states and the same transitions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.world import Space, decode

from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.types import Mode
from tests.tla.same import ACTIONS, Label, label_model_state, label_world
from tests.tla.tlc import TLA, read_graph, run_tlc

Edge = tuple[Label, str, Label]
_NUMBERS = {"none": None, "One": 1, "Two": 2, "Four": 4, "Six": 6}
CONFIGS = sorted(path.stem for path in TLA.glob("graph_*.cfg"))


def _read_bounds(path: Path) -> Bounds:
    """Returns the bounds of a configuration for the explorer: samples of length 1, and a budget of a group's size."""
    text = path.read_text()
    value = dict(re.findall(r"^    (\w+) (?:=|<-) (.*)$", text, re.MULTILINE))
    sizes = [int(size) for size in value["Shard"].split("_")[1:]]
    depths = [int(depth) for depth in value["Depth"].split("_")[1:]]
    quota = int(value["Quota"])
    accepted = [int(budget) for budget in value.get("Accepted", "").split("_")[1:]]
    return Bounds(
        lengths=tuple((1,) * size for size in sizes),
        budget_tokens=int(value["Cap"]),
        order=StepOrder.FULLEST,
        window_samples=int(value["Window"]),
        ramp_rounds=int(value["Ramp"]),
        depth_steps=depths[0],
        is_uneven_depth=len(set(depths)) > 1,
        is_urged_freely=value["Urging"] == '"always"',
        is_left_inside=value["IsLeftInside"] == "TRUE",
        mode=Mode(value["Mode"].strip('"')),
        quota_samples=quota or None,
        max_age_rounds=int(value["Age"]),
        rule=RULES[value["Rule"].strip('"')],
        failures=int(value["MaxFailures"]),
        stops=int(value["MaxStops"]),
        losses=int(value["MaxLosses"]),
        lost_loaders=int("MaxLostLoaders" in value),
        is_single_reads=value["IsSingleReads"] == "TRUE",
        is_shared="IsDrawn" in value,
        is_eager_end=value["IsEagerEnd"] == "TRUE",
        window_bytes=_NUMBERS[value.get("WindowBytes", "none")] or 0,
        update_samples=_NUMBERS[value.get("UpdateSamples", "none")],
        accepted=tuple((budget,) if budget else () for budget in accepted),
    )


def _walk_code(bounds: Bounds) -> tuple[int, set[Label], set[Edge]]:
    """Returns the number of different worlds, and their labels and transitions."""
    space = Space(bounds)
    config = bounds.compute_config(0)
    labels = {(world := space.begin()): label_world(space, config, world)}
    edges: set[Edge] = set()
    todo = [world]
    while todo:
        world = todo.pop()
        for code in space.enabled(world):
            after = space.apply(world, code)
            if after not in labels:
                labels[after] = label_world(space, config, after)
                todo.append(after)
            edges.add((labels[world], decode(code).act.name, labels[after]))
    # A space numbers answers by what was posted, so equal answers may have two numbers. Here they are one world. Likewise, only
    # the explorer's own checks remember since when a budget is in force, or that an offer has to tell of a failure.
    worlds = {
        (
            space.get_answer(w),
            space.get_shared(w)._replace(answer=0),
            tuple(replace(rank, budgets=(), is_due=False) for rank in space.get_ranks(w)),
        )
        for w in labels
    }
    return len(worlds), set(labels.values()), edges


def _walk_model(config: Path, work: Path) -> tuple[list[Label], set[Edge]]:
    result = run_tlc(config, work, arguments=("-deadlock", "-dump", "dot,actionlabels", str(work / "graph")))
    assert result.error == "", result.output
    nodes, edges = read_graph(work / "graph.dot")
    labels = {number: label_model_state(state) for number, state in nodes.items()}
    assert len(labels) == result.states
    return list(labels.values()), {
        (labels[start], ACTIONS[action].name, labels[end]) for start, action, end in edges if action != "End"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_and_the_code_have_the_same_graph(name: str, tmp_path: Path) -> None:
    """Checks: FREE, TERM, ALIGN, CONSERVE."""
    model_nodes, model_edges = _walk_model(TLA / f"{name}.cfg", tmp_path)
    code_worlds, code_nodes, code_edges = _walk_code(_read_bounds(TLA / f"{name}.cfg"))
    # Labels identify states: no two states of one side share one.
    assert len(set(model_nodes)) == len(model_nodes)
    assert len(code_nodes) == code_worlds
    assert set(model_nodes) == code_nodes
    assert model_edges == code_edges
