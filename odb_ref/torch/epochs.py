"""What a loader does, once it knows what it is: it begins epochs, saves and loads its state, and closes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

import torch.distributed as dist
from torch.utils.data import Dataset

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.weighting import Weighting
from odb_ref.core.config import Config, choose_ramp
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.core.offer import NONE
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
    """The epochs of a loader, one after another. Its constructor is `ODBDataLoader`'s, which checks all that is said here."""

    dataset: Dataset[object]
    num_workers: int
    token_budget: int
    process_group: dist.ProcessGroup | None
    _ranks: Ranks
    _resources: Resources
    _config: Config
    """That of a rank alone, with the smaller first windows of a loader whose samples nobody knows."""
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
    """What all ranks must have in common beside the configuration and the order, by the names that the user has for it."""
    _schedule: Schedule
    _budget_schedule: BudgetSchedule | None

    def _start_session(self) -> None:
        self._origin = LoaderOrigin(self._name, self.dataset)
        self._delivery: Delivery | None = None
        self._accepted_tokens: int | None = None
        self._steps_before = 0
        """Steps that were taken before the epoch under way, or before what `load_state_dict` was given last."""
        self._told: set[str] = set()
        self._session = Session()
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
        if self.has_updates_per_epoch:
            return self._order.count_updates()
        if (bound := self._compute_bound()) is not None:
            return bound
        raise TypeError(
            "an ODBDataLoader has no length: how many steps an epoch takes depends on the samples' lengths, which are known "
            "only when they are read; ask for a bound with Batching(len_bound=), or use StepInfo.progress. (Is it passed where "
            "a data set is wanted?)"
        )

    @property
    def update_samples(self) -> int | None:
        """How many samples of all ranks an optimizer update holds; None in the free mode."""
        return self._order.update_samples

    @property
    def has_updates_per_epoch(self) -> bool:
        """True when it is known how many updates an epoch has."""
        return self._order.update_samples is not None and self._order.is_auto

    @property
    def updates_per_epoch(self) -> int:
        """How many optimizer updates an epoch has.

        Raises: UsageError where nobody knows: without ``update_samples``, or where each rank is given its own samples.
        """
        if not self.has_updates_per_epoch:
            raise UsageError(
                "updates_per_epoch needs update_samples, and one order of all ranks (shard='auto' or 'shared')"
            )
        return self._order.count_updates()

    def _compute_bound(self) -> int | None:
        """Returns the bound of an epoch's steps, where one was asked for, of the data set as it is now."""
        return self._order.count_samples() if isinstance(self._bound, str) else self._bound

    @property
    def batch_sampler(self) -> NoReturn:
        """Refuses a framework that takes this for a loader of torch's and would make it anew, and says what to pass instead."""
        raise AttributeError(
            "an ODBDataLoader has no batch_sampler: it forms batches as samples are read, shares samples out by itself, and "
            "goes on from load_state_dict. Lightning: pass LightningLoader to train, EvaluationLoader to evaluate; "
            "Accelerate: iterate over it as it is, and use load_state_dict where you would skip_first_batches"
        )

    def estimate_steps(self, samples: int = 512) -> int:
        """Returns about how many steps an epoch takes, from so many lengths, alike on all ranks; a collective of them all.

        Raises: UsageError for a stream, or your own sampler.
        """
        config = self._make_config(*self._ranks.find_rank_and_size())
        return estimate_steps(self._order, self._spec.measure, config, samples, self.gather)

    def steps(self) -> StepIterator[Batch]:
        """Starts an epoch, and returns its steps: each batch with its `StepInfo`.

        ``for batch in loader`` reads the same batches alone, and warns where their losses are to be scaled.
        """
        return StepIterator(iter(self))

    def __iter__(self) -> EpochIterator[Batch]:
        session = self._session
        session.end_epoch(self._timeout_s, REPLACED)
        self._origin.check()
        exchange = session.get_exchange(self._make_exchange)
        base = self._make_config(exchange.rank, exchange.world_size)
        base = replace(base, peer=exchange.roster.peer, peers=exchange.roster.peers)
        service = session.get_service(self._make_service)
        try:
            start = self._begin(exchange.roster, exchange.identity, f"{exchange.run:x}")
            config = start.make_config(base)
            if start.trace is not None:
                claim_trace(start.trace, self)
                # Refused here where it cannot be written, and not empty should this process be killed early.
                TraceWriter(start.trace, config, driver="torch", epoch=start.epoch, workers=start.workers).close()
        except BaseException as error:  # a state that does not fit, a sampler that raises, Ctrl-C: the others wait
            session.begin(self._make_delivery(base, service, exchange, EpochStart(keys=())), error)
            raise
        self._schedule.begin(start)
        delivery = self._make_delivery(config, service, exchange, start)
        self._steps_before, self._delivery = start.steps_before, delivery
        session.begin(delivery)
        return EpochIterator(self, delivery, self._spec.on_idle, self._compute_bound(), told=self._told)

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns this rank's place after the last step it was given, small enough to save with every checkpoint of the
        model.

        Plain integers, strings, lists and dicts; no communication. Between epochs it stands at the start of the next one.
        Spec: R10. Preserves: ONCE, COVER, and REPLAY with the same world size.

        Raises: UsageError when Ctrl-C has taken a step away that was being handed out.
        """
        exchange, delivery = self._session.exchange, self._delivery
        if exchange is None:
            self._origin.check()
        # The ranks of the loader, which may outlive the process group.
        rank, world_size = (
            self._ranks.find_rank_and_size() if exchange is None else (exchange.rank, exchange.world_size)
        )
        progress = None
        if delivery is not None and not delivery.is_exhausted:
            delivery.check_whole()
            progress = delivery.driver.compute_progress()
        state = self._schedule.compute_state(rank, world_size, progress)
        return seal(replace(state, steps=self._count_steps(), accepted_tokens=self._accepted_tokens).to_dict())

    def load_state_dict(self, state: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Goes on from a saved state with the next iteration; the epoch under way, if any, is left, as by a ``break``.

        With the world size and settings it was saved with, a rank's own state is enough, and the same batches follow in the
        same order. With others give every rank the list of all ranks' states: what none of them had taken is shared out anew.

        Raises: UsageError when this is no such state, or a damaged one (R10.5); whether it fits is known at the next iteration.
        """
        states = self._schedule.load(state)
        self._session.end_epoch(self._timeout_s, LOADED)
        self._steps_before, self._delivery = max(one.steps for one in states), None
        accepted = [one.accepted_tokens for one in states if one.accepted_tokens is not None]
        self._accepted_tokens = min(accepted, default=None)

    def _begin(self, roster: Roster, identity: LoaderIdentity, run: str) -> EpochStart:
        rank, world_size = roster.rank, roster.world_size
        start = self._schedule.plan(rank, world_size)
        is_rest = start.checkpoint is not None or len(start.taken_before) > 0
        taken = self._count_steps() if is_rest else 0
        path, epoch = self._trace, start.epoch
        # By its number in the job: groups beside each other must not write the same files.
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
            # A round that is formed again was counted before.
            steps_before=self._count_steps() - start.progress.steps,
        )
        if start.checkpoint is None:
            acceptance = start.make_acceptance(self.token_budget, self._budget_schedule)
            start = replace(start, first_tokens=acceptance.compute_first())
        return start

    def _make_tag(self, start: EpochStart, identity: LoaderIdentity) -> str:
        """Returns the settings that the core does not know: where ranks differ in one, the epoch ends. Spec: R7.3, R18.1."""
        own: dict[str, object] = {"loader": identity.label, "epoch": start.epoch, "step": start.progress.steps}
        if start.listed:
            own["sampler"] = start.listed  # one order, which every rank lists for itself
        if self._delivery is not None:
            # A rank that has left alone when all was agreed on is not heard of before (NP2).
            own["the epoch before"] = "complete" if self._delivery.has_given_all else "left early"
        return json.dumps(self._order.make_settings(start.samples) | self._common | own, sort_keys=True)

    def _count_steps(self) -> int:
        """Returns how many steps were taken since training began."""
        return self._steps_before + (0 if self._delivery is None else self._delivery.next_step)

    def close(self) -> None:
        """Leaves the epoch under way, if any, and gives back processes, threads and connections."""
        self._session.close()
        self._origin.retire()
        release_traces(self)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def metrics(self) -> dict[str, float]:
        """Returns the counters of the present or last epoch on this rank, by slash-prefixed name; times in seconds.

        For the steps taken so far: ``odb/steps``, ``odb/idle_steps``, ``odb/samples``, ``odb/tokens``, the share of padding in
        ``odb/padding_ratio``, the share of the token budgets in force that held real tokens in ``odb/fill`` and, of all ranks,
        in ``odb/efficiency``, the last of these budgets in ``odb/token_budget``; ``odb/patches``, or ``odb/cost_0`` and so on.
        Besides: ``odb/data_wait_s``, what the training thread has waited for steps; ``odb/first_step_s``, from the epoch's
        start to its first step; ``odb/exchanges`` and ``odb/exchange_s``, the collectives that brought an answer, of all
        epochs; and ``odb/quarantined_samples``.
        """
        delivery, exchange = self._delivery, self._session.exchange
        if delivery is None or exchange is None:
            return {}
        return delivery.metrics.describe(self._resources, exchange.world_size) | {
            "odb/quarantined_samples": delivery.driver.quarantine.count,
            "odb/exchange_s": exchange.exchange_s,
            "odb/exchanges": exchange.exchanges,
        }

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The samples set aside on this rank in the present or last epoch, each with its cause: the first hundred of them."""
        return () if self._delivery is None else self._delivery.driver.quarantine.records

    # Budget ----------------------------------------------------------------------------------------------------------

    def accept_budget(self, tokens: int) -> None:
        """Sets what this rank accepts as its token budget, from now on and in later epochs; the least of all ranks' holds.

        May be called on any rank, during an epoch or between two, by the thread that trains. It exchanges nothing by itself:
        the next offer says it, and the round after that is formed with it, so up to two windows of steps still come as before.
        It may rise again, to ``token_budget`` at most. In the first round of an epoch each rank goes by what it accepts itself.

        Spec: R15.1, R15.2, R15.3.
        Raises: UsageError when it is not a number of tokens.
        """
        self._accepted_tokens = check_integer(tokens, "tokens", 1)
        if self._delivery is not None:
            self._delivery.accept_budget(self._accepted_tokens)

    @property
    def accepted_budget(self) -> int:
        """What `accept_budget` has said last on this rank; before that, and at most, ``token_budget``."""
        return self.token_budget if self._accepted_tokens is None else min(self.token_budget, self._accepted_tokens)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _make_config(self, rank: int, world_size: int) -> Config:
        """Returns what the epochs have in common: see `EpochStart.make_config`."""
        ramp = self._ramp_rounds
        if ramp is None:
            samples = self._order.count_samples() / world_size if self._order.is_auto else None
            ramp = choose_ramp(self._config.window_samples, samples)
        return replace(self._config, rank=rank, world_size=world_size, ramp_rounds=ramp)

    def _make_exchange(self) -> Exchange:
        roster = self._ranks.make_roster()
        identity = self._origin.begin(
            roster.group_name,
            self.token_budget,
            is_common=self._order.is_auto,
            is_alone=len(roster.processes) == 1,
        )
        transport = make_transport(roster, identity, self._transport, self._timeout_s, self._timeout_s / 2)
        return Exchange(transport, identity, self._timeout_s)

    def gather(self, own: Value) -> list[Value]:
        """Returns what each data-parallel rank has, by rank, the same on all; a collective of the trainer's.

        Raises: UsageError when this process is not one of them.
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
