"""Length traces: what can be read, and that each kind of bad input gives one line with file and line."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.lengths import list_bundled_names, load_lengths
from odb_sim.studies.runs import POLICIES, has_window, is_rule

from odb_ref.core.errors import UsageError
from tests.helpers.commands import refuse

ROWS = {
    "arxiv_summarization_vidur": 28257,
    "azure_llm_2023_code": 8819,
    "azure_llm_2023_conv": 19366,
    "gsm8k": 8792,
    "llamafactory_demos": 3749,
    "mm_mix_real": 5753,
    "sgd_dialogues": 17193,
}


def test_every_bundled_trace_is_listed_and_loads_whole() -> None:
    assert {name: len(load_lengths(name)) for name in list_bundled_names()} == ROWS


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_bundled_trace_holds_lengths(name: str) -> None:
    lengths = load_lengths(name)
    assert lengths.name == name
    assert lengths.tokens.min() >= 1
    assert (lengths.supervised_tokens <= lengths.tokens).all()
    assert lengths.supervised_tokens.sum() > 0


def test_csv_gz_npy_byte_order_mark_and_blank_lines_are_read(tmp_path: Path) -> None:
    text = "x,total_tokens\n1, 5\n\n2,7\n"
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write(text.replace("\n", "\r\n"))
    np.save(tmp_path / "c.npy", np.array([5, 7], dtype=np.int32))
    (tmp_path / "d.csv").write_bytes((tmp_path / "b.csv.gz").read_bytes())
    (tmp_path / "e.csv").write_text("total_tokens\n5\n7\n\n\n")
    for name in ("a.csv", "b.csv.gz", "c.npy", "d.csv", "e.csv"):
        lengths = load_lengths(str(tmp_path / name))
        assert lengths.tokens.tolist() == lengths.supervised_tokens.tolist() == [5, 7]


def test_supervised_tokens_are_used_where_they_are_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("supervised_tokens,total_tokens\n0,5\n7,7\n")
    assert load_lengths(str(tmp_path / "a.csv")).supervised_tokens.tolist() == [0, 7]


BAD_FILES = {
    "no_column.csv": (
        b"tokens,other\n5,5\n",
        ":1: no column total_tokens in the header, the first line; the columns are tokens, other",
    ),
    "no_header.csv": (b"5\n6\n", ":1: no column total_tokens in the header, the first line"),
    "negative.csv": (b"total_tokens\n5\n-3\n", ":3: total_tokens is -3"),
    "zero.csv": (b"total_tokens\n0\n", ":2: total_tokens is 0"),
    "word.csv": (b"total_tokens\n5\nfive\n", ":3: total_tokens is 'five', not a whole number"),
    "fraction.csv": (b"total_tokens\n5.5\n", ":2: total_tokens is '5.5', not a whole number"),
    "hole.csv": (b"total_tokens\n5\n\n\n7\n\n", ":3: an empty line between rows: remove it, or fill in total_tokens"),
    "blank.csv": (b"a,total_tokens\n5,\n", ":2: total_tokens is '', not a whole number"),
    "huge.csv": (b"total_tokens\n99999999999999999999\n", ":2: total_tokens is 1.000e+20"),
    "short_row.csv": (b"a,total_tokens\n1,5\n2\n", ":3: 1 values, but the header has 2 columns"),
    "supervised.csv": (
        b"total_tokens,supervised_tokens\n5,6\n",
        ":2: supervised_tokens is 6, expected 0 to total_tokens (5)",
    ),
    "twice.csv": (b"total_tokens,x, total_tokens\n5,1,7\n", ":1: 2 columns have the name total_tokens"),
    "supervised_twice.csv": (
        b"total_tokens,supervised_tokens,supervised_tokens\n5,1,2\n",
        ":1: 2 columns have the name supervised_tokens",
    ),
    "empty.csv": (b"", ": empty file"),
    "header_only.csv": (b"total_tokens\n", ": a header and no rows"),
    "binary.csv": (b"total_tokens\n\xff\xfe\n", ": not UTF-8 text"),
    "nul.csv": (b"total_tokens\n5\x00\n", ":2: "),
    "open_quote.csv": (b'text,total_tokens\na,5\n"b,6\nc,7\n', ":4: unexpected end of data"),
    "plain.csv.gz": (b"total_tokens\n5\n", ": cannot be read"),
    "cut.csv.gz": (gzip.compress(b"total_tokens\n" + b"5\n" * 50)[:-12], ": cannot be read"),
    "text.npy": (b"total_tokens\n5\n", ": cannot be read"),
    "empty.npy": (b"", ": cannot be read"),
    "header.npy": (b"\x93NUMPY\x01\x00\x02\x00{(", ": cannot be read"),
    "zip.npy": (b"PK\x03\x04", ": cannot be read"),
}


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_as_a_file(packed: bool, tmp_path: Path) -> None:
    text = ("total_tokens\n" + "5\n7\n" * 10_000).encode()
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(text) if packed else text,))
    writer.start()
    assert load_lengths(str(pipe)).tokens.sum() == 120_000
    writer.join()


BAD_COLUMNS = {
    "missing": (
        b"total_tokens\n5\n",
        "a.csv:1: no column patches in the header, the first line; the columns are total_tokens",
    ),
    "negative": (b"patches,total_tokens\n-1,5\n", "a.csv:2: patches is -1, but an amount is at least 0"),
    "word": (b"total_tokens,patches\n5,x\n", "a.csv:2: patches is 'x', not a whole number"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_a_bad_column_of_a_further_resource_is_refused(name: str, tmp_path: Path) -> None:
    content, expected = BAD_COLUMNS[name]
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        load_lengths(str(tmp_path / "a.csv"), ("patches",))


def test_an_array_of_lengths_has_no_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 4]))
    with pytest.raises(UsageError, match=r"no column patches, because a \.npy file holds only lengths"):
        load_lengths(str(tmp_path / "a.npy"), ("patches",))


def test_columns_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"b,total_tokens,a\n1,5,2\n0,6,9\n")
    lengths = load_lengths(str(tmp_path / "a.csv"), ("a", "b"))
    assert lengths.tokens.tolist() == lengths.supervised_tokens.tolist() == [5, 6]
    assert lengths.resources.tolist() == [[2, 1], [9, 0]]


def test_an_archive_of_arrays_is_refused_whatever_its_name(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.savez(file, lengths=np.array([3, 4]))
    with pytest.raises(UsageError, match=r"several arrays in one \.npz file"):
        load_lengths(str(tmp_path / "a.npy"))


BAD_ARRAYS = {
    "float.npy": (np.array([1.0, 2.0]), ": an array of float64 with shape (2,)"),
    "durations.npy": (np.array([1], dtype="timedelta64[s]"), ": an array of timedelta64[s] with shape (1,)"),
    "square.npy": (np.ones((2, 2), dtype=np.int64), ": an array of int64 with shape (2, 2)"),
    "none.npy": (np.array([], dtype=np.int64), ": empty array"),
    "zero.npy": (np.array([4, 0, 5]), ": element 1 is 0"),
}


@pytest.mark.parametrize("name", [*BAD_FILES, *BAD_ARRAYS])
def test_bad_input_is_one_line_and_status_2(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name in BAD_FILES:
        content, expected = BAD_FILES[name]
        path.write_bytes(content)
    else:
        array, expected = BAD_ARRAYS[name]
        np.save(path, array)
    assert f"{name}{expected}" in refuse(capfd, ["simulate", str(path), "--ranks", "1", "--token-budget", "100"])
    with pytest.raises(UsageError):
        load_lengths(str(path))


BAD_ARGUMENTS = {
    "missing file": (
        "no_such_trace",
        "no_such_trace: no such file, and no bundled trace; the bundled traces are arxiv",
    ),
    "directory": (".", ".: is a directory"),
    "more ranks than samples": ("gsm8k --ranks 9000", "9000 ranks, but only 8792 samples"),
    "more ranks than drawn": ("gsm8k --ranks 9 --samples 8", "9 ranks, but only 8 samples"),
    "no ranks": ("gsm8k --ranks 0", "ranks must be at least 1, got 0"),
    "rank is a word": ("gsm8k --ranks two", "--ranks: invalid int value: 'two'"),
    "budget 0": ("gsm8k --token-budget 0", "budget_tokens must be at least 1, got 0"),
    "samples 0": ("gsm8k --samples 0", "samples must be at least 1 and at most 1,000,000,000, got 0"),
    "absurdly many samples": (f"gsm8k --samples {10**30}", "samples must be at least 1 and at most"),
    "absurdly many ranks": (f"gsm8k --ranks {10**30}", "ranks, but only 8792 samples"),
    "negative seed": ("gsm8k --seed -1", "seed must not be negative, got -1"),
    "limit without a value": ("mm_mix_real --limit width", "--limit width: expected COLUMN=MAX"),
    "limit of words": ("mm_mix_real --limit width=many", "--limit width=many: expected COLUMN=MAX"),
    "limit twice": ("mm_mix_real --limit width=9 --limit width=8", "--limit width=8: a limit of 9 was given already"),
    "limit of no column": (
        "gsm8k --limit width=9",
        "gsm8k:1: no column width in the header, the first line; the columns are total_tokens",
    ),
    "limit of a baseline": ("mm_mix_real --limit width=9 --policy bmt", "policy bmt does not run the protocol"),
    "quota in join mode": ("gsm8k --quota 5", "--quota needs --mode quota"),
    "no workers": ("gsm8k --workers 0", "workers must be at least 1, got 0"),
    "unknown policy": ("gsm8k --policy magic", "unknown policy 'magic'"),
    "unknown mode": ("gsm8k --mode never", "--mode: invalid choice: 'never'"),
    "trace of a baseline": ("gsm8k --policy standard --trace t", "policy standard does not run the protocol"),
    "json in no folder": ("gsm8k --json /no/such/folder/x.json", "/no/such/folder/x.json: cannot be written"),
    "json and trace in one file": ("gsm8k --json x --trace ./x", "./x: named twice"),
    "schedule above the budget": (
        "gsm8k --budget-schedule 0:1024,40:4096",
        "--budget-schedule 40:4096: must be at most --token-budget 2048",
    ),
    "batch size of batches that have none": (
        "gsm8k --batch-size 4",
        "--batch-size 4: applies only to fixed batches (standard, hfg, balanced), and policy odb has none",
    ),
    "slow rank twice": (
        "gsm8k --slow-rank 1:2 --slow-rank 1:3",
        "rank 1 computes 3 times as long: 2 times was given already",
    ),
    "slow loader twice": (
        "gsm8k --slow-loader 0:2 --slow-loader 1:2 --slow-loader 0:2",
        "rank 0 loads 2 times as long: 2 times was given already",
    ),
    "trace in no folder": ("gsm8k --trace /no/such/folder/x", "/no/such/folder/x: cannot be written"),
}


@pytest.mark.parametrize("case", list(BAD_ARGUMENTS))
def test_bad_arguments_are_one_line_and_status_2(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = BAD_ARGUMENTS[case]
    defaults = ["--ranks", "2", "--token-budget", "2048"]
    lengths, *options = arguments.split()
    assert expected in refuse(capfd, ["simulate", lengths, *defaults, *options])


@pytest.mark.parametrize("missing", ["--ranks", "--token-budget"])
def test_what_is_required_is_named(missing: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = {"--ranks": "2", "--token-budget": "2048"}
    del given[missing]
    err = refuse(capfd, ["simulate", "gsm8k", *(word for pair in given.items() for word in pair)])
    assert f"needs {missing}" in err


@pytest.mark.parametrize("policy", POLICIES)
def test_absurdly_large_numbers_are_only_numbers(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = "1" + "0" * 30
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--samples", "20", "--policy", policy, "--seed", large]
    windows = ["--window", large] if has_window(policy) else []
    ages = ["--max-age", large, "--depth", large] if is_rule(policy) else []
    assert main([*arguments, "--token-budget", large, *windows, *ages]) == 0
    assert capsys.readouterr().err == ""


def test_files_that_lose_nothing_may_be_named_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,total_tokens,x\n1,5,2\n")
    assert load_lengths(str(tmp_path / "a.csv")).tokens.tolist() == [5], "no column that is read is there twice"
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--samples", "20", "--token-budget", "2048"]
    assert main([*arguments, "--json", "/dev/null", "--steps-csv", "/dev/null"]) == 0


@pytest.mark.parametrize(
    ("command", "others"),
    [("sweep", ["--ranks", "2", "--processes", "1"]), ("compare", ["--ranks", "2"])],
)
def test_a_batch_size_needs_a_policy_with_fixed_batches(
    command: str, others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "gsm8k", *others, "--samples", "40", "--token-budget", "2048", "--batch-size", "4"]
    assert "--batch-size 4: applies only to fixed batches" in refuse(capfd, [*arguments, "--policy", "odb,paper"])
    assert main([*arguments, "--policy", "odb,standard"]) == 0


@pytest.mark.parametrize("command", ["simulate", "compare", "sweep", "tune"])
def test_what_is_read_is_not_written_over(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("total_tokens\n" + "5\n7\n" * 20)
    budget = "--memory-tokens" if command == "tune" else "--token-budget"
    os.link(path, other := tmp_path / "other.json")
    for out in (path, other):
        arguments = [command, str(path), "--ranks", "2", budget, "50", "--json", str(out)]
        assert f"{out}: named twice" in refuse(capfd, arguments)
    assert len(load_lengths(str(path))) == 40


def test_a_trace_is_not_written_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "t.ndjson")
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--samples", "20", "--token-budget", "2048", "--trace", path]
    assert main(arguments) == 0
    capfd.readouterr()
    for command in (["check", "--json"], ["replay", "--json"], ["calibrate", "--out"], ["view", "--html"]):
        for read in (path, str(tmp_path)):  # the file, or the folder that it is in
            assert f"{path}: named twice" in refuse(capfd, [command[0], read, command[1], path])
    assert main(["check", path]) == 0


def test_neither_a_rule_nor_a_model_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    copy(Path(__file__).parents[2] / "examples/rules/smooth.py", "rule.py")
    run, rule = "gsm8k --ranks 2 --token-budget 2048", "--policy rule.py:SmoothRule --json rule.py"
    for command in (f"simulate {run}", f"compare {run}", f"sweep {run}", "check --replay t.ndjson", "verify"):
        assert "rule.py: named twice" in refuse(capfd, f"{command} {rule}".split())
    Path("config.json").touch()
    command = "plan gsm8k --model config.json --gpu h100 --gpus 1 --json config.json"
    assert "config.json: named twice" in refuse(capfd, command.split())
