"""How a DataLoader loads, in seconds: its workers, what is fetched ahead, and who collates. One model for every policy.

A PyTorch DataLoader gives item i (a batch, or a chunk of samples) to worker i mod W. ``prefetch_factor`` x W items are given
out at the start, and one more whenever one is taken; a worker does its items one after the other, and they are taken in
order. That is `Workers`, and all a plain DataLoader is: its items are batches, read and collated by a worker.

Ours reads chunks of 16 samples in the same way, under a process of its own: `WindowReader` answers the machine's reads from
them. A thread of that process takes chunks ahead until half a window lies ready. The process also receives the samples and
collates the batches: these share one processor, whatever the number of workers.

Every worker and the loader process have a processor of their own here: more workers than a machine has are not modelled.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from odb_sim.inputs.costs import LoaderCost, Seconds
from odb_sim.inputs.lengths import Integers

CHUNK_SAMPLES: Final = 16
"""How many samples a worker of ours reads at a time."""


class Workers:
    """The workers of one rank's DataLoader. Items are taken in order, each when it is asked for and ready."""

    __slots__ = ("_count", "_free_s", "_last_s", "_taken_s", "done_s")

    def __init__(self, loader: LoaderCost) -> None:
        self._count = 0
        self._free_s = [0.0] * loader.workers
        """When each worker is done with what it was given."""
        self._taken_s = [0.0] * (loader.workers * loader.prefetch_factor)
        """When each of the last items was taken, and its place given out anew."""
        self._last_s = 0.0
        self.done_s = 0.0
        """When the item taken last was ready."""

    def take(self, seconds: float, asked_s: float) -> float:
        """Returns when the next item, which costs a worker ``seconds``, is there for who asks at ``asked_s``."""
        free_s, taken_s = self._free_s, self._taken_s
        worker, place = self._count % len(free_s), self._count % len(taken_s)
        self._count += 1
        free_s[worker] = self.done_s = max(free_s[worker], taken_s[place]) + seconds
        taken_s[place] = self._last_s = max(asked_s, self.done_s, self._last_s)
        return self._last_s


class WindowReader:
    """Reads the windows of one rank: how long the machine waits for an answer that is partly read ahead."""

    __slots__ = (
        "_answered",
        "_answered_s",
        "_first",
        "_loader",
        "_pulled",
        "_pulled_s",
        "_read_ahead",
        "_tokens",
        "_workers",
    )

    def __init__(self, loader: LoaderCost, tokens: Integers, window_samples: int) -> None:
        self._loader = loader
        self._workers = Workers(loader)
        self._tokens = tokens
        """Lengths of the samples, in reading order."""
        self._read_ahead = window_samples // 2
        self._answered = 0
        """Samples that the machine has been given."""
        self._answered_s = 0.0
        self._pulled = 0
        """Chunks that lie ready, or have been given."""
        self._pulled_s = 0.0

    def read(self, count: int, asked_s: float, slowness: float = 1.0) -> float:
        """Returns when the next ``count`` samples, or all that are left, are there; reading takes ``slowness`` times as
        long.

        An answer waits for one sample more: whether the source has ended must not depend on timing.
        """
        last = -(-len(self._tokens) // CHUNK_SAMPLES) - 1
        needed = min((self._answered + count) // CHUNK_SAMPLES, last)
        # Samples the thread takes without being asked, since the last answer made room.
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
        """Returns the seconds that a worker takes for each of the chunks ``begin`` to ``end``."""
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


class BlockReader:
    """`WindowReader` for many ranks at once: the same sums and comparisons, on arrays; a test holds the two equal."""

    __slots__ = (
        "_answered",
        "_answered_s",
        "_count",
        "_free_s",
        "_last_s",
        "_loader",
        "_offsets",
        "_pulled_s",
        "_read_ahead",
        "_sizes",
        "_slowness",
        "_taken_s",
        "_tokens",
    )

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
        ranks = len(offsets)
        self._loader = loader
        self._tokens = tokens
        self._offsets, self._sizes = offsets, sizes
        """Where the samples of each rank begin in ``tokens``, and how many there are."""
        self._slowness = slowness
        self._read_ahead = window_samples // 2
        self._answered: Integers = np.zeros(ranks, dtype=np.int64)
        self._answered_s: Seconds = np.zeros(ranks)
        self._count: Integers = np.zeros(ranks, dtype=np.int64)
        self._free_s: Seconds = np.zeros((ranks, loader.workers))
        self._taken_s: Seconds = np.zeros((ranks, loader.workers * loader.prefetch_factor))
        self._last_s: Seconds = np.zeros(ranks)

    def read(self, counts: Integers, asked_s: float) -> Seconds:
        """Returns when each rank has its next samples; a rank with a count of 0 asks for nothing, and has it at once."""
        is_asking = counts > 0
        last = -(-self._sizes // CHUNK_SAMPLES) - 1
        needed = np.minimum((self._answered + counts) // CHUNK_SAMPLES, last)
        ahead = np.minimum((self._answered + self._read_ahead - 1) // CHUNK_SAMPLES, last)
        end = np.where(is_asking, np.maximum(needed, ahead) + 1, self._count)
        answer_s = np.maximum(asked_s, self._last_s)
        while (ranks := np.flatnonzero(self._count < end)).size:
            chunk = self._count[ranks]
            worker, place = chunk % self._free_s.shape[1], chunk % self._taken_s.shape[1]
            done_s = np.maximum(self._free_s[ranks, worker], self._taken_s[ranks, place])
            done_s += self._compute_chunks_s(ranks, chunk)
            allowed_s = np.where(chunk <= ahead[ranks], self._answered_s[ranks], asked_s)
            taken_s = np.maximum(np.maximum(allowed_s, done_s), self._last_s[ranks])
            self._free_s[ranks, worker] = done_s
            self._taken_s[ranks, place] = self._last_s[ranks] = taken_s
            answer_s[ranks] = np.where(chunk <= needed[ranks], np.maximum(asked_s, taken_s), answer_s[ranks])
            self._count[ranks] = chunk + 1
        answer_s = np.where(is_asking, answer_s, asked_s)
        self._answered = np.minimum(self._answered + counts, self._sizes)
        self._answered_s = np.where(is_asking, answer_s, self._answered_s)
        return answer_s

    def _compute_chunks_s(self, ranks: Integers, chunk: Integers) -> Seconds:
        begin = chunk * CHUNK_SAMPLES
        count = np.minimum(self._sizes[ranks] - begin, CHUNK_SAMPLES)
        places = self._offsets[ranks, None] + begin[:, None] + np.arange(CHUNK_SAMPLES)
        is_there = np.arange(CHUNK_SAMPLES) < count[:, None]
        tokens = np.where(is_there, self._tokens[np.minimum(places, len(self._tokens) - 1)], 0).sum(axis=1)
        seconds: Seconds = self._slowness[ranks] * (self._loader.sample_s * count + self._loader.per_token_s * tokens)
        return seconds
