"""The loader a training script uses in place of its DataLoader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Final, NoReturn, SupportsIndex, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, default_collate

from odb_ref.core.batching.cost import choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import get_rule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.batching.weighting import LossReduction, LossScaling, Weighting
from odb_ref.core.config import Config
from odb_ref.core.errors import UsageError, check_integer, choose
from odb_ref.core.types import Mode
from odb_ref.torch.arguments import (
    check_flag,
    check_functions,
    check_kind,
    check_len_bound,
    check_max_bad,
    check_name,
    check_optional,
    check_transport,
    check_updates,
    make_loader_options,
    make_order,
)
from odb_ref.torch.batches import Batch
from odb_ref.torch.epochs import Epochs
from odb_ref.torch.exchange.roster import choose_ranks
from odb_ref.torch.flattening import FlattenSamples
from odb_ref.torch.plan.schedule import Schedule
from odb_ref.torch.reading.collator import CollateFn, OnIdle
from odb_ref.torch.reading.costs import CostFn, make_resources
from odb_ref.torch.reading.counting import make_counting
from odb_ref.torch.reading.measure import LengthFn
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.quarantine import OnBadSample
from odb_ref.torch.settings import (
    FORMED,
    GROUP_OF,
    RENAMED,
    Batching,
    Faults,
    LayoutName,
    Loss,
    Protocol,
    ShardName,
    check_groups,
    describe_new_spelling,
    refuse_old_spelling,
)

Element = TypeVar("Element")


class ODBDataLoader(Epochs[Batch]):
    """Forms batches under a token budget, online, with the same number of steps on every rank.

    ::

        loader = ODBDataLoader(dataset, token_budget=16_384, collate_fn=collate, num_workers=4, shuffle=True)
        for batch, info in loader.steps():
            info.scale(compute_loss(model, batch)).backward()
            if info.is_update_end:
                optimizer.step()
                optimizer.zero_grad()

    Samples are read with a standard ``DataLoader``, and arguments with the same name mean the same as there. The same seed,
    data and world size always give the same batches, whatever the timing. For a map-style data set the number of workers does
    not matter either (REPLAY).

    Args:
        dataset: Map-style or iterable, of any length, including empty.
        token_budget: The maximum number of tokens in a batch, including padding. A longer sample gets a batch of its own.
        update_samples: Samples in an optimizer update, over all ranks. Update u holds the samples at places [uN, (u+1)N) of the
            order that all ranks share (R16). Default: an update holds ``Loss(accumulation_steps=)`` full batches.
        layout: ``"padded"`` gives each sample a row (default). ``"packed"`` lays them end to end in one row (`FlattenSamples`).
        collate_fn: Makes a batch from a list of samples. It runs outside the workers. Default: torch's, or `FlattenSamples` if
            packed.
        shuffle: Whether to permute the order by seed and epoch. Default: False.
        sampler: Lists what this rank reads, instead of its shard. With ``update_samples`` every rank must pass the same order,
            or a `DistributedSampler`.
        shard: ``"auto"`` gives a rank every world_size-th index (default). ``"shared"`` lets ranks draw from one order as they
            have room (R14). ``"given"`` means that the data set holds only this rank's samples.
        seed: Seeds the order, and random numbers drawn while samples are read. Default: 0.
        generator: Supplies the seed: one number is drawn from it now. It must be in the same state on every rank.
        drop_last: Whether to drop the last update if it is not full. Default: False.
        num_workers: Processes that read samples. With 0 the training thread reads. Default: 0.
        prefetch_factor: As in a DataLoader.
        persistent_workers: Whether processes outlive an epoch. Default: True, unless they are forked.
        multiprocessing_context: As in a DataLoader.
        worker_init_fn: As in a DataLoader.
        pin_memory: As in a DataLoader.
        timeout: Seconds to wait for a sample from the workers, as in a DataLoader. Default: 0, no limit.
        mesh: The device mesh of a model spread over several processes. Ranks lie along its data-parallel dimensions (R17).
        batching: How batches are formed: window, order, sizes, costs, a changing budget.
        loss: How losses are weighted: scaling, reduction, accumulation.
        faults: How to handle bad samples, and ranks and processes that stop responding.
        protocol: How ranks agree, and how an epoch ends.
        trace: Path of a file, one per rank, that records events and effects (`odb_ref.trace.format`). Default: none.

    ``docs/explanation/loader.md`` explains each of them.

    Spec: R5, R6, R7, R11, R16.
    Raises: UsageError when an argument makes no sense; `JobError` from an epoch, on every rank, when any rank fails.
    """

    @refuse_old_spelling
    def __init__(
        self,
        dataset: Dataset[Element],
        *,
        token_budget: int,
        update_samples: int | None = None,
        layout: LayoutName = "padded",
        collate_fn: Callable[[list[Element]], Batch] | None = None,
        shuffle: bool = False,
        sampler: Iterable[object] | None = None,
        shard: ShardName = "auto",
        seed: int = 0,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        multiprocessing_context: object = None,
        worker_init_fn: Callable[[int], None] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        mesh: DeviceMesh | None = None,
        batching: Batching = Batching(),  # noqa: B008 - frozen
        loss: Loss = Loss(),  # noqa: B008
        faults: Faults = Faults(),  # noqa: B008
        protocol: Protocol = Protocol(),  # noqa: B008
        trace: str | Path | None = None,
    ) -> None:
        check_groups(batching=batching, loss=loss, faults=faults, protocol=protocol)
        check_functions(
            collate_fn=collate_fn,
            length_fn=batching.length_fn,
            supervised_fn=loss.supervised_fn,
            cost_fn=batching.cost_fn,
            budget_schedule=batching.budget_schedule,
        )
        check_kind(generator, "generator", torch.Generator, "a torch.Generator")
        check_kind(mesh, "mesh", DeviceMesh, "a DeviceMesh")
        check_kind(trace, "trace", (str, PathLike), "a path")
        self.dataset: Dataset[object] = dataset
        self.sampler: Iterable[object] | None = sampler
        causal_shift = loss.causal_shift is None or check_flag(loss.causal_shift, "causal_shift")
        shape = choose(Layout, layout, "layout")
        if collate_fn is None:
            self.collate_fn = FlattenSamples(causal_shift) if shape is Layout.PACKED else default_collate
        else:  # the data set's items and the function's argument have the same type; from here on samples are opaque
            self.collate_fn = cast(CollateFn, collate_fn)
        # All options are checked once, here. From now on numbers and flags are Python's own types.
        options = make_loader_options(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            pin_memory=pin_memory,
            silence_s=faults.timeout_s,
        )
        self.num_workers = options.num_workers
        self.pin_memory = bool(pin_memory)
        self.token_budget = check_integer(token_budget, "token_budget", 1)
        self._budget_schedule = batching.budget_schedule
        self._resources = make_resources(batching.max_patches, cast(CostFn | None, batching.cost_fn), batching.limits)
        others: dict[str, object] = {
            "accumulation_steps": None if loss.accumulation_steps == 1 else loss.accumulation_steps,
            "window_bytes": batching.window_bytes,
            "quota": protocol.quota,
            "len_bound": batching.len_bound,
        }
        updates = check_updates(update_samples, others)
        window = updates or check_integer(batching.window, "window", 1)
        window_bytes = check_optional(batching.window_bytes, "window_bytes", 1)
        self._ramp_rounds = check_optional(protocol.ramp_rounds, "ramp_rounds", 0)
        on_idle = choose(OnIdle, protocol.on_idle, "on_idle")
        on_bad_sample = choose(OnBadSample, faults.on_bad_sample, "on_bad_sample")
        max_bad = check_max_bad(faults.max_bad_samples)
        self._weighting = Weighting(
            scaling=choose(LossScaling, loss.scaling, "scaling"),
            reduction=choose(LossReduction, loss.reduction, "reduction"),
            accumulation_steps=check_integer(loss.accumulation_steps, "accumulation_steps", 1),
            is_divided_by_steps=check_flag(loss.is_divided_by_trainer, "is_divided_by_trainer"),
        )
        self._config = Config(
            rank=0,
            world_size=1,
            budget_tokens=self.token_budget,
            # A step is handed out with its update's counts and the fact whether it is the last, so all of these must fit.
            depth_steps=max(check_integer(batching.depth, "depth", 1), self._weighting.accumulation_steps + 1),
            rule=get_rule(protocol.policy) if isinstance(protocol.policy, str) else protocol.policy,
            window_samples=window,
            layout=shape,
            order=choose(StepOrder, batching.order, "order"),
            cost=choose_cost(batching.cost),
            sizes=choose(Sizes, batching.sizes, "sizes"),
            padding_share=check_integer(batching.padding_share, "padding_share", 1),
            limits=self._resources.limits,
            max_age_rounds=check_integer(protocol.max_age_rounds, "max_age_rounds", 1),
            mode=choose(Mode, protocol.mode, "mode"),
            quota_samples=check_optional(protocol.quota, "quota", 1),
            update_samples=updates,
        )
        self._order = make_order(
            dataset,
            sampler=sampler,
            shuffle=shuffle,
            shard=shard,
            seed=seed,
            generator=generator,
            num_workers=self.num_workers,
            update_samples=updates,
            drop_last=check_flag(drop_last, "drop_last"),
        )
        if self._order.is_shared and window_bytes is not None:
            raise UsageError(
                "window_bytes cannot be used with shard='shared': a rank has to read every sample that it draws from the "
                "common order"
            )
        self._bound = check_len_bound(batching.len_bound, self._order)
        self._ranks = choose_ranks(
            protocol.process_group, mesh, protocol.mesh_dims, is_apart=check_flag(protocol.is_apart, "is_apart")
        )
        self.process_group = self._ranks.groups[-1]
        self._transport = check_transport(protocol.transport)
        self._timeout_s = options.silence_s
        self._trace = trace
        self._name = None if protocol.name is None else check_name(protocol.name)
        measure, label_check, settings = make_counting(
            cast(LengthFn | None, batching.length_fn),
            cast(LengthFn | None, loss.supervised_fn),
            causal_shift=causal_shift,
            is_assumed=loss.causal_shift is None,
            resources=self._resources,
            is_checked=self._weighting.needs_supervised,
            is_packing=self.num_workers > 0,
            is_weighing=window_bytes is not None,
        )
        self._spec = PipelineSpec(
            dataset=dataset,
            measure=measure,
            options=options,
            collate_fn=self.collate_fn,
            on_idle=on_idle,
            idle_sample=protocol.idle_sample,
            window_bytes=window_bytes,
            on_bad_sample=on_bad_sample,
            label_check=label_check,
            is_packed=shape is Layout.PACKED,
        )
        decisive = settings | ({} if window_bytes is None else {"window_bytes": window_bytes})
        self._common = decisive | {
            "on_idle": on_idle,
            "on_bad_sample": on_bad_sample,
            "loss_scaling": self._weighting.scaling,
            "loss_reduction": self._weighting.reduction,
            "accumulation_steps": self._weighting.accumulation_steps,
            "trainer_divides_loss": self._weighting.is_divided_by_steps,
        }
        # Refuses impossible settings before any process has started.
        shared = json.loads(self._set_ramp(self._config).shared_json)
        decisive |= {key: value for key, value in shared.items() if key not in ("tag", "world_size")}
        self._schedule = Schedule(
            self._order,
            json.dumps(decisive),
            quota=self._config.quota_samples,
            read_ahead=window // 2,
            max_bad=max_bad if on_bad_sample is OnBadSample.QUARANTINE else 0,
        )
        self._start_session()

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses assignments without effect: the arguments are read once. Raises: UsageError."""
        self._check_change(name, "assigned")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuses deletions without effect, like `__setattr__`. Raises: UsageError."""
        self._check_change(name, "deleted")
        super().__delattr__(name)

    def _check_change(self, name: str, what: str) -> None:
        if "_session" in self.__dict__ and name in _READ_ONCE:
            instead = _INSTEAD.get(name, "make another loader with it")
            raise UsageError(f"{name} cannot be {what}: the loader reads its arguments only when it is made; {instead}")

    def __bool__(self) -> bool:
        """Returns True, as for any loader, without asking for a length."""
        return True

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "an ODBDataLoader cannot be copied or pickled: it owns connections and processes. Make another from the same "
            "arguments, and transfer its position with state_dict and load_state_dict"
        )


_INSTEAD: Final = {
    "epoch": "call set_epoch",
    "token_budget": "call accept_budget for a smaller one, or make another loader",
    "batch_size": FORMED,
    "batch_sampler": FORMED,
    "in_order": "its batches are always in order",
    "pin_memory_device": "make another loader with pin_memory",
    **{name: f"make another loader with {describe_new_spelling(name)}" for name in RENAMED},
}
_READ_ONCE: Final = frozenset(signature(ODBDataLoader).parameters) | GROUP_OF.keys() | _INSTEAD.keys()
"""Arguments of this loader, arguments of a DataLoader that it replaces, and attributes that only the loader sets."""
