"""Writes the cases of the online protocol: questions at random, answers of the extracted model, never of the Python.

``python -m tests.proofs.vectors`` after ``make proofs`` writes ``groups.json``, ``align.json``, ``target.json`` and
``shares.json`` of ``spec/vectors/v1``; a test compares what is there with what the model says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from odb_ref.conformance.online import make_sample, read_offer, write_offer
from odb_ref.conformance.vectors import VECTORS
from odb_ref.core.batching.cost import choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import RULES
from odb_ref.core.offer import NONE, Offer
from tests.proofs.conftest import ask_model
from tests.proofs.wire import write_cost, write_integers, write_samples
from tests.proofs.wire import write_offer as word_offer

Question = dict[str, Any]
NAMES = (
    *(
        "round_min",
        "round_max",
        "fingerprint_min",
        "fingerprint_max",
        "ready_min",
        "failed_rank",
        "stop_step",
        "stop_rank",
    ),
    *("samples_min", "samples_max", "groups_min", "groups_max", "due_max", "budget_min"),
)
"""The fields of an offer, as the model prints them."""
RULES_OF = {
    "groups": ("R2.1", "How a window is grouped."),
    "align": ("R4.2", "What of the groups is emitted in so many steps, split or carried."),
    "target": ("R3.3", "How many steps an agreement makes."),
    "agreement": ("R3.2", "What all ranks learn of two offers."),
    "want": ("R14.2", "How many samples a rank wants of the common order."),
    "shares": ("R14.3", "How many places of the common order each rank draws."),
}
FILES = {
    "groups": "groups",
    "align": "align",
    "target": "target",
    "agreement": "target",
    "want": "shares",
    "shares": "shares",
}


def word(kind: str, question: Mapping[str, Any]) -> str:
    """The question as the model reads it."""
    match kind:
        case "groups":
            costs = question.get("costs") or [[]] * len(question["lengths"])
            samples = [
                make_sample(place, *item) for place, item in enumerate(zip(question["lengths"], costs, strict=True))
            ]
            command = "groups" if question["layout"] == Layout.PADDED else "rows"
            return f"{command} {question['budget']} {write_integers(question['limits'])} {write_samples(samples)}"
        case "align":
            groups = [[make_sample(*pair, []) for pair in group] for group in question["groups"]]
            terms = f"{question['layout']} {write_cost(choose_cost(question['cost']))} {question['order']} 0"
            head = f"align {question['target']} {question['due']} {terms} {len(groups)}"
            return " ".join([head, *map(write_samples, groups)])
        case "target":
            return f"rule {question['rule']} {word_offer(read_offer(question['agreement']))}"
        case "agreement":
            return "combine " + " ".join(word_offer(read_offer(offer)) for offer in question["offers"])
        case "want":
            places = f"want {question['ranks']} {question['total']} {int(question['layout'] == Layout.PACKED)}"
            rows = [
                [make_sample(place, length, []) for place, length in enumerate(question[name])]
                for name in ("held", "carried")
            ]
            return " ".join([f"{places} {question['window']} {question['drawn']}", *map(write_samples, rows)])
        case _:
            return f"shares {write_integers(question['wants'])} {question['left']}"


def read(kind: str, line: str) -> Any:
    """The model's answer."""
    if kind == "agreement":
        values = dict(zip(NAMES, map(int, line.split()), strict=True))
        nobody = {name for name, value in values.items() if value == -1}
        return {name: None if name in nobody else value for name, value in values.items()}
    found = json.loads("[" + line.replace(" ", ",") + "]")
    return {"emitted": found[:-1][0], "carried": found[-1]} if kind == "align" else found[0]


