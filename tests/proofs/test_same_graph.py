"""The coupled system of the proofs, extracted, and the explorer's, walked side by side: the same states and transitions.

`Run.perform` is proved to do exactly what `lossy_step` allows. Here it walks through small worlds beside the code. Each world
of the explorer is paired with a state of the model. Everything that can happen next is compared in both directions, and so are
all fields of every rank, its posts, and the answer of the exchange with the resulting target.

The surroundings of a rank are the explorer's: the number of faults, how a source answers, which ranks still read or collate
after a failure, whose process is gone. If these prevent something, the model is not asked.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from odb_sim.explore.bounds import Bounds
from odb_sim.explore.driver import Core
from odb_sim.explore.rank import Act, ExploredRank
from odb_sim.explore.violation import Breach
from odb_sim.explore.world import Action, Space, World, decode

from odb_ref.core.batching.cost import make_attention_cost, make_own_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.config import Config
from odb_ref.core.effects import Deliver, Effect
from odb_ref.core.events import Agreed, Counted, Event, Reported, Urged
from odb_ref.core.exchange import Answer
from odb_ref.core.machine import transition
from odb_ref.core.offer import NONE, Offer, reduce_offers
from odb_ref.core.rounds import Transition, compute_round_target, is_closing
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode
from tests.proofs.conftest import PROOFS, Model
from tests.proofs.wire import (
    Stairs,
    show_counts,
    show_list,
    show_state,
    write_config,
    write_offer,
    write_report,
    write_samples,
)

WORLDS = {
    "plain": Bounds(lengths=((1, 3, 2), (2,)), budget_tokens=4),
    "carried": Bounds(lengths=((1, 4, 2, 3, 1), (2, 2, 1)), window_samples=4, depth_steps=2, max_age_rounds=1),
    "limits": Bounds(lengths=((1, 1, 1), (2, 1)), budget_tokens=6, limits=(2, 3), window_samples=3),
    "packed": Bounds(
        lengths=((1, 4, 2, 3), (2, 2, 1)),
        layout=Layout.PACKED,
        cost=make_attention_cost(2),
        budget_tokens=6,
        window_samples=4,
        max_age_rounds=1,
    ),
    "neighbours": Bounds(
        lengths=((1, 4, 1, 2), (3, 1)), order=StepOrder.SAMPLER, budget_tokens=4, window_samples=3, max_age_rounds=1
    ),
    "bytes": Bounds(lengths=((1, 3, 2, 1), (2, 1)), window_samples=3, window_bytes=3, failures=1, stops=1),
    "bytes in parts": Bounds(
        lengths=((1, 1, 3, 1), (2, 2)), window_samples=3, window_bytes=2, is_single_reads=True, losses=1
    ),
    "costs": Bounds(lengths=((1, 4, 2), (2, 3)), cost=make_own_cost(Stairs(2)), budget_tokens=6, window_samples=3),
    "parts": Bounds(
        lengths=((1, 3, 2), (1, 1)), rule=RULES["paper"], ramp_rounds=1, is_single_reads=True, is_eager_end=True
    ),
    "three": Bounds(lengths=((1, 1), (1,), ())),
    "quota": Bounds(lengths=((1, 2, 1), (1, 1)), window_samples=3, mode=Mode.QUOTA, quota_samples=3),
    "until dry": Bounds(lengths=((1, 2, 1), (1, 1)), window_samples=2, mode=Mode.QUOTA),
    "failure": Bounds(lengths=((1, 1), (1,)), budget_tokens=1, failures=1),
    "stop": Bounds(lengths=((1, 1), (1,)), budget_tokens=1, stops=1),
    "inside": Bounds(lengths=((1, 1, 1), (1, 1)), budget_tokens=1, window_samples=3, stops=1, is_left_inside=True),
    "uneven": Bounds(lengths=((1, 1), (1, 1)), budget_tokens=1, stops=1, is_uneven_depth=True, is_urged_freely=True),
    "losses": Bounds(lengths=((1, 1), (1,)), budget_tokens=1, losses=1, failures=1),
    "lost loader": Bounds(lengths=((1, 1), (1,)), budget_tokens=1, lost_loaders=1, stops=1),
    "odd": Bounds(lengths=((1, 1), (1,)), odd_rank=1, failures=1),
    "updates": Bounds(lengths=((1, 3, 2, 1), (2, 1, 1)), update_samples=3, failures=1, stops=1),
    "updates of one": Bounds(lengths=((1, 3), (2,)), update_samples=2, losses=1, is_single_reads=True),
    "everything": Bounds(
        lengths=((1, 4, 2), (2, 1)),
        limits=(3,),
        window_samples=2,
        max_age_rounds=1,
        is_single_reads=True,
        failures=1,
        stops=1,
    ),
}
_CAUSES = re.compile(
    r"sample (\d+) of rank \d+ is broken|round (\d+) of rank \d+ cannot be collated|the loader of rank \d+ is (gone)|"
    r"its process is gone"
)


def _number(text: str) -> str:
    """Returns the text with the model's causes, which are numbers."""
    return _CAUSES.sub(lambda m: str(10 + int(m[1]) if m[1] else 50 + int(m[2]) if m[2] else 90 if m[3] else 9), text)


