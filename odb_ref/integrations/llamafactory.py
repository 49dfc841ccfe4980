"""LLaMA-Factory: runs its own configuration files, with an `ODBDataLoader` under its trainers.

::

    torchrun --nproc-per-node 8 -m odb_ref.integrations.llamafactory train.yaml odb_token_budget=16384

instead of ``llamafactory-cli train train.yaml``, for the stages ``pt``, ``sft`` and ``dpo``. Settings that begin with ``odb_``
are taken out of the file or the command line. They are options of `ODBOptions` (``odb_token_budget``, ``odb_max_samples``,
``odb_survives_out_of_memory``, ``odb_intervals`` with a mapping ...), or arguments of `ODBDataLoader` (``odb_window``,
``odb_max_patches``, ``odb_layout`` ...). All other settings are LLaMA-Factory's:

===============================  =======================================================================================
``per_device_train_batch_size``  times ``cutoff_len`` (twice that for pairs): the token budget, if none is given
``packing``, ``neat_packing``    refused: rows would be filled before training; stage ``pt`` packs unless ``packing: false``
``use_ray``, ``use_mca``,        refused: other processes or trainers would run, on LLaMA-Factory's own batches
``use_hyper_parallel``
``disable_shuffling``            the order of the data set
``streaming``                    each rank reads its part, as `datasets.distributed.split_dataset_by_node` has it
===============================  =======================================================================================

Tokens that its collators add as padding (up to a multiple of 8) are counted. Pairs are units. ``pref_bco_weight`` is refused,
because its baseline is a running mean over the batches of all ranks, including those that an idle rank replays.
"""

from __future__ import annotations

from odb_ref.extras import require

require(__name__, "transformers", extra="llamafactory")

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from typing import Final

from transformers import Trainer, TrainerCallback

from odb_ref.integrations.hf import ODBTrainer, enable
from odb_ref.integrations.hf.data import PAIRS, has_pairs
from odb_ref.integrations.hf.options import ODBOptions
from odb_ref.torch import UsageError
from odb_ref.torch.settings import GROUP_OF, SharedArguments

_USAGE: Final = "torchrun --nproc-per-node N -m odb_ref.integrations.llamafactory train.yaml [name=value ...]"
_PREFIX: Final = "odb_"
_TRAINERS: Final = {"pt": "CustomTrainer", "sft": "CustomSeq2SeqTrainer", "dpo": "CustomDPOTrainer"}
"""The class from which each stage's ``workflow`` module makes a trainer."""
_KNOWN: Final = {
    *({field.name for field in fields(ODBOptions)} - {"loader"}),
    *SharedArguments.__annotations__,
    *GROUP_OF,
}
"""The names that may follow the prefix."""
_ELSEWHERE: Final = ("use_ray", "use_mca", "use_hyper_parallel")
"""Settings that make LLaMA-Factory train with other processes or trainers. They are read from the environment as well."""
_CUTOFF: Final = 2048
"""LLaMA-Factory's default ``cutoff_len``."""
_LEAST_BCO: Final = 1e-6
"""LLaMA-Factory adds this loss from this weight on."""


def run_exp(args: Mapping[str, object] | None = None, callbacks: list[TrainerCallback] | None = None) -> None:
    """Trains like ``llamafactory.train.tuner.run_exp``, on batches formed online. Without ``args`` it reads the command line.

    Raises: UsageError when the settings do not fit together, and what LLaMA-Factory raises.
    """
    tuner = importlib.import_module("llamafactory.train.tuner")
    found: object = importlib.import_module("llamafactory.hparams").read_args(None if args is None else dict(args))
    if not isinstance(found, MutableMapping):
        raise UsageError(f"pass the settings in a file: {_USAGE}")
    own = {key: found.pop(key) for key in [*found] if key.startswith(_PREFIX)}
    stage = str(found.get("stage", "sft"))
    settings = make_settings(stage, found, {key.removeprefix(_PREFIX): value for key, value in own.items()})
    with _replacing(stage, settings, is_training=bool(found.get("do_train"))):
        tuner.run_exp(found, callbacks)


