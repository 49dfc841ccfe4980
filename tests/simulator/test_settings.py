"""Settings that cost an epoch more than 2 % are cautioned of, with one that really does better, and only these."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from odb_sim.engine.cautions import About
from odb_sim.inputs.conditions import BudgetTable, Conditions, Fault, FaultKind
from odb_sim.inputs.costs import Costs, NetworkCost
from odb_sim.studies import settings
from odb_sim.studies.runs import Run, run
from odb_sim.studies.settings import COSTLY, list_costly

from tests.helpers.simulated import make_run

FIELDS = {
    "--window": "window_samples",
    "--depth": "depth_steps",
    "--ramp": "ramp_rounds",
    "--max-age": "max_age_rounds",
}
FAR = Costs(network=NetworkCost(alpha_s=0.3))
"""Ranks so far apart that a round waits for its exchange, unless something is queued meanwhile."""


def build(trace: str, budget: int, **given: Any) -> Run:
    return make_run(trace, 8, budget_tokens=budget, **given)


def ask(what: Run) -> dict[str, tuple[int, float]]:
    """Returns for each option in a caution the value that does better, and the cost of the given one."""
    found = {}
    for caution in list_costly(what, run(what).summary):
        assert caution.about is About.SETTING
        said = re.fullmatch(
            r"(--[\w-]+) (\d+) instead of \d+ would save ([\d.]+)% of this epoch \([\d,]+ tokens/s\)", caution.text
        )
        assert said is not None, caution.text
        found[said[1]] = int(said[2]), float(said[3]) / 100
    return found


CASES = [
    ("--window", build("llamafactory_demos", 46_184, window_samples=8)),
    ("--window", build("gsm8k", 4096, window_samples=256)),
    ("--depth", build("gsm8k", 4096, window_samples=160, ramp_rounds=0, depth_steps=1, costs=FAR)),
    ("--max-age", build("azure_llm_2023_code", 30_000, window_samples=64, max_age_rounds=1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "what"), CASES)
def test_what_is_said_to_do_better_does(option: str, what: Run) -> None:
    found = ask(what)
    assert option in found
    rate = run(what).summary.tokens_per_s
    for name, (better, cost) in found.items():
        assert cost >= COSTLY
        assert run(replace(what, **{FIELDS[name]: better})).summary.tokens_per_s == pytest.approx(
            rate / (1 - cost), rel=1e-3
        )


def test_a_window_that_is_far_too_small_is_seen_and_how_large_it_should_be() -> None:
    better, cost = ask(CASES[0][1])["--window"]
    assert better > 200
    assert cost > 0.5


def test_where_the_window_is_a_whole_shard_it_is_the_ramp_that_costs() -> None:
    found = ask(build("llamafactory_demos", 46_184, window_samples=600))
    assert set(found) == {"--ramp"}


def test_good_settings_are_let_be() -> None:
    assert ask(build("mm_mix_real", 8192, window_samples=720, ramp_rounds=0)) == {}


def test_nothing_is_said_where_a_setting_has_no_say() -> None:
    assert ask(build("gsm8k", 4096, samples=2000, update_samples=256, window_samples=8)) == {}
    what = build("gsm8k", 4096, window_samples=8)
    for other in (
        replace(what, policy="standard"),
        replace(what, budget_schedule=BudgetTable(((0, 4096),))),
        replace(what, conditions=Conditions(faults=(Fault(FaultKind.STOP, 0, 5),))),
        replace(what, conditions=Conditions(jitter=0.1)),
    ):
        assert list_costly(other, run(other).summary) == ()


def test_an_epoch_too_long_to_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LARGEST_TRIED", 1999)
    what = build("gsm8k", 4096, samples=2000, window_samples=8)
    (caution,) = list_costly(what, run(what).summary)
    assert caution.about is About.UNTRIED
    monkeypatch.setattr(settings, "LARGEST_TRIED", 2000)
    assert len(ask(what)) > 0
