"""Fuzzes the trace checker: mutated traces, one after another in this process, must get a verdict or one line of complaint.

    python -m tests.soak.fuzz_check --runs 1000000 --seed 1

A run fails on any result but a verdict or a `TraceError` with file and line, on memory beyond a bound, on a case that takes
seconds, and on a mutant that holds although its meaning differs from the original (`tests.soak.meaning` lists the parts
without meaning, with reasons). It prints what the seed expanded to: how many mutants were malformed, violated or held.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Mode
from odb_ref.trace.check.job import check_traces, judge
from odb_ref.trace.check.stream import Stream
from odb_ref.trace.check.verdict import Property, Status
from odb_ref.trace.format import TraceError
from odb_ref.trace.origin import Origin, OwnedLot, digest_ids, make_lot, place_lot
from tests.helpers.tamper import Tampered
from tests.helpers.world import (
    Fault,
    World,
    make_config,
    make_configs,
    make_input,
    make_shards,
    run_by_arrival,
    write_trace,
)
from tests.soak.meaning import explain

NAME = "mutant.ndjson"
MEMORY_BYTES = 2**29
"""The memory that the process may grow by. A mutant of some kilobytes must not take more."""
CASE_S = 5.0
"""The seconds that one mutant may take, in processor time, because wall time depends on how busy the machine is."""
REPLAYED = 0.05
"""The share of mutants that are also replayed by the machine."""

VALUES: list[Any] = [
    0, 1, -1, 2, 3, 7, 100, 2**31, 2**53, 2**62, 2**63 - 1, 2**64, -(2**63), 10**12, 10**18, 10**19, 10**40, 1.5, 1e308,
    True, False, None, "", "x", "join", "quota", "complete", "failed", "lost", "\ud800", "\u0000\n", "é" * 100,
    [], {}, [[]], [{}], [0], [[1, 2, 3]], [[0, 0, 0, 0]], {"kind": "finish"}, {"kind": "read", "count": 10**12},
]  # fmt: skip
TEXTS = [
    b"", b"\n", b"null", b"{}", b"[]", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-" + b"9" * 5000, b"[" * 5000,
    b'{"a":' * 5000, b"[" * 400 + b"]" * 400, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b'"\\ud800"', b"0" * 30, b"1" * 20,
]  # fmt: skip
NUMBER = re.compile(rb"-?\d+")


def make_corpus() -> list[bytes]:
    """Returns valid traces of many kinds, and short, since they are checked a million times."""
    shards = [[(i * i + 5 * rank) % 23 + 1 for i in range(9 - 4 * rank)] for rank in range(2)]
    cases: list[tuple[dict[str, Any], tuple[Fault, ...]]] = [
        ({}, ()),
        ({"max_age_rounds": 1, "window_samples": 3}, ()),
        ({"limits": (20, 5)}, ()),
        ({"shared_samples": 14}, ()),
        ({"layout": Layout.PACKED, "order": StepOrder.SAMPLER}, ()),
        ({"sizes": Sizes.POWERS, "order": StepOrder.SHUFFLED, "order_seed": 3}, ()),
        ({"mode": Mode.QUOTA, "quota_samples": 8}, ()),
        ({"mode": Mode.QUOTA}, ()),
        ({}, (Fault("fail", 1, 30),)),
        ({"depth_steps": 1}, (Fault("stop", 1, 30),)),
        ({}, (Fault("kill", 0, 30),)),
        ({"limits": (20, 5)}, (Fault("accept", 1, 10, tokens=20),)),
        ({}, (Fault("urge", 0, 10), Fault("stop", 0, 60))),
        ({"peers": 2, "peer": 1}, ()),
        ({"shared_samples": 14, "update_samples": 4}, ()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        corpus = []
        for settings, faults in cases:
            run_by_arrival(shards, make_configs(2, **settings), seed=3, faults=faults, trace=path)
            corpus.append(path.read_bytes())
        corpus.append(add_what_adapters_write(path))
        corpus.append(make_rest(path, shards[0]))
    return corpus


def add_what_adapters_write(path: Path) -> bytes:
    """Returns the last trace of a run with own shards, with the time of each record and a sample set aside."""
    run_by_arrival([[3, 9, 4, 6], [5, 2]], make_configs(2), seed=3, trace=path, run="r")
    trace = Tampered(path)
    trace.header["workers"] = 2
    for number, record in enumerate(trace.records):
        record["time_s"] = number / 2
    lot, places = trace.header["inputs"][0], [0, 77, 1, 2, 3]
    lot |= {"samples": 5, "digest": digest_ids(places), "order": place_lot(places).digest}
    event = {"kind": "set_aside", "id": 77, "place": 1}
    trace.records.insert(2, {"rank": 0, "event": event, "effects": []})
    return trace.write(path).read_bytes()


def make_rest(path: Path, lengths: list[int]) -> bytes:
    """Returns the trace of the rest of an epoch of one rank, which was stopped after two steps."""
    (shard,) = make_shards([lengths])
    config = make_config(world_size=1)
    (begun,) = World(config, (shard,), stops={0: 2}).run().nodes
    saved = begun.ledger.compute_checkpoint()
    (rest,) = World(config, (shard,), checkpoints=[saved]).run().nodes
    before = OwnedLot(
        rank=0, lot=make_lot(sample.id for step in begun.taken for sample in step.group), steps=2, run="r"
    )
    write_trace(path, rest, Origin(run="s", inputs=(make_input(0, shard),), before=(before,)), saved)
    return path.read_bytes()


# Mutations -----------------------------------------------------------------------------------------------------------


def _find_place(value: Any, rng: random.Random) -> tuple[Any, Any, str]:
    """Returns a container somewhere in ``value``, a key of it, and the keys that lead there."""
    path = []
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        path.append(str(key))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            return value, key, ".".join(path)
        value = inner


def change_value(lines: list[bytes], rng: random.Random) -> str:
    place = rng.randrange(len(lines))
    line = json.loads(lines[place])
    holder, key, path = _find_place(line, rng)
    old = holder[key]
    if rng.random() < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif type(old) is int and rng.random() < 0.5:
        holder[key] = old + rng.choice([-1, 1, 2, -old, old, 10**6])
    else:
        holder[key] = rng.choice(VALUES)
    lines[place] = json.dumps(line).encode() + b"\n"
    kind = (line.get("event") or {}).get("kind", "start") if "event" in line and isinstance(line["event"], dict) else ""
    return re.sub(r"(samples|counts|effects|steps)\.\d+", r"\1.*", f"{'header' if place == 0 else kind} {path}")


def change_number(lines: list[bytes], rng: random.Random) -> str:
    """Replaces a number by another text."""
    place = rng.randrange(len(lines))
    found = list(NUMBER.finditer(lines[place]))
    if found:
        match = rng.choice(found)
        lines[place] = lines[place][: match.start()] + rng.choice(TEXTS) + lines[place][match.end() :]
    return "a number's text"


def change_bytes(lines: list[bytes], rng: random.Random) -> str:
    """Flips, removes, inserts or repeats bytes."""
    place = rng.randrange(len(lines))
    line = lines[place]
    start = rng.randrange(len(line) + 1)
    end = min(len(line), start + rng.randrange(20))
    middle = rng.choice([b"", line[start:end] * 2, rng.choice(TEXTS), rng.randbytes(3)])
    lines[place] = line[:start] + middle + line[end:]
    return "bytes"


def change_order(lines: list[bytes], rng: random.Random) -> str:
    """Loses, doubles, moves or exchanges lines, or gives one to another rank."""
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kinds = [(json.loads(lines[place]).get("event") or {}).get("kind", "start") for place in (one, other)]
    match rng.randrange(5):
        case 0:
            del lines[one]
            return f"order: {kinds[0]} lost"
        case 1:
            lines.insert(other, lines[one])
            return f"order: {kinds[0]} doubled"
        case 2:
            lines.insert(other, lines.pop(one))
        case 3:
            lines[one], lines[other] = lines[other], lines[one]
        case _:
            lines[one] = lines[one].replace(b'{"rank":0', b'{"rank":1')
            return f"order: {kinds[0]} of another rank"
    return "order: moved"


def cut(lines: list[bytes], rng: random.Random) -> str:
    """Ends the file early."""
    del lines[rng.randrange(len(lines)) + 1 :]
    lines[-1] = lines[-1][: rng.randrange(len(lines[-1]) + 1)]
    return "cut"


MUTATIONS: list[tuple[Callable[[list[bytes], random.Random], str], int]] = [
    (change_value, 12), (change_number, 3), (change_bytes, 3), (change_order, 3), (cut, 1),
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Returns a mutant of ``data``, and where it was changed, which is "several" for several changes."""
    lines = data.splitlines(keepends=True)
    places = []
    for _ in range(1 if rng.random() < 0.7 else rng.randrange(2, 5)):
        if not lines:
            break
        (mutation,) = rng.choices([item for item, _ in MUTATIONS], [weight for _, weight in MUTATIONS])
        try:
            places.append(mutation(lines, rng))
        except (ValueError, RecursionError, IndexError, AttributeError, TypeError, KeyError):
            places.append("nothing")  # a line that an earlier mutation has broken
    return b"".join(lines), places[0] if len(places) == 1 else "several"


