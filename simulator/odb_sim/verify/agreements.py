"""The agreements that ranks can reach, about which a rule is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Final

from odb_ref.core.offer import NONE, Offer

SMALL_SAMPLES: Final = 8
ROUNDS: Final = 10_000
SIZES: Final = 20_000
LARGE: Final = 20_000
LARGEST_SAMPLES: Final = 2**40
LARGEST_ROUND: Final = 2**31
MOST_CONSTANTS: Final = 60
GROUPS: Final = 4_000
_AROUND: Final = 24
_TYPICAL_ROUND: Final = 3


def make_agreement(
    *,
    samples: tuple[int, int],
    groups: tuple[int, int],
    due: int,
    round_: int,
    fingerprint: int = 1,
    budget: int = NONE,
) -> Offer:
    """Returns the agreement of a round without failure or stop, in which every rank is ready.

    ``samples`` and ``groups`` are pairs of the least and the most of any rank.
    """
    return Offer(
        round_min=round_,
        round_max=round_,
        fingerprint_min=fingerprint,
        fingerprint_max=fingerprint,
        ready_min=1,
        failed_rank=NONE,
        stop_step=NONE,
        stop_rank=NONE,
        samples_min=samples[0],
        samples_max=samples[1],
        groups_min=groups[0],
        groups_max=groups[1],
        due_max=due,
        budget_min=budget,
    )


def is_possible(agreement: Offer) -> bool:
    """Returns True when ranks can reach the agreement.

    Some rank must hold a sample. The most groups are at most the most samples, the fewest groups of ranks that still read are
    at most the most groups, and no more groups are due than there are.
    """
    groups_min = 1 if agreement.groups_min == NONE else agreement.groups_min
    return (
        1 <= groups_min <= agreement.groups_max <= agreement.samples_max
        and 0 <= agreement.samples_min <= agreement.samples_max
        and 0 <= agreement.due_max <= agreement.groups_max
        and agreement.round_min >= 0
        and agreement.budget_min >= 1
    )


def iterate_grid() -> Iterator[Offer]:
    """Yields every agreement on up to 8 samples per rank, smallest first, in an early and a late round."""
    for samples_max in range(1, SMALL_SAMPLES + 1):
        for groups_max in range(1, samples_max + 1):
            for samples_min in range(samples_max + 1):
                for groups_min in (*range(1, groups_max + 1), NONE):
                    for due in range(groups_max + 1):
                        samples, groups = (samples_min, samples_max), (groups_min, groups_max)
                        for round_, budget in ((0, NONE), (_TYPICAL_ROUND, NONE), (_TYPICAL_ROUND, 1)):
                            yield make_agreement(samples=samples, groups=groups, due=due, round_=round_, budget=budget)


def iterate_rounds() -> Iterator[Offer]:
    """Yields every round up to 9,999, each in three shapes: uneven ranks, a rank that has run dry, and due samples."""
    for round_ in range(ROUNDS):
        for samples_min, groups_min, due in ((9, 3, 0), (0, NONE, 0), (5, 2, 7)):
            yield make_agreement(samples=(samples_min, 24), groups=(groups_min, 8), due=due, round_=round_)


def iterate_sizes() -> Iterator[Offer]:
    """Yields every window up to 20,000 samples, in two shapes, each with every number of groups up to 4,000."""
    for samples_max in range(1, SIZES + 1):
        samples = samples_max // 3, samples_max
        # Each goes through all numbers of groups four times from 4,000 samples on: no step shares a divisor with 4,000.
        some, others = (min(samples_max, 1 + step * samples_max % GROUPS) for step in (2_473, 1_117))
        for groups_max, groups_min, due in ((some, max(1, some // 2), 0), (others, NONE, others)):
            yield make_agreement(samples=samples, groups=(groups_min, groups_max), due=due, round_=_TYPICAL_ROUND)


def iterate_large(count: int, seed: int) -> Iterator[Offer]:
    """Yields random agreements on up to 2^40 samples per rank, in any round, with extremes more likely than by chance."""
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return draw.choice((low, high, draw.randint(low, high), min(high, low + 1), max(low, high - 1)))

    for _ in range(count):
        samples_max = 2 ** draw.randint(0, 40) if draw.random() < 0.3 else draw.randint(1, 2 ** draw.randint(1, 40))
        groups_max = between(1, samples_max)
        yield make_agreement(
            samples=(between(0, samples_max), samples_max),
            groups=(NONE if draw.random() < 0.2 else between(1, groups_max), groups_max),
            due=between(0, groups_max),
            round_=draw.choice((0, 1, 2, draw.randint(3, 100), draw.randint(100, 10**6), LARGEST_ROUND)),
            fingerprint=draw.getrandbits(56),
            budget=draw.choice((NONE, draw.randint(1, 64), draw.randint(1, 2 ** draw.randint(1, 40)))),
        )


def iterate_around(constants: Sequence[int], seed: int) -> Iterator[Offer]:
    """Yields agreements with a number near one of ``constants`` or a multiple, where a rule's behaviour may change."""
    draw = random.Random(seed)
    for constant in constants[:MOST_CONSTANTS]:
        for value in sorted(
            {constant - 1, constant, constant + 1, 2 * constant, 3 * constant, 1 << min(max(constant, 0), 40)}
        ):
            for name in (
                "round_max",
                "samples_max",
                "samples_min",
                "groups_max",
                "groups_min",
                "due_max",
                "budget_min",
            ):
                for agreement in iterate_large(_AROUND, draw.getrandbits(32)):
                    changed = fit(agreement, name, value)
                    if is_possible(changed):
                        yield changed


def fit(agreement: Offer, name: str, value: int) -> Offer:
    """Returns the agreement with one number changed, and the others adjusted where necessary."""
    changed = replace(agreement, **{name: value})
    if name == "round_max":
        return replace(changed, round_min=value)
    if name == "samples_max":
        groups = min(changed.groups_max, value)
        changed = replace(changed, samples_min=min(changed.samples_min, value), groups_max=groups)
    if name in ("samples_min", "groups_max", "groups_min", "due_max"):
        groups = changed.groups_max if name == "samples_min" else max(changed.groups_max, value)
        changed = replace(changed, samples_max=max(changed.samples_max, value, groups))
        changed = replace(changed, groups_max=value if name == "groups_max" else groups)
    fewest = changed.groups_min if changed.groups_min == NONE else min(changed.groups_min, changed.groups_max)
    return replace(changed, groups_min=fewest, due_max=min(changed.due_max, changed.groups_max))


def describe_agreement(agreement: Offer) -> str:
    """Returns the fields of an agreement that a rule may use, in one line."""
    shown = ("round_min", "samples_min", "samples_max", "groups_min", "groups_max", "due_max", "budget_min")
    values = {item.name: getattr(agreement, item.name) for item in fields(Offer) if item.name in shown}
    return ", ".join(f"{name}={'NONE' if value == NONE else value}" for name, value in values.items())
