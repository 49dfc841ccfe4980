"""A cost model from a table of timed steps: two sizes are enough, more give attention and the error, nonsense is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.cost_files import load_costs
from odb_sim.recorded.measured import calibrate_table
from odb_sim.studies.bands import list_uncertain

from odb_ref.core.errors import UsageError
from tests.helpers.commands import get_answer, refuse, tell

FIXED_S, TOKEN_S, PAIR_S = 0.05, 1.2e-4, 4e-9


def write(
    path: Path, sizes: list[tuple[int, int]], *, noise: float = 0.0, seed: int = 0, pair_s: float = PAIR_S
) -> Path:
    random = np.random.default_rng(seed)
    lines = ["rows,longest,seconds"]
    for rows, longest in sizes:
        seconds = FIXED_S + rows * longest * (TOKEN_S + pair_s * longest)
        lines.append(f"{rows},{longest},{seconds * random.lognormal(0, noise):.6f}")
    path.write_text("\n".join(lines) + "\n")
    return path


GRID = [(rows, longest) for rows in (1, 2, 4, 8) for longest in (256, 1024, 4096) for _ in range(3)]


def test_two_sizes_are_enough_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "two.csv", tmp_path / "costs.json"
    path.write_text("tokens,seconds\n4096,0.52\n16384,1.81\n")
    figures, said = get_answer(capsys, f"calibrate {path} --out {out}")
    gpu = load_costs(out).gpu
    assert (gpu.fixed_s, gpu.per_token_s) == (pytest.approx(0.09, rel=1e-3), pytest.approx(1.05e-4, rel=1e-3))
    assert "two sizes make a line, and leave nothing to judge it by" in said
    assert "10% is assumed" in said
    assert "Attention's part, which grows with the square of a row's length, is left out" in said
    assert figures["fit"]["components"][0]["spans_held"] == 0
    assert [item.name for item in list_uncertain(load_costs(out))][-1] == "what the cost model leaves out"


def test_sizes_that_were_measured_twice_and_differ_are_cautioned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "two.csv", tmp_path / "costs.json"
    path.write_text("tokens,seconds\n4096,0.52\n4096,0.99\n16384,1.81\n16384,3.5\n")
    said = tell(capsys, f"calibrate {path} --out {out}")
    assert "Caution: steps of one size differ so much that it is 60% off" in said
    assert load_costs(out).ranges.rows[-1][2] - 1 == pytest.approx(0.6, abs=0.01)


def test_the_longest_row_timed_is_kept_and_longer_samples_are_cautioned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sizes would make rows of 16,000 a third too cheap. Four of them, the recipe of the page, show attention."""
    lengths, out = tmp_path / "lengths.csv", tmp_path / "costs.json"
    lengths.write_text("total_tokens\n" + "16000\n" * 16)
    simulate = f"simulate {lengths} --ranks 8 --token-budget 16384 --cost-model {out}"
    for sizes, longest in (([(4, 1024), (8, 2048)], 2048), ([(4, 1024), (8, 2048), (4, 4096), (1, 16000)], 16000)):
        steps = write(tmp_path / "steps.csv", sizes)
        assert f"rows of up to {longest:,};" in tell(capsys, f"calibrate {steps} --ranks 8 --out {out}")
        assert load_costs(out).fitted.longest == longest
        said = tell(capsys, simulate)
        assert ("rows of at most 2,048 tokens, and the longest sample here has 16,000" in said) == (longest == 2048)
    assert load_costs(out).gpu.per_token2_s == pytest.approx(PAIR_S, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [4, 10])
def test_many_sizes_tell_attention_and_ranges_that_hold_the_truth(tmp_path: Path, seeds: int) -> None:
    held = []
    for seed in range(seeds):
        made = calibrate_table(write(tmp_path / "many.csv", GRID, noise=0.03, seed=seed), ranks=8)
        (fit,) = made.fits
        truth = {"fixed_s": FIXED_S, "per_token_s": TOKEN_S, "per_token2_s": PAIR_S}
        assert set(fit.values) == set(truth)
        assert fit.values["per_token_s"] == pytest.approx(TOKEN_S, rel=0.1)
        held += [item.low <= truth[item.name] <= item.high for item in fit.ranges]
        assert 0.01 < fit.median_error < 0.05
        assert made.costs.fitted.ranks == 8
    assert np.mean(held) >= 0.7


