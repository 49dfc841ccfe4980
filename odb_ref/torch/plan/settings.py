"""How the settings of a saved state differ from a loader's, by the names that the user has for them."""

from __future__ import annotations

import json
from typing import Final

_OF_USER: Final = {
    "budget_tokens": "token_budget",
    "window_samples": "window",
    "quota_samples": "quota",
    "rule": "policy",
    "samples": "samples of the data set",
}


def describe_changes(saved: str, now: str) -> list[str]:
    """Returns what differs between two sets of settings, each a JSON object: the name, what was saved and what there is now."""
    before, after = json.loads(saved), json.loads(now)
    return [
        f"{_OF_USER.get(name, name)}: saved {before.get(name)!r}, now {after.get(name)!r}"
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    ]
