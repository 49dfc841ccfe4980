"""Presets: published facts about models, what others' runs measured, and a job recomputed by hand."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from math import ceil, log
from pathlib import Path

import numpy as np
import pytest
from odb_sim.inputs.jobs import TrainingJob, build_job
from odb_sim.inputs.presets import (
    Constant,
    list_names,
    load_constants,
    load_model,
    load_software,
    load_strategy,
    read_presets,
)
from odb_sim.studies.bands import Bands

from odb_ref.core.errors import UsageError

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""As published. Those of Qwen include biases and norms of heads, which cost nothing."""
MPT = {"760m": (1536, 24), "1b": (2048, 24), "3b": (2560, 32), "7b": (4096, 32), "13b": (5120, 40)}
MPT |= {"30b": (7168, 48), "70b": (8192, 80)}
FITTED = ("1b", "7b")
MEASURED = Path(__file__).parent / "measured" / "llm_foundry.csv"


@pytest.mark.parametrize("name", list_names("model"))
def test_a_model_has_as_many_parameters_as_is_published(name: str) -> None:
    model = load_model(name)
    if "llama" in name or "mistral" in name:
        assert model.parameters == PARAMETERS[name]
    assert model.parameters == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert model.active <= model.parameters


def test_a_mixture_meets_a_few_of_its_experts() -> None:
    assert load_model("qwen3-30b-a3b").active == pytest.approx(3.0e9, rel=0.03)


def test_the_memory_of_a_mixture_by_hand() -> None:
    """All experts of a layer are gathered, and each token is held once for each expert that it uses."""
    job = build_job(gpu="h100", model="qwen3-30b-a3b", strategy="fsdp", gpus=64)
    memory = job.compute_memory(job.values)
    layer = 2 * 2048 * 128 * (32 + 4) + 128 * 3 * 2048 * 768 + 2 * 2048
    assert memory.states == pytest.approx(16 * job.model.parameters / 64 + 6 * layer)
    kept = 2 * (2 * 2048 + 8 * 2 * 2048 + 3 * 4096 + 3 * 512 + 8 * 4 * 768) + 8 * 2048
    assert memory.token == pytest.approx(48 * kept + 12 * 151_936)


def test_experts_take_longer_than_as_many_weights_that_all_tokens_meet() -> None:
    job = build_job(gpu="h100", model="qwen3-30b-a3b", strategy="fsdp", gpus=64)
    shares = [job.price(job.values | {"expert_share": share}).gpu.per_token_s for share in (0.25, 0.5, 1.0)]
    met = 6 * 48 * 8 * 3 * 2048 * 768 / (989.4e12 * 0.52)
    assert [less - shares[-1] for less in shares] == pytest.approx([3 * met, met, 0.0])


def test_every_constant_has_a_source_and_lies_in_its_range() -> None:
    sections = [load_constants(kind, name) for kind in ("gpu", "precision") for name in list_names(kind)]
    for constants in (*sections, load_software()):
        for name, constant in constants.items():
            assert constant.source, name
            assert constant.low <= constant.value <= constant.high, name
            assert constant.value > 0, name
            assert (name == "price_usd") == bool(constant.date), name
    for kind in ("model", "strategy"):
        assert all(section["source"] for section in read_presets()[kind].values())


def test_the_cost_of_llama_3_8b_by_hand() -> None:
    job = build_job(gpu="h100", model="llama-3-8b", strategy="fsdp", gpus=64)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # queries and output, keys and values, three matrices
    active = 32 * layer + 128_256 * 4096
    costs, peak = job.price(job.values), 989.4e12
    kept = 2 * (4 * 4096 + 3 * 4096 + 3 * 1024) + 8 * 4096 + 2 * 4 * 14336
    held = 32 * kept + 12 * 128_256
    assert costs.gpu.per_token_s == pytest.approx(6 * active / (peak * 0.52) + 4 * held / 3.35e12)
    assert costs.gpu.per_token2_s == pytest.approx(6 * 32 * 4096 / (peak * 0.20))
    # Eight GPUs of a node send 50 GB/s each to other nodes, in a ring: 400 GB/s, of which three quarters; three times 16 GB.
    sent = 3 * (2 * 8_030_261_248 / (0.75 * 400e9) * 63 / 64 + 32 * 6 * 2e-5)
    assert costs.gpu.floor_s == pytest.approx(sent)
    assert costs.gpu.fixed_s == pytest.approx(0.15 * sent)
    assert costs.collective.fixed_s == pytest.approx(2 * 16 * 8_030_261_248 / 64 / 3.35e12)
    memory = job.compute_memory(job.values)
    assert memory.states == pytest.approx(16 * 8_030_261_248 / 64 + 6 * 128_256 * 4096)
    assert memory.token == pytest.approx(held)
    assert memory.tokens == int((0.92 * 84.9e9 - memory.states) / memory.token)


