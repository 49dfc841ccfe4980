"""Suites of explorations to run routinely, each with a name that describes it."""

from __future__ import annotations

from typing import Final

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Mode
from odb_sim.explore.bounds import Bounds, compute_lengths
from odb_sim.inputs.scattered import ScatteredRule


def _mixed(*shards: int) -> tuple[tuple[int, ...], ...]:
    return compute_lengths(shards, (3, 1, 2))


def _single(*shards: int) -> tuple[tuple[int, ...], ...]:
    return compute_lengths(shards, (1,))


SMALL: Final[dict[str, Bounds]] = {
    "one rank": Bounds(lengths=_mixed(4), failures=1, stops=1, losses=1),
    "uneven": Bounds(lengths=_mixed(5, 2)),
    "a rule without sense": Bounds(
        lengths=_single(5, 3), budget_tokens=1, window_samples=3, stops=1, rule=ScatteredRule()
    ),
    "empty shard": Bounds(lengths=_mixed(3, 0), failures=1, stops=1),
    "depth 1, failures and stops": Bounds(lengths=_mixed(3, 1), failures=2, stops=2),
    "depth 2, failures and stops": Bounds(lengths=_mixed(4, 2), failures=2, stops=2, depth_steps=2),
    "killed processes": Bounds(lengths=_mixed(3, 2), failures=1, stops=1, losses=2),
    "steps wait for room": Bounds(
        lengths=_single(4, 3), budget_tokens=1, window_samples=4, failures=1, stops=1, losses=1
    ),
    "quota": Bounds(lengths=_mixed(4, 3), mode=Mode.QUOTA, quota_samples=5, failures=1, stops=1, losses=1),
    "quota without a number": Bounds(lengths=_mixed(4, 2), mode=Mode.QUOTA, failures=1, stops=1),
    "paper's rule": Bounds(lengths=_mixed(5, 2), rule=PaperRule(), failures=1, stops=1),
    "several resources": Bounds(
        lengths=_mixed(5, 3), budget_tokens=6, limits=(2, 2), window_samples=4, failures=1, stops=1
    ),
    "packed": Bounds(lengths=_mixed(6, 3), layout=Layout.PACKED, window_samples=4, failures=1, stops=1),
    "powers of two": Bounds(
        lengths=_mixed(6, 3), sizes=Sizes.POWERS, budget_tokens=7, window_samples=4, failures=1, stops=1
    ),
    "even sizes": Bounds(
        lengths=((1, 1, 1, 2, 1, 1), (1, 2, 1)), sizes=Sizes.EVEN, budget_tokens=7, window_samples=6, ramp_rounds=0
    ),
    "shuffled": Bounds(lengths=((5, 4, 3, 2) * 2, (5, 4, 3)), budget_tokens=5, window_samples=4),
    "sampler order": Bounds(
        lengths=((1, 3, 1, 2, 2, 1), (2, 1, 1)), order=StepOrder.SAMPLER, window_samples=4, failures=1, stops=1
    ),
    "packed, sampler order": Bounds(
        lengths=((1, 3, 1, 2, 2, 1), (2, 1, 1)),
        layout=Layout.PACKED,
        order=StepOrder.SAMPLER,
        window_samples=4,
        max_age_rounds=1,
        rule=PaperRule(),
    ),
    "packed, several resources": Bounds(
        lengths=_mixed(5, 3), layout=Layout.PACKED, budget_tokens=6, limits=(2, 2), window_samples=4, stops=1
    ),
    "packed, paper's rule": Bounds(
        lengths=((1, 1, 1, 1), (4, 4, 4, 4)), layout=Layout.PACKED, window_samples=4, rule=PaperRule(), stops=1
    ),
    "shared shards": Bounds(lengths=_mixed(5, 2), is_shared=True, max_age_rounds=1, failures=1, stops=1, losses=1),
    "shared shards, reads in parts": Bounds(
        lengths=_mixed(4, 1, 0), is_shared=True, is_single_reads=True, is_eager_end=True, stops=1
    ),
    "shared shards, quota": Bounds(
        lengths=_mixed(4, 3), is_shared=True, mode=Mode.QUOTA, quota_samples=5, failures=1, stops=1
    ),
    "shared shards, packed, lost loaders": Bounds(
        lengths=_mixed(4, 2), is_shared=True, layout=Layout.PACKED, stops=1, lost_loaders=1
    ),
    "updates": Bounds(lengths=_mixed(5, 4), update_samples=4, failures=1, stops=1),
    "updates of three ranks": Bounds(lengths=_mixed(2, 2, 1), update_samples=4, losses=1),
    "updates, uneven sources, bad samples": Bounds(
        lengths=_mixed(6, 2),
        update_samples=4,
        bad=(2, 3, 6),
        is_single_reads=True,
        is_eager_end=True,
        failures=1,
        stops=1,
    ),
    "an update of bad samples": Bounds(
        lengths=_mixed(6, 5), update_samples=4, bad=(2, 3, 8, 9), layout=Layout.PACKED, stops=1
    ),
    "updates, quota": Bounds(lengths=_mixed(5, 3), update_samples=4, mode=Mode.QUOTA, failures=1, stops=1),
    "updates, budgets lowered and raised": Bounds(
        lengths=_mixed(5, 3), update_samples=6, accepted=((2,), (3,)), stops=1
    ),
    "updates dealt by load": Bounds(
        lengths=_mixed(5, 4), is_shared=True, update_samples=6, failures=1, stops=1, losses=1
    ),
    "updates dealt by load, bad samples": Bounds(
        lengths=_mixed(6, 4), is_shared=True, update_samples=6, bad=(1, 4, 6, 7, 8, 9), is_single_reads=True, stops=1
    ),
    "updates dealt by load, small queues": Bounds(
        lengths=_single(8, 4), budget_tokens=1, is_shared=True, update_samples=8, stops=1
    ),
    "ramp": Bounds(lengths=_mixed(5, 4), window_samples=4, ramp_rounds=2, failures=1, stops=1),
    "reads in parts": Bounds(lengths=_mixed(3, 2), is_single_reads=True, is_eager_end=True, failures=1, stops=1),
    "windows bounded in bytes": Bounds(lengths=_mixed(5, 3), window_samples=4, window_bytes=4, failures=1, stops=1),
    "windows bounded in bytes, reads in parts": Bounds(
        lengths=_mixed(4, 3), window_samples=3, window_bytes=2, is_single_reads=True, losses=1
    ),
    "leaving inside a step": Bounds(lengths=_single(4, 3), budget_tokens=1, failures=1, stops=2, is_left_inside=True),
    "queues of different depth": Bounds(
        lengths=_single(6, 5), budget_tokens=1, window_samples=3, stops=1, is_uneven_depth=True
    ),
    "budgets lowered and raised": Bounds(
        lengths=_mixed(6, 5), window_samples=3, accepted=((2, 4), (3,)), max_age_rounds=1
    ),
    "a budget lowered, failures and stops": Bounds(lengths=_mixed(4, 2), accepted=((), (2,)), failures=1, stops=1),
    "a schedule of budgets": Bounds(
        lengths=_mixed(5, 3),
        budget_tokens=6,
        limits=(3,),
        layout=Layout.PACKED,
        window_samples=3,
        budget_schedule=((0, 3), (2, 6), (3, 2)),
        accepted=((4,),),
        stops=1,
    ),
    "budgets that change, lost loaders": Bounds(
        lengths=_mixed(3, 2), budget_schedule=((0, 2), (2, 4)), accepted=((3,),), lost_loaders=1
    ),
    "another configuration": Bounds(lengths=_mixed(3, 2), failures=1, stops=1, losses=1, odd_rank=1),
    "urges for nothing": Bounds(
        lengths=_single(4, 3), budget_tokens=1, window_samples=2, stops=1, is_urged_freely=True
    ),
    "read by the consumer's thread": Bounds(
        lengths=_single(4, 3),
        budget_tokens=1,
        failures=1,
        stops=2,
        is_left_inside=True,
        is_inline=True,
        is_single_reads=True,
    ),
    "read by the consumer's thread, killed processes": Bounds(
        lengths=_mixed(4, 2), failures=1, stops=1, losses=1, depth_steps=2, is_inline=True
    ),
    "three ranks": Bounds(lengths=_mixed(3, 2, 0), failures=1, stops=1),
    "two ranks alike": Bounds(lengths=((1, 1),) * 2, budget_tokens=1, failures=1, stops=1, losses=1),
    "three ranks alike": Bounds(lengths=((1,),) * 3, failures=1, stops=1),
    "lost loaders": Bounds(lengths=_mixed(3, 1), failures=1, stops=1, lost_loaders=1),
    "lost loaders and killed processes": Bounds(
        lengths=_single(4, 3), budget_tokens=1, window_samples=4, stops=1, losses=1, lost_loaders=1
    ),
    "lost loaders, quota": Bounds(lengths=_mixed(4, 3), mode=Mode.QUOTA, quota_samples=5, failures=1, lost_loaders=1),
    "three ranks, a lost loader": Bounds(lengths=_mixed(3, 2, 1), lost_loaders=1),
}

