"""The page of `odb-ref view`, which plays a traced epoch round by round. `assets/lens.js` draws what `build_data` returns.

Its size is bounded. The strip at the top shows all rounds of a long epoch, but only those around a chosen round are played.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from odb_ref.core.offer import NONE
from odb_sim.recorded.story import RankRound, Story, Teller
from odb_sim.reports.document import PageSource, read_asset, write_document

MOST_RANKS: Final = 16
MOST_SAMPLES: Final = 120_000
"""The largest number of samples in the windows played, at some ten bytes each."""


def choose_ranks(story: Story, wanted: Collection[int] = ()) -> list[int]:
    """Returns the ranks to play: those ``wanted``, those with an incident, some that idle most, and others."""
    idle = {teller.rank: sum(len(part.idle_steps) for part in teller.parts) for teller in story.ranks}
    struck = {item.rank for item in story.incidents}
    most = sorted(idle, key=lambda rank: -idle[rank])[: MOST_RANKS // 4]
    spread = list(idle)[:: -(-len(idle) // MOST_RANKS)]
    order = dict.fromkeys([*sorted(wanted), *sorted(struck), *most, *spread, *idle])
    return sorted(list(order)[:MOST_RANKS])


def choose_rounds(story: Story, ranks: Collection[int], middle: int) -> range:
    """Returns the rounds to play: ``middle``, and those around it whose samples fit on a page."""
    sizes = [
        sum(len(part.window) for rank, part in story.list_parts(number) if rank in ranks)
        for number in range(story.rounds)
    ]
    first = last = middle
    total = sizes[middle] if sizes else 0
    while more := [place for place in (first - 1, last + 1) if 0 <= place < len(sizes)]:
        # Rounds before and after are equally welcome.
        place = min(more, key=lambda place: abs(place - middle))
        if total + sizes[place] > MOST_SAMPLES:
            break
        total += sizes[place]
        first, last = min(first, place), max(last, place)
    return range(first, last + 1) if sizes else range(0)


def build_data(story: Story, ranks: Sequence[int], played: range, start: tuple[int, int]) -> dict[str, object]:
    """Returns what the script plays. It begins at ``start``, a round and a stage."""
    tellers = {teller.rank: teller for teller in story.ranks}
    return {
        "world": story.header.world_size,
        "ranks": list(ranks),
        "isPacked": story.header.config.get("layout") == "packed",
        "first": story.first_round,
        "played": [played.start, played.stop],
        "start": list(start),
        "strip": [_summarize(story, number) for number in range(story.rounds)],
        "rounds": [
            {
                "why": story.explain_target(number),
                "parts": [_encode(tellers[rank], number, story) for rank in ranks],
            }
            for number in played
        ],
        "incidents": [{"round": item.round, "rank": item.rank, "text": item.text} for item in story.incidents],
        "ending": _describe_ending(story),
    }


def _summarize(story: Story, number: int) -> dict[str, object]:
    """Returns a round for the strip: its first step, its steps, and the idle batches and carried samples of all ranks."""
    parts = [part for _, part in story.list_parts(number)]
    steps = max((len(part.steps) for part in parts), default=0)
    firsts = [part.steps[0].number for part in parts if part.steps]
    return {
        "step": min(firsts, default=None),
        "steps": steps,
        "idle": sum(len(part.idle_steps) for part in parts),
        "carried": sum(part.carried for part in parts),
    }


def _encode(teller: Teller, number: int, story: Story) -> dict[str, object] | None:
    if number >= len(teller.parts):
        return None
    part = teller.parts[number]
    places = {sample.position: place for place, sample in enumerate(part.window)}
    step_of, group_of = [-1] * len(part.window), [-1] * len(part.window)
    for place, step in enumerate(part.steps):
        for position in step.positions:
            step_of[places[position]] = place
    groups = teller.find_groups(part)
    for place, group in enumerate(groups or []):
        for member in group:
            group_of[member] = place
    offer, agreement = part.offer, part.agreement
    return {
        "lengths": [sample.length for sample in part.window],
        "carriedIn": part.carried_in,
        "budget": teller.find_budget(part),
        "groups": None if groups is None else group_of,
        "steps": step_of,
        "count": len(part.steps),
        "target": part.target,
        "emit": None if offer.groups_min == NONE else offer.groups_min,
        "formed": offer.groups_max,
        "due": offer.due_max,
        "isEnded": part.is_ended,
        "isBroken": not offer.ready_min or offer.failed_rank != NONE or offer.stop_rank != NONE,
        "isAgreed": agreement is not None,
        "why": story.explain_idle(number, teller.rank),
        "times": _list_times(part),
        "taken": _find_taken(teller, part),
    }


def _list_times(part: RankRound) -> dict[str, float] | None:
    """Returns the seconds that the rank read, waited for the others' offers and counts, and collated."""
    spans = {"read": ("asked", "read"), "offers": ("posted", "agreed"), "counts": ("agreed", "counted")}
    spans["collate"] = ("counted", "collated")
    times = part.times_s
    found = {
        name: round(times[end] - times[begin], 4)
        for name, (begin, end) in spans.items()
        if begin in times and end in times
    }
    return found or None


