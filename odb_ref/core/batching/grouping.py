"""Local grouping: a window of samples into few groups, each within the token budget and all further limits. Spec: R2.

**Padded.** A group costs ``len(group) * longest``. Sorted by length, any run of samples that fits also fits without some of
them, so a greedy sweep over the sorted samples uses the fewest groups (FEWEST; proved in `proofs/`). The sweep starts at
the shortest: the one group that may be far from full then holds the longest samples, which cost least to carry.

Further resources are summed, not padded, and no order suits all of them: with limits the same sweep still keeps them, but
may use more groups than would do (NP21).

**Packed.** Laid end to end, samples cost their sum. A sample begins a group only where it fits into none (best fit), so no two
groups fit together (ANY-FIT) and there are fewer than twice the fewest; finding the fewest is bin packing, which is NP-hard
(NP22). The longest come first, which leaves the shortest to fill what is left; but before them the oldest, which would else be
carried round after round, as the shortest are, until they are due, and leave in a group that nothing has filled.

**In sampler order** a group is a run of the window, in either layout: no sample is moved to fill a group better.
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
"""Among how many samples the next group is looked for first."""


def compute_groups(
    samples: Iterable[Sample], budget_tokens: int, limits: tuple[int, ...] = (), most_padding: int | None = None
) -> tuple[Group, ...]:
    """Returns the samples as groups of at most ``budget_tokens`` padded tokens that use no more of any resource than ``limits``
    say; in updates ``most_padding`` of the tokens are padding, at most (R16.3).

    A sample that exceeds one of these by itself is a group of its own. Groups come shortest first; inside a group the
    longest sample is first. Ties in length fall to the position.

    Spec: R2.1, R2.2. Preserves: BUDGET, FEWEST where padding is not bounded.
    """
    groups: list[Group] = []
    begin = held = 0
    room = limits
    most = budget_tokens if most_padding is None else most_padding
    # Sorting keeps the order of equals: by whole numbers twice is faster than once by pairs, and a window is in order.
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
    """Returns the samples as groups, each begun as `compute_groups` begins its first and cut to a friendly number of samples:
    the longest, which are cut off, begin the next.

    Spec: R2.8. Preserves: BUDGET, SIZES.
    """
    groups: list[Group] = []
    ordered = sorted(samples, key=attrgetter("length", "position"))
    begin, reach = 0, _REACH
    while begin < len(ordered):
        first, *others = compute_groups(ordered[begin : begin + reach], budget_tokens, limits, most_padding)
        if not others and begin + reach < len(ordered):
            reach *= 2  # more might join
            continue
        end = begin + sizes.round_down(len(first))
        groups.append(tuple(ordered[begin:end][::-1]))
        begin, reach = end, _REACH
    return tuple(groups)


def compute_rows(samples: Iterable[Sample], budget_tokens: int, limits: tuple[int, ...] = ()) -> tuple[Group, ...]:
    """Returns the samples as groups of at most ``budget_tokens`` tokens in sum that use no more of any resource than
    ``limits`` say.

    A sample that exceeds one of these by itself is a group of its own. Groups come in the order in which they were begun, the
    first by the oldest samples, up to the budget; inside a group the longest sample is first. Ties in length fall to the
    position, ties in room to the group begun first.

    Spec: R2.5. Preserves: BUDGET.
    """
    by_position = sorted(samples, key=attrgetter("position"))
    oldest = next(_iterate_runs(by_position, _count_row_tokens, budget_tokens, limits), ())
    others = sorted(by_position[len(oldest) :], key=attrgetter("length"), reverse=True)
    groups: list[list[Sample]] = []
    rests: list[tuple[int, ...]] = []  # what is left of each limit, by group
    rooms: list[tuple[int, int]] = []  # tokens left, and the group's number; in order
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
    for group in groups[:1]:  # the others are in this order
        group.sort(key=attrgetter("position"))
        group.sort(key=attrgetter("length"), reverse=True)
    return tuple(map(tuple, groups))


def compute_runs(
    samples: Iterable[Sample],
    count_tokens: Callable[[int, int, int], int],
    budget_tokens: int,
    limits: tuple[int, ...] = (),
) -> tuple[Group, ...]:
    """Returns the samples as groups of neighbours, by position, that fit together: at most ``budget_tokens`` as
    ``count_tokens`` has them of size, longest and sum, and no more of any resource than ``limits`` say.

    A sample that exceeds one of these by itself is a group of its own.

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
