"""The shims: packages named `flash_attn` and `sageattention` whose functions are volta_fa's, for programs that import these names.

`volta_fa.install_flash_attn_shim()` puts the package at the end of sys.path; tools/flash_attn_shim is the same as a distribution for pip.
Each test runs a program in a process (`succeeds`, `run_pieces`), because imports would change other tests.

Environment:
- VOLTA_FA_TEST_TRANSFORMERS: folders (separated by colons) to each of which a release of transformers was installed
  with `pip install --target`; the tests with models run with each of them, and with an installed transformers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import volta_fa
from conftest import REPOSITORY
from processes import run_pieces, succeeds

PACKAGE = Path(volta_fa.__file__).parent
#: A program that uses flash_attn as others do: xformers, unsloth, transformers, Transformer Engine. Its names are volta_fa's objects.
USES = """
    import importlib.metadata as metadata, importlib.util, pathlib, volta_fa
    import flash_attn, flash_attn.bert_padding, flash_attn.flash_attn_interface, flash_attn.layers.rotary, flash_attn.ops.triton.rotary
    import flash_attn_interface, volta_fa.bert_padding, volta_fa.rotary
    from volta_fa.integrations.flash_attn import fa3, interface
    assert flash_attn.__all__ == interface.__all__ and flash_attn_interface.__all__ == fa3.__all__
    for theirs, ours, names in (
        (flash_attn, volta_fa, interface.__all__),
        (flash_attn.flash_attn_interface, volta_fa, interface.__all__),
        (flash_attn.bert_padding, volta_fa.bert_padding, volta_fa.bert_padding.__all__),
        (flash_attn.layers.rotary, volta_fa.rotary, volta_fa.rotary.__all__),
        (flash_attn.ops.triton.rotary, volta_fa.rotary, ["apply_rotary"]),
        (flash_attn_interface, fa3, fa3.__all__),
    ):
        assert [name for name in names if getattr(theirs, name) is not getattr(ours, name)] == [], theirs
    from flash_attn.losses.cross_entropy import CrossEntropyLoss
    from flash_attn.modules.mha import MHA
    from flash_attn.ops.rms_norm import rms_norm
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_linear_fn, layer_norm_ref, rms_norm_fn, rms_norm_ref
    assert flash_attn.__version__ == "2.8.3"
    assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.3+volta"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    # Transformer Engine imports private functions; xformers and unsloth read flash_attn_gpu and numbers of the version when they are
    # imported, and xformers calls by position
    from flash_attn_2_cuda import fwd, varlen_bwd
    from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward, flash_attn_gpu
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward
    assert flash_attn_gpu.fwd is fwd
    import torch
    q = torch.randn(1, 5, 2, 8)
    out, lse, *_ = fwd(q, q, q, None, None, 0.0, 0.5, True, -1, -1, 0.0, False, None)
    assert torch.equal(out, flash_attn.flash_attn_func(q, q, q, softmax_scale=0.5, causal=True)) and lse.shape == (1, 2, 5)
    # programs also look for modules without importing them
    assert all(importlib.util.find_spec(f"flash_attn.{name}") for name in ("bert_padding", "layers.rotary", "ops.triton.layer_norm"))
    # unsloth looks for this file without importing it
    assert (pathlib.Path(importlib.util.find_spec("flash_attn").submodule_search_locations[0]) / "flash_attn_interface.py").exists()
"""

USES_SAGEATTENTION = """
    import importlib.metadata as metadata, volta_fa.sageattention
    import sageattention, sageattention.core
    for name in sageattention.__all__:
        assert getattr(sageattention, name) is getattr(sageattention.core, name) is getattr(volta_fa.sageattention, name), name
    assert len(sageattention.__all__) == 6
    assert metadata.version("sageattention") == "2.2.0+volta"