FULL: Final[dict[str, Bounds]] = {
    **SMALL,
    "two ranks, all that can go wrong": Bounds(
        lengths=_mixed(5, 3), window_samples=3, depth_steps=2, is_single_reads=True, failures=2, stops=2, losses=1
    ),
    "three ranks, a million states": Bounds(lengths=_mixed(5, 3, 1), failures=2, stops=2, depth_steps=2),
    "three ranks, killed processes": Bounds(lengths=_mixed(2, 1, 2), failures=1, stops=1, losses=2),
    "three ranks, a lost loader and a stop": Bounds(lengths=_mixed(3, 2, 1), stops=1, lost_loaders=1),
    "three ranks, a lost loader, a failure and a stop": Bounds(
        lengths=_mixed(2, 1, 1), failures=1, stops=1, lost_loaders=1
    ),
    "three ranks, two lost loaders": Bounds(lengths=_mixed(3, 2, 1), lost_loaders=2),
    "three ranks, read by the consumer's thread": Bounds(
        lengths=_mixed(3, 2, 1), failures=1, stops=2, is_left_inside=True, is_inline=True
    ),
    "three ranks alike, all that can go wrong": Bounds(lengths=((3, 1),) * 3, failures=1, stops=1, losses=1),
    "four ranks": Bounds(lengths=_mixed(2, 1, 1, 0), failures=1, stops=1),
}

SUITES: Final = {"small": SMALL, "full": FULL}
