"""The Hugging Face Trainer with its own updates: log, rates, weights and resume of the plain Trainer. Spec: R16."""

from __future__ import annotations

import logging
import random
import warnings
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations import require

require("transformers")

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from odb_ref import Faults
from odb_ref.integrations.hf import ODBOptions, enable
from odb_ref.integrations.hf.data import choose_layout, is_shuffled, warn_of_shards
from odb_ref.integrations.hf.updates import UpdateBatch
from odb_ref.integrations.hf.versions import HAS_TOKEN_COUNT
from odb_ref.torch import UsageError
from tests.integrations.arguments import make_arguments
from tests.integrations.common import run_each
from tests.torch.ranks import get_values

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second", "total_flos"}
LOG = 1e-9 if HAS_TOKEN_COUNT else 1.01e-4
"""How much losses of two logs may differ. An earlier Trainer rounds them to four digits."""


class Texts(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        choose = random.Random(index)
        ids = [choose.randint(1, 31) for _ in range(choose.randint(3, 40))]
        labels = [-100] * choose.randint(0, 2) + ids
        return {"input_ids": ids, "labels": labels[: len(ids)]}


def collate(samples: list[Any]) -> Any:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def pad(name: str, value: int) -> Any:
        return torch.tensor([list(s[name]) + [value] * (longest - len(s[name])) for s in samples])

    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": torch.tensor(mask)}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    # With a cache to fill, samples of a packed row attend to each other in transformers before 5.
    config = LlamaConfig(vocab_size=32, attn_implementation="eager", use_cache=False, **sizes)
    return LlamaForCausalLM(config).double()


class Watch(TrainerCallback):
    """Records what a user's callback sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, event: str, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((event, state.global_step, round(state.epoch, 9), state.max_steps, state.num_train_epochs))

    on_epoch_begin = partialmethod(note, "epoch")
    on_step_begin = partialmethod(note, "begin")
    on_step_end = partialmethod(note, "end")
    on_log = partialmethod(note, "log")
    on_substep_end = partialmethod(note, "substep")


SKIPPING = ("Fast-forwarding", "Will skip", "Continuing training from")
"""Messages of a plain Trainer that resumes: it reads again what it trained on, and reports how much. The loader does not."""


class Banner(logging.Handler):
    """Records what a Trainer logs before it trains."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(("  ", "*****")) and not any(word in line for word in SKIPPING):
            self.lines.append(line)


def train(rank: int, folder: Path, odb: ODBOptions | None, resume: str, settings: dict[str, Any]) -> Any:
    settings = dict(settings)
    data = settings.pop("data", None) or Texts(settings.pop("samples", 45))
    collator = settings.pop("collator", collate)
    kind, config = settings.pop("kind", Trainer), settings.pop("config", {})
    failing = settings.pop("failing", False)
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "warmup_steps": 3,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "log_level": "info",
    }
    args = make_arguments(folder, **defaults | settings)
    watch, banner = Watch(), Banner()
    trainer: Any = kind(model=make_model(), args=args, train_dataset=data, data_collator=collator, callbacks=[watch])
    for name, value in config.items():
        setattr(trainer.model.config, name, value)
    logging.getLogger("transformers.trainer").addHandler(banner)
    if odb is not None:
        trainer = enable(trainer, odb)
        if failing:
            trainer.__class__ = type("Failing", (Failing, type(trainer)), {})
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    logging.getLogger("transformers.trainer").removeHandler(banner)
    weights = [float(value) for p in trainer.model.parameters() for value in p.detach().flatten()]
    return {
        "log": trainer.state.log_history,
        "seen": watch.seen,
        "banner": banner.lines,
        "weights": weights,
        "said": [str(item.message) for item in caught],
        "failures": getattr(trainer, "failures", 0),
    }


class Failing:
    """A Trainer whose last rank runs out of memory with every batch of several samples."""

    failures = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        is_last = self.args.process_index == self.args.world_size - 1  # type: ignore[attr-defined]
        if is_last and len(inputs["input_ids"]) > 1:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory: injected")
        return found


