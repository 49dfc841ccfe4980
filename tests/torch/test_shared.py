"""R14 in real processes: all ranks draw from one order of a map-style data set."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.core.batching.shards import Draw
from odb_ref.core.errors import UsageError
from odb_ref.core.resume import RoundStart
from odb_ref.torch.reading.datasets import KeyFeed
from odb_ref.torch.reading.quarantine import Places, Quarantine
from odb_ref.torch.reading.service import ReadPlan
from odb_ref.trace.check import Property, Status, check_traces
from tests.torch import data
from tests.torch.data import Numbers, Stream, check_goes_on, list_numbers, read, take
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks

COUNT = 101
make_loader = partial(data.make_loader, window=9, shuffle=True, shard="shared")
QUARANTINE: dict[str, Any] = {"on_bad_sample": "quarantine", "ramp_rounds": 0}
"""Without windows of a single sample, in which a bad one would be everything."""
SPOILT = (3, 17, 50, 51, 90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (3, {}),
        (3, {"num_workers": 2}),
        (2, {"num_workers": 1, "persistent_workers": True, "layout": "packed", "token_budget": 90}),
        (2, {"transport": "gather", "shuffle": False, "window": 200}),
        (4, {"num_workers": 2, "window": 1, "ramp_rounds": 0}),
    ],
)
def test_the_ranks_of_a_job_read_each_sample_once(world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Spec: R14, R14.2, R14.4. Checks: DEAL, COVER, ONCE, ALIGN. By what the trainers get, and by the traces."""

    def read_epochs(rank: int) -> list[Any]:
        with make_loader(Numbers(0, COUNT), trace=f"{tmp_path}/{{rank}}.{{epoch}}", **options) as loader:
            return [read(loader) for _ in range(2)]

    values = get_values(run_ranks(world_size, read_epochs))
    for epoch in range(2):
        ranks = [value[epoch] for value in values]
        assert sorted(list_numbers(*ranks)) == list(range(COUNT))
        assert len({len(steps) for steps in ranks}) == 1
    verdict = check_traces(sorted(tmp_path.iterdir()), is_replayed=True)
    assert verdict.is_ok, verdict.violations
    assert all(job.get_status(Property.DEAL) is Status.HOLDS for job in verdict.jobs)


def read_spoilt(rank: int, options: dict[str, Any], limit: int) -> Any:
    """Returns everything that is read, with a restart after ``limit`` steps, and what was set aside."""
    make = partial(make_loader, Numbers(0, COUNT, bad=SPOILT, fault="raise"), **QUARANTINE, **options)
    steps, state = data.save(make(), limit)
    with make(state=state) as loader:
        return list_numbers(steps, read(loader)), {bad.index for bad in loader.quarantined}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 4, 9])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_bad_samples_are_set_aside_by_who_draws_them(options: dict[str, Any], limit: int) -> None:
    """Spec: R11.1, R11.3, R14.4, R14.6. Checks: RESUME, COVER, ONCE."""
    values = get_values(run_ranks(3, read_spoilt, options, limit))
    taken = [number for numbers, _ in values for number in numbers]
    assert sorted(taken) == [number for number in range(COUNT) if number not in SPOILT]
    assert sorted(index for _, bad in values for index in bad) == [*SPOILT]


def test_a_window_of_bad_samples_ends_the_epoch_by_name() -> None:
    """Spec: R14.5, R11.2. Checks: ABORT. It neither ends silently, nor counts as the end of the order."""

    def read_a_bad_window(rank: int) -> None:
        # The first window of rank 1 holds the places 4 to 7, and all of them are bad.
        samples = Numbers(0, 40, bad=range(4, 8), fault="raise")
        take(make_loader(samples, shuffle=False, window=4, max_bad_samples=9, **QUARANTINE))

    results = run_ranks(2, read_a_bad_window)
    check_errors(results, "all samples of a window are bad", "shard='shared'", "window=", "ramp_rounds=0", rank=1)
    assert results[0].text == results[1].text


def test_a_sample_that_cannot_be_read_ends_all_ranks() -> None:
    """Spec: R7.2. Checks: ABORT."""

    def read_a_failure(rank: int, workers: int) -> None:
        take(make_loader(Numbers(0, COUNT, bad=40, fault="raise"), num_workers=workers))

    for results in run_each(2, read_a_failure, [(0,), (2,)]):
        check_errors(results, "bad row 40")


def test_a_rank_goes_on_in_a_round_for_which_it_has_drawn_nothing() -> None:
    """Spec: R14.6. Checks: RESUME, COVER, ONCE. Near the end of the order some ranks hold no sample, and draw none."""

    def resume_after_each_step(rank: int, count: int) -> Any:
        options = {"window": 2, "token_budget": 30, "on_bad_sample": "quarantine"}
        return check_goes_on(lambda: make_loader(Numbers(0, count), **options), None)

    counts = (5, 7, 13)
    for count, results in zip(counts, run_each(2, resume_after_each_step, zip(counts)), strict=True):
        values = get_values(results)
        assert sorted(list_numbers(*values)) == list(range(count))
        assert len(values[0]) > 1


