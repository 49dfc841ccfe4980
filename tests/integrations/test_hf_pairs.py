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
from odb_ref.torch import UsageError
from odb_ref.torch.loop import count_pairs, split_pairs
from tests.helpers.options import nested
from tests.integrations.common import OPTIONS, SIZES, check_weights, get_weights, join, run_ranks
from tests.integrations.test_hf import make_trainer
from tests.integrations.test_hf_budget import Unlucky
from tests.torch.pairs import Pairs, Preference, check_pairs, collate, compute_loss
from tests.torch.ranks import in_a_rank

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


def make(folder: Path, odb: ODBOptions, **settings: Any) -> Any:
    data = {"model": Preference(), "train_dataset": Pairs(range(SIZES[0])), "data_collator": collate}
    return make_trainer(0, folder, kind=CheckedUnlucky, odb=odb, **data, **settings)


@in_a_rank(run_ranks)
def test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight(tmp_path: Path) -> None:
    """Checks: WEIGHT, ONCE, COVER. On several ranks, and without pairs: tests/integrations/test_hf_budget.py."""
    trainer = make(tmp_path, PAIRED, num_train_epochs=2, gradient_accumulation_steps=3)
    trainer.train()
    assert trainer.updates.pop() == []
    assert sorted(join(trainer.updates)) == sorted([*range(SIZES[0])] * 2)
    check_weights([(trainer.updates, get_weights(trainer.model))], Preference(), compute_loss=compute_loss)
    counts = [entry["out_of_memory"] for entry in trainer.state.log_history if "loss" in entry]
    assert counts[-1] == trainer.injected > 1


@in_a_rank(run_ranks)
def test_pairs_whose_layout_nobody_has_said_are_refused_in_the_first_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, replace(PAIRED, split=None, count=None))
    with pytest.raises(UsageError, match=r"pass split_pairs and count_pairs of odb_ref.torch.loop"):
        trainer.train()
