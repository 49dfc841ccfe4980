"""The time and money of a training run, in the best way for a user who changes nothing else, and in other ways.

Every way trains on the same samples, in the same memory, and at the same global batch if one is requested. For each way the
budget, and the window if it has one, are searched for (`odb_sim.studies.search`), because a smaller one can leave fewer ranks
idle at the end of an update. For a long epoch the search simulates a part of it, spread evenly over the sorted lengths, and the
figures are those of the whole, or of a larger part if that takes more than seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, exp, hypot, log
from typing import Final

import numpy as np

from odb_ref.core.batching.layouts import Layout
from odb_ref.core.config import Terms
from odb_ref.core.errors import UsageError
from odb_sim.engine.cautions import About, Caution, describe_long, say_count
from odb_sim.engine.metrics import Summary
from odb_sim.engine.updates import EVERY_STEP, TOLERATED, GlobalBatch
from odb_sim.inputs.costs import RANGED, Costs, LoaderCost, Ranges
from odb_sim.inputs.jobs import TrainingJob
from odb_sim.inputs.lengths import Lengths
from odb_sim.studies.bands import LEFT_OUT, Band, Bands, Uncertain, compute_bands, list_uncertain
from odb_sim.studies.cells import Point, Runner
from odb_sim.studies.comparison import REFERENCE
from odb_sim.studies.fitted import fit_batches
from odb_sim.studies.runs import Run, is_rule, run
from odb_sim.studies.search import Dimensions, SettingSearch
from odb_sim.studies.sweep import Study, run_grid
from odb_sim.studies.tune import EDGE, LARGEST_WINDOW, PADDING_SHARES, compute_budget_ladder, compute_ladder

LARGEST_SEARCHED: Final = (20_000, 6_000)
"""The most samples to search for settings with; the same for updates of the protocol, which only events can simulate."""
LARGEST_SIMULATED: Final = (300_000, 50_000)
"""The same for the figures of the settings found."""
_FEWEST_UPDATES: Final = 8
_QUICK: Final = 8
"""With fewer samples of an update on a rank, the update's round takes most of the time: fewer samples are drawn."""
_LEAST_SHARD: Final = 512
"""The fewest samples per rank with which a way without updates is simulated, since no window is larger."""
_LEAST_OF_UPDATES: Final = 64
"""The same for updates of a fixed number of samples."""
_TOLERANCE: Final = 0.01
_WAITED: Final = 0.05
"""From this share of the time on, waiting for data is said: it rests on a loader that is assumed."""
_ROUND: Final = 64
"""Budgets are multiples of this number of tokens."""
_WORDS: Final = {
    "efficiency": "what share of its peak the GPU reaches",
    "attention": "how fast attention is",
    "expert_share": "how fast the experts of a mixture are",
    "passes": "how often what a layer holds crosses the memory",
    "logit_bytes": "how the loss is computed",
    "recompute": "what recomputing activations costs",
    "launch_s": "the time to launch a layer's kernels",
    "link_share": "what share of the wire messages reach",
    "hidden_share": "how much of the sending is hidden",
    "message_s": "the latency of messages",
    "model_error": LEFT_OUT,
}
"""A description of each constant."""
_REMEDY: Final = "time a few steps of two sizes or more, and give them to odb-ref calibrate as a CSV file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to plan. ``cost_model`` replaces the cost of a step by the presets.

    Raises: UsageError when a number is not valid.
    """

    job: TrainingJob
    lengths: Lengths
    global_batch: int | None = None
    epochs: float = 1.0
    tokens: int | None = None
    """The tokens to train on, instead of epochs."""
    memory_tokens: int | None = None
    """The padded tokens of a micro-batch that fit, if known."""
    cost_model: Costs | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= 1e6:
            raise UsageError(f"--epochs must be more than 0 and at most a million, got {self.epochs:g}")
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        if self.memory_tokens is not None and self.memory_tokens < 1:
            raise UsageError(f"--memory-tokens must be at least 1, got {self.memory_tokens}")
        if self.global_batch is not None and self.global_batch < self.job.gpus:
            raise UsageError(
                f"--global-batch {self.global_batch:,}: is less than one sample for each of {self.job.gpus:,} ranks"
            )
        if len(self.lengths) < self.job.gpus:
            raise UsageError(
                f"{self.lengths.name}: {len(self.lengths):,} samples are too few for {self.job.gpus:,} ranks"
            )

    @property
    def total_tokens(self) -> float:
        """The tokens of the whole run."""
        return self.epochs * int(self.lengths.tokens.sum()) if self.tokens is None else self.tokens

    @property
    def samples(self) -> float:
        """The samples of the whole run."""
        return self.total_tokens / float(self.lengths.tokens.mean())

    @property
    def budget_tokens(self) -> int:
        """The tokens that the memory holds for sure, or nearly so."""
        safe = self.job.compute_token_range()[0] if self.memory_tokens is None else self.memory_tokens
        return max(1, safe // _ROUND * _ROUND or safe)

    @property
    def costs(self) -> Costs:
        """The costs of the run. Whether ranks meet after each micro-batch follows from the strategy, not from timed steps."""
        if (given := self.cost_model) is None:
            return self.job.price(self.job.values)
        each_step = given.collective.each_step or self.job.strategy.each > 0
        return replace(given, collective=replace(given.collective, each_step=each_step))

    def draw(self, largest: tuple[int, int]) -> Lengths:
        """Returns the lengths, or if there are more than ``largest`` allows, evenly spaced ones of the sorted: the longest is
        among them, and their mean is that of all, or nearly so.
        """
        most, update = largest[self.global_batch is not None], self.global_batch
        if update is not None:
            most = int(most * min(1.0, update / (_QUICK * self.job.gpus)))
            most = max(_FEWEST_UPDATES, most // update) * update
        most = max(most, (_LEAST_SHARD if update is None else _LEAST_OF_UPDATES) * self.job.gpus)
        if len(self.lengths) <= most:
            return self.lengths
        places = (np.arange(most) + 0.5) * (len(self.lengths) / most)
        places[-1] = len(self.lengths) - 1
        rows = np.argsort(self.lengths.tokens, kind="stable")[places.astype(np.int64)]
        return Lengths(self.lengths.name, self.lengths.tokens[rows], self.lengths.supervised_tokens[rows])

    def list_inputs(self) -> list[Uncertain]:
        """Returns the costs that are not known exactly."""
        if self.cost_model is not None:
            return list_uncertain(self.costs)
        job, values = self.job, self.job.values
        found = []
        for name, words in _WORDS.items():
            low, high = (job.price(values | {name: end}) for end in (job.constants[name].low, job.constants[name].high))
            if low != high:
                found.append(Uncertain(words, low, high, _REMEDY))
        return found


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train, what it needs, and the result of its epoch."""

    name: str
    needs: str
    what: Run
    summary: Summary

    @property
    def token_s(self) -> float:
        """The mean seconds per token of the epoch, without padding."""
        return self.summary.sim_time_s / max(1, self.summary.real_tokens)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The answer: the recommended way first, fixed batches second, then others."""

    wanted: Wanted
    ways: tuple[Way, ...]
    bands: Bands
    cautions: tuple[str, ...]

    def compute_seconds(self, way: Way) -> float:
        """Returns the seconds of the whole run."""
        return way.token_s * self.wanted.total_tokens

    def compute_gpu_hours(self, way: Way) -> float:
        """Returns the hours of all GPUs together."""
        return self.compute_seconds(way) * self.wanted.job.gpus / 3600

    def compute_money(self, way: Way) -> float:
        """Returns the dollars, at the price of the job."""
        return self.compute_gpu_hours(way) * self.wanted.job.values["price_usd"]

    def compute_speedup(self, way: Way) -> float:
        """Returns the time of fixed batches divided by that of a way."""
        return self.ways[1].token_s / way.token_s

    def band(self, way: Way) -> Band:
        """Returns the band of the time of a way, and so of its GPU-hours."""
        return self.bands.combine(*[float(one is way) for one in self.ways])

    def band_money(self, way: Way) -> Band:
        """Returns the band of the money. The price has a range too, unless it is the user's own."""
        price = self.wanted.job.constants["price_usd"]
        lowest, highest = (end / price.value if price.value else 1.0 for end in (price.low, price.high))
        return self.band(way).widen("the price", lowest, highest, "a price of your own: --price")

    def band_speedup(self, way: Way) -> Band:
        """Returns the band of the speed-up."""
        return self.bands.combine(*[float(one is self.ways[1]) - float(one is way) for one in self.ways])


