"""The options of `ODBTrainer`, and checks of the Trainer's own arguments against them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, Self

from transformers import TrainingArguments

from odb_ref.integrations.hf.versions import HAS_TOKEN_COUNT, get_sampling
from odb_ref.integrations.progress import Intervals
from odb_ref.torch import UsageError
from odb_ref.torch.loop import MemoryFit
from odb_ref.torch.settings import LoaderArguments, SharedArguments, arrange, check_spelling, spread

Inputs = MutableMapping[str, object]

STEP_INFO: Final = "odb_step_info"
"""The key under which a batch carries its `StepInfo` from the loader to `ODBTrainer.compute_loss`, which removes it."""

_TAKEN: Final = {
    "token_budget": "it stands beside this mapping",
    "update_samples": "it stands beside this mapping",
    "accumulation_steps": "set TrainingArguments(gradient_accumulation_steps=...) instead",
    "is_divided_by_trainer": "ODBTrainer tells the Trainer not to divide, and dividing again would normalise twice",
    "on_idle": "the Trainer needs a batch in every step",
}


class EvaluationArguments(LoaderArguments, total=False):
    """The arguments that `ODBOptions.evaluation` may hold."""

    token_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ODBOptions:
    """Options of `ODBTrainer`: how it forms batches. Workers, seed and order of the samples come from the TrainingArguments.

    Raises: UsageError when an argument for the loader is not free to choose.
    """

    token_budget: int
    update_samples: int | Literal["plain"] | None = "plain"
    """Samples in an optimizer update, over all ranks. ``"plain"`` means the very samples of the plain Trainer's update,
    according to ``per_device_train_batch_size``, ``gradient_accumulation_steps`` and the number of ranks. None selects the free
    mode, in which an update holds ``gradient_accumulation_steps`` full batches."""
    updates_per_epoch: int | None = None
    """An estimate of the optimizer updates in an epoch, for a schedule's units (``warmup_steps``) and the progress bar in the
    free mode. It never sets the length of training. Default: estimated from some samples' lengths, which are read for this."""
    max_samples: int | None = None
    """Training ends at the latest with the update that reaches this number of samples."""
    follows_samples: bool = True
    """In the free mode, whether the learning rate follows the share of the samples trained on. Otherwise it follows the number
    of updates, which may turn out higher or lower than the estimate."""
    intervals: Intervals = field(default_factory=Intervals)
    """After how many samples or tokens to evaluate and to save, in addition to ``eval_strategy`` and ``save_strategy``."""
    budget_from_metrics: Callable[[dict[str, float], int], int | None] | None = None
    """``(metrics, current) -> token budget``: called after each evaluation. Returns the budget to accept from then on, at most
    ``token_budget``, or None to keep the current one. The lowest of all ranks' values applies to all of them from the same step
    on, within two windows. For a budget that depends on the step, use the loader's ``budget_schedule``."""
    checks_loss: bool = True
    """Whether training first tries, with at most eight samples, whether the loss depends on how an update is divided
    (`ODBDataLoader.check_loss`). ``compute_loss`` is called eight times for this, in ``eval`` mode."""
    survives_out_of_memory: bool = False
    """Whether a batch that does not fit is halved on its rank, with the same gradients on all ranks (see
    `odb_ref.torch.loop.StepGuard`). Each failure is counted (``out_of_memory`` in the logs), and lowers the budget of all
    ranks. Works for a model that is whole on each rank; a sharded one needs ``memory``."""
    memory: MemoryFit | None = None
    """The result of `odb_ref.torch.loop.fit_token_budget`. With FSDP, ranks use it to try beforehand whether a batch fits."""
    split: Callable[[Inputs, int], tuple[Inputs, Inputs]] | None = None
    """``(batch, samples) -> (first half, second half)``, for ``survives_out_of_memory``, if samples are not the entries of the
    first dimension. For preference pairs: `odb_ref.torch.loop.split_pairs`, the default under TRL and LLaMA-Factory."""
    count: Callable[[Inputs], int] | None = None
    """Returns the number of units that a batch's loss averages over, if its labels do not show it. For pairs: `count_pairs`."""
    loader: LoaderArguments = field(default_factory=LoaderArguments)
    """Further arguments of `ODBDataLoader`, such as ``{"batching": Batching(window=64)}``, or
    ``{"loss": Loss(causal_shift=False)}`` for a model that does not shift its labels by one token (sequence to sequence, token
    classification)."""
    evaluation: EvaluationArguments | None = None
    """If set, an `ODBDataLoader` reads for ``evaluate`` and ``predict`` too, so that ranks may have different numbers of
    samples. It gets these arguments (such as ``token_budget``), and those of training that concern how samples are counted.
    Default: the Trainer's own loader reads."""

    def __post_init__(self) -> None:
        for given in (self.loader, self.evaluation or {}):
            check_spelling(given)
        for name in self.settings:
            if name in _TAKEN:
                raise UsageError(f"ODBOptions: leave {name} out of this mapping: {_TAKEN[name]}")
        for name in (*self.loader, *(self.evaluation or ())):
            if name not in EvaluationArguments.__annotations__:
                raise UsageError(f"ODBOptions: ODBDataLoader has no argument {name}")
        if self.update_samples != "plain" and isinstance(self.update_samples, str):
            raise UsageError(
                f"ODBOptions: update_samples must be a number, 'plain' or None, got {self.update_samples!r}"
            )
        for name, value in (
            ("update_samples", self.update_samples),
            ("updates_per_epoch", self.updates_per_epoch),
            ("max_samples", self.max_samples),
        ):
            if isinstance(value, int) and value < 1:
                raise UsageError(f"ODBOptions: {name} must be at least 1, got {value}")

    @property
    def settings(self) -> dict[str, object]:
        """The settings in ``loader``, each by its own name."""
        return spread(self.loader)

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> Self:
        """Makes options from settings: those of this class, and all others as arguments of `ODBDataLoader`.

        Settings in a file are flat: those of `Batching` and other groups have their own names. ``intervals`` may be a mapping.

        Raises: UsageError, like the class.
        """
        own = {field.name for field in fields(cls)} - {"loader"}
        options = {name: value for name, value in settings.items() if name in own}
        if isinstance(intervals := options.get("intervals"), Mapping):
            options["intervals"] = Intervals(**intervals)
        loader = {name: value for name, value in settings.items() if name not in own}
        return cls(loader=arrange(loader), **options)  # type: ignore[arg-type]


