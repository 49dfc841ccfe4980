"""Out of memory in a step: halves on the rank that fails, the same gradients on all, nothing lost, no rank left waiting."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.errors import UsageError
from odb_ref.torch.loop import MemoryFit, StepGuard
from odb_ref.torch.loop import guard as guard_module
from odb_ref.torch.loop.splitting import find_count, split_batch
from tests.torch.data import Numbers, Prompts, make_loader
from tests.torch.models import (
    Update,
    check_gradient,
    check_updates,
    compute_loss,
    compute_union_gradient,
    get_gradient,
    list_updates,
    make_model,
)
from tests.torch.ranks import check_errors, get_values, run_each, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

torch.set_num_threads(1)
SIZES = [30, 9]
OPTIONS: dict[str, Any] = {"token_budget": 90, "window": 12, "shard": "given", "timeout_s": 30}
WHOLE = OPTIONS | {"token_budget": 1000, "ramp_rounds": 0}
"""Settings with which a few samples are one batch."""


@pytest.fixture(autouse=True)
def light_collections() -> Iterator[None]:
    """Excludes imported objects from the garbage collections after each failure, which would take a tenth of a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


class FailingBackward(torch.autograd.Function):
    """Passes a tensor through, and runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory: injected on the way back")


class Faults:
    """Makes batches of more than ``most`` samples fail, with some probability, at some point in the step."""

    def __init__(self, seed: int, chance: float, *, most: int = 1) -> None:
        self.choose = random.Random(seed)
        self.chance = chance
        self.most = most
        self.count = 0

    def compute(self, model: nn.Module, batch: dict[str, Any], reduction: str) -> torch.Tensor:
        return compute_loss(model, batch, reduction)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any], reduction: str = "mean") -> torch.Tensor:
        place = ""
        if len(batch["numbers"]) > self.most and self.choose.random() < self.chance:
            place = self.choose.choice(["before", "forward", "loss", "first", "middle"])
            self.count += 1
        if place == "before":
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        handles = []
        if place in ("forward", "middle"):

            def fail(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                if place == "forward":
                    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: injected")
                return FailingBackward.apply(output)

            layer = next(module for module in model.modules() if isinstance(module, nn.Tanh))
            handles.append(layer.register_forward_hook(fail))
        try:
            loss = self.compute(model, batch, reduction)
        finally:
            for handle in handles:
                handle.remove()
        if place == "loss":
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return FailingBackward.apply(loss) if place == "first" else loss


def train(
    rank: int, chance: float, seed: int, options: dict[str, Any], kind: str = "ddp", epochs: int = 1
) -> tuple[list[list[Update]], int, int | None]:
    """Returns its updates by epoch, and how often memory ran out on this rank."""
    model = make_model()
    wrapped = DistributedDataParallel(model) if kind == "ddp" and dist.is_initialized() else model
    reduction = options.get("loss_reduction", "mean")
    faults = Faults(seed + rank, chance)
    guard = StepGuard(wrapped, lambda model, batch: faults.compute_loss(model, batch, reduction))
    data = Numbers(sum(SIZES[:rank]), SIZES[rank])
    with make_loader(data, **OPTIONS | options) as loader:
        updates = [list_updates(loader, guard.backward, partial(get_gradient, wrapped)) for _ in range(epochs)]
    assert guard.failures == faults.count
    everywhere = torch.tensor(guard.failures)
    if dist.is_initialized():
        dist.all_reduce(everywhere)
    assert guard.all_failures == everywhere
    return updates, guard.failures, guard.token_budget


VARIANTS: list[dict[str, Any]] = [
    {},
    {"accumulation_steps": 3},
    {"accumulation_steps": 2, "loss_reduction": "sum"},
    {"on_idle": "none"},
]


def test_gradients_are_exact_on_one_process_whatever_fails() -> None:
    for seed, options in enumerate(VARIANTS[:3]):
        epochs, failures, token_budget = train(0, 0.5, seed, options)
        check_updates(epochs, SIZES[0])
        assert failures > 3
        assert token_budget is not None and token_budget < OPTIONS["token_budget"]


def test_gradients_are_exact_on_two_processes_whatever_fails() -> None:
    cases = [(0.5, seed, options) for seed, options in enumerate(VARIANTS)]
    for results in run_each(2, train, cases, timeout_s=200):
        values = get_values(results)
        check_updates([updates for (updates,), _, _ in values], sum(SIZES))
        assert sum(failures for _, failures, _ in values) > 3


@pytest.mark.deep
def test_a_thousand_failures_lose_no_sample_and_leave_nobody_waiting() -> None:
    epochs = 64
    values = get_values(run_ranks(2, train, 0.75, 100, {"accumulation_steps": 2}, "ddp", epochs, timeout_s=280))
    for ranks in zip(*(value[0] for value in values), strict=True):
        check_updates(ranks, sum(SIZES))
    assert sum(value[1] for value in values) >= 1000


@pytest.mark.parametrize("scaling", ["exact", "none"])
def test_a_batch_without_a_label_goes_in_halves_and_adds_nothing(scaling: str) -> None:
    """Its gradients are zero and not None, so momentum and weight decay act as in plain training."""
    model = make_model()
    faults = Faults(0, 1.0)
    guard = StepGuard(model, faults.compute_loss)
    with make_loader(Prompts(0, 8, "all"), loss_scaling=scaling, **OPTIONS) as loader:
        for batch, info in loader.steps():
            assert guard.backward(batch, info) == 0.0
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert not any(get_gradient(model))
    assert guard.failures > 2


def train_a_half_without_a_label(rank: int, *, is_sharded: bool) -> Any:
    def divide(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if len(batch["numbers"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        mask = batch["labels"][:, 1:] != -100
        return (model(batch["input_ids"])[:, 1:].sum(-1) * mask).sum() / mask.sum()

    model = make_model()
    guard = StepGuard(fully_shard(model), divide, memory=FIT) if is_sharded else StepGuard(model, divide)
    with make_loader(Prompts(0, 2, "odd"), **WHOLE) as loader, limited_memory(lambda: 30):
        for batch, info in loader.steps():
            guard.backward(batch, info)
    return guard.failures, get_gradient(model)


def test_a_half_without_a_label_is_left_out_so_its_mean_is_not_zero_by_zero() -> None:
    failures, gradient = train_a_half_without_a_label(0, is_sharded=False)
    assert failures == 1
    assert all(map(math.isfinite, gradient))
    assert get_values(run_ranks(1, partial(train_a_half_without_a_label, is_sharded=True))) == [(1, gradient)]


class Uneven(nn.Module):
    """Uses one parameter on even batches, another on odd ones, a third never. Counts its passes, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.never = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
        self.single = nn.Parameter(torch.ones(2, dtype=torch.float32))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        self.passes += 1
        used = self.odd if batch["numbers"][0] % 2 else self.even
        return used.sum() * len(batch["numbers"]) + self.single.sum().double()


