"""The walked graph as DOT, to compare with a model checker's and to look at."""

from __future__ import annotations

from typing import IO

from simulator.explore.rank import Rank
from simulator.explore.search import Search


def describe_rank(rank: Rank) -> str:
    """One rank in a few words: phase, round, what is under way, and its steps from formed to taken."""
    state = rank.state
    words = [f"{state.phase}{state.round}"]
    words += [f"reading{rank.reading}"] if rank.reading else []
    words += [f"collating{rank.collating}"] if rank.collating is not None else []
    words.append(f"window{len(state.window)}")
    words.append(f"plan{len(state.plan)}/{len(state.outbox)}/{len(state.queue)}/{len(rank.taken)}")
    flags = (
        ("failed", bool(rank.causes)),
        ("left", rank.is_left),
        ("urged", rank.is_urged),
        ("gone", rank.is_gone),
        ("cut", rank.is_cut),
    )
    words += [word for word, holds in flags if holds]
    words += [str(rank.finish.outcome.kind)] if rank.finish is not None else []
    return " ".join(words)


def write_dot(file: IO[str], search: Search) -> None:
    """Writes the graph that ``search`` has walked: nodes labelled with the ranks, edges with the action."""
    if search.space is None:
        return
    numbers = {world: number for number, world in enumerate(search.iterate_worlds())}
    file.write("digraph explored {\n")
    for world, number in numbers.items():
        label = "\\n".join(describe_rank(rank) for rank in search.space.get_ranks(world))
        file.write(f'{number} [label="{label}"];\n')
    for world, action, place in search.iterate_edges():
        name = "".join(word.capitalize() for word in action.act.name.split("_"))
        file.write(f'{numbers[world]} -> {numbers[place]} [label="{name}({action.rank})"];\n')
    file.write("}\n")
