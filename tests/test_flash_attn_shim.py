"""The packages `flash_attn` and `sageattention` that are made of volta_fa, each test in a process of its own.

Environment:
- VOLTA_FA_TEST_TRANSFORMERS: folders (separated by colons) to each of which a release of transformers was installed
  with `pip install --target`; the tests with models run with each of them, and with an installed transformers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import volta_fa
from processes import run_pieces, succeeds

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = Path(volta_fa.__file__).parent
SITE = PACKAGE / "integrations" / "flash_attn" / "shim"
DISTRIBUTION = REPOSITORY / "tools" / "flash_attn_shim"


USES = """
    import importlib.metadata as metadata, importlib.util, pathlib, volta_fa
    import flash_attn, flash_attn.bert_padding, flash_attn.flash_attn_interface, flash_attn.layers.rotary, flash_attn.ops.triton.rotary
    import volta_fa.bert_padding, volta_fa.rotary
    assert flash_attn.__all__ == volta_fa.integrations.flash_attn.interface.__all__
    for name in volta_fa.integrations.flash_attn.interface.__all__:
        assert getattr(flash_attn, name) is getattr(flash_attn.flash_attn_interface, name) is getattr(volta_fa, name), name
    assert flash_attn.bert_padding.unpad_input is volta_fa.bert_padding.unpad_input
    for name in volta_fa.bert_padding.__all__:
        assert getattr(flash_attn.bert_padding, name) is getattr(volta_fa.bert_padding, name), name
    for name in volta_fa.rotary.__all__:
        assert getattr(flash_attn.layers.rotary, name) is getattr(volta_fa.rotary, name), name
    assert flash_attn.ops.triton.rotary.apply_rotary is volta_fa.rotary.apply_rotary
    import flash_attn.losses.cross_entropy, flash_attn.modules.mha, flash_attn.ops.rms_norm
    import flash_attn.ops.triton.cross_entropy, flash_attn.ops.triton.layer_norm, flash_attn_2_cuda
    assert flash_attn.losses.cross_entropy.CrossEntropyLoss and flash_attn.ops.triton.cross_entropy.cross_entropy_loss
    assert flash_attn.ops.triton.layer_norm.rms_norm_fn and flash_attn.ops.rms_norm.rms_norm and flash_attn.modules.mha.MHA
    from flash_attn.layers.rotary import apply_rotary_emb_torch
    from flash_attn.ops.triton.layer_norm import layer_norm_linear_fn, layer_norm_ref, rms_norm_ref
    import flash_attn_interface
    assert flash_attn_interface.__all__ == volta_fa.integrations.flash_attn.fa3.__all__
    for name in flash_attn_interface.__all__:
        assert getattr(flash_attn_interface, name) is getattr(volta_fa.integrations.flash_attn.fa3, name), name
    assert flash_attn.__version__ == "2.8.3"
    assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.3+volta"
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
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

#: Distribution and what programs use of it, by module.
STAND_INS = {"flash_attn": ("flash-attn", USES), "sageattention": ("sageattention", USES_SAGEATTENTION)}
stand_ins = pytest.mark.parametrize("module", STAND_INS)


@stand_ins
def test_it_puts_a_package_within_reach(module):
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


def test_attributes_for_xformers_and_unsloth():
    """Both read flash_attn_gpu when they are imported, and numbers from the version. xformers calls its functions by position."""
    succeeds(
        """
        import volta_fa
        volta_fa.install_flash_attn_shim()
        from flash_attn.flash_attn_interface import flash_attn_gpu
        import flash_attn
        assert (2, 7, 1) <= tuple(int(part) for part in flash_attn.__version__.split(".")[:3]) <= (2, 8, 4)
        import flash_attn_2_cuda, torch
        assert flash_attn_gpu.fwd is flash_attn_2_cuda.fwd
        q = torch.randn(1, 5, 2, 8)
        out, lse, *_ = flash_attn_gpu.fwd(q, q, q, None, None, 0.0, 0.5, True, -1, -1, 0.0, False, None)
        assert torch.equal(out, flash_attn.flash_attn_func(q, q, q, softmax_scale=0.5, causal=True)) and lse.shape == (1, 2, 5)
        """
    )


