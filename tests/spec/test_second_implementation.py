"""A second implementation, written only from spec/protocol.md, makes the same batches as the core, so the page is complete.

It has no machines, events or schedules. It does, round by round, what R2 to R4 require of all ranks together. It shares only
the input with the core, and is kept independent on purpose.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.cost import TOKENS, get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.types import Mode
from tests.helpers.world import World, make_config, make_shards

Item = tuple[int, int, tuple[int, ...]]
"""The position, the length and the costs."""


Taken = tuple[int, list[int], tuple[int, ...]]
"""A step: round, positions, and for all ranks the samples, the tokens, and the use of each further resource."""


def _cost(group: list[Item], config: Config) -> int:
    """R2.4."""
    if config.layout is Layout.PACKED:
        return sum(length for _, length, _ in group)
    return len(group) * max((length for _, length, _ in group), default=0)


def _price(group: list[Item], config: Config) -> int:
    """R2.7."""
    name, _, q = config.cost.name.partition("/")
    prices = [n + (n * n // int(q) if name == "attention" else 0) for _, n, _ in group]
    return sum(prices) if config.layout is Layout.PACKED else len(prices) * max(prices, default=0)


def _fit(group: list[Item], config: Config) -> bool:
    """R2.1, R2.5."""
    used = [sum(costs[r] for _, _, costs in group) for r in range(len(config.limits))]
    return _cost(group, config) <= config.budget_tokens and all(
        u <= most for u, most in zip(used, config.limits, strict=True)
    )


def _is_dense(group: list[Item], config: Config) -> bool:
    """R16.3."""
    padding = _cost(group, config) - sum(length for _, length, _ in group)
    return config.update_samples is None or padding <= config.budget_tokens // config.padding_share


def _pack(window: list[Item], config: Config) -> list[list[Item]]:
    """R2.5."""
    groups: list[list[Item]] = []
    count = max((n for n in range(2, len(window) + 1) if _fit(sorted(window)[:n], config)), default=1)
    oldest, younger = sorted(window)[:count], sorted(window)[count:]
    for item in [*oldest, *sorted(younger, key=lambda item: (-item[1], item[0]))]:
        open_ = [i for i, group in enumerate(groups) if _fit([*group, item], config)]
        if open_:
            groups[max(open_, key=lambda i: (_cost(groups[i], config), -i))].append(item)
        else:
            groups.append([item])
    return [sorted(group, key=lambda item: (-item[1], item[0])) for group in groups]


def _run_of(window: list[Item], config: Config) -> list[list[Item]]:
    """R2.6."""
    groups: list[list[Item]] = []
    for item in sorted(window):
        if groups and _fit([*groups[-1], item], config):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _group(window: list[Item], config: Config) -> list[list[Item]]:
    """R2.1."""
    if config.order is StepOrder.SAMPLER:
        return _run_of(window, config)
    if config.layout is Layout.PACKED:
        return _pack(window, config)
    if config.sizes is not Sizes.ANY:
        return _group_friendly(sorted(window, key=lambda item: (item[1], item[0])), config)
    groups: list[list[Item]] = [[]]
    for item in sorted(window, key=lambda item: (item[1], item[0])):
        if groups[-1] and not (_fit([item, *groups[-1]], config) and _is_dense([item, *groups[-1]], config)):
            groups.append([])
        groups[-1].insert(0, item)
    return [group for group in groups if group]


def _list_friendly(config: Config, most: int) -> list[int]:
    """R2.8."""
    powers = [2**i for i in range(most)]
    kinds = {
        Sizes.ANY: [*range(most + 1)],
        Sizes.EVEN: [1, *range(2, most + 1, 2)],
        Sizes.THREES: [*powers, *(3 * power for power in powers)],
        Sizes.POWERS: powers,
    }
    return [number for number in kinds[config.sizes] if 1 <= number <= most]


def _group_friendly(items: list[Item], config: Config) -> list[list[Item]]:
    """R2.8."""
    if not items:
        return []
    fits = 1
    while fits < len(items) and _fit(items[: fits + 1], config) and _is_dense(items[: fits + 1], config):
        fits += 1
    size = max(_list_friendly(config, fits))
    return [items[:size][::-1], *_group_friendly(items[size:], config)]


def _count_to_emit(groups: list[list[Item]], config: Config) -> int:
    """R3.1."""
    is_one_kept = len(groups) >= 2 and any(_cost(group, config) < Fraction(config.budget_tokens, 2) for group in groups)
    return len(groups) - 1 if is_one_kept else len(groups)


def _halve(group: list[Item], config: Config) -> int:
    """R4.2."""
    if config.layout is Layout.PACKED:
        halves = [i for i in range(1, len(group)) if 2 * _price(group[:i], config) >= _price(group, config)]
        return min([*halves, len(group) - 1])
    friendly = _list_friendly(config, len(group))
    return min(i for i in friendly if 2 * i >= len(group) and len(group) - i in friendly)


def _mix(x: int) -> int:
    """R4.9."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def _order(steps: list[list[Item]], round_: int, config: Config) -> list[list[Item]]:
    """R4.8."""
    if config.order is not StepOrder.SHUFFLED:
        return steps
    hashes = {_mix(_mix(_mix(config.order_seed) ^ round_) ^ i): i for i in range(len(steps))}
    filled = sum(map(bool, steps))
    return [steps[hashes[h]] for h in sorted(hashes) if hashes[h] < filled] + [[]] * (len(steps) - filled)


