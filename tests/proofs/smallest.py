"""Minimises a difference between the core and the extracted model: the shortest log of one rank, with the smallest numbers.

The log of one rank is a case by itself: its configuration and its events, which the model is given. The search takes the world
that shows the difference after the fewest events. It leaves out events as long as the difference remains, first half of them,
then one by one. Then it reduces lengths, budget, window and other numbers. One question to the model holds many candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from odb_sim.explore.driver import Core

from odb_ref.core.batching.budgets import compute_offered
from odb_ref.core.batching.cost import TOKENS
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.config import Config
from odb_ref.core.errors import OdbError
from odb_ref.core.events import Agreed, Collated, Counted, Event, SamplesRead
from odb_ref.core.offer import NONE
from odb_ref.core.state import State
from odb_ref.core.types import Mode, Sample, StepCounts
from tests.proofs.wire import Budgets, show_state, write_config, write_event
from tests.proofs.worlds import World, begin, find_difference

LIMIT_S = 10.0
AT_ONCE = 60
FIELDS = (
    "phase", "round", "read", "ended", "wanted", "window", "marks", "groups", "budget", "accepted", "aligned", "plan",
    "collated", "planned", "global samples", "released", "queue", "taken", "failure", "stopped", "urged", "limit",
    "outcome", "post",
)  # fmt: skip
"""The contents of an answer's line, in order."""
LAST = 10
"""The number of last events shown of a longer case."""
MODEST = 40
"""Numbers are reduced only in cases of at most this many events."""

Model = Callable[[str], list[str]]


@dataclass(frozen=True)
class Case:
    """A rank's configuration and its events."""

    config: Config
    events: tuple[Event, ...]
    budgets: Budgets = (NONE, NONE)

    @property
    def size(self) -> tuple[int, ...]:
        """What should be small, the most important first."""
        samples = [sample for event in self.events if isinstance(event, SamplesRead) for sample in event.samples]
        config = self.config
        settings = (
            len(config.limits),
            config.ramp_rounds,
            config.quota_samples or 0,
            config.depth_steps,
            self.oddities,
        )
        numbers = (config.budget_tokens, config.window_samples, config.max_age_rounds)
        return len(self.events), len(samples), sum(item.length for item in samples), sum((*numbers, *settings))

    @property
    def oddities(self) -> int:
        """The number of unusual values among layout, cost and first budgets."""
        own = sum(budget != NONE for budget in self.budgets)
        return own + (self.config.layout != Layout.PADDED) + (self.config.cost != TOKENS)


@dataclass(frozen=True)
class Difference:
    """The event of a case after which the two differ, and their answers. 0 is the start."""

    case: Case
    place: int
    python: str
    model: str

    @property
    def is_refusal(self) -> bool:
        """True if only one of them refuses the event."""
        return "refused" in (self.python, self.model)


def _play(core: Core, case: Case, prints: dict[str, int]) -> tuple[tuple[Event, ...], list[str]]:
    """Returns the events, with consecutive positions and rounds, and the answers of the Python to each."""
    config = case.config
    state, effects = begin(core, config, case.budgets)
    events: list[Event] = []
    lines = [show_state(state, effects, prints)]
    for old in case.events:
        event = _follow(state, old)
        events.append(event)
        try:
            state, effects = core.transition(config, state, event)
        except OdbError:
            lines.append("refused")
            continue
        lines.append(show_state(state, effects, prints))
    return tuple(events), lines


def _follow(state: State, event: Event) -> Event:
    """Returns the event with the next position or round, since an earlier event may have been left out."""
    match event:
        case SamplesRead():
            samples = (replace(item, position=i) for i, item in enumerate(event.samples, state.read_samples))
            return replace(event, samples=tuple(samples))
        case Collated():
            return Collated(state.round - 1)
        case _:
            return event


def find_differences(model: Model, core: Core, cases: Sequence[Case], prints: dict[str, int]) -> list[Difference]:
    """Returns the cases that differ, cut after the first event that does."""
    played = []
    words = []
    for case in cases:
        known = prints | {case.config.shared_json: case.config.fingerprint}
        try:
            events, lines = _play(core, case, known)
        except Exception:
            continue
        played.append((replace(case, events=events), lines))
        log = " ".join(write_event(event, known) for event in events)
        words.append(f"machine {write_config(case.config, case.budgets)} {len(events)} {log}")
    said = model(" ".join(words)) if words else []
    found, start = [], 0
    for case, lines in played:
        for place, (python, answer) in enumerate(zip(lines, said[start : start + len(lines)], strict=False)):
            if python != answer:
                found.append(Difference(replace(case, events=case.events[:place]), place, python, answer))
                break
        start += len(lines)
    return found


def find_smallest(model: Model, core: Core, worlds: Iterable[World], limit_s: float = LIMIT_S) -> Difference | None:
    """Returns the smallest difference found in this time, or None if the logs of the worlds show none."""
    deadline = time.monotonic() + limit_s
    worlds = list(worlds)
    prints: dict[str, int] = {}
    for world in worlds:
        prints |= world.prints
    cases = [Case(rank.config, tuple(rank.log), rank.budgets) for world in worlds for rank in world.ranks]
    best = min(find_differences(model, core, cases, prints), key=lambda found: found.case.size, default=None)
    while best is not None and time.monotonic() < deadline:
        smaller = _find_smaller(model, core, best, prints, deadline)
        if smaller is None:
            break
        best = smaller
    return best


