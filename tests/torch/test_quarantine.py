"""Bad samples set aside: what is trained on and reported, what the limits are, and that a saved epoch continues exactly."""

from __future__ import annotations

import itertools
import json
import random
import time
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.torch import BadSampleWarning, ODBDataLoader
from odb_ref.torch.exchange.collectives import Transport
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.plan.order import compute_order
from odb_ref.torch.reading.datasets import KeyChunk, SeededDataset
from odb_ref.torch.reading.quarantine import BadSample, Quarantine
from odb_ref.trace.check import check_traces
from tests.helpers.effort import few
from tests.torch import data
from tests.torch.data import AtOnce, Numbers, Stream, check_goes_on, list_numbers, read, read_numbers, take
from tests.torch.ranks import check_errors, get_values, run_each
from tests.torch.states import check_fails

pytestmark = pytest.mark.filterwarnings("ignore::odb_ref.torch.BadSampleWarning")

make_loader = partial(data.make_loader, window=10, on_bad_sample="quarantine", max_bad_samples=20)
COUNT = 47
BAD = (0, 1, 9, 10, 11, 23, 38, 45, 46)
"""At both ends, single and in a row."""
FAULTS = ("raise", "empty", "no_ids", "labels")
SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 11, "window": 6}


def spoil(count: int = COUNT, bad: Iterable[int] = BAD, faults: tuple[str, ...] = FAULTS, kind: Any = Numbers) -> Any:
    """Returns samples of which those in ``bad`` are bad, each in the next of several ways."""
    fault_of = dict(zip(bad, itertools.cycle(faults)))
    return kind(0, count, bad=fault_of, fault=fault_of.get)


GOOD = [number for number in range(COUNT) if number not in BAD]


# What is trained on, and what is reported ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_set_aside_and_all_others_trained_on(num_workers: int) -> None:
    """Spec: R11, R11.1. Checks: COVER, ONCE."""
    with make_loader(spoil(), num_workers=num_workers) as loader:
        assert loader.quarantined == ()
        said = "epoch 0: the sample 0 was set aside: ValueError: bad row 0"
        with pytest.warns(BadSampleWarning, match=said) as caught:
            numbers = []
            for batch, info in loader.steps():
                numbers += batch["numbers"]
                set_aside = info.quarantined_samples
        assert len(caught) == 1
        assert sorted(numbers) == GOOD
        assert [item.index for item in loader.quarantined] == list(BAD)
        causes = ("ValueError: bad row 0", "length of a sample is 0", "has no input_ids", "labels is dict")
        assert all(cause in item.cause for cause, item in zip(causes, loader.quarantined, strict=False))
        assert loader.metrics()["odb/quarantined_samples"] == set_aside == len(BAD)
        with pytest.warns(BadSampleWarning, match="epoch 1"):
            assert sorted(read_numbers(loader)) == GOOD
        assert loader.metrics()["odb/quarantined_samples"] == len(BAD)


def test_a_warning_made_an_error_is_raised_to_the_one_who_trains() -> None:
    with warnings.catch_warnings(), make_loader(spoil()) as loader:
        warnings.simplefilter("error", BadSampleWarning)
        with pytest.raises(BadSampleWarning):
            read(loader)


def test_a_clean_epoch_warns_of_nothing() -> None:
    with warnings.catch_warnings(action="error"), make_loader(Numbers(0, 30)) as loader:
        assert sorted(read_numbers(loader)) == list(range(30))
        assert loader.quarantined == ()


CRACKED = Stream(0, COUNT, bad=BAD, fault="no_ids")
"""A stream with samples that have no length."""


def end(index: int) -> str:
    if index == COUNT:
        raise ValueError("the disk is gone")
    return "no_ids"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_an_iterable_data_set_what_has_no_length_is_set_aside(num_workers: int) -> None:
    with make_loader(CRACKED, num_workers=num_workers) as loader:
        assert sorted(read_numbers(loader)) == GOOD
        assert len(loader.quarantined) == len(BAD)


