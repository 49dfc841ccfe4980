"""Steps that survive running out of memory, on all ranks together, without losing or repeating a sample.

**A whole model on each rank** (DDP, or not wrapped). Each rank computes the gradients of its batches alone, and all gradients
are averaged together at the end of an update. So a rank that runs out of memory can start its update again, with the failing
batch in halves, while the others wait for it in the averaging. It has to start again, because a failed backward pass has
already added to some gradients, and a copy of them would take memory that is not there. The price is that gradients do not
travel during the backward pass, as they do with DDP.

**A sharded model** (FSDP). The forward pass contains collectives, and a rank that fails between two of them cannot be helped.
So each rank tries beforehand: it allocates the memory that its batch will take according to a `MemoryFit`, and halves the batch
until that succeeds. Then all ranks cut what is as large as what did not fit on any of them, and run the same number of passes.

A sample that does not fit alone fails the step on every rank; it is never dropped silently. Spec: R4.5. Preserves: WEIGHT.

`UpdateGuard` takes a function that runs a pass. `StepGuard` provides it for your own loop.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Generic, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_ref.core.batching.weighting import LossReduction, LossScaling
from odb_ref.core.errors import JobError, UsageError
from odb_ref.torch import StepInfo
from odb_ref.torch.batches import Batch
from odb_ref.torch.gathering import name_rank
from odb_ref.torch.loop.budget import MemoryFit
from odb_ref.torch.loop.checks import check_model, check_parameters, is_sharded
from odb_ref.torch.loop.memory import attempt, is_out_of_memory, release_memory, reserve_memory
from odb_ref.torch.loop.ranks import average, reduce
from odb_ref.torch.loop.splitting import describe_half, find_count, list_fields, split_batch
from odb_ref.torch.reading.tasks import get_labels

_LOG: Final = logging.getLogger("odb_ref")

SHRINK: Final = 0.9
"""The factor between the smallest batch that did not fit and the budget that `UpdateGuard.token_budget` proposes."""

_UNBOUNDED: Final = 2**62
"""More tokens than any batch has."""

Piece = tuple[Batch, StepInfo]
"""A batch of the update, or a part of one after a split. Its `StepInfo` then has the part's samples, supervised and padded
tokens, and weight."""


class GuardOptions(TypedDict, Generic[Batch], total=False):
    """The options of a guard: see `StepGuard`."""

    split: Callable[[Batch, int], tuple[Batch, Batch]]
    count: Callable[[Batch], int] | None
    memory: MemoryFit | None
    lower_budget: Callable[[int], object] | None
    group: dist.ProcessGroup | None


class UpdateGuard(Generic[Batch]):
    """Runs passes, in halves if memory runs out. `StepGuard` explains the options.

    ``run_pass(model, batch, info)`` runs forward and backward for a batch. It returns the loss, scaled by `StepInfo.scale` and
    detached, and must not average gradients over ranks.

    Raises: UsageError when the model would average gradients during a pass, or is a DeepSpeed engine.
    """

    def __init__(
        self,
        model: nn.Module,
        run_pass: Callable[[nn.Module, Batch, StepInfo], torch.Tensor],
        *,
        split: Callable[[Batch, int], tuple[Batch, Batch]] = split_batch,
        count: Callable[[Batch], int] | None = None,
        memory: MemoryFit | None = None,
        lower_budget: Callable[[int], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.failures = 0
        """How often this rank has run out of memory."""
        self.all_failures = 0
        """How often any rank has run out of memory, up to the end of the last update."""
        self.token_budget: int | None = None
        """A budget that would have avoided all failures on this rank so far, or None without any."""
        check_model(model)
        if isinstance(model, DistributedDataParallel):
            group = model.process_group if group is None else group
            # Under DDP's own forward, its backward pass would average gradients during the pass.
            model = model.module
        self._model = model
        # All parameters: those that do not train now may do so later.
        self._parameters = list(model.parameters())
        self._example = next(parameter for parameter in self._parameters if parameter.requires_grad)
        """A trainable parameter, whose type and device are used for losses and messages."""
        self._is_sharded = is_sharded(model)
        self._run = run_pass
        self._split = split
        self._count = count
        self._memory = memory
        self._lower_budget = lower_budget
        self._group = group
        self._is_new = True
        """Whether no update has begun yet."""
        self._pieces: list[Piece[Batch]] = []
        self._failure: Exception | None = None
        """What went wrong in this update. It is raised at the update's end, on all ranks. Until then this rank keeps taking its
        batches, because the others may need it in order to get theirs."""
        self._losses: list[torch.Tensor] = []
        """The losses of the update's pieces that have run."""
        self._told_failures = 0
        """How many of this rank's failures the other ranks know of."""
        self._is_split = not self._is_sharded or memory is not None
        """Whether batches may have to be split."""
        self._tried: set[frozenset[tuple[str, bool | None]]] = set()
        """What fields batches had on which splitting was tried, as of `list_fields`."""

    def backward(self, batch: Batch, info: StepInfo) -> torch.Tensor:
        """Adds the gradients of a batch to those of the update. Returns the batch's scaled loss, detached.

        All ranks must call this for every step. After the last step of an update the gradients are averaged over all ranks.

        Raises: at the end of an update, what a pass has raised, and OutOfMemoryError for a sample that does not fit alone; then
        JobError on the other ranks.
        """
        last = self._pieces[-1][1] if self._pieces else None
        if last is None or last.is_update_end or (info.epoch, info.step) != (last.epoch, last.step + 1):
            if self._is_new and any(parameter.grad is not None for parameter in self._parameters):
                raise UsageError(
                    "the model has gradients before the guard's first update, which would be lost. If they are of a checkpoint "
                    "inside an update: save where info.is_update_end is true. If they are of another guard or loader: make all "
                    "parts of an update with one guard, from one loader. Else call optimizer.zero_grad() before"
                )
            self._is_new = False
            self._pieces, self._losses, self._failure = [], [], None  # left over from an update that was interrupted
            self._clear()
        if self._is_sharded:
            self._run_together((batch, info))
        else:
            self._pieces.append((batch, info))
            try:
                if self._failure is None:
                    self._try_halves((batch, info))
                    self._run_update()
            except Exception as error:
                self._failure = error
            if info.is_update_end:
                self._average()
            if self._failure is not None:
                return self._example.new_full((), torch.nan)
        loss = [loss for loss, (_, of) in zip(self._losses, self._pieces, strict=True) if of.step == info.step]
        total = torch.stack(loss).sum()
        if info.is_update_end:
            self._pieces, self._losses = [], []
        return total

    # A whole model on each rank ------------------------------------------------------------------------------------------

    def _run_update(self) -> None:
        """Runs the pieces of the update that have not run, and all of them again if memory runs out."""
        while len(self._losses) < len(self._pieces):
            number = len(self._losses)
            piece = self._pieces[number]
            loss, text = attempt(partial(self._run_weighed, *piece))
            if loss is not None:
                self._losses.append(loss)
                continue
            self._pieces[number : number + 1] = self._halve(piece, text)
            self._losses = []
            self._clear()
            release_memory()

    def _run_weighed(self, batch: Batch, info: StepInfo) -> torch.Tensor:
        # A batch of masked samples runs: with a gradient of zero the optimizer moves weights, with None it would not.
        return self._example.new_zeros(()) if info.is_idle else self._run_piece(batch, info)

    def _average(self) -> None:
        """Replaces the gradients by their mean over ranks.

        Parameters that no rank has used keep None. Raises: this rank's failure, or JobError for another rank's.
        """
        present = self._exchange([int(parameter.grad is not None) for parameter in self._parameters], self._failure)
        parameters = [parameter for parameter, is_used in zip(self._parameters, present, strict=True) if is_used]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average([parameter.grad for parameter in parameters if parameter.grad is not None], self._group)

    # A sharded model -----------------------------------------------------------------------------------------------------

    def _run_together(self, piece: Piece[Batch]) -> None:
        """Runs a batch in pieces that fit on every rank. A rank with fewer of them repeats its last with weight 0.

        All cut by what does not fit on any of them, because model-parallel peers must make the same pieces of their batch.
        """
        pieces, lowest, failure = [piece], _UNBOUNDED, None
        try:
            self._try_halves(piece)
            while (number := next((n for n, item in enumerate(pieces) if not self._has_room(item)), None)) is not None:
                lowest = min(lowest, pieces[number][1].padded_tokens)
                pieces[number : number + 1] = self._halve(pieces[number], "its memory cannot be allocated")
        except Exception as error:
            failure = error
        (least,) = self._exchange([-lowest], failure)
        needed = 1
        if least > -_UNBOUNDED:
            try:
                pieces = self._cut_below(piece, -least)
            except Exception as error:
                failure = error
            (needed,) = self._exchange([len(pieces)], failure)
        batch, info = pieces[-1]
        pieces += [(batch, replace(info, loss_scale=0.0, local_supervised=0))] * (needed - len(pieces))
        self._pieces += pieces
        for item in pieces:
            self._losses.append(self._run_piece(*item))

    def _cut_below(self, piece: Piece[Batch], tokens: int) -> list[Piece[Batch]]:
        """Returns a batch in pieces of fewer tokens than this, as far as its samples allow."""
        if piece[1].padded_tokens < tokens or piece[1].local_samples < 2:
            return [piece]
        return [part for half in self._cut(piece) for part in self._cut_below(half, tokens)]

    def _has_room(self, piece: Piece[Batch]) -> bool:
        if self._memory is None:
            return True
        needed = self._memory.predict_bytes(piece[1].padded_tokens) - self._memory.predict_bytes(0)
        return not attempt(partial(reserve_memory, needed, self._example.device))[1]

    # Both ----------------------------------------------------------------------------------------------------------------

    def _run_piece(self, batch: Batch, info: StepInfo) -> torch.Tensor:
        try:
            return self._run(self._model, batch, info)
        except Exception as error:
            # A piece that is repeated for other ranks has the same samples.
            is_half = any(of.step == info.step and of.sample_ids != info.sample_ids for _, of in self._pieces)
            if is_half and self._split is split_batch and not is_out_of_memory(error):
                error.add_note(describe_half(batch, info.local_samples))
            raise

    def _try_halves(self, piece: Piece[Batch]) -> None:
        """Splits the first batch of each kind as a test, so that an error shows before memory runs out.

        Batches are of one kind if the same fields have an entry for each sample, which a field may have by chance.
        """
        batch, info = piece
        if not self._is_split or info.local_samples < 2:
            return
        kind = frozenset(list_fields(batch, info.local_samples).items())
        if kind not in self._tried:
            self._cut(piece)
            self._tried.add(kind)

    def _halve(self, piece: Piece[Batch], text: str) -> list[Piece[Batch]]:
        self.failures += 1
        info = piece[1]
        shrunk = max(1, int(info.padded_tokens * SHRINK))
        if self.token_budget is None or shrunk < self.token_budget:
            self.token_budget = shrunk
            if self._lower_budget is not None:
                self._lower_budget(shrunk)
        if info.local_samples < 2:
            raise torch.OutOfMemoryError(
                f"step {info.step}: a sample of {info.padded_tokens} tokens does not fit alone: {text}"
            )
        _LOG.warning(
            "out of memory in step %d: %d samples, %d tokens with padding, go in halves",
            info.step,
            info.local_samples,
            info.padded_tokens,
        )
        return self._cut(piece)

    def _cut(self, piece: Piece[Batch]) -> list[Piece[Batch]]:
        """Returns the halves of a batch, without one whose mean would be 0/0 where the whole batch's is not."""
        batch, info = piece
        batches = self._split(batch, info.local_samples)
        first = (info.local_samples + 1) // 2
        samples = first, info.local_samples - first
        ids = info.sample_ids[:first], info.sample_ids[first:]
        is_mean = info.weighting.reduction is LossReduction.MEAN
        counts = self._count_halves(batch, batches, samples, info) if is_mean else (info.local_supervised, 0)
        is_by_samples = info.weighting.scaling is LossScaling.SAMPLES and self._count is None
        weights = samples if is_by_samples else counts
        total = sum(weights) if is_mean else 0  # the user's count may differ from the loader's
        halves = []
        for half, held, supervised, weight, sample_ids in zip(batches, samples, counts, weights, ids, strict=True):
            if total and not weight:
                continue
            of_half = replace(
                info,
                local_samples=held,
                local_supervised=supervised,
                sample_ids=sample_ids,
                padded_tokens=info.padded_tokens * held // info.local_samples,
                loss_scale=info.loss_scale * weight / total if total else info.loss_scale,
            )
            halves.append((half, of_half))
        return halves

    def _count_halves(
        self, batch: Batch, halves: tuple[Batch, Batch], samples: tuple[int, int], info: StepInfo
    ) -> tuple[int, int]:
        """Returns the number of supervised tokens in each half. Raises: UsageError when it cannot be determined."""
        count = self._count or find_count(batch, info.local_supervised)
        if count is not None:
            return count(halves[0]), count(halves[1])
        is_each = get_labels(batch) is None and info.local_supervised == info.local_samples
        if not is_each and info.weighting.scaling is not LossScaling.SAMPLES:
            raise UsageError(
                f"by the loader's count a batch's loss is a mean over {info.local_supervised}, which its labels do not show, "
                "so its halves cannot be weighed: pass count=, a function that says what the loss of a batch is a mean over"
            )
        first, second = (-(-info.local_supervised * held // info.local_samples) for held in samples)
        return first, second

    def _exchange(self, own: list[int], failure: Exception | None) -> list[int]:
        """Returns the maximum of each value over all ranks. If any rank has new failures, also adds these up.

        Raises: this rank's failure, or JobError for another rank's.
        """
        rank, device = dist.get_rank(self._group) if dist.is_initialized() else 0, self._example.device
        new = self.failures - self._told_failures
        own = [0 if failure is None else rank + 1, int(new > 0), *own]
        try:
            failed, has_news, *values = reduce(own, dist.ReduceOp.MAX, device, self._group)
        finally:
            if failure is not None:
                raise failure
        if failed:
            name = name_rank(failed - 1, self._group)
            raise JobError(f"{name} failed in a step: see what it raised", failed - 1, "failed in a step")
        if has_news:
            (added,) = reduce([new], dist.ReduceOp.SUM, device, self._group)
            self._told_failures, self.all_failures = self.failures, self.all_failures + added
        return values

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class StepGuard(UpdateGuard[Batch]):
    """Runs forward and backward passes, in halves if memory runs out.

    ::

        guard = StepGuard(model, compute_loss)          # compute_loss(model, batch), as `info.scale` takes it
        for batch, info in loader.steps():
            loss = guard.backward(batch, info)
            if info.is_update_end:
                optimizer.step()                        # gradients are averaged over ranks, and begin anew by themselves

    ``model`` is whole on each rank, in `DistributedDataParallel` or not, or sharded by FSDP. If it is sharded, pass ``memory``,
    a `MemoryFit`. ``split(batch, samples)`` returns a batch's first ``(samples + 1) // 2`` samples, and the others (default:
    along the first dimension). ``count(batch)`` returns the number of units that its loss averages over (default: the
    supervised tokens, by its labels; with ``Loss(scaling="samples")`` its samples). For preference pairs pass `split_pairs` and
    `count_pairs`. Both are tried on the first batch with each set of fields. Gradients are averaged over ``group`` (default:
    that of DDP; otherwise all ranks of the job). A layer that mixes samples, such as batch normalisation, sees smaller batches
    after a split; dropout draws again.
    ``lower_budget`` is called with each new `token_budget`; ``loader.accept_budget`` applies it on all ranks (R15).
    ``backward`` is for frameworks with their own backward function, such as Accelerate.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: Callable[[nn.Module, Batch], torch.Tensor],
        *,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
        **options: Unpack[GuardOptions[Batch]],
    ) -> None:
        is_first = True

        def run_pass(model: nn.Module, batch: Batch, info: StepInfo) -> torch.Tensor:
            nonlocal is_first
            # Pass a copy: compute_loss may remove items, and they must be there if the pass is repeated.
            own = copy.copy(batch) if isinstance(batch, Mapping | list) else batch
            scaled = info.scale(compute_loss(model, own))
            if is_first and not self._is_sharded:  # FSDP trains other parameters than those it shows
                check_parameters(scaled, self._parameters)
                is_first = False
            backward(scaled)
            return scaled.detach()

        super().__init__(model, run_pass, **options)
