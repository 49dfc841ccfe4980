"""Simulates one run of any policy in one call. The commands and the reports are built on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

from odb_ref.arrays.twins import HUGE
from odb_ref.arrays.windows import fits_twins
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import RULES, TargetRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config, choose_ramp
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode
from odb_ref.trace.origin import Origin, OwnedLot, make_lot, place_lot
from odb_ref.trace.writing import TraceWriter
from odb_sim.baselines.figures import simulate_plan
from odb_sim.baselines.peer import plan_peer
from odb_sim.baselines.plans import FIXED_SIZE, PLANNERS, RankBatches, compute_batch_size
from odb_sim.engine.cautions import Caution, list_cautions
from odb_sim.engine.fill import Fill
from odb_sim.engine.metrics import RunSettings, StepRow, Summary, compute_summary
from odb_sim.engine.rounds import simulate_rounds
from odb_sim.engine.stage import Epoch
from odb_sim.engine.timeline import Timeline
from odb_sim.engine.updates import GlobalBatch
from odb_sim.engine.world import SimulatedWorld, TimedObserver
from odb_sim.inputs.rules import OWN, load_policy_rule
from odb_sim.inputs.workload import Sharding

PEER: Final = "peer"
POLICIES: Final = (*sorted(RULES), PEER, *PLANNERS)
"""Target rules, with which the protocol runs, and baselines, which run without it. A user's rule is `module:name`."""


class Driver(StrEnum):
    """The way to simulate the ranks of the protocol. Both ways give the same figures."""

    AUTO = "auto"
    """Rounds if they can simulate the run, else events."""
    ROUNDS = "rounds"
    """All ranks one round at a time, as arrays (`rounds`), for runs without faults and jitter."""
    EVENTS = "events"
    """The machine of every rank, event by event (`world`), which is the authority."""


def has_window(policy: str, update_samples: int | None = None) -> bool:
    """Returns True when a rank of the policy groups a window of samples at a time. The protocol groups an update if its size is
    fixed.
    """
    return policy == PEER or (is_rule(policy) and update_samples is None)


def keeps_shards(policy: str, asked: Sharding) -> bool:
    """Returns True when the ranks of the policy have the shards that are asked for. Baselines cannot share, and those that know
    all lengths deal batches out evenly, whatever the shards.
    """
    return is_rule(policy) or (policy in (PEER, "standard") and asked is not Sharding.SHARED)


def has_fixed_batches(policy: str) -> bool:
    """Returns True when all batches of the policy have the same number of samples."""
    return policy in FIXED_SIZE


def describe_budget(summary: Summary) -> str:
    """Returns the token budget of a run for its headline, with its schedule if there is one."""
    schedule = "" if summary.budget_schedule is None else f" at most ({summary.budget_schedule})"
    return f"budget {summary.token_budget:,}{schedule}"


def describe_shards(asked: str, runs: Iterable[RunSettings]) -> str:
    """Returns the shards that were asked for, and the policies that have even ones all the same."""
    even = dict.fromkeys(one.policy for one in runs if one.shards != asked)
    return f"{asked} shards" + (f", but even ones for {', '.join(even)}" if even else "")


def describe_window(summary: Summary) -> str:
    """Returns the window of a run for its headline, or an empty text if it has none or its window is an update."""
    return "" if summary.window is None else f", window {summary.window:,}"


