"""tools/hub.py: the folder that Hugging Face's `kernels` loads."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

import hub
import torch_releases
import volta_fa
from conftest import run_python

PACKAGE = Path(volta_fa.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("hub")
    hub.lay_out(PACKAGE, output)
    return output


def test_variants_of_releases():
    """CUDA 12.6 ends with torch 2.14; the hub asks for 12.6, 13.0 and 13.2 of torch 2.12 and 2.13."""
    for minor in torch_releases.MINORS:
        assert f"torch{minor.replace('.', '')}-cxx11-cpu-x86_64-linux" in hub.variants(minor)
    for minor in ("2.12", "2.13"):
        assert [name.split("-")[2] for name in hub.variants(minor)] == ["cpu", "cu126", "cu130", "cu132"]
    assert [name.split("-")[2] for name in hub.variants("2.8")] == ["cpu", "cu126"]
    assert [name.split("-")[2] for name in hub.variants("2.15")] == ["cpu", "cu130", "cu132"]


def test_a_variant_has_one_library_and_its_metadata(folder):
    found = sorted((folder / "build").iterdir())
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
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")


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


def test_the_module_loads_from_its_folder(folder):
    variant = next((folder / "build").glob("*-cpu-*"))
    printed = run_python(LOAD, variant)
    assert printed.split() == [str(variant / "__init__.py"), "volta_fa.transformers"]


def test_kernels_loads_it(folder):
    """The real loader, where it is installed."""
    pytest.importorskip("kernels")
    printed = run_python("import sys, pathlib, kernels; print(kernels.get_local_kernel(pathlib.Path(sys.argv[1])).__file__)", folder)
    assert Path(printed.strip()).is_relative_to(folder)


def wheel_of(tmp_path: Path, library: bytes | None) -> Path:
    wheel = tmp_path / "volta_fa-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("volta_fa/__init__.py", "")
        if library is not None:
            archive.writestr("volta_fa/torch-2.12/libvolta_fa.so", library)
    return wheel


def test_a_library_that_breaks_the_rules_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub, "violations", lambda path: ["PyUnicode_AsUTF8"] if path.read_bytes() == b"bad" else [])
    output = tmp_path / "out"
    assert len(hub.build(wheel_of(tmp_path, b"good"), output)) == 4
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "build"]
    monkeypatch.setattr(sys, "argv", ["hub.py", str(wheel_of(tmp_path, b"bad")), "--output", str(output)])
    assert hub.main() == 1 and not output.exists()
    assert "torch-2.12/libvolta_fa.so: PyUnicode_AsUTF8" in capsys.readouterr().err


def test_a_wheel_without_libraries_is_refused(tmp_path):
    with pytest.raises(hub.Refusal, match="has no library: `make wheel` builds them"):
        hub.build(wheel_of(tmp_path, None), tmp_path / "out")
