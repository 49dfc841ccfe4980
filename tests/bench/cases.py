"""What a training job may meet, tried with this project's loader and with the peer's: ``python -m tests.bench --peer-cases``.

Each case defines what would be right, and the same function judges both. A peer's failure may be a race, so the tests in
`tests.peer` assert only that ours is right. The table reports what the peer did this time.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.bench.launch import Rank, launch

Spec = dict[str, Any]
TRACE = "mm_mix_real"
BASE: Spec = {"trace": TRACE, "budget": 2048, "window": 8, "workers": 2, "batch": 2}
LIMIT_S = 40.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the result was right, and a line that describes it."""

    is_right: bool
    text: str


Judge = Callable[[Spec, list[Rank]], Outcome]


@dataclass(frozen=True, slots=True)
class Case:
    """A job on some ranks, and the judge of its result."""

    name: str
    title: str
    judge: Judge
    spec: Spec
    job: str = "epoch"

    def run(self, kind: str, limit_s: float = LIMIT_S) -> Outcome:
        """Returns the outcome for ``kind``, which is ours, peer or plain."""
        spec = {**BASE, **self.spec, "kind": kind}
        return self.judge(spec, launch(self.job, spec, ranks=len(spec["shards"]), limit_s=limit_s))


def has_peer() -> bool:
    return importlib.util.find_spec("odb") is not None


def _find_trouble(ranks: list[Rank]) -> str:
    """Returns what went wrong on ranks that failed, hung or exited with an error, or an empty string."""
    parts = []
    for number, rank in enumerate(ranks):
        error = (rank.data or {}).get("error")
        if error:
            parts.append(f"rank {number}: {' '.join(error.split())[:160]}")
        elif rank.is_hung:
            parts.append(f"rank {number} hangs" + (" at exit" if rank.data is not None else ""))
        elif rank.exit_status:
            parts.append(f"rank {number} exits with {rank.exit_status}: {rank.error[:160]}")
    return "; ".join(parts)


def _describe_coverage(spec: Spec, ranks: list[Rank]) -> tuple[bool, str]:
    counts = Counter(number for rank in ranks for number in (rank.data or {}).get("numbers", ()))
    total = sum(spec["shards"])
    lost = total - len(counts)
    twice = sum(counts.values()) - len(counts)
    text = f"{len(counts)} of {total} samples" + (f", {lost} lost" if lost else "") + (f", {twice} twice" * bool(twice))
    return not lost and not twice, text


