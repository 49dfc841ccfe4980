"""The expected result of a case of the soak."""

from __future__ import annotations

from collections import defaultdict

from tests.soak.case import HARMLESS, MISSABLE, Case, Fault
from tests.soak.rank import SHARD, Found

SLOW_S = 60.0
"""A case that takes longer has waited for a timeout, which is right only if the case is about timeouts."""
FOUND_APART = {Fault.STOP, Fault.CUT}
"""Ranks on the culprit's host know more than the others, or are cut off from them. The last agreement may not reach all."""


def judge(case: Case, found: dict[int, Found]) -> list[str]:
    """Returns what is wrong. ``found`` is what the ranks reported, by rank."""
    trouble: list[str] = []
    missing = set(range(case.ranks)) - set(found) - case.absent
    told = {rank: item for rank, item in found.items() if rank not in case.absent}
    if missing:
        trouble.append(f"ranks {sorted(missing)} have ended without a word")
    for rank, item in told.items():
        if len(set(item.numbers)) != len(item.numbers):
            trouble.append(f"rank {rank} has trained on a sample twice")
        if set(item.numbers) - set(_compute_shard(case, rank)):
            trouble.append(f"rank {rank} has trained on samples of others")
        if item.left:
            trouble.append(f"rank {rank} has {item.left}")
    if case.fault in HARMLESS or is_missed(case, found):
        return trouble + _judge_complete(case, found)
    return trouble + _judge_failed(case, told)


def _compute_shard(case: Case, rank: int) -> range:
    return range(SHARD * rank, SHARD * rank + case.sizes[rank])


def is_missed(case: Case, found: dict[int, Found]) -> bool:
    """Returns True if the fault came after the end of the epoch, or never."""
    others = [item for rank, item in found.items() if rank != case.culprit]
    is_silent = not any(item.error for item in others)
    if case.fault not in MISSABLE or not is_silent:
        return False
    culprit = found.get(case.culprit)
    return bool(others) or culprit is None or not culprit.error


def _judge_complete(case: Case, found: dict[int, Found]) -> list[str]:
    trouble = []
    spared = {case.culprit} if case.fault in MISSABLE else set()
    for rank, item in found.items():
        if rank in spared:
            continue
        if item.error:
            trouble.append(f"rank {rank} raised {item.error}: {item.text}")
        elif case.fault is not Fault.LEAVE_ALL and sorted(item.numbers) != list(_compute_shard(case, rank)):
            trouble.append(f"rank {rank} has not trained on every sample once: {item.numbers}")
    steps = {item.steps for rank, item in found.items() if rank not in spared}
    if len(steps) > 1:
        trouble.append(f"ranks took {steps} steps")
    return trouble


def _judge_failed(case: Case, told: dict[int, Found]) -> list[str]:
    # A rank that reads in its own thread raises the error of its own code. One that never begins raises nothing.
    is_own = case.fault in (Fault.LEAVE, Fault.TRAINER, Fault.INTERRUPT, Fault.SAMPLER, Fault.NEVER) or (
        case.fault in (Fault.READ, Fault.COLLATE) and not case.settings.workers
    )
    trouble = []
    texts: dict[object, set[str]] = defaultdict(set)
    for rank, item in told.items():
        if rank == case.culprit and is_own:
            continue
        if case.fault in FOUND_APART and not item.error and len(item.numbers) == case.sizes[rank]:
            continue  # it had all samples, and each rank learns by itself that another is lost (R7.5)
        if item.error != "JobError" or item.blamed not in _find_blamable(case, rank):
            trouble.append(f"rank {rank} raised {item.error or 'nothing'}, blaming {item.blamed}: {item.text}")
        texts[_is_with_culprit(case, rank) if case.fault in FOUND_APART else None].add(item.text)
    for side in texts.values():
        if len(side) > 1:
            trouble.append(f"ranks differ: {sorted(side)}")
    if case.settings.method == "fork" and any(item.seconds > SLOW_S for item in told.values()):
        trouble.append("it took too long")
    return trouble


def _find_blamable(case: Case, rank: int) -> set[int]:
    if case.fault is not Fault.CUT:
        return {case.failing}
    # On either side of the cut, it must be a rank on the other side.
    return {other for other in range(case.ranks) if _is_with_culprit(case, other) != _is_with_culprit(case, rank)}


def _is_with_culprit(case: Case, rank: int) -> bool:
    return case.places[rank] == case.places[case.culprit]
