"""Tests of volta_fa.sageattention, functions with the signatures of SageAttention (attention with int8 products) on volta_fa::fwd_fast.

They are compared with PyTorch's attention in fp64: relative L1 errors (sum of absolute errors / sum of absolute numbers) below 3 %, or
0.2 % where a mask is added to scores, which takes the exact op, volta_fa::fwd. Layouts: NHD is (batch, seqlen, nheads, headdim), HND
(batch, nheads, seqlen, headdim). `inputs()` returns q, k and v in fp16 and NHD: batch 2, 33 queries of 4 heads, 70 keys of 2, headdim 64.
`randn(*shape, seed=...)` draws fp16 numbers. `refused` checks that a call raises an error that matches. `on("cpu-fp16")` runs a test on the
CPU backend. test_flash_attn_shim.py tests the shim, which programs import as `sageattention`.

Environment:
- VOLTA_FA_TEST_SAGEATTENTION: a folder with SageAttention's source, whose signatures are compared, instead of the listed ones"""

import ast
import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import test_fast
import volta_fa.sageattention as sage
from conftest import on
from flash_attention import refused, signature_of
from test_fast import randn, relative_l1

_CUDA = "tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype="
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
#: Arguments after q, k, v of SageAttention 2.2 and of its main branch, 2025-12.
SIGNATURES = {
    "sageattn": "tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, **kwargs",
    "sageattn_varlen": _LENGTHS + "is_causal=False, sm_scale=None, smooth_k=True, **kwargs",
    "sageattn_qk_int8_pv_fp16_cuda": _CUDA + "'fp32', smooth_k=True, smooth_v=False, return_lse=False, **kwargs",
    "sageattn_qk_int8_pv_fp16_triton": "tensor_layout='HND', quantization_backend='triton', is_causal=False, attn_mask=None, "
    "sm_scale=None, smooth_k=True, return_lse=False, **kwargs",
    "sageattn_qk_int8_pv_fp8_cuda": _CUDA + "'fp32+fp16', smooth_k=True, smooth_v=False, return_lse=False, **kwargs",
    "sageattn_qk_int8_pv_fp8_cuda_sm90": _CUDA + "'fp32+fp32', smooth_k=True, return_lse=False, **kwargs",
}


def test_signatures_are_those_of_sageattention():
    expected = {name: f"(q, k, v, {text})" for name, text in SIGNATURES.items()}
    if "VOLTA_FA_TEST_SAGEATTENTION" in os.environ:
        source = ast.parse((Path(os.environ["VOLTA_FA_TEST_SAGEATTENTION"]) / "sageattention" / "core.py").read_text())
        functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name.startswith("sageattn")]
        assert {f.name for f in functions} <= set(SIGNATURES)
        for f in functions:  # without its body, and annotations stay text
            exec(f"from __future__ import annotations\ndef {f.name}({ast.unparse(f.args)}): pass", theirs := {})
            expected[f.name] = signature_of(theirs[f.name])
    assert set(sage.__all__) == {*SIGNATURES, "install_sageattention_shim"}
    for name, signature in expected.items():
        assert signature_of(getattr(sage, name)) == signature, name


# ---- the functions ---------------------------------------------------------------------------------------------------

inputs = functools.partial(test_fast.inputs, seqlen_q=33, seqlen_k=70, nheads=4, nheads_k=2, batch=2)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Returns PyTorch's attention in fp64 of tensors in the layout NHD. A causal mask is aligned to the first query and key."""
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    if is_causal:
        triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = triangle if mask is None else mask & triangle if mask.dtype == torch.bool else mask.masked_fill(~triangle, -torch.inf)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


FUNCTIONS = [sage.sageattn, sage.sageattn_qk_int8_pv_fp16_cuda, sage.sageattn_qk_int8_pv_fp16_triton]


