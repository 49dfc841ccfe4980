"""Micro-batches of samples whose lengths are known, over a process group: the same number on every rank. Spec: R13.

One exchange of a few integers, after which each rank plans alone: how many micro-batches the rank that needs most needs, the
counts behind the weights, and what all ranks must agree on. A rank that cannot plan says so in the same exchange, so no
rank is left waiting.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import distributed

from odb_ref.core.batching.cost import PROBES, CostOfLength
from odb_ref.core.batching.known_lengths import Indices, Length, PlanTerms, RankPlan, prepare
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError, choose
from odb_ref.core.types import StepCounts
from odb_ref.torch.info import Weighting

_EXACT: Final = Weighting()

SETTINGS: Final = ("budget_tokens", "layout", "multiple_of", "at_least", "may_exceed", "cost", "weighting")
"""What must be equal on all ranks, in the order in which it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of this rank."""

    indices: Indices
    """Which of this rank's samples it holds. An idle one holds the shortest, to be run again with weight 0, so that this rank
    takes part in every collective; none, where the rank has no sample."""
    is_idle: bool
    loss_scale: float
    """Multiply its loss by this before ``backward``: what the gradients then are, averaged over ranks and added up over
    micro-batches, is said in `odb_ref.torch.info`."""


def plan_micro_batches(
    lengths: Sequence[Length],
    *,
    budget_tokens: int,
    supervised: Sequence[int] | None = None,
    layout: Layout | str = Layout.PACKED,
    cost: CostOfLength | None = None,
    multiple_of: int = 1,
    at_least: int = 1,
    may_exceed: bool = False,
    weighting: Weighting = _EXACT,
    group: distributed.ProcessGroup | None = None,
) -> tuple[MicroBatch, ...]:
    """Returns this rank's micro-batches of one optimizer step; every rank of the group, and all must call it, gets as many.

    ``lengths`` says how many tokens each of this rank's samples has, ``supervised`` how many of them carry loss (default: all).
    The weights are those of ``weighting``, with all micro-batches for an accumulation window (default: the mean over all
    supervised tokens). `odb_ref.core.batching.known_lengths.PlanTerms` explains the other arguments. A process without a
    process group plans for itself.

    Raises: on every rank, when one rank's values make no sense, a sample exceeds the budget, or two ranks differ in what all
    must share: the error itself on the rank that has it, UsageError on the others. Spec: R13.3, R13.4.
    """
    error: Exception | None = None
    try:
        terms = PlanTerms(
            budget_tokens=budget_tokens,
            layout=choose(Layout, layout, "layout"),
            cost=cost,
            multiple_of=multiple_of,
            at_least=at_least,
            may_exceed=may_exceed,
        )
        own = prepare(lengths, terms)
        carrying = _check_supervised(own, supervised)
        message = [0, own.need, len(own.samples), sum(carrying), *_describe(terms, weighting)]
    except Exception as raised:  # also what a cost function raises: the others wait for this message
        error, message = raised, [1] * (4 + len(SETTINGS))
    messages = _exchange(message, group)
    if error is not None:
        raise error
    _check_messages(messages)
    number = terms.round_up(max(need for _, need, *_ in messages))
    window = StepCounts(sum(message[2] for message in messages), 0, sum(message[3] for message in messages))
    weights = replace(weighting, accumulation_steps=number)
    shortest = tuple(sample.id for sample in sorted(own.samples, key=lambda sample: sample.length)[:1])
    found = []
    for indices in own.divide(number):
        local = StepCounts(len(indices), 0, sum(carrying[index] for index in indices))
        scale = weights.compute_scale(local, window, len(messages))
        found.append(MicroBatch(indices=indices or shortest, is_idle=not indices, loss_scale=scale))
    return tuple(found)


def _check_supervised(own: RankPlan, supervised: Sequence[int] | None) -> list[int]:
    lengths = [sample.length for sample in own.samples]
    found = lengths if supervised is None else [operator.index(value) for value in supervised]
    if len(found) != len(lengths):
        raise UsageError(f"{len(lengths)} lengths, but {len(found)} numbers of supervised tokens")
    for index, (value, length) in enumerate(zip(found, lengths, strict=True)):
        if not 0 <= value <= length:
            raise UsageError(f"sample {index} has {value} supervised tokens of {length}")
    return found


def _describe(terms: PlanTerms, weighting: Weighting) -> list[int]:
    """Returns `SETTINGS` as integers; digests stand for what is none."""
    costs = None if terms.cost is None else [terms.cost(length) for length in PROBES]
    return [
        terms.budget_tokens,
        list(Layout).index(terms.layout),
        terms.multiple_of,
        terms.at_least,
        int(terms.may_exceed),
        _digest(repr(costs)),
        _digest(repr(weighting)),
    ]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _exchange(message: list[int], group: distributed.ProcessGroup | None) -> list[list[int]]:
    """Returns the messages of all ranks, in order."""
    if not distributed.is_available() or not distributed.is_initialized():
        return [message]
    # NCCL sends what lies on a device.
    device = "cuda" if "nccl" in distributed.get_backend(group) else "cpu"
    sent = torch.tensor(message, dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(received, sent, group=group)
    return [tensor.tolist() for tensor in received]


def _check_messages(messages: list[list[int]]) -> None:
    for rank, (has_failed, *_) in enumerate(messages):
        if has_failed:
            raise UsageError(f"rank {rank} cannot plan its micro-batches: its own error says why")
    for rank, (_, _, _, _, *settings) in enumerate(messages):
        for name, first, own in zip(SETTINGS, messages[0][4:], settings, strict=True):
            if own != first:
                raise UsageError(f"{name} differs: {_say(name, first)} on rank 0, {_say(name, own)} on rank {rank}")


def _say(name: str, value: int) -> str:
    match name:
        case "layout":
            return list(Layout)[value]
        case "may_exceed":
            return str(bool(value))
        case "cost" | "weighting":
            return f"one with the digest {value:x}"
        case _:
            return str(value)
