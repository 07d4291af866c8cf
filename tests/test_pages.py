"""Runs the blocks of the pages that are marked to run: `<!-- run -->` on the line before the fence. mkdocs shows no comment."""

from __future__ import annotations

import os
import re

import pytest

from conftest import REPOSITORY
from processes import run_forked

MARKED = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.M | re.S)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCKS = {
    f"{page.relative_to(REPOSITORY)}:{number}": block for page in PAGES for number, block in enumerate(MARKED.findall(page.read_text()))
}


def test_every_mark_has_a_block():
    """A mark before anything else would run nothing."""
    assert sum(page.read_text().count("<!-- run -->") for page in PAGES) == len(BLOCKS) > 0
    assert "README.md:0" in BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_marked_block_runs(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    ran = run_forked([str(tmp_path / "block.py")], {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}, cwd=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
