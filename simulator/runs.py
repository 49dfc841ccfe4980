"""One call for one simulated run, whatever the policy: what the commands and the reports are built on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError
from odb_ref.core.resume import RoundStart
from odb_ref.core.rules import RULES, TargetRule, get_rule
from odb_ref.core.types import Mode
from simulator.baselines import simulate_plan
from simulator.conditions import STEADY, Conditions
from simulator.costs import Costs
from simulator.metrics import COMPLETE, Settings, StepRow, Summary, compute_summary
from simulator.peer import plan_peer
from simulator.plans import FIXED_SIZE, PLANNERS, RankPlan, compute_batch_size
from simulator.timeline import Timeline
from simulator.workload import Sharding, Workload
from simulator.world import TimedObserver, World

PEER: Final = "peer"
POLICIES: Final = (*sorted(RULES), PEER, *PLANNERS)
"""Target rules of the core, which the protocol runs, and baselines, which need none."""


def has_window(policy: str) -> bool:
    """True when a rank of the policy groups a window of samples at a time."""
    return policy in RULES or policy == PEER


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to simulate. ``rule`` overrides ``policy`` with a target rule that does not ship.

    Raises: UsageError when a value makes no sense.
    """

    workload: Workload
    policy: str
    budget_tokens: int
    limits: tuple[int, ...] = ()
    window_samples: int = 256
    depth_steps: int = 8
    mode: Mode = Mode.JOIN
    quota_samples: int | None = None
    max_age_rounds: int = 4
    ramp_rounds: int = 3
    sharding: Sharding = Sharding.EVEN
    seed: int = 0
    costs: Costs = field(default_factory=Costs)
    conditions: Conditions = STEADY
    rule: TargetRule | None = None
    starts: tuple[RoundStart, ...] = ()
    """Where each rank goes on with a saved epoch; empty for one from its beginning."""

    def __post_init__(self) -> None:
        if self.rule is None and self.policy not in POLICIES:
            raise UsageError(f"no policy {self.policy!r}; there are {', '.join(POLICIES)}")
        if self.limits and not self.is_protocol:
            raise UsageError(f"policy {self.policy} does not run the protocol, so it cannot keep a limit")
        if self.conditions.faults and not self.is_protocol:
            raise UsageError(f"policy {self.policy} does not run the protocol, so it cannot be told of a fault")
        self.conditions.check_ranks(self.workload.ranks)
        if self.starts and (not self.is_protocol or len(self.starts) != self.workload.ranks):
            raise UsageError(f"an epoch is gone on with by every rank of the protocol: {len(self.starts)} starts given")
        self.build_config()

    @property
    def is_protocol(self) -> bool:
        """True when the protocol core runs; False for a baseline."""
        return self.rule is not None or self.policy in RULES

    def build_config(self) -> Config:
        """The configuration of rank 0.

        Raises: UsageError when a value makes no sense.
        """
        return Config(
            rank=0,
            world_size=self.workload.ranks,
            budget_tokens=self.budget_tokens,
            limits=self.limits,
            window_samples=self.window_samples,
            depth_steps=self.depth_steps,
            mode=self.mode,
            quota_samples=self.quota_samples,
            max_age_rounds=self.max_age_rounds,
            ramp_rounds=self.ramp_rounds,
            rule=self.rule or get_rule(self.policy if self.policy in RULES else "odb"),
            tag=f"seed={self.seed}",
        )


def _plan(what: Run) -> list[RankPlan]:
    if what.policy == PEER:
        return plan_peer(what.workload, what.budget_tokens, what.window_samples, what.seed)
    return PLANNERS[what.policy](what.workload, what.budget_tokens, what.seed)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run."""

    summary: Summary
    rows: list[StepRow]


def run(
    what: Run,
    *,
    observer: TimedObserver | None = None,
    timeline: Timeline | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Result:
    """Simulates ``what``. ``on_progress`` hears after each step how many samples are done.

    Raises: InvariantError when a property of the protocol does not hold.
    """
    begin_s = time.perf_counter()
    batch_size: int | None = None
    outcome, abort_s = COMPLETE, None
    if what.is_protocol:
        world = World(
            what.build_config(),
            what.workload,
            what.costs,
            conditions=what.conditions,
            seed=what.seed,
            starts=what.starts,
            observer=observer,
            timeline=timeline,
            on_progress=on_progress,
        )
        outcome = world.run()
        rows, totals, abort_s = world.recorder.rows, world.recorder.compute_totals(), world.abort_s
    else:
        if what.policy in FIXED_SIZE:
            batch_size = compute_batch_size(what.workload, what.budget_tokens)
        rows, totals = simulate_plan(
            what.workload,
            _plan(what),
            what.costs,
            budget_tokens=what.budget_tokens,
            depth_steps=what.depth_steps,
            conditions=what.conditions,
            seed=what.seed,
            mode=what.mode,
            quota_samples=what.quota_samples,
            timeline=timeline,
            on_progress=on_progress,
        )
    settings = Settings(
        lengths=what.workload.name,
        policy=what.policy if what.rule is None else what.rule.name,
        mode=str(what.mode),
        shards=str(what.sharding),
        ranks=what.workload.ranks,
        window=what.window_samples,
        depth=what.depth_steps,
        token_budget=what.budget_tokens,
        batch_size=batch_size,
        quota=what.quota_samples,
        seed=what.seed,
        samples_total=what.workload.samples_total,
    )
    wall_time_s = time.perf_counter() - begin_s
    return Result(compute_summary(settings, totals, wall_time_s=wall_time_s, outcome=outcome, abort_s=abort_s), rows)
