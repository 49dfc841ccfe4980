"""A budget from the memory of real steps: what is measured, what follows from it, and on which ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from examples import toy
from odb_ref.core.errors import JobError, UsageError
from odb_ref.torch import ODBDataLoader
from odb_ref.torch.loop import fit_token_budget, rehearse, scaled_learning_rate
from odb_ref.torch.loop.memory import get_available_bytes, is_out_of_memory, measure_peak, release_memory
from tests.torch.data import Numbers, collate
from tests.torch.ranks import get_values, run_each, run_ranks

torch.set_num_threads(1)
MIB = 2**20
LENGTHS = [64, 20, 33, 100, 7]


class Step:
    """A training step of a small model on made-up tokens, which records the shapes it was asked for."""

    def __init__(self, *, attends: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))
        self.attends = attends
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, samples: int, length: int) -> None:
        self.shapes.append((samples, length))
        ids = torch.zeros(samples, length, dtype=torch.long)
        logits = self.model(ids)
        if self.attends:
            logits = torch.softmax(logits @ logits.mT, -1) @ logits
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        self.model.zero_grad()


@pytest.mark.parametrize("attends", [False, True])
def test_the_budget_is_the_largest_that_fits_and_was_measured(attends: bool) -> None:
    step = Step(attends=attends)
    fit = fit_token_budget(step, LENGTHS, limit_bytes=10 * MIB, threshold=0.8)
    allowed = 0.8 * 10 * MIB
    assert step.shapes[0] == (1, 100)  # the worst case comes first
    measured = {point.tokens: point.peak_bytes for point in fit.points if point.peak_bytes is not None}
    assert measured[fit.token_budget] <= allowed
    for length in (100, 33):  # one more sample of any length does not fit
        samples = fit.token_budget // length
        assert measure_peak(lambda samples=samples, length=length: step(samples, length)) <= allowed
    hardest = 100 if attends else min((100, 33), key=lambda length: fit.token_budget // length * length)
    assert measure_peak(lambda: step(fit.token_budget // hardest + 1, hardest)) > allowed * 0.98
    assert fit.limit_bytes - fit.predict_bytes(fit.token_budget) == fit.headroom_bytes >= 0.19 * 10 * MIB
    growth = [two.samples / one.samples for one, two in zip(fit.points, fit.points[1:], strict=False)]
    assert max(growth) <= 2


def test_it_prints_what_it_rests_on() -> None:
    fit = fit_token_budget(Step(), LENGTHS, limit_bytes=10 * MIB)
    text = str(fit)
    assert f"token budget {fit.token_budget}: " in text and "of 10.00 MiB" in text and "(threshold 90%)" in text
    assert text.count("samples of") == len(fit.points) > 4
    assert ODBDataLoader(Numbers(0, 4), token_budget=fit.token_budget, collate_fn=collate).token_budget > 0


def test_what_fits_and_is_no_multiple_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\d+ tokens fit into memory, less than multiple_of=1000000"):
        fit_token_budget(Step(), LENGTHS, limit_bytes=10 * MIB, multiple_of=10**6)


def test_the_line_of_a_step_that_grows_linearly_is_exact() -> None:
    fit = fit_token_budget(Step(), [50], limit_bytes=20 * MIB)
    for samples in (3, 17, 60):
        assert fit.predict_bytes(samples * 50) == pytest.approx(
            measure_peak(lambda samples=samples: Step()(samples, 50)), rel=0.02
        )


def test_storages_add_up_as_the_memory_tracker_of_torch_says() -> None:
    step = Step()
    ours = measure_peak(lambda: step(8, 50))
    tracker = MemTracker()
    tracker.track_external(step.model)
    with tracker:
        step(8, 50)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert abs(ours - theirs) <= 4096


@pytest.mark.deep
def test_fake_tensors_are_measured_without_allocating() -> None:
    expected = measure_peak(lambda: Step()(8, 50))
    with FakeTensorMode():
        step = Step()
        assert abs(measure_peak(lambda: step(8, 50)) - expected) <= 4096
        fit = fit_token_budget(step, [4096], limit_bytes=2**35)  # 32 GiB
    assert fit.token_budget > 2**24


def test_an_accelerator_is_asked_for_what_every_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.accelerator` reports memory only since torch 2.9. The module of a device always has."""
    calls: list[str] = []
    answers: dict[str, Any] = {"max_memory_allocated": 7, "mem_get_info": (300, 1000), "memory_reserved": 200}
    answers["get_per_process_memory_fraction"] = 0.4

    class Device:
        def __getattr__(self, name: str) -> Any:
            assert hasattr(torch.cuda, name)
            return lambda: calls.append(name) or answers.get(name)

    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(torch, "get_device_module", Device)
    assert measure_peak(lambda: calls.append("run")) == 7
    assert calls == ["synchronize", "reset_peak_memory_stats", "run", "synchronize", "max_memory_allocated"]
    assert get_available_bytes() == 400, "no more than the process's share"
    answers["get_per_process_memory_fraction"] = 1.0
    assert get_available_bytes() == 500
    release_memory()
    assert calls[-1] == "empty_cache"


