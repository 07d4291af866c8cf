"""Downloads stock vLLM wheels and packs what a GPU machine without a network needs to run them. run.py unpacks the archives there.

    python tools/gpu/vllm_engine/prepare.py OUTPUT --versions 0.33.0
    python tools/gpu/vllm_engine/prepare.py OUTPUT --versions 0.26.0 0.20.2 --arch 90

Writes vllm-VERSIONS.tar.xz, site.tar.xz (vLLM's dependencies, unless it is there) and fa3-VERSION.tar.xz to OUTPUT, and keeps wheels and
unpacked files in --work. The wheels are those of PyPI. This script changes four things in them:

- it zeroes PTX and machine code of other architectures, which takes most of a wheel,
- it strips symbols that no program needs at run time,
- it leaves out what no job of run.py calls (UNUSED), and headers,
- of FlashAttention 2 it keeps host code, which vLLM imports. FlashAttention 3 of fp16 has an archive of its own.

Needs pip and network access, xz, and binutils' strip. Takes about five minutes on two cores."""

import argparse
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jobs import FORK, FORK_BASE  # versions of 1Cat-vLLM, and of the stock release whose machine code it runs with

VERSIONS = ["0.33.0", "0.26.0", "0.20.2"]
#: Parts of the wheels that no job calls.
UNUSED = (
    "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs", "vllm/_flashmla", "vllm/_flashkda", "vllm/_qutlass",
    "vllm/_deepselect", "vllm/cumem_allocator",
)  # fmt: skip
UNUSED_SITE = ("mistral_common/data", "pycountry/locales", "bin")  # of vLLM's dependencies
#: Libraries of FlashAttention 2 and 3 in vLLM's wheels.
FA2, FA3 = (f"vllm/vllm_flash_attn/_vllm_fa{i}_C.abi3.so" for i in (2, 3))
#: Releases whose FlashAttention 3 is packed.
WITH_FA3 = ["0.33.0", "0.26.0"]
#: glibc versions of the wheels' platform tags. pip compares them for equality.
GLIBC = ("2_35", "2_34", "2_31", "2_28", "2_24", "2_17")


def pip(python: str, *arguments: str) -> None:
    """Runs pip for the target machine: wheels only, no dependencies."""
    tags = [f"--platform=manylinux_{glibc}_x86_64" for glibc in GLIBC] + ["--platform=manylinux2014_x86_64", "--platform=any"]
    target = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *tags]
    target += ["--abi=abi3", f"--abi=cp{python.replace('.', '')}", "--abi=none"]
    subprocess.run([sys.executable, "-m", "pip", arguments[0], "-q", *target, *arguments[1:]], check=True)


def fp16_only(code: bytes) -> bool:
    """Returns whether kernels of FlashAttention 3 are fp16's, or of no dtype. Their mangled names hold CUTLASS's types."""
    return b"float_e4m3" not in code and (b"bfloat16_t" not in code or b"6half_t" in code)


def unpack(version: str, options) -> Path:
    """Downloads and unpacks a release, and reduces it. Returns the folder."""
    wheels, folder = options.work / "wheels", options.work / f"vllm-{version}"
    if not list(wheels.glob(f"vllm-{version}-*.whl")):
        pip(options.python, "download", "-d", str(wheels), f"vllm=={version}")
    [wheel] = wheels.glob(f"vllm-{version}-*.whl")
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith(UNUSED) and "/include/" not in name]
        archive.extractall(folder, [name for name in names if name != FA3 or version in WITH_FA3])
    choices = {FA2: lambda code: False, FA3: fp16_only}
    for library in folder.rglob("*.so"):
        wanted = choices.get(str(library.relative_to(folder)), lambda code: True)
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        kept, zeroed = reduce(library, options.arch, wanted)
        if kept + zeroed:
            print(f"{version} {library.name}: {kept / 1e6:.1f} MB of machine code kept, {zeroed / 1e6:.1f} MB zeroed", flush=True)
    return folder


def overlay(options) -> Path:
    """Puts the fork's Python sources over a stock release, whose machine code it then runs with. Returns the folder."""
    folder = options.work / f"vllm-{FORK}"
    shutil.rmtree(folder, ignore_errors=True)
    unpack(FORK_BASE, options).rename(folder)
    shutil.copytree(options.fork / "vllm", folder / "vllm", dirs_exist_ok=True)
    return folder


def install_site(options) -> Path:
    """Installs vLLM's dependencies into a folder, and reduces it. Returns the folder."""
    folder = options.work / "site"
    shutil.rmtree(folder, ignore_errors=True)
    requirements = str(Path(__file__).with_name("requirements.txt"))
    pip(options.python, "install", "--no-compile", "--target", str(folder), "-r", requirements)
    for name in UNUSED_SITE:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for library in folder.rglob("*.so*"):
        subprocess.run(["strip", "--strip-debug", str(library)], check=True)
    return folder


