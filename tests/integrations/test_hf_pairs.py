"""The Trainer on preference pairs, in steps that run out of memory: halves of whole pairs, and the weights of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import require

require("transformers")
require("accelerate")


from odb_ref.integrations.hf import ODBOptions
from odb_ref.torch.loop import count_pairs, split_pairs
from tests.helpers.options import nested
from tests.integrations.common import OPTIONS, SIZES, check_weights, get_weights, join, run_ranks
from tests.integrations.test_hf import make_trainer
from tests.integrations.test_hf_budget import Failing, Unlucky, get_largest
from tests.torch.pairs import Pairs, Preference, check_pairs, collate, compute_loss
from tests.torch.ranks import get_values

PAIRED = ODBOptions(
    update_samples=None,
    token_budget=150,
    survives_out_of_memory=True,
    split=split_pairs,
    count=count_pairs,
    loader=nested(**(OPTIONS | {"shard": "given"})),
)


class Checked:
    """Looks at what each pass is given."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        check_pairs(inputs)
        inputs.pop("names")
        return super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]


class CheckedFailing(Checked, Failing):
    """Rank 1 holds 40 tokens of several pairs."""


class CheckedUnlucky(Checked, Unlucky):
    """Fails by chance on any rank, to the end."""


VARIANTS: list[dict[str, Any]] = [
    {"kind": CheckedFailing},
    {"kind": CheckedUnlucky},
    {"kind": CheckedUnlucky, "gradient_accumulation_steps": 3},
]


def train_all(rank: int, folder: Path) -> Any:
    found = []
    for settings in VARIANTS:
        numbers = range(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        defaults = {"model": Preference(), "train_dataset": Pairs(numbers), "data_collator": collate, "odb": PAIRED}
        trainer = make_trainer(rank, folder, **defaults, num_train_epochs=2, **settings)
        trainer.train()
        assert trainer.updates.pop() == []
        counts = [entry["out_of_memory"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((trainer.updates, get_weights(trainer.model), trainer.injected, counts, trainer.sizes))
    return found


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 1])
def test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight(tmp_path: Path, world_size: int) -> None:
    """Checks: WEIGHT, ONCE, COVER. What one rank cannot hold becomes the budget of all."""
    values = get_values(run_ranks(world_size, train_all, tmp_path))
    for number, variant in enumerate(zip(*values, strict=True)):
        updates, weights, injected, counts, sizes = zip(*variant, strict=True)
        assert sorted(join(map(join, updates))) == sorted([*range(sum(SIZES[:world_size]))] * 2)
        check_weights([*zip(updates, weights, strict=True)], Preference(), compute_loss=compute_loss)
        # Counted over all ranks, and the same in everybody's logs.
        assert all(count == counts[0] and count[-1] == sum(injected) for count in counts)
        if number:
            assert sum(injected) > 1
        elif world_size > 1:
            assert injected[0] == 0 < injected[1]
            for rank, own in enumerate(sizes):
                assert get_largest(own, epoch=1, rounds=rank == 0) < get_largest(own, epoch=0) / 2


def leave_unsaid(rank: int, folder: Path) -> Any:
    settings = {"model": Preference(), "train_dataset": Pairs(range(9)), "data_collator": collate}
    odb = replace(PAIRED, split=None, count=None)
    make_trainer(rank, folder, **settings, kind=CheckedFailing, odb=odb).train()


def test_pairs_whose_layout_nobody_has_said_are_refused_in_the_first_step(tmp_path: Path) -> None:
    (result,) = run_ranks(1, leave_unsaid, tmp_path)
    assert result.error == "UsageError", result
    assert "pass split_pairs and count_pairs of odb_ref.torch.loop" in result.text
