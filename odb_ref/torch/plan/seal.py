"""Seals saved states with a checksum per field, so that a damaged state is refused and the field named. Spec: R10.5."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.state import StateDict

VERSION: Final = 5
"""The version of the state format."""

_SEAL: Final = "checksums"


def seal(fields: Mapping[str, object]) -> StateDict:
    """Returns a sealed state with these fields."""
    state = {"version": VERSION, **fields}
    return {**state, _SEAL: {name: _compute_checksum(name, value) for name, value in state.items()}}


def check_states(given: object) -> list[Mapping[str, object]]:
    """Returns the states given to `load_state_dict`, either one or a sequence.

    Raises: UsageError when one of them is not a state, or is damaged. Spec: R10.5.
    """
    if isinstance(given, Mapping):
        return [check_seal(given)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UsageError(
            f"load_state_dict: expected a state, or a list of the states of all ranks, got {type(given).__name__}"
        )
    return list(map(check_seal, given))


def check_seal(state: object) -> Mapping[str, object]:
    """Returns the state after checking that its fields are unchanged since `seal`.

    Raises: UsageError when they are not, or another version sealed it.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"load_state_dict: a state must be a dict, got {type(state).__name__}")
    if "version" not in state and _SEAL not in state:
        raise UsageError(
            f"load_state_dict: this is not what a loader's state_dict() returned, but has the keys {list(state)!r:.80}: "
            "pass the state itself, or to JobState(loader).load_state_dict what a JobState saved"
        )
    if (version := state.get("version")) != VERSION:
        found = version if isinstance(version, int) and 0 <= version < 2**16 else "unknown"
        raise UsageError(f"load_state_dict: the state has version {found}, but this library reads version {VERSION}")
    checksums = state.get(_SEAL)
    if not isinstance(checksums, Mapping):
        raise UsageError(f"load_state_dict: the field {_SEAL!r} of the state is missing or damaged")
    for name in {**checksums, **state}:
        if name == _SEAL:
            continue
        if name not in state:
            raise UsageError(f"load_state_dict: the field {name!r} of the state is missing")
        if checksums.get(name) != _compute_checksum(name, state[name]):
            raise UsageError(f"load_state_dict: the field {name!r} of the state has changed since it was saved")
    return state


def _compute_checksum(name: object, value: object) -> str:
    """Returns a field's checksum, or an empty string, which never matches, for a value that is not plain."""
    try:
        text = json.dumps([name, value], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