def test_flash_attention_3_as_programs_call_it():
    """By keywords, as Wan and SkyReels do. Programs before 2025-08-29 take the first of two results."""
    succeeds(
        """
        import torch, volta_fa
        volta_fa.install_flash_attn_shim()
        import flash_attn_interface
        q, cu = torch.randn(10, 2, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
        call = lambda: flash_attn_interface.flash_attn_varlen_func(
            q=q, k=q, v=q, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=None, seqused_k=None, max_seqlen_q=5, max_seqlen_k=5,
            softmax_scale=None, causal=False, deterministic=True,
        )
        out = call().unflatten(0, (2, 5))
        volta_fa.install_flash_attn_shim(fa3_returns_lse=True)
        volta_fa.install_flash_attn_shim()
        assert torch.equal(call()[0].unflatten(0, (2, 5)), out)
        volta_fa.install_flash_attn_shim(fa3_returns_lse=False)
        assert torch.equal(call().unflatten(0, (2, 5)), out)
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


def test_what_transformer_engine_imports():
    succeeds(
        """
        import volta_fa
        volta_fa.install_flash_attn_shim()
        from flash_attn_2_cuda import varlen_bwd
        from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward
        """
    )


def make_distribution(folder: Path, module: str, version: str | None) -> Path:
    """Another package; with a version, one that pip installed."""
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
    ran = run_pieces(
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
    assert ran.returncode == 0, ran.stderr
    message = f"{name} 1.0.6 is installed in .*pip uninstall {name}" if version else f"there is another {module}"
    assert re.search(message, ran.stdout), ran.stdout


def test_it_shadows_an_installed_sageattention_when_asked(tmp_path):
    site = make_distribution(tmp_path, "sageattention", "1.0.6")
    succeeds("import volta_fa\nvolta_fa.install_sageattention_shim(replace=True)\n", USES_SAGEATTENTION, path=site)
    ran = run_pieces("import volta_fa, sageattention\nvolta_fa.install_sageattention_shim(replace=True)", path=site)
    assert ran.returncode == 1 and "sageattention was imported before" in ran.stderr, ran.stderr


def test_it_does_not_replace_a_module_without_a_file():
    """Somebody's stand-in, which find_spec does not describe."""
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


def test_versions_agree():
    (info,) = SITE.glob("*.dist-info")
    (version,) = re.findall(r"^Version: (.*)$", (info / "METADATA").read_text(), re.M)
    assert info.name == f"flash_attn-{version}.dist-info"
    assert re.search(r'^__version__ = "(.*)"$', (SITE / "flash_attn" / "__init__.py").read_text(), re.M)[1] + "+volta" == version
    assert f'version = "{version}"' in (DISTRIBUTION / "pyproject.toml").read_text()


def test_sageattentions_distribution_is_the_same_package():
    site, folder = PACKAGE / "integrations" / "sageattention" / "shim", REPOSITORY / "tools" / "sageattention_shim"
    assert (folder / "sageattention").resolve() == site / "sageattention"
    (information,) = site.glob("*.dist-info")
    version = information.name.removeprefix("sageattention-").removesuffix(".dist-info")
    assert f'version = "{version}"' in (folder / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_distribution_installs_with_pip(tmp_path):
    """The same modules in site-packages; install_flash_attn_shim() then has nothing to do."""
    source = tmp_path / "source"
    shutil.copytree(DISTRIBUTION, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "flash_attn-2.8.3+volta-py3-none-any.whl"
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    shipped = (path.relative_to(SITE) for path in SITE.rglob("*.py"))
    # pip would put these into the folders of other distributions
    shipped = sorted(path for path in shipped if not path.parts[0].startswith(("flash_attn_v100", "flash_attn_turing")))
    assert sorted(path.relative_to(site) for path in site.rglob("*.py")) == shipped
    out = succeeds(
        USES,
        """
        assert metadata.requires("flash-attn") == ["volta-fa"], metadata.requires("flash-attn")
        import sys
        before = list(sys.path)
        volta_fa.install_flash_attn_shim()
        assert sys.path == before
        print(flash_attn.__file__)
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

# transformers takes "flash_attention_2" only where there is a CUDA device. The models stay on the CPU all the same.
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
    assert re.search(r"(ValueError|ImportError): FlashAttention2 has been toggled on.* is not available on CPU", ran.stderr), ran.stderr[
        -2000:
    ]


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
    """Positions that start anew: each sequence is alone, as if it was the whole batch."""
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
