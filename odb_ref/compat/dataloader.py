"""`ODBDataLoader` and `apply` with the interface of `online-dynamic-batching`, over a loader of `odb_ref`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Final, Generic, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from odb_ref.compat.config import LossScalingMode, ODBConfig, resolve_config, split_settings
from odb_ref.compat.handle import ODBHandle
from odb_ref.compat.step_info import mark
from odb_ref.torch import ODBDataLoader as OwnDataLoader
from odb_ref.torch import UsageError
from odb_ref.torch.batches import Batch
from odb_ref.torch.from_dataloader import ADOPTED, adopt_options, find_batch_sampler
from odb_ref.torch.plan.state import StateDict
from odb_ref.torch.settings import arrange, spread


class ODBDataLoader(Generic[Batch]):
    """Takes a DataLoader's arguments and a token budget. Its batches carry their step's information until `pop_step_info`.

    ``batch_size`` must be 1, because batches are formed under the budget. Without ``buffer_size`` the window from which batches
    are formed has the number of samples that the workers would have ready (``num_workers * prefetch_factor``, if both are
    given). Further arguments of `odb_ref.ODBDataLoader`, such as ``causal_shift=False``, are passed on.

    Raises: UsageError when an argument is invalid.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        token_budget: int | None = None,
        config: ODBConfig | None = None,
        max_input_length: int | None = None,
        loss_scaling: LossScalingMode = None,
        loss_scaling_approx: bool = True,
        join: bool | None = None,
        join_mode: bool | None = None,
        no_warmup: bool | None = None,
        no_sync: bool | None = None,
        buffer_size: int | None = None,
        version: int | None = None,
        max_patches: int | None = None,
        group_order_flip: str | None = None,
        **dataloader_kwargs: object,
    ) -> None:
        settings = {
            "token_budget": token_budget,
            "max_input_length": max_input_length,
            "loss_scaling": loss_scaling,
            "loss_scaling_approx": loss_scaling_approx,
            "join": join,
            "join_mode": join_mode,
            "no_warmup": no_warmup,
            "no_sync": no_sync,
            "buffer_size": buffer_size,
            "version": version,
            "max_patches": max_patches,
            "group_order_flip": group_order_flip,
        }
        known = {name: value for name, value in dataloader_kwargs.items() if name in _PLAIN}
        if "num_workers" not in known:
            known |= {"num_workers": _WORKERS, "prefetch_factor": _USUAL_PREFETCH} | known
        kept = _PLAIN - {"persistent_workers"}  # a False that was passed cannot be told from a DataLoader's default
        own = {name: value for name, value in dataloader_kwargs.items() if name not in kept}
        plain: DataLoader[object] = DataLoader(dataset, **known)  # type: ignore[arg-type]
        self.begin_with(plain, resolve_config(config=config, **settings), own)

    def begin_with(self, plain: DataLoader[object], config: ODBConfig, own: Mapping[str, object]) -> None:
        """Makes the loader from a DataLoader, which defines what to read, and from options of `odb_ref.ODBDataLoader`.

        Raises: UsageError when the DataLoader forms batches itself.
        """
        size: int | None = getattr(find_batch_sampler(plain), "batch_size", plain.batch_size)
        if size != 1 and not is_prepared(plain):
            raise UsageError(f"batches are formed under the token budget, so batch_size=1 is wanted, got {size}")
        self.odb_config = config
        self.options = make_options(plain, config, own)
        """The arguments of `odb_ref.ODBDataLoader`."""
        self.loader: OwnDataLoader[Batch] = OwnDataLoader(plain.dataset, **arrange(self.options))  # type: ignore[arg-type]
        """The loader of `odb_ref`, for its other features: states, metrics, traces."""
        # Attributes that frameworks read from a DataLoader.
        self.dataset: object = plain.dataset
        self.batch_size = size
        for name in ADOPTED:
            setattr(self, name, getattr(plain, name))

    def __iter__(self) -> Iterator[Batch]:
        for batch, info in self.loader.steps():
            mark(batch, info)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def odb_handle(self) -> ODBHandle:
        """The handle that `apply` returns and the integrations take."""
        return ODBHandle(self.odb_config)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads. Without this call each iteration reads the next epoch."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> StateDict:
        """Returns this rank's position: see `odb_ref.ODBDataLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Resumes from a saved state: see `odb_ref.ODBDataLoader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Leaves the current epoch, if any, and releases everything."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_PLAIN: Final = frozenset(signature(DataLoader).parameters) - {"dataset"}
"""The arguments of a DataLoader."""

_USUAL_PREFETCH: Final = 2
"""A DataLoader's default, so not a choice of the user."""
_WORKERS: Final = 4
"""The release's default number of workers."""


def is_prepared(plain: object) -> bool:
    """Returns True for a loader that Accelerate has made from another one, and that therefore has a batch sampler."""
    return bool(getattr(plain, "_is_accelerate_prepared", False))


def make_options(plain: DataLoader[object], config: ODBConfig, own: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments of `odb_ref.ODBDataLoader`, from a DataLoader and a configuration. ``own`` takes precedence."""
    options = config.make_options()
    if plain.num_workers and plain.prefetch_factor is not None and plain.prefetch_factor > _USUAL_PREFETCH:
        # This user has chosen how many samples are ready when batches are formed, which is the window here.
        options.setdefault("window", plain.num_workers * plain.prefetch_factor)
    given = {"prefetch_factor": None, **options, **spread(own)}
    if is_prepared(plain) and not {"sampler", "shuffle", "shard"} & given.keys():
        inner = getattr(find_batch_sampler(plain), "sampler", None)
        if inner is not None and not isinstance(plain.dataset, IterableDataset):
            given["shuffle"] = isinstance(inner, RandomSampler)
    return adopt_options(plain, given)


def apply(
    dataloader: DataLoader[object],
    max_input_length: int | None = None,
    loss_scaling: LossScalingMode = None,
    loss_scaling_approx: bool = True,
    join_mode: bool | None = None,
    *,
    config: ODBConfig | None = None,
    **options: object,
) -> ODBHandle:
    """Turns a DataLoader into an `ODBDataLoader`, in place. All its holders iterate over batches under the budget from now on.

    A plain one is then no longer a `torch.utils.data.DataLoader`, so frameworks do not take it apart and rebuild it with
    batches of one sample.

    Raises: UsageError, like `ODBDataLoader`.
    """
    settings, own = split_settings(options)
    settings |= {
        "max_input_length": max_input_length,
        "loss_scaling": loss_scaling,
        "loss_scaling_approx": loss_scaling_approx,
        "join_mode": join_mode,
    }
    resolved = resolve_config(config=config, **settings)
    made: ODBDataLoader[object] = ODBDataLoader.__new__(ODBDataLoader)
    made.begin_with(dataloader, resolved, own)
    kind = type(dataloader)
    try:
        object.__setattr__(dataloader, "__class__", ODBDataLoader)
    except TypeError:  # its objects have another memory layout, so it gets a class that inherits from both
        object.__setattr__(dataloader, "__class__", type(f"ODB{kind.__name__}", (ODBDataLoader, kind), {}))
    dataloader.__dict__ |= vars(made)
    return ODBHandle(resolved)
