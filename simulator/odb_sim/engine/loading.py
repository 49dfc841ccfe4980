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

from odb_sim.inputs.costs import LoaderCost, Seconds
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

    def take(self, seconds: float, asked_s: float) -> float:
        """Returns when the next item, which costs a worker ``seconds``, can be taken if requested at ``asked_s``."""
        free_s, taken_s = self._free_s, self._taken_s
        worker, place = self._count % len(free_s), self._count % len(taken_s)
        self._count += 1
        free_s[worker] = self.done_s = max(free_s[worker], taken_s[place]) + seconds
        taken_s[place] = self._last_s = max(asked_s, self.done_s, self._last_s)
        return self._last_s


class WindowReader:
    """The reader of one rank's windows: computes how long the machine waits for an answer that is partly read ahead."""

    def __init__(self, loader: LoaderCost, tokens: Integers, window_samples: int) -> None:
        self._loader = loader
        self._workers = Workers(loader)
        self._tokens = tokens
        """The lengths of the samples, in reading order."""
        self._read_ahead = window_samples // 2
        self._answered = 0
        """The number of samples passed to the machine."""
        self._answered_s = 0.0
        self._pulled = 0
        """The number of chunks taken from the workers so far."""
        self._pulled_s = 0.0

    def read(self, count: int, asked_s: float, slowness: float = 1.0) -> float:
        """Returns when the next ``count`` samples, or all that are left, are there. Reading takes ``slowness`` times as long.

        An answer waits for one sample more, so that whether the source has ended does not depend on timing.
        """
        last = -(-len(self._tokens) // CHUNK_SAMPLES) - 1
        needed = min((self._answered + count) // CHUNK_SAMPLES, last)
        # The chunks the thread takes ahead of a request, since the last answer made room.
        ahead = min((self._answered + self._read_ahead - 1) // CHUNK_SAMPLES, last)
        seconds = self._compute_chunks_s(self._pulled, max(needed, ahead) + 1, slowness)
        answer_s = max(asked_s, self._pulled_s)
        for chunk, chunk_s in enumerate(seconds, self._pulled):
            allowed_s = self._answered_s if chunk <= ahead else asked_s
            self._pulled_s = self._workers.take(chunk_s, allowed_s)
            if chunk <= needed:
                answer_s = max(asked_s, self._pulled_s)
        self._pulled += len(seconds)
        self._answered = min(self._answered + count, len(self._tokens))
        self._answered_s = answer_s
        return answer_s

    def _compute_chunks_s(self, begin: int, end: int, slowness: float) -> list[float]:
        """Returns the seconds a worker takes for each chunk from ``begin`` to ``end``."""
        tokens = self._tokens[begin * CHUNK_SAMPLES : end * CHUNK_SAMPLES]
        if not len(tokens):
            return []
        starts = np.arange(0, len(tokens), CHUNK_SAMPLES)
        counts = np.full(len(starts), CHUNK_SAMPLES)
        counts[-1] = len(tokens) - starts[-1]
        loader = self._loader
        seconds: list[float] = (
            slowness * (loader.sample_s * counts + loader.per_token_s * np.add.reduceat(tokens, starts))
        ).tolist()
        return seconds


class BlockWorkers:
    """`Workers` for many ranks at once, whose items are chunks."""

    __slots__ = ("_free_s", "_loader", "_taken_s", "_tokens", "count", "last_s", "slowness")

    def __init__(self, loader: LoaderCost, tokens: Integers, slowness: Seconds) -> None:
        ranks = len(slowness)
        self._loader = loader
        self._tokens = tokens
        self.slowness = slowness
        """The factor by which each rank's workers take longer."""
        self._free_s: Seconds = np.zeros((ranks, loader.workers))
        self._taken_s: Seconds = np.zeros((ranks, loader.workers * loader.prefetch_factor))
        self.count: Integers = np.zeros(ranks, dtype=np.int64)
        """The number of chunks each rank has taken."""
        self.last_s: Seconds = np.zeros(ranks)
        """When each rank took its last chunk."""

    def take(
        self, ranks: Integers, firsts: Integers, sizes: Integers, asked_s: Seconds | float, known_s: float = 0.0
    ) -> Seconds:
        """Returns when each of ``ranks`` can take its next chunk if requested at ``asked_s``. The chunks hold ``sizes`` samples
        from ``firsts`` on, and no worker begins one before ``known_s``.
        """
        worker, place = self.count[ranks] % self._free_s.shape[1], self.count[ranks] % self._taken_s.shape[1]
        done_s = np.maximum(self._free_s[ranks, worker], np.maximum(self._taken_s[ranks, place], known_s))
        done_s += self.slowness[ranks] * self._compute_chunks_s(firsts, sizes)
        taken_s: Seconds = np.maximum(np.maximum(asked_s, done_s), self.last_s[ranks])
        self._free_s[ranks, worker] = done_s
        self._taken_s[ranks, place] = self.last_s[ranks] = taken_s
        self.count[ranks] += 1
        return taken_s

    def _compute_chunks_s(self, firsts: Integers, sizes: Integers) -> Seconds:
        places = firsts[:, None] + np.arange(CHUNK_SAMPLES)
        is_there = np.arange(CHUNK_SAMPLES) < sizes[:, None]
        tokens = np.where(is_there, self._tokens[np.minimum(places, len(self._tokens) - 1)], 0).sum(axis=1)
        seconds: Seconds = self._loader.sample_s * sizes + self._loader.per_token_s * tokens
        return seconds


class OrderReader:
    """The reader of a common order, for many ranks at once. It reads nothing before it is drawn."""

    __slots__ = ("_workers",)

    def __init__(self, loader: LoaderCost, tokens: Integers, *, ranks: int) -> None:
        self._workers = BlockWorkers(loader, tokens, np.ones(ranks))

    def read(self, firsts: Integers, counts: Integers, asked_s: float, slowness: Seconds) -> Seconds:
        """Returns when each rank has the ``counts`` samples from ``firsts`` on that it has drawn at ``asked_s``."""
        self._workers.slowness = slowness
        answer_s = np.full(len(counts), asked_s)
        for begin in range(0, int(counts.max(initial=0)), CHUNK_SAMPLES):
            ranks = np.flatnonzero(counts > begin)
            sizes = np.minimum(counts[ranks] - begin, CHUNK_SAMPLES)
            answer_s[ranks] = self._workers.take(ranks, firsts[ranks] + begin, sizes, asked_s, asked_s)
        return answer_s


class BlockReader:
    """`WindowReader` for many ranks at once: the same sums and comparisons on arrays. A test keeps the two equal."""

    __slots__ = ("_answered", "_answered_s", "_offsets", "_read_ahead", "_sizes", "_workers")

    def __init__(
        self,
        loader: LoaderCost,
        tokens: Integers,
        offsets: Integers,
        sizes: Integers,
        *,
        window_samples: int,
        slowness: Seconds,
    ) -> None:
        self._workers = BlockWorkers(loader, tokens, slowness)
        self._offsets, self._sizes = offsets, sizes
        """Where the samples of each rank begin in ``tokens``, and their number."""
        self._read_ahead = window_samples // 2
        self._answered: Integers = np.zeros(len(offsets), dtype=np.int64)
        self._answered_s: Seconds = np.zeros(len(offsets))

    def read(self, counts: Integers, asked_s: float) -> Seconds:
        """Returns when each rank has its next samples. A rank with a count of 0 requests nothing and does not wait."""
        is_asking = counts > 0
        last = -(-self._sizes // CHUNK_SAMPLES) - 1
        needed = np.minimum((self._answered + counts) // CHUNK_SAMPLES, last)
        ahead = np.minimum((self._answered + self._read_ahead - 1) // CHUNK_SAMPLES, last)
        workers = self._workers
        end = np.where(is_asking, np.maximum(needed, ahead) + 1, workers.count)
        answer_s = np.maximum(asked_s, workers.last_s)
        while (ranks := np.flatnonzero(workers.count < end)).size:
            chunk = workers.count[ranks]
            begin = chunk * CHUNK_SAMPLES
            sizes = np.minimum(self._sizes[ranks] - begin, CHUNK_SAMPLES)
            allowed_s = np.where(chunk <= ahead[ranks], self._answered_s[ranks], asked_s)
            taken_s = workers.take(ranks, self._offsets[ranks] + begin, sizes, allowed_s)
            answer_s[ranks] = np.where(chunk <= needed[ranks], np.maximum(asked_s, taken_s), answer_s[ranks])
        answer_s = np.where(is_asking, answer_s, asked_s)
        self._answered = np.minimum(self._answered + counts, self._sizes)
        self._answered_s = np.where(is_asking, answer_s, self._answered_s)
        return answer_s
