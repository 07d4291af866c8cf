"""volta_fa.vllm: mixed batches as a server makes them, through the backend's cache update, metadata and forward, against fp64.

Run with small stand-ins of vLLM's classes (vllm_stub.py), and once more in a process of its own with each vLLM that is named:

Environment:
- VOLTA_FA_TEST_VLLM: folders (separated by colons) in each of which `import vllm` works: the Python files of a release, unpacked, and
  what these import. To make one: `pip download --no-deps vllm==0.33.0`, `unzip` of its
  `vllm/*.py`, `vllm/*.json` and `*/METADATA` into the folder, and
  `pip install --no-deps --target FOLDER -r tools/requirements/vllm.txt`. No GPU and none of its machine code is needed
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import math
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import reference
import vllm_stub
from conftest import REPOSITORY, on, within

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

#: Set by test_real_vllm for the process that it starts.
REAL = "VOLTA_FA_TEST_VLLM_HERE" in os.environ
if not REAL:
    vllm_stub.install()

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import volta_fa.vllm
from volta_fa.integrations.vllm import paged
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaBackend, VoltaMetadataBuilder
from volta_fa.integrations.vllm.mla import VoltaMLABackend, VoltaMLAImpl, VoltaMLAMetadataBuilder

#: vLLM up to 0.26 asks the backend for the cache's shape, and its cache has no room for the scales of int8.
OLD = not REAL or hasattr(importlib.import_module("vllm.v1.attention.backend").AttentionBackend, "get_kv_cache_shape")
#: From 0.26 on, vLLM's layer builds another attention for the prompts of models with latents.
PREFILL = REAL and importlib.util.find_spec("vllm.v1.attention.backends.mla.prefill") is not None
LATER = pytest.mark.skipif(REAL and OLD, reason="vLLM up to 0.26 has no room for the scales of int8")
BACKENDS = on("cpu-fp32", "cpu-fp64", "sim", "cuda")
PAGE = 16


# ---- a server --------------------------------------------------------------------------------------------------------

#: Of a layer's cache, from (blocks, block_size, nheads_k, headdim) of K and of V: how it lies in memory.
LAYOUTS = ["nhd", "hnd", "packed-nhd", "packed-hnd", "packed-layers"]


class Server:
    """Sequences that grow, in a cache whose blocks were dealt out in no order: what vLLM's runner hands to a backend."""

    def __init__(self, backend, layout="nhd", nheads=4, nheads_k=2, headdim=32, block=PAGE, max_blocks=6, sequences=4):
        if backend.machine == "sim":
            backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
        self.backend, self.headdim, self.block = backend, headdim, block
        self.nheads, self.nheads_k = nheads, nheads_k
        blocks = sequences * max_blocks + 1
        order = torch.Generator().manual_seed(backend.seed)
        # block 0 is vLLM's null block
        self.table = (
            (torch.randperm(blocks - 1, generator=order) + 1).int()[: sequences * max_blocks].view(sequences, -1).to(backend.device)
        )
        self.lengths = [0] * sequences
        self.tokens = [[] for _ in range(sequences)]  # of each sequence: the k and v that its cache must have
        self.kv_cache = self.allocate(layout, blocks, 2 * headdim, math.nan, backend.dtype)
        self.spec = SimpleNamespace(head_size=headdim, dtype=torch.float16, block_size=block)
        self.builder = VoltaMetadataBuilder(self.spec, ["layer"], None, torch.device(backend.device))

        self.layer = None

    def allocate(self, layout, blocks, content, value, dtype):
        """A layer's cache full of this value; `content`: elements of a token and head, keys and values together."""
        nheads_k, block, of = self.nheads_k, self.block, dict(dtype=dtype, device=self.backend.device)
        if layout == "nhd":
            return torch.full(VoltaBackend.get_kv_cache_shape(blocks, block, nheads_k, content // 2), value, **of)
        if layout == "hnd":
            return torch.full((blocks, 2, nheads_k, block, content // 2), value, **of).transpose(2, 3)
        if layout == "packed-nhd":
            return torch.full((blocks, block, nheads_k, content), value, **of).transpose(1, 2)
        if layout == "packed-hnd":
            return torch.full((blocks, nheads_k, block, content), value, **of)
        # the second of three layers that share blocks
        return torch.full((blocks, 3, block, nheads_k, content), value, **of)[:, 1].transpose(1, 2)

    def step(self, queries: dict[int, int], padded_requests=0, padded_tokens=0, causal=True):
        """So many new tokens of each of these sequences: q, k, v, the slots, and the metadata that vLLM would make."""
        b = self.backend
        starts = [0, *itertools.accumulate(queries.values())]
        total = starts[-1]
        rows = total + padded_tokens
        q, k, v = b.randn(rows, self.nheads, self.headdim), *(b.randn(rows, self.nheads_k, self.headdim) for _ in range(2))
        slots = [-1] * rows
        for (s, n), first in zip(queries.items(), starts):
            for i in range(n):
                position = self.lengths[s] + i
                slots[first + i] = int(self.table[s, position // self.block]) * self.block + position % self.block
                self.tokens[s].append((k[first + i], v[first + i]))
            self.lengths[s] += n
        slots = torch.tensor(slots, dtype=torch.int64, device=b.device)
        start_loc = b.ints(starts + [total] * padded_requests)
        table = torch.cat([self.table[list(queries)], self.table.new_full((padded_requests, self.table.shape[1]), -1)])
        common = CommonAttentionMetadata(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc.cpu(),
            seq_lens=b.ints([self.lengths[s] for s in queries] + [0] * padded_requests),
            num_reqs=len(queries) + padded_requests,
            num_actual_tokens=rows,
            max_query_len=max(queries.values()),
            max_seq_len=max(self.lengths),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=causal,
        )
        return q, k, v, slots, common

    def check(self, queries: dict[int, int], q, out, **options):
        """Each sequence's rows of out, within the rule of the forward pass."""
        first = 0
        for s, n in queries.items():
            inputs = (q[first : first + n][None], *(torch.stack(t)[None] for t in zip(*self.tokens[s])))
            ref = reference.forward(*inputs, **options)
            within(self.backend, "out", out[first : first + n][None], ref.out, reference.forward_budget(ref, *inputs, **options))
            first += n

    def check_cache(self):
        """What was written is there to the bit, and nothing else."""
        k_cache, v_cache = (t.clone() for t in paged.split_cache(self.kv_cache, self.headdim)[:2])
        for s, tokens in enumerate(self.tokens):
            for i, (k, v) in enumerate(tokens):
                page, row = int(self.table[s, i // self.block]), i % self.block
                assert torch.equal(k_cache[page, row], k) and torch.equal(v_cache[page, row], v)
                k_cache[page, row] = v_cache[page, row] = math.nan
        assert k_cache.isnan().all() and v_cache.isnan().all()


#: The scales of vLLM's layer. (Powers of two, so that fp16 has what fp8 stands for.)
LAYER_SCALES = (0.5, 2.0)
FP8 = ["fp8", "fp8_e4m3", "fp8_e5m2"]
INT8 = "int8_per_token_head"


def quantized(x, kv_cache_dtype, scale):
    """x as a cache of this type has it: codes, a scale if each has one of its own, and what both stand for in x's type."""
    kv_dtype = "int8" if kv_cache_dtype == INT8 else "fp8_e5m2" if kv_cache_dtype == "fp8_e5m2" else "fp8_e4m3"
    made = volta_fa.quantize_kv(x, kv_dtype, scale=None if kv_dtype == "int8" else scale)
    return made.data, made.scale, volta_fa.dequantize_kv(made.data, kv_dtype, made.scale, dtype=x.dtype)


class QuantizedServer(Server):
    """The same with a cache of bytes."""

    def __init__(self, backend, kv_cache_dtype, layout="nhd", **sizes):
        super().__init__(backend, layout, **sizes)
        self.kv_cache_dtype = kv_cache_dtype
        k_scale, v_scale = self.scales = tuple(torch.tensor(x, device=backend.device) for x in LAYER_SCALES)
        self.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
        is_int8 = kv_cache_dtype == INT8
        content = 2 * self.headdim + (paged.SCALE_BYTES if is_int8 else 0)
        # -1 is NaN in both formats of fp8, and as a scale
        self.kv_cache = self.allocate(layout, len(self.kv_cache), content, -1, torch.int8)
        if not is_int8:
            self.kv_cache = self.kv_cache.view(torch.uint8)
        self.codes = self.kv_cache.clone()

    def step(self, queries, **options):
        """The tokens are then what the cache stands for."""
        found = super().step(queries, **options)
        *caches, scales = paged.split_cache(self.codes, self.headdim, self.kv_cache_dtype, self.layer)
        for s, n in queries.items():
            for i in range(self.lengths[s] - n, self.lengths[s]):
                at = int(self.table[s, i // self.block]), i % self.block
                made = [quantized(t, self.kv_cache_dtype, x) for t, x in zip(self.tokens[s][i], self.scales)]
                for name, cache, (codes, scale, _) in zip("kv", caches, made):
                    cache[at] = codes
                    if self.kv_cache_dtype == INT8:
                        scales[f"{name}_scale"][at] = scale
                self.tokens[s][i] = tuple(numbers for *_, numbers in made)
        return found

    def check_cache(self):
        """Codes and scales to the bit, and nothing else."""
        assert torch.equal(self.kv_cache, self.codes)


def implementation(server, **options):
    return VoltaAttentionImpl(server.nheads, server.headdim, server.headdim**-0.5, server.nheads_k, **options)


def run(server, impl, queries, common_prefix_len=0, **padding):
    """One layer's part of a step: q and the rows of output that belong to somebody."""
    q, k, v, slots, common = server.step(queries, **padding)
    metadata = server.builder.build(common_prefix_len, common)
    impl.do_kv_cache_update(server.layer, k, v, server.kv_cache, slots)
    output = torch.full_like(q, math.nan)
    assert impl.forward(server.layer, q, k, v, server.kv_cache, metadata, output) is output
    total = sum(queries.values())
    return q[:total], output[:total]


# ---- mixed batches ---------------------------------------------------------------------------------------------------

#: New tokens of the sequences in each step: prompts, prompts in chunks beside decoding, guesses that are verified, decoding alone.
STEPS = [{0: 21, 1: 5}, {0: 1, 2: 40, 1: 1}, {3: 17, 2: 3, 0: 4}, {0: 1, 1: 1, 2: 1, 3: 1}]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "all": {"sliding_window": 20, "logits_soft_cap": 5.0, "sinks": True},
}


def arguments(backend, name: str) -> tuple[dict, dict]:
    """The implementation's arguments, and the same as the reference has them."""
    given = dict(OPTIONS[name])
    if "sinks" in given:
        given["sinks"] = backend.randn(4)
    same = {"is_causal": True}
    if "sliding_window" in given:
        same["window_left"] = given["sliding_window"] - 1
    if "logits_soft_cap" in given:
        same["softcap"] = given["logits_soft_cap"]
    if "sinks" in given:
        same["sinks"] = given["sinks"]
    if "alibi_slopes" in given:
        same["alibi_slopes"] = torch.tensor(given["alibi_slopes"], device=backend.device)
    return given, same


def serve(backend, name: str, steps, **layout):
    given, same = arguments(backend, name)
    server = Server(backend, **layout)
    impl = implementation(server, **given)
    for queries in steps:
        q, out = run(server, impl, queries)
        server.check(queries, q, out, **same)
    server.check_cache()


@pytest.mark.parametrize("name", OPTIONS)
@BACKENDS
def test_mixed_batches(backend, name):
    serve(backend, name, STEPS)


@BACKENDS
def test_headdim_512(backend):
    serve(backend, "plain", STEPS, headdim=512)


@pytest.mark.parametrize("layout", LAYOUTS)
@on("cpu-fp32", "sim", "cuda")
def test_layouts(backend, layout):
    """The caches of both generations of vLLM, in every order of their dimensions; blocks of 32 and headdim 64 besides."""
    serve(backend, "plain", [{0: 21, 1: 5}, {1: 1, 0: 2}], layout=layout, block=32, headdim=64, max_blocks=2)


@pytest.mark.parametrize(
    "kv_cache_dtype,layout",
    [(dtype, layout) for dtype in FP8 for layout in ("nhd", "packed-hnd")] + [(INT8, layout) for layout in LAYOUTS if "packed" in layout],
)
@BACKENDS
def test_quantized_caches(backend, kv_cache_dtype, layout):
    """Bytes to the bit, and attention to what they stand for, also of more rows than decode kernels have."""
    server = QuantizedServer(backend, kv_cache_dtype, layout=layout)
    impl = implementation(server, kv_cache_dtype=kv_cache_dtype)
    for queries in STEPS:
        q, out = run(server, impl, queries)
        server.check(queries, q, out, is_causal=True)
    server.check_cache()


@on("sim", "cuda")
def test_captured_cuda_graph(backend, monkeypatch):
    """What the host decides stays as it was for the capture, metadata too; steps come as new values in the runner's buffers, padded:
    requests without tokens, rows that belong to nobody, slots of -1. (On a GPU, where nobody looks at values.)"""
    monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    server = Server(backend)
    impl = implementation(server)
    rows, requests = 48, 4
    metadata = captured = None
    for queries in [{3: 40}, *STEPS]:
        q, k, v, slots, common = server.step(queries, padded_requests=requests - len(queries), padded_tokens=rows - sum(queries.values()))
        if captured is None:
            common.max_query_len = rows
            captured, metadata = common, server.builder.build_for_cudagraph_capture(common)
        for name, t in vars(common).items():
            if isinstance(t, torch.Tensor):
                getattr(captured, name).copy_(t)
        paged.write_slots(k, v, *paged.split_cache(server.kv_cache, server.headdim)[:2], captured.slot_mapping)
        output = torch.full_like(q, math.nan)
        impl.forward(None, q, k, v, server.kv_cache, metadata, output)
        server.check(queries, q, output, is_causal=True)
    server.check_cache()


@BACKENDS
def test_slots_in_any_order(backend):
    """Rejected guesses in the middle are left out, more rows than slots are padding, and no slot at all is nothing to do."""
    server = Server(backend)
    k_cache, v_cache, _ = paged.split_cache(server.kv_cache, server.headdim)
    k, v = backend.randn(6, 2, 32), backend.randn(6, 2, 32)
    slots = torch.tensor([70, -1, 33, 17, -1], device=backend.device)
    paged.write(k, v, k_cache, v_cache, slots)
    paged.write(k, v, k_cache, v_cache, slots[:0])
    paged.write(k, v, k_cache, v_cache, slots[1:2])
    for i in (0, 2, 3):
        page, row = divmod(int(slots[i]), PAGE)
        for cache, new in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[page, row], new[i])
            cache[page, row] = math.nan
    assert k_cache.isnan().all() and v_cache.isnan().all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", INT8])
@on("cpu-fp32", "sim", "cuda")  # the states that are merged have fp32's softmax_lse
def test_cascade(backend, kv_cache_dtype):
    """Sequences that begin with the same two blocks, by vLLM's common_prefix_len; reading them once makes no difference."""
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, layout="packed-nhd")
    impl = implementation(server, sinks=backend.randn(4), logits_soft_cap=5.0, kv_cache_dtype=kv_cache_dtype)
    run(server, impl, {0: 32})
    for s in (1, 2):
        server.table[s, :2] = server.table[0, :2]
        server.tokens[s], server.lengths[s] = list(server.tokens[0]), 32
    queries = {0: 3, 1: 1, 2: 9}
    q, out = run(server, impl, queries, common_prefix_len=32)
    server.check(queries, q, out, is_causal=True, softcap=5.0, sinks=impl.sinks)


@pytest.mark.parametrize("window", [None, 4])
@BACKENDS
def test_encoder(backend, window):
    """In both directions, without a cache."""
    server = Server(backend)
    impl = implementation(server, attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
    queries = {0: 9, 1: 20}
    q, k, v, slots, common = server.step(queries, causal=False)
    empty = torch.empty(0, dtype=backend.dtype, device=backend.device)
    impl.do_kv_cache_update(None, k, v, empty, slots)
    output = impl.forward(None, q, k, v, empty, server.builder.build(0, common), torch.full_like(q, math.nan))
    sides = {} if window is None else {"window_left": window - 1, "window_right": window - 1}
    server.check(queries, q, output, **sides)


@BACKENDS
def test_cross_attention(backend):
    """Of a decoder to what an encoder has written: all tokens, whatever the number of queries. key and value are None."""
    server = Server(backend)
    impl = implementation(server, attn_type=AttentionType.ENCODER_DECODER)
    _, k, v, slots, common = server.step({0: 18, 1: 7})
    impl.do_kv_cache_update(None, k, v, server.kv_cache, slots)
    queries = {0: 2, 1: 3}
    q, starts = backend.randn(5, 4, 32), backend.ints([0, 2, 5])
    metadata = server.builder.build(
        0, CommonAttentionMetadata(starts, starts, common.seq_lens, 2, 5, 3, 18, common.block_table_tensor, slots, False)
    )
    # (tokens, nheads * headdim), as some layers have it
    output = impl.forward(None, q, None, None, server.kv_cache, metadata, torch.full((5, 128), math.nan, dtype=q.dtype, device=q.device))
    server.check(queries, q, output.view(5, 4, 32))


# ---- latent attention --------------------------------------------------------------------------------------------------


def latent_implementation(kv_lora_rank, rotary, nheads=4, **options):
    names = ("num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap", "attn_type")
    given = dict(zip(names, (1, None, None, "auto", None, AttentionType.DECODER)), kv_sharing_target_layer_name=None) | options
    dims = dict(q_lora_rank=None, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=32, qk_rope_head_dim=rotary, qk_head_dim=32 + rotary)
    return VoltaMLAImpl(nheads, kv_lora_rank + rotary, (kv_lora_rank + rotary) ** -0.5, **given, **dims, v_head_dim=32, kv_b_proj=None)


def latent_cache(kv_cache_dtype, columns, blocks=25, of=None):
    """What vLLM allocates: NaN, as a scale too."""
    if kv_cache_dtype == "auto":
        return torch.full((blocks, PAGE, columns), math.nan, dtype=of.dtype, device=of.device)
    content = columns + (paged.SCALE_BYTES if kv_cache_dtype == INT8 else 0)
    return torch.full((blocks, PAGE, content), -1, dtype=torch.int8, device=of.device)


def latent_bytes(row, kv_cache_dtype, scale):
    """A token's content of the cache, and what it stands for."""
    if kv_cache_dtype == "auto":
        return row, row
    codes, own, numbers = quantized(row[None], kv_cache_dtype, scale)
    if kv_cache_dtype != INT8:
        return codes[0].view(torch.int8), numbers[0]
    beside = torch.zeros(paged.SCALE_BYTES, dtype=torch.int8, device=row.device)
    beside[:4] = own.view(torch.int8)
    return torch.cat((beside, codes[0])), numbers[0]


LATENT_DTYPES = ["auto", *FP8, INT8]


@pytest.mark.parametrize("kv_cache_dtype", LATENT_DTYPES)
@pytest.mark.parametrize("rank,rotary", [(64, 16), (512, 64)])
@BACKENDS
def test_latents(backend, rank, rotary, kv_cache_dtype):
    """Mixed batches over small latents and DeepSeek's; values are the keys' first columns. Bytes to the bit, padding between tokens."""
    if not paged.takes_latents(rank + rotary, rank):
        pytest.skip("this build has no fwd_mla")
    impl = latent_implementation(rank, rotary, kv_cache_dtype=kv_cache_dtype)
    server = Server(backend, nheads_k=1, headdim=rank + rotary)
    cache = server.kv_cache = latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
    expected = cache.clone()
    layer = SimpleNamespace(_k_scale=torch.tensor(LAYER_SCALES[0], device=backend.device))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device(backend.device))
    for queries in STEPS:
        q, k, _, slots, common = server.step(queries)
        for s, n in queries.items():
            for i in range(server.lengths[s] - n, server.lengths[s]):
                made, numbers = latent_bytes(server.tokens[s][i][0][0], kv_cache_dtype, layer._k_scale)
                expected[server.table[s, i // PAGE], i % PAGE] = made
                server.tokens[s][i] = numbers[None], numbers[None, :rank]
        metadata = builder.build(0, common)
        # as vLLM's layer divides the batch
        assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (len(queries), len(q), 0)
        assert metadata.decode is not None and metadata.prefill is None
        k = torch.cat((k, backend.randn(3, 1, rank + rotary)))  # of nobody
        impl.do_kv_cache_update(k[:, 0, :rank], k[..., rank:], cache, slots, kv_cache_dtype, layer._k_scale, True)
        seen = cache if kv_cache_dtype == "auto" else cache.view(torch.float8_e4m3fn)  # as vLLM's layer hands it over
        out, lse = impl.forward_mqa(q.split((rank, rotary), dim=-1), seen, metadata, layer)
        assert lse is None and torch.equal(out, impl.forward_mqa(q, seen, metadata, layer)[0])
        server.check(queries, q, out, is_causal=True, softmax_scale=impl.scale)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kv_cache_dtype", LATENT_DTYPES)
@BACKENDS
def test_latents_of_deepseek_are_written(backend, kv_cache_dtype):
    """512 columns and 64, behind rows of padding, through slots that leave tokens out."""
    server = Server(backend)
    cache = latent_cache(kv_cache_dtype, 576, blocks=5, of=server.kv_cache)
    expected = cache.clone()
    latent, rotary = backend.randn(6, 512), backend.randn(6, 1, 64)
    latent[2, 7] = math.inf  # of a token that has a number that is none, int8 says so by its scale
    slots = torch.tensor([70, -1, 33, 17], device=backend.device)
    scale = torch.tensor(LAYER_SCALES[0], device=backend.device)
    paged.write_latents(latent, rotary, cache, slots, kv_cache_dtype, scale)
    for i in (0, 2, 3):
        made, _ = latent_bytes(torch.cat([latent[i], rotary[i, 0]]), kv_cache_dtype, scale)
        expected[int(slots[i]) // PAGE, int(slots[i]) % PAGE] = made
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_latents_that_there_are_no_kernels_for():
    """Named, where the operator refuses the size; vLLM is told before."""
    there = paged.takes_latents(576, 512)
    assert VoltaMLABackend.is_mla() and (576 in VoltaMLABackend.get_supported_head_sizes()) == there
    assert paged.takes_latents(80, 64) and VoltaMLABackend.get_supported_head_sizes()
    if not there:
        with pytest.raises(NotImplementedError, match="head_size: got 576 with kv_lora_rank 512"):
            latent_implementation(512, 64)
    with pytest.raises(NotImplementedError, match="head_size: got 4160"):
        latent_implementation(4096, 64)
    with pytest.raises(NotImplementedError, match="sliding_window: got 5, expected None"):
        latent_implementation(64, 16, sliding_window=5)
    for dtype in ("fp8_ds_mla", "fp8_per_token_head"):
        with pytest.raises(NotImplementedError, match=f"kv_cache_dtype: got {dtype}, expected auto or float16 or fp8 or .*: "):
            latent_implementation(64, 16, kv_cache_dtype=dtype)
        with pytest.raises(NotImplementedError, match=f"kv_cache_dtype: got {dtype}, expected auto or float16 or fp8 or .*: "):
            VoltaMLABackend.get_kv_cache_shape(25, PAGE, 1, 80, dtype)
        assert dtype not in VoltaMLABackend.supported_kv_cache_dtypes
    with pytest.raises(NotImplementedError, match="forward_mha"):
        latent_implementation(64, 16).forward_mha(None)


# ---- metadata ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8, INT8])
@on("cpu-fp32")
def test_nothing_waits(backend, kv_cache_dtype):
    """Tensors without values: whoever looks at one raises. Building, writing and attending, with a cascade too, and to latents."""
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, "packed-nhd")
    q, k, v, slots, common = server.step({0: 21, 1: 5})
    latents = latent_cache(kv_cache_dtype, 576, of=server.kv_cache)
    q, k, v, slots, kv_cache, latents = (t.to("meta") for t in (q, k, v, slots, server.kv_cache, latents))
    layer = SimpleNamespace(_k_scale=torch.empty((), device="meta"), _v_scale=torch.empty((), device="meta"))
    for name, t in vars(common).items():
        if isinstance(t, torch.Tensor) and name != "query_start_loc_cpu":
            setattr(common, name, t.to("meta"))
    impl = implementation(server, alibi_slopes=[0.5] * 4, kv_cache_dtype=kv_cache_dtype)
    for prefix in (0, 16):
        if prefix:
            impl = implementation(server, kv_cache_dtype=kv_cache_dtype)
        metadata = server.builder.build(prefix, common)
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
        assert impl.forward(layer, q, k, v, kv_cache, metadata, torch.empty_like(q)).shape == q.shape
    mla = latent_implementation(512, 64, kv_cache_dtype=kv_cache_dtype)
    metadata = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device("meta")).build(0, common)
    made = torch.empty(26, 576, device="meta").split((512, 64), dim=-1)
    mla.do_kv_cache_update(*made, latents, slots, kv_cache_dtype, layer._k_scale)
    out, _ = mla.forward_mqa(torch.empty(26, 4, 576, device="meta"), latents, metadata, layer)
    assert out.shape == (26, 4, 512)


@on("cpu-fp32")
def test_metadata_is_the_runners(backend):
    """A captured graph reads the runner's buffers: the tensors are they, and no copies."""
    server = Server(backend)
    *_, common = server.step({0: 21, 1: 5})
    metadata = server.builder.build(0, common, fast_build=True)
    assert metadata.query_start_loc is common.query_start_loc and metadata.seq_lens is common.seq_lens
    assert metadata.block_table is common.block_table_tensor and metadata.slot_mapping is common.slot_mapping
    assert (metadata.num_actual_tokens, metadata.max_query_len, metadata.max_seq_len, metadata.causal) == (26, 21, 21, True)
    assert VoltaMetadataBuilder._cudagraph_support is AttentionCGSupport.ALWAYS
    common.causal = torch.ones(2, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="causal: got a tensor"):
        server.builder.build(0, common)


@on("cpu-fp32")
def test_when_a_cascade_pays(backend):
    """Bytes that are read once instead of once a sequence: 8 key heads of 128 are 4 KB a token."""
    builder = VoltaMetadataBuilder(SimpleNamespace(head_size=128, dtype=torch.float16, block_size=16), [], None, torch.device("cpu"))
    names = ("use_alibi", "use_sliding_window", "use_local_attention")
    options = dict.fromkeys(names, False) | {"num_query_heads": 32, "num_kv_heads": 8, "num_sms": 80, "dcp_world_size": 1}

    def pays(prefix, requests, **other):
        return builder.use_cascade_attention(common_prefix_len=prefix, query_lens=[1] * requests, **options | other)

    assert pays(2048, 4) and pays(16384, 2) and not pays(2048, 2) and not pays(2048, 1) and not pays(256, 8)
    assert not any(pays(16384, 8, **{name: True}) for name in names) and not pays(16384, 8, dcp_world_size=2)


# ---- what vLLM asks before -----------------------------------------------------------------------------------------------


def test_registration(monkeypatch):
    from vllm.v1.attention.backends import registry

    for _ in range(2):
        volta_fa.vllm.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is VoltaBackend
    assert VoltaBackend.get_name() == AttentionBackendEnum.CUSTOM.name
    monkeypatch.setenv("VOLTA_FA_VLLM_MLA", "1")
    volta_fa.vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is VoltaMLABackend and VoltaMLABackend.get_name() == "CUSTOM"
    monkeypatch.setenv("VOLTA_FA_VLLM_MLA", "yes")
    with pytest.raises(ValueError, match="VOLTA_FA_VLLM_MLA: got `yes`, expected 0 or 1"):
        volta_fa.vllm.register()
    monkeypatch.delenv("VOLTA_FA_VLLM_MLA")
    # an older vLLM starts all the same
    monkeypatch.delattr(registry, "register_backend")
    with pytest.warns(UserWarning, match="no registry of attention backends"):
        volta_fa.vllm.register()


def test_entry_point():
    """What pip writes into the distribution's metadata names a function that is there."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"vllm.general_plugins": {"volta_fa": "volta_fa.vllm:register"}}


def test_answers():
    assert VoltaBackend.get_impl_cls() is VoltaAttentionImpl and VoltaBackend.get_builder_cls() is VoltaMetadataBuilder
    assert not VoltaBackend.forward_includes_kv_cache_update
    assert [size.base for size in VoltaBackend.get_supported_kernel_block_sizes()] == [16]
    assert VoltaBackend.supports_sink() and VoltaBackend.supports_sliding_window() and VoltaBackend.supports_non_causal()
    assert all(VoltaBackend.supports_attn_type(kind) for kind in AttentionType)
    capabilities = {(7, 0): True, (7, 5): True, (9, 0): True, (6, 1): False}
    assert {pair: VoltaBackend.supports_compute_capability(DeviceCapability(*pair)) for pair in capabilities} == capabilities
    sizes = VoltaBackend.get_supported_head_sizes()
    assert {64, 80, 96, 128, 256, 512} < set(sizes) and not {100, 520, 576} & set(sizes)
    with pytest.raises(ValueError, match="block_size: got 24, expected a multiple of 16"):
        VoltaBackend.get_kv_cache_shape(3, 24, 2, 64)
    # for later releases: what lies beside int8's codes, of a latent one scale
    spec = dataclasses.make_dataclass("Spec", [("dtype", torch.dtype), "head_size", "head_size_v", ("state_content_bytes", object, None)])
    assert VoltaBackend.customize_spec(spec(torch.int8, 128, 64)).state_content_bytes == 128 + 64 + 16
    assert VoltaMLABackend.customize_spec(spec(torch.int8, 576, 0)).state_content_bytes == 576 + 16
    assert VoltaBackend.customize_spec(spec(torch.uint8, 128, 64)).state_content_bytes is None


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.skipif(not OLD, reason="this vLLM lays caches out itself")
def test_strides(layout, layers, monkeypatch):
    """As vLLM's runner allocates: in the order of memory, then permuted back. A head's rows of a block with HND, a token's heads with NHD,
    are one piece."""
    monkeypatch.setattr(importlib.import_module("vllm.v1.attention.backends.utils"), "get_kv_cache_layout", lambda: layout)
    shape = ((3,) if layers else ()) + VoltaBackend.get_kv_cache_shape(5, 16, 2, 64)
    order = VoltaBackend.get_kv_cache_stride_order(layers)
    assert sorted(order) == list(range(len(shape)))
    cache = torch.empty([shape[i] for i in order]).permute(*(order.index(i) for i in range(len(order))))
    assert cache.shape == shape
    k_cache, v_cache, _ = paged.split_cache(cache[1] if layers else cache, 64)
    assert k_cache.shape == v_cache.shape == (5, 16, 2, 64)
    assert k_cache.stride(3) == 1
    count = 3 if layers else 1
    # a block of all layers is one piece; within it, of HND a head of all layers
    assert k_cache.stride() == (count * 2 * 16 * 2 * 64, *((2 * 64, 64) if layout == "NHD" else (64, count * 16 * 64)), 1)


def test_refusals():
    server = SimpleNamespace(nheads=4, headdim=32, nheads_k=2)
    for dtype, why in (("fp8_inc", "read no others"), ("int4_per_token_head", "read no others"), ("bfloat16", "no bfloat16")):
        with pytest.raises(NotImplementedError, match=f"kv_cache_dtype: got {dtype}, expected auto or float16 or fp8 or .*: .*{why}"):
            implementation(server, kv_cache_dtype=dtype)
        assert dtype not in VoltaBackend.supported_kv_cache_dtypes
    why = "kv_cache_dtype: got int8_per_token_head, expected auto .* or fp8_e5m2: a cache of this vLLM has no room for a scale"
    for backend in (VoltaBackend, VoltaMLABackend):
        with pytest.raises(NotImplementedError, match=why):
            backend.get_kv_cache_shape(25, PAGE, 1, 64, INT8)
        # vLLM asks before it loads a model
        assert (INT8 in backend.supported_kv_cache_dtypes) == (not OLD) and "fp8" in backend.supported_kv_cache_dtypes
    with pytest.raises(NotImplementedError, match=why):
        paged.split_cache(torch.zeros(3, 2, PAGE, 2, 48, dtype=torch.int8), 32, INT8)
    q = torch.randn(3, 4, 32)
    impl = implementation(server)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name}: got a tensor"):
            impl.forward(None, q, q, q, q, None, q, **{name: q})
    assert (impl.forward(None, q, q, q, q, None, torch.full_like(q, math.nan)) == 0).all(), "while vLLM measures memory"
    with pytest.raises(ValueError, match=r"kv_cache: got shape \(3, 4, 32\)"):
        paged.split_cache(q, 32)


# ---- real releases ---------------------------------------------------------------------------------------------------------


def members(cls):
    return {name: member for name, member in vars(cls).items() if inspect.isfunction(getattr(member, "__func__", member))}


@pytest.mark.skipif(not REAL, reason="no vLLM")
def test_standins_are_like_vllm():
    """The methods that stand-ins have are there, and take the same arguments in the same order, of which newer ones may be more."""
    for module, standins in vllm_stub.MODULES.items():
        for standin in standins:
            name = f"{module}.{standin.__name__}"
            real = getattr(importlib.import_module(module), standin.__name__, None)
            if standin is vllm_stub.get_kv_cache_layout and not OLD:
                continue
            assert real is not None, name
            if not inspect.isclass(standin):
                assert list(inspect.signature(standin).parameters) == list(inspect.signature(real).parameters), name
                continue
            for method, member in members(standin).items():
                if method == "__class_getitem__":
                    continue
                theirs = inspect.getattr_static(real, method)
                assert type(theirs) is type(member), f"{name}.{method}"
                ours, theirs = (list(inspect.signature(getattr(f, "__func__", f)).parameters) for f in (member, theirs))
                assert ours == theirs[: len(ours)], f"{name}.{method}"
    fields = CommonAttentionMetadata.__dataclass_fields__
    assert list(fields)[:9] == list(vllm_stub.CommonAttentionMetadata.__dataclass_fields__)[:9] and "causal" in fields


@pytest.mark.skipif(not REAL, reason="no vLLM")
def test_vllm_takes_the_backend():
    """vLLM's own checks of a choice, with its own question: on a V100 yes, and no for what is not there."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    def reasons(capability=(7, 0), **options):
        asked = AttentionSelectorConfig(**dict(head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=16) | options)
        return VoltaBackend.validate_configuration(device_capability=DeviceCapability(*capability), **asked._asdict())

    assert (
        reasons()
        == reasons(has_sink=True)
        == reasons(head_size=512)
        == reasons(head_size=256, block_size=48)
        == reasons((7, 5), kv_cache_dtype="float16")
        == []
    )
    assert (
        reasons(dtype=torch.bfloat16) == ["dtype not supported"]
        and reasons(kv_cache_dtype="fp8") == reasons(kv_cache_dtype="fp8_e5m2") == []
    )
    assert reasons(kv_cache_dtype=INT8) == (["kv_cache_dtype not supported"] if OLD else [])
    assert reasons(kv_cache_dtype="fp8_inc") == ["kv_cache_dtype not supported"]
    assert reasons(head_size=520) == ["head_size not supported"] and reasons(use_mla=True) == ["MLA not supported"]
    assert reasons((6, 0)) == ["compute capability not supported"] and reasons(block_size=8) == ["block_size not supported"]
    if "has_sliding_window" in AttentionSelectorConfig._fields:
        assert reasons(has_sliding_window=True) == reasons(use_non_causal=True) == []


@pytest.mark.skipif(not REAL or OLD, reason="vLLM asks the backend for the shape")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", INT8])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
@on("cpu-fp32")
def test_vllm_lays_the_cache_out(backend, layout, kv_cache_dtype):
    """vLLM's own views of the memory of two layers, with room for what int8 has beside its codes."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.worker.utils import customize_attention_spec

    dtype = torch.int8 if kv_cache_dtype == INT8 else torch.float32
    mode = interface.get_kv_quant_mode(kv_cache_dtype)
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=dtype, kv_quant_mode=mode)
    spec = customize_attention_spec(VoltaBackend, spec)
    assert spec.page_size_bytes == 16 * 2 * (64 + 16 if kv_cache_dtype == INT8 else 256)
    blocks, layers = 25, ["a", "b"]
    layout = interface.KVCacheLayout[layout]
    layer_stride, block_stride, *_ = interface.compute_layout_strides(spec, blocks, len(layers), layout)
    memory = torch.zeros(len(layers) * blocks * spec.page_size_bytes, dtype=torch.int8)
    tensor = interface.KVCacheTensor(memory.numel(), layers, layer_stride, block_stride)
    views = interface.create_kv_cache_views(memory, spec, blocks, layout, tensor)
    server = QuantizedServer(backend, INT8, "packed-hnd") if kv_cache_dtype == INT8 else Server(backend, "packed-hnd")
    for view in views:
        assert view.shape == server.kv_cache.shape and view.dtype == server.kv_cache.dtype
        view.copy_(server.kv_cache)
    server.kv_cache = views[1]
    impl = implementation(server, kv_cache_dtype=kv_cache_dtype)
    for queries in STEPS[:2]:
        q, out = run(server, impl, queries)
        server.check(queries, q, out, is_causal=True)
    server.check_cache()
    assert views[0].isnan().all() or (views[0] == -1).all()


@pytest.mark.skipif(not REAL, reason="no vLLM")
def test_vllm_finds_the_plugin(tmp_path, monkeypatch):
    """By the entry point of a distribution, as pip installs it."""
    from vllm import plugins

    metadata = tmp_path / "volta_fa-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: volta-fa\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nvolta_fa = volta_fa.vllm:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_PLUGINS", "volta_fa")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    plugins.load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_class() is VoltaBackend


@pytest.mark.skipif(not REAL, reason="no vLLM")
def test_vllm_chooses_the_backend(monkeypatch):
    """vLLM's platform for CUDA, told that the card is a V100, asked as `--attention-backend CUSTOM` asks."""
    from vllm.config import AttentionConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

    for name in ("vllm._C", "vllm._C_stable_libtorch"):  # machine code, imported and not used here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.cuda import CudaPlatformBase

    class V100(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(7, 0))

    volta_fa.vllm.register()
    choice = AttentionConfig(backend="CUSTOM").backend
    asked = AttentionSelectorConfig(head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=16)
    assert V100.get_attn_backend_cls(choice, asked) == volta_fa.vllm.BACKEND
    with pytest.raises(ValueError, match="MLA not supported"):
        V100.get_attn_backend_cls(choice, asked._replace(use_mla=True))


@pytest.mark.skipif(not REAL, reason="no vLLM")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2", "fp8", pytest.param(INT8, marks=LATER)])
@on("cpu-fp32")
def test_vllm_layer(backend, kv_cache_dtype, monkeypatch):
    """vLLM's own attention layer, in its forward context: who calls the cache update and forward, and with what."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention.attention import Attention

    volta_fa.vllm.register()
    layout = "nhd" if OLD else "packed-nhd"
    server = Server(backend, layout=layout) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, layout=layout)
    cache = CacheConfig(cache_dtype=kv_cache_dtype)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        options = {"num_kv_heads": 2, "per_layer_sliding_window": 7, "prefix": "layer", "attn_backend": VoltaBackend}
        layer = Attention(4, 32, 32**-0.5, cache_config=cache, **options)
    if kv_cache_dtype.startswith("fp8"):
        assert layer._k_scale == layer._v_scale == 1.0
        for scale, x in zip((layer._k_scale, layer._v_scale), LAYER_SCALES):
            scale.fill_(x)
    assert isinstance(layer.impl, VoltaAttentionImpl) and layer.backend is AttentionBackendEnum.CUSTOM
    layer.kv_cache = server.kv_cache
    for queries in STEPS:
        q, k, v, slots, common = server.step(queries)
        metadata = {"layer": server.builder.build(0, common)}
        with torch.inference_mode(), set_current_vllm_config(config), set_forward_context(metadata, config, slot_mapping={"layer": slots}):
            out = layer(*(t.flatten(1) for t in (q, k, v)))
        server.check(queries, q, out.view_as(q), is_causal=True, window_left=6)
    server.check_cache()


@pytest.mark.skipif(not REAL, reason="no vLLM")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8, pytest.param(INT8, marks=LATER)])
@on("cpu-fp32")
def test_vllm_latent_layer(backend, kv_cache_dtype, monkeypatch, tmp_path):
    """vLLM's own layer of latent attention, which multiplies the up-projections into queries and outputs, against attention to expanded
    keys and values: prompts, chunks and decoding."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.platforms import current_platform

    monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *args, **kwargs: VoltaMLABackend)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(7, 0)))
    heads, rank, rotary, nope, columns = 4, 64, 16, 32, 24
    cached = CacheConfig(cache_dtype=kv_cache_dtype, **{} if OLD else {"block_size": PAGE})
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{tmp_path}/rendezvous", backend="gloo"
        )
        parallel_state.initialize_model_parallel()
        projection = ColumnParallelLinear(rank, heads * (nope + columns), bias=False)
        projection.weight.data = backend.randn(heads * (nope + columns), rank) * rank**-0.5
        dims = dict(qk_nope_head_dim=nope, qk_rope_head_dim=rotary, v_head_dim=columns, q_lora_rank=None, kv_lora_rank=rank)
        layer = mla_attention.MLAAttention(num_heads=heads, scale=0.2, kv_b_proj=projection, prefix="layer", cache_config=cached, **dims)
        layer.process_weights_after_loading(torch.float32)
    try:
        assert isinstance(layer.impl, VoltaMLAImpl)
        # vLLM finds no attention for prompts beside it that could fail on a card, and does not take it for a sparse one
        assert type(getattr(layer, "prefill_backend", None)).__name__ == ("NoPrefill" if PREFILL else "NoneType")
        assert not getattr(layer.impl, "is_sparse", False)
        server = Server(backend, nheads_k=1, headdim=rank + rotary)
        layer.kv_cache = latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
        layer._k_scale.fill_(LAYER_SCALES[0])
        if not OLD:
            config.cache_config.block_size, config.model_config = PAGE, SimpleNamespace(dtype=torch.float32)
            from vllm.v1.worker.utils import customize_attention_spec

            spec = customize_attention_spec(VoltaMLABackend, layer.get_kv_cache_spec(config))
            assert (PAGE, 1, spec.page_size_bytes) == (spec.block_size, spec.num_heads, layer.kv_cache[0].nbytes)
        builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device("cpu"))
        for queries in STEPS:
            _, latents, _, slots, common = server.step(queries)
            latent, k_pe = latents.split((rank, rotary), dim=-1)
            cached_numbers = torch.stack([latent_bytes(row, kv_cache_dtype, layer._k_scale)[1] for row in latents[:, 0]])[:, None]
            seen, seen_pe = cached_numbers.split((rank, rotary), dim=-1)
            k_nope, v = (seen[:, 0] @ projection.weight.T).view(-1, heads, nope + columns).split((nope, columns), dim=-1)
            k = torch.cat([k_nope, seen_pe.expand(-1, heads, -1)], -1)
            first = 0
            for s, n in queries.items():
                server.tokens[s][-n:] = zip(k[first : first + n], v[first : first + n])
                first += n
            q = backend.randn(len(latents), heads, nope + rotary)
            metadata = {"layer": builder.build(0, common)}
            with (
                torch.inference_mode(),
                set_current_vllm_config(config),
                set_forward_context(metadata, config, slot_mapping={"layer": slots}),
            ):
                out = layer(q, latent[:, 0], k_pe, output_shape=(len(q), heads * columns))
            first = 0
            for s, n in queries.items():
                inputs = (q[first : first + n][None], *(torch.stack(t)[None] for t in zip(*server.tokens[s])))
                expected = reference.forward(*inputs, is_causal=True, softmax_scale=0.2).out[0].float()
                # products in another order than those of expanded keys: fp32's rounding, of sums of 64
                torch.testing.assert_close(out.view(-1, heads, columns)[first : first + n], expected, rtol=1e-5, atol=1e-5)
                first += n
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


FOLDERS = [folder for folder in os.environ.get("VOLTA_FA_TEST_VLLM", "").split(":") if folder]


@pytest.mark.parametrize(
    "folder", FOLDERS or [pytest.param("", marks=pytest.mark.skip("VOLTA_FA_TEST_VLLM names no vLLM"))], ids=os.path.basename
)
@pytest.mark.skipif(REAL, reason="this is it")
def test_real_vllm(folder):
    """The same tests, and those of its own, with a real release."""
    path = [folder, str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "VOLTA_FA_TEST_VLLM_HERE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", __file__]
    result = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
