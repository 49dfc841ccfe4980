"""Writes the cases of the online protocol: random questions with answers of the extracted model, never of the Python.

``python -m tests.proofs.vectors`` after ``make -C proofs extraction`` writes the files of `FILES` in ``spec/vectors/v1``. A
test compares them with what the model answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from random import Random
from typing import Any

from odb_ref.conformance.vectors import VECTORS
from odb_ref.core.batching.cost import choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import RULES
from odb_ref.core.offer import NONE, Offer
from tests.conformance.online import make_configs, make_sample, make_shards, read_offer, write_offer
from tests.proofs.conftest import ask_model
from tests.proofs.wire import write_config, write_cost, write_integers, write_samples
from tests.proofs.wire import write_offer as word_offer

Question = dict[str, Any]
RULES_OF = {
    "groups": ("R2.1", "How a window is grouped."),
    "align": ("R4.2", "What of the groups is emitted in so many steps, split or carried."),
    "target": ("R3.3", "How many steps an agreement makes."),
    "agreement": ("R3.2", "What all ranks learn of two offers."),
    "want": ("R14.2", "How many samples a rank wants of the common order."),
    "shares": ("R14.3", "How many places of the common order each rank draws."),
    "run": ("R5", "What each rank trains on, step by step, and how the ranks end."),
    "epoch": ("R5", "What each rank trains on, step by step."),
    "rest": ("R10.3", "What of an order is left for another number of ranks."),
    "weights": ("R4.5", "What the loss of each micro-step is multiplied by."),
}
FILES = {
    "groups": "groups",
    "align": "align",
    "target": "target",
    "agreement": "target",
    "want": "shares",
    "shares": "shares",
    "run": "runs",
    "epoch": "runs",
    "rest": "rest",
    "weights": "scales",
}


def word(kind: str, question: Mapping[str, Any]) -> str:
    """Returns the question in the model's format."""
    match kind:
        case "groups":
            costs = question.get("costs") or [[]] * len(question["lengths"])
            samples = [
                make_sample(place, *item) for place, item in enumerate(zip(question["lengths"], costs, strict=True))
            ]
            # Without updates, padding may take all of a padded budget.
            command = f"groups {question['budget']}" if question["layout"] == Layout.PADDED else "rows"
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
        case "shares":
            return f"shares {write_integers(question['wants'])} {question['left']}"
        case "weights":
            rows = [write_integers([-1 if n is None else n for n in own]) for own in question["ranks"]]
            return " ".join(["weights", question["reduction"], str(len(rows)), *rows])
        case "rest":
            parts = [
                f"{rank['read']} {write_integers(rank['carried'])} {write_integers(rank['taken'])}"
                for rank in question["ranks"]
            ]
            return " ".join(["rest 1", str(len(parts)), *parts, write_integers(range(question["samples"]))])
        case _:
            return word_epoch(question, None)


def word_epoch(question: Mapping[str, Any], moment: int | None) -> str:
    """Returns an epoch in the model's format, and the round from whose start it is run again, if any."""
    rows = [
        f"{write_config(config)} {write_samples(shard)}"
        for config, shard in zip(make_configs(question), make_shards(question), strict=True)
    ]
    fails = question.get("fails") or {"rank": -1, "in": "-", "round": -1}
    words = ["epoch", len(rows), *rows, *fails.values(), -1 if moment is None else moment]
    return " ".join(map(str, words))


