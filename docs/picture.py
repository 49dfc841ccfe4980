"""Draws `_static/steps.svg`, the picture of the README, from a bundled trace: ``python docs/picture.py``.

Two loaders read the same samples (`mm_mix_real`, 4 ranks, budget 11,600 tokens). A bar is what one rank trains on in one
step: dark the samples' tokens, light the padding. What is left of the height is room that the step does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from odb_sim.baselines.plans import plan_standard
from odb_sim.inputs.lengths import load_lengths
from odb_sim.inputs.workload import Sharding, build_workload
from odb_sim.studies.runs import Run, run

from odb_ref.core.effects import Collate, Effect
from odb_ref.core.events import Event
from odb_ref.core.resume import Resumed

TARGET = Path(__file__).parent / "_static" / "steps.svg"
TRACE, RANKS, BUDGET, WINDOW, STEPS = "mm_mix_real", 4, 11_600, 512, 24
WIDTH, LANE, BAR, LEFT, TOP = 400, 44, 14, 20, 64
Bar = tuple[int, int, int]
"""Samples, tokens, and tokens with padding of one rank's batch."""


def make_bar(lengths: Sequence[int]) -> Bar:
    """Returns the figures of a batch."""
    return len(lengths), sum(lengths), len(lengths) * max(lengths, default=0)


def read_bars() -> dict[str, list[list[Bar]]]:
    """Returns by loader, then by rank, the bars of the first steps."""
    workload = build_workload(load_lengths(TRACE), ranks=RANKS, sharding=Sharding.EVEN, seed=0)
    tokens = workload.tokens
    fixed = []
    for plan in plan_standard(workload, BUDGET, 0):
        ends = [*plan.starts[1:], len(plan.order)]
        batches = [plan.order[start:end] for start, end in zip(plan.starts, ends, strict=True)]
        fixed.append([make_bar([int(tokens[item]) for item in batch]) for batch in batches[:STEPS]])
    online: list[list[Bar]] = [[] for _ in range(RANKS)]

    def observe(rank: int, event: Event | Resumed | None, effects: Sequence[Effect], time_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Collate):
                online[rank] += [make_bar([sample.length for sample in step.group]) for step in effect.steps]

    run(
        Run(workload=workload, policy="odb", budget_tokens=BUDGET, window_samples=WINDOW),
        observer=observe,
    )
    return {"fixed batches of 4": fixed, "odb-ref": [bars[:STEPS] for bars in online]}


def draw_panel(title: str, lanes: list[list[Bar]], left: int) -> list[str]:
    """Returns the SVG of one loader: a lane for each rank, a column for each step."""
    samples = sum(bar[0] for bars in lanes for bar in bars)
    share = sum(bar[1] for bars in lanes for bar in bars) / (BUDGET * RANKS * STEPS)
    said = f"{samples:,} samples in {STEPS} steps; {share:.0%} of the budget is tokens"
    parts = [
        f'<text x="{left}" y="26" class="head">{title}</text>',
        f'<text x="{left}" y="46">{said}</text>',
    ]
    for rank, bars in enumerate(lanes):
        base = TOP + (rank + 1) * (LANE + 8) - 8
        parts.append(f'<rect x="{left}" y="{base - LANE}" width="{STEPS * BAR}" height="{LANE}" class="room"/>')
        parts.append(f'<text x="{left + STEPS * BAR + 6}" y="{base - LANE // 2 + 4}" class="rank">rank {rank}</text>')
        for step, (_, used, padded) in enumerate(bars):
            x = left + step * BAR + 1
            for amount, name in ((padded, "pad"), (used, "use")):
                height = min(LANE, LANE * amount / BUDGET)
                parts.append(
                    f'<rect x="{x}" y="{base - height:.1f}" width="{BAR - 2}" height="{height:.1f}" class="{name}"/>'
                )
    return parts


def draw() -> str:
    """Returns the picture."""
    height = TOP + RANKS * (LANE + 8) + 28
    panels = [
        line
        for place, (title, lanes) in enumerate(read_bars().items())
        for line in draw_panel(title, lanes, LEFT + place * (WIDTH + 10))
    ]
    legend = [("use", "tokens"), ("pad", "padding"), ("room", "room left")]
    for place, (name, text) in enumerate(legend):
        x, y = LEFT + place * 100, height - 20
        panels += [
            f'<rect x="{x}" y="{y}" width="12" height="12" class="{name}"/>',
            f'<text x="{x + 18}" y="{y + 11}">{text}</text>',
        ]
    style = (
        "text{font:13px sans-serif;fill:#24292f}.head{font-weight:bold;font-size:15px}.rank{font-size:11px}"
        ".room{fill:#e8ebef}.pad{fill:#f4b183}.use{fill:#1f6f8b}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 40} {height}" role="img">',
            "<title>What each rank trains on in each step: fixed batches, and batches formed online</title>",
            f"<style>{style}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *panels,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    sys.exit()
