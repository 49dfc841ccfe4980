"""Scripted scenarios: events in, effects out, as text that can be read and compared.

A scenario is a file of commands, each on a line that begins with ``>``. The indented lines below it are the machine's answers.
``run_script`` recomputes them; ``python -m tests.core.script`` writes them into the files.

    > ranks 2 window_samples=2     machines with this configuration; ``rank=1 budget_tokens=7`` changes one rank's
    > begin 0                      the start of rank 0
    > read 0 3 4 5 end             three samples of these lengths, then the end of the source (half of each is supervised)
    > collated 0 / take 0 / stop 0 / urge 0 / fail 0 CAUSE / lost 0 RANK CAUSE
    > answer 0                     the answer to the open post of rank 0, once all ranks have posted
    > all begin / all answer ...   the same for every rank
    > state 0                      what the rank waits for
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from odb_ref.core.batching.rules import get_rule
from odb_ref.core.config import Config
from odb_ref.core.effects import Collate, Deliver, Effect, Finish, Post, PostCounts, PostOffer, PostReport, Read
from odb_ref.core.errors import OdbError, UsageError
from odb_ref.core.events import Collated, ConsumerStopped, Event, LocalFailed, PeerLost, SamplesRead, StepTaken, Urged
from odb_ref.core.exchange import combine_posts
from odb_ref.core.machine import Machine
from odb_ref.core.offer import NONE, Offer
from odb_ref.core.types import Group, Mode, Sample, Step, StepCounts

FOLDER = Path(__file__).with_name("scenarios")


def show_group(group: Group) -> str:
    return "[" + " ".join(f"{sample.position}:{sample.length}" for sample in group) + "]"


def show_step(step: Step) -> str:
    return f"{step.number}{show_group(step.group)} of {show_counts(step.global_counts)}"


def show_counts(counts: StepCounts) -> str:
    return "/".join(map(str, counts.to_row()))


def show_offer(offer: Offer) -> str:
    parts = []
    for name in ("round", "samples", "groups"):
        low, high = getattr(offer, f"{name}_min"), getattr(offer, f"{name}_max")
        parts.append(f"{name} {'-' if low == NONE else low}" + (f"..{high}" if low != high else ""))
    parts.append("ready" if offer.ready_min else "not ready")
    if offer.due_max:
        parts.append(f"due {offer.due_max}")
    if offer.failed_rank != NONE:
        parts.append(f"failed rank {offer.failed_rank}")
    if offer.stop_rank != NONE:
        parts.append(f"stopped rank {offer.stop_rank} after {offer.stop_step}")
    if offer.fingerprint_min != offer.fingerprint_max:
        parts.append("configurations differ")
    return ", ".join(parts)


def show_effect(effect: Effect) -> str:
    match effect:
        case Read(count):
            return f"Read {count}"
        case PostOffer(offer):
            return f"PostOffer {show_offer(offer)}"
        case PostCounts(counts):
            return "PostCounts " + " ".join(map(show_counts, counts))
        case PostReport(report):
            return f"PostReport round {report.round}" + (f", cause {report.cause!r}" if report.cause else "")
        case Collate(round, steps):
            return f"Collate round {round}: " + (", ".join(map(show_step, steps)) or "nothing")
        case Deliver(step):
            return f"Deliver {show_step(step)}"
        case Finish(outcome, limit):
            place = "" if outcome.rank is None else f" by rank {outcome.rank}"
            cause = f" ({outcome.cause})" if outcome.cause else ""
            return f"Finish {outcome.kind}{place}{cause}, steps below {limit}"


class Script:
    """The machines of a scenario, and the exchange between them."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.posts: list[list[Post]] = []
        self.answered: list[int] = []

    def execute(self, command: str) -> list[str]:
        """Returns the lines with which a command answers."""
        name, *words = command.split()
        if name == "ranks":
            self._set_up(words)
            return []
        if name == "all":
            lines = []
            for rank in range(len(self.machines)):
                lines += [f"{rank}: {line}" for line in self.execute(" ".join((words[0], str(rank), *words[1:])))]
            return lines
        rank = int(words[0])
        if name == "state":
            state = self.machines[rank].state
            wants = f", {state.wanted_samples} samples to read" if state.wanted_samples else ""
            return [
                f"{state.phase}, round {state.round}{wants}, window {show_group(state.window)}, "
                f"{len(state.plan)} planned, {len(state.released)} released, {len(state.queue)} queued, "
                f"{state.taken_steps} taken"
            ]
        before = self.machines[rank].state
        try:
            machine = self.machines[rank]
            effects = machine.begin() if name == "begin" else self._handle(rank, name, words[1:])
        except OdbError as error:
            if self.machines[rank].state is not before:
                raise AssertionError("an error has changed the state") from error
            return [f"! {type(error).__name__}: {error}"]
        for effect in effects:
            if isinstance(effect, Post):
                self.posts[rank].append(effect)
        return [show_effect(effect) for effect in effects] or ["-"]

    def _set_up(self, words: list[str]) -> None:
        size = int(words[0])
        common: dict[str, Any] = {"budget_tokens": 12, "window_samples": 4, "depth_steps": 2, "ramp_rounds": 0}
        special: dict[int, dict[str, Any]] = {}
        target = common
        for word in words[1:]:
            key, value = word.split("=")
            if key == "rank":
                target = special.setdefault(int(value), {})
            elif key == "rule":
                target[key] = get_rule(value)
            elif key == "mode":
                target[key] = Mode(value)
            else:
                target[key] = int(value)
        self.machines = [
            Machine(Config(rank=rank, world_size=size, **(common | special.get(rank, {})))) for rank in range(size)
        ]
        self.posts = [[] for _ in range(size)]
        self.answered = [0] * size

    def _handle(self, rank: int, name: str, words: list[str]) -> tuple[Effect, ...]:
        machine = self.machines[rank]
        make: dict[str, Callable[[], Event]] = {
            "read": lambda: self._read(rank, words),
            "collated": lambda: Collated(int(words[0]) if words else machine.state.round - 1),
            "take": StepTaken,
            "stop": ConsumerStopped,
            "urge": Urged,
            "fail": lambda: LocalFailed(" ".join(words)),
            "lost": lambda: PeerLost(None if words[0] == "-" else int(words[0]), " ".join(words[1:])),
            "answer": lambda: self._answer(rank),
        }
        event = make[name]()
        effects = machine.handle(event)
        if name == "answer":
            self.answered[rank] += 1
        return effects

    def _read(self, rank: int, words: list[str]) -> SamplesRead:
        first = self.machines[rank].state.read_samples
        lengths = [int(word) for word in words if word != "end"]
        return SamplesRead(
            tuple(
                Sample(100 * rank + position, position, length, length // 2)
                for position, length in enumerate(lengths, first)
            ),
            "end" in words,
        )

    def _answer(self, rank: int) -> Event:
        number = self.answered[rank]
        if any(len(of_rank) <= number for of_rank in self.posts):
            raise UsageError("the exchange waits: not all ranks have posted")
        posts = [of_rank[number] for of_rank in self.posts]
        return combine_posts(posts)


def run_script(lines: Iterable[str]) -> str:
    """Returns the scenario with recomputed answers. Comments and blank lines stay."""
    script = Script()
    out: list[str] = []
    for line in lines:
        if line.startswith(">"):
            out.append(line)
            out += [f"    {answer}" for answer in script.execute(line[1:])]
        elif not line.startswith("    "):
            out.append(line)
    return "\n".join(out) + "\n"


def main() -> None:
    """Rewrites every scenario. ``git diff`` shows what has changed."""
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(run_script(path.read_text().splitlines()))


if __name__ == "__main__":
    sys.exit(main())
