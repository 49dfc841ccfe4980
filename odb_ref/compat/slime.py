"""slime's schedule of optimizer steps, planned by `odb_ref.plan`: ``build_dp_schedule`` of ``slime.utils.dp_schedule``.

The interface is that of THUDM/slime at 04e6743, with miles' partial last step. After you change the import, the budget is kept,
micro-batches are balanced by the cost of attention, and there are few of them. Deliberate differences: ``balance_data`` and
``balance_by_flops`` are always on, and a sample longer than the budget is refused unless ``oversize="alone"``. Steps with a
number of tokens (``global_batch_tokens``) and batches that keep images apart (``multimodal_aware_packing``) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, Protocol

from odb_ref.core.batching.cost import CostOfLength
from odb_ref.core.errors import UsageError, check_integer
from odb_ref.plan import Oversize, attention, plan_all
from odb_ref.plan.terms import SAY_IDLE

CONFIG: Final = ("dp_size", "cp_size", "vpp_size", "microbatch_group_size_per_vp_stage")
"""What is used of slime's configuration of the ranks."""


class Arguments(Protocol):
    """The arguments of slime that are used here."""

    use_dynamic_batch_size: bool
    max_tokens_per_gpu: int | None
    micro_batch_size: int | None


def build_dp_schedule(
    args: Arguments,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    sample_is_multimodal: Sequence[bool] | None = None,
    cost: CostOfLength | None = None,
    oversize: Oversize | str = Oversize.REFUSE,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Returns the samples of each rank; for each rank its micro-batches, as indices into these; the number of micro-batches in
    each optimizer step; and the number of rollouts in each step.

    ``cost`` is the quantity to balance, as a function of the tokens (default: `odb_ref.plan.attention` for
    ``args.hidden_size``, or for 4,096). Trailing rollouts that do not fill a step are left out, unless
    ``args.allow_partial_train_step`` is set and there is a sample for each rank.

    Raises: UsageError when the terms cannot be met, or something unsupported is requested.
    """
    if getattr(args, "global_batch_tokens", None) is not None:
        raise UsageError("global_batch_tokens is not served: give global_batch_size")
    if any(sample_is_multimodal or ()) and getattr(args, "multimodal_aware_packing", "off") != "off":
        raise UsageError("multimodal_aware_packing is not served: samples with images share micro-batches with others")
    if len(rollout_indices) != len(total_lengths):
        raise UsageError(f"{len(rollout_indices)} rollout_indices for {len(total_lengths)} total_lengths")
    check_integer(global_batch_size, "global_batch_size", 1)
    missing = [name for name in CONFIG if name not in train_parallel_config]
    if missing:
        raise UsageError(f"train_parallel_config lacks {', '.join(missing)}")
    ranks = train_parallel_config["dp_size"]
    stages = train_parallel_config["microbatch_group_size_per_vp_stage"]
    is_interleaved = (train_parallel_config["vpp_size"] or 1) > 1
    rollouts: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(index)
    has_last = bool(getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size)
    steps = _cut([*rollouts.values()], global_batch_size, least=ranks if has_last else len(total_lengths) + 1)
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(ranks)]
    counts = []
    for number, step in enumerate(steps):
        samples = [*chain.from_iterable(step)]
        lengths = [total_lengths[index] for index in samples]
        budget, limits = _find_bounds(args, train_parallel_config["cp_size"], lengths)
        try:
            plan = plan_all(
                lengths,
                ranks=ranks,
                budget=budget,
                limits=limits,
                cost=attention(hidden_size=getattr(args, "hidden_size", 4_096)) if cost is None else cost,
                multiple_of=stages if is_interleaved else 1,
                oversize=oversize,
                short="refuse",
            )
        except UsageError as error:
            text = str(error).replace(SAY_IDLE, "it needs more samples, or fewer ranks (dp_size)")
            raise UsageError(
                f"optimizer step {number}, whose samples are {samples!r:.200} of total_lengths: {text}"
            ) from error
        counts.append(plan.count)
        for rank, own in enumerate(plan.ranks):
            for batch in own.micro_batches:
                first = len(partitions[rank])
                partitions[rank] += [samples[index] for index in batch]
                micro_batches[rank].append([*range(first, len(partitions[rank]))])
    return partitions, micro_batches, counts, [len(step) for step in steps]


def _cut(rollouts: list[list[int]], size: int, *, least: int) -> list[list[list[int]]]:
    """Returns the rollouts of each optimizer step. A last one that is not full is kept only with ``least`` samples."""
    if len(rollouts) < size:
        raise UsageError(f"{len(rollouts)} rollouts do not fill a step of {size}")
    steps = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
    return steps if len(steps[-1]) == size or sum(map(len, steps[-1])) >= least else steps[:-1]


def _find_bounds(args: Arguments, context_parallel: int, lengths: Sequence[int]) -> tuple[int, dict[str, int]]:
    """Returns the maximum tokens of a micro-batch, and its other limits."""
    if args.use_dynamic_batch_size:
        if args.max_tokens_per_gpu is None:
            raise UsageError("use_dynamic_batch_size needs max_tokens_per_gpu")
        margin: float = getattr(args, "packing_safety_margin", 1.0)
        return max(1, int(args.max_tokens_per_gpu * context_parallel * margin)), {}
    return max(sum(lengths), 1), {"samples": args.micro_batch_size or 1}
