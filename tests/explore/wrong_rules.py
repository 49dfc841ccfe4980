"""Wrong rules, with the property that `odb-ref verify` must name, and right rules that look odd."""

from __future__ import annotations

import tempfile
from pathlib import Path
from textwrap import indent

from odb_sim.verify.language import load_judged
from odb_sim.verify.rule import check_bounds, check_name
from odb_sim.verify.verdict import Finding

from odb_ref.core.errors import UsageError

_ODB = "max(a.groups_max if a.groups_min == NONE else a.groups_min, a.due_max)"
_TEMPLATE = """
from dataclasses import dataclass
from odb_ref.core.offer import NONE
{before}

@dataclass(frozen=True)
class Rule:
{members}
    def compute_target(self, a):
        odb = {odb}
        top = a.samples_max
{body}
"""


def _rule(body: str, *, name: str = "'mine'", members: str = "", before: str = "") -> str:
    members = f"name = {name}\n{members}" if name else members
    return _TEMPLATE.format(body=indent(body, " " * 8), members=indent(members, "    "), before=before, odb=_ODB)


BOUNDS, NAME, REFUSED, HOLDS = "RULE-BOUNDS", "RULE-NAME", "not in the language", ""


def _expect(property_: str, rules: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the rules by title, each with the property that it violates."""
    return {title: (property_, text) for title, text in rules.items()}


ANSWERS = {
    "nothing in a branch": _rule("if a.samples_min: return odb"),
    "a truth value": _rule("return odb if odb > 1 else odb == 1"),
    "forgets what is due": _rule("return a.groups_max if a.groups_min == NONE else a.groups_min"),
    "counts with nobody": _rule("return max(a.due_max, (a.groups_min + a.groups_max) // 2)"),
    "closes while a rank is dry": _rule("return odb if a.samples_min else a.due_max"),
    "divides by the dry rank's samples": _rule("return max(odb, a.samples_max // a.samples_min // 99)"),
    "one too many in round 37": _rule("return top + 1 if a.round_max == 37 else odb"),
    "one too many every 200th round": _rule("return top + 1 if a.round_max % 200 == 199 else odb"),
    "wrong above 5,000 samples": _rule("return top + 1 if top > 5_000 else odb"),
    "wrong at one size of 123,457": _rule("return top + 1 if top == 123_457 else odb"),
    "wrong for few numbers of groups, such as 521": _rule(
        "return top + 1 if a.groups_max**2 % 1_000_003 == 271_441 else odb"
    ),
    "wrong in round 1,000,003": _rule("return top + 1 if a.round_max == 1_000_003 else odb"),
    "wrong for 2^33 samples and more": _rule("return top + 1 if top >> 33 else odb"),
    "wrong where 4,242 groups are due": _rule("return odb - (a.due_max == 4_242)"),
    "one too many under a low budget": _rule("return top + 1 if a.budget_min < 40 else odb"),
    "one too many under one budget": _rule("return top + 1 if a.budget_min == 7_919 else odb"),
    "forgets what is due where windows are large": _rule(
        "return max(1, a.groups_min) if top > 500 and a.groups_min != NONE else odb"
    ),
    "divides by how far apart the ranks are": _rule(
        "if a.groups_min == NONE or a.groups_max < 48: return odb\n"
        "return max(odb, min(top, a.groups_max * 8 // (a.groups_max - a.groups_min)))"
    ),
}
NAMED = {
    "a word that its name leaves out": _rule(
        "return top if self.kind == 'fast' else odb", members="kind: str = 'slow'"
    ),
    "an option that its name leaves out": _rule(
        "return odb if self.more is None else top", members="more: int | None = None"
    ),
    "a tuple that its name leaves out": _rule(
        "return min(top, odb + self.by[1] - 2)", members="by: tuple[int, ...] = (1, 2)"
    ),
    "a choice that its name leaves out": _rule(
        "return top if self.how == How.ALL else odb",
        before="from enum import Enum\nclass How(Enum):\n    FEW = 1\n    ALL = 2",
        members="how: How = How.FEW",
    ),
    "a zero that its name shows as the default": _rule(
        "return min(top, odb + self.more)",
        name="",
        members="more: int = 5\n@property\ndef name(self): return f'mine-{self.more or 5}'",
    ),
    "an option that its name shows as the default": _rule(
        "return min(top, odb + (self.more or 0))",
        name="",
        members="more: int | None = 5\n@property\ndef name(self): return f'mine-{5 if self.more is None else self.more}'",
    ),
    "two numbers that its name joins": _rule(
        "return min(top, odb + self.more * self.by)",
        name="",
        members="more: int = 1\nby: int = 12\n@property\ndef name(self): return f'mine-{self.more}{self.by}'",
    ),
    "another rule of its file": _rule(
        "return min(top, odb + self.more)",
        name="",
        members="more: int = 3\n@property\ndef name(self): return f'mine-{self.more % 97}'",
    )
    + "\nSLOW = Rule(100)\n",
    "a share that its name rounds": _rule(
        "return max(odb, min(top, odb + self.share * (top - odb) // 100))",
        name="",
        members="share: int = 50\n@property\ndef name(self): return f'mine-{self.share // 10}'",
    ),
    "two numbers of which its name holds the sum": _rule(
        "return max(odb, min(top, odb + (self.up if a.round_max % 2 else self.down)))",
        name="",
        members="up: int = 1\ndown: int = 3\n@property\ndef name(self): return f'mine-{self.up + self.down}'",
    ),
    "another class of its name": _rule("return min(top, odb + self.more)", members="more = 0")
    + "\nclass Other:\n    name = 'mine'\n    def compute_target(self, a): return a.samples_max\n",
    "a number that matters in one round": _rule(
        "return max(odb, min(top, odb + self.more * (a.round_max == 1_000_003)))", members="more: int = 1"
    ),
    "called odb, answers otherwise": _rule("return a.groups_max", name="'odb'"),
    "called paper, differs above 100 groups": _rule(
        "return a.groups_max - (a.groups_max > 100 and a.due_max == 0)", name="'paper'"
    ),
    "a parameter that its name leaves out": _rule("return min(top, odb + self.more)", members="more: int = 1"),
    "a switch that its name leaves out": _rule("return top if self.fast else odb", members="fast: bool = False"),
    "a number for a name": _rule("return odb", name="7"),
    "a share that its name leaves out": _rule(
        "return max(1, a.due_max, min(top, odb * self.share[0] // self.share[1]))",
        members="share: tuple[int, int] = (1, 1)",
    ),
}
ENDING = {
    "exits with status 0": _rule("sys.exit(0)"),
    "exits in the middle of a job": _rule("if a.round_max == 41: sys.exit(0)\nreturn odb"),
    "ends its process": _rule("if a.samples_max > 900: os._exit(0)\nreturn odb"),
    "loops": _rule("while a.round_max == 77: pass\nreturn odb"),
    "loops and catches everything": _rule(
        "while a.round_max == 77:\n    try:\n        time.sleep(0.01)\n    except BaseException: pass\nreturn odb"
    ),
    "takes all memory": _rule("return odb + 0 * len([0] * 10**10)"),
    "recurses": _rule("return self.compute_target(a)"),
}
IMPURE = {
    "numpy integer": _rule("return np.int64(odb)", before="import numpy as np"),
    "a float": _rule("return (a.groups_max + odb) / 2"),
    "an int of its own": _rule("return I(odb)", before="class I(int): pass"),
    "moves the goalposts": _rule(
        "return top + 1",
        before="import odb_ref.core.batching.rules as r\nr.compute_bounds = lambda agreement: (0, 2**63)",
    ),
    "reads RANK": _rule("return top if os.environ.get('RANK') == '1' else odb"),
    "reads LOCAL_RANK on a late rank": _rule("return top if os.environ.get('LOCAL_RANK') == '6' else odb"),
    "reads the clock": _rule("return top if int(time.time() / 1e5) % 2 else odb"),
    "reads the date": _rule("return top if datetime.datetime.now().toordinal() % 2 else odb"),
    "reads the uptime": _rule("return top if int(time.monotonic_ns() // 1e14) % 2 else odb"),
    "reads the host's name": _rule("return top if socket.gethostname().endswith('1') else odb"),
    "hashes a word": _rule("return top if hash('word') % 3 else odb"),
    "walks through a set": _rule("return top if next(iter({'a', 'b', 'c', 'd'})) == 'a' else odb"),
    "walks through a set that begins so with few hash seeds": _rule(
        "return top if next(iter(set('fewest most middle due held left round half third ten'.split()))) == 'ten' else odb"
    ),
    "takes an address": _rule("return top if id(self) // 64 % 3 else odb"),
    "takes the process id": _rule("return top if os.getpid() % 2 else odb"),
    "draws": _rule("return random.randint(odb, top)"),
    "draws with a fixed seed": _rule("return D.randint(odb, top)", before="D = random.Random(0)"),
    "every 200th answer": _rule("self.n += 1\nreturn top if self.n % 200 == 0 else odb", members="n = 0"),
    "remembers the last answer": _rule("self.n = max(odb, min(top, self.n + 1))\nreturn self.n", members="n = 0"),
    "a cache with too small a key": _rule(
        "return max(odb, min(top, self.c.setdefault(a.groups_max, top)))", members="c = {}"
    ),
    "counts, to three million": _rule("self.n += 1\nreturn top if self.n > 3_000_000 else odb", members="n: int = 0"),
    "remembers in its module": _rule(
        "return SEEN.setdefault((a.groups_max, a.groups_min, a.due_max), odb)", before="SEEN = {}"
    ),
    "counts in a default": _rule(
        "return self.go(odb)", members="def go(self, odb, seen=[]):\n    seen.append(odb)\n    return odb"
    ),
    "counts in a closure": _rule(
        "return count(odb)",
        before="def make():\n    n = 0\n    def count(odb):\n        nonlocal n\n        n += 1\n        return odb\n"
        "    return count\ncount = make()",
    ),
    "counts in its class": _rule("Rule.n += 1\nreturn odb", members="n = 0"),
    "counts in a slot of another object": _rule(
        "self.kept[0].n += 1\nreturn odb",
        before="class Kept:\n    __slots__ = ('n',)\n    def __init__(self): self.n = 0",
        members="kept = (Kept(),)",
    ),
    "counts in an array": _rule("N[7] += 1\nreturn odb", before="import numpy as np\nN = np.zeros(2_000, int)"),
    "goes through a generator": _rule(
        "return odb + 0 * next(N)", before="def go():\n    for n in range(10**9): yield n\nN = go()"
    ),
    "the first answer is another": _rule("self.n += 1\nreturn top if self.n == 9 else odb", members="n = 0"),
    "hashes how many groups there are": _rule("return min(top, odb + hash(f'step {a.groups_max}') % 2)"),
    "looks at its caller, which knows the rank": _rule(
        "frame = sys._getframe()\nwhile frame and 'config' not in frame.f_locals: frame = frame.f_back\n"
        "return min(top, odb + frame.f_locals['config'].rank) if frame else odb"
    ),
    "changes its mind after 200 questions": _rule(
        "self.asked.append(a)\nreturn odb if len(self.asked) < 200 else top", members="asked = []"
    ),
    "answers with a root where it is whole": _rule(
        "root = math.sqrt(a.groups_max)\nreturn max(odb, min(top, root)) if root > 12 and root == int(root) else odb",
        before="import math",
    ),
    "looks for a square that is not always there": _rule(
        "t = a.due_max\nwhile a.round_min > 20 and t * t % 7 == 2 and odb != top: t += 7\nreturn odb"
    ),
    "changes what others read": _rule("object.__setattr__(a, 'groups_min', 1)\nreturn odb"),
    "knows the day by numpy": _rule(
        "return max(odb, int(np.datetime64('today').astype(int)) % 2)", before="import numpy as np"
    ),
}
OUTSIDE = {
    "reads the local hour": _rule("return top if time.localtime().tm_hour % 2 else odb"),
    "reads the month": _rule("return top if time.strftime('%m') > '06' else odb"),
    "reads today's date": _rule("return top if datetime.date.today().year % 2 else odb"),
    "reads a switch of the command": _rule("return top if '--fast' in sys.argv else odb"),
    "counts the arguments": _rule("return top if len(sys.argv) > 9 else odb"),
    "reads a variable of the environment": _rule("return top if os.environ.get('ODB_FAST') else odb"),
    "reads a variable while it is loaded": _rule(
        "return min(top, odb + MORE)", before="MORE = int(os.getenv('ODB_MORE', '0'))"
    ),
    "looks for a variable": _rule("return top if 'ODB_FAST' in os.environ else odb"),
    "reads a file": _rule("return top if open('/etc/hostname').read() == 'x' else odb"),
    "reads a file, and hides that it cannot": _rule(
        "try:\n    return min(top, int(open('/no/such/file').read()))\nexcept OSError:\n    return odb"
    ),
    "reads a file while it is loaded": _rule(
        "return min(top, odb + MORE)", before="MORE = len(open('/etc/hostname').read()) // 100"
    ),
    "looks for a file": _rule("return top if 'fast' in os.listdir('/tmp') else odb"),
    "asks the network": _rule("socket.socket().close()\nreturn odb"),
    "starts a process": _rule("return top if os.system('true') else odb"),
    "imports when it is asked": _rule("import xml.dom.minidom as m\nreturn top if m.Node is None else odb"),
    "goes by the number of processors": _rule("return top if os.cpu_count() % 2 else odb"),
    "goes by the process's time": _rule("return top if int(time.clock_gettime(0) / 1e5) % 2 else odb"),
    "looks whether a file is there": _rule("return top if os.path.exists('/tmp/fast') else odb"),
    "goes by when a file was written": _rule("return top if os.stat('/etc').st_mtime > 4e9 else odb"),
    "reads the environment as bytes": _rule("return top if os.environb.get(b'ODB_FAST') else odb"),
    "reads the environment below os": _rule(
        "return top if posix.environ.get(b'ODB_FAST') else odb", before="import posix"
    ),
    "counts a switch of the command": _rule("return top if sys.argv.count('--fast') else odb"),
    "reads the date below datetime": _rule(
        "return top if _datetime.datetime.now().year > 2040 else odb", before="import _datetime"
    ),
    "goes by the zone of time": _rule("return top if time.timezone > 0 else odb"),
    "goes by its folder": _rule("return top if os.getcwd().endswith('fast') else odb"),
    "goes by its user": _rule("return top if os.getuid() == 1234 else odb"),
    "goes by what is loaded": _rule("return top if 'torch.cuda' in sys.modules else odb"),
    "goes by where it prints to": _rule("return top if sys.stdout.isatty() else odb"),
    "reaches os through a module that may be used": _rule(
        "return top if s.argv[1:] == ['--fast'] else odb", before="from dataclasses import sys as s"
    ),
    "draws by a module of NumPy's": _rule(
        "return odb + int(RNG.random() < 1e-9)", before="from numpy.random import default_rng\nRNG = default_rng()"
    ),
    "reads the clock behind what it is shown": _rule(
        "return top if getattr(time, '_module', time).time() > 4e9 else odb"
    ),
}
ESCAPES = {
    "leaves the agreement by its class": _rule("return a.__class__.__init__.__globals__['x']"),
    "leaves by a method": _rule("return odb + len(f'{self.compute_target}')"),
    "writes its own address": _rule("return odb + len(f'{self}') % 2"),
    "is called by its address": _rule(
        "return odb", name="", members="@property\ndef name(self): return f'{self.compute_target}'"
    ),
    "writes the address of a word": _rule("return odb + len(f'{self.kind.upper}') % 2", members="kind: str = 'x'"),
    "writes the address of a class": _rule(
        "return odb + len(f'{How.mro}') % 2", before="from enum import Enum\nclass How(Enum):\n    FEW = 1"
    ),
    "leaves by a format": _rule("return odb + len('{0.__class__}'.format(a))"),
    "writes what it is asked": _rule("a.groups_min = 1\nreturn odb"),
    "replaces a built-in function": _rule("return max(odb, 1)", before="max = min"),
    "two functions that call each other": _rule(
        "return one(odb)", before="def one(n): return two(n)\ndef two(n): return one(n)"
    ),
    "takes a function for a number": _rule("return key(odb)", before="def key(n, go=max): return go(n, 1)"),
    "a definition in a function": _rule("def go(n):\n    return go(n)\nreturn go(odb)"),
    "an import of the shipped table": _rule("return odb", before="from odb_ref.core.batching.rules import RULES"),
    "an import of a neighbour that is called as a library": _rule("return odb", before="from .enum import Enum"),
    "an import of everything": _rule("return odb", before="from math import *"),
    "an import under another name": _rule("return max(odb, 1)", before="from odb_ref.core.offer import NONE as max"),
    "a decorator that keeps the answers": _rule("return odb", members="@cache\ndef go(self): return 1"),
    "an annotation that prints": _rule("return odb", members="more: print('x') = 1"),
    "ends the process by an exception": _rule("raise SystemExit(0)"),
    "asks by match": _rule("match odb:\n    case 7: return top\nreturn odb"),
    "a number without end": _rule("return max(odb, 2**top % 2)"),
    "a shift without end": _rule("return max(odb, (1 << top) % 2)"),
    "a constructor of its own": _rule("return odb", members="def __init__(self): pass"),
    "a comparison of its own": _rule("return odb", members="def __eq__(self, other): return 1"),
    "is made of another": _rule("return odb", before="class Base:\n    pass").replace(
        "class Rule:", "class Rule(Base):"
    ),
    "counts its instances": _rule("return odb", members="made = []"),
    "compares by identity": _rule("return top if odb is 257 else odb"),
    "does something while it is loaded": _rule("return odb", before="print('x')"),
    "counts in a list that is not written as one": _rule(
        "seen = B\nseen += (1,)\nreturn top if len(seen) == 3_000_000 else odb", before="A, *B = (1, 2)"
    ),
    "writes the address of a property": _rule(
        "return min(top, odb + ('7' in self.word))",
        members="@property\ndef half(self): return 1\nword = f'{half}'",
    ),
    "writes the address of a property of a choice": _rule(
        "return min(top, odb + ('7' in f'{How.half}'))",
        before="from enum import Enum\nclass How(Enum):\n    FEW = 1\n    @property\n    def half(self): return 1",
    ),
    "a fraction by an exponent": _rule(
        "return max(odb, top ** (0 - EIGHT.bit_length()) * 0 + 1)", before="EIGHT: int = 8"
    ),
    "an exponent that ends like a small one": _rule("return max(odb, 2 ** (top + odb.bit_length()) % 2)"),
    "replaces a built-in function, if": _rule("return max(odb, 1)", before="if 1:\n    def max(x, y): return x"),
    "calls itself by a second definition": _rule(
        "return two(odb)",
        before="def one(n): return 1\ndef two(n): return one(n)\nif 1:\n    def one(n): return two(n) + two(n)",
    ),
    "a constructor of its own, if": _rule("return odb", members="if 1:\n    def __init__(self): pass"),
    "writes as the place does": _rule("return min(top, odb + len(f'{1000:n}') % 2)"),
    "joins truth values bit by bit": _rule("return top if (a.due_max > 3) | (a.round_max > 2) else odb"),
}
RIGHT = {
    "at most 64 steps": _rule("return max(1, a.due_max, min(odb, 64))"),
    "names its parameter": _rule(
        "return min(top, odb + self.more)",
        name="",
        members="more: int = 1\n@property\ndef name(self): return f'mine-{self.more}'",
    ),
    "refuses wrong parameters": _rule(
        "return min(top, odb + self.more)",
        name="",
        members="more: int = 1\ndef __post_init__(self):\n    if self.more < 0: raise ValueError('more than 0')\n"
        "@property\ndef name(self): return f'mine-{self.more}'",
    ),
    "a choice that its name holds": _rule(
        "return top if self.how == How.ALL else odb",
        name="",
        before="from enum import Enum\nclass How(Enum):\n    FEW = 1\n    ALL = 2",
        members="how: How = How.FEW\n@property\ndef name(self): return f'mine-{self.how.name}'",
    ),
    "goes by powers of two": _rule("return max(odb, min(top, 1 << (a.round_max % 9).bit_length()))"),
    "a function and a table": _rule(
        "if a.round_max in (0, 1):\n    n = ramp(odb, SHARES[1])\nelif top > 9:\n    n = odb\nelse:\n    n = odb + 0\n"
        "n += sum((0, 0))\nreturn max(1, a.due_max, min(n, top))",
        before="SHARES: tuple[int, ...] = (2, 3)\ndef ramp(n: int, by: int = 2) -> int:\n    more, rest = divmod(n, by)\n"
        "    return abs(-more) + (rest > 0)",
    ),
    "a constant that is computed": _rule(
        "return max(1, a.due_max, min(odb, LIMIT + self.more))",
        members="more = min(0, 1)",
        before="LIMIT = max(3, 4)",
    ),
    "numbers that cannot be written": _rule(
        "return odb",
        members="more: int = ((((2**64) ** 4) ** 4) ** 4) ** 4\nby: int = ((((2**64) ** 4) ** 4) ** 4) ** 4",
    ),
    "a method above": _rule("return self.go(odb)", members="def go(self, n):\n    return n if n else 1"),
    "does nothing with a product": _rule("return max(odb, min(top, odb * a.samples_min % 7))"),
}
TABLE = (
    _expect(BOUNDS, ANSWERS)
    | _expect(NAME, NAMED)
    | _expect(REFUSED, ENDING | IMPURE | OUTSIDE | ESCAPES)
    | _expect(HOLDS, RIGHT)
)


def find(text: str, *, file: str = "rule.py") -> tuple[str, Finding | str]:
    """Returns the property that the rule violates and the finding, or `REFUSED` and the message. Runs no worlds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        path.write_text(text, encoding="utf-8")
        try:
            judged = load_judged(f"{path}:Rule")
        except UsageError as error:
            return REFUSED, str(error)
        for check in (check_bounds, check_name):
            stage = check(judged)
            if stage.findings:
                return stage.findings[0].property, stage.findings[0]
            if stage.skipped:
                return "not judged", stage.skipped
    return HOLDS, ""