def fail_to_collate(samples: list[Any]) -> Any:
    raise KeyError("pixel_values")


@pytest.mark.parametrize(
    ("dataset", "options", "cause"),
    [
        (Stream(0, COUNT + 1, bad=(*BAD, COUNT), fault=end), {}, "the disk is gone"),
        (spoil(), {"collate_fn": fail_to_collate}, "KeyError: 'pixel_values'"),
        (spoil(faults=("kill",)), {"num_workers": 1}, "exited unexpectedly"),
    ],
)
def test_what_is_no_matter_of_a_sample_still_fails(dataset: Any, options: dict[str, Any], cause: str) -> None:
    """Spec: R11.1. Checks: ABORT."""
    check_fails(make_loader(dataset, **options), cause)


# Limits ------------------------------------------------------------------------------------------------------------------


MANY: dict[str, Any] = {"data": spoil(2000, range(0, 60, 2), ("raise",)), "window": 50, "token_budget": 400}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"data": spoil(faults=("raise",)), "max_bad_samples": 4},
            r"5 bad samples, but max_bad_samples=4 allows only 4 on this rank\. The last is 11: ValueError: bad row 11",
        ),
        (MANY | {"max_bad_samples": 0.014}, "29 bad samples, but max_bad_samples=0.014 allows only 28 on this rank"),
        (
            {"data": spoil(5, range(5), ("raise",))},
            r"all 5 samples of this rank are bad\. The last is 4: ValueError: bad row 4",
        ),
    ],
    ids=["number", "share", "all"],
)
def test_more_than_the_limit_end_the_epoch_with_the_last_cause(
    options: dict[str, Any], said: str, num_workers: int
) -> None:
    """Spec: R11.2."""
    check_fails(make_loader(**options, num_workers=num_workers), f"rank 0 failed: .*{said}")


def test_a_share_is_one_of_the_samples_of_the_rank_and_allows_a_few_in_any_case() -> None:
    assert len(take(make_loader(max_bad_samples=0.015, **MANY))) == 1970
    assert sorted(take(make_loader(spoil(), max_bad_samples=0.001))) == GOOD


# Several ranks -----------------------------------------------------------------------------------------------------------


def test_the_batches_are_the_same_with_and_without_workers(tmp_path: Path) -> None:
    """Checks: REPLAY, COVER, ALIGN. The traces pass the checker."""

    def read_epochs(rank: int, options: dict[str, Any]) -> Any:
        with make_loader(spoil(), shuffle=True, seed=5, **options) as loader:
            epochs = [read(loader), read(loader)]
            return epochs, [item.index for item in loader.quarantined], loader.metrics()["odb/quarantined_samples"]

    variants: list[dict[str, Any]] = [
        {"trace": tmp_path / "run.ndjson"},
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
    ]
    found = [get_values(results) for results in run_each(2, read_epochs, [(options,) for options in variants])]
    assert found[0] == found[1] == found[2]
    (epochs, bad, count), (other_epochs, other_bad, other_count) = found[0]
    for mine, others in zip(epochs, other_epochs, strict=True):
        assert [step for step, _, _ in mine] == [step for step, _, _ in others]
        assert sorted(list_numbers(mine, others)) == GOOD
    assert sorted(bad + other_bad) == list(BAD)
    assert count + other_count == len(BAD)
    verdict = check_traces(sorted(map(str, tmp_path.glob("*.ndjson"))))
    assert not verdict.violations


def test_bad_samples_of_one_rank_leave_all_ranks_in_step_and_too_many_end_all() -> None:
    """Checks: ALIGN, ABORT."""

    def read_one_bad_shard(rank: int, limit: int) -> Any:
        dataset = spoil(40, (3, 5, 7, 30) if rank == 1 else (), ("raise",))
        with make_loader(dataset, shard="given", max_bad_samples=limit) as loader:
            return [step for step, _, _ in read(loader)], len(loader.quarantined)

    good, bad = run_each(2, read_one_bad_shard, [(4,), (3,)])
    first, second = get_values(good)
    assert first[0] == second[0]
    assert (first[1], second[1]) == (0, 4)
    check_errors(bad, "4 bad samples", rank=1)
    assert bad[0].text == bad[1].text


