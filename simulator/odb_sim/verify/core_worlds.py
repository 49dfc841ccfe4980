"""One stage of worlds with the core that this process imports: ``python -m odb_sim.verify.core_worlds NAME SEED LIMIT_S FILE``.

`core_copy` starts it in a copy of the repository with a changed core.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_ref.core.batching.rules import RULES
from odb_sim.verify.stages import Stage, encode_stage, explore_small_worlds, run_large_worlds, run_random_worlds


def main(arguments: Sequence[str]) -> int:
    """Runs the stage and writes what it found."""
    name, seed, limit_s, path = arguments[0], int(arguments[1]), float(arguments[2]), Path(arguments[3])
    stage: Stage
    if name == "exploration":
        stage = explore_small_worlds(None, "", limit_s)
    elif name == "large":
        stage = run_large_worlds([RULES[key] for key in sorted(RULES)], seed, limit_s=limit_s)
    else:
        stage = run_random_worlds([RULES[key] for key in sorted(RULES)], "", seed, limit_s=limit_s)
    path.write_text(json.dumps({**encode_stage(stage), "properties": stage.properties}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