def train_uneven(rank: int) -> Any:
    model = Uneven()
    wrapped = DistributedDataParallel(model)
    budgets: list[int] = []
    guard = StepGuard(wrapped, lambda model, batch: fail_once(model(batch)), lower_budget=budgets.append)
    is_new = True

    def fail_once(loss: torch.Tensor) -> torch.Tensor:
        nonlocal is_new
        has_failed, is_new = is_new and not rank, False
        return FailingBackward.apply(loss) if has_failed else loss

    options = OPTIONS | {"loss_scaling": "none", "loss_reduction": "sum", "ramp_rounds": 0, "token_budget": 10_000}
    with make_loader(Numbers(2 + rank, 1 + (not rank)), **options) as loader:
        for batch, info in loader.steps():
            guard.backward(batch, info)
    gradients = [model.even.grad, model.odd.grad, model.never.grad, model.single.grad]
    return [None if grad is None else grad.tolist() for grad in gradients], budgets, guard.token_budget


def test_parameters_that_one_rank_uses_are_averaged_and_others_left_alone() -> None:
    """Rank 0 has samples 2 and 3, in halves because it fails once, and rank 1 has sample 3."""
    (gradients, budgets, budget), second = get_values(run_ranks(2, train_uneven))
    assert gradients == [[0.5] * 3, [1.0] * 3, None, [1.5] * 2]
    assert budgets == [budget] and budget > 0
    assert second == (gradients, [], None)


def train_apart(rank: int) -> list[Update]:
    """Trains a job of its own, beside that of the other rank."""
    own = [dist.new_group([each]) for each in range(2)][rank]
    guard = StepGuard(DistributedDataParallel(model := make_model(), process_group=own), compute_loss)
    options = OPTIONS | {"update_samples": 5, "process_group": own, "is_apart": True, "name": str(rank)}
    with make_loader(Numbers(10 * rank, 10), **options) as loader:
        return list_updates(loader, guard.backward, partial(get_gradient, model))


def test_gradients_are_averaged_over_the_group_of_the_model() -> None:
    for numbers, gradient in chain.from_iterable(get_values(run_ranks(2, train_apart))):
        check_gradient(gradient, compute_union_gradient(numbers))