def compare(
    tmp_path: Path, world_size: int, resume: str = "", before: int = 0, odb: ODBOptions | None = None, **settings: Any
) -> list[Any]:
    """Trains with the plain Trainer and with ours. Compares logs and messages without times, what callbacks see, the weights.
    Returns our results by rank.
    """
    given = settings | ({"lr_scheduler_type": "constant"} if resume else {})
    first = given | {"save_strategy": "steps", "save_steps": before, "max_steps": before}
    cases: list[Any] = []
    for name, options in (("plain", None), ("ours", odb or ODBOptions(token_budget=80))):
        if resume:
            cases.append((tmp_path / name, options, "", first))
        cases.append((tmp_path / name, options, resume, given))
    trained = [get_values(results) for results in run_each(world_size, train, cases)]
    found = [trained[-1 - len(cases) // 2], trained[-1]]
    (plain, *_), (ours, *_) = found
    assert len(ours["log"]) == len(plain["log"])
    for mine, entry in zip(ours["log"], plain["log"], strict=True):
        assert mine.keys() - {"out_of_memory"} == entry.keys()
        for key in entry.keys() - TIMES:
            assert mine[key] == pytest.approx(entry[key], rel=1e-6, abs=LOG), key
    assert "***** Running training *****" in plain["banner"]
    assert ours["banner"] == plain["banner"]
    # In an epoch that is resumed, the last update counts the batches of any update, of which all but one are empty.
    kept = [[event for event in run["seen"] if not (resume and event[0] == "substep")] for run in (ours, plain)]
    assert kept[0] == kept[1]
    # Losses are computed in float32 in transformers, and AdamW amplifies gradients near 0.
    assert ours["weights"] == pytest.approx(plain["weights"], rel=1e-5, abs=1e-6)
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {}),
        (2, {"dataloader_drop_last": True}),
        (2, {"max_steps": 7, "gradient_accumulation_steps": 1}),
        (2, {"lr_scheduler_type": "cosine", "data_seed": 5, "dataloader_num_workers": 1, "logging_steps": 2}),
        (1, {"collator": DataCollatorWithFlattening(), "per_device_train_batch_size": 4}),
        (2, {"collator": DataCollatorWithFlattening(), "num_train_epochs": 1.5}),
    ],
)
def test_the_log_and_the_weights_are_those_of_the_plain_trainer(
    tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    """Checks: UPDATE, WEIGHT. One line changed: the same losses, rates, epochs and weights."""
    compare(tmp_path, world_size, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("before", [3, 6])
def test_a_checkpoint_goes_on_as_the_plain_trainers(tmp_path: Path, before: int) -> None:
    """Checks: UPDATE, RESUME. In either epoch. Callbacks see the same, including the fraction of the epoch."""
    if before == 6 and not HAS_TOKEN_COUNT:
        pytest.skip("an earlier plain Trainer that goes on in its second epoch is not the one that was not stopped")
    compare(tmp_path, 2, resume=f"checkpoint-{before}", before=before)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_running_out_of_memory_changes_no_update(tmp_path: Path, world_size: int) -> None:
    """Checks: UPDATE, WEIGHT. Batches are halved, and the budget falls, but the log and the weights stay the same."""
    odb = ODBOptions(token_budget=160, survives_out_of_memory=True, checks_loss=False)
    settings = {"samples": 60, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "failing": True}
    found = compare(tmp_path, world_size, odb=odb, **settings)
    assert found[-1]["failures"] == found[0]["log"][-1]["out_of_memory"] > 3


class OwnLoader(Trainer):  # type: ignore[misc]
    """Makes batches of another size than its arguments say."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=5, shuffle=True, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class Shuffled(IterableDataset[Any]):
    """A stream with a different order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        texts = Texts(42)  # whole updates, because a plain Trainer carries the rest of a stream over
        return (texts[index] for index in random.Random(self.epoch).sample(range(42), 42))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"kind": OwnLoader}),
        (2, {"kind": OwnLoader, "num_train_epochs": 1}),
        (1, {"data": Shuffled(), "max_steps": 16}),
        (1, {"data": Shuffled(), "max_steps": 16, "dataloader_num_workers": 1}),
    ],
)
def test_a_loader_of_the_trainers_own_and_a_stream_have_its_updates(
    tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    """Checks: UPDATE, COVER. Batches of another size lost half of the samples, and each epoch of a stream was the first."""
    compare(tmp_path, world_size, **settings)


def test_a_stream_goes_on_in_the_epoch_in_which_it_was_saved(tmp_path: Path) -> None:
    """Checks: RESUME, COVER. Inside the first epoch of seven updates, at its end, and inside the next. Streams restarted."""
    odb = ODBOptions(token_budget=80)
    settings = {"data": Shuffled(), "max_steps": 12, "lr_scheduler_type": "constant"}
    first = settings | {"save_strategy": "steps", "save_steps": 1}
    cases = [(tmp_path, odb, "", first), *((tmp_path, odb, f"checkpoint-{at}", settings) for at in (4, 7, 10))]
    whole, *resumed = [get_values(results)[0] for results in run_each(1, train, cases)]
    for run in resumed:
        assert run["weights"] == whole["weights"]
        assert [entry["epoch"] for entry in run["log"]] == [entry["epoch"] for entry in whole["log"]]


class Short(Shuffled):
    """A stream of seven whole updates and a few samples, for micro-batches of two. Three of these are an update."""

    def __init__(self, rest: int) -> None:
        self.rest = rest

    def __iter__(self) -> Any:
        return iter([Texts(42 + self.rest)[index] for index in range(42 + self.rest)])


def test_a_stream_whose_end_is_carried_over_by_the_plain_trainer_is_said(tmp_path: Path) -> None:
    """The plain Trainer also makes an update with the third micro-batch, full or not."""
    settings = {"max_steps": 9, "lr_scheduler_type": "constant"}
    odb = ODBOptions(token_budget=80)
    runs = [{"data": Short(rest), **settings} for rest in (0, 3, 4, 5)]
    runs += [{"data": Short(1), "gradient_accumulation_steps": 1, **settings}]
    found = [get_values(results)[0] for results in run_each(1, train, [(tmp_path, odb, "", given) for given in runs])]
    said = [[text for text in run["said"] if "at the end of the stream" in text] for run in found]
    assert ["stream: 3." in " ".join(said[1]), "stream: 4." in " ".join(said[2])] == [True, True]
    assert [bool(texts) for texts in said] == [False, True, True, False, False]


class Bad(Texts):
    """Texts of which one cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("cannot be read")
        return super().__getitem__(index)


def test_an_epoch_of_fewer_updates_than_the_trainer_counts_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """Checks: RESUME, COVER. The one sample of an update was set aside in each epoch. ``max_steps`` are all made."""
    odb = ODBOptions(token_budget=80, loader={"faults": Faults(on_bad_sample="quarantine", max_bad_samples=9)})
    settings = {
        "data": Bad(6),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 4,
    }
    settings |= {"lr_scheduler_type": "constant"}
    first = settings | {"save_strategy": "steps", "save_steps": 1}
    resumed = [(tmp_path, odb, f"checkpoint-{at}", settings) for at in (5, 11, 15)]
    cases = [(tmp_path, odb, "", first), *resumed, (tmp_path, odb, "", settings | {"max_steps": 23})]
    whole, *others, longer = [get_values(results)[0] for results in run_each(1, train, cases)]
    assert [run["log"][-1]["step"] for run in (whole, longer)] == [20, 23]
    for run in others:
        assert run["weights"] == whole["weights"]
        assert [entry.get("epoch") for entry in run["log"]] == [entry.get("epoch") for entry in whole["log"]]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4, 5])
def test_a_stream_is_divided_among_ranks_as_the_plain_trainer_divides_it(tmp_path: Path, shards: int) -> None:
    """Checks: UPDATE. Where Accelerate gives whole shards to ranks, each rank gets the ones that follow each other."""
    datasets = pytest.importorskip("datasets")
    texts = [Texts(60)[index] for index in range(60)]
    stream = datasets.Dataset.from_list(texts).to_iterable_dataset(num_shards=shards)
    compare(tmp_path, 2, data=stream, max_steps=4, accelerator_config={"dispatch_batches": False})


class Drawing(Trainer):  # type: ignore[misc]
    """Its sampler draws from torch's own generator, and some samples twice."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler([1.0] * 15, 45)


def test_an_order_that_is_drawn_from_the_processs_generator_goes_on_inside_an_epoch(tmp_path: Path) -> None:
    """Checks: RESUME."""
    odb = ODBOptions(token_budget=80)
    settings = {"kind": Drawing, "lr_scheduler_type": "constant", "num_train_epochs": 1}
    first = settings | {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    free = ODBOptions(token_budget=80, update_samples=None)
    runs = [(odb, "", settings), (odb, "", first), (odb, "checkpoint-3", settings), (free, "", settings)]
    cases = [(tmp_path, options, resume, given) for options, resume, given in runs]
    (whole,), _, (resumed,), (refused,) = run_each(1, train, cases)
    assert resumed.value["weights"] == whole.value["weights"]
    assert "WeightedRandomSampler draws from the process's random generators" in " ".join(whole.value["said"])
    assert "WeightedRandomSampler chooses which samples the Trainer reads" in refused.text


def test_the_free_mode_shuffles_where_the_trainers_own_loader_does() -> None:
    data = Texts(8)
    assert is_shuffled(DataLoader(data, batch_size=2, shuffle=True))
    assert not is_shuffled(DataLoader(data, batch_size=2))
    for loader in (DataLoader(data, batch_size=2, sampler=range(5)), DataLoader(data, batch_sampler=[[1]])):
        with pytest.raises(UsageError, match="chooses which samples the Trainer reads"):
            is_shuffled(loader)


def test_shards_that_are_dealt_out_to_ranks_are_said() -> None:
    stream = SimpleNamespace(num_shards=4)
    with pytest.warns(RuntimeWarning, match="each of 2 ranks reads its own of 4 shards"):
        warn_of_shards(stream, 2)
    with warnings.catch_warnings(action="error"):
        for dataset, ranks in ((stream, 1), (stream, 3), (object(), 2)):
            warn_of_shards(dataset, ranks)


def test_an_update_says_where_its_batches_are() -> None:
    with pytest.raises(KeyError, match=r"input_ids: .* \.parts"):
        UpdateBatch()["input_ids"]


SAID: list[tuple[dict[str, Any], str]] = [
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ({"include_num_input_tokens_seen": True}, "counts padding" if HAS_TOKEN_COUNT else "needs transformers 5.3"),
    ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler=False draws an epoch's order"),
    ({"config": {"output_router_logits": True}}, "raise router_aux_loss_coef"),
    ({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}, "split_batches"),
    ({"accelerator_config": {"split_batches": True}, "max_steps": 2, "data": Shuffled()}, "split_batches"),
]


def sum_losses(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Sums losses as the Trainer's documentation shows: divided by the number of all labels of an update."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Summing(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=sum_losses, **kwargs)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_function_may_divide_by_what_it_is_told(world_size: int, tmp_path: Path) -> None:
    compare(tmp_path, world_size, kind=Summing)


class Copying(Trainer):  # type: ignore[misc]
    """A Trainer with a copy of the training step, which takes the mean over batches whose labels are not counted."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_copy_of_the_training_step_divides_nothing(tmp_path: Path) -> None:
    """Checks: WEIGHT. The loss was divided by ``gradient_accumulation_steps``."""
    compare(tmp_path, 1, kind=Copying)


class Growing(Texts):
    """Longer texts in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return {name: value[: 9 + 9 * self.epoch] for name, value in super().__getitem__(index).items()}


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 1), (2, 0)])
def test_a_data_set_is_told_the_epoch_where_the_plain_trainer_tells_it(
    tmp_path: Path, world_size: int, workers: int
) -> None:
    """Each epoch was the first."""
    compare(tmp_path, world_size, data=Growing(20), dataloader_num_workers=workers)


