"""What tells one data set from another without reading a sample: digests of what it holds. Spec: R18.1.

Nothing of it can be read off a digest, so it may be sent, and stand in a message by its name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sized
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Final

import numpy as np
import torch
from torch.utils.data import Dataset

_OF_RANK: Final = frozenset(
    ("rank", "local_rank", "global_rank", "node_rank", "process_index", "local_process_index", "device", "seed")
)
"""Names of what may differ between ranks that read one data set."""
TYPE: Final = "type()"
SIZE: Final = "len()"
"""By what names these two are told, which nothing else can have."""
_MOST: Final = 32
"""So many attributes are looked at, and so many numbers of an array."""


def list_facts(data: object, *, is_sized: bool = False, is_own: bool = False, depth: int = 3) -> dict[str, str]:
    """Returns the type of a data set, and digests of what it holds, by name: of what is plain, or data in turn, and public.

    ``is_sized`` adds how many samples it has; ``is_own`` what has a meaning in this process only: which objects the rest of it
    is.
    """
    items = [("its items", data)] if isinstance(data, list | tuple | np.ndarray | torch.Tensor) else []
    found = {TYPE: type(data).__name__}
    with contextlib.suppress(Exception):  # one that raises is found out when the epoch begins, on all ranks
        found |= {SIZE: str(len(data))} if is_sized and isinstance(data, Sized) else {}
    for name, value in [*items, *getattr(data, "__dict__", {}).items()][:_MOST]:
        text = None
        if not isinstance(value, dict):  # what was read before, often
            with contextlib.suppress(Exception):  # an array of another kind
                text = _describe(value, depth)
        if is_own:
            text = text or f"object {id(value)}"
        elif name.startswith("_") or name in _OF_RANK:
            continue
        if text is not None:
            found[name] = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return found


def _describe(value: object, depth: int) -> str | None:
    """Returns a text that is the same in every process that has such a value; None where there is none."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | range() | PurePath():
            return repr(value)
        case np.generic():
            return repr(value.item())
        case FunctionType() | BuiltinFunctionType() | type():
            return value.__qualname__
        case np.ndarray() | torch.Tensor():
            ends = (value[:2], value[-2:]) if value.ndim else (value,)
            numbers = [_describe(part.reshape(-1)[:_MOST].tolist(), depth) for part in ends]
            return f"{value.dtype} {tuple(value.shape)} {numbers}"
        case list() | tuple():
            places = (
                range(len(value)) if len(value) <= _MOST else (0, len(value) // 3, 2 * len(value) // 3, len(value) - 1)
            )
            return f"{len(value)} {[_describe(value[place], depth - 1) for place in places] if depth else None}"
        case dict():
            pairs = list(value.items())[:_MOST] if depth else []
            return f"{len(value)} {[(_describe(name, 0), _describe(item, depth - 1)) for name, item in pairs]}"
        case Dataset() if depth:
            return f"{type(value).__name__} {list_facts(value, depth=depth - 1)}"
        case _:
            return None
