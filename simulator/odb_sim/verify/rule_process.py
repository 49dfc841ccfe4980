"""The process in which a rule is verified: ``python -P -m odb_sim.verify.rule_process RULE RANK LIMIT_S IN OUT``.

It loads the rule, describes it, and answers questions over two pipes, one line of JSON each. If the rule ends its process,
prints or loops, only this process is affected. `rule_client` is the other end.

Every rank's process has a different hash seed and different addresses, like the processes of a job. Whatever else may differ
among these (the clock, the host, the environment, files), a rule may not use at all (`guard`).
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import Offer
from odb_sim.inputs.rules import OWN, describe_error, load_rule
from odb_sim.verify.guard import CHANGES, OUTSIDE, Guard, OutsideError
from odb_sim.verify.rule_state import compute_state, describe_change
from odb_sim.verify.variants import iterate_options, iterate_others, iterate_pairs

if TYPE_CHECKING:
    from _typeshed import TraceFunction

Json = None | bool | int | str | Sequence["Json"] | dict[str, "Json"]
_MOST_BYTES: Final = 8 * 2**30
_BALLAST: Final[list[bytes]] = []
"""Memory allocated before the rule is loaded, more on each rank, so that its objects have different addresses."""
_FLUSH_S: Final = 0.05
_MOST_SLOW: Final = 2
_CLASS: Final = "class"
"""Takes a parameter's place in a variant that is another class of the rule's file."""


class _TooLongError(BaseException):
    """The rule has not answered in time. It is no `Exception`, so that a rule which catches those is stopped too."""


def _raise_too_long(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


class ReplyLines:
    """Tracks which lines of the rule's file have run, in the functions that were entered."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._left: dict[CodeType, set[int]] = {}

    def trace(self, frame: FrameType, event: str, value: object) -> TraceFunction | None:
        """Returns the line tracer for calls into the rule's file that have lines left to run. For `sys.settrace`."""
        code = frame.f_code
        if code.co_filename != self.path:
            return None
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = {line for _, _, line in code.co_lines() if line is not None}
            left.discard(code.co_firstlineno)
        return self._trace_line if left else None

    def _trace_line(self, frame: FrameType, event: str, value: object) -> TraceFunction | None:
        self._left[frame.f_code].discard(frame.f_lineno)
        return self._trace_line

    def list_missed(self) -> list[int]:
        """Returns the lines that have not run."""
        return sorted(set().union(*self._left.values()))


