"""Replay: equal if the run decided like the core, and otherwise the first difference."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.engine.updates import EVERY_STEP, GlobalBatch
from odb_sim.inputs.conditions import Conditions, Fault, FaultKind, parse_budget_schedule
from odb_sim.inputs.costs import Costs, GpuCost
from odb_sim.recorded.calibrate import calibrate
from odb_sim.recorded.replay import Replay, replay
from odb_sim.recorded.runs import load_runs

from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode
from tests.helpers.commands import get_figures, refuse
from tests.helpers.tamper import Line, Tampered, tamper
from tests.helpers.world import Fault as Accepting
from tests.helpers.world import make_configs, run_by_arrival
from tests.simulator_answers.helpers import record


def replay_file(path: Path, costs: Costs | None = None) -> Replay:
    (recorded,) = load_runs([path])
    return replay(recorded, costs=costs)


def find_steps(trace: Tampered, rank: int, round_: int) -> list[Line]:
    steps: list[Line] = trace.effects("collate", rank)[round_]["steps"]
    return steps


@pytest.mark.parametrize("policy", ["odb", "paper"])
@pytest.mark.parametrize(("mode", "quota"), [(Mode.JOIN, None), (Mode.QUOTA, None), (Mode.QUOTA, 150)])
def test_a_simulated_run_replays_equal(tmp_path: Path, policy: str, mode: Mode, quota: int | None) -> None:
    path = record(tmp_path / "t.ndjson.gz", policy=policy, mode=mode, quota_samples=quota)
    result = replay_file(path)
    assert result.difference == ""
    assert result.measured_steps == result.predicted_steps > 0
    assert result.decisions == 3 * result.measured_steps


def test_a_job_that_accumulated_its_steps_is_predicted_so(tmp_path: Path) -> None:
    """A trace does not record which of its steps ended an update. Ranks wait for one another only there."""
    update = GlobalBatch(samples=96)
    (recorded,) = load_runs([record(tmp_path / "t.ndjson", global_batch=update)])
    told, untold = (replay(recorded, costs=Costs(), global_batch=goal) for goal in (update, EVERY_STEP))
    assert told.is_equal
    assert untold.is_equal
    assert told.timing.total_error == pytest.approx(0, abs=1e-3)
    assert untold.timing.total_error > 0.01


@pytest.mark.parametrize("text", ["0:900", "0:2048,5:700,20:2048", "0:500,12:2000,24:1000"])
@pytest.mark.parametrize("quota", [None, 300])
def test_a_run_whose_budget_changed_replays_equal(tmp_path: Path, text: str, quota: int | None) -> None:
    """Spec: R15.1, R15.3."""
    mode = Mode.JOIN if quota is None else Mode.QUOTA
    schedule = parse_budget_schedule(text)
    result = replay_file(record(tmp_path / "t.ndjson", mode=mode, quota_samples=quota, budget_schedule=schedule))
    assert result.difference == ""
    assert result.measured_steps == result.predicted_steps > 5


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_are_told_of_budgets_at_any_moment_replay_equal(tmp_path: Path, seed: int) -> None:
    """Spec: R15.2, R15.3. Each rank accepts its own budget, from the first round on or later."""
    draw = random.Random(seed)
    moments = [draw.choice((0, draw.randrange(200))) for _ in range(6)]
    faults = [Accepting("accept", draw.randrange(3), moment, draw.randint(5, 50)) for moment in moments]
    lengths = [[draw.randint(1, 14) for _ in range(40)] for _ in range(3)]
    path = tmp_path / "t.ndjson"
    run_by_arrival(lengths, make_configs(3), seed=seed, faults=faults, trace=path)
    assert '"budget_min":' in path.read_text()
    assert replay_file(path).difference == ""


def test_a_replay_notices_a_budget_that_was_not_the_runs(tmp_path: Path) -> None:
    path = record(tmp_path / "t.ndjson", budget_schedule=parse_budget_schedule("0:2048,5:700"))
    text = path.read_text()
    assert '"budget_min":700' in text
    path.write_text(text.replace('"budget_min":700', '"budget_min":900'))
    assert replay_file(path).difference
    path.write_text(text.replace('"budget_min":700', '"budget_min":0'))
    with pytest.raises(UsageError, match="agrees on a budget of 0 tokens"):
        load_runs([path])


def test_timing_does_not_change_a_replay(tmp_path: Path) -> None:
    path = record(tmp_path / "t.ndjson", conditions=Conditions(jitter=1.0, slow_ranks=((1, 5.0),)))
    assert replay_file(path).is_equal


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_run_that_ended_early_is_compared_as_far_as_it_got(tmp_path: Path, kind: FaultKind) -> None:
    at = {FaultKind.READ: 70, FaultKind.COLLATE: 3, FaultKind.STOP: 9, FaultKind.KILL: 9}[kind]
    path = record(tmp_path / "t.ndjson", conditions=Conditions(faults=(Fault(kind, 2, at),)))
    result = replay_file(path)
    assert result.outcome != "complete"
    assert result.difference == ""
    assert 0 < result.measured_steps == result.predicted_steps


def test_a_record_that_breaks_off_anywhere_replays_equal(tmp_path: Path) -> None:
    lines = record(tmp_path / "t.ndjson").read_text().splitlines(keepends=True)
    for cut in range(len(lines) // 5, len(lines), len(lines) // 5):
        (tmp_path / "cut.ndjson").write_text("".join(lines[:cut]))
        assert replay_file(tmp_path / "cut.ndjson").difference == ""


def test_the_first_difference_names_round_step_and_rank(tmp_path: Path) -> None:
    path = record(tmp_path / "t.ndjson", ramp_rounds=0)

    def swap(trace: Tampered) -> None:
        steps = find_steps(trace, rank=1, round_=2)
        steps[0]["positions"], steps[1]["positions"] = steps[1]["positions"], steps[0]["positions"]

    number = find_steps(Tampered(path), 1, 2)[0]["number"]
    result = replay_file(tamper(path, swap))
    assert not result.is_equal
    assert result.difference.startswith(f"round 2, step {number}, rank 1: positions (")


def test_a_missing_step_and_a_wrong_count_are_differences(tmp_path: Path) -> None:
    short = tamper(record(tmp_path / "a.ndjson"), lambda trace: find_steps(trace, 2, 1).pop())
    assert replay_file(short).difference.startswith("round 1, rank 2: ")
    page = tmp_path / "page.html"
    assert main(["replay", str(short), "--html", str(page)]) == 1
    assert "round 1, rank 2: " in page.read_text()
    wrong = tamper(record(tmp_path / "b.ndjson"), lambda trace: find_steps(trace, 0, 0)[0].update(counts=[1, 1, 1]))
    assert "rank 0: counts (1, 1, 1) recorded" in replay_file(wrong).difference


def test_times_are_predicted_exactly_by_the_costs_the_run_had(tmp_path: Path) -> None:
    costs = Costs(gpu=GpuCost(fixed_s=0.2))
    timing = replay_file(record(tmp_path / "t.ndjson", costs=costs), costs).timing
    assert timing.predicted_s == pytest.approx(timing.measured_s, rel=1e-5)
    assert timing.step_error < 1e-4
    other = replay_file(tmp_path / "t.ndjson", Costs(gpu=GpuCost(fixed_s=0.4))).timing
    assert other.total_error > 0.3


def test_a_record_without_times_has_no_timing(tmp_path: Path) -> None:
    path = tamper(record(tmp_path / "t.ndjson"), lambda trace: [record.pop("time_s") for record in trace.records])
    assert replay_file(path).timing is None
    assert replay_file(path).is_equal


def test_files_of_a_job_are_one_run(tmp_path: Path) -> None:
    head, *lines = record(tmp_path / "t.ndjson").read_text().splitlines(keepends=True)
    paths = []
    for rank in range(3):
        path = tmp_path / f"rank{rank}.ndjson"
        path.write_text(head + "".join(line for line in lines if json.loads(line)["rank"] == rank))
        paths.append(path)
    (recorded,) = load_runs(paths)
    assert replay(recorded).is_equal
    with pytest.raises(UsageError, match="no record of rank 2"):
        load_runs(paths[:2])


def test_a_resumed_epoch_and_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    def shift(trace: Tampered) -> None:
        del trace.events("samples_read")[0]["samples"][:5]

    with pytest.raises(UsageError, match="resumed"):
        load_runs([tamper(record(tmp_path / "a.ndjson"), shift)])
    strange = tamper(record(tmp_path / "b.ndjson"), lambda trace: trace.header["config"].update(rule="mine"))
    with pytest.raises(UsageError, match="unknown target rule 'mine'"):
        load_runs([strange])


def test_a_sample_with_more_costs_than_there_are_limits_is_refused(tmp_path: Path) -> None:
    def add(trace: Tampered) -> None:
        trace.events("samples_read")[0]["samples"][0].append(3)

    with pytest.raises(UsageError, match="reads a sample with 1 costs, not 0"):
        load_runs([tamper(record(tmp_path / "a.ndjson"), add)])


@pytest.mark.parametrize(("kind", "why"), [("collate", "it has not collated"), ("deliver", "was not delivered to it")])
def test_a_step_that_comes_from_nowhere_is_refused(kind: str, why: str, tmp_path: Path) -> None:
    def drop(trace: Tampered) -> None:
        record_, effect = next(trace.iterate(kind))
        record_["effects"].remove(effect)

    path = tamper(record(tmp_path / "t.ndjson"), drop)
    with pytest.raises(UsageError, match=rf"t\.ndjson.*: rank \d takes a step that {why}"):
        calibrate(load_runs([path]))


def test_the_command_s_exit_status_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(record(tmp_path / "t.ndjson"))
    (entry,) = get_figures(["replay", path])["replays"]
    assert entry["is_equal"] is True
    assert entry["measured_steps"] == entry["predicted_steps"]
    tamper(Path(path), lambda trace: find_steps(trace, 0, 0)[0]["positions"].reverse())
    assert main(["replay", path]) == 1
    assert "round 0, step 0, rank 0" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert main(["replay", path, "--depth", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_replay_is_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--replay", "t.ndjson"])
    assert "unrecognized arguments: --replay" in capsys.readouterr().err


def write_model(path: Path, **loader: float) -> None:
    costs = {"format": "odb-costs", "version": 2, "gpu": {"fixed_s": 0.01, "per_token_s": 1e-6}}
    path.write_text(json.dumps(costs | {"loader": loader}))


def simulate_priced(folder: Path, *options: str) -> tuple[Path, Path]:
    """Simulates a job that its loader limits. Returns its cost model and its trace."""
    model, trace = folder / "costs.json", folder / "t.ndjson"
    write_model(model, workers=4, sample_s=0.02)
    data = ["gsm8k", "--ranks", "2", "--token-budget", "4096", "--cost-model", str(model), "--trace", str(trace)]
    assert main(["simulate", *data, *options]) == 0
    return model, trace


def test_the_prediction_knows_the_workers_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another number of workers gives another time."""
    model, trace = simulate_priced(tmp_path, "--samples", "2000", "--workers", "8")

    def find_error(*options: str) -> float:
        figures = get_figures(["replay", str(trace), "--cost-model", str(model), *options])
        return float(figures["replays"][0]["timing"]["total_error"])

    assert abs(find_error()) < 1e-3
    trace.write_text(trace.read_text().replace('"workers":8,', ""))
    assert find_error() > 0.5, "an older trace does not say it, so the cost model's four are taken"
    assert abs(find_error("--workers", "8")) < 1e-3
    assert main(["replay", str(trace), "--workers", "-1"]) == 2
    capsys.readouterr()
    assert f"{trace}: a global batch of 1 samples" in refuse(capsys, ["replay", str(trace), "--global-batch", "1"])


def test_without_workers_nothing_is_priced_as_if_there_were_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the training thread reads is part of its steps, or is reported as left out."""
    model, trace = simulate_priced(tmp_path, "--samples", "1000")
    trace.write_text(trace.read_text().replace('"workers":4,', '"workers":0,'))

    def replay_with(*options: str) -> tuple[float, str]:
        figures = get_figures(["replay", str(trace), "--cost-model", str(model), *options])
        return float(figures["replays"][0]["timing"]["predicted_s"]), capsys.readouterr().out

    capsys.readouterr()
    inline_s, said = replay_with()
    loaded_s, said_of_four = replay_with("--workers", "4")
    assert inline_s < 0.6 * loaded_s
    assert "0 workers), and this cost model was not fitted to that" in said
    assert "Caution" not in said_of_four
    costs = ("sample_s", "per_token_s", "collate_step_s", "collate_per_token_s", "receive_sample_s")
    write_model(model, workers=1, **dict.fromkeys(costs, 0))
    assert "Caution" not in replay_with()[1], "the file says that steps hold what the loader does"
