"""Cost models as JSON files: what `odb-ref calibrate` writes and ``--cost-model`` reads.

::

    {
      "format": "odb-costs",
      "version": 2,
      "gpu": {"fixed_s": 0.05, "per_token_s": 0.00012},
      "network": {"alpha_s": 5e-05, "transport": "reduce"},
      "loader": {"workers": 4, "sample_s": 0.001}
    }

The sections and their keys are the fields of `odb_sim.inputs.costs`. A key left out keeps its default, except in ``ranges``,
where a number without a range counts as exact. ``fit`` may hold anything; `odb-ref calibrate` writes how it got the numbers
there. An invalid number is refused with its line, since a plan made from it would look as good as any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from odb_ref.core.errors import UsageError
from odb_sim.inputs.costs import Costs, Ranges
from odb_sim.inputs.files import write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Section = TypeVar("Section", bound=DataclassInstance)

FORMAT: Final = "odb-costs"
VERSION: Final = 2

_LARGE_BATCH: Final = np.array([1 << 20])
_SECTIONS: Final = tuple(item.name for item in fields(Costs))
_TOKEN: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')

Path_ = tuple[str, ...]


class _Source:
    """The text of a cost model, with the lines of its keys."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = _locate_keys(text)

    def refuse(self, path: Path_, what: str) -> UsageError:
        line = self.lines.get(path)
        place = self.name if line is None else f"{self.name}:{line}"
        return UsageError(f"{place}: {'.'.join(path)}{' ' if path else ''}{what}")


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Makes a dict. Raises: UsageError when a key occurs twice, because one value would be lost."""
    found = dict(pairs)
    for name in found:
        if sum(key == name for key, _ in pairs) > 1:
            raise UsageError(f"{name} appears twice")
    return found


def load_costs(path: str | Path) -> Costs:
    """Returns the cost models of a file.

    Raises: UsageError, in one line with file, line and key, when it is not a cost model or holds an invalid number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}") from error
    try:
        data = json.loads(text, object_pairs_hook=_make_object)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{where}: not JSON: {getattr(error, 'msg', error)}") from error
    source = _Source(str(path), text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise source.refuse(("format",) if isinstance(data, dict) else (), f'is not "{FORMAT}": not a cost model')
    if data.get("version") != VERSION:
        raise source.refuse(("version",), f"is {data.get('version')!r}, but this program reads {VERSION}")
    for key in data:
        if key not in (*_SECTIONS, "format", "version", "fit"):
            raise source.refuse((key,), f"is not a part of a cost model; the parts are {', '.join(_SECTIONS)}")
    costs = replace(Costs(), ranges=Ranges())
    sections = {name: _build(source, name, getattr(costs, name), data[name]) for name in _SECTIONS if name in data}
    costs = replace(costs, **sections)
    if not costs.compute_steps_s(_LARGE_BATCH, _LARGE_BATCH).any() and not costs.collective.fixed_s:
        raise source.refuse(("gpu",), "says that a training step costs nothing")
    return costs


def _build(source: _Source, name: str, default: Section, data: object) -> Section:
    if not isinstance(data, Mapping):
        raise source.refuse((name,), f"is {data!r:.40}, expected an object")
    defaults = {item.name: getattr(default, item.name) for item in fields(default)}
    values = {}
    for key, value in data.items():
        path = (name, key)
        if key not in defaults:
            raise source.refuse(path, f"is not known; choose from {', '.join(defaults)}")
        values[key] = _convert(source, path, defaults[key], value)
        try:
            replace(default, **{key: values[key]})
        except UsageError as error:
            raise source.refuse(path, f"is refused: {error}") from error
    try:
        return replace(default, **values)
    except UsageError as error:
        raise source.refuse((name,), f"is refused: {error}") from error


def _convert(source: _Source, path: Path_, default: object, value: object) -> object:
    match default:
        case Enum():
            kind = type(default)
            if value not in [str(item) for item in kind]:
                raise source.refuse(path, f"is {value!r:.40}, expected one of {', '.join(map(str, kind))}")
            return kind(value)
        case bool() if type(value) is not bool:
            raise source.refuse(path, f"is {value!r:.40}, expected true or false")
        case int() if type(value) is not type(default):
            raise source.refuse(path, f"is {value!r:.40}, expected a whole number")
        case float() if type(value) not in (int, float):
            raise source.refuse(path, f"is {value!r:.40}, expected a number")
        case tuple():
            if not isinstance(value, list):
                raise source.refuse(path, f"is {value!r:.40}, expected a list")
            return tuple(tuple(item) if isinstance(item, list) else item for item in value)
        case _:
            return value


def _locate_keys(text: str) -> dict[Path_, int]:
    """Returns the line of every key, by its path of keys."""
    tokens = list(_TOKEN.finditer(text))
    lines: dict[Path_, int] = {}
    stack: list[str] = []
    key = ""
    line, position = 1, 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        match token.group():
            case "{" | "[":
                stack.append(key)
                key = ""
            case "}" | "]":
                key = stack.pop() if stack else ""
            case word if following is not None and following.group() == ":" and word.startswith('"'):
                line += text.count("\n", position, token.start())
                position = token.start()
                key = json.loads(word)
                lines[(*filter(None, stack), key)] = line
    return lines


def encode_costs(costs: Costs) -> dict[str, object]:
    """Returns the cost models as the JSON object of a file, with every number written out."""
    return {"format": FORMAT, "version": VERSION, **asdict(costs)}


def write_costs(path: str | Path, costs: Costs, fit: Mapping[str, object] | None = None) -> None:
    """Writes a cost model that `load_costs` reads. ``fit`` records where the numbers come from."""
    data = encode_costs(costs)
    if fit is not None:
        data["fit"] = dict(fit)
    write_json(path, data)
