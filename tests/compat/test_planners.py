"""verl's and slime's planners, implemented by ours, with their signatures and results. What hangs or overruns there does not.

The originals run if they are installed, as for ``make conformance``: ``PYTHONPATH=build/peers/verl-0.9.1``. Otherwise a plain
class replaces tensordict's.
"""

from __future__ import annotations

import inspect
import re
import time
from datetime import timedelta
from importlib import import_module
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_ref.compat import slime, verl
from odb_ref.core.errors import UsageError
from tests.torch.ranks import get_values, run_each, run_ranks


class Columns(dict[str, Any]):
    """The parts of a TensorDict that are used."""

    def __init__(self, source: dict[str, Any], batch_size: int) -> None:
        super().__init__(source)
        self.batch_size = batch_size


class Data:
    """The parts of a DataProto that are used."""

    def __init__(self, batch: Any, non_tensor_batch: dict[str, Any], meta_info: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    @classmethod
    def from_dict(cls, tensors: dict[str, Any], non_tensors: dict[str, Any], meta_info: dict[str, Any]) -> Data:
        return cls(tensors, non_tensors, meta_info)


def make_batch(lengths: list[int], *, is_nested: bool = False, kind: Any = Columns) -> Any:
    """Returns samples whose tokens all equal their number, from 1."""
    rows = [torch.full((length,), index + 1) for index, length in enumerate(lengths)]
    width = max(lengths, default=1)
    ids = torch.zeros(0, 1, dtype=torch.long)
    if is_nested:
        columns = {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    else:
        mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
        if rows:
            ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
        columns = {"input_ids": ids, "attention_mask": mask.long()}
    columns["loss_mask"] = torch.ones(len(lengths), 3)
    return kind(columns, len(lengths))


def compute_workload(tokens: int) -> int:
    return 24_576 * tokens + tokens**2


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(LENGTHS, st.booleans(), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_verl_batches_are_whole_within_the_budget_and_small_at_the_ends(
    lengths: list[int], is_nested: bool, divided_by: int, at_least: int, is_balanced: bool
) -> None:
    batch = make_batch(lengths, is_nested=is_nested)
    least = {"num_batches_divided_by": divided_by, "min_num_micro_batch": at_least}
    parts, indices = verl.rearrange_micro_batches(batch, 60, use_dynamic_bsz_balance=is_balanced, **least)
    assert len(parts) % divided_by == 0
    assert len(parts) >= at_least
    used: list[int] = []
    costs = []
    for part, own in zip(parts, indices, strict=True):
        rows = [row[row == index + 1] for row, index in zip(part["input_ids"].unbind(), own, strict=True)]
        assert [len(row) for row in rows if len(row)] == [lengths[index] for index in own]
        assert part.batch_size == len(own)
        assert sum(lengths[index] for index in own) <= 60
        is_idle = not part["loss_mask"].any()
        costs.append(0 if is_idle else sum(compute_workload(lengths[index]) for index in own))
        used += [] if is_idle else own
    assert sorted(used) == list(range(len(lengths)))
    falling = sorted(costs, reverse=True)
    assert costs == ([*falling[::2][::-1], *falling[1::2]] if is_balanced else falling)


@given(LENGTHS, st.booleans(), st.integers(1, 6))
def test_verl_outputs_come_back_in_order(lengths: list[int], is_nested: bool, at_least: int) -> None:
    parts, indices = verl.rearrange_micro_batches(
        make_batch(lengths, is_nested=is_nested), 60, min_num_micro_batch=at_least
    )
    if is_nested:
        rows = [row for part in parts for row in part["input_ids"].unbind()]
        back = verl.restore_dynamic_batch(torch.nested.as_nested_tensor(rows, layout=torch.jagged), indices)
        assert [row.tolist() for row in back.unbind()] == [[index + 1] * length for index, length in enumerate(lengths)]
    else:
        back = verl.restore_dynamic_batch(torch.cat([part["input_ids"] for part in parts]), indices)
        assert torch.equal(back, make_batch(lengths)["input_ids"])
    with pytest.raises(UsageError, match=r"indices, but \d+ rows"):
        verl.restore_dynamic_batch(torch.zeros(99), indices)


def test_verl_groups_stay_together() -> None:
    _, indices = verl.rearrange_micro_batches(make_batch([30, 20, 10, 15, 40, 5]), 60, force_group_size=2)
    assert sorted(map(tuple, indices)) == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(UsageError, match="3 samples cannot be grouped by 2"):
        verl.rearrange_micro_batches(make_batch([30, 20, 10]), 60, force_group_size=2)


def test_verl_repeats_whole_groups_and_masks_them_in_their_own_type() -> None:
    batch = make_batch([9, 9, 9, 9])
    batch["loss_mask"] = torch.ones(4, 3, dtype=torch.bool)
    batch["response_mask"] = torch.full((4, 3), torch.nan)
    parts, indices = verl.rearrange_micro_batches(batch, 60, force_group_size=2, min_num_micro_batch=3)
    assert sorted(indices) == [[0, 1], [0, 1], [2, 3]]
    (idle,) = [part for part in parts if not part["loss_mask"].any()]
    assert idle["loss_mask"].dtype == torch.bool
    assert torch.equal(idle["response_mask"], torch.zeros(2, 3))


def test_verl_repeats_nothing_that_it_cannot_mask() -> None:
    batch = make_batch([9, 9])
    del batch["loss_mask"]
    assert len(verl.rearrange_micro_batches(batch, 60)[0]) == 1
    words = (
        r"^rank 0 has 2 to divide into 3 micro-batches: a batch needs a column loss_mask or response_mask, .* twice$"
    )
    with pytest.raises(UsageError, match=words):
        verl.rearrange_micro_batches(batch, 60, min_num_micro_batch=3)


def test_verl_without_a_sample_asks_for_one_and_not_for_a_mask() -> None:
    batch = make_batch([])
    words = r"^rank 0 has no sample, so none for an idle micro-batch to run: give it one$"
    for _ in range(2):
        with pytest.raises(UsageError, match=words):
            verl.rearrange_micro_batches(batch, 60)
        batch.pop("loss_mask", None)


def make_nested(rows: list[Any], dim: int) -> Any:
    ends = torch.tensor([0] + [row.shape[dim - 1] for row in rows]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, dim - 1), ends, jagged_dim=dim)


@pytest.mark.parametrize("lengths", [[30, 20, 10, 50], [30, 30], [9]])
def test_verl_nested_columns_stay_ragged_along_their_tokens(lengths: list[int]) -> None:
    """Positions of several axes are [axes, tokens] for each sample. One row alone does not show which of the two is ragged."""
    batch = make_batch(lengths, is_nested=True)
    rows = [torch.arange(3 * length).view(3, length) for length in lengths]
    batch["position_ids"] = make_nested(rows, 2)
    parts, indices = verl.rearrange_micro_batches(batch, 60)
    for part, own in zip(parts, indices, strict=True):
        found, expected = part["position_ids"], make_nested([rows[index] for index in own], 2)
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.offsets(), expected.offsets())


def test_verl_data_keeps_its_other_columns() -> None:
    import numpy

    data = Data(make_batch([30, 20, 40]), {"uid": numpy.array(["a", "b", "c"])}, {"step": 3})
    parts, indices = verl.prepare_dynamic_batch(data, 60)
    assert [[*part.non_tensor_batch["uid"]] for part in parts] == [["abc"[index] for index in own] for own in indices]
    assert all(part.meta_info == {"step": 3} for part in parts)


SHARDS = [[60, 60, 60], [20]]


def test_verl_ranks_with_few_samples_or_one_too_long_do_not_hang() -> None:
    """Spec: R13.4, R13.11."""

    def rearrange(rank: int, shards: list[list[int]]) -> Any:
        group = torch.distributed.group.WORLD
        parts, indices = verl.rearrange_micro_batches(make_batch(shards[rank]), 60, dp_group=group)
        return indices, [float(part["loss_mask"].sum()) for part in parts]

    few, long, fitting, empty = run_each(
        2, rearrange, [(SHARDS,), ([[60], [61, 5]],), ([[60], [5] * 3],), ([[60], []],)]
    )
    (indices, _), (repeated, masks) = get_values(few)
    assert sorted(chain.from_iterable(indices)) == [0, 1, 2]
    assert repeated == [[0]] * 3
    assert sorted(masks) == [0.0, 0.0, 3.0]
    assert [len(indices) for indices, _ in get_values(fitting)] == [1, 1]
    for results, words in (
        (long, "rank 1: sample 0 has 61 tokens, more than the budget of 60: raise the budget"),
        (empty, "rank 1 has no sample, so none for an idle micro-batch to run: give it one"),
    ):
        assert [(result.error, result.text) for result in results] == [("UsageError", words)] * 2


OLDER = {
    "0.2, 0.3, and copies in TinyZero and EasyR1": "batch max_token_len dp_group",
    "0.4": "batch max_token_len dp_group num_batches_divided_by same_micro_num_in_dp min_num_micro_batch",
    "0.5, 0.6": "batch max_token_len dp_group num_batches_divided_by same_micro_num_in_dp min_num_micro_batch"
    " use_dynamic_bsz_balance",
}
"""The arguments of `rearrange_micro_batches` in older releases of verl, from which other projects have copied it."""


@pytest.mark.parametrize("names", OLDER.values(), ids=[*OLDER])
def test_verl_calls_of_older_releases_mean_the_same(names: str) -> None:
    assert [*inspect.signature(verl.rearrange_micro_batches).parameters][: len(names.split())] == names.split()


@pytest.mark.parametrize("name", ["rearrange_micro_batches", "prepare_dynamic_batch", "restore_dynamic_batch"])
def test_verl_signatures_are_the_originals(name: str) -> None:
    original = pytest.importorskip("verl.utils.seqlen_balancing")
    theirs = inspect.signature(getattr(original, name)).parameters
    ours = inspect.signature(getattr(verl, name)).parameters
    assert [*ours] == [*theirs]
    assert [item.default for item in ours.values()] == [item.default for item in theirs.values()]


def test_verl_positions_of_several_axes_are_selected_as_the_original_does() -> None:
    utils = pytest.importorskip("verl.utils.tensordict_utils")
    kind = pytest.importorskip("tensordict").TensorDict
    batch = make_batch([30, 20, 10, 50], is_nested=True, kind=kind)
    rows = [torch.arange(3 * length).view(3, length) for length in (30, 20, 10, 50)]
    batch["position_ids"] = utils.nested_tensor_from_tensor_list(rows, ragged_idx=2)
    for part, own in zip(*verl.rearrange_micro_batches(batch, 60), strict=True):
        theirs = utils.index_select_tensor_dict(batch, own)["position_ids"]
        assert part["position_ids"]._ragged_idx == theirs._ragged_idx
        assert torch.equal(part["position_ids"].values(), theirs.values())
        assert torch.equal(part["position_ids"].offsets(), theirs.offsets())


@given(LENGTHS, st.booleans())
def test_verl_results_are_of_the_originals_kind(lengths: list[int], is_nested: bool) -> None:
    original = pytest.importorskip("verl.utils.seqlen_balancing")
    kind = pytest.importorskip("tensordict").TensorDict
    batch = make_batch(lengths, is_nested=is_nested, kind=kind)
    ours, own = verl.rearrange_micro_batches(batch, 60)
    theirs, other = original.rearrange_micro_batches(batch, 60)
    assert len(ours) <= len(theirs)
    assert sorted(chain.from_iterable(own)) == sorted(chain.from_iterable(other))
    select = pytest.importorskip("verl.utils.tensordict_utils").index_select_tensor_dict
    for part, indices in zip(ours, own, strict=True):
        expected = select(batch, indices)
        assert part.batch_size == expected.batch_size
        assert {*part.keys()} == {*expected.keys()}
        for key in expected.keys():  # noqa: SIM118 (of a TensorDict)
            for mine, yours in zip(part[key].unbind(), expected[key].unbind(), strict=True):
                assert torch.equal(mine, yours)
    flat = torch.arange(len(lengths))
    outputs = torch.cat([flat[indices] for indices in own])
    assert torch.equal(verl.restore_dynamic_batch(outputs, own), original.restore_dynamic_batch(outputs, own))


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 4)
)
def test_verl_plans_where_the_original_does_and_no_more_micro_batches(
    lengths: list[int], size: int, divided_by: int, at_least: int
) -> None:
    """With groups, multiples and a least number, whatever the original plans is planned here, with no more micro-batches."""
    original = pytest.importorskip("verl.utils.seqlen_balancing")
    kind = pytest.importorskip("tensordict").TensorDict
    lengths = lengths[: len(lengths) - len(lengths) % size]
    options: dict[str, Any] = {"num_batches_divided_by": divided_by, "min_num_micro_batch": at_least}
    options |= {"force_group_size": size}
    batch = make_batch(lengths, kind=kind)
    ours, own = verl.rearrange_micro_batches(batch, 60, **options)
    for indices in own:
        groups = sorted({index // size for index in indices})
        assert sorted(indices) == [group * size + place for group in groups for place in range(size)]
    try:
        theirs, other = original.rearrange_micro_batches(batch, 60, **options)
    except ValueError:  # fewer groups than micro-batches: here one is run again
        assert any(not part["loss_mask"].any() for part in ours)
        return
    assert len(ours) <= len(theirs)
    assert len(ours) % divided_by == len(theirs) % divided_by == 0
    assert sorted(chain.from_iterable(own)) == sorted(chain.from_iterable(other))


def prepare(rank: int, shards: list[list[int]]) -> Any:
    from verl.protocol import DataProto

    columns = dict(make_batch(shards[rank]))
    data = DataProto.from_dict(columns, {}, {"step": 3})
    try:
        parts, indices = verl.prepare_dynamic_batch(data, 60, dp_group=torch.distributed.group.WORLD)
    except UsageError as error:
        found: Any = str(error)
    else:
        outputs = torch.cat([part.batch["input_ids"][:, 0] for part in parts])
        back = verl.restore_dynamic_batch(outputs, indices)
        found = len(parts), back.tolist(), sum(float(part.batch["loss_mask"].sum()) for part in parts)
    torch.distributed.barrier()  # no rank is left behind
    return found


def test_a_user_of_verl_changes_one_import_and_nothing_hangs() -> None:
    """Two gloo ranks with verl's own classes: one has fewer samples than the agreed count, then one has an over-long sample."""
    pytest.importorskip("verl.protocol")
    first, second = (result.value for result in run_ranks(2, prepare, SHARDS))
    assert first == (3, [1, 2, 3], 9.0)
    assert second == (3, [1], 3.0)
    first, second = (result.value for result in run_ranks(2, prepare, [[60, 5], [61, 5]]))
    assert first == second
    assert first.startswith("rank 1: sample 0 has 61 tokens, more than the budget of 60")


OURS, ORIGINAL = "odb_ref.compat.verl", "verl.utils.seqlen_balancing"
PATIENCE_S = 4.0


def train_step(rank: int, name: str, shards: list[list[int]]) -> Any:
    """Returns how many micro-batches a trainer reduces gradients of, or what it raises. Like an actor, it survives that."""
    from verl.protocol import DataProto

    group = torch.distributed.new_group(timeout=timedelta(seconds=PATIENCE_S))
    data = DataProto.from_dict(dict(make_batch(shards[rank])), {}, {})
    torch.distributed.barrier()
    module: Any = import_module(name)
    module.get_device_name = lambda: "cpu"  # the original's would be a GPU
    try:
        parts, _ = module.prepare_dynamic_batch(data, 60, dp_group=group)
        for _ in parts:
            torch.distributed.all_reduce(torch.ones(1), group=group)
    except Exception as error:
        if name == ORIGINAL:
            time.sleep(2 * PATIENCE_S)
        return str(error)
    return len(parts)


LONG = [[60, 5], [61, 5]]
TOO_LONG = "rank 1: sample 0 has 61 tokens, more than the budget of 60"


@pytest.mark.parametrize(
    ("shards", "ours", "original"),
    [
        (SHARDS, ["3", "3"], ["(?s)Requested 3 non-empty.*only 1", "(?s)Requested 3 non-empty.*only 1"]),
        (LONG, [TOO_LONG, TOO_LONG], ["(?i)timed out", "max_token_len must be greater"]),
    ],
    ids=["fewer-samples-than-micro-batches", "one-too-long"],
)
def test_a_user_of_verl_beside_the_original_import(
    shards: list[list[int]], ours: list[str], original: list[str]
) -> None:
    """Spec: R13.4, R13.11. Only the import differs. If a rank has few samples, the original has no plan. If one has one that
    is too long, the other rank waits for it until its group gives up.
    """
    pytest.importorskip("verl.protocol")
    for rank, result in enumerate(run_ranks(2, train_step, OURS, shards)):
        assert re.match(ours[rank], str(result.value))
        assert result.seconds < PATIENCE_S
    for rank, result in enumerate(run_ranks(2, train_step, ORIGINAL, shards)):
        assert re.search(original[rank], str(result.value)), result.value


def make_arguments(**changes: Any) -> SimpleNamespace:
    values = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30, "micro_batch_size": None, "balance_data": True}
    return SimpleNamespace(**values | changes)


CONFIG = {"dp_size": 2, "cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}


@given(st.lists(st.integers(1, 60), min_size=8, max_size=30), st.integers(1, 3), st.booleans())
def test_slime_schedules_place_each_sample_once_within_the_budget(
    lengths: list[int], per_rollout: int, has_last: bool
) -> None:
    rollouts = [index // per_rollout for index in range(len(lengths))]
    number = max(rollouts) + 1
    size = max(1, number // 2)
    arguments = make_arguments(allow_partial_train_step=has_last)
    try:
        partitions, micro_batches, counts, sizes = slime.build_dp_schedule(
            arguments, CONFIG, lengths, global_batch_size=size, rollout_indices=rollouts
        )
    except UsageError as error:
        assert "to divide into" in str(error)
        return
    kept = sum(sizes)
    left_over = sum(rollout >= number - number % size for rollout in rollouts)
    assert sizes == [size] * (number // size) + ([number % size] if has_last and left_over >= 2 else [])
    assert sorted(chain.from_iterable(partitions)) == [
        index for index, rollout in enumerate(rollouts) if rollout < kept
    ]
    assert all(count % 2 == 0 for count in counts)
    for own, batches in zip(partitions, micro_batches, strict=True):
        assert [*chain.from_iterable(batches)] == [*range(len(own))]
        assert len(batches) == sum(counts)
        assert all(0 < sum(lengths[own[place]] for place in batch) <= 60 for batch in batches)
        step_of = [rollouts[own[batch[0]]] // size for batch in batches]
        assert step_of == [step for step, count in enumerate(counts) for _ in range(count)]


def schedule(arguments: SimpleNamespace, lengths: list[int], size: int, **more: Any) -> Any:
    config = {"dp_size": 4, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": None}
    return slime.build_dp_schedule(
        arguments, config, lengths, global_batch_size=size, rollout_indices=[*range(len(lengths))], **more
    )


def test_slime_serves_what_it_says_and_refuses_the_rest() -> None:
    arguments = make_arguments(allow_partial_train_step=True)
    assert schedule(arguments, [9] * 9, 8)[3] == [8]  # a rank would have nothing to do in the last step
    assert schedule(arguments, [9] * 12, 8, sample_is_multimodal=[True] * 12)[3] == [8, 4]
    arguments.packing_safety_margin = 0.5
    assert max(map(len, schedule(arguments, [5] * 32, 32)[1][0])) == 3
    arguments.multimodal_aware_packing = "separate"
    assert schedule(arguments, [5] * 8, 8)[3] == [8]
    with pytest.raises(UsageError, match="multimodal_aware_packing is not served"):
        schedule(arguments, [5] * 8, 8, sample_is_multimodal=[True] * 8)
    arguments.global_batch_tokens = 100
    with pytest.raises(UsageError, match="global_batch_tokens is not served"):
        schedule(arguments, [5] * 8, 8)


FIXED = {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None, "micro_batch_size": 2}
FLAT = CONFIG | {"vpp_size": 1}


def build(lengths: list[int], size: int, arguments: dict[str, Any], config: Any = CONFIG, rollouts: Any = None) -> Any:
    given = range(len(lengths)) if rollouts is None else rollouts
    return slime.build_dp_schedule(
        make_arguments(**arguments), config, lengths, global_batch_size=size, rollout_indices=[*given]
    )


def test_slime_batches_of_a_fixed_size() -> None:
    _, batches, *_ = build([9] * 8, 8, FIXED, FLAT)
    assert [len(batch) for own in batches for batch in own] == [2] * 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([9] * 3, 4, FIXED), "3 rollouts do not fill a step of 4"),
        (([9] * 3, 1, FIXED, CONFIG, [0, 1]), "2 rollout_indices for 3 total_lengths"),
        (([9] * 3, 0, FIXED), "global_batch_size"),
        (([9], 1, FIXED, {"dp_size": 2}), "^train_parallel_config lacks cp_size, vpp_size, microbatch_group_size_per_"),
        (([9], 1, {}, FLAT), "rank 1 has 0 to divide into 1 micro-batches: it needs more samples, or fewer"),
        (([9] * 4, 4, {"max_tokens_per_gpu": None}), "needs max_tokens_per_gpu"),
        (
            ([*[9] * 7, 90], 4, {"max_tokens_per_gpu": 40}, FLAT),
            r"optimizer step 1, whose samples are \[4, 5, 6, 7\].*sample 3 has 90 tokens",
        ),
    ],
)
def test_slime_schedules_that_make_no_sense_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(*arguments)
