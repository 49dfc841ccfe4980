"""Evaluates in the Trainer's own loop over an `ODBDataLoader`: each sample once, whatever number of them a rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from odb_ref.integrations.hf.data import make_counting_options, take_share
from odb_ref.integrations.hf.gathering import gather_rows
from odb_ref.integrations.hf.options import STEP_INFO, ODBOptions
from odb_ref.integrations.hf.updates import UpdateBatch
from odb_ref.torch import ODBDataLoader, StepInfo, UsageError
from odb_ref.torch.from_dataloader import read_options
from odb_ref.torch.gathering import all_reduce, gather_objects
from odb_ref.torch.settings import arrange, spread

Tensors = TypeVar("Tensors")
Metrics = dict[str, float]
Rows = np.ndarray[tuple[int], np.dtype[np.int64]]

_OF_TRAINING: Final = frozenset(
    {"sampler", "shuffle", "shard", "seed", "generator", "mode", "quota", "scaling", "trace", "idle_sample"}
)
"""Settings that define how an epoch of training is read, but not how samples are counted."""


class EvaluationSteps:
    """The steps of an evaluation, in the form in which the Trainer iterates over them and queries them.

    They register with Accelerate's ``gradient_state`` like its own loaders, because the Trainer asks it which batch is last.
    """

    end_of_dataloader = False
    remainder = -1
    """How many repeated samples Accelerate cuts from the last batch: -1 for unknown, because none is repeated here."""

    def __init__(self, loader: ODBDataLoader, gradient_state: GradientState) -> None:
        self.loader = loader
        self._gradient_state = gradient_state
        self.samples = 0
        """Samples evaluated so far, on all ranks."""
        self._info: StepInfo | None = None
        self._ids: list[tuple[int, ...]] = []
        self._rows: Rows | None = None
        self._loss = torch.zeros((), dtype=torch.float64)
        self._supervised = 0

    def __iter__(self) -> Iterator[object]:
        self._gradient_state._add_dataloader(self)
        try:
            for batch, info in self.loader.steps():
                if not isinstance(batch, Mapping):
                    raise UsageError(f"the Trainer needs batches that are mappings, not {type(batch).__name__}")
                self._info, self.end_of_dataloader = info, info.is_last
                self._ids.append(info.sample_ids)
                self.samples += info.global_samples
                yield batch
            self._rows = self._find_rows()
        finally:
            self._gradient_state._remove_dataloader(self)

    def _find_rows(self) -> Rows | None:
        """Returns where the data set's samples are, in order, in the gathered rows. None if ranks read their own samples."""
        if self._info is None or (self._info.world_size > 1 and isinstance(self.loader.dataset, IterableDataset)):
            return None
        steps = zip(*gather_objects(self._ids, None), strict=True)
        ids = [sample for ranks in steps for held in ranks for sample in held]
        return np.argsort(ids) if len(set(ids)) == len(ids) else None

    def sort(self, found: object) -> object:
        """Sorts rows into the data set's order, if there is one row per sample and the ranks share the data set."""
        match found:
            case np.ndarray() if self._rows is not None and found.ndim and len(found) == len(self._rows):
                return found[self._rows]
            case tuple():
                return tuple(map(self.sort, found))
            case list():
                return list(map(self.sort, found))
            case Mapping():
                return {name: self.sort(value) for name, value in found.items()}
            case _:
                return found

    def note_loss(self, loss: Tensor) -> None:
        """Adds the mean loss of the present batch."""
        weight = self.info.local_supervised
        if weight:
            self._loss += loss.detach().double().cpu() * weight
            self._supervised += weight

    def compute_loss(self, device: torch.device) -> float | None:
        """Returns the mean over the supervised tokens of all ranks, or None if there are none. A collective of all ranks."""
        totals = torch.stack([self._loss, torch.tensor(self._supervised, dtype=torch.float64)]).to(device)
        loss, supervised = all_reduce(totals).tolist()
        return loss / supervised if supervised else None

    @property
    def info(self) -> StepInfo:
        """The `StepInfo` of the present batch."""
        if self._info is None:
            raise UsageError("no batch is being evaluated")
        return self._info

    def gather(self, tensors: Tensors) -> Tensors:
        """Returns the rows of all ranks' batches, rank by rank, without idle ones. Serves as the Trainer's gather function."""
        return gather_rows(tensors, info=self.info)


