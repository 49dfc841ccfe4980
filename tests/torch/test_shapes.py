"""A bounded set of shapes: rows of few lengths within the budget, their cost, and the compilations they save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run, run
from torch import Tensor, nn

from odb_ref import BoundedShapes, FlattenSamples, ODBDataLoader, UsageError
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.effects import Collate
from tests.helpers.options import nested
from tests.torch.data import make_sample

BUDGET = 12_288
SHAPES = 8
GOAL = 0.03
"""The largest share of padding in addition to the tokens."""


def test_rows_are_padded_within_the_budget_to_at_most_so_many_lengths() -> None:
    """Checks: BUDGET."""
    for budget, shapes in ((12_288, 8), (100, 7), (5, 8), (9, 1)):
        bounded = BoundedShapes(token_budget=budget, shapes=shapes)
        lengths = [bounded.compute_length(tokens) for tokens in range(1, budget + 1)]
        assert all(tokens <= length <= budget for tokens, length in enumerate(lengths, 1))
        assert len(set(lengths)) <= shapes
        assert bounded.compute_length(2 * budget + 1) == 3 * budget
    for mistake in ({"token_budget": 0}, {"token_budget": 9, "shapes": 0}):
        with pytest.raises(UsageError):
            BoundedShapes(**mistake)


def test_the_padding_repeats_the_positions_of_the_samples_without_labels() -> None:
    samples = [{"input_ids": [5, 6, 7], "weights": [1, 2, 3], "head_labels": [0, 1, 2]}]
    samples += [{"input_ids": [8, 9], "weights": [4, 5], "head_labels": [3, 4]}]
    batch = BoundedShapes(token_budget=16, shapes=2, pad_token=3)(samples)
    assert {name: row.tolist() for name, row in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 3, 3, 3]],
        "labels": [[-100, 6, 7, -100, 9, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2]],
        "weights": [[1, 2, 3, 4, 5, 0, 0, 0]],
        "head_labels": [[0, 1, 2, 3, 4, -100, -100, -100]],
    }
    batch = BoundedShapes(token_budget=8, shapes=1)(
        [{"input_ids": [5], "position_ids": [2]}, {"input_ids": [6, 7], "position_ids": [2, 3]}]
    )
    assert batch["position_ids"].tolist() == [[2, 2, 3, 2, 2, 3, 2, 2]]


@pytest.mark.parametrize("kind", ["learned", "dynamic"])
def test_the_padding_has_no_position_beyond_the_samples(kind: str) -> None:
    """Learned positions have an end, and the largest position determines the frequencies of some rotary ones."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 32, "use_cache": False, "attn_implementation": "sdpa"}
    if kind == "learned":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 4}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **size))
    else:
        size |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        size["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(max_position_embeddings=4, **size))
    model = model.double().eval()
    samples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [8, 9]}]
    plain: Any = FlattenSamples()(samples)
    padded = BoundedShapes(token_budget=16, shapes=1)(samples)
    expected = model(input_ids=plain["input_ids"], position_ids=plain["position_ids"]).logits
    assert torch.allclose(model(**padded).logits[:, :6], expected)


def read_rows(name: str, window: int) -> list[int]:
    """Returns the tokens of each packed row of eight ranks."""
    rows: list[int] = []

    def observe(rank: int, event: object, effects: Sequence[object], time_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Collate):
                rows.extend(sum(sample.length for sample in step.group) for step in effect.steps if step.group)

    workload = build_workload(load_lengths(name), ranks=8, sharding=Sharding.EVEN, seed=0)
    settings = {"budget_tokens": BUDGET, "window_samples": window, "layout": Layout.PACKED}
    run(Run(workload=workload, policy="odb", **settings), observer=observe)
    return rows


@pytest.mark.deep
def test_what_the_shapes_cost() -> None:
    """``pytest tests/torch/test_shapes.py -s -k cost`` prints the table of docs/howto/packed.md."""
    bounded = BoundedShapes(token_budget=BUDGET, shapes=SHAPES)
    print("\n| trace | window 256: lengths, padding | 1,024 |\n|---|---|---|")
    for name in list_bundled_names():
        cells = []
        for window in (256, 1024):
            rows = read_rows(name, window)
            lengths = [bounded.compute_length(tokens) for tokens in rows]
            # One trace has a sample over the budget.
            assert len({length for length in lengths if length <= BUDGET}) <= SHAPES
            assert all(length % BUDGET == 0 for length in lengths if length > BUDGET)
            price = sum(lengths) / sum(rows) - 1
            assert price < GOAL, (name, window)
            cells.append(f"{len(set(rows)):,} -> {len(set(lengths))}, {price:.1%}")
        print(f"| `{name}` | {' | '.join(cells)} |")


class Attention(nn.Module):
    """A layer that separates the samples of a row by their positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        numbers = (position_ids == 0).cumsum(1)
        mask = (numbers[:, :, None] == numbers[:, None]).tril()
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def train(collate: Any) -> tuple[int, list[float]]:
    """Returns how often a model was compiled in an epoch, and its weighted losses."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Attention().double()
    with torch._dynamo.config.patch(cache_size_limit=1000):  # torch 2.6 does not have the newer name
        compiled = torch.compile(model, backend="eager", dynamic=False)
        losses = []
        data = [{name: make_sample(number)[name] for name in ("input_ids", "labels")} for number in range(100)]
        options = {"layout": "packed", "window": 32, "collate_fn": collate, "num_workers": 0}
        with ODBDataLoader(data, token_budget=64, **nested(**options)) as loader:
            for batch, info in loader.steps():
                logits = compiled(batch["input_ids"], batch["position_ids"])[0, :-1]
                loss = nn.functional.cross_entropy(logits, batch["labels"][0, 1:])
                losses.append(info.scale(loss).item())
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], losses


def test_a_compiled_model_is_compiled_once_for_each_shape() -> None:
    """Its losses are also those without padding."""
    before, losses = train(FlattenSamples())
    after, padded = train(BoundedShapes(token_budget=64, shapes=4))
    print(f"compiled {before} times for rows of any length, {after} times for four lengths, in {len(losses)} steps")
    assert after <= 4 < before
    assert padded == pytest.approx(losses, rel=1e-12)
