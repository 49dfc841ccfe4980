"""`odb.constants`: the keys under which a batch carries its step's information."""

from __future__ import annotations

from typing import Final

LOCAL_BATCH_SIZE_KEY: Final = "local_batch_size"
TOTAL_BATCH_SIZE_KEY: Final = "total_batch_size"
LOCAL_TOKENS_KEY: Final = "odb_local_tokens"
TOTAL_TOKENS_KEY: Final = "odb_total_tokens"
ODB_STEP_INFO_KEY: Final = "odb_step_info"

IDLE_DATA: Final = -4201
"""The data of an idle rank in the release. Here it gets a batch with weight 0 instead."""
