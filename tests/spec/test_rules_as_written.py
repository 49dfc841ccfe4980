"""R2.5 and R4.2, read sentence by sentence, beside the core, the simulator's arrays, and the examples on the page.

This code is slow and literal on purpose, and exhaustive over small windows, so that no case is left to chance. They include
windows whose first sample fits nothing, and windows whose groups and steps are equal in number.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Group, Sample

PAGE = (Path(__file__).parents[2] / "spec" / "protocol.md").read_text(encoding="utf-8")
Lengths = tuple[int, ...]
Item = tuple[int, int]
"""The position and the length."""


def make(lengths: Lengths) -> Group:
    return tuple(Sample(position, position, length, length) for position, length in enumerate(lengths))


def encode(groups: tuple[Group, ...]) -> list[list[Item]]:
    return [[(sample.position, sample.length) for sample in group] for group in groups]


def by_falling_length(item: Item) -> tuple[int, int]:
    return -item[1], item[0]


def count(group: list[Item]) -> int:
    return sum(length for _, length in group)


def group_as_written(lengths: Lengths, budget: int, reached: Counter[str]) -> list[list[Item]]:
    """R2.5."""
    window = list(enumerate(lengths))
    # "The oldest come first: the first sample by position, and those that follow it,
    oldest = window[:1]
    for item in window[1:]:
        # up to one that does not fit together with all before it, which is not among them."
        if count([*oldest, item]) > budget:
            break
        oldest.append(item)
    reached["the first fits nothing"] += bool(oldest) and count(oldest) > budget
    groups: list[list[Item]] = []
    # "The others follow by falling length, equal ones by position."
    for item in [*oldest, *sorted(window[len(oldest) :], key=by_falling_length)]:
        # "Each joins, of the groups with all of which it fits together, the one with the most tokens, of equal ones the one
        # begun first;
        fitting = [group for group in groups if count([*group, item]) <= budget]
        if fitting:
            most = max(map(count, fitting))
            next(group for group in fitting if count(group) == most).append(item)
        else:
            # where there is none, it begins a group, whether it fits by itself or not."
            groups.append([item])
    # "Inside a group samples stand by falling length, equal ones by position. Groups stand in the order in which they were
    # begun"
    return [sorted(group, key=by_falling_length) for group in groups]


def align_as_written(groups: list[list[Item]], target: int, layout: Layout, reached: Counter[str]) -> list[list[Item]]:
    """R4.2, then the order of R4.1, with at most ``target`` groups."""

    def cost(group: list[Item]) -> int:
        return count(group) if layout is Layout.PACKED else len(group) * max(length for _, length in group)

    made = 0

    # "The groups are numbered from 0: first those of R2 in their order, then the parts in the order in which they are made."
    def enter(group: list[Item]) -> tuple[int, int, list[Item]]:
        nonlocal made
        made += 1
        # "A group's *key* is the pair (minus its cost, its number), and of a single sample (0, its number)."
        return (-cost(group) if len(group) > 1 else 0, made - 1, group)

    # "An item *sinks*: while a child has a lesser key, it changes places with the child that has the least."
    def sink(place: int) -> None:
        while children := heap[2 * place + 1 : 2 * place + 3]:
            child = heap.index(min(children))
            if heap[child] > heap[place]:
                break
            heap[child], heap[place] = heap[place], heap[child]
            place = child

    # "The n groups are put into the array in their order. The item at each place from floor(n / 2) - 1 down to 0 sinks."
    heap = [enter(group) for group in groups]
    for place in range(len(groups) // 2 - 1, -1, -1):
        sink(place)
    reached["a group for each step"] += len(groups) == target
    # "While there are fewer than T groups and the one at place 0 has two or more samples,
    while heap and len(heap) < target and len(heap[0][2]) > 1:
        # (The group is the costliest of two or more samples, of equal ones the one made first.)"
        assert heap[0] is min((item for item in heap if len(item[2]) > 1), key=lambda item: (-cost(item[2]), item[1]))
        # that group is taken out: the last item of the array moves to place 0 and sinks."
        _, _, group = heap[0]
        heap[0] = heap[-1]
        heap.pop()
        sink(0)
        if layout is Layout.PACKED:
            # "as few as hold at least half of its cost, but never all"
            first = next(size for size in range(1, len(group) + 1) if 2 * count(group[:size]) >= count(group))
            first = min(first, len(group) - 1)
        else:
            first = -(-len(group) // 2)
        # "It is split into its first samples and the rest, both in the order they had. These two, in this order, are numbered
        # and put into the heap: each at the end, from where it changes places with its parent while the parent's key is
        # greater."
        for part in (group[:first], group[first:]):
            heap.append(enter(part))
            place = len(heap) - 1
            while place and heap[(place - 1) // 2] > heap[place]:
                heap[(place - 1) // 2], heap[place] = heap[place], heap[(place - 1) // 2]
                place = (place - 1) // 2
    # "R4.1 orders the groups as they stand in the array": "by falling cost"
    steps = sorted((group for _, _, group in heap), key=lambda group: -cost(group))
    return steps + [[]] * (target - len(steps))


WINDOWS = [lengths for size in range(6) for lengths in product((1, 2, 3, 5), repeat=size)]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("budget", [1, 4, 6, 9])
def test_the_core_does_what_the_page_says_of_every_small_window(layout: Layout, budget: int) -> None:
    """Spec: R2.5, R4.2."""
    reached: Counter[str] = Counter()
    for lengths in WINDOWS:
        groups = layout.compute_groups(make(lengths), budget, ())
        if layout is Layout.PACKED:
            assert encode(groups) == group_as_written(lengths, budget, reached), lengths
        for target in range(len(groups), len(lengths) + 2):
            steps, carried = align(groups, target, 0, layout)
            assert encode(steps) == align_as_written(encode(groups), target, layout, reached), (lengths, target)
            assert carried == ()
    assert reached["a group for each step"] >= len(WINDOWS)
    assert layout is Layout.PADDED or budget > 4 or reached["the first fits nothing"] > 100


def read_examples(rule: str) -> list[list[str]]:
    """Returns the rows of the table under a rule."""
    text = re.split(r"\n\*\*R\d|\n## ", PAGE.split(f"\n**{rule}** ")[1])[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def parse_groups(text: str) -> list[list[int]]:
    return [[] if part.strip() == "-" else list(map(int, part.split())) for part in text.split("/")]


def shorten(groups: tuple[Group, ...]) -> list[list[int]]:
    return [[sample.length for sample in group] for group in groups]


def test_the_examples_of_the_page_are_what_the_core_does() -> None:
    """Spec: R2.5, R4.2."""
    packed = read_examples("R2.5")
    assert len(packed) == 3
    for lengths, budget, groups in packed:
        window = make(tuple(map(int, lengths.split())))
        assert shorten(Layout.PACKED.compute_groups(window, int(budget), ())) == parse_groups(groups)
    aligned = read_examples("R4.2")
    assert len(aligned) == 4
    for lengths, budget, layout, target, steps in aligned:
        window = make(tuple(map(int, lengths.split())))
        formed = Layout(layout).compute_groups(window, int(budget), ())
        assert shorten(align(formed, int(target), 0, Layout(layout))[0]) == parse_groups(steps)
