"""Local grouping: divides a window of samples into few groups, each within the token budget and all further limits. Spec: R2.

**Padded.** A group costs ``len(group) * longest``. If a run of samples, sorted by length, fits, it also fits without some of
them. So a greedy sweep over the sorted samples uses the fewest groups (FEWEST; proved in `proofs/`). The sweep starts at
the shortest, so the one group that may be far from full holds the longest samples, which cost least to carry.

Further resources are summed, not padded, and no single order suits all of them. With limits the same sweep still respects
them, but may use more groups than necessary (NP21).

**Packed.** The samples lie end to end, so a group costs their sum. A sample begins a new group only if it fits into no other
(best fit). So no two groups fit together (ANY-FIT), and there are fewer than twice the fewest possible; finding the fewest is
bin packing, which is NP-hard (NP22). The longest samples come first, which leaves the shortest to fill the gaps. The oldest
come even before these. Otherwise they would be carried round after round, as the shortest are, until they are due, and then
leave in a group that nothing has filled.

**In sampler order** a group is a run of the window, in either layout. No sample is moved to fill a group better.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, gt, le, sub
from typing import Final

from odb_ref.core.batching.sizes import Sizes
from odb_ref.core.types import Group, Sample

_REACH: Final = 64
"""The number of samples among which the next group is sought first; doubled if the group may be larger."""


def compute_groups(
    samples: Iterable[Sample], budget_tokens: int, limits: tuple[int, ...] = (), most_padding: int | None = None
) -> tuple[Group, ...]:
    """Returns the samples in groups of at most ``budget_tokens`` padded tokens, each within all ``limits``. In updates at most
    ``most_padding`` of a group's tokens are padding (R16.3).

    A sample that exceeds a bound by itself becomes a group of its own. Groups come shortest first; inside a group the
    longest sample is first. Position breaks ties in length.

    Spec: R2.1, R2.2. Preserves: BUDGET, FEWEST where padding is not bounded.
    """
    groups: list[Group] = []
    begin = held = 0
    room = limits
    most = budget_tokens if most_padding is None else most_padding
    # Sorting is stable, and two sorts by integers are faster than one by pairs. A window is already in position order.
    by_position = sorted(samples, key=attrgetter("position"))
    ordered = sorted(by_position, key=attrgetter("length"))
    for end, sample in enumerate(ordered):
        size = end - begin
        padded = size * sample.length
        is_over = padded + sample.length > budget_tokens or padded - held > most
        if size and (is_over or (limits and any(map(gt, sample.costs, room)))):
            groups.append(tuple(ordered[begin:end][::-1]))
            begin, held = end, 0
            room = limits
        held += sample.length
        if limits:
            room = tuple(map(sub, room, sample.costs))
    if ordered:
        groups.append(tuple(ordered[begin:][::-1]))
    return tuple(groups)


def compute_sized_groups(
    samples: Iterable[Sample],
    sizes: Sizes,
    budget_tokens: int,
    limits: tuple[int, ...] = (),
    most_padding: int | None = None,
) -> tuple[Group, ...]:
    """Returns the samples in groups of friendly sizes.

    Each group is the first that `compute_groups` forms of the samples left, cut to a friendly number of samples. The longest
    are cut off and begin the next group. Spec: R2.8. Preserves: BUDGET, SIZES.
    """
    groups: list[Group] = []
    ordered = sorted(samples, key=attrgetter("length", "position"))
    begin, reach = 0, _REACH
    while begin < len(ordered):
        first, *others = compute_groups(ordered[begin : begin + reach], budget_tokens, limits, most_padding)
        if not others and begin + reach < len(ordered):
            reach *= 2  # more samples might fit
            continue
        end = begin + sizes.round_down(len(first))
        groups.append(tuple(ordered[begin:end][::-1]))
        begin, reach = end, _REACH
    return tuple(groups)


def compute_rows(samples: Iterable[Sample], budget_tokens: int, limits: tuple[int, ...] = ()) -> tuple[Group, ...]:
    """Returns the samples in groups of at most ``budget_tokens`` tokens in sum, each within all ``limits``.

    A sample that exceeds a bound by itself becomes a group of its own. Groups come in the order in which they were begun. The
    first begins with the oldest samples, up to the budget. Inside a group the longest sample is first. Position breaks ties in
    length; among groups with equal room the one begun first is chosen.

    Spec: R2.5. Preserves: BUDGET.
    """
    by_position = sorted(samples, key=attrgetter("position"))
    oldest = next(_iterate_runs(by_position, _count_row_tokens, budget_tokens, limits), ())
    others = sorted(by_position[len(oldest) :], key=attrgetter("length"), reverse=True)
    groups: list[list[Sample]] = []
    rests: list[tuple[int, ...]] = []  # by group: what is left of each limit
    rooms: list[tuple[int, int]] = []  # tokens left and the group's number, sorted
    for sample in chain(oldest, others):
        place = bisect_left(rooms, (sample.length, 0))
        while limits and place < len(rooms) and not all(map(le, sample.costs, rests[rooms[place][1]])):
            place += 1
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = budget_tokens, len(groups)
            groups.append([])
            rests.append(limits)
        groups[number].append(sample)
        if limits:
            rests[number] = tuple(map(sub, rests[number], sample.costs))
        insort(rooms, (room - sample.length, number))
    for group in groups[:1]:  # the others are already in this order
        group.sort(key=attrgetter("position"))
        group.sort(key=attrgetter("length"), reverse=True)
    return tuple(map(tuple, groups))


def compute_runs(
    samples: Iterable[Sample],
    count_tokens: Callable[[int, int, int], int],
    budget_tokens: int,
    limits: tuple[int, ...] = (),
) -> tuple[Group, ...]:
    """Returns the samples in groups of neighbours by position, each of at most ``budget_tokens`` tokens and within all
    ``limits``. ``count_tokens`` computes a group's tokens from its size, its longest length and the sum of its lengths.

    A sample that exceeds a bound by itself becomes a group of its own.

    Spec: R2.6. Preserves: BUDGET.
    """
    return tuple(_iterate_runs(sorted(samples, key=attrgetter("position")), count_tokens, budget_tokens, limits))


def _iterate_runs(
    by_position: Iterable[Sample],
    count_tokens: Callable[[int, int, int], int],
    budget_tokens: int,
    limits: tuple[int, ...],
) -> Iterator[Group]:
    group: list[Sample] = []
    longest = total = 0
    rest = limits
    for sample in by_position:
        longest, total = max(longest, sample.length), total + sample.length
        fits = count_tokens(len(group) + 1, longest, total) <= budget_tokens and all(map(le, sample.costs, rest))
        if group and not fits:
            yield tuple(group)
            group = []
            longest = total = sample.length
            rest = limits
        group.append(sample)
        if limits:
            rest = tuple(map(sub, rest, sample.costs))
    if group:
        yield tuple(group)


def _count_row_tokens(_size: int, _longest: int, total: int) -> int:
    return total
