"""Finds phrases that read as translated, in every text of the repository: pages, docstrings, comments, messages.

    python -m tests.repo.prose            # what `make lint` runs; names file, line, and what to write instead

A phrase that is needed after all must be worded differently: no line can be exempted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.helpers.capture import capture

ROOT: Final = Path(__file__).parents[2]
TEXTS: Final = (".py", ".md", ".v", ".tla", ".ipynb", ".yml", ".toml")

_START: Final = r"(?:^[\s#>*(-]*|\"\"\"|[.:?] |\| |\(\* )"
"""The beginning of a sentence."""

# Assembled here, so that this file does not contain them.
PHRASES: Final = {
    r"\bHears" + r"\b": "Reads, takes",
    _START
    + "Has "
    + r"(?:the|a|an|each|all|every|it|its|them|this|what|\w+) \w+ ?\w*\b": "Makes, lets; or Returns whether",
    r"\bSays " + r"(?:which|what|whether|how|that|why|where|who|by|of)\b": "Returns, names, raises",
    r"\b[Ww]ho" + "ever": "a caller, the rank that",
    r"\bone's " + r"own\b|\ba \w+ of one's\b": "your own, the user's",
    r"(?<!here )\b(?:is|are|was|were|be) " + r"none\b(?! of)": "is not one",
    r"(?<!least )(?<!twice )(?<!times )(?<!most )(?<!exactly )\bas many "
    + r"(?:[\w'`-]+ ){0,5}as\b": "the same number of, up to, all that",
    _START + r"Of " + r"(?!course\b|these\b|those\b)\w": "begin with the subject",
    r"\b(?:says?|said|means?|knows?|known|shows?|shown|sees?|seen|asks?|told|proved|tested), " + r"that\b": "no comma",
    # English allows this after "there", but not elsewhere.
    r"(?<!here )(?<!her )\b(?:is|are|was|were|be) "
    + r"no (?!longer|more|fewer|less|greater|such|doubt)\w+": "is not a",
    r"\b(?:gone|going|goe?s?) " + r"on with\b": "continue",
    "of no " + "account": "does not matter",
    r"\btakes? " + r"note\b": "notes",
    "[Nn]othing " + "when": "does nothing",
    '"""' + r'None\."': "says what it is",
}
PATTERN: Final = {re.compile(phrase): advice for phrase, advice in PHRASES.items()}


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields what should be worded differently: its line, the phrase, and what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, advice in PATTERN.items():
            if match := pattern.search(line):
                yield number, match[0].strip(), advice


def list_texts() -> list[Path]:
    """Returns the tracked files that hold prose."""
    done = capture(["git", "ls-files"], cwd=ROOT)
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).suffix in TEXTS and path.is_file()]


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase!r}: {advice}"
        for path in list_texts()
        for number, phrase, advice in find(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) or "no phrase that reads as translated")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
