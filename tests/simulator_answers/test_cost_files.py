"""Cost-model files are read back as written, and nonsense is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from odb_sim.inputs.cost_files import encode_costs, load_costs, write_costs
from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost, LoaderCost, NetworkCost, PricedTransport, Ranges

from odb_ref.core.errors import UsageError
from tests.helpers.commands import get_figures


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    costs = Costs(
        gpu=GpuCost(fixed_s=0.3, per_token2_s=0),
        network=NetworkCost(transport=PricedTransport.GATHER),
        loader=LoaderCost(workers=7),
    )
    write_costs(tmp_path / "costs.json", costs, {"whence": "a test"})
    assert load_costs(tmp_path / "costs.json") == costs


def test_what_is_left_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"format": "odb-costs", "version": 2, "gpu": {"fixed_s": 1}}')
    assert load_costs(path) == Costs(gpu=GpuCost(fixed_s=1), ranges=Ranges())


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('"per_token_s": 0.00012', '"per_token_s": -1', 6, "gpu.per_token_s"),
        ('"fixed_s": 0.05', '"fixed_s": NaN', 5, "gpu.fixed_s"),
        ('"fixed_s": 0.05', '"fixed_s": 1e400', 5, "gpu.fixed_s"),
        ('"fixed_s": 0.05', '"fixed_s": 1e9', 5, "more than a day"),
        ('"fixed_s": 0.05', f'"fixed_s": 1{400 * "0"}', 5, "more than a day"),
        ('"fixed_s": 0.05', '"fixed_s": "0.05"', 5, "expected a number"),
        ('"fixed_s": 0.05', '"fixed_s": true', 5, "expected a number"),
        ('"each_step": false', '"each_step": 1', 16, "expected true or false"),
        ('"fixed_s"', '"fixed"', 5, "gpu.fixed is not known"),
        ('"alpha_s": 5e-05', '"alpha_s": -Infinity', 19, "network.alpha_s"),
        ('"reduce"', '"carrier pigeon"', 21, "network.transport"),
        ('"workers": 4', '"workers": 0', 24, "loader.workers"),
        ('"workers": 4', '"workers": 2.5', 24, "a whole number"),
        ('"network"', '"netwerk"', 18, "netwerk is not a part"),
        ('"odb-costs"', '"odb-trace"', 2, "not a cost model"),
        ('"version": 2', '"version": 1', 3, "version"),
    ],
)
def test_nonsense_is_refused_with_its_line(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    path = tmp_path / "costs.json"
    text = json.dumps(encode_costs(Costs()), indent=2)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        load_costs(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", '{"format": "odb-costs", "version": 2, "gpu": 3}', "{", "\x00"),
        '{"format": "odb-costs", "version": 2, "gpu": {"per_token_s": 1}, "gpu": {"fixed_s": 1}}',
        '{"format": "odb-costs", "version": 2, "fitted": {"ranks": -3}}',
    ],
)
def test_what_is_no_cost_model_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=str(path)) as caught:
        load_costs(path)
    assert "\n" not in str(caught.value)


def test_a_model_in_which_steps_cost_nothing_is_refused(tmp_path: Path) -> None:
    write_costs(
        tmp_path / "c.json", Costs(gpu=GpuCost(fixed_s=0, per_token_s=0, per_token2_s=0), collective=NO_COLLECTIVE)
    )
    with pytest.raises(UsageError, match="costs nothing"):
        load_costs(tmp_path / "c.json")


def test_a_missing_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_costs(tmp_path / "none.json")


@pytest.mark.parametrize(
    "rows",
    [
        *("7", "[[1, 2]]", "[[100, 0.1], [50, 0.2]]", '[[1, 2], ["3", 4]]', "[[1, 2], 3]", "null", '["ab", "cd"]'),
        *("[[5, 1], [5, 2]]", "[[0, 1], [5, 2]]", "[[5, -1], [6, 1]]", "[[5, 1], [6]]"),
        f"[[5, 1], [1{'0' * 400}, 2]]",
    ],
)
def test_a_step_table_that_makes_no_sense_is_refused(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(f'{{"format": "odb-costs",\n"version": 2,\n"step_table": {{\n"rows": {rows}}}}}')
    with pytest.raises(UsageError, match=f"^{path}:4: step_table.rows "):
        load_costs(path)


def test_a_step_table_is_read_and_used(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"format": "odb-costs", "version": 2, "step_table": {"rows": [[1, 5.0], [100000, 5.0]]}}')
    assert load_costs(path).step_table.compute_step_s(150) == pytest.approx(5.0)
    run = f"simulate gsm8k --ranks 2 --token-budget 2048 --samples 50 --cost-model {path}"
    figures = get_figures(run)
    assert figures["sim_time_s"] == pytest.approx(5.02 * figures["steps"], rel=0.01)