def pack(archive: Path, work: Path, wanted: Callable[[str], bool]) -> None:
    """Packs the wanted files of a folder. Like files of several versions lie side by side, so a version more takes little."""
    names = [str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()]
    names = sorted(filter(wanted, names), key=lambda name: (Path(name).suffix, name.partition("/")[2], name))
    with archive.open("wb") as output:
        compressor = subprocess.Popen(["xz", "-T2", "--x86", "--lzma2=preset=6,dict=96MiB", "-c"], stdin=subprocess.PIPE, stdout=output)
        with tarfile.open(fileobj=compressor.stdin, mode="w|") as tar:
            for name in names:
                tar.add(work / name, name)
        compressor.communicate()
    if compressor.returncode:
        raise SystemExit(f"xz: got exit status {compressor.returncode}, expected 0")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)


# ---- machine code: a CUDA library holds its GPU code in the ELF section .nv_fatbin ----
#
# The section has containers, each with one entry per architecture. Zeros compress to nothing, and host code stays as it is.

#: How both begin. Container: magic, version, bytes of the header, bytes after it. Entry: kind, version, bytes of the header and the code.
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_MAGIC = 0xBA55ED50
_ARCH = 28  # bytes from an entry to its architecture
CUBIN = 2  # an entry's kind; 1 is PTX


class Entry(NamedTuple):
    """One architecture's code: its kind, its architecture (90 for sm_90) and the range of its bytes in the file."""

    kind: int
    arch: int
    begin: int
    end: int


def section(data: bytearray, wanted: bytes) -> range:
    """Returns the range of a section of a 64-bit ELF file, empty if the file has none of this name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)  # offset of the table of sections
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)  # bytes of an entry, entries, index of the section with the names
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]  # its offset in the file
    for name, _, _, _, offset, length in headers:
        if data.startswith(wanted + b"\0", strings + name):
            return range(offset, offset + length)
    return range(0)


def entries(data: bytearray) -> Iterator[Entry]:
    """Yields the entries of all containers of a library."""
    found = section(data, b".nv_fatbin")
    at = found.start
    while at + _CONTAINER.size <= found.stop:
        magic, _, header, length = _CONTAINER.unpack_from(data, at)
        if magic != _MAGIC:  # containers begin on 8-byte boundaries
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry + _ARCH + 4 <= at:
            kind, _, header, length = _ENTRY.unpack_from(data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + _ARCH)
            yield Entry(kind, arch, entry + header, entry + header + length)
            entry += header + length


def reduce(path: Path, arch: int, wanted: Callable[[bytes], bool] = lambda code: True) -> tuple[int, int]:
    """Zeroes all entries in place except machine code for `arch` that is `wanted`. Returns the bytes kept and zeroed.

    A kernel without an entry fails at its first launch, not when the library loads."""
    data = bytearray(path.read_bytes())
    kept = zeroed = 0
    for entry in entries(data):
        size = entry.end - entry.begin
        if entry.kind == CUBIN and entry.arch == arch and wanted(bytes(data[entry.begin : entry.end])):
            kept += size
        else:
            data[entry.begin : entry.end] = bytes(size)
            zeroed += size
    path.write_bytes(data)
    return kept, zeroed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--versions", nargs="*", default=VERSIONS)
    parser.add_argument("--arch", type=int, default=90, help="the target GPU's architecture (%(default)s)")
    parser.add_argument("--python", default="3.12", help="the target machine's Python (%(default)s)")
    parser.add_argument("--fork", type=Path, help=f"1Cat-vLLM's sources, packed as {FORK} over the wheel of {FORK_BASE}")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_engine"), help="where wheels and unpacked files stay (%(default)s)")
    options = parser.parse_args()
    output, work = options.output, options.work
    output.mkdir(parents=True, exist_ok=True)
    folders = tuple(f"{unpack(version, options).name}/" for version in options.versions)
    if folders:
        pack(output / f"vllm-{'-'.join(options.versions)}.tar.xz", work, lambda name: name.startswith(folders) and not name.endswith(FA3))
    if options.fork:
        folder = f"{overlay(options).name}/"
        pack(output / f"vllm-{FORK}.tar.xz", work, lambda name: name.startswith(folder))
    for version in set(options.versions) & set(WITH_FA3):
        pack(output / f"fa3-{version}.tar.xz", work, lambda name, file=f"vllm-{version}/{FA3}": name == file)
    if not (output / "site.tar.xz").exists():
        pack(output / f"{install_site(options).name}.tar.xz", work, lambda name: name.startswith("site/"))


if __name__ == "__main__":
    main()
