"""Tuning: the cheapest setting within the tolerance, found with few simulations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import pytest
from odb_sim.cli.main import main
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.costs import Costs, GpuCost
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.cells import CellAnswer, Runner
from odb_sim.studies.search import SettingSearch, compute_host_tokens
from odb_sim.studies.sweep import Study, run_grid
from odb_sim.studies.tune import (
    NAMES,
    Question,
    Tuning,
    compute_budget_ladder,
    compute_ladder,
    list_choices,
    tune,
)

from odb_ref.core.batching.cost import TOKENS
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.config import Terms
from odb_ref.core.errors import UsageError
from tests.helpers.commands import get_figures, refuse
from tests.simulator_answers import brute
from tests.simulator_answers.helpers import make_lengths

LENGTHS = make_lengths(600)


@cache
def ask(tolerance: float = 0.02, memory_tokens: int = 4096, window_max: int = 256) -> Tuning:
    question = Question(
        study=Study(lengths=LENGTHS), ranks=4, memory_tokens=memory_tokens, window_max=window_max, tolerance=tolerance
    )
    return tune(question)


def test_the_recommendation_is_within_the_tolerance_and_cheapest_of_all_that_are() -> None:
    tuning = ask()
    best = max(answer.rate for answer in tuning.tried)
    assert tuning.best.rate == best
    good = [answer for answer in tuning.tried if answer.rate >= 0.99 * best]
    assert tuning.recommended in good
    assert compute_host_tokens(tuning.recommended) <= 1.01 * min(map(compute_host_tokens, good))


def answer(rate: float, host: int, **point: int | str) -> CellAnswer:
    """Returns an answer of ``rate`` tokens per second, whose loader holds ``host``."""
    one = ask().recommended
    summary = replace(one.summary, tokens_per_s=rate, padding_ratio=0.0, real_tokens=9, samples_emitted=9)
    settings = {"window_samples": 64, "budget_tokens": host - 3 * 64, "depth_steps": 1, "ramp_rounds": None, **point}
    return replace(one, point=replace(one.point, **settings), summary=summary)  # type: ignore[arg-type]


def choose(*found: CellAnswer) -> CellAnswer:
    """Returns what the search chooses from ``found`` if all other answers are slow."""
    dimensions = {"max_age_rounds": (2, 4), "cost": ("tokens", "attention/9")}
    slow = answer(1, 1000)
    search = SettingSearch(lambda points: [replace(slow, point=point) for point in points], dimensions, 0.02)
    search.answers = {each.point: each for each in found}
    return search.improve(found[0].point)


def test_less_than_a_percent_of_memory_does_not_buy_a_setting_of_ones_own() -> None:
    plain = answer(100, 1009, max_age_rounds=4, cost="tokens")
    changed = answer(100, 1000, max_age_rounds=2, cost="attention/9")
    assert choose(plain, changed) is plain
    assert choose(answer(99.5, 1009, max_age_rounds=4, cost="tokens"), changed).point == plain.point
    much = answer(100, 900, max_age_rounds=2, cost="attention/9")
    assert choose(plain, much) is much


def test_reasons_say_what_decided() -> None:
    """No setting that is good enough is called too far below the best, and none that is too far below is called good enough."""
    tuning = ask()
    for name, curve in tuning.curves.items():
        at = next(place for place, one in enumerate(curve) if one is tuning.recommended)
        (reason,) = [text for text in tuning.reasons[1:] if text.startswith(f"{NAMES[name][0]} ")]
        is_below = at > 0 and curve[at - 1].rate < 0.99 * tuning.best.rate
        assert ("below the best" in reason) == is_below
        assert "0.00%" not in reason


def test_what_is_given_is_held() -> None:
    held = {"ramp_rounds": 2, "max_age_rounds": 2, "cost": TOKENS}
    terms = replace(Terms(), **held)  # type: ignore[arg-type]
    question = Question(
        study=Study(lengths=LENGTHS, terms=terms), ranks=4, memory_tokens=4096, window_max=16, held=frozenset(held)
    )
    tuning = tune(question)
    assert {(one.point.ramp_rounds, one.point.max_age_rounds, one.point.cost) for one in tuning.tried} == {
        (2, 2, "tokens")
    }
    assert "age 2: as given" in tuning.reasons
    assert "--ramp 2 --max-age 2" in tuning.options


def test_options_without_a_say_are_refused_and_what_is_given_is_tuned_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned = "tune gsm8k --samples 96 --ranks 2 --memory-tokens 2048 --processes 1 --no-beside"
    updates = f"{tuned} --global-batch 32"
    figures = get_figures(f"{updates} --padding-share 4 --cost tokens")
    assert {(one["padding_share"], one["cost"]) for one in figures["tried"]} == {(4, "tokens")}
    capsys.readouterr()
    swept = "sweep gsm8k --ranks 2 --token-budget 2048 --processes 1"
    for command, why in (
        (f"{updates} --window-max 64", "--window-max 64: has no effect with --global-batch"),
        (f"{updates} --ramp 1", "--ramp has no effect with --global-batch"),
        (f"{tuned} --padding-share 4", "--padding-share has no effect without --global-batch"),
        (f"{swept} --padding-share 4", "--padding-share 4: has no effect without --global-batch"),
        (f"{swept} --global-batch 32 --window 64,128", "--window 64,128: has no effect with --global-batch"),
    ):
        assert why in refuse(capsys, command.split())


def test_no_single_step_down_from_it_is_good_enough() -> None:
    tuning = ask()
    point, best = tuning.recommended.point, tuning.best.rate
    for name in ("window_samples", "budget_tokens", "depth_steps"):
        curve = tuning.curves[name]
        values = [getattr(answer.point, name) for answer in curve]
        assert values == sorted(set(values))
        at = values.index(getattr(point, name))
        if at:
            assert curve[at - 1].rate < 0.99 * best
    windows = compute_ladder(600 // 4, 8)
    below = windows[windows.index(point.window_samples) - 1]
    assert below in [answer.point.window_samples for answer in tuning.curves["window_samples"]]


def test_limits_are_kept_and_few_simulations_are_needed() -> None:
    tuning = ask()
    assert len(tuning.tried) <= 200
    assert all(answer.point.budget_tokens <= 4096 for answer in tuning.tried)
    assert all(answer.point.window_samples <= 256 for answer in tuning.tried)
    assert all(answer.summary.over_budget_groups == 0 for answer in tuning.tried)


def test_the_answer_is_the_same_every_time() -> None:
    first, second = ask(), ask.__wrapped__()
    assert [a.to_json() for a in first.tried] == [a.to_json() for a in second.tried]
    assert first.reasons == second.reasons


@pytest.mark.deep
def test_more_tolerance_never_costs_more() -> None:
    costs = [compute_host_tokens(ask(tolerance, window_max=64).recommended) for tolerance in (0.0, 0.02, 0.2)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_samples_that_fit_no_memory_are_counted() -> None:
    tuning = ask(memory_tokens=512, window_max=16)
    assert tuning.samples_over_memory == int((LENGTHS.tokens > 512).sum()) > 0


def test_the_rate_is_that_of_the_epoch_asked_about() -> None:
    tuning = ask()
    question = Question(study=Study(lengths=LENGTHS), ranks=4, memory_tokens=4096)
    (answer,) = run_grid(question.study, [tuning.recommended.point], Runner())
    assert answer.summary.samples_total == 600
    assert answer.summary.tokens_per_s == tuning.recommended.rate
    wide = tune(replace(question, study=replace(question.study, samples=80)))
    assert "no window above the 20 samples of a rank was tried" in wide.cautions[0]


def test_a_very_long_epoch_is_judged_by_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_sim.studies.tune.LARGEST_JUDGED", 400)
    question = Question(study=Study(lengths=LENGTHS, samples=4_000), ranks=4, memory_tokens=4096, window_max=16)
    tuning = tune(question)
    assert {answer.summary.samples_total for answer in tuning.tried} == {400}
    assert "400 samples was judged instead of 4,000" in tuning.cautions[0]


def test_what_needs_a_choice_is_shown_beside_at_what_is_best_for_it() -> None:
    question = Question(study=Study(lengths=LENGTHS), ranks=4, memory_tokens=4096, window_max=64, tolerance=0.02)
    choices = {choice[0]: choice for choice in list_choices(question)}
    assert set(choices) == {
        "--layout packed", "--shards shared", "--layout packed --shards shared", "--order fullest", "--order sampler",
        "--sizes threes", "--sizes powers",
    }  # fmt: skip
    tuning = tune(question, choices=[choices["--layout packed"], choices["--sizes threes"]])
    found = {item.choice: item for item in tuning.beside}
    assert set(found) == {"--layout packed", "--sizes threes"}
    packed = found["--layout packed"]
    assert packed.answer.summary.layout == "packed"
    assert packed.answer.point != tuning.recommended.point
    point = packed.answer.point
    options = f"--window {point.window_samples} --token-budget {point.budget_tokens} --ramp {point.ramp_rounds}"
    assert packed.options == f"--layout packed {options}"
    assert packed.answer.rate > tuning.recommended.rate
    assert {answer.summary.layout for answer in tuning.tried} == {"padded"}
    beside = brute.compare_beside(question, tuning, [choices[packed.choice]])
    assert beside[packed.choice] >= brute.ENOUGH_BESIDE


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "ranks", "update", "samples"),
    [
        ("gsm8k", 16, None, 1000),
        ("gsm8k", 64, None, None),
        ("mm_mix_real", 8, None, None),
        ("llamafactory_demos", 8, None, None),
        ("mm_mix_real", 8, 256, None),
    ],
)
def test_no_setting_beats_the_recommendation_by_more_than_the_tolerance(
    name: str, ranks: int, update: int | None, samples: int | None
) -> None:
    question = brute.ask(load_lengths(name), ranks, update_samples=update, samples=samples)
    some: dict[str, tuple[int, ...]] = {
        "window_samples": tuple(compute_ladder(question.shard_samples, 16)[::2]),
        "budget_tokens": tuple(compute_budget_ladder(question.memory_tokens)[::2]),
        "depth_steps": (2, 8),
        "ramp_rounds": (0, 3),
        "max_age_rounds": (1, 4, 16),
    }
    assert brute.try_all(question, some).share >= brute.ENOUGH


def test_updates_of_a_global_batch_are_tuned_by_what_has_a_say() -> None:
    terms = Terms(update_samples=64)
    study = Study(lengths=LENGTHS, terms=terms, global_batch=GlobalBatch(samples=64))
    tuning = tune(Question(study=study, ranks=4, memory_tokens=4096))
    assert set(tuning.curves) == {"depth_steps", "cost", "budget_tokens", "padding_share"}
    assert {answer.summary.samples_per_update for answer in tuning.tried} == {600 / 10}
    assert tuning.options.startswith("--token-budget ")
    assert "--window" not in tuning.options
    assert "--order fullest" not in {item.choice for item in tuning.beside}
    assert not any("every step is an update" in text for text in tuning.cautions)
    assert any("every step is an update" in text for text in ask().cautions)


def test_padding_that_costs_more_than_steps_is_avoided_further() -> None:
    """If a step costs almost nothing, less padding is always better: the last share tried, which is reported."""
    costs = Costs(gpu=GpuCost(fixed_s=1e-5, per_token_s=1e-4, per_token2_s=0))
    study = Study(lengths=LENGTHS, terms=Terms(update_samples=200), global_batch=GlobalBatch(samples=200), costs=costs)
    tuning = tune(Question(study=study, ranks=2, memory_tokens=16_384, tolerance=0.0))
    assert tuning.recommended.point.padding_share == 128
    assert any("no padding share above 128 was tried" in text for text in tuning.cautions)
    (usual,) = run_grid(study, [replace(tuning.recommended.point, padding_share=16)], Runner())
    assert tuning.recommended.rate > 1.01 * usual.rate


def test_shared_shards_are_tuned_as_such() -> None:
    """They are faster than own shards at the recommended setting, because no rank waits for another's samples."""
    study = Study(lengths=LENGTHS, sharding=Sharding.SHARED, terms=Terms(layout=Layout.PACKED))
    question = Question(study=study, ranks=4, memory_tokens=4096, window_max=64, tolerance=0.02)
    tuning = tune(question)
    assert {answer.summary.shards for answer in tuning.tried} == {"shared"}
    point = tuning.recommended.point
    fixed = replace(question, study=replace(study, sharding=Sharding.EVEN))
    (even,) = run_grid(fixed.study, [point], Runner())
    assert tuning.recommended.rate > even.rate