def train_with_less(rank: int) -> Any:
    """Returns by epoch the largest batch, and the failures so far. Rank 1 holds at most 60 tokens."""

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if rank == 1 and batch["input_ids"].numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return compute_loss(model, batch)

    found = []
    with make_loader(Numbers(60 * rank, 60), **OPTIONS) as loader:
        guard = StepGuard(make_model(), step, lower_budget=loader.accept_budget)
        for _ in range(3):
            tokens, numbers = [], []
            for batch, info in loader.steps():
                guard.backward(batch, info)
                tokens.append(info.padded_tokens)
                numbers += [] if info.is_idle else batch["numbers"]
            assert sorted(numbers) == list(range(60 * rank, 60 * rank + 60))
            found.append((max(tokens), guard.failures))
    return found


def test_what_one_rank_cannot_hold_becomes_the_budget_of_all() -> None:
    values = get_values(run_ranks(2, train_with_less))
    for (first, _), *later in values:
        assert first > 81
        assert all(most <= 81 for most, _ in later)
    assert values[0][-1][1] == 0
    assert values[1][0][1] > 0


def make_stepping() -> nn.Module:
    """Returns a model with an optimizer in the backward pass, which would step before gradients are averaged, and twice."""
    model = make_model()
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def make_tensor_parallel() -> nn.Module:
    return parallelize_module(make_model(), init_device_mesh("cpu", (2,)), {"2": ColwiseParallel()})


ENGINE = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (ENGINE, "DeepSpeed's engine has collectives of its own"),
    (
        lambda: nn.Sequential(DistributedDataParallel(make_model())),
        "DistributedDataParallel stands inside a Sequential",
    ),
    (lambda: make_model().requires_grad_(False), "no parameter to train"),
    # A rank with idle batches has no sparse gradients, and would wait for a rank that has failed.
    (lambda: nn.Sequential(nn.Embedding(32, 6, sparse=True), nn.Linear(6, 32)), "use sparse=False"),
    (make_stepping, "changed in the backward pass"),
    (make_tensor_parallel, "the model is tensor parallel"),
]


def test_a_model_whose_gradients_a_guard_cannot_average_is_refused() -> None:
    found = run_each(2, lambda rank, make: StepGuard(make(), compute_loss), [(make,) for make, _ in REFUSED])
    for (_, said), results in zip(REFUSED, found, strict=True):
        check_errors(results, said, error="UsageError")


def test_a_parameter_outside_the_model_is_refused() -> None:
    """Preserves: WEIGHT. Its gradient would never be cleared."""
    model, scale = make_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    with make_loader(Numbers(0, 4), **OPTIONS) as loader:
        batch, info = next(iter(loader.steps()))
        with pytest.raises(UsageError, match="put all that is trained into one module"):
            StepGuard(model, lambda model, batch: compute_loss(model, batch) * scale).backward(batch, info)
        assert scale.grad is None
        whole = nn.ModuleList([model, nn.ParameterList([scale])])
        StepGuard(whole, lambda _, batch: compute_loss(model, batch) * scale).backward(batch, info)
        assert scale.grad is not None


# What does not fit alone, and what is not a lack of memory -------------------------------------------------------------------


def fail_for_good(rank: int, error: Exception, accumulation_steps: int) -> Any:
    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if rank == 1:
            raise error
        return compute_loss(model, batch)

    guard = StepGuard(make_model(), step)
    with make_loader(Numbers(20 * rank, 20), accumulation_steps=accumulation_steps, **OPTIONS) as loader:
        for batch, info in loader.steps():
            guard.backward(batch, info)


def test_a_sample_that_does_not_fit_alone_or_any_other_error_fails_on_every_rank() -> None:
    memory = torch.OutOfMemoryError("CUDA out of memory")
    *unfit, bug = run_each(2, fail_for_good, [(memory, 1), (memory, 3), (ValueError("a bug"), 1)])
    for results in unfit:
        assert [result.error for result in results] == ["JobError", "OutOfMemoryError"]
        assert results[0].rank == 1
        assert "does not fit alone: CUDA out of memory" in results[1].text
    assert (bug[1].error, bug[1].text) == ("ValueError", "a bug")
    assert (bug[0].error, bug[0].rank) == ("JobError", 1)


# A sharded model ----------------------------------------------------------------------------------------------------------


