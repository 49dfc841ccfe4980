"""R2.6, R4.8, R4.9: the order in which the steps of a round follow each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder, mix, permute
from odb_ref.core.batching.rules import get_rule
from odb_ref.core.types import Mode
from tests.helpers.world import World, make_config, make_shards, run

SHARDS = st.lists(st.lists(st.integers(1, 10), max_size=14), min_size=1, max_size=4)


def test_the_hash_is_that_of_splitmix64() -> None:
    """Spec: R4.9. The first numbers of the published generator, which adds its constant once for each."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix(i * gamma) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(2**64 - gamma) == 0


def test_some_permutations() -> None:
    """Spec: R4.9. Other implementations can compare with them."""
    assert permute(8, 0, 0) == (0, 1, 6, 3, 5, 4, 2, 7)
    assert permute(8, 0, 1) == (3, 0, 1, 5, 2, 7, 4, 6)
    assert permute(8, 20, 3) == (4, 1, 2, 6, 5, 3, 0, 7)
    assert permute(0, 5, 5) == () and permute(1, 5, 5) == (0,)


@given(st.integers(0, 300), st.integers(0, 2**64), st.integers(0, 2**20))
def test_a_permutation_has_each_number_once(count: int, seed: int, round_: int) -> None:
    """Spec: R4.9."""
    assert sorted(permute(count, seed, round_)) == list(range(count))


def test_every_step_may_come_first() -> None:
    """Spec: R4.9. In 600 rounds with 6 steps, each comes first about 100 times."""
    firsts = [permute(6, 1, round_)[0] for round_ in range(600)]
    assert all(70 <= firsts.count(number) <= 130 for number in range(6))


@given(SHARDS, st.integers(0, 99), st.sampled_from(Layout))
def test_shuffled_steps_are_the_fullest_first_ones_in_another_order(
    lengths: list[list[int]], seed: int, layout: Layout
) -> None:
    """Spec: R4.8. Checks: ALIGN, COVER, ORDER. As steps of all ranks, with none idle on any rank."""
    rounds = []
    for order in (StepOrder.FULLEST, StepOrder.SHUFFLED):
        world = run(lengths, make_config(order=order, order_seed=seed, layout=layout), seed=seed)
        steps: dict[int, list[tuple[tuple[int, ...], ...]]] = {}
        for each in zip(*(node.taken for node in world.nodes), strict=True):
            meeting = tuple(tuple(sample.position for sample in step.group) for step in each)
            steps.setdefault(each[0].round, []).append(meeting)
        rounds.append(steps)
    for fullest, shuffled in zip(*(steps.values() for steps in rounds), strict=True):
        if all(map(all, fullest)):
            assert shuffled == [fullest[number] for number in permute(len(fullest), seed, _find(rounds[0], fullest))]
        for rank in range(len(lengths)):
            assert sorted(step[rank] for step in shuffled) == sorted(step[rank] for step in fullest)


def _find(steps: dict[int, list[tuple[tuple[int, ...], ...]]], wanted: object) -> int:
    return next(round_ for round_, found in steps.items() if found is wanted)


@given(SHARDS, st.sampled_from(StepOrder))
def test_idle_steps_come_last(lengths: list[list[int]], order: StepOrder) -> None:
    """Spec: R4.8. Checks: COVER. The lemma IDLE-LAST."""
    world = run(lengths, make_config(order=order))
    for node in world.nodes:
        is_idle = [step.is_idle for step in node.taken]
        assert is_idle == sorted(is_idle)


@given(SHARDS, st.sampled_from(Layout), st.sampled_from(Mode), st.integers(1, 3), st.sampled_from(("odb", "paper")))
def test_no_sample_leaves_in_a_later_step_than_one_behind_it(
    lengths: list[list[int]], layout: Layout, mode: Mode, age: int, rule: str
) -> None:
    """Spec: R2.6, R4.1, R4.8. Checks: ORDER. This holds whatever is carried, split, cut or due."""
    config = make_config(order=StepOrder.SAMPLER, layout=layout, mode=mode, max_age_rounds=age, rule=get_rule(rule))
    for node in World(config, make_shards(lengths), seed=age).run().nodes:
        assert [sample.position for sample in node.trained] == list(range(len(node.trained)))