def test_what_is_sharded_and_sent_is_the_strategy_s() -> None:
    jobs = {
        name: build_job(gpu="h100", model="qwen2.5-0.5b", strategy=name, gpus=16) for name in list_names("strategy")
    }
    costs = {name: job.price(job.values | {"launch_s": 0.0}) for name, job in jobs.items()}
    states = [jobs[name].compute_memory(jobs[name].values).states for name in ("ddp", "zero-1", "zero-2")]
    assert all(more > less for more, less in pairwise(states))
    alone = build_job(gpu="h100", model="qwen2.5-0.5b", strategy="ddp", gpus=1)
    held = alone.compute_memory(alone.values).states
    assert states[0] == pytest.approx(held * 18 / 16), "DDP's buckets, which one rank has not"
    assert [costs[name].collective.each_step for name in ("ddp", "zero-1", "zero-2", "fsdp")] == [
        False,
        False,
        True,
        True,
    ]
    assert costs["ddp"].gpu.floor_s == 0
    assert costs["fsdp"].gpu.floor_s == pytest.approx(3 * costs["zero-2"].gpu.floor_s)
    assert costs["fsdp"].collective.transfer_s == 0
    assert costs["ddp"].collective.transfer_s == pytest.approx(2 * costs["zero-2"].collective.transfer_s)


def test_gradients_are_hidden_as_far_as_the_backward_pass_lasts() -> None:
    """On a slow network DDP sends longer than it computes, and no more slowly for it than sharded ranks that send as much."""
    job = build_job(gpu="rtx4090", model="qwen2.5-0.5b", strategy="ddp", gpus=64)
    once_s = 2 * job.model.parameters / (0.75 * 16e9)
    for computed_s in (0.01, 0.1, 1.0):
        took_s = job.price(job.values).collective.compute_end_s(np.array([computed_s]), np.array([computed_s]), 64)
        open_s = job.price(job.values).collective.compute_s(64)
        left_s = max(0.0, 0.85 * 2 * once_s * 63 / 64 - 2 / 3 * computed_s)
        assert took_s == pytest.approx(computed_s + open_s + left_s)


def test_a_small_micro_batch_takes_as_long_as_its_kernels_take_to_launch() -> None:
    """Medians of `python -m tests.bench --only gpu` on an H200: rows, longest sample and seconds."""
    job = build_job(gpu="h200", model="qwen2.5-0.5b", strategy="ddp", gpus=1)
    launch_s = 3e-3
    assert launch_s < job.constants["launch_s"].high
    gpu = job.price(job.values | {"launch_s": launch_s}).gpu
    for rows, longest, seconds in ((2, 256, 0.0761), (4, 512, 0.0699), (4, 1024, 0.0739)):
        assert gpu.compute_steps_s(np.array(rows * longest), np.array(rows * longest**2)) == pytest.approx(
            seconds, rel=0.1
        )


@pytest.mark.parametrize(
    ("gpu", "model", "gpus", "rows", "length", "again", "measured"),
    [
        ("a100", "llama-2-13b", 64, 2, 4096, False, 2162),
        ("a100", "llama-2-70b", 64, 2, 4096, True, 353),
        ("a100", "llama-3-70b", 64, 1, 8192, True, 331),
        ("h100", "qwen3-30b-a3b", 8, 4, 4096, False, 12_040),
    ],
)
def test_throughputs_that_others_published_are_met(
    gpu: str, model: str, gpus: int, rows: int, length: int, again: bool, measured: float
) -> None:
    """Tokens a second of a GPU, by torchtitan's docs/performance.md (2024) and NeMo AutoModel's (with expert parallelism)."""
    constants = load_constants("gpu", gpu) | load_constants("precision", "bf16") | load_software()
    found, strategy = load_model(model), load_strategy("fsdp")
    job = TrainingJob(model=found, strategy=strategy, gpus=gpus, recomputes=again, constants=constants)
    row = {"accumulation": "1", "batch": str(rows), "length": str(length)}
    assert rows * length / predict(job, row, job.values) == pytest.approx(measured, rel=0.18)


def test_computing_again_takes_longer_and_holds_more() -> None:
    kept, again = (
        build_job(gpu="a100", model="llama-3-8b", strategy="fsdp", gpus=8, recomputes=recomputes)
        for recomputes in (False, True)
    )
    assert again.price(again.values).gpu.per_token_s > kept.price(kept.values).gpu.per_token_s
    assert again.compute_memory(again.values).tokens > 3 * kept.compute_memory(kept.values).tokens
    low, high = again.compute_token_range()
    assert low < again.compute_memory(again.values).tokens < high


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu": "h101"}, "--gpu h101: unknown; choose from h100"),
        ({"model": "llama-3-9b"}, "did you mean llama-3-"),
        ({"strategy": "dpp"}, "did you mean ddp?"),
        ({"gpus": 0}, "--gpus"),
        ({"price_usd": -1.0}, "--price"),
        ({"strategy": "ddp"}, "needs 145 GB of each of 64 GPUs"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], said: str) -> None:
    asked: dict[str, object] = {"gpu": "h100", "model": "llama-3-8b", "strategy": "fsdp", "gpus": 64}
    with pytest.raises(UsageError) as error:
        build_job(**(asked | given))  # type: ignore[arg-type]
    assert said in str(error.value)


