"""R5: what `tests/core/test_transitions.py` does not show about single transitions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odb_ref.core.effects import OutcomeKind
from odb_ref.core.errors import PeerError, UsageError
from odb_ref.core.events import (
    Agreed,
    SamplesRead,
)
from odb_ref.core.machine import start, transition
from odb_ref.core.offer import NONE
from odb_ref.core.state import Phase
from tests.helpers.world import make_config, make_shard, run

CONFIG = make_config(window_samples=2)
SHARD = make_shard([8, 7])


def test_a_read_ends_where_the_window_is_full() -> None:
    """Spec: R2.3, R5.1."""
    begun, _ = start(CONFIG)
    full, (post,) = transition(CONFIG, begun, SamplesRead(SHARD[:1], is_full=True))
    assert (full.wanted_samples, full.is_ended, post.offer.groups_min) == (0, False, 1)
    state, _ = transition(CONFIG, begun, SamplesRead(SHARD[:1]))
    assert transition(CONFIG, state, SamplesRead((), is_full=True)) == (full, (post,))
    for event in (
        SamplesRead(SHARD[:2], is_full=True),  # nothing is left out
        SamplesRead(SHARD[:1], is_ended=True, is_full=True),
        SamplesRead((), is_full=True),  # nothing is held
    ):
        with pytest.raises(UsageError, match="SamplesRead is full, but"):
            transition(CONFIG, begun, event)


def test_an_agreement_is_judged_in_the_order_of_the_rule() -> None:
    """Spec: R5.3, R7.4. Failure, then mismatch, then a wrong round, then stop, then not ready, then closing."""
    state, (post,) = transition(CONFIG, start(CONFIG)[0], SamplesRead(SHARD))
    own = post.offer
    everything = replace(
        own, failed_rank=0, stop_rank=0, stop_step=0, ready_min=0, samples_max=0, round_min=9, round_max=9
    )
    assert transition(CONFIG, state, Agreed(everything))[0].phase is Phase.REPORT
    unfailed = replace(everything, failed_rank=NONE)
    with pytest.raises(PeerError, match="round_min"):
        transition(CONFIG, state, Agreed(unfailed))
    assert transition(CONFIG, state, Agreed(replace(unfailed, round_min=0)))[0].phase is Phase.REPORT
    in_round = replace(unfailed, round_min=0, round_max=0)
    outcome = transition(CONFIG, state, Agreed(in_round))[0].outcome
    assert outcome.kind is OutcomeKind.STOPPED
    with pytest.raises(PeerError, match="ready_min"):
        transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE)))
    closing = transition(CONFIG, state, Agreed(replace(in_round, stop_rank=NONE, stop_step=NONE, ready_min=1)))[0]
    assert closing.outcome.kind is OutcomeKind.COMPLETE


def test_an_urge_frees_a_rank_whose_consumer_waits_for_one_that_left() -> None:
    """Spec: R5.9. Checks: FREE, STOP."""
    shards = [[8] * 6, [8] * 6]
    free = stuck = 0
    for seed in range(40):
        options = {"seed": seed, "stops": {0: 1}}
        config = make_config(depth_steps=1)
        free += run(shards, config, **options).is_over
        stuck += not run(shards, config, **options, is_urging=False).is_over
    assert free == 40
    assert stuck > 0
