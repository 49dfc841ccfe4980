"""The type of a loader's batches: what its ``collate_fn`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch = TypeVar("Batch", default=object)
    """If no ``collate_fn`` determines it, annotate: ``loader: ODBDataLoader[dict[str, Tensor]] = ODBDataLoader(...)``."""
else:
    from typing import TypeVar

    Batch = TypeVar("Batch")