def run_model(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the model's ranks train on, and how they end, after ``resume_after`` steps from where their round began."""
    found = read_epoch(ask_model(word_epoch(question, None)), 0)
    after = question.get("resume_after", 0)
    if after:
        moment = found["steps"][after - 1][0]
        found = read_epoch(ask_model(word_epoch(question, moment)), after)
    return found


def read_epoch(lines: Sequence[str], after: int) -> dict[str, Any]:
    """Returns the answer of a run, without its first ``after`` steps."""
    ranks, ends = zip(*(line.split(" | ") for line in lines), strict=True)
    taken = [re.findall(r"\d+:(\d+):\[([\d ]*)\]:([\d/]+)", rank)[after:] for rank in ranks]
    (end,) = set(ends)
    kind, *who = end.split()
    return {
        "steps": [[int(number), *map(int, counts.split("/"))] for number, _, counts in taken[0]],
        "groups": [[[*map(int, positions.split())] for _, positions, _ in own] for own in taken],
        "end": [kind, int(who[0]) if who else None],
    }


def read(kind: str, line: str) -> Any:
    if kind == "agreement":
        values = dict(zip([item.name for item in fields(Offer)], map(int, line.split()), strict=True))
        nobody = {name for name, value in values.items() if value == -1}
        return {name: None if name in nobody else value for name, value in values.items()}
    if kind == "weights":
        words = re.sub(r"\d+/\d+", lambda found: str(round(float(Fraction(found[0])), 9)), line)
        return json.loads(words.replace(" ", ","))
    found = json.loads("[" + line.replace(" ", ",") + "]")
    return {"emitted": found[:-1][0], "carried": found[-1]} if kind == "align" else found[0]


def ask(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    plain = [(kind, question) for kind, question in cases if kind not in ("run", "epoch")]
    lines = iter(ask_model(" ".join(word(kind, question) for kind, question in plain)))
    return [run_model(question) if kind in ("run", "epoch") else read(kind, next(lines)) for kind, question in cases]


def make_exact(kind: str, answer: Any) -> dict[str, Any]:
    """Returns the part of a case that the model's answer determines."""
    return {"plan": answer["groups"]} if kind == "epoch" else {"answer": answer}


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
    """Draws a question, small enough to be read."""
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
        case "weights":
            rows = [[rng.choice([None, 0, rng.randint(1, 40), rng.randint(1, 40)]) for _ in range(3)] for _ in range(3)]
            return {"reduction": rng.choice(["mean", "sum"]), "ranks": rows[: rng.randint(1, 3)]}
        case "rest":
            samples, ranks = rng.randint(4, 14), rng.randint(1, 3)
            return {
                "samples": samples,
                "ranks": [draw_place(len(range(rank, samples, ranks)), rng) for rank in range(ranks)],
            }
        case "run" | "epoch":
            return draw_epoch(kind, rng)
        case _:
            return {"wants": [rng.randrange(9) for _ in range(rng.randint(1, 6))], "left": rng.randrange(30)}


def draw_place(samples: int, rng: Random) -> Question:
    """Draws where a rank with ``samples`` samples stands: carried samples were read, taken ones were carried or follow."""
    read = rng.randint(0, samples)
    carried = sorted(rng.sample(range(read), min(read, rng.randrange(3))))
    taken = [place for place in (*carried, *range(read, samples)) if rng.random() < 0.4]
    return {"read": read, "carried": carried, "taken": taken}


def draw_epoch(kind: str, rng: Random) -> Question:
    """Draws a small epoch that goes to its end, or for a run one with a quota, a failure or an interruption."""
    ranks, layout = rng.randint(2, 3), rng.choice(["padded", "packed"])
    lengths = [[rng.randint(1, 30) for _ in range(rng.choice((0, 3, 9, 14)))] for _ in range(ranks)]
    settings: Question = {
        "window_samples": rng.choice((3, 4, 6)),
        "ramp_rounds": rng.randrange(3),
        "max_age_rounds": rng.randint(1, 3),
        "rule": rng.choice([*RULES]),
        "order": rng.choice(["fullest", "shuffled", "sampler"]),
    }
    question: Question = {"lengths": lengths, "supervised": [[n // 2 for n in own] for own in lengths]}
    question |= {"terms": {"budget": rng.randint(30, 60), "layout": layout}, "settings": settings}
    if rng.random() < 0.4:
        question["terms"]["cost"] = "attention/20"
    if kind == "run":
        match rng.choice(("quota", "fails", "fails", "resume", "resume", "resume")):
            case "quota":
                settings |= {"mode": "quota", "quota_samples": rng.randint(1, 20)}
            case "fails":
                place, round_ = rng.choice(["read", "collate"]), rng.randrange(4)
                question["fails"] = {"rank": rng.randrange(ranks), "in": place, "round": round_}
            case _:
                steps = len(run_model(question)["steps"])
                question |= {"resume_after": rng.randint(1, max(1, steps - 1))} if steps else {}
    return question


def draw_padded_epoch(sizes: Sequence[int], rng: Random) -> Question:
    """Draws an epoch like the released peer's: padded, without a cost."""
    lengths = [[rng.randint(1, 30) for _ in range(size)] for size in sizes]
    settings = {"window_samples": 8, "ramp_rounds": 1, "max_age_rounds": 2, "rule": "odb", "order": "fullest"}
    question: Question = {"lengths": lengths, "supervised": [[n // 2 for n in own] for own in lengths]}
    return question | {"terms": {"budget": 60, "layout": "padded"}, "settings": settings}


def main() -> None:
    rng = Random(1)
    cases = [(kind, draw(kind, rng)) for kind, number in NUMBERS.items() for _ in range(number)]
    many = [[[2 * place + 1, 9], [2 * place, 9]] for place in range(150)]
    terms = {"target": 2, "due": 0, "layout": "packed", "cost": "tokens", "order": "fullest"}
    cases.append(("align", {"groups": many, **terms}))
    equal = [[[place, 2] for place in (6, 5, 4, 3)], [[2, 4], [1, 4]], [[0, 8]]]
    cases.append(("align", {"groups": equal, **terms, "layout": "padded"}))
    odd = {"ranks": 2, "total": 60, "drawn": 54, "window": 9}  # an odd window, of which half is enough
    cases.append(("want", {**odd, "layout": "packed", "held": [3], "carried": []}))
    cases += [("epoch", draw_padded_epoch(sizes, rng)) for sizes in SHARDS]
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
            "  " + json.dumps({**record, "flags": [], "expect": "plan", "exact": make_exact(kind, exact)})
        )
    for name, lines in rows.items():
        (VECTORS / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


NUMBERS = {
    **{"groups": 60, "align": 59, "want": 30, "target": 24, "agreement": 16, "shares": 20},
    **{"weights": 12, "rest": 12, "epoch": 12, "run": 30},
}
SHARDS = ((12, 12), (24, 24), (8, 8, 8), (24, 9), (16, 0))
"""The samples of ranks in further epochs, equal in number or not."""

if __name__ == "__main__":
    main()
