"""Worlds of all magnitudes: many ranks and limits, old samples, wide windows; epochs that resume at large rounds and steps.

The numbers of a world are drawn by magnitude, so that one in ten is large, and one in a hundred exceeds that of any real job.
The checker of traces, which shares no decision with the core, judges what the core makes of them. A saved and resumed epoch is
compared with itself without the interruption. `odb-ref verify --core` runs this for a changed core.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import pytest

from odb_ref.core.batching.alignment import align, is_due
from odb_ref.core.batching.budgets import Acceptance, BudgetSchedule
from odb_ref.core.batching.cost import TOKENS, get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import RULES
from odb_ref.core.batching.shards import NOTHING_DRAWN, Draw, compute_shares
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.batching.updates import compute_portion, compute_portion_shares, count_rounds
from odb_ref.core.config import Config
from odb_ref.core.effects import Outcome, OutcomeKind, PostCounts
from odb_ref.core.events import Counted, Report
from odb_ref.core.exchange import combine_posts, compute_failure
from odb_ref.core.peers import compute_digest
from odb_ref.core.resume import Checkpoint, RoundStart, compute_round_start, resume
from odb_ref.core.types import Mode, Sample, StepCounts
from odb_ref.trace.check import Property, Violation, check_traces
from odb_ref.trace.origin import UNKNOWN
from tests.helpers.effort import few
from tests.helpers.sizes import draw_size
from tests.helpers.world import ACTIONS, AnyOrder, Choice, Node, Shard, World, make_config, write_trace
from tests.spec.test_r14_shared import is_fair
from tests.spec.test_second_implementation import _align

SAMPLES = 800
"""The most samples of a world over all ranks, though each rank may have at least 2."""
BEFORE = Sample(0, 0, 1, 1)
"""Fills the places that an epoch has left behind when it resumes."""


class InTurn(AnyOrder):
    """Begins at any rank, and chooses the first that can do something, which is fast for any number of ranks."""

    def choose(self, world: World) -> Choice | None:
        ranks = len(world.nodes)
        first = self.random.randrange(ranks)
        for rank in (*range(first, ranks), *range(first)):
            if waiting := world.nodes[rank].waiting:
                return ACTIONS[type(self.random.choice(waiting))], rank
            if choices := world.list_of_consumer(rank):
                return choices[0]
        return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A world that has not run yet: what the ranks read, and where they begin."""

    config: Config
    shards: tuple[Shard, ...]
    """The source of each rank, or with shared shards only the common order, as the first."""
    starts: tuple[Checkpoint, ...]
    schedule: BudgetSchedule | None
    seed: int

    def make(self, checkpoints: tuple[Checkpoint, ...] = (), read: tuple[Shard, ...] = (), **stops: int) -> World:
        """Returns the world, from its start or from where it was saved. ``read`` is what the ranks had read by then."""
        at = checkpoints or self.starts
        ranks = self.config.world_size
        before = read or tuple((BEFORE,) * start.start.read_samples for start in at)
        is_shared = self.config.shared_samples is not None
        return World(
            self.config,
            before if is_shared else self.shards,
            order=self.shards[0] if is_shared else (),
            schedule=InTurn(self.seed),
            stops=dict.fromkeys(range(ranks), stops["after"]) if stops else None,
            checkpoints=at,
            budgets=[self.schedule] * ranks,
            drawn=before,
        )


