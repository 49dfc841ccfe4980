"""The settings of a plan, equal on all ranks, and refusals with the same words on every rank. Spec: R13.2, R13.4."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Required, TypedDict

from odb_ref.core.batching.cost import TOKENS, Cost, CostOfLength, choose_cost, make_attention_cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.errors import UsageError, check_integer, choose

SAY_ALONE: Final = ", or say oversize='alone'"
SAY_EMPTY: Final = ", or say short='empty' if it can run something else"
SAY_IDLE: Final = "say short='idle'"
"""The advice in errors, for callers that have these terms. Drop-ins replace it."""
SAMPLES: Final = "samples"
"""The name of the limit of which every sample uses 1."""


class Within(StrEnum):
    """Where the samples of one key must be together. Spec: R13.7."""

    MICRO_BATCH = "micro-batch"
    """In one micro-batch, like the two answers of a preference pair."""
    RANK = "rank"
    """On one rank, like the answers to a prompt."""
    STEP = "step"
    """Anywhere in the planned optimizer step. The key then matters only to the mean over groups."""


class Oversize(StrEnum):
    """What to do with a unit that exceeds the budget or a limit by itself. Spec: R13.3."""

    REFUSE = "refuse"
    ALONE = "alone"


class Short(StrEnum):
    """What to do if a rank has fewer units than micro-batches. Spec: R13.4."""

    IDLE = "idle"
    """The others are idle and run a sample again: one of the rank, or else any in `plan_all`. If there is none, all refuse."""
    REFUSE = "refuse"
    EMPTY = "empty"
    """They are idle, even on a rank without samples, which must then have something else to run."""


class BatchOrder(StrEnum):
    """The order in which a rank runs its micro-batches. Spec: R13.8."""

    COSTLIEST_FIRST = "costliest_first"
    SMALLEST_AT_ENDS = "smallest_at_ends"


class Options(TypedDict, total=False):
    """The settings as a caller passes them; see `PlanTerms`."""

    budget: Required[int]
    layout: Layout | str
    cost: str | CostOfLength | None
    limits: Mapping[str, int]
    multiple_of: int
    at_least: int
    at_most: int | None
    pad_to: int
    within: Within | str
    oversize: Oversize | str
    short: Short | str
    order: BatchOrder | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """The settings of a plan, equal on all ranks. Spec: R13.2."""

    budget: int
    """The most tokens of a micro-batch."""
    layout: Layout = Layout.PACKED
    """How tokens are counted: the sum of the lengths, or with ``"padded"`` the rows times the longest."""
    cost: Cost = TOKENS
    """The cost of a sample's tokens, which is balanced: a name (``"attention/24576"``), `attention` of a model, or a
    function."""
    limits: tuple[tuple[str, int], ...] = ()
    """Further bounds of a micro-batch, by name: of ``"samples"``, or of a resource that ``uses`` gives for each sample."""
    multiple_of: int = 1
    """The number of micro-batches of a rank is a multiple of this, as virtual pipeline stages require."""
    at_least: int = 1
    at_most: int | None = None
    pad_to: int = 1
    """Each length is rounded up to a multiple of this, such as ``2 * cp * tp``, or 16 for FP8."""
    within: Within = Within.MICRO_BATCH
    """Where samples of the same key (``together``) must be together."""
    oversize: Oversize = Oversize.REFUSE
    short: Short = Short.IDLE
    order: BatchOrder = BatchOrder.COSTLIEST_FIRST

    def round_up(self, need: int) -> int:
        """Returns the number of micro-batches per rank if one rank needs ``need`` and no rank needs more. Spec: R13.4."""
        return -(-max(need, self.at_least) // self.multiple_of) * self.multiple_of

    def check_count(self, count: int, units: Sequence[int]) -> None:
        """Checks the number of micro-batches for ranks with these numbers of ``units``.

        Raises: UsageError, with the same words on all ranks, when there are too many micro-batches, or too few units for
        them. Spec: R13.4.
        """
        if self.at_most is not None and count > self.at_most:
            way = "raise the budget, or a limit" if self.limits else "raise the budget"
            raise UsageError(f"{count} micro-batches are needed, more than at_most={self.at_most}: {way}")
        for rank, number in enumerate(units):
            if self.short is Short.REFUSE and number < count:
                raise UsageError(f"rank {rank} has {number} to divide into {count} micro-batches: {SAY_IDLE}")

    def check_spares(self, samples: Sequence[int]) -> None:
        """Checks the numbers of samples from which ranks can take one for an idle micro-batch.

        Raises: UsageError, with the same words on all ranks, when a rank has none. Spec: R13.4.
        """
        if self.short is not Short.EMPTY and not all(samples):
            rank = [*map(bool, samples)].index(False)
            raise UsageError(
                f"rank {rank} has no sample, so none for an idle micro-batch to run: give it one{SAY_EMPTY}"
            )

    def to_row(self) -> list[int]:
        """Returns the settings as integers for the exchange, in the order of `SETTINGS`; equal if two ranks agree."""
        values: list[object] = [getattr(self, name) for name in SETTINGS]
        return [_encode(value) for value in values]


SETTINGS: Final = tuple(PlanTerms.__dataclass_fields__)
"""The names of the settings, which must be equal on all ranks."""


def word_setting(name: str, value: int) -> str:
    """Returns the text for the integer that stands for a setting."""
    if name in ("cost", "limits"):
        return f"one with the digest {value:x}"
    kind = _KINDS.get(name)
    return str(value or None) if kind is None else repr(str([*kind][value]))


_KINDS: Final[Mapping[str, type[StrEnum]]] = {
    "layout": Layout,
    "within": Within,
    "oversize": Oversize,
    "short": Short,
    "order": BatchOrder,
}


def _encode(value: object) -> int:
    match value:
        case int():
            return value
        case None:
            return 0
        case StrEnum():
            return [*type(value)].index(value)
        case Cost():
            return digest(value.name)
        case _:
            return digest(repr(value))


def digest(text: str) -> int:
    """Returns an integer of 56 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def attention(*, hidden_size: int) -> CostOfLength:
    """Returns the cost function of a model with attention. In a sample of six times the hidden size, the attention of a layer
    takes as long as its matrices.

    Raises: UsageError when the size is less than 1.
    """
    return make_attention_cost(6 * check_integer(hidden_size, "hidden_size", 1)).of_tokens


