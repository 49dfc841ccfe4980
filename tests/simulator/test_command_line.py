"""One spelling for one thing: what all commands have in common."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest
from odb_sim.cli.main import EXAMPLES, build_parser, main

from tests.helpers.commands import get_figures, refuse


def get_commands() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    (found,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


COMMANDS = get_commands()


def get_options(command: str) -> dict[str, argparse.Action]:
    return {name: action for action in COMMANDS[command]._actions for name in action.option_strings}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_begins_with_an_example_that_can_be_parsed(command: str) -> None:
    example = EXAMPLES[command]
    assert COMMANDS[command].format_help().startswith(f"example: {example}\n\nusage: odb-ref {command}")
    program, *arguments = shlex.split(example)
    assert program == "odb-ref"
    assert build_parser().parse_args(arguments).command == command


def test_a_name_means_one_thing() -> None:
    """Options of the same name take values of the same kind in every command, and things of one kind have one name."""
    kinds: dict[str, set[object]] = {}
    for command in COMMANDS:
        for name, action in get_options(command).items():
            kinds.setdefault(name, set()).add(
                "flag" if action.nargs == 0 else str(action.metavar or "").partition("[")[0]
            )
    named = {name: {str(item) for item in found if item} for name, found in kinds.items()}
    for name in ("--token-budget", "--shards", "--workers", "--json", "--limit", "--processes", "--cost-model"):
        assert len(named[name]) <= 1, f"{name}: {named[name]}"
    # `plan_all` says budget, and so does its command.
    assert [command for command in COMMANDS if "--budget" in get_options(command)] == ["micro-batches"]
    for wrong in ("--policies", "--rule", "--max-age-rounds", "--dot"):
        assert wrong not in kinds, wrong
    # These two write files, but no figures.
    assert [command for command in COMMANDS if "--json" not in get_options(command)] == ["demo", "view"]


RUN_OPTIONS = (
    "--seed", "--samples", "--shards", "--max-age", "--ramp", "--limit", "--cost-model", "--workers",
    "--prefetch-factor", "--transport", "--jitter", "--slow-rank", "--slow-loader",
)  # fmt: skip


@pytest.mark.parametrize("command", ["simulate", "compare", "sweep", "tune"])
def test_every_command_that_simulates_has_the_run_options(command: str) -> None:
    assert set(RUN_OPTIONS) - get_options(command).keys() == set()
    assert ("--quota" in get_options(command)) == (command != "tune")


SMALL = ["gsm8k", "--ranks", "2", "--samples", "60"]
GIVEN = {
    "simulate": [*SMALL, "--token-budget", "2000", "--window", "16"],
    "compare": [*SMALL, "--token-budget", "2000", "--window", "16", "--policy", "odb,standard"],
    "sweep": [*SMALL, "--token-budget", "2000", "--window", "16", "--processes", "1"],
    "explore": ["--shard-sizes", "1,1"],
}


@pytest.mark.parametrize("command", GIVEN)
def test_json_to_standard_output_is_all_that_stands_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = get_figures([command, *GIVEN[command]])
    tables = capsys.readouterr().out
    assert main([command, *GIVEN[command], "--json", "-"]) == 0
    shown = capsys.readouterr()

    def drop_times(value: object) -> object:
        if isinstance(value, dict):
            kept = {key: drop_times(item) for key, item in value.items()}
            return {key: item for key, item in kept.items() if key not in ("wall_time_s", "states_per_s")}
        return [drop_times(item) for item in value] if isinstance(value, list) else value

    assert drop_times(json.loads(shown.out)) == drop_times(figures)
    assert len(shown.err.splitlines()) >= len(tables.splitlines()) > 0
    assert not Path("-").exists()


def test_run_options_reach_a_sweep() -> None:
    """A sweep simulates what `simulate` does with the same options."""
    options = "--max-age 1 --ramp 0 --shards uneven --mode quota --quota 40 --workers 2"
    given = f"--ranks 2 --token-budget 1000 --window 16 --samples 80 {options}"
    figures = get_figures(f"simulate gsm8k {given}")
    (point,) = get_figures(f"sweep gsm8k --processes 1 {given}")
    assert figures["mode"] == "quota"
    same = figures.keys() & point.keys() - {"wall_time_s"}
    assert len(same) > 20
    assert {key: point[key] for key in same} == {key: figures[key] for key in same}


def test_a_limit_holds_in_a_comparison_and_a_sweep() -> None:
    steps = {}
    for limit in ("", "--limit image_tokens=1500"):
        options = f"mm_mix_real --ranks 2 --samples 200 --token-budget 8000 --window 32 --policy odb {limit}"
        for command in ("compare", "sweep"):
            (figures,) = get_figures(f"{command} {options}", *["--processes", "1"] * (command == "sweep"))
            steps[command, bool(limit)] = figures["steps"]
    assert steps["compare", True] == steps["sweep", True] > steps["compare", False] == steps["sweep", False]


FIXED, BASELINE = "with --global-batch", "without a policy that runs the protocol"


WITHOUT_EFFECT = [
    ("--global-batch 64", "--window 32", FIXED),
    ("--global-batch 64", "--max-age 2", FIXED),
    ("--global-batch 64", "--ramp 1", FIXED),
    ("--global-batch 64 --layout packed", "--padding-share 4", "with --layout packed"),
    ("", "--padding-share 4", "without --global-batch"),
    ("--policy standard", "--window 256", BASELINE),
    ("--policy standard", "--depth 4", BASELINE),
    ("--policy standard", "--transport gather", BASELINE),
    ("--policy standard", "--layout padded", BASELINE),
    ("--policy standard", "--order fullest", BASELINE),
    ("--policy standard", "--cost attention/600", BASELINE),
    ("--policy standard", "--sizes powers", BASELINE),
    ("--policy standard", "--ramp 1", BASELINE),
    ("--policy standard", "--max-age 2", BASELINE),
    ("--policy hfg", "--shards uneven", "on hfg, with shards that are always even"),
    ("--policy standard", "--shards shared", "on standard, with shards that are always even"),
]
OF_SIMULATE = [
    ("--policy standard", "--deadline 5.0", BASELINE),
    ("", "--deadline 5.0", "without --fault"),
    ("--policy standard", "--driver events", BASELINE),
]


@pytest.mark.parametrize(
    ("command", "given", "option", "why"),
    [
        *((command, *row) for command in ("simulate", "compare", "sweep") for row in WITHOUT_EFFECT),
        *(("simulate", *row) for row in OF_SIMULATE),
    ],
)
def test_an_option_without_effect_is_refused(
    command: str, given: str, option: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = [] if "--policy" in given else ["--policy", "odb"]
    arguments = [command, *SMALL, "--token-budget", "2000", *given.split(), *policy, *option.split()]
    assert f"{option}: has no effect {why}" in refuse(capsys, arguments)


@pytest.mark.parametrize("command", ["simulate", "compare", "sweep"])
def test_fixed_updates_name_no_window(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, policies = tmp_path / "out.json", "odb" if command == "simulate" else "odb,standard"
    updates = [command, *SMALL, "--token-budget", "2000", "--global-batch", "64", "--json", str(path)]
    assert main([*updates, "--policy", policies]) == 0
    figures = json.loads(path.read_text())
    assert {one["window"] for one in (figures if isinstance(figures, list) else [figures])} == {None}
    assert "window 2" not in capsys.readouterr().out
    if command != "simulate":  # the peer has windows all the same
        assert main([*updates, "--policy", "odb,standard,peer", "--window", "32"]) == 0
        assert [one["window"] for one in json.loads(path.read_text())] == [None, None, 32]
