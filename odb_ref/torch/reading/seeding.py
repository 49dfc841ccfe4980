"""Seeds the random numbers that user code draws while reading a sample or making a batch, from the epoch and its number.

The generators are those of `random`, NumPy (the old global one) and torch on the CPU. They belong to the whole process, so code
that seeds them must make sure that nothing else draws at the same time: see `isolate`. Spec: R12.
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
    """The purpose of a seed."""

    EPOCH = 0
    SAMPLE = 1
    STEP = 2
    STREAM = 3
    ORDER = 4
    UNDRAWN = 5
    PERMUTATION = 6


def compute_seed(use: Use, *numbers: int) -> int:
    """Returns a seed of 63 bits: a hash of its purpose and some numbers."""
    text = ",".join(map(str, (int(use), *numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int) -> None:
    """Seeds the generators of this process. Spec: R12.1. Preserves: REPLAY."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    # torch.manual_seed would also seed the generators of every device, which belong to the model.
    torch.default_generator.manual_seed(seed)


class DrawDetector:
    """Detects whether anything has drawn from the generators or seeded them, by what they yield next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.arm()
        self._next = _draw()

    def arm(self) -> None:
        """Seeds the generators."""
        seed_generators(self.seed)

    def has_drawn(self) -> bool:
        """Returns True if the generators were used or seeded since `arm`. The check itself uses them."""
        return _draw() != self._next


def _draw() -> tuple[int, bytes, bytes]:
    """Draws 64 bits from Python's generator and from NumPy's, because reading their states is slow, and reads torch's state."""
    return random.getrandbits(64), np.random.bytes(8), torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def isolate() -> Iterator[None]:
    """Restores the generators on exit, so that nothing done inside affects later draws. Spec: R12.2."""
    state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
