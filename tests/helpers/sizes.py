"""Numbers and texts of all sizes, for tests that should meet every bound in the code."""

from __future__ import annotations

import random


def draw_size(draw: random.Random, most: int, least: int = 0) -> int:
    """Returns a number from ``least`` to ``most``, each number of digits equally likely, and often next to a power of two."""
    number = int(2 ** draw.uniform(0, (most - least + 1).bit_length()))
    if draw.random() < 0.4:
        number = 2 ** (number.bit_length() - 1) + draw.randint(-1, 2)
    return least + min(max(0, number - 1), most - least)


def draw_text(draw: random.Random) -> str:
    """Returns a text that is not empty: blank, or of one or several lines, with letters of 1 to 4 bytes, up to 2^14 letters."""
    letters = draw.choice((" ", " \t\n", "ab {}[]:,\"'\\\n", "é\u2028中🙂\x00"))
    return "".join(draw.choices(letters, k=draw_size(draw, 2**14, 1)))
