"""The protocol of one rank, as a pure function: ``transition(config, state, event) -> (state, effects)``.

How it works
------------
An epoch is a sequence of rounds. In round k a rank fills a *window* (the samples carried from round k-1, then new ones),
divides it into groups, and posts an *offer*. The offers of all ranks are reduced to one *agreement*, from which every rank
computes the same target: the number of steps of the round. Each rank aligns its groups to exactly that number of steps,
posts the counts of each step, and learns their sums over all ranks. The batches of round k are then collated while window
k+1 fills. The offer of round k+1 reports that they are ready, and only its agreement *releases* them (commit before
release). Released steps are delivered as soon as the consumer's queue has room.

::

    phase    waits for                         then
    FILL     window k full, steps k-1 ready    posts offer k                                             -> OFFER
             and all released steps delivered
    OFFER    the agreement on round k          failure or mismatch: posts a report                       -> REPORT
                                               stop: drops what is not released                          -> DRAIN
                                               nothing left: releases steps k-1                          -> DRAIN
                                               else: releases steps k-1, aligns, posts counts k, reads   -> COUNT
    COUNT    the sums of round k               collates steps k                                          -> FILL
    REPORT   all ranks' reports                                                                          -> DRAIN
    DRAIN    all released steps delivered      finishes                                                  -> DONE
    DONE     nothing

After a failure or a stop, FILL posts at once. An urged rank does not wait for its consumer. Reading and collating run
while the rank is in FILL or COUNT; the consumer takes steps in any phase. The machine has no clock, no I/O and no
randomness: the same state and event always give the same result, so every driver (simulator, torch adapter, explorer,
tests) runs the same protocol. An illegal event raises an error and leaves the state unchanged.

Spec: R5, R6, R7.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain, repeat
from typing import Final, assert_never

from odb_ref.core.batching.budgets import compute_offered
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Effect, Finish, Outcome, OutcomeKind, PostCounts, PostReport, make_deliver
from odb_ref.core.errors import PeerError, UsageError
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
from odb_ref.core.exchange import compute_failure
from odb_ref.core.invariants import check_transition
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.resume import Resumed, RoundStart, resume
from odb_ref.core.rounds import (
    Transition,
    ask_for_samples,
    compute_round_target,
    count_planned_steps,
    draw_samples,
    form_steps,
    is_closing,
    make_read,
    make_report,
    post_when_ready,
)
from odb_ref.core.state import Phase, State, replace
from odb_ref.core.types import Group, Step, compute_counts, make_step

_DRAIN: Final = Phase.DRAIN
_ENDING: Final = (_DRAIN, Phase.DONE)


def start(config: Config) -> Transition:
    """Returns the first state of an epoch and its first effects. Spec: R5.0."""
    return resume(config, RoundStart(), ())


def transition(config: Config, state: State, event: Event) -> Transition:
    """Returns the state after ``event``, and the effects to perform, in order.

    Raises: UsageError when the event is illegal in this state, PeerError when a message contradicts the protocol,
    RuleError when the target rule leaves its bounds. The caller's state is unchanged in each case. Spec: R5.
    """
    match event:
        case StepTaken():  # first, because it is the most frequent
            return _take(config, state)
        case SamplesRead():
            return post_when_ready(config, _read(config, state, event))
        case Collated():
            return post_when_ready(config, _collated(state, event))
        case Agreed():
            return _agree(config, state, event.agreement)
        case Counted():
            return _count(config, state, event)
        case Reported():
            return _report(config, state, event.reports)
        case ConsumerStopped():
            return _stop(config, state)
        case LocalFailed():
            if state.phase in _ENDING or state.failure:
                return state, ()
            return post_when_ready(config, replace(state, failure=event.cause or "unknown failure"))
        case Urged():
            if state.phase in _ENDING:
                return state, ()
            return post_when_ready(config, replace(state, is_urged=True))
        case PeerLost():
            return _lose(state, event)
        case BudgetAccepted():
            return replace(state, accepted_tokens=compute_offered(event.tokens, config.budget_tokens)), ()
        case _:
            assert_never(event)


# Input -------------------------------------------------------------------------------------------------------------


def _read(config: Config, state: State, event: SamplesRead) -> State:
    """Spec: R5.1, R16.5."""
    samples = event.samples
    is_ended = event.is_ended if config.shared_samples is None else state.is_ended
    if not state.wanted_samples:
        raise UsageError(f"SamplesRead in phase {state.phase}: no Read is open")
    # A rank's part of an update may hold no good sample. Any other window holds one until the source ends.
    is_held = bool(samples or state.window or config.update_samples is not None)
    if not samples and not event.is_full and not (event.is_ended and (is_ended or is_held)):
        raise UsageError("SamplesRead holds no sample, and the source has not ended: an answer must say something")
    if len(samples) > state.wanted_samples:
        raise UsageError(f"SamplesRead holds {len(samples)} samples, only {state.wanted_samples} were asked for")
    is_drawn = config.shared_samples is not None  # drawn samples are always read: no other rank will read them
    if event.is_full and (event.is_ended or len(samples) == state.wanted_samples or not is_held or is_drawn):
        raise UsageError("SamplesRead is full, but nothing is left out, or nothing is held: a round needs a sample")
    for position, sample in enumerate(samples, state.read_samples):
        if sample.position != position:
            raise UsageError(f"sample {sample.id} has position {sample.position}, expected {position}")
    config.check_samples(samples)
    return replace(
        state,
        read_samples=state.read_samples + len(samples),
        is_ended=is_ended,
        wanted_samples=0 if event.is_ended or event.is_full else state.wanted_samples - len(samples),
        window=state.window + samples,
    )


def _collated(state: State, event: Collated) -> State:
    """Spec: R5.2."""
    if state.is_collated or event.round != state.round - 1:
        raise UsageError(f"Collated({event.round}) in round {state.round}: that collation is not under way")
    return replace(state, is_collated=True)


# Rounds ------------------------------------------------------------------------------------------------------------


def _agree(config: Config, state: State, agreement: Offer) -> Transition:
    """Spec: R5.3, R7.2, R7.3, R7.4."""
    if state.phase is not Phase.OFFER:
        raise UsageError(f"Agreed in phase {state.phase}: no offer is open")
    is_mismatch = agreement.round_min != agreement.round_max or agreement.fingerprint_min != agreement.fingerprint_max
    if agreement.failed_rank != NONE or is_mismatch:
        report = make_report(config, state)
        return replace(state, phase=Phase.REPORT, groups=()), (PostReport(report),)
    if agreement.round_min != state.round:
        raise PeerError(f"agreement in round {state.round}, field round_min: {agreement.round_min}")
    if agreement.stop_rank != NONE:
        cause = f"its consumer left after {agreement.stop_step} steps"
        outcome = Outcome(OutcomeKind.STOPPED, agreement.stop_rank, cause)
        return _drain(config, replace(state, groups=()), outcome, agreement.stop_step)
    if agreement.ready_min != 1:
        raise PeerError(f"agreement in round {state.round}, field ready_min: {agreement.ready_min}, expected 1")
    advanced = replace(state, groups=(), released=state.released + state.plan, plan=())
    if is_closing(config, agreement):
        return _drain(config, advanced, Outcome(OutcomeKind.COMPLETE), advanced.planned_steps)
    aligned, carried = form_steps(config, state, compute_round_target(config, agreement))
    asked, told = ask_for_samples(config, advanced, carried)
    counting = replace(
        advanced,
        phase=Phase.COUNT,
        wanted_samples=asked,
        window=carried,
        marks=(*advanced.marks, advanced.read_samples)[-config.max_age_rounds :],
        aligned=aligned,
        agreed_tokens=agreement.budget_min,
    )
    counting, delivered = _deliver(config, counting)
    reads = (make_read(config, state.round + 1, asked),) if asked else ()
    counts = tuple(map(compute_counts, aligned, repeat(len(config.limits))))
    return counting, (*delivered, *reads, PostCounts(counts, told))


def _count(config: Config, state: State, event: Counted) -> Transition:
    """Spec: R5.4, R4.5, R4.6, R14.3, R16.8."""
    counts = event.counts
    if state.phase is not Phase.COUNT:
        raise UsageError(f"Counted in phase {state.phase}: no counts are open")
    if len(counts) != len(state.aligned):
        raise PeerError(f"counts of round {state.round}, field counts: {len(counts)} steps, not {len(state.aligned)}")
    totals = tuple(accumulate((count.samples for count in counts), initial=state.global_samples))
    steps = count_planned_steps(config, totals[1:])
    numbers = range(state.planned_steps, state.planned_steps + steps)
    plan = tuple(map(make_step, numbers, repeat(state.round), state.aligned, counts))
    filling = replace(
        state,
        phase=Phase.FILL,
        round=state.round + 1,
        window=_return_samples(state.window, state.aligned[steps:]),
        aligned=(),
        plan=plan,
        is_collated=False,
        planned_steps=state.planned_steps + steps,
        global_samples=totals[steps],
    )
    filling, reads = draw_samples(config, filling, event.wants)
    filling, posted = post_when_ready(config, filling)
    return filling, (*reads, Collate(state.round, plan), *posted)


def _return_samples(window: Group, groups: tuple[Group, ...]) -> Group:
    """Returns the window with the samples of ``groups`` put back, ordered by position."""
    if not groups:
        return window
    return tuple(sorted(chain(window, *groups), key=lambda sample: sample.position))


# Output ------------------------------------------------------------------------------------------------------------


def _deliver(config: Config, state: State) -> tuple[State, tuple[Effect, ...]]:
    """Moves released steps into the queue while there is room. Spec: R6.6."""
    steps = _list_deliverable(config, state)
    if not steps:
        return state, ()
    state = replace(state, released=state.released[len(steps) :], queue=state.queue + steps)
    return state, tuple(map(make_deliver, steps))


def _list_deliverable(config: Config, state: State, *, taken: int = 0) -> tuple[Step, ...]:
    """Returns the released steps for which the queue has room once ``taken`` steps have left it."""
    if not state.released:
        return ()
    room = config.depth_steps - len(state.queue) + taken
    steps = state.released[:room]
    if steps and steps[-1].number < state.step_limit:  # step numbers ascend
        return steps
    return tuple([step for step in steps if step.number < state.step_limit])


def _take(config: Config, state: State) -> Transition:
    """Spec: R5.6."""
    if not state.queue or state.queue[0].number >= state.step_limit:
        raise UsageError("StepTaken, but no step is there to take")
    steps = _list_deliverable(config, state, taken=1)
    taken = replace(
        state,
        released=state.released[len(steps) :],
        queue=state.queue[1:] + steps,
        taken_steps=state.taken_steps + 1,
        taken_samples=state.taken_samples + len(state.queue[0].group),
    )
    if taken.phase is _DRAIN:
        taken, effects = _finish_when_drained(taken)
    else:
        taken, effects = post_when_ready(config, taken)
    return taken, (*map(make_deliver, steps), *effects)


# Ending ------------------------------------------------------------------------------------------------------------


def _drain(config: Config, state: State, outcome: Outcome, step_limit: int) -> Transition:
    """Enters DRAIN: the outcome is known, and only released steps below ``step_limit`` are still handed out. Spec: R7.1."""
    limit = min(step_limit, state.step_limit)
    draining, delivered = _deliver(config, replace(state, phase=Phase.DRAIN, outcome=outcome, step_limit=limit))
    draining, finish = _finish_when_drained(draining)
    return draining, (*delivered, *finish)


def _finish_when_drained(state: State) -> Transition:
    if state.outcome is None or (state.released and state.released[0].number < state.step_limit):
        return state, ()
    return replace(state, phase=Phase.DONE), (Finish(state.outcome, state.step_limit),)


def _report(config: Config, state: State, reports: tuple[Report, ...]) -> Transition:
    """Spec: R5.5, R7.2, R7.3."""
    if state.phase is not Phase.REPORT:
        raise UsageError(f"Reported in phase {state.phase}: no report is open")
    expected = [(rank, peer) for rank in range(config.world_size) for peer in range(config.peers)]
    if [(report.rank, report.peer) for report in reports] != expected:
        ranks = [report.rank for report in reports]
        raise PeerError(f"reports of round {state.round}, field rank: {ranks}, expected 0..{config.world_size - 1}")
    return _drain(config, state, compute_failure(reports), state.planned_steps - len(state.plan))


def _stop(config: Config, state: State) -> Transition:
    """Spec: R5.7, R7.4."""
    if state.is_stopped or state.phase is Phase.DONE:
        return state, ()
    stopped = replace(state, is_stopped=True, step_limit=min(state.step_limit, state.taken_steps))
    if stopped.phase is Phase.DRAIN:
        return _finish_when_drained(stopped)
    return post_when_ready(config, stopped)


def _lose(state: State, event: PeerLost) -> Transition:
    """Ends the rank: once the exchange is lost, no further step can be trained on. Spec: R5.10, R7.5."""
    if state.phase in _ENDING:
        return state, ()
    limit = min(state.step_limit, state.taken_steps)
    outcome = Outcome(OutcomeKind.LOST, event.rank, event.cause)
    lost = replace(
        state,
        phase=Phase.DONE,
        window=_return_samples(state.window, state.aligned),
        groups=(),
        aligned=(),
        step_limit=limit,
        outcome=outcome,
    )
    return lost, (Finish(outcome, limit),)


Observer = Callable[[int, Event | Resumed | None, tuple[Effect, ...]], None]
"""Called with rank, event and effects after each transition. For the start of an epoch the event is None, or `Resumed`.

