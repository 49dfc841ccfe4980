"""Planners of other projects, asked by the kit. Each function calls what the package's trainer calls.

This file holds the trainer's part: the exchanges of its ranks, which go through the kit's, and the dealing of packs to ranks,
as a sampler does it. `tests.conformance.scoreboard` installs the packages and runs the kit on them.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from odb_ref.conformance.asking import LIMIT_S, Exchange, StuckError
from odb_ref.conformance.vectors import decode

Question = Mapping[str, Any]
Plan = list[list[list[int]]]
LONGEST = 1 << 20
"""Longer samples are not made as tensors."""

_rank = threading.local()
_importing = threading.Lock()
"""Ranks are threads, and none may see a module that another has half imported."""


def _find_file(package: str, path: str) -> Path:
    """Returns the path of an installed file."""
    (found,) = [file for file in files(package) or () if str(file) == path]
    return Path(str(found.locate()))


def _load(package: str, path: str) -> Any:
    """Imports an installed module by itself, without the package's other imports."""
    name = path.removesuffix(".py").replace("/", ".")
    with _importing:
        if name not in sys.modules:
            spec = spec_from_file_location(name, _find_file(package, path))
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[name]


def plan_model(question: Question) -> Any:
    """Asks the model extracted from Coq, for plans and the online protocol."""
    from tests.proofs import plans, vectors

    kind, record = question["kind"], {name: value for name, value in question.items() if name != "kind"}
    if kind in vectors.RULES_OF:
        (answer,) = vectors.ask([(kind, record)])
        return vectors.make_exact(kind, answer).get("plan", answer)
    (said,) = plans.ask_model(plans.write_problem(decode(record, kind)))
    return json.loads(said.replace(" ", ","))


# verl: ranks, each with its own batch ------------------------------------------------------------------------------------


def _import_verl() -> Any:
    """Imports verl's module with its collective replaced by the kit's, as an all-reduce of integers by any rank's thread."""
    with _importing:
        import torch
        from torch import distributed
        from verl.utils import seqlen_balancing

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        rows = _rank.exchange([int(value) for value in tensor.flatten().tolist()])
        choose = {distributed.ReduceOp.MAX: max, distributed.ReduceOp.MIN: min, distributed.ReduceOp.SUM: sum}[op]
        tensor.copy_(torch.tensor([*map(choose, zip(*rows, strict=True))]).reshape(tensor.shape))

    seqlen_balancing.get_device_name = lambda: "cpu"
    seqlen_balancing.dist = SimpleNamespace(
        is_initialized=lambda: True, all_reduce=all_reduce, ReduceOp=distributed.ReduceOp
    )
    return seqlen_balancing


def plan_verl(question: Question, exchange: Exchange, *, dp_group: object | None = "all ranks") -> Any:
    """Plans as verl's engines do: with the data-parallel group, and rows without padding."""
    module = _import_verl()
    import torch
    from tensordict import TensorDict

    lengths, terms = question["lengths"], question["terms"]
    if not lengths or max(lengths) > LONGEST or min(lengths) < 1:
        raise ValueError("not a batch")
    rows = torch.nested.as_nested_tensor(
        [torch.ones(length, dtype=torch.long) for length in lengths], layout=torch.jagged
    )
    batch = TensorDict({"input_ids": rows}, batch_size=len(lengths))
    _rank.exchange = exchange
    _, indices = module.rearrange_micro_batches(
        batch,
        terms["budget"],
        dp_group=dp_group,
        num_batches_divided_by=terms.get("multiple_of"),
        min_num_micro_batch=terms.get("at_least"),
    )
    return indices


def plan_verl_actor(question: Question, exchange: Exchange) -> Any:
    """Plans as the actor of an FSDP worker does in the installed version, whose source shows whether it passes the group."""
    source = _find_file("verl", "verl/workers/actor/dp_actor.py").read_text()
    calls = re.findall(r"prepare_dynamic_batch\((.*?)\)\n", source, re.DOTALL)
    assert calls
    return plan_verl(question, exchange, dp_group="all ranks" if all("dp_group" in call for call in calls) else None)


# OpenRLHF and SkyRL: ranks that agree on a number ------------------------------------------------------------------------


def plan_openrlhf(question: Question, exchange: Exchange) -> Any:
    """Plans as ``setup_dynamic_batch`` of its replay buffer: first fit, the most of all ranks, balanced into that many."""
    module = _load("openrlhf", "openrlhf/utils/seqlen_balancing.py")
    lengths = question["lengths"]
    own = module.get_minimum_num_micro_batch_size(lengths, question["terms"]["budget"], 1, 1)
    most = max(row[0] for row in exchange([own]))
    return module.get_seqlen_balanced_partitions(lengths, most, equal_size=False)


