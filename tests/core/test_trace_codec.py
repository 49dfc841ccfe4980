"""The trace codec reads back what it wrote, for every event, and effects identify samples by position."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.effects import (
    Collate,
    Deliver,
    Effect,
    Finish,
    Outcome,
    OutcomeKind,
    PostCounts,
    PostOffer,
    PostReport,
    Read,
)
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
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.types import Sample, Step, StepCounts
from odb_ref.trace.format import decode_event, encode_effect, encode_event
from tests.helpers.effort import IS_MUTATED

N = st.integers(0, 2**40)
# All of Unicode takes seconds to set up, more than all other tests of a mutant.
TEXT = st.text('a"\\\n\0é\u2028') if IS_MUTATED else st.text()
OFFERS = st.builds(Offer, **{item.name: N | st.just(NONE) for item in fields(Offer)})
SAMPLES = st.builds(Sample, N, N, N, N, st.lists(N, max_size=2).map(tuple))
COUNTS = st.lists(st.builds(StepCounts, N, N, N, st.lists(N, max_size=2).map(tuple)), max_size=4).map(tuple)
REPORTS = st.builds(Report, N, TEXT, N, TEXT)
EVENTS: dict[type, st.SearchStrategy[Event]] = {
    SamplesRead: st.builds(SamplesRead, st.lists(SAMPLES, max_size=4).map(tuple), st.booleans(), st.booleans()),
    Collated: st.builds(Collated, N),
    Agreed: st.builds(Agreed, OFFERS),
    Counted: st.builds(Counted, COUNTS),
    Reported: st.builds(Reported, st.lists(REPORTS, max_size=3).map(tuple)),
    StepTaken: st.just(StepTaken()),
    ConsumerStopped: st.just(ConsumerStopped()),
    LocalFailed: st.builds(LocalFailed, TEXT),
    Urged: st.just(Urged()),
    PeerLost: st.builds(PeerLost, st.none() | N, TEXT),
    BudgetAccepted: st.builds(BudgetAccepted, N),
}


def test_every_event_has_a_strategy() -> None:
    assert set(get_args(Event)) == EVENTS.keys()


@pytest.mark.parametrize("kind", EVENTS)
@given(data=st.data())
def test_an_event_is_read_back_through_json(kind: type, data: st.DataObject) -> None:
    event = data.draw(EVENTS[kind])
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


STEP = Step(3, 1, (Sample(70, 7, 5, 2), Sample(40, 4, 3, 1)), StepCounts(4, 9, 6))
REPORT = Report(1, "why", 2, "{}")
OFFER = Offer(**{item.name: index for index, item in enumerate(fields(Offer))})
EFFECTS: dict[type, tuple[Effect, object]] = {
    Read: (Read(5), {"kind": "read", "count": 5}),
    PostOffer: (
        PostOffer(OFFER),
        {"kind": "post_offer", "offer": {item.name: index for index, item in enumerate(fields(Offer))}},
    ),
    PostCounts: (PostCounts((StepCounts(1, 2, 3),)), {"kind": "post_counts", "counts": [[1, 2, 3]]}),
    PostReport: (
        PostReport(REPORT),
        {"kind": "post_report", "report": {"rank": 1, "cause": "why", "round": 2, "config": "{}"}},
    ),
    Collate: (
        Collate(1, (STEP,)),
        {"kind": "collate", "round": 1, "steps": [{"number": 3, "positions": [7, 4], "counts": [4, 9, 6]}]},
    ),
    Deliver: (Deliver(STEP), {"kind": "deliver", "number": 3}),
    Finish: (
        Finish(Outcome(OutcomeKind.FAILED, 1, "why"), 4),
        {"kind": "finish", "outcome": {"kind": "failed", "rank": 1, "cause": "why"}, "step_limit": 4},
    ),
}


@pytest.mark.parametrize("kind", get_args(Effect))
def test_an_effect_is_written_as_the_format_says(kind: type) -> None:
    effect, expected = EFFECTS[kind]
    assert json.loads(json.dumps(encode_effect(effect))) == expected