def make_plan(wanted: Wanted, runner: Runner) -> RunPlan:
    """Returns the plan. Raises: UsageError when ``wanted`` is not valid."""
    if wanted.budget_tokens < int(wanted.lengths.tokens.min()):
        if wanted.memory_tokens is not None:
            raise UsageError(
                f"--memory-tokens {wanted.memory_tokens:,}: the shortest sample has {int(wanted.lengths.tokens.min()):,}"
            )
        most = wanted.job.compute_token_range()[1]
        raise UsageError(
            f"{wanted.job.model.name} on {wanted.job.gpus:,} GPUs has room for {wanted.budget_tokens:,} to {most:,} "
            "tokens, and the shortest sample may not fit: use more GPUs, or pass --memory-tokens if you know what fits"
        )
    searched, simulated = wanted.draw(LARGEST_SEARCHED), wanted.draw(LARGEST_SIMULATED)
    ways: list[Way] = []
    cautions: tuple[Caution, ...] = ()
    for name, needs, policy, terms in _list_ways(wanted):
        study = _build_study(wanted, searched, terms, _choose_global_batch(wanted, policy, ways))
        start, dimensions = _build_dimensions(wanted, searched, policy, terms.layout)
        search = SettingSearch(partial(run_grid, study, runner=runner), dimensions, _TOLERANCE)
        found = search.run(start)
        what = fit_batches(replace(study, lengths=simulated).build_run(found.point))
        result = run(what)
        if not ways:
            cautions, smallest = result.cautions, min(point.budget_tokens for point in search.answers)
        size = result.summary.batch_size
        batch = "" if size is None else f" of {size:,}"
        # The bands draw from these samples again, and may miss the longest, which determines the size.
        ways.append(Way(name + batch, needs, replace(what, batch_size=size), result.summary))
    bands = compute_bands([way.what for way in ways], wanted.list_inputs(), most=len(searched), runner=runner)
    said = _list_cautions(wanted, ways, cautions)
    if ways[0].what.budget_tokens <= smallest < wanted.budget_tokens:
        said.append(f"no budget below {smallest:,} was tried: --token-budget of odb-ref simulate tries one")
    if len(searched) < len(wanted.lengths):
        said.append(
            f"settings were searched for with {len(searched):,} samples, spread evenly over the {len(wanted.lengths):,} "
            f"sorted by length; the figures are those of {'all' if simulated is wanted.lengths else f'{len(simulated):,}'}"
        )
    return RunPlan(wanted, tuple(ways), bands, tuple(dict.fromkeys(said)))


