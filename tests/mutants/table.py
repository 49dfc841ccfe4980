"""The mutants: each a defect that an implementation of this protocol could have, and the property it breaks."""

from __future__ import annotations

from dataclasses import replace

from odb_sim.explore.bounds import Bounds, compute_lengths

from odb_ref.core.batching.cost import get_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import PaperRule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Mode
from tests.mutants.loader import Mutant


def _mixed(*shards: int, failures: int = 0, stops: int = 0, losses: int = 0, depth: int = 1, window: int = 2) -> Bounds:
    return Bounds(
        lengths=compute_lengths(shards, (3, 1, 2)),
        window_samples=window,
        depth_steps=depth,
        failures=failures,
        stops=stops,
        losses=losses,
    )


def _singles(*shards: int, stops: int = 0, failures: int = 0, window: int = 3) -> Bounds:
    """Every sample fills a step of its own, so that steps wait for room in the queue."""
    lengths = compute_lengths(shards, (1,))
    return Bounds(lengths=lengths, budget_tokens=1, window_samples=window, stops=stops, failures=failures)


PLAIN = _mixed(5, 2)
FULL = Bounds(lengths=compute_lengths((4, 3), (3, 1, 2)), window_samples=3, window_bytes=4)
FAILURE = _mixed(3, 2, failures=1)
STOP = _singles(4, 3, stops=1)
ODD = Bounds(lengths=((1,), (1,)), odd_rank=1)
LOSS = _mixed(3, 1, losses=1)
SPLIT = Bounds(lengths=((1, 1, 1, 1), (4, 4, 4, 4)), budget_tokens=4, window_samples=4, rule=PaperRule())
QUOTA = Bounds(
    lengths=compute_lengths((6, 6), (1,)), budget_tokens=1, window_samples=3, mode=Mode.QUOTA, quota_samples=3
)
DRY = Bounds(lengths=((4, 4, 4), (4,)), window_samples=3, mode=Mode.QUOTA)
# Rank 1 makes one group of a window, so one step a round: rank 0 carries most of what it reads, until it is due.
CARRY = Bounds(lengths=((4,) * 5, (1,) * 8), budget_tokens=4, window_samples=3, max_age_rounds=1)
# Rank 0's short sample never makes the fullest group: only its age gets it out.
AGED = Bounds(lengths=((1, 9, 9, 9), (1,) * 8), budget_tokens=9, window_samples=2, max_age_rounds=1)
# Samples use 0, 1, 2, 0 ... of the one further resource.
LIMITS = Bounds(lengths=((1, 1, 1), (1,)), limits=(2,), window_samples=3)
# The oldest, longer than the budget, is alone: the others are packed by their length.
ROWS = Bounds(lengths=((5, 3, 1, 2, 2, 1, 3), (2, 3)), layout=Layout.PACKED, window_samples=5)
# The longest sample leaves the least room and uses the resource up: the shortest fits into the second row only.
ROW_LIMITS = Bounds(
    lengths=((9, 9, 9, 5, 1, 6), (1, 2)), budget_tokens=8, layout=Layout.PACKED, limits=(2,), window_samples=6
)
LOADER = replace(PLAIN, lengths=compute_lengths((4, 2), (3, 1, 2)), lost_loaders=1)
LOADER_WAITS = replace(STOP, stops=0, lost_loaders=1)
SHARED = Bounds(lengths=compute_lengths((5, 2), (3, 1, 2)), is_shared=True)
# Rank 0 makes three groups of its part of an update, rank 1 one.
UPDATES = Bounds(lengths=((4,) * 5, (1,) * 4), update_samples=6)
DEALT = Bounds(lengths=((4,) * 5, (1,) * 4), update_samples=6, is_shared=True)
# The second update has no good sample, the first none on rank 1.
BAD_UPDATES = Bounds(lengths=compute_lengths((6, 6), (3, 1, 2)), update_samples=4, bad=(2, 3, 6, 7, 8, 9))
SHARED_PARTS = replace(SHARED, is_single_reads=True, is_eager_end=True)
# Neighbours of unlike length, of which a short one would fill a group further back.
NEIGHBOURS = Bounds(lengths=((1, 3, 1, 2, 2, 1), (2, 1, 1)), order=StepOrder.SAMPLER, window_samples=4)
# Four steps of a window, none as full as another.
DEARER = Bounds(
    lengths=((3, 3, 5), (5, 3, 3)),
    budget_tokens=6,
    layout=Layout.PACKED,
    cost=get_cost("attention/1"),
    window_samples=3,
)
"""The row of one long sample has fewer tokens than that of two, and costs more."""
DEAREST = replace(DEARER, lengths=((4, 4, 5), (5, 4, 4)), budget_tokens=8)
"""The row of two samples costs more than that of one that is longer than each."""
UNLIKE = Bounds(lengths=((6, 5, 4, 3), (3, 6, 4, 5)), budget_tokens=6, window_samples=4)
# Windows of 1, 2 and 4. Under a budget of 12 rank 0 makes one group, less than half full; and two, of which one is half full.
KEPT_BACK = Bounds(lengths=((3, 6, 12, 2, 2, 5, 7, 9), (12, 12)), budget_tokens=12, window_samples=4, ramp_rounds=2)
KEPT_ONE = replace(KEPT_BACK, lengths=((2, 2, 5, 7, 9), (12, 12)), ramp_rounds=0)
"""Three groups of 4, 5 and 7 tokens, of which two are less than half full."""
RAMPED = Bounds(lengths=((4,) * 9, (4,) * 9), budget_tokens=4, window_samples=24, ramp_rounds=3, max_age_rounds=1)
"""Several groups in each of the first windows, of which what is left once is due in the next round."""
# A row of 3 tokens, which would have 4 with padding: half of the budget.
KEPT_ROW = Bounds(lengths=((8, 2, 1, 8), (8,)), budget_tokens=8, layout=Layout.PACKED, window_samples=3, ramp_rounds=0)
HALVED = Bounds(
    lengths=((1,) * 7, (4,) * 3), sizes=Sizes.EVEN, budget_tokens=7, window_samples=7, ramp_rounds=0, rule=PaperRule()
)
IDLE = Bounds(lengths=((4,) * 4, (4,)), budget_tokens=4, window_samples=2)
TOLD = Bounds(lengths=((1,) * 9, (1,) * 6), window_samples=3, accepted=((2, 4), (3,)))
"""Rank 0 lowers its budget and raises it again, rank 1 lowers its own by less; groups are as large as the budget in force."""
TIMED = replace(TOLD, accepted=((3,),), budget_schedule=((0, 2), (1, 3), (2, 4), (3, 1), (4, 3), (5, 2)))