@on("cpu-fp16")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("seqlen_k", [33, 70, 20])
@pytest.mark.parametrize("is_causal", [False, True])
def test_layouts_and_causal_masks(backend, function, layout, seqlen_k, is_causal):
    """SageAttention's causal mask is aligned to the first query and key, also with more keys than queries."""
    q, k, v = inputs(seqlen_k=seqlen_k)
    expected = exact(q, k, v, is_causal=is_causal, scale=0.2)
    q, k, v = (t.transpose(1, 2) if layout == "HND" else t for t in (q, k, v))
    out, lse = function(q, k, v, tensor_layout=layout, is_causal=is_causal, sm_scale=0.2, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 33) and lse.dtype == torch.float32
    assert relative_l1(out.transpose(1, 2) if layout == "HND" else out, expected) < 0.03
    assert torch.equal(function(q, k, v, tensor_layout=layout, is_causal=is_causal, sm_scale=0.2), out)


MASKS = {
    "bool, rank 2": ((33, 70), torch.bool),
    "bool, rank 3": ((4, 33, 70), torch.bool),
    "bool, keys": ((2, 1, 1, 70), torch.bool),
    "bool, rows": ((33, 1), torch.bool),
    "added": ((2, 4, 33, 70), torch.float16),
    "added, fp32": ((1, 1, 33, 70), torch.float32),
}


@on("cpu-fp16")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape, dtype", MASKS.values(), ids=MASKS)
def test_masks_are_applied(backend, function, shape, dtype, is_causal):
    q, k, v = inputs()
    mask = randn(*shape, seed=5) if dtype != torch.bool else randn(*shape, seed=5) > 0
    mask = mask.to(dtype)
    if dtype == torch.bool and shape[-1] > 1:
        mask[..., 0] = True  # causal rows see a key
    found = function(q, k, v, tensor_layout="NHD", is_causal=is_causal, attn_mask=mask)
    expected = exact(q, k, v, mask, is_causal)
    assert relative_l1(found, expected) < (0.03 if dtype == torch.bool else 2e-3)
    assert relative_l1(function(q, k, v, tensor_layout="NHD", is_causal=is_causal), expected) > 0.1