@contextmanager
def limited_memory(most_bytes: Callable[[], float]) -> Iterator[None]:
    """Limits what the guard may reserve."""

    def reserve(size: int, device: torch.device) -> None:
        if size > most_bytes():
            raise torch.OutOfMemoryError("CUDA out of memory: injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module, "reserve_memory", reserve)
        yield


FIT = MemoryFit(points=(), base_bytes=0, bytes_per_token=1, limit_bytes=1000, threshold=0.9, token_budget=90)


def train_sharded(rank: int, kind: str, options: dict[str, Any], least: int = 31) -> Any:
    model = make_model()
    peers = 2 if kind == "fsdp2 and tp" else 1  # which hold the same batches, and do not fail alike
    if kind != "fsdp1":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // peers, peers), mesh_dim_names=("dp_shard", "tp"))
        options = options | {"mesh": mesh}
        if peers > 1:
            parallelize_module(model[2], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        fully_shard(model[2], mesh=mesh["dp_shard"])
        wrapped: nn.Module = fully_shard(model, mesh=mesh["dp_shard"])
    else:
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    passes = 0

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return compute_loss(model, batch)

    guard = StepGuard(wrapped, step, memory=FIT)
    choose = random.Random(rank)
    get = get_whole_gradient if kind == "fsdp1" else get_gradient
    own = rank // peers
    with (
        make_loader(Numbers(sum(SIZES[:own]), SIZES[own]), **OPTIONS | options) as loader,
        limited_memory(lambda: choose.uniform(least, 90)),
    ):
        updates = list_updates(loader, guard.backward, partial(get, wrapped))
        return updates, guard.failures, passes - loader.metrics()["odb/steps"]


def get_whole_gradient(model: nn.Module) -> list[float]:
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return get_gradient(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "fsdp2 and tp"])
def test_a_sharded_model_takes_more_passes_on_every_rank(kind: str) -> None:
    values = get_values(run_ranks(2, train_sharded, kind, {"accumulation_steps": 2}, timeout_s=120))
    is_one = kind == "fsdp2 and tp"
    check_updates([value[0] for value in values[: 1 if is_one else 2]], SIZES[0] if is_one else sum(SIZES))
    (_, failures, more), (_, other_failures, others_more) = values
    assert failures + other_failures > 5
    assert more == others_more >= 3


def test_a_sharded_model_that_cannot_hold_a_sample_fails_before_the_step_on_every_rank() -> None:
    results = run_ranks(2, train_sharded, "fsdp2", {"seed": 0}, 1)
    assert {result.error for result in results} <= {"JobError", "OutOfMemoryError"}
    assert "OutOfMemoryError" in {result.error for result in results}


# Halves -------------------------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_where_samples_end() -> None:
    batch = {"ids": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0), "kind": "text"}
    batch["weights"] = np.arange(3)
    first, second = split_batch(batch, 3)
    assert first["ids"].tolist() == [[0, 1], [2, 3]] and second["ids"].tolist() == [[4, 5]]
    assert (first["names"], second["names"]) == (["a", "b"], ["c"])
    assert (first["weights"].tolist(), second["weights"].tolist()) == ([0, 1], [2])
    assert first["scale"] == second["scale"] == 2.0 and first["kind"] == "text"
    pair = split_batch((torch.arange(4), torch.arange(4)), 4)
    assert [[part.tolist() for part in half] for half in pair] == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    assert [half.tolist() for half in split_batch(torch.arange(3), 3)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    "batch",
    [{"ids": torch.zeros(1, 9)}, {"images": {"a": torch.zeros(3)}}, object(), {"mask": [1, 2]}, {"ids": {1, 2, 3}}],
)
def test_a_batch_whose_samples_nobody_can_tell_is_not_cut(batch: Any) -> None:
    with pytest.raises(UsageError, match="pass split="):
        split_batch(batch, 3)


def run_once(
    batch: dict[str, Any],
    prepare: Callable[[dict[str, Any]], None] = lambda batch: None,
    settings: Any = (),
    **options: Any,
) -> list[float]:
    """Returns the gradient of a batch of four samples that fails once. ``prepare`` is called with what is passed."""
    model = make_model()
    faults = Faults(0, 1.0, most=3)

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        prepare(batch)
        return faults.compute_loss(model, batch)

    guard = StepGuard(model, step, **options)
    with make_loader(Numbers(0, 4), **WHOLE | dict(settings)) as loader:
        ((found, info),) = loader.steps()
        guard.backward(found | batch, info)
    assert guard.failures == 1
    return get_gradient(model)


