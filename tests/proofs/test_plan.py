"""Plans of known lengths by the Python and by the proved model: `odb_ref.plan` beside proofs/Plan.v."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from odb_sim.inputs.lengths import list_bundled_names, load_lengths

from odb_ref.conformance.vectors import Problem, encode
from odb_ref.core.errors import UsageError
from odb_ref.plan import Options, division, packing, settling
from tests.conformance.ours import plan_here
from tests.proofs.conftest import Model
from tests.proofs.plans import EXACT, SHIPPED, Thresholds, draw_padded, draw_problem, make_cases, write_problem

DRAWN = 600


def show_plan(problem: Problem) -> str:
    """Returns the Python's plan in the model's format."""
    try:
        said = plan_here(encode(problem))
    except UsageError:
        return "refused"
    assert isinstance(said, dict)
    return str([[[*batch] for batch in row] for row in said["plan"]]).replace(",", "")


def find_difference(model: Model, seeds: range, thresholds: Thresholds = SHIPPED) -> str | None:
    """Returns the first problem for which the two plans differ."""
    return compare(model, [draw_problem(Random(seed)) for seed in seeds], thresholds)


def compare(model: Model, problems: list[Problem], thresholds: Thresholds = SHIPPED) -> str | None:
    said = model(" ".join(write_problem(problem, thresholds) for problem in problems))
    for problem, answer in zip(problems, said, strict=True):
        if (expected := show_plan(problem)) != answer:
            return f"{encode(problem)}:\n python {expected}\n model  {answer}"
    return None


def test_the_model_plans_as_the_python_does(model: Model) -> None:
    """Spec: R13.1, R13.2, R13.3, R13.4, R13.5, R13.6, R13.7, R13.8. Checks: PLAN (the link from proof to code)."""
    assert find_difference(model, range(DRAWN)) is None


def test_padded_too(model: Model) -> None:
    """Spec: R13.4, R13.5. The model takes runs unit by unit, and the Python searches for them."""
    assert compare(model, [draw_padded(Random(seed)) for seed in range(3 * DRAWN)]) is None


def test_the_model_plans_real_lengths_as_the_python_does(model: Model) -> None:
    """Spec: R13.4, R13.5. A few of every trace, dealt out, by tokens and by attention, packed and padded."""
    problems = []
    for name in list_bundled_names():
        lengths = [min(int(length), 16_384) for length in load_lengths(name).tokens]
        drawn = Random(name).sample(lengths, min(128, len(lengths)))
        ranks = [drawn[rank::8] for rank in range(8)]
        for cost, layout in product(("tokens", "attention/24576"), ("packed", "padded")):
            terms: Options = {"budget": 16_384, "cost": cost, "layout": layout}
            problems.append(Problem(lengths=ranks, is_dealt=True, terms=terms))
    assert compare(model, problems) is None


def test_beyond_small_thresholds_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R13.4, R13.5."""
    small = Thresholds(near=2, far=3, exchanged=7, tried=8)
    for module in (division, settling):
        monkeypatch.setattr(module, "EXCHANGED", small.exchanged)
    monkeypatch.setattr(division, "FAR", small.far)
    monkeypatch.setattr(packing, "TRIED", small.tried)
    monkeypatch.setattr(settling.Settling.__init__, "__defaults__", ((), (), small.near))
    assert find_difference(model, range(DRAWN, 2 * DRAWN), small) is None


@pytest.mark.parametrize("name", Thresholds._fields)
def test_that_another_number_is_noticed(model: Model, name: str) -> None:
    """The comparison can fail, and the problems reach what these numbers bound."""
    assert find_difference(model, range(DRAWN), SHIPPED._replace(**{name: 0})) is not None


def test_the_exact_cases_are_what_the_model_says(model: Model) -> None:
    """Spec: R13. None is written by hand, or by the Python."""
    assert EXACT.read_text() == make_cases(model)
