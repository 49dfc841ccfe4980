"""Losses other than a mean over labels predicted from the token before: what is weighted, and what is warned of."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification, LlamaForCausalLM, Trainer

from odb_ref.integrations.hf import ODBOptions, enable
from odb_ref.integrations.hf.data import PAIRS, predicts_first_label
from odb_ref.integrations.hf.versions import SMOOTHER_COUNTS, counts_first_labels, passes_number
from odb_ref.integrations.trl import configure_trainer
from odb_ref.torch import Loss, UsageError
from tests.integrations.arguments import PLAIN, make_arguments
from tests.integrations.test_hf_updates import Texts, collate, make_model

COUNT = 12


class Prompted(LlamaForCausalLM):  # type: ignore[misc]
    """A model under PEFT's prompt tuning, with two virtual tokens before each row."""

    active_peft_config = SimpleNamespace(is_prompt_learning=True, peft_type="PROMPT_TUNING")
    loss_type = "ForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.prompt = nn.Parameter(torch.ones(1, 2, config.hidden_size))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        rows = len(input_ids)
        embeds = torch.cat((self.prompt.expand(rows, -1, -1), self.get_input_embeddings()(input_ids)), 1)
        labels = torch.cat((labels.new_full((rows, 2), -100), labels), 1)
        mask = torch.cat((attention_mask.new_ones(rows, 2), attention_mask), 1)
        return super().forward(inputs_embeds=embeds, labels=labels, attention_mask=mask, **kwargs)


def train(folder: Path, odb: ODBOptions | None, model: Any, kind: type = Trainer, **settings: Any) -> Any:
    """Returns the Trainer after an update of all samples, and its warnings."""
    defaults = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    args = make_arguments(
        folder, **PLAIN | {"max_steps": 1, "logging_steps": 1, "learning_rate": 0.5} | defaults | settings
    )
    trainer: Any = kind(model, args, train_dataset=Texts(COUNT), data_collator=collate)
    with warnings.catch_warnings(record=True, action="always") as caught:
        if odb is not None:
            enable(trainer, odb)
        trainer.train()
    return trainer, " ".join(str(item.message) for item in caught)


def test_the_label_that_virtual_tokens_predict_is_counted(tmp_path: Path) -> None:
    """Checks: WEIGHT. Weights used to depend on the token budget. A plain Trainer divides only by the other labels."""
    torch.manual_seed(0)
    start = Prompted(make_model().config).double().state_dict()
    found = []
    for odb in (None, ODBOptions(token_budget=50), ODBOptions(token_budget=1000)):
        model = Prompted(make_model().config).double()
        model.load_state_dict(start)
        trainer, said = train(tmp_path, odb, model)
        found.append((trainer.state.log_history[0]["loss"], model.prompt.detach().flatten(), said))
    (plain, _, _), (loss, weights, said), (whole, expected, _) = found
    assert torch.allclose(weights, expected, rtol=0, atol=1e-6)
    assert loss == pytest.approx(whole, rel=1e-4)
    labels = collate([Texts(COUNT)[number] for number in range(COUNT)])["labels"].ne(-100)
    is_larger = not counts_first_labels(trainer)
    ratio = labels.sum() / labels[:, 1:].sum() if is_larger else 1
    assert plain == pytest.approx(whole * float(ratio), rel=1e-4)
    assert ("virtual tokens predict the first label" in said) is is_larger


def test_what_stands_in_no_row_predicts_no_label_in_it() -> None:
    for kind in ("PREFIX_TUNING", "LORA"):
        config = SimpleNamespace(is_prompt_learning=kind != "LORA", peft_type=kind)
        assert not predicts_first_label(SimpleNamespace(active_peft_config=config))


class OfTrl(Trainer):  # type: ignore[misc]
    """A Trainer of TRL, which itself divides a routers' loss by the micro-batches of an update."""

    __module__ = "trl.trainer.sft_trainer"


@pytest.mark.parametrize(("kind", "steps", "is_less"), [(Trainer, 3, True), (Trainer, 1, False), (OfTrl, 3, False)])
def test_a_routers_loss_is_said_to_depend_on_the_micro_batches(
    tmp_path: Path, kind: type, steps: int, is_less: bool
) -> None:
    model = make_model()
    model.config.output_router_logits = True
    _, said = train(tmp_path, ODBOptions(token_budget=80), model, kind, gradient_accumulation_steps=steps)
    assert "it depends on how an update is divided" in said
    assert ("raise router_aux_loss_coef" in said) is is_less


