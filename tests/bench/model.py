"""The simulator's model of a loader beside real loaders: ``python -m tests.bench --only model``.

Reading, collating and the training step sleep, so a sample costs the same for any number of workers on this machine's
processors. What remains is what the model describes: who waits for whom. A busy machine wakes sleepers late, by a time that no
model of a loader knows, so each sleep records its real length, and the model gets the means. Throughput is measured between the
first batch and the last, because the start of workers is not modelled. Each case is measured several times, all cases in turn,
and judged by the median. Means hide how uneven the delays are: if sleepers are late by more than a fraction of their sleep, a
throughput that is off does not count against the model, and is not judged.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from odb_sim.inputs.costs import NO_COLLECTIVE, Costs, GpuCost, LoaderCost
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Workload
from odb_sim.studies.runs import Run
from odb_sim.studies.runs import run as simulate
from torch.utils.data import DataLoader, Dataset

from odb_ref.core.batching.order import StepOrder
from odb_ref.torch import Batching, Loss, ODBDataLoader
from tests.bench.report import print_table, say

Sample = dict[str, Any]

TRACE: Final = "mm_mix_real"
SAMPLES: Final = 480
BUDGET_TOKENS: Final = 8192
WINDOW_SAMPLES: Final = 64
BATCH_SAMPLES: Final = 8
TOLERANCE: Final = 0.15
LATEST: Final = 0.3
"""The largest mean delay of a sample, as a share of its reading time, at which the throughput is judged."""
WORKERS: Final = (1, 2, 3, 4)
KINDS: Final = ("plain", "ours")
SAMPLE_S: Final = 4e-3
PER_TOKEN_S: Final = 2e-6
COLLATE_S: Final = 6e-3
STEPS_S: Final = {"loader": 0.0, "both": 0.025, "trainer": 0.08}
"""What the epoch waits for, and the seconds of a training step that make it do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loader, its workers, and the length of a training step."""

    kind: str
    workers: int
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A measured epoch: when each batch arrived, its samples, and mean lengths of the sleeps, in seconds."""

    taken_s: list[float]
    samples: list[int]
    late_s: float
    """How much longer it took to read a sample than intended."""
    collate_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """The measured and the predicted samples per second between the first batch and the last."""

    case: Case
    steps: int
    are_batches_equal: bool
    measured: float
    predicted: float
    late: float
    """How much longer the reading sleeps were than intended, as a share."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def verdict(self) -> str:
        """Empty if every batch has the predicted number of samples and the throughput is within the tolerance."""
        if self.are_batches_equal and abs(self.error) <= TOLERANCE:
            return ""
        return "too busy to say" if self.are_batches_equal and self.late > LATEST else "WRONG"


class Sleepy(Dataset[Sample]):
    """Samples that take a worker's time, but no processor."""

    def __init__(self, lengths: Sequence[int], *, is_asleep: bool = True) -> None:
        self.lengths = list(lengths)
        self.is_asleep = is_asleep

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        seconds = SAMPLE_S + PER_TOKEN_S * self.lengths[index]
        late_s = sleep(seconds) - seconds if self.is_asleep else 0.0
        ids = torch.ones(self.lengths[index], dtype=torch.int64)
        return {"input_ids": ids, "labels": ids, "late_s": late_s}


def sleep(seconds: float) -> float:
    """Returns how long it slept."""
    begin_s = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - begin_s


def collate_slowly(samples: list[Sample]) -> dict[str, float]:
    """Returns the number of samples and how late they were, after some time."""
    late_s = sum(sample["late_s"] for sample in samples)
    return {"samples": len(samples), "late_s": late_s, "collate_s": sleep(COLLATE_S)}


def build_workload(samples: int = SAMPLES) -> Workload:
    """Returns one rank that reads the first rows of the trace in order."""
    tokens = load_lengths(TRACE).tokens[:samples]
    return Workload(
        name=TRACE,
        ids=np.arange(samples),
        tokens=tokens,
        supervised_tokens=tokens,
        resources=np.empty((samples, 0), dtype=np.int64),
        offsets=np.array([0, samples]),
    )