class Pretended:
    """A step whose memory is a function, so that the results can be computed by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_of: Any) -> None:
        self.shapes: list[tuple[int, int]] = []

        def measure(run: Any) -> int:
            run()
            return int(bytes_of(*self.shapes[-1]))

        monkeypatch.setattr("odb_ref.torch.loop.budget.measure_peak", measure)

    def __call__(self, samples: int, length: int) -> None:
        self.shapes.append((samples, length))


@pytest.mark.parametrize(
    ("bytes_of", "expected"),
    [
        (lambda n, length: 1000 + 10 * n * length, 800),  # 9,000 allowed
        (lambda n, length: 1000 + n * length + (n * length) ** 2 // 100, 840),  # grows faster than the line
        (lambda n, length: 1000 + 200 * (n * length) ** 0.5, 1590),  # or slower
        (lambda n, length: 1000 + 10 * n * length + 100 * n, 400),  # a cost for each sample: the short ones decide
    ],
)
def test_whatever_the_curve_the_last_point_that_fits_is_found(
    monkeypatch: pytest.MonkeyPatch, bytes_of: Any, expected: int
) -> None:
    step = Pretended(monkeypatch, bytes_of)
    fit = fit_token_budget(step, [10, 10, 100], limit_bytes=10_000)
    assert len(step.shapes) == len(set(step.shapes)) < 25
    for length in (10, 100):
        assert bytes_of(max(1, fit.token_budget // length), length) <= 9_000
    assert fit.token_budget >= 0.9 * expected // 100 * 100
    assert fit_token_budget(step, [100], limit_bytes=10_000, multiple_of=64).token_budget % 64 == 0


def test_running_out_of_memory_is_a_bound() -> None:
    def step(samples: int, length: int) -> None:
        if samples > 37:
            raise torch.OutOfMemoryError("CUDA out of memory")
        inner(samples, length)

    inner = Step()
    fit = fit_token_budget(step, [50], limit_bytes=2**40)
    assert fit.token_budget == 37 * 50
    assert any(point.peak_bytes is None for point in fit.points)
    assert "out of memory" in str(fit)


def misuse(rank: int, options: dict[str, Any], is_rehearsed: bool) -> None:
    given = {"lengths": LENGTHS, "token_budget" if is_rehearsed else "limit_bytes": 40 * MIB} | (
        options if rank else {}
    )
    (rehearse if is_rehearsed else fit_token_budget)(Step(), **given)  # type: ignore[operator]


WRONG: list[tuple[dict[str, Any], bool, str, str]] = [
    ({"lengths": []}, False, "JobError", "lengths must not be empty"),
    ({"lengths": [3, 0]}, False, "JobError", "a length must be at least 1"),
    ({"threshold": 1.5}, False, "JobError", "threshold lie above 0"),
    ({"threshold": 0.5}, False, "UsageError", "must be the same on all ranks"),
    ({"lengths": [3, 0]}, True, "JobError", "a length must be at least 1"),
    ({"token_budget": 0}, True, "JobError", "token_budget must be at least 1"),
    ({"token_budget": 5}, True, "UsageError", "must be the same on all ranks"),
]


def test_what_is_wrong_on_one_rank_is_an_error_on_all_at_once() -> None:
    cases = [(options, is_rehearsed) for options, is_rehearsed, _, _ in WRONG]
    for (other, own), (_, _, error, text) in zip(run_each(2, misuse, cases), WRONG, strict=True):
        assert own.error == "UsageError"
        assert other.error == error
        assert text in own.text
        assert text in other.text
        assert max(own.seconds, other.seconds) < 10


def test_what_makes_no_sense_is_refused() -> None:
    step = Step()
    for options in ({"threshold": 0.0}, {"threshold": 1.1}, {"growth": 1.0}, {"multiple_of": 0}, {"limit_bytes": 0}):
        with pytest.raises(UsageError):
            fit_token_budget(step, LENGTHS, **({"limit_bytes": MIB} | options))
    with pytest.raises(UsageError, match="empty"):
        fit_token_budget(step, [], limit_bytes=MIB)
    with pytest.raises(UsageError, match="one sample of 100 tokens takes"):
        fit_token_budget(step, LENGTHS, limit_bytes=1000)
    with pytest.raises(UsageError, match="do not take more memory"):
        fit_token_budget(lambda samples, length: None, LENGTHS, limit_bytes=MIB)
    if not torch.accelerator.is_available():
        with pytest.raises(UsageError, match="limit_bytes="):
            fit_token_budget(step, LENGTHS)
    with pytest.raises(ZeroDivisionError):
        fit_token_budget(lambda samples, length: 1 / 0, LENGTHS, limit_bytes=MIB)


def test_what_says_that_memory_ran_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_hardest_batches_come_first_and_stay_in_the_budget() -> None:
    step = Step()
    points = rehearse(step, LENGTHS, 150, count=3)
    sizes = sorted((max(1, 150 // length) * length for length in LENGTHS), reverse=True)
    assert [a * b for a, b in step.shapes] == sizes[:3]
    assert [point.tokens for point in points] == [a * b for a, b in step.shapes]
    assert rehearse(step, [200], 150)[0].samples == 1  # longer than the budget, so alone


# Several ranks -----------------------------------------------------------------------------------------------------------


def test_all_ranks_get_the_budget_of_the_one_that_needs_most() -> None:
    def fit_on_rank(rank: int) -> Any:
        step = Step()
        if rank == 1:  # needs more than the other
            step.model.append(nn.Linear(32, 512))
            step.model.append(nn.Linear(512, 32))
        return str(fit_token_budget(step, [30 + 20 * rank], limit_bytes=20 * MIB)), step.shapes

    values = get_values(run_ranks(2, fit_on_rank))
    assert values[0] == values[1]
    assert values[0][1][0] == (1, 50)
    alone = fit_token_budget(Step(), [50], limit_bytes=20 * MIB)
    assert f"token budget {alone.token_budget}:" not in values[0][0]


def fail_on_rank(rank: int, failing: str) -> Any:
    def step(samples: int, length: int) -> None:
        if rank == 1 and samples > 3:
            raise torch.OutOfMemoryError("CUDA out of memory") if failing == "memory" else ValueError("a bug")
        inner(samples, length)

    inner = Step()
    if failing == "memory":
        fit = fit_token_budget(step, [50], limit_bytes=2**40)
        with pytest.raises(JobError, match="rank 1 ran out of memory"):
            rehearse(step, [50], 400)
        return fit.token_budget
    return fit_token_budget(step, [50], limit_bytes=2**40)


def test_a_rank_that_fails_leaves_none_waiting() -> None:
    memory, results = run_each(2, fail_on_rank, [("memory",), ("bug",)])
    assert get_values(memory) == [150, 150]
    assert [result.error for result in results] == ["JobError", "ValueError"]
    assert results[0].rank == 1 and "a bug" in results[0].text


# The learning rate -------------------------------------------------------------------------------------------------------


def test_the_rate_is_scaled_for_one_step_only() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.2}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    weight.grad = torch.ones_like(weight)
    with scaled_learning_rate(optimizer, 3.0):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.6])
        optimizer.step()
    assert weight.tolist() == pytest.approx([0.7, 0.7])
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.1])
    with pytest.raises(ZeroDivisionError), scaled_learning_rate(optimizer, 3.0):
        _ = 1 / 0
    assert schedule.get_last_lr() == pytest.approx([group["lr"] for group in optimizer.param_groups])


def test_the_page_fits_a_budget_without_training_the_model() -> None:
    """The first two blocks of docs/howto/memory.md run real steps, on made-up batches."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "memory.md"
    fit, hardest, *_ = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    before = copy.deepcopy(toy.model.state_dict())
    exec(compile(fit + hardest, str(page), "exec"), {})
    assert not toy.optimizer.state
    torch.testing.assert_close(toy.model.state_dict(), before, rtol=0, atol=0)
