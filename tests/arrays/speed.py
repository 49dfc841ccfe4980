"""The time of the core's own functions on windows of many ranks, and of the arrays: ``python -m tests.arrays.speed``.

A twin with a ratio of at most 3 is not worth its lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from odb_sim.inputs.lengths import load_lengths

from odb_ref.arrays import twins
from odb_ref.arrays.windows import encode_samples, sort_windows
from odb_ref.core.batching.alignment import align, count_groups_to_emit
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.types import make_sample

RANKS, TRIES = 64, 5


def measure(work: Callable[[], object]) -> float:
    """Returns the processor seconds of the fastest of some tries."""
    seconds = []
    for _ in range(TRIES):
        begin_s = time.process_time()
        work()
        seconds.append(time.process_time() - begin_s)
    return min(seconds)


def compare(name: str, budget: int, window: int, layout: Layout, order: StepOrder) -> tuple[float, float]:
    """Returns microseconds per sample for the arrays and for the core, from lengths to the steps of a round."""
    tokens = np.random.default_rng(0).choice(load_lengths(name).tokens, (RANKS, window))
    samples, counts = encode_samples(tokens.reshape(-1), np.arange(tokens.size)), np.full(RANKS, window)

    def use_arrays() -> None:
        windows = sort_windows((samples, counts))
        if order is StepOrder.SAMPLER:
            windows, bounds = twins.line_up_windows(windows, layout, budget)
        elif layout is Layout.PACKED:
            windows, bounds = twins.pack_windows(windows, budget)
        else:
            bounds = twins.compute_group_bounds(windows, budget)
        target = int(twins.count_groups_to_emit(windows, bounds, layout, budget).min())
        due = twins.find_due(windows, bounds, np.zeros(RANKS, dtype=np.int64))
        twins.align_windows(windows, bounds, target, due, layout=layout, step_order=order)

    def use_core() -> None:
        rows = [tuple(make_sample(i, i, n, n, ()) for i, n in enumerate(row)) for row in tokens.tolist()]
        formed = [order.compute_groups(row, layout, budget, ()) for row in rows]
        target = min(count_groups_to_emit(groups, layout, budget) for groups in formed)
        for groups in formed:
            align(groups, target, 0, layout, order)

    per_sample = 1e6 / tokens.size
    return measure(use_arrays) * per_sample, measure(use_core) * per_sample


if __name__ == "__main__":
    print("us a sample: trace, window, layout, order: arrays, core, ratio")
    for name, budget, window in (
        ("gsm8k", 8192, 256),
        ("mm_mix_real", 11_600, 512),
        ("azure_llm_2023_conv", 12_288, 1024),
    ):
        for layout in Layout:
            for order in (StepOrder.FULLEST, StepOrder.SAMPLER):
                ours, cores = compare(name, budget, window, layout, order)
                print(f"{name} {window} {layout} {order}: {ours:.3f} {cores:.3f} {cores / ours:.1f}")
