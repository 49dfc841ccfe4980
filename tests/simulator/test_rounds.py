"""The driver of rounds equals the world with the real machine, for random settings: steps, tokens, times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.engine import rounds
from odb_sim.engine.metrics import StepRow
from odb_sim.inputs.conditions import Conditions, Fault, FaultKind
from odb_sim.inputs.costs import (
    NO_COLLECTIVE,
    CollectiveCost,
    Costs,
    GpuCost,
    LoaderCost,
    NetworkCost,
    PricedTransport,
    StepTable,
)
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.inputs.workload import Sharding, Workload
from odb_sim.studies.runs import Driver, Result, Run, run

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import OdbRule, PaperRule, TargetRule
from odb_ref.core.errors import RuleError, UsageError
from odb_ref.core.events import Counted, Event
from odb_ref.core.machine import Machine
from odb_ref.core.offer import Offer
from odb_ref.core.resume import Resumed, RoundStart, compute_round_start
from odb_ref.core.types import Mode
from tests.helpers.commands import get_figures
from tests.helpers.effort import few
from tests.helpers.simulated import make_run

EXACT = {name for name, kind in StepRow.__annotations__.items() if kind == "int"}


def check_equal(events: Result, by_rounds: Result, *, has_chance: bool = False) -> None:
    """Integers are equal. Seconds summed over ranks may be rounded differently. With ``has_chance`` events may coincide."""
    assert (events.summary.driver, by_rounds.summary.driver) == ("events", "rounds")
    assert len(events.rows) == len(by_rounds.rows)
    for theirs, ours in zip(events.rows, by_rounds.rows, strict=True):
        for name, value in asdict(theirs).items():
            if has_chance and name == "queued_steps":
                continue
            other = getattr(ours, name)
            if name in EXACT or name in ("start_s", "end_s"):
                assert other == value, (theirs.step, name)
            else:
                assert other == pytest.approx(value, rel=1e-9, abs=1e-9 * max(1.0, theirs.end_s)), (theirs.step, name)
    summary, ours = events.summary.to_json(), by_rounds.summary.to_json()
    for name in ("wall_time_s", "driver"):
        del summary[name], ours[name]
    for name, value in summary.items():
        assert ours[name] == (pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value), name


def run_both(what: Run, *, has_chance: bool = False) -> Result:
    by_rounds = run(replace(what, driver=Driver.ROUNDS))
    check_equal(run(replace(what, driver=Driver.EVENTS)), by_rounds, has_chance=has_chance)
    return by_rounds


@dataclass(frozen=True, slots=True)
class LastGroupRule:
    """A user's rule between the two that ship."""

    name: str = "middle"

    def compute_target(self, agreement: Offer) -> int:
        low = min(agreement.groups_min, agreement.groups_max)
        return max(1, agreement.due_max, (low + agreement.groups_max) // 2)


RULES: tuple[TargetRule, ...] = (OdbRule(), PaperRule(), LastGroupRule())


def draw_seconds(prime: int) -> st.SearchStrategy[float]:
    """Draws multiples of a separate root for each cost, so that no two sums of different costs coincide."""
    return st.integers(1, 1000).map(lambda times: 1e-3 * times * prime**0.5)


@st.composite
def draw_costs(draw: st.DrawFn) -> Costs:
    table = draw(st.sampled_from([(), ((8.0, 0.1), (64.0, 0.3), (65.0, 0.9))]))
    return Costs(
        gpu=GpuCost(
            fixed_s=draw(draw_seconds(2)),
            per_token_s=draw(draw_seconds(3)),
            per_token2_s=draw(draw_seconds(5)),
        ),
        collective=CollectiveCost(
            fixed_s=draw(draw_seconds(7)), transfer_s=draw(draw_seconds(29)), hidden_s=draw(draw_seconds(37))
        ),
        network=NetworkCost(alpha_s=draw(draw_seconds(11)), transport=draw(st.sampled_from(PricedTransport))),
        loader=LoaderCost(
            workers=draw(st.integers(1, 5)),
            prefetch_factor=draw(st.integers(1, 3)),
            receive_sample_s=draw(draw_seconds(31)),
            sample_s=draw(draw_seconds(13)),
            per_token_s=draw(draw_seconds(17)),
            collate_step_s=draw(draw_seconds(19)),
            collate_per_token_s=draw(draw_seconds(23)),
        ),
        step_table=StepTable(rows=table),
    )


@st.composite
def draw_workload(draw: st.DrawFn, resources: int) -> Workload:
    """Draws shards of any sizes, also empty ones."""
    shards = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    total = sum(shards)
    longest = draw(st.sampled_from([3, 12, 60]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = random.integers(1, longest + 1, total)
    return Workload(
        name="drawn",
        ids=random.permutation(total),
        tokens=tokens,
        supervised_tokens=tokens,
        resources=random.integers(0, 4, (total, resources)),
        offsets=np.concatenate(([0], np.cumsum(shards))),
    )


@st.composite
def draw_run(draw: st.DrawFn) -> Run:
    limits = draw(st.sampled_from([(), (), (3,), (4, 9)]))
    workload = draw(draw_workload(len(limits)))
    mode = draw(st.sampled_from(Mode))
    pairs = st.tuples(st.integers(0, workload.ranks - 1), st.floats(0.1, 9))
    factors = st.lists(pairs, max_size=2, unique_by=lambda pair: pair[0]).map(tuple)
    return Run(
        workload=workload,
        policy="odb",
        rule=draw(st.sampled_from(RULES)),
        order=draw(st.sampled_from(StepOrder)),
        seed=draw(st.integers(0, 9)),
        budget_tokens=draw(st.integers(1, 80)),
        layout=draw(st.sampled_from([Layout.PADDED, Layout.PACKED])),
        cost=get_cost(draw(st.sampled_from(["tokens", "attention/1", "attention/20"]))),
        limits=limits,
        window_samples=draw(st.integers(1, 24)),
        depth_steps=draw(st.integers(1, 9)),
        sharding=draw(st.sampled_from([Sharding.EVEN, Sharding.SHARED])),  # the drawn shards have any sizes
        mode=mode,
        quota_samples=draw(st.none() | st.integers(1, 100)) if mode is Mode.QUOTA else None,
        max_age_rounds=draw(st.integers(1, 4)),
        ramp_rounds=draw(st.integers(0, 4)),
        costs=draw(draw_costs()),
        conditions=Conditions(slow_ranks=draw(factors), slow_loaders=draw(factors)),
    )


@settings(max_examples=few(300), deadline=None)
@given(draw_run())
def test_rounds_give_what_events_give(what: Run) -> None:
    run_both(what)


@settings(deadline=None)
@given(draw_run(), st.booleans())
def test_rounds_give_what_events_give_where_things_cost_nothing(what: Run, is_trained_in_no_time: bool) -> None:
    costs = replace(
        what.costs,
        network=NetworkCost(alpha_s=0.0, beta_s=0.0),
        loader=LoaderCost(
            sample_s=0.0, per_token_s=0.0, collate_step_s=0.0, collate_per_token_s=0.0, receive_sample_s=0.0
        ),
    )
    if is_trained_in_no_time:
        gpu = GpuCost(fixed_s=0, per_token_s=0, per_token2_s=0)
        costs = replace(costs, gpu=gpu, collective=NO_COLLECTIVE, step_table=StepTable())
    # Much happens at the same time. What comes first shows in how full the queues are.
    run_both(replace(what, costs=costs), has_chance=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_bundled_names())
@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("policy", ["odb", "paper"])
def test_every_trace_gives_the_same_either_way(name: str, sharding: Sharding, policy: str) -> None:
    settings = {"sharding": sharding, "policy": policy, "budget_tokens": 2 * int(load_lengths(name).tokens.max())}
    run_both(make_run(name, 6, 1500, draw=4, window_samples=64, **settings))


def test_blocks_of_ranks_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"policy": "paper", "budget_tokens": 9000, "window_samples": 32, "max_age_rounds": 1}
    whole = run(what := make_run("mm_mix_real", 9, 2000, sharding=Sharding.UNEVEN, **settings))
    monkeypatch.setattr(
        rounds.simulate_rounds, "__kwdefaults__", {**rounds.simulate_rounds.__kwdefaults__, "block_samples": 70}
    )
    parted = run_both(what)
    assert [asdict(row) for row in parted.rows] == [pytest.approx(asdict(row), rel=1e-12) for row in whole.rows]


class Starts:
    """An observer of machines that records where each round began."""

    def __init__(self, what: Run) -> None:
        config = what.build_config()
        self.machines = [Machine(replace(config, rank=rank)) for rank in range(what.workload.ranks)]
        self.starts: list[dict[int, RoundStart]] = [{} for _ in self.machines]

    def __call__(self, rank: int, event: Event | Resumed | None, *_: object) -> None:
        machine = self.machines[rank]
        if event is None:
            machine.begin()
            return
        assert not isinstance(event, Resumed)
        machine.handle(event)
        if isinstance(event, Counted):
            start = compute_round_start(machine.state)
            self.starts[rank][start.round] = start


@settings(max_examples=few(60), deadline=None)
@given(draw_run().filter(lambda what: what.sharding is not Sharding.SHARED), st.data())
def test_the_rest_of_an_epoch_is_the_same_either_way(what: Run, data: st.DataObject) -> None:
    seen = Starts(what)
    run(what, observer=seen)
    round_ = data.draw(st.sampled_from([0, *seen.starts[0]]))
    starts = tuple(own.get(round_, RoundStart()) for own in seen.starts)
    run_both(replace(what, starts=starts))


def test_a_source_has_ended_when_a_read_has_found_its_end() -> None:
    """A rank that resumes with a full window does not read, and does not know that nothing is left."""
    tokens = np.array([9] * 8 + [1] * 4)
    workload = Workload(
        name="made",
        ids=np.arange(12),
        tokens=tokens,
        supervised_tokens=tokens,
        resources=np.zeros((12, 0), dtype=np.int64),
        offsets=np.array([0, 8, 12]),
    )
    starts = (
        RoundStart(round=5, read_samples=8, carried=tuple(range(8)), marks=(8,)),
        RoundStart(round=5, read_samples=4, carried=tuple(range(4)), marks=(4,)),
    )
    what = Run(workload=workload, policy="odb", budget_tokens=10, window_samples=4, starts=starts)
    # Eight groups and one: as long as both may read on, the smaller number decides.
    assert run_both(what).rows[0].idle_ranks == 0


def test_the_driver_is_chosen_and_can_be_forced() -> None:
    what = make_run("gsm8k", 2, 200, budget_tokens=2000, window_samples=32)
    assert run(what).summary.driver == "rounds"
    assert run(what, observer=lambda *_: None).summary.driver == "events"
    assert run(replace(what, driver=Driver.EVENTS)).summary.driver == "events"
    assert run(replace(what, policy="standard", driver=Driver.ROUNDS)).summary.driver == "plan"
    fault = Conditions(faults=(Fault(FaultKind.STOP, 0, 3),))
    for conditions in (Conditions(jitter=0.1), fault):
        assert run(replace(what, conditions=conditions)).summary.driver == "events"
        with pytest.raises(UsageError, match="rounds cannot simulate"):
            replace(what, conditions=conditions, driver=Driver.ROUNDS)
    with pytest.raises(UsageError, match="no events"):
        run(replace(what, driver=Driver.ROUNDS), observer=lambda *_: None)


@dataclass(frozen=True, slots=True)
class WildRule:
    """Returns answers outside its bounds."""

    name: str = "wild"

    def compute_target(self, agreement: Offer) -> int:
        return agreement.samples_max + 1


@pytest.mark.parametrize("driver", [Driver.ROUNDS, Driver.EVENTS])
def test_a_rule_that_leaves_its_bounds_is_an_error_either_way(driver: Driver) -> None:
    settings = {"rule": WildRule(), "budget_tokens": 2000, "window_samples": 8, "ramp_rounds": 0, "driver": driver}
    what = make_run("gsm8k", 2, 200, **settings)
    with pytest.raises(RuleError, match=r"^RULE-BOUNDS: rule 'wild' returned 9, outside 1\.\.8") as caught:
        run(what)
    assert caught.value.invariant == "RULE-BOUNDS"


def test_progress_ends_at_all_samples() -> None:
    heard: list[int] = []
    run(make_run("gsm8k", 2, 200, budget_tokens=2000, window_samples=32), on_progress=heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 200


@pytest.mark.parametrize(("options", "driver"), [("", "rounds"), ("--driver events", "events")])
def test_the_command_says_what_drove(options: str, driver: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = get_figures(f"simulate gsm8k --ranks 2 --token-budget 2000 --samples 200 {options}")
    assert f"driver: {driver}, " in capsys.readouterr().out
    assert figures["driver"] == driver
