"""The frameworks' examples run as their first lines say, and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import require

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("framework", "example", "arguments", "epochs"),
    [
        ("transformers", "train_hf_trainer.py", (), "2.0 epochs"),
        ("lightning", "train_lightning.py", ("--ranks", "2"), "2 epochs"),
    ],
)
def test_an_example_trains_on_every_sample(
    tmp_path: Path, framework: str, example: str, arguments: tuple[str, ...], epochs: str
) -> None:
    """Checks: COVER."""
    require(framework)
    from tests.torch.test_examples import run_example

    length, coverage, weights = run_example(tmp_path, example, *arguments, ranks=2).splitlines()[-3:]
    assert length.endswith(f" updates, {epochs}")
    assert coverage == "the last epoch trained on 61 of 61 samples"
    assert weights == "the same weights on every rank: True"
