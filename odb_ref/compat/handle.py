"""`odb.handle`: what `apply` has made of a DataLoader."""

from __future__ import annotations

from dataclasses import dataclass

from odb_ref.compat.config import ODBConfig
from odb_ref.compat.constants import ODB_STEP_INFO_KEY


@dataclass(frozen=True, slots=True)
class ODBHandle:
    """What `apply` has made of a DataLoader."""

    config: ODBConfig
    step_info_key: str = ODB_STEP_INFO_KEY

    @property
    def token_budget(self) -> int:
        """The budget of a batch, in tokens."""
        return self.config.token_budget

    @property
    def join(self) -> bool:
        """True when every sample of every rank is trained on."""
        return self.config.join
