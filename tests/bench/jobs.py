"""The jobs of a rank: it trains on an epoch with one of the loaders, and reports what it saw."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.bench import edges, process, training, updates
from tests.bench.data import BrokenCollate, Stream, Texts, collate, collate_known, compute_shards
from tests.bench.launch import find_descendants, get_maker
from tests.helpers.options import nested

Spec = dict[str, Any]
SETTLE_S = 4.0
VOCABULARY = 32


def make_dataset(spec: Spec, rank: int) -> Texts | Stream:
    sizes = spec["shards"]
    lengths = compute_shards(spec["trace"], sizes)[rank]
    fault = spec.get("fault")
    mine = fault if fault is not None and fault["rank"] == rank and fault["kind"] != "collate" else None
    texts = Texts(lengths, sum(sizes[:rank]), masked=spec.get("masked", 0.0), fault=mine)
    return Stream(texts) if spec.get("is_iterable") else texts


def read(loader: Any, pop: Callable[[Any], Any] | None) -> Iterator[tuple[Any, Any]]:
    """Yields the steps of a loader of `make_loader`: each batch with its step information."""
    yield from loader.steps() if pop is None else ((batch, pop(batch)) for batch in loader)


def make_loader(spec: Spec, rank: int) -> tuple[Any, Callable[[Any], Any] | None]:
    """Returns the loader that ``spec["kind"]`` names, set up as its README describes, and the function that takes the step
    information out of a batch, if the loader puts it there.
    """
    dataset = make_dataset(spec, rank)
    fault = spec.get("fault")
    function: Any = collate_known if spec.get("is_collate_strict") else collate
    if fault is not None and fault["rank"] == rank and fault["kind"] == "collate":
        function = BrokenCollate(sum(spec["shards"][:rank]) + fault["at"])
    workers = spec.get("workers", 2)
    options = {"num_workers": workers, "collate_fn": function, **spec.get("options", {})}
    match spec["kind"]:
        case "ours":
            from odb_ref.torch import ODBDataLoader

            own = {"token_budget": spec["budget"], "window": spec["window"], **spec.get("ours", {})}
            if not spec.get("is_iterable"):
                own["shard"] = "given"
            if spec.get("is_idle_sample_given"):
                own["idle_sample"] = Texts([4], 0)[0]
            return ODBDataLoader(dataset, **nested(**{**own, **options})), None
        case "peer":
            import odb

            own = {"token_budget": spec["budget"], "batch_size": 1, "loss_scaling": "exact"}
            if workers:
                own["prefetch_factor"] = max(1, spec["window"] // workers)
            pop = spec.get("peer", {}).get("loss_scaling", "exact")
            loader = odb.ODBDataLoader(dataset, **{**own, **spec.get("peer", {}), **options})
            return loader, lambda batch: odb.pop_step_info(batch, loss_scaling=pop)
        case "plain":
            return DataLoader(dataset, batch_size=spec["batch"], **options), lambda batch: None
        case kind:
            raise ValueError(kind)


def epoch(spec: Spec, rank: int, ranks: int) -> Spec:
    """Takes all steps of one epoch, without a model, and returns what they held."""
    _import(spec["kind"])
    if ranks > 1:
        dist.barrier()  # otherwise the first exchange would wait for a rank whose imports take longer
    began = time.monotonic()
    first: Spec = {"first_s": None, "processes": 0}

    def note_first(_batch: Any, _info: Any) -> None:
        if first["first_s"] is None:
            first["first_s"] = time.monotonic() - began
            first["processes"] = sum(1 for _ in find_descendants(os.getpid()))

    return first | take(spec, rank, began, note_first)


def take(spec: Spec, rank: int, began: float, use: Callable[[Any, Any], object]) -> Spec:
    """Gives ``use`` the steps of an epoch, and returns what they held, the error at their end, and the time since ``began``."""
    loader, pop = make_loader(spec, rank)
    seen: Spec = {"numbers": [], "padded": [], "real": [], "groups": [], "scales": [], "idle": 0}
    error = None
    try:
        for batch, info in read(loader, pop):
            use(batch, info)
            _note(seen, batch, info)
            if len(seen["padded"]) == spec.get("break_at", {}).get(str(rank)):
                break
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:600]
    seconds = time.monotonic() - began
    if hasattr(loader, "close"):
        loader.close()
    return {**seen, "seconds": seconds, "error": error, "steps": len(seen["padded"])}


def _import(kind: str) -> None:
    # The time of imports is not part of the loader's speed.
    if kind != "plain":
        importlib.import_module("odb" if kind == "peer" else "odb_ref.torch")


def _note(seen: Spec, batch: Any, info: Any) -> None:
    is_idle = info is not None and getattr(info, "is_idle", False)
    seen["idle"] += is_idle
    seen["padded"].append(0 if is_idle else batch["input_ids"].numel())
    seen["real"].append(0 if is_idle else int(batch["attention_mask"].sum()))
    seen["groups"].append(0 if is_idle else len(batch["number"]))
    seen["numbers"] += [] if is_idle else batch["number"].tolist()
    if info is not None:
        seen["scales"].append(float(info.loss_scale))


def length(spec: Spec, rank: int, ranks: int) -> Spec:
    """Returns the ``len()`` before an epoch of this loader, and of a plain one made after it."""
    loader, _ = make_loader(spec, rank)
    try:
        own: int | str = len(loader)
    except TypeError as error:
        own = f"TypeError: {error}"[:80]
    steps = sum(1 for _ in loader)
    plain = DataLoader(range(10))
    return {"own": own, "steps": steps, "plain": len(plain)}


class Model(nn.Module):
    """The smallest language model whose gradients depend on every token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    def forward(self, batch: Any) -> torch.Tensor:
        """Returns the mean loss over the supervised tokens of the batch, with the causal shift."""
        logits = self.layers(batch["input_ids"])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _get_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])


