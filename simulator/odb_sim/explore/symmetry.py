"""Ranks that are alike: worlds that differ only in which of them is which are one. The argument is in the spec
(properties.md, "Why fewer worlds are enough").

That the core treats ranks alike is not taken on trust. Each time it runs for one rank, or an exchange answers, the same is
done with the ranks in each other order, and the results are compared; where they differ `Asymmetry` is raised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import permutations, product
from operator import itemgetter
from typing import Final, TypeVar, cast

from odb_ref.core.effects import Outcome
from odb_ref.core.events import PeerLost, Report, Reported
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.types import Sample
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core, answer_posts
from odb_sim.explore.rank import Act, ExploredRank
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Shared, Space, World

Order = tuple[int, ...]
"""Where each rank goes: rank i becomes rank ``order[i]``."""

_NAMED: Final = re.compile(r"(?<=of rank )\d+")
"""A rank in the text of a cause."""

_Value = TypeVar("_Value")


class Asymmetry(Exception):
    """The core does not treat alike ranks alike."""


def find_alike(bounds: Bounds) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of ranks that may change places, each of two or more: equal samples, configurations and queues.

    None where several ranks may be at fault in the same way, since an outcome then names the lowest of them, nor where rank 0
    has another configuration, with which all others are compared, nor where ranks draw in the order of their numbers, or an
    update has more places of one than of another.
    """
    if bounds.is_shared or bounds.update_samples is not None:
        return ()
    if bounds.failures + bounds.lost_loaders > 1 or bounds.stops > 1 or bounds.losses > 1 or bounds.odd_rank == 0:
        return ()
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in range(bounds.ranks):
        config = bounds.compute_config(rank)
        samples = tuple((item.length, item.supervised, item.costs) for item in bounds.compute_shard(rank))
        alike[config.shared_json, config.depth_steps, samples, bounds.get_accepted(rank)].append(rank)
    return tuple(tuple(ranks) for ranks in alike.values() if len(ranks) > 1)


def list_orders(alike: Sequence[Sequence[int]], ranks: int) -> list[Order]:
    """Returns each way in which alike ranks can change places; the first leaves all where they are."""
    orders = []
    for places in product(*map(permutations, alike)):
        order = list(range(ranks))
        for group, places_of_group in zip(alike, places, strict=True):
            for rank, place in zip(group, places_of_group, strict=True):
                order[rank] = place
        orders.append(tuple(order))
    return orders


def rename(value: _Value, order: Order, shard: Sequence[Sample] = ()) -> _Value:
    """Returns what ``value`` becomes when ranks change places: each rank that it names, and its samples from ``shard``."""
    return cast(_Value, _rename(value, order, shard))


def _rename_text(text: str, order: Order) -> str:
    return _NAMED.sub(lambda found: str(order[int(found[0])]), text)


def _rename(value: object, order: Order, shard: Sequence[Sample]) -> object:
    match value:
        case Sample():
            return shard[value.position]
        case Offer():
            failed, stopped = (rank if rank == NONE else order[rank] for rank in (value.failed_rank, value.stop_rank))
            return replace(value, failed_rank=failed, stop_rank=stopped)
        case Outcome() | PeerLost():
            rank = None if value.rank is None else order[value.rank]
            return replace(value, rank=rank, cause=_rename_text(value.cause, order))
        case Report():
            return replace(value, rank=order[value.rank], cause=_rename_text(value.cause, order))
        case Reported():
            reports = (rename(report, order) for report in value.reports)
            return Reported(tuple(sorted(reports, key=lambda report: report.rank)))
        case Enum():
            return value
        case str():
            return _rename_text(value, order)
        case tuple():
            return tuple([_rename(item, order, shard) for item in value])
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{item.name: _rename(getattr(value, item.name), order, shard) for item in fields(value)}
            )
        case _:
            return value


