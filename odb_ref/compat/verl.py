"""verl's micro-batches, planned by `odb_ref.plan`: functions of ``verl.utils.seqlen_balancing``, which other projects copy.

The interface is that of verl 0.9.1. Older versions, and copies in other projects, have the first of these arguments. After you
change the import, calls that hung or exceeded the budget no longer do. Deliberate differences: a rank with fewer samples than
micro-batches repeats its shortest sample with an empty loss mask, or all ranks refuse if there is no such column. And if one
rank cannot plan, all ranks raise the same error. Neither verl nor tensordict is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, Protocol, TypeVar

import torch
from torch import distributed

from odb_ref.core.errors import UsageError
from odb_ref.plan import plan_rank
from odb_ref.plan.terms import SAY_ALONE, SAY_EMPTY, SAY_IDLE
from odb_ref.torch.gathering import gather_integers

LOSS_MASKS: Final = ("loss_mask", "response_mask")
"""Columns that are zeroed in a micro-batch that repeats a sample. One of them must exist."""
_SAY_MASK: Final = f"a batch needs a column {' or '.join(LOSS_MASKS)}, or a sample would count twice"


class TensorRows(Protocol):
    """The parts of a ``TensorDict`` that are used here: columns with one row per sample."""

    def __init__(self, source: Mapping[str, torch.Tensor], batch_size: int) -> None: ...
    def __getitem__(self, key: str, /) -> torch.Tensor: ...
    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the columns."""


class Proto(Protocol):
    """The parts of a ``DataProto`` that are used here."""

    batch: TensorRows
    non_tensor_batch: dict[str, torch.Tensor]
    meta_info: dict[str, object]

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, torch.Tensor],
        meta_info: Mapping[str, object],
    ) -> Proto:
        """Returns an instance with these columns."""


Rows = TypeVar("Rows", bound=TensorRows)
Data = TypeVar("Data", bound=Proto)


def rearrange_micro_batches(  # noqa: PLR0917 (as the original has them)
    batch: Rows,
    max_token_len: int,
    dp_group: distributed.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Rows], list[list[int]]]:
    """Returns the micro-batches, and the indices of each one's samples. Small micro-batches come first and last.

    With ``use_dynamic_bsz_balance=False`` the costliest come first. Samples are counted without padding.

    Raises: UsageError on every rank when one cannot plan, has no sample, or would have to repeat one that it cannot mask.
    Spec: R13.4, R13.11.
    """
    has_mask = any(key in LOSS_MASKS for key, _ in batch.items())
    is_shared = distributed.is_initialized() and same_micro_num_in_dp and dp_group is not None
    try:
        plan = plan_rank(
            _iterate_lengths(batch),
            exchange=partial(gather_integers, group=dp_group) if is_shared else None,
            together=_iterate_groups(batch, force_group_size) if force_group_size != 1 else None,
            budget=max_token_len,
            cost=_compute_workload,
            multiple_of=1 if num_batches_divided_by is None else num_batches_divided_by,
            at_least=1 if min_num_micro_batch is None else min_num_micro_batch,
            short="idle" if has_mask else "refuse",
            order="smallest_at_ends" if use_dynamic_bsz_balance else "costliest_first",
        )
    except UsageError as error:
        text = str(error).replace(SAY_EMPTY, "").replace(SAY_ALONE, "")
        raise UsageError(text.replace(SAY_IDLE, _SAY_MASK)) from error
    indices = [[*(own or plan.spare)] for own in plan.micro_batches]
    return [_select(batch, own, is_idle=is_idle) for own, is_idle in zip(indices, plan.is_idle, strict=True)], indices


def prepare_dynamic_batch(  # noqa: PLR0917
    data: Data,
    max_token_len: int,
    dp_group: distributed.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Proto], list[list[int]]]:
    """Does the same for a ``DataProto``: see `rearrange_micro_batches`."""
    parts, indices = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    found = []
    for part, own in zip(parts, indices, strict=True):
        others = {key: value[own] for key, value in data.non_tensor_batch.items()}
        found.append(type(data).from_dict(dict(part.items()), others, meta_info=copy.deepcopy(data.meta_info)))
    return found, indices


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the rows of all micro-batches in the order of the samples. For a repeated sample, takes the first row.

    Raises: UsageError when the numbers of rows and indices differ.
    """
    flat = [*chain.from_iterable(batch_idx_list)]
    if len(flat) != data.shape[0]:
        raise UsageError(f"{len(flat)} indices, but {data.shape[0]} rows")
    place_of: dict[int, int] = {}
    for place, index in enumerate(flat):
        place_of.setdefault(index, place)
    return _take(data, [place_of[index] for index in sorted(place_of)])


def _compute_workload(tokens: int) -> int:
    """Returns verl's estimate of a sample's cost."""
    return 24_576 * tokens + tokens**2


def _iterate_lengths(batch: TensorRows) -> Iterator[int]:
    """Yields the samples' tokens lazily, so that errors occur inside `plan_rank`, which reports them to all ranks."""
    tokens = batch["input_ids"]
    if tokens.is_nested:
        yield from (len(row) for row in tokens.unbind())
    else:
        yield from map(int, batch["attention_mask"].sum(dim=1).tolist())


def _iterate_groups(batch: TensorRows, size: int) -> Iterator[int]:
    number = batch["input_ids"].shape[0]
    if size < 1 or number % size:
        raise UsageError(f"{number} samples cannot be grouped by {size}")
    for index in range(number):
        yield index // size


def _select(batch: Rows, indices: list[int], *, is_idle: bool) -> Rows:
    columns = {}
    for key, value in batch.items():
        columns[key] = _take(value, indices) if len(value.shape) else value  # a scalar belongs to the whole batch
        if is_idle and key in LOSS_MASKS:
            columns[key] = torch.zeros_like(columns[key])
    return type(batch)(columns, len(indices))


def _take(value: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.is_nested:
        return value[torch.tensor(indices, dtype=torch.long)]
    every = value.unbind()
    rows = [every[index] for index in indices]
    if value.layout != torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    # verl marks a tensor's ragged dimension by this attribute of torch's, not in its shape.
    ragged: int = getattr(value, "_ragged_idx", 1)
    ends = torch.tensor([0] + [row.shape[ragged - 1] for row in rows], device=value.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, ragged - 1), ends, jagged_dim=ragged)
