"""Arguments of a Trainer in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

PLAIN: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}
"""Updates that are easily computed by hand."""


def make_arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Returns arguments for processors, which neither report nor save anything unless ``settings`` say so."""
    defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **defaults | settings)
