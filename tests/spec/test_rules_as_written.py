"""R2.1, R2.5 and R4.1 to R4.3 in every small window, beside the second implementation, and the examples on the page.

No case is left to chance: among them are windows whose first sample fits nothing, with a group for each step, or due.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.types import Group
from tests.helpers.world import make_config, make_shard
from tests.spec.test_second_implementation import Item, _align, _group

PAGE = (Path(__file__).parents[2] / "spec" / "protocol.md").read_text(encoding="utf-8")


def encode(groups: tuple[Group, ...]) -> list[list[Item]]:
    return [[(sample.position, sample.length, ()) for sample in group] for group in groups]


WINDOWS = [lengths for size in range(6) for lengths in product((1, 2, 3, 5), repeat=size)]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("budget", [1, 4, 6, 9])
def test_the_core_does_what_the_page_says_of_every_small_window(layout: Layout, budget: int) -> None:
    """Spec: R2.1, R2.5, R4.1, R4.2, R4.3. Checks: AGE."""
    config = make_config(layout=layout, budget_tokens=budget)
    for lengths in WINDOWS:
        window = make_shard(lengths)
        groups = layout.compute_groups(window, budget, ())
        assert encode(groups) == _group(*encode((window,)), config), lengths
        for due_before in (0, 2):
            due = sum(is_due(group, due_before) for group in groups)
            for target in range(max(1, due), len(lengths) + 2):
                steps, carried = align(groups, target, due_before, layout)
                expected, left = _align(encode(groups), target, due_before, config)
                assert encode((*steps, carried)) == [*expected, left], (lengths, target, due_before)


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
        window = make_shard([*map(int, lengths.split())])
        assert shorten(Layout.PACKED.compute_groups(window, int(budget), ())) == parse_groups(groups)
    aligned = read_examples("R4.2")
    assert len(aligned) == 4
    for lengths, budget, layout, target, steps in aligned:
        window = make_shard([*map(int, lengths.split())])
        formed = Layout(layout).compute_groups(window, int(budget), ())
        assert shorten(align(formed, int(target), 0, Layout(layout))[0]) == parse_groups(steps)
