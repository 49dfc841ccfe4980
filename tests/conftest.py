"""What is run: all tests, or one of three parts, which ``make test`` runs one after the other.

How much Hypothesis tries: its default, without deadlines; a quarter in a slice; few examples, always the same, while
mutmut runs the tests. A deadline would measure how busy the machine is. Under mutmut (see tests/mutants/SURVIVORS.md) the
suite runs some two thousand times, a mutant must meet the examples that the unmutated code met, and nobody reads a shrunk
example.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from hypothesis import Phase, is_hypothesis_test, settings

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
settings.register_profile("slice", deadline=None, max_examples=25)


_NEED_TORCH: Final = ("bench", "compat", "integrations", "lab", "peer", "torch")
"""Folders that are left out where torch is not installed: except in CI, which fails there."""

_HAS_TORCH: Final = os.environ.get("CI") == "true" or find_spec("torch") is not None

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
    # Each of these builds, explores or starts something of its own for every case. Odd numbers meet both values of a last
    # parameter that has two.
    "test_an_attack_is_refused": 71,
    "test_a_rule_that_is_no_function_of_the_agreement_or_has_no_name_of_its_own_is_refuted": 45,
    "test_a_deep_defect_is_caught": 20,
    "test_a_rule_that_leaves_its_bounds_ends_its_process_or_hangs_is_refuted": 20,
    "test_any_chain_of_restarts_trains_each_update_whole": 16,
    "test_no_command_s_table_is_cut_at_80_columns": 15,
    "test_a_module_without_its_package_names_the_command_that_installs_it": 14,
    "test_the_checker_accepts_worlds_of_all_magnitudes_and_their_rests": 14,
    "test_every_trace_keeps_the_properties": 13,
    "test_the_configuration_holds_or_fails_as_it_says": 11,
    "test_the_model_and_the_code_have_the_same_graph": 10,
    "test_a_page_is_legible_without_network_and_without_complaints": 9,
    "test_a_tampered_trace_is_refused": 9,
    "test_every_stage_is_legible_without_network_and_without_complaints": 9,
    "test_ours_is_right": 9,
    "test_a_job_emits_each_sample_of_the_order_once": 7,
    "test_a_lone_stop_is_told_to_all": 7,
    "test_an_epoch_goes_on_with_another_number_of_ranks": 7,
    "test_counterexample_can_be_replayed_and_the_real_core_survives_it": 7,
    "test_every_trace_gives_the_same_either_way": 7,
    "test_large_random_world_ends_properly": 7,
    "test_mutant_is_killed_without_the_cores_own_invariants": 7,
    "test_the_batches_are_those_of_the_seed_whatever_the_workers": 7,
    "test_the_losses_of_one_process_each_sample_once_the_same_after_a_checkpoint_and_no_warning": 7,
    "test_what_goes_wrong_ends_all_ranks": 7,
    "test_no_process_outlives_the_training_process": 6,
    "test_same_seed_same_trace_bytes_in_another_process": 6,
    "test_a_collate_fn_may_use_its_buffer_again": 5,
    "test_a_planted_planner_breaks_its_property_and_no_other": 5,
    "test_a_rank_does_what_one_does_whose_source_is_what_it_drew": 5,
    "test_any_number_of_ranks_goes_on_after_any_step_of_any_other": 5,
    "test_every_batch_of_a_job_is_friendly": 5,
    "test_every_property_holds_in_every_interleaving": 5,
    "test_every_property_holds_in_every_interleaving_of_large_worlds": 5,
    "test_no_setting_beats_the_recommendation_by_more_than_the_tolerance": 5,
    "test_planted_ranks_break_their_property_and_no_other": 5,
    "test_random_schedules_find_a_planted_bug": 5,
    "test_the_log_and_the_weights_are_those_of_the_plain_trainer": 5,
    "test_the_order_may_be_that_of_distributed_sampler": 5,
    "test_the_proved_system_and_the_code_have_the_same_graph": 5,
    "test_the_ramp_costs_less_than_a_step_in_a_hundred": 5,
    "test_the_real_core_keeps_every_property_there": 5,
    "test_the_weights_are_those_of_plain_training_after_every_update": 5,
    "test_what_is_drawn_depends_on_no_worker_and_no_start_method": 5,
    "test_every_command_keeps_the_global_batch": 4,
    "test_on_a_real_terminal_of_80_columns": 4,
    "test_a_page_begins_with_its_answer_ends_with_where_it_comes_from_and_is_of_bounded_size": 3,
    "test_a_policy_whose_steps_hold_more_gets_smaller_batches": 3,
    "test_a_rank_killed_on_any_host_is_named": 3,
    "test_a_row_of_the_figures": 3,
    "test_a_run_of_the_core_is_a_behaviour_of_the_model": 3,
    "test_a_signal_ends_a_study_and_its_workers_soon": 3,
    "test_an_update_holds_its_places_whoever_reads_them": 3,
    "test_bad_samples_are_set_aside_by_who_draws_them": 3,
    "test_batches_without_a_supervised_token_leave_every_gradient_finite_and_exact": 3,
    "test_both_drivers_follow_a_schedule_alike": 3,
    "test_fast_epochs_with_early_breaks_leave_nothing_behind": 3,
    "test_handlers_of_signals_run_in_the_users_process_only": 3,
    "test_other_numbers_of_ranks_finish_the_epoch_without_loss_or_repetition": 3,
    "test_packed_rows_of_shared_shards_waste_less_than_a_hundredth": 3,
    "test_pairs_go_in_halves_of_whole_pairs_with_exact_gradients": 3,
    "test_real_lengths_take_the_fewest_steps_and_wait_no_longer_than_they_must": 3,
    "test_runs_of_a_machine_whose_speed_drifts_lie_within_the_bands": 3,
    "test_the_model_makes_the_same_transitions_as_the_python": 3,
    "test_the_peer_beside_it": 3,
    "test_the_ranks_of_a_job_read_each_sample_once": 3,
    "test_the_rest_of_an_epoch_is_accepted_after_any_step": 3,
    "test_the_weights_are_those_of_plain_training_whatever_ranks_go_on": 3,
    "test_what_a_command_prints_and_writes_has_a_formula": 3,
    "test_what_differs_from_the_plain_trainer_is_said_or_refused": 3,
    "test_what_is_no_exception_ends_every_rank": 3,
    "test_what_is_said_to_do_better_does": 3,
    "test_a_checkpoint_goes_on_as_the_plain_trainers": 2,
    "test_a_cluster_gives_the_same_answers": 2,
    "test_a_dask_cluster_without_anybody_is_said": 2,
    "test_a_failure_is_what_the_table_says": 2,
    "test_a_failure_on_one_rank_is_the_same_error_on_all": 2,
    "test_a_page_says_the_cautions_that_the_terminal_says": 2,
    "test_a_rank_stopped_on_any_host_is_named": 2,
    "test_a_rank_that_begins_a_new_loader_while_others_go_on_with_an_old_one_is_told": 2,
    "test_a_rank_that_waits_says_for_whom": 2,
    "test_a_worker_that_is_stopped_ends_every_rank": 2,
    "test_a_wrong_rule_is_refuted_in_under_a_minute_with_a_schedule": 2,
    "test_an_iterator_keeps_its_loader_alive": 2,
    "test_batches_are_what_they_were": 2,
    "test_batches_that_do_not_fit_go_in_halves_and_change_no_weight": 2,
    "test_control_c_ends_a_process_whose_data_set_blocks": 2,
    "test_many_sizes_tell_attention_and_ranges_that_hold_the_truth": 2,
    "test_memory_does_not_grow_with_samples_that_are_not_held": 2,
    "test_one_that_does_not_wait_until_the_others_know_is_named_all_the_same": 2,
    "test_running_out_of_memory_changes_no_update": 2,
    "test_states_saved_with_workers_and_prefetch_in_flight_are_as_good": 2,
    "test_the_audit_refuses_another_program_around_the_model": 2,
    "test_the_command_finds_what_depends_on_the_hash_seed": 2,
    "test_the_commands_run_on_a_cluster": 2,
    "test_the_formula_for_bytes_is_what_two_ranks_measure": 2,
    "test_the_real_peer_makes_the_same_batches_on_even_shards": 2,
    # These try fewer random cases by themselves: see `few_in_slice`.
    "test_groups_of_all_sizes_are_lined_up_split_and_carried_as_the_page_says": 1,
    "test_mutants_are_each_a_verdict_or_a_complaint": 1,
    "test_random_worlds_keep_every_property": 1,
}
"""Tests of which ``make test`` runs one case in so many, always the same ones; ``make soak`` and a plain ``pytest`` run all."""

DEEP: Final = {
    "test_what_the_release_makes_of_its_own_loops",
    "test_pairs_that_do_not_fit_go_in_halves_and_change_no_weight",
    "test_random_worlds_reach_what_they_must",
    "test_random_worlds_of_shared_shards_reach_what_they_must",
    "test_the_audit_accepts_the_proofs",  # `make proofs` audits them
    "test_a_thousand_failures_lose_no_sample_and_leave_nobody_waiting",
    "test_it_runs_from_its_first_cell_to_its_last",
    "test_a_link_that_is_cut_for_long_names_who_is_behind_it",
    "test_an_epoch_that_waits_for_its_workers_is_predicted_within_a_tenth",
    "test_real_runs_that_nothing_was_fitted_to_lie_within_the_bands",
    "test_more_tolerance_never_costs_more",
    "test_few_shapes_of_padded_batches_cannot_be_cheap",
    "test_steps_of_other_sizes_lie_within_the_error_that_it_states",
    "test_ray_tasks_plan_as_one_place_does_again_and_again",
    "test_sigterm_ends_a_study_on_ray_with_its_own_status",
    "test_the_command_judges_a_function",
    "test_what_was_compiled_before_does_not_count",
    "test_a_cluster_survives_likewise",
    "test_a_file_that_the_surroundings_bring_is_not_there",
    "test_what_cannot_be_compared_is_sent_anew",
}
"""Tests that ``make test`` leaves to ``make soak``: another looks at a smaller case of the same."""


def find_part(path: Path) -> str:
    """Which part a file of tests belongs to."""
    names = {path.parent.name, path.name}
    return "alone" if names & {*_ALONE} else "waiting" if names & {*_WAITING} else "together"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Only the tests that may share the machine with any, with a few of their kind, or with none. Default: all."
    parser.addoption("--part", choices=["together", "waiting", "alone"], help=text)
    parser.addoption("--slice", action="store_true", help="Of the tests with many long cases only some: see `SLICED`.")
    parser.addoption("--sliced", action="store_true", help="Only the tests that --slice cuts, with all their cases.")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("mutants" if IS_MUTATED else "slice" if config.getoption("slice") else "odb")


def pytest_collection_finish() -> None:
    """Spares every collection of garbage what is imported: a framework that collects does so in each rank of each test."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("part")
    if collection_path.name in _NEED_TORCH and not _HAS_TORCH:
        return True
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
        is_long = name in SLICED or name in DEEP or is_hypothesis_test(getattr(item, "obj", None))
        if is_long if is_rest else not is_cut or (name not in DEEP and place % SLICED.get(name, 1) == 0):
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
