"""What user code draws at random while it reads a sample or makes a batch: it follows from the epoch and the number of either.

The generators are those of `random`, of NumPy (the old, global one) and of torch on the CPU. Each belongs to the whole process,
so whoever seeds them sees to it that nobody else draws meanwhile: see `isolate`. Spec: R12.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.random import mtrand

_BYTES: Final = 624 * 4 + 4
"""The numbers of a Mersenne Twister, and how many of them are used up."""

_looked_at: Final[list[tuple[object, int]]] = []
"""The global generator that was found last, and where its memory is; 0 where it is not what it is taken for."""


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
    """Returns 64 bits of Python's generator, which takes its time to tell its state, and the states of the others."""
    return random.getrandbits(64), read_numpy_state(), torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def isolate() -> Iterator[None]:
    """Keeps what is seeded and drawn inside from what is drawn after. Spec: R12.2."""
    state, put_back, torch_state = random.getstate(), save_numpy_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        put_back()
        torch.default_generator.set_state(torch_state)


def read_numpy_state() -> bytes:
    """Returns what tells whether somebody has drawn: the same bytes when nobody has since the generator was seeded."""
    address = _find_memory()
    return ctypes.string_at(address, _BYTES) if address else np.random.bytes(8)


def save_numpy_state() -> Callable[[], None]:
    """Returns what puts the state of NumPy's global generator back, whatever is seeded and drawn meanwhile.

    NumPy copies a state number by number, in as much time as many small samples take to be read. Where its memory is what it
    is taken for, that is copied at once, in a hundredth of the time; elsewhere NumPy is asked.

    Until something is seeded it is what it was, but for the second number of a normal pair.
    """
    address = _find_memory()
    if not address:
        return partial(np.random.set_state, np.random.get_state(legacy=False))
    bits = mtrand.get_bit_generator()  # its memory is there as long as it is
    memory = ctypes.string_at(address, _BYTES)
    spare = _take_spare(address)

    def put_back() -> None:
        if mtrand.get_bit_generator() is not bits:
            mtrand.set_bit_generator(bits)
        _take_spare(address)
        ctypes.memmove(address, memory, _BYTES)
        if spare is not None:
            numbers = np.frombuffer(memory[:-4], dtype=np.uint32)
            np.random.set_state(("MT19937", numbers, int.from_bytes(memory[-4:], sys.byteorder), 1, spare))

    ctypes.memmove(address, memory, _BYTES)
    return put_back


def _take_spare(address: int) -> float | None:
    """Returns the second number of a normal pair, which the generator keeps until it is asked again; None when it keeps none.

    Afterwards it keeps none, and its memory may be another.
    """
    memory = ctypes.string_at(address, _BYTES)
    first = np.random.standard_normal()
    if ctypes.string_at(address, _BYTES) == memory:
        return first
    np.random.standard_normal()
    return None


def _find_memory() -> int:
    """Returns where the global generator keeps its state; 0 where that is not known."""
    bits = mtrand.get_bit_generator()
    if not (_looked_at and _looked_at[0][0] is bits):
        _looked_at[:] = [(bits, _look(bits))]
    return _looked_at[0][1]


def _look(bits: object) -> int:
    if not isinstance(bits, np.random.MT19937):
        return 0
    address = int(bits.ctypes.state_address)
    state = bits.state["state"]
    wanted = state["key"].astype(np.uint32).tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return address if ctypes.string_at(address, _BYTES) == wanted else 0