def test_a_config_json_is_read_whatever_it_calls_its_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    )
    assert load_model(str(tmp_path)).parameters == pytest.approx(124e6, rel=0.02)
    preset = dict(read_presets()["model"]["qwen3-8b"])
    (tmp_path / "vl.json").write_text(json.dumps({"vision_config": {}, "text_config": preset}))
    assert load_model(str(tmp_path / "vl.json")).parameters == load_model("qwen3-8b").parameters
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "vocab_size": 151_936}
    mixture = sizes | experts | {"intermediate_size": 18_944, "shared_expert_intermediate_size": 20_480}
    for config, known in ((mixture, (57.4, 14)), (mixture | {"num_experts": 0}, (7.6, 7.1))):
        (tmp_path / "qwen2.json").write_text(json.dumps(config))
        model = load_model(str(tmp_path / "qwen2.json"))
        assert (model.parameters / 1e9, model.active / 1e9) == pytest.approx(known, rel=0.03), "Qwen2 57B-A14B and 7B"
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    deepseek = latent | {"num_attention_heads": 128, "q_lora_rank": 1536, "num_experts_per_tok": 8}
    deepseek |= {"hidden_size": 7168, "num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1}
    deepseek |= {"moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3}
    (tmp_path / "v3.json").write_text(json.dumps(deepseek | {"vocab_size": 129_280}))
    v3 = load_model(str(tmp_path / "v3.json"))
    assert (v3.parameters / 1e9, v3.active / 1e9) == pytest.approx((671, 37), rel=0.02), "DeepSeek-V3"
    assert v3.attention_width == 128 * (192 + 128) // 2
    with pytest.raises(UsageError, match=r"gone/config\.json: not the config\.json of a model: No such file"):
        (tmp_path / "gone").mkdir()
        load_model(str(tmp_path / "gone"))
    for bad, said in ((preset | {"hidden_size": "x"}, "hidden_size"), ([1], "not an object"), ({}, "hidden_size")):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        with pytest.raises(UsageError, match=said):
            load_model(str(tmp_path / "bad.json"))


def build_measured(row: dict[str, str]) -> TrainingJob:
    width, layers = MPT[row["model"]]
    config = {"model_type": "mpt", "d_model": width, "n_layers": layers, "n_heads": width // 128, "vocab_size": 50368}
    path = Path(f"{row['model']}.json")
    path.write_text(json.dumps(config))
    return TrainingJob(
        model=load_model(str(path)),
        strategy=load_strategy("fsdp"),
        gpus=int(row["gpus"]),
        recomputes=row["checkpoints"] == "1",
        constants=load_constants("gpu", row["gpu"]) | load_constants("precision", "bf16") | load_software(),
    )


def predict(job: TrainingJob, row: dict[str, str], values: dict[str, float]) -> float:
    """Returns the seconds of an update on fixed lengths."""
    costs, batches = job.price(values), int(row["accumulation"])
    rows, length = int(row["batch"]), int(row["length"])
    update_s = batches * costs.gpu.compute_steps_s(np.array(rows * length), np.array(rows * length**2))
    return float(update_s) + costs.collective.compute_s(job.gpus)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_measured_runs_that_nothing_was_fitted_to_lie_within_the_bands(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    inside, errors = [], []
    for row in rows:
        job = build_measured(row)
        predicted = predict(job, row, job.values)
        moves = [
            [log(predict(job, row, job.values | {name: end}) / predicted) for end in (constant.low, constant.high)]
            for name, constant in job.constants.items()
        ]
        names = tuple((name, "") for name in job.constants)
        ends = np.array(moves)
        band = Bands(names, ends[:, :1], ends[:, 1:]).combine(1.0)
        samples = int(row["batch"]) * int(row["accumulation"])
        measured = samples * int(row["length"]) / float(row["tokens_per_gpu_s"])
        assert 1.1 < band.high / band.low < 3, "at 65,536 tokens most is attention"
        if row["model"] in FITTED:
            errors.append(abs(log(measured / predicted)))
        else:
            inside.append(predicted * band.low <= measured <= predicted * band.high)
    assert np.mean(errors) < 0.15, "of the models fitted to, with an attention that is newer than theirs"
    assert len(inside) >= 25
    assert np.mean(inside) >= 0.8, "of nine in ten promised"


def test_micro_batches_that_were_trained_on_fit_into_what_memory_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            tokens = int(row["batch"]) * int(row["length"])
            assert tokens <= build_measured(row).compute_token_range()[1], row


def test_a_price_of_one_s_own_has_no_range() -> None:
    job = build_job(gpu="h100", model="llama-3-8b", strategy="fsdp", gpus=64, price_usd=1.75)
    assert job.constants["price_usd"] == Constant(value=1.75, low=1.75, high=1.75, source="yours")
    assert ceil(load_constants("gpu", "h100")["price_usd"].value) == 3
