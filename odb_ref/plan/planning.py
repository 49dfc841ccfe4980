"""Planning in one process that knows all lengths: samples are dealt out to the ranks, or stay where they are.

Spec: R13.4, R13.5.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import SupportsIndex, TypeAlias, Unpack

from odb_ref.core.errors import UsageError, check_integer
from odb_ref.plan.division import arrange, compute_cost, make_division
from odb_ref.plan.outcome import Plan, PlanReport, RankPlan, Totals, compute_totals, sum_totals
from odb_ref.plan.packing import Batch
from odb_ref.plan.quality import compute_least_wait, compute_least_wait_of_ranks, compute_wait, make_report, sum_costs
from odb_ref.plan.terms import BatchOrder, Options, PlanTerms, Within, make_terms
from odb_ref.plan.units import Indices, Key, Samples, Units, make_samples, make_units, read_list

Rows: TypeAlias = list[list[Batch]]
"""The micro-batches of each rank, the costliest first."""


def plan_all(
    lengths: Iterable[SupportsIndex],
    *,
    ranks: int,
    supervised: Iterable[SupportsIndex] | None = None,
    together: Iterable[Key] | None = None,
    uses: Mapping[str, Iterable[SupportsIndex]] | None = None,
    **terms: Unpack[Options],
) -> Plan:
    """Deals the samples out to ``ranks`` and returns the micro-batches of all; their indices refer to ``lengths``.

    ::

        >>> [rank.micro_batches for rank in plan_all([300, 200, 100, 600], ranks=2, budget=600).ranks]
        [((0, 1, 2),), ((3,),)]

    ``supervised`` holds the number of tokens of each sample that carry loss (default: all), ``together`` a key for each
    sample, and ``uses``, for each of the ``limits``, how much each sample uses of it. `PlanTerms` explains the terms.

    Raises: UsageError when a value is not valid, or the terms cannot be met. Spec: R13.
    """
    own = make_terms(terms)
    size = check_integer(ranks, "ranks", 1)
    samples = make_samples(lengths, supervised, together, uses, own)
    units = make_units(samples, range(len(samples.lengths)), own)
    if own.within is Within.RANK:
        shares = [make_units(samples, home, own) for home in _choose_homes(samples, units, size)]
        rows, least = _divide_shares(shares, own)
        least = max(own.round_up(-(-make_division(units, own, size).least // size)), least if size == 1 else 0)
    else:
        rows, least = _deal(units, size, own)
        shares = [units] * size
    own.check_spares([len(samples.lengths)] * size)
    own.check_count(len(rows[0]), [sum(map(len, row)) for row in rows])
    totals, sums = compute_totals(samples, size), samples.sum_by_key()
    report = _make_report(shares, rows, own, (totals, least, compute_least_wait(units, own, len(rows[0]), size)))
    shortest = find_spare(samples, units.members)
    plans = []
    for share, row in zip(shares, rows, strict=True):
        plans.append(
            RankPlan(
                micro_batches=list_indices(share, row, own.order),
                totals=totals,
                spare=find_spare(samples, [share.members[unit] for unit in chain.from_iterable(row)]) or shortest,
                report=report,
                samples=samples,
                group_supervised=sums,
            )
        )
    return Plan(ranks=tuple(plans))


def plan_ranks(
    lengths: Sequence[Iterable[SupportsIndex]],
    *,
    supervised: Sequence[Iterable[SupportsIndex]] | None = None,
    together: Sequence[Iterable[Key]] | None = None,
    uses: Mapping[str, Sequence[Iterable[SupportsIndex]]] | None = None,
    **terms: Unpack[Options],
) -> Plan:
    """Returns the micro-batches of each rank, whose samples stay where they are; its indices refer to ``lengths[rank]``.

    ::

        >>> [rank.micro_batches for rank in plan_ranks([[300, 200, 100], [600]], budget=600, at_least=2).ranks]
        [((0,), (1, 2)), ((0,), ())]

    The other columns are by rank too. Equal keys of ``together`` on two ranks count as one only with ``within="step"``. Each
    rank's result is what `plan_rank` returns on that rank.

    Raises: UsageError when a value is not valid, or the terms cannot be met. Spec: R13.
    """
    own = make_terms(terms)
    if not len(read_list("lengths", lengths)):  # an array has no truth value
        raise UsageError("lengths are those of each rank: there is none")
    for name, column in (("supervised", supervised), ("together", together), *(uses or {}).items()):
        if column is not None and len(column) != len(lengths):
            raise UsageError(f"{len(lengths)} ranks have lengths, but {len(column)} {name}")
    found: list[tuple[Samples, Units]] = []
    for rank, mine in enumerate(lengths):
        try:
            samples = make_samples(
                mine,
                None if supervised is None else supervised[rank],
                None if together is None else together[rank],
                {name: column[rank] for name, column in (uses or {}).items()},
                own,
            )
            found.append((samples, make_units(samples, range(len(samples.lengths)), own)))
        except UsageError as error:
            raise UsageError(f"rank {rank}: {error}") from None
    shares = [units for _, units in found]
    rows, least = _divide_shares(shares, own)
    own.check_spares([*map(len, shares)])
    own.check_count(len(rows[0]), [*map(len, shares)])
    if own.within is Within.STEP:
        whole = _join([samples for samples, _ in found])
        totals, sums = compute_totals(whole, len(found)), [whole.sum_by_key()] * len(found)
    else:
        totals = sum_totals(compute_totals(samples) for samples, _ in found)
        sums = [samples.sum_by_key() for samples, _ in found]
    least_wait = compute_least_wait_of_ranks([sum_costs(units, own) for units in shares])
    report = _make_report(shares, rows, own, (totals, least, least_wait))
    plans = [
        make_rank_plan(mine, list_indices(mine[1], row, own.order), totals, report, by_key)
        for mine, row, by_key in zip(found, rows, sums, strict=True)
    ]
    return Plan(ranks=tuple(plans))


def make_rank_plan(
    own: tuple[Samples, Units],
    micro_batches: tuple[Indices, ...],
    totals: Totals,
    report: PlanReport,
    sums: Mapping[Key, int],
) -> RankPlan:
    """Returns the plan of a rank with its ``own`` samples and their units."""
    samples, units = own
    return RankPlan(
        micro_batches=micro_batches,
        totals=totals,
        spare=find_spare(samples, units.members),
        report=report,
        samples=samples,
        group_supervised=sums,
    )


def find_spare(samples: Samples, units: Iterable[Indices]) -> Indices:
    """Returns the first of the shortest units with supervised tokens, or of all if none has any; nothing without units.

    Supervised tokens matter because the mean over no token is NaN, and so is its product with a weight of 0. Spec: R13.4.
    """

    def rank(unit: Indices) -> tuple[bool, int]:
        return not any(samples.supervised[index] for index in unit), sum(samples.lengths[index] for index in unit)

    return min(units, key=rank, default=())


def list_indices(units: Units, row: Sequence[Batch], order: BatchOrder) -> tuple[Indices, ...]:
    """Returns the samples of a rank's micro-batches, in the order these are run. Spec: R13.8."""
    return tuple(
        tuple(sorted(chain.from_iterable([units.members[unit] for unit in batch]))) for batch in arrange([*row], order)
    )


