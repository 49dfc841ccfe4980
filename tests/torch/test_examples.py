"""The examples run as their first lines say, and do what they promise. The notebook is stored without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from odb_sim.cli.main import main

from tests.helpers.programs import run_program
from tests.torch.data import Numbers, make_loader

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(tmp_path: Path, name: str, *arguments: str, ranks: int = 0) -> str:
    return run_program(EXAMPLES / name, *arguments, folder=tmp_path, ranks=ranks)


def find_steps(out: str) -> set[str]:
    """Returns the different numbers of steps that ranks report."""
    return {line.split(": ")[1].split(" steps")[0] for line in out.splitlines() if line.startswith("rank ")}


def test_ddp_over_uneven_shards_trains_on_every_sample_once(tmp_path: Path) -> None:
    """Checks: COVER, ALIGN. Shards of 40, 13, 13 and 1 samples; the traces pass the checker."""
    out = run_example(tmp_path, "train_ddp.py", ranks=4)
    assert "67 samples trained on, each exactly once: True" in out
    assert len(find_steps(out)) == 1
    traces = sorted(map(str, (tmp_path / "ddp-trace").glob("*.ndjson")))
    assert len(traces) == 4
    assert main(["check", "--replay", *traces]) == 0


def test_a_rank_without_an_image_runs_the_vision_tower_too(tmp_path: Path) -> None:
    """Spec: R4.5. The tower is sharded, so a rank that calls it alone would wait for ever."""
    out = run_example(tmp_path, "train_images.py", ranks=2)
    assert "51 samples trained on, each exactly once: True" in out
    steps, runs, dummies = zip(
        *(re.findall(r"\d+", line)[1:4] for line in out.splitlines() if line.startswith("rank ")), strict=True
    )
    assert len(set(steps)) == len(set(runs)) == 1
    assert 0 < int(runs[0]) < int(steps[0])
    assert max(map(int, dummies)) > 0
    with pytest.raises(AssertionError, match=r"Timed out|Connection closed by peer"):
        run_example(tmp_path, "train_images.py", "--no-dummies", "--timeout", "3", ranks=2)


def test_evaluation_over_uneven_shards_equals_that_of_one_process(tmp_path: Path) -> None:
    """Checks: COVER, ALIGN. The figures are the same to the last digits, and so are the samples."""
    figures = []
    for shards in (["40", "13", "13", "1"], ["67"]):
        first, second = run_example(tmp_path, "evaluate_ddp.py", "--shards", *shards, ranks=len(shards)).splitlines()
        assert first == "67 samples evaluated, each exactly once: True"
        figures.append([float(word.rstrip(",")) for word in second.split() if word[0].isdigit()])
    many, one = figures
    assert many == pytest.approx(one, rel=1e-10)
    assert many[2] == one[2] > 1000


def test_an_accelerate_loop_shares_the_samples_out(tmp_path: Path) -> None:
    """Checks: COVER, ALIGN. `prepare` neither re-shards nor re-batches the loader."""
    pytest.importorskip("accelerate")
    out = run_example(tmp_path, "train_accelerate.py", ranks=2)
    ranks = [line.split(": ")[1].split(" steps, ") for line in out.splitlines() if line.startswith("rank ")]
    assert [samples for _, samples in ranks] == ["31 samples", "30 samples"]
    assert len({steps for steps, _ in ranks}) == 1
    assert "61 samples trained on, each exactly once: True" in out
    assert "the same weights on every rank: True" in out


def test_metrics_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert "steps written to" in run_example(tmp_path, "tensorboard_metrics.py")
    assert list((tmp_path / "runs" / "odb").glob("events.out.*"))


def test_training_from_memory_goes_in_halves_and_trains_on_every_sample_once(tmp_path: Path) -> None:
    out = run_example(tmp_path, "train_from_memory.py", ranks=2)
    assert "token budget" in out and "of 2.00 MiB" in out
    assert "60 samples trained on, each exactly once: True" in out
    assert int(out.split("out of memory ")[1].split(" times")[0]) > 2


def test_a_policy_of_two_ranks_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    """Spec: R13.1, R13.9. Checks: WEIGHT. GRPO calls verl's function, implemented by ours. One rank has too few answers."""
    out = run_example(tmp_path, "train_grpo.py", "--check", "--steps", "3", ranks=2)
    found = re.findall(r"(\d+) micro-batches, (\d+) idle, gradient of ([\d.]+), differs by ([\d.e-]+)", out)
    assert len(found) == 3
    assert any(int(idle) > 0 for _, idle, _, _ in found)
    assert all(float(norm) > 0.01 and float(largest) < 1e-9 for _, _, norm, largest in found)


def test_why_steps_were_idle_is_said_of_one_epoch(tmp_path: Path) -> None:
    with make_loader(Numbers(0, 9), trace=tmp_path / "run.ndjson") as loader:
        for _ in range(2):
            assert list(loader)
    traces = sorted(path.name for path in tmp_path.iterdir())
    assert len(traces) == 2
    assert "no step was idle" in run_example(tmp_path, "why_idle.py", traces[0])
    with pytest.raises(AssertionError, match="are of different epochs: give all files of one"):
        run_example(tmp_path, "why_idle.py", *traces)


# The notebook ------------------------------------------------------------------------------------------------------------


def read_cells() -> list[dict[str, object]]:
    notebook = json.loads((EXAMPLES / "lengths.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in read_cells())


@pytest.mark.deep
def test_it_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks: COVER, ALIGN, BUDGET. It runs as one program, since its cells hold nothing that only a notebook understands."""
    pytest.importorskip("matplotlib")
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in read_cells()))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    out = run_program(program, folder=tmp_path, timeout_s=240)
    assert "samples trained on: 800 of 800" in out
    assert "exit status 0" in out
    assert len(find_steps(out)) == 1
    (fullest,) = [line for line in out.splitlines() if line.startswith("the fullest batch")]
    assert int(fullest.split(": ")[1].split()[0].replace(",", "")) <= 16_384
    assert (tmp_path / "notebook-run" / "steps.png").stat().st_size > 5000
