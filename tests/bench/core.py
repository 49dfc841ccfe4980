"""The speed of the core by itself: ``python -m tests.bench --only core``.

It runs one rank with every invariant checked and samples made beforehand: grouping, alignment and the state machine, without
reading, collating, transport or simulated time. It measures processor time, which a busy machine disturbs less than wall time.
A single rank never carries or splits a group; with others it is slower.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import deque
from typing import Final

from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.inputs.workload import build_workload

from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, OutcomeKind, PostCounts, PostOffer, Read
from odb_ref.core.events import Agreed, Collated, Counted, Event, SamplesRead, StepTaken
from odb_ref.core.machine import Machine
from odb_ref.core.types import Sample
from tests.bench.report import print_table, say

BUDGET_TOKENS: Final = 12_288
WINDOW_SAMPLES: Final = 1024
SAMPLES: Final = 100_000


def run(options: Namespace) -> bool:
    """Prints by trace the samples per step, and per second of processor time, from the best repetition. Returns True."""
    rows = []
    for trace in list_bundled_names():
        say(trace)
        tokens = build_workload(load_lengths(trace), ranks=1, samples=SAMPLES).tokens.tolist()
        shard = tuple(Sample(place, place, length, length) for place, length in enumerate(tokens))
        seconds, steps = min(run_epoch(shard) for _ in range(options.times))
        rows.append([trace, f"{len(shard) / steps:.1f}", f"{len(shard) / seconds:,.0f}"])
    print_table(
        f"The core by itself, one rank, checks on, window {WINDOW_SAMPLES:,}, budget {BUDGET_TOKENS:,}",
        ["trace", "samples per step", "samples per second"],
        rows,
    )
    return True


def run_epoch(shard: tuple[Sample, ...]) -> tuple[float, int]:
    """Returns the processor seconds that an epoch of one rank takes, and its steps.

    Raises: RuntimeError when some sample did not come exactly once, because such an epoch's figures mean nothing.
    """
    machine = Machine(Config(rank=0, world_size=1, budget_tokens=BUDGET_TOKENS, window_samples=WINDOW_SAMPLES))
    began = time.process_time()
    effects = deque(machine.begin())
    read = steps = 0
    came: list[Sample] = []
    finish: Finish | None = None
    while effects:
        effect = effects.popleft()
        match effect:
            case Deliver(step):
                came += step.group
                steps += 1
            case Finish():
                finish = effect
                continue
            case Read(count):
                read += count
        effects += machine.handle(_answer(effect, shard, read))
    seconds = time.process_time() - began
    if finish is None or finish.outcome.kind is not OutcomeKind.COMPLETE:
        raise RuntimeError(f"the epoch has not come to its end: {finish}")
    if sorted(sample.position for sample in came) != list(range(len(shard))):
        raise RuntimeError(f"{len(came)} samples came of {len(shard)}, or one of them twice")
    return seconds, steps


def _answer(effect: Effect, shard: tuple[Sample, ...], read: int) -> Event:
    """Returns the immediate answer to a single rank. ``read`` includes this read."""
    match effect:
        case Deliver():
            return StepTaken()
        case Read(count):
            return SamplesRead(shard[read - count : read], is_ended=read >= len(shard))
        case PostOffer(offer):
            return Agreed(offer)
        case PostCounts(counts):
            return Counted(counts)
        case Collate(round_):
            return Collated(round_)
        case _:
            raise RuntimeError(f"not expected of a rank without troubles: {effect}")
