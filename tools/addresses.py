"""Keeps the addresses of this project's releases, sources and issues (python/volta_fa/addresses.json), and writes pages that name them.

    python tools/addresses.py --release URL --source URL --issues URL     # `make release URL= SOURCE= ISSUES=` runs it
    python tools/addresses.py                                             # writes the pages again

The pages are `Where to get it` in docs/install.md, which says what to do instead of a missing address, and the issue forms, with a link to
the release if there is one. All other pages link to that section. tools/release.py puts the addresses into the release's notebook, and
commands of the package read the file."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path("python/volta_fa/addresses.json")
SECTION = Path("docs/install.md")
FORMS = Path(".github/ISSUE_TEMPLATE/config.yml")
#: Keys of the file: the URL of the folder with a release's files, what `git clone` takes, where users open an issue. A value is "" if there
#: is no address. `known` below is the file's content.
NAMES = ("release", "source", "issues")
#: The text of docs/install.md that this file writes.
_BETWEEN = re.compile(r"(?<=<!-- begin addresses -->\n).*?(?=<!-- end addresses -->)", re.S)


def read(root: Path = ROOT) -> dict[str, str]:
    """Returns the file's content, of a checkout in `root`."""
    return dict(json.loads((root / FILE).read_text()))


def section(known: dict[str, str]) -> str:
    """Returns the lines of the section: one for each name, with its address or what to do without one."""
    release, source, issues = (known[name].rstrip("/") for name in NAMES)
    return "".join(
        f"- {line}\n"
        for line in (
            f"**Wheel**: <{release}/>, with `SHA256SUMS` and a [notebook]({release}/first_light.ipynb) that installs it."
            if release
            else "**Wheel**: no release is published. Run `make wheel` in your checkout; the wheel is then in `dist/`.",
            f"**Sources**: `git clone {source} volta_fa`."
            if source
            else "**Sources**: no repository is published. Use the checkout or the source distribution that you were given.",
            f"**Reports and questions**: <{issues}>."
            if issues
            else "**Reports and questions**: no issue tracker is published. Send them to the person who gave you volta_fa.",
        )
    )


def forms(known: dict[str, str]) -> str:
    """Returns config.yml of the issue forms: a link to the release, which has the wheel that the forms ask about."""
    text = "# Settings of GitHub's issue forms. tools/addresses.py writes this file, with a link to the release once there is one.\n"
    text += "blank_issues_enabled: true\n"
    if known["release"]:
        about = "The newest wheel. Please try it before you report."
        text += f"contact_links:\n  - name: Release\n    url: {known['release']}\n    about: {about}\n"
    return text


def pages(known: dict[str, str], root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of each page that names an address."""
    install, count = _BETWEEN.subn(lambda _: section(known), (root / SECTION).read_text())
    if count != 1:
        raise SystemExit(f"{SECTION}: got {count} sections of addresses, expected one")
    return {SECTION: install, FORMS: forms(known)}


def write(known: dict[str, str], root: Path = ROOT) -> list[Path]:
    """Keeps the addresses and writes the pages. Returns the files that changed."""
    texts = {FILE: json.dumps(known, indent=2) + "\n", **pages(known, root)}
    changed = [path for path, text in texts.items() if (root / path).read_text() != text]
    for path in changed:
        (root / path).write_text(texts[path])
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in NAMES:
        parser.add_argument(f"--{name}", metavar="URL", help="default: the one that is kept")
    given = {name: url for name, url in vars(parser.parse_args()).items() if url is not None}
    for path in write(read() | given):
        print(f"{path}: written; commit it")


if __name__ == "__main__":
    main()