def _align(
    groups: list[list[Item]], target: int, due_before: int, config: Config
) -> tuple[list[list[Item]], list[Item]]:
    """R4.1, R4.2."""

    def place(group: list[Item], by: Callable[[list[Item], Config], int] = _price) -> int:
        return group[0][0] if config.order is StepOrder.SAMPLER else -by(group, config)

    if len(groups) > target:
        due = [any(position < due_before for position, _, _ in group) for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (not due[i], place(groups[i], _cost), i))
        steps = [groups[i] for i in order[:target]]
        carried = sorted(item for i in order[target:] for item in groups[i])
        return sorted(steps, key=place), carried
    made = len(groups)
    heap = [(-_price(group, config) if len(group) > 1 else 0, i, group) for i, group in enumerate(groups)]
    heapq.heapify(heap)
    while heap and heap[0][0] < 0 and len(heap) < target:
        _, _, group = heapq.heappop(heap)
        half = _halve(group, config)
        for part in (group[:half], group[half:]):
            heapq.heappush(heap, (-_price(part, config) if len(part) > 1 else 0, made, part))
            made += 1
    steps = sorted((group for _, _, group in heap), key=place)
    return steps + [[]] * (target - len(steps)), []


def _lower(config: Config, budget: int) -> Config:
    """R15.1."""
    limits = tuple(max(1, math.floor(Fraction(limit * budget, config.budget_tokens))) for limit in config.limits)
    return replace(config, budget_tokens=budget, limits=limits)


def _sum(items: list[Item]) -> int:
    return sum(length for _, length, _ in items)


def _deal(wants: list[int], left: int) -> list[int]:
    """R14.3, one place at a time: to the rank that wants most, the lowest of equal ones, but in the order of the page."""
    given = [0] * len(wants)
    for _ in range(min(left, sum(wants))):
        r = max(range(len(wants)), key=lambda r: (wants[r] - given[r], -r))
        given[r] += 1
    return given


