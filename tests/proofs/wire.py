"""Cases and answers of the extracted model, as words, matching proofs/extracted/main.ml."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from odb_ref.core.batching.cost import TOKENS, Cost
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, OutcomeKind, PostCounts, PostOffer, PostReport
from odb_ref.core.events import (
    Agreed,
    BudgetAccepted,
    Collated,
    ConsumerStopped,
    Counted,
    Event,
    LocalFailed,
    PeerLost,
    Report,
    Reported,
    SamplesRead,
    StepTaken,
    Urged,
)
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.state import State
from odb_ref.core.types import Group, Mode, Sample, Step, StepCounts


@dataclass(frozen=True)
class Stairs:
    """A user's cost that grows by one with every ``width`` tokens."""

    width: int

    def __call__(self, tokens: int) -> int:
        return 1 + tokens // self.width


def write_cost(cost: Cost) -> str:
    function = cost.of_tokens
    if isinstance(function, Stairs):
        return f"stairs {function.width}"
    return cost.name if cost == TOKENS else cost.name.replace("/", " ")


def _option(value: int) -> int:
    return -1 if value == NONE else value


def _words(*items: object) -> str:
    return " ".join(map(str, items))


def write_integers(values: Sequence[int]) -> str:
    return _words(len(values), *values)


def write_samples(samples: Sequence[Sample]) -> str:
    rows = (f"{s.id} {s.position} {s.length} {s.supervised} {write_integers(s.costs)}" for s in samples)
    return _words(len(samples), *rows)


def write_offer(offer: Offer) -> str:
    return _words(
        offer.round_min,
        offer.round_max,
        offer.fingerprint_min,
        offer.fingerprint_max,
        offer.ready_min,
        _option(offer.failed_rank),
        _option(offer.stop_step),
        _option(offer.stop_rank),
        offer.samples_min,
        offer.samples_max,
        _option(offer.groups_min),
        offer.groups_max,
        offer.due_max,
        _option(offer.budget_min),
    )


def _write_counts(counts: Iterable[StepCounts]) -> str:
    rows = [f"{c.samples} {c.tokens} {c.supervised} {write_integers(c.costs)}" for c in counts]
    return _words(len(rows), *rows)


def write_report(report: Report, prints: dict[str, int]) -> str:
    return _words(report.rank, report.cause or -1, report.round, prints[report.config])


Budgets = tuple[int, int]
"""The budget with which a rank begins, and the one it accepts. NONE means the configuration's."""


def write_config(config: Config, budgets: Budgets = (NONE, NONE), *, is_bounded: bool = False) -> str:
    """Returns a configuration, the budgets with which its rank begins, and whether its windows are bounded in bytes."""
    return _words(
        config.layout,
        write_cost(config.cost),
        config.budget_tokens,
        write_integers(config.limits),
        config.window_samples,
        config.ramp_rounds,
        config.max_age_rounds,
        int(config.mode is Mode.QUOTA),
        -1 if config.quota_samples is None else config.quota_samples,
        config.rule.name,
        config.fingerprint,
        config.order,
        config.order_seed,
        config.rank,
        config.depth_steps,
        int(is_bounded),
        *map(_option, budgets),
        config.world_size,
        config.update_samples or 0,
        0 if config.shared_samples is None else config.update_rounds,
        1 if config.update_samples is None else config.padding_share,
    )


def write_event(event: Event, prints: dict[str, int]) -> str:
    match event:
        case SamplesRead():
            return _words("read", int(event.is_ended), int(event.is_full), write_samples(event.samples))
        case Collated():
            return "collated"
        case Agreed():
            return _words("agreed", write_offer(event.agreement))
        case Counted():
            return _words("counted", _write_counts(event.counts))
        case Reported():
            return _words("reported", len(event.reports), *(write_report(item, prints) for item in event.reports))
        case StepTaken():
            return "taken"
        case ConsumerStopped():
            return "stopped"
        case LocalFailed():
            return _words("failed", event.cause)
        case Urged():
            return "urged"
        case BudgetAccepted():
            return _words("accepted", event.tokens)
        case PeerLost():
            return _words("lost", -1 if event.rank is None else event.rank, event.cause)
        case _:
            assert_never(event)


def show_list(items: Iterable[object]) -> str:
    return "[" + " ".join(map(str, items)) + "]"


def show_group(group: Group) -> str:
    return show_list(sample.position for sample in group)


def show_groups(groups: Iterable[Group]) -> str:
    return show_list(map(show_group, groups))


def show_counts(counts: StepCounts) -> str:
    """Returns counts without zeros at the end, because a missing amount is 0 for the model."""
    costs = list(counts.costs)
    while costs and not costs[-1]:
        costs.pop()
    return "/".join(map(str, (counts.samples, counts.tokens, counts.supervised, *costs)))


def _show_step(step: Step) -> str:
    return f"{step.number}:{step.round}:{show_group(step.group)}:{show_counts(step.global_counts)}"


def _show_outcome(state: State) -> str:
    outcome = state.outcome
    if outcome is None:
        return "-"
    match outcome.kind:
        case OutcomeKind.COMPLETE:
            return "complete"
        case OutcomeKind.STOPPED:
            return f"stopped {outcome.rank}"
        case OutcomeKind.FAILED:
            return f"failed {outcome.rank} {outcome.cause}"
        case OutcomeKind.MISMATCH:
            return f"mismatch {outcome.rank}"
        case OutcomeKind.LOST:
            return f"lost {-1 if outcome.rank is None else outcome.rank} {outcome.cause}"
        case _:
            assert_never(outcome.kind)


def _show_post(effects: Sequence[Effect], prints: dict[str, int]) -> str:
    for effect in effects:
        match effect:
            case PostOffer():
                return "offer " + write_offer(effect.offer)
            case PostCounts():
                return "counts " + show_list(map(show_counts, effect.counts))
            case PostReport():
                return "report " + write_report(effect.report, prints)
            case _:
                pass
    return "-"


def show_state(state: State, effects: Sequence[Effect], prints: dict[str, int]) -> str:
    """Returns one line with every field of the state but ``taken_samples``, and what was posted to the exchange."""
    fields = (
        state.phase,
        state.round,
        state.read_samples,
        int(state.is_ended),
        state.wanted_samples,
        show_group(state.window),
        show_list(state.marks),
        show_groups(state.groups),
        _option(state.agreed_tokens),
        _option(state.accepted_tokens),
        show_groups(state.aligned),
        show_list(map(_show_step, state.plan)),
        int(state.is_collated),
        state.planned_steps,
        state.global_samples,
        show_list(map(_show_step, state.released)),
        show_list(map(_show_step, state.queue)),
        state.taken_steps,
        state.failure or -1,
        int(state.is_stopped),
        int(state.is_urged),
        _option(state.step_limit),
        _show_outcome(state),
        _show_post(effects, prints),
    )
    return " | ".join(map(str, fields))
