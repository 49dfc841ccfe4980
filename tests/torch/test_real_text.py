"""Real text, unevenly shared out: the batches are those of the seed, whatever the number and the kind of workers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from demo_texts import ByteTexts, Text, read_docstrings
from demo_train import collate

from odb_ref.torch import ODBDataLoader
from tests.helpers.options import nested
from tests.torch.ranks import get_values, run_each

SHARES = (61, 23, 40, 8)
EPOCHS = 2


def read_epochs(rank: int, texts: list[Text], options: dict[str, Any]) -> list[list[str]]:
    """A digest of each batch of each epoch, idle ones included."""
    first = sum(SHARES[:rank])
    dataset = ByteTexts(texts[first : first + SHARES[rank]], 512)
    settings = {"token_budget": 2048, "window": 24, "shuffle": True, "shard": "given", "seed": 11, "timeout_s": 60}
    epochs = []
    with ODBDataLoader(dataset, **nested(collate_fn=collate, **settings, **options)) as loader:
        for _ in range(EPOCHS):
            digests = []
            for batch, info in loader.steps():
                digest = hashlib.sha256(f"{info.step} {info.is_idle} {info.loss_scale}".encode())
                for value in batch.values():
                    digest.update(f"{tuple(value.shape)}".encode() + value.numpy().tobytes())
                digests.append(digest.hexdigest())
            epochs.append(digests)
    return epochs


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return read_docstrings(sum(SHARES))


@pytest.mark.deep
@pytest.mark.parametrize(
    "variants",
    [[("fork", 1, True), ("fork", 2, False), ("fork", 3, False)], [("forkserver", 1, True), ("spawn", 2, True)]],
    ids=["fork", "others"],
)
def test_the_batches_are_those_of_the_seed_whatever_the_workers(
    texts: list[Text], variants: list[tuple[str, int, bool]]
) -> None:
    """Checks: REPLAY, ALIGN. 4 ranks with very different amounts of text, two epochs: batch by batch, idle ones included, what
    they are without workers.
    """
    options = [
        {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": is_persistent}
        for method, workers, is_persistent in variants
    ]
    cases = [(texts, more) for more in ({}, *options)]
    without, *others = map(get_values, run_each(len(SHARES), read_epochs, cases, timeout_s=400))
    assert len({tuple(map(len, epochs)) for epochs in without}) == 1
    assert all(len(set(map(tuple, epochs))) == EPOCHS for epochs in without)
    assert others == [without] * len(others)
