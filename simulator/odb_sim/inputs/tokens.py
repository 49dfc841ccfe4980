"""Counts the tokens of a row of texts, and those that carry loss, as a trainer would tokenize it.

A conversation is rendered whole by the tokenizer's chat template, and tokenized once. An assistant's turns carry loss,
including the token that ends each. To find where a turn begins and ends, the template renders the conversation up to the
turn's beginning, and up to its end. If an earlier part then depends on what follows, this fails; the content of the turn is
searched for instead, without its end.

The response to a prompt carries loss, and so does all of a plain text. A preference pair (``prompt``, ``chosen`` and
``rejected``) counts as two rows as long as the longer one. Tokenized rows (``input_ids``, with ``labels`` if not all tokens
carry loss) are counted as they are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from odb_ref.core.errors import UsageError
from odb_sim.inputs.texts import INSTALL, TEXT, Json, Row

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

CHATML: Final = "chatml"
NO_TEMPLATE: Final = "none"
_CHATML: Final = (
    "{% if tools %}{{ raise_exception('it has no place for tools: give yours with --template') }}{% endif %}"
    "{% for message in messages %}{% for name in ('tool_calls', 'function_call', 'reasoning_content') %}{% if message[name] %}"
    "{{ raise_exception('it has no place for ' ~ name ~ ': give yours with --template') }}{% endif %}{% endfor %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDS: Final = "input_ids"
LABELS: Final = "labels"
_IGNORED: Final = -100
_CONVERSATIONS: Final = ("messages", "conversations")
_CHOSEN: Final = "chosen"
_REJECTED: Final = "rejected"
_PAIRS: Final = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", _CHOSEN),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
_ROLES: Final = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Maps the role names of conversations to those of messages."""
ASSISTANT: Final = "assistant"

Message = dict[str, Json]
Template = Callable[[Sequence[Message], bool, Json], str]
"""Renders a conversation, given its turns, whether the next turn should begin, and the tools it may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReading:
    """How to read rows: a small value that can be sent to another process."""

    tokenizer: str | None = None
    """A ``tokenizer.json`` file, a folder that holds one, or a name on the hub. None is for tokenized rows."""
    template: str | None = None
    """A file, `CHATML` or `NO_TEMPLATE`. None means the tokenizer's own, or `CHATML` if the tokenizer has its tokens."""
    columns: tuple[str, ...] = ()
    """One column of texts or conversations, or two of prompt and response. Empty means the usual names."""
    max_tokens: int | None = None
    """The length at which a sample is cut."""


@dataclass(frozen=True, slots=True)
class CountedRow:
    """The lengths of a row."""

    total: int
    supervised: int
    is_cut: bool = False
    is_approximate: bool = False
    """True if the template did not show where an assistant's turn ends."""
    is_empty: bool = False
    """True if there is no token, which counts as 1."""


def measure(where: str, row: Row, reading: RowReading) -> CountedRow:
    """Returns the lengths of a row.

    Raises: UsageError naming the row, when it lacks the columns or they hold something else.
    """
    columns = reading.columns or _find_columns(row)
    if not columns:
        there = ", ".join(map(str, row))[:200]
        raise UsageError(f"{where} has no column with a usual name ({there}): choose one with --column")
    if not reading.columns and columns[-1] == _CHOSEN and row.get(_REJECTED) is not None:
        pair = [_measure_columns(where, row, (*columns[:-1], name), reading) for name in (_CHOSEN, _REJECTED)]
        return CountedRow(
            2 * max(one.total for one in pair),
            sum(one.supervised for one in pair),
            any(one.is_cut for one in pair),
            any(one.is_approximate for one in pair),
            any(one.is_empty for one in pair),
        )
    return _measure_columns(where, row, columns, reading)


