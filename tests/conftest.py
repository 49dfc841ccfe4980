"""What is run: all tests, or one of three parts, which ``make test`` runs one after the other.

How much Hypothesis tries: its default, without deadlines; few examples, always the same, while mutmut runs the tests.
A deadline would measure how busy the machine is. Under mutmut (see tests/mutants/SURVIVORS.md) the suite runs some two
thousand times, a mutant must meet the examples that the unmutated code met, and nobody reads a shrunk example.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, settings

from tests.helpers.effort import IS_MUTATED

settings.register_profile("odb", deadline=None)
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("mutants" if IS_MUTATED else "odb")


_ALONE: Final = ("bench", "test_gpu.py", "test_leaks.py", "test_real_runs.py", "test_resources.py")
"""Folders and files of tests that measure time, or look for what is left on the machine."""

_WAITING: Final = (
    "lab",
    "test_collate_workers.py",
    "test_elsewhere.py",
    "test_failures.py",
    "test_links.py",
    "test_quarantine.py",
    "test_random_faults.py",
    "test_stuck.py",
)
"""Those of tests that fork ranks by the dozen and wait for limits of seconds, of which a busy machine needs more."""

SLICED: Final = {
    # Each of these builds, explores or starts something of its own for every case.
    "test_an_attack_is_refused": 11,
    "test_a_rule_that_is_no_function_of_the_agreement_or_has_no_name_of_its_own_is_refuted": 6,
    "test_a_rule_that_leaves_its_bounds_ends_its_process_or_hangs_is_refuted": 5,
    "test_a_deep_defect_is_caught": 4,
    "test_the_checker_accepts_worlds_of_all_magnitudes_and_their_rests": 4,
    "test_the_configuration_holds_or_fails_as_it_says": 4,
    "test_the_model_and_the_code_have_the_same_graph": 4,
    "test_a_page_is_legible_without_network_and_without_complaints": 3,
    "test_every_property_holds_in_every_interleaving_of_large_worlds": 3,
    "test_every_stage_is_legible_without_network_and_without_complaints": 3,
    "test_the_losses_of_one_process_each_sample_once_the_same_after_a_checkpoint_and_no_warning": 3,
    "test_ours_is_right": 3,
    "test_pairs_go_in_halves_of_whole_pairs_with_exact_gradients": 3,
    "test_the_batches_are_those_of_the_seed_whatever_the_workers": 3,
    "test_the_peer_beside_it": 3,
    "test_what_is_drawn_depends_on_no_worker_and_no_start_method": 3,
    "test_fast_epochs_with_early_breaks_leave_nothing_behind": 3,
    "test_a_cluster_survives_likewise": 2,
    "test_a_rank_that_waits_says_for_whom": 2,
    "test_an_iterator_keeps_its_loader_alive": 2,
    "test_any_number_of_ranks_goes_on_after_any_step_of_any_other": 2,
    "test_batches_that_do_not_fit_go_in_halves_and_change_no_weight": 2,
    "test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight": 2,
    "test_a_worker_that_is_stopped_ends_every_rank": 2,
    "test_no_process_outlives_the_training_process": 2,
}
"""Tests of which ``make test`` runs one case in so many, always the same ones; ``make soak`` and a plain ``pytest`` run all."""


def find_part(path: Path) -> str:
    """Which part a file of tests belongs to."""
    names = {path.parent.name, path.name}
    return "alone" if names & {*_ALONE} else "waiting" if names & {*_WAITING} else "together"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Only the tests that may share the machine with any, with a few of their kind, or with none. Default: all."
    parser.addoption("--part", choices=["together", "waiting", "alone"], help=text)
    parser.addoption("--slice", action="store_true", help="Of the tests with many long cases only some: see `SLICED`.")
    parser.addoption("--sliced", action="store_true", help="Only the tests that --slice cuts, with all their cases.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("part")
    if part is None or collection_path.is_dir():
        return None  # for other options to say
    return True if find_part(collection_path) != part else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_cut, is_rest = config.getoption("slice"), config.getoption("sliced")
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        test, _, _ = item.nodeid.partition("[")
        name, place = test.rpartition("::")[2], seen[test]
        seen[test] += 1
        if name in SLICED if is_rest else not is_cut or place % SLICED.get(name, 1) == 0:
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