def plan_skyrl(question: Question, exchange: Exchange) -> Any:
    """Plans as ``TokenBasedBatchIterator``: its balanced packer, with padding micro-batches up to the most of all ranks."""
    make_seq_packer = _load("skyrl", "skyrl/train/dataset/bin_packing.py").make_seq_packer
    packs = make_seq_packer("balanced", bin_capacity=question["terms"]["budget"]).pack(question["lengths"])
    most = max(row[0] for row in exchange([len(packs)]))
    return packs + [[] for _ in range(most - len(packs))]


def plan_skyrl_all(question: Question) -> Plan:
    """Plans as its SFT trainer: first fit decreasing, a multiple of the ranks, dealt out."""
    make_seq_packer = _load("skyrl", "skyrl/train/dataset/bin_packing.py").make_seq_packer
    ranks, lengths = len(question["lengths"]), _join(question)
    packer = make_seq_packer(
        "first_fit_decreasing", bin_capacity=question["terms"]["budget"], min_bin_count=ranks, bin_count_multiple=ranks
    )
    return _deal(packer.pack(lengths), ranks)


# Packers: all lengths in one place, packs dealt out ----------------------------------------------------------------------


def _join(question: Question) -> list[int]:
    return [length for own in question["lengths"] for length in own]


def _deal(packs: Sequence[Sequence[int]], ranks: int) -> Plan:
    """Deals packs to ranks in turn. If the last round is short, some get empty ones."""
    count = max(1, math.ceil(len(packs) / ranks))
    full = [[*pack] for pack in packs] + [[] for _ in range(count * ranks - len(packs))]
    return [full[rank::ranks] for rank in range(ranks)]


class _Unused(ModuleType):
    """Replaces a module that is imported but not used."""

    def __getattr__(self, name: str) -> str:
        return name


def plan_trl(question: Question) -> Plan:
    """Plans with ``pack_dataset``, and deals the packs to ranks like a distributed sampler."""
    import datasets
    from torch.utils.data import DistributedSampler
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    ranks, lengths = len(question["lengths"]), _join(question)
    rows = [[index] * length for index, length in enumerate(lengths)]
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": rows}), question["terms"]["budget"], strategy="bfd")
    packs = [sorted(set(row)) for row in packed["input_ids"]]
    samplers = [DistributedSampler(packs, ranks, rank, shuffle=False) for rank in range(ranks)]  # type: ignore[arg-type]
    return [[packs[place] for place in sampler] for sampler in samplers]


def plan_binpacking(question: Question) -> Plan:
    """Plans with ``to_constant_volume``."""
    from binpacking import to_constant_volume

    packs = to_constant_volume(dict(enumerate(_join(question))), question["terms"]["budget"])
    return _deal([[*pack] for pack in packs], len(question["lengths"]))


def plan_prtpy(question: Question) -> Plan:
    """Plans by first fit decreasing, with ``prtpy.pack``."""
    sys.modules.setdefault("mip", _Unused("mip"))  # a solver that first fit does not use
    from prtpy.packing.adaptors import pack
    from prtpy.packing.first_fit import decreasing

    lengths = dict(enumerate(_join(question)))
    packs = pack(algorithm=decreasing, binsize=question["terms"]["budget"], items=lengths)
    return _deal(packs, len(question["lengths"]))


# Online: the released peer -------------------------------------------------------------------------------------------------


class _Rows:
    """A rank's samples, with their numbers of tokens and their places."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = torch.ones(self._lengths[index], dtype=torch.long)
        return {"input_ids": row, "attention_mask": row, "labels": row, "place": torch.tensor([index])}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    from torch.nn.utils.rnn import pad_sequence

    names = ("input_ids", "attention_mask", "labels", "place")
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in names}


def _take_all(rank: int, question: Question) -> list[list[int]]:
    """Returns what one rank of an epoch receives, step by step. It leaves when all ranks have received everything."""
    import odb
    from torch import distributed

    loader = odb.ODBDataLoader(
        _Rows(question["lengths"][rank]),
        token_budget=question["terms"]["budget"],
        batch_size=1,
        num_workers=1,
        prefetch_factor=question["settings"]["window_samples"],
        collate_fn=_collate,
    )
    steps = []
    for batch in loader:
        info = odb.pop_step_info(batch)
        steps.append([] if getattr(info, "is_idle", False) else batch["place"].flatten().tolist())
    distributed.barrier()
    return steps


def plan_odb(question: Question) -> Plan:
    """Runs an epoch as its README starts one, with a process for each rank, which has its own samples."""
    from tests.torch.ranks import run_ranks

    try:
        results = run_ranks(len(question["lengths"]), _take_all, question, timeout_s=0.8 * LIMIT_S)
    except AssertionError as error:
        raise StuckError(str(error)) from error
    for result in results:
        if result.error or result.is_gone:
            raise RuntimeError(f"{result.error or 'a rank is gone'}: {result.text}")
    return [result.value for result in results]
