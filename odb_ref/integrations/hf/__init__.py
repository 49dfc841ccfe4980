"""The Hugging Face Trainer on an `ODBDataLoader`: use `ODBTrainer`, or `enable` for a Trainer that already exists."""

from odb_ref.extras import require

require(__name__, "transformers", "accelerate", extra="transformers")

from odb_ref.integrations.hf.options import STEP_INFO, ODBOptions
from odb_ref.integrations.hf.trainer import ODBTrainer, enable

__all__ = ["STEP_INFO", "ODBOptions", "ODBTrainer", "enable"]
