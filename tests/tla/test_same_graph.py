"""The TLA+ model and the code, explored within the same bounds, have the same states and the same transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.world import Space, decode

from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.types import Mode
from tests.tla.same import ACTIONS, Label, label_model_state, label_world
from tests.tla.tlc import Configuration, read_configurations, read_graph, run_tlc

Edge = tuple[Label, str, Label]
GRAPHS = read_configurations()["graphs"]


def _read_bounds(constants: Mapping[str, Any]) -> Bounds:
    """Returns a configuration's bounds for the explorer: samples of length 1, and a budget of a group's size."""
    return Bounds(
        lengths=tuple((1,) * size for size in constants["Shard"]),
        budget_tokens=constants["Cap"],
        order=StepOrder.FULLEST,
        window_samples=constants["Window"],
        ramp_rounds=constants["Ramp"],
        depth_steps=constants["Depth"][0],
        is_uneven_depth=len(set(constants["Depth"])) > 1,
        is_urged_freely=constants["Urging"] == "always",
        is_left_inside=constants["IsLeftInside"],
        mode=Mode(constants["Mode"]),
        quota_samples=constants["Quota"] or None,
        max_age_rounds=constants["Age"],
        rule=RULES[constants["Rule"]],
        failures=constants["MaxFailures"],
        stops=constants["MaxStops"],
        losses=constants["MaxLosses"],
        lost_loaders=constants["MaxLostLoaders"],
        is_single_reads=constants["IsSingleReads"],
        is_shared=constants["IsDrawn"],
        is_eager_end=constants["IsEagerEnd"],
        window_bytes=constants["WindowBytes"],
        update_samples=constants["UpdateSamples"] or None,
        accepted=tuple(map(tuple, constants["Accepted"])),
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


def _walk_model(configuration: Configuration, work: Path) -> tuple[list[Label], set[Edge]]:
    result = run_tlc(configuration, work, "-dump", "dot,actionlabels", str(work / "graph"))
    assert result.error == "", result.output
    nodes, edges = read_graph(work / "graph.dot")
    labels = {number: label_model_state(state) for number, state in nodes.items()}
    assert len(labels) == result.states
    return list(labels.values()), {
        (labels[start], ACTIONS[action].name, labels[end]) for start, action, end in edges if action != "End"
    }


@pytest.mark.slow
@pytest.mark.parametrize("configuration", GRAPHS.values(), ids=GRAPHS)
def test_the_model_and_the_code_have_the_same_graph(configuration: Configuration, tmp_path: Path) -> None:
    """Checks: FREE, TERM, ALIGN, CONSERVE."""
    model_nodes, model_edges = _walk_model(configuration, tmp_path)
    code_worlds, code_nodes, code_edges = _walk_code(_read_bounds(configuration.constants))
    # Labels identify states: no two states of one side share one.
    assert len(set(model_nodes)) == len(model_nodes)
    assert len(code_nodes) == code_worlds
    assert set(model_nodes) == code_nodes
    assert model_edges == code_edges
