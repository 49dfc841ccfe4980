"""Faults at random, in real processes: ``python -m tests.soak.faults --runs N --seed S``.

Each run is what its seed expands to; what goes wrong is printed with it. No rank may hang, no sample be lost or repeated, no
wrong rank be blamed, nothing be left behind. Runs mostly wait, so several go on at a time; every process is forked from this
one, or from a fork server that has torch loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once here rather than in every process
import torch.distributed as dist

from tests.soak.case import HARMLESS, MISSABLE, Case, Fault, expand
from tests.soak.rank import SHARD, Found, be_rank
from tests.torch.ranks import find_sessions

LIMIT_S = {"fork": 45.0, "forkserver": 150.0, "spawn": 150.0}
SLOW_S = 25.0
"""What a run may take, where starting a process takes long."""
LINGER_S = 8.0


@dataclass
class Verdict:
    """What was wrong with a run."""

    case: Case
    trouble: list[str] = field(default_factory=list)
    seconds: float = 0.0
    found: list[Found | None] = field(default_factory=list)


def warm_up() -> None:
    """Starts one fork server for all runs, each of which would load torch for seconds, and makes forks cheap."""
    multiprocessing.set_forkserver_preload(["tests.soak.faults"])
    multiprocessing.forkserver.ensure_running()
    # A collection of garbage in a forked process would otherwise write to all that torch holds, and so copy it.
    gc.collect()
    gc.freeze()


def _run_rank(case: Case, rank: int, store: str, pipe: Connection[Any, Any]) -> None:
    os.setsid()
    # The fork server is this process's aunt, not its child: it runs, and need not be asked.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    dist.barrier()
    found = be_rank(case, rank)
    pipe.send_bytes(pickle.dumps(found))
    pipe.close()


def run(case: Case) -> Verdict:
    """Runs and judges one case."""
    verdict, began = Verdict(case), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pipes, pids = {}, {}
        for rank in range(case.ranks):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            pids[rank] = _fork(lambda rank=rank, theirs=theirs: _run_rank(case, rank, f"{folder}/store", theirs))
            theirs.close()
            pipes[rank] = ours
        found = _receive(case, pipes, began + LIMIT_S[case.method], verdict)
        seen = find_sessions(set(pids.values()))
        for rank in case.absent:
            if case.fault is Fault.STOP:
                os.kill(pids[rank], signal.SIGKILL)
        codes = _wait_all(pids, verdict)
        _check_left(set(pids.values()), seen, verdict)
    verdict.found = [found.get(rank) for rank in range(case.ranks)]
    verdict.seconds = time.monotonic() - began
    if not verdict.trouble:
        judge(case, found, codes, verdict.trouble)
    return verdict


def _fork(function: Any) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    finally:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(code)


def _receive(case: Case, pipes: dict[int, Connection[Any, Any]], deadline: float, verdict: Verdict) -> dict[int, Found]:
    found: dict[int, Found] = {}
    waiting = {pipe: rank for rank, pipe in pipes.items() if not (rank in case.absent and case.fault is Fault.STOP)}
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            with contextlib.suppress(EOFError):
                found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
    if waiting:
        verdict.trouble.append(f"ranks {sorted(waiting.values())} hang")
    if case.absent and case.fault is Fault.STOP:
        rank = case.culprit
        if pipes[rank].poll(0):
            with contextlib.suppress(EOFError):
                found[rank] = pickle.loads(pipes[rank].recv_bytes())
    return found


def _wait_all(pids: dict[int, int], verdict: Verdict) -> dict[int, int]:
    """The exit codes."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LINGER_S
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    if not verdict.trouble:
                        verdict.trouble.append(f"rank {rank} has said what came of it, and does not end")
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def _check_left(leaders: set[int], seen: set[int], verdict: Verdict) -> None:
    deadline = time.monotonic() + LINGER_S
    while (left := find_sessions(leaders)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        name = ""
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
            os.kill(pid, signal.SIGKILL)
        verdict.trouble.append(f"process {pid} is left: {name}")
    files = [path.name for path in find_files() if path.name.split("_")[1] in {str(pid) for pid in leaders | seen}]
    if files:
        verdict.trouble.append(f"files are left in /dev/shm: {files}")


def find_files() -> Iterator[Path]:
    """The shared-memory files of torch, whose names hold the number of the process that has made them."""
    return Path("/dev/shm").glob("torch_*_*")


def judge(case: Case, found: dict[int, Found], codes: dict[int, int], trouble: list[str]) -> None:
    """Adds to ``trouble`` what is not as it must be."""
    missing = set(range(case.ranks)) - set(found)
    told = {rank: item for rank, item in found.items() if rank not in case.absent}
    for rank, code in codes.items():
        if code and rank not in case.absent:
            trouble.append(f"rank {rank} ended with {code}")
    if missing - case.absent:
        trouble.append(f"ranks {sorted(missing - case.absent)} have ended without a word")
    for rank, item in told.items():
        for numbers in item.numbers:
            if len(set(numbers)) != len(numbers):
                trouble.append(f"rank {rank} has trained on a sample twice")
            if set(numbers) - set(range(SHARD * rank, SHARD * rank + case.sizes[rank])):
                trouble.append(f"rank {rank} has trained on samples of others")
        if item.left:
            trouble.append(f"rank {rank} has {item.left}")
    if case.fault in HARMLESS or _is_missed(case, found):
        _judge_complete(case, found, trouble)
    else:
        _judge_failed(case, told, trouble)


def _is_missed(case: Case, found: dict[int, Found]) -> bool:
    """True when what was to happen came after the end of the epoch, or never."""
    others = [item for rank, item in found.items() if rank != case.culprit]
    is_silent = not any(item.error for item in others)
    if case.fault not in MISSABLE or not is_silent:
        return False
    culprit = found.get(case.culprit)
    return bool(others) or culprit is None or not culprit.error


def _judge_complete(case: Case, found: dict[int, Found], trouble: list[str]) -> None:
    spared = case.fault in MISSABLE
    for rank, item in found.items():
        if item.error and not (spared and rank == case.culprit):
            trouble.append(f"rank {rank} raised {item.error}: {item.text}")
        if item.error or case.fault is Fault.LEAVE_ALL or (spared and rank == case.culprit):
            continue
        wanted = list(range(SHARD * rank, SHARD * rank + case.sizes[rank]))
        if [sorted(numbers) for numbers in item.numbers] != [wanted] * case.epochs:
            trouble.append(f"rank {rank} has not trained on every sample once: {item.numbers}")
    steps = {item.steps for rank, item in found.items() if not (spared and rank == case.culprit)}
    if len(steps) > 1:
        trouble.append(f"ranks took {steps} steps")


def _judge_failed(case: Case, told: dict[int, Found], trouble: list[str]) -> None:
    # Whoever reads in its own thread raises what its own code raises.
    is_own = case.fault in (Fault.LEAVE, Fault.TRAINER, Fault.INTERRUPT) or (
        case.fault in (Fault.READ, Fault.COLLATE) and not case.workers
    )
    texts = set()
    for rank, item in told.items():
        if rank == case.culprit and is_own:
            continue
        if item.error != "JobError" or item.blamed != case.failing:
            trouble.append(f"rank {rank} raised {item.error or 'nothing'}, blaming {item.blamed}: {item.text}")
        texts.add(item.text)
    if len(texts) > 1:
        trouble.append(f"ranks differ: {sorted(texts)}")
    is_prompt = case.method != "fork" or all(item.seconds < SLOW_S for item in told.values())
    if not is_prompt:
        trouble.append("it took too long")


# Many ------------------------------------------------------------------------------------------------------------------


def run_all(seeds: Iterator[int], jobs: int, is_loud: bool) -> list[Verdict]:
    """Runs them, several at a time."""
    running: dict[int, tuple[int, Connection[Any, Any]]] = {}
    verdicts: list[Verdict] = []
    is_over = False
    while running or not is_over:
        while len(running) < jobs and not is_over:
            seed = next(seeds, None)
            if seed is None:
                is_over = True
                break
            ours, theirs = multiprocessing.Pipe(duplex=False)
            pid = _fork(lambda seed=seed, theirs=theirs: theirs.send_bytes(pickle.dumps(run(expand(seed)))))
            theirs.close()
            running[pid] = seed, ours
        for pid, (seed, pipe) in list(running.items()):
            if pipe.poll(0.02):
                try:
                    verdict = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    verdict = Verdict(expand(seed), ["the run itself has failed"])
                os.waitpid(pid, 0)
                pipe.close()
                del running[pid]
                verdicts.append(verdict)
                if verdict.trouble or is_loud:
                    show(verdict)
    return verdicts


def show(verdict: Verdict) -> None:
    print(f"{'WRONG' if verdict.trouble else 'right'} in {verdict.seconds:.1f} s: {verdict.case}", flush=True)
    for line in verdict.trouble:
        print(f"    {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; each further one is one higher")
    parser.add_argument("--jobs", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--loud", action="store_true", help="print each run, not only those that go wrong")
    options = parser.parse_args()
    warm_up()
    before = set(find_files())
    began = time.monotonic()
    verdicts = run_all(iter(range(options.seed, options.seed + options.runs)), options.jobs, options.loud)
    seconds = time.monotonic() - began
    wrong = [verdict for verdict in verdicts if verdict.trouble]
    counts = Counter(str(verdict.case.fault) for verdict in verdicts)
    print(
        f"{len(verdicts)} runs in {seconds:.0f} s ({len(verdicts) / seconds:.2f} a second), {len(wrong)} wrong: {dict(counts)}"
    )
    left = [path.name for path in set(find_files()) - before if not Path(f"/proc/{path.name.split('_')[1]}").exists()]
    if left:
        print(f"left in /dev/shm: {left}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