SMALL_MODEL = """rows,longest,seconds
2,256,0.0761
4,512,0.0699
4,1024,0.0739
32,256,0.1073
16,512,0.1082
8,1024,0.1097
5,2048,0.1359
64,256,0.1959
8,2048,0.2073
"""
"""Medians that `python -m tests.bench --only gpu` measured of Qwen2.5-0.5B on an H200."""


def test_steps_that_launching_makes_equally_long_give_a_floor(tmp_path: Path) -> None:
    path, out = tmp_path / "steps.csv", tmp_path / "costs.json"
    path.write_text(SMALL_MODEL)
    (fit,) = calibrate_table(path).fits
    assert fit.values["floor_s"] == pytest.approx(0.0739, rel=0.06)
    assert fit.median_error < 0.03, "0.12 without a floor"
    assert main(["calibrate", str(path), "--out", str(out)]) == 0
    assert load_costs(out).gpu.floor_s == fit.values["floor_s"]
    assert "gpu.floor_s" in [item.name for item in list_uncertain(load_costs(out))]


@pytest.mark.parametrize("seed", range(4))
def test_steps_on_a_line_have_no_floor(tmp_path: Path, seed: int) -> None:
    (fit,) = calibrate_table(write(tmp_path / "many.csv", GRID, noise=0.03, seed=seed)).fits
    assert "floor_s" not in fit.values


def test_attention_that_nothing_shows_is_left_out(tmp_path: Path) -> None:
    (fit,) = calibrate_table(write(tmp_path / "line.csv", GRID, noise=0.03, pair_s=0.0)).fits
    assert "per_token2_s" not in fit.values


def test_the_error_that_it_states_is_that_of_a_fit_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three numbers meet three of four measurements, which says nothing of the next, nor of the range of each number."""
    (tmp_path / "four.csv").write_text("rows,longest,seconds\n4,1024,0.52\n8,2048,1.81\n4,4096,1.98\n1,14089,2.27\n")
    assert "step: fixed_s 0.1129 - - " in tell(capsys, f"calibrate {tmp_path / 'four.csv'} --out {tmp_path / 'c.json'}")
    made = calibrate_table(tmp_path / "four.csv")
    (fit,) = made.fits
    assert fit.run_error > fit.p90_error > 0.1
    assert made.costs.ranges.rows[-1] == ("error", 1 / (1 + fit.run_error), 1 + fit.run_error)


@pytest.mark.deep
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_steps_of_other_sizes_lie_within_the_error_that_it_states(tmp_path: Path, noise: float) -> None:
    inside = []
    for seed in range(8):
        made = calibrate_table(write(tmp_path / "many.csv", GRID, noise=noise, seed=seed))
        _, low, high = made.costs.ranges.rows[-1]
        random = np.random.default_rng(100 + seed)
        for rows, longest in ((3, 512), (6, 2048), (2, 3000), (8, 700)):
            tokens = rows * longest
            predicted = float(made.costs.gpu.compute_steps_s(np.array(tokens), np.array(tokens * longest)))
            true = (FIXED_S + tokens * (TOKEN_S + PAIR_S * longest)) * random.lognormal(0, noise)
            inside.append(predicted * low <= true <= predicted * high)
    assert np.mean(inside) >= 0.8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens,seconds\n", "no measurement"),
        ("tokens,seconds\n5,1\n5,2\n", "two sizes are enough, one is not"),
        ("length,seconds\n5,1\n", ":1: a table of steps has the columns seconds"),
        ("tokens,seconds\n5,1\nx,2\n", ":3: tokens is 'x'"),
        ("tokens,seconds\n5,1\n6,nan\n", ":3: seconds is 'nan'"),
        ("tokens,seconds,seconds\n5,1,9\n6,2,18\n", ":1: 2 columns are called seconds"),
        ("rows,longest,seconds\n1,5,1\n1,,2\n", ":3: longest is ''"),
        ("tokens,seconds\n5,1\n6,1e9\n", ":3: seconds is '1e9'"),
        ("tokens,seconds\n4096,1.81\n16384,0.52\n", "steps with more tokens do not take longer"),
        ("tokens,rows,longest,seconds\n1000,1,5,1\n9,1,9,2\n", ":2: 1,000 tokens, and rows times longest are 5"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        calibrate_table(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_table_stands_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.csv", GRID)
    assert "given alone" in refuse(capsys, ["calibrate", str(path), str(path)])
    assert "--ranks must be at least 1" in refuse(capsys, ["calibrate", str(path), "--ranks", "0"])
