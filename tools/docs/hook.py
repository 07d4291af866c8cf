"""What the documentation site has besides docs/: pages that live elsewhere in the repository, and links between all of them.

A page's links are written for whoever reads the file in the repository. On the site, a link to another page leads there, and
of a link to any other file of the repository its text remains, since the site has no sources. A link to what does not
exist stays as it is, for mkdocs to complain about.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
#: Files of the repository and their names on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tools/volta-sim/README.md": "simulator.md",
}
_CODE = re.compile(r"^( *)(```+).*?^\1\2|(?<!`)`[^`\n]+`(?!`)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from elsewhere."""
    from mkdocs.structure.files import File  # the tests import this module without mkdocs

    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(REPOSITORY / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the page's links, and what belongs to a numbered item: mkdocs' Markdown wants four spaces, others three."""
    return re.sub(r"^   (?=\S)", "    ", site_links(markdown, page.file.src_uri), flags=re.M)


def site_links(markdown: str, name: str) -> str:
    """The text of the page that has this name on the site, with the site's links."""
    source = next((path for path, uri in ELSEWHERE.items() if uri == name), f"docs/{name}")

    def rewrite(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path or path.startswith("/"):
            return link[0]
        found = os.path.normpath(os.path.join(os.path.dirname(source), path))
        uri = ELSEWHERE.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if uri is not None:
            return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(name) or '.')}{hash_}{anchor})"
        return text if (REPOSITORY / found).exists() else link[0]

    code: list[str] = []  # in which nothing is a link

    def hide(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    return re.sub(r"\0(\d+)\0", lambda hidden: code[int(hidden[1])], _LINK.sub(rewrite, _CODE.sub(hide, markdown)))
