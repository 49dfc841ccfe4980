"""``odb-ref published``: the paper's speed-ups beside the simulator's predictions."""

from __future__ import annotations

import argparse
from typing import Final

from odb_sim.cli.options import add_processes
from odb_sim.inputs.files import check_files, write_json
from odb_sim.reports.terminal import print_table, show_progress
from odb_sim.studies.processes import make_executor
from odb_sim.studies.published import ASSUMPTIONS, Comparison, compare_published

HELP: Final = "the paper's speed-ups beside the prediction"
DESCRIPTION: Final = (
    "Predicts the paper's published speed-ups over fixed batches from stated inputs, and shows how "
    "much depends on each input that the paper does not give."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", metavar="FILE", help="write both tables and every input")
    add_processes(parser, "simulations at a time, each a process")


def run_command(options: argparse.Namespace) -> int:
    """Returns exit status 0; bad input raises UsageError."""
    check_files(options.json)
    with show_progress("published", 0), make_executor(options.processes) as executor:
        comparisons = compare_published(executor)
    if options.json is not None:
        write_json(options.json, [comparison.to_json() for comparison in comparisons])
    _print(comparisons)
    return 0


def _print(comparisons: list[Comparison]) -> None:
    rows = []
    for comparison in comparisons:
        published, prediction = comparison.published, comparison.prediction
        low, high = comparison.span
        speeds, held = prediction.samples_per_s, prediction.samples_per_update
        rows.append(
            {
                "data set": published.name,
                "CV": f"{published.length_cv:.2f}",
                "published": f"{published.speedup:.2f}",
                "predicted": f"{prediction.compute_speedup():.2f}",
                "error": f"{comparison.error:+.0%}",
                "one input moved": f"{low:.2f} to {high:.2f}",
                "our rule": f"{prediction.compute_speedup('odb'):.2f}",
                "fixed sam/s pub / pred": f"{published.standard_samples_per_s:.2f} / {speeds['standard']:.2f}",
                "dynamic sam/s pub / pred": f"{published.odb_samples_per_s:.2f} / {speeds['paper']:.2f}",
                "batch size": f"{prediction.batch_size}",
                "sam/update fixed / dynamic": f"{held['standard']:,.0f} / {held['paper']:,.0f}",
            }
        )
    print_table(
        "Speed-up over fixed batches: published (arXiv 2606.19989, eight H20) and predicted",
        list(rows[0]),
        [list(row.values()) for row in rows],
    )
    header = ["assumed"]
    for comparison in comparisons:
        header += [comparison.published.name.split(",")[0], "speed-ups"]
    lines = []
    for items in zip(*(comparison.sensitivities for comparison in comparisons), strict=True):
        line = [items[0].input]
        for item in items:
            low, assumed, high = item.values
            line += [f"{assumed} ({low}, {high})", f"{item.speedup_low:.2f}, {item.speedup_high:.2f}"]
        lines.append(line)
    print_table(
        "Each input that the paper does not give: as assumed (moved down, up), and the speed-ups when it is moved",
        header,
        lines,
    )
    print(
        "Nothing is fitted to the published figures, and inputs are moved one at a time. The ranges show how far to "
        "trust a match: it shows that the assumptions are plausible, not that they are those of the paper."
    )
    print("Why these values:")
    for assumption in ASSUMPTIONS:
        print(f"- {assumption.field}: {assumption.reason}")
