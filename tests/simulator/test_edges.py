"""Values at the edge of what makes sense are refused in a line, or computed, but never give nan or infinite figures."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from odb_sim.cli.main import EXAMPLES
from odb_sim.inputs.costs import LARGEST_S
from odb_sim.inputs.files import check_files, write_csv
from odb_sim.inputs.lengths import load_lengths
from odb_sim.studies.runs import Driver, run

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import WIRE_SIZE
from tests.helpers.commands import get_figures, refuse
from tests.helpers.simulated import make_run

SIMULATE = ["simulate", "gsm8k", "--ranks", "2", "--samples", "200", "--token-budget", "4096"]


def test_the_dearest_that_is_allowed_gives_numbers(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"format": "odb-costs", "version": 2, "loader": {"sample_s": LARGEST_S}}))
    figures = get_figures(SIMULATE, "--slow-loader", "0:1e6", "--cost-model", str(costs))
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))


@pytest.mark.parametrize("text", ["1_000", "٣", "1e3", "0x10", "1.0", "", "--1", "9" * 5000])
def test_a_length_is_written_in_digits(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"total_tokens,x\n{text},1\n", encoding="utf-8")
    assert f"{path}:2: total_tokens is " in refuse(
        capsys, ["simulate", str(path), "--ranks", "1", "--token-budget", "10"]
    )


def test_spaces_and_signs_are_let_be(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("total_tokens\n 7\n+8 \n")
    assert load_lengths(str(path)).tokens.tolist() == [7, 8]


@pytest.mark.parametrize("option", ["--steps-csv", "--trace", "--html", "--perfetto"])
def test_a_file_named_dash_is_not_made_by_chance(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "./-" in refuse(capsys, [*SIMULATE, option, "-"])
    assert not list(tmp_path.iterdir())
    assert "standard input" in refuse(capsys, ["simulate", "-", *SIMULATE[2:]])


@pytest.mark.parametrize("option", ["--json", "--steps-csv", "--trace", "--perfetto"])
def test_a_full_disk_is_told_with_the_file(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    assert "/dev/full: No space left" in refuse(capsys, [*SIMULATE, option, "/dev/full"])


def test_half_a_file_does_not_stay(tmp_path: Path) -> None:
    def break_off() -> Iterator[list[str]]:
        yield ["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_csv(tmp_path / "steps.csv", break_off())
    assert not list(tmp_path.iterdir())


def test_what_is_read_of_a_folder_is_not_written(tmp_path: Path) -> None:
    (shard := tmp_path / "data.arrow").touch()
    with pytest.raises(UsageError, match="contents would be lost"):
        check_files(shard, reads=[tmp_path])


@pytest.mark.parametrize(
    "command", ["simulate", "compare", "sweep", "tune", "plan", "micro-batches", "lengths", "replay"]
)
def test_a_device_that_never_ends_is_not_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(EXAMPLES[command])[1:]
    assert "/dev/zero: a device" in refuse(capsys, [words[0], "/dev/zero", *words[2:]])


def test_a_link_that_leads_nowhere_is_no_name_on_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (loop := tmp_path / "tokenizer").symlink_to(tmp_path / "tokenizer")
    (texts := tmp_path / "texts.jsonl").write_text('{"text": "one"}\n')
    assert f"{loop}: a link that leads to no file" in refuse(capsys, ["lengths", str(texts), "--tokenizer", str(loop)])


def test_host_memory_is_not_negative(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--host-bytes-per-token" in refuse(
        capsys, ["tune", "gsm8k", "--ranks", "2", "--memory-tokens", "4096", "--host-bytes-per-token", "-1"]
    )


@pytest.mark.parametrize("policy", ["odb", "packing", "standard"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("driver", [Driver.ROUNDS, Driver.EVENTS])
def test_squares_of_long_rows_do_not_wrap(policy: str, layout: Layout, driver: Driver) -> None:
    settings = {"policy": policy, "layout": layout, "driver": driver}
    result = run(make_run([2**31 - 1] * 40, 2, budget_tokens=10 * 2**31, window_samples=20, **settings))
    assert sum(row.compute_s for row in result.rows) == pytest.approx(40 * (2.0**31 - 1) ** 2 * 2e-9, rel=0.01)


def test_costs_that_64_bits_do_not_hold_go_to_the_events() -> None:
    settings = {"budget_tokens": 10 * 2**31, "window_samples": 20, "cost": get_cost("attention/1")}
    assert run(make_run([2**31 - 1] * 40, 2, **settings)).summary.driver == "events"


def test_the_glossary_says_how_long_an_offer_is() -> None:
    text = (Path(__file__).parents[2] / "simulator/odb_sim/GLOSSARY.md").read_text(encoding="utf-8")
    assert f"b = {8 * WIRE_SIZE} of an offer ({WIRE_SIZE} integers of 8 bytes" in text