def make_plan(draw: random.Random) -> Plan:
    """Draws a world, with values for everything in a configuration and a start."""
    ranks = draw_size(draw, 100, 1)
    is_shared, has_updates = draw.random() < 0.4, draw.random() < 0.35
    layout = draw.choice(tuple(Layout))
    order = draw.choice(tuple(StepOrder))
    limits = 0 if draw.random() < 0.5 else draw_size(draw, 12)
    unit = 2 ** draw.choice((0, 0, 0, 8, 20, 34, 34))
    longest = draw_size(draw, 200, 1)
    window = draw_size(draw, 900, 1)
    budget = unit * draw_size(draw, longest * max(2, window), 1)
    mode = Mode.JOIN if has_updates else draw.choice((Mode.JOIN, Mode.JOIN, Mode.QUOTA))
    each = min(max(2, SAMPLES // ranks), max(4, 6 * window))
    has_sizes = layout is Layout.PADDED and order is not StepOrder.SAMPLER
    config = make_config(
        world_size=ranks,
        budget_tokens=budget,
        window_samples=window,
        layout=layout,
        order=order,
        order_seed=draw_size(draw, 2**62),
        cost=draw.choice((TOKENS, get_cost(f"attention/{unit * draw_size(draw, 300, 1)}"))),
        sizes=draw.choice(tuple(Sizes)) if has_sizes else Sizes.ANY,
        limits=tuple(draw_size(draw, 3 * window + 5, 5) for _ in range(limits)),
        mode=mode,
        max_age_rounds=draw_size(draw, 40, 1),
        ramp_rounds=draw_size(draw, 12),
        depth_steps=draw_size(draw, 20, 1),
        rule=RULES[draw.choice(sorted(RULES))],
        update_samples=ranks * draw_size(draw, max(1, each // 2), 1) + draw.randrange(ranks) if has_updates else None,
    )
    first = draw_size(draw, 2**16) if draw.random() < 0.5 else 0
    counts = [each - draw_size(draw, each) // 2 for _ in range(ranks)]
    schedule: BudgetSchedule | None = None
    if draw.random() < 0.3:
        pace, part = draw_size(draw, 9, 1), draw_size(draw, 9, 2)
        schedule = lambda step, tokens: max(1, config.budget_tokens // (1 + step // pace % part))  # noqa: E731
    return fill(draw, config, first, counts, (longest, unit), is_shared=is_shared, schedule=schedule)


def fill(
    draw: random.Random,
    config: Config,
    first: int,
    counts: list[int],
    lengths: tuple[int, int],
    *,
    is_shared: bool,
    schedule: BudgetSchedule | None,
) -> Plan:
    """Draws the samples, and where the ranks begin. ``first`` is the round, or the source of its magnitude."""
    ranks, (longest, unit) = config.world_size, lengths
    is_even = draw.random() < 0.3

    def make_shard(rank: int, before: int, count: int) -> Shard:
        mine = [longest if is_even else draw_size(draw, longest, 1) for _ in range(count)]
        costs = [tuple(draw_size(draw, 5) for _ in config.limits) for _ in range(count)]
        return (BEFORE,) * before + tuple(
            Sample(rank + ranks * i, i, length * unit, draw.randint(0, length * unit), costs[i - before])
            for i, length in enumerate(mine, before)
        )

    total = sum(counts)
    size, rounds = config.update_samples, config.update_rounds
    if is_shared:
        rounds = replace(config, shared_samples=total).update_rounds
    if size is not None:
        first = min(first, 2**16 // size) // rounds * rounds
    has_begun = first > 0
    places = draw_size(draw, 2**16) * has_begun if size is None else first // rounds * size
    planned, emitted = sorted((draw_size(draw, 2**40), draw_size(draw, 2**50)))  # R10.6: a step holds a sample
    common = RoundStart(round=first, planned_steps=planned * has_begun, global_samples=emitted * has_begun)
    if config.mode is Mode.QUOTA and draw.random() < 0.7:
        config = replace(config, quota_samples=common.global_samples + draw_size(draw, total, 1))
    if is_shared:
        config = replace(config, shared_samples=total)
    portion = min(total, draw.randint(ranks, ranks * 3))
    shares = [portion // ranks + (rank < portion % ranks) for rank in range(ranks)]
    starts = []
    for rank in range(ranks):
        read = max(0, ceil((places - rank) / ranks)) if size is not None and not is_shared else places
        drawn = (
            Draw(places + sum(shares[:rank]), shares[rank], places + portion)
            if is_shared and has_begun and size is None
            else NOTHING_DRAWN
        )
        mine = replace(common, read_samples=read, draw=drawn)
        known = min(config.max_age_rounds, first)
        starts.append(Checkpoint(start=replace(mine, marks=(read,) * known) if has_begun else RoundStart()))
    if is_shared:
        config = replace(config, shared_samples=places + total)
        shards: tuple[Shard, ...] = (make_shard(0, places, total),)
    else:
        shards = tuple(
            make_shard(rank, starts[rank].start.read_samples, count if size is None else total // ranks)
            for rank, count in enumerate(counts)
        )
    return Plan(config=config, shards=shards, starts=tuple(starts), schedule=schedule, seed=draw.getrandbits(30))


def judge(plan: Plan, world: World, folder: Path, checkpoints: tuple[Checkpoint, ...]) -> list[str]:
    """Returns the violations that the checker of traces finds, and whether the epoch is complete."""
    paths = [folder / f"{rank}.ndjson" for rank in range(len(world.nodes))]
    kept: list[Violation] = []
    for rank, (node, checkpoint) in enumerate(zip(world.nodes, checkpoints, strict=True)):
        state, start, is_new = node.machine.state, checkpoint.start, checkpoint.start == RoundStart()
        write_trace(paths[rank], node, UNKNOWN, None if is_new else checkpoint)
        # R4.3: a mark a round, the last A of them.
        if len(state.marks) != min(plan.config.max_age_rounds, len(start.marks) + state.round - start.round):
            property_ = Property.AGE if is_new else Property.RESUME
            kept.append(Violation(property_, f"keeps {len(state.marks)} marks", rank, state.round))
    found = [str(item) for item in (*check_traces(paths).violations, *kept)]
    kinds = {node.finish.outcome.kind if node.finish else None for node in world.nodes}
    if kinds - {OutcomeKind.COMPLETE, OutcomeKind.STOPPED}:
        found.append(f"ends with {kinds}")
    return found


def list_taken(node: Node) -> Iterator[tuple[int, tuple[int, ...]]]:
    for step in node.taken:
        yield step.number, tuple(sample.position for sample in step.group)


def run_both(plan: Plan, folder: Path, draw: random.Random) -> list[str]:
    """Runs the epoch whole and in two parts, and returns what is wrong with either."""
    whole = plan.make().run()
    found = judge(plan, whole, folder, plan.starts)
    steps = len(whole.nodes[0].taken)
    if found or not steps:
        return found
    begun = plan.make(after=draw.randrange(steps)).run()
    saved = tuple(begun.save())
    read = tuple(node.shard[: at.start.read_samples] for node, at in zip(begun.nodes, saved, strict=True))
    rest = plan.make(saved, read).run()
    found = judge(plan, rest, folder, saved)
    for rank, nodes in enumerate(zip(begun.nodes, rest.nodes, whole.nodes, strict=True)):
        first, second, one = (dict(list_taken(node)) for node in nodes)
        if first | second != one:
            what = f"makes other steps than if it had not stopped after {len(first)}"
            found.append(str(Violation(Property.RESUME, what, rank)))
    return found


WORLDS, PARTS = 80, 20
MET = {
    "more than 40 ranks": 5, "more than 4 limits": 5, "more than 8 rounds of age": 15, "beyond round 4,096": 8,
    "beyond 1,000,000 samples": 12, "beyond 1,000 steps": 12, "windows of 300": 8, "tokens of 40 bits": 8,
    "updates on 9 ranks": 4, "budgets that change": 10, "goes on in a common order": 5,
}  # fmt: skip
"""The minimum number of worlds with each."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_checker_accepts_worlds_of_all_magnitudes_and_their_rests(part: int) -> None:
    """Spec: R9, R10.2, R15.1, R16.2. Checks: AGE, BUDGET, ORDER, QUOTA, RESUME, REPLAY, UPDATE, DEAL, COVER."""
    for number in range(part, WORLDS, PARTS):
        draw = random.Random(f"magnitudes {number}")
        plan = make_plan(draw)
        with tempfile.TemporaryDirectory() as folder:
            found = run_both(plan, Path(folder), draw)
        assert not found, f"world {number}: {plan.config}, from round {plan.starts[0].start.round}: {found[:3]}"


def test_the_worlds_have_all_magnitudes() -> None:
    met = Counter[str]()
    for number in range(WORLDS):
        plan = make_plan(random.Random(f"magnitudes {number}"))
        config, start = plan.config, plan.starts[0].start
        met["more than 40 ranks"] += config.world_size > 40
        met["more than 4 limits"] += len(config.limits) > 4
        met["more than 8 rounds of age"] += config.max_age_rounds > 8
        met["beyond round 4,096"] += start.round > 4_096
        met["beyond 1,000,000 samples"] += start.global_samples > 10**6
        met["beyond 1,000 steps"] += start.planned_steps > 1_000
        met["windows of 300"] += config.window_samples > 300
        met["tokens of 40 bits"] += any(sample.length > 2**39 for shard in plan.shards for sample in shard[-9:])
        met["updates on 9 ranks"] += config.update_samples is not None and config.world_size > 8
        met["budgets that change"] += plan.schedule is not None
        met["goes on in a common order"] += config.shared_samples is not None and start.round > 0
    assert not {name: met[name] for name, least in MET.items() if met[name] < least}, met


@pytest.mark.slow
def test_peers_that_hold_other_samples_differ_wherever_these_are() -> None:
    """Spec: R17.3. Checks: PEERS."""
    draw = random.Random(1)
    for _ in range(400):
        limits = draw_size(draw, 6)
        window = tuple(
            Sample(draw_size(draw, 2**40), i, draw_size(draw, 2**42, 1), 0, (draw_size(draw, 2**42),) * limits)
            for i in range(draw_size(draw, 3_000, 1))
        )
        place = draw.randrange(len(window))
        one = window[place]
        bit = 1 << draw.randrange(40)
        other = draw.choice(
            (
                replace(one, id=one.id ^ bit),
                replace(one, length=one.length ^ bit or 1),
                replace(one, supervised=1),
                replace(one, costs=(*one.costs[:-1], one.costs[-1] ^ bit)) if limits else replace(one, id=one.id ^ bit),
            )
        )
        changed = (*window[:place], other, *window[place + 1 :])
        digests = {compute_digest(held, is_ended=False) for held in (window, changed, window[:-1])}
        digests.add(compute_digest(window, is_ended=True))
        assert len(digests) == 4, (len(window), place, one, other)


def test_a_schedule_counts_the_steps_of_all_epochs() -> None:
    """Spec: R15.2, R15.4."""
    draw = random.Random(2)
    for _ in range(300):
        before, planned, agreed = draw_size(draw, 2**40), draw_size(draw, 2**40), draw_size(draw, 2**42, 1)
        asked: list[tuple[int, int]] = []

        def say(step: int, tokens: int, asked: list[tuple[int, int]] = asked) -> int:
            asked.append((step, tokens))
            return tokens

        acceptance = Acceptance(budget_tokens=2**41, schedule=say, steps_before=before)
        assert acceptance.ask(planned, agreed).tokens == min(agreed, 2**41)
        assert asked == [(before + planned, min(agreed, 2**41))]


def test_what_is_loaded_is_what_was_saved() -> None:
    """Spec: R10.1, R10.2, R14.6. Checks: RESUME."""
    draw = random.Random(3)
    for number in range(300):
        age, end = draw_size(draw, 60, 1), draw_size(draw, 2**40, 1)
        drawn = Draw(draw_size(draw, end), draw_size(draw, 2**20), end) if number % 2 else NOTHING_DRAWN
        shared = end + draw_size(draw, 2**40, 1) if number % 2 else None
        config = make_config(max_age_rounds=age, window_samples=2_000, shared_samples=shared)
        marks = sorted(draw_size(draw, 2**50) for _ in range(draw_size(draw, age)))
        read = marks[-1] if marks else 0
        carried = tuple(sorted({draw.randrange(read) for _ in range(draw_size(draw, 1_000))} if read else ()))
        planned, emitted = sorted((draw_size(draw, 2**50), draw_size(draw, 2**60)))  # R10.6: a step holds a sample
        start = RoundStart(
            round=draw_size(draw, 2**50, max(1, len(marks))),
            read_samples=read,
            is_ended=draw.random() < 0.5,
            carried=carried,
            draw=drawn,
            marks=tuple(marks),
            planned_steps=planned,
            global_samples=emitted,
            agreed_tokens=draw_size(draw, 2**42, 1),
            accepted_tokens=draw_size(draw, 2**42, 1),
        )
        samples = tuple(Sample(position, position, 1, 1) for position in carried)
        assert compute_round_start(resume(config, start, samples)[0]) == start


@pytest.mark.slow
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("order", StepOrder)
def test_groups_of_all_sizes_are_lined_up_split_and_carried_as_the_page_says(layout: Layout, order: StepOrder) -> None:
    """Spec: R4.1, R4.2, R4.3. Checks: AGE."""
    draw = random.Random(4)
    for _ in range(few(40)):
        sizes = [draw_size(draw, 600, 1) for _ in range(draw_size(draw, 60, 1))]
        positions = draw.sample(range(sum(sizes)), sum(sizes))
        if order is StepOrder.SAMPLER:
            positions.sort()
        unit, longest = 2 ** draw.choice((0, 8, 34)), draw_size(draw, 200, 1)
        held = iter(positions)
        items = [[(next(held), unit * draw_size(draw, longest, 1), ()) for _ in range(size)] for size in sizes]
        items = [
            sorted(group) if order is StepOrder.SAMPLER else sorted(group, key=lambda it: -it[1]) for group in items
        ]
        groups = tuple(tuple(Sample(at, at, length, 0) for at, length, _ in group) for group in items)
        due_before = draw_size(draw, sum(sizes))
        assert [is_due(group, due_before) for group in groups] == [
            any(position < due_before for position, _, _ in group) for group in items
        ]
        due = sum(is_due(group, due_before) for group in groups)
        target = draw.choice(
            (max(1, due), draw.randint(max(1, due), len(groups)), draw_size(draw, sum(sizes), len(groups)))
        )
        config = make_config(layout=layout, order=order, budget_tokens=1)
        steps, carried = align(groups, target, due_before, layout, order)
        expected, left = _align(items, target, due_before, config)
        assert [[sample.position for sample in step] for step in steps] == [
            [at for at, _, _ in step] for step in expected
        ]
        assert [sample.position for sample in carried] == [at for at, _, _ in left]


def test_a_common_order_of_any_size_is_shared_out_to_its_last_place() -> None:
    """Spec: R14.3, R16.4. Checks: DEAL, UPDATE."""
    draw = random.Random(5)
    for _ in range(60):
        ranks = draw_size(draw, 100, 1)
        wants = [draw_size(draw, 2**20) for _ in range(ranks)]
        left = draw.choice((sum(wants), draw_size(draw, sum(wants))))
        assert is_fair(wants, left, compute_shares(wants, left)), (wants, left)
        size = ranks * draw_size(draw, 2**12, 1) + draw.randrange(ranks)
        begin = drawn = size * draw_size(draw, 2**20)
        end = begin + draw.choice((size, draw_size(draw, size, 1)))
        portions = count_rounds(size, ranks, is_shared=True) - 1
        for number in range(portions):
            is_last = number == portions - 1
            loads = [draw_size(draw, 2**42) for _ in range(ranks)]
            portion = end - drawn if is_last else end - drawn - (end - drawn) // 3
            held = [load * (drawn - begin) // sum(loads) if sum(loads) else 0 for load in loads]
            shares = compute_portion_shares(loads, drawn - begin, portion)
            assert is_fair([max(held) - own + portion for own in held], portion, shares), (loads, portion)
            for rank in {0, ranks // 2, ranks - 1}:
                found = compute_portion(rank, loads, drawn, begin=begin, end=end, is_last=is_last)
                assert found == Draw(drawn + sum(shares[:rank]), shares[rank], drawn + portion)
            drawn += portion
        assert drawn == end


def test_what_many_ranks_post_has_one_answer() -> None:
    """Spec: R4.5, R7.2, R7.3. Checks: ALIGN, WEIGHT, ABORT."""
    draw = random.Random(6)
    for _ in range(100):
        ranks, steps, columns = draw_size(draw, 100, 1), draw_size(draw, 9), 3 + draw_size(draw, 6)
        rows = [[[draw_size(draw, 2**42) for _ in range(columns)] for _ in range(steps)] for _ in range(ranks)]
        posts = [PostCounts(tuple(map(StepCounts.from_row, own))) for own in rows]
        sums = [[sum(column) for column in zip(*step, strict=True)] for step in zip(*rows, strict=True)]
        assert combine_posts(posts) == Counted(tuple(map(StepCounts.from_row, sums)))
        failed, late = (draw.sample(range(1, ranks + 1), draw_size(draw, ranks)) for _ in range(2))
        outcome = (
            compute_failure(
                tuple(
                    Report(rank, f"of {rank}" if rank in failed else "", int(rank in late), "{}")
                    for rank in range(ranks + 1)
                )
            )
            if failed or late
            else None
        )
        if failed:
            assert outcome == Outcome(OutcomeKind.FAILED, min(failed), f"of {min(failed)}")
        elif late:
            assert outcome == Outcome(OutcomeKind.MISMATCH, min(late), "round 1, rank 0 is in 0")
