"""R10: resume after any taken step."""

from __future__ import annotations

import pytest

from odb_ref.core.config import Config
from odb_ref.core.types import Mode
from tests.helpers.world import World, make_config, make_shards

SHARDS = [[3, 4, 1, 9, 2, 8, 8, 1, 1, 5], [2], [], [5, 1, 5, 2, 7, 7, 3]]
CONFIGS = [
    make_config(),
    make_config(depth_steps=1, ramp_rounds=2, window_samples=6, max_age_rounds=1),
    make_config(limits=(4,)),
    make_config(mode=Mode.QUOTA, window_samples=2),
    make_config(tag="quota 9", mode=Mode.QUOTA, quota_samples=5, window_samples=3),
]
QUOTA_SHARDS = [[3, 4, 1, 9, 2, 8], [2, 8, 8, 8], [1, 1, 1, 8, 8]]


@pytest.mark.parametrize("config", CONFIGS, ids=["join", "ramp and age", "limit", "quota", "quota cut"])
def test_going_on_after_any_step_gives_the_same_steps(config: Config) -> None:
    """Spec: R10, R10.1, R10.2. Checks: RESUME, REPLAY."""
    lengths = SHARDS if config.mode is Mode.JOIN else QUOTA_SHARDS
    costs = [[(length % 4,) * len(config.limits) for length in shard] for shard in lengths]
    shards = make_shards(lengths, costs)
    whole = World(config, shards).run()
    total = len(whole.nodes[0].taken)
    assert total > 3 or config.mode is Mode.QUOTA
    for count in range(total + 1):
        stops = dict.fromkeys(range(len(shards)), count)
        checkpoints = World(config, shards, seed=count, stops=stops).run().save()
        rest = World(config, shards, seed=99 - count, checkpoints=checkpoints).run()
        assert rest.is_over
        for rank, node in enumerate(rest.nodes):
            skipped = checkpoints[rank].taken_steps
            again = [sample.position for step in node.taken[:skipped] for sample in step.group]
            assert again == [*checkpoints[rank].taken]
            assert node.taken[skipped:] == whole.nodes[rank].taken[count:]


def test_a_checkpoint_tells_another_world_size_what_was_taken() -> None:
    """Spec: R10.3. Checks: RESUME, ONCE, COVER."""
    shards = make_shards(SHARDS)
    total = len(World(make_config(), shards).run().nodes[0].taken)
    for count in range(total + 1):
        world = World(make_config(), shards, seed=count, stops=dict.fromkeys(range(4), count)).run()
        for node, checkpoint in zip(world.nodes, world.save(), strict=True):
            taken = {sample.position for sample in node.trained}
            assert {sample.position for sample in node.shard if checkpoint.is_taken(sample.position)} == taken