def test_what_differs_from_the_plain_trainer_is_said_or_refused(tmp_path: Path) -> None:
    cases = [(tmp_path, ODBOptions(token_budget=80), "", settings) for settings, _ in SAID]
    for (_, text), results in zip(SAID, run_each(2, train, cases), strict=True):
        for result in results:
            assert text in (result.text if result.error else " ".join(result.value["said"])), result


def test_input_tokens_without_padding_are_counted_as_by_the_plain_trainer(tmp_path: Path) -> None:
    """An idle rank's replay adds nothing."""
    if not HAS_TOKEN_COUNT:
        pytest.skip("before transformers 5.3 the loop counts, and nothing in an update: a warning says so")
    compare(tmp_path, 2, include_num_input_tokens_seen="non_padding", samples=31)


def test_a_collator_that_flattens_is_not_counted_as_one_that_pads() -> None:
    assert choose_layout(DataCollatorWithFlattening(), {}) == {"layout": "packed"}
    assert choose_layout(collate, {}) == {}
    with pytest.raises(UsageError, match="lays samples end to end"):
        choose_layout(DataCollatorWithFlattening(), {"layout": "padded"})


def test_the_samples_reported_are_those_of_the_updates_made(tmp_path: Path) -> None:
    """The banner and the samples per second were those of the arguments, or of all epochs."""
    number, limit = ODBOptions(token_budget=80, update_samples=9), ODBOptions(token_budget=80, max_samples=12)
    cases: list[Any] = [(tmp_path, number, "", {"max_steps": 5}), (tmp_path, limit, "", {})]
    found = [get_values(results)[0] for results in run_each(1, train, cases)]
    for run, samples in zip(found, (45, 12), strict=True):
        last = run["log"][-1]
        assert last["train_samples_per_second"] == pytest.approx(samples / last["train_runtime"], rel=0.01)
    assert any("Total train batch size" in line and line.endswith(" = 9") for line in found[0]["banner"])


def test_what_an_update_holds_is_a_number_or_plain() -> None:
    with pytest.raises(UsageError, match="update_samples must be a number"):
        ODBOptions(token_budget=1, update_samples="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="update_samples must be at least 1"):
        ODBOptions(token_budget=1, update_samples=0)
