"""Inference over the loader's batches returns each sample once, in order, on every rank, even if some do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odb_ref.core.errors import UsageError
from odb_ref.torch import ODBDataLoader, gather_samples
from odb_ref.torch.loop import generate
from odb_ref.torch.reading.tasks import get_length
from tests.torch.data import Numbers, collate, make_sample
from tests.torch.ranks import get_values, run_ranks

COUNT = 37
EXPECTED = [int(make_sample(number)["input_ids"].sum()) for number in range(COUNT)]


FUNCTIONS: dict[str, Any] = {"length_fn": get_length, "collate_fn": collate}


class Run:
    """Adds up each sample's tokens, and fails for more than a number of samples."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failures = 0
        self.sizes: list[int] = []

    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        if len(batch["numbers"]) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(batch["numbers"]))
        assert not torch.is_grad_enabled()
        return batch["input_ids"].sum(1)


def run_all(rank: int, most: int, num_workers: int = 0) -> Any:
    run, data = Run(most), Numbers(0, COUNT)
    data.folder = f"cache-{rank}"  # type: ignore[attr-defined]  # what each rank has for itself tells no loaders apart
    outputs = generate(run, data, token_budget=200, window=16, num_workers=num_workers, **FUNCTIONS)
    return [int(output) for output in outputs], run.failures, run.sizes


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_sample_has_its_output_in_its_place(num_workers: int) -> None:
    outputs, failures, sizes = run_all(0, 1000, num_workers)
    assert outputs == EXPECTED and failures == 0 and max(sizes) > 3


def test_what_does_not_fit_goes_in_halves() -> None:
    outputs, failures, sizes = run_all(0, 3)
    assert outputs == EXPECTED and failures > 3 and max(sizes) <= 3 and sum(sizes) == COUNT


def test_all_ranks_have_all_outputs() -> None:
    values = get_values(run_ranks(2, run_all, 3))
    assert [outputs for outputs, _, _ in values] == [EXPECTED, EXPECTED]
    assert sum(sum(sizes) for _, _, sizes in values) == COUNT
    assert all(failures for _, failures, _ in values)


def test_a_sample_that_does_not_fit_fails_on_every_rank() -> None:
    results = run_ranks(2, lambda rank: run_all(rank, 0 if rank else 3))
    assert [result.error for result in results] == ["JobError", "OutOfMemoryError"], results
    assert "does not fit alone" in results[1].text and results[0].rank == 1


def test_a_run_that_gives_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(UsageError, match="1 outputs for a batch of"):
        generate(lambda batch: [0], Numbers(0, 9), token_budget=200, **FUNCTIONS)


@pytest.mark.parametrize(
    "outputs", [{"scores": torch.ones(9), "tokens": torch.ones(9)}, (torch.ones(9), torch.ones(9))]
)
def test_fields_of_a_batch_are_not_taken_for_samples(outputs: Any) -> None:
    """The batch has two fields and two samples."""
    with pytest.raises(UsageError, match="entries are fields instead of samples"):
        generate(lambda batch: outputs, Numbers(0, 2), token_budget=1000, **FUNCTIONS)
    with ODBDataLoader(Numbers(0, 2), token_budget=1000, collate_fn=collate) as loader:
        _, info = next(loader.steps())
        with pytest.raises(UsageError, match="entries are fields instead of samples"):
            gather_samples(outputs, info)


def test_outputs_can_be_trained_on() -> None:
    """For example those of a teacher or a reward model."""
    (output,) = generate(lambda batch: torch.ones(1), Numbers(0, 1), token_budget=1000, **FUNCTIONS)
    weight = torch.nn.Parameter(torch.ones(()))
    (weight * output).backward()
    assert weight.grad == 1.0
