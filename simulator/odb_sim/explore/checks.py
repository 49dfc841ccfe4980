"""What must hold of one rank, of all ranks together, and at the end. Independent of the core's own invariants.

The checks rely on what drivers see (effects, steps handed out), so they notice a core that keeps wrong books.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, groupby
from operator import attrgetter, gt
from typing import Final

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder, permute
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import Config
from odb_ref.core.effects import Outcome, OutcomeKind, PostOffer
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase
from odb_ref.core.types import Group, Mode, Sample, Step, StepCounts
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.rank import ExploredRank
from odb_sim.explore.updates import check_steps_of_updates, check_whole_updates
from odb_sim.explore.violation import Breach
from odb_sim.explore.weights import check_counts

_Budgets = tuple[tuple[int, int], ...]
"""The budgets that came into force, each with its first round. They are the only agreed values that may depend on timing."""
_MOST_PARTITIONED: Final = 8
"""The most samples of a window whose partitions are all tried."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far a rank has come, as far as properties of several ranks need it."""

    round: int
    planned: int
    released: int
    ready: int
    handed_out: int
    taken: int
    entered: int
    outcome: Outcome | None
    limit: int
    is_left: bool
    is_gone: bool
    is_done: bool
    is_draining: bool
    has_step: bool


def compute_progress(rank: ExploredRank) -> RankProgress:
    """Returns the rank's progress, in steps."""
    state = rank.state
    before_plan = state.planned_steps - len(state.plan)
    return RankProgress(
        round=state.round,
        planned=state.planned_steps,
        released=before_plan,
        ready=state.planned_steps if rank.collating is None and state.is_collated else before_plan,
        handed_out=len(rank.taken) + len(rank.queue),
        taken=len(rank.taken),
        entered=rank.entered_steps,
        outcome=rank.finish.outcome if rank.finish is not None else state.outcome,
        limit=rank.finish.step_limit if rank.finish is not None else NONE,
        is_left=rank.is_left,
        is_gone=rank.is_gone,
        is_done=rank.is_done,
        is_draining=state.phase is Phase.DRAIN,
        has_step=rank.has_step and not rank.is_left and not rank.is_gone,
    )


