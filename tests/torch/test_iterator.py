"""An iterator owns what it needs, and one that has lost its epoch reports who took it."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from odb_ref.torch import JobError, UsageError
from tests.torch import data
from tests.torch.data import Numbers, catch_texts, make_loader, read_numbers, save
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_keeps_its_loader_alive(num_workers: int) -> None:
    """Checks: COVER."""
    batches = iter(make_loader(num_workers=num_workers))
    gc.collect()
    numbers = next(batches)["numbers"]
    gc.collect()
    assert sorted([*numbers, *(number for batch in batches for number in batch["numbers"])]) == list(range(40))


def test_a_closed_loader_takes_the_epoch_and_the_iterator_says_so() -> None:
    loader = make_loader()
    batches = iter(loader)
    next(batches)
    loader.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="epoch 0 of this iterator was cut short: its loader was closed"):
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_iteration_takes_the_epoch_and_the_first_iterator_says_so(num_workers: int) -> None:
    with make_loader(num_workers=num_workers) as loader:
        first = iter(loader)
        next(first)
        second = iter(loader)
        with pytest.raises(UsageError, match="epoch 0 of this iterator was cut short: another iteration"):
            next(first)
        assert sorted(number for batch in second for number in batch["numbers"]) == list(range(40))
        with pytest.raises(UsageError, match="make two loaders") as caught:
            list(zip(loader, loader, strict=True))
        assert "zip" not in str(caught.value)  # of two loaders it drops what is left of the longer


def test_an_iterator_that_has_had_its_last_step_has_lost_nothing() -> None:
    with make_loader() as loader:
        first = loader.steps()
        for _, info in first:
            if info.is_last:
                break
        second = iter(loader)
        assert next(first, None) is None
        assert list(second)
        assert next(second, None) is None
    assert next(second, None) is None


def test_one_step_is_asked_for_at_a_time() -> None:
    def ask(samples: list[Any]) -> Any:
        return next(batches)

    with make_loader(collate_fn=ask) as loader:
        batches = iter(loader)
        with pytest.raises(JobError, match="rank 0 failed: UsageError: this iterator is already asked for a step"):
            next(batches)

    entered, asked = threading.Event(), threading.Event()

    def wait(samples: list[Any]) -> Any:
        entered.set()
        assert asked.wait(20)
        return data.collate(samples)

    with make_loader(collate_fn=wait) as loader, ThreadPoolExecutor() as pool:
        batches = iter(loader)
        first = pool.submit(next, batches)
        assert entered.wait(20)
        with pytest.raises(UsageError, match="by another thread"):
            next(batches)
        asked.set()
        numbers = [number for batch in (first.result(), *batches) for number in batch["numbers"]]
    assert sorted(numbers) == list(range(40))


def test_nested_loops_are_refused_on_every_rank() -> None:
    def nest(rank: int) -> None:
        with make_loader(Numbers(40 * rank, 30 + rank), shard="given") as loader:
            for _ in loader:
                list(loader)

    check_errors(run_ranks(2, nest), "epoch 0 of this iterator was cut short: another iteration", error="UsageError")


def test_an_iterator_that_is_replaced_after_another_rank_has_left_says_so_too() -> None:
    """Checks: COVER."""

    def replace_late(rank: int) -> int:
        with make_loader(Numbers(40 * rank, 30 + rank), shard="given") as loader:
            batches = iter(loader)
            next(batches)
            if rank == 1:  # the other has left, and so ended the epoch of both after this step
                assert batches._delivery.wait(20)
            again = iter(loader)
            with pytest.raises(UsageError, match="epoch 0 of this iterator was cut short: another iteration"):
                next(batches)
            return sum(len(batch["numbers"]) for batch in again)

    assert min(get_values(run_ranks(2, replace_late))) >= 30


def test_batches_without_their_weights_are_warned_of_once() -> None:
    """Checks: WEIGHT."""

    def take(rank: int, options: dict[str, Any], how: str) -> list[str]:
        with make_loader(Numbers(40 * rank, 30 + rank), shard="given", **options) as loader, catch_texts() as caught:
            for _ in range(2):
                list(loader if how == "batches" else loader.steps())
        return [text for text in caught if "loader.steps()" in text]

    cases: list[tuple[dict[str, Any], str]] = [({}, "batches"), ({}, "steps"), ({"loss_scaling": "none"}, "batches")]
    for case, count, results in zip(cases, (1, 0, 0), run_each(2, take, cases), strict=True):
        assert [len(told) for told in get_values(results)] == [count] * 2, case
    with warnings.catch_warnings(action="error"):
        assert list(make_loader())  # on a single rank each loss is scaled by 1


def test_a_trainer_may_read_a_whole_update_ahead() -> None:
    """Checks: WEIGHT."""
    steps = 20
    with make_loader(Numbers(0, 80), accumulation_steps=steps) as loader, warnings.catch_warnings(action="error"):
        infos = [info for _, info in loader.steps()]
    updates = [infos[first : first + steps] for first in range(0, len(infos), steps)]
    ends = [[info.is_update_end for info in update].index(True) for update in updates[:-1]]
    assert ends == [steps - 1] * (len(updates) - 1)
    assert any(info.loss_scale != 1 for info in updates[0])


def forget_labels(samples: list[Any]) -> dict[str, Any]:
    return {"numbers": [sample["number"] for sample in samples]}


def test_a_warning_that_is_an_error_loses_no_batch() -> None:
    """Checks: COVER."""
    numbers: list[int] = []
    raised = 0
    with make_loader(collate_fn=forget_labels) as loader, warnings.catch_warnings(action="error"):
        batches = iter(loader)
        while len(numbers) < 40:
            try:
                numbers += next(batches)["numbers"]
            except RuntimeWarning:
                raised += 1
    assert raised
    assert sorted(numbers) == list(range(40))


def time_out(number: int, frame: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("handler", "error"), [(signal.default_int_handler, KeyboardInterrupt), (time_out, TimeoutError)]
)
def test_a_batch_that_an_interrupt_has_taken_from_its_consumer_is_missed(
    monkeypatch: pytest.MonkeyPatch, handler: Any, error: type[BaseException]
) -> None:
    """A state does not report it as trained on either. Checks: ONCE, COVER, RESUME."""
    before = signal.signal(signal.SIGINT, handler)  # a job in the background starts with Ctrl-C ignored
    with make_loader() as loader:
        batches = iter(loader)
        numbers = next(batches)["numbers"]
        saved = loader.state_dict()
        monkeypatch.setattr(batches, "_warn", lambda step: signal.raise_signal(signal.SIGINT))
        with pytest.raises(error):
            next(batches)
        monkeypatch.undo()
        for use in (lambda: next(batches), loader.state_dict):
            with pytest.raises(UsageError, match=f"step 1 was lost when {error.__name__} came .* the last saved state"):
                use()
        loader.load_state_dict(saved)
        assert loader.state_dict() == saved
        assert sorted(numbers + read_numbers(loader)) == list(range(40))
    signal.signal(signal.SIGINT, before)


def make_resumed() -> Any:
    """Returns a loader that goes on from a state with carried samples."""
    make = partial(make_loader, Numbers(0, 80), shuffle=True)
    _, state = save(make(), 4)
    assert state["checkpoint"]["start"]["carried"]
    return make(state=state)


def leave_at_once(rank: int, absent_s: float) -> None:
    with make_resumed() as loader:
        batches = iter(loader)
        if not rank:
            batches.close()
            return
        time.sleep(absent_s)
        list(batches)


@pytest.mark.parametrize("absent_s", [0.0, 3.0])
def test_who_leaves_a_resumed_epoch_before_its_first_batch_is_named(absent_s: float) -> None:
    """Its machine has not begun then, because the samples that were carried into the first round are not read yet. Nor has that
    of a rank that is urged while its own consumer is away.
    """
    left, told = run_ranks(2, leave_at_once, absent_s)
    assert not left.error, left
    # A rank that has failed waits two seconds for the others.
    assert told.error == "JobError" and re.match("rank 0 (failed|is lost): its consumer left before", told.text), told


def test_a_budget_is_accepted_before_the_first_batch_of_a_resumed_epoch() -> None:
    with make_resumed() as loader:
        batches = iter(loader)
        loader.accept_budget(40)
        assert len(list(batches)) > 4
        assert (loader.accepted_budget, loader.metrics()["odb/token_budget"]) == (40, 40)
