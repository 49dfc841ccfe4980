"""`odb.handle`: the result of `apply`."""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.compat.config import ODBConfig
from odb_ref.compat.constants import ODB_STEP_INFO_KEY


@dataclass(frozen=True, slots=True)
class ODBHandle:
    """Describes the loader that `apply` has made from a DataLoader."""

    config: ODBConfig
    step_info_key: str = ODB_STEP_INFO_KEY

    @property
    def token_budget(self) -> int:
        """The budget of a batch, in tokens."""
        return self.config.token_budget

    @property
    def join(self) -> bool:
        """True if every sample of every rank is trained on."""
        return self.config.join
