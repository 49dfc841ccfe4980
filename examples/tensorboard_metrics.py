"""The loader's counters on TensorBoard, under their own names (needs `pip install 'odb-ref[torch,tensorboard]'`).

python examples/tensorboard_metrics.py --logdir runs/odb
tensorboard --logdir runs
"""

from __future__ import annotations

import argparse
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter

from odb_ref.torch import Batching, ODBDataLoader


def collate(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Log an ODBDataLoader's metrics to TensorBoard.")
    parser.add_argument("--logdir", default="runs/odb")
    args = parser.parse_args()

    choose = random.Random(0)
    dataset = [{"input_ids": torch.ones(int(choose.lognormvariate(4, 0.8)) + 1, dtype=torch.long)} for _ in range(3000)]
    with (
        SummaryWriter(args.logdir) as writer,
        ODBDataLoader(
            dataset, token_budget=4096, shuffle=True, collate_fn=collate, batching=Batching(window=512)
        ) as loader,
    ):
        for _, info in loader.steps():
            writer.add_scalar("odb/local_samples", info.local_samples, info.step)
            writer.add_scalar("odb/global_tokens", info.global_tokens, info.step)
            for name, value in loader.metrics().items():
                writer.add_scalar(name, value, info.step)
        print(f"{info.step + 1} steps written to {args.logdir}")


if __name__ == "__main__":
    main()
