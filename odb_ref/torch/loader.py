"""The loader a training script uses in place of its DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Final, NoReturn, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from odb_ref.core.batching.budgets import BudgetSchedule
from odb_ref.core.batching.cost import CostOfLength, choose_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.rules import TargetRule, get_rule
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import DEPTH_STEPS, MAX_AGE_ROUNDS, RAMP_ROUNDS, Terms
from odb_ref.core.errors import UsageError, check_integer, choose
from odb_ref.core.types import Mode
from odb_ref.torch.arguments import (
    check_flag,
    check_functions,
    check_max_bad,
    check_seconds,
    check_transport,
    make_loader_options,
)
from odb_ref.torch.batches import Batch
from odb_ref.torch.epochs import Epochs
from odb_ref.torch.exchange.roster import choose_ranks
from odb_ref.torch.info import LossReduction, LossScaling, Weighting
from odb_ref.torch.options import check_len_bound, check_skipping, check_updates, choose_collate, make_order
from odb_ref.torch.plan.schedule import Schedule
from odb_ref.torch.reading.collator import CollateFn, OnIdle
from odb_ref.torch.reading.costs import CostFn, make_resources
from odb_ref.torch.reading.counting import make_counting
from odb_ref.torch.reading.measure import LengthFn
from odb_ref.torch.reading.quarantine import OnBadSample
from odb_ref.torch.shared import SharedSettings, describe_decisive

Element = TypeVar("Element")


class ODBDataLoader(Epochs[Batch]):
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
    is how many samples a rank looks at when it forms batches, the larger the fuller, and ``window_bytes`` bounds what these
    take (beside them a rank holds the batches made of the window before, what is read ahead, half a window at most, and what
    its workers have ready); ``depth`` is how many steps are ready ahead.
    ``length_fn`` gives a sample's tokens, ``supervised_fn`` those that carry loss: by default what the fields of usual tasks
    say (`odb_ref.torch.reading.tasks`), labels other than -100, without the first when ``causal_shift`` (then a batch that
    carries another number fails, for its weight would be wrong). Batches of a window leave shuffled; with ``order="sampler"``
    they hold neighbours and leave in the sampler's order, at a price. ``cost`` says by what the batches that meet in a step
    are alike: tokens, ``"attention/Q"`` (``tokens + tokens**2 // Q``), or a function of a sample's tokens. With
    ``sizes="powers"`` (of two), ``"threes"`` (and three times these) or ``"even"`` a padded batch has such a number of
    samples, or one. ``policy`` is the target rule, ``max_age_rounds`` bounds how often a sample may be put off,
    ``ramp_rounds`` how many first windows are smaller, for an early first step.

    **Updates.** With ``update_samples=N`` an optimizer update holds exactly N samples over all ranks: those at the places [uN,
    (u+1)N) of the common order. That is the order of ``shuffle`` and ``seed``, or of a ``sampler`` that lists the same on all
    ranks, with ``shard="shared"`` (the ranks then draw by how many tokens they hold). The last update holds what is left, or is
    left out with ``drop_last``. Only the batches inside an update are formed by length, so an update does not depend on the
    number of ranks, on memory, workers or timing. ``len()`` counts updates. With ``shard="given"`` or a stream each rank gives
    N / ranks of its own (R16).

    **Budgets that change.** ``token_budget`` is the largest there is. ``budget_schedule(step, current)`` may answer with a
    smaller one, by the number of steps planned since training began and the budget in force: a function of these alone, called
    once a round where batches are formed. `accept_budget` says on any one rank what it accepts, as out of memory or a metric
    would have it. The least that any rank accepts holds on all of them, from the same step on (R15).

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

    **Ends.** Iterating raises `JobError`, on every rank and with the name of a rank and the cause, when any rank fails,
    leaves early or is lost: silent for ``timeout_s`` (``loader_timeout_s``: its loader process does nothing, or a worker is
    stopped). One that is slow is waited for; the logger ``odb_ref`` says for whom, every ``log_wait_s``. `close` ends all.

    **Length.** ``len()`` raises TypeError, for nobody knows it, unless ``len_bound`` asks for a bound: ``"samples"``, which
    always holds, or a number of your own, beyond which a warning is given.

    **State, metrics, traces.** See `state_dict`, `metrics` and `odb_ref.trace.format`: ``trace=PATH`` writes one file for each
    rank. Ranks are those of ``process_group``, else all. ``device_mesh`` is that of a model spread over several processes:
    ranks are along its dimensions named dp, dp_replicate, dp_shard or batch, or those in ``mesh_dims``; processes that differ
    in other dimensions only (tensor, context, pipeline parallel) are one rank, and get the same batches (R17). A loader belongs
    to the process group it was made under, and to the line that made it: ranks in different loaders are told so (R18).

    Spec: R5 to R7, R11, R16.
    Raises: UsageError when an argument makes no sense.
    """

    def __init__(
        self,
        dataset: Dataset[Element],
        *,
        token_budget: int,
        update_samples: int | None = None,
        budget_schedule: BudgetSchedule | None = None,
        layout: str = "padded",
        order: str = "shuffled",
        cost: str | CostOfLength = "tokens",
        sizes: str = "any",
        max_patches: int | None = None,
        cost_fn: Callable[[Element], Sequence[int]] | None = None,
        limits: Sequence[int] = (),
        window: int = 1024,
        window_bytes: int | None = None,
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
        drop_last: bool = False,
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
        mesh_dims: str | Sequence[str] | None = None,
        timeout_s: float = 60.0,
        loader_timeout_s: float = 60.0,
        log_wait_s: float = 30.0,
        len_bound: int | str | None = None,
        trace: str | Path | None = None,
    ) -> None:
        check_functions(collate_fn=collate_fn, length_fn=length_fn, supervised_fn=supervised_fn, cost_fn=cost_fn)
        check_functions(budget_schedule=budget_schedule)
        self.dataset: Dataset[object] = dataset
        self.sampler: Iterable[object] | None = sampler
        # What the data set yields is what these functions take: past this point samples are opaque.
        causal_shift = check_flag(causal_shift, "causal_shift")
        self._layout = choose(Layout, layout, "layout")
        self.collate_fn = cast(CollateFn, collate_fn or choose_collate(self._layout, causal_shift=causal_shift))
        # Checked once, here: from here on numbers and flags are Python's own.
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
        self.num_workers = self._options.num_workers
        self.pin_memory = bool(pin_memory)
        self.token_budget = check_integer(token_budget, "token_budget", 1)
        self._budget_schedule = budget_schedule
        self._resources = make_resources(max_patches, cast(CostFn | None, cost_fn), limits)
        k = None if accumulation_steps == 1 else accumulation_steps
        others = {"accumulation_steps": k, "window_bytes": window_bytes, "quota": quota, "len_bound": len_bound}
        self._update_samples = check_updates(update_samples, others)
        self._window = self._update_samples or check_integer(window, "window", 1)
        self._window_bytes = None if window_bytes is None else check_integer(window_bytes, "window_bytes", 1)
        self._terms = Terms(
            layout=self._layout,
            order=choose(StepOrder, order, "order"),
            cost=choose_cost(cost),
            sizes=choose(Sizes, sizes, "sizes"),
            limits=self._resources.limits,
            max_age_rounds=check_integer(max_age_rounds, "max_age_rounds", 1),
            ramp_rounds=check_integer(ramp_rounds, "ramp_rounds", 0),
            mode=choose(Mode, mode, "mode"),
            quota_samples=None if quota is None else check_integer(quota, "quota", 1),
            update_samples=self._update_samples,
        )
        self._rule = get_rule(policy) if isinstance(policy, str) else policy
        self._on_idle = choose(OnIdle, on_idle, "on_idle")
        self._idle_sample = idle_sample
        self._on_bad_sample = choose(OnBadSample, on_bad_sample, "on_bad_sample")
        self._weighting = Weighting(
            scaling=choose(LossScaling, loss_scaling, "loss_scaling"),
            reduction=choose(LossReduction, loss_reduction, "loss_reduction"),
            accumulation_steps=check_integer(accumulation_steps, "accumulation_steps", 1),
            is_divided_by_steps=check_flag(trainer_divides_loss, "trainer_divides_loss"),
        )
        # A step is handed out with the counts of its accumulation window, and whether it is the last: all of these must fit.
        self._depth = max(check_integer(depth, "depth", 1), self._weighting.accumulation_steps + 1)
        check_skipping(self._on_idle, self._weighting.accumulation_steps if self._update_samples is None else 2)
        self._order = make_order(
            dataset,
            sampler=sampler,
            shuffle=shuffle,
            shard=shard,
            seed=seed,
            generator=generator,
            update_samples=self._update_samples,
            drop_last=check_flag(drop_last, "drop_last"),
        )
        if self._order.is_shared and window_bytes is not None:
            raise UsageError("window_bytes needs shards of one's own: with shard='shared' what is drawn is read")
        self._bound = check_len_bound(len_bound, self._order)
        self._ranks = choose_ranks(process_group, device_mesh, mesh_dims)
        self.process_group = self._ranks.groups[-1]
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
            is_packing=self.num_workers > 0,
            is_weighing=window_bytes is not None,
        )
        choices: dict[str, object] = {"on_idle": self._on_idle, "on_bad_sample": self._on_bad_sample}
        choices |= {"window_bytes": self._window_bytes} if window_bytes is not None else {}
        weighting, counting = self._weighting, self._counting
        self._shared = SharedSettings(order=self._order, weighting=weighting, counting=counting, choices=choices)
        # Refuses what makes no sense before any process has started.
        settings = describe_decisive(self._make_config(0, 1), self._counting, self._window_bytes)
        self._schedule = Schedule(
            self._order,
            settings,
            quota=self._terms.quota_samples,
            read_ahead=self._window // 2,
            max_bad=check_max_bad(max_bad_samples),
        )
        self._start_session()

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses what would change nothing: the arguments are read once.

        Raises: UsageError.
        """
        if "_session" in self.__dict__ and name in _READ_ONCE:
            instead = _INSTEAD.get(name, "make another loader with it")
            raise UsageError(f"{name} cannot be assigned: the loader has read its arguments; {instead}")
        super().__setattr__(name, value)

    def __bool__(self) -> bool:
        """Returns True, as for any loader: its length does not matter."""
        return True

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "an ODBDataLoader cannot be copied or pickled: it has connections and processes. Make another from the same "
            "arguments; state_dict and load_state_dict carry its place over"
        )


_FORMED: Final = "batches are formed under token_budget"
_INSTEAD: Final = {
    "epoch": "call set_epoch",
    "token_budget": "call accept_budget for a smaller one, or make another loader",
    "batch_size": _FORMED,
    "batch_sampler": _FORMED,
}
_READ_ONCE: Final = frozenset(signature(ODBDataLoader).parameters) | _INSTEAD.keys()
"""Names of arguments, of what a DataLoader would be told, and of what is the loader's to say."""