"""

#: The shims by the module's name: the distribution's name, and a program that uses the module.
STAND_INS = {"flash_attn": ("flash-attn", USES), "sageattention": ("sageattention", USES_SAGEATTENTION)}
stand_ins = pytest.mark.parametrize("module", STAND_INS)


@stand_ins
def test_it_puts_a_package_within_reach(module):
    """The install function appends a folder to sys.path, once, and imports nothing."""
    again = "replace=True" if module == "sageattention" else ""
    succeeds(
        f"""
        import importlib.metadata, importlib.util, sys, volta_fa
        assert importlib.util.find_spec("{module}") is None, "importing volta_fa is not enough"
        before = list(sys.path)
        volta_fa.install_{module}_shim()
        volta_fa.install_{module}_shim({again})
        assert sys.path[:-1] == before and "{module}" not in sys.modules
        """,
        STAND_INS[module][1],
    )


def test_flash_attention_3_as_programs_call_it():
    """Programs such as Wan and SkyReels pass keywords. Programs before 2025-08-29 take the first of two results."""
    succeeds(
        """
        import torch, volta_fa
        volta_fa.install_flash_attn_shim()
        from flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
        q, cu = torch.randn(10, 2, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
        calls = [
            lambda: flash_attn_varlen_func(
                q=q, k=q, v=q, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=None, seqused_k=None, max_seqlen_q=5, max_seqlen_k=5,
                softmax_scale=None, causal=False, deterministic=True,
            ),
            lambda: flash_attn_func(q[None], q[None], q[None]),
            lambda: flash_attn_qkvpacked_func(torch.stack((q, q, q), 1)[None]),
        ]
        alone = [call() for call in calls]
        volta_fa.install_flash_attn_shim(fa3_returns_lse=True)
        volta_fa.install_flash_attn_shim()
        for call, out in zip(calls, alone):
            again, lse = call()
            assert torch.equal(again, out) and lse.isfinite().all()
        volta_fa.install_flash_attn_shim(fa3_returns_lse=False)
        assert all(torch.equal(call(), out) for call, out in zip(calls, alone))
        """
    )


def test_names_of_other_packages_for_these_gpus(tmp_path):
    """An installed package of such a name is found first."""
    code = """
        import torch, volta_fa
        volta_fa.install_flash_attn_shim()
        import flash_attn_turing
        from flash_attn_turing import bwd, fwd, varlen_bwd, varlen_fwd
        if not hasattr(flash_attn_turing, "origin"):
            import flash_attn_v100, flash_attn_v100_cuda
            from flash_attn_v100.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
            from flash_attn_v100_cuda import fwd_kvcache, varlen_bwd, varlen_fwd
            q = torch.randn(1, 5, 2, 8)
            out = flash_attn_v100.flash_attn_func(q, q, q, 0.5, True)
            assert torch.equal(out, volta_fa.flash_attn_func(q, q, q, softmax_scale=0.5, causal=True))
            first = q.transpose(1, 2).contiguous()
            found = flash_attn_v100_cuda.fwd(first, first, first, None, None, 0.0, 0.5, True, -1, -1, 0.0, False, None)[0]
            assert torch.equal(found, out.transpose(1, 2))
            assert torch.equal(fwd(q, q, q, True)[0], volta_fa.flash_attn_func(q, q, q, causal=True))
        print(getattr(flash_attn_turing, "origin", "volta_fa"))
    """
    assert succeeds(code) == "volta_fa\n"
    (tmp_path / "flash_attn_turing.py").write_text("origin = 'another'; bwd = fwd = varlen_bwd = varlen_fwd = None")
    assert succeeds(code, path=tmp_path) == "another\n"


def make_distribution(folder: Path, module: str, version: str | None) -> Path:
    """Makes another package of the module's name in the folder, and returns the folder. With a version, it looks installed by pip."""
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text("origin = 'another'")
    if version is not None:
        information = folder / f"{module}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {STAND_INS[module][0]}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize("version", ["1.0.6", None])
@pytest.mark.parametrize("imported", [False, True])
@stand_ins
def test_it_does_not_shadow_another_package(tmp_path, module, version, imported):
    site, name = make_distribution(tmp_path, module, version), STAND_INS[module][0]
    printed = succeeds(
        f"""
        import sys, volta_fa
        if {imported}:
            import {module}
        before = list(sys.path)
        try:
            volta_fa.install_{module}_shim()
        except RuntimeError as error:
            print(error)
        import {module}
        assert {module}.origin == "another" and sys.path == before
        """,
        path=site,
    )
    message = f"{name} 1.0.6 is installed in .*pip uninstall {name}" if version else f"there is another {module}"
    assert re.search(message, printed), printed


def test_it_shadows_an_installed_sageattention_when_asked(tmp_path):
    site = make_distribution(tmp_path, "sageattention", "1.0.6")
    succeeds("import volta_fa\nvolta_fa.install_sageattention_shim(replace=True)\n", USES_SAGEATTENTION, path=site)
    ran = run_pieces("import volta_fa, sageattention\nvolta_fa.install_sageattention_shim(replace=True)", path=site)
    assert ran.returncode == 1 and "sageattention was imported before" in ran.stderr, ran.stderr


def test_it_does_not_replace_a_module_without_a_file():
    """sys.modules has a flash_attn that another program made, for which find_spec raises an error."""
    ran = run_pieces(
        """
        import sys, types, volta_fa
        sys.modules["flash_attn"] = types.ModuleType("flash_attn")
        volta_fa.install_flash_attn_shim()
        """
    )
    assert ran.returncode == 1 and "RuntimeError: volta_fa.install_flash_attn_shim: there is another flash_attn" in ran.stderr, ran.stderr


def test_a_flash_attn_installed_later_comes_first(tmp_path):
    make_distribution(tmp_path, "flash_attn", None)
    out = succeeds(
        f"""
        import sys, volta_fa
        volta_fa.install_flash_attn_shim()
        sys.path.insert(0, {str(tmp_path)!r})
        import flash_attn
        print(flash_attn.origin)
        """
    )
    assert out.strip() == "another"


@pytest.mark.parametrize("module", ["flash_attn.ops.triton.rotary", "flash_attn_v100.flash_attn_interface", "sageattention.core"])
def test_a_program_looks_for_a_module_before_any_import(module):
    """Spawned processes take over sys.path alone."""
    shim = "sageattention" if module.startswith("sage") else "flash_attn"
    succeeds(
        f"""
        import importlib.util, multiprocessing, sys, volta_fa
        volta_fa.install_{shim}_shim()
        assert importlib.util.find_spec("{module}").name == "{module}" and "{module.partition(".")[0]}" in sys.modules
        assert importlib.util.find_spec("{module}s") is None
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(importlib.util.find_spec, ["{module}"])
        """
    )


def test_it_warns_where_transformers_may_have_looked_already():
    ran = run_pieces(
        """
        import sys, types, volta_fa
        sys.modules["transformers"] = types.ModuleType("transformers")
        volta_fa.install_flash_attn_shim()
        import flash_attn
        """
    )
    assert ran.returncode == 0 and "UserWarning: volta_fa.install_flash_attn_shim: transformers was imported before" in ran.stderr


# ---- the distribution ------------------------------------------------------------------------------------------


@stand_ins
def test_versions_agree(module):
    """A distribution, for pip, and the metadata and the package of the shim."""
    (info,) = (PACKAGE / "integrations" / module / "shim").glob("*.dist-info")
    (version,) = re.findall(r"^Version: (.*)$", (info / "METADATA").read_text(), re.M)
    assert info.name == f"{module}-{version}.dist-info"
    assert f'version = "{version}"' in (REPOSITORY / "tools" / f"{module}_shim" / "pyproject.toml").read_text()
    if module == "flash_attn":
        assert f'__version__ = "{version.removesuffix("+volta")}"\n' in (info.parent / "flash_attn" / "__init__.py").read_text()


@pytest.mark.slow
@stand_ins
def test_the_distribution_installs_with_pip(tmp_path, module):
    """The same modules in site-packages; the install function then has nothing to do."""
    for folder in (f"tools/{module}_shim", f"python/volta_fa/integrations/{module}/shim"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip, site = [sys.executable, "-m", "pip", "--disable-pip-version-check"], tmp_path / "site"
    options = ["-q", "--no-build-isolation", "--no-deps", "--no-index", "--target", site]
    subprocess.run([*pip, "install", *options, tmp_path / "tools" / f"{module}_shim"], check=True)
    shim = tmp_path / "python" / "volta_fa" / "integrations" / module / "shim"
    assert len([*shim.glob("*-info")]) == 1, "pip leaves no metadata in the shim"
    shipped = (path.relative_to(shim) for path in shim.rglob("*.py"))
    # pip would put these into the folders of other distributions
    shipped = sorted(path for path in shipped if not path.parts[0].startswith(("flash_attn_v100", "flash_attn_turing")))
    assert sorted(path.relative_to(site) for path in site.rglob("*.py")) == shipped
    distribution, uses = STAND_INS[module]
    out = succeeds(
        uses,
        f"""
        assert metadata.requires("{distribution}") == ["volta-fa"], metadata.requires("{distribution}")
        import sys
        before = list(sys.path)
        volta_fa.install_{module}_shim()
        assert sys.path == before
        print({module}.__file__)
        """,
        path=site,
    )
    assert Path(out.strip()).is_relative_to(site)


# ---- transformers ----------------------------------------------------------------------------------------------

FOLDERS = [folder for folder in os.environ.get("VOLTA_FA_TEST_TRANSFORMERS", "").split(":") if folder]
if importlib.util.find_spec("transformers"):
    FOLDERS.append("")
RELEASES = pytest.mark.parametrize(
    "transformers",
    [pytest.param(f, id=Path(f).name or "installed", marks=[pytest.mark.slow] if f else []) for f in FOLDERS]
    or [pytest.param(None, marks=pytest.mark.skip("no transformers"))],
)

# The beginning of programs with models. transformers takes "flash_attention_2" only where there is a CUDA device, so the program says
# that there is one; the models stay on the CPU. `pair` makes a model with volta_fa's attention and one with eager attention of the same
# weights. `compare` compares their logits (`rows`: a mask of tokens) and gradients.
PRETEND = """
    import copy, torch
    torch.cuda.is_available = lambda: True
    import volta_fa
    volta_fa.install_flash_attn_shim()
    import transformers
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal
    assert is_flash_attn_2_available() and is_flash_attn_greater_or_equal("2.8.0")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    SMALL = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
                 initializer_range=0.2)

    def pair(name, auto=transformers.AutoModelForCausalLM, **options):
        config = getattr(transformers, name + "Config")(**SMALL | options)
        flash = auto.from_config(copy.deepcopy(config), attn_implementation="flash_attention_2", dtype=torch.float32)
        eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
        eager.load_state_dict(flash.state_dict())
        assert flash.config._attn_implementation == "flash_attention_2" and eager.config._attn_implementation == "eager"
        return flash.eval(), eager.eval()

    def gradients(model, logits, rows=None):
        (logits if rows is None else logits[rows]).square().sum().backward()
        result = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return result

    def close(a, b, tolerance=1e-4):
        error, largest = (a - b).abs().max().item(), b.abs().max().item()
        assert error <= tolerance * largest + 1e-7, (error, largest)

    def compare(flash, eager, rows=None, tolerance=1e-4, **inputs):
        got, want = flash(**inputs).logits, eager(**inputs).logits
        close(got if rows is None else got[rows], want if rows is None else want[rows], tolerance)
        for a, b in zip(gradients(flash, got, rows), gradients(eager, want, rows)):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b, tolerance)

    torch.manual_seed(0)
    ids = torch.randint(3, 50, (2, 13))
    right, left = torch.ones(2, 13, dtype=torch.long), torch.ones(2, 13, dtype=torch.long)
    right[1, 8:], left[0, :6] = 0, 0
"""


@RELEASES
def test_transformers_on_a_machine_without_a_gpu(transformers):
    """transformers finds the shim, and refuses because of the machine: nothing that a package could change."""
    ran = run_pieces(
        """
        import torch, volta_fa
        torch.cuda.is_available = lambda: False
        volta_fa.install_flash_attn_shim()
        from transformers import AutoModelForCausalLM, LlamaConfig
        AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=64, num_hidden_layers=1), attn_implementation="flash_attention_2")
        """,
        path=transformers,
    )
    found = re.search(r"(ValueError|ImportError): FlashAttention2 has been toggled on.* is not available on CPU", ran.stderr)
    assert found, ran.stderr[-2000:]


@RELEASES
def test_transformers_models(transformers):
    """Logits, gradients and generated tokens are eager attention's: batches, and padding on either side."""
    succeeds(
        PRETEND,
        """
        gemma = {"sliding_window": 4, "head_dim": 12, "attn_logit_softcapping": 2.0}
        for name, options in [("Llama", {}), ("Mistral", {"sliding_window": 4}), ("Gemma2", gemma)]:
            flash, eager = pair(name, **options)
            compare(flash, eager, input_ids=ids)
            for mask in (right, left):
                compare(flash, eager, mask.bool(), input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
            for mask in (torch.ones_like(left), left):
                generate = dict(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
                assert torch.equal(flash.generate(**generate), eager.generate(**generate)), name
        from transformers import modeling_flash_attention_utils as utils
        assert utils._flash_fn is volta_fa.flash_attn_func and utils._flash_varlen_fn is volta_fa.flash_attn_varlen_func
        assert utils._unpad_fn is volta_fa.bert_padding.unpad_input and utils._pad_fn is volta_fa.bert_padding.pad_input
        """,
        path=transformers,
    )


@pytest.mark.slow
@RELEASES
def test_transformers_packed_sequences(transformers):
    """position_ids that start again at 0 separate sequences: each gives the result that it has alone in the batch."""
    succeeds(
        PRETEND,
        """
        flash, eager = pair("Llama")
        lengths = [5, 1, 7, 13]
        tokens = torch.randint(3, 50, (1, sum(lengths)))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        packed = flash(input_ids=tokens, position_ids=positions, use_cache=False).logits
        alone = torch.cat([eager(input_ids=part).logits for part in tokens.split(lengths, dim=1)], dim=1)
        close(packed, alone)
        for a, b in zip(gradients(flash, packed), gradients(eager, alone)):
            close(a, b)
        """,
        path=transformers,
    )


@pytest.mark.slow
@RELEASES
def test_transformers_attention_dropout(transformers):
    """In training only, and from PyTorch's generator."""
    succeeds(
        PRETEND,
        """
        flash, eager = pair("Llama", attention_dropout=0.3)
        compare(flash, eager, input_ids=ids)
        flash.train()
        torch.manual_seed(1)
        a = flash(input_ids=ids, labels=ids)
        b = flash(input_ids=ids, labels=ids)
        torch.manual_seed(1)
        c = flash(input_ids=ids, labels=ids)
        assert not torch.equal(a.logits, b.logits) and torch.equal(a.logits, c.logits)
        a.loss.backward()
        assert all(p.grad.isfinite().all() for p in flash.parameters())
        """,
        path=transformers,
    )


@pytest.mark.slow
@RELEASES
def test_transformers_modernbert(transformers):
    """An encoder with windows on both sides; 4.57 makes it of flash_attn's rotary layers and unpadded batches, and runs
    fp32 models' attention in bf16."""
    succeeds(
        PRETEND,
        """
        flash, eager = pair("ModernBert", transformers.AutoModelForMaskedLM, local_attention=6, global_attn_every_n_layers=2,
                            reference_compile=False, cls_token_id=1, sep_token_id=2, initializer_cutoff_factor=100.0)
        tolerance = 3e-2 if transformers.__version__.startswith("4.") else 1e-4
        compare(flash, eager, right.bool(), tolerance, input_ids=ids, attention_mask=right)
        """,
        path=transformers,
    )