class Labelling:
    """Makes labels as TRL's collator did before 1.8, by the mask or not, and cuts rows."""

    max_length = 7

    def __init__(self, completion_only_loss: bool, truncation_mode: str) -> None:
        self.completion_only_loss = completion_only_loss
        self.truncation_mode = truncation_mode

    def __call__(self, samples: list[Any]) -> Any:
        rows = []
        part = slice(self.max_length) if self.truncation_mode == "keep_start" else slice(-self.max_length, None)
        for sample in samples:
            ids: list[int] = sample["input_ids"][part]
            kept = sample["completion_mask"][part] if self.completion_only_loss else [1] * len(ids)
            labels = [token if is_kept else -100 for token, is_kept in zip(ids, kept, strict=True)]
            rows.append({"input_ids": ids, "labels": labels})
        return collate(rows)


@pytest.mark.parametrize("end", ["keep_start", "keep_end"])
@pytest.mark.parametrize("is_only", [True, False])
def test_a_mask_chooses_labels_if_the_collator_of_trl_follows_it(tmp_path: Path, is_only: bool, end: str) -> None:
    """Checks: WEIGHT. The job used to fail if it does."""
    texts = [Texts(COUNT)[number]["input_ids"] for number in range(COUNT)]
    rows = [{"input_ids": ids, "completion_mask": [0, 0, *[1] * (len(ids) - 2)]} for ids in texts]
    data = pytest.importorskip("datasets").Dataset.from_list(rows)
    kind = type("SFTTrainer", (OfTrl,), {"__module__": OfTrl.__module__})
    settings = PLAIN | {"max_steps": 1, "logging_steps": 1, "gradient_accumulation_steps": 3}
    losses = []
    for is_ours in (False, True):
        args = make_arguments(tmp_path, per_device_train_batch_size=4, remove_unused_columns=False, **settings)
        trainer: Any = kind(make_model(), args, train_dataset=data, data_collator=Labelling(is_only, end))
        if is_ours:
            configure_trainer(trainer, token_budget=80)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Unpassed(Trainer):  # type: ignore[misc]
    """Does not pass num_items_in_batch to a model that takes it, as LLaMA-Factory's does if a model has a processor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trainer_that_passes_no_number_is_said_to_weigh_micro_batches(tmp_path: Path, steps: int) -> None:
    """With one micro-batch per update there is no difference. The message used to claim that the model takes no number."""
    settings = {"per_device_train_batch_size": COUNT // steps, "gradient_accumulation_steps": steps}
    found = [train(tmp_path, odb, make_model(), Unpassed, **settings) for odb in (None, ODBOptions(token_budget=80))]
    assert ("LlamaForCausalLM is not passed num_items_in_batch" in found[1][1]) is (steps > 1)
    plain, ours = (trainer.state.log_history[0]["loss"] for trainer, _ in found)
    assert (ours == pytest.approx(plain, rel=1e-6)) is (steps == 1)


class Around(nn.Module):
    """Passes what it is given to a model inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return self.inner(input_ids, labels=labels, attention_mask=attention_mask, **kwargs)


class Taking(Around):
    """Takes the number out of what it is given."""

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any, **kwargs: Any) -> Any:
        number = kwargs.pop("num_items_in_batch", None)
        found = self.inner(input_ids, labels=labels, attention_mask=attention_mask)
        if number is not None:
            found.loss = found.loss * labels[:, 1:].ne(-100).sum() / number
        return found