def predict(case: Case, workload: Workload, epoch: Epoch) -> tuple[list[float], list[int]]:
    """Returns when each batch arrives in the simulator, and its samples. Sleeps are as long as in ``epoch``."""
    loader = LoaderCost(
        workers=case.workers,
        sample_s=SAMPLE_S + epoch.late_s,
        per_token_s=PER_TOKEN_S,
        collate_step_s=epoch.collate_s,
        collate_per_token_s=0.0,
    )
    gpu = GpuCost(fixed_s=epoch.step_s, per_token_s=0.0, per_token2_s=0.0)
    what = Run(
        workload=workload,
        policy="odb" if case.kind == "ours" else "standard",
        # A fixed batch holds the number of longest samples that fit the budget.
        budget_tokens=BUDGET_TOKENS if case.kind == "ours" else BATCH_SAMPLES * int(workload.tokens.max()),
        window_samples=WINDOW_SAMPLES,
        depth_steps=2,
        order=StepOrder.FULLEST,  # the model does not know the loader's seed
        costs=Costs(gpu=gpu, collective=NO_COLLECTIVE, loader=loader),
    )
    rows = simulate(what).rows
    return [row.start_s + row.data_wait_s for row in rows], [row.samples for row in rows]


def measure(case: Case, workload: Workload, *, is_asleep: bool = True) -> Epoch:
    """Measures an epoch of a real loader. Without sleeping only its batches are meaningful."""
    dataset = Sleepy(workload.tokens.tolist(), is_asleep=is_asleep)
    taken_s, samples, collate_s, steps_s = [], [], [], []
    late_s = 0.0
    with warnings.catch_warnings():
        # Workers that sleep do not need a processor each.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        for batch in _open(case, dataset):
            taken_s.append(time.monotonic())
            samples.append(int(batch["samples"]))
            late_s += batch["late_s"]
            collate_s.append(batch["collate_s"])
            steps_s.append(sleep(STEPS_S[case.waits_for]) if is_asleep and STEPS_S[case.waits_for] else 0.0)
    return Epoch(
        taken_s=taken_s,
        samples=samples,
        late_s=late_s / sum(samples),
        collate_s=fmean(collate_s),
        step_s=fmean(steps_s),
    )


def _open(case: Case, dataset: Sleepy) -> Iterator[dict[str, float]]:
    if case.kind == "plain":
        yield from DataLoader(dataset, BATCH_SAMPLES, num_workers=case.workers, collate_fn=collate_slowly)
        return
    with ODBDataLoader(
        dataset,
        token_budget=BUDGET_TOKENS,
        num_workers=case.workers,
        collate_fn=collate_slowly,
        batching=Batching(window=WINDOW_SAMPLES, depth=2, order="fullest"),
        loss=Loss(scaling="none"),
    ) as loader:
        yield from loader


def compare(case: Case, workload: Workload) -> Finding:
    """Returns the measured and the predicted figures of a case."""
    epoch = measure(case, workload)
    predicted_s, predicted = predict(case, workload, epoch)
    return Finding(
        case,
        len(epoch.samples),
        epoch.samples == predicted,
        sum(epoch.samples[1:]) / (epoch.taken_s[-1] - epoch.taken_s[0]),
        sum(predicted[1:]) / (predicted_s[-1] - predicted_s[0]),
        epoch.late_s / (SAMPLE_S + PER_TOKEN_S * float(workload.tokens.mean())),
    )


def choose_median(findings: Sequence[Finding]) -> Finding:
    """Returns the finding with the median error, or one whose batches differ, since timing cannot cause that."""
    return min(
        (found for found in findings if not found.are_batches_equal),
        key=lambda found: found.error,
        default=sorted(findings, key=lambda found: found.error)[len(findings) // 2],
    )


def run(options: Namespace) -> bool:
    """Prints the median finding of each case. Returns True if none is wrong."""
    workload = build_workload()
    cases = [
        Case(kind=kind, workers=workers, waits_for=name) for kind, workers, name in product(KINDS, WORKERS, STEPS_S)
    ]
    findings: dict[Case, list[Finding]] = {case: [] for case in cases}
    for repetition, (case, found) in product(range(options.times), findings.items()):
        say(
            f"model, {case.kind}, {case.workers} worker(s), waits for {case.waits_for}, {repetition + 1} of {options.times}"
        )
        found.append(compare(case, workload))
    medians = [choose_median(found) for found in findings.values()]
    header = [
        "loader",
        "workers",
        "epoch waits for",
        "steps",
        "batches",
        "measured",
        "predicted",
        "error",
        "sleeps late",
        "",
    ]
    rows = [
        [
            found.case.kind, found.case.workers, found.case.waits_for, found.steps,
            "equal" if found.are_batches_equal else "DIFFER", f"{found.measured:.1f}", f"{found.predicted:.1f}",
            f"{found.error:+.1%}", f"{found.late:.0%}", found.verdict,
        ]
        for found in medians
    ]  # fmt: skip
    title = f"Loader model, {SAMPLES} samples of {TRACE}: samples/s between the first batch and the last"
    print_table(title, header, rows)
    return all(found.verdict != "WRONG" for found in medians)
