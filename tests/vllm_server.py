"""What test_vllm*.py share. `Server` makes the tensors and metadata of a step, as vLLM's runner does. `run` passes them to the backend's
cache update, metadata builder and forward. `Server.check` compares each sequence's rows of out with the fp64 reference.

vLLM's words: a step is one forward pass over the new tokens of several sequences (requests); a block is a page of the cache; a slot is a
token's place in the cache (-1: none); an implementation is the attention of one layer. vLLM's classes are a stub (vllm_stub.py), or those
of a real release in a process that test_real_vllm starts (test_vllm_releases.py)."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from types import SimpleNamespace

import pytest
import torch

import reference
import vllm_stub
from conftest import on, within

#: Set by test_real_vllm for the process that it starts.
REAL = "VOLTA_FA_TEST_VLLM_HERE" in os.environ
if not REAL:
    vllm_stub.install()

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

import volta_fa.vllm
from volta_fa.integrations.vllm import paged
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaBackend, VoltaMetadataBuilder
from volta_fa.integrations.vllm.mla import VoltaMLAImpl

#: vLLM up to 0.26 asks the backend for the cache's shape, and its cache has no room for the scales of int8. The stub counts as old.
OLD = not REAL or hasattr(importlib.import_module("vllm.v1.attention.backend").AttentionBackend, "get_kv_cache_shape")
#: From 0.26 on, vLLM's layer builds another attention for the prompts of models with latents.
PREFILL = REAL and importlib.util.find_spec("vllm.v1.attention.backends.mla.prefill") is not None
#: Skips tests of caches with scales beside codes. With the stub they run, because Server itself allocates the cache.
LATER = pytest.mark.skipif(REAL and OLD, reason="vLLM up to 0.26 has no room for the scales of int8")
BACKENDS = on("cpu-fp32", "cpu-fp64", "sim", "cuda")
#: Tokens of a block.
PAGE = 16
#: Memory layouts of a layer's cache, by the order of tokens (n), heads (h) and columns (d) in a block. Shapes: (blocks, 2, block_size,
#: nheads_k, headdim), K and V apart; packed: (blocks, nheads_k, block_size, 2 * headdim), K and V side by side in a row.
LAYOUTS = ["nhd", "hnd", "packed-nhd", "packed-hnd", "packed-layers"]


def with_first_rows(queries: dict[int, int]):
    """Yields ((sequence, number of queries), the sequence's first row in the step's tensors)."""
    return zip(queries.items(), itertools.accumulate(queries.values(), initial=0))


class Server:
    """Four sequences that grow, in a cache whose blocks are in random order: what vLLM's runner passes to a backend. `block`: tokens of a
    block; `max_blocks`: blocks of a sequence."""

    def __init__(self, backend, layout="nhd", nheads=4, nheads_k=2, headdim=32, block=PAGE, max_blocks=6, sequences=4):
        backend.simulate()
        self.backend, self.headdim, self.block = backend, headdim, block
        self.nheads, self.nheads_k = nheads, nheads_k
        blocks = sequences * max_blocks + 1
        order = torch.Generator().manual_seed(backend.seed)
        # block 0 is vLLM's null block
        self.table = (torch.randperm(blocks - 1, generator=order) + 1).int().view(sequences, -1).to(backend.device)
        self.lengths = [0] * sequences
        self.tokens = [[] for _ in range(sequences)]  # of each sequence: the k and v that its cache must have
        self.kv_cache = self.allocate(layout, blocks, 2 * headdim, math.nan, backend.dtype)
        self.spec = SimpleNamespace(head_size=headdim, dtype=torch.float16, block_size=block)
        self.builder = VoltaMetadataBuilder(self.spec, ["layer"], None, torch.device(backend.device))  # None: no VllmConfig
        self.layer = None

    def allocate(self, layout, blocks, content, value, dtype):
        """Returns a layer's cache full of this value. `content`: elements of a token and head, keys and values together."""
        nheads_k, block = self.nheads_k, self.block

        def full(*shape):
            return torch.full(shape, value, dtype=dtype, device=self.backend.device)

        match layout:
            case "nhd":
                return full(*VoltaBackend.get_kv_cache_shape(blocks, block, nheads_k, content // 2))
            case "hnd":
                return full(blocks, 2, nheads_k, block, content // 2).transpose(2, 3)
            case "packed-nhd":
                return full(blocks, block, nheads_k, content).transpose(1, 2)
            case "packed-hnd":
                return full(blocks, nheads_k, block, content)
            case "packed-layers":  # the second of three layers that share blocks
                return full(blocks, 3, block, nheads_k, content)[:, 1].transpose(1, 2)

    def step(self, queries: dict[int, int], padded_requests=0, padded_tokens=0, causal=True):
        """Appends new tokens, whose number by sequence is `queries`. Returns q, k, v, their slots, and vLLM's metadata of the step."""
        b = self.backend
        starts = [0, *itertools.accumulate(queries.values())]
        total = starts[-1]
        rows = total + padded_tokens
        q, k, v = b.randn(rows, self.nheads, self.headdim), *(b.randn(rows, self.nheads_k, self.headdim) for _ in range(2))
        slots = [-1] * rows
        for (s, n), first in with_first_rows(queries):
            for i in range(n):
                position = self.lengths[s] + i
                slots[first + i] = int(self.table[s, position // self.block]) * self.block + position % self.block
                self.tokens[s].append((k[first + i], v[first + i]))
            self.lengths[s] += n
        slots = torch.tensor(slots, dtype=torch.int64, device=b.device)
        start_loc = b.ints(starts + [total] * padded_requests)
        table = torch.nn.functional.pad(self.table[list(queries)], (0, 0, 0, padded_requests), value=-1)
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
        """Compares each sequence's rows of out with the fp64 reference, within the forward pass's error budget."""
        for (s, n), first in with_first_rows(queries):
            inputs = (q[first : first + n][None], *(torch.stack(t)[None] for t in zip(*self.tokens[s])))
            ref = reference.forward(*inputs, **options)
            within(self.backend, "out", out[first : first + n][None], ref.out, reference.forward_budget(ref, *inputs, **options))

    def check_cache(self):
        """Checks that the cache has bitwise the tokens that were written, and NaN elsewhere."""
        k_cache, v_cache = (t.clone() for t in paged.split_cache(self.kv_cache, self.headdim)[:2])
        for s, tokens in enumerate(self.tokens):
            for i, (k, v) in enumerate(tokens):
                page, row = int(self.table[s, i // self.block]), i % self.block
                assert torch.equal(k_cache[page, row], k) and torch.equal(v_cache[page, row], v)
                k_cache[page, row] = v_cache[page, row] = math.nan
        assert k_cache.isnan().all() and v_cache.isnan().all()


#: The scales of K and V of vLLM's layer: powers of two, so that dequantized fp8 values are exact in fp16.
LAYER_SCALES = (0.5, 2.0)
FP8 = ["fp8", "fp8_e4m3", "fp8_e5m2"]
INT8 = "int8_per_token_head"
#: int8 keys and int4 values, which vLLM has from the plugin.
MIXED = "int8k_int4v"
#: Cache dtypes with scales beside their codes.
BESIDE = [INT8, MIXED]


def quantized(x, kv_cache_dtype, scale, is_value=False):
    """Returns x quantized as this cache dtype stores it (codes, and scales if it is one of BESIDE), and dequantized again."""
    kv_dtype = {INT8: "int8", MIXED: "int4" if is_value else "int8", "fp8_e5m2": "fp8_e5m2"}.get(kv_cache_dtype, "fp8_e4m3")
    made = volta_fa.quantize_kv(x, kv_dtype, scale=None if kv_cache_dtype in BESIDE else scale)
    return made, volta_fa.dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=x.dtype)


class QuantizedServer(Server):
    """A server with a quantized cache. `codes` is what the cache must contain, and `tokens` has the dequantized values."""

    def __init__(self, backend, kv_cache_dtype, layout="nhd", **sizes):
        super().__init__(backend, layout, **sizes)
        self.kv_cache_dtype = kv_cache_dtype
        k_scale, v_scale = self.scales = tuple(torch.tensor(x, device=backend.device) for x in LAYER_SCALES)
        self.layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
        # bytes of a token and head: codes, and 16 for scales
        content = {INT8: 2 * self.headdim + 16, MIXED: self.headdim * 3 // 2 + 16}.get(kv_cache_dtype, 2 * self.headdim)
        # -1 is NaN in both formats of fp8, and as a scale
        self.kv_cache = self.allocate(layout, len(self.kv_cache), content, -1, torch.int8)
        if kv_cache_dtype != INT8:
            self.kv_cache = self.kv_cache.view(torch.uint8)
        self.codes = self.kv_cache.clone()

    def step(self, queries, **options):
        """Appends as Server.step does, and quantizes the new tokens into `codes`."""
        found = super().step(queries, **options)
        *caches, scales = paged.split_cache(self.codes, self.headdim, self.kv_cache_dtype, self.layer)
        for s, n in queries.items():
            for i in range(self.lengths[s] - n, self.lengths[s]):
                at = int(self.table[s, i // self.block]), i % self.block
                made = [quantized(t, self.kv_cache_dtype, x, x is self.scales[1]) for t, x in zip(self.tokens[s][i], self.scales)]
                for name, cache, (row, _) in zip("kv", caches, made):
                    cache[at] = row.data
                    if self.kv_cache_dtype in BESIDE:
                        scales[f"{name}_scale"][at] = row.scale
                    if row.zero_point is not None:
                        scales[f"{name}_zero_point"][at] = row.zero_point
                self.tokens[s][i] = tuple(numbers for _, numbers in made)
        return found

    def check_cache(self):
        """Checks that the cache has bitwise the expected codes and scales, and nothing else."""
        assert torch.equal(self.kv_cache, self.codes)


def implementation(server, **options):
    """Returns the attention of a layer for a server's sizes."""
    return VoltaAttentionImpl(server.nheads, server.headdim, server.headdim**-0.5, server.nheads_k, **options)


def run(server, impl, queries, common_prefix_len=0, **padding):
    """Runs a step of one layer. Returns q and output, without rows of padding."""
    q, k, v, slots, common = server.step(queries, **padding)
    metadata = server.builder.build(common_prefix_len, common)
    impl.do_kv_cache_update(server.layer, k, v, server.kv_cache, slots)
    output = torch.full_like(q, math.nan)
    assert impl.forward(server.layer, q, k, v, server.kv_cache, metadata, output) is output
    total = sum(queries.values())
    return q[:total], output[:total]


# ---- mixed batches ---------------------------------------------------------------------------------------------------

#: New tokens by sequence in each step: prompts; chunks of prompts beside decoding; several tokens, as in speculation; decoding alone.
STEPS = [{0: 21, 1: 5}, {0: 1, 2: 40, 1: 1}, {3: 17, 2: 3, 0: 4}, {0: 1, 1: 1, 2: 1, 3: 1}]
#: Arguments of an implementation, and the same as options of the reference. `arguments` adds tensors.
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 7}, {"window_left": 6}),
    "softcap": ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "sinks": ({"sinks": None}, {}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {}),
    "all": ({"sliding_window": 20, "logits_soft_cap": 5.0, "sinks": None}, {"window_left": 19, "softcap": 5.0}),
}


def arguments(backend, name: str) -> tuple[dict, dict]:
    """Returns the arguments of an implementation, and the same as options of the reference."""
    given, same = (dict(options) for options in OPTIONS[name])
    if "sinks" in given:
        given["sinks"] = same["sinks"] = backend.randn(4)
    if "alibi_slopes" in given:
        same["alibi_slopes"] = torch.tensor(given["alibi_slopes"], device=backend.device)
    return given, {"is_causal": True, **same}


def serve(server, impl, steps=STEPS, **same):
    """Runs the steps and checks out of each, and the cache at the end."""
    for queries in steps:
        q, out = run(server, impl, queries)
        server.check(queries, q, out, **same)
    server.check_cache()


#: Skips tests of image spans: vLLM up to 0.20 does not pass them to plugins.
SPANS = pytest.mark.skipif("mm_req_doc_ranges" not in CommonAttentionMetadata.__dataclass_fields__, reason="this vLLM has no spans here")


def latent_implementation(kv_lora_rank, rotary, nheads=4, **options):
    """Returns the latent attention of a layer. Latents have kv_lora_rank columns that are key and value, and `rotary` more of the key."""
    names = "alibi_slopes sliding_window logits_soft_cap kv_sharing_target_layer_name kv_b_proj q_lora_rank"
    unused = dict.fromkeys(names.split())
    given = {**unused, "num_kv_heads": 1, "kv_cache_dtype": "auto", "attn_type": AttentionType.DECODER, **options}
    dims = dict(kv_lora_rank=kv_lora_rank, qk_nope_head_dim=32, qk_rope_head_dim=rotary, qk_head_dim=32 + rotary, v_head_dim=32)
    return VoltaMLAImpl(nheads, kv_lora_rank + rotary, (kv_lora_rank + rotary) ** -0.5, **given, **dims)


def latent_cache(kv_cache_dtype, columns, blocks=25, of=None):
    """Returns a cache of latents as vLLM allocates it, full of NaN (bytes of -1 are NaN in fp8, and as scales). `of`: dtype, device."""
    if kv_cache_dtype == "auto":
        return torch.full((blocks, PAGE, columns), math.nan, dtype=of.dtype, device=of.device)
    content = columns + (paged.SCALE_BYTES if kv_cache_dtype == INT8 else 0)
    return torch.full((blocks, PAGE, content), -1, dtype=torch.int8, device=of.device)


def latent_bytes(row, kv_cache_dtype, scale):
    """Returns a token's bytes in the cache, and its dequantized values."""
    if kv_cache_dtype == "auto":
        return row, row
    made, numbers = quantized(row[None], kv_cache_dtype, scale)
    if kv_cache_dtype != INT8:
        return made.data[0].view(torch.int8), numbers[0]
    beside = torch.zeros(paged.SCALE_BYTES, dtype=torch.int8, device=row.device)
    beside[:4] = made.scale.view(torch.int8)
    return torch.cat((beside, made.data[0])), numbers[0]
