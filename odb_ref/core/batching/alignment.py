"""Exact alignment: a rank's groups become exactly the agreed number of steps. Spec: R4.

If there are more groups than steps, the surplus is carried into the next window. If there are fewer, groups are split. Once
every group is a single sample, the remaining steps are idle. No sample is lost or emitted twice (CONSERVE, ONCE).
"""

from __future__ import annotations

import heapq
from itertools import chain
from operator import attrgetter

from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Group


def is_due(group: Group, due_before: int) -> bool:
    """Returns True when the group holds a sample whose position is below ``due_before``. Spec: R4.3."""
    if due_before:
        for sample in group:
            if sample.position < due_before:
                return True
    return False


def count_groups_to_emit(groups: tuple[Group, ...], layout: Layout, budget_tokens: int) -> int:
    """Returns how many of its groups a rank that still reads would emit: all, or one fewer if any is less than half full.

    One group is then carried, to be filled in the next window: `align` carries the emptiest, or the last in sampler order.
    At least one group is emitted, so that every round has a step.
    Spec: R3.1.
    """
    if len(groups) < 2:
        return len(groups)
    return len(groups) - any(2 * layout.compute_tokens(group) < budget_tokens for group in groups)


def align(
    groups: tuple[Group, ...],
    target: int,
    due_before: int,
    layout: Layout = Layout.PADDED,
    step_order: StepOrder = StepOrder.FULLEST,
    *,
    cost: Cost = TOKENS,
    sizes: Sizes = Sizes.ANY,
) -> tuple[tuple[Group, ...], Group]:
    """Returns exactly ``target`` groups to emit, idle (empty) ones last, and the samples carried, by position.

    Due groups are emitted before all others, then the fullest (most tokens) or, in sampler order, the first. The order of
    ``groups`` breaks ties. Cost does not matter for this choice, because a group is carried to be filled. The emitted groups
    are lined up in sampler order, or else by falling cost, so that the batches of a step take equally long.
    Spec: R4.1, R4.2, R4.3. Preserves: ALIGN, CONSERVE, BUDGET, SIZES, AGE (when ``target`` is at least the number of due
    groups).
    """
    if len(groups) > target:
        ranks = [step_order.compute_rank(group, layout, cost) for group in groups]
        fills = ranks if cost == TOKENS else [step_order.compute_rank(group, layout) for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (not is_due(groups[i], due_before), fills[i]))
        carried = sorted(chain.from_iterable(groups[i] for i in order[target:]), key=attrgetter("position"))
        return tuple(groups[i] for i in sorted(order[:target], key=ranks.__getitem__)), tuple(carried)
    # With the most costly first, each step has groups that take equally long on all ranks, so no rank waits for a straggler.
    steps = sorted(
        _split(groups, target, layout, cost, sizes), key=lambda group: step_order.compute_rank(group, layout, cost)
    )
    return tuple(steps) + ((),) * max(0, target - sum(map(len, groups))), ()


def _split(groups: tuple[Group, ...], target: int, layout: Layout, cost: Cost, sizes: Sizes) -> list[Group]:
    """Halves the most costly group until there are ``target`` groups, or each is a single sample."""
    heap = [(-_compute_splittable_cost(group, layout, cost), order, group) for order, group in enumerate(groups)]
    heapq.heapify(heap)
    order = len(heap)
    while heap and len(heap) < target and heap[0][0]:
        _, _, group = heapq.heappop(heap)
        middle = layout.find_middle(group, cost, sizes)
        for half in (group[:middle], group[middle:]):
            heapq.heappush(heap, (-_compute_splittable_cost(half, layout, cost), order, half))
            order += 1
    return [group for _, _, group in heap]


def _compute_splittable_cost(group: Group, layout: Layout, cost: Cost) -> int:
    return layout.compute_cost(group, cost) if len(group) > 1 else 0
