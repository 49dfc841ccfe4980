"""`odb.constants`: the keys under which a batch carries what belongs to it."""

from __future__ import annotations

from typing import Final

from odb_ref.compat.step_info import (
    LOCAL_BATCH_SIZE_KEY,
    LOCAL_TOKENS_KEY,
    ODB_STEP_INFO_KEY,
    TOTAL_BATCH_SIZE_KEY,
    TOTAL_TOKENS_KEY,
)

__all__ = [
    "IDLE_DATA",
    "LOCAL_BATCH_SIZE_KEY",
    "LOCAL_TOKENS_KEY",
    "ODB_STEP_INFO_KEY",
    "TOTAL_BATCH_SIZE_KEY",
    "TOTAL_TOKENS_KEY",
]

IDLE_DATA: Final = -4201
"""What an idle rank of the release is given; here it is given a batch with weight 0."""
