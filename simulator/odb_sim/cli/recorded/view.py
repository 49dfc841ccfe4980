"""``odb-ref view``: plays an epoch, recorded or simulated, round by round on one page."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError
from odb_sim.inputs.files import check_files
from odb_sim.recorded.story import Story, read_story
from odb_sim.reports.document import PageSource
from odb_sim.reports.lens import choose_ranks, write_view

_SHOWN = 20
HELP: Final = "play an epoch round by round, from its trace"
DESCRIPTION: Final = (
    "Writes a page that plays an epoch from its trace: windows fill, groups form, offers meet, steps align; "
    "what is carried, idles or fails. Prints why steps were idle."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="a trace file; give all files of an epoch together, or their folder"
    )
    parser.add_argument("--html", metavar="FILE", default="view.html", help="write the page to this file (view.html)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="open the page at this step, and print what it was on every rank"
    )
    parser.add_argument(
        "--ranks",
        metavar="R[,R...]",
        default="",
        help="ranks to play (default: all; if there are many, those with most to see)",
    )
    parser.add_argument("--epoch", type=int, metavar="E", help="epoch to play, if the files are of several")


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    try:
        wanted = {int(word) for word in options.ranks.split(",") if word}
    except ValueError:
        raise UsageError(f"--ranks: {options.ranks!r} is not a list of ranks") from None
    check_files(options.html, reads=options.traces)
    story = read_story(options.traces, epoch=options.epoch)
    if unknown := wanted - {teller.rank for teller in story.ranks}:
        raise UsageError(f"--ranks: the traces hold no rank {min(unknown)}")
    source = PageSource(command=options.said, data=story.paths)
    write_view(Path(options.html), story, source, step=options.step, wanted=wanted)
    if options.step is None:
        _print_idle(story)
    else:
        _print_step(story, options.step, choose_ranks(story, wanted))
    for item in story.incidents:
        print(f"rank {item.rank}, round {story.first_round + item.round}: {item.text}")
    print(f"{options.html} plays it")
    return 0


def _print_idle(story: Story) -> None:
    """Prints a line for each rank and round with idle steps, and the number of idle batches."""
    lines, idle = [], Counter[str]()
    for number in range(story.rounds):
        for rank, part in story.list_parts(number):
            if steps := part.idle_steps:
                why = "its input has ended" if part.is_ended else "its window is small"
                idle[why] += len(steps)
                which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
                where = f"rank {rank}, {which} (round {story.first_round + number})"
                lines.append(f"{where}: idle; {story.explain_idle(number, rank)}")
    print(*lines[:_SHOWN], sep="\n", end="\n" if lines else "")
    if len(lines) > _SHOWN:
        print(f"and {len(lines) - _SHOWN} more; --step gives the reason for any of them")
    print(", ".join(f"{count} idle because {why}" for why, count in idle.items()) or "no step was idle")


def _print_step(story: Story, step: int, ranks: list[int]) -> None:
    """Prints a line for each rank that is played: what it trains on in a step, or why it idles."""
    number = story.find_round(step)
    for rank, part in story.list_parts(number):
        if rank not in ranks:
            continue
        lengths = {sample.position: sample.length for sample in part.window}
        mine = next((item for item in part.steps if item.number == step), None)
        if mine is None:
            print(f"rank {rank}: the trace ends before step {step}")
        elif mine.positions:
            own = [lengths[position] for position in mine.positions]
            print(
                f"rank {rank}: {len(own)} sample{'s' * (len(own) != 1)}, {sum(own):,} tokens, the longest {max(own):,}"
            )
        else:
            print(f"rank {rank}: idle; {story.explain_idle(number, rank)}")