def test_what_has_no_common_order_is_refused() -> None:
    """Spec: R14.1."""
    with pytest.raises(UsageError, match="shard='shared' needs a map-style data set"):
        make_loader(Stream(0, 9), shuffle=False)
    with pytest.raises(UsageError, match="shard='shared' with a sampler needs update_samples"):
        make_loader(shuffle=False, sampler=[1, 2])


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.booleans(), st.randoms(use_true_random=False))
def test_places_are_those_of_what_is_neither_left_out_nor_skipped(
    left_out: set[int], bad: set[int], is_drawn: bool, rng: Any
) -> None:
    """Spec: R11.1, R14.4. This holds for any order in which they are skipped."""
    places = Places(5, 0, left_out=left_out, is_drawn=is_drawn)
    cuts = sorted(rng.sample(range(31), 3))
    for begin, end in pairwise([0, *cuts, 31]):
        places.draw(range(begin, end))
    skipped = sorted(bad - left_out, key=lambda _: rng.random())
    for place in skipped:
        places.skip(place)
    good = [place for place in range(31) if place not in left_out | bad]
    assert [places.get_place(position) for position in range(5, 5 + len(good))] == good
    assert [places.get_position(place) for place in good] == list(range(5, 5 + len(good)))


def test_places_go_on_with_those_of_a_round() -> None:
    """Spec: R11.3, R14.6. Samples 0 to 8 come before place 40, 5 is carried, and the round has drawn two places or none."""
    for count in (0, 2):
        start = RoundStart(read_samples=9, carried=(5,), draw=Draw(40, count, 60))
        places = Places.resume(start, (22,), ())
        assert places.end == 40 + count
        places.draw(range(60, 61))
        assert (places.get_place(5), places.get_position(22)) == (22, 5)
        assert [places.get_place(position) for position in range(9, 10 + count)] == [*range(40, 40 + count), 60]


def test_places_of_an_order_that_has_ended_are_those_carried() -> None:
    """Spec: R14.6. The draw is that of an earlier round, from which two samples are left."""
    start = RoundStart(read_samples=9, carried=(5, 7), is_ended=True, draw=Draw(40, 5, 45))
    places = Places.resume(start, (42, 44), ())
    assert [places.get_place(position) for position in (5, 7)] == [42, 44]
    assert [places.get_position(place) for place in (42, 44)] == [5, 7]


def test_a_quarantine_counts_what_is_drawn() -> None:
    """Spec: R11.1, R14.4."""
    quarantine = Quarantine(lambda place: place, max_bad=9, total_samples=40, places=Places(is_drawn=True))
    quarantine.places.draw(range(10, 14))
    assert quarantine.add(11, "spoilt") == ""
    assert [quarantine.places.get_position(place) for place in (10, 12, 13)] == [0, 1, 2]
    quarantine.places.draw(range(30, 32))
    assert [quarantine.places.get_place(position) for position in range(5)] == [10, 12, 13, 30, 31]
    assert quarantine.get_known(3, False) == 32  # everything drawn was read
    assert quarantine.add(31, "spoilt") == ""
    assert quarantine.get_known(4, False) == 32  # although a rank that draws nothing more reads no good sample after it


def test_a_feed_hands_out_nothing_while_nothing_is_drawn() -> None:
    """Spec: R14.4."""
    feed = KeyFeed(ReadPlan(keys=(), is_drawn=True))
    assert feed.take(16) == (0, [])
    feed.add([(place, -place) for place in range(17)], 17)
    feed.close()
    assert [feed.take(16), feed.take(16), feed.take(16)] == [
        (0, [(place, -place) for place in range(16)]),
        (0, [(16, -16)]),
        None,
    ]


def test_what_is_asked_for_does_not_wait_for_what_is_read_ahead() -> None:
    """Spec: R16.4. A chunk holds samples of one kind, and those of a small draw are divided among workers."""
    feed = KeyFeed(ReadPlan(keys=(), is_drawn=True), readers=2)
    feed.add([(place, place) for place in range(9)], 3)
    feed.add([], 6)  # the samples read ahead
    feed.add([(9, 9), (10, 10)], 1)
    feed.close()
    chunks = [chunk.keys for chunk in iter(lambda: feed.take(16), None) if chunk]
    assert list(map(len, chunks)) == [2, 1, 3, 3, 1, 1]
    assert [place for chunk in chunks for place, _ in chunk] == list(range(11))
    resumed = KeyFeed(ReadPlan(keys=(7, 8), places=(0, 1), is_drawn=True))
    resumed.add([(place, place) for place in range(2, 8)], 2)
    assert [len(chunk.keys) for _ in range(3) if (chunk := resumed.take(16))] == [2, 2, 4]


@pytest.mark.parametrize(("readers", "sizes"), [(None, [16, 16, 8]), (1, [5, 12, 12, 11]), (2, [3, 2, 9, 9, 9, 8])])
def test_readers_are_done_with_what_they_share_at_the_same_time(readers: int | None, sizes: list[int]) -> None:
    """The start of an epoch does not wait for a chunk of which it needs one sample, nor the end for one reader."""
    feed = KeyFeed(ReadPlan(keys=range(40), places=range(40)), readers, first=5)
    chunks = [chunk.keys for chunk in iter(lambda: feed.take(16), None) if chunk]
    assert list(map(len, chunks)) == sizes
    assert [place for chunk in chunks for place, _ in chunk] == list(range(40))
