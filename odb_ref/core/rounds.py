"""When a rank posts its offer, what the offer says, and what an agreement decides. Spec: R3, R4.3, R4.6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from odb_ref.core.batching.alignment import align, count_groups_to_emit, is_due
from odb_ref.core.batching.rules import compute_checked_target
from odb_ref.core.batching.shards import Draw, compute_draw, compute_want
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, PostOffer, Read
from odb_ref.core.errors import PeerError
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.state import Phase, State, replace
from odb_ref.core.types import Group, Mode, compute_real_tokens

Transition = tuple[State, tuple[Effect, ...]]

_FILL: Final = Phase.FILL
"""Looked up once: that costs a good part of what a step that is taken costs, after each of which this is asked."""


def post_when_ready(config: Config, state: State) -> Transition:
    """Posts the offer of the round when it is ready, or at once when the round is to end the epoch; else does nothing.

    Spec: R3.4. Preserves: RELEASE, FREE.
    """
    if state.phase is not _FILL:
        return state, ()
    is_ready = state.is_collated and not state.wanted_samples
    # An urged rank does not wait for its consumer, which may wait for one that has left; it still has its input ready,
    # since the offers of the others may hold no stop yet.
    may_post = is_ready and (state.is_urged or not state.outbox)
    must_end = bool(state.failure) or state.is_stopped
    if not may_post and not must_end:
        return state, ()
    budget_tokens, limits = config.compute_round_bounds(state.agreed_tokens)
    groups = config.order.compute_groups(state.window, config.layout, budget_tokens, limits, sizes=config.sizes)
    to_emit = NONE if state.is_ended else count_groups_to_emit(groups, config.layout, budget_tokens)
    offer = _compute_offer(config, state, groups, to_emit, is_ready)
    return replace(state, phase=Phase.OFFER, groups=groups), (PostOffer(offer),)


def _compute_offer(config: Config, state: State, groups: tuple[Group, ...], to_emit: int, is_ready: bool) -> Offer:
    """Spec: R3.1."""
    due_before = compute_due_before(config, state)
    held = 0 if is_quota_met(config, state) else len(state.window)
    return Offer(
        round_min=state.round,
        round_max=state.round,
        fingerprint_min=config.fingerprint,
        fingerprint_max=config.fingerprint,
        ready_min=int(is_ready),
        failed_rank=config.rank if state.failure else NONE,
        stop_rank=config.rank if state.is_stopped else NONE,
        stop_step=state.taken_steps if state.is_stopped else NONE,
        samples_min=held,
        samples_max=held,
        groups_min=to_emit,
        groups_max=len(groups),
        due_max=sum(is_due(group, due_before) for group in groups) if due_before else 0,
        budget_min=state.accepted_tokens,
    )


def compute_due_before(config: Config, state: State) -> int:
    """Returns the position before which a held sample must be emitted in this round; 0 where nothing held is as old as that.

    Spec: R4.3.
    """
    mark = state.marks[0] if len(state.marks) == config.max_age_rounds else 0
    return mark if state.window and state.window[0].position < mark else 0


def form_steps(config: Config, state: State, target: int) -> tuple[tuple[Group, ...], Group]:
    """Returns the ``target`` steps of the round, in the order in which they leave, and the samples carried.

    Spec: R4.1, R4.2, R4.8. Preserves: ALIGN, CONSERVE.
    """
    due_before = compute_due_before(config, state)
    steps, carried = align(
        state.groups, target, due_before, config.layout, config.order, cost=config.cost, sizes=config.sizes
    )
    return config.order.arrange(steps, config.order_seed, state.round), carried


def is_quota_met(config: Config, state: State) -> bool:
    """Returns True when as many samples are planned as the quota asks for. Spec: R4.6."""
    return config.quota_samples is not None and state.global_samples >= config.quota_samples


def compute_wanted_samples(config: Config, round_: int, carried: int, *, is_ended: bool) -> int:
    """Returns how many samples fill the window of ``round_``, into which ``carried`` are carried. Spec: R2.3."""
    return 0 if is_ended else max(0, config.compute_window_samples(round_) - carried)


def ask_for_samples(config: Config, state: State, carried: Group) -> tuple[int, int | None]:
    """Returns for how many samples to ask a source of one's own now, and what to tell all ranks that one wants of a shared one.

    Either is for the next window, into which ``carried`` are carried. Spec: R2.3, R14.2.
    """
    round_, is_ended = state.round + 1, state.is_ended
    if config.shared_samples is None:
        return compute_wanted_samples(config, round_, len(carried), is_ended=is_ended), None
    if is_ended:
        return 0, 0
    tokens, carried_tokens = compute_real_tokens(state.window), compute_real_tokens(carried)
    size = config.compute_shared_window(round_, state.draw.end)
    return 0, compute_want(size, samples=len(state.window), tokens=tokens, carried_tokens=carried_tokens)


def draw_samples(config: Config, state: State, wants: Sequence[int]) -> tuple[State, tuple[Read, ...]]:
    """Returns the state of a rank that has drawn its part of what all ranks want, and its read.

    With a source of its own it has asked for that already: nothing changes.

    Spec: R14.3, R14.5. Preserves: DEAL.
    Raises: PeerError when there is not one number of samples for each rank.
    """
    if config.shared_samples is None or state.is_ended:
        return state, ()
    if len(wants) != config.world_size or min(wants) < 0:
        raise PeerError(f"counts of round {state.round - 1}, field wants: {wants}, of {config.world_size} ranks")
    return read_draw(config, state, compute_draw(config.rank, wants, state.draw.end, config.shared_samples))


def read_draw(config: Config, state: State, draw: Draw) -> tuple[State, tuple[Read, ...]]:
    """Returns the state of a rank that reads what it has drawn, and its read, if it has drawn anything. Spec: R14.4, R14.5."""
    is_ended = draw.end == config.shared_samples
    drawn = replace(state, draw=draw, wanted_samples=draw.count, is_ended=is_ended)
    return drawn, ((Read(draw.count, draw.first),) if draw.count else ())


def count_fitting(nbytes: Iterable[int], room: int, *, is_empty: bool) -> int:
    """Returns how many of the next samples, by their bytes, fit into a window that has so much room, and if it is empty, for
    one in any case. Spec: R2.3. Preserves: TERM.
    """
    count = 0
    for size in nbytes:
        room -= size
        if room < 0 and not (is_empty and not count):
            break
        count += 1
    return count


def count_planned_steps(config: Config, totals: Sequence[int]) -> int:
    """Returns the steps of a round that are planned, of which ``totals`` holds the epoch's samples after each. Spec: R4.6."""
    if config.quota_samples is None:
        return len(totals)
    return next((i for i, total in enumerate(totals, 1) if total >= config.quota_samples), len(totals))


def compute_round_target(config: Config, agreement: Offer) -> int:
    """Returns the number of steps of the round; 0 closes the epoch.

    A function of the agreement alone (ALIGN). Spec: R3.3, R3.5.
    """
    if agreement.samples_max == 0 or (config.mode is Mode.QUOTA and agreement.samples_min == 0):
        return 0
    target = compute_checked_target(config.rule, agreement)
    # Quota mode never idles: the rank with the fewest samples bounds the round, and the next one closes.
    return min(target, agreement.samples_min) if config.mode is Mode.QUOTA else target
