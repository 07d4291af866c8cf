"""volta_fa.flash_mla: FlashMLA's functions, called as its users call them."""

from __future__ import annotations

import inspect

import pytest
import torch

from cached import check_sequences
from conftest import on
from test_mla import draw, latents
from volta_fa import flash_mla


def call(backend, case, **options):
    problem, given = draw(backend, case)
    lengths = given["cache_seqlens"]
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, problem.q.shape[1] * problem.q.shape[2], 1)
    for _ in backend._runs(problem.q, problem.k_cache):
        found = flash_mla.flash_mla_with_kvcache(
            problem.q, problem.k_cache, given["block_table"], lengths, 512, metadata, num_splits, **options
        )
    return problem, found


@on("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16", "sim", "cuda")
@pytest.mark.parametrize("causal", [False, True])
def test_against_fp64(backend, causal):
    problem, (out, lse) = call(backend, latents([(2, 37), (2, 150)], is_causal=causal), causal=causal)
    assert out.shape == (2, 2, 16, 512) and lse.shape == (2, 16, 2)
    check_sequences(backend, problem, out, lse, problem.k_cache, problem.v_cache)


@on("cpu-fp32", "sim")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_quantized(backend, kv_dtype):
    problem, given = draw(backend, latents([(2, 37), (2, 150)], kv_dtype=kv_dtype, descale="bh"))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1" if backend.machine == "sim" else "0")
    scales = {"latent_scale": given.get("latent_scale"), "descale_k": given.get("latent_descale")}
    assert any(t is not None for t in scales.values())
    expected = torch.ops.volta_fa.fwd_mla(problem.q, problem.k_cache, **given)
    arguments = problem.q, problem.k_cache, given["block_table"], given["cache_seqlens"], 512
    found = flash_mla.flash_mla_with_kvcache(*arguments, causal=True, **scales)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@on("cpu-fp32")
def test_the_scale_is_that_of_the_whole_headdim(backend):
    case = latents([(1, 37)])
    _, found = call(backend, case)
    backend.generator.manual_seed(backend.seed)
    _, given = call(backend, case, softmax_scale=576**-0.5)
    backend.generator.manual_seed(backend.seed)
    _, other = call(backend, case, softmax_scale=192**-0.5)
    assert torch.equal(found[0], given[0]) and not torch.equal(found[0], other[0])


@on("cpu-fp32", "cuda")
def test_metadata(backend):
    """Where the lengths are, and of the shapes that callers keep buffers for; newer callers give none."""
    metadata, num_splits = flash_mla.get_mla_metadata(backend.ints([3, 4, 5]), 16, 1)
    assert metadata.shape == (0, 8) and num_splits.shape == (4,)
    assert {t.dtype for t in (metadata, num_splits)} == {torch.int32}
    assert {t.device.type for t in (metadata, num_splits)} == {backend.device}
    flash_mla.get_mla_metadata()


def test_the_arguments_are_flashmlas():
    """By name and in order, as its README and vLLM call them."""
    assert list(inspect.signature(flash_mla.get_mla_metadata).parameters)[:3] == ["cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"]
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits", "softmax_scale", "causal",
        "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip


WRONG = {
    "head_dim_v": ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576, expected 512"),
    "fp8": ({"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache: got True, expected False"),
    "sparse": ({"topk_length": torch.zeros(2)}, ValueError, "topk_length: got a tensor, expected None without indices"),
    "sink": ({"attn_sink": torch.zeros(16)}, ValueError, "attn_sink: got a tensor, expected None without indices"),
    "table": ({"block_table": None}, ValueError, "block_table: got None"),
    "lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
    "q": ({"q": None}, ValueError, "q: got None, expected a tensor"),
    "heads": ({"k_cache": torch.zeros(4, 64, 2, 576)}, ValueError, "latent_cache: got nheads_k 2"),
    "headdim": ({"k_cache": torch.zeros(4, 64, 1, 512)}, ValueError, "latent_cache: got headdim 512"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    wrong, error, message = WRONG[name]
    arguments = {
        "q": torch.zeros(2, 1, 16, 576),
        "k_cache": torch.zeros(4, 64, 1, 576),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "head_dim_v": 512,
    }
    flash_mla.flash_mla_with_kvcache(**arguments)
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**{**arguments, **wrong})


def test_wrong_metadata():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="num_heads_k: got 2, expected 1"):
        flash_mla.get_mla_metadata(lengths, 16, 2)
    # of sparse decoding, ignored as the others are
    flash_mla.get_mla_metadata(lengths, 16, 1, is_fp8_kvcache=True, topk=2048)