class TrainerArguments(SharedArguments, total=False):
    """All arguments of `ODBOptions.from_settings` except ``token_budget``: see `ODBOptions`."""

    update_samples: int | Literal["plain"] | None
    updates_per_epoch: int | None
    max_samples: int | None
    follows_samples: bool
    intervals: Intervals
    budget_from_metrics: Callable[[dict[str, float], int], int | None] | None
    checks_loss: bool
    survives_out_of_memory: bool
    memory: MemoryFit | None
    split: Callable[[Inputs, int], tuple[Inputs, Inputs]] | None
    count: Callable[[Inputs], int] | None
    evaluation: EvaluationArguments | None


def check_arguments(args: TrainingArguments, *, is_free: bool) -> None:
    """Checks for arguments of the Trainer that make sense for fixed batches only.

    Raises: UsageError that names what to set instead.
    """
    if args.n_gpu > 1:
        raise UsageError("ODBTrainer does not run under DataParallel: start one process for each device (torchrun)")
    if args.auto_find_batch_size:
        raise UsageError("auto_find_batch_size has no batch size to find: lower ODBOptions.token_budget instead")
    if _counts_tokens(args) and not HAS_TOKEN_COUNT:
        what = "include_num_input_tokens_seen needs transformers 5.3: num_input_tokens_seen stays 0"
        warnings.warn(what, RuntimeWarning, stacklevel=4)
    if not is_free:
        _check_plain_arguments(args)
        return  # settings that order or drop samples for fixed batches also apply here
    if args.dataloader_drop_last:
        warnings.warn(
            "dataloader_drop_last=True has no effect: ranks end together, and every sample is trained on. To stop when the "
            "first rank runs out of samples, pass ODBOptions(loader={'protocol': Protocol(mode='quota')})",
            RuntimeWarning,
            stacklevel=4,
        )
    if get_sampling(args) not in ("random", "sequential"):
        raise UsageError(
            f"train_sampling_strategy={get_sampling(args)!r} orders samples for fixed batches: use 'random' or 'sequential'"
        )


def _check_plain_arguments(args: TrainingArguments) -> None:
    """Warns about settings with which a plain Trainer's losses or counts differ from those of the same updates here."""
    said = []
    if args.world_size > 1 and not args.average_tokens_across_devices:
        said.append(
            "average_tokens_across_devices=False: a plain Trainer then averages the ranks' means. ODBTrainer's gradient is "
            "that of the mean over the tokens of all ranks, as with True, the default"
        )
    if _counts_tokens(args) and HAS_TOKEN_COUNT and args.include_num_input_tokens_seen != "non_padding":
        said.append(
            "include_num_input_tokens_seen='all' counts padding, and these batches have less of it than fixed batches; "
            "'non_padding' counts the same tokens as in a plain Trainer"
        )
    for text in said:
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _counts_tokens(args: TrainingArguments) -> bool:
    return getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False)


def check_engine(config: Mapping[str, object], args: TrainingArguments, odb: ODBOptions) -> None:
    """Checks that DeepSpeed's own schedule does not depend on a number of updates that is unknown beforehand.

    Raises: UsageError when it does, because its rate could be 0 long before training ends.
    """
    if "scheduler" in config and args.max_steps <= 0 and odb.follows_samples and odb.update_samples is None:
        raise UsageError(
            "the schedule in DeepSpeed's configuration counts updates, but the number of updates in an epoch is only an "
            "estimate: remove scheduler from it and set lr_scheduler_type=, which follows the samples; or set max_steps, or "
            "ODBOptions(follows_samples=False)"
        )
