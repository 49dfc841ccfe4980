"""The pure rules of the online protocol, as they are asked: a dictionary of JSON for each kind. Ours is the first to answer.

=============  ========================================================================  =======================================
kind           asked                                                                     answered
=============  ========================================================================  =======================================
``groups``     ``lengths`` of a window, ``costs``, ``budget``, ``limits``, ``layout``    positions of each group (R2.1, R2.5)
``align``      ``groups`` of ``[position, length]``, ``target``, ``due``, ``layout``,    ``emitted`` positions of each step, and
               ``cost``, ``order``                                                       what is ``carried`` (R4.1, R4.2)
``target``     an ``agreement``, a ``rule``                                              the number of steps (R3.3)
``agreement``  ``offers``, with null for nobody                                          their combination (R3.2)
``want``       ``ranks``, ``total`` and ``drawn`` places of the common order, a rank's   how many it wants (R14.2)
               ``window``, ``layout``, lengths it ``held`` and has ``carried``
``shares``     ``wants`` of the ranks, and how many places are ``left``                  how many each draws (R14.3)
=============  ========================================================================  =======================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Final

from odb_ref.conformance.vectors import Json
from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.cost import choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.batching.shards import compute_shares, compute_want
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import NONE, Offer, combine
from odb_ref.core.types import Group, Sample

_LEAST: Final = frozenset(("failed_rank", "stop_step", "stop_rank", "groups_min", "budget_min"))
"""Fields of an offer that may say nobody."""


def answer(question: Mapping[str, Json]) -> Json:
    """Returns what the core makes of a question.

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
        case _:
            raise UsageError(f"no such question: {question.get('kind')}")


def make_sample(position: int, length: int, costs: Sequence[int]) -> Sample:
    """Returns a sample of which nothing else matters."""
    return Sample(id=position, position=position, length=length, supervised=length, costs=tuple(costs))


def _read_sample(pair: Json) -> Sample:
    position, length = map(_count, _list(pair))
    return make_sample(position, length, [])


def read_offer(record: Mapping[str, Json]) -> Offer:
    """Returns the offer of a record, in which null is nobody."""
    return Offer(**{name: NONE if value is None else _count(value) for name, value in record.items()})


def write_offer(offer: Offer) -> dict[str, Json]:
    """Returns an offer as JSON."""
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
