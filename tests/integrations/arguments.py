"""Arguments of a Trainer in tests, and options of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from odb_ref.integrations.hf import ODBOptions
from tests.helpers.options import nested
from tests.integrations.common import BUDGET_TOKENS, OPTIONS

PLAIN: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}
"""Updates that are easily computed by hand."""


def make_arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Returns arguments for processors, which neither report nor save anything unless ``settings`` say so."""
    defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **defaults | settings)


def make_odb(settings: Any = (), **loader: Any) -> ODBOptions:
    """Returns options of the free mode. The loader has `OPTIONS`, unless ``loader`` says otherwise."""
    defaults = {"update_samples": None, "token_budget": BUDGET_TOKENS, "loader": nested(**OPTIONS | loader)}
    return ODBOptions(**defaults | dict(settings))
