"""Random worlds, larger than can be explored, under one random schedule each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from odb_ref.core.rules import TargetRule
from odb_ref.core.types import Mode
from simulator.explore.bounds import Bounds
from simulator.explore.rank import ACTS, Act, Violation
from simulator.explore.search import Counterexample, explore, make_space
from simulator.explore.world import Action, decode


@dataclass(frozen=True, slots=True)
class Sampled:
    """One world under one schedule: what it was, and what went wrong if anything did."""

    bounds: Bounds
    transitions: int
    counterexample: Counterexample | None


def make_random_bounds(draw: random.Random, choose_rule: Callable[[random.Random], TargetRule]) -> Bounds:
    """A world of up to 8 ranks with up to 30 samples each, and up to 3 faults of each kind."""
    mode = draw.choice(list(Mode))
    ranks = draw.randint(1, 8)
    return Bounds(
        lengths=tuple(tuple(draw.randint(1, 60) for _ in range(draw.choice((0, 1, 5, 30)))) for _ in range(ranks)),
        budget_tokens=draw.randint(1, 128),
        limits=tuple(draw.randint(1, 6) for _ in range(draw.choice((0, 0, 1, 2)))),
        window_samples=draw.randint(1, 12),
        depth_steps=draw.randint(1, 4),
        mode=mode,
        quota_samples=draw.choice((None, draw.randint(1, 120))) if mode is Mode.QUOTA else None,
        max_age_rounds=draw.randint(1, 5),
        ramp_rounds=draw.randint(0, 3),
        rule=choose_rule(draw),
        failures=draw.choice((0, 0, 1, 3)),
        stops=draw.choice((0, 0, 1, 3)),
        losses=draw.choice((0, 0, 1, 2)),
        is_single_reads=draw.random() < 0.5,
        is_eager_end=draw.random() < 0.5,
        is_urged_freely=draw.random() < 0.3,
        is_left_inside=draw.random() < 0.3,
        is_uneven_depth=draw.random() < 0.3,
        odd_rank=draw.randrange(ranks) if ranks > 1 and draw.random() < 0.05 else None,
        lost_loaders=draw.choice((0, 0, 1, 2)),
    )


def run_random_schedule(bounds: Bounds, draw: random.Random) -> Sampled:
    """The world driven to its end by random actions: ranks of very different speed, faults often or rarely."""
    speeds = [draw.choice((1.0, 0.1, 0.01)) for _ in range(bounds.ranks)]
    fault_weight = draw.choice((1.0, 0.02))
    schedule: list[Action] = []
    try:
        space, world = make_space(bounds)
        while codes := space.enabled(world):
            if space.is_over(world, codes):
                space.check_over(world)
            weights = [speeds[code // ACTS] * (fault_weight if code % ACTS >= Act.STOP else 1.0) for code in codes]
            code = draw.choices(codes, weights)[0]
            schedule.append(decode(code))
            world = space.apply(world, code)
            space.check(world)
        space.check_over(world)
    except Violation as violation:
        found = Counterexample(property=violation.property, detail=violation.detail, schedule=tuple(schedule))
        return Sampled(bounds, len(schedule), found)
    return Sampled(bounds, len(schedule), None)


_STATES: Final = 3_000
_TRIES: Final = 150


def shrink(sampled: Sampled) -> Sampled:
    """A smaller world in which the same property does not hold, with its shortest schedule; or the world as it was.

    Takes away ranks, samples, faults and room, one thing at a time, as long as a short search still finds a violation.
    """
    best = sampled
    tries = 0
    while best.counterexample is not None and tries < _TRIES:
        for bounds in _iterate_smaller(best.bounds):
            if bounds == best.bounds:
                continue
            tries += 1
            found = explore(bounds, max_states=_STATES).counterexample
            if found is not None and found.property == best.counterexample.property:
                best = Sampled(bounds, len(found.schedule), found)
                break
            if tries >= _TRIES:
                break
        else:
            break
    return best


def _iterate_smaller(bounds: Bounds) -> Iterator[Bounds]:
    lengths = bounds.lengths
    for i in range(len(lengths)):
        if len(lengths) > 1:
            yield replace(bounds, lengths=lengths[:i] + lengths[i + 1 :], odd_rank=None)
    if bounds.lost_loaders:
        yield replace(bounds, lost_loaders=bounds.lost_loaders - 1)
    if bounds.failures or bounds.stops or bounds.losses:
        yield replace(bounds, failures=0, stops=0, losses=0)
        yield replace(
            bounds, failures=min(1, bounds.failures), stops=min(1, bounds.stops), losses=min(1, bounds.losses)
        )
    for i, shard in enumerate(lengths):
        for size in sorted({0, len(shard) // 2, len(shard) - 1} - {len(shard), -1}):
            yield replace(bounds, lengths=(*lengths[:i], shard[:size], *lengths[i + 1 :]))
    yield replace(bounds, limits=())
    yield replace(bounds, window_samples=max(1, bounds.window_samples - 1))
    yield replace(bounds, depth_steps=1, ramp_rounds=0)
    yield replace(bounds, is_single_reads=False, is_eager_end=False, is_urged_freely=False)
    yield replace(bounds, is_left_inside=False, is_uneven_depth=False, odd_rank=None)
