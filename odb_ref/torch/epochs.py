"""What a loader does, once it knows what it is: it begins epochs, saves and loads its state, and closes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Generic, NoReturn, Self

import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.config import Config, Terms
from odb_ref.core.errors import check_integer
from odb_ref.core.offer import NONE
from odb_ref.torch.backend.messages import Backend
from odb_ref.torch.backend.process_backend import ProcessBackend
from odb_ref.torch.backend.thread_backend import ThreadBackend
from odb_ref.torch.batches import Batch
from odb_ref.torch.estimate import estimate_steps
from odb_ref.torch.exchange.collectives import get_rank_and_size
from odb_ref.torch.exchange.exchange import Exchange
from odb_ref.torch.exchange.rendezvous import make_transport
from odb_ref.torch.info import TABLE, Reminders, StepInfo, Weighting
from odb_ref.torch.iterator import EpochIterator, LastStep, StepIterator
from odb_ref.torch.options import compute_trace_path
from odb_ref.torch.plan.order import Beginning, Order
from odb_ref.torch.plan.schedule import Schedule
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import StateDict
from odb_ref.torch.reading.collator import CollateFn, OnIdle
from odb_ref.torch.reading.costs import Resources
from odb_ref.torch.reading.counting import Counting
from odb_ref.torch.reading.pipeline import PipelineSpec
from odb_ref.torch.reading.quarantine import OnBadSample, Quarantined
from odb_ref.torch.reading.source import LoaderOptions
from odb_ref.torch.shared import SharedSettings
from odb_ref.torch.trainer.session import REPLACED, Session
from odb_ref.torch.trainer.trainer_side import TrainerSide
from odb_ref.trace.format import TraceWriter


class Epochs(Generic[Batch]):
    """The epochs of a loader, one after another. Its constructor is `ODBDataLoader`'s, which checks all that is said here."""

    dataset: Dataset[object]
    collate_fn: CollateFn
    num_workers: int
    token_budget: int
    process_group: dist.ProcessGroup | None
    _resources: Resources
    _window: int
    _window_bytes: int | None
    _terms: Terms
    _rule: TargetRule
    _depth: int
    _on_idle: OnIdle
    _idle_sample: object
    _on_bad_sample: OnBadSample
    _weighting: Weighting
    _order: Order
    _len_bound: int | None
    _transport: str
    _timeout_s: float
    _log_wait_s: float
    _trace: str | Path | None
    _counting: Counting
    _shared: SharedSettings
    _options: LoaderOptions
    _schedule: Schedule
    _budget_schedule: BudgetSchedule | None

    def _start_session(self) -> None:
        self._trainer_side: TrainerSide | None = None
        self._accepted_tokens: int | None = None
        self._steps_before = 0
        """Steps that were taken before the epoch under way, or before what `load_state_dict` was given last."""
        self._is_loaded = False
        self._reminders = Reminders()
        self._last_step = LastStep()
        self._session = Session(TABLE.drop)
        self._finalizer = weakref.finalize(self, self._session.close_soon)
        self._finalizer.atexit = False

    # Epochs ----------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads; without it each iteration goes on to the next.

        Raises: UsageError when it is not an integer of at least 0.
        """
        self._schedule.epoch = check_integer(epoch, "epoch", 0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._schedule.epoch

    def __len__(self) -> int:
        if self._len_bound is not None:
            return self._len_bound
        raise TypeError(
            "an ODBDataLoader has no length: how many steps an epoch takes depends on the samples' lengths, which are known "
            "only when they are read; ask for a bound with len_bound=, or use StepInfo.progress. (Is it passed where a data "
            "set is wanted?)"
        )

    @property
    def batch_sampler(self) -> NoReturn:
        """Says what to pass in its place to a framework that takes this for a loader of torch's, to be made anew."""
        raise AttributeError(
            "an ODBDataLoader has no batch_sampler: it forms batches as samples are read, shares samples out by itself, and "
            "goes on from load_state_dict. Lightning: pass LightningLoader to train, EvaluationLoader to evaluate; "
            "Accelerate: iterate over it as it is"
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
        state = self._schedule.compute_state(rank, world_size, progress).to_dict()
        return state | {"steps": self._count_steps(), "accepted_tokens": self._accepted_tokens}

    def load_state_dict(self, state: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Goes on from a saved state with the next iteration.

        With the world size and settings it was saved with, a rank's own state is enough, and the same batches follow in the
        same order. With others give every rank the list of all ranks' states: what none of them had taken is shared out anew.

        Raises: UsageError when this is no such state; whether it fits is known at the next iteration.
        """
        self._schedule.load(state)
        states = [state] if isinstance(state, Mapping) else state
        self._steps_before, self._is_loaded = max(_get_integer(one, "steps") or 0 for one in states), True
        accepted = [tokens for one in states if (tokens := _get_integer(one, "accepted_tokens")) is not None]
        self._accepted_tokens = min(accepted, default=None)

    def _begin(self, rank: int, world_size: int) -> Beginning:
        beginning = self._schedule.plan(rank, world_size)
        is_rest = beginning.start.checkpoint is not None or beginning.emitted_before > 0
        taken = self._count_steps() if is_rest else 0
        path, epoch = self._trace, beginning.start.epoch
        trace = None if path is None else compute_trace_path(path, rank, world_size, epoch, taken)
        # A round that is formed again was counted before.
        self._steps_before, self._is_loaded = self._count_steps() - beginning.start.progress.steps, False
        start = replace(
            beginning.start,
            tag=self._shared.make_tag(beginning),
            trace=trace,
            accepted_tokens=NONE if self._accepted_tokens is None else self._accepted_tokens,
            steps_before=self._steps_before,
        )
        if start.checkpoint is None:
            acceptance = start.make_acceptance(self.token_budget, self._budget_schedule)
            start = replace(start, first_tokens=acceptance.compute_first())
        return replace(beginning, start=start)

    def _count_steps(self) -> int:
        """Returns how many steps were taken since training began."""
        trainer_side = None if self._is_loaded else self._trainer_side
        return self._steps_before + (0 if trainer_side is None else trainer_side.next_step)

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
        ``odb/padding_ratio``, the share of the token budgets in force that held real tokens in ``odb/fill`` and, of all ranks,
        in ``odb/efficiency``, the last of these budgets in ``odb/token_budget``; ``odb/patches``, or ``odb/cost_0`` and so on.
        Besides: ``odb/data_wait_s``, what the training thread has waited for steps; ``odb/first_step_s``, from the epoch's
        start to its first step; ``odb/exchanges`` and ``odb/exchange_s``, the collectives that brought an answer, of all
        epochs; and ``odb/quarantined_samples``.
        """
        trainer_side, exchange = self._trainer_side, self._session.exchange
        if trainer_side is None or exchange is None:
            return {}
        return trainer_side.metrics.describe(self._resources, exchange.world_size) | {
            "odb/quarantined_samples": trainer_side.bad_samples.count,
            "odb/exchange_s": exchange.exchange_s,
            "odb/exchanges": exchange.exchanges,
        }

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The samples set aside on this rank in the present or last epoch, each with its cause: the first hundred of them."""
        return () if self._trainer_side is None else self._trainer_side.bad_samples.records

    # Budget ----------------------------------------------------------------------------------------------------------

    def accept_budget(self, tokens: int) -> None:
        """Says what this rank accepts as its token budget, from now on and in later epochs; the least of all ranks' holds.

        May be called on any rank, during an epoch or between two, by the thread that trains. It exchanges nothing by itself:
        the next offer says it, and the round after that is formed with it, so up to two windows of steps still come as before.
        It may rise again, to ``token_budget`` at most. In the first round of an epoch each rank goes by what it accepts itself.

        Spec: R15.1 to R15.3.
        Raises: UsageError when it is not a number of tokens.
        """
        self._accepted_tokens = check_integer(tokens, "tokens", 1)
        if self._trainer_side is not None:
            self._trainer_side.accept_budget(self._accepted_tokens)

    @property
    def accepted_budget(self) -> int:
        """What `accept_budget` has said last on this rank; before that, and at most, ``token_budget``."""
        return self.token_budget if self._accepted_tokens is None else min(self.token_budget, self._accepted_tokens)

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
            window_bytes=self._window_bytes,
            on_bad_sample=self._on_bad_sample,
            label_check=self._counting.label_check,
            is_packed=config.layout is Layout.PACKED,
            budget_schedule=self._budget_schedule,
        )
        return ProcessBackend(config, spec) if self.num_workers else ThreadBackend(config, spec, is_inline=True)


def _get_integer(state: Mapping[str, object], key: str) -> int | None:
    """Returns what a saved state has at ``key``; None where it has nothing, as states of earlier versions."""
    value = state.get(key)
    return value if type(value) is int and value >= 0 else None
