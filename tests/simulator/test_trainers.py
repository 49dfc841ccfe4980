"""One SimPy process for all trainers is exact: a process for each rank sees the same events at the same times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from odb_sim.engine.rank import Rank
from odb_sim.engine.world import SimulatedWorld
from odb_sim.inputs.costs import CollectiveCost, Costs, GpuCost, LoaderCost, NetworkCost
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.runs import Run

from odb_ref.core.effects import Effect
from odb_ref.core.errors import InvariantError
from odb_ref.core.events import Event, StepTaken
from odb_ref.core.types import Mode
from tests.helpers.effort import few
from tests.helpers.simulated import make_run

History = dict[int, list[tuple[Event | None, tuple[Effect, ...], float]]]


class TrainerEach:
    """Trainers in their simplest form: each rank is a process that waits for its step, computes, and meets the others."""

    updates = 0

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._arrived = 0
        self._all_arrived = world.stage.env.event()
        self._news = [world.stage.env.event() for _ in world.ranks]

    def find_obstacle(self) -> None:
        """Does nothing, because no rank leaves here."""

    def note_held(self) -> None:
        """Does nothing either."""

    def notice(self, rank: int) -> None:
        if not self._news[rank].triggered:
            self._news[rank].succeed()

    def train(self) -> Generator[simpy.Event, object, None]:
        for rank in range(len(self._world.ranks)):
            self._world.stage.env.process(self._train(rank))
        yield self._world.stage.env.timeout(0)

    def _train(self, number: int) -> Generator[simpy.Event, object, None]:
        world, rank = self._world, self._world.ranks[number]
        while True:
            while not rank.queue:
                if rank.outcome is not None:
                    return
                self._news[number] = world.stage.env.event()
                yield self._news[number]
            step = rank.queue.popleft()
            rank.handle(StepTaken())
            rows, longest = len(step.group), step.group[0].length if step.group else 0
            yield world.stage.env.timeout(world.stage.costs.gpu.compute_steps_s(rows * longest, rows * longest**2))
            self._arrived += 1
            meeting = self._all_arrived
            if self._arrived == len(world.ranks):
                self._arrived, self._all_arrived = 0, world.stage.env.event()
                meeting.succeed()
            yield meeting
            yield world.stage.env.timeout(world.stage.costs.collective.compute_s(len(world.ranks)))


def record(what: Run, *, is_each: bool) -> History:
    """Returns events, effects and times of every rank."""
    history: History = defaultdict(list)

    def observe(rank: int, event: Event | None, effects: Sequence[Effect], time_s: float) -> None:
        history[rank].append((event, tuple(effects), time_s))

    world = SimulatedWorld(what, what.build_config(), observer=observe)
    if is_each:
        world.trainers = TrainerEach(world)  # type: ignore[assignment]
    world.run()
    return history


@st.composite
def runs(draw: st.DrawFn) -> Run:
    tokens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=80))
    # Odd numbers, so that no two things happen at the same time by accident.
    scale = draw(st.sampled_from([0.0137, 0.731, 11.93]))
    return make_run(
        tokens,
        draw(st.integers(1, min(6, len(tokens)))),
        sharding=draw(st.sampled_from(list(Sharding))),
        policy=draw(st.sampled_from(["odb", "paper"])),
        budget_tokens=draw(st.integers(10, 150)),
        window_samples=draw(st.integers(1, 16)),
        depth_steps=draw(st.integers(1, 4)),
        mode=draw(st.sampled_from(list(Mode))),
        costs=Costs(
            gpu=GpuCost(fixed_s=0.317, per_token_s=0.0113, per_token2_s=0.00071),
            collective=CollectiveCost(fixed_s=0.0523),
            network=NetworkCost(alpha_s=0.00313),
            loader=LoaderCost(workers=2, sample_s=scale * 0.173, per_token_s=scale * 0.00917, collate_step_s=0.00291),
        ),
    )


@settings(max_examples=few(80), deadline=None)
@given(what=runs())
def test_one_process_for_all_trainers_is_exact(what: Run) -> None:
    together, each = record(what, is_each=False), record(what, is_each=True)
    assert together.keys() == each.keys()
    for rank, mine in together.items():
        assert [entry[:2] for entry in mine] == [entry[:2] for entry in each[rank]]
        assert [entry[2] for entry in mine] == pytest.approx([entry[2] for entry in each[rank]], abs=1e-9)


def build_world() -> SimulatedWorld:
    what = make_run(range(1, 41), 2, budget_tokens=80, window_samples=8)
    return SimulatedWorld(what, what.build_config())


def test_a_world_in_which_nothing_can_happen_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Rank.handle
    monkeypatch.setattr(Rank, "handle", lambda self, event: handle(self, event) if self.number == 0 else None)
    with pytest.raises(InvariantError, match="FREE: nothing can happen and rank 0 is in phase offer, round 0"):
        build_world().run()


def test_a_rank_that_takes_another_step_than_the_others_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Rank.handle

    def drop_a_step(self: Rank, event: Event) -> None:
        handle(self, event)
        if self.number == 1 and len(self.queue) > 1:
            self.queue.popleft()

    monkeypatch.setattr(Rank, "handle", drop_a_step)
    with pytest.raises(InvariantError, match=r"ALIGN: rank 1 takes step \d+, the others step 1"):
        build_world().run()
