"""A process that is not forked stays for the next epoch, unless it would have to receive something else.

A fork server's processes receive the same as spawned ones, and torch is imported once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from odb_ref import compat
from odb_ref.torch import apply
from tests.torch import data
from tests.torch.states import check_fails


@pytest.fixture(autouse=True)
def a_server_that_has_torch() -> None:
    multiprocessing.set_forkserver_preload([__name__])


class Where:
    """A data set that reports which process read a sample."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * 3, "number": index + self.offset, "pid": os.getpid()}


def get_samples(samples: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(sample["number"], sample["pid"]) for sample in samples]


OPTIONS: dict[str, Any] = {"collate_fn": get_samples, "num_workers": 1, "multiprocessing_context": "forkserver"}
make_loader = partial(data.make_loader, token_budget=12, window=1024, **OPTIONS)


def test_processes_stay_for_the_next_epoch_while_nothing_has_changed() -> None:
    samples: Any = Where()
    with make_loader(samples) as loader:
        epochs = [sorted(item for batch in loader for item in batch) for _ in range(2)]
        service: Any = loader._session._service
        stayed = service._process
        (worker,) = {pid for _, pid in epochs[0]}
        server = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
        has_torch = "libtorch" in Path(f"/proc/{server}/maps").read_text()
        assert has_torch, "its workers would each import torch"
        samples.offset = 100
        iter(loader)  # make soak waits for its samples, since another worker would import torch
        assert service._process is not stayed
        assert not stayed.is_alive()
    assert epochs[0] == epochs[1]
    assert [number for number, _ in epochs[0]] == [*range(12)]


@pytest.mark.parametrize(("given", "stays"), [({}, True), ({"persistent_workers": False}, False)], ids=str)
@pytest.mark.parametrize("way", ["apply", "compat.apply", "compat.ODBDataLoader"])
def test_a_loader_made_from_another_keeps_processes_unless_told_not_to(
    way: str, given: dict[str, Any], *, stays: bool
) -> None:
    """A DataLoader's default of False counted as a choice. It cannot be told from one, unless `apply` itself is told."""
    samples: Any = Where()
    loader: Any
    if way == "compat.ODBDataLoader":
        loader = compat.ODBDataLoader(samples, token_budget=12, **OPTIONS, **given)
    else:
        loader = DataLoader(samples, **OPTIONS)
        made = (apply if way == "apply" else compat.apply)(loader, token_budget=12, **given)
        loader = made if way == "apply" else loader
    with loader:
        (first,), (second,) = ({pid for batch in loader for _, pid in batch} for _ in range(2))
    assert (first == second) is stays


class Counted(Where):
    """Holds what can be sent only to a new process."""

    def __init__(self) -> None:
        super().__init__()
        self.count = multiprocessing.get_context("forkserver").Value("i", 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.count:
            self.count.value += 1
        return super().__getitem__(index)


@pytest.mark.deep
def test_what_cannot_be_compared_is_sent_anew() -> None:
    samples: Any = Counted()
    with make_loader(samples) as loader:
        epochs = []
        for offset in (0, 100):
            samples.offset = offset
            epochs.append(sorted(item for batch in loader for item in batch))
    assert {pid for _, pid in epochs[0]}.isdisjoint(pid for _, pid in epochs[1])
    assert [[number for number, _ in items] for items in epochs] == [[*range(12)], [*range(100, 112)]]
    assert samples.count.value == 24


class Unwelcome(Where):
    """Cannot be rebuilt in processes whose name begins with one of these."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if multiprocessing.current_process().name.startswith(self.names):
            raise RuntimeError("not here")

    def __call__(self, samples: list[Any]) -> list[Any]:
        return samples


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.deep), "forkserver"])
@pytest.mark.parametrize("name", ["odb-loader", "Process", "odb-collate"])
def test_what_cannot_be_rebuilt_in_another_process_is_told(name: str, method: str) -> None:
    """It was taken for a missing guard. With more than a pipe holds behind it, the rank waited for ever."""
    samples: Any = Unwelcome("nowhere" if name == "odb-collate" else name)
    collate: Any = Unwelcome("odb-collate")
    collate.ballast = b"0" * 1_000_000
    loader = make_loader(samples, collate_fn=collate, multiprocessing_context=method)
    check_fails(loader, "RuntimeError: not here")


class Fatal(Where):
    """Ends the process to which it is sent, like a main script without a guard."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (self.code,)


@pytest.mark.parametrize("code", [1, 0])
def test_a_process_that_ends_before_it_begins_says_what_may_be_missing(code: int) -> None:
    said = rf"exit code {code}\) before it began\. .* work under if __name__ == '__main__'"
    check_fails(make_loader(Fatal(code)), said)
