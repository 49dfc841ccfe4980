"""Rooms, and the arrows between them: each points one way, none to the simulator, and no module is in an import cycle."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("odb_ref/**/*.py"), *ROOT.glob("simulator/**/*.py")])

ARROWS: dict[str, tuple[str, ...]] = {
    "odb_ref.extras": (),
    "odb_ref.core": (),
    "odb_ref.plan": ("odb_ref.core",),
    "odb_ref.conformance": ("odb_ref.core", "odb_ref.plan"),
    "odb_ref.trace": ("odb_ref.core",),
    "odb_ref.trace.check": ("odb_ref.core", "odb_ref.trace"),
    "odb_ref.torch.reading": ("odb_ref.core",),
    "odb_ref.torch.exchange": ("odb_ref.core",),
    "odb_ref.torch.plan": ("odb_ref.core", "odb_ref.torch.reading"),
    "odb_ref.torch.workers": ("odb_ref.core", "odb_ref.torch.reading", "odb_ref.torch.exchange"),
    "odb_ref.torch.epoch": (
        "odb_ref.core", "odb_ref.trace", "odb_ref.torch.reading", "odb_ref.torch.exchange", "odb_ref.torch.plan",
    ),
    "odb_ref.torch": (
        "odb_ref.extras", "odb_ref.core", "odb_ref.plan", "odb_ref.trace", "odb_ref.torch.reading",
        "odb_ref.torch.exchange", "odb_ref.torch.plan", "odb_ref.torch.workers", "odb_ref.torch.epoch",
    ),
    "odb_ref.torch.loop": ("odb_ref.core", "odb_ref.torch", "odb_ref.torch.reading"),
    "odb_ref.integrations": ("odb_ref.extras", "odb_ref.torch", "odb_ref.torch.loop", "odb_ref.torch.reading"),
    "odb_ref.compat": ("odb_ref.extras", "odb_ref.core", "odb_ref.plan", "odb_ref.torch", "odb_ref.torch.plan"),
    "odb_ref.compat.integrations": ("odb_ref.extras", "odb_ref.compat", "odb_ref.integrations", "odb_ref.torch"),
    "odb_ref": ("odb_ref.core", "odb_ref.plan", "odb_ref.torch", "odb_ref.torch.reading"),
    "odb_sim": (),
    "odb_sim.inputs": ("odb_ref.core",),
    "odb_ref.arrays": ("odb_ref.core",),
    "odb_sim.engine": ("odb_ref.core", "odb_ref.arrays", "odb_sim.inputs"),
    "odb_sim.baselines": ("odb_ref.core", "odb_sim.inputs", "odb_sim.engine"),
    "odb_sim.studies": (
        "odb_ref", "odb_ref.core", "odb_ref.plan", "odb_ref.arrays", "odb_ref.trace", "odb_sim.inputs",
        "odb_sim.engine", "odb_sim.baselines",
    ),
    "odb_sim.recorded": (
        "odb_ref.core", "odb_ref.trace", "odb_ref.trace.check", "odb_sim.inputs", "odb_sim.engine",
        "odb_sim.studies",
    ),
    "odb_sim.explore": ("odb_ref.core", "odb_ref.trace", "odb_sim.inputs"),
    "odb_sim.verify": (
        "odb_ref", "odb_ref.extras", "odb_ref.core", "odb_ref.trace.check", "odb_sim.inputs", "odb_sim.studies",
        "odb_sim.explore",
    ),
    "odb_sim.reports": (
        "odb_ref.core", "odb_ref.trace", "odb_ref.trace.check", "odb_sim.inputs", "odb_ref", "odb_sim.engine",
        "odb_sim.studies", "odb_sim.recorded",
    ),
    "odb_sim.cli.planning": (
        "odb_ref.core", "odb_ref.plan", "odb_sim.cli", "odb_sim.inputs", "odb_sim.studies", "odb_sim.reports",
    ),
    "odb_sim.cli": (
        "odb_ref", "odb_ref.core", "odb_ref.trace", "odb_ref.trace.check", "odb_sim", "odb_sim.inputs",
        "odb_sim.engine", "odb_sim.studies", "odb_sim.recorded", "odb_sim.explore", "odb_sim.verify",
        "odb_sim.reports",
    ),
}  # fmt: skip
"""Each room with the rooms it may import, besides itself. `odb_ref` itself imports only when a name is asked for."""

FLOORS = (
    {"values", "errors", "types", "offer"},
    {f"batching.{name}" for name in ("cost", "sizes", "grouping", "layouts", "order", "alignment", "rules", "shards")},
)
"""The floors of the core, lowest first: what ranks exchange, and what makes steps of samples. The rest stands on both."""

FRAMEWORKS = {"transformers", "lightning", "accelerate"}
"""Only the integrations may import these. Torch users and planners do not need them."""


@cache
def get_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{item.name}" for item in node.names}
    return names


def list_modules() -> dict[str, Path]:
    """Returns the files of both packages, by module name."""
    found = {}
    for path in SOURCES:
        base = ROOT / "simulator" if path.is_relative_to(ROOT / "simulator") else ROOT
        found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def build_graph(modules: Mapping[str, Path]) -> networkx.DiGraph:
    """Returns which module imports which, anywhere in a module, including imports for types."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules)
    for name, path in modules.items():
        for item in get_imports(path):
            target = item if item in modules else item.rpartition(".")[0]
            if target in modules and target != name:
                graph.add_edge(name, target)
    return graph