def ask(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """What the model answers to each question."""
    lines = ask_model(" ".join(word(kind, question) for kind, question in cases))
    return [read(kind, line) for (kind, _), line in zip(cases, lines, strict=True)]


def draw_offer(rng: Random) -> dict[str, Any]:
    groups = rng.randrange(9)
    samples = rng.randrange(20)
    offer = Offer(
        round_min=(number := rng.randrange(3)),
        round_max=number,
        fingerprint_min=7,
        fingerprint_max=7,
        ready_min=rng.randrange(2),
        failed_rank=rng.choice([NONE, NONE, rng.randrange(4)]),
        stop_step=(step := rng.choice([NONE, NONE, rng.randrange(9)])),
        stop_rank=NONE if step == NONE else rng.randrange(4),
        samples_min=samples,
        samples_max=samples + rng.randrange(9),
        groups_min=rng.choice([NONE, groups]),
        groups_max=groups + rng.randrange(4),
        due_max=rng.randrange(groups + 1),
        budget_min=rng.choice([NONE, 1 + rng.randrange(99)]),
    )
    return dict(write_offer(offer))


def draw(kind: str, rng: Random) -> Question:
    """A question at random, small enough to be read."""
    lengths = [rng.randint(1, 40) for _ in range(rng.randrange(12))]
    layout = rng.choice(["padded", "packed"])
    match kind:
        case "groups":
            limits = [rng.randint(3, 30) for _ in range(rng.randrange(4))]
            question: Question = {
                "lengths": lengths,
                "budget": rng.randint(30, 100),
                "limits": limits,
                "layout": layout,
            }
            costs = {"costs": [[rng.randint(0, 6) for _ in limits] for _ in lengths]}
            return question | (costs if limits else {})
        case "align":
            window = [make_sample(place, length, []) for place, length in enumerate(lengths or [5])]
            groups = Layout(layout).compute_groups(tuple(window), rng.randint(40, 80))
            cost = rng.choice(["tokens", "attention/20"])
            return {
                "groups": [[[sample.position, sample.length] for sample in group] for group in groups],
                "target": rng.randint(1, len(groups) + 3),
                "due": rng.randrange(len(lengths) + 1),
                "layout": layout,
                "cost": cost,
                "order": rng.choice(["fullest", "sampler"]),
            }
        case "want":
            held, drawn = lengths or [3], rng.randrange(60)
            question = {"ranks": rng.randint(1, 4), "total": 60, "drawn": drawn, "window": rng.randint(1, 20)}
            return question | {"layout": layout, "held": held, "carried": held[: rng.randrange(len(held) + 1)]}
        case "target":
            return {"rule": rng.choice([*RULES]), "agreement": draw_offer(rng)}
        case "agreement":
            return {"offers": [draw_offer(rng), draw_offer(rng)]}
        case _:
            return {"wants": [rng.randrange(9) for _ in range(rng.randint(1, 6))], "left": rng.randrange(30)}


def main() -> None:
    """Writes the files."""
    rng = Random(1)
    cases = [(kind, draw(kind, rng)) for kind, number in NUMBERS.items() for _ in range(number - (kind == "align"))]
    many = [[[2 * place + 1, 9], [2 * place, 9]] for place in range(150)]
    terms = {"target": 2, "due": 0, "layout": "packed", "cost": "tokens", "order": "fullest"}
    cases.append(("align", {"groups": many, **terms}))
    rows: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for (kind, question), exact in zip(cases, ask(cases), strict=True):
        numbers[kind] = numbers.get(kind, 0) + 1
        origin, comment = RULES_OF[kind]
        record = {
            "id": f"{kind}-{numbers[kind]}",
            "comment": comment,
            "from": origin,
            "kind": kind,
            "problem": question,
        }
        rows.setdefault(FILES[kind], []).append(
            "  " + json.dumps({**record, "flags": [], "expect": "plan", "exact": {"answer": exact}})
        )
    for name, lines in rows.items():
        (VECTORS / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


NUMBERS = {"groups": 60, "align": 60, "want": 30, "target": 24, "agreement": 16, "shares": 20}

if __name__ == "__main__":
    main()