def gradient(spec: Spec, rank: int, ranks: int) -> Spec:
    """Compares each step's gradient, averaged over ranks, with that of one process on the union batch (float64)."""
    torch.manual_seed(0)
    model = Model().double()
    loader, pop = make_loader(spec, rank)
    errors = []
    for batch, info in read(loader, pop):
        model.zero_grad()
        (model(batch) * info.loss_scale).backward()
        mine = _get_gradient(model)
        dist.all_reduce(mine)
        batches: list[Any] = [None] * ranks
        is_idle = getattr(info, "is_idle", False)
        dist.all_gather_object(batches, None if is_idle else dict(batch))
        model.zero_grad()
        present = [item for item in batches if item is not None]
        counts = [int((item["labels"][:, 1:] != -100).sum()) for item in present]
        for item, count in zip(present, counts, strict=True):
            if count:
                (model(item) * (count / sum(counts))).backward()
        union = _get_gradient(model)
        errors.append(float((mine / ranks - union).norm() / union.norm()))
    if hasattr(loader, "close"):
        loader.close()
    return {"errors": errors}


def train(spec: Spec, rank: int, ranks: int) -> Spec:
    """Trains a plain DDP model to the end of the epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    return take(spec, rank, time.monotonic(), lambda batch, info: (model(batch) * info.loss_scale).backward())


def breaks(spec: Spec, rank: int, ranks: int) -> Spec:
    """Runs several short epochs, each with a fresh loader that is left early, and returns what is left at the end."""
    before: dict[str, int] = {}
    born = {os.getpid()}
    for epoch_number in range(spec["epochs"]):
        if ranks > 1:
            dist.barrier()
        loader, pop = make_loader(spec, rank)
        for step, _ in enumerate(read(loader, pop)):
            born |= set(find_descendants(os.getpid()))
            if step == 2:
                break
        del loader
        gc.collect()
        if not epoch_number:
            # One-time setup of a library is not a leak, so only what later epochs add counts.
            time.sleep(SETTLE_S / 2)
            before = _count_left(born)
    deadline = time.monotonic() + SETTLE_S
    while (left := _count_left(born)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    if ranks > 1:
        dist.barrier()
    return {key: left[key] - before[key] for key in left} | {"left": left}


def _count_left(born: set[int]) -> dict[str, int]:
    return {
        "processes": sum(1 for _ in find_descendants(os.getpid())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared_files": sum(get_maker(name) in born for name in os.listdir("/dev/shm")),
        "threads": threading.active_count(),
    }


def exchange(spec: Spec, rank: int, ranks: int) -> Spec:
    """Returns the bytes that this rank sends in one round of the exchange: an agreement, and a sum over the counts of
    ``spec["steps"]`` steps.
    """
    from odb_ref.core.peers import POST_SIZE
    from odb_ref.torch.exchange.identity import LoaderOrigin
    from odb_ref.torch.exchange.rendezvous import make_transport
    from odb_ref.torch.exchange.roster import Ranks

    identity = LoaderOrigin(None, None).begin("", 1, is_common=False, is_alone=False)
    transport = make_transport(Ranks().make_roster(), identity, spec["transport"], 60.0)
    before = transport.links.bytes
    transport.reduce_offers([rank] * (POST_SIZE + spec["flags"]))
    transport.reduce_sum([rank] * (3 * spec["steps"]))
    sent = transport.links.bytes - before
    dist.barrier()
    transport.links.close()
    return {"bytes": sent}


JOBS: dict[str, Callable[[Spec, int, int], Spec]] = {
    "epoch": epoch,
    "length": length,
    "gradient": gradient,
    "train": train,
    "breaks": breaks,
    "exchange": exchange,
    "busy": process.busy,
    "first": process.first,
    "learn": training.learn,
    "edge": edges.edge,
    "memory": edges.memory,
    "race": updates.race,
}
