"""mkdocs hook (mkdocs.yml names it): adds to the documentation site pages from outside docs/, and a generated page of kernels.

Links in a page are relative to its file in the repository. On the site, a link to another page leads there. A link to any
other file of the repository becomes plain text, since the site has no sources. A link to a missing file stays, so that
mkdocs reports it.

The page `reference/kernels.md` lists what `volta_fa::_info` tells of this build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
#: Files of the repository and their names on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tools/volta-sim/README.md": "design/simulator.md",
}
#: Blocks of code between fences, and code within a line.
_CODE = re.compile(r"^( *)(```+).*?^\1\2|(?<!`)`[^`\n]+`(?!`)", re.M | re.S)
#: Links and images: `!` of an image, text, target.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to mkdocs' files. mkdocs calls it before it reads any page."""
    from mkdocs.structure.files import File  # here, because tests import this module without mkdocs

    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(REPOSITORY / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/kernels.md", content=kernels_page(library_info())))
    return files


def library_info() -> dict[str, Any]:
    """Returns `volta_fa::_info`'s JSON from the built library; empty if it is not built."""
    code = "import torch, volta_fa; print(torch.ops.volta_fa._info())"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return dict(json.loads(ran.stdout)) if ran.returncode == 0 else {}


def kernels_page(info: dict[str, Any]) -> str:
    """Returns the page of kernels: one table for each family and pass."""
    page = ["# Kernels", ""]
    if not info:
        return "\n".join([*page, "The library is not built. Run `make build`, then `make docs`.", ""])
    page.append("`volta_fa::_info` of this build lists these kernels. `python -m volta_fa info --kernels` prints the same on your machine.")
    page.append("Registers are per thread, as ptxas reports them. Shared memory is per block.")
    page.append("[Architecture](../design/architecture.md#feature-sets) explains features.")
    for family in info["families"]:
        page += ["", f"## {family['name'].capitalize()}, sm_{family['sm']}"]
        for kernel_pass in info["passes"]:
            rows = [v for v in info["variants"] if v["family"] == family["name"] and v["pass"] == kernel_pass["name"]]
            if not rows:
                continue
            page += ["", f"### {family['name'].capitalize()}: {kernel_pass['name']}", ""]
            page.append("| kernel | headdim | threads | registers | shared, KB | features | required |")
            page.append("| --- | --- | --- | --- | --- | --- | --- |")
            for v in rows:
                headdim = str(v["headdim"]) if v["headdim"] == v["headdim_v"] else f"{v['headdim']} / {v['headdim_v']}"
                cells = (v["name"], headdim, v["threads"], v["registers"], f"{v['shared_bytes'] / 1024:.1f}")
                sets = (", ".join(v[key]) for key in ("features", "required_features"))
                page.append("| " + " | ".join(map(str, (*cells, *sets))) + " |")
    return "\n".join([*page, ""])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the page's links, and indents what follows in a numbered item by four spaces, as mkdocs requires. mkdocs calls it."""
    return re.sub(r"^   (?=\S)", "    ", site_links(markdown, page.file.src_uri), flags=re.M)


def site_links(markdown: str, name: str) -> str:
    """Returns the text of the page with this name on the site, with the site's links."""
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

    # hides code, whose brackets are no links: NUL, number, NUL stands for it until the links are rewritten
    code: list[str] = []

    def hide(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    return re.sub(r"\0(\d+)\0", lambda hidden: code[int(hidden[1])], _LINK.sub(rewrite, _CODE.sub(hide, markdown)))