def test_ladders() -> None:
    assert compute_ladder(100, 8) == [8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert compute_ladder(5, 8) == [5]
    assert compute_budget_ladder(4096)[0] == 512
    assert compute_budget_ladder(4096)[-1] == 4096
    assert compute_budget_ladder(1) == [1]


@pytest.mark.parametrize(
    "wrong", [{"ranks": 0}, {"memory_tokens": 0}, {"window_max": 0}, {"tolerance": -0.1}, {"tolerance": float("nan")}]
)
def test_a_question_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    good: dict[str, float] = {"ranks": 4, "memory_tokens": 4096}
    with pytest.raises(UsageError):
        Question(study=Study(lengths=LENGTHS), **(good | wrong))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["even", "shared"])
def test_the_command(tmp_path: Path, shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "t.html"
    command = f"tune gsm8k --samples 100 --ranks 2 --memory-tokens 2048 --window-max 32 --shards {shards}"
    data = get_figures(f"{command} --processes 1 --no-beside --host-bytes-per-token 1 --html {page}")
    assert data["beside"] == []
    assert data["recommended"]["shards"] == shards
    text = capsys.readouterr().out
    assert f"--window {data['window']} --token-budget {data['token_budget']} --depth {data['depth']}" in data["options"]
    assert f"Recommended: {data['options']};" in text
    assert f"at most {ceil(data['host_mib'])} MiB of host memory" in text
    assert len(data["reasons"]) == 7
    assert data["options"] in page.read_text()
    assert main(["tune", "gsm8k", "--ranks", "0", "--memory-tokens", "2048", "--processes", "1"]) == 2
    assert main(["tune", "gsm8k", "--ranks", "2", "--memory-tokens", "-1", "--processes", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
