"""``odb-ref explore``: every interleaving of the real core, for a small world."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import UsageError
from odb_sim.cli.options import add_number, add_repeated, add_save, add_terms, add_text, build_terms
from odb_sim.explore.bounds import Bounds, compute_lengths
from odb_sim.explore.graph import GraphShape, build_graph, check_graph_path, describe_rank, measure_graph, write_graph
from odb_sim.explore.scenario import (
    Scenario,
    compute_scenario,
    encode_scenario,
    read_scenario,
    replay,
    write_scenario,
)
from odb_sim.explore.search import Exploration, Search
from odb_sim.explore.suites import SUITES
from odb_sim.inputs.conditions import parse_budget_schedule
from odb_sim.inputs.files import check_files, write_json
from odb_sim.inputs.rules import check_rule_name
from odb_sim.reports.terminal import show_progress
from odb_sim.verify.language import load_judged

HELP: Final = "walk through every interleaving of a small world"
DESCRIPTION: Final = (
    "Walks through every interleaving of the real protocol core with its exchange, trainers and "
    "faults. Checks the properties in every state, and that a measure decreases on every transition. A state without a "
    "successor that is not a proper end is a deadlock. Prints the shortest schedule that leads to a violation."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    text = "several explorations in one go; of the options that describe a world only --policy applies"
    parser.add_argument("--suite", choices=sorted(SUITES), help=text)
    add_number(parser, "--ranks", "N", "number of ranks (default: that of --shard-sizes, or 2)")
    text = "samples of each rank (default: 3,1 and so on)"
    parser.add_argument("--shard-sizes", type=_integers, metavar="N,N,..", help=text)
    text = "lengths of the samples in tokens, taken in turn"
    parser.add_argument("--lengths", type=_integers, default=(3, 1, 2), metavar="N,N,..", help=text)
    add_number(parser, "--token-budget", "B", "token budget", 4)
    add_number(parser, "--window", "K", "samples of a window", 2)
    add_number(parser, "--depth", "D", "steps the queue holds", 1)
    add_terms(parser, Bounds)
    text = "odb, paper, module:name or path.py:name, a rule that odb-ref verify can judge (odb; in a suite various)"
    parser.add_argument("--policy", metavar="RULE", help=text)
    add_number(parser, "--failures", "N", "reads or collations that may fail", 0)
    add_number(parser, "--stops", "N", "consumers that may leave early", 0)
    add_number(parser, "--losses", "N", "processes that may be killed", 0)
    add_number(parser, "--lost-loaders", "N", "loader processes that may be lost", 0)
    parser.add_argument("--single-reads", action="store_true", help="answer reads sample by sample")
    add_number(parser, "--window-bytes", "N", "maximum tokens of a window; 0: no limit", 0)
    parser.add_argument("--eager-end", action="store_true", help="the source ends together with its last sample")
    parser.add_argument("--free-urges", action="store_true", help="urge at any moment, without a reason")
    parser.add_argument("--leave-inside", action="store_true", help="consumers may leave in the middle of a step, too")
    parser.add_argument("--inline", action="store_true", help="each consumer's own thread reads and collates")
    parser.add_argument("--uneven-depth", action="store_true", help="rank r's queue holds r more steps")
    parser.add_argument("--shared", action="store_true", help="all ranks draw from one order, of all shards' samples")
    add_repeated(parser, "--accept", "RANK:TOKENS", "a token budget that a rank may accept at any moment")
    add_text(parser, "--budget-schedule", "STEP:TOKENS,..", "token budgets by planned steps, the same on all ranks")
    add_number(parser, "--odd-rank", "R", "this rank has another configuration")
    add_number(parser, "--max-states", "N", "stop after about this many states, with exit status 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    text = "write the graph of all worlds and actions: FILE.graphml, .dot or .gv"
    parser.add_argument("--graph", type=Path, metavar="FILE", help=text)
    add_save(parser, "save the schedule of a violation")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="replay a saved schedule instead")


INCOMPLETE: Final = 3
_MOST_RANKS: Final = 64
"""Twelve ranks with a sample each have a million states, and each further rank triples them. A thousand take long to begin."""


def run_command(options: argparse.Namespace) -> int:
    """Returns 0 if everything holds and was covered, 1 if a property does not hold, and 3 if the limit came first."""
    if options.replay is not None:
        check_files(reads=[options.replay])
        return _replay(options.replay)
    check_files(options.json, options.save, options.graph, reads=[options.policy])
    if options.graph is not None:
        check_graph_path(options.graph)
        if options.suite is not None:
            raise UsageError("--graph writes the graph of one exploration: leave out --suite")
    if options.suite is not None:
        suite = SUITES[options.suite]
        if options.policy is not None:
            rule = _load_rule(options.policy)
            suite = {name: replace(bounds, rule=rule) for name, bounds in suite.items()}
        return _run_all(options, suite)
    return _run_all(options, {"": _get_bounds(options, _load_rule(options.policy or "odb"))})


def _load_rule(name: str) -> TargetRule:
    """Returns a rule that always answers, and always the same, and has a name of its own."""
    return check_rule_name(name, load_judged(name).rule)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


def _get_bounds(options: argparse.Namespace, rule: TargetRule) -> Bounds:
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {options.ranks}")
    ranks: int = options.ranks or (len(options.shard_sizes) if options.shard_sizes else 2)
    if ranks > _MOST_RANKS:
        raise UsageError(f"a world of {ranks} ranks has more states than can be walked: at most {_MOST_RANKS}")
    shards: tuple[int, ...] = options.shard_sizes or tuple(3 if rank == 0 else 1 for rank in range(ranks))
    if len(shards) != ranks:
        raise UsageError(f"--ranks is {ranks}, but --shard-sizes names {len(shards)}")
    if options.max_states is not None and options.max_states < 1:
        raise UsageError(f"--max-states must be at least 1, got {options.max_states}")
    schedule: str | None = options.budget_schedule
    bounds = Bounds(
        lengths=compute_lengths(shards, options.lengths),
        budget_tokens=options.token_budget,
        window_samples=options.window,
        depth_steps=options.depth,
        rule=rule,
        failures=options.failures,
        stops=options.stops,
        losses=options.losses,
        lost_loaders=options.lost_loaders,
        is_single_reads=options.single_reads,
        is_eager_end=options.eager_end,
        window_bytes=options.window_bytes,
        is_urged_freely=options.free_urges,
        is_left_inside=options.leave_inside,
        is_inline=options.inline,
        is_uneven_depth=options.uneven_depth,
        odd_rank=options.odd_rank,
        is_shared=options.shared,
        accepted=_list_accepted(options.accept, ranks),
        budget_schedule=() if schedule is None else parse_budget_schedule(schedule).changes,
    )
    return build_terms(options).apply(bounds)


def _list_accepted(texts: Sequence[str], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each rank the budgets that it comes to accept, in order."""
    try:
        pairs = [(int(rank), int(tokens)) for rank, tokens in (text.split(":") for text in texts)]
    except ValueError:
        raise UsageError(f"--accept: expected RANK:TOKENS, got {', '.join(texts)}") from None
    if not all(0 <= rank < ranks and tokens > 0 for rank, tokens in pairs):
        raise UsageError(
            f"--accept: expected a rank of 0 to {ranks - 1} and tokens of at least 1, got {', '.join(texts)}"
        )
    last = max((rank for rank, _ in pairs), default=-1)
    return tuple(tuple(tokens for of, tokens in pairs if of == rank) for rank in range(1 + last))