def _run(
    config: Config,
    shards: list[list[tuple[int, tuple[int, ...]]]],
    reached: Counter[str] | None = None,
    window_bytes: int = 0,
    schedules: Sequence[BudgetSchedule] = (),
) -> list[list[Taken]]:
    """Returns the steps of each rank. Counts what was ``reached``."""
    reached = Counter() if reached is None else reached
    ranks = range(len(shards))
    read, windows = [0] * len(shards), [[] for _ in ranks]  # type: ignore[var-annotated]
    marks: list[list[int]] = [[] for _ in ranks]
    ended = [False] * len(shards)
    steps: list[list[Taken]] = [[] for _ in ranks]
    planned = round_ = 0
    common, shards = (list(shards[0]), [[] for _ in ranks]) if config.shared_samples is not None else ([], shards)
    counted = [0] * len(shards)
    in_force = [min(config.budget_tokens, schedule(0, config.budget_tokens)) for schedule in schedules]
    while True:
        accepted = [schedule(len(steps[0]), in_force[r]) for r, schedule in enumerate(schedules)]
        size = max(1, config.window_samples // 2 ** max(0, config.ramp_rounds - round_))
        if config.shared_samples is not None:
            if config.layout is Layout.PACKED and round_:
                room = max(math.ceil(Fraction(len(common), len(shards))), math.ceil(Fraction(size, 2)))
                reached["smaller near the end"] |= common != [] and room < size
                size = min(size, room)
            dealt = _deal([max(0, size - counted[r]) for r in ranks], len(common))
            reached["dealt out"] |= common != [] and sum(dealt) == len(common)
            reached["dealt unevenly"] |= len(set(dealt)) > 1
            for r in ranks:
                shards[r] += common[: dealt[r]]
                del common[: dealt[r]]
        for r in ranks:
            wanted = 0 if ended[r] else max(0, size - len(windows[r]))
            if config.shared_samples is not None:
                wanted = len(shards[r]) - read[r]
            new = [(i, *item) for i, item in enumerate(shards[r])][read[r] : read[r] + wanted]
            ended[r] = ended[r] or len(new) < wanted
            # R2.3, with one byte for each token
            while window_bytes and len(windows[r] + new) > 1 and new and _sum(windows[r] + new) > window_bytes:
                new.pop()
                ended[r] = False
                reached["full"] = 1
            if config.shared_samples is not None:
                ended[r] = not common
            windows[r] += new
            read[r] += len(new)
        bounds = [_lower(config, in_force[r]) if schedules else config for r in ranks]
        groups = [_group(windows[r], bounds[r]) for r in ranks]
        reached["budget"] |= any(bound.budget_tokens < config.budget_tokens for bound in bounds)
        if schedules:
            in_force = [min(config.budget_tokens, *accepted)] * len(shards)
        before = [marks[r][0] if len(marks[r]) == config.max_age_rounds else 0 for r in ranks]
        due = max(sum(any(p < before[r] for p, _, _ in group) for group in groups[r]) for r in ranks)
        is_met = config.quota_samples is not None and planned >= config.quota_samples
        held = [0 if is_met else len(windows[r]) for r in ranks]
        if max(held) == 0 or (config.mode is Mode.QUOTA and min(held) == 0):
            return steps
        most = max(map(len, groups))
        target = most
        if config.rule.name == "odb":
            to_emit = [_count_to_emit(groups[r], bounds[r]) for r in ranks if not ended[r]]
            reached["kept back"] |= bool(to_emit) and max(due, min(to_emit)) < min(map(len, groups))
            target = max(due, min(to_emit, default=most))
        if round_ < config.ramp_rounds and not all(ended):
            reached["ramp"] += 1
            target = max(1, due, target // 4)
        if config.mode is Mode.QUOTA:
            target = min(target, *held)
        aligned = []
        for r in ranks:
            whole = windows[r]
            emitted, windows[r] = _align(groups[r], target, before[r], config)
            if whole:
                counted[r] = math.ceil(Fraction(len(whole) * _sum(windows[r]), _sum(whole)))
            is_due = any(p < before[r] for group in groups[r] for p, _, _ in group)
            for case, holds in (
                ("carried", windows[r]),
                ("due", is_due),
                ("due and carried", is_due and windows[r]),
                ("split", len(groups[r]) < sum(map(bool, emitted))),
                ("65,536 tokens", max((_cost(group, config) for group in groups[r]), default=0) > 65_536),
                ("round 20", round_ >= 20),
                ("more than 16 ranks", len(shards) > 16),
            ):
                reached[case] |= bool(holds)
            marks[r] = [*marks[r], read[r]][-config.max_age_rounds :]
            aligned.append(_order(emitted, round_, config))
        for j in range(target):
            step = [item for emitted in aligned for item in emitted[j]]
            total = len(step)
            counts = (total, _sum(step), *(sum(costs[c] for _, _, costs in step) for c in range(len(config.limits))))
            if config.quota_samples is not None and planned >= config.quota_samples:
                reached["cut"] = 1
                break
            planned += total
            reached["met exactly"] |= planned == config.quota_samples
            for r in ranks:
                steps[r].append((round_, [position for position, _, _ in aligned[r][j]], counts))
        round_ += 1


def _list_taken(world: World) -> list[list[Taken]]:
    return [
        [
            (step.round, [s.position for s in step.group], (counts.samples, counts.tokens, *counts.costs))
            for step in node.taken
            for counts in [step.global_counts]
        ]
        for node in world.nodes
    ]


SCHEDULES = st.builds(
    lambda least, width, pace: lambda step, current: least + (pace * step + current) % width,
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(0, 3),
)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 10), st.tuples(st.integers(0, 5), st.integers(0, 5))), max_size=14),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 12), max_size=2).map(tuple),
    st.sampled_from(sorted(RULES)),
    st.sampled_from(Mode),
    st.sampled_from(Layout),
    st.sampled_from(StepOrder),
    st.data(),
)
def test_both_make_the_same_batches(
    items: list[list[tuple[int, tuple[int, int]]]],
    limits: tuple[int, ...],
    rule: str,
    mode: Mode,
    layout: Layout,
    order: StepOrder,
    data: st.DataObject,
) -> None:
    """Spec: R2, R2.1, R2.3, R2.4, R2.5, R2.6, R2.7, R2.8, R3.3, R3.5, R4, R4.1, R4.2, R4.3, R4.6, R4.8, R4.9.
    Spec: R15.1, R15.3, R15.4.

    Checks: REPLAY, ORDER, BUDGET, SIZES.
    """
    has_sizes = layout is Layout.PADDED and order is not StepOrder.SAMPLER
    config = make_config(
        sizes=data.draw(st.sampled_from(Sizes)) if has_sizes else Sizes.ANY,
        mode=mode,
        rule=RULES[rule],
        budget_tokens=data.draw(st.integers(1, 24)),
        layout=layout,
        order=order,
        cost=get_cost(data.draw(st.sampled_from(("tokens", "attention/1", "attention/3", "attention/7")))),
        order_seed=data.draw(st.integers(0, 2**62)),
        limits=limits,
        window_samples=data.draw(st.integers(1, 8)),
        max_age_rounds=data.draw(st.integers(1, 3)),
        ramp_rounds=data.draw(st.integers(0, 2)),
        quota_samples=data.draw(st.none() | st.integers(1, 30)) if mode is Mode.QUOTA else None,
    )
    shards = [[(length, costs[: len(limits)]) for length, costs in shard] for shard in items]
    samples = make_shards(
        [[length for length, _ in shard] for shard in shards], [[costs for _, costs in shard] for shard in shards]
    )
    window_bytes = data.draw(st.sampled_from((0, 0, 1, 8, 30)))
    schedules = data.draw(st.just([]) | st.lists(SCHEDULES, min_size=len(shards), max_size=len(shards)))
    seed = data.draw(st.integers(0, 99))
    world = World(config, samples, seed=seed, window_bytes=window_bytes, budgets=schedules).run()
    assert _list_taken(world) == _run(config, shards, window_bytes=window_bytes, schedules=schedules)