def _choose_global_batch(wanted: Wanted, policy: str, ways: Sequence[Way]) -> GlobalBatch:
    """Returns the global batch to which a way accumulates its steps: the one requested, or that of the first way's updates."""
    if not ways or (policy == "odb" and wanted.global_batch is not None):
        return EVERY_STEP  # the protocol's own updates
    samples = ceil(ways[0].summary.samples_per_update) if wanted.global_batch is None else wanted.global_batch
    return GlobalBatch(samples=max(samples, wanted.job.gpus))


def choose(wanted: Sequence[Wanted]) -> Wanted:
    """Returns the fastest of several jobs with the same goal, each at its largest budget. The last needs the least memory.

    A job whose memory does not hold the longest sample is chosen only if all are like that; then the one with the largest
    budget is. If costs were measured, the first is chosen, because the measurement is of one of the jobs, and the others would
    get their larger budgets for free. Memory that is known was measured of one of the jobs too: of the last, if it is more than
    the first has room for, or as much as the last surely has.
    """
    if (known := wanted[0].memory_tokens) is not None:
        (_, most), *others = [one.job.compute_token_range() for one in wanted]
        if known > most or any(known >= least for least, _ in others):
            wanted = wanted[-1:]
    longest, largest = int(wanted[0].lengths.tokens.max()), max(one.budget_tokens for one in wanted)
    holding = [one for one in wanted if one.budget_tokens >= min(longest, largest)]
    if len(holding) == 1 or holding[0].cost_model is not None:
        return holding[0]
    return min(holding, key=_measure)


def _measure(wanted: Wanted) -> float:
    _, _, policy, terms = next(_list_ways(wanted))
    searched = wanted.draw(LARGEST_SEARCHED)
    point, _ = _build_dimensions(wanted, searched, policy, terms.layout)
    return run(_build_study(wanted, searched, terms).build_run(point)).summary.sim_time_s


def compute_ranges(wanted: Wanted) -> Ranges:
    """Returns the ranges of the cost model's own numbers for its file, each with all effects on it combined."""
    if wanted.cost_model is not None:
        return wanted.cost_model.ranges
    rows = []
    for name in RANGED:
        section, _, number = name.partition(".")
        value = float(getattr(getattr(wanted.costs, section), number))
        if not value or section in ("network", "loader"):
            continue
        moves = [
            [
                log(max(1e-12, float(getattr(getattr(costs, section), number))) / value)
                for costs in (item.low, item.high)
            ]
            for item in wanted.list_inputs()
        ]
        down, up = (hypot(*(sign * max(0.0, *(sign * move for move in pair)) for pair in moves)) for sign in (-1, 1))
        rows.append((name, value * exp(-down), value * exp(up)))
    return Ranges(rows=tuple(rows))


