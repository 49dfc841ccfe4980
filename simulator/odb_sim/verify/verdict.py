"""The verdict on each property, from what the stages of a verification found."""

from __future__ import annotations

from collections.abc import Sequence

from odb_sim.verify.stages import PROPERTIES, Stage


def compute_verdicts(stages: Sequence[Stage]) -> dict[str, tuple[str, str]]:
    """Returns for each property the verdict (holds, VIOLATED, not shown or not judged), and the stages it comes from.

    "Holds" applies only as far as those stages looked. A stage that has found something has not looked at everything. A
    property is "not shown" of a core that differs from the one proved or fails a test of it, if no case violates it.
    """
    verdicts: dict[str, tuple[str, str]] = {}
    spoken_of = (
        name
        for stage in stages
        for name in (*stage.properties, *(item.property for item in stage.findings), *stage.doubted)
    )
    for name in dict.fromkeys((*PROPERTIES, *spoken_of)):
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
