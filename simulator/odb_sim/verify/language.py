"""The language of the rules that `odb-ref verify` judges: integer arithmetic on the agreement, without loops.

Whatever is written in it is a function of the agreement and of the rule's own parameters, and ends. It has no words for a
clock, a file, the number of a rank, chance, memory, the order of a set or an endless loop. A rule's file is read before it
runs, so nothing has to be caught while it runs, and `symbolic` can follow every path through it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import EllipsisType, ModuleType
from typing import Final

from odb_ref.core.batching.rules import TargetRule
from odb_ref.core.errors import UsageError
from odb_ref.core.offer import Offer
from odb_sim.inputs.rules import OWN, describe_error, find_file, load_rule

_VALUE, _FUNCTION, _TYPE, _METHOD, _PROPERTY = "value", "function", "type", "method", "property"
MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    "__future__": {"annotations": _TYPE},
    "dataclasses": {"dataclass": _TYPE},
    "enum": {"Enum": _TYPE},
    "typing": {"ClassVar": _TYPE, "Final": _TYPE, "Literal": _TYPE},
    "odb_ref.core.batching.rules": {"TargetRule": _TYPE, "compute_bounds": _FUNCTION},
    "odb_ref.core.offer": {"NONE": _VALUE, "Offer": _TYPE},
}
"""What a rule may import."""
FUNCTIONS: Final = ("abs", "divmod", "len", "max", "min", "sum")
"""The built-in functions that a rule may call."""
ERRORS: Final = ("ArithmeticError", "RuntimeError", "TypeError", "ValueError")
"""The exceptions that a rule may raise."""
ATTRIBUTES: Final = frozenset({"name", "value", *(item.name for item in fields(Offer))})
"""The attributes of what is not a rule: of an agreement, or of a member of an `Enum`."""
MOST_POWER: Final = 4
"""The largest constant to raise a number to that is not a constant. Z3 does not end in time with higher powers."""
MOST_SHIFT: Final = 64
"""The largest constant to shift by, or to raise a constant to."""

_SHIPPED: Final = "from dataclasses import dataclass\nfrom odb_ref.core.offer import NONE, Offer\n"
"""What the file of the shipped rules imports."""
_GRAMMAR: Final = (
    *(ast.Module, ast.ImportFrom, ast.alias, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.keyword),
    *(ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Return, ast.Raise, ast.Pass, ast.Load, ast.Store),
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Starred, ast.Call, ast.IfExp),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.JoinedStr, ast.FormattedValue),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_GROWING: Final = (ast.Pow, ast.LShift, ast.RShift)
_OPERATORS: Final = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitOr, *_GROWING)
"""BitOr is for the types of annotations."""
_TITLES: Final[Mapping[type[ast.AST], str]] = {
    ast.Dict: "a dictionary",
    ast.Div: "a true division, which rounds: use //",
    ast.For: "a loop",
    ast.GeneratorExp: "a loop",
    ast.Global: "a change of a global name",
    ast.Import: "an import of a whole module",
    ast.Lambda: "a lambda",
    ast.List: "a list, which could be changed: use a tuple",
    ast.ListComp: "a loop",
    ast.Nonlocal: "a change of an outer name",
    ast.Set: "a set",
    ast.Try: "the handling of an exception",
    ast.While: "a loop",
    ast.With: "a with statement",
}

Names = dict[str, str]
"""Names, each with what it stands for."""


class OutsideError(Exception):
    """Something is not of the language. The message says what, and in which line."""

    line: int = 0


@contextmanager
def _at(node: ast.AST) -> Iterator[None]:
    """Notes the line of the innermost node in which something is not of the language."""
    try:
        yield
    except OutsideError as error:
        error.line = error.line or getattr(node, "lineno", 0)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A rule in the `language`, and its file."""

    policy: str
    rule: TargetRule
    path: str | None
    """None for a shipped rule."""
    tree: ast.Module


def load_judged(policy: str) -> Judged:
    """Returns the rule called ``policy``, see `odb_sim.inputs.rules.load_rule`. Its file is read before it is run.

    Raises: UsageError when there is no such rule, or it is not in the language.
    """
    path: str | None = None
    try:
        if OWN not in policy:
            tree = ast.parse(_SHIPPED + inspect.getsource(type(load_rule(policy))))
        else:
            path = find_file(policy.rpartition(OWN)[0])
            tree = ast.parse(Path(path).read_bytes())
        check_language(tree)
    except UsageError:  # no such shipped rule
        raise
    except OutsideError as error:
        raise UsageError(
            f"rule {policy!r}: {error}. A rule is judged if it computes with integers alone: docs/howto/target-rule.md says how"
        ) from None
    except Exception as error:  # no such file, or not Python
        raise UsageError(f"rule {policy!r}: cannot read its file: {describe_error(error)}") from None
    return Judged(policy=policy, rule=load_rule(policy, lambda _: _run(tree, str(path))), path=path, tree=tree)


