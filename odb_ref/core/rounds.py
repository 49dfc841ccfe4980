"""When a rank posts its offer, what the offer contains, and what an agreement decides. Spec: R3, R4.3, R4.6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from odb_ref.core.batching.alignment import align, count_groups_to_emit, is_due
from odb_ref.core.batching.rules import compute_checked_target
from odb_ref.core.batching.shards import Draw, compute_draw, compute_want
from odb_ref.core.batching.updates import compute_portion
from odb_ref.core.config import Config
from odb_ref.core.effects import Effect, PostOffer, Read
from odb_ref.core.errors import PeerError
from odb_ref.core.events import Report
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.peers import compute_digest, describe_held
from odb_ref.core.state import Phase, State, replace
from odb_ref.core.types import Group, Mode, compute_real_tokens

Transition = tuple[State, tuple[Effect, ...]]

RAMP_SHARE: Final = 4
"""In the first rounds, whose windows are small, only one step in this many is formed; the rest is carried. Spec: R3.3."""

_FILL: Final = Phase.FILL
"""Looked up once, because `post_when_ready` runs after every step taken and the lookup is a good part of its cost."""


def post_when_ready(config: Config, state: State) -> Transition:
    """Posts the offer of the round when it is ready, or at once after a failure or a stop; otherwise does nothing.

    Spec: R3.4. Preserves: RELEASE, FREE.
    """
    if state.phase is not _FILL:
        return state, ()
    is_ready = state.is_collated and not state.wanted_samples
    # An urged rank does not wait for its consumer, which may be waiting for one that has left. It still waits for its input,
    # since the offers of the other ranks may not carry the stop yet. A rank with nothing to release does not wait either.
    may_post = is_ready and (state.is_urged or not state.released or not state.plan)
    must_end = bool(state.failure) or state.is_stopped
    if not may_post and not must_end:
        return state, ()
    budget_tokens, limits = config.compute_round_bounds(state.agreed_tokens)
    window = state.window if config.has_steps(state.round) else ()
    padding = config.compute_most_padding(budget_tokens)
    groups = config.order.compute_groups(
        window, config.layout, budget_tokens, limits, sizes=config.sizes, most_padding=padding
    )
    is_all = state.is_ended or config.update_samples is not None
    to_emit = NONE if is_all else count_groups_to_emit(groups, config.layout, budget_tokens)
    offer = _compute_offer(config, state, groups, to_emit, is_ready)
    # A rank that ends the epoch may hold fewer samples than its peers, because its window may not be full.
    is_compared = config.peers > 1 and not must_end
    digest = compute_digest(state.window, is_ended=state.is_ended) if is_compared else None
    return replace(state, phase=Phase.OFFER, groups=groups), (PostOffer(offer, digest),)


def _compute_offer(config: Config, state: State, groups: tuple[Group, ...], to_emit: int, is_ready: bool) -> Offer:
    """Spec: R3.1."""
    due_before = compute_due_before(config, state)
    held = 0 if is_quota_met(config, state) else len(state.window)
    if config.update_samples is not None and not state.is_ended:
        held = max(1, held)  # a rank without a good sample continues, because its next update may have some
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


def make_report(config: Config, state: State) -> Report:
    """Returns this rank's report on a failure. Spec: R7.2, R17.4."""
    if config.peers == 1:
        return Report(config.rank, state.failure, state.round, config.shared_json)
    held = describe_held(state.window, is_ended=state.is_ended)
    return Report(config.rank, state.failure, state.round, config.shared_json, config.peer, held)


def compute_due_before(config: Config, state: State) -> int:
    """Returns the position before which a held sample must be emitted in this round, or 0 if no held sample is that old.

    Spec: R4.3, R16.3.
    """
    if config.update_samples is not None:
        return 0
    mark = state.marks[0] if len(state.marks) == config.max_age_rounds else 0
    return mark if state.window and state.window[0].position < mark else 0


def form_steps(config: Config, state: State, target: int) -> tuple[tuple[Group, ...], Group]:
    """Returns the ``target`` steps of the round, in the order they leave, and the samples carried. With a target of 0, all
    are carried.

    Spec: R4.1, R4.2, R4.8, R16.3. Preserves: ALIGN, CONSERVE, UPDATE.
    """
    if not target:
        return (), state.window
    due_before = compute_due_before(config, state)
    steps, carried = align(
        state.groups, target, due_before, config.layout, config.order, cost=config.cost, sizes=config.sizes
    )
    return config.order.arrange(steps, config.order_seed, state.round), carried


def is_quota_met(config: Config, state: State) -> bool:
    """Returns True when the planned samples reach the quota. Spec: R4.6."""
    return config.quota_samples is not None and state.global_samples >= config.quota_samples


def compute_wanted_samples(config: Config, round_: int, carried: int, *, is_ended: bool) -> int:
    """Returns how many samples fill up the window of ``round_`` when ``carried`` are already in it. Spec: R2.3."""
    return 0 if is_ended else max(0, config.compute_window_samples(round_) - carried)


