"""The time a DataLoader takes to load: its workers, prefetching and collation. All policies share this model.

A PyTorch DataLoader gives item i (a batch, or a chunk of samples) to worker i mod W. It gives out ``prefetch_factor`` x W
items at the start, and one more whenever one is taken. A worker does its items one after the other, and they are taken in
order. `Workers` models this, which is all a plain DataLoader does: its items are batches, read and collated by a worker.

Our loader reads chunks of 16 samples in the same way, under its own process, and `WindowReader` answers the machine's reads
from them. A thread of that process takes chunks ahead until half a window is ready. The process also receives the samples and
collates the batches, which share one processor, whatever the number of workers. What a rank draws from a common order (R14) is
not known in advance, so `OrderReader` reads nothing ahead.

Every worker and the loader process have their own processor. A machine with fewer processors than workers is not modelled.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from odb_sim.inputs.costs import LoaderCost
from odb_sim.inputs.lengths import Integers

CHUNK_SAMPLES: Final = 16
"""The number of samples that a worker of our loader reads at a time."""


class Workers:
    """The workers of one rank's DataLoader. Items are taken in order, each once it is requested and ready."""

    __slots__ = ("_count", "_free_s", "_last_s", "_taken_s", "done_s")

    def __init__(self, loader: LoaderCost) -> None:
        self._count = 0
        self._free_s = [0.0] * loader.workers
        """When each worker is done with its items."""
        self._taken_s = [0.0] * (loader.workers * loader.prefetch_factor)
        """When each of the last items was taken, so that another could be given out."""
        self._last_s = 0.0
        self.done_s = 0.0
        """When the last item taken was ready."""

    def take(self, seconds: float, asked_s: float, known_s: float = 0.0) -> float:
        """Returns when the next item, which costs a worker ``seconds``, can be taken if requested at ``asked_s``. No worker
        begins it before ``known_s``.
        """
        free_s, taken_s = self._free_s, self._taken_s
        worker, place = self._count % len(free_s), self._count % len(taken_s)
        self._count += 1
        free_s[worker] = self.done_s = max(free_s[worker], taken_s[place], known_s) + seconds
        taken_s[place] = self._last_s = max(asked_s, self.done_s, self._last_s)
        return self._last_s


class WindowReader:
    """The reader of one rank's windows: computes how long the machine waits for an answer that is partly read ahead."""

    __slots__ = (
        "_answered", "_answered_s", "_chunks_s", "_pulled", "_pulled_s", "_read_ahead", "_samples", "_workers",
    )  # fmt: skip

    def __init__(self, loader: LoaderCost, tokens: Integers, window_samples: int) -> None:
        self._workers = Workers(loader)
        self._samples = len(tokens)
        self._chunks_s = _compute_chunks_s(loader, tokens)
        """What each chunk of the rank's samples, in reading order, takes a worker."""
        self._read_ahead = window_samples // 2
        self._answered = 0
        """The number of samples passed to the machine."""
        self._answered_s = 0.0
        self._pulled = 0
        """The number of chunks taken from the workers so far."""
        self._pulled_s = 0.0

    def read(self, count: int, asked_s: float, slowness: float = 1.0, _first: int = 0) -> float:
        """Returns when the next ``count`` samples, or all that are left, are there. Reading takes ``slowness`` times as long.

        An answer waits for one sample more, so that whether the source has ended does not depend on timing.
        """
        last = len(self._chunks_s) - 1
        needed = min((self._answered + count) // CHUNK_SAMPLES, last)
        # The chunks the thread takes ahead of a request, since the last answer made room.
        ahead = min((self._answered + self._read_ahead - 1) // CHUNK_SAMPLES, last)
        answer_s, end = max(asked_s, self._pulled_s), max(self._pulled, needed + 1, ahead + 1)
        for chunk in range(self._pulled, end):
            allowed_s = self._answered_s if chunk <= ahead else asked_s
            self._pulled_s = self._workers.take(slowness * self._chunks_s[chunk], allowed_s)
            if chunk <= needed:
                answer_s = max(asked_s, self._pulled_s)
        self._pulled = end
        self._answered = min(self._answered + count, self._samples)
        self._answered_s = answer_s
        return answer_s


class OrderReader:
    """The reader of what one rank draws from a common order. It reads nothing before it is drawn."""

    __slots__ = ("_loader", "_tokens", "_workers")

    def __init__(self, loader: LoaderCost, tokens: Integers) -> None:
        self._loader = loader
        self._workers = Workers(loader)
        self._tokens = tokens
        """The lengths of all samples of the order."""

    def read(self, count: int, asked_s: float, slowness: float = 1.0, first: int = 0) -> float:
        """Returns when the ``count`` samples from ``first`` on, drawn at ``asked_s``, are there."""
        answer_s = asked_s
        for chunk_s in _compute_chunks_s(self._loader, self._tokens[first : first + count]):
            answer_s = self._workers.take(slowness * chunk_s, asked_s, asked_s)
        return answer_s


def _compute_chunks_s(loader: LoaderCost, tokens: Integers) -> list[float]:
    """Returns the seconds a worker takes for each chunk of the samples."""
    starts = np.arange(0, len(tokens), CHUNK_SAMPLES)
    if not len(starts):
        return []
    counts = np.minimum(CHUNK_SAMPLES, len(tokens) - starts)
    seconds: list[float] = (loader.sample_s * counts + loader.per_token_s * np.add.reduceat(tokens, starts)).tolist()
    return seconds
