"""Runs a function in several real processes that are joined by gloo, and says what came of each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP's first backward imports it, for seconds: once here rather than in every process
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    """What one rank returned, or the exception it raised; how long it took."""

    value: Any = None
    error: str = ""
    text: str = ""
    rank: int | None = None
    seconds: float = 0.0
    is_gone: bool = False


def _run(
    pipe: Any, function: Callable[..., Any], store: str, rank: int, world_size: int, args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        began = time.monotonic()
        result = Result(value=function(rank, *args), seconds=time.monotonic() - began)
    except BaseException as error:
        blamed = getattr(error, "rank", None)
        result = Result(error=type(error).__name__, text=str(error), rank=blamed, seconds=time.monotonic() - began)
    pipe.send(result)
    pipe.close()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Result]:
    """Each rank's result, by rank; one that died without a word is ``is_gone``.

    Raises: AssertionError when a rank has not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_run, args=(theirs, function, store, rank, world_size, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        results: list[Result | None] = [None] * world_size
        try:
            for rank, pipe in enumerate(pipes):
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    try:
                        results[rank] = pipe.recv()
                    except EOFError:
                        results[rank] = Result(is_gone=True)
            for process in processes:
                process.join(max(0.1, deadline - time.monotonic()))
            hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
            assert not hanging, f"ranks {hanging} hang; results: {results}"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [result for result in results if result is not None]
