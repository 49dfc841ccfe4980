"""Lengths of texts, computed by hand, for any format of the rows, and without a word of the texts in an error."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from odb_sim.cli.main import main
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.tokens import CountedRow, RowReading, load_tokenizer, measure
from tokenizers import Tokenizer, models, pre_tokenizers

from odb_ref.core.errors import UsageError
from tests.helpers.commands import get_figures, hear, refuse

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system", *"abcdefgh", "think"]
SECRET = "abcabcabc"
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
"""Words and marks are tokens, lines are not. A turn is its mark, its role, its words and its end."""
PAIRS = [
    {"prompt": "a b", "response": "c d e"},
    {"prompt": "a", "response": "b"},
    {"prompt": "a b c d", "response": "e"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def count(row: object, tokenizer: Path, **reading: object) -> CountedRow:
    return measure("data:7", row, RowReading(tokenizer=str(tokenizer), **reading))  # type: ignore[arg-type]


def test_a_conversation_is_counted_turn_by_turn(tokenizer: Path) -> None:
    """<|im_start|> user a b <|im_end|>, then <|im_start|> assistant, then what carries loss: c d e <|im_end|>."""
    assert count({"messages": CHAT}, tokenizer) == CountedRow(5 + 2 + 4, 4)
    longer = [
        {"role": "system", "content": "h"},
        *CHAT,
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]
    assert count({"messages": longer}, tokenizer) == CountedRow(4 + 11 + 4 + 2 + 2, 4 + 2)
    assert count({"messages": CHAT[:1]}, tokenizer) == CountedRow(5, 0)
    assert count({"messages": CHAT}, tokenizer, max_tokens=9) == CountedRow(9, 2, is_cut=True)


def test_other_names_mean_the_same(tokenizer: Path) -> None:
    expected = count({"messages": CHAT}, tokenizer)
    assert (
        count({"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}]}, tokenizer)
        == expected
    )
    assert count(PAIRS[0], tokenizer) == expected
    assert count({"question": "a b", "answer": "c d e", "id": 3}, tokenizer) == expected
    assert count({"instruction": "a", "input": "b", "output": "c d e"}, tokenizer) == expected
    assert count({"x": "a b", "y": "c d e"}, tokenizer, columns=("x", "y")) == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b"}]}, CHAT[1]]
    assert count({"messages": parts}, tokenizer) == expected
    assert count({"prompt": CHAT[:1], "completion": CHAT[1:]}, tokenizer) == expected


def test_texts_and_what_is_tokenized_already(tokenizer: Path) -> None:
    assert count({"text": "a b c"}, tokenizer) == CountedRow(3, 3)
    assert count(PAIRS[0], tokenizer, template="none") == CountedRow(5, 3)
    ids = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}
    assert measure("data:1", ids, RowReading()) == CountedRow(4, 2)
    assert measure("data:1", {"input_ids": [1, 2, 3]}, RowReading(max_tokens=2)) == CountedRow(2, 2, is_cut=True)
    assert count({"text": ""}, tokenizer) == CountedRow(1, 0, is_empty=True), "a length is at least 1"


def test_a_template_of_ones_own(tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }} <|im_end|>{% endgeneration %}{% else %}{{ m.content }} <|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )
    assert count({"messages": CHAT}, tokenizer, template=str(template)) == CountedRow(11, 4)
    template = tmp_path / "thinking.jinja"
    # Thoughts in turns before the last are dropped, so a rendered prefix differs from the beginning of the whole.
    template.write_text(
        "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == 'assistant' and loop.last %}think {% endif %}"
        "{{ m.content }} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant think {% endif %}"
    )
    twice = count({"messages": [*CHAT, *CHAT]}, tokenizer, template=str(template))
    assert (twice.total, twice.supervised, twice.is_approximate) == (11 + 12, 3 + 4, True)


CALL = [{"type": "function", "function": {"name": "c", "arguments": "d e"}}]


@pytest.mark.parametrize(
    ("turn", "more", "what"),
    [
        ({"content": None, "tool_calls": CALL}, {}, "tool_calls"),
        ({"content": None, "function_call": {"name": "c", "arguments": ""}}, {}, "function_call"),
        ({"content": "c", "reasoning_content": "d"}, {}, "reasoning_content"),
        ({"content": "c"}, {"tools": CALL}, "tools"),
    ],
)
def test_what_the_fallback_template_leaves_out_is_refused_and_counted_with_one_that_has_it(
    turn: dict[str, object], more: dict[str, object], what: str, tokenizer: Path, tmp_path: Path
) -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", **turn}], **more}
    with pytest.raises(UsageError, match=f"data:7: .* no place for {what}: give yours with --template"):
        count(row, tokenizer)
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% for tool in tools or [] %}h {% endfor %}{% for m in messages %}{{ m.content }} "
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments }} {% endfor %}{% endfor %}"
    )
    plain = count(
        {"messages": [CHAT[0], {"role": "assistant", "content": turn["content"]}]}, tokenizer, template=str(template)
    )
    expected = plain.total + {"tool_calls": 2, "tools": 1}.get(what, 0)
    assert count(row, tokenizer, template=str(template)).total == expected
    if "tools" in more:
        assert count({**row, "tools": json.dumps(CALL)}, tokenizer, template=str(template)).total == expected
    assert count({"messages": [{**CHAT[0], "tool_calls": None}, CHAT[1]], "tools": []}, tokenizer).total == 11


def test_a_preference_pair_is_twice_the_longer(tokenizer: Path) -> None:
    """The longer of 5 + 2 + 4 tokens, with three words chosen, and 5 + 2 + 6, with five rejected."""
    pair = {"prompt": "a b", "chosen": "c d e", "rejected": "a b c d e"}
    assert count(pair, tokenizer) == CountedRow(2 * 13, 4 + 6)
    assert count(pair, tokenizer, max_tokens=12) == CountedRow(2 * 12, 4 + 5, is_cut=True)
    assert count(pair, tokenizer, columns=("prompt", "chosen")) == CountedRow(11, 4), "as it is asked for by name"
    assert count({**pair, "rejected": None}, tokenizer) == CountedRow(11, 4)


def test_no_column_is_kept_twice(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a b", "total_tokens": 9, "x": 1}\n')
    for names in (["total_tokens"], ["x", "x"]):
        keep = [word for name in names for word in ("--keep", name)]
        command = ["lengths", str(data), "--tokenizer", str(tokenizer), *keep, "--processes", "1"]
        assert f"--keep {names[0]}: the file already has a column of that name" in refuse(capsys, command)


@pytest.mark.parametrize("has_several", [False, True])
def test_the_template_beside_a_tokenizer_is_its_own(has_several: bool, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    own = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": own}]
    config = {"chat_template": named if has_several else own, "bos_token": {"content": "h"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert count({"messages": CHAT}, tmp_path) == CountedRow(1 + 5, 3)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", b"{{ 1 + 'a' }}", "data:7: the chat template fails on a conversation: TypeError"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not a file that can be read"),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json: not the configuration of a tokenizer"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "not the configuration of a tokenizer"),
    ],
)
def test_a_template_that_does_not_work_is_said(
    name: str, content: bytes, expected: str, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        count({"messages": CHAT}, tmp_path)


def test_values_of_several_kinds_that_are_kept_stay_apart(tmp_path: Path) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "l.csv"
    groups = [1, "a", 1, "1", 0, "b", None, "None", -1]
    rows = [{"input_ids": [1], "group": group, "id": 2**62 + number} for number, group in enumerate(groups)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["lengths", str(data), "--keep", "group", "--keep", "id", "--out", str(out), "--processes", "1"]
    assert main(command) == 0
    assert load_lengths(str(out), ["group", "id"]).resources is not None
    with out.open(newline="") as file:
        found = [row["group"] for row in csv.DictReader(file)]
    assert found[0] == found[2]
    assert len(set(found)) == len(groups) - 1


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "saved", "file.py:function"])
def test_whatever_holds_the_rows_the_lengths_are_the_same(
    kind: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / f"data.{kind}", tmp_path / "lengths.csv"
    lines = "".join(json.dumps(row) + "\n" for row in PAIRS)
    match kind:
        case "jsonl":
            data.write_text(lines)
        case "jsonl.gz":
            data.write_bytes(gzip.compress(lines.encode()))
        case "json":
            data.write_text(json.dumps(PAIRS))
        case "csv":
            with data.open("w", newline="") as file:
                writer = csv.DictWriter(file, PAIRS[0])
                writer.writeheader()
                writer.writerows(PAIRS)
        case "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(PAIRS), data)
        case "saved":
            pytest.importorskip("datasets").Dataset.from_list(PAIRS).save_to_disk(data)
        case _:
            (tmp_path / "rows.py").write_text(f"def make():\n    yield from {PAIRS!r}\n")
            data = tmp_path / "rows.py:make"
    command = ["lengths", str(data), "--tokenizer", str(tokenizer), "--out", str(out), "--processes", "1"]
    assert main(command) == 0
    lengths = load_lengths(str(out))
    expected = [count(row, tokenizer) for row in PAIRS]
    assert lengths.tokens.tolist() == [one.total for one in expected]
    assert lengths.supervised_tokens.tolist() == [one.supervised for one in expected]
    assert main(["simulate", str(out), "--ranks", "2", "--token-budget", "30"]) == 0


def test_empty_samples_are_counted_and_cautioned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"input_ids": []}\n{"input_ids": [1, 2]}\n{"input_ids": []}\n')
    figures = get_figures(["lengths", str(data), "--processes", "1"])
    assert (figures["samples"], figures["tokens"], figures["empty"]) == (3, 4, 2)
    assert "Caution: 2 of 3 samples have no token at all" in hear(capsys)


def test_missing_data_is_told_before_the_tokenizer_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look_up(name: str) -> None:
        raise AssertionError(f"{name} was looked up on the hub")

    monkeypatch.setattr(Tokenizer, "from_pretrained", look_up)
    data = tmp_path / "none.jsonl"
    assert f"{data}: no such file" in refuse(capsys, ["lengths", str(data), "--tokenizer", "a/b"])
    data.write_text("\n")
    assert f"{data}: no row in it" in refuse(capsys, ["lengths", str(data), "--tokenizer", "a/b"])


def test_several_processes_keep_the_order(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "l.csv"
    rows = [{"text": "a " * (number % 97 + 1), "user": f"u{number // 10}", "n": number} for number in range(1000)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"lengths {data} --tokenizer {tokenizer} --out {out} --processes 2"
    summary = get_figures(f"{command} --keep user --keep n --max-length 90")
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [int(row["total_tokens"]) for row in found] == [min(90, number % 97 + 1) for number in range(1000)]
    assert [int(row["user"]) for row in found] == [number // 10 for number in range(1000)]
    assert [int(row["n"]) for row in found] == list(range(1000))
    assert sum(bin_["samples"] for bin_ in summary["bins"]) == 1000
    assert sum(bin_["token_share"] for bin_ in summary["bins"]) == pytest.approx(1)
    assert summary["cut"] == sum(number % 97 + 1 > 90 for number in range(1000))
    said = capsys.readouterr().out
    assert f"{summary['cut']} samples are cut at --max-length" in said
    assert said.count("#") > 40


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (f'{{"prompt": "{SECRET}"', [], r"d.jsonl:1: not JSON"),
        (f'["{SECRET}"]', [], r"d.jsonl:1 is of type list"),
        (f'{{"something": "{SECRET}"}}', [], r"d.jsonl:1 has no column with a usual name \(something\): choose one"),
        (f'{{"text": ["{SECRET}"]}}', [], r"d.jsonl:1: a turn is of type str"),
        (f'{{"text": "{SECRET}"}}\n{{"text": null}}', [], r"d.jsonl:2: text is null"),
        (f'{{"text": "{SECRET}"}}', ["--column", "none"], r"d.jsonl:1 has no column none"),
        (f'{{"text": "{SECRET}"}}', ["--keep", "none"], r"d.jsonl:1 has no column none"),
        (
            f'{{"messages": [{{"role": "user", "content": [{{"type": "image", "x": "{SECRET}"}}]}}]}}',
            [],
            "more than text",
        ),
        (
            f'{{"text": "{SECRET}"}}',
            ["--tokenizer", "no-such-file.json"],
            "--tokenizer no-such-file.json: No such file",
        ),
        (
            f'{{"text": "{SECRET}"}}',
            ["--template", "no-such-file"],
            "--template no-such-file: not a file that can be read",
        ),
        (f'{{"text": "{SECRET}"}}', ["--max-length", "0"], "--max-length must be at least 1"),
        ("", [], "no row in it"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_without_the_text(
    text: str, options: list[str], expected: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(text)
    err = refuse(capsys, ["lengths", str(data), "--tokenizer", str(tokenizer), "--processes", "1", *options])
    with pytest.raises(UsageError, match=expected):
        raise UsageError(err)
    assert SECRET not in err


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.jsonl", f'{{"text": "{SECRET}\\ud800"}}', r"d\.jsonl:1: a text is not valid Unicode"),
        ("d.jsonl", f'{{"text": "{SECRET}", "id": {"9" * 5000}}}', r"d\.jsonl:1: holds a number of too many digits"),
        ("d.json", f'[{{"text": "{SECRET}", "id": {"9" * 5000}}}]', r"d\.json: holds a number of too many digits"),
        ("d.csv", f'text\n"{SECRET}\nb\nc\n', r"d\.csv:4: unexpected end of data"),
        ("d.csv", f"text\na\n{SECRET}, b\n", r"d\.csv:3: more or fewer values than the 1 columns"),
        ("d.csv", f"text,n\n{SECRET}\n", r"d\.csv:2: more or fewer values than the 2 columns"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:10] + b"\xff" * 20, r"d\.jsonl\.gz: cannot be read"),
        (
            "d.py:make",
            "def make():\n    yield {'text': 'a'}\n    raise ValueError('no')",
            r"d\.py:make: ValueError: no",
        ),
        ("d.py:make", "def make():\n    yield {'text': 'a'}\n    raise SystemExit(4)", r"d\.py:make: SystemExit: 4"),
    ],
)
def test_rows_that_cannot_be_read_are_said_with_their_place(
    name: str, content: str | bytes, expected: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name.partition(":")[0]).write_bytes(content if isinstance(content, bytes) else content.encode())
    err = refuse(capsys, ["lengths", str(tmp_path / name), "--tokenizer", str(tokenizer), "--processes", "1"])
    assert re.search(expected, err)
    assert SECRET not in err


def test_a_text_in_a_csv_may_be_long(tokenizer: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.csv"
    data.write_text("text\n" + "a " * 100_000 + "\n")
    assert get_figures(["lengths", str(data), "--tokenizer", str(tokenizer), "--processes", "1"])["longest"] == 100_000


def test_rows_of_texts_need_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a"}')
    assert "need --tokenizer" in refuse(capsys, ["lengths", str(data), "--processes", "1"])
    assert main(["lengths", f"{tmp_path}/none.py:rows"]) == 2
    assert main(["lengths", f"{tmp_path}/none.bin"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    "name", ["d.jsonl", "d.json", "d.txt", "d.parquet", "d.csv", "plain.csv", "quoted.csv", "number.csv"]
)
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_texts_where_lengths_are_wanted_are_said_and_not_shown(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / name
    data.write_text(
        {
            "d.csv": f"prompt,response\n{SECRET},{SECRET}\n",
            "plain.csv": f"and so it was that {SECRET} said to me, long ago\n",
            "quoted.csv": f'"{SECRET}, she said, and went, quite content with it all"\n',
            "number.csv": f"total_tokens,x\nand so {SECRET} came to be,1\n",
        }.get(name, json.dumps({"prompt": SECRET}))
    )
    err = refuse(capsys, [command, str(data), "--ranks", "2", "--token-budget", "99"])
    assert SECRET not in err
    if name != "number.csv":
        assert f"odb-ref lengths {data} --tokenizer TOKENIZER --out lengths.csv makes them" in err
    else:
        assert "total_tokens is a text of 27 characters" in err


def test_a_missing_package_is_named(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs tokenizers: pip install 'odb-ref\[data\]'"):
        count({"text": "a"}, tokenizer)
    load_tokenizer.cache_clear()


def test_a_plan_says_how_the_texts_were_counted(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that it prints count the same lengths, whatever the file's name."""
    monkeypatch.chdir(tmp_path)
    words = [" ".join("abcdefgh"[: 1 + number % 8]) for number in range(64)]
    rows = [json.dumps({"x": text, "y": text}) for text in words]
    Path("my texts.jsonl").write_text("\n".join(rows))
    reading = [
        "--tokenizer",
        str(tokenizer),
        "--template",
        "none",
        "--column",
        "x",
        "--column",
        "y",
        "--max-length",
        "9",
    ]
    job = "--model qwen2.5-0.5b --gpu rtx4090 --gpus 2 --strategy ddp --global-batch 16 --processes 1 --json plan.json"
    assert main(["plan", "my texts.jsonl", *reading, *job.split()]) == 0
    *_, lengths, simulate = json.loads(Path("plan.json").read_text())["commands"]
    program, *arguments = shlex.split(lengths)
    assert program == "odb-ref"
    assert main(arguments) == 0
    assert load_lengths("lengths.csv").tokens.tolist() == [min(9, 2 * (1 + number % 8)) for number in range(64)]
    assert "odb-ref simulate lengths.csv " in simulate
