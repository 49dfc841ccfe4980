"""Groups, as the checker forms and judges them. Spec: R2.1, R2.2, R2.5, R2.6, R2.8.

The code differs from the core's. Without limits it counts padded groups from the longest sample down, and forms them only to
see which are due. For packed groups it examines every group's contents instead of keeping a list of their rooms.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from odb_ref.trace.check.decode import Rows, Settings


def compute_fewest_groups(lengths: list[int], budget_tokens: int) -> int:
    """Returns the fewest groups of any partition in which a group of two or more fits the budget, padded. Spec: R2.1.

    Some group holds the longest sample, and fits no more samples than that length allows. Filling it with the next longest ones
    leaves the shortest for the rest. (The grouping under test sweeps from the other end.)
    """
    ordered = sorted(lengths, reverse=True)
    groups = start = 0
    while start < len(ordered):
        start += max(1, budget_tokens // ordered[start])
        groups += 1
    return groups


def _list_packed(rows: Rows, settings: Settings) -> list[Rows]:
    """Returns the packed groups of a window: each sample goes where it leaves the least room within all bounds."""
    bounds = (settings.budget_tokens, *settings.limits)
    groups: list[Rows] = []
    sums: list[list[int]] = []
    for row in _line_up_for_packing(rows, bounds):
        uses = [row[2], *row[4:]]
        best: list[int] | None = None
        place = 0
        for number, used in enumerate(sums):
            fits = all(have + more <= most for have, more, most in zip(used, uses, bounds, strict=False))
            if fits and (best is None or used[0] > best[0]):
                best, place = used, number
        if best is None:
            groups.append([row])
            sums.append(uses)
        else:
            groups[place].append(row)
            sums[place] = [have + more for have, more in zip(best, uses, strict=False)]
    return groups


def _line_up_for_packing(rows: Rows, bounds: tuple[int, ...]) -> Rows:
    """Returns the samples in packing order: the oldest ones that fit together, then the others, longest first."""
    line = sorted(rows, key=itemgetter(1))
    count = 0
    used = [0] * len(bounds)
    for row in line:
        used = [have + more for have, more in zip(used, (row[2], *row[4:]), strict=False)]
        if count and any(have > most for have, most in zip(used, bounds, strict=False)):
            break
        count += 1
    return line[:count] + sorted(line[count:], key=lambda row: (-row[2], row[1]))


def _iterate_groups(rows: Rows, settings: Settings) -> Iterator[Rows]:
    """Yields the padded groups of a window, in the order of R2.1."""
    group: Rows = []
    used = [0] * len(settings.limits)
    held = 0
    for row in sorted(rows, key=itemgetter(2, 1)):
        costs = row[4:]
        padding = len(group) * row[2] - held
        fits = (len(group) + 1) * row[2] <= settings.budget_tokens and padding <= settings.most_padding
        fits &= all(have + more <= limit for have, more, limit in zip(used, costs, settings.limits, strict=False))
        if group and not fits:
            yield group
            group, used, held = [], [0] * len(used), 0
        group.append(row)
        held += row[2]
        used = [have + more for have, more in zip(used, costs, strict=False)]
    if group:
        yield group


def is_friendly(count: int, sizes: str) -> bool:
    """Returns True when a group may have ``count`` samples. Halves the count while it is even, and looks at the rest."""
    if count <= 1 or sizes == "any":
        return True
    if sizes == "even":
        return count % 2 == 0
    while count % 2 == 0:
        count //= 2
    return count == 1 or (count == 3 and sizes == "threes")


def _list_sized(rows: Rows, settings: Settings) -> list[Rows]:
    """Returns the padded groups of a window, each cut at its end until its size is friendly. Spec: R2.8."""
    rest = sorted(rows, key=itemgetter(2, 1))
    groups: list[Rows] = []
    while rest:
        group = list(next(_iterate_groups(rest, settings)))
        while not is_friendly(len(group), settings.sizes):
            group.pop()
        groups.append(group)
        rest = rest[len(group) :]
    return groups


def _list_runs(rows: Rows, settings: Settings) -> list[Rows]:
    """Returns the groups of neighbours that a window forms in sampler order, in either layout. Spec: R2.6."""
    groups: list[Rows] = []
    for row in sorted(rows, key=itemgetter(1)):
        if groups and not any(list_excesses([*groups[-1], row], settings)):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _list_groups(rows: Rows, settings: Settings) -> list[Rows]:
    if settings.order == "sampler":
        return _list_runs(rows, settings)
    if settings.sizes != "any":
        return _list_sized(rows, settings)
    return _list_packed(rows, settings) if settings.is_packed else list(_iterate_groups(rows, settings))


class GroupNumbers(NamedTuple):
    """The number of groups of a window, of those a rank that still reads would emit, and of those that hold a due sample."""

    groups: int
    to_emit: int
    due: int


def count_groups(rows: Rows, settings: Settings, due_before: int) -> GroupNumbers:
    """Counts the groups of a window. A group is due if it holds a sample positioned before ``due_before``. Spec: R3.1."""
    is_due = bool(rows) and min(map(itemgetter(1), rows)) < due_before
    due = 0
    is_plain = not (settings.is_packed or settings.limits or settings.update_samples)
    if not is_plain or is_due or settings.order == "sampler" or settings.sizes != "any":
        formed = _list_groups(rows, settings)
        groups, tokens = len(formed), [settings.compute_tokens(group) for group in formed]
        due = sum(any(row[1] < due_before for row in group) for group in formed)
    else:
        lengths = [row[2] for row in rows]
        groups, tokens = compute_fewest_groups(lengths, settings.budget_tokens), _list_tokens(lengths, settings)
    is_one_kept = groups > 1 and min(tokens) * 2 < settings.budget_tokens
    return GroupNumbers(groups, groups - is_one_kept, due)


def find_other_choice(
    window: Rows, emitted: Sequence[Sequence[int]], target: int, settings: Settings, due_before: int
) -> str:
    """Returns how the positions ``emitted``, by step, differ from those a window contributes to a round of ``target`` steps, or
    an empty text. It ignores how a group is split and the order of the steps. Spec: R4.1, R4.2.
    """
    groups = [[row[1] for row in group] for group in _choose(_list_groups(window, settings), settings, due_before)]
    steps = [frozenset(positions) for positions in emitted if positions]
    if len(groups) > target:
        others = {*steps} - {*map(frozenset, groups[:target])}
        return f"emits {sorted(min(others, key=min))[:5]}, which is not one of the groups chosen" if others else ""
    place = {position: number for number, group in enumerate(groups) for position in group}
    if mixed := next((step for step in steps if len({place.get(position) for position in step}) > 1), None):
        return f"emits {sorted(mixed)[:5]}, of several groups"
    if len(emitted) == target and len(place) > sum(map(len, steps)):
        return (
            f"carries {len(place) - sum(map(len, steps))} samples, though {target} steps hold all {len(groups)} groups"
        )
    if len(steps) < len(emitted) and max(map(len, steps), default=0) > 1:
        return f"idles in {len(emitted) - len(steps)} steps, though it has a group to split"
    return ""


def _choose(groups: list[Rows], settings: Settings, due_before: int) -> list[Rows]:
    """Returns the groups in the order they are chosen: due ones, then by falling tokens, or by position. Spec: R4.1."""

    def rank(group: Rows) -> tuple[bool, int]:
        is_due = any(row[1] < due_before for row in group)
        return not is_due, group[0][1] if settings.order == "sampler" else -settings.compute_tokens(group)

    return sorted(groups, key=rank)


def _list_tokens(lengths: list[int], settings: Settings) -> list[int]:
    """Returns the padded tokens of each group of a window without limits or due groups. Spec: R2.1."""
    ordered = sorted(lengths)
    tokens = []
    begin = 0
    while begin < len(ordered):
        end = _find_end(ordered, begin, settings.budget_tokens)
        tokens.append((end - begin) * ordered[end - 1])
        begin = end
    return tokens


def _find_end(ordered: list[int], begin: int, budget_tokens: int) -> int:
    """Returns the end of the group that starts at ``begin``. Its tokens grow with each sample, so a bisection finds it."""
    ends = range(begin + 1, len(ordered) + 1)
    return begin + max(1, bisect_right(ends, budget_tokens, key=lambda end: (end - begin) * ordered[end - 1]))


def list_excesses(group: Rows, settings: Settings) -> Iterator[str]:
    """Yields how a group of two samples or more exceeds the budget and the limits."""
    if len(group) < 2:
        return
    tokens = settings.compute_tokens(group)
    if tokens > settings.budget_tokens:
        kind = "packed" if settings.is_packed else "padded"
        yield f"{len(group)} samples, {tokens} {kind} tokens, over {settings.budget_tokens}"
    for place, limit in enumerate(settings.limits, 4):
        used = sum(row[place] for row in group if place < len(row))
        if used > limit:
            yield f"{len(group)} samples use {used} of resource {place - 4}, over {limit}"
