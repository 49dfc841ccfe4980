"""One process: what the loader returns, and how it reacts to misuse."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from functools import partial
from multiprocessing import util

import numpy as np
import pytest
import torch

from odb_ref.core.effects import OutcomeKind
from odb_ref.torch import Batching, ODBDataLoader, UsageError
from tests.torch import data
from tests.torch.data import Numbers, make_sample, take
from tests.torch.ranks import get_values, run_each
from tests.torch.states import check_fails

make_loader = partial(data.make_loader, window=16)


def read(loader: ODBDataLoader) -> list[list[int]]:
    """Returns the sample numbers of each batch."""
    return [batch["numbers"] for batch, info in loader.steps() if not info.is_idle]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_exactly_once_and_no_batch_is_over_budget(num_workers: int) -> None:
    with make_loader(Numbers(0, 100), num_workers=num_workers) as loader:
        numbers = []
        for batch, info in loader.steps():
            assert batch["input_ids"].numel() == info.padded_tokens <= 60
            assert info.local_tokens == sum(len(make_sample(number)["input_ids"]) for number in batch["numbers"])
            numbers += batch["numbers"]
    assert sorted(numbers) == list(range(100))
    assert info.is_last
    assert info.progress == 1.0
    assert info.emitted_samples == 100


def count_alike(rank: int, num_workers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the counters, and the same figures computed from the steps."""
    shard = Numbers(100 * rank, 40 - 15 * rank)
    with make_loader(shard, shard="given", num_workers=num_workers) as loader:
        infos = [info for _, info in loader.steps()]
        found = loader.metrics()
    budgets = 60 * len(infos)
    real = sum(info.local_tokens for info in infos)
    expected = {
        "odb/steps": len(infos),
        "odb/idle_steps": sum(info.is_idle for info in infos),
        "odb/samples": sum(info.local_samples for info in infos),
        "odb/tokens": real,
        "odb/padding_ratio": 1 - real / sum(info.padded_tokens for info in infos),
        "odb/fill": real / budgets,
        "odb/efficiency": sum(info.global_tokens for info in infos) / (2 * budgets),
    }
    return found, expected


def test_the_counters_are_the_sums_over_the_steps() -> None:
    for values in map(get_values, run_each(2, count_alike, [(0,), (1,)])):
        for found, expected in values:
            assert {name: found[name] for name in expected} == pytest.approx(expected)
            assert min(found["odb/first_step_s"], found["odb/exchange_s"], found["odb/exchanges"]) > 0
        (first, _), (second, _) = values
        assert first["odb/efficiency"] == second["odb/efficiency"]
        assert second["odb/idle_steps"] > 0


def test_quota_mode_stops_at_the_quota() -> None:
    batches = take(make_loader(Numbers(0, 100), mode="quota", quota=np.int64(30)), read)
    assert sum(map(len, batches[:-1])) < 30 <= sum(map(len, batches))


def test_a_length_function_and_a_custom_batch_type() -> None:
    texts = ["a" * (1 + number % 7) for number in range(30)]
    loader = ODBDataLoader(texts, token_budget=14, collate_fn=tuple, batching=Batching(window=8, length_fn=len))
    with loader:
        batches = []
        for batch, info in loader.steps():
            assert info.local_samples == len(batch)
            batches.append(batch)
    assert sorted(text for batch in batches for text in batch) == sorted(texts)


def test_the_old_names_of_steps_say_the_new_ones() -> None:
    with pytest.raises(ImportError, match=r"loader.steps\(\) now"):
        from odb_ref import pop_step_info  # type: ignore[attr-defined]  # noqa: F401
    with make_loader(Numbers(0, 9)) as loader:
        _, info = next(loader.steps())
    for old, new in (("is_window_end", "is_update_end"), ("window_supervised", "update_supervised")):
        with pytest.raises(AttributeError, match=f"StepInfo.{old} is {new} now"):
            getattr(info, old)
    assert not hasattr(info, "windw")


def test_a_loader_has_no_length() -> None:
    with pytest.raises(TypeError, match="no length: the number of steps in an epoch depends on the samples' lengths"):
        len(make_loader())
    with pytest.raises(
        TypeError, match="no length: the number of updates in an epoch is unknown, because each rank has"
    ):
        len(make_loader(update_samples=8, shard="given"))