def _measure_columns(where: str, row: Row, columns: tuple[str, ...], reading: RowReading) -> CountedRow:
    for column in columns:
        if row.get(column) is None and column in reading.columns[:1]:
            raise UsageError(f"{where} has no column {column}")
    first = row.get(columns[0])
    if columns[0] == IDS or (isinstance(first, list) and first and isinstance(first[0], int)):
        return _cut(*_count_ids(where, row, columns[0]), reading)
    tokenizer, template = load_tokenizer(reading)
    messages = _list_messages(where, row, columns)
    if template is not None and messages is not None:
        return _measure_chat(where, (messages, _get_tools(where, row)), tokenizer, template, reading)
    if messages is not None and len(columns) == 1 and not isinstance(first, str):
        raise UsageError(f"{where} is a conversation, and the tokenizer has no chat template: pass --template")
    if row.get(columns[-1]) is None:
        raise UsageError(f"{where}: {columns[-1]} is null")
    *before, last = [_get_text(where, row, column) for column in columns]
    if not before:
        total = len(_encode(where, tokenizer, last).ids) + _count_end(tokenizer)
        return _cut([True] * total, False, reading)
    prompt = len(_encode(where, tokenizer, "\n".join(filter(None, before))).ids)
    response = len(_encode(where, tokenizer, last, has_special=False).ids) + _count_end(tokenizer)
    return _cut([False] * prompt + [True] * response, False, reading)


def _encode(where: str, tokenizer: Tokenizer, text: str, *, has_special: bool = True) -> Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=has_special)
    except TypeError:  # JSON can spell what no encoding can hold
        raise UsageError(f"{where}: a text is not valid Unicode: it has half of a surrogate pair") from None


def _cut(carries: Sequence[bool], is_approximate: bool, reading: RowReading) -> CountedRow:
    kept = carries if reading.max_tokens is None else carries[: reading.max_tokens]
    return CountedRow(max(1, len(kept)), sum(kept), len(kept) < len(carries), is_approximate, not kept)


