"""LLaMA-Factory settings that are refused, and runs without our trainer, with a stand-in for its modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

from transformers import Trainer

from odb_ref.integrations.llamafactory import configure_trainer, main, make_settings, run_exp
from odb_ref.torch import UsageError
from tests.integrations.arguments import make_arguments
from tests.integrations.test_hf_losses import Answers
from tests.integrations.test_hf_updates import collate, make_model

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sft", {"use_mca": True}, {}, "use_mca starts other processes or trainers"),
    ("sft", {"use_hyper_parallel": True}, {}, "use_hyper_parallel starts other processes"),
    ("sft", {"use_ray": True}, {}, "use_ray starts other processes"),
    ("sft", {"ignore_pad_token_for_loss": False}, {}, "ignore_pad_token_for_loss: false trains on padding"),
    ("sft", {}, {"layout": "packed"}, "odb_layout: packed: the collators of LLaMA-Factory pad"),
    ("sft", {}, {"token_budgt": 9}, r"odb_token_budgt is not a setting: odb_token_budget\?"),
    ("sft", {}, {"windw": 9}, r"odb_windw is not a setting: odb_window\b"),
    ("sft", {}, {"zzz": 9}, "odb_zzz is not a setting$"),
    ("sft", {}, {"update_samples": "all"}, "update_samples must be a number"),
    ("pt", {}, {}, "set packing: false"),
    ("pt", {"packing": None}, {}, "set packing: false"),
]


@pytest.mark.parametrize(("stage", "args", "own", "text"), REFUSED)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(
    stage: str, args: dict[str, Any], own: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        make_settings(stage, args, own)


def test_what_fits_becomes_options() -> None:
    args = {"per_device_train_batch_size": 4, "cutoff_len": 24, "use_mca": False}
    assert make_settings("dpo", args, {"window": 12}) == {"window": 12, "token_budget": 2 * 4 * 24}


def test_ray_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory detects it by nothing else."""
    monkeypatch.setenv("USE_RAY", "1")
    with pytest.raises(UsageError, match="use_ray starts other processes"):
        make_settings("sft", {}, {})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the calls of a stand-in whose ``run_exp`` makes no trainer of the class that is replaced."""
    told: list[Any] = []
    trainer = type("CustomSeq2SeqTrainer", (), {})
    parts: dict[str, dict[str, Any]] = {
        "llamafactory": {},
        "llamafactory.hparams": {"read_args": lambda args: sys.argv[1:] if args is None else args},
        "llamafactory.train": {},
        "llamafactory.train.sft": {},
        "llamafactory.train.sft.trainer": {"CustomSeq2SeqTrainer": trainer},
        "llamafactory.train.sft.workflow": {},
        "llamafactory.train.tuner": {"run_exp": lambda args, callbacks: told.append(args)},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_a_run_that_made_no_trainer_of_ours_is_no_success(ran: list[Any]) -> None:
    with pytest.raises(UsageError, match="LLaMA-Factory made no CustomSeq2SeqTrainer, so this run ignored the odb_"):
        run_exp({"stage": "sft", "do_train": True, "odb_window": 12})
    run_exp({"stage": "sft", "do_predict": True})
    assert ran == [{"stage": "sft", "do_train": True}, {"stage": "sft", "do_predict": True}]


class DPOTrainer(Trainer):  # type: ignore[misc]
    """A base of LLaMA-Factory's trainer for pairs, with the name of TRL's."""


class Storing(DPOTrainer):
    """Stores a metric of each pass, as LLaMA-Factory's trainer for pairs does: the loss, which is logged weighted."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.store_metrics({"metric": loss.item()}, train_eval="train")
        return loss

    def store_metrics(self, metrics: dict[str, float], train_eval: str = "train") -> None:
        assert train_eval == "train"
        self.__dict__.setdefault("stored", []).append(metrics)


def test_metrics_of_micro_batches_are_weighed_as_their_loss(tmp_path: Path) -> None:
    """Checks: WEIGHT. They used to be stored for each micro-batch, and the trainer's mean over these favoured long pairs."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    args = make_arguments(tmp_path, max_steps=3, logging_steps=1, **sizes)
    storing = Storing(make_model(), args, data_collator=collate, train_dataset=Answers(45))
    trainer: Any = configure_trainer(storing, token_budget=80)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Before transformers 5 the log has four digits.
    assert [stored["metric"] for stored in trainer.stored] == pytest.approx(losses, rel=1e-6, abs=6e-5)


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["train"], 2), (["train", "-h"], 0)])
def test_without_a_file_the_command_line_says_how_it_is_used(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory.py", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert capsys.readouterr().out.startswith("usage: torchrun --nproc-per-node N -m odb_ref.integrations.llamafactory")


def test_a_refusal_on_the_command_line_is_a_line(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory.py", "train", "--stage", "sft"])
    with pytest.raises(SystemExit, match=r"^error: pass the settings in a file: torchrun"):
        main()
    assert sys.argv[1:] == ["--stage", "sft"]