class Server:
    """Answers the questions of one client."""

    def __init__(self, name: str, limit_s: float, answers: IO[str]) -> None:
        self._name = name
        self._limit_s = limit_s
        self._answers = answers
        self._clock = time.monotonic
        self._guard = Guard(name)
        self.rule = load_rule(name)
        module = sys.modules.get(type(self.rule).__module__)
        path = getattr(module, "__file__", None) if OWN in name else None
        self._lines = ReplyLines(path)
        self._slow = 0
        modules = [found for found in [*sys.modules.values()] if isinstance(found, ModuleType)]
        self._own = [found for found in modules if self._guard.is_own(vars(found))]
        self._state: dict[str, str] = {}

    def describe(self) -> Json:
        """Returns the rule's description of itself, and the integers in its file, near which its behaviour may change."""
        name = self.rule.name
        constants: set[int] = set()
        if self._lines.path is not None:
            tree = ast.parse(Path(self._lines.path).read_text(encoding="utf-8"))
            values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            constants = {int(value) for value in values if isinstance(value, int | float) and abs(value) < 2**61}
        self._state = compute_state(self.rule, self._own)
        return {
            "name": name if isinstance(name, str) else None,
            "shown": repr(name),
            "file": self._lines.path,
            "constants": sorted(constants),
        }

    def ask(self, wires: Sequence[Sequence[int]], *, is_traced: bool) -> None:
        """Writes the answer for each agreement. After some that took too long, the rule is not asked any more."""
        flushed = self._clock()
        for wire in wires:
            answer = self._ask_one(self.rule, Offer.from_wire(wire), is_traced=is_traced)
            self._answers.write(json.dumps(answer) + "\n")
            now = self._clock()
            if now - flushed > _FLUSH_S:
                self._answers.flush()
                flushed = now

    def _ask_one(self, rule: TargetRule, agreement: Offer, *, is_traced: bool = False) -> Json:
        """Returns the target, or a text that says why there is none."""
        if self._slow == _MOST_SLOW:
            return "is not asked any more: it did not answer in time, more than once"
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        if is_traced:
            sys.settrace(self._lines.trace)
        try:
            before = agreement.to_wire()
            target: object = rule.compute_target(agreement)
            self._guard.raise_noted()
            if agreement.to_wire() != before:
                return CHANGES
        except OutsideError as error:
            return f"{OUTSIDE}{error}"
        except _TooLongError:
            self._slow += 1
            return f"does not answer within {self._limit_s:g} s"
        except SystemExit as error:
            return f"ends its process: sys.exit({error.code!r})"
        except BaseException as error:
            return f"raises {describe_error(error)}"
        finally:
            if is_traced:
                sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
        if type(target) is int:
            return target
        kind = type(target)
        return f"answers {target!r}, a {kind.__module__}.{kind.__qualname__}, not an int".replace("builtins.", "")

    def describe_change(self) -> Json:
        """Returns a description of how the rule's state differs from before the first question."""
        return describe_change(self._state, compute_state(self.rule, self._own))

    def list_missed_lines(self) -> Json:
        """Returns the lines of the rule's file that no agreement reached."""
        return self._lines.list_missed()

    def compare_variants(self, wires: Sequence[Sequence[int]]) -> Json:
        """Returns a variant that has this rule's name but answers differently: the same class with one or two parameters
        changed, or another class of its file. Also returns the parameters for which no other value is known.
        """
        try:
            return self._compare_variants([Offer.from_wire(wire) for wire in wires])
        finally:
            self._state = compute_state(self.rule, self._own)  # because a class may count its instances

    def _compare_variants(self, agreements: Sequence[Offer]) -> Json:
        ours = [self._ask_one(self.rule, agreement) for agreement in agreements]
        unvaried: list[str] = []
        for parameter, value, variant in self._make_variants(unvaried):
            if variant.name != self.rule.name:
                continue
            for agreement, one in zip(agreements, ours, strict=True):
                other = self._ask_one(variant, agreement)
                if parameter == _CLASS and isinstance(other, str):
                    break  # an abstract or helper class, not a rule by itself
                if one != other:
                    return {"variant": [parameter, value, agreement.to_wire(), str(one), str(other)], "unvaried": []}
        return {"variant": None, "unvaried": unvaried}

    def _make_variants(self, unvaried: list[str]) -> Iterator[tuple[str, str, TargetRule]]:
        """Yields the rule with parameters changed. Adds parameters for which no other value is known to ``unvaried``."""
        kind = type(self.rule)
        for other_kind in [*getattr(sys.modules.get(kind.__module__), "__dict__", {}).values()]:
            is_sibling = isinstance(other_kind, type) and other_kind.__module__ == kind.__module__
            if is_sibling and other_kind is not kind and (sibling := _make(other_kind, {})) is not None:
                yield _CLASS, other_kind.__name__, sibling
        try:
            parameters = inspect.signature(kind).parameters
        except (TypeError, ValueError):
            return
        words = self._list_words()
        given = {name: getattr(self.rule, name) for name in parameters if hasattr(self.rule, name)}
        yield from self._make_otherwise(kind, words)
        for one, two in combinations(sorted(given.keys() - {"name"}), 2):
            for pair in iterate_pairs(given[one], given[two]):
                if (variant := _make(kind, {**given, one: pair[0], two: pair[1]})) is not None:
                    yield f"({one}, {two})", repr(pair), variant
        for name, parameter in parameters.items():
            if name == "name":
                continue
            is_open = parameter.kind is parameter.VAR_KEYWORD
            tried: list[tuple[Mapping[str, object], object]] = []
            tried += [(options, options) for options in (iterate_options(words) if is_open else ())]
            tried += [({name: other}, other) for other in iterate_others(given.get(name, parameter.default), words)]
            has_made = False
            for values, shown in tried:
                if (variant := _make(kind, {**given, **values}) or _make(kind, values)) is not None:
                    has_made = True
                    yield name, repr(shown), variant
            if not has_made:
                unvaried.append(name)

    def _make_otherwise(self, kind: type, words: list[str]) -> Iterator[tuple[str, str, TargetRule]]:
        """Yields the rule as its alternative constructors make it, with the same value for all their parameters."""
        for name, member in vars(kind).items():
            if not isinstance(member, classmethod | staticmethod):
                continue
            make = getattr(kind, name)
            for value in iterate_others(None, words):
                with suppress(Exception):
                    made: object = make(*[value] * len(inspect.signature(make).parameters))
                    if isinstance(made, TargetRule):
                        yield f"{name}()", repr(value), made

    def _list_words(self) -> list[str]:
        """Returns the strings in the rule's file, which may be valid values of a string parameter."""
        if self._lines.path is None:
            return []
        tree = ast.parse(Path(self._lines.path).read_text(encoding="utf-8"))
        return sorted(
            {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        )


def _make(kind: type, values: Mapping[str, object]) -> TargetRule | None:
    """Returns the rule with these parameters, or None if it does not accept them."""
    try:
        made: object = kind(**values)
        return made if isinstance(made, TargetRule) else None
    except Exception:
        return None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(arguments: Sequence[str]) -> int:
    """Serves until the client closes its end."""
    name, rank, limit_s = arguments[0], int(arguments[1]), float(arguments[2])
    questions, answers = os.fdopen(int(arguments[3])), os.fdopen(int(arguments[4]), "w")
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    signal.signal(signal.SIGPROF, _raise_too_long)
    _BALLAST.extend(bytes(17 * i % 401) for i in range(1_009 * rank))

    def say(value: Json) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        with _limited(5 * limit_s):
            server = Server(name, limit_s, answers)
            say(server.describe())
    except UsageError as error:
        say({"error": str(error)})
        return 2
    except _TooLongError:
        say({"error": f"rule {name!r} is not loaded within {5 * limit_s:g} s"})
        return 2
    except BaseException as error:  # A name that is computed may do anything.
        say({"error": f"rule {name!r}: {describe_error(error)}"})
        return 2
    for line in questions:
        kind, wires = json.loads(line)
        match kind:
            case "ask" | "trace":
                server.ask(wires, is_traced=kind == "trace")
                answers.flush()
            case "variants":
                say(server.compare_variants(wires))
            case "change":
                say(server.describe_change())
            case _:
                say(server.list_missed_lines())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