def _run_all(options: argparse.Namespace, suite: Mapping[str, Bounds]) -> int:
    results: list[dict[str, object]] = []
    status = 0
    for name, bounds in suite.items():
        with show_progress(f"{name or 'exploring'}, states", 0) as on_progress:
            search = Search(bounds, max_states=options.max_states, on_progress=on_progress)
            result = search.run()
        print("\n".join(_summarize(name, result)))
        entry: dict[str, object] = {"name": name, **_to_json(result)}
        if result.counterexample is not None:
            scenario = compute_scenario(bounds, result.counterexample, options.policy)
            _print_counterexample(scenario)
            write_scenario(options.save, scenario)
            print(f"saved; replay with: odb-ref explore --replay {options.save}")
            entry["counterexample"] = encode_scenario(scenario)
            status = 1
        elif not result.is_complete:
            status = INCOMPLETE
        results.append(entry)
        if options.graph is not None and result.is_complete:
            graph = build_graph(search)
            write_graph(options.graph, graph)
            print(f"{options.graph}: {_describe(measure_graph(graph))}")
        if status == 1:
            break
    if options.json is not None:
        payload = results[0] if options.suite is None else {"suite": options.suite, "runs": results}
        write_json(options.json, payload, indent=1)
    return status


def _summarize(name: str, result: Exploration) -> list[str]:
    """Returns the verdict and the figures in lines that fit a terminal of 80 columns."""
    verdict = "all hold" if result.is_complete else "stopped at the limit"
    if result.counterexample is not None:
        verdict = f"{result.counterexample.property} DOES NOT HOLD"
    return [
        f"{name}: {verdict}" if name else verdict,
        f"  {result.states:,} states, {result.edges:,} edges, depth {result.depth} of {result.transition_bound}, "
        f"{result.ends:,} ends, {result.seconds:.1f} s",
    ]


def _describe(shape: GraphShape) -> str:
    return f"{shape.sinks:,} sinks, {shape.shortest} to {shape.longest} transitions from the start"


def _to_json(result: Exploration) -> dict[str, object]:
    return {
        "states": result.states,
        "edges": result.edges,
        "depth": result.depth,
        "ends": result.ends,
        "rank_states": result.rank_states,
        "transition_bound": result.transition_bound,
        "wall_time_s": round(result.seconds, 3),
        "states_per_s": round(result.states_per_s),
        "is_complete": result.is_complete,
        "counterexample": None,
    }


def _print_counterexample(scenario: Scenario) -> None:
    print(f"{scenario.property}: {scenario.detail}")
    print(f"after {len(scenario.schedule)} transitions:")
    for number, action in enumerate(scenario.schedule, 1):
        print(f"  {number:3}  {action}")


def _replay(path: Path) -> int:
    violation = None
    for number, moment in enumerate(replay(read_scenario(path, _load_rule)), 1):
        after = describe_rank(moment.after) if moment.after is not None else "refused"
        print(f"{number:4}  {moment.action!s:24} {describe_rank(moment.before)}  ->  {after}")
        violation = moment.violation
    if violation is None:
        print("every property holds")
        return 0
    print(f"{violation.property}: {violation.detail}")
    return 1
