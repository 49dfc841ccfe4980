"""What a rank reads in an epoch, from its beginning or from a saved state on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass

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
    """Returns a permutation of so many keys, a function of seed and epoch. Spec: R12.4."""
    generator = torch.Generator()
    generator.manual_seed(compute_seed(Use.PERMUTATION, seed, epoch))
    order = array("q")
    order.frombytes(torch.randperm(count, generator=generator, device="cpu").view(torch.uint8).numpy().data)
    return order


def _pack(keys: Sequence[object]) -> Sequence[object]:
    """Returns the keys, as plain numbers where all are that: in a fifth of the memory, here and where they are read."""
    if isinstance(keys, array | range):
        return keys
    numbers = [key for key in keys if type(key) is int]
    try:
        return array("q", numbers) if len(numbers) == len(keys) else keys
    except OverflowError:
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the keys of an epoch come about; the same on all ranks but for data set and sampler."""

    dataset: object
    sampler: Iterable[object] | None
    is_iterable: bool
    is_auto: bool
    is_shuffled: bool
    seed: int
    seed_source: str = ""
    is_shared: bool = False
    """True when the ranks draw from one order, which is that of ``is_auto``. Spec: R14."""
    update_samples: int | None = None
    """How many samples an optimizer update holds, where that is fixed. Spec: R16."""
    drops_last: bool = False
    """True when an epoch ends with the last whole update."""
    stream_workers: int | None = None
    """How many workers share a stream out among them; one where it is read by one process. None where there is no stream."""

    def make_settings(self, samples: int) -> dict[str, object]:
        """Returns what all ranks must have in common of it, by the name it has for the user."""
        if not self.is_auto:
            return {"shard": "given"}
        return {
            "shard": self.shard,
            "shuffle": self.is_shuffled,
            f"seed{self.seed_source}": self.seed,
            "samples": samples,
            **({"drop_last": True} if self.drops_last else {}),
        }

    def describe(self, samples: int) -> str:
        """Returns what decides the order, as a JSON object: must be the same where a saved state is loaded."""
        own = {} if self.is_auto else {"shuffle": self.is_shuffled, f"seed{self.seed_source}": self.seed}
        if self.stream_workers is not None:
            own["num_workers"] = self.stream_workers
        return json.dumps(self.make_settings(samples) | own)

    @property
    def shard(self) -> str:
        """How the ranks share the data set, as the user names it."""
        if not self.is_auto:
            return "given"
        return "shared" if self.is_shared else "auto"

    def count_samples(self) -> int:
        """Returns how many samples the order of all ranks has, those that are dropped included.

        Raises: UsageError when neither data set nor sampler says.
        """
        source = self.dataset if self.sampler is None else self.sampler
        if not isinstance(source, Sized):
            raise UsageError("the data set has no length: pass a sampler, which must have one where all ranks share it")
        return len(source)

    def follow(self, saved: str, world_size: int) -> None:
        """Lists what the ``world_size`` ranks did that have ``saved`` their place, where the sampler repeats keys for them."""
        sampler: object = self.sampler
        samples = json.loads(saved).get("samples")
        if isinstance(sampler, Repeating) and isinstance(samples, int):
            most = sampler.least + max(self.update_samples or 1, world_size)
            sampler.samples = samples if sampler.least <= samples < most else sampler.samples

    def count_updates(self) -> int:
        """Returns how many updates an epoch has, by R16.1."""
        samples, size = self.count_samples(), self.update_samples or 1
        return samples // size if self.drops_last else -(-samples // size)

    def compute_first_place(self, progress: EpochProgress, rank: int, world_size: int) -> int:
        """Returns where in the order that the rank reads its next update begins; 0 in the free mode.

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
        """Returns this rank's keys in order, how many samples the epoch has (None when unknown), the keys taken before,
        and of a sampler that all ranks have alike a digest of what it lists.
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
        """Returns what a saved state tells of the keys that are read: of all ranks, or where each is given its own, of this
        one.
        """
        if start.keys is None:
            return ""
        if start.listed:
            return start.listed  # a sampler may list other keys the second time
        return compute_digest(self._compute_order(start.epoch, start.samples) if self.is_auto else start.keys)


def make_plan(start: EpochStart, quarantine: Quarantine) -> ReadPlan:
    """Returns what is left to read of the epoch: first what was carried into the round it resumes in, then what follows.

    With shared shards what follows is drawn later, round by round.
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
    if not carried and all(place < first for place in bad):
        return ReadPlan(keys=keys[first:] if first else keys, places=range(first, len(keys)), seed=start.seed)
    places = array("q", (*carried, *(place for place in range(first, len(keys)) if place not in bad)))
    return ReadPlan(keys=_pack([keys[place] for place in places]), places=places, seed=start.seed)
