"""Tests of the repository and package around the operators: one version and one list of pins everywhere, links of the documentation, shared
libraries, errors of `import volta_fa`, and the command line `python -m volta_fa`.

The package has a core library (kernels; needs no torch) and one small library, the shim, for each torch release. Two modules of tools/ have
what files must agree with: the supported releases (torch_releases), and the pins of tools/requirements.txt (check_build_env)."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import build_shims  # build_shims.CORE: the core library's file name
import check_build_env
import torch_releases
import volta_fa
from processes import REPOSITORY, run_forked
from volta_fa import cli, library


def read(name: str) -> str:
    return (REPOSITORY / name).read_text()


def requirements(section: str) -> dict[str, str]:
    """Returns versions by package from a section of tools/requirements.txt. A line without an exact version raises an AttributeError."""
    pin = re.compile(r'([\w-]+)==([\w.]+)(?:; python_version (?:<|>=) "3\.\d+")?')
    return dict(pin.fullmatch(line).groups() for line in check_build_env.requirements(section))


# ---- one version, one set of pins ------------------------------------------------------------------------------


def test_versions_agree():
    places = {"Cargo.toml": r'^version = "(.*)"', "CHANGELOG.md": r"^## (\S+)", "CITATION.cff": r"^version: (\S+)"}
    found = {json.loads(torch.ops.volta_fa._info())["version"], *(re.search(line, read(name), re.M)[1] for name, line in places.items())}
    assert found == {volta_fa.__version__}


def test_the_releases_of_torch_are_in_one_list():
    """The list has one patch release of each minor release, without a gap, and pyproject.toml has the same range and default."""
    numbers = [tuple(map(int, release.split("."))) for release in torch_releases.RELEASES]
    assert [number[:2] for number in numbers] == [(2, minor) for minor in range(numbers[0][1], numbers[-1][1] + 1)]
    assert torch_releases.DEFAULT in torch_releases.RELEASES and torch_releases.minor(torch.__version__) in torch_releases.MINORS
    project = read("pyproject.toml")
    assert set(re.findall(r'"torch==(.*?)"', project)) == {torch_releases.DEFAULT}
    assert f'dependencies = ["{torch_releases.REQUIREMENT}"]' in project


def test_build_requirements_are_the_pinned_ones():
    block = re.search(r"^requires = \[(.*?)^\]", read("pyproject.toml"), re.M | re.S)[1]
    pins = requirements("build") | requirements("nvrtc") | {"torch": torch_releases.DEFAULT}
    assert dict(re.findall(r'"([\w-]+)==([\w.]+)"', block)) == pins
    nvrtc = check_build_env.requirements("nvrtc")
    assert all(wheel in read("tools/build/nvrtc.rs") for wheel in nvrtc)
    for packages in (check_build_env.requirements("build"), nvrtc):
        assert f"\npip install {' '.join(packages)}\n" in read("docs/install.md")


def test_rust_versions_agree():
    oldest = re.search(r'^rust-version = "(.*)"', read("Cargo.toml"), re.M)[1]
    pinned = re.search(r'^channel = "(.*)"', read("rust-toolchain.toml"), re.M)[1]
    assert [int(part) for part in pinned.split(".")] >= [int(part) for part in oldest.split(".")]
    for name in ("tools/check_build_env.py", "docs/install.md"):
        assert f"Rust {oldest} or newer" in read(name), name


def test_files_in_the_architecture_diagram_exist():
    diagram = read("docs/design/architecture.md").partition("```text\n")[2].partition("```")[0]
    names = re.findall(r"\w+/[\w/.]*\w", diagram)
    assert len(names) > 10 and all((REPOSITORY / name).exists() for name in names), names


def test_links_on_the_site():
    """The hook of mkdocs turns links to files outside docs/ into links to the site's copies, else into plain text. Others and code stay."""
    spec = importlib.util.spec_from_file_location("hook", REPOSITORY / "tools/docs/hook.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    readme = "[a](docs/guides/sdpa.md#layers), [`b`](src/lib.rs), [c](tools/volta-sim/README.md), [d](https://d/e.md), `[f](src/lib.rs)`"
    site = "[a](guides/sdpa.md#layers), `b`, [c](design/simulator.md), [d](https://d/e.md), `[f](src/lib.rs)`"
    assert hook.site_links(readme, "index.md") == site
    code = "\n```\n[e](../build.rs)\n```\n"
    page = f"[a](../../README.md#use) ![b](../images/fast.png) [c](#d) [nowhere](../../src/nowhere.rs){code}[f](../../build.rs)"
    site = f"[a](../index.md#use) ![b](../images/fast.png) [c](#d) [nowhere](../../src/nowhere.rs){code}f"
    assert hook.site_links(page, "guides/sdpa.md") == site
    assert all((REPOSITORY / path).exists() for path in hook.ELSEWHERE)


def test_links_lead_to_files_of_the_repository():
    """Links also work where the repository is browsed: mkdocs does not report a link to a page that only the site has."""
    hidden_code = re.compile(r"^( *)(```+).*?^\1\2|`[^`\n]+`", re.M | re.S)
    pages = [path for folder in ("docs", "tools/volta-sim") for path in (REPOSITORY / folder).rglob("*.md")] + [*REPOSITORY.glob("*.md")]
    targets = [
        (page, target.partition("#")[0])
        for page in pages
        for target in re.findall(r"\]\(([^()\s]+)\)", hidden_code.sub("", page.read_text(encoding="utf-8")))
        if ":" not in target
    ]
    dead = [f"{page.relative_to(REPOSITORY)}: {target}" for page, target in targets if not (page.parent / target).exists()]
    assert targets and not dead


def test_python_range_is_the_same_everywhere():
    oldest, newest = check_build_env.PYTHON_OLDEST, check_build_env.PYTHON_NEWEST  # as (3, 10)
    assert f'requires-python = ">=3.{oldest[1]},<3.{newest[1] + 1}"' in read("pyproject.toml")
    assert f"{oldest} <= sys.version_info[:2] <= {newest}" in read("tools/find_python.sh")


# ---- the package -----------------------------------------------------------------------------------------------


def needed_by(path: Path) -> list[str]:
    """Returns the names of the libraries that a library links."""
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", dynamic)


def test_the_libraries_need_no_cuda_and_the_core_no_torch():
    shim, core = needed_by(volta_fa.library_path()), needed_by(volta_fa.library_path().parents[1] / build_shims.CORE)
    assert {"libtorch_cpu.so", "libc10.so", build_shims.CORE} <= set(shim)
    assert not [name for name in shim + core if "cuda" in name or "nvrtc" in name or "python" in name], (shim, core)
    assert not [name for name in core if "torch" in name or "c10" in name or "stdc++" in name], core


def test_the_symbol_for_the_current_stream_has_one_name():
    """Before torch 2.11 the shim finds the current CUDA stream through this symbol. test_torch_matrix.py looks for it in libtorch_cuda."""
    assert f'"{torch_releases.STREAM_FUNCTION}"' in read("torch_ops/stream.cpp")
    assert f"TORCH_VERSION_MINOR >= {torch_releases.STREAM_SINCE.split('.')[1]}" in read("torch_ops/stream.cpp")


#: How torch-sys writes the C types of torch_ops/tch.cpp.
RUST_TYPES = {
    "void": None, "int": "c_int", "int8_t": "i8", "int64_t": "i64", "size_t": "size_t", "double": "f64",
    "char*": "*mut c_char", "void*": "*mut c_void", "const void*": "*const c_void", "int64_t*": "*mut i64",
    "const int64_t*": "*const i64", "Scalar*": "*mut C_scalar", "Tensor*": "*mut C_tensor", "Tensor**": "*mut *mut C_tensor",
    "Tensor* const*": "*const *mut C_tensor",
}  # fmt: skip


def test_functions_of_tch_cpp_have_the_types_that_rust_declares():
    """torch_ops/tch.cpp defines functions that the crate torch-sys declares. The linker compares only names, so this compares types."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--offline", "--filter-platform=x86_64-unknown-linux-gnu"]
    packages = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=REPOSITORY).stdout)["packages"]
    torch_sys = next(Path(package["manifest_path"]).parent for package in packages if package["name"] == "torch-sys")
    declared = "".join(path.read_text() for path in torch_sys.glob("src/*.rs"))
    # the preprocessor expands macros that define functions, several in a line
    code = re.sub(r"^#include.*", "", read("torch_ops/tch.cpp"), flags=re.M)
    code = subprocess.run(["g++", "-E", "-P", "-xc++", "-"], input=code, capture_output=True, check=True, text=True).stdout
    definitions = re.findall(r"(?:^|\} ) *(\w[\w* ]*[ *])(\w+)\(([^()]*)\) \{", code.split('extern "C" {')[1], re.M)
    some = {"get_and_reset_last_err", "ats_float", "at_device", "atg_nan_to_num_", "atg_abs", "atg_lt_tensor"}
    assert some <= {name for _, name, _ in definitions}  # the pattern finds definitions of each kind
    for result, name, parameters in definitions:
        found = re.search(rf"pub fn {name}\(([^()]*)\)(?:\s*->\s*([^;]+))?;", declared)
        assert found, f"torch-sys has no {name}"
        rust = [parameter.split(":")[1].strip() for parameter in found[1].split(",") if parameter.strip()]
        c = [re.sub(r"\s*\w+$", "", parameter.strip()) for parameter in parameters.split(",") if parameter.strip()]
        assert [RUST_TYPES[t] for t in c] == rust, name
        assert RUST_TYPES[result.strip()] == (found[2] and found[2].strip()), name


def package_without_libraries(folder: Path) -> Path:
    """Copies the Python package into a folder, from which a program can import it."""
    package = folder / "volta_fa"
    shutil.copytree(REPOSITORY / "python" / "volta_fa", package, ignore=shutil.ignore_patterns("*.so", "torch-*", "__pycache__"))
    return package


def put_damaged_library(package: Path, release: str) -> None:
    """Makes the file where the shim of this torch release belongs, without a library in it."""
    (package / f"torch-{release}").mkdir()
    (package / f"torch-{release}" / "libvolta_fa.so").write_bytes(b"not a library")


def import_error(folder: Path) -> str:
    """Returns the message of the ImportError of `import volta_fa` from this folder."""
    ran = run_forked(["-c", "import volta_fa"], {**os.environ, "PYTHONPATH": str(folder)}, cwd="/")
    assert ran.returncode != 0
    return re.search(r"^ImportError: (.*)\n\Z", ran.stderr, re.M)[1]


def test_a_missing_or_damaged_library_is_an_import_error(tmp_path):
    package = package_without_libraries(tmp_path)
    assert re.search("the native library .* has not been built: run `make build`", import_error(tmp_path))
    put_damaged_library(package, torch_releases.minor(torch.__version__))
    assert re.search("the native library .* does not load into torch", import_error(tmp_path))


@pytest.mark.parametrize("releases, said", [(["2.6"], "was built for torch 2.6, and torch "),
                                            (["2.6", "2.5", "2.16"], "has libraries for torch 2.5 to 2.16, and torch ")])  # fmt: skip
def test_another_torch_is_an_import_error(releases, said, tmp_path):
    package = package_without_libraries(tmp_path)
    for release in releases:
        put_damaged_library(package, release)
    own = torch_releases.minor(torch.__version__)
    message = import_error(tmp_path)
    assert said + torch.__version__ + " is installed: " in message
    assert message.endswith(f"install one of these, or a volta_fa for torch {own}")
    (tmp_path / "python").mkdir()
    package.rename(tmp_path / "python/volta_fa")
    (tmp_path / "Cargo.toml").touch()
    assert import_error(tmp_path / "python").endswith(f"run `make build` in {tmp_path}")


@pytest.mark.parametrize("version, release", [("2.7.0", "2.7"), ("2.10.0+cu128", "2.10"), ("2.16.0a0+gitabc", "2.16")])
def test_the_library_is_the_one_of_the_minor_release(version, release, monkeypatch):
    monkeypatch.setattr(library.torch, "__version__", version)
    assert volta_fa.library_path() == Path(volta_fa.__file__).parent / f"torch-{release}" / "libvolta_fa.so"
    assert torch_releases.minor(version) == release


def test_help_names_every_argument():
    """help(volta_fa) names every argument and result of the ops, as docs/reference/options.md promises, and every environment variable."""
    words = set(re.findall(r"\w+", volta_fa.__doc__))
    for op in (torch.ops.volta_fa.fwd, torch.ops.volta_fa.bwd, torch.ops.volta_fa.merge_attention_states):
        schema = op.default._schema
        names = {a.name for a in (*schema.arguments, *schema.returns)}
        assert not names - words, f"{op} has {sorted(names - words)}"
    sources = ("src/ops/inputs.rs", "src/plan/device.rs", "src/log.rs", "src/launch/tuning.rs", "torch_ops/sdpa.cpp")
    variables = set(re.findall(r'"(VOLTA_FA_[A-Z_]+)"', "".join(map(read, sources))))
    assert len(variables) == 7 and variables <= words, variables - words  # 7, so that the pattern cannot silently find none


def test_info_is_complete():
    facts = volta_fa.info()
    assert facts["versions"]["torch"] == torch.__version__ and Path(facts["library"]).exists()
    assert len(facts["devices"]) == torch.cuda.device_count()
    assert sum(family["variants"] for family in facts["families"]) == len(facts["variants"]) > 0
    for variant in facts["variants"]:
        assert variant["registers"] > 0 and variant["threads"] > 0 and variant["shared_bytes"] >= 0, variant
    json.dumps(facts)


#: `native`: the library has machine code for the device, so its driver compiles no PTX.
@pytest.mark.parametrize("capability, family, native", [((6, 1), None, False), ((7, 0), "volta", True), ((7, 2), "volta", True)])
def test_info_names_the_family_of_a_device(capability, family, native, monkeypatch):
    for name, value in (("device_count", 1), ("get_device_capability", capability), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert volta_fa.kernel_family(torch.device("cuda", 0)) == family
    [device] = volta_fa.info()["devices"]
    major, minor = capability
    assert device == {"index": 0, "name": "a GPU", "capability": f"{major}.{minor}", "family": family, "native": native}


# ---- the command line ------------------------------------------------------------------------------------------


def test_without_a_command_it_prints_its_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "30"])  # 30: narrower than kernel names
def test_info_prints_a_summary_every_variant_or_json(columns, capsys, monkeypatch):
    variants = volta_fa.info()["variants"]
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["info"]) == 0
    summary = capsys.readouterr().out
    assert len(summary.splitlines()) <= 10 + 2 * torch.cuda.device_count() and str(len(variants)) in summary
    assert cli.main(["info", "--kernels"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    for variant in variants:
        registers = f".* {variant['registers']} " if columns == "80" else ""
        assert re.search(rf"^{variant['name']} {registers}", text, re.M), variant["name"]
    assert cli.main(["info", "--json"]) == 0 and json.loads(capsys.readouterr().out) == volta_fa.info()


def test_a_closed_pipe_is_no_error():
    """`head -1` closes its input after one line."""
    command = f"{sys.executable} -m volta_fa info --json | head -1"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=REPOSITORY / "python")
    assert ran.stdout == "{\n" and ran.stderr == ""


@pytest.mark.parametrize("command, missing", [("info", "rich"), ("demo", "matplotlib")])
def test_a_missing_printing_package_is_one_line(command, missing, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else find_spec(name, *a))
    assert cli.main([command]) == 2
    assert capsys.readouterr().err == f"volta_fa: this command needs {missing}: pip install {missing}\n"
