"""What user code draws at random while it reads a sample or makes a batch: it follows from the epoch and the number of either.

The generators are those of `random`, of NumPy (the old, global one) and of torch on the CPU. Each belongs to the whole process,
so whoever seeds them sees to it that nobody else draws meanwhile: see `isolate`. Spec: R12.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Use(IntEnum):
    """What a seed is for."""

    EPOCH = 0
    SAMPLE = 1
    STEP = 2
    STREAM = 3
    ORDER = 4
    UNDRAWN = 5
    PERMUTATION = 6


def compute_seed(use: Use, *numbers: int) -> int:
    """Returns a seed of 63 bits, a hash of what it is for and of some numbers."""
    text = ",".join(map(str, (int(use), *numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int) -> None:
    """Has this process draw from now on what follows from ``seed``. Spec: R12.1. Preserves: REPLAY."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    # Not torch.manual_seed, which seeds the generators of every device too: they are the model's.
    torch.default_generator.manual_seed(seed)


class DrawDetector:
    """A state of the generators that shows whether somebody has drawn from them, or has seeded them: what they give next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.arm()
        self._next = _draw()

    def arm(self) -> None:
        """Seeds the generators."""
        seed_generators(self.seed)

    def has_drawn(self) -> bool:
        """Returns True when they are not as they were left; then, in any case, they are not."""
        return _draw() != self._next


def _draw() -> tuple[int, bytes, bytes]:
    """Returns 64 bits each of Python's generator and NumPy's, which take their time to tell their state, and torch's state."""
    return random.getrandbits(64), np.random.bytes(8), torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def isolate() -> Iterator[None]:
    """Keeps what is seeded and drawn inside from what is drawn after. Spec: R12.2."""
    state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.default_generator.get_state(),
    )
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
