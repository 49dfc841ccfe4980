"""Every Python block of the documents runs as pasted, each page's in order, in a separate process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.capture import capture
from tests.repo.test_docs import PAGES, ROOT

BLOCK: Final = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS: Final = re.compile(r"\b(MPI|ray|multihost_utils)\.")
"""Blocks for packages that nothing else here needs."""
RUN_EACH: Final = """
import os, runpy, sys, traceback
import accelerate, odb_ref.torch, odb_ref.integrations.hf
failed = []
for name in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            runpy.run_path(name, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(" ".join(failed) or None)
"""
"""Runs scripts one by one, each in a process forked after the slowest imports."""


@pytest.mark.slow
def test_the_blocks_of_each_page_run_as_pasted(tmp_path: Path) -> None:
    for number, page in enumerate(PAGES):
        if blocks := [block for block in BLOCK.findall(page.read_text()) if not OTHERS.search(block)]:
            # Names must be unique, and must not hide a package.
            (tmp_path / f"page_{number}_{page.stem}.py").write_text("\n".join(blocks))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 12
    ran = capture(
        [sys.executable, "-c", RUN_EACH, *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
