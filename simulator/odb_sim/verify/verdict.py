"""What a stage of a verification found, and the verdict on each property."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from odb_sim.explore.scenario import Scenario, decode_scenario, encode_scenario

BOUNDS: Final = "RULE-BOUNDS"
"""A target rule stays within its bounds, which the core checks of every answer. Spec: R3.3."""
OF_THE_WORLD: Final = (
    *("ALIGN", "CONSERVE", "COVER", "ONCE", "QUOTA", "FREE", "TERM", "ABORT"),
    *("RELEASE", "STOP", "BUDGET", "SIZES", "FEWEST", "AGE", "ORDER", "WEIGHT", "REPLAY", "UPDATE", "DEAL"),
)
"""The properties that are judged of every core, and proved for every rule within its bounds. RESUME and PEERS are judged by
tests alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A property that does not hold, and a case that shows it: the smallest found for a rule, the first for a core."""

    property: str
    detail: str
    case: str
    scenario: Scenario | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what it covered, the properties it judges, and what it found.

    ``doubted`` lists the properties that what it found leaves open: other stages cannot show them of this core. ``ranges``
    describes in full what it looked at. ``skipped`` says why it did not look at all of it; its properties then count
    as not judged. ``remedy`` is the command after which the stage can run.
    """

    name: str
    covered: str
    ranges: str = ""
    properties: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...]
    doubted: tuple[str, ...] = ()
    skipped: str = ""
    remedy: str = ""


def encode_stage(stage: Stage) -> dict[str, object]:
    """Returns the stage as JSON."""
    return {
        "name": stage.name,
        "covered": stage.covered,
        "ranges": stage.ranges,
        "skipped": stage.skipped,
        "wall_time_s": round(stage.seconds, 3),
        "findings": [
            {
                "property": finding.property,
                "detail": finding.detail,
                "case": finding.case,
                "scenario": finding.scenario and encode_scenario(finding.scenario),
            }
            for finding in stage.findings
        ],
    }


def decode_stage(text: str) -> Stage:
    """Returns the stage from the JSON of `encode_stage` with its ``properties`` added."""
    found = json.loads(text)
    findings = (
        Finding(**item | {"scenario": item["scenario"] and decode_scenario(item["scenario"])})
        for item in found["findings"]
    )
    return Stage(
        name=found["name"],
        covered=found["covered"],
        ranges=found["ranges"],
        properties=tuple(found["properties"]),
        seconds=found["wall_time_s"],
        findings=tuple(findings),
        skipped=found["skipped"],
    )


def compute_verdicts(stages: Sequence[Stage], expected: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Returns for each property the verdict (holds, VIOLATED, not shown or not judged), and the stages it comes from. The
    ``expected`` properties have one even if no stage judges them.

    "Holds" applies only as far as those stages looked. A stage that has found something has not looked at everything. A
    property is "not shown" of a core that differs from the one proved or fails a test of it, if no case violates it.
    """
    verdicts: dict[str, tuple[str, str]] = {}
    spoken_of = (
        name
        for stage in stages
        for name in (*stage.properties, *(item.property for item in stage.findings), *stage.doubted)
    )
    for name in dict.fromkeys((*expected, *spoken_of)):
        refuting = ", ".join(stage.name for stage in stages if any(item.property == name for item in stage.findings))
        doubting = ", ".join(stage.name for stage in stages if name in stage.doubted)
        resting = ", ".join(
            stage.name for stage in stages if name in stage.properties and not (stage.findings or stage.skipped)
        )
        if refuting:
            verdicts[name] = "VIOLATED", refuting
        elif doubting:
            verdicts[name] = "not shown", f"{doubting}; no violation in {resting}" if resting else doubting
        else:
            verdicts[name] = "holds" if resting else "not judged", resting
    return verdicts