def _deal(units: Units, ranks: int, terms: PlanTerms) -> tuple[Rows, int]:
    """Returns the micro-batches of all ranks, those of a step being neighbours in cost, and a lower bound of the count."""
    division = make_division(units, terms, ranks)
    count = terms.round_up(-(-division.need // ranks))
    batches = division.divide(count * ranks, ranks)
    rows: Rows = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for step in range(count):
        # The costliest of a step goes to the rank with the least cost so far, so that the sums of the ranks are even too.
        order = sorted(range(ranks), key=sums.__getitem__)
        for batch, rank in zip(batches[step * ranks : (step + 1) * ranks], order, strict=True):
            rows[rank].append(batch)
            sums[rank] += compute_cost(units, batch, terms.layout)
    return rows, terms.round_up(-(-division.least // ranks))


def _divide_shares(shares: Sequence[Units], terms: PlanTerms) -> tuple[Rows, int]:
    """Returns the micro-batches of each rank, made of its own units, and a lower bound of the count."""
    divisions = [make_division(units, terms) for units in shares]
    count = terms.round_up(max(division.need for division in divisions))
    least = terms.round_up(max(division.least for division in divisions))
    return [division.divide(count) for division in divisions], least


def _choose_homes(samples: Samples, units: Units, ranks: int) -> list[list[int]]:
    """Returns the samples of each rank, with each key on one rank: the costliest key first, to the rank with the least cost."""
    found: dict[Key, list[int]] = {}
    for index, key in enumerate(samples.get_keys()):
        found.setdefault(key, []).append(index)
    costs = {key: sum([units.costs[index] for index in indices]) for key, indices in found.items()}
    homes: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for key in sorted(found, key=costs.__getitem__, reverse=True):
        cost, rank = heap[0]
        homes[rank] += found[key]
        heapq.heapreplace(heap, (cost + costs[key], rank))
    return [sorted(home) for home in homes]


def _join(parts: Sequence[Samples]) -> Samples:
    """Returns the samples of all ranks joined into one."""
    return Samples(
        lengths=tuple(chain.from_iterable(part.lengths for part in parts)),
        supervised=tuple(chain.from_iterable(part.supervised for part in parts)),
        keys=tuple(chain.from_iterable(part.get_keys() for part in parts)),
        uses=(),
    )


def _make_report(shares: Sequence[Units], rows: Rows, terms: PlanTerms, known: tuple[Totals, int, float]) -> PlanReport:
    """Returns the report of a plan. ``known`` holds the totals and the lower bounds of count and wait."""
    totals, least, least_wait = known
    costs = [
        [compute_cost(units, batch, terms.layout) for batch in row] for units, row in zip(shares, rows, strict=True)
    ]
    return make_report(terms, totals, (len(rows[0]), least), (compute_wait(costs), least_wait))
