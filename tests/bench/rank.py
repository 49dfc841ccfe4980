"""One rank of a job: ``python -m tests.bench.rank FOLDER``, started by `tests.bench.launch`."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.jobs import JOBS


def main() -> None:
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    rank, ranks = int(os.environ["RANK"]), spec["ranks"]
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=spec.get("group_timeout_s", 60)),
        )
    result = JOBS[spec["job"]](spec, rank, ranks)
    part = folder / f"part-{rank}"
    part.write_text(json.dumps(result))
    part.rename(folder / f"result-{rank}.json")


if __name__ == "__main__":
    main()