def test_a_bound_for_its_length_may_be_asked_for() -> None:
    assert len(make_loader(len_bound="samples")) == 40
    with make_loader(len_bound=50) as loader:
        assert len(loader) == 50
        with warnings.catch_warnings(action="error"):
            steps = len(read(loader))
    with make_loader(len_bound=steps - 1) as loader:
        with pytest.warns(RuntimeWarning, match=f"epoch 0 has more than the {steps - 1} steps of len_bound") as caught:
            assert len(read(loader)) == steps
        assert len(caught) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"len_bound": 0}, "len_bound must be at least 1"),
        ({"len_bound": "steps"}, "len_bound must be a number of steps or 'samples'"),
        ({"len_bound": "samples", "shard": "given"}, "len_bound='samples' needs shard='auto'"),
        ({"generator": torch.Generator(), "seed": 4}, "seed and generator exclude each other"),
        ({"seed": "3"}, "seed must be an integer, got '3'"),
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"mode": "both"}, "mode must be one of"),
        ({"quota": 5}, "quota_samples needs"),
        ({"policy": "best"}, "unknown target rule"),
        ({"on_idle": "wait"}, "on_idle must be one of"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"sampler": [1], "shuffle": True}, "exclude each other"),
        ({"sampler": iter([1])}, "sampler is an iterator"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 0.3}, "timeout_s must be at least 1 s, got 0.3"),  # a slow data set was taken for lost
        ({"shard": "mine"}, "shard"),
        ({"token_budget": "60"}, "token_budget must be an integer, got '60'"),
        ({"token_budget": 60.5}, "token_budget must be an integer"),
        ({"window": True}, "window must be an integer, got True"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"max_age_rounds": 0}, "max_age_rounds must be at least 1"),
        ({"ramp_rounds": -1}, "ramp_rounds must be at least 0, got -1"),
        ({"mode": "quota", "quota": 0}, "quota must be at least 1"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be at least 1"),
        ({"prefetch_factor": 2}, "prefetch_factor needs num_workers of at least 1"),
        ({"persistent_workers": True}, "persistent_workers needs num_workers of at least 1"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context needs num_workers of at least 1"),
        ({"num_workers": 1, "multiprocessing_context": "clone"}, "multiprocessing_context must be one of fork"),
        (
            {"num_workers": 1, "multiprocessing_context": 3},
            "multiprocessing_context must be a name or a context, got 3",
        ),
        ({"timeout": -1}, "timeout must not be negative"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of seconds"),
        ({"collate_fn": 3}, "collate_fn must be a function, got int"),
        ({"generator": 42}, "generator must be a torch.Generator, got 42"),
        ({"sampler": torch.tensor(3)}, "expected a Sampler or a sequence"),
        ({"process_group": 0}, "process_group must be a ProcessGroup, got 0"),
        ({"mesh": (2, 2)}, "mesh must be a DeviceMesh, got \\(2, 2\\)"),
        ({"trace": True}, "trace must be a path, got True"),
        ({"length_fn": "len"}, "length_fn must be a function, got str"),
        ({"worker_init_fn": 1, "num_workers": 1}, "worker_init_fn must be a function"),
        ({"transport": "carrier"}, "unknown transport 'carrier'; choose from gather, reduce"),
        ({"len_bound": 2.5}, "len_bound must be an integer"),
        # Beyond what can be exchanged, and of other types.
        ({"window": 2**62}, "window must be at most 4611686018427387903"),
        ({"token_budget": 10**30}, "token_budget must be at most"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"num_workers": 10**6}, "num_workers must be at most 65536"),
        ({"num_workers": 1, "prefetch_factor": 2**40}, "prefetch_factor must be at most"),
        ({"window": np.array([1, 2])}, "window must be an integer"),
        ({"window": torch.tensor(1.5)}, "window must be an integer"),
        ({"timeout": 3}, "timeout needs num_workers of at least 1"),
        ({"shuffle": "no"}, "shuffle must be True or False"),
        ({"trainer_divides_loss": 1}, "is_divided_by_trainer must be True or False"),
        # Batches and their costs.
        ({"layout": "rows"}, "layout must be one of padded, packed, got 'rows'"),
        *(({"cost": cost}, "cost") for cost in ("attention", "attention/0", lambda tokens: -tokens, 5)),
        ({"sizes": "odd"}, "any, even, threes, powers"),
        ({"sizes": "even", "layout": "packed"}, "sizes='even' needs layout='padded'"),
        ({"sizes": "even", "order": "sampler"}, "sizes='even' needs layout='padded'"),
        *(({"window_bytes": value}, "window_bytes") for value in (0, -1, 1.5, "1 GB")),
        ({"max_patches": 0}, "max_patches must be at least 1, got 0"),
        ({"max_patches": 4, "limits": [3]}, "exclude each other"),
        ({"limits": [3]}, "cost_fn and limits must be given together"),
        ({"cost_fn": len}, "cost_fn and limits must be given together"),
        ({"limits": None}, "limits must be a sequence of integers, got None"),
        ({"cost_fn": len, "limits": [3, 0]}, r"limits\[1\] must be at least 1, got 0"),
        ({"cost_fn": len, "limits": [2.5]}, r"limits\[0\] must be"),
        # What happens to a step, and to a sample.
        ({"on_bad_sample": "skip"}, "on_bad_sample"),
        ({"on_bad_sample": "quarantine", "max_bad_samples": -1}, "max_bad_samples"),
        ({"on_bad_sample": "quarantine", "max_bad_samples": 1.5}, "max_bad_samples"),
        # Updates of a fixed number of samples.
        ({"update_samples": 16, "accumulation_steps": 4}, "update_samples and accumulation_steps=4 exclude each other"),
        ({"update_samples": 16, "window_bytes": 1000}, "window_bytes"),
        ({"update_samples": 0}, "update_samples must be at least 1"),
        ({"drop_last": True}, "drop_last needs update_samples"),
        ({"update_samples": 16, "shard": "given", "drop_last": True}, "drop_last needs one order"),
    ],
)
def test_misuse_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(**options)


