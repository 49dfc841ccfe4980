"""Labels for states of the TLA+ model and worlds of the explorer, which are equal if the states are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from odb_sim.explore.rank import Act, ExploredRank
from odb_sim.explore.world import Space, World

from odb_ref.core.config import Config
from odb_ref.core.effects import Post, PostCounts, PostOffer, PostReport
from odb_ref.core.events import Agreed, Counted, Reported
from odb_ref.core.exchange import Answer
from odb_ref.core.offer import NONE
from odb_ref.core.rounds import compute_round_target
from odb_ref.core.types import Group, Step
from tests.tla.tlc import TLA_NONE

Label = tuple[object, ...]
_RANK_FIELDS = (
    "phase round read ended wanted held marks aligned plan collated planned global released queue taken got failed stopped "
    "urged limit outcome reading collating post causes left inside told lost gone loaderless agreed accepted coming draw places"
)
ACTIONS = {
    "Read": Act.READ, "Collate": Act.COLLATE, "Answer": Act.ANSWER, "Take": Act.TAKE, "Urge": Act.URGE, "Lose": Act.LOSE,
    "Stop": Act.STOP, "FailRead": Act.FAIL_READ, "FailCollate": Act.FAIL_COLLATE, "Die": Act.DIE, "Abandon": Act.ABANDON,
    "Accept": Act.ACCEPT, "LoseLoader": Act.LOSE_LOADER,
}  # fmt: skip


def _freeze(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, tuple):
        return tuple(map(_freeze, value))
    return value


def _record(**fields: object) -> object:
    return _freeze(fields)


# The model's side ----------------------------------------------------------------------------------------------------


def label_model_state(state: Mapping[str, object]) -> Label:
    """Returns the label of a state that TLC has dumped."""
    ranks = state["rank"]
    assert isinstance(ranks, tuple)
    return (
        tuple(tuple(_freeze(rank[name]) for name in _RANK_FIELDS.split()) for rank in ranks),
        _freeze(state["answer"]),
        state["owed"],
        (state["failures"], state["stops"], state["losses"]),
    )


# The code's side -----------------------------------------------------------------------------------------------------


def _number(value: int | None) -> int:
    return TLA_NONE if value is None or value == NONE else value


def _who(rank: int | None) -> int:
    return TLA_NONE if rank is None or rank == NONE else rank + 1


def _sizes(items: tuple[Step, ...] | tuple[Group, ...]) -> tuple[int, ...]:
    return tuple(len(item.group) if isinstance(item, Step) else len(item) for item in items)


def _label_post(posted: Post | None, budget_tokens: int) -> object:
    match posted:
        case None:
            return _record(kind="none")
        case PostOffer(post):
            return _record(
                kind="offer", round=post.round_min, ready=post.ready_min, failed=_who(post.failed_rank),
                stop=_who(post.stop_rank), step=_number(post.stop_step), samples=post.samples_min,
                reading=_number(post.groups_min), groups=post.groups_max, due=post.due_max,
                budget=min(budget_tokens, post.budget_min),
            )  # fmt: skip
        case PostReport(report):
            return _record(kind="report", failed=bool(report.cause))
        case PostCounts(counts, wanted):
            wants = {} if wanted is None else {"want": wanted}
            return _record(kind="counts", sizes=tuple(count.samples for count in counts), **wants)
        case _:
            assert_never(posted)


def _label_answer(config: Config, answered: Answer | None) -> object:
    match answered:
        case None:
            return _record(kind="none")
        case Agreed(answer):
            is_plain = (answer.failed_rank, answer.stop_rank, answer.ready_min) == (NONE, NONE, 1)
            return _record(
                kind="offer", failed=_who(answer.failed_rank), stop=_who(answer.stop_rank),
                step=_number(answer.stop_step), ready=answer.ready_min,
                samples=(answer.samples_min, answer.samples_max), reading=_number(answer.groups_min),
                groups=answer.groups_max, due=answer.due_max, budget=min(config.budget_tokens, answer.budget_min),
                target=compute_round_target(config, answer) if is_plain else TLA_NONE,
            )  # fmt: skip
        case Counted(counts, wants):
            asked = {"wants": wants} if wants else {}
            return _record(kind="counts", sizes=tuple(count.samples for count in counts), **asked)
        case Reported(reports):
            return _record(kind="report", first=min(report.rank for report in reports if report.cause) + 1)
        case _:
            assert_never(answered)


def _label_cause(cause: str) -> tuple[str, int]:
    words = cause.split()
    if words[1] == "loader":
        return ("loader", 0)
    return ("read" if words[0] == "sample" else "collate", int(words[1]))


def _label_rank(rank: ExploredRank) -> Label:
    state, budget_tokens = rank.state, rank.acceptance.budget_tokens
    outcome = state.outcome
    values = {
        "phase": str(state.phase), "round": state.round, "read": state.read_samples, "ended": state.is_ended,
        "wanted": state.wanted_samples, "held": len(state.window), "marks": state.marks,
        "aligned": _sizes(state.aligned), "plan": _sizes(state.plan), "collated": state.is_collated,
        "planned": state.planned_steps, "global": state.global_samples, "released": _sizes(state.released),
        "queue": _sizes(rank.queue), "taken": state.taken_steps, "got": state.taken_samples,
        "failed": bool(state.failure), "stopped": state.is_stopped, "urged": state.is_urged,
        "limit": _number(state.step_limit),
        "outcome": _record(
            kind="none" if outcome is None else str(outcome.kind),
            # The model does not contain which rank is lost: it covers what ranks do, not what they report.
            rank=TLA_NONE if outcome is None or outcome.kind == "lost" else _who(outcome.rank),
        ),
        "reading": rank.reading, "collating": _number(rank.collating), "post": _label_post(rank.post, budget_tokens),
        "causes": tuple(map(_label_cause, rank.causes)), "left": rank.is_left, "inside": rank.is_inside, "told": rank.is_urged,
        "lost": rank.is_lost, "gone": rank.is_gone, "loaderless": rank.is_loader_lost,
        "agreed": min(budget_tokens, state.agreed_tokens),
        "accepted": min(budget_tokens, state.accepted_tokens), "coming": rank.coming,
        "draw": (state.draw.first, state.draw.count, state.draw.end),
        "places": tuple(sample.id for sample in rank.drawn) if state.draw.end else (),  # in the model: places of a common order
    }  # fmt: skip
    return tuple(values[name] for name in _RANK_FIELDS.split())


def label_world(space: Space, config: Config, world: World) -> Label:
    """Returns the label of a world of the explorer."""
    shared = space.get_shared(world)
    ranks = space.get_ranks(world)
    return (
        tuple(map(_label_rank, ranks)),
        _label_answer(config, space.get_answer(world)),
        frozenset(i + 1 for i in range(len(ranks)) if shared.owed & 1 << i),
        (shared.failures, shared.stops, shared.losses),
    )
