"""The settings of the loader: few arguments, whose old spelling is refused with a hint at the new one."""

from __future__ import annotations

import re
from inspect import get_annotations, signature
from typing import get_type_hints

import pytest
from torch.utils.data import BatchSampler

from odb_ref import ODBDataLoader, UsageError
from odb_ref.torch.settings import GROUP_OF, GROUPS, RENAMED, LoaderArguments, arrange, describe_new_spelling, spread

MOST_ARGUMENTS = 24
KEPT = {"scaling", "reduction", "is_divided_by_trainer"}
"""Settings that used to have another name, without an argument of this name."""


def test_the_constructor_has_few_arguments_and_each_is_described() -> None:
    assert len(signature(ODBDataLoader).parameters) <= MOST_ARGUMENTS
    for kind in (ODBDataLoader, *GROUPS.values()):
        text = (kind.__doc__ or "").partition("Args:")[2]
        assert [name for name in signature(kind).parameters if not re.search(rf"\n( {{4}}){{1,2}}{name}: ", text)] == []


@pytest.mark.parametrize("name", sorted({*GROUP_OF, *RENAMED} - KEPT))
def test_an_old_spelling_is_refused_with_the_new_one(name: str) -> None:
    new = describe_new_spelling(name)
    assert new is not None
    with pytest.raises(UsageError) as caught:
        ODBDataLoader([], token_budget=1, **{name: None})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name}=... is now {new}"
    given, _, kind = new.partition("=")
    assert given in signature(ODBDataLoader).parameters
    if given in GROUPS:
        group, _, field = kind.partition("(")
        assert field.partition("=")[0] in signature(GROUPS[given]).parameters
        assert group == GROUPS[given].__name__


def test_what_passes_arguments_on_knows_them_as_the_constructor_does() -> None:
    given = get_annotations(ODBDataLoader.__init__, eval_str=True)
    for name in ("self", "return", "dataset", "token_budget"):
        given.pop(name, None)
    known = get_type_hints(LoaderArguments)
    assert set(known) == set(given)
    assert {name for name in known if known[name] != given[name]} == {"collate_fn"}  # of any sample


def test_batches_of_a_fixed_size_are_refused_with_what_says_it_here() -> None:
    for options in ({"batch_size": 4}, {"batch_sampler": []}, {"sampler": BatchSampler([0, 1, 2], 2, drop_last=False)}):
        with pytest.raises(UsageError, match="update_samples= sets how many samples an update holds"):
            ODBDataLoader([1, 2, 3], token_budget=1, **options)  # type: ignore[arg-type]


def test_processes_that_no_process_group_joins_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = [{"input_ids": [1]}] * 3
    with (
        ODBDataLoader(data, token_budget=3, collate_fn=list) as loader,
        pytest.warns(RuntimeWarning, match="WORLD_SIZE is 2, .* each process reads all samples"),
    ):
        assert len(list(loader.steps())) == 1


def test_what_was_never_an_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="windw"):
        ODBDataLoader([], token_budget=1, windw=3)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_another_class_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be {GROUPS[name].__name__}\(\.\.\.\), got 3"):
        ODBDataLoader([], token_budget=1, **{name: 3})  # type: ignore[arg-type]


def test_settings_one_by_one_are_those_of_the_groups() -> None:
    flat = {"token_budget": 9, "window": 3, "timeout_s": 2.0, "scaling": "none", "mode": "quota"}
    assert spread(arrange(flat)) == flat
    assert arrange(spread(arrange(flat))) == arrange(flat)