def crash_at_the_end(worker_id: int) -> None:
    util.Finalize(None, os._exit, args=(3,), exitpriority=100)


def test_a_worker_that_crashes_when_all_is_read_takes_nothing_with_it() -> None:
    found: list[int] = []
    with make_loader(Numbers(0, 50), num_workers=1, worker_init_fn=crash_at_the_end) as loader:
        for batch in loader:
            found += batch["numbers"]
            time.sleep(0.1)  # long enough for a check of the workers
    assert sorted(found) == list(range(50))


@pytest.mark.parametrize("length", [0, -1, 1.5, None, "7", True])
def test_nonsense_from_length_fn_ends_the_epoch_with_its_cause(length: object) -> None:
    check_fails(make_loader(Numbers(0, 9), length_fn=lambda sample: length), f"the length of a sample is {length!r}")


def test_steps_are_the_batches_with_what_belongs_to_them() -> None:
    with make_loader(Numbers(0, 60), shuffle=True) as loader:
        found = [batch["numbers"] for batch, _ in loader.steps()]
        loader.set_epoch(0)
        assert [batch["numbers"] for batch in loader] == found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropping_the_steps_leaves_the_epoch(num_workers: int) -> None:
    """Checks: STOP. A process alone has no thread for an exchange."""
    with make_loader(Numbers(0, 600), num_workers=num_workers) as loader:
        for _, info in loader.steps():
            if info.step == 2:
                break
        side = loader._delivery
        assert not {"odb-exchange", "odb-links"} & {thread.name for thread in threading.enumerate()}
        assert side.wait(10)
        assert side.driver.state.outcome.kind is OutcomeKind.STOPPED


def test_epoch_and_seed_are_integers_of_any_library() -> None:
    with make_loader(Numbers(0, 20), shuffle=True, seed=np.int64(7)) as loader:
        loader.set_epoch(np.int64(3))
        found = read(loader)
        assert json.dumps(loader.state_dict())
        for wrong in (1.0, -1, None):
            with pytest.raises(UsageError, match="epoch must be"):
                loader.set_epoch(wrong)  # type: ignore[arg-type]
    with make_loader(Numbers(0, 20), shuffle=True, seed=7) as loader:
        loader.set_epoch(3)
        assert read(loader) == found