def test_a_rank_without_samples_replays_the_first_good_one() -> None:
    def read_empty_shard(rank: int, bad: range) -> Any:
        dataset = Numbers(20, 20) if rank == 0 else spoil(40, bad, ("raise",))
        with make_loader(dataset, shard="given", name="one", **({} if rank == 0 else {"sampler": []})) as loader:
            return [(info.is_idle, batch["numbers"]) for batch, info in loader.steps()]

    (busy, idle), failed = run_each(2, read_empty_shard, [(range(3),), (range(40),)])
    assert idle.value == [(True, [3])] * len(busy.value)
    check_errors(failed, "rank 1 failed", "none of the first 40 samples is good")


# Resuming ----------------------------------------------------------------------------------------------------------------


def save_and_go_on(rank: int, num_workers: int, limits: Iterable[int] | None) -> list[Any]:
    """Returns for these steps, or every one, what was read before, what a new loader reads from the state, and its report."""
    options = {"shuffle": True, "accumulation_steps": 2, "num_workers": num_workers}
    with make_loader(spoil(), **options) as loader:
        whole = read(loader)
        bad = {item.index for item in loader.quarantined}
    rows: list[Any] = [whole]
    for limit in limits or range(len(whole) + 1):
        before, state = data.save(make_loader(spoil(), **options), limit)
        with make_loader(spoil(), state=state, **options) as loader:
            assert loader.state_dict() == state
            steps = loader.steps()
            # Nothing was taken since then.
            assert not limit or loader.state_dict() == state
            after = [(info.step, [] if info.is_idle else batch["numbers"], info.loss_scale) for batch, info in steps]
            found = {item.index for item in loader.quarantined}
        rows.append((before, after, found == bad, state))
    return rows


def test_the_same_ranks_go_on_identically_after_any_step() -> None:
    """Spec: R11.3. Checks: RESUME, REPLAY. The state does not depend on timing or workers either."""
    some = (1, 5, 8)
    alone, helped = map(get_values, run_each(2, save_and_go_on, [(0, None), (2, some)], timeout_s=120))
    for (whole, *rows), found in zip(alone, helped, strict=True):
        assert found == [whole, *(rows[limit] for limit in some)]
        assert len(rows) > 8
        for before, after, is_alike, _ in rows:
            assert before + after == whole
            assert is_alike


def save(rank: int, limit: int, base: list[Any], bad: tuple[int, ...]) -> tuple[list[int], dict[str, Any], list[Any]]:
    with make_loader(spoil(bad=bad), state=base, **SHUFFLED) as loader:
        numbers = list_numbers(read(loader, limit))
        return numbers, json.loads(json.dumps(loader.state_dict())), [item.index for item in loader.quarantined]


def test_what_was_set_aside_stays_so_though_it_could_be_read_now() -> None:
    """Spec: R11.3."""
    numbers, state, _ = save(0, 7, [], BAD)
    assert state["bad"]
    after, _, records = save(0, 100, [state], ())
    given = set(range(COUNT)) - set(numbers) - set(after)
    assert len(given) == len(state["bad"])
    assert set(records) == given
    assert given < set(BAD)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_decided_the_steps_taken_must_be_readable_again(is_last: bool) -> None:
    """Spec: R11.3."""
    _, state, _ = save(0, 1, [], ())
    order = compute_order(COUNT, 11, 0)
    needed = order[state["known"] - 1 if is_last else 0]
    message = f"the sample {needed} was good before the state was saved, but cannot be read"
    check_fails(make_loader(spoil(bad=(needed,), faults=("raise",)), state=state, **SHUFFLED), message)
    with make_loader(spoil(bad=(order[state["known"]],), faults=("raise",)), state=state, **SHUFFLED) as loader:
        assert len(read_numbers(loader)) < COUNT
        assert len(loader.quarantined) == 1