def fail_above(most: int, compute_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function that runs out of memory for more than ``most`` samples."""

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if len(batch["numbers"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return compute_loss(model, batch)

    return step


def test_a_class_of_a_sample_is_not_predicted_from_the_one_before() -> None:
    """Checks: WEIGHT. The first sample of the second half counts."""
    count = find_count({"labels": torch.tensor([-100, 1, 2, 0])}, 3)
    assert count is not None
    assert [count({"labels": torch.tensor(half)}) for half in ([-100, 1], [2, 0])] == [1, 2]


def take(
    fields: list[dict[str, Any]], compute_loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor], **options: Any
) -> StepGuard[Any]:
    """The guard that has taken a batch of four samples with each of these fields."""
    guard = StepGuard(make_model(), compute_loss, **options)
    with make_loader(Numbers(0, 4 * len(fields)), **WHOLE | {"window": 4}) as loader:
        for (batch, info), more in zip(loader.steps(), fields, strict=True):
            guard.backward(batch | more, info)
    return guard


@pytest.mark.parametrize("first", [{}, {"pixels": None}, {"pixels": torch.zeros(4, 3)}, {"pixels": 1, "more": [1] * 4}])
def test_the_first_batch_of_each_kind_is_split_as_a_trial(first: dict[str, Any]) -> None:
    """Samples without images come first, or an image each by chance."""
    with pytest.raises(UsageError, match=r"batch\['pixels'\] has 16 entries for 4 samples.*pass split="):
        take([first, first, {"pixels": torch.zeros(16, 3)}], compute_loss)


def test_batches_of_one_kind_are_split_once() -> None:
    tried = []

    def split(batch: dict[str, Any], samples: int) -> tuple[Any, Any]:
        tried.append(list(batch))
        return split_batch({name: value for name, value in batch.items() if name != "pixels"}, samples)

    pixels = {"pixels": torch.zeros(16, 3)}
    take([{}, pixels, {}, {"pixels": torch.zeros(8, 3)}, pixels], compute_loss, split=split)
    assert ["pixels" in names for names in tried] == [False, True]


def test_an_error_in_a_half_names_what_was_cut() -> None:
    def compute(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        raise IndexError("a box of a sample that is not here")

    with pytest.raises(IndexError, match="a box") as caught:
        take([{"boxes": torch.zeros(4), "kind": "text"}], fail_above(2, compute))
    (note,) = caught.value.__notes__
    assert "cut to 2 entries in " in note and "boxes" in note and "kind" not in note and "pass split=" in note
    with pytest.raises(IndexError) as caught:
        take([{}], compute)
    assert not hasattr(caught.value, "__notes__")


def test_what_a_compute_loss_changes_in_a_batch_is_as_it_was_when_the_pass_is_repeated() -> None:
    def change(batch: dict[str, Any]) -> None:
        batch["more"] = batch.pop("more") + 1
        assert batch["more"] == 2

    assert run_once({"more": 1}, change) == pytest.approx(run_once({}), abs=1e-15)


def test_labels_that_do_not_show_what_carries_loss_need_a_count() -> None:
    expected = run_once({})

    def count(batch: dict[str, Any]) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    assert run_once({"kind": "text"}, count=count) == pytest.approx(expected, abs=1e-15)
    with pytest.raises(UsageError, match="pass count="):
        run_once({}, settings={"supervised_fn": lambda sample: 1})


def test_a_mean_over_samples_goes_in_halves_by_samples() -> None:
    """Checks: WEIGHT. Spec: R4.5. Samples of several lengths count equally."""

    def compute(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()

    def run(most: int) -> list[float]:
        model = make_model()
        with make_loader(Numbers(0, 4), loss_scaling="samples", **WHOLE) as loader:
            StepGuard(model, fail_above(most, compute)).backward(*next(iter(loader.steps())))
        return get_gradient(model)

    check_gradient(run(1), torch.tensor(run(4), dtype=torch.float64))


@pytest.mark.parametrize("scaling", ["exact", "samples"])
def test_where_each_sample_counts_once_halves_need_no_labels(scaling: str) -> None:
    """Checks: WEIGHT. A mean over samples, for batches whose labels have another name."""
    model = nn.Linear(1, 1).double()

    def compute(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return model(torch.tensor(batch["numbers"]).double()[:, None]).mean()

    guard = StepGuard(model, fail_above(1, compute))
    with make_loader(Numbers(0, 3), loss_scaling=scaling, supervised_fn=lambda sample: 1, **WHOLE) as loader:
        batch, info = next(iter(loader.steps()))
        guard.backward({"numbers": batch["numbers"]}, info)
    assert guard.failures == 2
    assert get_gradient(model) == pytest.approx([1.0, 1.0])
