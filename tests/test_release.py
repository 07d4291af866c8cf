"""Tests of tools/release.py, which makes the folder that users download from, and tools/hub.py, which makes the folder for the Hugging Face
Hub. A small wheel and a source archive (sdist) stand for the real ones.

Addresses are URLs of the release, its source and its issues (tools/addresses.py); "" is one that is not known yet."""

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import addresses
import hub
import release
import torch_releases
import volta_fa
from conftest import REPOSITORY, run_python
from flash_attention import refused  # checks that a call raises this error, with a message of one line

NAME = "volta_fa-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
METADATA = "Metadata-Version: 2.4\nName: volta-fa\nVersion: 0.1.0\nRequires-Python: >=3.10,<3.99\n"
UNKNOWN = dict.fromkeys(addresses.NAMES, "")
KNOWN = {"release": "https://host/files/", "source": "https://host/volta_fa.git", "issues": "https://host/issues"}
CHANGELOG = "# Changelog\n\n## 0.1.0 (unreleased)\n\nThe foundation.\n\n- Kernels.\n\n## 0.0.9\n\n- Older.\n"


def write_wheel(path, files):
    """Writes a wheel with these files, its metadata, and the RECORD of hashes that pip checks. Returns its path."""
    info = "volta_fa-0.1.0.dist-info"
    tag = path.stem.split("-", 2)[2]
    files = {
        **files,
        "volta_fa/integrations/flash_attn/shim/flash_attn.dist-info/METADATA": b"Version: 2.8.3\n",
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode(),
    }
    lines = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
        archive.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def built(tmp_path):
    """Returns the paths of a wheel and an sdist."""
    wheel = write_wheel(tmp_path / NAME, {"volta_fa/__init__.py": b"answer = 42\n"})
    sdist = tmp_path / "volta_fa-0.1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(wheel, "volta_fa-0.1.0/wheel")
    return wheel, sdist


@pytest.fixture
def folder(built, tmp_path, monkeypatch):
    """The release folder, made where an earlier release's file was, which must disappear. auditwheel does not run."""
    monkeypatch.setattr(release, "audit", lambda wheel: "right")  # its report; make() returns it
    output = tmp_path / "dist" / "release"
    output.mkdir(parents=True)
    (output / "of an earlier release").write_text("")
    assert release.make(*built, output, CHANGELOG, UNKNOWN) == "right"
    return output


def test_files_of_the_folder(folder):
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        NAME, "volta_fa-0.1.0.tar.gz", "simple/index.html", "simple/volta-fa/index.html", "SHA256SUMS",
        "Dockerfile", "recipe.yaml", "RELEASE_NOTES.md", "first_light.ipynb",
    }  # fmt: skip
    assert (folder / "RELEASE_NOTES.md").read_text() == "# volta_fa 0.1.0\n\nThe foundation.\n\n- Kernels.\n"
    assert f"COPY {NAME} /tmp/" in (folder / "Dockerfile").read_text()
    # no placeholder, such as @VERSION@, is left
    assert "@" not in "".join((folder / name).read_text() for name in ("Dockerfile", "recipe.yaml"))