@given(
    st.lists(st.integers(1, 10), max_size=40),
    st.integers(1, 5),
    st.sampled_from(sorted(RULES)),
    st.sampled_from(Mode),
    st.sampled_from(Layout),
    st.data(),
)
def test_both_make_the_same_batches_of_a_common_order(
    lengths: list[int], ranks: int, rule: str, mode: Mode, layout: Layout, data: st.DataObject
) -> None:
    """Spec: R14, R14.1, R14.2, R14.3, R14.4, R14.5. Checks: REPLAY, DEAL."""
    config = make_config(
        mode=mode,
        rule=RULES[rule],
        budget_tokens=data.draw(st.integers(1, 24)),
        layout=layout,
        sizes=data.draw(st.sampled_from(Sizes)) if layout is Layout.PADDED else Sizes.ANY,
        shared_samples=len(lengths),
        window_samples=data.draw(st.integers(1, 8)),
        max_age_rounds=data.draw(st.integers(1, 3)),
        ramp_rounds=data.draw(st.integers(0, 2)),
        quota_samples=data.draw(st.none() | st.integers(1, 30)) if mode is Mode.QUOTA else None,
    )
    _compare_shared(config, lengths, ranks, data.draw(st.integers(0, 99)), Counter())


def _compare_shared(config: Config, lengths: list[int], ranks: int, seed: int, reached: Counter[str]) -> None:
    world = World(config, [()] * ranks, order=make_shards([lengths])[0], seed=seed).run()
    assert _list_taken(world) == _run(
        config, [[(length, ()) for length in lengths], *([] for _ in range(ranks - 1))], reached
    )


def test_both_make_the_same_batches_of_a_long_common_order() -> None:
    """Spec: R14.2, R14.3. Checks: REPLAY, DEAL. It fails if shares are always the same."""
    reached = Counter[str]()
    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.choice((draw.randint(1, 9), draw.randint(1, 90))) for _ in range(draw.randint(1, 300))]
        config = make_config(
            layout=Layout.PACKED if seed % 2 else Layout.PADDED,
            shared_samples=len(lengths),
            budget_tokens=draw.randint(20, 120),
            window_samples=draw.randint(1, 30),
            max_age_rounds=draw.randint(1, 3),
            ramp_rounds=draw.randint(0, 2),
        )
        found = Counter[str]()
        _compare_shared(config, lengths, draw.randint(2, 6), seed, found)
        reached += found
    assert reached["dealt out"] >= 30
    assert reached["dealt unevenly"] >= 25
    assert reached["smaller near the end"] >= 9