def _count_end(tokenizer: Tokenizer) -> int:
    """Returns 1 if the tokenizer knows an end token, with which each sample then ends, else 0."""
    return int(
        any(tokenizer.token_to_id(name) is not None for name in ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"))
    )


def _find_columns(row: Row) -> tuple[str, ...]:
    for column in (IDS, *_CONVERSATIONS):
        if row.get(column) is not None:
            return (column,)
    for columns in _PAIRS:
        if all(column in row for column in columns):
            return columns
    return (TEXT,) if TEXT in row else ()


def _count_ids(where: str, row: Row, column: str) -> tuple[list[bool], bool]:
    ids, labels = row.get(column), row.get(LABELS)
    if not isinstance(ids, list) or (labels is not None and (not isinstance(labels, list) or len(labels) != len(ids))):
        raise UsageError(f"{where}: {column} and {LABELS} must be lists of the same length")
    return ([True] * len(ids) if labels is None else [label != _IGNORED for label in labels]), False


def _get_text(where: str, row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {column} is of type {type(value).__name__}, expected a string")
    return value


def _list_messages(where: str, row: Row, columns: Sequence[str]) -> list[Message] | None:
    """Returns the turns of a conversation, or of a prompt and a response; None for a plain text."""
    first = row.get(columns[0])
    if isinstance(first, list):
        last = row.get(columns[-1]) if len(columns) > 1 else None
        turns = [*first, *(last if isinstance(last, list) else [])]
        messages = [_make_message(where, turn) for turn in turns]
        if isinstance(last, str):
            messages.append({"role": ASSISTANT, "content": last})
        return messages
    if len(columns) == 1:
        return None
    *before, last_text = [_get_text(where, row, column) for column in columns]
    return [
        {"role": "user", "content": "\n".join(filter(None, before))},
        {"role": ASSISTANT, "content": last_text},
    ]


def _make_message(where: str, turn: Json) -> Message:
    if not isinstance(turn, Mapping):
        raise UsageError(f"{where}: a turn is of type {type(turn).__name__}, expected an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise UsageError(
                f"{where}: a turn holds more than text, and the tokens of an image are not known: give rows with {IDS}, "
                "from module:function"
            )
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise UsageError(f"{where}: a turn has no role, or its content is not a string")
    return {**turn, "role": _ROLES.get(role, role), "content": content or ""}


def _get_tools(where: str, row: Row) -> Json:
    tools = row.get("tools")
    try:
        return json.loads(tools) if isinstance(tools, str) and tools else tools
    except ValueError:
        raise UsageError(f"{where}: tools is a string that is not JSON") from None


def _measure_chat(
    where: str,
    conversation: tuple[Sequence[Message], Json],
    tokenizer: Tokenizer,
    template: Template,
    reading: RowReading,
) -> CountedRow:
    messages, tools = conversation
    try:
        text = template(messages, False, tools)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    spans: list[tuple[int, int]] = []
    is_approximate, end = False, 0
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        try:
            before = template(messages[:place], True, tools)
            after = template(messages[: place + 1], False, tools).rstrip()
        except UsageError:  # the template only renders whole conversations
            before = after = "\0"
        if text.startswith(after) and after.startswith(before) and len(before) >= end:
            begin, end = len(before), len(after)
        else:
            content = str(message["content"]).strip()
            begin = text.find(content, end)
            is_approximate = True
            if begin < 0:
                raise UsageError(f"{where}: turn {place + 1} is missing from the text that the chat template renders")
            end = begin + len(content)
        spans.append((begin, end))
    encoding = _encode(where, tokenizer, text, has_special=False)
    carries, at = [], 0
    for begin, _ in encoding.offsets:
        while at < len(spans) and begin >= spans[at][1]:
            at += 1
        carries.append(at < len(spans) and begin >= spans[at][0])
    return _cut(carries, is_approximate, reading)


# Tokenizers and templates ------------------------------------------------------------------------------------------


@cache
def load_tokenizer(reading: RowReading) -> tuple[Tokenizer, Template | None]:
    """Returns the tokenizer and its template, or None if it has no template.

    Raises: UsageError when either cannot be loaded.
    """
    name = reading.tokenizer
    if name is None:
        raise UsageError(
            "rows of texts need --tokenizer: a tokenizer.json, a folder that has one, or a name on the hub"
        )
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError:
        raise UsageError(f"--tokenizer needs tokenizers: {INSTALL}") from None
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.suffix == ".gz":
            tokenizer = Loaded.from_str(gzip.decompress(file.read_bytes()).decode())
        elif file.exists() or file.suffix == ".json":  # not a name on the hub, where a look-up would take half a minute
            tokenizer = Loaded.from_file(str(file))
        else:
            tokenizer = Loaded.from_pretrained(name)
    except Exception as error:  # tokenizers raises plain exceptions
        raise UsageError(f"--tokenizer {name}: {' '.join(str(error).split())[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, _load_template(reading.template, folder if file.exists() else None, tokenizer)


def _load_template(asked: str | None, folder: Path | None, tokenizer: Tokenizer) -> Template | None:
    if asked == NO_TEMPLATE:
        return None
    names: Mapping[str, str] = {}
    text = None
    if asked is None and folder is not None:
        text, names = _read_own_template(folder)
    if asked not in (None, CHATML):
        text = _read_template(Path(str(asked)))
    if text is None and (asked == CHATML or tokenizer.token_to_id("<|im_start|>") is not None):
        text = _CHATML
    return None if text is None else _compile(text, names)


def _read_own_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Returns the template stored beside a tokenizer, and the special tokens that templates refer to."""
    text, names = None, {}
    config = folder / "tokenizer_config.json"
    if config.exists():
        try:
            data = json.loads(config.read_text(encoding="utf-8"))
            own = data.get("chat_template")
            if isinstance(own, list):  # several, each with a name
                own = {one["name"]: one["template"] for one in own}.get("default")
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise UsageError(f"{config}: not the configuration of a tokenizer") from error
        text = own if isinstance(own, str) else None
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = data.get(key)
            names[key] = token.get("content", "") if isinstance(token, dict) else token or ""
    if (file := folder / "chat_template.jinja").exists():
        text = _read_template(file)
    return text, names


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {file}: not a file that can be read, nor {CHATML} or {NO_TEMPLATE}") from error


def _compile(text: str, names: Mapping[str, str]) -> Template:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UsageError(f"chat templates need jinja2: {INSTALL}") from None

    class Generation(Extension):
        """The tag that transformers adds to templates to mark an assistant's text. Its contents are rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):  # type: ignore[no-untyped-def]
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )

    def refuse(message: str) -> str:
        raise TemplateError(message)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise UsageError(f"this is not a chat template: {error}") from error

    def render(messages: Sequence[Message], is_open: bool, tools: Json) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=is_open, tools=tools, **names)
        except TemplateError as error:
            raise UsageError(f"the chat template refuses a conversation: {error}") from error
        except Exception as error:  # it may add a number to a text, for example
            raise UsageError(f"the chat template fails on a conversation: {type(error).__name__}") from error

    return render