class OwnLoss(Trainer):  # type: ignore[misc]
    """Divides by the number itself."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def make_classifier() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "classifier_dropout": 0}
    return BertForTokenClassification(BertConfig(vocab_size=32, num_labels=32, **sizes, **dropouts))


def test_a_model_whose_means_a_plain_trainer_adds_up_is_said(tmp_path: Path) -> None:
    """A plain Trainer takes a ``forward`` with ``**kwargs`` for one that divides by the number it is passed."""
    odb = ODBOptions(token_budget=1000)
    found = []
    for steps in (1, 3):
        settings = {"per_device_train_batch_size": COUNT // steps, "gradient_accumulation_steps": steps}
        plain, _ = train(tmp_path, None, make_classifier(), **settings)
        ours, said = train(tmp_path, odb, make_classifier(), **settings)
        losses = [trainer.state.log_history[0]["loss"] for trainer in (ours, plain)]
        found.append("adds up the mean losses" in said)
        assert found[-1] is (steps > 1 and passes_number(ours))
        assert losses[1] == pytest.approx(
            losses[0] * (steps if found[-1] else 1), rel=0 if steps == 1 else 0.1, abs=1e-5
        )
    for model, kind in (
        (make_model(), Trainer),
        (Around(), Trainer),
        (Taking(), Trainer),
        (make_classifier(), OwnLoss),
    ):
        _, said = train(tmp_path, odb, model, kind)
        assert "adds up the mean losses" not in said


@pytest.mark.parametrize("counts", [True, False])
def test_a_smoothed_loss_that_a_plain_trainer_adds_up_is_said(
    tmp_path: Path, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odb_ref.integrations.hf.losses.SMOOTHER_COUNTS", counts)
    odb = ODBOptions(token_budget=80)
    trainer, said = train(tmp_path, odb, make_model(), label_smoothing_factor=0.1)
    assert ("adds up the mean losses of an update's 3 micro-batches" in said) is not counts
    if SMOOTHER_COUNTS:
        plain, _ = train(tmp_path, None, make_model(), label_smoothing_factor=0.1)
        losses = [one.state.log_history[0]["loss"] for one in (plain, trainer)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_noise_that_depends_on_padding_is_said_to_be_larger(tmp_path: Path, alpha: float | None) -> None:
    _, said = train(tmp_path, ODBOptions(token_budget=80), make_model(), neftune_noise_alpha=alpha)
    assert ("neftune_noise_alpha: the noise is divided by the square root of a row's padded length" in said) is (
        alpha is not None
    )


class Answers(Texts):
    """Samples like answers to a prompt: no first label counts. A plain Trainer before transformers 5.10 divides by it too."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample | {"labels": [-100, *sample["labels"][1:]]}


class Calling(Trainer):  # type: ignore[misc]
    """Calls its loss function itself, which takes no number, as in LLaMA-Factory's ASFT."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=causal_mean, **kwargs | {"train_dataset": Answers(COUNT)})

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.compute_loss_func(model(**inputs).logits, inputs["labels"])


def causal_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_trainer_may_call_its_loss_function_by_itself(tmp_path: Path) -> None:
    """Checks: WEIGHT. It used to be given num_items_in_batch, and raised a TypeError."""
    settings = {"per_device_train_batch_size": COUNT, "gradient_accumulation_steps": 1}
    found = []
    for odb in (None, ODBOptions(token_budget=80)):
        model = make_model()
        trainer, _ = train(tmp_path, odb, model, Calling, **settings)
        found.append((trainer.state.log_history[0]["loss"], model.lm_head.weight.detach()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_of_pairs_is_said_to_count_each_pair_alike(tmp_path: Path, steps: int) -> None:
    """A plain Trainer weighs a last micro-batch with fewer pairs like any other, although its model counts labels."""
    odb = ODBOptions(token_budget=80, **PAIRS)  # type: ignore[arg-type]
    trainer, said = train(tmp_path, odb, make_model(), gradient_accumulation_steps=steps)
    assert trainer.model_accepts_loss_kwargs
    wanted = f"so a plain Trainer weights the mean losses of an update's {steps} micro-batches equally"
    assert (f"a loss of pairs takes no num_items_in_batch, {wanted}" in said) is (steps > 1)


PREFERENCES: Any = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}] * COUNT


def test_a_loss_of_pairs_that_is_no_mean_over_them_is_refused_by_enable_too(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    args.loss_type = ["sigmoid", "sft"]
    whole = ODBOptions(token_budget=80, loader={"loss": Loss(scaling="samples")})
    enable(Trainer(make_model(), args, train_dataset=PREFERENCES), whole)
    enable(Trainer(make_model(), args, train_dataset=Texts(COUNT)), ODBOptions(token_budget=80))
    with pytest.raises(UsageError, match="loss_type 'sft': this loss is a mean over tokens"):
        enable(Trainer(make_model(), args, train_dataset=PREFERENCES), ODBOptions(token_budget=80))


class Comparing(Trainer):  # type: ignore[misc]
    """Takes the other samples of a batch as negatives."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        text = model.model.embed_tokens(inputs["input_ids"]).mean(1)
        return nn.functional.cross_entropy(text @ text.T, torch.arange(len(text)))