@dataclass(slots=True)
class RankChecks:
    """Checks each rank by itself. It remembers what each step held, which no schedule may change (REPLAY)."""

    bounds: Bounds
    steps: dict[tuple[int, int, _Budgets], Step] = field(default_factory=dict)
    """Steps by rank, number and the budgets agreed on so far."""
    rounds: dict[tuple[int, _Budgets], tuple[int, StepCounts]] = field(default_factory=dict)
    """Round and global counts by step number and these budgets; the same on all ranks (ALIGN, WEIGHT)."""

    def check(self, config: Config, rank: ExploredRank) -> None:
        """Checks everything that must hold of a rank. Raises: Breach."""
        state = rank.state
        steps = (*rank.taken, *rank.queue, *state.released, *state.plan)
        if rank.queue != state.queue:
            raise Breach("FREE", f"rank {config.rank}: the queue is not what was delivered")
        emitted = [sample.position for step in steps for sample in step.group]
        held = [sample.position for group in state.aligned for sample in group]
        held += [sample.position for sample in state.window]
        if len(set(emitted)) < len(emitted):
            raise Breach("ONCE", f"rank {config.rank}: the steps hold positions {emitted}")
        if sorted(emitted + held) != list(range(state.read_samples)):
            detail = f"{state.read_samples} samples read, steps hold {emitted}, the window {held}"
            raise Breach("CONSERVE", f"rank {config.rank}: {detail}")
        for number, step in enumerate(steps):
            if step.number != number:
                raise Breach("ALIGN", f"rank {config.rank}: step {number} is numbered {step.number}")
            self._check_step(config, rank, step)
        if config.update_samples is None:
            self._check_age(config, rank, steps)
        else:
            check_steps_of_updates(config, rank, steps)
        self._check_fewest(config, rank)
        self._check_offer(config, rank)
        self._check_order(config, rank, steps)

    def _check_step(self, config: Config, rank: ExploredRank, step: Step) -> None:
        budgets = rank.get_budgets(step.round)
        known = self.steps.setdefault((config.rank, step.number, budgets), step)
        if known.group != step.group:
            raise Breach("REPLAY", f"rank {config.rank} step {step.number} depends on the schedule: {_name(step)}")
        told = step.round, step.global_counts
        agreed = self.rounds.setdefault((step.number, budgets), told)
        if agreed != told:
            detail = f"round {step.round}, {step.global_counts}, elsewhere round {agreed[0]}, {agreed[1]}"
            raise Breach("ALIGN", f"rank {config.rank} step {step.number}: {detail}")
        lengths = [sample.length for sample in step.group]
        if not _is_friendly(config.sizes, len(lengths)):
            raise Breach(
                "SIZES", f"rank {config.rank} step {step.number}: {len(lengths)} samples, sizes={config.sizes}"
            )
        tokens = _compute_tokens(config, lengths)
        budget, limits = _compute_bounds(config, budgets)
        if len(lengths) > 1 and tokens > budget:
            kind = f"{tokens} {config.layout} tokens of {budget}"
            raise Breach("BUDGET", f"rank {config.rank} step {step.number}: {kind} in {_name(step)}")
        is_bounded = config.update_samples is not None and config.order != StepOrder.SAMPLER
        if is_bounded and (more := tokens - sum(lengths)) > budget // config.padding_share:
            raise Breach("BUDGET", f"rank {config.rank}: {more} of {budget} are padding in {_name(step)}")
        used = _sum_costs(step.group)
        if len(step.group) > 1 and any(map(gt, used, limits)):
            raise Breach("BUDGET", f"rank {config.rank} step {step.number}: uses {used} in {_name(step)}")

    def _check_fewest(self, config: Config, rank: ExploredRank) -> None:
        groups = rank.state.groups
        budget, limits = _compute_bounds(config, rank.get_budgets(rank.state.round))
        if config.order == StepOrder.SAMPLER:
            return
        if config.layout == Layout.PACKED:
            for pair in combinations(groups, 2):
                both = pair[0] + pair[1]
                tokens = sum(sample.length for sample in both)
                if tokens <= budget and not any(map(gt, _sum_costs(both), limits)):
                    raise Breach("ANY-FIT", f"rank {config.rank}: two groups of {tokens} tokens together")
            self._check_oldest(config, groups, budget, limits)
            return
        if config.limits or config.sizes != Sizes.ANY:
            return
        lengths = tuple(sorted(sample.length for group in groups for sample in group))
        most_padding = None if config.update_samples is None else budget // config.padding_share
        if len(lengths) <= _MOST_PARTITIONED and len(groups) > compute_fewest_groups(lengths, budget, most_padding):
            raise Breach("FEWEST", f"rank {config.rank}: {len(groups)} groups of {lengths}")

    def _check_oldest(self, config: Config, groups: Sequence[Group], budget: int, limits: tuple[int, ...]) -> None:
        """Checks that the oldest samples of a packed window share its first group as far as they fit together."""
        window = sorted((sample for group in groups for sample in group), key=attrgetter("position"))
        for count in range(1, len(window) + 1):
            oldest = window[:count]
            tokens, used = sum(sample.length for sample in oldest), _sum_costs(oldest)
            fits = tokens <= budget and not any(map(gt, used, limits))
            if (fits or count == 1) and not set(oldest) <= set(groups[0]):
                positions = [sample.position for sample in oldest]
                raise Breach("ANY-FIT", f"rank {config.rank}: positions {positions} are not all in the first group")

    def _check_offer(self, config: Config, rank: ExploredRank) -> None:
        """Checks the groups to emit. Spec: R3.1."""
        post, groups = rank.post, rank.state.groups
        if rank.state.phase is not Phase.OFFER or not isinstance(post, PostOffer) or not post.offer.ready_min:
            return  # the window of a rank that ends the epoch may still change
        budget, _ = _compute_bounds(config, rank.get_budgets(rank.state.round))
        tokens = [_compute_tokens(config, [sample.length for sample in group]) for group in groups]
        to_emit = len(groups) - (len(groups) > 1 and 2 * min(tokens) < budget)
        is_all = rank.state.is_ended or config.update_samples is not None
        if post.offer.groups_min != (NONE if is_all else to_emit):
            detail = f"offers to emit {post.offer.groups_min} groups, of {tokens} tokens under {budget}"
            raise Breach("FEWEST", f"rank {config.rank}: {detail}")

    def _check_order(self, config: Config, rank: ExploredRank, steps: Sequence[Step]) -> None:
        if config.order == StepOrder.SAMPLER:
            emitted = [position for step in steps for position in sorted(sample.position for sample in step.group)]
            if emitted != list(range(len(emitted))):
                raise Breach("ORDER", f"rank {config.rank}: the steps hold positions {emitted}")
        elif config.quota_samples is None:  # a quota may cut a round, whose other steps are then not seen
            for round_, grouped in groupby(steps, key=lambda step: step.round):
                self._check_fullness(config, round_, list(grouped))

    def _check_fullness(self, config: Config, round_: int, steps: Sequence[Step]) -> None:
        """Checks that the steps of a round, with any permutation undone, go from the fullest down."""
        costs = [_compute_tokens(config, [config.cost.of_tokens(s.length) for s in step.group]) for step in steps]
        filled = len(costs) - costs.count(0)
        places = permute(len(steps), config.order_seed, round_) if config.order == StepOrder.SHUFFLED else range(filled)
        lined = sorted(zip([place for place in places if place < filled], costs, strict=False))
        fullness = [count for _, count in lined]
        if not all(costs[:filled]) or fullness != sorted(fullness, reverse=True):
            detail = f"{config.cost.name} of {costs} a step, {fullness} in the order of places"
            raise Breach("ORDER", f"rank {config.rank} round {round_}: {detail}")

    def _check_age(self, config: Config, rank: ExploredRank, steps: Sequence[Step]) -> None:
        if config.mode is Mode.QUOTA and (self.bounds.window_bytes or self.bounds.is_shared):
            return  # NP26
        for step in steps:
            for sample in step.group:
                arrival = bisect_right(rank.windows, sample.position)
                if step.round - arrival > config.max_age_rounds:
                    detail = f"position {sample.position} came in round {arrival} and is emitted in round {step.round}"
                    raise Breach("AGE", f"rank {config.rank}: {detail}")