def damage(data: bytes, rng: random.Random) -> bytes:
    """Returns a compressed file with bytes changed or cut off."""
    packed = bytearray(gzip.compress(data, 1))
    for _ in range(rng.randrange(1, 4)):
        packed[rng.randrange(len(packed))] = rng.randrange(256)
    return bytes(packed[: rng.randrange(len(packed))] if rng.random() < 0.3 else packed)


# One case ------------------------------------------------------------------------------------------------------------


def check(data: bytes, *, is_packed: bool = False, path: Path | None = None) -> str:
    """Returns the checker's result for a file: "malformed", "violated" or "holds". Anything else is raised.

    With a ``path`` the file is written there, and the machine replays it too.
    """
    file = gzip.GzipFile(fileobj=io.BytesIO(data)) if is_packed else io.BytesIO(data)
    try:
        if path is None:
            verdict = judge([Stream(NAME, file)])
        else:
            path.write_bytes(data)
            verdict = check_traces([path], is_replayed=True)
    except TraceError as error:
        text = str(error)
        if not text.startswith(f"{path or NAME}:") or "\n" in text or len(text) > 2000:
            raise AssertionError(f"not a line that names the file: {text[:300]!r}") from error
        return "malformed"
    "\n".join(map(str, verdict.violations)).encode(errors="backslashreplace")
    return "holds" if verdict.is_ok else "violated"


