"""volta_fa.vllm: mixed batches as a server makes them, through the backend's cache update, metadata and forward, against fp64.

Run with small stand-ins of vLLM's classes (vllm_stub.py), and once more in a process of its own with each vLLM that is named:

Environment:
- VOLTA_FA_TEST_VLLM: folders (separated by colons) in each of which `import vllm` works: the Python files of a release, unpacked, and
  what these import. To make one: `pip download --no-deps vllm==0.33.0`, `unzip` of its
  `vllm/*.py`, `vllm/*.json` and `*/METADATA` into the folder, and
  `pip install --no-deps --target FOLDER -r tools/requirements/vllm.txt`. No GPU and none of its machine code is needed
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
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

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

import volta_fa.vllm
from volta_fa.integrations.vllm import expanded, mla, paged
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
        backend.simulate()
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
            max_seq_len=max(self.lengths[s] for s in queries),
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
    given = (
        dict(zip(names, (1, None, None, "auto", None, AttentionType.DECODER)), kv_sharing_target_layer_name=None, kv_b_proj=None) | options
    )
    dims = dict(q_lora_rank=None, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=32, qk_rope_head_dim=rotary, qk_head_dim=32 + rotary)
    return VoltaMLAImpl(nheads, kv_lora_rank + rotary, (kv_lora_rank + rotary) ** -0.5, **given, **dims, v_head_dim=32)


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
        assert metadata.decode is metadata and metadata.prefill is None
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


@pytest.mark.parametrize("workspace", [expanded._WORKSPACE, 1], ids=["whole", "chunks"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2", INT8])
@on("cpu-fp32", "sim", "cuda")
def test_long_prompts(backend, kv_cache_dtype, workspace, monkeypatch):
    """Sequences with more new tokens than a limit attend to expanded keys: without earlier tokens, and with those of the cache."""
    rank, rotary, nope, columns, most = 64, 16, 32, 32, 4
    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", most)
    monkeypatch.setattr(expanded, "_WORKSPACE", workspace)
    server = Server(backend, nheads_k=1, headdim=rank + rotary)
    weight = backend.randn(rank, server.nheads * (nope + columns)) * rank**-0.5
    impl = latent_implementation(
        rank, rotary, kv_cache_dtype=kv_cache_dtype, kv_b_proj=lambda latent: (latent.to(weight.dtype) @ weight, None)
    )
    cache = server.kv_cache = latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
    layer = SimpleNamespace(_k_scale=torch.tensor(LAYER_SCALES[0], device=backend.device))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device(backend.device))
    sequences = [[] for _ in server.lengths]  # of the keys and values that the cache stands for
    for queries in ({0: 21, 1: 5}, {0: 1, 1: 4, 2: 40}, {0: 4, 2: 3, 1: 17, 3: 33}, {0: 2, 3: 5, 1: 30}):
        _, new, _, slots, common = server.step(queries)
        q = backend.randn(len(new), server.nheads, nope + rotary)
        assert builder.build(0, common).prefill is None  # without lengths on the host
        common.seq_lens_cpu_upper_bound = torch.tensor([server.lengths[s] + 20 * (s == 1) for s in queries])
        metadata = builder.build(0, common)
        prompts = [s for s, n in queries.items() if n > most]
        decoded = sum(n for n in queries.values() if n <= most)
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (len(queries) - len(prompts), decoded)
        assert metadata.num_prefills == len(prompts) == len(queries) - list(queries).index(prompts[0])
        # the blocks that are expanded: only those of earlier tokens, and of a bound that is too high
        earlier = [server.lengths[s] - queries[s] + 20 * (s == 1) for s in prompts]
        for blocks in (1, 2, 100):
            parts = metadata.prefill.parts(PAGE, blocks)
            assert sum(len(part.blocks) for part in parts) == sum(-(-n // PAGE) for n in earlier)
            assert all(0 < len(part.blocks) <= blocks for part in parts)
        assert (metadata.decode is None) == (decoded == 0)
        latent, k_pe = new[..., :rank], new[..., rank:]
        impl.do_kv_cache_update(latent[:, 0], k_pe, cache, slots, kv_cache_dtype, layer._k_scale, True)
        seen = cache if kv_cache_dtype == "auto" else cache.view(torch.float8_e4m3fn)
        out = torch.full((len(q) - decoded, server.nheads * columns), math.nan, dtype=q.dtype, device=q.device)
        impl.forward_mha(q[decoded:], latent[decoded:, 0], k_pe[decoded:], seen, metadata, layer._k_scale, out)
        exact = [list(zip(*impl.expansion.keys_and_values(t[:, 0, :rank], t[:, 0, rank:]))) for t in new.split(list(queries.values()))]
        for (s, n), tokens in zip(queries.items(), exact):
            server.tokens[s] = sequences[s] + tokens
            numbers = torch.stack([latent_bytes(row, kv_cache_dtype, layer._k_scale)[1] for row in new[:n, 0]])
            new = new[n:]
            sequences[s] += zip(*impl.expansion.keys_and_values(numbers[:, :rank], numbers[:, rank:]))
        of_prompts = {s: queries[s] for s in prompts}
        server.check(of_prompts, q[decoded:], out.view(-1, server.nheads, columns), is_causal=True, softmax_scale=impl.scale)
        assert builder.build_for_cudagraph_capture(common).prefill is None


# ---- real releases ---------------------------------------------------------------------------------------------------------

FOLDERS = [folder for folder in os.environ.get("VOLTA_FA_TEST_VLLM", "").split(":") if folder]


@pytest.mark.parametrize(
    "folder", FOLDERS or [pytest.param("", marks=pytest.mark.skip("VOLTA_FA_TEST_VLLM names no vLLM"))], ids=os.path.basename
)
@pytest.mark.skipif(REAL, reason="this is it")
def test_real_vllm(folder):
    """The same tests, and those of its own, with a real release."""
    path = [folder, str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "VOLTA_FA_TEST_VLLM_HERE": "1"}
    files = [__file__, str(REPOSITORY / "tests/test_vllm_backend.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *files]
    result = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
