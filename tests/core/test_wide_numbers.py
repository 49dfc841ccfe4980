"""No number is truncated to fewer bits, no field of several is left out, and shortcuts have limits: slips that small worlds do
not show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from odb_ref.core.batching.alignment import align
from odb_ref.core.batching.grouping import compute_groups, compute_sized_groups
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.shards import compute_draw
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.batching.updates import compute_portion
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Post, PostCounts, Read
from odb_ref.core.errors import InvariantError, PeerError
from odb_ref.core.events import Agreed, Collated, SamplesRead, StepTaken
from odb_ref.core.exchange import combine_posts
from odb_ref.core.invariants import check_transition
from odb_ref.core.machine import Machine, transition
from odb_ref.core.offer import NONE, WIRE_SIZE, Offer, reduce_offers
from odb_ref.core.peers import POST_SIZE, settle
from odb_ref.core.resume import Checkpoint, Ledger, RoundStart
from odb_ref.core.state import Phase, State
from odb_ref.core.types import Mode, Sample, Step, StepCounts
from tests.helpers.sizes import draw_size, draw_text
from tests.helpers.world import make_offer

CONFIG = Config(
    rank=0, world_size=2, budget_tokens=12, window_samples=4, ramp_rounds=0, max_age_rounds=2, order=StepOrder.FULLEST
)
"""The order is the same in every round. That of shuffled steps would not be."""
SHARDS = [[(i * i + 5 * rank) % 11 + 1 for i in range(23 - 9 * rank)] for rank in range(2)]
FAR = {"position": 2**40, "round": 2**33, "number": 2**41, "samples": 2**45}
"""How much later a run begins."""


def run(by: dict[str, int], mode: Mode) -> Iterator[tuple[int, Effect]]:
    """Resumes two ranks somewhere, and yields each effect in turn. Every request is answered at once."""
    quota = 5 + by["samples"] + 18 if mode is Mode.QUOTA else None
    start = RoundStart(
        round=3 + by["round"],
        read_samples=7 + by["position"],
        marks=(6 + by["position"], 7 + by["position"]),
        planned_steps=5 + by["number"],
        global_samples=5 + by["samples"],
    )
    machines = [
        Machine(replace(CONFIG, rank=rank, mode=mode, quota_samples=quota, depth_steps=1 + rank)) for rank in range(2)
    ]
    sources = [iter(enumerate(shard, start.read_samples)) for shard in SHARDS]
    waiting: list[tuple[int, Effect]] = []
    posts: dict[int, Post] = {}
    for rank, machine in enumerate(machines):
        waiting += [(rank, effect) for effect in machine.begin(start)]
    while waiting:
        rank, effect = waiting.pop(0)
        yield rank, effect
        machine = machines[rank]
        new: tuple[Effect, ...] = ()
        match effect:
            case Read():
                rows = [row for _, row in zip(range(effect.count), sources[rank], strict=False)]
                read = tuple(Sample(position, position, length, length) for position, length in rows)
                new = machine.handle(SamplesRead(read, len(read) < effect.count))
            case Collate():
                new = machine.handle(Collated(effect.round))
            case Deliver():
                new = machine.handle(StepTaken())
            case _ if isinstance(effect, Post):
                posts[rank] = effect
                if len(posts) == 2:
                    answer = combine_posts([posts.pop(0), posts.pop(1)])
                    for other in range(2):
                        waiting += [(other, item) for item in machines[other].handle(answer)]
            case _:
                pass
        waiting += [(rank, item) for item in new]


def move(value: object, by: dict[str, int]) -> object:
    """Returns the value as it is in a run that begins later by ``by``."""
    match value:
        case Sample():
            return replace(value, id=value.id + by["position"], position=value.position + by["position"])
        case Offer():
            return replace(value, round_min=value.round_min + by["round"], round_max=value.round_max + by["round"])
        case Step():
            moved = replace(value, number=value.number + by["number"], round=value.round + by["round"])
            return replace(moved, group=move(value.group, by))
        case Collate():
            return Collate(value.round + by["round"], tuple(move(step, by) for step in value.steps))  # type: ignore[misc]
        case StepCounts():
            return value
        case tuple():
            return tuple(move(item, by) for item in value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            moved_fields = {item.name: move(getattr(value, item.name), by) for item in fields(value)}
            if "step_limit" in moved_fields and value.step_limit != NONE:  # type: ignore[attr-defined]
                moved_fields["step_limit"] = value.step_limit + by["number"]  # type: ignore[attr-defined]
            return replace(value, **moved_fields)
        case _:
            return value


@pytest.mark.parametrize("mode", list(Mode))
def test_a_run_that_begins_far_on_is_the_same_run_moved(mode: Mode) -> None:
    """Positions, rounds, steps and samples exceed 32 bits. Nothing depends on where an epoch is, only on how far it goes."""
    near = list(run(dict.fromkeys(FAR, 0), mode))
    far = list(run(FAR, mode))
    assert len(near) > 40
    assert any(isinstance(effect, PostCounts) for _, effect in near)
    assert [(rank, strip(effect)) for rank, effect in far] == [
        (rank, strip(move(effect, FAR))) for rank, effect in near
    ]


def strip(effect: object) -> object:
    """Removes the fingerprint, which depends on the quota."""
    offer = getattr(effect, "offer", None)
    return effect if offer is None else replace(offer, fingerprint_min=0, fingerprint_max=0)


def test_what_is_carried_of_a_great_window_is_in_sampler_order() -> None:
    """Spec: R4.1. Checks: CONSERVE."""
    draw = random.Random(5)
    samples = [Sample(0, position, draw.randint(1, 50), 0) for position in range(2**16 - 700, 2**16 + 700)]
    aligned, carried = align(compute_groups(samples, 60), 20, 0)
    assert len(carried) > 1000
    assert [item.position for item in carried] == sorted(item.position for item in carried)
    assert len(carried) + sum(map(len, aligned)) == len(samples)


@pytest.mark.parametrize("place", range(5))
def test_each_of_five_limits_is_kept(place: int) -> None:
    """Spec: R2.1. Checks: BUDGET."""
    costs = tuple(3 if i == place else 0 for i in range(5))
    samples = [Sample(0, position, 1, 0, costs) for position in range(4)]
    limits = tuple(7 if i == place else 9 for i in range(5))
    assert [len(group) for group in compute_groups(samples, 100, limits)] == [2, 2]
    config = replace(CONFIG, limits=limits, budget_tokens=100)
    group = tuple(samples[:3])
    with pytest.raises(InvariantError, match="I6"):
        _check_aligned(config, group)
    _check_aligned(config, group[:2])


def _check_aligned(config: Config, group: tuple[Sample, ...]) -> None:
    before = State(phase=Phase.OFFER, read_samples=len(group), window=group)
    after = State(phase=Phase.COUNT, read_samples=len(group), aligned=(tuple(reversed(group)),))
    check_transition(config, before, after)


WIDE = [*range(1, 80), *(2**bits + more for bits in (8, 15, 16, 31, 32, 40) for more in (0, 1))]


@pytest.mark.parametrize(
    "name", ["budget_tokens", "window_samples", "max_age_rounds", "ramp_rounds", "quota_samples", "world_size"]
)
def test_each_value_of_a_shared_setting_has_a_fingerprint_of_its_own(name: str) -> None:
    """Spec: R1.4."""
    base = replace(CONFIG, mode=Mode.QUOTA)
    assert len({replace(base, **{name: value}).fingerprint for value in WIDE}) == len(WIDE)


def test_each_limit_enters_the_fingerprint() -> None:
    """Spec: R1.4."""
    settings = [tuple(2 if i == place else 1 for i in range(size)) for size in range(6) for place in range(size)]
    assert len({replace(CONFIG, limits=limits).fingerprint for limits in settings}) == len(settings)


def test_what_is_given_is_left_as_it_is() -> None:
    """Callers continue to use these lists: what crosses the wire, wants and loads, posts, samples that are read."""
    samples = [Sample(i, i, 5 * i % 7 + 1, 0, (i % 3,)) for i in range(20, 0, -1)]
    uses: list[tuple[list[Any], Callable[[list[Any]], object]]] = [
        (list(range(POST_SIZE)), settle),
        (list(range(WIRE_SIZE)), Offer.from_wire),
        ([7, 2, 9], lambda wants: compute_draw(1, wants, 5, 15)),
        ([7, 2, 9], lambda loads: compute_portion(1, loads, 20, begin=9, end=90, is_last=False)),
        ([PostCounts((StepCounts(1, 2, 3),)), PostCounts((StepCounts(4, 5, 6),))], combine_posts),
        *((samples, lambda own, name=order: name.compute_groups(own, Layout.PADDED, 20, (4,))) for order in StepOrder),
        (samples, lambda own: Layout.PACKED.compute_groups(own, 20, (4,))),
    ]
    for given, use in uses:
        kept = list(given)
        use(given)
        assert given == kept, use


def test_each_letter_of_a_tag_enters_the_fingerprint() -> None:
    """Spec: R1.4."""
    draw = random.Random(8)
    for _ in range(100):
        text = draw_text(draw)
        place = draw.randrange(len(text))
        tags = ("", text, text[:place] + "-" + text[place + 1 :], text[:-1] + "-", text + " ", "-" + text)
        assert len({replace(CONFIG, tag=tag).fingerprint for tag in tags}) == len(set(tags)), (len(text), place)


@pytest.mark.parametrize("round_", [2, 4])
def test_an_agreement_of_the_round_before_is_refused_as_one_of_the_next_is(round_: int) -> None:
    """Spec: R5.3."""
    machine = Machine(replace(CONFIG, world_size=1))
    (read,) = machine.begin(RoundStart(round=3))
    assert read == Read(4)
    (post,) = machine.handle(SamplesRead((), True))
    offer = replace(post.offer, round_min=round_, round_max=round_)  # type: ignore[union-attr]
    with pytest.raises(PeerError, match=f"agreement in round 3, field round_min: {round_}"):
        transition(machine.config, machine.state, Agreed(offer))


# The limits of shortcuts: what only large windows and many bounds show. -------------------------------------------------------


@pytest.mark.parametrize("samples", [65, 130, 300, 1_000])
def test_a_friendly_group_is_found_among_any_number(samples: int) -> None:
    """Spec: R2.8."""
    window = [Sample(i, i, 1, 0) for i in range(samples)]
    for sizes in (Sizes.EVEN, Sizes.THREES, Sizes.POWERS):
        (first, *_) = compute_sized_groups(window, sizes, 10_000)
        assert len(first) == sizes.round_down(samples)


def test_any_number_of_samples_is_split_in_the_middle() -> None:
    """Spec: R4.2."""
    assert [Sizes.ANY.find_middle(size) for size in range(2, 1_000)] == [-(-size // 2) for size in range(2, 1_000)]


def test_an_agreement_is_of_all_ranks_however_many() -> None:
    """Spec: R3.2."""
    offers = [make_offer(samples=rank) for rank in range(100)]
    agreement = reduce_offers(offers)
    assert (agreement.samples_min, agreement.samples_max) == (0, 99)
    assert reduce_offers(offers[::-1]) == agreement


def test_a_checkpoint_knows_what_is_taken_however_much_that_is() -> None:
    """Spec: R10.3. Checks: ONCE, RESUME. Many carried samples, steps of many samples, rounds of many steps."""
    draw = random.Random(9)
    for _ in range(30):
        read, ahead = draw_size(draw, 2**14), draw_size(draw, 2**14)
        carried = sorted(draw.sample(range(read), draw_size(draw, read)))
        start = RoundStart(round=5, read_samples=read, carried=tuple(carried), planned_steps=7)
        window = [*carried, *range(read, read + ahead)]
        taken = draw.sample(window, draw_size(draw, len(window)))
        ledger = Ledger()
        for round_ in range(draw_size(draw, 40)):
            ledger.note_round(RoundStart(round=round_))
        ledger.note_round(start)
        cuts = sorted(draw_size(draw, len(taken)) for _ in range(draw_size(draw, 200)))
        for number, (begin, end) in enumerate(pairwise((0, *cuts, len(taken))), 7):
            ledger.note_taken(number, taken[begin:end])
        point = ledger.compute_checkpoint()
        assert point == Checkpoint(start=start, taken_steps=len(cuts) + 1, taken=tuple(taken))
        rest = set(range(read + ahead + 9)) - set(range(read)).difference(carried) - set(taken)
        assert point.compute_rest(read + ahead + 9) == sorted(rest)
        places = draw.choices(range(read + ahead + 9), k=20)
        assert [point.is_taken(place) for place in places] == [place not in rest for place in places]
