"""Batches of fifty settings stay the same, byte for byte. Checks: REPLAY.

A setting is a function of its seed. ``batch_digests.json`` has, by seed, a digest for each rank of everything that its trainer
received, and a digest of the decisions in its trace. A change that must not affect batches must leave that file alone. One that
does must rewrite it: ``python -m tests.torch.test_batch_digests``.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from odb_ref.torch import ODBDataLoader
from tests.helpers.options import nested
from tests.torch.data import Augmented, AugmentedStream, collate, draw, make_sample
from tests.torch.ranks import get_values, run_ranks

KEPT: Final = Path(__file__).with_name("batch_digests.json")
SEEDS: Final = range(50)
WORLDS: Final = (1, 2, 3, 4)
SHARDS: Final = ("auto", "shared", "given", "sampler", "stream")


def collate_noisy(samples: list[dict[str, Any]]) -> dict[str, Any]:
    noise = torch.tensor([sample["drawn"] for sample in samples], dtype=torch.float64)
    return collate(samples) | {"noise": noise, "drawn": draw()}


def collate_packed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate_noisy(samples)
    for name in ("input_ids", "labels"):
        batch[name] = torch.cat([sample[name] for sample in samples])[None]
    return batch


def count_costs(sample: dict[str, Any]) -> tuple[int, ...]:
    return sample["number"] % 3, len(sample["input_ids"]) ** 2


def cost_squared(tokens: int) -> int:
    return tokens + tokens * tokens // 8


def shrink(step: int, current: int) -> int:
    return max(35, 70 - step)


def make_setting(seed: int) -> dict[str, Any]:
    """Returns what the seed draws, by name: ``options`` are the loader's, the rest is the test's."""
    choose = random.Random(seed)
    layout = choose.choice(["padded", "packed"])
    shard = SHARDS[seed % len(SHARDS)]
    mode = choose.choice(["join", "join", "quota"])
    order = choose.choice(["shuffled", "sampler"])
    workers = choose.choice([0, 0, 2])
    k = choose.choice([1, 1, 3])
    options: dict[str, Any] = {
        "token_budget": choose.choice([40, 60, 90]),
        "layout": layout,
        "order": order,
        "mode": mode,
        "window": choose.choice([4, 9, 16, 40]),
        "depth": choose.choice([1, 4, 8]),
        "cost": choose.choice(["tokens", "attention/16", cost_squared]),
        "policy": choose.choice(["odb", "odb", "paper"]),
        "max_age_rounds": choose.choice([1, 4]),
        "ramp_rounds": choose.choice([0, 3]),
        "seed": choose.choice([0, 7, 2**40]),
        "num_workers": workers,
        "loss_scaling": choose.choice(["exact", "samples", "none"]),
        "loss_reduction": choose.choice(["mean", "sum"]),
        "causal_shift": False,
        "accumulation_steps": k,
        "trainer_divides_loss": choose.choice([False, True]),
        "transport": choose.choice(["reduce", "gather"]),
        # One of three, as when the digests were taken: a choice among two would draw other numbers.
        "on_idle": choose.choice(["replay", "none"] if k > 1 else ["replay", "none", "none"]),
        "idle_sample": make_sample(0) | {"drawn": [0.0, 0.0, 0.0]},
    }
    if shard in ("auto", "shared"):
        options |= {"shuffle": choose.choice([False, True, True]), "shard": shard}
    if mode == "quota":
        options["quota"] = choose.choice([25, 60, 1000])
    if layout == "padded" and order == "shuffled":
        options["sizes"] = choose.choice(["any", "powers", "threes", "even"])
    if choose.random() < 0.25:
        options |= {"cost_fn": count_costs, "limits": (9, 900)}
    if choose.random() < 0.25:
        options["budget_schedule"] = shrink
    if shard != "shared" and choose.random() < 0.25:
        options["window_bytes"] = 4000
    bad: tuple[int, ...] = ()
    if shard != "stream" and choose.random() < 0.3:
        options |= {"on_bad_sample": "quarantine", "max_bad_samples": 5}
        bad = (3, 11)
    if workers and choose.random() < 0.3:
        options |= {"persistent_workers": True, "prefetch_factor": 3}
    return {
        "world_size": WORLDS[choose.randrange(4)],
        "shard": shard,
        "counts": [choose.choice([0, 7, 23, 40]) + 20 * (rank == 0) for rank in range(4)],
        "bad": bad,
        "resume_at": choose.choice([None, 2, 5]),
        "options": options,
    }


def make_loader(setting: dict[str, Any], rank: int, **more: Any) -> Any:
    options = setting["options"] | more
    options["collate_fn"] = collate_packed if options["layout"] == "packed" else collate_noisy
    count, start = setting["counts"][rank], 100 * rank
    match setting["shard"]:
        case "auto" | "shared":
            data: Any = Augmented(0, sum(setting["counts"][: setting["world_size"]]), bad=setting["bad"], fault="raise")
        case "given":
            data = Augmented(start, count, bad=setting["bad"], fault="raise")
            options["shard"] = "given"
        case "sampler":
            data = Augmented(0, 400, bad=[start + index for index in setting["bad"]], fault="raise")
            options["sampler"] = range(start + count - 1, start - 1, -1)
        case _:
            data = AugmentedStream(start, count)
    return ODBDataLoader(data, **nested(**options))


def describe(batch: Any) -> Any:
    """Returns a batch for JSON, with the type and the bytes of each tensor."""
    if isinstance(batch, torch.Tensor):
        return [str(batch.dtype), list(batch.shape), batch.contiguous().numpy().tobytes().hex()]
    return {name: describe(value) for name, value in batch.items()} if isinstance(batch, dict) else batch


def describe_step(batch: Any, info: Any) -> Any:
    counted = ("samples", "tokens", "supervised", "costs")
    # The names of window fields are those in use when the digests were made.
    names = [
        "step", "round", "epoch", "loss_scale", "is_idle", "is_last", "is_window_end", "window_supervised",
        "padded_tokens", "emitted_samples", "progress", "world_size",
        *(f"{who}_{what}" for who in ("local", "global") for what in counted),
    ]  # fmt: skip
    return [describe(batch), {name: getattr(info, name.replace("window_", "update_")) for name in names}]


def describe_trace(path: Path) -> Iterator[Any]:
    """Yields the decisions in order: the steps taken, with round, samples and counts. It leaves out times, earlier events, and
    how far a rank had planned when its consumer left, because that depends on time.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    taken = sum((record["event"] or {}).get("kind") == "step_taken" for record in records)
    effects = [effect for record in records for effect in record["effects"] if effect["kind"] == "collate"]
    steps = [[effect["round"], step] for effect in effects for step in effect["steps"]]
    first = steps[0][1]["number"] if steps else 0
    yield from (entry for entry in steps if entry[1]["number"] < first + taken)