def _run(tree: ast.Module, path: str) -> ModuleType:
    """Returns the module of just what was read: Python might take other code that it compiled before, or run a package."""
    module = ModuleType(f"_odb_rule_{Path(path).stem}")
    sys.modules[module.__name__] = module  # dataclasses look it up
    exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
    return module


def check_language(tree: ast.Module) -> None:
    """Checks a rule's file. Raises: OutsideError when something in it is not of the language."""
    known: Names = dict.fromkeys(FUNCTIONS, _FUNCTION) | dict.fromkeys(("property", *ERRORS), _TYPE)
    try:
        for node in ast.walk(tree):
            with _at(node):
                _check_node(node)
        for statement in tree.body:
            with _at(statement):
                _check_names(statement, known)
                for name, kind in _list_defined(statement, known):
                    if name in known or name.startswith("__"):
                        raise OutsideError(f"another meaning of {name}")
                    known[name] = kind
    except OutsideError as error:
        raise OutsideError(f"line {error.line}: {error}") from None
    except RecursionError:
        raise OutsideError("it is nested too deeply") from None


def _check_node(node: ast.AST) -> None:
    """Checks all that does not depend on what names mean."""
    match node:
        case ast.ImportFrom(module, names, level):
            for alias in names:
                if level or alias.name not in MODULES.get(module or "", ()) or alias.asname is not None:
                    raise OutsideError(f"an import of {'.' * (level or 0)}{module or ''}.{ast.unparse(alias)}")
        case ast.Constant(value) if not isinstance(value, int | str | None | EllipsisType):
            raise OutsideError(f"{value!r}, which is not an integer")
        case ast.Expr(value) if not isinstance(value, ast.Constant):
            raise OutsideError("a statement that has no effect here")
        case ast.Attribute(_, name, context) if name.startswith("__") or not isinstance(context, ast.Load):
            raise OutsideError(f"{'a change of ' * isinstance(context, ast.Store)}{ast.unparse(node)}")
        case ast.Subscript(ctx=ast.Store()):
            raise OutsideError(f"a change of {ast.unparse(node)}")
        case ast.Starred(ctx=ast.Store()):
            raise OutsideError(_TITLES[ast.List])
        case ast.FormattedValue(format_spec=ast.expr()):
            raise OutsideError("a format, of which some depend on the environment")
        case ast.Compare(_, operators, others):
            for operator, other in zip(operators, others, strict=True):
                if isinstance(operator, ast.Is | ast.IsNot) and ast.unparse(other) != "None":
                    raise OutsideError("a comparison of identities")
        case ast.BinOp(left, operator, right) | ast.AugAssign(left, operator, right):
            if not isinstance(operator, _OPERATORS):
                raise OutsideError(_TITLES.get(type(operator), f"{type(operator).__name__} of numbers"))
            is_power = isinstance(operator, ast.Pow) and not isinstance(left, ast.Constant)
            most = MOST_POWER if is_power else MOST_SHIFT
            match right:
                case ast.Constant(value) if value in range(most + 1):
                    pass
                case ast.Call(ast.Attribute(_, "bit_length")) if not is_power:
                    pass
                case _ if isinstance(operator, _GROWING):
                    raise OutsideError(f"an exponent that is neither a constant up to {most} nor a bit_length()")
        case ast.FunctionDef(args=given) if given.vararg or given.kwarg:
            raise OutsideError("a function of any arguments")
        case (
            ast.arg(annotation=ast.expr() as said)
            | ast.AnnAssign(annotation=said)
            | ast.FunctionDef(returns=ast.expr() as said)
        ):
            if any(isinstance(part, ast.Call) for part in ast.walk(said)):
                raise OutsideError("a computed annotation")
        case _ if not isinstance(node, _GRAMMAR):
            raise OutsideError(_TITLES.get(type(node), f"{type(node).__name__} of Python's grammar"))


def _list_defined(statement: ast.stmt, known: Names) -> Iterator[tuple[str, str]]:
    """Yields the names that a statement of the file or of a class defines."""
    match statement:
        case ast.ImportFrom(str(module), names):
            yield from ((alias.name, MODULES[module][alias.name]) for alias in names)
        case ast.FunctionDef(name, decorator_list=decorators):
            yield name, _PROPERTY if decorators else _FUNCTION
        case ast.ClassDef(name, bases, _, body):
            yield name, _TYPE
            if any(ast.unparse(base) == "Enum" for base in bases):
                yield from ((f"{name}.{member}", kind) for part in body for member, kind in _list_defined(part, known))
        case ast.Assign([ast.Name(name)], ast.Call(ast.Name(called))) if known.get(called) is _TYPE:
            yield name, _TYPE
        case _:
            stored = (part for part in ast.walk(statement) if isinstance(part, ast.Name))
            yield from ((part.id, _VALUE) for part in stored if isinstance(part.ctx, ast.Store))