POSSIBLE = "the machine, asked, would have done the same: another run, and a true one"


def is_possible(data: bytes, path: Path) -> bool:
    """Returns whether the machine, given the events, answers with the effects."""
    path.write_bytes(data)
    verdict = check_traces([path], is_replayed=True)
    return verdict.is_ok and all(job.get_status(Property.REPLAY) is Status.HOLDS for job in verdict.jobs)


def compute_memory_bytes() -> int:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(runs: int, seed: int, first: int = 0) -> tuple[Counter[str], Counter[str]]:
    """Checks ``runs`` mutants, from number ``first`` on. Returns the results, and the reasons why changes in holding ones have
    no meaning.

    Raises: AssertionError, with the seed and the number of the mutant, when the checker fails.
    """
    corpus = make_corpus()
    results: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    most = compute_memory_bytes() + MEMORY_BYTES
    path = Path(tempfile.mkdtemp()) / NAME
    for number in range(first, first + runs):
        rng = random.Random(f"{seed}/{number}")
        original = rng.choice(corpus)
        data, place = mutate(original, rng)
        is_packed = rng.random() < 0.02
        data = damage(data, rng) if is_packed else data
        started_s = time.process_time()
        try:
            result = check(data, is_packed=is_packed, path=path if not is_packed and rng.random() < REPLAYED else None)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, mutant {number} ({place}): {type(error).__name__}: {error}") from error
        if time.process_time() - started_s > CASE_S:
            raise AssertionError(f"seed {seed}, mutant {number} ({place}): took more than {CASE_S} s")
        if compute_memory_bytes() > most:
            raise AssertionError(f"seed {seed}, mutant {number} ({place}): more than {MEMORY_BYTES} bytes")
        results[result] += 1
        if result == "holds" and not is_packed:
            try:
                unseen.update(explain(original, data))
            except ValueError as error:
                if not is_possible(data, path):
                    raise AssertionError(f"seed {seed}, mutant {number} ({place}): held, and {error}") from error
                unseen[POSSIBLE] += 1
    shutil.rmtree(path.parent)
    return results, unseen


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="the number of the first mutant, to go on or to see one again"
    )
    options = parser.parse_args()
    started_s = time.perf_counter()
    results, unseen = fuzz(options.runs, options.seed, options.first)
    seconds = time.perf_counter() - started_s
    told = ", ".join(f"{count} {result}" for result, count in results.most_common())
    print(f"{options.runs} mutants, seed {options.seed}: {told}; {seconds:.0f} s, {compute_memory_bytes() >> 20} MiB")
    print("Held, and nothing that means something was changed:")
    for reason, count in unseen.most_common():
        print(f"{count:>8}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
