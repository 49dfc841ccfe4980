"""The Trainer on preference pairs, in steps that run out of memory: halves of whole pairs, and the weights of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integrations import require

require("transformers")
require("accelerate")


from odb_ref.integrations.hf import ODBOptions
from odb_ref.torch.loop import count_pairs, split_pairs
from tests.helpers.options import nested
from tests.integrations.common import OPTIONS, SIZES, check_weights, get_weights, join, run_ranks
from tests.integrations.test_hf import make_trainer
from tests.integrations.test_hf_budget import Unlucky
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
    """Checks what each pass receives."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        check_pairs(inputs)
        inputs.pop("names")
        return super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]


class CheckedUnlucky(Checked, Unlucky):
    """Fails by chance, to the end."""


def train(rank: int, folder: Path) -> Any:
    defaults = {"model": Preference(), "train_dataset": Pairs(range(SIZES[0])), "data_collator": collate, "odb": PAIRED}
    trainer = make_trainer(
        rank, folder, kind=CheckedUnlucky, **defaults, num_train_epochs=2, gradient_accumulation_steps=3
    )
    trainer.train()
    assert trainer.updates.pop() == []
    counts = [entry["out_of_memory"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.updates, get_weights(trainer.model), trainer.injected, counts


def test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight(tmp_path: Path) -> None:
    """Checks: WEIGHT, ONCE, COVER. On several ranks, and without pairs: tests/integrations/test_hf_budget.py."""
    ((updates, weights, injected, counts),) = get_values(run_ranks(1, train, tmp_path))
    assert sorted(join(updates)) == sorted([*range(SIZES[0])] * 2)
    check_weights([(updates, weights)], Preference(), compute_loss=compute_loss)
    assert counts[-1] == injected > 1


def leave_unsaid(rank: int, folder: Path) -> Any:
    settings = {"model": Preference(), "train_dataset": Pairs(range(9)), "data_collator": collate}
    odb = replace(PAIRED, split=None, count=None)
    make_trainer(rank, folder, **settings, kind=CheckedUnlucky, odb=odb).train()


def test_pairs_whose_layout_nobody_has_said_are_refused_in_the_first_step(tmp_path: Path) -> None:
    (result,) = run_ranks(1, leave_unsaid, tmp_path)
    assert result.error == "UsageError", result
    assert "pass split_pairs and count_pairs of odb_ref.torch.loop" in result.text