def make_terms(options: Options) -> PlanTerms:
    """Returns the terms for ``options``.

    Raises: UsageError when a value is not valid, or no number of micro-batches can meet the terms.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown or "budget" not in options:
        raise UsageError(f"no such term: {', '.join(unknown)}" if unknown else "a plan needs a budget")
    cost, at_most = options.get("cost"), options.get("at_most")
    limits = options.get("limits", {})
    if not isinstance(limits, Mapping) or not all(isinstance(name, str) for name in limits):
        raise UsageError(f"limits must be a mapping of names to numbers, got {limits!r}")
    terms = PlanTerms(
        budget=check_integer(options["budget"], "budget", 1),
        layout=choose(Layout, options.get("layout", Layout.PACKED), "layout"),
        cost=TOKENS if cost is None else choose_cost(cost),
        limits=tuple((name, check_integer(limits[name], f"limits[{name!r}]", 1)) for name in sorted(limits)),
        multiple_of=check_integer(options.get("multiple_of", 1), "multiple_of", 1),
        at_least=check_integer(options.get("at_least", 1), "at_least", 1),
        at_most=None if at_most is None else check_integer(at_most, "at_most", 1),
        pad_to=check_integer(options.get("pad_to", 1), "pad_to", 1),
        within=choose(Within, options.get("within", Within.MICRO_BATCH), "within"),
        oversize=choose(Oversize, options.get("oversize", Oversize.REFUSE), "oversize"),
        short=choose(Short, options.get("short", Short.IDLE), "short"),
        order=choose(BatchOrder, options.get("order", BatchOrder.COSTLIEST_FIRST), "order"),
    )
    if terms.at_most is not None and terms.round_up(1) > terms.at_most:
        wanted = f"at_least={terms.at_least}, multiple_of={terms.multiple_of} and at_most={terms.at_most}"
        raise UsageError(f"{wanted} allow no number of micro-batches")
    return terms
