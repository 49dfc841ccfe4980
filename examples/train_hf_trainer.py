"""The Hugging Face Trainer with batches under a token budget, two epochs of every sample on any number of ranks, on the CPU.

    pip install 'odb-ref[torch,transformers]'
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py --out hf-run
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py --out hf-run --resume hf-run/checkpoint-4

`ODBTrainer` is the Trainer with one more argument. Each update holds the samples that the plain Trainer would put into it, and
has the gradient of the mean over their supervised tokens. A run resumed from a checkpoint continues at the next sample.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from odb_ref import gather_objects
from odb_ref.integrations.hf import ODBOptions, ODBTrainer

VOCABULARY = 128
SAMPLES = 64


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
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="The Hugging Face Trainer on an ODBDataLoader.")
    parser.add_argument("--out", default="hf-run", help="folder for checkpoints")
    parser.add_argument("--resume", help="go on from this checkpoint, on the same or another number of ranks")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    args = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=4,
        logging_steps=4,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = ODBTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)),
        args,
        train_dataset=Texts(),
        data_collator=collate,
        # Each update holds the samples that the plain Trainer would put into it. Only its micro-batches are formed by length.
        odb=ODBOptions(token_budget=600),
    )
    trainer.train(resume_from_checkpoint=options.resume)

    checksums = gather_objects(sum(parameter.detach().sum().item() for parameter in trainer.model.parameters()))
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} updates, {trainer.state.epoch} epochs")
        print(f"the last epoch trained on {round(trainer.progress.coverage * SAMPLES)} of {SAMPLES} samples")
        print(f"the same weights on every rank: {len(set(checksums)) == 1}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