def _find_smaller(
    model: Model, core: Core, best: Difference, prints: dict[str, int], deadline: float
) -> Difference | None:
    waiting = _iterate_smaller(best.case)
    while time.monotonic() < deadline:
        batch = [case for _, case in zip(range(AT_ONCE), waiting, strict=False)]
        if not batch:
            return None
        found = [
            item
            for item in find_differences(model, core, batch, prints)
            if item.is_refusal == best.is_refusal and item.case.size < best.case.size
        ]
        if found:
            return min(found, key=lambda item: item.case.size)
    return None


def _iterate_smaller(case: Case) -> Iterator[Case]:
    events = case.events
    yield from _iterate_settings(case)
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            yield replace(case, events=events[:start] + events[start + size :])
        size //= 2
    for i, event in enumerate(events if len(events) <= MODEST else ()):
        for other in _iterate_events(event):
            yield replace(case, events=(*events[:i], other, *events[i + 1 :]))


def _iterate_settings(case: Case) -> Iterator[Case]:
    config = case.config
    if case.budgets != (NONE, NONE):
        yield replace(case, budgets=(NONE, NONE))
    if config.cost != TOKENS:
        yield replace(case, config=replace(config, cost=TOKENS))
    if config.layout != Layout.PADDED:
        yield replace(case, config=replace(config, layout=type(config.layout).PADDED))
    if config.limits:
        yield replace(case, config=replace(config, limits=()), events=tuple(map(_drop_costs, case.events)))
    if config.quota_samples is not None:
        yield replace(case, config=replace(config, mode=Mode.JOIN, quota_samples=None))
    for name, least in (
        *(("budget_tokens", 1), ("window_samples", 1), ("max_age_rounds", 1), ("depth_steps", 1)),
        *(("ramp_rounds", 0), ("quota_samples", 1)),
    ):
        value = getattr(config, name)
        for smaller in _list_smaller(value or 0, least):
            changed = replace(config, **{name: smaller})
            first, accepted = case.budgets
            budgets = (
                compute_offered(first, changed.budget_tokens),
                compute_offered(accepted, changed.budget_tokens),
            )
            yield replace(case, config=changed, budgets=budgets)


def _list_smaller(value: int, least: int) -> list[int]:
    """Returns candidates for a smaller number: the smallest possible, then numbers that halve the remaining distance.

    Reducing only by one would take an hour if a budget is large and cannot be halved.
    """
    nearer = {value - (value >> k) for k in range(1, value.bit_length())}
    return sorted(smaller for smaller in {least} | nearer if least <= smaller < value)


def _drop_costs(event: Event) -> Event:
    if not isinstance(event, SamplesRead):
        return event
    return replace(event, samples=tuple(replace(item, costs=()) for item in event.samples))


def _iterate_events(event: Event) -> Iterator[Event]:
    match event:
        case SamplesRead():
            for i, sample in enumerate(event.samples):
                before, after = event.samples[:i], event.samples[i + 1 :]
                if len(event.samples) > 1 or event.is_ended:
                    yield replace(event, samples=(*before, *after))
                for length in _list_smaller(sample.length, 1):
                    yield replace(event, samples=(*before, _shorten(sample, length), *after))
        case Counted():
            yield Counted(tuple(StepCounts(1, 1, 1) for _ in event.counts))
        case _:
            pass


def _shorten(sample: Sample, length: int) -> Sample:
    return replace(sample, length=length, supervised=min(sample.supervised, length))


def explain(model: Model, core: Core, worlds: Sequence[World]) -> str | None:
    """Returns how the model differs, with the smallest case that shows it, or None if they agree."""
    difference = find_difference(model, worlds)
    if difference is None:
        return None
    found = find_smallest(model, core, worlds)
    return difference if found is None else describe(found)


def describe(found: Difference) -> str:
    """Returns both answers and the case: its last events and its configuration."""
    config, events = found.case.config, found.case.events
    quota = "" if config.quota_samples is None else f" of {config.quota_samples}"
    limits = f", limits {list(config.limits)}" if config.limits else ""
    layout = "" if config.layout == Layout.PADDED else f"{config.layout}, "
    cost = "" if config.cost == TOKENS else f"cost {config.cost.name}, "
    told = "; ".join(_describe_event(event) for event in events[-LAST:]) or "the start"
    return (
        f"Python: {_cut_out(found.python, found.model)}; model: {_cut_out(found.model, found.python)}\n"
        f"smallest case found, {len(events)} events of rank {config.rank} of {config.world_size}"
        f"{', of which the last' if len(events) > LAST else ''}: {told}\n"
        f"with {layout}{cost}budget {config.budget_tokens}{limits}, window {config.window_samples}, "
        f"ramp {config.ramp_rounds}, age {config.max_age_rounds}, depth {config.depth_steps}, {config.mode}{quota}, "
        f"rule {config.rule.name}"
    )


def _describe_event(event: Event) -> str:
    match event:
        case SamplesRead():
            end = ", then the end" if event.is_ended else ""
            return f"read lengths {[item.length for item in event.samples]}{end}"
        case Agreed():
            agreed = event.agreement
            return f"agreed on samples {agreed.samples_min} to {agreed.samples_max}, groups up to {agreed.groups_max}"
        case Counted():
            return f"counted {len(event.counts)} steps"
        case _:
            return type(event).__name__


def _cut_out(text: str, other: str) -> str:
    """Returns the fields of ``text`` that differ in ``other``."""
    ours, theirs = text.split(" | "), other.split(" | ")
    if not len(ours) == len(theirs) == len(FIELDS):
        return text[:200]
    rows = zip(FIELDS, ours, theirs, strict=True)
    return ", ".join(f"{name} {own[:80]}" for name, own, their in rows if own != their)