def _list_ways(wanted: Wanted) -> Iterator[tuple[str, str, str, Terms]]:
    """Yields the name of each way, what it needs, its policy, and the terms of the protocol."""
    packed = "attention that keeps the samples of a row apart"
    terms = Terms(update_samples=wanted.global_batch)
    yield "online batches", "nothing", "odb", terms
    yield "fixed batches", "nothing", REFERENCE, Terms()
    yield "online, packed rows", packed, "odb", replace(terms, layout=Layout.PACKED)
    yield "packed beforehand", f"all lengths before the run; {packed}", "packing", Terms()


def _build_study(wanted: Wanted, lengths: Lengths, terms: Terms, global_batch: GlobalBatch = EVERY_STEP) -> Study:
    return Study(
        lengths=lengths,
        seed=wanted.seed,
        costs=wanted.costs,
        terms=terms,
        global_batch=global_batch,
    )


def _build_dimensions(wanted: Wanted, lengths: Lengths, policy: str, layout: Layout) -> tuple[Point, Dimensions]:
    """Returns the point where the search for a way's setting begins, and the values to try."""
    shard, shortest = -(-len(lengths) // wanted.job.gpus), int(wanted.lengths.tokens.min())
    budgets = sorted({tokens // _ROUND * _ROUND or tokens for tokens in compute_budget_ladder(wanted.budget_tokens)})
    dimensions: dict[str, tuple[int, ...]] = {"budget_tokens": tuple(one for one in budgets if one >= shortest)}
    window = min(LARGEST_WINDOW, shard)
    if is_rule(policy) and wanted.global_batch is None:
        dimensions["window_samples"] = tuple(compute_ladder(window, 8))
    elif is_rule(policy) and layout is Layout.PADDED:
        dimensions["padding_share"] = PADDING_SHARES
    point = Point(policy=policy, ranks=wanted.job.gpus, budget_tokens=wanted.budget_tokens, window_samples=window)
    return point, dimensions


def _list_cautions(wanted: Wanted, ways: Sequence[Way], found: Sequence[Caution]) -> list[str]:
    # All samples are counted, not only those simulated.
    long = describe_long(wanted.lengths.tokens, ways[0].what.budget_tokens)
    said = [*([long] if long else []), *(one.text for one in found if one.about is not About.MEMORY)]
    (least, most), update = wanted.job.compute_token_range(), ways[0].summary.samples_per_update
    if wanted.memory_tokens is not None and wanted.memory_tokens > most:
        said.append(
            f"--memory-tokens {wanted.memory_tokens:,} is more than the {least:,} to {most:,} that fit with activations "
            f"{wanted.job.activations} by the model of memory: check the unit, and pass --recompute as it was measured"
        )
    over = int((wanted.lengths.tokens > wanted.budget_tokens).sum())
    if over:
        said.append(
            f"{say_count(over, 'sample is', 'samples are')} longer than the {wanted.budget_tokens:,} tokens that "
            f"{'surely fit' if wanted.memory_tokens is None else 'fit by --memory-tokens'}, the longest has "
            f"{int(wanted.lengths.tokens.max()):,}: cut {'it' if over == 1 else 'them'}"
            f"{'' if wanted.job.recomputes else ', or compute activations again (--recompute yes)'}"
        )
    job = wanted.job
    if job.node_ranks < min(job.node_gpus, job.gpus):
        said.append(
            f"{job.gpus:,} GPUs are {job.node_ranks} on each of {job.gpus // job.node_ranks:,} nodes, since torchrun starts as "
            f"many on all, which share less of the network: a multiple of {job.node_gpus} fills the nodes"
        )
    if wanted.global_batch is not None and wanted.global_batch > len(wanted.lengths):
        said.append(
            f"an epoch has {len(wanted.lengths):,} samples, fewer than an update of {wanted.global_batch:,}: the epoch "
            "is one smaller update"
        )
    if wanted.samples < update:
        said.append(
            f"the run trains on {wanted.samples:,.3g} samples, fewer than an update of {update:,.0f}: its time is that "
            "share of an update's"
        )
    if wanted.global_batch is None:
        largest = max(way.summary.samples_per_update for way in ways)
        other = (
            f"up to {largest:,.0f}, because they end with a step" if largest > TOLERATED * update else "the same size"
        )
        said.append(
            f"without --global-batch each step of online batches is an update, of {update:,.0f} samples; the other "
            f"methods are compared with updates of {other}"
        )
    loader, wait = wanted.costs.loader, ways[0].summary.data_wait_share
    if wait >= _WAITED and loader == LoaderCost():
        said.append(
            f"{wait:.0%} of the time of online batches is waiting for data, by a loader that is assumed ({loader.workers} "
            f"workers, {loader.sample_s:g} s a sample and {loader.per_token_s:g} s a token each), and the band does not "
            "count that: odb-ref calibrate measures yours, on a trace"
        )
    if wanted.global_batch is not None and ways[0].what.padding_share == PADDING_SHARES[-1]:
        said.append(EDGE)
    return said