class EvaluatingTrainer(Trainer):  # type: ignore[misc]
    """The part of an `ODBTrainer` that evaluates, if `ODBOptions.evaluation` is set. Otherwise the Trainer evaluates itself."""

    odb: ODBOptions
    compute_metrics: Callable[[EvalPrediction], Metrics] | None
    _evaluation: EvaluationSteps | None = None

    @property
    def evaluated(self) -> StepInfo | None:
        """The `StepInfo` of the `ODBDataLoader` batch being evaluated, or None at other times."""
        return None if self._evaluation is None else self._evaluation.info

    def adopt_options(self, prepared: DataLoader[object]) -> dict[str, object]:
        """Returns the options that a loader takes over from the one that the Trainer has made."""
        options = read_options(prepared)
        options["pin_memory"] = prepared.pin_memory and self.args.device.type != "cpu"
        is_packed = self.odb.loader.get("layout") == "packed"
        is_smoothed = self.label_smoother is not None
        return options | make_counting_options(
            self.model, self.data_collator, is_packed=is_packed, is_smoothed=is_smoothed
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset[object] | None = None) -> object:
        """Returns the steps of this rank, or the Trainer's own loader."""
        prepared: DataLoader[object] = super().get_eval_dataloader(eval_dataset)
        named = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._choose(prepared, self.eval_dataset[named] if isinstance(named, str) else named)

    def get_test_dataloader(self, test_dataset: Dataset[object]) -> object:
        """Returns the steps of this rank, or the Trainer's own loader."""
        return self._choose(super().get_test_dataloader(test_dataset), test_dataset)

    def _choose(self, prepared: DataLoader[object], dataset: object) -> object:
        if self.odb.evaluation is None:
            return prepared
        if "loss" in self.args.include_for_metrics:
            raise UsageError(
                "include_for_metrics=['loss'] repeats a batch's loss for a fixed number of samples, but batches differ in "
                "size: compute the loss from the predictions in compute_metrics"
            )
        options = {name: value for name, value in self.odb.settings.items() if name not in _OF_TRAINING}
        options = {"token_budget": self.odb.token_budget} | self.adopt_options(prepared) | options
        options |= spread(self.odb.evaluation)
        read = take_share(
            dataset if isinstance(dataset, IterableDataset) else prepared.dataset, self.args, options.get("shard")
        )
        loader = ODBDataLoader(read, **arrange(options))  # type: ignore[arg-type]
        return EvaluationSteps(loader, self.accelerator.gradient_state)

    def evaluation_loop(
        self, dataloader: object, *args: object, metric_key_prefix: str = "eval", **kwargs: object
    ) -> EvalLoopOutput:
        """Evaluates like the Trainer, but the loss is the mean over all supervised tokens."""
        if not isinstance(dataloader, EvaluationSteps):
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._evaluation, self.gather_function = dataloader, dataloader.gather
        own = self.compute_metrics
        if own is not None and not self.args.batch_eval_metrics:
            self.compute_metrics = partial(_compute_metrics, dataloader, own)
        try:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            name = f"{metric_key_prefix}_loss"
            if name in output.metrics and (loss := dataloader.compute_loss(self.args.device)) is not None:
                output.metrics[name] = loss
        finally:
            self._evaluation, self.gather_function = None, self.accelerator.gather_for_metrics
            self.compute_metrics = own
            dataloader.loader.close()
        return output._replace(
            predictions=dataloader.sort(output.predictions),
            label_ids=dataloader.sort(output.label_ids),
            num_samples=dataloader.samples,
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, object], *args: object, **kwargs: object
    ) -> tuple[Tensor | None, object, object]:
        """Returns the Trainer's result, the mean loss of a batch and the model's outputs, after noting the loss.

        Raises: UsageError for a batch of the training loader.
        """
        if isinstance(inputs, UpdateBatch) or STEP_INFO in inputs:
            raise UsageError(
                "an evaluation reads the training loader, whose losses are weighted for training: do not override "
                "get_eval_dataloader, or pass ODBOptions(evaluation={...})"
            )
        result: tuple[Tensor | None, object, object] = super().prediction_step(model, inputs, *args, **kwargs)
        if self._evaluation is not None and result[0] is not None:
            self._evaluation.note_loss(result[0])
        return result


def _compute_metrics(
    steps: EvaluationSteps, compute_metrics: Callable[[EvalPrediction], Metrics], found: EvalPrediction
) -> Metrics:
    """Returns the user's metrics, computed in the order of the data set."""
    parts = {name: steps.sort(value) for name, value in vars(found).items() if name != "elements"}
    return compute_metrics(EvalPrediction(**parts))
