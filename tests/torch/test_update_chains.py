"""Epochs that are saved and resumed repeatedly, by other ranks: with random updates, under other budgets, inside an update.

Bad samples come in clusters, as in a damaged file. A chain is what its number expands to, and many run in one launch of ranks.
Spec: R10.3, R11.3, R16.5, R16.6.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch.distributed as dist

from odb_ref.torch import ODBDataLoader
from tests.torch import data
from tests.torch.data import Numbers
from tests.torch.ranks import get_values, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::odb_ref.torch.BadSampleWarning")

MOST_RANKS = 3
CHAINS_EACH = 25
END = 10**6


@dataclass(frozen=True)
class Leg:
    """A part of an epoch: ``ranks`` ranks resume from the state before, and leave after some steps, or before the first."""

    ranks: int
    steps: int
    budget: int
    layout: str = "padded"


@dataclass(frozen=True)
class Chain:
    """One epoch, in legs."""

    samples: int
    size: int
    """The number of samples in an update, or 0 in free mode."""
    shard: str
    bad: frozenset[int]
    legs: tuple[Leg, ...]
    is_shuffled: bool = False
    workers: int = 0


def draw_chain(number: int) -> Chain:
    rng = random.Random(number)
    samples, size = rng.choice((11, 30, 47, 61)), rng.choice((3, 7, 12, 16, 25))
    bad: set[int] = set()
    for _ in range(rng.choice((0, 0, 1, 2))):
        first, length = rng.randrange(samples), rng.choice((1, 2, 3, size))
        bad |= set(range(first, min(first + length, samples)))
    legs = [draw_leg(rng) for _ in range(rng.choice((1, 2, 3, 4)))]
    for i in range(1, len(legs)):
        if rng.random() < 0.4:  # the same ranks with the same settings form the same round again
            legs[i] = Leg(legs[i - 1].ranks, legs[i].steps, legs[i - 1].budget, legs[i - 1].layout)
    legs[-1] = Leg(legs[-1].ranks, END, legs[-1].budget, legs[-1].layout)
    return Chain(
        samples=samples,
        size=size,
        shard=rng.choice(("auto", "shared")),
        bad=frozenset(bad),
        legs=tuple(legs),
        is_shuffled=rng.random() < 0.3,
        workers=int(rng.random() < 0.05),
    )


def draw_leg(rng: random.Random) -> Leg:
    return Leg(
        rng.randint(1, MOST_RANKS),
        rng.choice((0, 1, 2, 3, 5, 8)),
        rng.choice((30, 60, 90)),
        rng.choice(("padded", "packed")),
    )


Found = tuple[dict[int, list[int]], dict[int, float], list[tuple[int, int, bool, int]], Any]
"""Samples of each update, its weight, the steps, and the state, which is None at the end of the epoch. A step is its number,
its update, whether that ends with it, and the number of samples trained on that it reports.
"""


def make_loader(chain: Chain, leg: Leg, group: Any) -> ODBDataLoader[Any]:
    free = {"window": 9, "ramp_rounds": 0, "accumulation_steps": 3}
    return data.make_loader(
        Numbers(0, chain.samples, bad=chain.bad, fault="raise"),
        token_budget=leg.budget, layout=leg.layout, shard=chain.shard, shuffle=chain.is_shuffled,
        num_workers=chain.workers, on_bad_sample="quarantine", max_bad_samples=10**6, timeout_s=30,
        process_group=group, is_apart=group is not None,
        **({"update_samples": chain.size} if chain.size else free),
    )  # fmt: skip


def read_leg(loader: ODBDataLoader[Any], chain: Chain, leg: Leg, state: Any, group: Any) -> Found:
    updates: dict[int, list[int]] = defaultdict(list)
    weights: dict[int, float] = defaultdict(float)
    steps: list[tuple[int, int, bool, int]] = []
    if state is not None:
        loader.load_state_dict(state)
    taken = loader.steps()
    saved = None if leg.steps else loader.state_dict()
    for batch, info in taken if leg.steps else ():
        if not info.is_idle:
            updates[info.update] += batch["numbers"]
            # Together 1 in an update of all ranks, be it by labels or by tokens.
            weights[info.update] += info.loss_scale / info.world_size / 2 + info.local_tokens / info.update_tokens / 2
            if chain.size:
                whole = info.local_supervised * info.world_size
                assert info.loss_scale * info.update_supervised == pytest.approx(whole)
        steps.append((info.step, info.update, info.is_update_end, info.emitted_samples))
        if len(steps) == leg.steps:
            saved = loader.state_dict()
            break
    dist.barrier(group)  # a rank that leaves before another has had its step would end that one's epoch
    return dict(updates), dict(weights), steps, saved


def run_chains(rank: int, chains: list[Chain]) -> list[str]:
    """Returns what is wrong with each chain, on the first rank."""
    groups = {ranks: dist.new_group(range(ranks)) for ranks in range(1, MOST_RANKS + 1)}
    return [text for chain in chains if (text := run_chain(rank, chain, groups))]


def run_chain(rank: int, chain: Chain, groups: dict[int, Any]) -> str:
    """Returns what is wrong with a chain, the same on each rank."""
    state: Any = None
    taken: list[list[Found]] = []
    for leg in chain.legs:
        mine: Found | str | None = None
        # A rank that takes no part still makes its loader, because a process's loaders are counted by line.
        with make_loader(chain, leg, groups[leg.ranks] if rank < leg.ranks else None) as loader:
            if rank < leg.ranks:
                try:
                    mine = read_leg(loader, chain, leg, state, groups[leg.ranks])
                except Exception as error:
                    mine = f"{type(error).__name__}: {error}"
        of_all: list[Any] = [None] * MOST_RANKS
        dist.all_gather_object(of_all, mine)
        found = of_all[: leg.ranks]
        if wrong := [text for text in found if isinstance(text, str)]:
            is_right = (
                not taken
                and has_rank_of_bad(chain, leg.ranks)
                and all("samples of this rank are bad" in text for text in wrong)
            )
            return "" if is_right else f"{chain}\n  in {leg}: {wrong[0]}"
        taken.append(found)
        state = [part[3] for part in reversed(found)]  # files may be listed in any order
        if state[0] is None:
            break
    return judge(chain, taken)


def has_rank_of_bad(chain: Chain, ranks: int) -> bool:
    """Returns whether a rank reads several samples of its own, none of them good: R11.2."""
    shares = [list_order(chain)[rank::ranks] for rank in range(ranks)]
    return chain.shard == "auto" and any(len(share) > 1 and chain.bad >= set(share) for share in shares)


def judge(chain: Chain, taken: list[list[Found]]) -> str:
    updates: dict[int, Counter[int]] = defaultdict(Counter)
    weights: dict[int, float] = defaultdict(float)
    for found in taken:
        if len({str(part[2]) for part in found}) > 1:
            return f"{chain}\n  ranks differ in their steps: {[part[2] for part in found]}"
        for part in found:
            for update, numbers in part[0].items():
                updates[update].update(numbers)
            for update, weight in part[1].items():
                weights[update] += weight
    taken_on = [sum(len(numbers) for part in found for numbers in part[0].values()) for found in taken]
    told = [found[0][2][-1][3] if found[0][2] else None for found in taken]
    if any(known not in (None, so_far) for known, so_far in zip(told, accumulate(taken_on), strict=True)):
        return f"{chain}\n  has trained on {taken_on} samples, and says {told} by then"
    if not chain.size:
        samples = sum(updates.values(), Counter())
        is_complete = samples == Counter(set(range(chain.samples)) - chain.bad)
        return "" if is_complete else f"{chain}\n  has trained on {sorted(samples.elements())}"
    ends = [update for found in taken for _, update, is_end, _ in found[0][2] if is_end]
    if ends != sorted(set(ends)):
        return f"{chain}\n  updates end in the order {ends}"
    order = list_order(chain)
    for update in range(-(-chain.samples // chain.size)):
        places = order[update * chain.size : (update + 1) * chain.size]
        expected = Counter(number for number in places if number not in chain.bad)
        if updates[update] != expected:
            return f"{chain}\n  update {update} has {sorted(updates[update].elements())}, expected {sorted(expected)}"
        if expected and abs(weights[update] - 1) > 1e-9:
            return f"{chain}\n  update {update} weighs {weights[update]}"
        if (update in ends) != bool(expected):
            return f"{chain}\n  update {update} of {len(expected)} samples ends in {ends}"
    return ""


def list_order(chain: Chain) -> list[int]:
    if not chain.is_shuffled:
        return list(range(chain.samples))
    from odb_ref.torch.plan.order import compute_order

    return list(compute_order(chain.samples, 0, 0))


def check_chains(chains: list[Chain]) -> None:
    wrong, *_ = get_values(run_ranks(MOST_RANKS, run_chains, chains, timeout_s=300))
    assert not wrong, "\n".join(wrong)


NO_BAD: frozenset[int] = frozenset()


def test_chains_that_went_wrong() -> None:
    """Checks: UPDATE, WEIGHT, RESUME."""
    packed = (Leg(2, 5, 60, "packed"), Leg(3, 2, 60, "packed"), Leg(3, END, 60, "packed"))
    chains = [
        Chain(47, 8, "shared", NO_BAD, (Leg(2, 1, 30), Leg(2, 6, 45), Leg(2, END, 45))),  # weights, another budget
        Chain(47, 8, "auto", NO_BAD, (Leg(2, 1, 30), Leg(1, 6, 60), Leg(1, END, 60))),  # weights, other ranks
        Chain(61, 25, "auto", frozenset({8}), packed),  # a bad place after the last good one
        Chain(200, 8, "shared", frozenset({2, 3}), (Leg(2, END, 60),)),  # all of a portion
        Chain(30, 7, "shared", frozenset({14, 15, 28}), (Leg(3, 8, 30, "packed"), Leg(3, END, 30, "packed"))),
        Chain(30, 12, "shared", frozenset({14, 22, 24}), (Leg(1, 2, 60, "packed"), Leg(2, END, 90))),
    ]
    check_chains(chains)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["auto", "shared"])
def test_other_numbers_of_ranks_finish_an_epoch_of_the_free_mode(shard: str) -> None:
    """Spec: R10.3, R11.3, R14.6. Checks: RESUME, ONCE, COVER. Twice, with bad samples at both ends and in a row, or none."""
    bad = frozenset({0, 1, 9, 10, 11, 23, 38, 45, 46})
    check_chains(
        [
            Chain(47, 0, shard, spoilt, (Leg(first, steps, 60), Leg(second, steps, 60), Leg(third, END, 60)), True)
            for first, second, third in ((1, 2, 3), (2, 3, 1), (3, 1, 2))
            for steps in (1, 3)
            for spoilt in (NO_BAD, bad)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["auto", "shared"])
def test_an_epoch_goes_on_with_another_number_of_ranks(shard: str) -> None:
    """Saved after any step, twice within an update, once before it took a step. Checks: UPDATE, WEIGHT, RESUME."""
    once = [
        (Leg(before, steps, 60), Leg(after, END, 60 if before == after else 45))
        for before, after, moments in ((2, 3, (1, 4, 9, 14)), (3, 1, (4, 9)), (1, 3, (4,)), (2, 2, (1, 14)))
        for steps in moments
    ]
    twice = [
        (Leg(a, 1, 30), Leg(b, then, 30), Leg(c, END, 30))
        for a, b, c, then in ((2, 3, 1, 1), (1, 2, 2, 1), (3, 1, 2, 0))
    ]
    chains = [Chain(103, 16, shard, NO_BAD, legs, True) for legs in once]
    check_chains([*chains, *(Chain(47, 25, shard, NO_BAD, legs, True) for legs in twice)])


@pytest.mark.deep
@pytest.mark.parametrize("block", range(16))
def test_any_chain_of_restarts_trains_each_update_whole(block: int) -> None:
    """Checks: UPDATE, WEIGHT, RESUME, ALIGN."""
    check_chains([draw_chain(block * CHAINS_EACH + i) for i in range(CHAINS_EACH)])