LEAST = {
    "carried": 30, "due": 25, "due and carried": 18, "split": 30, "cut": 4, "met exactly": 4, "65,536 tokens": 10,
    "round 20": 10, "more than 16 ranks": 8, "full": 15, "kept back": 25,
}  # fmt: skip
"""The minimum number of worlds below that meet each case, well below the actual counts."""


def _compare(seed: int, reached: Counter[str]) -> None:
    """Compares a long world, or a wide one, whose ranks have samples of very different lengths."""
    draw = random.Random(seed)
    ranks = draw.randint(17, 20) if draw.random() < 0.12 else draw.randint(1, 4)
    budget = draw.choice((draw.randint(2, 40), draw.randint(2, 40), draw.randint(66_000, 300_000)))
    mode = draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    size = 60 if ranks < 17 else 10
    shards = [
        [(draw.randint(1, longest), ()) for _ in range(draw.choice((size, size, size // 3)))]
        for longest in (max(2, budget // draw.choice((1, 2, 8)) + 1) for _ in range(ranks))
    ]
    config = make_config(
        mode=mode,
        layout=Layout.PACKED if seed % 3 == 2 else Layout.PADDED,
        order=tuple(StepOrder)[seed // 3 % 3],
        sizes=tuple(Sizes)[seed % 4]
        if seed % 3 < 2 and tuple(StepOrder)[seed // 3 % 3] != StepOrder.SAMPLER
        else Sizes.ANY,
        order_seed=seed // 9,
        cost=get_cost(f"attention/{max(1, budget // 4)}") if seed % 2 else TOKENS,
        rule=RULES[draw.choice(("odb", "odb", "paper"))],
        budget_tokens=budget,
        window_samples=draw.choice((draw.randint(1, 4), draw.randint(3, 14))),
        max_age_rounds=draw.choice((1, 1, 2, 3)),
        ramp_rounds=draw.randint(0, 2),
        quota_samples=draw.randint(1, ranks * size) if mode is Mode.QUOTA and draw.random() < 0.8 else None,
    )
    window_bytes = draw.choice((0, 0, draw.randint(1, 4 * budget)))
    samples = make_shards([[length for length, _ in shard] for shard in shards])
    world = World(config, samples, seed=seed, window_bytes=window_bytes).run()
    assert _list_taken(world) == _run(config, shards, reached, window_bytes), f"seed {seed}: {config}"


@pytest.mark.deep
def test_both_make_the_same_batches_in_long_and_wide_worlds() -> None:
    """Spec: R2, R2.1, R2.3, R3.3, R3.5, R4, R4.1, R4.2, R4.3, R4.6. Checks: REPLAY. It fails if they meet too few cases."""
    reached = Counter[str]()
    for seed in range(120):
        found = Counter[str]()
        _compare(seed, found)
        reached += found
    missed = {case: (reached[case], least) for case, least in LEAST.items() if reached[case] < least}
    assert not missed, f"met in too few of 120 worlds, (found, least): {missed}; all: {reached}"


def test_both_make_the_same_fingerprint() -> None:
    """Spec: R1.4."""
    config = make_config(world_size=2, tag="é", mode=Mode.QUOTA, quota_samples=3, order=StepOrder.FULLEST)
    text = (
        '{"budget_tokens": 8, "max_age_rounds": 4, "mode": "quota", "quota_samples": 3, "ramp_rounds": 0, "rule": "odb", '
        '"tag": "\\u00e9", "window_samples": 4, "world_size": 2}'
    )
    assert json.loads(text)["tag"] == "é"
    ordered = {"order": StepOrder.SHUFFLED, "order_seed": 7}
    for changes, before, more in (
        ({}, "{", ""),
        ({"limits": (9, 7)}, '"max', '"limits": [9, 7], '),
        ({"layout": Layout.PACKED}, '"max', '"layout": "packed", '),
        (ordered, '"quota_s', '"order": "shuffled", "order_seed": 7, '),
        ({"cost": get_cost("attention/7")}, '"max', '"cost": "attention/7", '),
    ):
        digest = hashlib.blake2b(text.replace(before, more + before, 1).encode(), digest_size=7).digest()
        assert replace(config, **changes).fingerprint == int.from_bytes(digest, "big") < 2**56
