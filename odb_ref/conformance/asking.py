"""Puts a case to a function or a program, in one process or on ranks in a virtual world. No question waits for ever.

A program reads each question as a line of JSON and answers with one: ``{"plan": ...}``, ``{"refused": "why"}`` or, for the
online protocol, ``{"answer": ...}``. A rank that plans alone may first answer ``{"exchange": [integers]}``. It then reads
``{"gathered": [[integers], ...]}`` with the messages of all ranks. Spec: R13.11.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain, repeat
from typing import Final, TypeAlias

from odb_ref.conformance.answers import Answer
from odb_ref.conformance.vectors import PLANNED, Case, Json, encode, encode_rank
from odb_ref.core.errors import OdbError

LIMIT_S: Final = 10.0
"""The most seconds for an answer. A rank that waits for one that has ended is noticed at once."""
START_S: Final = 120.0
"""The most seconds for the first answer, because programs have to start and functions to import."""
_LATER_S: Final = 0.001
"""How many seconds after an answer further lines of it may come."""
_END_S: Final = 5.0
"""The most seconds for a program that has closed its output to end."""
_LARGEST: Final = 2**63 - 1

Ask: TypeAlias = Callable[[Case], Answer]
Exchange: TypeAlias = Callable[[Sequence[int]], Sequence[Sequence[int]]]
Planner: TypeAlias = Callable[[Mapping[str, Json]], Json]
"""Answers a question, or raises to refuse it."""
RankPlanner: TypeAlias = Callable[[Mapping[str, Json], Exchange], Json]
"""Answers a question for one rank, given its all-gather, or raises to refuse it."""


class StuckError(OdbError, RuntimeError):
    """An answer did not come in time, or waited for a rank that never came."""


class PlannerEndedError(OdbError, RuntimeError):
    """A planner ended, or gave an unreadable answer."""


class RefusedError(OdbError, RuntimeError):
    """A program refused."""


def make_question(case: Case) -> dict[str, Json]:
    """Returns the question to one process, as JSON. It is a copy, which a planner may change."""
    return deepcopy(encode(case.problem) if case.kind in PLANNED else {"kind": case.kind, **case.record})


def ask_here(planner: Planner, limit_s: float = LIMIT_S) -> Ask:
    """Returns the `Ask` for a planner in one process that knows everything."""
    limits = chain([max(limit_s, START_S)], repeat(limit_s))

    def ask(case: Case) -> Answer:
        (found,) = _run_all([lambda: planner(make_question(case))], next(limits))
        return _join([found]) if isinstance(found, Exception) else Answer(said=found)

    return ask


def _run_all(calls: Sequence[Callable[[], Json]], limit_s: float) -> list[Json | Exception]:
    """Returns what each call returns or raises: StuckError for a call that takes too long, PlannerEndedError for one that ends
    its thread.
    """
    found: list[Json | Exception] = [StuckError(f"no answer in {limit_s:g} s")] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error
        except BaseException as error:  # such as SystemExit, which must not end the judge
            found[place] = PlannerEndedError(f"the planner ended with {error!r}")

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return [*found]


class World:
    """An all-gather between threads, which notices a rank left waiting in it."""

    def __init__(self, ranks: int, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._given: list[list[list[int]]] = [[] for _ in range(ranks)]
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def make_exchange(self, rank: int) -> Exchange:
        """Returns the all-gather of one rank.

        The all-gather raises StuckError when another rank has ended or never comes, or when the messages are not equally long
        lists of 64-bit integers, which no real all-gather would carry.
        """

        def exchange(message: Sequence[int]) -> Sequence[Sequence[int]]:
            with self._changed:
                self._given[rank].append([*message])
                self._changed.notify_all()
                number = len(self._given[rank])
                self._changed.wait_for(lambda: self._is_over(number), self._limit_s)
                if any(len(given) < number for given in self._given):
                    raise StuckError(f"rank {rank} is left in the exchange")
                rows = [given[number - 1] for given in self._given]
            if len({len(row) for row in rows}) > 1 or not all(abs(value) <= _LARGEST for row in rows for value in row):
                raise StuckError(f"rank {rank}: not as many integers of 64 bits from each")
            return [[*row] for row in rows]

        return exchange

    def leave(self, rank: int) -> None:
        """Notes that a rank has ended."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def _is_over(self, number: int) -> bool:
        late = {rank for rank, given in enumerate(self._given) if len(given) < number}
        return not late or bool(late & self._ended)


def ask_ranks(planners: Callable[[int], RankPlanner], limit_s: float = LIMIT_S) -> Ask:
    """Returns the `Ask` for ranks that plan alone, each in a thread. ``planners`` returns the planner of each rank."""
    limits = chain([max(limit_s, START_S)], repeat(limit_s))

    def ask(case: Case) -> Answer:
        problem = case.problem
        size, patience_s = len(problem.lengths), next(limits)
        world = World(size, patience_s)
        chosen = [planners(rank) for rank in range(size)]

        def run(rank: int) -> Json:
            try:
                return chosen[rank](deepcopy(encode_rank(problem, rank)), world.make_exchange(rank))
            finally:
                world.leave(rank)

        return _join(_run_all([partial(run, rank) for rank in range(size)], 2 * patience_s))

    return ask


