"""The loader a training script uses in place of its DataLoader."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import TargetRule, get_rule
from odb_ref.core.config import DEPTH_STEPS, MAX_AGE_ROUNDS, RAMP_ROUNDS, Config, Terms
from odb_ref.core.errors import UsageError, check_integer, choose
from odb_ref.core.types import Mode
from odb_ref.torch.arguments import check_functions, check_seconds, check_transport, make_loader_options
from odb_ref.torch.backend.messages import Backend
from odb_ref.torch.backend.process_backend import ProcessBackend
from odb_ref.torch.backend.thread_backend import ThreadBackend
from odb_ref.torch.batches import Batch
from odb_ref.torch.estimate import estimate_steps
from odb_ref.torch.exchange.collectives import get_rank_and_size
from odb_ref.torch.exchange.exchange import Exchange
from odb_ref.torch.exchange.rendezvous import make_transport
from odb_ref.torch.info import TABLE, LossReduction, LossScaling, Reminders, StepInfo, Weighting
from odb_ref.torch.iterator import EpochIterator, LastStep, StepIterator
from odb_ref.torch.options import check_len_bound, choose_collate, compute_trace_path, make_order
from odb_ref.torch.plan.order import Beginning
from odb_ref.torch.plan.schedule import Schedule
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import StateDict
from odb_ref.torch.reading.collator import CollateFn, OnIdle
from odb_ref.torch.reading.costs import CostFn, make_resources
from odb_ref.torch.reading.counting import make_counting
from odb_ref.torch.reading.measure import LengthFn
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.quarantine import OnBadSample, Quarantined, check_max_bad
from odb_ref.torch.shared import SharedSettings, describe_decisive
from odb_ref.torch.trainer.session import REPLACED, Session
from odb_ref.torch.trainer.trainer_side import TrainerSide
from odb_ref.trace.format import TraceWriter

Element = TypeVar("Element")


class ODBDataLoader(Generic[Batch]):
    """Batches under a token budget, formed online, with the same number of steps on every rank.

    ::

        loader = ODBDataLoader(dataset, token_budget=16_384, collate_fn=collate, num_workers=4, shuffle=True)
        for batch, info in loader.steps():
            info.scale(compute_loss(model, batch)).backward()
            if info.is_window_end:
                optimizer.step()
                optimizer.zero_grad()

    Samples are read with a standard ``DataLoader``; all keyword arguments of that name mean what they mean there. Batches are
    the same for the same seed, data and world size, whatever the timing and the number of workers (REPLAY).

    **Batches.** ``token_budget`` bounds a batch, padding included; a longer sample travels alone. With ``layout="packed"`` a
    batch is one row of samples laid end to end (`odb_ref.torch.FlattenSamples`), and the budget bounds their sum. ``window``
    is how many samples a rank looks at when it forms batches, the larger the fuller; ``depth`` how many steps are ready ahead.
    ``length_fn`` gives a sample's tokens, ``supervised_fn`` those that carry loss: by default what the fields of usual tasks
    say (`odb_ref.torch.reading.tasks`), labels other than -100, without the first when ``causal_shift`` (then a batch that
    carries another number fails, for its weight would be wrong). ``policy`` is the target rule, ``max_age_rounds`` bounds how
    often a sample may be put off, ``ramp_rounds`` how many first windows are smaller, for an early first step.

    **Several resources.** ``max_patches`` bounds the patches of a batch's images and videos too (`count_patches` has the
    fields it counts). Or ``cost_fn`` gives what a sample uses of any resources, as integers, and ``limits`` what a batch may
    use of each. Costs are added up, tokens are padded; a sample beyond a limit travels alone, as one beyond the budget does.

    **What a rank reads.** Of a map-style data set its own shard (``shard="auto"``: every world_size-th index of a permutation
    shared by seed and epoch, nothing padded or dropped), or with ``shard="given"``, a ``sampler`` or an iterable data set
    whatever it is given: shards may be of any sizes, also empty. With ``shard="shared"`` all ranks draw from the permutation,
    as their windows have room, and end together (R14). A sampler is listed when an epoch begins, so it must end; a stream
    without an end is an iterable data set. ``generator`` seeds the shuffling in place of ``seed``, by one number drawn from it
    now, on every rank the same. With ``mode="quota"`` all ranks stop together, at ``quota`` samples or when one runs dry.

    **Processes.** With ``num_workers`` above 0 a process of its own reads (by as many workers), forms groups and collates, so
    that none of it holds the interpreter lock of the process that trains; with 0 the thread that asks for a batch does, as
    with a DataLoader, and a rank then takes part only while it asks. ``collate_fn`` runs beside the workers, in a thread or,
    where it is slow, several processes: `get_worker_info` is None and ``worker_init_fn`` has not been called. Where starting a
    process takes seconds (``spawn``, ``forkserver``) these outlive the epoch, unless data set, ``collate_fn`` or another
    function has changed meanwhile, or ``persistent_workers=False``. A sample of any size takes memory, and neither a
    descriptor nor shared memory, while it is held.

    **Randomness.** What ``dataset[i]`` and ``collate_fn`` draw from `random`, `numpy.random` and torch (CPU) follows from
    seed, epoch, rank and the number of the sample or step, and disturbs nobody else's drawing (R12).

    **Idle steps.** A rank that has nothing left takes part in every step to the end: by default with a small batch of its own
    read again, with weight 0 (``on_idle="replay"``; ``idle_sample`` for a rank that never has a sample), with None for a batch
    (``"none"``), or not at all (``"skip"``, for DDP's Join; not with an accumulation window).

    **Weights.** `StepInfo.scale` makes the average over ranks the mean over all supervised tokens of the accumulation window
    of ``accumulation_steps`` batches (``loss_scaling="exact"``), or over its samples (``"samples"``), or leaves it
    (``"none"``), for a loss that is the mean or the sum over a batch (``loss_reduction``). See `odb_ref.torch.info`.

    **Bad samples.** One that cannot be read or measured (``__getitem__`` raises; no or nonsensical length) fails the epoch on
    every rank, by default. With ``on_bad_sample="quarantine"`` it is set aside: not trained on, counted in ``metrics()`` and
    `StepInfo`, listed with its cause in `quarantined`, warned of once an epoch (`BadSampleWarning`), and left out when a saved
    epoch goes on. More than ``max_bad_samples`` on one rank in one epoch still fail: a number, or a share of the rank's
    samples (of those read so far, where their number is unknown), which above 0 always allows ten; so does a rank none of
    whose several samples is good. A ``collate_fn`` or an iterator that raises and a worker that dies always fail.

    **Ends.** Iterating raises `JobError`, the same on every rank and with the rank's name and cause, when any rank fails,
    leaves early or is lost: silent for ``timeout_s`` (``loader_timeout_s``: its loader process does nothing, or a worker is
    stopped). One that is slow is waited for; the logger ``odb_ref`` says for whom, every ``log_wait_s``. `close` ends all.

    **Length.** ``len()`` raises TypeError, for nobody knows it, unless ``len_bound`` asks for a bound: ``"samples"``, which
    always holds, or a number of your own, beyond which a warning is given.

    **State, metrics, traces.** See `state_dict`, `metrics` and `odb_ref.trace.format`: ``trace=PATH`` writes one file for each
    rank. Ranks are those of ``process_group`` or ``device_mesh``, else all; peers outside of it (tensor parallel) get the same
    batches.

    Spec: R5 to R7, R11.
    Raises: UsageError when an argument makes no sense.
    """

    def __init__(
        self,
        dataset: Dataset[Element],
        *,
        token_budget: int,
        layout: str = "padded",
        max_patches: int | None = None,
        cost_fn: Callable[[Element], Sequence[int]] | None = None,
        limits: Sequence[int] = (),
        window: int = 1024,
        depth: int = DEPTH_STEPS,
        mode: str = "join",
        quota: int | None = None,
        policy: str | TargetRule = "odb",
        max_age_rounds: int = MAX_AGE_ROUNDS,
        ramp_rounds: int = RAMP_ROUNDS,
        length_fn: Callable[[Element], int] | None = None,
        supervised_fn: Callable[[Element], int] | None = None,
        causal_shift: bool = True,
        collate_fn: Callable[[list[Element]], Batch] | None = None,
        shuffle: bool = False,
        sampler: Iterable[object] | None = None,
        shard: str = "auto",
        seed: int = 0,
        generator: torch.Generator | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        multiprocessing_context: object = None,
        worker_init_fn: Callable[[int], None] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        on_idle: str = "replay",
        idle_sample: object = None,
        on_bad_sample: str = "fail",
        max_bad_samples: float = 0.01,
        loss_scaling: str = "exact",
        loss_reduction: str = "mean",
        accumulation_steps: int = 1,
        trainer_divides_loss: bool = False,
        transport: str = "reduce",
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        timeout_s: float = 60.0,
        loader_timeout_s: float = 60.0,
        log_wait_s: float = 30.0,
        len_bound: int | str | None = None,
        trace: str | Path | None = None,
    ) -> None:
        check_functions(collate_fn=collate_fn, length_fn=length_fn, supervised_fn=supervised_fn, cost_fn=cost_fn)
        self.dataset: Dataset[object] = dataset
        self.sampler: Iterable[object] | None = sampler
        # What the data set yields is what these functions take: past this point samples are opaque.
        self._layout = choose(Layout, layout, "layout")
        self.collate_fn = cast(CollateFn, collate_fn or choose_collate(self._layout, causal_shift=causal_shift))
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.token_budget = check_integer(token_budget, "token_budget", 1)
        self._resources = make_resources(max_patches, cast(CostFn | None, cost_fn), limits)
        self._window = check_integer(window, "window", 1)
        self._terms = Terms(
            layout=self._layout,
            limits=self._resources.limits,
            max_age_rounds=check_integer(max_age_rounds, "max_age_rounds", 1),
            ramp_rounds=check_integer(ramp_rounds, "ramp_rounds", 0),
            mode=choose(Mode, mode, "mode"),
            quota_samples=None if quota is None else check_integer(quota, "quota", 1),
        )
        self._rule = get_rule(policy) if isinstance(policy, str) else policy
        self._on_idle = choose(OnIdle, on_idle, "on_idle")
        self._idle_sample = idle_sample
        self._on_bad_sample = choose(OnBadSample, on_bad_sample, "on_bad_sample")
        self._weighting = Weighting(
            scaling=choose(LossScaling, loss_scaling, "loss_scaling"),
            reduction=choose(LossReduction, loss_reduction, "loss_reduction"),
            accumulation_steps=check_integer(accumulation_steps, "accumulation_steps", 1),
            is_divided_by_steps=trainer_divides_loss,
        )
        # A step is handed out with the counts of its accumulation window, and whether it is the last: all of these must fit.
        self._depth = max(check_integer(depth, "depth", 1), accumulation_steps + 1)
        if self._on_idle is OnIdle.SKIP and accumulation_steps > 1:
            raise UsageError(
                "on_idle='skip' needs accumulation_steps=1: a rank that skips the step which ends an accumulation window "
                "would never synchronize what it has of it; use on_idle='replay'"
            )
        self._order = make_order(dataset, sampler=sampler, shuffle=shuffle, shard=shard, seed=seed, generator=generator)
        self._len_bound = check_len_bound(len_bound, self._order)
        if process_group is not None and device_mesh is not None:
            raise UsageError("process_group and device_mesh exclude each other")
        self.process_group = device_mesh.get_group() if device_mesh is not None else process_group
        self._transport = check_transport(transport)
        self._timeout_s = check_seconds(timeout_s, "timeout_s", is_zero_allowed=False)
        self._log_wait_s = check_seconds(log_wait_s, "log_wait_s", is_zero_allowed=False)
        self._trace = trace
        self._counting = make_counting(
            cast(LengthFn | None, length_fn),
            cast(LengthFn | None, supervised_fn),
            causal_shift=causal_shift,
            resources=self._resources,
            is_checked=self._weighting.needs_supervised,
            is_packing=num_workers > 0,
        )
        choices = {"on_idle": self._on_idle, "on_bad_sample": self._on_bad_sample}
        order, weighting = self._order, self._weighting
        self._shared = SharedSettings(order=order, weighting=weighting, counting=self._counting, choices=choices)
        self._options = make_loader_options(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            pin_memory=pin_memory,
            loader_timeout_s=loader_timeout_s,
        )
        # Refuses what makes no sense before any process has started.
        settings = describe_decisive(self._make_config(0, 1))
        self._schedule = Schedule(
            self._order, settings, quota=quota, read_ahead=window // 2, max_bad=check_max_bad(max_bad_samples)
        )
        self._trainer_side: TrainerSide | None = None
        self._reminders = Reminders()
        self._last_step = LastStep()
        self._session = Session(TABLE.drop)
        self._finalizer = weakref.finalize(self, self._session.close_soon)
        self._finalizer.atexit = False

    # Epochs ----------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads; without it each iteration goes on to the next."""
        self._schedule.epoch = epoch

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._schedule.epoch

    def __len__(self) -> int:
        if self._len_bound is not None:
            return self._len_bound
        raise TypeError(
            "an ODBDataLoader has no length: how many steps an epoch takes depends on the samples' lengths, which are known "
            "only when they are read; ask for a bound with len_bound=, or use StepInfo.progress"
        )

    def estimate_steps(self, samples: int = 512) -> int:
        """Returns about how many steps an epoch takes, from so many lengths, alike on all ranks; a collective of them all.

        Raises: UsageError for a stream, or a sampler of one's own.
        """
        config = self._make_config(*get_rank_and_size(self.process_group))
        return estimate_steps(self._order, self._counting.measure, config, samples, self.process_group)

    def steps(self) -> StepIterator[Batch]:
        """Starts an epoch, and returns its steps: each batch with what belongs to it.

        ``for batch in loader`` reads the same batches, and `pop_step_info` finds what belongs to one until it is moved.
        """
        return StepIterator(iter(self))

    def __iter__(self) -> EpochIterator[Batch]:
        session = self._session
        session.end_epoch(self._timeout_s, REPLACED)
        exchange = session.get_exchange(self._make_exchange)
        base = self._make_config(exchange.rank, exchange.world_size)
        backend = session.get_backend(lambda: self._make_backend(base))
        try:
            beginning = self._begin(exchange.rank, exchange.world_size)
            start = beginning.start
            config = start.make_config(base)
            if start.trace is not None:
                # Refused here where it cannot be written, and not empty should this process be killed early.
                TraceWriter(start.trace, config, driver="torch", epoch=start.epoch).close()
        except BaseException as error:  # a state that does not fit, a sampler that raises, Ctrl-C: the others wait
            session.refuse(TrainerSide(base, backend, exchange, EpochStart(keys=())), error)
            raise
        self._schedule.begin(beginning)
        steps, log_wait_s = self._weighting.accumulation_steps, self._log_wait_s
        trainer_side = TrainerSide(config, backend, exchange, start, accumulation_steps=steps, log_wait_s=log_wait_s)
        self._trainer_side, self._last_step = trainer_side, LastStep()
        session.begin(trainer_side)
        self._reminders.begin()
        return EpochIterator(
            self,
            trainer_side,
            beginning,
            world_size=exchange.world_size,
            weighting=self._weighting,
            on_idle=self._on_idle,
            len_bound=self._len_bound,
            reminders=self._reminders,
            last=self._last_step,
        )

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns this rank's place after the last step it was given, small enough to save with every checkpoint of the
        model.

        Plain integers, strings, lists and dicts; no communication. Between epochs it stands at the start of the next one.
        Spec: R10. Preserves: ONCE, COVER, and REPLAY with the same world size.
        """
        rank, world_size = get_rank_and_size(self.process_group)
        trainer_side = self._trainer_side
        progress = None if trainer_side is None or trainer_side.is_exhausted else trainer_side.compute_progress()
        return self._schedule.compute_state(rank, world_size, progress).to_dict()

    def load_state_dict(self, state: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Goes on from a saved state with the next iteration.

        With the world size and settings it was saved with, a rank's own state is enough, and the same batches follow in the
        same order. With others give every rank the list of all ranks' states: what none of them had taken is shared out anew.

        Raises: UsageError when this is no such state; whether it fits is known at the next iteration.
        """
        self._schedule.load(state)

    def _begin(self, rank: int, world_size: int) -> Beginning:
        beginning = self._schedule.plan(rank, world_size)
        path = self._trace
        trace = None if path is None else compute_trace_path(path, rank, world_size, beginning.start.epoch)
        return replace(beginning, start=replace(beginning.start, tag=self._shared.make_tag(beginning), trace=trace))

    def close(self) -> None:
        """Leaves the epoch under way, if any, and gives back processes, threads and connections."""
        self._session.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def step_info(self) -> StepInfo | None:
        """What belongs to the step that was handed out last; for idle steps that are None, which carry nothing."""
        self._reminders.note_use()
        return self._last_step.info

    def metrics(self) -> dict[str, float]:
        """Returns the counters of the present or last epoch on this rank, by slash-prefixed name; times in seconds.

        Of the steps taken so far: ``odb/steps``, ``odb/idle_steps``, ``odb/samples``, ``odb/tokens``, the share of padding in
        ``odb/padding_ratio``, the share of the token budgets that held real tokens in ``odb/fill`` and, of all ranks, in
        ``odb/efficiency``; ``odb/patches``, or ``odb/cost_0`` and so on. Besides: ``odb/data_wait_s``, what the training
        thread has waited for steps; ``odb/first_step_s``, from the epoch's start to its first step; ``odb/exchanges`` and
        ``odb/exchange_s``, the collectives that brought an answer, of all epochs; and ``odb/quarantined_samples``.
        """
        trainer_side, exchange = self._trainer_side, self._session.exchange
        if trainer_side is None or exchange is None:
            return {}
        return trainer_side.metrics.describe(self.token_budget, self._resources, exchange.world_size) | {
            "odb/quarantined_samples": trainer_side.bad_samples.count,
            "odb/exchange_s": exchange.exchange_s,
            "odb/exchanges": exchange.exchanges,
        }

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The samples set aside on this rank in the present or last epoch, each with its cause: the first hundred of them."""
        return () if self._trainer_side is None else self._trainer_side.bad_samples.records

    # Parts -----------------------------------------------------------------------------------------------------------

    def _make_config(self, rank: int, world_size: int) -> Config:
        """Returns what the epochs have in common: see `EpochStart.make_config`."""
        config = Config(
            rank=rank,
            world_size=world_size,
            budget_tokens=self.token_budget,
            depth_steps=self._depth,
            rule=self._rule,
            window_samples=self._window,
        )
        return self._terms.apply(config)

    def _make_exchange(self) -> Exchange:
        return Exchange(make_transport(self.process_group, self._transport, self._timeout_s, self._log_wait_s))

    def _make_backend(self, config: Config) -> Backend:
        spec = PipelineSpec(
            dataset=self.dataset,
            measure=self._counting.measure,
            options=self._options,
            collate_fn=self.collate_fn,
            on_idle=self._on_idle,
            idle_sample=self._idle_sample,
            on_bad_sample=self._on_bad_sample,
            label_check=self._counting.label_check,
        )
        return ProcessBackend(config, spec) if self.num_workers else ThreadBackend(config, spec, is_inline=True)