class AlikeSpace(Space):
    """A space in which one world stands for all that differ in the places of alike ranks: the one with its ranks in order."""

    def __init__(self, bounds: Bounds, core: Core | None = None, *, is_forgetful: bool = False) -> None:
        self.alike = find_alike(bounds)
        self.exchanged = 0
        """How often a world was met with its ranks out of order."""
        self._shards = [bounds.compute_shard(rank) for rank in range(bounds.ranks)]
        self._orders = list_orders(self.alike, bounds.ranks)
        self._looks: dict[ExploredRank, int] = {}
        self._look_of: list[int] = []
        self._renamed: dict[tuple[int, Order], int] = {}
        self._renamed_shared: dict[tuple[int, Order], int] = {}
        self._seen_by_all: dict[int, Order] = {}
        for group in self.alike:
            for own in group:
                # To itself a rank is the first of its kind; of the others it can only say that they are others.
                others = {rank: kind[0] for kind in self.alike for rank in kind} | dict.fromkeys(group, group[1])
                self._seen_by_all[own] = tuple(
                    (others | {own: group[0]}).get(rank, rank) for rank in range(bounds.ranks)
                )
        super().__init__(bounds, core, is_forgetful=is_forgetful)

    def apply(self, world: World, code: int) -> World:
        """Returns the world that stands for the one after a possible action.

        Raises: Breach as `Space.apply`, Asymmetry when ranks prove not to be alike.
        """
        after = super().apply(world, code)
        order = self._find_order(after)
        if order is None:
            return after
        self.exchanged += 1
        return self._reorder(after, order)

    def place(self, schedule: Sequence[Action]) -> tuple[Action, ...]:
        """Returns the schedule with each action at the rank that it happens to when no rank changes its place."""
        world = self.begin()
        ranks = list(range(self._count))
        placed = []
        for number, action in enumerate(schedule, 1):
            placed.append(Action(ranks[action.rank], action.act))
            if number < len(schedule):
                world = Space.apply(self, world, action.code)
                order = self._find_order(world)
                if order is not None:
                    world = self._reorder(world, order)
                    ranks = [rank for _, rank in sorted(zip(order, ranks, strict=True))]
        return tuple(placed)

    def _find_order(self, world: World) -> Order | None:
        """Returns the order that puts alike ranks in a row by what they look like; None when they are."""
        looks = self._look_of
        places: dict[int, int] | None = None
        for group in self.alike:
            keys = [looks[world[rank + 1]] for rank in group]
            if all(map(int.__le__, keys, keys[1:])):
                continue
            places = places or {}
            row = sorted(zip(keys, group, strict=True))
            places |= {rank: place for (_, rank), place in zip(row, group, strict=True)}
        return None if places is None else tuple(places.get(rank, rank) for rank in range(self._count))

    def _reorder(self, world: World, order: Order) -> World:
        after = list(world)
        after[0] = self._rename_shared(world[0], order)
        for rank, place in enumerate(order):
            after[place + 1] = self._rename_rank(rank, world[rank + 1], order)
        return tuple(after)

    def _rename_rank(self, i: int, number: int, order: Order) -> int:
        key = number, order
        found = self._renamed.get(key)
        if found is None:
            renamed = rename(self._ranks[number], order, self._shards[order[i]])
            found = self._renamed[key] = self._number_rank(order[i], renamed)
        return found

    def _rename_shared(self, number: int, order: Order) -> int:
        key = number, order
        found = self._renamed_shared.get(key)
        if found is None:
            shared = self._shared[number]
            owed, left, gone = (
                sum(1 << order[rank] for rank in range(self._count) if ranks >> rank & 1)
                for ranks in (shared.owed, shared.left, shared.gone)
            )
            answer = self._rename_answer(shared.answer, order)
            found = self._number_shared(shared._replace(owed=owed, left=left, gone=gone, answer=answer))
            self._renamed_shared[key] = found
        return found

    def _rename_answer(self, number: int, order: Order) -> int:
        answer = self._answers[number]
        return number if answer is None else self._number_answer(rename(answer, order))

    def _number_rank(self, i: int, rank: ExploredRank) -> int:
        number = super()._number_rank(i, rank)
        if number == len(self._look_of):
            look = 0
            if i in self._seen_by_all:
                order = self._seen_by_all[i]
                seen = rename(self._ranks[number], order, self._shards[order[i]])
                look = self._looks.setdefault(seen, len(self._looks))
            self._look_of.append(look)
        return number

    # The premise ----------------------------------------------------------------------------------------------------

    def _advance(self, i: int, number: int, act: int, shared: Shared) -> int:
        after = super()._advance(i, number, act, shared)
        lost = self._find_gone(shared, i) if act == Act.LOSE else None
        tried = {(number, shared.answer, lost)}
        for order in self._orders[1:]:
            answer = self._rename_answer(shared.answer, order) if act == Act.ANSWER else shared.answer
            case = (self._rename_rank(i, number, order), answer, None if lost is None else order[lost])
            if case in tried:
                continue
            tried.add(case)
            if self._act_elsewhere(order[i], act, case) != self._rename_rank(i, after, order):
                what = Act(act).name.lower().replace("_", " ")
                raise Asymmetry(f"rank {order[i]} does not do what rank {i} does in its place: {what}")
        return after

    def _act_elsewhere(self, j: int, act: int, case: tuple[int, int, int | None]) -> int | None:
        """Returns the rank after ``act``, as `_advance` does, of rank ``j``; None where that does not go well."""
        number, answer, lost = case
        try:
            after = self._drivers[j].act(self._ranks[number], Act(act), self._answers[answer], lost)
            return self._number_rank(j, after)
        except Breach:
            return None

    def _answer(self, posts: tuple[int, ...]) -> int:
        if posts in self._answer_numbers:
            return self._answer_numbers[posts]
        number = super()._answer(posts)
        for order in self._orders[1:]:
            row = sorted(zip(order, (self._post_list[post] for post in posts), strict=True), key=itemgetter(0))
            try:
                answer = answer_posts(self._core, tuple(rename(post, order) for _, post in row if post is not None))
            except Breach:
                answer = None
            if answer != rename(self._answers[number], order):
                raise Asymmetry("the exchange answers otherwise when ranks change places")
        return number
