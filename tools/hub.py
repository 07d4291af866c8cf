"""Lays out a repository of Hugging Face's library `kernels`, which downloads kernels from its hub, from a built wheel.

    python tools/hub.py WHEEL --output dist/hub     # `make hub` builds the wheel first

    build/<variant>/    the wheel's package with one of its libraries torch-X.Y/, and metadata.json; a variant is a torch release
                        and one of its builds, for a CUDA or the CPU
    README.md           the model card

Users load it with `kernels.get_kernel`, and from a folder with `kernels.get_local_kernel` or `LOCAL_KERNELS=org/volta-fa=FOLDER`.
Files of variants are hard links where the file system has them, and the hub stores equal files once.

The module and the operators keep their names, `volta_fa` and `torch.ops.volta_fa`. So `import volta_fa` finds the loaded kernel,
and the libraries refuse to be loaded twice.

Checks every library against the rules of the hub (kernel_abi_check). Fails without a folder if one breaks them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from portable_linker import GLIBC

#: The kernel's version on the hub. A new one allows changes that break callers.
VERSION = 1
#: Compute capabilities with machine code, and PTX for newer ones. CUDA 13 has no Volta.
_ARCHS = {"cu126": ["7.0", "7.5+PTX"], "cu130": ["7.5+PTX"], "cu132": ["7.5+PTX"]}
#: First and last torch release with builds for this CUDA. The libraries do not depend on CUDA, but the hub tells variants apart by it.
#: A variant also serves later minor versions of its CUDA: cu126 is used with cu128.
_BUILDS = {"cu126": ("2.7", "2.14"), "cu130": ("2.9", None), "cu132": ("2.12", None)}  # None: all later ones
#: The oldest Python and the platform that the hub's rules name.
_PYTHON, _PLATFORM = "3.9", f"manylinux_{GLIBC.replace('.', '_')}"
_CARD = """---
library_name: kernels
license: bsd-3-clause
tags:
- kernels
---
# volta_fa

Exact attention, forward and backward, for NVIDIA Volta and Turing GPUs. `flash_attn_func`, `flash_attn_varlen_func` and
`flash_attn_with_kvcache` have the signatures of flash-attn 2, and `s_aux` for attention sinks.

```python
from kernels import get_kernel

volta_fa = get_kernel("<org>/volta-fa", version=1, trust_remote_code=True)
out = volta_fa.flash_attn_func(q, k, v, causal=True)  # (batch, seqlen, nheads, headdim), float16
```

In transformers: `attn_implementation="<org>/volta-fa"`.
"""


def refusal(why: str) -> SystemExit:
    return SystemExit(f"{Path(__file__).name}: {why}")


def _number(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def variants(minor: str) -> dict[str, dict[str, object]]:
    """Returns the variants of a torch release, as 2.12, and the backend that their metadata.json describes."""
    found: dict[str, dict[str, object]] = {"cpu": {"type": "cpu"}}
    for cuda, (first, last) in _BUILDS.items():
        if _number(first) <= _number(minor) and (last is None or _number(minor) <= _number(last)):
            found[cuda] = {"type": "cuda", "archs": _ARCHS[cuda]}
    return {f"torch{minor.replace('.', '')}-cxx11-{name}-x86_64-linux": backend for name, backend in found.items()}


def _link(source: str, target: str) -> None:
    """Makes a hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def lay_out(package: Path, output: Path) -> list[Path]:
    """Makes build/<variant>/ below `output` for each torch release in a package folder. Returns the variants' folders."""
    made = []
    for shim in sorted(package.glob("torch-*")):
        others = [other.name for other in package.glob("torch-*") if other != shim]
        for name, backend in variants(shim.name.removeprefix("torch-")).items():
            folder = output / "build" / name
            shutil.copytree(package, folder, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__", *others))
            about = {"name": "volta-fa", "id": "volta_fa", "version": VERSION, "license": "BSD-3-Clause", "python-depends": []}
            (folder / "metadata.json").write_text(json.dumps(about | {"backend": backend}, indent=2) + "\n")
            made.append(folder)
    if not made:
        raise refusal(f"{package} has no library: `make wheel` builds them")
    (output / "README.md").write_text(_CARD)
    return made


def violations(library: Path) -> list[str]:
    """Returns what breaks the hub's rules in a library: symbols of Python, of a newer glibc, or of a newer libstdc++."""
    import kernel_abi_check

    binary = kernel_abi_check.ObjectFile(library)
    return [repr(found) for found in (*binary.check_python_abi(_PYTHON), *binary.check_manylinux(_PLATFORM))]


def build(wheel: Path, output: Path) -> list[Path]:
    """Makes `output` anew from a wheel. Returns the variants' folders. Raises SystemExit if it has no library, or one breaks the rules."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(dir=output) as unpacked:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            package = Path(unpacked) / "volta_fa"
            broken = {str(path.relative_to(package)): violations(path) for path in sorted(package.rglob("*.so"))}
            if any(broken.values()):
                raise refusal("the hub's rules: " + "; ".join(f"{name}: {', '.join(found)}" for name, found in broken.items() if found))
            made = lay_out(package, output)
    except BaseException:
        shutil.rmtree(output)
        raise
    print(f"{len(broken)} libraries keep the rules of the hub")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path, default=Path("dist/hub"))
    arguments = parser.parse_args()
    made = build(arguments.wheel, arguments.output)
    print(f"{arguments.output}: {len(made)} variants, {', '.join(folder.name for folder in made)}")


if __name__ == "__main__":
    main()
