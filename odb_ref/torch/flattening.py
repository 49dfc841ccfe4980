"""The collate_fn of the packed layout, which lays samples end to end in one row, for padding-free training. Spec: R2.4.

The fields have the names of transformers' ``DataCollatorWithFlattening``. Attention keeps the samples of a row apart if it uses
these fields: variable-length kernels do, and so do the masks that transformers derives from positions that begin again. These
masks need ``use_cache=False``, in the model's configuration or in the call, as its Trainer sets it. With a cache, transformers
silently does not look for several samples in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from odb_ref.core.errors import check_integer
from odb_ref.torch.reading.tasks import CHOOSING, IGNORE_INDEX, SampleError

_READ: Final = ("input_ids", "labels")


@dataclass(frozen=True, slots=True)
class FlattenSamples:
    """Makes one row from samples that are mappings with ``input_ids``, and with ``labels`` unless every token is its own label.

    ``input_ids``, ``labels``, ``position_ids`` (from 0 in each sample, unless it has its own) and all other fields with one
    value per token have the shape [1, tokens]. ``cu_seq_lens_q`` and ``_k`` hold the boundaries between samples,
    ``max_length_q`` and ``_k`` the longest length. There is no ``attention_mask``, which would be tokens by tokens.

    With ``is_shifted`` the first label of each sample becomes -100, because the token before it belongs to another sample. So
    no label reaches across samples, and the tokens that carry loss are those that were counted (WEIGHT).
    """

    is_shifted: bool = True

    def __call__(self, samples: Sequence[object]) -> dict[str, object]:
        """Returns the batch.

        Raises: SampleError when a sample has no ``input_ids``, or a field that cannot be laid end to end.
        """
        rows = [_read(sample) for sample in samples]
        names = dict.fromkeys(rows[0])
        for row in rows:
            if row.keys() != names.keys():
                raise SampleError(
                    f"samples of one batch must have the same fields, got {', '.join(names)} and {', '.join(row)}"
                )
            if self.is_shifted:
                row["labels"] = row["labels"].clone()
                row["labels"][:1] = IGNORE_INDEX
        sizes = [len(row["input_ids"]) for row in rows]
        ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        batch = {name: torch.cat([row[name] for row in rows])[None] for name in names}
        positions, begins = batch["position_ids"][0], ends[1:-1]
        if (positions[begins] == positions[begins - 1] + 1).any():
            raise SampleError(
                "position_ids of a sample continue those of the sample before it in the row, so attention that uses them "
                "would take both for one sample. Leave position_ids out, so that they begin at 0, or pass collate_fn="
            )
        return batch | {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(sizes),
            "max_length_k": max(sizes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedShapes:
    """Makes rows of at most ``shapes`` different lengths, for torch.compile and CUDA graphs, which handle each length anew.

    Rows are those of `FlattenSamples`, padded to the next of ``shapes`` equal parts of the token budget, so that none exceeds
    it. A longer sample, in a batch of its own, is padded to whole budgets, which adds a shape for each. The padding follows the
    samples like further samples without labels: it repeats the positions of the row from its beginning. ``cu_seq_lens`` and
    ``max_length`` are left out, because they would have shapes and values of their own.
    """

    token_budget: int
    shapes: int = 8
    pad_token: int = 0
    is_shifted: bool = True

    def __post_init__(self) -> None:
        check_integer(self.token_budget, "token_budget", 1)
        check_integer(self.shapes, "shapes", 1)

    def compute_length(self, tokens: int) -> int:
        """Returns the length of the row to which this many tokens are padded."""
        if tokens > self.token_budget:
            return -(-tokens // self.token_budget) * self.token_budget
        part = -(-tokens * self.shapes // self.token_budget)
        return part * self.token_budget // self.shapes

    def __call__(self, samples: Sequence[object]) -> dict[str, torch.Tensor]:
        """Returns the batch: tensors of shape [1, length]. Raises: SampleError, like `FlattenSamples`."""
        batch = FlattenSamples(self.is_shifted)(samples)
        rows = {name: row for name, row in batch.items() if isinstance(row, torch.Tensor) and row.ndim == 2}
        tokens = rows["input_ids"].shape[1]
        missing = self.compute_length(tokens) - tokens
        padding = {"input_ids": self.pad_token}
        padded = {
            name: torch.nn.functional.pad(
                row, (0, missing), value=padding.get(name, IGNORE_INDEX * name.endswith("labels"))
            )
            for name, row in rows.items()
        }
        # Without a position that the samples do not have: a model may have no more, or let the largest change its frequencies.
        padded["position_ids"] = rows["position_ids"][:, torch.arange(tokens + missing) % tokens]
        return padded


def _read(sample: object) -> dict[str, torch.Tensor]:
    """Returns the fields of a sample, each with one value per token."""
    if not isinstance(sample, Mapping) or sample.get("input_ids") is None:
        raise SampleError(f"a sample ({type(sample).__name__}) has no input_ids to lay end to end; pass collate_fn=")
    ids = _flatten(sample["input_ids"], "input_ids")
    given = sample.get("labels")
    labels = ids if given is None else _flatten(given, "labels")
    # The ids may have an integer type that cannot hold -100.
    fields = {"input_ids": ids, "labels": labels if labels.is_floating_point() else labels.long()}
    fields["position_ids"] = torch.arange(len(ids))
    for name, value in sample.items():
        if name not in _READ and not (name == "attention_mask" and value is None):
            fields[str(name)] = _flatten(value, str(name))
    for name, field in fields.items():
        if len(field) != len(ids):
            raise SampleError(
                f"{name} of a sample has {len(field)} values for {len(ids)} tokens: pass collate_fn= to pack it"
            )
    positions = fields["position_ids"]
    # A position that is the first again begins another text in a sample that was packed before.
    if ((positions[1:] != positions[:-1] + 1) & (positions[1:] != positions[:1])).any():
        raise SampleError(
            "position_ids of a sample do not go up by 1, so attention that uses them would take its parts for several samples. "
            "Leave position_ids out, or pass layout='padded' or a collate_fn for a model that finds samples otherwise"
        )
    mask = fields.pop("attention_mask", None)
    if mask is not None and not mask.all():
        raise SampleError(
            "a sample's attention_mask hides tokens, and a packed row has no mask: leave these tokens out of the sample"
        )
    for name in CHOOSING if given is None else ():
        if name in fields and not fields[name].all():
            raise SampleError(
                f"the {name} of a sample leaves out tokens, but the sample has no labels: add labels, with {IGNORE_INDEX} for "
                "these tokens, or pass collate_fn="
            )
    return fields


def _flatten(value: object, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleError(
            f"{name} of a sample does not have one value for each token: pass collate_fn= to pack it"
        ) from error
    if tensor.ndim == 0 or tensor.numel() != tensor.shape[-1]:
        raise SampleError(f"{name} of a sample has the shape {list(tensor.shape)}: pass collate_fn= to pack it")
    return tensor.reshape(-1)
