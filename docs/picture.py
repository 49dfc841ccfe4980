"""Draws `_static/steps.svg`, the picture of the README, from a bundled trace: ``python docs/picture.py``.

Two loaders train the same optimizer updates: the same samples in each (`mm_mix_real`, 8 ranks, 256 samples an update). A lane
is a rank, a bar a batch as long as it takes to compute, by the default cost model: dark what its tokens take, light its
padding. Between bars a rank waits for others.

And `_static/updates.svg` from what the demo has recorded: ``make demo``, then
``.venv/bin/python docs/picture.py demo-out/train.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_sim.engine.fill import Fill
from odb_sim.engine.timeline import Timeline
from odb_sim.engine.updates import GlobalBatch
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.comparison import choose_budget
from odb_sim.studies.fitted import fit_batches
from odb_sim.studies.runs import Run, run

TARGET = Path(__file__).parent / "_static" / "steps.svg"
TRACE, RANKS, UPDATE, SHOWN = "mm_mix_real", 8, 256, 4
WIDTH, LANE, LEFT = 720, 13, 10
STYLE = """text{font:20px system-ui,"Segoe UI",Roboto,sans-serif;fill:#54616e}.head{font-weight:700;font-size:23px;fill:#17212b}
.back{fill:#fff}.use{fill:#17829f}.pad{fill:#efb489}.wait{fill:#dbe3ea}.end{stroke:#17212b;stroke-width:1.5}
@media(prefers-color-scheme:dark){text{fill:#9dabb8}.head{fill:#e4ebf1}.back{fill:#10161d}.use{fill:#36a9c8}.pad{fill:#8a5a3a}
.wait{fill:#263441}.end{stroke:#e4ebf1}}"""


class Lanes:
    """One policy: its batches by rank, as start, seconds of tokens and seconds of padding; when they and the epoch end."""

    def __init__(self, policy: str) -> None:
        lengths = load_lengths(TRACE)
        what = Run(
            workload=build_workload(lengths, ranks=RANKS, sharding=Sharding.EVEN),
            policy=policy,
            budget_tokens=choose_budget(lengths),
            global_batch=GlobalBatch(samples=UPDATE),
            update_samples=UPDATE if policy == "odb" else None,
        )
        timeline, fill = Timeline(), Fill(RANKS)
        result = run(fit_batches(what), timeline=timeline, fill=fill)
        self.epoch_s, self.size = result.summary.sim_time_s, result.summary.batch_size
        columns = fill.build(policy, what.budget_tokens).columns
        ended, samples = 0, 0
        for ended, column in enumerate(columns, 1):  # noqa: B007 (the steps of the updates that are shown)
            samples += sum(cell.samples for cell in column.cells)
            if samples >= SHOWN * UPDATE:
                break
        self.end_s = result.rows[ended - 1].end_s
        self.batches: list[list[tuple[float, float, float]]] = []
        for rank in range(RANKS):
            spans = [span for span in timeline.list_spans([rank]) if span[2] in ("compute", "idle")][:ended]
            lane = []
            for (_, _, _, begin, end), column in zip(spans, columns, strict=False):
                cell = column.cells[rank]
                use = (end - begin) * cell.real / max(1, cell.padded)
                lane.append((begin, use, end - begin - use))
            self.batches.append(lane)


def draw_panel(lanes: Lanes, top: int, scale: float) -> list[str]:
    """Returns the SVG of one policy."""
    parts = [f'<rect x="{LEFT}" y="{top}" width="{lanes.end_s * scale:.1f}" height="{RANKS * LANE}" class="wait"/>']
    for rank, lane in enumerate(lanes.batches):
        y = top + rank * LANE + 1
        for name, pick in (("use", lambda one: (one[0], one[1])), ("pad", lambda one: (one[0] + one[1], one[2]))):
            path = "".join(
                f"M{LEFT + begin * scale:.1f} {y}h{max(0.0, seconds * scale - 0.5):.1f}v{LANE - 2}H{LEFT + begin * scale:.1f}z"
                for begin, seconds in map(pick, lane)
                if seconds
            )
            parts.append(f'<path class="{name}" d="{path}"/>')
    x = LEFT + lanes.end_s * scale
    return [*parts, f'<path class="end" d="M{x:.1f} {top - 5}v{RANKS * LANE + 10}"/>']


def draw() -> str:
    """Returns the picture."""
    fixed, ours = Lanes("standard"), Lanes("odb")
    scale, first, second = (WIDTH - 2 * LEFT) / fixed.end_s, 76, 282
    texts = [
        (34, "head", f"Fixed batches of {fixed.size}, gradients accumulated"),
        (62, "", f"{SHOWN} updates of {UPDATE} samples on {RANKS} ranks: {fixed.end_s:.1f} s"),
        (240, "head", f"odb-ref: {fixed.epoch_s / ours.epoch_s:.2f} times as fast over the epoch"),
        (268, "", f"the same samples in the same {SHOWN} updates: {ours.end_s:.1f} s"),
    ]
    parts = [
        f'<text x="{LEFT}" y="{y}"{f" class={chr(34)}{name}{chr(34)}" if name else ""}>{text}</text>'
        for y, name, text in texts
    ]
    parts += [*draw_panel(fixed, first, scale), *draw_panel(ours, second, scale)]
    for place, (name, text) in enumerate((("use", "tokens"), ("pad", "padding"), ("wait", "waiting"))):
        x = LEFT + place * 150
        parts.append(
            f'<rect x="{x}" y="412" width="18" height="18" class="{name}"/><text x="{x + 26}" y="428">{text}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 446" width="{WIDTH}" role="img">',
            "<title>What ranks compute in the same optimizer updates: fixed batches, and batches formed by length</title>",
            f"<style>{STYLE}</style>",
            '<rect width="100%" height="100%" rx="12" class="back"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


# The loss over updates and over seconds ------------------------------------------------------------------------------------

CURVES = Path(__file__).parent / "_static" / "updates.svg"
WAYS = {"fixed": "fixed batches", "odb": "the same updates", "free": "free mode"}
CURVE_STYLE = """text{font:15px system-ui,"Segoe UI",Roboto,sans-serif;fill:#54616e}path{fill:none;stroke-width:2}
.back{fill:#fff}.fixed{stroke:#efb489;stroke-width:6}.odb{stroke:#17829f}.free{stroke:#8a94a0;stroke-dasharray:6 4}
.axis{stroke:#54616e;stroke-width:1}
@media(prefers-color-scheme:dark){text{fill:#9dabb8}.back{fill:#10161d}.axis{stroke:#9dabb8}}"""


def draw_curves(recorded: dict[str, Sequence[tuple[int, float, float]]]) -> str:
    """Returns two plots of the held-out loss: over updates, and over seconds."""
    points = [point for curve in recorded.values() for point in curve]
    low, high = min(loss for _, _, loss in points), max(loss for _, _, loss in points)
    parts: list[str] = []
    for place, unit in enumerate(("updates", "seconds")):
        left, most = 60 + 360 * place, max(point[place] for point in points)
        parts.append(f'<path class="axis" d="M{left} 40V230H{left + 290}"/><text x="{left}" y="252">0</text>')
        parts.append(f'<text x="{left + 290}" y="252" text-anchor="end">{most:.0f} {unit}</text>')
        for way, curve in recorded.items():
            line = "L".join(
                f"{left + 290 * point[place] / most:.1f} {230 - 180 * (point[2] - low) / (high - low):.1f}"
                for point in curve
            )
            parts.append(f'<path class="{way}" d="M{line}"/>')
    for loss, y in ((high, 54), (low, 234)):
        parts.append(f'<text x="52" y="{y}" text-anchor="end">{loss:.1f}</text>')
    for place, (way, name) in enumerate(WAYS.items()):
        x = 60 + 200 * place
        parts.append(f'<path class="{way}" d="M{x} 18h34"/><text x="{x + 42}" y="23">{name}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 264" width="{WIDTH}" role="img">',
            "<title>The loss over held-out texts: over updates one curve, over seconds two, and that of the free mode</title>",
            f"<style>{CURVE_STYLE}</style>",
            '<rect width="100%" height="100%" rx="12" class="back"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        CURVES.write_text(
            draw_curves(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["curves"]), encoding="utf-8"
        )
    else:
        TARGET.write_text(draw(), encoding="utf-8")