@on("cpu-fp16")
def test_smoothing(backend):
    """smooth_k, the default, subtracts the keys' mean before quantization, and so reduces the error. softmax_lse includes the mean."""
    q, k, v = inputs(seqlen_k=300)
    k += 12 * randn(64, seed=8)
    _, lse = sage.sageattn(q, k, v, tensor_layout="NHD", return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 8
    assert (lse - scores.logsumexp(-1)).abs().max() < 0.1
    error = lambda **options: relative_l1(sage.sageattn(q, k, v, tensor_layout="NHD", **options), exact(q, k, v))  # noqa: E731
    assert error(smooth_k=False) > 3 * error(smooth_k=True) and error() == error(smooth_k=True)


@on("cpu-fp16")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(backend, dtype, is_causal):
    """Each packed sequence attends to its own keys. A scale of 0.2 differs from the default, 1 / sqrt(headdim)."""
    q, k, v = (t[0] for t in inputs(seqlen_q=90, seqlen_k=90 if is_causal else 120))
    cu_q = torch.tensor([0, 40, 90], dtype=dtype)
    cu_k = cu_q if is_causal else torch.tensor([0, 70, 120], dtype=dtype)
    lengths = (50, 50) if is_causal else (50, 70)
    out = sage.sageattn_varlen(q, k, v, cu_q, cu_k, *lengths, is_causal, 0.2)
    for i in range(2):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        expected = exact(q[None, rows], k[None, keys], v[None, keys], is_causal=is_causal, scale=0.2)
        assert relative_l1(out[None, rows], expected) < 0.03


@on("cpu-fp16")
def test_arguments_without_effect(backend):
    """Accumulators, granularities and backends of SageAttention's kernels change nothing here."""
    q, k, v = inputs()
    nhd = dict(tensor_layout="NHD")
    expected = sage.sageattn(q, k, v, **nhd)
    cuda, triton = FUNCTIONS[1:]
    for accumulator in ("fp32", "fp16", "fp16+fp32"):
        for granularity in ("per_warp", "per_thread"):
            options = dict(pv_accum_dtype=accumulator, qk_quant_gran=granularity, smooth_v=True)
            assert torch.equal(cuda(q, k, v, **nhd, **options), expected)
    assert torch.equal(triton(q, k, v, **nhd, quantization_backend="cuda"), expected)
    assert torch.equal(sage.sageattn(q, k, v, **nhd, attn_mask=None, dropout_p=0), expected)
    # the arguments of PyTorch's function, which SageAttention's guide replaces with sageattn
    found = sage.sageattn(q, k, v, **nhd, attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.2, enable_gqa=True)
    assert torch.equal(found, sage.sageattn(q, k, v, **nhd, sm_scale=0.2)) and not torch.equal(found, expected)


@on("cpu-fp16")
def test_invalid_and_unsupported_arguments_are_refused(backend):
    nhd = dict(tensor_layout="NHD")
    sageattn, cuda, triton = FUNCTIONS
    q, k, v = qkv = inputs()
    refused(NotImplementedError, "sageattn: dropout_p: got 0.1, expected None or 0.0", sageattn, *qkv, dropout_p=0.1)
    refused(TypeError, "sageattn: key_mask: got an unknown keyword, expected one of", sageattn, *qkv, key_mask=q)
    refused(ValueError, "scale: got 0.3, expected sm_scale, 0.2", sageattn, *qkv, sm_scale=0.2, scale=0.3)
    message = "sageattn: attn_mask: got dtype torch.int64, expected torch.bool, torch.float16"
    refused(ValueError, message, sageattn, *qkv, **nhd, attn_mask=torch.ones(33, 70, dtype=torch.int64))
    refused(NotImplementedError, "pv_accum_dtype: got 'fp8', expected 'fp32' or 'fp16' or", cuda, *qkv, pv_accum_dtype="fp8")
    refused(NotImplementedError, "qk_quant_gran: got 'per_tensor', expected", cuda, *qkv, qk_quant_gran="per_tensor")
    message = "quantization_backend: got 'rocm', expected 'triton' or 'cuda'"
    refused(NotImplementedError, message, triton, *qkv, quantization_backend="rocm")
    refused(ValueError, "tensor_layout: got 'BSHD', expected 'HND' or 'NHD'", sageattn, *qkv, tensor_layout="BSHD")
    refused(ValueError, r"q: got shape \(33, 4, 64\), expected four dimensions", sageattn, q[0], k, v)
    message = r"attn_mask: got shape \(3, 70\), expected one that broadcasts"
    refused(ValueError, message, sageattn, *qkv, **nhd, attn_mask=torch.ones(3, 70))
    refused(ValueError, "q: got dtype torch.float32", sageattn, *(t.float() for t in qkv), **nhd)
    refused(NotImplementedError, "requires grad", sageattn, q.clone().requires_grad_(), k, v, **nhd)
    for function in (sage.sageattn_qk_int8_pv_fp8_cuda, sage.sageattn_qk_int8_pv_fp8_cuda_sm90):
        refused(NotImplementedError, f"sageattention.{function.__name__}: .* no products in fp8. Use sageattn", function, *qkv)


@on("cpu-fp16")
def test_invalid_packed_sequences_are_refused(backend):
    varlen = sage.sageattn_varlen
    q, k, v = (t[0] for t in inputs())
    packed = (q, k, v, torch.tensor([0, 33]), torch.tensor([0, 70]), 33, 70)
    refused(ValueError, "is_causal: got True with sequences that have more keys", varlen, *packed, is_causal=True)
    refused(ValueError, "cu_seqlens_k: got dtype torch.float32, expected an integer", varlen, *packed[:4], torch.tensor([0, 70.5]), 33, 70)
    # totals and longest lengths agree, but not the lengths of each sequence
    starts = torch.tensor([0, 13, 33], dtype=torch.int32), torch.tensor([0, 20, 33], dtype=torch.int32)
    message = "sageattn_varlen: is_causal: got True with sequences that have more keys or more queries"
    refused(ValueError, message, varlen, q, k[:33], v[:33], *starts, 20, 20, is_causal=True)
    refused(NotImplementedError, "attn_mask: got a mask, expected None", varlen, *packed, attn_mask=q)


@on("cpu-fp16")
def test_compiles_without_a_graph_break(backend):
    q, k, v = inputs()
    mask = randn(33, 70, seed=3) > 0
    run = lambda q, k, v: sage.sageattn(q, k, v, tensor_layout="NHD", attn_mask=mask)  # noqa: E731
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), run(q, k, v))
