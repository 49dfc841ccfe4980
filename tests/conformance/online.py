"""The online protocol as asked of our core. docs/howto/conformance.md describes each kind of question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from itertools import chain
from typing import Any, Final

from odb_ref.conformance.vectors import Json, Problem, decode
from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.batching.shards import compute_shares, compute_want
from odb_ref.core.batching.weighting import LossReduction, Weighting
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE, Offer, combine
from odb_ref.core.resume import Checkpoint, RoundStart
from odb_ref.core.types import ZERO_COUNTS, Group, Mode, Sample, StepCounts
from tests.helpers.world import ByArrival, Choice, World

_LEAST: Final = frozenset(("failed_rank", "stop_step", "stop_rank", "groups_min", "budget_min"))
"""Fields of an offer that may name no rank or value."""


def answer(question: Mapping[str, Json]) -> Json:
    """Returns the core's answer to a question.

    Raises: UsageError when there is no such kind.
    """
    match question:
        case {
            "kind": "groups",
            "lengths": [*lengths],
            "budget": int(budget),
            "limits": [*limits],
            "layout": str(layout),
        }:
            rows = question.get("costs")
            costs = rows if isinstance(rows, Sequence) else [[]] * len(lengths)
            window = tuple(
                make_sample(place, _count(length), [*map(_count, _list(own))])
                for place, (length, own) in enumerate(zip(lengths, costs, strict=True))
            )
            found = Layout(layout).compute_groups(window, budget, tuple(map(_count, limits)))
            return [*map(_list_positions, found)]
        case {
            "kind": "align",
            "groups": [*groups],
            "target": int(target),
            "due": int(due),
            "layout": str(layout),
            "cost": str(cost),
            "order": str(order),
        }:
            held = tuple(tuple(_read_sample(pair) for pair in _list(group)) for group in groups)
            emitted, carried = align(held, target, due, Layout(layout), StepOrder(order), cost=choose_cost(cost))
            return {"emitted": [*map(_list_positions, emitted)], "carried": _list_positions(carried)}
        case {"kind": "target", "rule": str(rule), "agreement": Mapping() as agreement}:
            return RULES[rule].compute_target(read_offer(agreement))
        case {"kind": "agreement", "offers": [*offers]}:
            return write_offer(reduce(combine, [read_offer(offer) for offer in offers if isinstance(offer, Mapping)]))
        case {"kind": "want", "layout": str(layout), "window": int(window), "held": [*held], "carried": [*carried]}:
            left = -(-(_count(question["total"]) - _count(question["drawn"])) // _count(question["ranks"]))
            return compute_want(
                Layout(layout).compute_shared_window(window, left),
                samples=len(held),
                tokens=sum(map(_count, held)),
                carried_tokens=sum(map(_count, carried)),
            )
        case {"kind": "shares", "wants": [*wants], "left": int(left)}:
            return [*compute_shares([*map(_count, wants)], left)]
        case {"kind": "weights", "reduction": str(reduction), "ranks": [*ranks]}:
            return compute_scales(reduction, [[*map(_read_supervised, _list(own))] for own in ranks])
        case {"kind": "rest", "samples": int(samples), "ranks": [*ranks]}:
            return compute_rest(samples, [read_checkpoint(record) for record in ranks if isinstance(record, Mapping)])
        case {"kind": "run"}:
            return run(question)
        case _:
            raise UsageError(f"no such question: {question.get('kind')}")


def compute_scales(reduction: str, ranks: Sequence[Sequence[StepCounts]]) -> list[Json]:
    """Returns the factor for the loss of each micro-step of each rank, to 9 digits."""
    weighting = Weighting(reduction=LossReduction(reduction))
    window = sum(chain.from_iterable(ranks), ZERO_COUNTS)
    return [[round(weighting.compute_scale(own, window, len(ranks)), 9) for own in steps] for steps in ranks]


def _read_supervised(value: Json) -> StepCounts:
    return ZERO_COUNTS if value is None else StepCounts(1, _count(value) + 1, _count(value))


def compute_rest(samples: int, checkpoints: Sequence[Checkpoint]) -> list[Json]:
    """Returns the places of an order of ``samples`` samples that no rank has trained on."""
    from odb_ref.torch.plan.state import Generation, Part  # imports torch, which few questions need

    parts = tuple(Part(checkpoint) for checkpoint in checkpoints)
    return [*Generation(parts).compute_rest(range(samples))]


def read_checkpoint(record: Mapping[str, Json]) -> Checkpoint:
    """Returns where a rank stands in its epoch."""
    read, carried, taken = (record[name] for name in ("read", "carried", "taken"))
    start = RoundStart(read_samples=_count(read), carried=tuple(map(_count, _list(carried))))
    return Checkpoint(start=start, taken=tuple(map(_count, _list(taken))))


class _Until(ByArrival):
    """A schedule in which no trainer takes more than a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(0)
        self._steps = steps

    def choose(self, world: World) -> Choice | None:
        choices = [
            (action, rank)
            for action, rank in world.compute_choices()
            if action != "take" or len(world.nodes[rank].taken) < self._steps
        ]
        return self.random.choice(choices) if choices else None


