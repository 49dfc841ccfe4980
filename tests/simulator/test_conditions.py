"""Jitter, slow ranks and faults: timing never changes a batch, and a fault ends every rank alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.cli.main import main
from odb_sim.engine.cautions import About
from odb_sim.engine.metrics import Summary
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.conditions import Conditions, Fault, FaultKind
from odb_sim.inputs.costs import CollectiveCost, Costs, GpuCost, LoaderCost, NetworkCost, PricedTransport
from odb_sim.inputs.workload import Workload
from odb_sim.studies.runs import Run, run

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.effects import Deliver, Effect, OutcomeKind
from odb_ref.core.errors import UsageError
from odb_ref.core.events import ConsumerStopped, Event, StepTaken
from tests.helpers.commands import get_figures, refuse
from tests.helpers.effort import few
from tests.helpers.simulated import make_run
from tests.simulator.test_rounds import draw_run

Batches = dict[int, list[tuple[int, ...]]]


def simulate(what: Run) -> tuple[Summary, Batches, dict[int, int]]:
    """Returns the figures, the positions of every delivered step of every rank, and how many steps each consumer that left had
    taken.
    """
    batches: Batches = defaultdict(list)
    taken, left = Counter[int](), dict[int, int]()

    def observe(rank: int, event: Event | None, effects: Sequence[Effect], time_s: float) -> None:
        taken[rank] += isinstance(event, StepTaken)
        if isinstance(event, ConsumerStopped):
            left.setdefault(rank, taken[rank])
        for effect in effects:
            if isinstance(effect, Deliver):
                batches[rank].append(tuple(sample.position for sample in effect.step.group))

    return run(what, observer=observe).summary, batches, left


RUNS = draw_run().filter(lambda what: what.order is not StepOrder.SHUFFLED)
"""The seed, here for jitter, would shuffle steps."""


def seconds() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 1e-4, 0.1, 10.0])


def costs() -> st.SearchStrategy[Costs]:
    return st.builds(
        Costs,
        gpu=st.builds(GpuCost, fixed_s=seconds(), per_token_s=seconds()),
        collective=st.builds(CollectiveCost, fixed_s=seconds(), transfer_s=seconds()),
        network=st.builds(NetworkCost, alpha_s=seconds(), transport=st.sampled_from(list(PricedTransport))),
        loader=st.builds(LoaderCost, workers=st.integers(1, 3), sample_s=seconds(), collate_step_s=seconds()),
    )


def conditions(faults: st.SearchStrategy[tuple[Fault, ...]]) -> st.SearchStrategy[Conditions]:
    slow = st.lists(st.tuples(st.just(0), st.sampled_from([0.1, 3.0, 100.0])), max_size=1).map(tuple)
    return st.builds(
        Conditions, jitter=st.sampled_from([0.0, 0.2, 1.5]), slow_ranks=slow, slow_loaders=slow, faults=faults
    )


@settings(max_examples=few(150), deadline=None)
@given(what=RUNS, costs=costs(), conditions=conditions(st.just(())), depth=st.integers(1, 4), seed=st.integers(0, 9))
def test_timing_never_changes_a_batch(what: Run, costs: Costs, conditions: Conditions, depth: int, seed: int) -> None:
    summary, batches, _ = simulate(what)
    other = replace(what, costs=costs, conditions=conditions, depth_steps=depth, seed=seed)
    other_summary, other_batches, _ = simulate(other)
    assert batches == other_batches
    assert summary.critical_tokens == other_summary.critical_tokens
    assert summary.samples_emitted == summary.samples_unique == sum(len(b) for own in batches.values() for b in own)
    assert summary.outcome == other_summary.outcome
    is_short = what.quota_samples is not None and summary.samples_emitted < what.quota_samples
    assert summary.outcome == ("short" if is_short else OutcomeKind.COMPLETE)


faults = st.tuples(st.builds(Fault, st.sampled_from(list(FaultKind)), st.just(0), st.integers(0, 20)))


@settings(max_examples=few(200), deadline=None)
@given(what=RUNS, costs=costs(), conditions=conditions(faults))
def test_a_fault_ends_every_rank_alike_and_changes_no_earlier_batch(
    what: Run, costs: Costs, conditions: Conditions
) -> None:
    _, steady, _ = simulate(what)
    summary, batches, left = simulate(replace(what, costs=costs, conditions=conditions))
    (fault,) = conditions.faults
    for rank, own in batches.items():
        assert own == steady[rank][: len(own)]
    assert summary.samples_emitted == summary.samples_unique
    assert summary.steps <= len(steady[0])
    if summary.outcome not in (OutcomeKind.COMPLETE, "short"):
        # A trainer that gives up while its loader still reads is the first that an agreement knows of.
        assert summary.outcome_rank == 0 or (fault.kind is FaultKind.STOP and summary.outcome_rank in left)
        assert summary.outcome_cause
    assert all(steps > fault.at for rank, steps in left.items() if rank), "only a trainer that is held gives up"
    if summary.abort_s is None:
        assert summary.steps == len(steady[0]), "the run ended before the fault"
        assert summary.outcome in (OutcomeKind.COMPLETE, "short")


def build_shards(sizes: Sequence[int], seed: int) -> Workload:
    """Returns shards of these sizes, with samples of 1 to 3 tokens."""
    ids = np.arange(sum(sizes))
    tokens = np.random.default_rng(seed).integers(1, 4, len(ids))
    return Workload("drawn", ids, tokens, tokens, np.zeros((len(ids), 0), dtype=np.int64), np.cumsum([0, *sizes]))


@pytest.mark.parametrize("seed", [0, 1, 2, 21, 29])
def test_a_stop_names_the_rank_that_left_however_long_the_others_still_load(seed: int) -> None:
    """They wait for data at the deadline, and not in a collective, so that none of them gives up then."""
    what = Run(
        workload=build_shards([3, 6, 12], seed),
        policy="odb",
        budget_tokens=19,
        window_samples=2,
        depth_steps=1,
        max_age_rounds=1,
        ramp_rounds=3,
        order=StepOrder.SAMPLER,
        seed=seed,
        costs=Costs(
            gpu=GpuCost(fixed_s=0.0, per_token_s=0.0),
            collective=CollectiveCost(fixed_s=0.0, transfer_s=10.0),
            network=NetworkCost(alpha_s=0.0),
            loader=LoaderCost(workers=1, sample_s=0.0, collate_step_s=10.0),
        ),
        conditions=Conditions(jitter=1.5, faults=(Fault(FaultKind.STOP, 0, 6),)),
    )
    summary, _, left = simulate(what)
    assert (summary.outcome, summary.outcome_rank) == (OutcomeKind.STOPPED, 0)
    assert summary.abort_s is not None
    assert summary.abort_s > what.conditions.deadline_s
    assert {rank for rank, steps in left.items() if steps == 6} == {0}, (
        "the others are in the collective when they give up"
    )


def test_a_rank_that_hears_the_last_answer_before_the_deadline_has_lost_its_peer_like_the_others() -> None:
    """Its loader ends in order, but its trainer waits for the rank that is gone."""
    shards = build_shards([0, 0, 0, 18], 0)
    what = Run(workload=shards, policy="odb", budget_tokens=1, window_samples=17, depth_steps=1, ramp_rounds=0)
    costs = Costs(
        gpu=GpuCost(fixed_s=0.0, per_token_s=1.0),
        collective=CollectiveCost(fixed_s=0.0, transfer_s=0.0),
        network=NetworkCost(alpha_s=10.0),
        loader=LoaderCost(workers=1, sample_s=0.0, collate_step_s=0.0),
    )
    outcomes = set()
    for seed in range(10):
        conditions = Conditions(jitter=1.5, faults=(Fault(FaultKind.KILL, 0, 17),))
        summary = run(replace(what, costs=costs, conditions=conditions, seed=seed)).summary
        outcomes.add((summary.outcome, summary.outcome_rank, summary.outcome_cause))
    assert outcomes == {(OutcomeKind.LOST, 0, "kill fault at 17")}


def test_an_answer_that_comes_after_the_deadline_is_not_heard() -> None:
    """By then the rank has been told that a peer is gone, and has ended."""
    late = Costs(network=NetworkCost(alpha_s=10.0, transport=PricedTransport.REDUCE))
    outcomes = set()
    for seed in range(40):
        faults = (Fault(FaultKind.KILL, 0, 1),)
        settings = {"costs": late, "conditions": Conditions(jitter=1.5, faults=faults), "seed": seed}
        what = make_run("gsm8k", 2, 8, budget_tokens=1, window_samples=1, depth_steps=1, **settings)
        outcomes.add(run(what).summary.outcome)
    assert outcomes == {OutcomeKind.LOST}


@pytest.mark.parametrize("slowness", [1.0, 3000.0])
@pytest.mark.parametrize("each_step", [False, True])
def test_an_update_that_a_failure_cuts_short_does_not_end(each_step: bool, slowness: float) -> None:
    """The ranks do not meet in a collective, however late they learn of the failure."""
    what = make_run(
        "gsm8k",
        2,
        1000,
        budget_tokens=2048,
        window_samples=32,
        global_batch=GlobalBatch(tokens=300_000),
        costs=Costs(collective=CollectiveCost(each_step=each_step)),
        conditions=Conditions(slow_loaders=((0, slowness),), faults=(Fault(FaultKind.READ, 0, 100),)),
    )
    result = run(what)
    assert (result.summary.outcome, result.summary.outcome_rank) == (OutcomeKind.FAILED, 0)
    assert result.summary.steps > 0
    assert result.summary.updates == 0
    assert not any(row.collective_s for row in result.rows)


KINDS = {
    "read:3:40": (OutcomeKind.FAILED, "read fault at 40"),
    "collate:3:1": (OutcomeKind.FAILED, "collate fault at 1"),
    "stop:3:9": (OutcomeKind.STOPPED, "its consumer left after 9 steps"),
    "kill:3:9": (OutcomeKind.LOST, "kill fault at 9"),
}


@pytest.mark.parametrize("fault", list(KINDS))
def test_each_fault_is_named_on_every_rank_and_passes_the_check(fault: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.ndjson"
    command = "simulate gsm8k --ranks 8 --token-budget 2048 --window 64 --jitter 0.3 --deadline 5"
    summary = get_figures(command, "--fault", fault, "--trace", str(trace))
    kind, cause = KINDS[fault]
    assert (summary["outcome"], summary["outcome_rank"], summary["outcome_cause"]) == (kind, 3, cause)
    assert summary["abort_s"] == pytest.approx(5) if kind is OutcomeKind.LOST else summary["abort_s"] < 1
    if kind in (OutcomeKind.STOPPED, OutcomeKind.LOST):
        assert summary["steps"] == 9
    assert main(["check", str(trace)]) == 0


def test_a_slow_rank_slows_every_step_and_a_slow_loader_starves_the_trainers() -> None:
    for policy in ("odb", "standard"):
        base, slow, starved = (
            run(
                make_run("gsm8k", 4, 1000, policy=policy, budget_tokens=2048, window_samples=64, conditions=one)
            ).summary
            for one in (Conditions(), Conditions(slow_ranks=((2, 3.0),)), Conditions(slow_loaders=((2, 1000.0),)))
        )
        assert 2 < slow.sim_time_s / base.sim_time_s < 3
        assert slow.trainer_wait_share > base.trainer_wait_share + 0.2
        assert starved.sim_time_s > 5 * base.sim_time_s
        assert starved.data_wait_share > base.data_wait_share


@pytest.mark.parametrize("policy", ["odb", "standard"])
def test_jitter_is_a_function_of_the_seed(policy: str) -> None:
    base = make_run("gsm8k", 4, 400, policy=policy, budget_tokens=2048)
    times = [
        run(replace(base, seed=seed, conditions=Conditions(jitter=jitter))).summary.sim_time_s
        for seed, jitter in ((1, 0.2), (1, 0.2), (2, 0.2), (1, 0.0))
    ]
    assert times[0] == times[1]
    assert len(set(times)) == 3


BAD = {
    "--fault": ["stop", "stop:1", "stop:x:1", "stop:1:x", "melt:1:1", "stop:1:1:1", "stop:9:1", "stop:1:-1"],
    "--slow-rank": ["1", "1:x", "x:2", "1:0", "1:-2", "1:nan", "1:1e7", "9:2", "-1:2"],
    "--slow-loader": ["1:inf", "0:1e308", "1:0", "4:1"],
    "--jitter": ["-1", "nan", "9", "x"],
    "--deadline": ["-1", "inf"],
    "--cost-model": ["/no/such/file.json"],
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in BAD.items() for value in values])
def test_nonsense_is_refused_on_one_line(option: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = refuse(capfd, ["simulate", "gsm8k", "--ranks", "4", "--token-budget", "2048", f"{option}={value}"])
    assert "at most 1,000,000" in said or value not in ("1:0", "1:-2", "1:nan", "1:1e7", "1:inf", "0:1e308")


def test_a_baseline_cannot_be_told_of_a_fault() -> None:
    fault = Conditions(faults=(Fault(FaultKind.STOP, 0, 1),))
    with pytest.raises(UsageError, match="does not run the protocol"):
        make_run("gsm8k", 2, 10, policy="gmt", budget_tokens=100, conditions=fault)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP])
@pytest.mark.parametrize("global_batch", [None, 300])
def test_an_epoch_whose_loaders_are_done_is_not_complete_when_a_rank_leaves(
    kind: FaultKind, layout: str, global_batch: int | None
) -> None:
    """The loaders have nothing left to do and end in order. The trainers wait for the rank that is gone."""
    settings = {"layout": Layout(layout), "global_batch": GlobalBatch(samples=global_batch)}
    what = make_run("gsm8k", 4, 6000, budget_tokens=8192, window_samples=1024, **settings)
    whole = run(what).summary
    for at in (0, 2, whole.steps - 1, whole.steps):
        fault = Fault(kind, 1, at)
        result = run(replace(what, conditions=Conditions(faults=(fault,), deadline_s=5.0)))
        summary = result.summary
        is_whole = at == whole.steps
        said = [caution.text for caution in result.cautions if caution.about is About.FAULT]
        assert said == ([f"1 fault struck after the last step, and changed nothing: {fault}"] if is_whole else [])
        assert (summary.outcome == OutcomeKind.COMPLETE) == is_whole
        assert (summary.samples_emitted == 6000) == is_whole
        assert summary.fault_s is not None
        if not is_whole:
            assert (summary.outcome, summary.outcome_rank, summary.outcome_cause) == (
                str(fault.outcome.kind),
                1,
                fault.outcome.cause,
            )
            assert summary.abort_s is not None
            assert 0 < summary.abort_s < 5.1
            assert summary.steps <= at