def is_rule(policy: str) -> bool:
    """Returns True when the policy is a target rule, shipped or the user's, which the protocol core runs."""
    return policy in RULES or OWN in policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Epoch):
    """A run to simulate. ``rule`` overrides ``policy`` with a target rule that is not shipped.

    Raises: UsageError when a value is not valid.
    """

    policy: str
    batch_size: int | None = None
    """The samples of a fixed batch. None means the number of longest samples that fit the budget."""
    rule: TargetRule | None = None
    driver: Driver = Driver.AUTO

    def __post_init__(self) -> None:
        if self.rule is None and self.policy not in POLICIES and not is_rule(self.policy):
            raise UsageError(
                f"unknown policy {self.policy!r}; choose from {', '.join(POLICIES)}, or module:name for a rule of your own"
            )
        for is_asked, why in (
            (self.limits, "it cannot keep a limit"),
            (self.conditions.faults, "it cannot have a fault"),
            (self.budget_schedule is not None, "its budget cannot change"),
        ):
            if is_asked and not self.is_protocol:
                raise UsageError(f"policy {self.policy} does not run the protocol, so {why}")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"a batch must hold at least 1 sample, got {self.batch_size}")
        goal = self.global_batch.samples
        if goal is not None and goal < self.workload.ranks:
            raise UsageError(
                f"a global batch of {goal:,} samples leaves some of {self.workload.ranks:,} ranks without one"
            )
        self.conditions.check_ranks(self.workload.ranks)
        if self.starts and (not self.is_protocol or len(self.starts) != self.workload.ranks):
            raise UsageError(
                f"an epoch can be resumed only by every rank of the protocol: {len(self.starts)} starts given"
            )
        if self.sharding is Sharding.SHARED and any(start.round for start in self.starts):
            raise UsageError("an epoch of shared shards can be simulated only from its beginning")
        self.build_config()
        if self.is_protocol and self.driver is Driver.ROUNDS and (obstacle := self.find_obstacle()):
            raise UsageError(
                f"the driver of rounds cannot simulate {obstacle}: leave it to choose, or take that of events"
            )

    def find_obstacle(self) -> str:
        """Returns what in a run of the protocol only events can simulate, or an empty text if rounds can do it too."""
        if self.conditions.faults:
            return "a fault"
        if self.conditions.jitter:
            return "jitter"
        if self.full_reads:
            return "windows bounded in bytes"
        if self.update_samples is not None:
            return "updates of a fixed number of samples"
        places = {(start.round, start.planned_steps, start.global_samples, len(start.marks)) for start in self.starts}
        if len(places) > 1:
            return "ranks that go on from different rounds"
        if self.workload.resources.shape[1] != len(self.limits) or not fits_twins(self.workload.tokens):
            return "samples that the machine refuses"
        dearest = self.cost.of_tokens(int(self.workload.tokens.max()))
        if dearest * min(self.window_samples, self.workload.samples_total) > HUGE:
            return "costs of too many digits"
        return ""

    @property
    def is_protocol(self) -> bool:
        """True when the protocol core runs; False for a baseline."""
        return self.rule is not None or is_rule(self.policy)

    @property
    def forms_updates(self) -> bool:
        """True when the protocol forms updates of a fixed number of samples (R16), whatever the global batch is."""
        return self.is_protocol and self.update_samples is not None

    @property
    def has_window(self) -> bool:
        """True when ranks group a window of samples at a time: see `has_window`."""
        return self.update_samples is None if self.rule is not None else has_window(self.policy, self.update_samples)

    @property
    def expected_samples(self) -> int:
        """The least number of samples of a complete epoch. It is not known in advance in quota mode, nor of the peer, which by
        its own rules loses some.
        """
        if self.mode is not Mode.JOIN or self.policy == PEER:
            return 0
        return self.workload.samples_total - sum(start.read_samples - len(start.carried) for start in self.starts)

    def build_config(self) -> Config:
        """Returns the configuration of rank 0. Raises: UsageError when a value is not valid."""
        config = Config(
            rank=0,
            world_size=self.workload.ranks,
            budget_tokens=self.budget_tokens,
            window_samples=self.window_samples
            if self.update_samples is None
            else max(1, self.update_samples // self.workload.ranks),
            depth_steps=self.depth_steps,
            rule=self.rule or load_policy_rule(self.policy if is_rule(self.policy) else "odb"),
            order_seed=self.seed if self.order_seed is None else self.order_seed,
            tag=f"seed={self.seed}",
        )
        shared_samples = self.workload.samples_total if self.sharding is Sharding.SHARED else None
        return replace(self._choose_ramp().apply(config), shared_samples=shared_samples)

    def _choose_ramp(self) -> Run:
        """Returns the run with its ramp filled in if none is given."""
        if self.ramp_rounds is not None:
            return self
        samples = self.workload.samples_total / self.workload.ranks
        return replace(self, ramp_rounds=choose_ramp(self.window_samples, samples))

    def open_trace(self, path: str | Path) -> TraceWriter:
        """Opens a trace of the run, whose header states the samples there are. Spec: R9.6."""
        workload, is_shared = self.workload, self.sharding is Sharding.SHARED
        offsets = [0, workload.samples_total] if is_shared else workload.offsets.tolist()
        shards = [workload.ids[begin:end].tolist() for begin, end in pairwise(offsets)]
        inputs = tuple(
            OwnedLot(rank=None if is_shared else rank, lot=make_lot(ids), order=place_lot(ids).digest)
            for rank, ids in enumerate(shards)
        )
        return TraceWriter(
            path,
            self.build_config(),
            driver="simulator",
            workers=self.costs.loader.workers,
            origin=Origin(inputs=inputs),
        )


PLANNED_LAYOUT: Final = {"packing": Layout.PACKED}
"""The layouts of baselines that do not pad."""

PLANNED_ORDER: Final = "planned"
"""Stands for the order of a baseline's steps, which the plan decides."""


def _plan(what: Run) -> list[RankBatches]:
    if what.policy == PEER:
        return plan_peer(what.workload, what.budget_tokens, what.window_samples, what.seed)
    return PLANNERS[what.policy](what.workload, _choose_planned_tokens(what), what.seed)


def _choose_planned_tokens(what: Run) -> int:
    """Returns the budget for which a plan is made. If fixed batches have a given size, it is what that many of the longest
    samples need.
    """
    if what.batch_size is None or what.policy not in FIXED_SIZE:
        return what.budget_tokens
    return what.batch_size * int(what.workload.tokens.max())


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    summary: Summary
    rows: list[StepRow]
    cautions: tuple[Caution, ...] = ()


def run(
    what: Run,
    *,
    observer: TimedObserver | None = None,
    timeline: Timeline | None = None,
    fill: Fill | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Result:
    """Simulates ``what``. ``fill`` gets what each rank trains on, and ``on_progress`` the number of samples done so far.

    Raises: InvariantError when a property of the protocol does not hold, UsageError when ``what.driver`` cannot simulate it.
    """
    begin_s = time.perf_counter()
    if what.forms_updates:  # overrides the global batch of a comparison
        what = replace(what, global_batch=GlobalBatch(samples=what.update_samples))
    batch_size: int | None = None
    policy, driver = what.policy, "plan"
    if what.is_protocol:
        config = what.build_config()
        policy = config.rule.name
        driver = str(_choose_driver(what, is_watched=observer is not None or timeline is not None))
    if driver == Driver.ROUNDS:
        record = simulate_rounds(what, config, fill=fill, on_progress=on_progress)
    elif driver == Driver.EVENTS:
        record = SimulatedWorld(
            what, config, observer=observer, timeline=timeline, fill=fill, on_progress=on_progress
        ).run()
    else:
        if what.policy in FIXED_SIZE:
            batch_size = compute_batch_size(what.workload, _choose_planned_tokens(what))
        record = simulate_plan(what, _plan(what), timeline=timeline, fill=fill, on_progress=on_progress)
    settings = RunSettings(
        lengths=what.workload.name,
        policy=policy,
        mode=str(what.mode),
        shards=str(what.sharding if what.is_protocol or keeps_shards(policy, what.sharding) else Sharding.EVEN),
        cost=what.cost.name,
        layout=str(what.layout if what.is_protocol else PLANNED_LAYOUT.get(what.policy, Layout.PADDED)),
        order=str(what.order) if what.is_protocol else PLANNED_ORDER,
        sizes=str(what.sizes if what.is_protocol else Sizes.ANY),
        ranks=what.workload.ranks,
        window=what.window_samples if what.has_window else None,
        depth=what.depth_steps if what.is_protocol else None,
        token_budget=what.budget_tokens,
        budget_schedule=None if what.budget_schedule is None else str(what.budget_schedule),
        batch_size=batch_size,
        quota=what.quota_samples,
        global_batch=what.global_batch.samples,
        global_tokens=what.global_batch.tokens,
        seed=what.seed,
        samples_total=what.workload.samples_total,
    )
    wall_time_s = time.perf_counter() - begin_s
    summary = compute_summary(
        settings,
        record,
        wall_time_s=wall_time_s,
        driver=driver,
        expected_samples=what.expected_samples,
    )
    cautions = list_cautions(
        what.workload,
        summary,
        what.costs.fitted,
        is_steady=what.budget_schedule is None,
        faults=what.conditions.faults,
        acted=record.acted,
    )
    return Result(summary, record.rows, cautions)


def _choose_driver(what: Run, *, is_watched: bool) -> Driver:
    """Returns the driver for the run. ``is_watched`` is true if a trace or a timeline is requested.

    Raises: UsageError when rounds are requested for a trace or a timeline, since they have no events.
    """
    if what.driver is Driver.ROUNDS and is_watched:
        raise UsageError("the driver of rounds has no events, so it writes no trace and no timeline")
    has_events = what.driver is Driver.EVENTS or is_watched or what.find_obstacle()
    return Driver.EVENTS if has_events else Driver.ROUNDS