MUTANTS = (
    # Grouping and alignment.
    Mutant(
        name="the budget is one sample too wide",
        module="batching.grouping",
        old="padded + sample.length > budget_tokens",
        new="padded > budget_tokens",
        property="BUDGET",
        bounds=PLAIN,
    ),
    Mutant(
        name="the budget counts real tokens, not padded ones",
        module="batching.grouping",
        old="padded + sample.length > budget_tokens",
        new="held + sample.length > budget_tokens",
        property="BUDGET",
        bounds=Bounds(lengths=((3, 1), (3, 1)), budget_tokens=4),
    ),
    Mutant(
        name="limits are not looked at",
        module="batching.grouping",
        old="(limits and any(map(gt, sample.costs, room)))",
        new="False",
        property="BUDGET",
        bounds=LIMITS,
    ),
    Mutant(
        name="a limit holds for each sample, not for their sum",
        module="batching.grouping",
        old="            room = tuple(map(sub, room, sample.costs))",
        new="            room = limits",
        property="BUDGET",
        bounds=LIMITS,
    ),
    Mutant(
        name="groups are swept in sampler order",
        module="batching.grouping",
        old='sorted(by_position, key=attrgetter("length"))',
        new="by_position",
        property="BUDGET",
        bounds=Bounds(lengths=((3, 1), (3, 1)), budget_tokens=4),
    ),
    Mutant(
        name="every sample is a group of its own",
        module="batching.grouping",
        old="is_over = padded + sample.length > budget_tokens or padded - held > most",
        new="is_over = True",
        property="FEWEST",
        bounds=Bounds(lengths=((1, 1), (1,))),
    ),
    Mutant(
        name="the last group is forgotten when it is a single sample",
        module="batching.grouping",
        old="    if ordered:\n        groups",
        new="    if len(ordered) - begin > 1:\n        groups",
        property="CONSERVE",
        bounds=PLAIN,
    ),
    Mutant(
        name="a row takes a token more than it has room for",
        module="batching.grouping",
        old="bisect_left(rooms, (sample.length, 0))",
        new="bisect_left(rooms, (sample.length - 1, 0))",
        property="BUDGET",
        bounds=ROWS,
    ),
    Mutant(
        name="a row that was joined keeps its room",
        module="batching.grouping",
        old="insort(rooms, (room - sample.length, number))",
        new="insort(rooms, (room, number))",
        property="BUDGET",
        bounds=ROWS,
    ),
    Mutant(
        name="only the last row is looked at",
        module="batching.grouping",
        old="        if place < len(rooms):\n",
        new="        if place < len(rooms) and rooms[place][1] == len(groups) - 1:\n",
        property="ANY-FIT",
        bounds=ROWS,
    ),
    Mutant(
        name="a row's limits are not looked at",
        module="batching.grouping",
        old="while limits and place",
        new="while False and place",
        property="BUDGET",
        bounds=ROW_LIMITS,
    ),
    Mutant(
        name="a row over a limit ends the search",
        module="batching.grouping",
        old="            place += 1\n",
        new="            place = len(rooms)\n",
        property="ANY-FIT",
        bounds=ROW_LIMITS,
    ),
    Mutant(
        name="what a row has used of a limit is not counted",
        module="batching.grouping",
        old="tuple(map(sub, rests[number], sample.costs))",
        new="limits",
        property="BUDGET",
        bounds=ROW_LIMITS,
    ),
    Mutant(
        name="the oldest are packed as all others are",
        module="batching.grouping",
        old="next(_iterate_runs(by_position, _count_row_tokens, budget_tokens, limits), ())",
        new="()",
        property="ANY-FIT",
        bounds=ROWS,
    ),
    Mutant(
        name="packed groups are formed as padded ones",
        module="batching.layouts",
        old="return compute_rows(samples, budget_tokens, limits)",
        new="return compute_groups(samples, budget_tokens, limits)",
        property="ANY-FIT",
        bounds=ROWS,
    ),
    Mutant(
        name="packed groups are packed by a larger budget",
        module="batching.layouts",
        old="return compute_rows(samples, budget_tokens, limits)",
        new="return compute_rows(samples, 2 * budget_tokens, limits)",
        property="BUDGET",
        bounds=ROWS,
    ),
    Mutant(
        name="what is carried is dropped",
        module="batching.alignment",
        old="), tuple(carried)",
        new="), ()",
        property="CONSERVE",
        bounds=CARRY,
    ),
    Mutant(
        name="what is carried is emitted as well",
        module="batching.alignment",
        old="for i in order[target:]",
        new="for i in order[target - 1 :]",
        property="CONSERVE",
        bounds=CARRY,
    ),
    Mutant(
        name="an idle step uses up the slot of a group",
        module="batching.alignment",
        old="tuple(groups[i] for i in sorted(order[:target], key=ranks.__getitem__))",
        new="(*(groups[i] for i in sorted(order[: target - 1], key=ranks.__getitem__)), ())",
        property="CONSERVE",
        bounds=CARRY,
    ),
    Mutant(
        name="a rank that runs dry posts no idle steps",
        module="batching.alignment",
        old=" + ((),) * max(0, target - sum(map(len, groups)))",
        new="",
        property="ALIGN",
        bounds=IDLE,
    ),
    Mutant(
        name="what is due by age does not go first",
        module="batching.alignment",
        old="(not is_due(groups[i], due_before), fills[i])",
        new="(False, fills[i])",
        property="AGE",
        bounds=AGED,
    ),
    Mutant(
        name="the carried samples lose their order",
        module="batching.alignment",
        old='sorted(chain.from_iterable(groups[i] for i in order[target:]), key=attrgetter("position"))',
        new='reversed(sorted(chain.from_iterable(groups[i] for i in order[target:]), key=attrgetter("position")))',
        property="REPLAY",
        bounds=CARRY,
        needs_invariants=True,
    ),
    Mutant(
        name="ties are broken by how often the rank has been asked",
        module="batching.alignment",
        old="fills[i])",
        new="fills[i], -i if _calls % 3 else i)",
        prelude="""
_original, _calls = align, 0


def align(
    groups: tuple[Group, ...], target: int, due_before: int, layout: Layout, step_order: StepOrder, **terms: object
) -> tuple[tuple[Group, ...], Group]:
    global _calls
    _calls += 1
    return _original(groups, target, due_before, layout, step_order, **terms)
""",
        property="REPLAY",
        bounds=replace(CARRY, lengths=((4,) * 8, (1,) * 16), max_age_rounds=4),
    ),
    Mutant(
        name="a split loses the sample in the middle",
        module="batching.alignment",
        old="group[middle:])",
        new="group[middle + 1 :])",
        property="CONSERVE",
        bounds=SPLIT,
    ),
    Mutant(
        name="a split emits the sample in the middle twice",
        module="batching.alignment",
        old="(group[:middle],",
        new="(group[: middle + 1],",
        property="CONSERVE",
        bounds=SPLIT,
    ),
    # The order of steps.
    Mutant(
        name="steps are not shuffled",
        module="batching.order",
        old="if self is not StepOrder.SHUFFLED:",
        new="if True:",
        property="ORDER",
        bounds=UNLIKE,
    ),
    Mutant(
        name="every round is shuffled alike",
        module="batching.order",
        old="key = mix(mix(seed) ^ round_)",
        new="key = mix(mix(seed))",
        property="ORDER",
        bounds=replace(UNLIKE, lengths=((6, 5, 4, 3) * 2,)),
    ),
    Mutant(
        name="idle steps are shuffled with the others",
        module="batching.order",
        old="permute(len(steps), seed, round_) if steps[number]])",
        new="permute(len(steps), seed, round_)])",
        property="ORDER",
        bounds=replace(UNLIKE, lengths=((6, 5, 4, 3), (6, 5, 4))),
    ),
    Mutant(
        name="neighbours are grouped with who fits",
        module="batching.order",
        old="if self is StepOrder.SAMPLER:\n            return",
        new="if False:\n            return",
        property="ORDER",
        bounds=NEIGHBOURS,
    ),
    Mutant(
        name="in sampler order the fullest groups are chosen",
        module="batching.order",
        old="group[0].position if self is StepOrder.SAMPLER else -layout",
        new="-layout",
        property="ORDER",
        bounds=NEIGHBOURS,
    ),
    Mutant(
        name="a run forgets how long its longest sample is",
        module="batching.grouping",
        old="longest, total = max(longest, sample.length), total",
        new="longest, total = sample.length, total",
        property="BUDGET",
        bounds=NEIGHBOURS,
    ),
    # Offers, agreements and the target.
    Mutant(
        name="the epoch closes when the first rank runs dry",
        module="rounds",
        old="agreement.samples_max == 0 or (config.mode is Mode.QUOTA and agreement.samples_min == 0)",
        new="agreement.samples_min == 0",
        property="COVER",
        bounds=PLAIN,
    ),
    Mutant(
        name="the epoch closes when a single sample is left",
        module="rounds",
        old="agreement.samples_max == 0 or",
        new="agreement.samples_max <= 1 or",
        property="COVER",
        bounds=PLAIN,
    ),
    # How many of its groups a rank would emit.
    Mutant(
        name="no group is ever kept back",
        module="batching.alignment",
        old="    return len(groups) - any(2 * layout.compute_tokens(group) < budget_tokens for group in groups)",
        new="    return len(groups)",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="a group that is half full is kept back",
        module="batching.alignment",
        old="2 * layout.compute_tokens(group) < budget_tokens",
        new="2 * layout.compute_tokens(group) <= budget_tokens",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="any group that is not full is kept back",
        module="batching.alignment",
        old="2 * layout.compute_tokens(group) < budget_tokens",
        new="layout.compute_tokens(group) < budget_tokens",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="each group less than half full is kept back",
        module="batching.alignment",
        old="len(groups) - any(2 *",
        new="len(groups) - sum(2 *",
        property="FEWEST",
        bounds=KEPT_ONE,
    ),
    Mutant(
        name="the only group is kept back",
        module="batching.alignment",
        old="    if len(groups) < 2:\n",
        new="    if not groups:\n",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="only the last group may be kept back",
        module="batching.alignment",
        old="< budget_tokens for group in groups)",
        new="< budget_tokens for group in groups[-1:])",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="how full a row is goes by padded tokens",
        module="rounds",
        old="count_groups_to_emit(groups, config.layout, budget_tokens)",
        new="count_groups_to_emit(groups, type(config.layout).PADDED, budget_tokens)",
        property="FEWEST",
        bounds=KEPT_ROW,
    ),
    Mutant(
        name="half full is by the largest budget, not by that in force",
        module="rounds",
        old="count_groups_to_emit(groups, config.layout, budget_tokens)",
        new="count_groups_to_emit(groups, config.layout, config.budget_tokens)",
        property="FEWEST",
        bounds=TOLD,
    ),
    Mutant(
        name="in the ramp a group that is due is carried on",
        module="rounds",
        old="max(1, agreement.due_max, target // RAMP_SHARE)",
        new="max(1, target // RAMP_SHARE)",
        property="AGE",
        bounds=RAMPED,
    ),
    Mutant(
        name="in the ramp a round may form no step",
        module="rounds",
        old="max(1, agreement.due_max, target // RAMP_SHARE)",
        new="max(agreement.due_max, target // RAMP_SHARE)",
        property="TERM",
        bounds=RAMPED,
        needs_invariants=True,
    ),
    Mutant(
        name="a rank keeps a group back though its source has ended",
        module="rounds",
        old="NONE if is_all else count_groups_to_emit",
        new="count_groups_to_emit",
        property="FEWEST",
        bounds=KEPT_BACK,
    ),
    Mutant(
        name="the fewest samples are taken where the most are meant",
        module="offer",
        old="samples_max: int = _max()",
        new="samples_max: int = _min()",
        property="COVER",
        bounds=PLAIN,
    ),
    Mutant(
        name="the target depends on the rank",
        module="rounds",
        old="    target = compute_checked_target(config.rule, agreement, is_update=is_update)\n",
        new="    target = compute_checked_target(config.rule, agreement, is_update=is_update) + config.rank\n",
        property="ALIGN",
        bounds=PLAIN,
    ),
    Mutant(
        name="the fewest due groups are taken where the most are meant",
        module="offer",
        old="due_max: int = _max()",
        new="due_max: int = _min()",
        property="AGE",
        bounds=CARRY,
    ),
    Mutant(
        name="no group is ever due",
        module="rounds",
        old="due_max=sum(is_due(group, due_before) for group in groups) if due_before else 0,",
        new="due_max=0,",
        property="AGE",
        bounds=CARRY,
    ),
    Mutant(
        name="age is counted one round too late",
        module="rounds",
        old="mark = state.marks[0] if len(state.marks) == config.max_age_rounds else 0",
        new="mark = state.marks[-2] if len(state.marks) > 1 else 0",
        property="AGE",
        bounds=AGED,
    ),
    Mutant(
        name="the rule forgets what is due",
        module="batching.rules",
        old="return max(wanted, agreement.due_max)",
        new="return wanted",
        property="RULE-BOUNDS",
        bounds=CARRY,
    ),
    Mutant(
        name="the rule asks for more steps than anybody has samples",
        module="batching.rules",
        old="        return agreement.groups_max\n",
        new="        return agreement.groups_max + 1\n",
        property="RULE-BOUNDS",
        bounds=SPLIT,
    ),
    # Quota mode.
    Mutant(
        name="quota mode idles",
        module="rounds",
        old="return min(target, agreement.samples_min) if config.mode is Mode.QUOTA else target",
        new="return target",
        property="QUOTA",
        bounds=DRY,
    ),
    Mutant(
        name="the quota is not counted",
        module="rounds",
        old="return next((i for i, total in enumerate(totals, 1) if total >= config.quota_samples), len(totals))",
        new="return len(totals)",
        property="QUOTA",
        bounds=QUOTA,
    ),
    Mutant(
        name="the quota cut comes a step late",
        module="rounds",
        old="if total >= config.quota_samples)",
        new="if total > config.quota_samples)",
        property="QUOTA",
        bounds=replace(QUOTA, quota_samples=4),
    ),
    Mutant(
        name="the quota counts one rank's samples",
        module="machine",
        old="accumulate((count.samples for count in counts), initial=state.global_samples)",
        new="accumulate((len(group) for group in state.aligned), initial=state.global_samples)",
        property="QUOTA",
        bounds=QUOTA,
    ),
    Mutant(
        name="the epoch goes on after the quota",
        module="rounds",
        old="held = 0 if is_quota_met(config, state) else len(state.window)",
        new="held = len(state.window)",
        property="QUOTA",
        bounds=replace(QUOTA, max_age_rounds=9),
    ),
    Mutant(
        name="the steps that a quota cuts off are lost",
        module="machine",
        old="window=_return_samples(state.window, state.aligned[steps:]),",
        new="window=state.window,",
        property="CONSERVE",
        bounds=QUOTA,
    ),
    Mutant(
        name="the steps that a quota cuts off are numbered all the same",
        module="machine",
        old="planned_steps=state.planned_steps + steps,",
        new="planned_steps=state.planned_steps + len(counts),",
        property="ALIGN",
        bounds=QUOTA,
    ),
    # Reading and steps.
    Mutant(
        name="a rank offers before its window is full",
        module="rounds",
        old="is_ready = state.is_collated and not state.wanted_samples",
        new="is_ready = state.is_collated",
        property="FEWEST",
        bounds=PLAIN,
    ),
    Mutant(
        name="the window is not filled again",
        module="machine",
        old="asked, told = ask_for_samples(config, advanced, carried)",
        new="asked, told = 0, None",
        property="COVER",
        bounds=PLAIN,
    ),
    Mutant(
        name="a rank reads on after the end of its source",
        module="rounds",
        old="len(carried), is_ended=is_ended), None",
        new="len(carried), is_ended=False), None",
        property="TERM",
        bounds=PLAIN,
    ),
    Mutant(
        name="a rank forgets that its source has ended",
        module="machine",
        old="is_ended=is_ended,",
        new="is_ended=False,",
        property="TERM",
        bounds=PLAIN,
    ),
    Mutant(
        name="a part of a read counts as the whole",
        module="machine",
        old="state.wanted_samples - len(samples),",
        new="0,",
        property="FREE",
        bounds=Bounds(lengths=((3, 1, 2), (3,)), is_single_reads=True),
    ),
    Mutant(
        name="a window that is full leaves its read open",
        module="machine",
        old="0 if event.is_ended or event.is_full else",
        new="0 if event.is_ended else",
        property="FREE",
        bounds=FULL,
    ),
    Mutant(
        name="a window that is full ends the source",
        module="machine",
        old="is_ended=is_ended,",
        new="is_ended=event.is_ended or event.is_full,",
        property="COVER",
        bounds=FULL,
    ),
    Mutant(
        name="steps are numbered one too high",
        module="machine",
        old="range(state.planned_steps, state.planned_steps + steps)",
        new="range(state.planned_steps + 1, state.planned_steps + steps + 1)",
        property="ALIGN",
        bounds=PLAIN,
    ),
    Mutant(
        name="the round is not counted on",
        module="machine",
        old="round=state.round + 1,",
        new="round=state.round,",
        property="TERM",
        bounds=PLAIN,
    ),
    Mutant(
        name="a step is told its rank's own counts",
        module="machine",
        old="repeat(state.round), state.aligned, counts)",
        new="repeat(state.round), state.aligned, map(compute_counts, state.aligned, repeat(len(config.limits))))",
        property="ALIGN",
        bounds=PLAIN,
    ),
    Mutant(
        name="idle steps are not counted",
        module="machine",
        old="tuple(map(compute_counts, aligned, repeat(len(config.limits))))",
        new="tuple(compute_counts(group, len(config.limits)) for group in aligned if group)",
        property="ALIGN",
        bounds=PLAIN,
    ),
    Mutant(
        name="further resources are not counted",
        module="machine",
        old="tuple(map(compute_counts, aligned, repeat(len(config.limits))))",
        new="tuple(map(compute_counts, aligned))",
        property="WEIGHT",
        bounds=LIMITS,
    ),
    Mutant(
        name="steps are lined up by tokens",
        module="batching.order",
        old="-layout.compute_cost(group, cost)",
        new="-layout.compute_tokens(group)",
        property="ORDER",
        bounds=DEARER,
    ),
    Mutant(
        name="a row costs what its longest sample does",
        module="batching.layouts",
        old="return sum([cost.of_tokens(sample.length) for sample in group])",
        new="return max([cost.of_tokens(sample.length) for sample in group])",
        property="ORDER",
        bounds=DEAREST,
    ),
    # Sizes.
    Mutant(
        name="what is split is halved, friendly or not",
        module="batching.layouts",
        old="return sizes.find_middle(len(group))",
        new="return (len(group) + 1) // 2",
        property="SIZES",
        bounds=HALVED,
    ),
    Mutant(
        name="a group keeps what makes its number unfriendly",
        module="batching.grouping",
        old="end = begin + sizes.round_down(len(first))",
        new="end = begin + len(first)",
        property="SIZES",
        bounds=replace(HALVED, lengths=((1,) * 7, (4,))),
    ),
    Mutant(
        name="every number is taken for a power of two",
        module="batching.sizes",
        old="case Sizes.POWERS:\n                return _floor_power(size)",
        new="case Sizes.POWERS:\n                return size",
        property="SIZES",
        bounds=replace(HALVED, sizes=Sizes.POWERS),
    ),
    # Release and delivery.
    Mutant(
        name="a rank says that it is ready before it has collated",
        module="rounds",
        old="is_ready = state.is_collated and not state.wanted_samples",
        new="is_ready = not state.wanted_samples",
        property="RELEASE",
        bounds=PLAIN,
    ),
    Mutant(
        name="a rank does not wait for its collation",
        module="machine",
        old="is_collated=False,",
        new="is_collated=True,",
        property="FREE",
        bounds=PLAIN,
    ),
    Mutant(
        name="a rank releases what it has collated itself",
        module="machine",
        old="return replace(state, is_collated=True)",
        new="return replace(state, is_collated=True, released=state.released + state.plan, plan=())",
        property="RELEASE",
        bounds=PLAIN,
    ),
    Mutant(
        name="a release overwrites what waits for room",
        module="machine",
        old="released=state.released + state.plan, plan=())",
        new="released=state.plan, plan=())",
        property="CONSERVE",
        bounds=replace(_singles(4, 4, window=2), is_urged_freely=True),
    ),
    Mutant(
        name="a step is delivered into a full queue",
        module="machine",
        old="room = config.depth_steps - len(state.queue)",
        new="room = config.depth_steps - len(state.queue) + 1",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="room in the queue goes unnoticed",
        module="machine",
        old="steps = _list_deliverable(config, state, taken=1)",
        new="steps: tuple[Step, ...] = ()",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="a taken step's samples are not booked",
        module="machine",
        old="taken_samples=state.taken_samples + len(state.queue[0].group),",
        new="taken_samples=state.taken_samples,",
        property="CONSERVE",
        bounds=PLAIN,
        needs_invariants=True,
    ),
    # Endings.
    Mutant(
        name="the last round is not handed out",
        module="machine",
        old="return _drain(config, advanced, Outcome(OutcomeKind.COMPLETE), advanced.planned_steps)",
        new="return _drain(config, replace(state, groups=()), Outcome(OutcomeKind.COMPLETE), advanced.planned_steps)",
        property="COVER",
        bounds=PLAIN,
    ),
    Mutant(
        name="a rank finishes while steps wait for room",
        module="machine",
        old="if state.outcome is None or (state.released and state.released[0].number < state.step_limit):",
        new="if state.outcome is None:",
        property="STOP",
        bounds=STOP,
    ),
    Mutant(
        name="a failure waits for the read that has failed",
        module="rounds",
        old="must_end = bool(state.failure) or state.is_stopped",
        new="must_end = state.is_stopped",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="a failure is not agreed on: the rank ends alone",
        module="machine",
        old='return post_when_ready(config, replace(state, failure=event.cause or "unknown failure"))',
        new="return _drain(config, replace(state, failure=event.cause), "
        "Outcome(OutcomeKind.FAILED, config.rank, event.cause), state.planned_steps - len(state.plan))",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="a failure is not said in the offer",
        module="rounds",
        old="failed_rank=config.rank if state.failure else NONE,",
        new="failed_rank=NONE,",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="a failure outside FILL is forgotten",
        module="machine",
        old="            if state.phase in _ENDING or state.failure:",
        new="            if state.phase is not Phase.FILL or state.failure:",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="the agreement ignores a failure",
        module="machine",
        old="if agreement.failed_rank != NONE or is_mismatch:",
        new="if is_mismatch:",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="ranks with different configurations go on",
        module="machine",
        old="if agreement.failed_rank != NONE or is_mismatch:",
        new="if agreement.failed_rank != NONE:",
        property="ABORT",
        bounds=ODD,
    ),
    Mutant(
        name="different configurations are noticed and not named",
        module="exchange",
        old="        if report.config != first.config:",
        new="        if report.config is None:",
        property="FREE",
        bounds=ODD,
    ),
    Mutant(
        name="each rank puts a different configuration down to itself",
        module="machine",
        old="return _drain(config, state, compute_failure(reports), state.planned_steps - len(state.plan))",
        new="return _drain(config, state, Outcome(compute_failure(reports).kind, config.rank), "
        "state.planned_steps - len(state.plan))",
        property="ABORT",
        bounds=ODD,
    ),
    Mutant(
        name="a failure is agreed on only when every rank has failed",
        module="offer",
        old="failed_rank: int = _min()",
        new="failed_rank: int = _max()",
        property="FREE",
        bounds=FAILURE,
    ),
    Mutant(
        name="the failure of a rank is put down to another",
        module="exchange",
        old="return Outcome(OutcomeKind.FAILED, report.rank, report.cause + where)",
        new="return Outcome(OutcomeKind.FAILED, 0, report.cause + where)",
        property="ABORT",
        bounds=FAILURE,
    ),
    Mutant(
        name="a failure hands out what is not released",
        module="machine",
        old="return _drain(config, state, compute_failure(reports), state.planned_steps - len(state.plan))",
        new="return _drain(config, replace(state, released=state.released + state.plan, plan=()), "
        "compute_failure(reports), state.planned_steps)",
        property="RELEASE",
        bounds=FAILURE,
    ),
    Mutant(
        name="a stop waits for the consumer that has left",
        module="rounds",
        old="must_end = bool(state.failure) or state.is_stopped",
        new="must_end = bool(state.failure)",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="a stop is forgotten",
        module="machine",
        old="replace(state, is_stopped=True, step_limit=",
        new="replace(state, step_limit=",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="a stop is not said in the offer",
        module="rounds",
        old="stop_rank=config.rank if state.is_stopped else NONE,",
        new="stop_rank=NONE,",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="a stop names what was planned, not what was taken",
        module="rounds",
        old="stop_step=state.taken_steps if state.is_stopped else NONE,",
        new="stop_step=state.planned_steps if state.is_stopped else NONE,",
        property="STOP",
        bounds=STOP,
    ),
    Mutant(
        name="each rank puts a stop down to itself",
        module="machine",
        old="outcome = Outcome(OutcomeKind.STOPPED, agreement.stop_rank, cause)",
        new="outcome = Outcome(OutcomeKind.STOPPED, config.rank, cause)",
        property="ABORT",
        bounds=STOP,
    ),
    Mutant(
        name="a consumer that leaves at the end is waited for",
        module="machine",
        old="    if stopped.phase is Phase.DRAIN:\n        return _finish_when_drained(stopped)\n",
        new="",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="an urge is ignored",
        module="rounds",
        old="may_post = is_ready and (state.is_urged or not state.released or not state.plan)",
        new="may_post = is_ready and (not state.released or not state.plan)",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="an urge is noted and not acted on",
        module="machine",
        old="return post_when_ready(config, replace(state, is_urged=True))",
        new="return replace(state, is_urged=True), ()",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="an urged rank offers before it is ready",
        module="rounds",
        old="may_post = is_ready and (state.is_urged or not state.released or not state.plan)",
        new="may_post = state.is_urged or (is_ready and (not state.released or not state.plan))",
        property="FREE",
        bounds=STOP,
    ),
    Mutant(
        name="a lost peer is waited for",
        module="machine",
        old="            return _lose(state, event)",
        new="            return state, ()",
        property="FREE",
        bounds=LOSS,
    ),
    Mutant(
        name="after a loss a rank trains on",
        module="machine",
        old="    limit = min(state.step_limit, state.taken_steps)\n    outcome = Outcome(OutcomeKind.LOST",
        new="    limit = state.step_limit\n    outcome = Outcome(OutcomeKind.LOST",
        property="ABORT",
        bounds=LOSS,
    ),
    Mutant(
        name="a loss leaves formed steps behind",
        module="machine",
        old="        groups=(),\n        aligned=(),\n        step_limit=limit,",
        new="        step_limit=limit,",
        property="TERM",
        bounds=LOSS,
    ),
    # A lost loader process.
    Mutant(
        name="a failure after the offer is forgotten",
        module="machine",
        old="            if state.phase in _ENDING or state.failure:",
        new="            if state.phase in (*_ENDING, Phase.OFFER) or state.failure:",
        property="FREE",
        bounds=LOADER,
    ),
    Mutant(
        name="a rank that is ready does not say that it has failed",
        module="rounds",
        old="failed_rank=config.rank if state.failure else NONE,",
        new="failed_rank=config.rank if state.failure and not is_ready else NONE,",
        property="ABORT",
        bounds=LOADER_WAITS,
    ),
    # Shared shards.
    Mutant(
        name="all ranks draw the same places",
        module="batching.shards",
        old="return Draw(drawn + sum(shares[:rank]),",
        new="return Draw(drawn,",
        property="DEAL",
        bounds=SHARED,
    ),
    Mutant(
        name="a rank leaves the places of the others out",
        module="batching.shards",
        old="drawn + sum(shares))",
        new="drawn + shares[rank])",
        property="DEAL",
        bounds=SHARED,
    ),
    Mutant(
        name="a rank draws what it wants, whatever is left",
        module="batching.shards",
        old="if sum(wants) <= left:",
        new="if left:",
        property="DEAL",
        bounds=SHARED,
    ),
    Mutant(
        name="the last places are given to each rank",
        module="batching.shards",
        old="        spare -= more\n",
        new="",
        property="DEAL",
        bounds=replace(SHARED, lengths=((1, 1, 1), (1, 1)), budget_tokens=1),
    ),
    Mutant(
        name="each round draws from the beginning of the order",
        module="rounds",
        old="compute_draw(config.rank, wants, state.draw.end, total)",
        new="compute_draw(config.rank, wants, 0, total)",
        property="DEAL",
        bounds=SHARED,
    ),
    Mutant(
        name="what is drawn is not read",
        module="rounds",
        old="return drawn, ((Read(draw.count, draw.first),) if draw.count else ())",
        new="return drawn, ((Read(draw.count, draw.first),) if state.round == 0 else ())",
        property="FREE",
        bounds=SHARED,
    ),
    Mutant(
        name="the end of a read is taken for the end of the order",
        module="machine",
        old="is_ended = event.is_ended if config.shared_samples is None else state.is_ended",
        new="is_ended = event.is_ended",
        property="DEAL",
        bounds=SHARED_PARTS,
    ),
    Mutant(
        name="a rank asks for what it wants before it is drawn",
        module="rounds",
        old="    if config.shared_samples is None:\n        return compute_wanted_samples",
        new="    if True:\n        return compute_wanted_samples",
        property="DEAL",
        bounds=SHARED,
    ),
    # Budgets that change.
    Mutant(
        name="the ranks agree on the largest budget, not on the least",
        module="offer",
        old='budget_min: int = field(default=NONE, metadata={"reduction": Reduction.MIN, "absent": NONE})',
        new='budget_min: int = field(default=NONE, metadata={"reduction": Reduction.MAX, "absent": NONE})',
        property="BUDGET",
        bounds=TOLD,
    ),
    Mutant(
        name="a rank groups by what it alone accepts",
        module="rounds",
        old="config.compute_round_bounds(state.agreed_tokens)",
        new="config.compute_round_bounds(min(state.agreed_tokens, state.accepted_tokens))",
        property="FEWEST",
        bounds=TOLD,
    ),
    Mutant(
        name="a budget holds from the round that agrees on it",
        module="machine",
        old="    aligned, carried = form_steps(config, state, compute_round_target(config, agreement))\n",
        new="    bounds = config.compute_round_bounds(agreement.budget_min)\n"
        "    groups = config.order.compute_groups(state.window, config.layout, *bounds)\n"
        "    aligned, carried = form_steps(config, replace(state, groups=groups), compute_round_target(config, agreement))\n",
        property="REPLAY",
        bounds=TOLD,
    ),
    Mutant(
        name="the budget agreed on is not kept",
        module="machine",
        old="        agreed_tokens=agreement.budget_min,\n",
        new="",
        property="BUDGET",
        bounds=TOLD,
    ),
    Mutant(
        name="a budget that was lowered never rises",
        module="machine",
        old="        agreed_tokens=agreement.budget_min,\n",
        new="        agreed_tokens=min(state.agreed_tokens, agreement.budget_min),\n",
        property="FEWEST",
        bounds=TOLD,
    ),
    Mutant(
        name="a rank offers the budget in force, not the one it accepts",
        module="rounds",
        old="budget_min=state.accepted_tokens",
        new="budget_min=state.agreed_tokens",
        property="BUDGET",
        bounds=TOLD,
    ),
    Mutant(
        name="the first round has the largest budget, whatever the schedule says",
        module="resume",
        old="        agreed_tokens=start.agreed_tokens,\n",
        new="",
        property="BUDGET",
        bounds=TIMED,
    ),
    Mutant(
        name="a schedule overrides what the rank was told",
        module="batching.budgets",
        old="min(self.budget_tokens, self.told_tokens, self.scheduled_tokens)",
        new="min(self.budget_tokens, self.told_tokens if self.schedule is None else self.scheduled_tokens)",
        property="BUDGET",
        bounds=TIMED,
    ),
    Mutant(
        name="a schedule is asked at the start only",
        module="batching.budgets",
        old="        if self.schedule is None:\n            return self\n",
        new="        if self.schedule is None or planned_steps:\n            return self\n",
        property="BUDGET",
        bounds=TIMED,
    ),
    Mutant(
        name="a schedule is answered one step late",
        module="batching.budgets",
        old="self.steps_before + planned_steps, min",
        new="self.steps_before + max(0, planned_steps - 1), min",
        property="BUDGET",
        bounds=TIMED,
    ),
    Mutant(
        name="a sample slips into the next update",
        module="rounds",
        old="    target = compute_checked_target(config.rule, agreement, is_update=is_update)\n",
        new="    target = max(1, agreement.groups_max - 1)\n",
        property="UPDATE",
        bounds=UPDATES,
    ),
    Mutant(
        name="an update has the steps of the rank with the fewest groups",
        module="rounds",
        old="is_all = state.is_ended or config.update_samples is not None",
        new="is_all = state.is_ended or not config.has_steps(state.round)",
        property="FEWEST",
        bounds=UPDATES,
    ),
    Mutant(
        name="an epoch closes with an update without a good sample",
        module="rounds",
        old="        held = max(1, held)",
        new="        held = max(0, held)",
        property="DEAL",
        bounds=BAD_UPDATES,
    ),
    Mutant(
        name="a short read pulls from the next update",
        module="machine",
        old="wanted_samples=0 if event.is_ended or event.is_full else state.wanted_samples - len(samples),",
        new="wanted_samples=0 if event.is_ended else state.wanted_samples - len(samples),",
        property="FREE",
        bounds=BAD_UPDATES,
    ),
    Mutant(
        name="the places of an update are counted by what was good",
        module="rounds",
        old="config.compute_update_place(round_ // config.update_rounds)",
        new="config.compute_update_place(round_ // config.update_rounds) - (round_ > 1)",
        property="DEAL",
        bounds=BAD_UPDATES,
    ),
    Mutant(
        name="each rank reads as much as a whole update holds",
        module="rounds",
        old="max(0, config.compute_window_samples(round_) - carried)",
        new="max(0, (config.update_samples or 0) - carried)",
        property="UPDATE",
        bounds=UPDATES,
    ),
    Mutant(
        name="a portion is emitted by itself",
        module="rounds",
        old="window = state.window if config.has_steps(state.round) else ()",
        new="window = state.window",
        property="UPDATE",
        bounds=DEALT,
    ),
    Mutant(
        name="a rank takes its own load for more than the others do",
        module="batching.updates",
        old="compute_portion_shares(loads, drawn - begin, portion)\n",
        new="compute_portion_shares([3 * x if i == rank else x for i, x in enumerate(loads)], drawn - begin, portion)\n",
        property="DEAL",
        bounds=DEALT,
    ),
    Mutant(
        name="a group of an update holds any padding",
        module="rounds",
        old="padding = config.compute_most_padding(budget_tokens)",
        new="padding = budget_tokens",
        property="BUDGET",
        bounds=replace(UPDATES, lengths=((1, 2), (2, 1))),
    ),
    Mutant(
        name="a portion goes beyond its update",
        module="rounds",
        old="        end=min(begin + config.update_samples, total),\n",
        new="        end=total,\n",
        property="UPDATE",
        bounds=DEALT,
    ),
)

PLANTED = (
    "what is carried is dropped",
    "an idle step uses up the slot of a group",
    "the epoch closes when the first rank runs dry",
    "a rank says that it is ready before it has collated",
    "a failure is not agreed on: the rank ends alone",
)
"""The defects that random schedules must find, too, within seconds."""
