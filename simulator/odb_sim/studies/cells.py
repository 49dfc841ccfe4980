"""Studies made of cells. A cell is a simulation, which is repeated if its process dies, and kept, so that a study can resume.

A `Runner` takes any `concurrent.futures.Executor`: the processes of this machine, `Local` for this process alone, a Dask or
Ray cluster (`odb_sim.studies.clusters`), and others with that interface. A cell whose worker dies is run once more. One that
fails twice is a `CellFailure`, and the others continue. With a `Store` each answer is written to a folder as it comes, and the
same command finds it there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from odb_ref import __version__
from odb_ref.core.errors import OdbError, UsageError
from odb_sim.engine.cautions import About, Caution
from odb_sim.engine.metrics import Summary
from odb_sim.inputs.files import naming
from odb_sim.inputs.lengths import Integers
from odb_sim.inputs.rules import digest_rule
from odb_sim.studies.processes import Local, WorkerDied

FILE: Final = "cells.ndjson"
_TRIES: Final = 2
_LOOK_EVERY_S: Final = 2.0
_PARTS: Final = {"odb_ref": ("core", "arrays"), "odb_sim": ("inputs", "engine", "baselines", "studies")}
"""The folders whose code decides the results of a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The settings in which the simulations of a study differ."""

    policy: str
    ranks: int
    budget_tokens: int
    window_samples: int
    depth_steps: int = 8
    ramp_rounds: int | None = None
    """None means the study's setting, here and in the next three fields."""
    max_age_rounds: int | None = None
    padding_share: int | None = None
    cost: str | None = None
    """The name of the cost."""
    samples: int | None = None
    """The number of samples drawn for this simulation. None means the samples of the study."""


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """The result of a point."""

    point: Point
    summary: Summary
    first_step_s: float
    """The simulated seconds from the start until a rank has its first step, as a mean over ranks."""
    cautions: tuple[Caution, ...] = ()

    @property
    def rate(self) -> float:
        """The tokens per second over the epoch."""
        return self.summary.tokens_per_s

    def to_json(self) -> dict[str, str | int | float | None]:
        """Returns the figures without the one that depends on the machine, so that the same grid gives the same bytes."""
        figures = self.summary.to_json() | {"first_step_s": self.first_step_s}
        del figures["wall_time_s"]
        return figures