def make_settings(stage: str, args: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings of `configure_trainer`, from LLaMA-Factory's settings and those of this library.

    Raises: UsageError when the stage is unsupported, packs beforehand or is run by something else, or a setting is unknown.
    """
    for name in own:
        if name not in _KNOWN:
            near = " or ".join(_PREFIX + known for known in get_close_matches(name, _KNOWN, cutoff=0.7))
            raise UsageError(f"{_PREFIX}{name} is not a setting" + (f": {near}?" if near else ""))
    for name in _ELSEWHERE:
        if args.get(name) or os.environ.get(name.upper(), "").lower() in ("1", "y", "true"):
            raise UsageError(
                f"{name} starts other processes or trainers, with LLaMA-Factory's own batches: leave it out, and start ranks "
                "with torchrun"
            )
    if not args.get("ignore_pad_token_for_loss", True):
        raise UsageError(
            "ignore_pad_token_for_loss: false trains on padding, and these batches have less of it than batches of a fixed "
            "size: leave it out"
        )
    if own.get("layout", "padded") != "padded":
        raise UsageError(f"odb_layout: {own['layout']}: the collators of LLaMA-Factory pad: leave it out")
    if stage not in _TRAINERS:
        raise UsageError(f"stage {stage!r} is not supported: use one of {', '.join(_TRAINERS)}")
    packing = args.get("packing")
    if args.get("neat_packing") or (stage == "pt" if packing is None else packing):
        raise UsageError(
            "packing fills rows before training: set packing: false, and the loader fills batches with whole samples"
        )
    settings = dict(own)
    if "token_budget" not in settings:
        rows, length = args.get("per_device_train_batch_size", 8), args.get("cutoff_len", _CUTOFF)
        settings["token_budget"] = int(str(rows)) * int(str(length)) * (2 if stage == "dpo" else 1)
    ODBOptions.from_settings(settings)  # fails before a model is loaded if the options are invalid
    return settings


def configure_trainer(trainer: Trainer, **settings: object) -> ODBTrainer:
    """Turns a trainer of LLaMA-Factory into an `ODBTrainer`, and returns it.

    ``settings`` are options of `ODBOptions`, and arguments of `ODBDataLoader`.

    Raises: UsageError like these.
    """
    if getattr(getattr(trainer, "finetuning_args", None), "disable_shuffling", False):
        settings = {"shuffle": False} | settings
    if getattr(trainer, "bco_gemma", 0.0) >= _LEAST_BCO:
        raise UsageError(
            "pref_bco_weight: its baseline is a running mean over the batches of all ranks, to which idle ranks would add the "
            "batches that they replay: leave it at 0"
        )
    if has_pairs(trainer.train_dataset):
        settings = PAIRS | settings
    enabled = enable(trainer, ODBOptions.from_settings(settings))
    if store := getattr(trainer, "store_metrics", None):
        trainer.store_metrics = partial(_store_weighed, enabled, store, defaultdict(float))
    return enabled


def _store_weighed(
    trainer: ODBTrainer,
    store: Callable[[Mapping[str, float], str], None],
    sums: MutableMapping[str, float],
    metrics: Mapping[str, float],
    train_eval: str = "train",
) -> None:
    """Stores the metrics of training passes once per update, weighted like their loss. The trainer logs the mean of what is
    stored, over all ranks, and micro-batches have different numbers of pairs.
    """
    info = trainer.weighed
    if train_eval != "train" or info is None or trainer.may_repeat:
        store(metrics, train_eval)
        return
    for name, value in metrics.items():
        sums[name] += 0.0 if info.is_idle else value * info.loss_scale
    if info.is_update_end:
        store(dict(sums), train_eval)
        sums.clear()


@contextmanager
def _replacing(stage: str, settings: Mapping[str, object], *, is_training: bool) -> Iterator[None]:
    """Makes the workflow of a stage configure its trainers. Some workflows import the class only when they run.

    Raises: UsageError when training ran with a trainer that was not configured.
    """
    name = _TRAINERS[stage]
    trainer = importlib.import_module(f"llamafactory.train.{stage}.trainer")
    workflow = importlib.import_module(f"llamafactory.train.{stage}.workflow")
    kind: type[Trainer] = getattr(trainer, name)

    made: list[ODBTrainer] = []

    def make(*args: object, **kwargs: object) -> ODBTrainer:
        made.append(configure_trainer(kind(*args, **kwargs), **settings))
        return made[-1]

    modules = [module for module in (trainer, workflow) if hasattr(module, name)]
    for module in modules:
        setattr(module, name, make)
    try:
        yield
        if is_training and not made:
            raise UsageError(
                f"LLaMA-Factory made no {name}, so this run ignored the {_PREFIX}* settings: please report it, with "
                "LLaMA-Factory's settings"
            )
    finally:
        for module in modules:
            setattr(module, name, kind)


def main() -> None:
    """Runs the command line: `run_exp`, with its UsageErrors in one line."""
    if sys.argv[1:2] == ["train"]:  # the same arguments as for llamafactory-cli
        del sys.argv[1]
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        sys.stdout.write(f"usage: {_USAGE}\n")
        sys.exit(0 if sys.argv[1:] else 2)
    try:
        run_exp()
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