def get_room(module: str) -> str:
    return max((room for room in ARROWS if f"{module}.".startswith(f"{room}.")), key=len)


def find_circles(graph: networkx.DiGraph) -> list[list[str]]:
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20


def test_arrows_between_rooms_are_the_ones_that_are_drawn() -> None:
    """No arrow more, and, to keep the picture true, no arrow fewer."""
    drawn = {(room, target) for room, targets in ARROWS.items() for target in targets}
    found: dict[tuple[str, str], list[str]] = {}
    for importer, imported in build_graph(list_modules()).edges:
        rooms = get_room(importer), get_room(imported)
        if rooms[0] != rooms[1]:
            found.setdefault(rooms, []).append(f"{importer} -> {imported}")
    assert {rooms: how for rooms, how in found.items() if rooms not in drawn} == {}
    assert drawn - found.keys() == set()


def test_no_arrow_comes_back() -> None:
    rooms = networkx.DiGraph((room, target) for room, targets in ARROWS.items() for target in targets)
    assert find_circles(rooms) == []
    assert find_circles(build_graph(list_modules())) == []


def test_a_circle_and_a_wrong_arrow_would_be_found(tmp_path: Path) -> None:
    """Checks that the checks above can fail."""
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from odb_sim.second import World\n")
    second.write_text("def late() -> None:\n    import odb_sim.first\n")
    graph = build_graph({"odb_sim.first": first, "odb_sim.second": second})
    assert find_circles(graph) == [["odb_sim.first", "odb_sim.second"]]
    assert get_room("odb_ref.torch.workers.serving") == "odb_ref.torch.workers"
    assert get_room("odb_ref.torch.workers_of_another") == "odb_ref.torch"


def test_nothing_of_the_library_knows_the_simulator_and_no_room_is_a_crowd() -> None:
    assert not [
        path for path in ROOT.glob("odb_ref/**/*.py") if "odb_sim" in {item.split(".")[0] for item in get_imports(path)}
    ]
    folders = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > 14} == {}


def test_within_the_core_imports_go_down() -> None:
    """The pure functions that make steps do not import machines, and values import neither."""

    def get_floor(module: str) -> int:
        name = module.removeprefix("odb_ref.core.")
        return next((number for number, floor in enumerate(FLOORS) if name in floor), len(FLOORS))

    modules = {name: path for name, path in list_modules().items() if get_room(name) == "odb_ref.core"}
    graph = build_graph(modules)
    assert {name for floor in FLOORS for name in floor} < {name.removeprefix("odb_ref.core.") for name in modules}
    assert not [edge for edge in graph.edges if get_floor(edge[0]) < get_floor(edge[1])]


def test_only_the_integrations_know_frameworks() -> None:
    rooms = (ROOT / "odb_ref" / "integrations", ROOT / "odb_ref" / "compat" / "integrations")
    others = [path for path in SOURCES if not any(path.is_relative_to(room) for room in rooms)]
    assert {item for path in others for item in get_imports(path) if item.split(".")[0] in FRAMEWORKS} == set()


def test_no_example_needs_the_simulator_to_train() -> None:
    for path in sorted((ROOT / "examples").glob("train*.py")):
        assert not {item for item in get_imports(path) if item.startswith("odb_sim")}, path
