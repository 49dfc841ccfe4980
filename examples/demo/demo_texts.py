"""Real text for the demo: from any Python installation, or the user's own JSON lines."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from odb_ref import UsageError

IGNORE_INDEX = -100
"""The label of a token that carries no loss."""

_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a text, which a model should learn if it ``is_supervised``."""

    text: str
    is_supervised: bool


Text = tuple[Part, ...]


def read_docstrings(limit: int) -> list[Text]:
    """Returns up to ``limit`` docstrings of the installed Python standard library, module by module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[Text] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "lib2to3"} & set(parts):
            continue
        for text in _read_module(path):
            if len(texts) == limit:
                return texts
            texts.append((Part(text, True),))
    return texts


def _read_module(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node)):
            yield text


def read_json_lines(path: Path, limit: int) -> list[Text]:
    """Returns up to ``limit`` texts of a file of JSON lines: ``{"text"}``, ``{"prompt", "response"}`` or ``{"messages"}``.

    Prompts, and messages by anyone but the assistant, carry no loss.
    Raises: UsageError with file and line.
    """
    texts: list[Text] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(texts) == limit:
                    break
                if line.strip():
                    texts.append(_parse(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    return texts


def _parse(line: str, where: str) -> Text:
    try:
        match json.loads(line):
            case {"text": str(text)}:
                return (Part(text, True),)
            case {"prompt": str(prompt), "response": str(response)}:
                return Part(prompt + "\n", False), Part(response, True)
            case {"messages": [*messages]} if messages:
                return tuple(
                    Part(f"{message['role']}: {message['content']}\n", message["role"] == "assistant")
                    for message in messages
                )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error
    raise UsageError(f"{where}: expected an object with text, with prompt and response, or with messages")


class ByteTexts(Dataset[dict[str, torch.Tensor]]):
    """Texts as bytes: ``input_ids`` (1 to 256; 0 pads) and ``labels``, the last ``max_tokens`` of each."""

    def __init__(self, texts: list[Text], max_tokens: int) -> None:
        self._texts = texts
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids: list[int] = []
        labels: list[int] = []
        for part in self._texts[index]:
            tokens = [value + 1 for value in part.text.encode()]
            ids += tokens
            labels += tokens if part.is_supervised else [IGNORE_INDEX] * len(tokens)
        return {
            "input_ids": torch.tensor(ids[-self._max_tokens :] or [1]),
            "labels": torch.tensor(labels[-self._max_tokens :] or [IGNORE_INDEX]),
        }
