"""Budgets that change do so at the same step on every rank, whichever rank asks, with any number of workers. Spec: R15."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from odb_ref.core.errors import UsageError
from odb_ref.torch import ODBDataLoader
from odb_ref.trace.check import check_traces
from tests.torch.data import Numbers, check_goes_on, make_loader, take
from tests.torch.ranks import get_values, run_each, run_ranks
from tests.torch.states import check_fails

FULL, LESS = 90, 40


OPTIONS: dict[str, Any] = {"token_budget": FULL, "window": 12, "ramp_rounds": 0, "depth": 2, "shuffle": True}
_make_loader = partial(make_loader, Numbers(0, 240), **OPTIONS)


def _read(loader: ODBDataLoader, lower_at: int | None = None) -> list[tuple[int, int, list[int]]]:
    """Returns round, padded tokens and samples of each step. Accepts less after step ``lower_at``."""
    found = []
    for batch, info in loader.steps():
        numbers = [] if info.is_idle else batch["numbers"]
        found.append((info.round, info.padded_tokens if len(numbers) > 1 else 0, numbers))
        if info.step == lower_at:
            loader.accept_budget(LESS)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_lowers_the_budget_and_all_follow_at_the_same_step(workers: int, tmp_path: Path) -> None:
    """Spec: R15.2, R15.3, R5.11. Checks: BUDGET, COVER, ALIGN."""

    def lower_on_one_rank(rank: int) -> list[tuple[int, int, list[int]]]:
        with _make_loader(num_workers=workers, trace=tmp_path / "trace.ndjson") as loader:
            return _read(loader, lower_at=4 if rank == 1 else None)

    steps = get_values(run_ranks(2, lower_on_one_rank))
    assert len(steps[0]) == len(steps[1]) > 0
    assert sorted(number for own in steps for _, _, numbers in own for number in numbers) == list(range(240))
    # The last round with a batch over the new budget is the same on both ranks, unless one of them has none by chance.
    last = [max((round_ for round_, tokens, _ in own if tokens > LESS), default=-1) for own in steps]
    assert all(tokens > LESS for own in steps for round_, tokens, _ in own[:1] if tokens)
    lowered_in = steps[1][4][0]
    assert max(last) <= lowered_in + 3  # accepted in one round, offered in one of the next two, in force after that
    assert max(last) < steps[0][-1][0] - 2
    verdict = check_traces(sorted(tmp_path.glob("*.ndjson")))
    assert verdict.is_ok, verdict


def _grow(step: int, current: int) -> int:
    return min(FULL, 30 + 2 * step)


def test_a_schedule_gives_the_same_batches_with_any_number_of_workers() -> None:
    """Spec: R15.1, R15.4. Checks: REPLAY, BUDGET."""

    def follow_schedule(rank: int, workers: int) -> list[tuple[int, int, list[int]]]:
        return take(_make_loader(num_workers=workers, budget_schedule=_grow), _read)

    alone, helped = map(get_values, run_each(2, follow_schedule, [(0,), (2,)]))
    assert alone == helped
    first = [tokens for round_, tokens, _ in alone[0] if round_ == 0]
    assert max(first) <= 30
    assert max(tokens for _, tokens, _ in alone[0]) > 60


def test_a_lowered_budget_is_saved_and_holds_in_the_first_round_of_the_next_epoch() -> None:
    """Spec: R15.1, R15.5."""
    with _make_loader() as loader:
        _read(loader, lower_at=3)
        assert loader.accepted_budget == LESS
        again = _read(loader)
        state = loader.state_dict()
    assert max(tokens for _, tokens, _ in again) <= LESS
    with _make_loader(state=state) as other:
        assert other.accepted_budget == LESS
        assert max(tokens for _, tokens, _ in _read(other)) <= LESS


@pytest.mark.parametrize("updates", [None, 24])
def test_an_epoch_under_a_schedule_is_resumed_with_the_same_batches(updates: int | None) -> None:
    """Spec: R15.4, R15.5. Checks: RESUME."""
    check_goes_on(lambda: _make_loader(budget_schedule=_grow, update_samples=updates), (3, 9, 20, 31))


def test_a_lowered_budget_holds_in_the_update_behind_the_one_that_was_saved() -> None:
    """Spec: R15.5, R16.6. Checks: RESUME. Other numbers of ranks also begin with the accepted budget."""

    def go_on(rank: int, states: list[Any]) -> list[tuple[int, int, list[int]]]:
        return take(_make_loader(update_samples=24, state=states), _read)

    found = [value[0] for value in get_values(run_ranks(2, _lower_and_save))]
    states = [state for state, _ in found]
    for ranks, given in ((2, states), (2, states[1:]), (1, states), (3, states[1:])):
        rests = get_values(run_ranks(ranks, go_on, given))
        assert max(tokens for rest in rests for _, tokens, _ in rest) <= LESS
        if ranks == 2:
            assert rests == [rest for _, rest in found]


def _lower_and_save(rank: int) -> list[tuple[Any, list[tuple[int, int, list[int]]]]]:
    """Returns the states at the ends of updates once all later steps use the lower budget, each with the steps after it."""
    states = []
    with _make_loader(update_samples=24) as loader:
        for batch, info in loader.steps():
            numbers = [] if info.is_idle else batch["numbers"]
            states.append((info, numbers, loader.state_dict()))
            if info.step == 4 and rank == 1:
                loader.accept_budget(LESS)
    steps = [(info.round, info.padded_tokens if len(numbers) > 1 else 0, numbers) for info, numbers, _ in states]
    ends = [at for at, (info, _, _) in enumerate(states) if info.is_update_end and info.update > 3]
    return [(states[at][2], steps[at + 1 :]) for at in ends]


def test_a_schedule_counts_the_steps_of_all_epochs() -> None:
    """Spec: R15.4."""
    with make_loader(Numbers(0, 60), budget_schedule=_grow, **OPTIONS) as loader:
        first, second = _read(loader), _read(loader)
    assert max(tokens for _, tokens, _ in first[:4]) <= 30
    assert max(tokens for _, tokens, _ in second[:4]) > 30
    assert len(second) < len(first)


def test_metrics_go_by_the_budget_in_force() -> None:
    """Spec: R15.1. A loader whose schedule returns 40 fills its batches like one with a largest budget of 40."""
    found = []
    for options in ({"token_budget": LESS}, {"budget_schedule": lambda step, current: LESS}):
        with _make_loader(**options) as loader:
            _read(loader)
            found.append(loader.metrics())
    for name in ("odb/steps", "odb/token_budget", "odb/fill", "odb/efficiency"):
        assert found[0][name] == found[1][name] > 0, name
    with _make_loader() as loader:
        _read(loader, lower_at=3)
        metrics = loader.metrics()
    budgets = metrics["odb/tokens"] / metrics["odb/fill"]
    assert metrics["odb/token_budget"] == LESS
    assert LESS * metrics["odb/steps"] < budgets < FULL * metrics["odb/steps"]


def test_a_budget_that_was_loaded_may_be_raised_in_the_same_epoch() -> None:
    """Spec: R15.2, R15.5."""
    with _make_loader() as loader:
        iterator = loader.steps()
        loader.accept_budget(LESS)
        for _ in range(14):
            next(iterator)
        state = loader.state_dict()
        iterator.close()
    with _make_loader(state=state) as loader:
        iterator = loader.steps()
        next(iterator)
        loader.accept_budget(FULL)
        rest = [info.padded_tokens for _, info in iterator]
    assert max(rest[:2]) <= LESS < max(rest)


def test_a_budget_that_is_none_is_refused() -> None:
    """Spec: R8, R15.4."""
    with _make_loader() as loader, pytest.raises(UsageError, match="at least 1"):
        loader.accept_budget(0)
    nonsense = _make_loader(budget_schedule=lambda step, current: 0 if step else current)
    check_fails(nonsense, "budget schedule", Exception)


def test_a_schedule_that_raises_fails_on_every_rank_with_its_cause() -> None:
    """Spec: R15.4, R7.2. Checks: ABORT."""

    def fail_in_its_schedule(rank: int, workers: int) -> None:
        def ask(step: int, current: int) -> int:
            if rank and step:
                raise ValueError("no such step")
            return current

        take(_make_loader(num_workers=workers, budget_schedule=ask), _read)

    for result in chain.from_iterable(run_each(2, fail_in_its_schedule, [(0,), (1,)])):
        assert (result.error, result.rank) == ("JobError", 1), result
        assert result.text == "rank 1 failed: in its budget schedule: ValueError: no such step"
