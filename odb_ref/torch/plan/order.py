"""The order in which a rank reads the samples of an epoch, from its beginning or from a saved state."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice

import torch

from odb_ref.core.batching.updates import compute_first_place, count_rounds
from odb_ref.core.errors import UsageError
from odb_ref.torch.plan.sampler import Repeating, list_keys
from odb_ref.torch.plan.start import EpochStart
from odb_ref.torch.plan.state import EpochProgress, Generation, compute_digest
from odb_ref.torch.reading.quarantine import Quarantine
from odb_ref.torch.reading.seeding import Use, compute_seed
from odb_ref.torch.reading.service import ReadPlan


def compute_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Returns a permutation of ``count`` keys that depends on seed and epoch only. Spec: R12.4."""
    generator = torch.Generator()
    generator.manual_seed(compute_seed(Use.PERMUTATION, seed, epoch))
    order = array("q")
    order.frombytes(torch.randperm(count, generator=generator, device="cpu").view(torch.uint8).numpy().data)
    return order


def _pack(keys: Sequence[object]) -> Sequence[object]:
    """Returns the keys as an array if all are plain integers, which takes a fifth of the memory wherever they are kept."""
    if isinstance(keys, array | range):
        return keys
    numbers = [key for key in keys if type(key) is int]
    try:
        return array("q", numbers) if len(numbers) == len(keys) else keys
    except OverflowError:
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Determines the keys of an epoch. The same on all ranks, except for data set and sampler."""

    dataset: object
    sampler: Iterable[object] | None
    is_iterable: bool
    is_auto: bool
    is_shuffled: bool
    seed: int
    seed_source: str = ""
    is_shared: bool = False
    """True if all ranks draw from one order, the one that ``is_auto`` describes. Spec: R14."""
    update_samples: int | None = None
    """The number of samples in an optimizer update, if that is fixed. Spec: R16."""
    drops_last: bool = False
    """True if an epoch ends with the last whole update."""
    stream_workers: int | None = None
    """How many workers read a stream, at least 1, or None if the data set is not a stream."""

    def make_settings(self, samples: int) -> dict[str, object]:
        """Returns the settings of the order that all ranks must share, under the names that users know."""
        if not self.is_auto:
            return {"shard": "given"}
        return {
            "shard": "shared" if self.is_shared else "auto",
            "shuffle": self.is_shuffled,
            f"seed{self.seed_source}": self.seed,
            "samples": samples,
            **({"drop_last": True} if self.drops_last else {}),
        }

    def describe(self, samples: int) -> str:
        """Returns what determines the order, as a JSON object. It must not change between saving and loading a state."""
        own = {} if self.is_auto else {"shuffle": self.is_shuffled, f"seed{self.seed_source}": self.seed}
        if self.stream_workers is not None:
            own["num_workers"] = self.stream_workers
        return json.dumps(self.make_settings(samples) | own)

    def count_samples(self) -> int:
        """Returns the length of the order of all ranks, including samples that are dropped.

        Raises: UsageError when neither data set nor sampler has a length.
        """
        source = self.dataset if self.sampler is None else self.sampler
        if not isinstance(source, Sized):
            if self.sampler is not None:
                raise UsageError("the sampler has no length: pass one that has")
            raise UsageError(
                "the data set has no length: make it a torch.utils.data.IterableDataset, or pass a sampler"
            )
        return len(source)

    def follow(self, saved: str | None, ranks: int) -> None:
        """Adopts the length of a saved order, or its own again for None, if it depends on the number of ranks or on batch size.

        Lengths differ by less than an update, or than the larger number of ``ranks``. If they differ by more, the data set has
        changed.
        """
        sampler: object = self.sampler
        if isinstance(sampler, Repeating):
            own = sampler.own_samples
            samples = own if saved is None else json.loads(saved).get("samples")
            is_near = isinstance(samples, int) and abs(samples - own) < max(self.update_samples or 1, ranks)
            sampler.samples = samples if is_near else own

    def count_updates(self, least: int = 1) -> int:
        """Returns the number of updates in an epoch, of which a last one has at least ``least`` samples. Spec: R16.1, R16.7."""
        updates, left = divmod(self.count_samples(), self.update_samples or 1)
        return updates + (left >= least and not self.drops_last)

    def compute_first_place(self, progress: EpochProgress, rank: int, world_size: int) -> int:
        """Returns the first place, in the order that the rank reads, of the update it begins with; 0 in the free mode.

        Spec: R16.2, R16.6.
        """
        if self.update_samples is None or progress.checkpoint is None:
            return 0
        rounds = count_rounds(self.update_samples, world_size, is_shared=self.is_shared)
        update = progress.checkpoint.start.round // rounds
        if self.is_shared:
            return update * self.update_samples
        return compute_first_place(update, update_samples=self.update_samples, rank=rank, world_size=world_size)

    def compute_keys(
        self, epoch: int, rank: int, world_size: int, base: tuple[Generation, ...]
    ) -> tuple[Sequence[object], int | None, list[object], str]:
        """Returns this rank's keys in order, the number of samples in the epoch (None if unknown), the keys taken before and,
        for a sampler whose order all ranks share, a digest of its keys.
        """
        order: Sequence[object] = (
            self._compute_order(epoch, self.count_samples()) if self.sampler is None else list_keys(self.sampler, epoch)
        )
        if not self.is_auto:
            return _pack(order), len(order) if world_size == 1 else None, [], ""
        listed = "" if self.sampler is None else compute_digest(order)
        if self.drops_last:
            order = order[: self.count_updates() * (self.update_samples or 1)]
        total = len(order)
        taken: list[object] = []
        for generation in base:
            taken += generation.list_taken(order)
            order = generation.compute_rest(order)
        own = order if self.is_shared or world_size == 1 else order[rank::world_size]
        return _pack(own), total, taken, listed

    def _compute_order(self, epoch: int, samples: int) -> Sequence[int]:
        return compute_order(samples, self.seed, epoch) if self.is_shuffled else range(samples)

    def compute_digest(self, start: EpochStart) -> str:
        """Returns the digest of keys for a saved state. It covers all ranks' keys, or this rank's if each is given its own."""
        if start.keys is None:
            return ""
        if start.listed:
            return start.listed  # a sampler may list other keys when asked again
        return compute_digest(self._compute_order(start.epoch, start.samples) if self.is_auto else start.keys)


def make_plan(start: EpochStart, quarantine: Quarantine) -> ReadPlan:
    """Returns what remains to be read of the epoch: first the samples carried into its first round, then the following ones.

    With shared shards the latter are drawn later, round by round.
    """
    keys, progress = start.keys, start.progress
    round_start = None if progress.checkpoint is None else progress.checkpoint.start
    carried = () if round_start is None else tuple(map(quarantine.places.get_place, round_start.carried))
    if start.is_shared and keys is not None:
        return ReadPlan(keys=[keys[p] for p in carried], places=carried, seed=start.seed, is_drawn=True)
    read_samples = 0 if round_start is None else round_start.read_samples
    first = start.first_place or (quarantine.places.get_place(read_samples - 1) + 1 if read_samples else 0)
    bad = frozenset(progress.bad + progress.gone)
    if keys is None:
        return ReadPlan(keys=None, first=first, kept=frozenset(carried), dropped=bad, seed=start.seed)
    if first < len(keys) and not carried and all(place < first for place in bad):
        return ReadPlan(keys=keys[first:] if first else keys, places=range(first, len(keys)), seed=start.seed)
    places = array("q", (*carried, *(place for place in range(first, len(keys)) if place not in bad)))
    first = 0
    if not places:  # all was trained on: idle steps replay the first sample, which is read again
        places = array("q", islice((place for place in range(len(keys)) if place not in bad), 1))
        first = places[0] + 1 if places else 0
    return ReadPlan(keys=_pack([keys[place] for place in places]), places=places, first=first, seed=start.seed)
