"""Random bounds for Hypothesis, and the state machine that drives the explorer's world within them.

The world is that of `odb_sim.explore`, so a failing example is a scenario that ``odb-ref explore --replay`` shows.
"""

from __future__ import annotations

import json

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from odb_sim.explore.bounds import Bounds, compute_lengths
from odb_sim.explore.driver import Core
from odb_sim.explore.measure import compute_bound
from odb_sim.explore.rank import ACTS, Act
from odb_sim.explore.scenario import Scenario, encode_scenario
from odb_sim.explore.search import make_space
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Space, World, decode

from odb_ref.core.batching.rules import RULES
from odb_ref.core.types import Mode

_FAULTS = frozenset({Act.FAIL_READ, Act.FAIL_COLLATE, Act.STOP, Act.DIE, Act.ABANDON, Act.LOSE_LOADER})

_ACCEPTED = st.lists(st.integers(1, 17), max_size=3).map(tuple)
_SCHEDULES = ((), (), ((0, 3),), ((0, 2), (2, 16), (5, 6)))


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    """Draws worlds of up to 4 ranks with up to 8 samples each, some of them longer than the budget."""
    faults = st.integers(0, 2)
    shards = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))
    is_shared = draw(st.booleans())
    update = draw(st.none() | st.integers(len(shards), len(shards) + 8))
    mode = Mode.JOIN if is_shared and update else draw(st.sampled_from(Mode))
    bad = st.sets(st.integers(0, max(0, sum(shards) - 1)), max_size=3).map(sorted).map(tuple)
    return Bounds(
        lengths=compute_lengths(shards, draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))),
        budget_tokens=draw(st.integers(1, 16)),
        limits=tuple(draw(st.lists(st.integers(1, 6), max_size=2))),
        window_samples=draw(st.integers(1, 6)),
        depth_steps=draw(st.integers(1, 3)),
        mode=mode,
        quota_samples=draw(st.none() | st.integers(1, 20)) if mode is Mode.QUOTA and not update else None,
        max_age_rounds=draw(st.integers(1, 4)),
        ramp_rounds=draw(st.integers(0, 2)),
        rule=draw(st.sampled_from(sorted(RULES.values(), key=lambda rule: rule.name))),
        failures=draw(faults),
        stops=draw(faults),
        losses=draw(faults),
        is_single_reads=draw(st.booleans()),
        is_eager_end=draw(st.booleans()),
        window_bytes=0 if is_shared else draw(st.sampled_from((0, 0, 1, 5, 12))),
        is_urged_freely=draw(st.booleans()),
        is_left_inside=draw(st.booleans()),
        is_uneven_depth=draw(st.booleans()),
        lost_loaders=draw(faults),
        accepted=tuple(draw(st.lists(_ACCEPTED, max_size=len(shards)))),
        budget_schedule=draw(st.sampled_from(_SCHEDULES)),
        is_shared=is_shared,
        update_samples=update,
        bad=draw(bad) if update else (),
    )


class WorldMachine(RuleBasedStateMachine):
    """One world. Every rule makes something happen, and at the end of an example the rest runs to its end.

    A failing example is printed with its schedule as a scenario for ``odb-ref explore --replay``.
    """

    core = Core()

    def __init__(self) -> None:
        super().__init__()
        self.space: Space | None = None
        self.world: World = ()
        self.bounds: Bounds | None = None
        self.schedule: list[Action] = []

    @initialize(chosen=bounds())
    def begin(self, chosen: Bounds) -> None:
        self.bounds = chosen
        self.space, self.world = make_space(chosen, self.core)

    def _codes(self) -> list[int]:
        return self.space.enabled(self.world) if self.space is not None else []

    def _has(self, *, is_fault: bool) -> bool:
        return any((code % ACTS in _FAULTS) is is_fault for code in self._codes())

    def _apply(self, code: int) -> None:
        assert self.space is not None and self.bounds is not None
        self.schedule.append(decode(code))
        before = self.space.compute_measure(self.world)
        try:
            self.world = self.space.apply(self.world, code)
            self.space.check(self.world)
            assert self.space.compute_measure(self.world) < before, "the measure does not fall"
            assert len(self.schedule) <= compute_bound(self.bounds), "more transitions than the bound"
            if self.space.is_over(self.world, self._codes()):
                self.space.check_over(self.world)
        except (Breach, AssertionError):
            scenario = Scenario(bounds=self.bounds, schedule=tuple(self.schedule), rule=self.bounds.rule.name)
            note(json.dumps(encode_scenario(scenario)))
            raise

    @precondition(lambda self: self._has(is_fault=False))
    @rule(pick=st.integers(0, 2**16), count=st.integers(1, 8))
    def go_on(self, pick: int, count: int) -> None:
        """Makes anything but a fault happen, anywhere, a few times."""
        for _ in range(count):
            codes = [code for code in self._codes() if code % ACTS not in _FAULTS]
            if not codes:
                return
            self._apply(codes[pick % len(codes)])

    @precondition(lambda self: self._has(is_fault=False))
    @rule(rank=st.integers(0, 3))
    def go_on_alone(self, rank: int) -> None:
        """Runs one rank as far as it gets while the others stand still, the least fair schedule possible."""
        while codes := [code for code in self._codes() if code // ACTS == rank and code % ACTS not in _FAULTS]:
            self._apply(codes[0])

    @precondition(lambda self: self._has(is_fault=True))
    @rule(pick=st.integers(0, 2**16))
    def go_wrong(self, pick: int) -> None:
        """Makes a rank fail, a consumer leave, or a process die."""
        codes = [code for code in self._codes() if code % ACTS in _FAULTS]
        self._apply(codes[pick % len(codes)])

    @precondition(lambda self: not self._codes())
    @rule()
    def rest(self) -> None:
        """Checks that nothing more can happen."""

    def teardown(self) -> None:
        while codes := [code for code in self._codes() if code % ACTS not in _FAULTS]:
            self._apply(codes[-1])
