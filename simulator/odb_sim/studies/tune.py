"""Finds token budget, window, depth, ramp, age and balance: the cheapest setting whose epoch is within a tolerance of the
fastest.

What the settings cost
----------------------
The **budget** bounds the padded tokens of a batch, which a GPU must hold, so it is at most the memory, given in tokens. A
single sample longer than that travels alone, so no setting makes it fit.

**Window** and **depth** cost host memory. Before a round is released a rank holds at most the window being filled, the
previous window, collated, the released steps of the one before that, also collated, and ``depth`` batches in the queue. With K
samples of mean length L, padding ratio p, depth D and budget B these are ``K L + 2 K L / (1 - p) + D B`` tokens, which is an
upper estimate. The **ramp** costs no memory: it makes the first windows of an epoch smaller, so that the first step comes
sooner, but fills their groups worse. The **age** that a sample may reach, the cost by which the ranks' steps are **balanced**,
and the **padding share** of updates cost no memory either. Among settings whose memory differs by at most a percent, the one
with the most of the loader's defaults is chosen.

With a global batch (updates of a fixed number of samples, R16) windows, ramp and age have no effect.

What it judges by
-----------------
It judges by the tokens per second of the whole epoch, its ends included, in simulations of that epoch. An epoch of more than
`LARGEST_JUDGED` samples is replaced by one of that many, drawn from the same lengths. For updates, which only events can
simulate, the limit is `LARGEST_UPDATES`.

Other ways to be faster need a choice of the user's, because they change the batches, their order or what the model must know:
packed rows, shared shards, another order, sizes that suit the hardware. Each is tuned separately, starting from the
recommendation, and shown beside it with its best settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from odb_ref.core.batching.cost import TOKENS
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.config import RAMP_ROUNDS, choose_ramp
from odb_ref.core.errors import UsageError
from odb_sim.inputs.workload import Sharding
from odb_sim.studies.cells import CellAnswer, CellFailure, Point, Runner
from odb_sim.studies.search import Dimensions, SettingSearch, Value, compute_host_tokens, list_own
from odb_sim.studies.sweep import Study, run_grid

LARGEST_WINDOW: Final = 4096
LARGEST_JUDGED: Final = 1_000_000
LARGEST_UPDATES: Final = 50_000
DEPTHS: Final = (2, 4, 8, 16)
"""Without 1, because the simulator hands over a step in no time, unlike a real queue."""
RAMPS: Final = tuple(range(RAMP_ROUNDS + 2))
AGES: Final = (1, 2, 4, 8, 16)
PADDING_SHARES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""The padding shares to try for padded updates (R16.3). The more a step costs, the more padding a group may hold."""
EDGE: Final = f"no padding share above {PADDING_SHARES[-1]} was tried: --padding-share of odb-ref simulate tries one"
"""The note if the last of them is recommended."""
START_DEPTH: Final = 8
UNTOUCHED: Final = ("depth_steps", "max_age_rounds")
"""The settings that keep their recommended values when a choice of the user's changes the rest."""
NAMES: Final = {
    "window_samples": ("window", "--window"),
    "budget_tokens": ("token budget", "--token-budget"),
    "depth_steps": ("depth", "--depth"),
    "ramp_rounds": ("ramp", "--ramp"),
    "max_age_rounds": ("age", "--max-age"),
    "padding_share": ("padding share", "--padding-share"),
    "cost": ("balance", "--cost"),
}
"""The name of each setting, and its option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to tune. ``tolerance`` is the share of the best throughput that may be given up for a cheaper setting.

    Raises: UsageError when a value is not valid.
    """

    study: Study
    ranks: int
    memory_tokens: int
    policy: str = "odb"
    window_max: int = LARGEST_WINDOW
    tolerance: float = 0.01
    held: frozenset[str] = frozenset()
    """The fields of a point that keep the study's values."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"ranks must be at least 1, got {self.ranks}")
        if self.memory_tokens < 1:
            raise UsageError(f"memory_tokens must be at least 1, got {self.memory_tokens}")
        if self.window_max < 1:
            raise UsageError(f"window_max must be at least 1, got {self.window_max}")
        if not 0 <= self.tolerance < 1:
            raise UsageError(f"tolerance must lie in 0..1, got {self.tolerance}")
        for name in sorted(self.held - set(self.build_dimensions())):
            raise UsageError(f"{NAMES[name][1]} has no effect {'with' if self.is_update else 'without'} --global-batch")

    @property
    def is_update(self) -> bool:
        """True if the protocol forms updates of a fixed number of samples."""
        return self.study.terms.update_samples is not None

    @property
    def epoch_samples(self) -> int:
        """The samples of the epoch in question."""
        return len(self.study.lengths) if self.study.samples is None else self.study.samples

    @property
    def shard_samples(self) -> int:
        """The samples of a rank."""
        return -(-self.epoch_samples // self.ranks)

    @property
    def judged_samples(self) -> int | None:
        """The number of samples drawn for each simulation. None means the epoch's own samples."""
        most = LARGEST_JUDGED
        if (update := self.study.terms.update_samples) is not None:
            most = max(1, LARGEST_UPDATES // update) * update
        return most if self.epoch_samples > most else None

    def build_dimensions(self) -> Dimensions:
        """Returns the values to try for each setting that has an effect, ascending. A held setting has one."""
        point = self.build_point()
        return {
            name: (getattr(point, name),) if name in self.held else values
            for name, values in self._list_dimensions().items()
        }

    def _list_dimensions(self) -> Dimensions:
        own = self.study.terms.cost
        costs = (own,) if own != TOKENS else dict.fromkeys((own, self.study.costs.balance))
        depths = {"depth_steps": DEPTHS, "cost": tuple(cost.name for cost in costs)}
        budgets = {"budget_tokens": tuple(compute_budget_ladder(self.memory_tokens))}
        if self.is_update:
            is_padded = self.study.terms.layout is Layout.PADDED
            return {**depths, **budgets, **({"padding_share": PADDING_SHARES} if is_padded else {})}
        windows = {"window_samples": tuple(compute_ladder(min(self.window_max, self.shard_samples), 8))}
        return {"ramp_rounds": RAMPS, **windows, **depths, "max_age_rounds": AGES, **budgets}

    def build_point(self) -> Point:
        """Returns the point at which the search begins."""
        window, ramp = min(self.window_max, self.shard_samples), self.study.terms.ramp_rounds
        return Point(
            policy=self.policy,
            ranks=self.ranks,
            budget_tokens=self.memory_tokens,
            window_samples=window,
            depth_steps=START_DEPTH,
            ramp_rounds=choose_ramp(window, self.shard_samples) if ramp is None else ramp,
            max_age_rounds=self.study.terms.max_age_rounds,
            padding_share=self.study.terms.padding_share,
            cost=self.study.terms.cost.name,
            samples=self.judged_samples,
        )


Choice = tuple[str, str, Study]
"""A choice left to the user: its options, what it needs, and the study with it."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The result of a choice left to the user: its options, what it needs, and the best setting found with it."""

    choice: str
    options: str
    """The options of the choice and of the setting."""
    needs: str
    answer: CellAnswer


@dataclass(frozen=True, slots=True)
class Tuning:
    """The answer: the recommended setting, and everything that was tried."""

    recommended: CellAnswer
    best: CellAnswer
    """The answer with the highest throughput of all tried."""
    curves: Mapping[str, tuple[CellAnswer, ...]]
    """The trade-off over each setting, by field of a point, with the other settings as recommended; ascending."""
    tried: tuple[CellAnswer, ...]
    reasons: tuple[str, ...]
    """The reason for each setting, in one sentence."""
    beside: tuple[Beside, ...]
    failed: tuple[CellFailure, ...]
    samples_over_memory: int
    cautions: tuple[str, ...]

    @property
    def options(self) -> str:
        """The command-line options of the recommendation."""
        return list_options(self.recommended.point, self.curves)


def compute_ladder(largest: int, smallest: int) -> list[int]:
    """Returns values from ``smallest`` to ``largest``, ascending: powers of two, three halves of these, and the ends."""
    steps = {largest, min(smallest, largest)}
    power = 1
    while power <= largest:
        steps |= {value for value in (power, power * 3 // 2) if smallest <= value <= largest}
        power *= 2
    return sorted(steps)


def compute_budget_ladder(memory_tokens: int) -> list[int]:
    """Returns the budgets to try, ascending by 4/3 and 3/2 in turn, from an eighth of the memory to all of it."""
    return sorted({max(1, memory_tokens * parts // 24) for parts in (3, 4, 6, 8, 12, 16, 24)})


def tune(question: Question, runner: Runner | None = None, *, choices: Iterable[Choice] = ()) -> Tuning:
    """Returns the cheapest setting within the tolerance, and the curves it was chosen from. It also shows what each of
    ``choices`` (`list_choices`) would bring, which takes about the same number of simulations again for each.

    Raises: UsageError when the question is not valid.
    """
    used = runner or Runner()

    dimensions = question.build_dimensions()
    search = SettingSearch(partial(run_grid, question.study, runner=used), dimensions, question.tolerance)
    chosen = search.run(question.build_point())
    beside = []
    for options, needs, study in choices:
        every = replace(question, study=study).build_dimensions()
        near = {name: values for name, values in every.items() if name not in UNTOUCHED}
        own_search = SettingSearch(partial(run_grid, study, runner=used), near, question.tolerance)
        # Packed rows are best with budgets and windows far from those of padded ones.
        is_near = study.terms.layout is question.study.terms.layout
        own = (own_search.improve if is_near else own_search.run)(chosen.point)
        beside.append(Beside(options, f"{options} {list_options(own.point, near)}", needs, own))
    curves = {name: tuple(search.list_line(chosen.point, name)) for name in dimensions}
    lengths = question.study.build_workload(question.ranks).tokens
    return Tuning(
        recommended=chosen,
        best=search.best,
        curves=curves,
        tried=tuple(search.answers.values()),
        reasons=_explain(question, search, chosen, curves),
        beside=tuple(sorted(beside, key=lambda item: -item.answer.rate)),
        failed=tuple(search.failed.values()),
        samples_over_memory=int((lengths > question.memory_tokens).sum()),
        cautions=_list_cautions(question, chosen, tuple(search.failed.values())),
    )


def list_choices(question: Question) -> Iterator[Choice]:
    """Yields each choice left to the user."""
    study, terms = question.study, question.study.terms
    packed = replace(study, terms=replace(terms, layout=Layout.PACKED, sizes=Sizes.ANY))
    is_padded, is_own = terms.layout is Layout.PADDED, study.sharding is not Sharding.SHARED
    if is_padded:
        yield "--layout packed", "attention that keeps the samples of a row apart", packed
    if is_own:
        yield "--shards shared", "one sampler order for all ranks", replace(study, sharding=Sharding.SHARED)
    if is_padded and is_own:
        yield "--layout packed --shards shared", "both", replace(packed, sharding=Sharding.SHARED)
    if terms.order is not StepOrder.FULLEST and not question.is_update:
        needs = "long and short samples need not be mixed over the steps of a round"
        yield "--order fullest", needs, replace(study, terms=replace(terms, order=StepOrder.FULLEST))
    if terms.order is not StepOrder.SAMPLER and terms.sizes is Sizes.ANY:
        needs = "nothing: batches of neighbours, in the sampler's order, as a curriculum wants them"
        yield "--order sampler", needs, replace(study, terms=replace(terms, order=StepOrder.SAMPLER))
    if terms.sizes is Sizes.ANY and is_padded and terms.order is not StepOrder.SAMPLER:
        for sizes in (Sizes.THREES, Sizes.POWERS):
            needs = "nothing: fewer shapes, for compiled models and kernels"
            yield f"--sizes {sizes}", needs, replace(study, terms=replace(terms, sizes=sizes))


def _list_cautions(question: Question, chosen: CellAnswer, failed: Sequence[CellFailure]) -> tuple[str, ...]:
    found = []
    largest = min(question.window_max, question.shard_samples)
    if largest == question.shard_samples < question.window_max and not question.is_update:
        found.append(
            f"no window above the {largest:,} samples of a rank was tried: for a longer data set, pass its --samples"
        )
    if question.is_update and chosen.point.padding_share == PADDING_SHARES[-1]:
        found.append(EDGE)
    if (judged := question.judged_samples) is not None:
        found.append(f"an epoch of {judged:,} samples was judged instead of {question.epoch_samples:,}")
    if question.study.global_batch.goal is None:
        found.append(
            f"every step is an update here, of {chosen.summary.samples_per_update:,.0f} samples with the "
            "recommendation, and of other sizes with other settings. With --global-batch N all are judged with updates of N "
            "samples"
        )
    if failed:
        found.append(f"{len(failed)} simulations failed, the first: {failed[0]}")
    return tuple(found)


def _explain(
    question: Question, search: SettingSearch, chosen: CellAnswer, curves: Mapping[str, tuple[CellAnswer, ...]]
) -> tuple[str, ...]:
    best = search.best
    share = chosen.rate / best.rate
    memory = compute_host_tokens(chosen) / max(1, compute_host_tokens(best))
    reasons = [
        f"{share:.2%} of the best throughput tried ({best.rate:,.0f} tokens/s at {describe_point(best.point, curves)}), "
        f"with {memory:.0%} of its host memory; the tolerance is {question.tolerance:.2%}, half of it kept in reserve"
    ]
    for name, curve in curves.items():
        value = getattr(chosen.point, name)
        at = next(place for place, answer in enumerate(curve) if answer is chosen)
        title = f"{NAMES[name][0]} {_show(value)}"
        if name in question.held:
            reasons.append(f"{title}: as given")
            continue
        if not at:
            reasons.append(f"{title}: the smallest tried is good enough")
            continue
        below = curve[at - 1]
        other, loss = _show(getattr(below.point, name)), 1 - below.rate / best.rate
        if not search.is_good(below):
            said = f"{loss:.2%}" if loss >= 5e-5 else "less than 0.01%"
            reasons.append(f"{title}: the next smaller value, {other}, is {said} below the best")
        elif name in list_own(below) - list_own(chosen):
            reasons.append(f"{title}: the loader's default; {other} is good enough too, but saves hardly any memory")
        elif compute_host_tokens(below) > compute_host_tokens(chosen):
            reasons.append(f"{title}: {other} is good enough too, but takes more host memory")
        else:
            reasons.append(f"{title}: {other} is good enough too, but no faster")
    return tuple(reasons)


def _show(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def describe_point(point: Point, names: Mapping[str, object]) -> str:
    """Returns the values of those settings in ``names`` that are tuned, as a text."""
    return ", ".join(f"{NAMES[name][0]} {_show(getattr(point, name))}" for name in NAMES if name in names)


def list_options(point: Point, names: Mapping[str, object]) -> str:
    """Returns the options for those settings in ``names`` that are tuned."""
    given = [(NAMES[name][1], getattr(point, name)) for name in NAMES if name in names]
    return " ".join(f"{option} {value}" for option, value in given if value not in (TOKENS.name, None))
