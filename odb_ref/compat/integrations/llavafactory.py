"""`odb.integrations.llavafactory`: the same as for LLaMA-Factory."""

from odb_ref.compat.integrations.llamafactory import configure_trainer, enable_odb

__all__ = ["configure_trainer", "enable_odb"]