def _join(found: Sequence[Json | Exception]) -> Answer:
    """Returns the joint answer of all ranks."""
    stuck = [str(item) for item in found if isinstance(item, StuckError)]
    ended = [str(item) for item in found if isinstance(item, PlannerEndedError)]
    errors = [
        item for item in found if isinstance(item, Exception) and not isinstance(item, StuckError | PlannerEndedError)
    ]
    refusals = [str(item) or type(item).__name__ for item in errors]
    if stuck or ended:
        return Answer(refusals=(*refusals, *stuck), is_stuck=bool(stuck), problem="; ".join(ended))
    if refusals:
        is_divided = len(refusals) < len(found) or len(set(refusals)) > 1
        return Answer(refusals=tuple(dict.fromkeys(refusals)), is_divided=is_divided)
    rows = [item if isinstance(item, Mapping) else {"plan": item} for item in found if not isinstance(item, Exception)]
    said: dict[str, Json] = {
        name: [row[name] for row in rows]
        for name in ("plan", "weights", "scales", "restored")
        if all(row.get(name) is not None for row in rows)
    }
    return Answer(said={**said, "report": rows[0].get("report")})


class Program:
    """A planner in its own process, started on the first question, and again after it has hung or ended."""

    def __init__(
        self, command: Sequence[str], seed: str, limit_s: float = LIMIT_S, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = [*command]
        self._environment = {**os.environ, **(environment or {}), "PYTHONHASHSEED": seed}
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_answered = False

    def answer(self, question: Mapping[str, Json], exchange: Exchange | None = None) -> Json:
        """Returns the program's answer. ``exchange`` is the all-gather of a rank.

        Raises: RefusedError, StuckError when it takes too long, PlannerEndedError when it ends or its answer is unreadable.
        """
        try:
            return self._answer(question, exchange)
        except (StuckError, PlannerEndedError):
            self.close()
            raise

    def _answer(self, question: Mapping[str, Json], exchange: Exchange | None) -> Json:
        if self._process is not None:
            self._check_silence()
        self._write(question)
        while True:
            said = self._read()
            if exchange is not None and "exchange" in said:
                self._write({"gathered": exchange(_read_message(said["exchange"]))})
            elif "refused" in said:
                raise RefusedError(str(said["refused"]))
            elif "answer" in said:
                return said["answer"]
            elif "plan" in said:
                return said
            else:
                raise PlannerEndedError(f"neither a plan nor a refusal: {json.dumps(said)[:80]}")

    def _check_silence(self) -> None:
        """Looks for what would be taken for the next answer."""
        with suppress(queue.Empty):
            line = self._lines.get(timeout=_LATER_S)
            if line:
                raise PlannerEndedError(f"printed a line that nobody asked for: {line.strip()[:80]!r}")
            self._lines.put(line)

    def _write(self, message: Mapping[str, Json]) -> None:
        if self._process is None:
            self._start()
        if self._process is None or self._process.stdin is None:
            raise PlannerEndedError("the program has no pipes")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PlannerEndedError(f"the program takes no question: {error}") from error

    def _read(self) -> Mapping[str, Json]:
        limit_s = self._limit_s if self._has_answered else max(self._limit_s, START_S)
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise StuckError(f"no answer in {limit_s:g} s") from None
        self._has_answered = True
        if not line:
            try:
                status = None if self._process is None else self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                raise PlannerEndedError("the program has closed its output") from None
            raise PlannerEndedError(f"the program has ended with status {status}")
        try:
            said: Json = json.loads(line)
        except (ValueError, RecursionError):
            said = line.strip()
        if not isinstance(said, Mapping):
            raise PlannerEndedError(f"an answer is a line with a JSON object, got {json.dumps(said)[:80]}")
        return said

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            env=self._environment,
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines, self._has_answered = lines, False

        def receive() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put("")

        threading.Thread(target=receive, daemon=True).start()

    def close(self) -> None:
        """Ends the program. The next question starts it again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # closing flushes input that the program can no longer take
                        pipe.close()
            self._process = None


class Programs:
    """One program per rank, all with the same command."""

    def __init__(self, command: Sequence[str], seed: str) -> None:
        self._make = partial(Program, command, seed)
        self._programs: dict[int, Program] = {}

    def get(self, rank: int) -> RankPlanner:
        """Returns the planner of a rank."""
        return self._programs.setdefault(rank, self._make()).answer

    def close(self) -> None:
        """Ends all programs."""
        for program in self._programs.values():
            program.close()


def _read_message(value: Json) -> list[int]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        found = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
        if len(found) == len(value):
            return found
    raise PlannerEndedError(f"an exchange is of integers, got {json.dumps(value)[:80]}")
