"""The graph that a search has walked: its shape, and GraphML or DOT to look at or to compare with a model checker's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import networkx

from odb_ref.core.errors import UsageError
from odb_sim.explore.rank import ExploredRank
from odb_sim.explore.search import Search
from odb_sim.explore.world import Action

FORMATS: Final = (".graphml", ".dot", ".gv")


def describe_rank(rank: ExploredRank) -> str:
    """Returns a short description of one rank: phase, round, work under way, and its steps from formed to taken."""
    state = rank.state
    words = [f"{state.phase}{state.round}"]
    words += [f"reading{rank.reading}"] if rank.reading else []
    words += [f"collating{rank.collating}"] if rank.collating is not None else []
    words.append(f"window{len(state.window)}")
    words.append(f"plan{len(state.plan)}/{len(state.released)}/{len(state.queue)}/{len(rank.taken)}")
    flags = (
        ("failed", bool(rank.causes)),
        ("left", rank.is_left),
        ("urged", rank.is_urged),
        ("gone", rank.is_gone),
        ("loaderless", rank.is_loader_lost),
    )
    words += [word for word, holds in flags if holds]
    words += [str(rank.finish.outcome.kind)] if rank.finish is not None else []
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape of the graph, with lengths in transitions."""

    sinks: int
    """The number of worlds without a successor, whether proper ends or not."""
    shortest: int
    """The length of the shortest schedule from the start to a sink."""
    longest: int
    """The length of the longest schedule from the start to a sink."""


def build_graph(search: Search) -> networkx.MultiDiGraph:
    """Returns the graph that ``search`` has walked. Worlds are numbered from 0, the start, and each edge has its action.

    The nodes have a ``label`` that describes the ranks, the edges an ``action`` such as ``Take(1)``.
    """
    graph = networkx.MultiDiGraph()
    if search.space is None:
        return graph
    numbers = {world: number for number, world in enumerate(search.iterate_worlds())}
    for world, number in numbers.items():
        graph.add_node(number, label="\n".join(describe_rank(rank) for rank in search.space.get_ranks(world)))
    for world, action, place in search.iterate_edges():
        graph.add_edge(numbers[world], numbers[place], action=name_action(action))
    return graph


def name_action(action: Action) -> str:
    """Returns an action's name in the graph, which is the same as in the TLA+ model: ``Take(1)``."""
    return "".join(word.capitalize() for word in action.act.name.split("_")) + f"({action.rank})"


def find_sinks(graph: networkx.MultiDiGraph) -> list[int]:
    """Returns the worlds without a successor."""
    return [node for node, degree in graph.out_degree() if not degree]


def measure_graph(graph: networkx.MultiDiGraph) -> GraphShape:
    """Returns the shape of a graph, which has no cycle because the measure falls on every transition."""
    distances = networkx.single_source_shortest_path_length(graph, 0)
    sinks = find_sinks(graph)
    return GraphShape(len(sinks), min(distances[sink] for sink in sinks), networkx.dag_longest_path_length(graph))


def write_graph(path: Path, graph: networkx.MultiDiGraph) -> None:
    """Writes the graph as GraphML (Gephi, yEd, networkx) or DOT (Graphviz), by the suffix of the file's name.

    Raises: UsageError when the suffix is another, or the file cannot be written.
    """
    check_graph_path(path)
    try:
        if path.suffix == ".graphml":
            networkx.write_graphml(graph, path)
        else:
            with path.open("w", encoding="utf-8") as file:
                write_dot(file, graph)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_graph_path(path: Path) -> None:
    """Checks that the suffix of the file's name is a known format. Raises: UsageError when it is not."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: the name must end in {' or '.join(FORMATS)}")


def write_dot(file: IO[str], graph: networkx.MultiDiGraph) -> None:
    """Writes the graph as DOT."""
    file.write("digraph explored {\n")
    for number, label in graph.nodes(data="label"):
        text = label.replace("\n", "\\n")
        file.write(f'{number} [label="{text}"];\n')
    for before, after, action in graph.edges(data="action"):
        file.write(f'{before} -> {after} [label="{action}"];\n')
    file.write("}\n")
