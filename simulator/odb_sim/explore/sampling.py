"""Random worlds, too large to explore, each under one random schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import RULES, TargetRule
from odb_ref.core.types import Mode
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import ACTS, Act
from odb_sim.explore.search import Counterexample, explore, make_space
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, decode
from odb_sim.inputs.scattered import ScatteredRule

ALL_RULES: Final[tuple[TargetRule, ...]] = (*RULES.values(), ScatteredRule())
"""What is proved holds with every rule within its bounds, so worlds run with one that has nothing else in its favour, too."""
FAULTS: Final = frozenset({Act.STOP, Act.FAIL_READ, Act.FAIL_COLLATE, Act.DIE, Act.ABANDON, Act.LOSE_LOADER})


@dataclass(frozen=True, slots=True)
class Sampled:
    """One world under one schedule, with the violation if there was one."""

    bounds: Bounds
    transitions: int
    rounds: int
    """The round in which it ended, or 0 after a violation."""
    counterexample: Counterexample | None


def make_random_bounds(draw: random.Random) -> Bounds:
    """Returns a world of up to 24 ranks, usually few. Nearly half of all worlds have no faults, the others up to 3 of a kind.

    Some ranks hold many windows of samples, so that there are many rounds and carried samples become due. Some budgets are far
    beyond 65,536 tokens. Three in ten worlds share one order. Three in five of all have updates (R16), some with bad samples.
    """
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    ranks = draw.choice((1, 2, draw.randint(2, 4), draw.randint(3, 8), draw.randint(2, 4), draw.randint(9, 24)))
    most = draw.choice((5, 30, 30, 80)) if ranks < 9 else 12
    budget = draw.choice((draw.randint(1, 24), draw.randint(1, 128), draw.randint(65_000, 400_000)))
    longest = max(1, budget * draw.choice((1, 2, 5)) // draw.choice((1, 2, 4)))
    # Ranks with comparatively long samples form many groups, and carry those for which the others do not wait.
    shortest = [1 if draw.random() < 0.6 else (longest + 1) // 2 for _ in range(ranks)]
    faults = 0 if draw.random() < 0.45 else 1
    # In quota mode a rank without samples ends the epoch at once.
    few = (0, 1) if mode is Mode.JOIN else (draw.choice((0, most)), most)
    samples = sum(sizes := [draw.choice((*few, most // 2, most, most, most)) for _ in range(ranks)])
    accepted, budget_schedule = _make_random_budgets(draw, ranks, budget)
    is_shared = draw.random() < 0.3
    update = draw.choice((None, None, ranks, draw.randint(ranks, 4 * ranks), draw.randint(ranks, ranks + samples)))
    if update is not None and is_shared:
        mode = Mode.JOIN
    return Bounds(
        lengths=tuple(
            tuple(draw.randint(low, longest) for _ in range(size)) for low, size in zip(shortest, sizes, strict=True)
        ),
        budget_tokens=budget,
        limits=tuple(draw.randint(1, 6) for _ in range(draw.choice((0, 0, 1, 2)))),
        window_samples=draw.choice((draw.randint(1, 4), draw.randint(2, 6), draw.randint(1, 12))),
        depth_steps=draw.randint(1, 4),
        mode=mode,
        quota_samples=draw.choice((None, draw.randint(1, samples + 2))) if mode is Mode.QUOTA and not update else None,
        max_age_rounds=draw.choice((1, 1, 2, draw.randint(1, 5))),
        ramp_rounds=draw.randint(0, 3),
        rule=draw.choice(ALL_RULES),
        failures=faults * draw.choice((0, 0, 1, 3)),
        stops=faults * draw.choice((0, 0, 1, 3)),
        losses=faults * draw.choice((0, 0, 1, 2)),
        is_single_reads=draw.random() < 0.3,
        is_eager_end=draw.random() < 0.5,
        is_urged_freely=draw.random() < 0.3,
        is_left_inside=draw.random() < 0.3,
        is_uneven_depth=draw.random() < 0.3,
        odd_rank=draw.randrange(ranks) if ranks > 1 and draw.random() < 0.03 else None,
        lost_loaders=faults * draw.choice((0, 0, 1, 2)),
        layout=draw.choice((Layout.PADDED, Layout.PADDED, *Layout)),
        window_bytes=0 if is_shared else draw.choice((0, 0, 0, draw.randint(1, 20))),
        accepted=accepted,
        budget_schedule=budget_schedule,
        is_shared=is_shared,
        update_samples=update,
        bad=tuple(number for number in range(samples) if draw.random() < 0.1) if update and draw.random() < 0.3 else (),
    )


def _make_random_budgets(
    draw: random.Random, ranks: int, budget: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """Returns, for some worlds, the budgets that ranks will accept, and for some of these a schedule."""
    if draw.random() < 0.75:
        return (), ()
    accepted = [tuple(draw.randint(1, budget + 1) for _ in range(draw.choice((0, 1, 1, 3)))) for _ in range(ranks)]
    steps = sorted({0, *(draw.randint(1, 12) for _ in range(2))})
    changes = tuple((step, draw.randint(1, budget + 1)) for step in steps)
    return tuple(accepted), draw.choice(((), changes))


def run_random_schedule(bounds: Bounds, draw: random.Random) -> Sampled:
    """Drives the world to its end by random actions. Ranks have very different speeds; faults come often or very rarely."""
    speeds = [draw.choice((1.0, 0.1, 0.01)) for _ in range(bounds.ranks)]
    fault_weight = draw.choice((1.0, 0.02, 0.001, 0.0001, 0.0001))
    schedule: list[Action] = []
    rounds = 0
    try:
        space, world = make_space(bounds)
        while codes := space.enabled(world):
            if space.is_over(world, codes):
                space.check_over(world)
            weights = [speeds[code // ACTS] * (fault_weight if code % ACTS in FAULTS else 1.0) for code in codes]
            code = draw.choices(codes, weights)[0]
            schedule.append(decode(code))
            world = space.apply(world, code)
            space.check(world)
        space.check_over(world)
        rounds = max(rank.state.round for rank in space.get_ranks(world))
    except Breach as violation:
        found = Counterexample(property=violation.property, detail=violation.detail, schedule=tuple(schedule))
        return Sampled(bounds, len(schedule), rounds, found)
    return Sampled(bounds, len(schedule), rounds, None)


_STATES: Final = 3_000
_TRIES: Final = 150
SHRINK_S: Final = 20.0
"""The most seconds to spend on shrinking a counterexample."""


def shrink(sampled: Sampled, limit_s: float = SHRINK_S) -> Sampled:
    """Returns a smaller world that violates the same property, with its shortest schedule, or the world unchanged.

    It takes away ranks, samples, faults and room, one at a time, as long as a short search still finds a violation and there
    is time.
    """
    best = sampled
    tries = 0
    deadline = time.monotonic() + limit_s
    while best.counterexample is not None and tries < _TRIES and time.monotonic() < deadline:
        for bounds in _iterate_smaller(best.bounds):
            if bounds == best.bounds:
                continue
            tries += 1
            if time.monotonic() >= deadline:
                break
            found = explore(bounds, max_states=_STATES).counterexample
            if found is not None and found.property == best.counterexample.property:
                best = Sampled(bounds, len(found.schedule), 0, found)
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
            accepted = bounds.accepted[:i] + bounds.accepted[i + 1 :]
            yield replace(bounds, lengths=lengths[:i] + lengths[i + 1 :], odd_rank=None, accepted=accepted)
    yield replace(bounds, budget_schedule=())
    yield replace(bounds, accepted=())
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
    yield replace(bounds, layout=Layout.PADDED)
    yield replace(bounds, is_shared=False)
    yield replace(bounds, update_samples=None, bad=())
    yield replace(bounds, window_samples=max(1, bounds.window_samples - 1))
    yield replace(bounds, depth_steps=1, ramp_rounds=0)
    yield replace(bounds, is_single_reads=False, is_eager_end=False, is_urged_freely=False)
    yield replace(bounds, is_left_inside=False, is_uneven_depth=False, odd_rank=None)
