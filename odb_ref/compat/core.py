"""`odb.core`: `apply`."""

from odb_ref.compat.dataloader import apply

__all__ = ["apply"]
