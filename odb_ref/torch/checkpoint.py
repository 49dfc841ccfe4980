"""`JobState`: the states of all ranks in one object that frameworks can save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.batches import Batch
from odb_ref.torch.loader import ODBDataLoader
from odb_ref.torch.plan.state import StateDict

_KEY: Final = "odb_ranks"


class JobState:
    """Saves and loads a loader's position for all ranks at once: a ``Stateful`` of `torch.distributed.checkpoint`.

    ::

        torch.distributed.checkpoint.save({"model": model, "loader": JobState(loader)}, checkpoint_id=folder)
        accelerator.register_for_checkpointing(JobState(loader))

    `ODBDataLoader.state_dict` covers one rank, and no rank knows what the others have taken. This class gathers all states on
    every rank, so any rank may write the file, and any number of ranks can resume from it. Spec: R10.3.
    """

    def __init__(self, loader: ODBDataLoader[Batch]) -> None:
        self._save, self._load, self._gather = loader.state_dict, loader.load_state_dict, loader.gather

    def state_dict(self) -> StateDict:
        """Returns the states of all ranks, as one string.

        This is a collective: call it on every rank of the loader, after the same step.
        """
        states = self._gather(self._save())
        # One value: a checkpoint stores each value under its key, and the keys must not depend on the number of ranks.
        return {_KEY: json.dumps(states)}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Resumes from this state with the next iteration, on the present ranks.

        Raises: UsageError when it is not the state of a `JobState`.
        """
        text = state_dict.get(_KEY) if isinstance(state_dict, Mapping) else None
        try:
            states: object = json.loads(text) if isinstance(text, str) else None
        except json.JSONDecodeError:
            states = None
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            raise UsageError("load_state_dict: this is not a state that a JobState saved")
        self._load(states)