def test_what_is_read_after_a_failure_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: R11.3. The carried samples are read again before the exchange has reported that one of them is bad."""
    original = Exchange._exchange

    def exchange_late(exchange: Exchange, transport: Transport) -> None:
        time.sleep(0.3)
        original(exchange, transport)

    _, state, _ = save(0, 1, [], ())
    order = compute_order(COUNT, 11, 0)
    monkeypatch.setattr(Exchange, "_exchange", exchange_late)
    loader = make_loader(spoil(bad=(order[0],), faults=("raise",)), state=state, **SHUFFLED)
    check_fails(loader, f"the sample {order[0]} was good before")


def test_an_iterable_data_set_goes_on_by_reading_again() -> None:
    def read_and_count(loader: ODBDataLoader, limit: int | None = None) -> list[Any]:
        rows = read(loader, limit)
        assert limit or loader.metrics()["odb/quarantined_samples"] == len(BAD)
        return rows

    check_goes_on(lambda: make_loader(CRACKED), range(1, 12), read_and_count)


@pytest.mark.parametrize("seed", range(few(40)))
def test_random_data_go_on_identically_and_with_other_settings_completely(seed: int) -> None:
    """Spec: R11.3. Checks: RESUME, REPLAY, COVER, ONCE."""
    choose = random.Random(seed)
    count = choose.randint(2, 40)
    share = choose.choice([0.1, 0.3, 0.7])
    bad = [index for index in range(1, count) if choose.random() < share]
    good = [index for index in range(count) if index not in bad]
    options: dict[str, Any] = {
        "shuffle": choose.random() < 0.5,
        "window": choose.randint(1, 12),
        "token_budget": choose.choice([20, 60, 120]),
        "max_bad_samples": count,
        "max_age_rounds": choose.randint(1, 4),
        "ramp_rounds": choose.randint(0, 3),
    }
    whole = take(make_loader(spoil(count, bad), **options), read)
    assert sorted(list_numbers(whole)) == good
    limit = choose.randint(1, len(whole))
    before, state = data.save(make_loader(spoil(count, bad), **options), limit)
    with make_loader(spoil(count, bad), state=state, **options) as loader:
        assert before + read(loader) == whole
        assert sorted(item.index for item in loader.quarantined) == bad
    if limit < len(whole):
        rest = take(make_loader(spoil(count, bad), state=[state], **options | {"token_budget": 70}))
        assert sorted(list_numbers(before) + rest) == good


# Parts -------------------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 40)))
def test_positions_count_the_places_that_are_not_set_aside(bad: set[int]) -> None:
    quarantine = Quarantine(lambda place: place, max_bad=50, total_samples=None)
    for place in sorted(bad):
        assert quarantine.add(place, "bad") == ""
    good = [place for place in range(60) if place not in bad]
    assert [quarantine.places.get_place(position) for position in range(len(good))] == good
    assert [quarantine.places.get_position(place) for place in good] == list(range(len(good)))
    resumed = Quarantine(lambda place: place, max_bad=50, total_samples=None, bad=sorted(bad))
    assert [resumed.places.get_place(position) for position in range(len(good))] == good
    assert resumed.count == len(bad)


def test_a_guarded_data_set_that_reads_at_once_says_which_sample_is_bad() -> None:
    inner = spoil(kind=AtOnce)
    guarded = SeededDataset(inner, list, is_guarded=True)
    found: Any = guarded[KeyChunk(0, [(0, 2), (1, 3)])]
    assert [(place, sample["number"]) for place, sample in found] == [(0, 2), (1, 3)]
    assert inner.calls == 2  # the first sample is read alone, to find out whether it draws
    (_, first), (_, second) = guarded[KeyChunk(0, [(0, 0), (1, 2)])]
    assert first == BadSample("ValueError: bad row 0")
    assert second["number"] == 2  # type: ignore[index]