`trace.TraceWriter.record` is one.
"""


class Machine:
    """A rank's state and the two calls a driver needs: ``begin`` once, then ``handle`` for each event.

    It checks the invariants after every transition. Explorers and proofs work on `transition` itself.
    """

    __slots__ = ("_observer", "config", "state")

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        self.config = config
        self.state = State()
        self._observer = observer

    def begin(self, round_start: RoundStart | None = None, carried: Group = ()) -> tuple[Effect, ...]:
        """Returns the first effects of the epoch. To resume one, pass its ``round_start`` and the samples carried into it.

        Raises: UsageError when the epoch has begun, or when ``carried`` does not match ``round_start``.
        """
        if self.state != State():
            raise UsageError("begin: the epoch has begun")
        self.state, effects = resume(self.config, round_start or RoundStart(), carried)
        check_transition(self.config, State(), self.state)
        if self._observer is not None:
            self._observer(self.config.rank, None if round_start is None else Resumed(round_start, carried), effects)
        return effects

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Returns the effects of ``event``, to be performed in order.

        Raises: the errors of `transition`, and InvariantError when the new state breaks an invariant. On any error the state
        is unchanged.
        """
        state, effects = transition(self.config, self.state, event)
        check_transition(self.config, self.state, state)
        self.state = state
        if self._observer is not None:
            self._observer(self.config.rank, event, effects)
        return effects
