"""What all ranks must have in common, by the names that the user has for it; a difference ends the epoch. Spec: R7.3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from odb_ref.core.config import Config
from odb_ref.torch.info import Weighting
from odb_ref.torch.plan.order import Beginning, Order
from odb_ref.torch.plan.state import compute_digest
from odb_ref.torch.reading.counting import Counting


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    """The settings that the core does not know."""

    order: Order
    weighting: Weighting
    counting: Counting
    choices: Mapping[str, object]
    """Further settings by name."""

    def make_tag(self, beginning: Beginning, loader: str) -> str:
        """Returns the tag of an epoch's configuration; ``loader`` says which loader's it is. Spec: R18.1."""
        settings: dict[str, object] = self.order.settings | {
            "loader": loader,
            "epoch": beginning.start.epoch,
            "step": beginning.resume_step,
            "loss_scaling": self.weighting.scaling,
            "loss_reduction": self.weighting.reduction,
            "accumulation_steps": self.weighting.accumulation_steps,
            "trainer_divides_loss": self.weighting.is_divided_by_steps,
        }
        start = beginning.start
        if self.order.is_auto and self.order.sampler is not None and start.keys is not None:
            settings["sampler"] = compute_digest(start.keys)  # one order, which every rank lists for itself
        return json.dumps({**settings, **self.choices, **self.counting.settings}, sort_keys=True)


def describe_decisive(config: Config, counting: Counting, window_bytes: int | None) -> str:
    """Returns what decides the batches as a JSON object, but for the data, their order and the number of ranks."""
    shared = json.loads(config.shared_json)
    decisive = {key: value for key, value in shared.items() if key not in ("tag", "world_size")} | counting.settings
    return json.dumps(decisive if window_bytes is None else decisive | {"window_bytes": window_bytes})
