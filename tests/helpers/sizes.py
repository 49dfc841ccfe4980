"""Numbers and texts of all sizes, for tests that a bound in the code would slip through."""

from __future__ import annotations

import random


def draw_size(draw: random.Random, most: int, least: int = 0) -> int:
    """A number from ``least`` to ``most``, each number of digits as likely as another; often just beside a power of two."""
    number = int(2 ** draw.uniform(0, (most - least + 1).bit_length()))
    if draw.random() < 0.4:
        number = 2 ** (number.bit_length() - 1) + draw.randint(-1, 2)
    return least + min(max(0, number - 1), most - least)


def draw_text(draw: random.Random) -> str:
    """A text that is not empty: blank, of one line or several, of letters of one byte to four, to 2^14 of them."""
    letters = draw.choice((" ", " \t\n", "ab {}[]:,\"'\\\n", "é\u2028中🙂\x00"))
    return "".join(draw.choices(letters, k=draw_size(draw, 2**14, 1)))
