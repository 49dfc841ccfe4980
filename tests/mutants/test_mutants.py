"""The check that the table names kills each mutant, and nothing in the table is a false alarm."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from odb_sim.explore.scenario import compute_scenario, replay
from odb_sim.explore.search import Exploration, explore
from odb_sim.explore.violation import Breach

from odb_ref.core.errors import UsageError
from tests.mutants.defects import Defect
from tests.mutants.fresh import DEFECTS, plant
from tests.mutants.loader import Mutant, load
from tests.mutants.planted import PLANTED as SLIPS
from tests.mutants.planted import ROOT
from tests.mutants.table import MUTANTS, PLANTED
from tests.properties.worlds import WorldMachine

MAX_STATES = 60_000
every_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def find(mutant: Mutant, *, has_invariants: bool = True) -> Exploration:
    with load(mutant, has_invariants=has_invariants) as (core, bounds):
        return explore(bounds, core=core, max_states=MAX_STATES)


@every_mutant
def test_mutant_is_killed_by_its_check(mutant: Mutant) -> None:
    found = find(mutant).counterexample
    assert found is not None, "survives"
    assert found.property == mutant.property, found.detail


@pytest.mark.slow
@every_mutant
def test_mutant_is_killed_without_the_cores_own_invariants(mutant: Mutant) -> None:
    found = find(mutant, has_invariants=False)
    if mutant.needs_invariants:
        assert found.is_complete, "the world's checks see it: needs_invariants is wrong"
    else:
        assert found.counterexample is not None, "survives"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if not mutant.prelude], ids=lambda mutant: mutant.name)
def test_counterexample_can_be_replayed_and_the_real_core_survives_it(mutant: Mutant) -> None:
    with load(mutant) as (core, bounds):
        found = explore(bounds, core=core, max_states=MAX_STATES).counterexample
        assert found is not None
        scenario = compute_scenario(bounds, found)
        *before, last = replay(scenario, core)
    assert all(moment.violation is None for moment in before)
    assert last.violation is not None and last.violation.property == found.property
    # The real core must not fail in the mutant's schedule.
    with contextlib.suppress(UsageError):
        assert all(moment.violation is None for moment in replay(compute_scenario(mutant.bounds, found)))


@pytest.mark.parametrize("bounds", {mutant.bounds: None for mutant in MUTANTS})
def test_the_real_core_keeps_every_property_there(bounds: object) -> None:
    found = explore(bounds)  # type: ignore[arg-type]
    assert found.counterexample is None
    assert found.is_complete


def test_table_names_every_mutant_once() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 30
    assert set(PLANTED) <= set(names)


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_slip_can_be_planted(slip: Defect) -> None:
    """Its text occurs once. `python -m tests.mutants.planted` shows what catches it."""
    text = (ROOT / slip.module).read_text()
    assert slip.plant(text) != text


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_fresh_defect_can_be_planted(defect: Defect, tmp_path: Path) -> None:
    """`make soak` runs what refutes it."""
    ast.parse((plant(defect, tmp_path) / f"{defect.module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def test_there_are_many_slips_and_each_has_its_name() -> None:
    assert len({slip.name for slip in SLIPS}) == len(SLIPS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_random_schedules_find_a_planted_bug(name: str) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    with load(mutant) as (mutant_core, _):

        class PlantedMachine(WorldMachine):
            core = mutant_core

        with pytest.raises(Breach):
            run_state_machine_as_test(
                PlantedMachine,
                settings=settings(
                    max_examples=2000,
                    stateful_step_count=60,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )
