"""The base class of the loader: begins epochs, saves and loads their state, and closes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, NoReturn, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.config import Config, choose_ramp
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.core.events import BudgetAccepted
from odb_ref.core.offer import NONE
from odb_ref.core.resume import RoundStart
from odb_ref.core.types import Mode
from odb_ref.torch.batches import Batch
from odb_ref.torch.epoch.delivery import Delivery
from odb_ref.torch.epoch.driver import EpochDriver
from odb_ref.torch.epoch.session import LOADED, REPLACED, Session
from odb_ref.torch.epoch.trace import claim_trace, compute_trace_path, release_traces
from odb_ref.torch.estimate import estimate_steps
from odb_ref.torch.exchange.exchange_thread import Exchange
from odb_ref.torch.exchange.identity import LoaderIdentity, LoaderOrigin
from odb_ref.torch.exchange.rendezvous import make_transport
from odb_ref.torch.exchange.roster import Ranks, Roster
from odb_ref.torch.gathering import gather_objects
from odb_ref.torch.iterator import EpochIterator, StepIterator
from odb_ref.torch.loss_check import LossCheck
from odb_ref.torch.plan.order import Order
from odb_ref.torch.plan.schedule import Schedule
from odb_ref.torch.plan.seal import seal
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import StateDict
from odb_ref.torch.reading.costs import Resources
from odb_ref.torch.reading.pipeline import PipelineSpec, ReadPipeline
from odb_ref.torch.reading.quarantine import Quarantined
from odb_ref.torch.reading.service import SampleService
from odb_ref.torch.workers.process import LoaderProcess
from odb_ref.trace.writing import TraceWriter

Value = TypeVar("Value")


class Epochs(Generic[Batch]):
    """Runs the epochs of a loader, one after another. Its subclass `ODBDataLoader` checks arguments and sets the fields."""

    dataset: Dataset[object]
    num_workers: int
    token_budget: int
    process_group: dist.ProcessGroup | None
    _ranks: Ranks
    _resources: Resources
    _config: Config
    """The configuration of a single rank; `_set_ramp` sets the ramp, which depends on the number of samples."""
    _ramp_rounds: int | None
    _spec: PipelineSpec
    _weighting: Weighting
    _order: Order
    _bound: int | str | None
    _transport: str
    _timeout_s: float
    _trace: str | Path | None
    _name: str | None
    _common: dict[str, object]
    """Settings that all ranks must share, beside the configuration and the order, under the names that users know."""
    _schedule: Schedule
    _budget_schedule: BudgetSchedule | None

    def _start_session(self) -> None:
        self._origin = LoaderOrigin(self._name, self.dataset)
        self._delivery: Delivery | None = None
        self._accepted_tokens: int | None = None
        self._steps_before = 0
        """Steps taken before the current epoch, or before the state that was last loaded."""
        self._told: set[str] = set()
        self._session = Session()
        self._finalizer = weakref.finalize(self, self._session.close_soon)
        self._finalizer.atexit = False

    # Epochs ----------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads. Without this call each iteration reads the next epoch.

        Raises: UsageError when it is not an integer of at least 0.
        """
        self._schedule.epoch = check_integer(epoch, "epoch", 0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._schedule.epoch

    def __len__(self) -> int:
        if self.has_updates_per_epoch:
            return self.updates_per_epoch
        if (bound := self._compute_bound()) is not None:
            return bound
        if self.update_samples is None:
            why = "steps in an epoch depends on the samples' lengths, which are known only when the samples are read"
            advice = "for a bound, pass Batching(len_bound=); "
        else:
            why, advice = "updates in an epoch is unknown, because each rank has its own samples or a stream", ""
        raise TypeError(
            f"an ODBDataLoader has no length: the number of {why} ({advice}for progress, use StepInfo.progress). "
            "(Did you pass the loader where a data set is expected?)"
        )

    @property
    def update_samples(self) -> int | None:
        """Samples in an optimizer update, over all ranks, or None in the free mode."""
        return self._order.update_samples

    @property
    def has_updates_per_epoch(self) -> bool:
        """True if the number of updates in an epoch is known."""
        return self._order.update_samples is not None and self._order.is_auto

    @property
    def updates_per_epoch(self) -> int:
        """The number of optimizer updates in an epoch.

        Raises: UsageError when it is unknown: without ``update_samples``, or if each rank is given its own samples.
        """
        if not self.has_updates_per_epoch:
            raise UsageError(
                "updates_per_epoch needs update_samples, and one order for all ranks (shard='auto' or 'shared')"
            )
        is_quota = self._config.mode is Mode.QUOTA  # then an update begins only if every rank has a sample for it
        return self._order.count_updates(self._ranks.find_rank_and_size()[1] if is_quota else 1)

    @property
    def batch_size(self) -> NoReturn:
        """Stops code that counts samples by it, because batches hold what fits. The error names what there is instead."""
        raise AttributeError(
            "an ODBDataLoader has no batch_size: batches hold what fits under token_budget (info.local_samples says how many), "
            "and updates hold update_samples"
        )

    def _compute_bound(self) -> int | None:
        """Returns the bound on an epoch's steps, or None. The bound `SAMPLES` follows the data set's present length."""
        return self._order.count_samples() if isinstance(self._bound, str) else self._bound

    @property
    def batch_sampler(self) -> NoReturn:
        """Stops frameworks that would rebuild this loader as a torch DataLoader. The error names what to pass instead."""
        raise AttributeError(
            "an ODBDataLoader has no batch_sampler: it forms batches as it reads samples, divides them among ranks itself, "
            "and resumes with load_state_dict. In Lightning, pass LightningLoader to train and EvaluationLoader to evaluate. "
            "In Accelerate, iterate over it as it is, and use load_state_dict instead of skip_first_batches"
        )

    def estimate_steps(self, samples: int = 512) -> int:
        """Estimates the number of steps in an epoch from ``samples`` lengths. The same on all ranks; a collective.

        Raises: UsageError for a stream, or with a sampler of your own.
        """
        rank, world_size = self._ranks.find_rank_and_size()
        config = self._set_ramp(replace(self._config, rank=rank, world_size=world_size))
        return estimate_steps(self._order, self._spec.measure, config, samples, self.gather)

    def check_loss(self, compute: Callable[[Batch], torch.Tensor]) -> bool:
        """Tries with a few samples whether a loss can be weighted, and returns whether that could be tried.

        ``compute`` returns the loss of a batch. It is called a few times, and should be in the model's ``eval`` mode, without
        dropout. All ranks must call this. Spec: R4.7.

        Warns if the gradient depends on how an update is divided.

        Raises: UsageError when the loss itself does, for example because it compares samples.
        """
        return LossCheck(
            order=self._order,
            spec=self._spec,
            weighting=self._weighting,
            config=self._config,
        ).run(cast(Callable[[object], torch.Tensor], compute))

    def steps(self) -> StepIterator[Batch]:
        """Starts an epoch, and returns its steps: each batch with its `StepInfo`.

        ``for batch in loader`` yields the same batches without it, and warns if their losses need scaling.
        """
        return StepIterator(iter(self))

    def __iter__(self) -> EpochIterator[Batch]:
        session = self._session
        follows_break = session.end_epoch(self._timeout_s, REPLACED)
        self._origin.check()
        exchange = session.get_exchange(self._make_exchange)
        roster = exchange.roster
        base = replace(
            self._config, rank=roster.rank, world_size=roster.world_size, peer=roster.peer, peers=roster.peers
        )
        service = session.get_service(self._make_service)
        try:
            start = self._begin(roster, exchange.identity, f"{exchange.run:x}", follows_break)
            bound = self._compute_bound()
            config = start.make_config(self._set_ramp(base))
            if start.trace is not None:
                claim_trace(start.trace, self)
                # Fails early if the file cannot be written, and leaves a header if this process is killed soon.
                TraceWriter(start.trace, config, driver="torch", epoch=start.epoch, workers=start.workers).close()
        except BaseException as error:  # a state that does not fit, a sampler that raises, Ctrl-C: others must know
            session.begin(self._make_delivery(base, service, exchange, EpochStart(keys=())), error)
            raise
        self._schedule.begin(start, self._weighting.accumulation_steps)
        delivery = self._make_delivery(config, service, exchange, start)
        self._steps_before, self._delivery = start.steps_before, delivery
        session.begin(delivery)
        return EpochIterator(self, delivery, bound, told=self._told)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns this rank's position after the last step it was given. Small enough to save with every model checkpoint.

        Plain integers, strings, lists and dicts; no communication. Between epochs it is the start of the next epoch.
        Spec: R10. Preserves: ONCE, COVER, and REPLAY with the same world size.

        Raises: UsageError when Ctrl-C interrupted a step while it was being handed out, so that the step was lost.
        """
        exchange, delivery = self._session.exchange, self._delivery
        if exchange is None:
            self._origin.check()
            rank, world_size = self._ranks.find_rank_and_size()
        else:  # the loader may outlive the process group
            rank, world_size = exchange.roster.rank, exchange.roster.world_size
        progress = None
        if delivery is not None and not delivery.is_exhausted:
            delivery.check_whole()
            progress = delivery.driver.compute_progress()
        state = self._schedule.compute_state(rank, world_size, progress)
        return seal(replace(state, steps=self._count_steps(), accepted_tokens=self._accepted_tokens).to_dict())

    def load_state_dict(self, state: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Resumes from a saved state with the next iteration. Leaves the current epoch, if any, as a ``break`` would.

        With the same world size and settings a rank's own state is enough, and the same batches follow in the same order. With
        others, pass the list of all ranks' states on every rank: the samples that no rank had taken are divided anew.

        Raises: UsageError when it is not a loader's state, or is damaged (R10.5). The next iteration checks whether it fits.
        """
        states = self._schedule.load(state)
        self._session.end_epoch(self._timeout_s, LOADED)
        self._steps_before, self._delivery = max(one.steps for one in states), None
        accepted = [one.accepted_tokens for one in states if one.accepted_tokens is not None]
        self._accepted_tokens = min(accepted, default=None)

    def _begin(self, roster: Roster, identity: LoaderIdentity, run: str, follows_break: bool | None) -> EpochStart:
        rank, world_size = roster.rank, roster.world_size
        start = replace(self._schedule.plan(rank, world_size), follows_break=follows_break)
        is_rest = start.checkpoint is not None or len(start.taken_before) > 0
        taken = self._count_steps() if is_rest else 0
        path, epoch = self._trace, start.epoch
        # Use the rank's number in the job: groups side by side must not write the same files.
        number = rank if roster.peers > 1 else roster.processes[rank]
        size = max(world_size, number + 1)
        trace = None if path is None else compute_trace_path(path, number, size, epoch, taken, peer=roster.peer)
        start = replace(
            start,
            tag=self._make_tag(start, identity),
            trace=trace,
            run=run,
            workers=self.num_workers,
            accepted_tokens=NONE if self._accepted_tokens is None else self._accepted_tokens,
            # Steps of a round that is formed again were counted before.
            steps_before=self._count_steps() - start.progress.steps,
        )
        if start.checkpoint is None:
            acceptance = start.make_acceptance(self.token_budget, self._budget_schedule)
            agreed_tokens, accepted_tokens = acceptance.compute_first()
            start = replace(start, first=RoundStart(agreed_tokens=agreed_tokens, accepted_tokens=accepted_tokens))
        return start

    def _make_tag(self, start: EpochStart, identity: LoaderIdentity) -> str:
        """Returns the settings that the core does not know. If ranks differ in one, the epoch ends. Spec: R7.3, R18.1."""
        own: dict[str, object] = {"loader": identity.label, "epoch": start.epoch, "step": start.progress.steps}
        if start.listed:
            own["sampler"] = start.listed  # all ranks share one order, but each lists it for itself
        if start.follows_break is not None:
            # A rank that leaves alone once everything is agreed tells the others only now (NP2).
            own["the epoch before"] = "left early" if start.follows_break else "complete"
        return json.dumps(self._order.make_settings(start.samples) | self._common | own, sort_keys=True)

    def _count_steps(self) -> int:
        """Returns the number of steps taken since training began."""
        return self._steps_before + (0 if self._delivery is None else self._delivery.next_step)

    def close(self) -> None:
        """Leaves the current epoch, if any, and releases processes, threads and connections."""
        self._session.close()
        self._origin.retire()
        release_traces(self)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def metrics(self) -> dict[str, float]:
        """Returns this rank's counters for the present or last epoch, by slash-prefixed name. Times are in seconds.

        For the steps taken so far: ``odb/steps``, ``odb/idle_steps``, ``odb/samples``, ``odb/tokens``; ``odb/padding_ratio``,
        the share of padding; ``odb/fill``, the share of the token budgets in force that held real tokens; ``odb/efficiency``,
        the same over all ranks; ``odb/token_budget``, the last of these budgets; and ``odb/patches``, or ``odb/cost_0`` and so
        on. Also: ``odb/data_wait_s``, how long the training thread has waited for steps; ``odb/first_step_s``, from the epoch's
        start to its first step; ``odb/exchanges`` and ``odb/exchange_s``, the number and duration of collectives with an
        answer, over all epochs; and ``odb/quarantined_samples``.
        """
        delivery, exchange = self._delivery, self._session.exchange
        if delivery is None or exchange is None:
            return {}
        return delivery.metrics.describe(self._resources, exchange.roster.world_size) | {
            "odb/quarantined_samples": delivery.driver.quarantine.count,
            "odb/exchange_s": exchange.exchange_s,
            "odb/exchanges": exchange.exchanges,
        }

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The samples that this rank set aside in the present or last epoch, with causes; at most the first hundred."""
        return () if self._delivery is None else self._delivery.driver.quarantine.records

    # Budget ----------------------------------------------------------------------------------------------------------

    def accept_budget(self, tokens: int) -> None:
        """Sets the token budget that this rank accepts, from now on and in later epochs. The lowest of all ranks' applies.

        May be called on any rank, during or between epochs, by the training thread. It communicates nothing by itself: the next
        offer carries the value, and the round after that is formed with it, so up to two windows of steps still use the old
        one. The value may rise again, up to ``token_budget``. In an epoch's first round each rank uses the value it accepts
        itself.

        Spec: R15.1, R15.2, R15.3.
        Raises: UsageError when it is not a number of tokens.
        """
        self._accepted_tokens = check_integer(tokens, "tokens", 1)
        if self._delivery is not None:
            self._delivery.driver.submit(BudgetAccepted(self._accepted_tokens))

    @property
    def accepted_budget(self) -> int:
        """The last value given to `accept_budget` on this rank, at most ``token_budget``, which is also the initial value."""
        return self.token_budget if self._accepted_tokens is None else min(self.token_budget, self._accepted_tokens)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _set_ramp(self, config: Config) -> Config:
        ramp = self._ramp_rounds
        if ramp is None:
            samples = self._order.count_samples() / config.world_size if self._order.is_auto else None
            ramp = choose_ramp(config.window_samples, samples)
        return replace(config, ramp_rounds=ramp)

    def _make_exchange(self) -> Exchange:
        roster = self._ranks.make_roster()
        identity = self._origin.begin(
            roster.group_name, self.token_budget, is_common=self._order.is_auto, is_alone=len(roster.processes) == 1
        )
        transport = make_transport(roster, identity, self._transport, self._timeout_s)
        return Exchange(transport, identity, self._timeout_s)

    def gather(self, own: Value) -> list[Value]:
        """Returns the value of each data-parallel rank, in rank order, the same on all. A collective on the trainer's groups.

        Raises: UsageError when this process is not a data-parallel rank.
        """
        self._ranks.find_rank_and_size()
        found = [own]
        for group in reversed(self._ranks.groups):
            found = [item for part in gather_objects(found, group) for item in part]
        return found

    def _make_service(self) -> SampleService:
        return LoaderProcess(self._spec) if self.num_workers else ReadPipeline(self._spec, is_inline=True)

    def _make_delivery(self, config: Config, service: SampleService, exchange: Exchange, start: EpochStart) -> Delivery:
        driver = EpochDriver(
            config,
            service,
            exchange,
            start,
            schedule=self._budget_schedule,
            accumulation_steps=self._weighting.accumulation_steps,
            is_pinned=self._spec.options.is_pinned,
        )
        return Delivery(driver, self._weighting, log_wait_s=self._timeout_s / 2)
