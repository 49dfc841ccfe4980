"""A rule in processes of its own, one per rank, so that it cannot harm or block the caller. `rule_process` is the other end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import RuleError, UsageError
from odb_ref.core.offer import Offer

Answer = int | str
"""A target, or a text that says why there is none."""

LIMIT_S: Final = 2.0
"""The processor time for one answer, in seconds. Wall-clock time would fail a correct rule on a busy machine."""
PROCESSES: Final = 8
SEEDS: Final = 64
"""The most hash seeds to try a rule with, within `_SEEDS_S`. Each seed orders a set of strings differently."""
_SEEDS_S: Final = 20.0
_GRACE_S: Final = 3.0
_LOAD_FACTOR: Final = 5
_CHUNK: Final = 2_000
_MOST_LOSSES: Final = 2
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "GROUP_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A rule's description of itself. ``name`` is None if it is not a string."""

    name: str | None
    shown: str
    file: str | None
    constants: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another rule with the same name: a parameter, its other value, and an agreement on which the answers differ."""

    parameter: str
    value: str
    agreement: Offer
    ours: str
    theirs: str


class _GoneError(Exception):
    """The process does not answer. The message says what happened."""


class RuleProcess:
    """One instance of a rule, in the process of ``rank``. A process that ends or hangs is replaced by a new one.

    Raises: UsageError when there is no such rule.
    """

    def __init__(self, name: str, rank: int, limit_s: float = LIMIT_S) -> None:
        self._name = name
        self._rank = rank
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.unvaried: list[str] = []
        """The parameters for which `find_variant` knows no other value, or had no time to try one."""
        self.description = self._start()

    def _start(self) -> Description:
        child_in, self._to_child = os.pipe()
        self._from_child, child_out = os.pipe()
        # Modules are not imported from the current directory, where a random.py would replace the library's.
        path = os.pathsep.join(os.path.abspath(item) for item in sys.path if item not in ("", "."))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONHASHSEED": str(self._rank),
            "WORLD_SIZE": str(PROCESSES),
        }
        environment |= dict.fromkeys(_RANK_VARIABLES, str(self._rank)) | {"HOSTNAME": f"host-{self._rank}"}
        arguments = [self._name, str(self._rank), str(self._limit_s), str(child_in), str(child_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "odb_sim.verify.rule_process", *arguments],
            pass_fds=(child_in, child_out),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)
        self._unread = b""
        try:
            found = json.loads(self._read_line(_LOAD_FACTOR * self._limit_s + _GRACE_S))
        except _GoneError as error:
            self.close()
            raise UsageError(f"rule {self._name!r}, while it is loaded, {error}") from None
        if "error" in found:
            self.close()
            raise UsageError(found["error"])
        return Description(
            name=found["name"], shown=found["shown"], file=found["file"], constants=tuple(found["constants"])
        )

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        os.close(self._to_child)
        os.close(self._from_child)

    def ask(self, agreements: Sequence[Offer], *, is_traced: bool = False) -> list[Answer]:
        """Returns the rule's answers. After one that ends or hangs the process, a new process is asked about the rest."""
        answers: list[Answer] = []
        wires = [agreement.to_wire() for agreement in agreements]
        size, losses = _CHUNK, 0
        while len(answers) < len(wires):
            if losses == _MOST_LOSSES:
                return answers + [f"{answers[-1]}; it is not asked any more"] * (len(wires) - len(answers))
            chunk = wires[len(answers) : len(answers) + size]
            try:
                self._send("trace" if is_traced else "ask", chunk)
                for _ in chunk:
                    answers.append(json.loads(self._read_line(_LOAD_FACTOR * self._limit_s + _GRACE_S)))
            except _GoneError as error:
                if size == 1:
                    answers.append(str(error))
                    losses += 1
                # Answers not yet written are lost, so ask again one by one, until the agreement at fault is found.
                self._restart()
                size = 1
        return answers

    def _restart(self) -> None:
        self.close()
        self._start()

    def list_missed_lines(self) -> list[int]:
        """Returns the lines of the rule's file that no traced agreement reached."""
        try:
            self._send("lines", [])
            found: list[int] = json.loads(self._read_line(self._limit_s + _GRACE_S))
        except _GoneError:
            return []
        return found

    def find_change(self) -> str:
        """Returns a description of how the rule's state differs from before the first question, or an empty text."""
        try:
            self._send("change", [])
            found: str = json.loads(self._read_line(_LOAD_FACTOR * self._limit_s + _GRACE_S))
        except _GoneError:
            self._restart()
            return ""
        return found

    def find_variant(self, agreements: Sequence[Offer]) -> Variant | None:
        """Returns another rule of the same class and name, if there is one."""
        try:
            self._send("variants", [agreement.to_wire() for agreement in agreements])
            found = json.loads(self._read_line(30 * self._limit_s))
        except _GoneError:
            self._restart()
            self.unvaried = ["all"]
            return None
        self.unvaried = found["unvaried"]
        if found["variant"] is None:
            return None
        parameter, value, wire, ours, theirs = found["variant"]
        return Variant(parameter=parameter, value=value, agreement=Offer.from_wire(wire), ours=ours, theirs=theirs)

    def _send(self, kind: str, wires: Sequence[Sequence[int]]) -> None:
        if self._process is None:
            self._start()
        data = memoryview(f"{json.dumps([kind, wires])}\n".encode())
        try:
            while data:
                if not select.select([], [self._to_child], [], self._limit_s + _GRACE_S)[1]:
                    raise _GoneError("does not answer")
                data = data[os.write(self._to_child, data[:4096]) :]
        except BrokenPipeError:
            raise self._explain_end() from None

    def _read_line(self, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if not select.select([self._from_child], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _GoneError(f"does not answer within {limit_s:g} s")
            data = os.read(self._from_child, 1 << 16)
            if not data:
                raise self._explain_end()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _explain_end(self) -> _GoneError:
        status = None if self._process is None else self._process.wait()
        return _GoneError(f"ends its process, with status {status}")


@dataclass(frozen=True, slots=True)
class RemoteRule:
    """The rule of one rank of a world, asked in its own process. Any misbehaviour counts as a breach of its bounds."""

    name: str
    process: RuleProcess

    def compute_target(self, agreement: Offer) -> int:
        """Returns the rule's answer. Raises: RuleError when there is none."""
        (answer,) = self.process.ask([agreement])
        if isinstance(answer, str):
            raise RuleError(f"rule {self.name!r} {answer}")
        return answer


class RuleProcesses:
    """A rule with an instance for each of eight ranks, which further ranks share in turn. Close it after use.

    Raises: UsageError when there is no such rule.
    """

    def __init__(self, name: str, limit_s: float = LIMIT_S) -> None:
        self._name = name
        self._limit_s = limit_s
        self._processes: dict[int, RuleProcess] = {}
        self.seeds = PROCESSES
        """The number of hash seeds tried with the rule."""
        self.get_process(0)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes.values():
            process.close()

    def get_process(self, rank: int) -> RuleProcess:
        """Returns the process of ``rank``, which is started when first needed.

        Raises: UsageError when the rule cannot be loaded in that process.
        """
        rank %= PROCESSES
        if rank not in self._processes:
            self._processes[rank] = RuleProcess(self._name, rank, self._limit_s)
        return self._processes[rank]

    def iterate_further(self) -> Iterator[RuleProcess]:
        """Yields processes with further hash seeds as long as there is time, and ends each after use."""
        deadline = time.monotonic() + _SEEDS_S
        while self.seeds < SEEDS and time.monotonic() < deadline:
            process = RuleProcess(self._name, self.seeds, self._limit_s)
            self.seeds += 1
            try:
                yield process
            finally:
                process.close()

    @property
    def description(self) -> Description:
        """The rule's description of itself on rank 0."""
        return self.get_process(0).description

    @property
    def name(self) -> str:
        """The rule's name, or a stand-in if it is not a string."""
        return self.description.name or "nameless"

    def for_rank(self, rank: int) -> TargetRule:
        """Returns the instance of ``rank``."""
        return RemoteRule(self.name, self.get_process(rank))

    def compute_target(self, agreement: Offer) -> int:
        """Returns the answer of rank 0."""
        return self.for_rank(0).compute_target(agreement)