def test_the_index_installs(folder, tmp_path):
    """pip installs from the folder's package index, a static page, and refuses a wheel that differs from the hash in its link."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    simple = ["--index-url", f"file://{folder}/simple/"]
    subprocess.run([*pip, *simple, "--target", tmp_path / "site", "volta-fa"], check=True)
    assert (tmp_path / "site/volta_fa/__init__.py").read_text() == "answer = 42\n"
    write_wheel(folder / NAME, {"volta_fa/__init__.py": b"answer = 43\n"})
    ran = subprocess.run([*pip, *simple, "--no-cache-dir", "--target", tmp_path / "other", "volta-fa"], capture_output=True, text=True)
    assert ran.returncode != 0 and "DO NOT MATCH THE HASHES" in ran.stderr


def test_sha256sums(folder):
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder).returncode == 0
    assert len((folder / "SHA256SUMS").read_text().splitlines()) == 8  # all files but SHA256SUMS
    (folder / "RELEASE_NOTES.md").write_text("other")
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode != 0


def test_the_notebook_installs_this_wheel(folder):
    """The release's copy of the notebook has the wheel's name and hash, and with known addresses also the URLs."""

    def source(text):
        return "".join(line for cell in json.loads(text)["cells"] for line in cell["source"])

    own = source((folder / "first_light.ipynb").read_text())
    assert f'WHEEL = "{NAME}"\nSHA256 = "{release.sha256(folder / NAME)}"\n' in own
    filled = source(release.notebook(folder / NAME, KNOWN))
    lines = f'WHEEL = "https://host/files/{NAME}"\n', 'ISSUES = "https://host/issues"\n', 'SOURCE = "https://host/volta_fa.git"\n'
    assert all(line in filled for line in lines)


def test_the_recipe_is_yaml(folder):
    recipe = pytest.importorskip("yaml").safe_load((folder / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == "0.1.0"
    assert recipe["source"]["sha256"] == release.sha256(folder / "volta_fa-0.1.0.tar.gz")


@pytest.mark.parametrize("version, changelog, words", [
    ("0.2.0", CHANGELOG, "not of one version"),
    ("0.1.0", CHANGELOG.replace("0.1.0", "0.0.1"), "CHANGELOG.md says nothing of 0.1.0"),
])  # fmt: skip
def test_versions_that_disagree_are_refused(built, version, changelog, words, monkeypatch, tmp_path):
    monkeypatch.setattr(release, "audit", lambda wheel: "right")
    wheel, sdist = built
    with pytest.raises(SystemExit, match=words):
        release.make(wheel, sdist.rename(sdist.with_name(f"volta_fa-{version}.tar.gz")), tmp_path / "release", changelog, UNKNOWN)
    assert not (tmp_path / "release").exists()


@pytest.mark.skipif(importlib.util.find_spec("setuptools_rust") is None, reason="not the build environment (`make` has it)")
def test_the_sdist_has_all_that_a_build_needs(tmp_path):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    # in a copy, because setuptools writes into the source folder
    needed = ["csrc", "packaging", "python", "src", "tools", "torch_ops", "Cargo.toml", "Cargo.lock", "build.rs", "setup.py", "MANIFEST.in"]
    for name in [*needed, "pyproject.toml", "README.md", "LICENSE", "rust-toolchain.toml"]:
        source, copy = REPOSITORY / name, tmp_path / "sources" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "target", "torch-*"))
        else:
            shutil.copy(source, copy)
    expected = {str(path.relative_to(tmp_path / "sources")) for path in (tmp_path / "sources").rglob("*") if path.is_file()}
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tmp_path / "sources", check=True, capture_output=True)
    with tarfile.open(tmp_path / "volta_fa-0.1.0.tar.gz") as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert expected - found - {"tools/volta-sim/.gitignore"} == set()


def compiled(folder, name, *arguments):
    """Returns the bytes of a shared library that g++ makes in this folder with these arguments."""
    library = folder / name
    source = 'extern int puts(const char*); int f(void) { return puts(""); }'
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, "-", *arguments], input=source, text=True, check=True)
    return library.read_bytes()


def test_auditwheel_checks_the_platform_tag(tmp_path):
    """auditwheel accepts a wheel that fits its platform tag. It refuses a newer C library, another tag, and an unknown library."""
    pytest.importorskip("auditwheel")
    compiled(tmp_path, "libtorch_cpu.so", "-Wl,-soname,libtorch_cpu.so")
    linked = (f"-L{tmp_path}", "-Wl,--no-as-needed")
    right = write_wheel(tmp_path / NAME, {"volta_fa/a.so": compiled(tmp_path, "a.so", *linked, "-ltorch_cpu")})
    assert "auditwheel: every symbol is on manylinux_2_5_x86_64" in release.audit(right)
    # glibc 2.34 has a new version of the symbol with which programs begin; manylinux_2_28 has none. Older machines skip this.
    newer = compiled(tmp_path, "b.so", "-Wl,--undefined=__libc_start_main")
    if b"GLIBC_2.34" in newer:
        with pytest.raises(SystemExit, match="auditwheel takes .* for manylinux_2_34_x86_64"):
            release.audit(write_wheel(tmp_path / NAME, {"volta_fa/b.so": newer}))
    with pytest.raises(SystemExit, match="is not of the platform manylinux_2_28_x86_64"):
        release.audit(right.rename(right.with_name("volta_fa-0.1.0-py3-none-linux_x86_64.whl")))
    compiled(tmp_path, "libnobody.so", "-Wl,-soname,libnobody.so")
    with pytest.raises(SystemExit, match="needs libnobody.so"):
        release.audit(write_wheel(tmp_path / NAME, {"volta_fa/c.so": compiled(tmp_path, "c.so", *linked, "-lnobody")}))


def test_the_notebook_stops_with_one_line_without_a_wheel_and_an_address(monkeypatch, tmp_path):
    """Runs the notebook's cells without an installed volta_fa. `make notebook` runs the whole notebook in all states."""
    cells = json.loads((REPOSITORY / "examples" / "first_light.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "a notebook without results"
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    (install,) = (source for source in sources.values() if "WHEEL = " in source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    scope = {"subprocess": subprocess, "sys": sys, "os": os}
    with pytest.raises(Exception, match="no volta_fa: set WHEEL or SOURCE") as stopped:
        exec(install, scope)
    (line,) = stopped.value._render_traceback_()  # what IPython prints
    assert line.startswith("Stopped: no volta_fa") and "\n" not in line
    for needs_volta_fa in ("c06", "c09", "c11"):  # ids of cells
        refused(Exception, "^no volta_fa: run the cell of section 2 first", exec, sources[needs_volta_fa], scope | {"has_gpu": False})
    (tmp_path / NAME).write_bytes(b"damaged")
    line = f'SHA256 = "0123  {NAME}"'  # of SHA256SUMS
    refused(Exception, "expected 0123: download it again", exec, install.replace('SHA256 = ""', line), {**scope})


# ---- tools/hub.py: the folder that Hugging Face's `kernels` loads --------------------------------------------------------

PACKAGE = Path(volta_fa.__file__).parent


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("hub")
    hub.lay_out(PACKAGE, output)
    return output


def test_variants_of_a_torch_release():
    """CUDA 12.6 ends with torch 2.14; the hub asks for 12.6, 13.0 and 13.2 of torch 2.12 and 2.13."""
    for minor in torch_releases.MINORS:
        assert f"torch{minor.replace('.', '')}-cxx11-cpu-x86_64-linux" in hub.variants(minor)
    backends = {minor: [name.split("-")[2] for name in hub.variants(minor)] for minor in ("2.8", "2.12", "2.13", "2.15")}
    both = ["cpu", "cu126", "cu130", "cu132"]
    assert backends == {"2.8": ["cpu", "cu126"], "2.12": both, "2.13": both, "2.15": ["cpu", "cu130", "cu132"]}


def test_a_variant_has_one_library_and_its_metadata(hub_folder):
    found = list((hub_folder / "build").iterdir())
    releases = {path.name.removeprefix("torch-") for path in PACKAGE.glob("torch-*")}
    assert len(found) == sum(len(hub.variants(release)) for release in releases)
    for variant in found:
        (shim,) = variant.glob("torch-*/libvolta_fa.so")
        core = variant / "libvolta_fa_core.so"
        assert shim.stat().st_size and core.stat().st_size == (PACKAGE / core.name).stat().st_size
        described = json.loads((variant / "metadata.json").read_text())
        assert described["id"] == "volta_fa" and described["license"] == "BSD-3-Clause"
        assert described["backend"]["type"] == ("cpu" if "-cpu-" in variant.name else "cuda")
        assert "-cu126-" not in variant.name or described["backend"]["archs"] == ["7.0", "7.5+PTX"]
    assert (hub_folder / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")


#: What kernels.get_kernel does after it has chosen a variant.
LOAD = """
    import importlib.util, sys
    import torch
    spec = importlib.util.spec_from_file_location("volta_fa", sys.argv[1] + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["volta_fa"] = module
    spec.loader.exec_module(module)
    q = torch.randn(1, 9, 2, 16, dtype=torch.float64, requires_grad=True)
    out = module.flash_attn_varlen_func(q[0], q[0], q[0], *[torch.tensor([0, 9], dtype=torch.int32)] * 2, 9, 9, causal=True)
    right = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)[0]
    assert (out - right).abs().max() < 1e-12
    import volta_fa.transformers as part
    print(module.__file__, part.__name__)
"""


def test_the_module_loads_from_its_folder(hub_folder):
    variant = next((hub_folder / "build").glob("*-cpu-*"))
    assert run_python(LOAD, variant).split() == [str(variant / "__init__.py"), "volta_fa.transformers"]


def test_the_package_kernels_loads_the_folder(hub_folder):
    pytest.importorskip("kernels")
    printed = run_python("import sys, pathlib, kernels; print(kernels.get_local_kernel(pathlib.Path(sys.argv[1])).__file__)", hub_folder)
    assert Path(printed.strip()).is_relative_to(hub_folder)


def test_a_library_that_breaks_the_rules_is_refused(tmp_path, monkeypatch):
    """The hub forbids symbols of Python, and of newer C libraries, in a library: hub.violations() returns them."""
    monkeypatch.setattr(hub, "violations", lambda path: ["PyUnicode_AsUTF8"] if path.read_bytes() == b"bad" else [])
    output, library = tmp_path / "out", "volta_fa/torch-2.12/libvolta_fa.so"
    assert len(hub.build(write_wheel(tmp_path / NAME, {library: b"good"}), output)) == 4  # folders of variants
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "build"]
    wheel = write_wheel(tmp_path / NAME, {library: b"bad"})
    monkeypatch.setattr(sys, "argv", ["hub.py", str(wheel), "--output", str(output)])
    refused(SystemExit, "torch-2.12/libvolta_fa.so: PyUnicode_AsUTF8", hub.main)
    assert not output.exists()


def test_a_wheel_without_libraries_is_refused(tmp_path):
    refused(SystemExit, "has no library: `make wheel` builds them", hub.build, write_wheel(tmp_path / NAME, {}), tmp_path / "out")