class Summing(Trainer):  # type: ignore[misc]
    """Returns a sum over labels."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss * inputs["labels"][:, 1:].ne(-100).sum()


class Each(Trainer):  # type: ignore[misc]
    """Returns the mean over rows of sums over labels."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return Summing.compute_loss(self, model, inputs) / len(inputs["labels"])


class Random(Comparing):
    """Is random, so that nothing can be told."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * torch.rand(())


@pytest.mark.parametrize(
    ("kind", "loss", "told"),
    [
        (Comparing, Loss(), "it needs fixed batches"),
        (Comparing, Loss(scaling="samples"), "it needs fixed batches"),
        (Comparing, Loss(scaling="none"), ""),
        (Summing, Loss(), r"is a sum: pass Loss\(reduction='sum'\)"),
        (Summing, Loss(reduction="sum"), ""),
        (Trainer, Loss(reduction="sum"), "depends on how an update is divided"),
        (Each, Loss(), r"is a mean over samples: pass Loss\(scaling='samples'\)"),
        (Each, Loss(scaling="samples"), ""),
        (Random, Loss(), ""),
    ],
)
def test_a_loss_that_depends_on_how_an_update_is_divided_is_refused(
    tmp_path: Path, kind: type, loss: Loss, told: str
) -> None:
    """Spec: R4.7. Checks: WEIGHT. Training used to go on, with gradients that were wrong by any factor."""
    options: dict[str, Any] = {"token_budget": 200, "loader": {"loss": loss}}
    with pytest.raises(UsageError, match=told) if told else nullcontext():
        train(tmp_path, ODBOptions(**options), make_model(), kind)
    train(tmp_path, ODBOptions(**options, checks_loss=False), make_model(), kind)


def test_a_mean_over_tokens_that_is_weighed_by_samples_is_warned_of_once(tmp_path: Path) -> None:
    """Spec: R4.7."""
    odb = ODBOptions(token_budget=200, loader={"loss": Loss(scaling="samples")})
    _, said = train(tmp_path, odb, make_model())
    assert said.count("the weights are only near, as for a mean over tokens") == 1


class Weighing(Trainer):  # type: ignore[misc]
    """Weighs classes, so each batch divides by a number of its own. The loss of a model that knows nothing hardly shows it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        weights = 1 + 99 * (torch.arange(logits.shape[1]) % 16 == 0).to(logits)
        return nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), weights)


def test_a_gradient_that_depends_on_it_is_warned_of(tmp_path: Path) -> None:
    """Spec: R4.7. Checks: WEIGHT. Padding could be the cause, and the same in plain training, so it is not refused."""
    for kind, is_told in ((Trainer, False), (Weighing, True)):
        _, said = train(tmp_path, ODBOptions(token_budget=200), make_model(), kind)
        assert ("so it depends on how an update is divided" in said) is is_told


class Watching(Trainer):  # type: ignore[misc]
    """Notes whether each pass that is not of training could keep activations."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            self.kept = [*getattr(self, "kept", ()), torch.is_grad_enabled()]
        return super().compute_loss(model, *args, **kwargs)


@pytest.mark.parametrize("is_recomputing", [False, True])
def test_trying_a_loss_keeps_no_activations_where_training_keeps_none(tmp_path: Path, is_recomputing: bool) -> None:
    """Spec: R4.7. There is no memory for them."""
    model = make_model()
    if is_recomputing:
        model.gradient_checkpointing_enable()
    trainer, _ = train(tmp_path, ODBOptions(token_budget=200), model, Watching)
    assert trainer.kept == [not is_recomputing] * 8


def test_trying_a_loss_changes_no_weight(tmp_path: Path) -> None:
    """Spec: R4.7. Random draws of the model stay those of training."""
    found = []
    for is_tried in (True, False):
        model = make_model()
        model.model.layers[0].self_attn.attention_dropout = 0.5
        train(tmp_path, ODBOptions(token_budget=80, checks_loss=is_tried), model)
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    assert torch.equal(*found)