def _find_taken(teller: Teller, part: RankRound) -> list[float] | None:
    """Returns when the consumer took the first and the last step taken of a round, or None if there is no record of either."""
    if not part.steps or not teller.taken_s:
        return None
    first = part.steps[0].number - teller.first_step
    taken = teller.taken_s[first : first + len(part.steps)]
    return [round(taken[0], 4), round(taken[-1], 4)] if taken else None


def _describe_ending(story: Story) -> str:
    outcome = story.outcome
    if outcome is None:
        return "The traces end before the epoch does."
    limit = (
        ""
        if outcome.kind == "complete" or outcome.step_limit == NONE
        else f" No step from {outcome.step_limit} on is handed out."
    )
    return f"The epoch ends {outcome.outcome}.{limit}"


def write_view(path: Path, story: Story, source: PageSource, *, step: int | None, wanted: Collection[int] = ()) -> None:
    """Writes the page. It opens at ``step``, or at the beginning. Raises: UsageError when there is no such step."""
    ranks = choose_ranks(story, wanted)
    middle = 0 if step is None else story.find_round(step)
    played = choose_rounds(story, ranks, middle)
    data = build_data(story, ranks, played, (middle, 0 if step is None else 3)) | {"step": step}
    header, config = story.header, story.header.config
    title = f"odb-ref view: {header.driver}, epoch {header.epoch}, {header.world_size:,} ranks"
    cautions = []
    if len(ranks) < header.world_size:
        cautions.append(
            f"{len(ranks)} of {header.world_size:,} ranks are played: {', '.join(map(str, ranks))}; others with --ranks"
        )
    if len(played) < story.rounds:
        cautions.append(
            f"rounds {story.first_round + played.start:,} to {story.first_round + played.stop - 1:,} of {story.rounds:,} are "
            "played; others with --step"
        )
    lead = (
        f"Rule {config.get('rule')}, budget at most {config.get('budget_tokens'):,} {config.get('layout', 'padded')} tokens, "
        f"window {config.get('window_samples'):,} samples, {config.get('mode')} mode."
    )
    body = (
        f'<p class="over">{html.escape(title)}</p><h1>{_make_headline(story)}</h1><p class="lead">{html.escape(lead)}</p>'
        + "".join(f'<p class="caution">Note: {html.escape(text)}.</p>' for text in cautions)
        + read_asset("lens.html")
    )
    write_document(path, title, body, source=source, data=data, scripts=("lens.js",))


def _make_headline(story: Story) -> str:
    planned = [
        max((len(part.steps) for _, part in story.list_parts(number)), default=0) for number in range(story.rounds)
    ]
    steps, rounds = sum(planned), len(planned) - (planned[-1:] == [0])  # the last agreement only ends the epoch
    idle = sum(len(part.idle_steps) for teller in story.ranks for part in teller.parts)
    batches = sum(len(part.steps) for teller in story.ranks for part in teller.parts)
    said = f"{steps:,} steps in {rounds:,} rounds, <strong>{idle:,} of {batches:,} batches idle</strong>"
    outcome = story.outcome
    if outcome is not None and outcome.kind != "complete":
        ended = html.escape(outcome.outcome[0].upper() + outcome.outcome[1:])
        said = f"<strong>{ended}</strong>, after {steps:,} planned steps"
    elif struck := [teller for teller in story.ranks if teller.incidents]:
        first = min(struck, key=lambda teller: teller.taken_steps)
        text = html.escape(first.incidents[0].text)
        said = f"<strong>Rank {first.rank}: {text}</strong>, after {first.taken_steps:,} of {steps:,} planned steps"
    return said
