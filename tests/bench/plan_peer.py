"""One rank of verl's own balancing, run by the Python of an environment that has verl: see `tests.bench.plan`.

Reads a JSON request from standard input, and answers with one line of JSON: for each rank and case the micro-batches, or what
was raised.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run_rank(rank: int, world_size: int, store: str, request: dict[str, Any], pipe: Any) -> None:
    """Sends what verl makes of each case on this rank."""
    import torch
    from tensordict import TensorDict
    from torch import distributed
    from verl.utils import seqlen_balancing

    torch.set_num_threads(1)
    seqlen_balancing.get_device_name = lambda: "cpu"  # it takes CUDA for granted; what it computes is the same
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    found = []
    for lengths in request["cases"]:
        own = torch.tensor(lengths[rank])
        mask = torch.arange(max(map(max, lengths)))[None, :] < own[:, None]
        batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=len(own))
        distributed.barrier()
        began = time.perf_counter()
        try:
            _, indices = seqlen_balancing.rearrange_micro_batches(
                batch, request["budget_tokens"], dp_group=distributed.group.WORLD, use_dynamic_bsz_balance=True
            )
            found.append({"micro_batches": indices, "seconds": time.perf_counter() - began})
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            break  # its ranks are no longer in step
    pipe.send(found)


def main() -> None:
    """Answers the request."""
    import torch.multiprocessing as multiprocessing

    request = json.load(sys.stdin)
    world_size = len(request["cases"][0])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, world_size, str(Path(folder) / "store"), request, theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        answers = [pipe.recv() if pipe.poll(120) else [{"error": "no answer in 120 s"}] for pipe in pipes]
        for process in processes:
            process.join(5)
            process.kill()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