def judge_coverage(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: every sample once, the same number of steps on all ranks, and all ranks end by themselves."""
    trouble = _find_trouble(ranks)
    is_covered, text = _describe_coverage(spec, ranks)
    steps = [(rank.data or {}).get("steps") for rank in ranks]
    is_aligned = len(set(steps)) == 1
    text += ", steps " + "/".join(map(str, steps)) + (f"; {trouble}" if trouble else "")
    return Outcome(not trouble and is_covered and is_aligned, text)


def judge_counts(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: like `judge_coverage`, and the weights of each step average to 1 over the ranks."""
    outcome = judge_coverage(spec, ranks)
    scales = [(rank.data or {}).get("scales", []) for rank in ranks]
    wrong = [abs(sum(step) - len(ranks)) > 1e-6 for step in zip(*scales, strict=False)]
    largest = max((max((rank.data or {}).get("groups", []), default=0) for rank in ranks), default=0)
    text = f"{outcome.text}; weights wrong in {sum(wrong)} of {len(wrong)} steps; largest batch {largest}"
    return Outcome(outcome.is_right and bool(wrong) and not any(wrong), text)


def judge_gradient(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: the gradient of each step is within 1e-9 of that of the union batch."""
    trouble = _find_trouble(ranks)
    errors = sorted((ranks[0].data or {}).get("errors", []))
    if not errors:
        return Outcome(False, trouble or "no step")
    text = f"gradient off by {errors[len(errors) // 2]:.1e} (median of {len(errors)} steps), {errors[-1]:.1e} at most"
    return Outcome(not trouble and errors[-1] < 1e-9, text + (f"; {trouble}" if trouble else ""))


def judge_blame(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: every rank ends by itself, with an error that names the failed rank, and the cause."""
    fault = spec["fault"]
    cause = fault["cause"]
    errors = [(rank.data or {}).get("error") or "" for rank in ranks]
    named = [f"rank {fault['rank']}" in error and cause in error for error in errors]
    seconds = max((rank.data or {}).get("seconds", rank.seconds) for rank in ranks)
    text = f"{sum(named)} of {len(ranks)} ranks told rank and cause, after {seconds:.1f} s"
    if not all(named):
        _, coverage = _describe_coverage(spec, ranks)
        text += f"; {_find_trouble(ranks) or f'no error, {coverage}'}"
    return Outcome(all(named) and not any(rank.is_hung for rank in ranks), text)


def judge_leaver(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: the rank that leaves ends without an error, and every other rank ends with an error that names it."""
    (leaver,) = map(int, spec["break_at"])
    errors = [(rank.data or {}).get("error") or "" for rank in ranks]
    named = [f"rank {leaver}" in error for number, error in enumerate(errors) if number != leaver]
    is_right = all(named) and not errors[leaver] and not any(rank.is_hung for rank in ranks)
    seconds = max((rank.data or {}).get("seconds", rank.seconds) for rank in ranks)
    text = f"{sum(named)} of {len(named)} others told the rank, after {seconds:.1f} s"
    return Outcome(is_right, text if is_right else f"{text}; {_find_trouble(ranks) or 'no error'}")


def judge_leaks(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: no process is left, and threads, descriptors and shared-memory files do not grow from epoch to epoch."""
    trouble = _find_trouble(ranks)
    data = ranks[0].data
    if data is None:
        return Outcome(False, trouble)
    names = ("processes", "threads", "descriptors", "shared_files")
    text = ", ".join(f"{data[name]:+d} {name.replace('_', ' ')}" for name in names)
    text = f"from the first epoch to the last: {text}; left after it: {data['left']['processes']} processes"
    is_clean = not trouble and not data["left"]["processes"] and all(data[name] <= 0 for name in names)
    return Outcome(is_clean, text + (f"; {trouble}" if trouble else ""))


def judge_processes(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: like `judge_coverage`, and with ``num_workers=0`` at most one helper process."""
    outcome = judge_coverage(spec, ranks)
    processes = (ranks[0].data or {}).get("processes", 0)
    return Outcome(outcome.is_right and processes <= 1, f"{outcome.text}; {processes} processes")


def judge_length(spec: Spec, ranks: list[Rank]) -> Outcome:
    """Right: ``len()`` returns the number of steps or raises TypeError, and a plain DataLoader returns its own (10)."""
    data = ranks[0].data
    if data is None:
        return Outcome(False, _find_trouble(ranks))
    own = data["own"]
    text = f"len() says {own}, there are {data['steps']} steps; a plain DataLoader of 10 batches says {data['plain']}"
    is_honest = own == data["steps"] or str(own).startswith("TypeError")
    return Outcome(is_honest and data["plain"] == 10, text)


def _fault(kind: str, cause: str) -> Spec:
    return {"shards": [48, 48], "fault": {"rank": 1, "at": 20, "kind": kind, "cause": cause}, "group_timeout_s": 20}


CASES = (
    Case("even_join", "even shards, join mode (48 and 48)", judge_coverage, {"shards": [48, 48]}),
    Case("one_rank", "one rank", judge_coverage, {"shards": [48]}),
    Case(
        "unequal_join",
        "unequal shards, join mode (24 and 9)",
        judge_coverage,
        {"shards": [24, 9], "budget": 1024, "window": 16, "peer": {"loss_scaling": "approx"}},
    ),
    Case("unequal_exact_3", "unequal shards, exact scaling, 3 ranks", judge_coverage, {"shards": [40, 13, 5]}),
    Case(
        "empty_shard",
        "a rank without a sample (ours with idle_sample=)",
        judge_coverage,
        {"shards": [12, 0], "is_idle_sample_given": True},
    ),
    Case(
        "plain_ddp",
        "unequal shards under plain DDP (the peer's README asks for DDP Join)",
        judge_coverage,
        {"shards": [30, 9], "group_timeout_s": 10},
        job="train",
    ),
    Case(
        "spawn",
        "worker processes by spawn",
        judge_counts,
        {"shards": [24, 24], "options": {"multiprocessing_context": "spawn"}},
    ),
    Case(
        "masked_gradient",
        "exact scaling, masked prompts",
        judge_gradient,
        {"shards": [32, 32], "masked": 0.5},
        job="gradient",
    ),
    Case(
        "strict_collate",
        "exact scaling, collate_fn makes only known keys",
        judge_gradient,
        {"shards": [32, 32], "is_collate_strict": True},
        job="gradient",
    ),
    Case(
        "early_breaks",
        "four epochs, fresh loader, early break",
        judge_leaks,
        {"shards": [120, 120], "epochs": 4},
        job="breaks",
    ),
    Case("leaver", "one rank leaves the loop early", judge_leaver, {"shards": [60, 60], "break_at": {"1": 2}}),
    Case("getitem_raises", "__getitem__ raises on rank 1", judge_blame, _fault("getitem", "sample 20 is broken")),
    Case("collate_raises", "collate_fn raises on rank 1", judge_blame, _fault("collate", "cannot be collated")),
    Case("worker_killed", "a worker of rank 1 is killed", judge_blame, _fault("kill", "exited unexpectedly")),
    Case("empty_sample", "an empty sample on rank 1", judge_blame, _fault("empty", "length")),
    Case("no_input_ids", "a sample without input_ids on rank 1", judge_blame, _fault("no_input_ids", "input_ids")),
    Case("no_workers", "num_workers=0", judge_processes, {"shards": [24], "workers": 0}),
    Case("iterable", "iterable data set", judge_coverage, {"shards": [24, 13], "is_iterable": True}),
    Case(
        "persistent",
        "persistent workers",
        judge_coverage,
        {"shards": [24, 24], "options": {"persistent_workers": True}},
    ),
    Case("length", "len() of the loader", judge_length, {"shards": [40]}, job="length"),
)


def get_case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
