"""Runs the blocks of the pages that are marked to run: `<!-- run -->` on the line before the fence. mkdocs shows no comment.

Then the addresses: every one on a page is another project's, or comes from tools/addresses.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

import addresses
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


#: Addresses of other projects that pages, forms and the notebook may name.
OTHERS = ("https://download.pytorch.org/whl/", "https://sh.rustup.rs", "https://github.com/vllm-project/", "https://github.com/1CatAI/")
URL = re.compile(r"\b(?:https?|git|ssh)://[^\s)>\"'`\\]+|\bgit@[\w.]+:[^\s)>\"'`\\]+")
#: What makes a reader look for a place, and the links that have it.
ASKS = re.compile(r"open an issue|an issue with|report it\b|send the report|get the wheel|wheel from (?!a )|git clone|whom you have", re.I)
PLACES = ("#where-to-get-it", "check-gpu.md#send-a-report")
NAMED = [
    *PAGES,
    *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "CITATION.cff")),
    *sorted((REPOSITORY / ".github").rglob("*.*")),
    *sorted((REPOSITORY / "packaging").iterdir()),
    *sorted((REPOSITORY / "integrations").rglob("*.md")),
    REPOSITORY / "examples" / "first_light.ipynb",
]


def strange(text, known):
    """Returns the addresses in a text that are neither another project's nor this one's."""
    own = tuple(url.rstrip("/") for url in known.values() if url)
    return [url for url in URL.findall(text) if not url.startswith((*OTHERS, *own))]


@pytest.mark.parametrize("page", [page for page in NAMED if page.is_file()], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_address_comes_from_one_place(page):
    assert strange(page.read_text(), addresses.read()) == []


def test_an_address_from_elsewhere_is_found():
    known = {"release": "https://host/files/", "source": "git@host:volta_fa.git", "issues": ""}
    text = "<https://host/files/a.whl>, `git clone git@host:volta_fa.git`, [x](https://other/volta_fa/issues), git@other:volta_fa.git"
    assert strange(text, known) == ["https://other/volta_fa/issues", "git@other:volta_fa.git"]


@pytest.mark.parametrize("page", [page for page in NAMED if page.suffix == ".md"], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_that_asks_for_a_place_links_to_it(page):
    text = page.read_text()
    assert not ASKS.search(text) or page.name == "CHANGELOG.md" or any(place in text for place in PLACES)


def test_pages_have_the_kept_addresses():
    assert all((REPOSITORY / path).read_text() == text for path, text in addresses.pages(addresses.read()).items())


def test_addresses_reach_the_pages_and_leave_them(tmp_path):
    files = [addresses.FILE, addresses.SECTION, addresses.FORMS]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    none = dict.fromkeys(addresses.NAMES, "")
    known = {"release": "https://host/files/", "source": "https://host/volta_fa.git", "issues": "https://host/issues"}
    addresses.write(none, tmp_path)
    before = [(tmp_path / path).read_text() for path in files]
    assert addresses.write(known, tmp_path) == files
    install = (tmp_path / addresses.SECTION).read_text()
    for text in (
        "<https://host/files/>",
        "https://host/files/first_light.ipynb",
        "git clone https://host/volta_fa.git",
        "<https://host/issues>",
    ):
        assert text in install
    assert "is published" not in install and "url: https://host/files/" in (tmp_path / addresses.FORMS).read_text()
    assert json.loads((tmp_path / addresses.FILE).read_text()) == known
    addresses.write(none, tmp_path)
    assert [(tmp_path / path).read_text() for path in files] == before
