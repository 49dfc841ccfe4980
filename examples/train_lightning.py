"""A Lightning Trainer with batches under a token budget, two epochs of every sample on any number of ranks, on the CPU.

    pip install 'odb-ref[torch,lightning]'
    torchrun --nproc-per-node 2 examples/train_lightning.py --ranks 2

`LightningLoader` is the train loader and comes with a callback. `scale_loss` weighs the loss of a training step, so that each
update has the gradient of the mean over the supervised tokens of all ranks and of all its micro-steps.
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from odb_ref import Batching, Loss
from odb_ref.integrations.lightning import LightningLoader, scale_loss

VOCABULARY = 128
SAMPLES = 61
ACCUMULATION_STEPS = 2


class Texts(Dataset):
    """Made-up token sequences of uneven lengths, the first quarter of each masked as a prompt."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 200, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 4] = -100
        return {"input_ids": ids, "labels": labels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.layers(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
        return scale_loss(self, loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description="A Lightning Trainer on an ODBDataLoader.")
    parser.add_argument("--out", default="lightning-run", help="folder for checkpoints")
    parser.add_argument("--ranks", type=int, default=1, help="the number that torchrun starts")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = LightningLoader(
        Texts(),
        token_budget=600,
        loss=Loss(accumulation_steps=ACCUMULATION_STEPS),
        collate_fn=collate,
        shuffle=True,
        batching=Batching(window=16),
    )
    trainer = pl.Trainer(
        default_root_dir=args.out,
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATION_STEPS,
        callbacks=[loader.callback],
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.ranks,
        strategy=DDPStrategy() if args.ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Tiny()
    with loader:
        trainer.fit(model, loader)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).sum()
        weights = trainer.strategy.all_gather(weights).reshape(-1)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} updates, {trainer.current_epoch} epochs")
        print(f"the last epoch trained on {round(loader.progress.coverage * SAMPLES)} of {SAMPLES} samples")
        print(f"the same weights on every rank: {bool((weights == weights[0]).all())}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
