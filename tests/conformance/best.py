"""What no plan can improve, by trying all: the fewest micro-batches, and the least wait with that many, for small problems.

``python -m tests.conformance.best`` writes it into the cases of ``spec/vectors/v1``, as ``exact``. A test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

from odb_ref.conformance.judge import compute_least
from odb_ref.conformance.vectors import VECTORS, Problem, decode
from odb_ref.core.batching.cost import choose_cost

MOST_UNITS = 9
MOST_PAIRS = 200_000
Units = list[list[int]]


def list_divisions(problem: Problem, rank: int | None, count: int, units: Units) -> set[tuple[int, ...]]:
    """Returns the costs, in falling order, of each division of a rank's units into ``count``, without avoidable empty ones."""
    bounds = {"budget": problem.terms["budget"], **problem.terms.get("limits", {})}
    cost = choose_cost(problem.terms.get("cost") or "tokens").of_tokens
    is_alone = problem.terms.get("oversize") == "alone"

    def is_kept(batch: list[list[int]]) -> bool:
        taken = problem.measure(rank, [index for unit in batch for index in unit])
        return (is_alone and len(batch) == 1) or all(value <= bounds[name] for name, value in taken.items())

    def weigh(batch: list[list[int]]) -> int:
        rows = [cost(tokens) for unit in batch for tokens in problem.list_tokens(rank, unit)]
        return len(rows) * max(rows, default=0) if problem.is_padded() else sum(rows)

    def divide(place: int, batches: list[list[list[int]]]) -> Iterator[tuple[int, ...]]:
        if len(units) - place < min(count, len(units)) - len(batches):
            return
        if place == len(units):
            yield tuple(sorted([*map(weigh, batches), *[0] * (count - len(batches))], reverse=True))
            return
        for batch in batches:
            batch.append(units[place])
            if is_kept(batch):
                yield from divide(place + 1, batches)
            batch.pop()
        if len(batches) < count and is_kept([units[place]]):
            yield from divide(place + 1, [*batches, [units[place]]])

    return set(divide(0, []))


def find_best(problem: Problem) -> dict[str, int | float] | None:
    """Returns the fewest micro-batches and the least wait with that many, or None if the problem is too large or unsolvable."""
    ranks = len(problem.lengths)
    homes: list[int | None] = [None] if problem.is_dealt else [*range(ranks)]
    units = {rank: problem.list_units(rank) for rank in homes}
    if problem.has_homes() or problem.is_online or max(map(len, units.values())) > MOST_UNITS:
        return None
    multiple = problem.terms.get("multiple_of", 1)
    for count in range(compute_least(problem), 20, multiple):
        whole = count * ranks if problem.is_dealt else count
        found = {rank: list_divisions(problem, rank, whole, units[rank]) for rank in homes}
        if not all(found.values()):
            continue
        number = 1
        for costs in found.values():
            number *= len(costs)
        if number > MOST_PAIRS:
            return {"count": count}
        if problem.is_dealt:
            waits = (ranks * sum(costs[::ranks]) / (sum(costs) or 1) for costs in found[None])
        else:
            waits = (
                ranks * sum(map(max, zip(*costs, strict=True))) / (sum(map(sum, costs)) or 1)
                for costs in product(*found.values())
            )
        return {"count": count, "wait": max(1.0, min(waits))}
    return None


def main() -> None:
    """Writes the best values into the cases."""
    for path in sorted(VECTORS.glob("*.json")):
        if path.name in ("schema.json", "exact.json"):
            continue
        records = json.loads(path.read_text())
        for record in records:
            if record["expect"] == "plan" and record["kind"] in ("plan_all", "plan_ranks"):
                best = find_best(decode(record["problem"], record["kind"]))
                if best is not None:
                    record["exact"] = {**record.get("exact", {}), **best}
        path.write_text("[\n" + ",\n".join("  " + json.dumps(record) for record in records) + "\n]\n")


if __name__ == "__main__":
    main()
