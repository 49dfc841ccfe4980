"""The frameworks' examples run as their first lines say, and do what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integrations import require


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
    done, total = re.findall(r"\d+", coverage)
    assert coverage == f"the last epoch trained on {done} of {total} samples"
    assert done == total
    assert weights == "the same weights on every rank: True"


def run_titan(folder: Path, kind: str, *arguments: str) -> list[list[tuple[str, list[int]]]]:
    """Returns the updates of each rank: rate, loss and weights, and the samples of the rank."""
    from tests.torch.test_examples import EXAMPLES, run_example

    if kind == "torchtitan":
        python = os.environ["ODB_TORCHTITAN_PYTHON"]
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(EXAMPLES / "train_torchtitan.py"), "--torchtitan", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
        out = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    else:
        out = run_example(folder, "train_torchtitan.py", *arguments, ranks=2)
    found = [re.split(": |, samples ", line) for line in out.splitlines() if line.startswith("rank ")]
    return [
        [(done, json.loads(numbers)) for name, done, numbers in found if name == f"rank {rank}"] for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "torchtitan"])
def test_a_hand_written_loop_trains_as_with_fixed_batches_and_goes_on_where_it_was_saved(
    tmp_path: Path, kind: str
) -> None:
    """Checks: UPDATE, WEIGHT, RESUME, COVER, ALIGN. After every update rate, loss and weights equal those of the same loop with
    fixed batches of the same samples, although it stops and resumes in the middle of an epoch.

    ``ODB_TORCHTITAN_PYTHON`` names the Python of an environment with torchtitan.
    """
    if kind == "torchtitan" and "ODB_TORCHTITAN_PYTHON" not in os.environ:
        pytest.skip("needs ODB_TORCHTITAN_PYTHON: python -m venv peers && peers/bin/pip install torchtitan triton")
    whole_epoch = ("--double", "--epochs", "1")
    fixed = run_titan(tmp_path, kind, *whole_epoch, "--fixed")
    first = run_titan(tmp_path, kind, *whole_epoch, "--stop-after", "3")
    rest = run_titan(tmp_path, kind, *whole_epoch, "--resume")
    assert [len(rank) for rank in first] == [3, 3]
    whole = [before + after for before, after in zip(first, rest, strict=True)]
    for ours, plain in zip(zip(*whole, strict=True), zip(*fixed, strict=True), strict=True):
        assert sorted(ours[0][1] + ours[1][1]) == sorted(plain[0][1] + plain[1][1])
        for one, other in zip(ours[0][0].split(", "), plain[0][0].split(", "), strict=True):
            assert float(one.split()[1]) == pytest.approx(float(other.split()[1]), rel=1e-9, abs=2e-9)
    assert sorted(number for rank in whole for _, numbers in rank for number in numbers) == [*range(51)]