def compute_digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def read(rank: int, setting: dict[str, Any], folder: Path) -> list[Any]:
    """Returns everything that this rank receives in two epochs. The first may be saved and resumed."""
    steps: list[Any] = []
    trace = {"trace": folder / "trace-{rank}-{epoch}"}
    loader = make_loader(setting, rank, **trace)
    try:
        if setting["resume_at"] is not None:
            iterator = loader.steps()
            for batch, info in iterator:
                steps.append(describe_step(batch, info))
                if info.step + 1 >= setting["resume_at"]:
                    break
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            loader = make_loader(setting, rank, **trace)
            loader.load_state_dict(state)
        for _ in range(2):
            steps += [describe_step(batch, info) for batch, info in loader.steps()]
    finally:
        loader.close()
    return steps


def read_all(rank: int, seeds: list[int], folder: str) -> dict[str, list[Any]]:
    """Returns by seed the number of this rank's steps, their digest, and that of its traces."""
    found = {}
    for seed in seeds:
        place = Path(folder) / str(seed)
        place.mkdir(exist_ok=True)
        steps = read(rank, make_setting(seed), place)
        traces = [list(describe_trace(path)) for path in sorted(place.glob(f"trace-{rank}-*"))]
        found[str(seed)] = [len(steps), compute_digest(steps), compute_digest(traces)]
    return found


def compute_digests(world_size: int, seeds: list[int]) -> dict[str, Any]:
    """Returns by seed the result of each rank's `read_all`. One set of processes reads all seeds."""
    with tempfile.TemporaryDirectory() as folder:
        values = get_values(run_ranks(world_size, read_all, seeds, folder, timeout_s=200))
    return {str(seed): [value[str(seed)] for value in values] for seed in seeds}


def list_seeds(world_size: int) -> list[int]:
    return [seed for seed in SEEDS if make_setting(seed)["world_size"] == world_size]


@pytest.mark.filterwarnings("ignore::odb_ref.torch.BadSampleWarning")
@pytest.mark.parametrize(
    ("world_size", "part"),
    [
        (2, slice(5)),
        # A slice runs the first and the last of these.
        *(pytest.param(world_size, slice(None), marks=pytest.mark.slow) for world_size in (4, 1, 3)),
        pytest.param(2, slice(5, None), marks=pytest.mark.slow),
    ],
)
def test_batches_are_what_they_were(world_size: int, part: slice) -> None:
    """Spec: R12. Checks: REPLAY."""
    seeds = list_seeds(world_size)[part]
    kept = json.loads(KEPT.read_text())
    found = compute_digests(world_size, seeds)
    differ = {seed: (make_setting(int(seed)), kept[seed], found[seed]) for seed in found if found[seed] != kept[seed]}
    assert not differ, differ


def test_the_settings_hold_every_choice() -> None:
    """Otherwise the digests would not cover what is left out."""
    settings = [make_setting(seed) for seed in SEEDS]
    assert {setting["world_size"] for setting in settings} == set(WORLDS)
    assert {setting["shard"] for setting in settings} == set(SHARDS)
    wanted = {
        "layout": {"padded", "packed"},
        "order": {"shuffled", "sampler"},
        "mode": {"join", "quota"},
        "sizes": {"any", "powers", "threes", "even"},
        "num_workers": {0, 2},
        "on_idle": {"replay", "none"},
        "loss_scaling": {"exact", "samples", "none"},
        "policy": {"odb", "paper"},
        "transport": {"reduce", "gather"},
    }
    for name, values in wanted.items():
        assert {setting["options"].get(name) for setting in settings} >= values, name
    for name in ("cost_fn", "budget_schedule", "window_bytes", "on_bad_sample", "persistent_workers"):
        assert any(name in setting["options"] for setting in settings), name
    assert {setting["shard"] for setting in settings if setting["resume_at"]} == set(SHARDS)


def write() -> None:
    """Rewrites the digests, with a line for each seed."""
    found: dict[str, Any] = {}
    for world_size in WORLDS:
        found |= compute_digests(world_size, list_seeds(world_size))
    lines = ",\n".join(f'"{seed}": {json.dumps(found[str(seed)])}' for seed in SEEDS)
    KEPT.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    write()
