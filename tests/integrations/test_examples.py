"""The frameworks' examples run as their first lines say, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
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
    done, total = re.findall(r"\d+", coverage)
    assert coverage == f"the last epoch trained on {done} of {total} samples"
    assert done == total
    assert weights == "the same weights on every rank: True"


def run_titan(folder: Path, *arguments: str) -> list[list[str]]:
    """The updates of each rank."""
    from tests.torch.test_examples import EXAMPLES, run_example

    if "--torchtitan" in arguments:
        python = os.environ["ODB_TORCHTITAN_PYTHON"]
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(EXAMPLES / "train_torchtitan.py"), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
        out = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    else:
        out = run_example(folder, "train_torchtitan.py", *arguments, ranks=2)
    lines = out.splitlines()
    found = [line.split(": ", 1) for line in lines if line.startswith("rank ")]
    return [[line for name, line in found if name == f"rank {rank}"] for rank in range(2)]


@pytest.mark.parametrize("kind", ["plain", "torchtitan"])
def test_a_hand_written_loop_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, kind: str) -> None:
    """Checks: RESUME, COVER, ALIGN. Shards of 40 and 11 samples: the rates, losses and samples of one training without a stop.

    ``ODB_TORCHTITAN_PYTHON`` names the Python of an environment with torchtitan.
    """
    arguments = ["--torchtitan"] if kind == "torchtitan" else []
    if arguments and "ODB_TORCHTITAN_PYTHON" not in os.environ:
        pytest.skip("needs ODB_TORCHTITAN_PYTHON: python -m venv peers && peers/bin/pip install torchtitan triton")
    whole = run_titan(tmp_path, *arguments)
    samples = sorted(
        int(number) for rank in whole for line in rank for number in line.split("[")[1][:-1].split(", ") if number
    )
    assert samples == sorted([*range(51)] * 2)
    first = run_titan(tmp_path, *arguments, "--stop-after", "3")
    rest = run_titan(tmp_path, *arguments, "--resume")
    assert [len(rank) for rank in first] == [3, 3]
    assert [before + after for before, after in zip(first, rest, strict=True)] == whole
    rates = [float(line.split()[1][:-1]) for line in whole[0]]
    assert max(rates) == rates[1] == 0.01
    assert 0 < rates[-1] < 0.002