def _check_names(node: ast.AST, known: Names, members: Names | None = None, me: str = "") -> None:
    """Checks the uses of names. Each must be ``known`` already, so that no function calls itself.

    In a method ``me`` is its first parameter, and ``members`` are those defined above it.
    """

    def check(*parts: ast.AST | None) -> None:
        for part in parts:
            if isinstance(part, ast.FunctionDef | ast.ClassDef | ast.ImportFrom):
                raise OutsideError("a definition inside a statement")
            if part is not None:
                with _at(part):
                    _check_names(part, known, members, me)

    match node:
        case ast.ClassDef() if not me:
            _check_class(node, known)
        case ast.FunctionDef() if not me:
            _check_function(node, known, members)
        case ast.FunctionDef() | ast.ClassDef() | ast.ImportFrom() if me:
            raise OutsideError("a definition inside a function")
        case ast.AnnAssign(value=value):
            check(value)
        case ast.Assign([ast.Name()], ast.Call(ast.Name(name), arguments, options)) if (
            known.get(name) is _TYPE and members is None
        ):
            check(*arguments, *(option.value for option in options))  # a rule with other parameters
        case ast.Raise(ast.Call(ast.Name(name), arguments), None) if name in ERRORS:
            check(*arguments)
        case ast.Raise():
            raise OutsideError("another exception")
        case ast.Call(called, arguments, options):
            match called:
                case ast.Name(name) if known.get(name) is _FUNCTION:
                    pass
                case ast.Attribute(ast.Name(base), name) if base == me and (members or {}).get(name) is _METHOD:
                    pass
                case ast.Attribute(value, "bit_length"):
                    check(value)
                case _:
                    raise OutsideError(f"a call of {ast.unparse(called)}")
            check(*arguments, *(option.value for option in options))
        case ast.Attribute(ast.Name(base), name) if base == me:
            if (members or {}).get(name) not in (_VALUE, _PROPERTY):
                raise OutsideError(f"{base}.{name}, which is not a value above it")
        case ast.Attribute(ast.Name(base), name) if known.get(f"{base}.{name}") is _VALUE:
            pass
        case ast.Attribute(value, name):
            if name not in ATTRIBUTES:
                raise OutsideError(ast.unparse(node))
            check(value)
        case ast.BinOp(op=ast.BitOr()) | ast.AugAssign(op=ast.BitOr()):
            raise OutsideError("BitOr of numbers")
        case ast.Name(name, ast.Load()) if known.get(name, (members or {}).get(name) if not me else None) is not _VALUE:
            raise OutsideError(f"{name}, which is not a number of the rule's or the agreement's")
        case _:
            check(*ast.iter_child_nodes(node))


def _check_class(node: ast.ClassDef, known: Names) -> None:
    if node.keywords:
        raise OutsideError("a metaclass")
    _check_types([*node.bases, *node.decorator_list], known, ("Enum", "TargetRule", "dataclass"))
    members: Names = {}
    for statement in node.body:
        with _at(statement):
            _check_names(statement, known, members)
            for name, kind in _list_defined(statement, known):
                if name in members or (name.startswith("__") and name != "__post_init__"):
                    raise OutsideError(f"another meaning of {name}")
                members[name] = _METHOD if kind is _FUNCTION else kind


def _check_function(node: ast.FunctionDef, known: Names, members: Names | None) -> None:
    given = node.args
    _check_types(node.decorator_list, known, ("property",) if members is not None else ())
    for default in (*given.defaults, *filter(None, given.kw_defaults)):
        _check_names(default, known)
    arguments = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    stored = [part.id for part in names if isinstance(part.ctx, ast.Store)]
    me = arguments[0] if members is not None and arguments else "a function"
    local = known | dict.fromkeys((*arguments, *stored), _VALUE) | {me: _TYPE}
    for statement in node.body:
        with _at(statement):
            _check_names(statement, local, members or {}, me)


def _check_types(nodes: list[ast.expr], known: Names, allowed: tuple[str, ...]) -> None:
    """Checks decorators and bases."""
    for node in nodes:
        match node:
            case ast.Name(name) if name in allowed and known.get(name) is _TYPE:
                pass
            case ast.Call(ast.Name("dataclass"), [], options) if known.get("dataclass") is _TYPE:
                if not all(isinstance(option.value, ast.Constant) for option in options):
                    raise OutsideError("a computed option of a dataclass")
            case _:
                raise OutsideError(f"{ast.unparse(node)} as a decorator or a base")