@dataclass(frozen=True, slots=True)
class CellFailure:
    """A cell without an answer."""

    point: Point
    cause: str

    def __str__(self) -> str:
        point = self.point
        return (
            f"policy {point.policy}, {point.ranks:,} ranks, budget {point.budget_tokens:,}, window "
            f"{point.window_samples:,}, depth {point.depth_steps}: {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. The executor decides where ``simulate`` is called. ``key`` identifies everything it depends on."""

    point: Point
    key: str
    simulate: Callable[[], CellAnswer]


@cache
def compute_program_digest() -> str:
    """Returns a digest of the program itself, whose code may change while its version does not."""
    digest = sha256(__version__.encode())
    for package in ("odb_ref", "odb_sim"):
        folder = resources.files(package)
        for part in _PARTS[package]:
            for path in sorted(Path(str(folder / part)).rglob("*.py")):
                digest.update(f"{path.relative_to(str(folder))}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def compute_key(arrays: Sequence[Integers], policies: Iterable[str], *settings: object) -> str:
    """Returns a name for a simulation of these data with these settings by this program. It includes the contents of a user's
    rule file, which may change too.
    """
    rules = [digest_rule(policy) for policy in policies]
    digest = sha256(repr((compute_program_digest(), rules, settings)).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Store:
    """The answers in a folder, which is created if needed. Close it after use.

    Raises: UsageError when the folder cannot be written, or its file is something else.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._path = None if folder is None else Path(folder) / FILE
        self._answers: dict[str, CellAnswer] = {}
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be written: {error.strerror}") from error
        self._file.seek(0)
        text = self._file.read()
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                answer = entry["answer"]
                self._answers[entry["key"]] = CellAnswer(
                    point=Point(**answer["point"]),
                    summary=Summary(**answer["summary"]),
                    first_step_s=answer["first_step_s"],
                    cautions=tuple(Caution(About(item["about"]), item["text"]) for item in answer["cautions"]),
                )
            except (ValueError, KeyError, TypeError):
                # The last line may be cut off. Any other is not ours, or of another version, and its cell is run again.
                if number == 1 and text.count("\n") > 1:
                    raise UsageError(f"{self._path}:1: holds no answers of simulations: pass another --out") from None
        if text and not text.endswith("\n"):
            self._file.write("\n")

    @property
    def is_lasting(self) -> bool:
        """True when answers are written to a folder."""
        return self._path is not None

    def find(self, key: str) -> CellAnswer | None:
        """Returns the answer of a cell that was run before, or None."""
        return self._answers.get(key)

    def add(self, key: str, answer: CellAnswer) -> None:
        """Keeps an answer."""
        self._answers[key] = answer
        if self._path is not None:
            with naming(self._path):
                self._file.write(json.dumps({"key": key, "answer": asdict(answer)}) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._path is not None:
            self._file.close()


class ClusterGone(UsageError):
    """No worker is left that could simulate."""


class WatchedExecutor(Executor):
    """An executor with remote workers, which it may lose. A `Runner` checks it while it waits."""

    def check(self) -> None:
        """Checks that there are workers. Raises: UsageError when there are none."""


class Runner:
    """Runs the simulations of a study: knows where, keeps their answers, and counts them.

    ``on_done`` gets the number of simulations done, those that were kept before among them.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        store: Store | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> None:
        self.executor = executor or Local()
        self._store = store or Store(None)
        self._on_done = on_done
        self._done = 0

    def note(self) -> None:
        """Counts one more simulation as done."""
        self._done += 1
        if self._on_done is not None:
            self._on_done(self._done)

    def run(self, cells: Sequence[Cell]) -> list[CellAnswer | CellFailure]:
        """Returns the answers or failures of all cells, in order.

        Raises: the error of a simulation that refuses its settings or breaks a property. Cells not yet begun are then given up.
        """
        answers: dict[int, CellAnswer | CellFailure] = {}
        for place, cell in enumerate(cells):
            if (answer := self._store.find(cell.key)) is not None:
                answers[place] = answer
        self._done += len(answers)
        todo = deque(place for place in range(len(cells)) if place not in answers)
        tries = dict.fromkeys(todo, 0)
        again = deque[int]()
        """The cells whose worker died. Each is run alone, because a cluster fails all cells that a worker had when it died."""
        waiting: dict[Future[CellAnswer], int] = {}
        try:
            while todo or waiting or again:
                if not todo and not waiting:
                    todo.append(again.popleft())
                if todo:
                    place = todo.popleft()
                    tries[place] += 1
                    waiting[self.executor.submit(cells[place].simulate)] = place
                # Answers are kept at once, even if each cell is simulated as it is submitted.
                watched = self.executor if isinstance(self.executor, WatchedExecutor) else None
                pause_s = 0 if todo else None if watched is None else _LOOK_EVERY_S
                done = wait(waiting, timeout=pause_s, return_when=FIRST_COMPLETED).done
                if watched is not None and not done and not todo:
                    watched.check()
                for future in done:
                    place = waiting.pop(future)
                    try:
                        answers[place] = future.result()
                        self._store.add(cells[place].key, future.result())
                    except Exception as error:
                        if isinstance(error, OdbError | OSError) and not isinstance(error, WorkerDied):
                            raise
                        # The process is gone, or a cluster reports so with an error of its own.
                        if watched is not None:
                            watched.check()
                        if tries[place] < _TRIES:
                            again.append(place)
                            continue
                        answers[place] = CellFailure(
                            cells[place].point, " ".join(str(error).split())[:200] or repr(error)
                        )
                    self.note()
        except ClusterGone as error:
            kept = (
                "are kept, and the same command continues from there"
                if self._store.is_lasting
                else "are lost: pass --out FOLDER to keep them"
            )
            raise UsageError(f"--executor {error}; {len(answers)} of {len(cells)} simulations {kept}") from error
        finally:
            for future in waiting:
                with suppress(Exception):  # a cluster that is gone has nothing to cancel
                    future.cancel()
        return [answers[place] for place in range(len(cells))]


def split_failed(answers: Sequence[CellAnswer | CellFailure]) -> tuple[list[CellAnswer], list[CellFailure]]:
    """Returns the answers and the failures separately. Raises: UsageError when there is no answer at all."""
    found = [answer for answer in answers if isinstance(answer, CellAnswer)]
    failed = [answer for answer in answers if isinstance(answer, CellFailure)]
    if failed and not found:
        raise UsageError(f"every simulation has failed, the first: {failed[0]}")
    return found, failed