def make_configs(question: Mapping[str, Json]) -> list[Config]:
    settings: Any = question["settings"]
    ranks, terms = len(_list(question["lengths"])), decode_epoch(question).terms
    config = Config(
        rank=0,
        world_size=ranks,
        budget_tokens=terms["budget"],
        layout=Layout(terms.get("layout", Layout.PACKED)),
        cost=choose_cost(terms.get("cost") or "tokens"),
        **{
            **settings,
            "rule": RULES[settings["rule"]],
            "order": StepOrder(settings["order"]),
            "mode": Mode(settings.get("mode", Mode.JOIN)),
        },
    )
    return [replace(config, rank=rank) for rank in range(ranks)]


def make_shards(question: Mapping[str, Json]) -> list[tuple[Sample, ...]]:
    problem = decode_epoch(question)
    columns = zip(problem.lengths, problem.supervised or problem.lengths, strict=True)
    return [
        tuple(Sample(place, place, *sizes) for place, sizes in enumerate(zip(*own, strict=True))) for own in columns
    ]


def decode_epoch(question: Mapping[str, Json]) -> Problem:
    """Returns the epoch, without its failures and interruptions."""
    return decode({name: value for name, value in question.items() if name not in ("fails", "resume_after")}, "epoch")


def run(question: Mapping[str, Json]) -> dict[str, Json]:
    """Returns what each rank trains on, with the round and the global counts of each step, and how the ranks end."""
    configs, shards = make_configs(question), make_shards(question)
    after: Any = question.get("resume_after", 0)
    fails: Any = question.get("fails")
    checkpoints = None
    if after:
        first = World(configs, shards, schedule=_Until(after)).run()
        checkpoints = first.save()
    faults = {fails["rank"]: (fails["in"], fails["round"])} if fails else None
    world = World(configs, shards, schedule=_Until(10**9), checkpoints=checkpoints, fails=faults).run()
    taken = [[step for step in node.taken if step.number >= after] for node in world.nodes]
    (end,) = {None if outcome is None else (str(outcome.kind), outcome.rank) for outcome in world.outcomes}
    return {
        "steps": [[step.round, *step.global_counts.to_row()] for step in taken[0]],
        "groups": [[_list_positions(step.group) for step in own] for own in taken],
        "end": [*end] if end else None,
    }


def make_sample(position: int, length: int, costs: Sequence[int]) -> Sample:
    """Returns a sample in which nothing else matters."""
    return Sample(id=position, position=position, length=length, supervised=length, costs=tuple(costs))


def _read_sample(pair: Json) -> Sample:
    position, length = map(_count, _list(pair))
    return make_sample(position, length, [])


def read_offer(record: Mapping[str, Json]) -> Offer:
    """Returns the offer in a record, where null stands for none."""
    return Offer(**{name: NONE if value is None else _count(value) for name, value in record.items()})


def write_offer(offer: Offer) -> dict[str, Json]:
    return {name: None if name in _LEAST and value == NONE else value for name, value in asdict(offer).items()}


def _list(value: Json) -> Sequence[Json]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"expected a list, got {value!r}")
    return value


def _count(value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"expected an integer, got {value!r}")
    return value


def _list_positions(group: Group) -> list[Json]:
    return [sample.position for sample in group]
