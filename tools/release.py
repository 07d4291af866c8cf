"""Makes the folder of a release from a built wheel and sdist: downloads for users, with checksums.

    python tools/release.py WHEEL SDIST --output dist/release       # `make release` builds both first

volta_fa-*.whl, volta_fa-*.tar.gz
simple/            a PEP 503 index for any static host: pip install --index-url .../simple/ --no-deps volta-fa
SHA256SUMS         of all files: sha256sum -c SHA256SUMS
Dockerfile         an image for V100, from packaging/
recipe.yaml        a recipe in conda-forge's form, from packaging/
RELEASE_NOTES.md   this version's part of CHANGELOG.md
first_light.ipynb  examples/first_light.ipynb with this wheel's address and checksum, and those of sources and reports"""

from __future__ import annotations

import argparse
import hashlib
import html
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import addresses

ROOT = Path(__file__).resolve().parent.parent
#: The torch of packaging/Dockerfile: the last release with Volta in its default builds.
V100 = {"V100_TORCH": "2.10.0", "V100_CUDA": "cu128"}

#: Lines of the notebook, as its JSON has them, that set a variable to an empty string. The release puts a value between the quotes.
_EMPTY = r"\"\""
_WHEEL_LINE, _SHA256_LINE, _SOURCE_LINE, _ISSUES_LINE = (rf"{name} = {_EMPTY}\n" for name in ("WHEEL", "SHA256", "SOURCE", "ISSUES"))


def refusal(why: str) -> SystemExit:
    return SystemExit(f"volta_fa: no release: {why}")


def metadata(wheel: Path) -> tuple[str, str]:
    """Returns the wheel's version and its range of Pythons."""
    with zipfile.ZipFile(wheel) as archive:
        # at the top level: the flash_attn stand-in has its own metadata
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        found = HeaderParser().parsestr(archive.read(name).decode())
    return found["Version"], found["Requires-Python"]


def audit(wheel: Path) -> str:
    """Returns the report of tools/check_wheel.py with auditwheel's verdict. Raises SystemExit if the wheel fails the check."""
    ran = subprocess.run([sys.executable, Path(__file__).with_name("check_wheel.py"), wheel], capture_output=True, text=True)
    if ran.returncode != 0:
        raise refusal(ran.stderr.strip())
    return ran.stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def notes(changelog: str, version: str) -> str:
    """Returns this version's section of the changelog, as a page with unwrapped lines."""
    match = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if not match or not match[1].strip():
        raise refusal(f"CHANGELOG.md says nothing of {version}")
    return f"# volta_fa {version}\n\n{match[1].strip()}\n"


def page(links: list[str]) -> str:
    """Returns an HTML page of a package index, with these links."""
    body = "\n".join(f"    {link}<br/>" for link in links)
    head = '<meta charset="utf-8"/><meta name="pypi:repository-version" content="1.0"/>'
    return f"<!DOCTYPE html>\n<html>\n  <head>{head}</head>\n  <body>\n{body}\n  </body>\n</html>\n"


def write_index(folder: Path, files: list[Path], requires_python: str) -> None:
    """Writes simple/volta-fa/ with links to the files. Works on any static server and with file:// URLs."""
    project = folder / "simple" / "volta-fa"
    project.mkdir(parents=True)
    (folder / "simple" / "index.html").write_text(page(['<a href="volta-fa/">volta-fa</a>']))
    python = html.escape(requires_python, quote=True)
    links = [f'<a href="../../{f.name}#sha256={sha256(f)}" data-requires-python="{python}">{f.name}</a>' for f in files]
    (project / "index.html").write_text(page(links))


def fill(template: str, values: dict[str, str]) -> str:
    """Returns the template with values in place of @NAMES@."""
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: values[match[1]], template)


def notebook(wheel: Path, known: dict[str, str]) -> str:
    """Returns the notebook that installs this wheel: from the release's address, or from the notebook's own folder."""
    text = (ROOT / "examples" / "first_light.ipynb").read_text()
    address = f"{known['release'].rstrip('/')}/{wheel.name}" if known["release"] else wheel.name
    values = (_WHEEL_LINE, address), (_SHA256_LINE, sha256(wheel)), (_SOURCE_LINE, known["source"]), (_ISSUES_LINE, known["issues"])
    for line, value in values:
        if text.count(line) != 1:
            raise refusal(f"examples/first_light.ipynb does not have the line {line} once")
        text = text.replace(line, line.replace(_EMPTY, rf"\"{value}\""))
    return text


def make(wheel: Path, sdist: Path, output: Path, changelog: str, known: dict[str, str]) -> str:
    """Makes the complete folder, or none on an error. Returns the report on the wheel. `known`: addresses (tools/addresses.py)."""
    version, requires_python = metadata(wheel)
    if sdist.name != f"volta_fa-{version}.tar.gz":
        raise refusal(f"{wheel.name} and {sdist.name} are not of one version")
    verdict = audit(wheel)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch) / "release"
        folder.mkdir()
        write_index(folder, [Path(shutil.copy(path, folder)) for path in (wheel, sdist)], requires_python)
        values = {"VERSION": version, "WHEEL": wheel.name, "SDIST": sdist.name, "SDIST_SHA256": sha256(sdist), **V100}
        for template in (ROOT / "packaging").iterdir():
            (folder / template.name).write_text(fill(template.read_text(), values))
        (folder / "RELEASE_NOTES.md").write_text(notes(changelog, version))
        (folder / "first_light.ipynb").write_text(notebook(wheel, known))
        sums = [f"{sha256(path)}  {path.relative_to(folder)}\n" for path in sorted(folder.rglob("*")) if path.is_file()]
        (folder / "SHA256SUMS").write_text("".join(sums))
        shutil.rmtree(output, ignore_errors=True)
        folder.rename(output)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "release")
    options = parser.parse_args()
    print(make(options.wheel, options.sdist, options.output, (ROOT / "CHANGELOG.md").read_text(), addresses.read()))
    for path in sorted(options.output.iterdir()):
        print(f"{path}{'/' if path.is_dir() else f'  {path.stat().st_size / 2**20:.2f} MiB'}")


if __name__ == "__main__":
    main()
