"""What samples cost while they are held: memory, but no descriptors and no shared-memory files."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_ref.torch.reading import serialization
from odb_ref.torch.reading.serialization import LARGE_BYTES, TransferError, pack, unpack
from tests.helpers.capture import capture
from tests.helpers.waiting import count_descriptors, is_in_time

EPOCH_OF_IMAGES = textwrap.dedent(
    """
    import resource, torch
    from torch.utils.data import Dataset
    from odb_ref.torch import Batching, ODBDataLoader

    class Images(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            pixels = torch.full((300 * 1024,), index % 251, dtype=torch.uint8)
            return {"input_ids": torch.full((10 + index % 5,), index), "pixels": pixels}

    def collate(samples):
        return [int(s["input_ids"][0]) for s in samples], torch.stack([s["pixels"] for s in samples])

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
        options = {"batching": Batching(window=200), "num_workers": 2}
        with ODBDataLoader(Images(), token_budget=30, collate_fn=collate, **options) as loader:
            seen = []
            for ids, pixels in loader:
                seen += ids
                assert [int(row[-1]) for row in pixels] == [i % 251 for i in ids]
        assert sorted(seen) == list(range(400)), len(seen)
        print("all seen")
    """
)


def run(program: str, tmp_path: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(program)
    return capture([*prefix, sys.executable, str(path)], timeout=120)


def test_a_window_of_images_takes_no_descriptors(tmp_path: Path) -> None:
    """200 samples of 300 KB and 100 batches are held at a time, by processes that may open 96 files."""
    done = run(EPOCH_OF_IMAGES, tmp_path)
    assert done.stdout == "all seen\n", done.stderr[-2000:]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
def test_a_window_of_images_takes_no_shared_memory(tmp_path: Path) -> None:
    """/dev/shm is as small as in some containers: 1 MB, for 60 MB of samples."""
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounting in this container")
    done = run(EPOCH_OF_IMAGES, tmp_path, "unshare", "-m", "sh", "-c", mount, "sh")
    assert done.stdout == "all seen\n", done.stderr[-2000:]


def send(value: object) -> Any:
    """Returns what arrives when a value is sent to another process."""
    return unpack(ForkingPickler.loads(ForkingPickler.dumps(pack(value))))


@pytest.mark.parametrize("has_files", [True, False])
def test_large_tensors_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch, has_files: bool) -> None:
    if not has_files:
        monkeypatch.delattr(os, "memfd_create")
    generator = torch.Generator().manual_seed(0)
    sent = {
        "odd": torch.randint(0, 255, (LARGE_BYTES + 3,), dtype=torch.uint8, generator=generator),
        "floats": torch.rand(3, LARGE_BYTES // 4, generator=generator).t(),
        "small": torch.arange(5),
        "doubles": torch.rand(LARGE_BYTES // 8, dtype=torch.float64, generator=generator),
        "half": torch.rand(LARGE_BYTES, generator=generator).to(torch.bfloat16),
        "text": "as it is",
    }
    before = count_descriptors()
    arrived = send(sent)
    again = send(arrived)  # like a batch made of received samples
    # One stays: the socket for requests of descriptors. Its thread closes descriptors some time after it has handed them out.
    assert is_in_time(lambda: count_descriptors() <= before + 1)
    for name, value in sent.items():
        for found in (arrived[name], again[name]):
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    arrived["odd"] += 1  # a batch belongs to the trainer, which may change it
    assert not torch.equal(arrived["odd"], again["odd"])
    array = torch.arange(LARGE_BYTES // 8).numpy()
    assert len(pack(array).large) == 1
    assert (send(array) == array).all()


@pytest.mark.parametrize(
    ("code", "advice"), [("ENOSPC", "window_bytes="), ("ENOMEM", "window_bytes="), ("EMFILE", "ulimit -n")]
)
def test_a_full_machine_is_explained(monkeypatch: pytest.MonkeyPatch, code: str, advice: str) -> None:
    number = getattr(serialization.errno, code)

    def fail(name: str) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(TransferError, match=advice):
        send(torch.zeros(LARGE_BYTES, dtype=torch.uint8))


def test_a_process_without_descriptors_left_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    send(data)  # opens the socket for requests of descriptors
    try:
        # None of these is free, whatever a thread of an earlier test closes in the meantime.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(TransferError, match="no file descriptor left"):
            send(data)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
