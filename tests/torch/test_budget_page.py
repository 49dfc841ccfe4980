"""The blocks of docs/howto/budgets.md, run one by one. Spec: R15."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from odb_ref.core.types import Mode
from odb_ref.torch import Batching, ODBDataLoader, Protocol
from odb_ref.torch.loop import StepGuard

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "budgets.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LONGEST = 2_048


LENGTHS = [LONGEST if index == 7 else 20 + ((index * 7919) % 1_500) ** 2 // 1_500 for index in range(700)]
TEXTS: Any = [{"number": number, "input_ids": torch.ones(length).long()} for number, length in enumerate(LENGTHS)]
"""Samples of 20 to 2,048 tokens."""


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
    }


class Page:
    """The page's blocks, found by a text in them. Each runs after those it names."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "Batching": Batching,
            "ODBDataLoader": ODBDataLoader,
            "dataset": TEXTS,
            "collate": collate,
        }
        self.blocks = BLOCK.findall(re.sub(r"^from examples.*\n", "", PAGE.read_text(), flags=re.MULTILINE))

    def run(self, text: str) -> Any:
        (block,) = (block for block in self.blocks if text in block)
        exec(compile(block, str(PAGE), "exec"), self.names)
        return self.names["loader"]


def read(loader: ODBDataLoader[Any, Any]) -> dict[int, list[tuple[int, int, list[int]]]]:
    """Returns by round, for each step, its number of samples, its padded tokens, and its samples."""
    found = defaultdict(list)
    with loader:
        for batch, info in loader.steps():
            found[info.round].append((len(batch["numbers"]), batch["input_ids"].numel(), batch["numbers"]))
    numbers = [number for steps in found.values() for _, _, own in steps for number in own]
    assert sorted(numbers) == list(range(700))
    return found


def compute_most(steps: list[tuple[int, int, list[int]]]) -> int:
    return max((tokens for count, tokens, _ in steps if count > 1), default=0)


def test_there_is_a_test_for_every_block_of_the_page() -> None:
    assert len(Page().blocks) == 8  # tests/integrations/test_hf_budget.py covers the Trainer's


def test_the_budget_grows_by_the_step() -> None:
    """Spec: R15.4. Checks: BUDGET, COVER."""
    page = Page()
    rounds = read(page.run("def grow("))
    assert compute_most(rounds[0]) <= 4_096
    assert max(map(compute_most, rounds.values())) > 8_000
    planned = 0
    for number, steps in sorted(rounds.items()):
        # The budget for round k + 1 is asked for when round k begins.
        if number:
            assert compute_most(steps) <= page.names["grow"](planned, 0)
            planned += len(rounds[number - 1])


def test_a_loop_raises_the_budget_when_its_loss_falls() -> None:
    """Spec: R15.2."""
    page = Page()
    losses = iter([3.0] * 1000)
    seen: list[int] = []

    def model(*, numbers: list[int], input_ids: torch.Tensor) -> SimpleNamespace:
        seen.append(input_ids.numel() if len(numbers) > 1 else 0)
        return SimpleNamespace(loss=torch.tensor(next(losses), requires_grad=True))

    loader = ODBDataLoader(TEXTS, token_budget=16_384, collate_fn=collate, batching=Batching(window=64, depth=1))
    page.names |= {"loader": loader, "model": model, "optimizer": torch.optim.SGD([torch.zeros(1)])}
    with loader:
        loader.accept_budget(4_096)
        page.run("loss = model")
        assert loader.accepted_budget == 4_096
        losses = iter([3.0] * 4 + [1.0] * 1000)
        seen.clear()
        page.run("loss = model")
        assert loader.accepted_budget == 16_384
    assert max(seen[:4]) <= 4_096
    assert max(seen) > 8_192


def test_the_guard_lowers_the_budget_of_the_loader() -> None:
    page = Page()
    loader = page.run("def grow(")
    page.names["model"] = torch.nn.Linear(1, 1)
    page.run("StepGuard(")
    assert isinstance(page.names["guard"], StepGuard)
    page.names["guard"]._lower_budget(3_000)
    assert loader.accepted_budget == 3_000
    loader.close()


def test_a_gpu_says_what_it_holds() -> None:
    """Spec: R15.1, R15.2. Checks: BUDGET."""
    loader = Page().run("TOKENS_OF_THIS_GPU")
    assert 4_500 < max(map(compute_most, read(loader).values())) <= 5_000
    assert loader.metrics()["odb/token_budget"] == 5_000


def test_a_number_of_samples_is_bounded_beside_the_tokens() -> None:
    """Checks: BUDGET."""
    rounds = read(Page().run("limits=(32,)"))
    sizes = [count for steps in rounds.values() for count, _, _ in steps]
    assert max(sizes) == 32
    assert max(map(compute_most, rounds.values())) <= 16_384


def test_a_batch_size_grows_by_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Spec: R15.1, R15.4. Checks: BUDGET."""
    page = Page()
    page.run("limits=(32,)").close()  # it defines the function that counts samples
    loader = page.run("def grow_size")
    rounds = read(loader)
    planned = 0
    for number, steps in sorted(rounds.items()):
        size = page.names["grow_size"](planned, 0) // LONGEST
        sizes = [count for count, _, _ in steps]
        # All batches have exactly this size, except those left over at the end of a window or of the data.
        assert max(sizes) <= size
        if number < max(rounds):
            assert sizes.count(size) >= len(sizes) - 2
        if number:
            planned += len(rounds[number - 1])
    assert size > 8
    page.names["loader"] = SimpleNamespace(steps=lambda: [(None, None)], metrics=loader.metrics)
    page.run('metrics["odb/token_budget"]')
    budget, fill, efficiency = map(float, capsys.readouterr().out.split())
    assert budget == LONGEST * size
    assert 0 < fill == efficiency < 1


@pytest.mark.parametrize("mode", list(Mode))
def test_the_last_batch_is_included_however_short(mode: Mode) -> None:
    """Checks: COVER, QUOTA. On one rank nothing is left over at the end, in either mode."""
    with ODBDataLoader(
        TEXTS, token_budget=65_536, collate_fn=collate, batching=Batching(window=64), protocol=Protocol(mode=mode)
    ) as loader:
        sizes = [len(batch["numbers"]) for batch in loader]
    assert sum(sizes) == 700
    assert min(sizes) < 0.5 * max(sizes)