def ask_for_samples(config: Config, state: State, carried: Group) -> tuple[int, int | None]:
    """Returns how many samples to request from the rank's own source, and what to post as ``wanted`` for a shared one.

    Both are for the next window, into which ``carried`` go. The second is None if the rank has its own source. In updates it
    is not the number of samples wanted but the number of tokens held. Spec: R2.3, R14.2, R16.4.
    """
    round_, is_ended = state.round + 1, state.is_ended
    if config.shared_samples is None:
        return compute_wanted_samples(config, round_, len(carried), is_ended=is_ended), None
    if is_ended:
        return 0, 0
    tokens, carried_tokens = compute_real_tokens(state.window), compute_real_tokens(carried)
    if config.update_samples is not None:
        return 0, carried_tokens
    size = config.compute_shared_window(round_, state.draw.end)
    return 0, compute_want(size, samples=len(state.window), tokens=tokens, carried_tokens=carried_tokens)


def draw_samples(config: Config, state: State, wants: Sequence[int]) -> tuple[State, tuple[Read, ...]]:
    """Returns the state after this rank has drawn its share of what all ranks want, and the read of it.

    If the rank has its own source, its samples are already requested, and nothing changes.

    Spec: R14.3, R14.5. Preserves: DEAL.
    Raises: PeerError when ``wants`` does not hold one number, at least 0, for each rank.
    """
    if config.shared_samples is None or state.is_ended:
        return state, ()
    if config.update_samples is not None and state.round % config.update_rounds == 0:
        return state, ()  # the first round of an update draws nothing
    if len(wants) != config.world_size or min(wants) < 0:
        raise PeerError(f"counts of round {state.round - 1}, field wants: {wants}, of {config.world_size} ranks")
    return read_draw(config, state, _compute_draw(config, state, wants, config.shared_samples))


def _compute_draw(config: Config, state: State, wants: Sequence[int], total: int) -> Draw:
    """Spec: R14.3, R16.4."""
    if config.update_samples is None:
        return compute_draw(config.rank, wants, state.draw.end, total)
    begin = min(total, state.round // config.update_rounds * config.update_samples)
    return compute_portion(
        config.rank,
        wants,
        max(begin, state.draw.end),
        begin=begin,
        end=min(begin + config.update_samples, total),
        is_last=config.has_steps(state.round),
    )


def foresee_draw(config: Config, round_: int) -> Draw:
    """Returns the first draw from the update after that of ``round_``, so that it can be read ahead; shared shards only.

    No rank holds samples of that update yet, so the draw follows from the places alone. Spec: R16.4. Preserves: DEAL.
    """
    following = State(round=(round_ // config.update_rounds + 1) * config.update_rounds + 1)
    return _compute_draw(config, following, [0] * config.world_size, config.shared_samples or 0)


def make_read(config: Config, round_: int, count: int) -> Read:
    """Returns the read of ``count`` samples from the rank's own source, for the window of ``round_``. Spec: R6.1, R16.2."""
    place = None if config.update_samples is None else config.compute_update_place(round_ // config.update_rounds)
    return Read(count, place)


def read_draw(config: Config, state: State, draw: Draw) -> tuple[State, tuple[Read, ...]]:
    """Returns the state of a rank that reads ``draw``, and the read, unless the draw is empty. Spec: R14.4, R14.5."""
    is_ended = draw.end == config.shared_samples
    drawn = replace(state, draw=draw, wanted_samples=draw.count, is_ended=is_ended)
    return drawn, ((Read(draw.count, draw.first),) if draw.count else ())


def count_fitting(nbytes: Iterable[int], room: int, *, is_empty: bool) -> int:
    """Returns how many of the next samples, given their sizes in bytes, fit into a window with ``room`` bytes left.

    An empty window takes at least one sample, whatever its size. Spec: R2.3. Preserves: TERM.
    """
    count = 0
    for size in nbytes:
        room -= size
        if room < 0 and not (is_empty and not count):
            break
        count += 1
    return count


def count_planned_steps(config: Config, totals: Sequence[int]) -> int:
    """Returns how many steps of a round are planned; ``totals`` holds the epoch's samples after each step. Spec: R4.6."""
    if config.quota_samples is None:
        return len(totals)
    return next((i for i, total in enumerate(totals, 1) if total >= config.quota_samples), len(totals))


def is_closing(config: Config, agreement: Offer) -> bool:
    """Returns True when the agreement closes the epoch. Spec: R3.5, R16.7. Preserves: ALIGN."""
    return agreement.samples_max == 0 or (config.mode is Mode.QUOTA and agreement.samples_min == 0)


def compute_round_target(config: Config, agreement: Offer) -> int:
    """Returns the number of steps of the round: 0 if the agreement closes the epoch, or in updates if no rank has a group.

    It depends on the configuration and the agreement alone (ALIGN). Spec: R3.3, R3.5, R16.3.
    """
    is_update = config.update_samples is not None
    if is_closing(config, agreement) or (is_update and not agreement.groups_max):
        return 0
    target = compute_checked_target(config.rule, agreement)
    if is_update:
        return max(target, agreement.groups_max)  # no sample of an update is carried into the next
    if agreement.round_min < config.ramp_rounds and agreement.groups_min != NONE:
        # A small window fills its groups poorly, so most of its samples are carried into a larger one.
        target = max(1, agreement.due_max, target // RAMP_SHARE)
    # Quota mode never idles: the rank with the fewest samples bounds the round, and the next one closes.
    return min(target, agreement.samples_min) if config.mode is Mode.QUOTA else target