@contextmanager
def _open_model() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [PROOFS / "extracted/model"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@dataclass
class Pair:
    """The explorer's space and the model's, and the pairs of their states."""

    bounds: Bounds
    process: subprocess.Popen[str]
    core: Core = field(default_factory=Core)
    numbers: dict[World, str] = field(default_factory=dict)
    edges: int = 0
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.space = Space(self.bounds, self.core)
        self.configs = [self.bounds.compute_config(rank) for rank in range(self.bounds.ranks)]
        self.prints = {config.shared_json: config.fingerprint for config in self.configs}
        # The model compares fingerprints, in unary numbers. Small ones in the same order are enough.
        self.small = {str(number): str(i) for i, number in enumerate(sorted(set(self.prints.values())), 1)}

    def walk(self) -> None:
        """Walks through all worlds.

        Raises: AssertionError where the two differ.
        """
        ranks = (
            f"{write_config(c, is_bounded=self.bounds.window_bytes > 0)} {write_samples(self.bounds.compute_shard(c.rank))}"
            for c in self.configs
        )
        self.write(f"system {len(self.configs)} {' '.join(ranks)}")
        todo = [self.space.begin()]
        self.meet(todo[0], self.read())
        actions = [Action(rank, act) for rank in range(self.bounds.ranks) for act in _CHOICES]
        while todo:
            world = todo.pop()
            enabled = {decode(code): code for code in self.space.enabled(world)}
            self.seen |= {action.act.name for action in enabled}
            choices = [self.write_choice(world, action) for action in actions]
            self.write(f"{self.numbers[world]} {len(choices)} {' '.join(choices)}")
            answers = {action: self.read() for action in actions}
            for action, answer in answers.items():
                if answer != "-" and action not in enabled:
                    assert self.is_kept_from(world, action), f"only the model can: {action}"
            for action, code in enabled.items():
                after = self.space.apply(world, code)
                if after not in self.numbers:
                    todo.append(after)
                self.edges += 1
                answer = answers.get(action, "-")
                if answer == "-":
                    # What changes nothing in the core is not an event of the model.
                    assert self.show(after) == self.show(world), f"only the code can: {action}"
                self.meet(after, f"{self.numbers[world]} {self.show(world)}" if answer == "-" else answer)
        self.write("-1")

    def meet(self, world: World, answer: str) -> None:
        """Pairs a world with a state. Their labels must be equal, and a world must always meet the same state."""
        number, _, label = answer.partition(" ")
        assert label == self.show(world)
        assert self.numbers.setdefault(world, number) == number

    def write(self, text: str) -> None:
        self.process.stdin.write(self.shorten(text) + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def show(self, world: World) -> str:
        """Returns the label of a world, as the model prints it."""
        shared = self.space.get_shared(world)
        ranks = self.space.get_ranks(world)
        parts = [f"{self.show_rank(rank)} | {shared.owed >> i & 1}" for i, rank in enumerate(ranks)]
        return self.shorten(_number(" || ".join([*parts, self.show_answer(self.space.get_answer(world))])))

    def shorten(self, text: str) -> str:
        """Returns the text with small fingerprints."""
        for number, short in self.small.items():
            text = text.replace(number, short)
        return text

    def show_rank(self, rank: ExploredRank) -> str:
        state = rank.state
        # The driver's books and the core's state agree.
        assert rank.queue == state.queue
        assert (rank.finish is not None) == (state.phase is Phase.DONE)
        effects: Sequence[Effect] = () if rank.post is None else (rank.post,)
        is_waiting = state.phase in (Phase.OFFER, Phase.COUNT, Phase.REPORT)
        assert is_waiting == (rank.post is not None and not rank.state.outcome)
        return show_state(state, effects if is_waiting else (), self.prints)

    def show_answer(self, answer: Answer | None) -> str:
        match answer:
            case None:
                return "-"
            case Agreed(agreement):
                return f"agreed {write_offer(agreement)} target {show_target(self.configs[0], agreement)}"
            case Reported(reports):
                return "reported " + show_list(f"report {write_report(report, self.prints)}" for report in reports)
            case Counted(counts):
                return "counted " + show_list(map(show_counts, counts))

    def count_fitting(self, rank: int, state: State, there: int) -> int:
        """Returns how many of the next samples fit the window, at one byte per token. Spec: R2.3."""
        next_ones = self.bounds.compute_shard(rank)[state.read_samples :][:there]
        held = sum(sample.length for sample in state.window)
        is_empty = not state.window
        for count, sample in enumerate(next_ones):
            held += sample.length
            if held > (self.bounds.window_bytes or held) and not (is_empty and count == 0):
                return count
        return there

    def write_choice(self, world: World, action: Action) -> str:
        rank = self.space.get_ranks(world)[action.rank]
        i, state = action.rank, rank.state
        match action.act:
            case Act.READ:
                asked = min(1, state.wanted_samples) if self.bounds.is_single_reads else state.wanted_samples
                left = len(self.bounds.compute_shard(i)) - state.read_samples
                there = min(asked, left)
                count = self.count_fitting(i, state, there)
                is_full = count < there
                is_ended = count == left if self.bounds.is_eager_end else not is_full and count < asked
                return f"read {i} {count} {int(is_ended)} {int(is_full)}"
            case Act.FAIL_READ:
                return f"fail {i} {10 + state.read_samples}"
            case Act.FAIL_COLLATE:
                return f"fail {i} {50 + (state.round - 1 if rank.collating is None else rank.collating)}"
            case Act.LOSE_LOADER:
                return f"fail {i} 90"
            case Act.LOSE:
                gone = [q for q, peer in enumerate(self.space.get_ranks(world)) if q != i and peer.is_gone]
                return f"lose {i} {min(gone, default=-1)} 9"
            case _:
                return f"{_CHOICES[action.act]} {i}"

    def is_kept_from(self, world: World, action: Action) -> bool:
        """Returns True if the rank's surroundings prevent the action, and not the rank."""
        ranks, shared, bounds = self.space.get_ranks(world), self.space.get_shared(world), self.bounds
        rank = ranks[action.rank]
        others = [q for i, q in enumerate(ranks) if i != action.rank]
        if rank.is_gone:
            return True
        match action.act:
            case Act.READ:
                return (
                    rank.is_loader_lost
                    or any(cause.startswith("sample") for cause in rank.causes)
                    or rank.finish is not None
                )
            case Act.COLLATE:
                return (
                    rank.is_loader_lost
                    or any(cause.startswith("round") for cause in rank.causes)
                    or rank.finish is not None
                )
            case Act.TAKE:
                # A consumer that leaves a finished rank does not change the machine. A step left halfway has no end.
                is_gone_unsaid = rank.is_left and rank.finish is not None
                return is_gone_unsaid or any(q.is_inside and q.entered_steps < len(rank.taken) for q in ranks)
            case Act.STOP:
                return shared.stops == bounds.stops or any(q.entered_steps < len(rank.taken) for q in ranks)
            case Act.ABANDON:
                return (
                    shared.stops == bounds.stops or not bounds.is_left_inside or not rank.taken
                    or any(len(q.taken) > len(rank.taken) for q in others)
                )  # fmt: skip
            case Act.FAIL_READ:
                return shared.failures == bounds.failures or not rank.reading
            case Act.FAIL_COLLATE:
                return shared.failures == bounds.failures or rank.collating is None
            case Act.LOSE_LOADER:
                return shared.lost_loaders == bounds.lost_loaders
            case Act.URGE:
                return not (any(q.is_left for q in others) or bounds.is_urged_freely)
            case Act.LOSE:
                return not any(q.is_gone for q in others)
            case _:
                return False


_CHOICES = {
    Act.READ: "read", Act.COLLATE: "collate", Act.ANSWER: "answer", Act.TAKE: "take", Act.URGE: "urge", Act.LOSE: "lose",
    Act.STOP: "leave", Act.ABANDON: "leave", Act.FAIL_READ: "fail", Act.FAIL_COLLATE: "fail",
    Act.LOSE_LOADER: "fail",
}  # fmt: skip


def show_target(config: Config, agreement: Offer) -> str:
    """Returns the target of an agreement that plans steps."""
    is_bad = agreement.failed_rank != NONE or agreement.fingerprint_min != agreement.fingerprint_max
    is_plain = not is_bad and agreement.stop_rank == NONE and agreement.ready_min
    if not is_plain:
        return "-"
    return "closes" if is_closing(config, agreement) else str(compute_round_target(config, agreement))


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_the_proved_system_and_the_code_have_the_same_graph(model: Model, name: str) -> None:
    """Checks: ALIGN, CONSERVE, ONCE, QUOTA, FREE, TERM, ABORT, RELEASE, STOP (the link from proof to code)."""
    with _open_model() as process:
        pair = Pair(WORLDS[name], process)
        pair.walk()
    assert pair.edges >= len(pair.numbers) - 1 >= 20
    print(f"{name}: {len(pair.numbers)} worlds, {pair.edges} transitions, {', '.join(sorted(pair.seen))}")


def _reduce_otherwise(offers: Sequence[Offer]) -> Offer:
    agreement = reduce_offers(offers)
    return replace(agreement, due_max=agreement.due_max + 1)


def _ignore_urges(config: Config, state: State, event: Event) -> Transition:
    return (state, ()) if isinstance(event, Urged) else transition(config, state, event)


def _deliver_late(config: Config, state: State, event: Event) -> Transition:
    """Delivers one step fewer than there is room for."""
    after, effects = transition(config, state, event)
    if len(after.queue) < 2 or not isinstance(event, Agreed):
        return after, effects
    late = replace(after, queue=after.queue[:-1], released=(after.queue[-1], *after.released))
    return late, tuple(effect for effect in effects if effect != Deliver(after.queue[-1]))


@pytest.mark.parametrize(
    ("name", "core"),
    [
        ("carried", Core(reduce=_reduce_otherwise)),
        ("stop", Core(transition=_ignore_urges)),
        ("carried", Core(transition=_deliver_late)),
    ],
    ids=["another-reduction", "no-urges", "late-deliveries"],
)
def test_another_core_has_another_graph(model: Model, name: str, core: Core) -> None:
    """The comparison can fail where the core's own invariants find nothing."""
    core = replace(core, check=lambda *_: None)
    with _open_model() as process, pytest.raises((AssertionError, Breach)) as caught:
        Pair(WORLDS[name], process, core).walk()
    assert caught.type is AssertionError
