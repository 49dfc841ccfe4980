"""R12.4: the order of a shuffled epoch, by seed and epoch."""

from __future__ import annotations

from odb_ref.torch import Batching, ODBDataLoader
from odb_ref.torch.plan.order import compute_order
from tests.torch.data import Numbers, collate, read


def read_order(seed: int, epoch: int) -> list[int]:
    data = Numbers(0, 30)
    with ODBDataLoader(
        data, token_budget=60, collate_fn=collate, shuffle=True, seed=seed, batching=Batching(order="sampler")
    ) as loader:
        loader.set_epoch(epoch)
        return [number for _, numbers, _ in read(loader) for number in numbers]


def test_different_seeds_and_epochs_have_different_orders() -> None:
    """Spec: R12.4. This includes those with the same sum, product or last 32 bits."""
    seeds = (0, 1, 2, 7, -1, 1_000_003, 2_000_006, 2**31, 2**32, 2**32 + 1, 2**63, 2**63 + 1, 2**64 - 1, -(2**63))
    orders = {tuple(compute_order(30, seed, epoch)) for seed in seeds for epoch in range(20)}
    assert len(orders) == 20 * len(seeds)
    assert all(sorted(order) == list(range(30)) for order in orders)


def test_the_loader_reads_in_that_order() -> None:
    """Spec: R12.4."""
    assert read_order(0, 1) == list(compute_order(30, 0, 1)) == read_order(0, 1)
    assert read_order(0, 1) != read_order(1_000_003, 0)
    assert read_order(5, 0) != read_order(5 + 2**32, 0)
