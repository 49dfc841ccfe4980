"""Problems of known lengths, as words for the extracted model, and drawn at random.

``python -m tests.proofs.plans`` lets the model, once built (``make -C proofs extraction``), write the cases of the level
*exact*.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, pairwise
from random import Random
from typing import Final, NamedTuple

from odb_ref.conformance.vectors import VECTORS, Problem, encode
from odb_ref.core.batching.cost import TOKENS, choose_cost
from odb_ref.plan.packing import TRIED
from odb_ref.plan.settling import EXCHANGED, FAR, NEAR
from odb_ref.plan.terms import SAMPLES, Options
from tests.proofs.conftest import Model, ask_model
from tests.proofs.wire import write_cost, write_integers

EXACT: Final = VECTORS / "exact.json"
_SEEDS: Final = """
1 6 30 34 73 117 150 179 190 210 215 233 308 309 415 428 430 435 445 480 535 555 604 629 636 687 701 725 735
786 788 892 1267
"""
_PADDED_SEEDS: Final = "21 24 28 177 190 231 512 669 838 5198"
"""Where possible, three problems that each planted defect of the planner fails, at least two of them padded."""
_LAST: Final = Problem(
    lengths=[[60, 1, 15, 14], [10, 13, 2, 10], [12, 16, 15, 15], [5, 16, 2, 14]],
    is_dealt=True,
    uses={"patches": [[2, 7, 7, 1], [3, 1, 0, 7], [2, 4, 1, 1], [3, 0, 2, 1]]},
    terms={"budget": 60, "limits": {"patches": 8}, "at_least": 2},
)
"""With settling, one micro-batch would give away its last sample, to one that costs less and had no room for it before."""
_STEPS: Final = Problem(
    lengths=[[2, 1, 3, 4], [3, 1, 4, 4]],
    is_dealt=True,
    uses={"patches": [[2, 5, 0, 0], [3, 0, 1, 3]]},
    terms={"budget": 8, "limits": {"patches": 5, "samples": 4}},
)
"""Three micro-batches would be enough, but are not searched for, since two ranks need four."""


class Thresholds(NamedTuple):
    """The numbers in R13.4 and R13.5 beyond which less is tried. Small ones reach what comes after them."""

    near: int = NEAR
    far: int = FAR
    exchanged: int = EXCHANGED
    tried: int = TRIED


SHIPPED: Final = Thresholds()


def write_problem(problem: Problem, thresholds: Thresholds = SHIPPED) -> str:
    """Returns the question for the model."""
    terms = problem.terms
    cost, most = terms.get("cost"), terms.get("at_most")
    limits = dict(sorted(terms.get("limits", {}).items()))
    within = None if problem.together is None else terms.get("within", "micro-batch")
    words: list[object] = [
        "plan",
        int(problem.is_padded()),
        terms["budget"],
        write_integers([*limits.values()]),
        write_cost(TOKENS if cost is None else choose_cost(cost)),
        terms.get("multiple_of", 1),
        terms.get("at_least", 1),
        -1 if most is None else most,
        int(terms.get("oversize") == "alone"),
        int(terms.get("short") != "refuse"),
        int(terms.get("order") == "smallest_at_ends"),
        *thresholds,
        int(within == "micro-batch" or (problem.is_dealt and within == "rank")),
    ]
    ranks = [_write_samples(problem, rank, [*limits]) for rank in range(len(problem.lengths))]
    if not problem.is_dealt:
        words += ["stay", len(ranks), *(" ".join([str(len(own)), *own]) for own in ranks)]
    else:
        rows = [*chain.from_iterable(ranks)]
        numbered = [f"{row.split()[0]} {place} {row.split(maxsplit=2)[2]}" for place, row in enumerate(rows)]
        words += ["homes" if within == "rank" else "dealt", len(rows), *numbered, len(ranks)]
    return " ".join(map(str, words))


def _write_samples(problem: Problem, rank: int, limits: list[str]) -> list[str]:
    """Returns for each sample: its key or number, place, length rounded up, no token that carries loss, and what it uses."""
    rows = []
    tokens = problem.list_tokens(rank, range(len(problem.lengths[rank])))
    for index, length in enumerate(tokens):
        key = index if problem.together is None else problem.together[rank][index]
        uses = [problem.uses[name][rank][index] if name in problem.uses else 1 for name in limits]
        rows.append(f"{key} {index} {length} 0 {write_integers(uses)}")
    return rows


def draw_problem(rng: Random) -> Problem:
    """Draws a packed problem: few samples or many, short of the budget or near it, by tokens or not, with any term."""
    budget, ranks = rng.choice((12, 60, 60, 1_000)), rng.randint(1, 4)
    draw = rng.choice((_draw_any, _draw_any, _draw_tight))
    lengths = [draw(rng, budget, rng.choice((3, 9, 30))) for _ in range(ranks)]
    terms: Options = {"budget": budget}
    if draw is _draw_tight and rng.random() < 0.7:
        return Problem(lengths=lengths, is_dealt=rng.random() < 0.5, terms=terms)
    terms["oversize"] = rng.choice(("alone", "alone", "refuse"))
    if rng.random() < 0.5:
        terms["cost"] = f"attention/{rng.choice((1, 5, 40))}"
    if rng.random() < 0.3:
        terms["multiple_of"] = rng.randint(1, 4)
    if rng.random() < 0.3:
        terms["at_least"] = rng.randint(1, 8)
    if rng.random() < 0.1:
        terms["at_most"] = max(terms.get("multiple_of", 1) * terms.get("at_least", 1), rng.randint(2, 20))
    if rng.random() < 0.2:
        terms["pad_to"] = rng.choice((2, 5))
    if rng.random() < 0.1:
        terms["short"] = "refuse"
    if rng.random() < 0.2:
        terms["order"] = "smallest_at_ends"
    uses = {}
    if rng.random() < 0.35:
        terms["limits"] = {SAMPLES: rng.randint(1, 6)} if rng.random() < 0.5 else {}
        if rng.random() < 0.7:
            terms["limits"] = {**terms["limits"], "patches": rng.randint(3, 20)}
            uses["patches"] = [[rng.randint(0, rng.choice((3, 9))) for _ in own] for own in lengths]
    together = None
    if rng.random() < 0.3:
        terms["within"] = rng.choice(("micro-batch", "micro-batch", "rank", "step"))
        together = [[rng.randrange(max(1, len(own))) for _ in own] for own in lengths]
    is_dealt = rng.random() < 0.5
    if not (any if is_dealt else all)(lengths):  # the model has no samples that a rank runs again
        terms.setdefault("short", "empty")
    return Problem(lengths=lengths, is_dealt=is_dealt, together=together, uses=uses, terms=terms)


def draw_padded(rng: Random) -> Problem:
    """Draws a padded problem. Some have larger budgets, so that a micro-batch holds more."""
    problem = draw_problem(rng)
    more: Options = {"budget": rng.choice((1, 1, 2, 6)) * problem.terms["budget"], "layout": "padded"}
    return replace(problem, terms={**problem.terms, **more})


def _draw_any(rng: Random, budget: int, most: int) -> list[int]:
    """Draws up to ``most`` lengths: below the budget, near half of it, or above, and sometimes it or half of it."""
    low, high = rng.choice(((1, budget // 8), (1, budget), (budget // 3, budget // 2 + 2), (1, budget + 2)))
    found = [rng.randint(max(1, low), max(1, high)) for _ in range(rng.randint(0, most))]
    return [rng.choice((budget, budget // 2)) if rng.random() < 0.05 else length for length in found]


def _draw_tight(rng: Random, budget: int, most: int) -> list[int]:
    """Draws lengths that fill micro-batches completely, or nearly, so that fewer than best fit finds are searched for."""
    full = budget - rng.choice((0, 0, 1, 2))
    found: list[int] = []
    for _ in range(rng.randint(2, max(2, most // 3))):
        cuts = sorted(rng.randint(0, full) for _ in range(rng.choice((2, 2, 3))))
        found += [high - low for low, high in pairwise([0, *cuts, full]) if high > low]
    return rng.sample(found, len(found))


def make_cases(model: Model) -> str:
    """Returns the text of `EXACT`: problems, and the model's plans."""
    problems = {seed: draw_problem(Random(int(seed))) for seed in _SEEDS.split()} | {"last": _LAST, "steps": _STEPS}
    problems |= {f"padded-{seed}": draw_padded(Random(int(seed))) for seed in _PADDED_SEEDS.split()}
    said = model(" ".join(map(write_problem, problems.values())))
    records: list[dict[str, object]] = []
    for (seed, problem), answer in zip(problems.items(), said, strict=True):
        record = encode(problem)
        kind, plan = record.pop("kind"), json.loads(answer.replace(" ", ", "))
        case = {"id": f"exact-{seed}", "comment": "Planned by the proved model.", "from": "R13", "kind": kind}
        records.append({**case, "problem": record, "flags": [], "expect": "plan", "exact": {"plan": plan}})
    return "[\n" + ",\n".join("  " + json.dumps(record) for record in records) + "\n]\n"


if __name__ == "__main__":
    EXACT.write_text(make_cases(ask_model))
