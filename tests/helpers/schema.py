"""The schema of traces, `spec/trace-schema.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jsonschema


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key appears twice among {[key for key, _ in pairs]}"
    return found


SCHEMA: Final = json.loads(
    (Path(__file__).parents[2] / "spec" / "trace-schema.json").read_text(), object_pairs_hook=_make_object
)
VALIDATOR: Final = jsonschema.Draft202012Validator(SCHEMA)