def _compute_bounds(config: Config, budgets: _Budgets) -> tuple[int, tuple[int, ...]]:
    """Returns the last budget in force, and each limit under it. Spec: R15.1.

    It does not use the core's function, so that an error in that shows.
    """
    if not budgets:
        return config.budget_tokens, config.limits
    budget = budgets[-1][1]
    return budget, tuple(max(1, limit * budget // config.budget_tokens) for limit in config.limits)


def _is_friendly(sizes: Sizes, count: int) -> bool:
    """Returns True when a group may have ``count`` samples, again without the core's function. Spec: R2.8."""
    powers = {2**power for power in range(count.bit_length())} | {0}
    return {
        Sizes.ANY: True,
        Sizes.EVEN: count <= 1 or count % 2 == 0,
        Sizes.THREES: count in powers or (count % 3 == 0 and count // 3 in powers),
        Sizes.POWERS: count in powers,
    }[sizes]


def _compute_tokens(config: Config, lengths: Sequence[int]) -> int:
    if config.layout == Layout.PACKED:
        return sum(lengths)
    return len(lengths) * max(lengths, default=0)


def _sum_costs(samples: Sequence[Sample]) -> list[int]:
    return [sum(costs) for costs in zip(*(sample.costs for sample in samples), strict=True)]


def _name(step: Step) -> str:
    return f"positions {[sample.position for sample in step.group]}"


@cache
def compute_fewest_groups(lengths: tuple[int, ...], budget_tokens: int, most_padding: int | None = None) -> int:
    """Returns the fewest groups of any partition within the budget and, if given, the bound of padding. It tries all
    partitions, which is exponential in the number of samples.
    """
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for picked in range(2 ** len(rest)):
        group = (first, *(length for i, length in enumerate(rest) if picked >> i & 1))
        tokens = len(group) * max(group)
        is_dense = most_padding is None or tokens - sum(group) <= most_padding
        if len(group) == 1 or (tokens <= budget_tokens and is_dense):
            left = tuple(length for i, length in enumerate(rest) if not picked >> i & 1)
            best = min(best, 1 + compute_fewest_groups(left, budget_tokens, most_padding))
    return best


def check_together(ranks: Sequence[RankProgress]) -> None:
    """Checks what must hold of all ranks at all times. Raises: Breach."""
    least_ready = min(rank.ready for rank in ranks)
    for i, rank in enumerate(ranks):
        if rank.released > least_ready or rank.handed_out > least_ready:
            late = next(j for j, other in enumerate(ranks) if other.ready == least_ready)
            number = max(rank.released, rank.handed_out) - 1
            raise Breach("RELEASE", f"rank {i} has released step {number}, rank {late} is ready up to {least_ready}")
        if rank.taken - min(other.entered for other in ranks) > 1:
            raise Breach("FREE", f"rank {i} has taken {rank.taken} steps, more than a step ahead")
    first = min(ranks, key=lambda rank: rank.round)
    planned: dict[int, int] = {}
    for i, rank in enumerate(ranks):
        if rank.round - first.round > 1:
            raise Breach("ALIGN", f"rank {i} is in round {rank.round}, rank {ranks.index(first)} in {first.round}")
        if planned.setdefault(rank.round, rank.planned) != rank.planned:
            detail = f"rank {i} has planned {rank.planned} steps, another {planned[rank.round]}"
            raise Breach("ALIGN", f"{detail} before round {rank.round}")
    outcomes = [
        rank.outcome for rank in ranks if rank.outcome is not None and rank.outcome.kind is not OutcomeKind.LOST
    ]
    if any(outcome != outcomes[0] for outcome in outcomes):
        raise Breach("ABORT", f"the ranks end differently: {', '.join(map(str, outcomes))}")


def check_stillness(ranks: Sequence[RankProgress]) -> None:
    """Checks a world in which nothing has to happen any more: every loader is done, and every consumer done, gone or stranded.

    A consumer is *stranded* when it waits, in the collective of a step, for a consumer that has left or is gone. No loader
    can help it. A loader that still has steps for it is in DRAIN, and delays no other rank.
    Raises: Breach.
    """
    least = min(rank.entered for rank in ranks)
    is_stranding = any(rank.is_gone or (rank.is_left and rank.entered == least) for rank in ranks)
    for i, rank in enumerate(ranks):
        if not rank.is_done and (rank.is_left or not (rank.is_draining and is_stranding)):
            raise Breach("FREE", f"deadlock: rank {i} waits for ever in round {rank.round}")
        if (rank.has_step or rank.taken > least) and not is_stranding:
            raise Breach("FREE", f"deadlock: the consumer of rank {i} waits for ever in step {rank.taken - 1}")


def check_end(bounds: Bounds, ranks: Sequence[ExploredRank]) -> None:
    """Checks how the epoch ended. Raises: Breach."""
    finishes = [rank.finish for rank in ranks if rank.finish is not None and not rank.is_gone]
    outcomes = [finish.outcome for finish in finishes]
    causes = [(i, cause) for i, rank in enumerate(ranks) for cause in rank.causes]
    left = [i for i, rank in enumerate(ranks) if rank.is_left]
    gone = [i for i, rank in enumerate(ranks) if rank.is_gone]
    due = [rank.causes[0] for rank in ranks if rank.is_due]
    for outcome in outcomes:
        match outcome.kind:
            case OutcomeKind.COMPLETE | OutcomeKind.STOPPED if due:
                raise Breach("ABORT", f"a failure is forgotten, though its rank offers again: {due[0]}; {outcome}")
            case OutcomeKind.FAILED if (outcome.rank, outcome.cause) not in causes:
                raise Breach("ABORT", f"nothing failed as the outcome says: {outcome}")
            case OutcomeKind.STOPPED if outcome.rank not in left:
                raise Breach("STOP", f"nobody left as the outcome says: {outcome}")
            case OutcomeKind.STOPPED:
                _check_stopped(ranks, outcome)
            case OutcomeKind.LOST if outcome.rank not in gone:
                raise Breach("ABORT", f"nobody is gone as the outcome says: {outcome}")
            case OutcomeKind.MISMATCH if bounds.odd_rank is None:
                raise Breach("ABORT", f"the ranks do run the same configuration: {outcome}")
            case OutcomeKind.COMPLETE if bounds.odd_rank is not None:
                raise Breach("ABORT", f"rank {bounds.odd_rank} has another configuration, and nobody notices")
            case OutcomeKind.COMPLETE:
                _check_complete(bounds, ranks)
            case _:
                pass


def _check_stopped(ranks: Sequence[ExploredRank], outcome: Outcome) -> None:
    """Checks that no rank gets a step that the consumer named by the outcome has not taken."""
    taken = 0 if outcome.rank is None else len(ranks[outcome.rank].taken)
    for i, finish in enumerate(rank.finish for rank in ranks):
        if finish is not None and finish.outcome == outcome and finish.step_limit > taken:
            raise Breach("STOP", f"rank {i} gets steps below {finish.step_limit}, rank {outcome.rank} took {taken}")


def _check_complete(bounds: Bounds, ranks: Sequence[ExploredRank]) -> None:
    """Checks that join mode planned every sample once and, if no consumer left, that all took every step, the same ones."""
    if any(rank.is_gone for rank in ranks):
        return
    planned = [
        sorted(sample.position for step in (*rank.taken, *rank.queue, *rank.state.released) for sample in step.group)
        for rank in ranks
    ]
    is_drawn = bounds.is_shared or bounds.update_samples is not None
    inputs = [len(rank.drawn) for rank in ranks] if is_drawn else list(map(len, bounds.lengths))
    whole = [positions == list(range(size)) for positions, size in zip(planned, inputs, strict=True)]
    if bounds.mode is Mode.JOIN and not all(whole):
        late = whole.index(False)
        raise Breach("COVER", f"rank {late} has {inputs[late]} samples and emits {planned[late]}")
    if is_drawn:
        _check_drawn(bounds, ranks)
    if any(rank.is_left for rank in ranks):
        return
    taken = [len(rank.taken) for rank in ranks]
    if len(set(taken)) > 1:
        raise Breach("ALIGN", f"the ranks take {taken} steps")
    if taken[0] != ranks[0].state.planned_steps:
        raise Breach("COVER", f"the consumers take {taken[0]} steps of {ranks[0].state.planned_steps}")
    check_counts(bounds, ranks)
    if bounds.update_samples is not None:
        check_whole_updates(bounds, ranks)
    elif bounds.mode is Mode.QUOTA:
        _check_quota(bounds, ranks, any(whole))


def _check_drawn(bounds: Bounds, ranks: Sequence[ExploredRank]) -> None:
    """Checks that no place of the common order is drawn twice and, in join mode, that each is drawn unless set aside."""
    drawn = sorted(sample.id for rank in ranks for sample in rank.drawn)
    good = sorted(set(range(bounds.total_samples)) - set(bounds.bad))
    if len(set(drawn)) < len(drawn) or (bounds.mode is Mode.JOIN and drawn != good):
        raise Breach("DEAL", f"of {bounds.total_samples} places the ranks draw {drawn}")


def _check_quota(bounds: Bounds, ranks: Sequence[ExploredRank], is_dry: bool) -> None:
    """Checks that no rank idled, and that the epoch closed at the quota or because a rank ran dry (``is_dry``)."""
    idle = next((i for i, rank in enumerate(ranks) if any(step.is_idle for step in rank.taken)), None)
    if idle is not None:
        raise Breach("QUOTA", f"rank {idle} idles in quota mode")
    totals = [sum(len(step.group) for step in steps) for steps in zip(*(rank.taken for rank in ranks), strict=True)]
    quota = bounds.quota_samples
    if quota is not None and sum(totals[:-1]) >= quota:
        raise Breach("QUOTA", f"{totals} samples a step: the quota of {quota} was met before the last one")
    if (quota is None or sum(totals) < quota) and not is_dry:
        raise Breach("QUOTA", f"closed after {sum(totals)} samples, short of the quota, and no rank has run dry")
