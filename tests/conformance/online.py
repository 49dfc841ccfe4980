"""The online protocol as asked of our core. docs/howto/conformance.md describes each kind of question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from itertools import chain
from typing import Any, Final

from odb_ref.conformance.vectors import Problem, decode
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

Question = Mapping[str, Any]

_LEAST: Final = frozenset(("failed_rank", "stop_step", "stop_rank", "groups_min", "budget_min"))
"""Fields of an offer that may name no rank or value."""


def answer(question: Question) -> Any:
    """Returns the core's answer to a question.

    Raises: UsageError when there is no such kind.
    """
    match question["kind"]:
        case "groups":
            lengths = question["lengths"]
            costs = question.get("costs") or [[]] * len(lengths)
            window = tuple(make_sample(place, *item) for place, item in enumerate(zip(lengths, costs, strict=True)))
            limits = tuple(question["limits"])
            return [
                *map(_list_positions, Layout(question["layout"]).compute_groups(window, question["budget"], limits))
            ]
        case "align":
            held = tuple(tuple(make_sample(*pair, []) for pair in group) for group in question["groups"])
            layout, order = Layout(question["layout"]), StepOrder(question["order"])
            cost = choose_cost(question["cost"])
            emitted, carried = align(held, question["target"], question["due"], layout, order, cost=cost)
            return {"emitted": [*map(_list_positions, emitted)], "carried": _list_positions(carried)}
        case "target":
            return RULES[question["rule"]].compute_target(read_offer(question["agreement"]))
        case "agreement":
            return write_offer(reduce(combine, map(read_offer, question["offers"])))
        case "want":
            left = -(-(question["total"] - question["drawn"]) // question["ranks"])
            return compute_want(
                Layout(question["layout"]).compute_shared_window(question["window"], left),
                samples=len(question["held"]),
                tokens=sum(question["held"]),
                carried_tokens=sum(question["carried"]),
            )
        case "shares":
            return [*compute_shares(question["wants"], question["left"])]
        case "weights":
            return compute_scales(question["reduction"], [[*map(_read_supervised, own)] for own in question["ranks"]])
        case "rest":
            return compute_rest(question["samples"], [*map(read_checkpoint, question["ranks"])])
        case "run":
            return run(question)
        case kind:
            raise UsageError(f"no such question: {kind}")


def compute_scales(reduction: str, ranks: Sequence[Sequence[StepCounts]]) -> list[list[float]]:
    """Returns the factor for the loss of each micro-step of each rank, to 9 digits."""
    weighting = Weighting(reduction=LossReduction(reduction))
    window = sum(chain.from_iterable(ranks), ZERO_COUNTS)
    return [[round(weighting.compute_scale(own, window, len(ranks)), 9) for own in steps] for steps in ranks]


def _read_supervised(value: int | None) -> StepCounts:
    return ZERO_COUNTS if value is None else StepCounts(1, value + 1, value)


def compute_rest(samples: int, checkpoints: Sequence[Checkpoint]) -> list[int]:
    """Returns the places of an order of ``samples`` samples that no rank has trained on."""
    from odb_ref.torch.plan.state import Generation, Part  # imports torch, which few questions need

    parts = tuple(Part(checkpoint) for checkpoint in checkpoints)
    return [*Generation(parts).compute_rest(range(samples))]


def read_checkpoint(record: Question) -> Checkpoint:
    """Returns where a rank stands in its epoch."""
    start = RoundStart(read_samples=record["read"], carried=tuple(record["carried"]))
    return Checkpoint(start=start, taken=tuple(record["taken"]))


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


def make_configs(question: Question) -> list[Config]:
    settings, ranks, terms = question["settings"], len(question["lengths"]), decode_epoch(question).terms
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


def make_shards(question: Question) -> list[tuple[Sample, ...]]:
    problem = decode_epoch(question)
    columns = zip(problem.lengths, problem.supervised or problem.lengths, strict=True)
    return [
        tuple(Sample(place, place, *sizes) for place, sizes in enumerate(zip(*own, strict=True))) for own in columns
    ]


def decode_epoch(question: Question) -> Problem:
    """Returns the epoch, without its failures and interruptions."""
    return decode({name: value for name, value in question.items() if name not in ("fails", "resume_after")}, "epoch")


def run(question: Question) -> dict[str, Any]:
    """Returns what each rank trains on, with the round and the global counts of each step, and how the ranks end."""
    configs, shards = make_configs(question), make_shards(question)
    after, fails = question.get("resume_after", 0), question.get("fails")
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


def read_offer(record: Question) -> Offer:
    """Returns the offer in a record, where null stands for none."""
    return Offer(**{name: NONE if value is None else value for name, value in record.items()})


def write_offer(offer: Offer) -> dict[str, Any]:
    return {name: None if name in _LEAST and value == NONE else value for name, value in asdict(offer).items()}


def _list_positions(group: Group) -> list[int]:
    return [sample.position for sample in group]
