"""Tests of volta_fa.vllm, an attention backend of the server vLLM, against fp64: mixed batches of prompts, chunks and decoding.

vllm_server.py stands for vLLM's runner; vLLM's classes are a stub (vllm_stub.py). Names from it:
- Server: four sequences of growing length, by default with 4 heads on 2 KV heads of headdim 32; PAGE: tokens of a block of its cache
- `step({sequence: new tokens})` makes the tensors of a step, `builder.build(0, common)` its metadata; 0 is the length of a common prefix
- `implementation`: the attention of a layer; `run` passes a step to it; `Server.check` compares out with the fp64 reference
- `serve` does all this for STEPS; `arguments(backend, name)`: those of an implementation, and the same as options of the reference
- cache dtypes: "auto" is the dtype of k, BESIDE have scales beside their codes, MIXED is one of them (int8 keys, int4 values)

`on(...)` and BACKENDS list the values of the fixture `backend`: CPU (`cpu-DTYPE`), simulator (`sim`), GPU
(`cuda`). `refused` checks that a call raises an error that matches."""

import concurrent.futures
import math
import threading
from types import SimpleNamespace

import pytest
import torch

import vllm_server
from conftest import on
from flash_attention import refused
from vllm_server import BACKENDS, BESIDE, MIXED, PAGE, SPANS, STEPS, QuantizedServer, Server, implementation, run, serve, with_first_rows

# Without a real vLLM, the import of vllm_server puts a stub of it into sys.modules.
# isort: split
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

from volta_fa.integrations.vllm import backend as vllm_backend
from volta_fa.integrations.vllm import expanded, mla, paged
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaMetadataBuilder
from volta_fa.integrations.vllm.mla import VoltaMLABackend, VoltaMLAMetadataBuilder
from volta_fa.integrations.vllm.ranks import Ranks


@pytest.mark.parametrize("name,headdim", [*((name, 32) for name in vllm_server.OPTIONS), ("plain", 512)])
@BACKENDS
def test_mixed_batches(backend, name, headdim):
    given, same = vllm_server.arguments(backend, name)
    server = Server(backend, headdim=headdim)
    serve(server, implementation(server, **given), **same)


def check_anchored(server, queries, q, out, anchors, window, **same):
    """Checks attention of each sequence's rows to its first `anchors` tokens, and the last `window` ones up to their own."""
    for (s, n), first in with_first_rows(queries):
        i, j = torch.arange(server.lengths[s] - n, server.lengths[s])[:, None], torch.arange(server.lengths[s])[None, :]
        mask = (j <= i) & ((i - j < window) | (j < anchors))
        server.check({s: n}, q[first:], out[first:], attn_bias=mask[None, None].to(q.device), **same)


@pytest.mark.parametrize("value", ["5:7", "18:1", "1:100"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", *BESIDE])
@on("cpu-fp32", "sim", "cuda")  # not in fp64: two results are merged by softmax_lse, which is fp32
def test_anchored_window(backend, kv_cache_dtype, value, monkeypatch):
    """VOLTA_FA_VLLM_ANCHORED_WINDOW is ANCHORS:WINDOW, in tokens. Steps have a padded request without tokens."""
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", value)
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, "packed-hnd")
    sinks = backend.randn(4)
    impl = implementation(server, kv_cache_dtype=kv_cache_dtype, sinks=sinks, logits_soft_cap=5.0)
    for queries in STEPS:
        q, out = run(server, impl, queries, padded_requests=1)
        check_anchored(server, queries, q, out, *map(int, value.split(":")), sinks=sinks, softcap=5.0)
    server.check_cache()


@on("cpu-fp32")
def test_layers_without_anchors(backend, monkeypatch):
    """Layers with a window of their own, whose first tokens vLLM frees, and cross-attention stay as they are."""
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", "5:7")
    given, same = vllm_server.arguments(backend, "all")
    server = Server(backend)
    serve(server, implementation(server, **given), **same)
    attention = implementation(server, attn_type=AttentionType.ENCODER_DECODER)._attention
    assert attention.sliding_window is None and attention.anchor_tokens == 0


@pytest.mark.parametrize("layout", vllm_server.LAYOUTS)
@on("cpu-fp32", "sim", "cuda")
def test_layouts(backend, layout):
    """Caches with K and V apart (vLLM up to 0.26) or packed (later), in every order of dimensions; with blocks of 32 and headdim 64."""
    server = Server(backend, layout, block=32, headdim=64, max_blocks=2)
    serve(server, implementation(server), [{0: 21, 1: 5}, {1: 1, 0: 2}], is_causal=True)


@pytest.mark.parametrize(
    "kv_cache_dtype,layout",
    [(dtype, layout) for dtype in vllm_server.FP8 for layout in ("nhd", "packed-hnd")]
    + [(dtype, layout) for dtype in BESIDE for layout in vllm_server.LAYOUTS if "packed" in layout],
)
@BACKENDS
def test_quantized_caches(backend, kv_cache_dtype, layout):
    """The cache is bitwise as expected, and attention to its dequantized values is right, also of more rows than decode kernels take."""
    server = QuantizedServer(backend, kv_cache_dtype, layout)
    serve(server, implementation(server, kv_cache_dtype=kv_cache_dtype), is_causal=True)


@pytest.mark.parametrize("layout", ["packed-hnd", "packed-layers"])
@on("sim")
def test_codes_are_read_in_place(backend, layout):
    """One launch decodes a cache in place: 16 bytes of scales before keys, and keys before values, leave both on 16-byte boundaries."""
    server = QuantizedServer(backend, MIXED, layout, headdim=64)
    impl = implementation(server, kv_cache_dtype=MIXED)
    run(server, impl, {0: 18})
    q, k, v, slots, common = server.step({0: 1})
    impl.do_kv_cache_update(server.layer, k, v, server.kv_cache, slots)
    metadata = server.builder.build(0, common)
    launches = backend.launches(lambda: impl.forward(server.layer, q, k, v, server.kv_cache, metadata, torch.empty_like(q)))
    (kernel,) = (launch["kernel"] for launch in launches)
    assert "decode" in kernel and MIXED in kernel


@pytest.mark.parametrize("anchored", [None, "5:7"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", MIXED])
@on("sim", "cuda")
def test_captured_cuda_graph(backend, kv_cache_dtype, anchored, monkeypatch):
    """A replayed graph has the metadata and host decisions of its capture. Steps come as new values in the runner's buffers, padded:
    requests without tokens, rows of no sequence, slots of -1. Here eager calls with one metadata object stand for replays."""
    monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", anchored or "")
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, layout="packed-nhd")
    impl = implementation(server, kv_cache_dtype=kv_cache_dtype)
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
        k_cache, v_cache, scales = paged.split_cache(server.kv_cache, server.headdim, kv_cache_dtype, server.layer)
        paged.write_slots(k, v, k_cache, v_cache, captured.slot_mapping, **scales)
        output = torch.full_like(q, math.nan)
        impl.forward(server.layer, q, k, v, server.kv_cache, metadata, output)
        check_anchored(server, queries, q, output, *((0, 10**6) if anchored is None else (5, 7)))  # 10^6 keys: no window
    server.check_cache()


@BACKENDS
def test_slots_in_any_order(backend):
    """Rows with slot -1 (rejected tokens) and rows beyond the slots (padding) are not written. Without slots nothing is."""
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


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", *BESIDE])
@on("cpu-fp32", "sim", "cuda")  # not in fp64: two results are merged by softmax_lse, which is fp32
def test_cascade(backend, kv_cache_dtype):
    """Sequences share their first two blocks (common_prefix_len 32). Attention to these, computed once and merged, changes no result."""
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, layout="packed-nhd")
    impl = implementation(server, sinks=backend.randn(4), logits_soft_cap=5.0, kv_cache_dtype=kv_cache_dtype)
    run(server, impl, {0: 32})
    for s in (1, 2):
        server.table[s, :2] = server.table[0, :2]
        server.tokens[s], server.lengths[s] = list(server.tokens[0]), 32
    queries = {0: 3, 1: 1, 2: 9}
    q, out = run(server, impl, queries, common_prefix_len=32)
    server.check(queries, q, out, is_causal=True, softcap=5.0, sinks=impl.sinks)


# ---- image spans -----------------------------------------------------------------------------------------------------

#: First and last position of the image spans of a sequence, whose tokens see each other. One begins at 0, two touch, one has one token.
IMAGES = {0: [(0, 2), (5, 20), (21, 37), (39, 39)], 2: [(9, 25), (30, 46)]}
#: New tokens as in STEPS: prompts with and without spans, chunks, one of which begins within a span and ends within another, decoding.
SPAN_STEPS = [{0: 43, 1: 5}, {2: 12, 1: 1}, {1: 2, 2: 20, 0: 1, 3: 17}, {0: 5, 2: 15, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}]


def seen(length, queries, spans, window=None, clamped=False):
    """Returns (queries, length) bool by vLLM's rule for the last queries of a sequence: a key is visible if causal and in the window, or in
    the query's span. `clamped`: spans end at the window."""
    i, j = torch.arange(length - queries, length)[:, None], torch.arange(length)[None, :]
    near = torch.ones(1, 1, dtype=torch.bool) if window is None else i - j < window
    found = (j <= i) & near
    for first, last in spans:
        found |= (first <= i) & (i <= last) & (first <= j) & (j <= last) & (near | (not clamped))
    return found


def serve_images(server, impl, layer=None, window=None, clamped=False, **same):
    """Runs SPAN_STEPS and checks all results. Lengths on the host (`seq_lens_cpu_upper_bound`) are 3 too large for sequences that decode,
    as with speculation. Returns the spans that the metadata of each step has."""
    prompts = {0: 43, 1: 5, 2: 47, 3: 17}
    found = []
    for queries in SPAN_STEPS:
        q, k, v, slots, common = server.step(queries, padded_requests=1)
        common.seq_lens_cpu_upper_bound = torch.tensor([server.lengths[s] + 3 * (server.lengths[s] > prompts[s]) for s in queries] + [0])
        common.mm_req_doc_ranges = {i: IMAGES.get(s, []) for i, s in enumerate(queries)}
        metadata = server.builder.build(0, common)
        impl.do_kv_cache_update(layer, k, v, server.kv_cache, slots)
        out = impl.forward(layer, q, k, v, server.kv_cache, metadata, torch.full_like(q, math.nan))
        for (s, n), first in with_first_rows(queries):
            mask = seen(server.lengths[s], n, IMAGES.get(s, []), window, clamped).to(q.device)
            server.check({s: n}, q[first:], out[first:], attn_bias=mask[None, None], **same)
        found.append(metadata.mm_prefix_range)
    server.check_cache()
    return found


@SPANS
@pytest.mark.parametrize("name", [name for name in vllm_server.OPTIONS if name != "alibi"])
@BACKENDS
def test_image_spans(backend, name):
    """Queries of a span see later tokens of it: in whole prompts and chunks, beside text and decoding."""
    given, same = vllm_server.arguments(backend, name)
    same = {key: value for key, value in same.items() if key not in ("is_causal", "window_left")}
    server = Server(backend)
    layer = SimpleNamespace(mm_prefix_clamp_sliding_window=name == "window")  # a span has up to 17 tokens, and its window 7
    window = given.get("sliding_window")
    spans = serve_images(server, implementation(server, **given), layer, window, layer.mm_prefix_clamp_sliding_window, **same)
    # each step's queries in spans of IMAGES; a span of one token has none
    assert [0 if found is None else len(found.rows) for found in spans] == [3 + 16 + 17, 3, 14 + 2, 15, 0]


@pytest.mark.slow
@SPANS
@pytest.mark.parametrize("kv_cache_dtype", [*vllm_server.FP8, *(pytest.param(dtype, marks=vllm_server.LATER) for dtype in BESIDE)])
@BACKENDS
def test_image_spans_of_quantized_caches(backend, kv_cache_dtype):
    server = QuantizedServer(backend, kv_cache_dtype, layout="packed-hnd")
    serve_images(server, implementation(server, kv_cache_dtype=kv_cache_dtype, sliding_window=20), server.layer, 20)


@SPANS
@on("cpu-fp32")
def test_causal_layers_of_models_with_spans(backend):
    """vLLM's Gemma 4 clears the metadata's mm_prefix_range for layers in which images are causal."""
    server = Server(backend)
    impl = implementation(server)
    queries = {0: 43, 2: 47}
    q, k, v, slots, common = server.step(queries)
    common.mm_req_doc_ranges = {0: IMAGES[0], 1: IMAGES[2]}  # without lengths on the host
    metadata = server.builder.build(0, common)
    impl.do_kv_cache_update(None, k, v, server.kv_cache, slots)
    with_spans = impl.forward(None, q, k, v, server.kv_cache, metadata, torch.full_like(q, math.nan))
    metadata.mm_prefix_range = None
    out = impl.forward(None, q, k, v, server.kv_cache, metadata, torch.full_like(q, math.nan))
    server.check(queries, q, out, is_causal=True)
    changed = ((with_spans - out).abs().amax((1, 2)) > 1e-4).nonzero().flatten().tolist()  # more than rounding
    # the last token of a span sees no later one
    assert changed == [i for i in range(37) if i not in (2, 3, 4, 20)] + [43 + i for i in (*range(9, 25), *range(30, 46))]


@SPANS
@on("cpu-fp32")
def test_refused_spans(backend):
    server = Server(backend)
    q, k, v, slots, common = server.step({2: 47})
    common.mm_req_doc_ranges = {0: IMAGES[2]}
    metadata = server.builder.build(0, common)
    for options, message in (
        ({"sliding_window": 16}, "mm_req_doc_ranges: got a span of 17 tokens, expected at most 16, the sliding window"),
        ({"alibi_slopes": [0.5] * 4}, "mm_prefix_range: got spans, expected None with ALiBi"),
    ):
        impl = implementation(server, **options)
        impl.do_kv_cache_update(None, k, v, server.kv_cache, slots)
        refused(NotImplementedError, message, impl.forward, None, q, k, v, server.kv_cache, metadata, torch.empty_like(q))


# ---- decode context parallelism --------------------------------------------------------------------------------------


class Group:
    """A process group as vLLM has it, but its ranks are threads. `slots`: the tensor of each rank while they exchange one."""

    def __init__(self, rank, world_size, barrier, slots):
        self.rank_in_group, self.world_size, self.barrier, self.slots = rank, world_size, barrier, slots
        self.gathered = 0

    def exchange(self, t):
        self.slots[self.rank_in_group] = t
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()  # no rank overwrites its tensor before all have read it
        self.gathered += 1
        return found

    def all_gather(self, t, dim):
        return torch.cat(self.exchange(t), dim)


def combine(out, lse, group, return_lse):
    """Combines the ranks' results by softmax_lse, as vLLM's CorrectAttnCPOutKernel and a reduce-scatter over heads do, in PyTorch."""
    assert return_lse and out.shape[:2] == lse.shape
    lses = torch.stack(group.exchange(lse))
    lses = lses.masked_fill(lses.isnan() | (lses == math.inf), -math.inf)
    most = lses.amax(0)
    most = most.masked_fill(most == -math.inf, 0.0)
    total = (lses - most).exp().sum(0).log() + most
    difference = lse - total
    factor = difference.masked_fill(difference.isnan() | (difference == math.inf), -math.inf).exp()[..., None]
    corrected = torch.where(factor == 0.0, 0.0, out * factor).to(out.dtype)
    heads = slice(group.rank_in_group * out.shape[1] // group.world_size, (group.rank_in_group + 1) * out.shape[1] // group.world_size)
    return sum(part[:, heads] for part in group.exchange(corrected)), total[:, heads]


class Rank:
    """A rank of decode context parallelism. It computes some heads, and caches tokens with position // interleave % world_size == rank."""

    def __init__(self, server, group, interleave, monkeypatch, **options):
        self.server, self.group, self.interleave = server, group, interleave
        self.cache = torch.full_like(server.kv_cache, math.nan) if server.layer is None else server.kv_cache.clone()
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
        monkeypatch.setattr(vllm_backend, "find_ranks", lambda *_: Ranks(group, interleave, combine))
        self.builder = VoltaMetadataBuilder(server.spec, ["layer"], config, torch.device(server.backend.device))
        heads = server.nheads // group.world_size
        self.heads = slice(group.rank_in_group * heads, (group.rank_in_group + 1) * heads)
        if "sinks" in options:
            options["sinks"] = options["sinks"][self.heads]
        self.impl = VoltaAttentionImpl(heads, server.headdim, server.headdim**-0.5, server.nheads_k, **options)

    def slots(self, queries):
        """Returns vLLM's slots: -1 for tokens of other ranks."""
        block, every, found = self.server.block, self.group.world_size * self.interleave, []
        for s, n in queries.items():
            for position in range(self.server.lengths[s] - n, self.server.lengths[s]):
                at = position // every * self.interleave + position % self.interleave
                here = position // self.interleave % self.group.world_size == self.group.rank_in_group
                found.append(int(self.server.table[s, at // block]) * block + at % block if here else -1)
        return torch.tensor(found, device=self.server.backend.device)

    def forward(self, queries, q, k, v, common):
        slots = self.slots(queries)
        self.impl.do_kv_cache_update(self.server.layer, k, v, self.cache, slots)
        q = q[:, self.heads]
        return self.impl.forward(self.server.layer, q, k, v, self.cache, self.builder.build(0, common), torch.full_like(q, math.nan))


RANK_STEPS = [{0: 21, 1: 1}, {0: 1, 2: 40, 1: 1}, {3: 17, 2: 3, 0: 4}, {0: 1, 1: 1, 2: 1, 3: 1}]


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", MIXED])
@pytest.mark.parametrize("world_size,interleave", [(2, 1), (4, 16)])
@on("cpu-fp32", "sim")  # the states that are merged have fp32's softmax_lse
def test_ranks_share_a_cache(backend, world_size, interleave, kv_cache_dtype, name, monkeypatch):
    """Ranks with a part of the tokens and some heads each give together the result of one process. Some parts are empty."""
    given, same = vllm_server.arguments(backend, name)
    sizes = {"nheads": 4, "nheads_k": 1}
    server = Server(backend, **sizes) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, "packed-hnd", **sizes)
    barrier, slots = threading.Barrier(world_size), [None] * world_size
    groups = [Group(r, world_size, barrier, slots) for r in range(world_size)]
    ranks = [Rank(server, group, interleave, monkeypatch, kv_cache_dtype=kv_cache_dtype, **given) for group in groups]
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        for queries in RANK_STEPS:
            q, k, v, _, common = server.step(queries, padded_requests=1)
            common.seq_lens_cpu_upper_bound = common.seq_lens.cpu()
            before = ranks[0].group.gathered
            parts = list(pool.map(lambda rank: rank.forward(queries, q, k, v, common), ranks))
            new = list(zip(k, v))
            for (s, n), first in with_first_rows(queries):
                cached = server.tokens[s][-n:]
                server.tokens[s][-n:] = new[first : first + n]  # ranks attend to new tokens before quantization
                server.check({s: n}, q[first:], torch.cat(parts, 1)[first:], **same)
                server.tokens[s][-n:] = cached
            # nothing is exchanged while no sequence has earlier tokens
            assert (ranks[0].group.gathered == before) == (queries is RANK_STEPS[0])
    held = [int(rank.builder._earlier_lengths[0]) for rank in ranks]  # earlier tokens of sequence 0
    assert sum(held) == server.lengths[0] - 1 and max(held) - min(held) <= interleave


@on("cpu-fp32")
def test_metadata_of_ranks(backend, monkeypatch):
    """Captured graphs read the lengths of earlier tokens in the builder's own memory, and have calls for these even if none exist yet."""
    server = Server(backend, nheads_k=1)
    rank = Rank(server, Group(rank=1, world_size=2, barrier=None, slots=[]), interleave=1, monkeypatch=monkeypatch)
    _, _, _, _, common = server.step({0: 5, 1: 2})
    common.seq_lens_cpu_upper_bound = common.seq_lens.cpu()
    first, captured = rank.builder.build(0, common).earlier, rank.builder.build_for_cudagraph_capture(common).earlier
    assert (first.any, captured.any) == (False, True) and captured.lengths.tolist() == [0, 0]
    _, _, _, _, common = server.step({0: 1, 1: 1})
    metadata = rank.builder.build(0, common)
    # of tokens 0 to 4 and 0 to 1 the odd ones, in the same memory
    assert metadata.earlier.any and captured.lengths.tolist() == metadata.earlier.lengths.tolist() == [2, 1]
    assert captured.lengths.data_ptr() == metadata.earlier.lengths.data_ptr() and not rank.builder.supports_draft_decode_metadata_update
    q = backend.randn(2, 2, 32)
    with pytest.raises(NotImplementedError, match="key: got None, expected new tokens: remove --decode-context-parallel-size"):
        rank.impl.forward(None, q, None, None, rank.cache, metadata, torch.empty_like(q))
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size: got 2, expected 1 for a model whose image tokens"):
        VoltaMetadataBuilder(server.spec, ["layer"], config, torch.device("cpu"))

    class Shared(VoltaAttentionImpl):
        dcp_world_size = 2

        def __new__(cls, *_, **__):  # vLLM's own __new__ needs its process groups
            return object.__new__(cls)

    for options in ({"sliding_window": 7}, {"alibi_slopes": [1.0] * 4}, {"kv_sharing_target_layer_name": "layer"}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(options))}: got .*, expected None with decode context parallelism"):
            Shared(4, 32, 1.0, 1, **options)  # heads, headdim, scale, KV heads
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", "4:7")
    refused(NotImplementedError, r"VOLTA_FA_VLLM_ANCHORED_WINDOW: got \(4, 7\), expected None with decode context", Shared, 4, 32, 1.0, 1)


# ---- encoders and cross-attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4])
@BACKENDS
def test_encoder(backend, window):
    """Encoders attend in both directions, without a cache."""
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
    """A decoder's queries see all tokens that the encoder wrote into the cache. key and value are None."""
    server = Server(backend)
    impl = implementation(server, attn_type=AttentionType.ENCODER_DECODER)
    _, k, v, slots, common = server.step({0: 18, 1: 7})
    impl.do_kv_cache_update(None, k, v, server.kv_cache, slots)
    queries = {0: 2, 1: 3}
    q, starts = backend.randn(5, 4, 32), backend.ints([0, 2, 5])
    # 2 requests, 5 tokens, at most 3 new and 18 cached ones of a request, not causal
    step = CommonAttentionMetadata(starts, starts, common.seq_lens, 2, 5, 3, 18, common.block_table_tensor, slots, False)
    metadata = server.builder.build(0, step)
    # (tokens, nheads * headdim), as some layers have it
    output = impl.forward(None, q, None, None, server.kv_cache, metadata, torch.full((5, 128), math.nan, dtype=q.dtype, device=q.device))
    server.check(queries, q, output.view(5, 4, 32))


# ---- latent attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *vllm_server.FP8, vllm_server.INT8])
@pytest.mark.parametrize("rank,rotary", [(64, 16), (512, 64)])
@BACKENDS
def test_latents(backend, rank, rotary, kv_cache_dtype):
    """Latent attention (MLA) of mixed batches: values are the keys' first `rank` columns. The cache is bitwise as expected."""
    if not paged.takes_latents(rank + rotary, rank):
        pytest.skip("this build has no fwd_mla")
    impl = vllm_server.latent_implementation(rank, rotary, kv_cache_dtype=kv_cache_dtype)
    server = Server(backend, nheads_k=1, headdim=rank + rotary)
    cache = server.kv_cache = vllm_server.latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
    expected = cache.clone()
    layer = SimpleNamespace(_k_scale=torch.tensor(vllm_server.LAYER_SCALES[0], device=backend.device))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device(backend.device))
    for queries in STEPS:
        q, k, _, slots, common = server.step(queries)
        for s, n in queries.items():
            for i in range(server.lengths[s] - n, server.lengths[s]):
                made, numbers = vllm_server.latent_bytes(server.tokens[s][i][0][0], kv_cache_dtype, layer._k_scale)
                expected[server.table[s, i // PAGE], i % PAGE] = made
                server.tokens[s][i] = numbers[None], numbers[None, :rank]
        metadata = builder.build(0, common)
        # vLLM's layer sends all queries to forward_mqa if there are no prefills
        assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (len(queries), len(q), 0)
        assert metadata.decode is metadata and metadata.prefill is None
        # between the tokens padding (slot -1), and one with inf in block 0, which no sequence has; after them rows beyond the slots
        padding, spare, *beyond = backend.randn(4, 1, rank + rotary).split(1)
        spare[..., 7] = math.inf  # int8 marks a token with inf or NaN by its scale
        expected[0, 3], _ = vllm_server.latent_bytes(spare[0, 0], kv_cache_dtype, layer._k_scale)
        k = torch.cat((k[:1], padding, spare, k[1:], *beyond))
        slots = torch.cat((slots[:1], slots.new_tensor([-1, 3]), slots[1:]))
        impl.do_kv_cache_update(k[:, 0, :rank], k[..., rank:], cache, slots, kv_cache_dtype, layer._k_scale, True)
        seen = cache if kv_cache_dtype == "auto" else cache.view(torch.float8_e4m3fn)  # as vLLM's layer passes it
        out, lse = impl.forward_mqa(q.split((rank, rotary), dim=-1), seen, metadata, layer)
        assert lse is None and torch.equal(out, impl.forward_mqa(q, seen, metadata, layer)[0])
        server.check(queries, q, out, is_causal=True, softmax_scale=impl.scale)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_unsupported_latents_are_refused():
    """Unsupported sizes, options and dtypes of latents raise errors, and the lists that vLLM asks for do not have them."""
    has_fwd_mla = paged.takes_latents(576, 512)
    assert VoltaMLABackend.is_mla() and (576 in VoltaMLABackend.get_supported_head_sizes()) == has_fwd_mla
    assert paged.takes_latents(80, 64) and VoltaMLABackend.get_supported_head_sizes()
    if not has_fwd_mla:
        refused(NotImplementedError, "head_size: got 576 with kv_lora_rank 512", vllm_server.latent_implementation, 512, 64)
    refused(NotImplementedError, "head_size: got 4160", vllm_server.latent_implementation, 4096, 64)
    refused(NotImplementedError, "sliding_window: got 5, expected None", vllm_server.latent_implementation, 64, 16, sliding_window=5)
    for dtype in ("fp8_ds_mla", "fp8_per_token_head", MIXED):
        message = f"kv_cache_dtype: got {dtype}, expected auto or float16 or fp8 or .*: "
        refused(NotImplementedError, message, vllm_server.latent_implementation, 64, 16, kv_cache_dtype=dtype)
        refused(NotImplementedError, message, VoltaMLABackend.get_kv_cache_shape, 25, PAGE, 1, 80, dtype)
        assert dtype not in VoltaMLABackend.supported_kv_cache_dtypes


@pytest.mark.parametrize("workspace", [expanded._WORKSPACE, 1], ids=["whole", "chunks"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2", vllm_server.INT8])
@on("cpu-fp32", "sim", "cuda")
def test_long_prompts(backend, kv_cache_dtype, workspace, monkeypatch):
    """Sequences with more than `most` new tokens attend to keys and values expanded from latents (kv_b_proj), with and without earlier
    tokens, which the workspace expands at once or in chunks. Shorter ones attend to latents."""
    rank, rotary, nope, columns, most = 64, 16, 32, 32, 4
    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", most)
    monkeypatch.setattr(expanded, "_WORKSPACE", workspace)
    server = Server(backend, nheads_k=1, headdim=rank + rotary)
    weight = backend.randn(rank, server.nheads * (nope + columns)) * rank**-0.5
    impl = vllm_server.latent_implementation(
        rank, rotary, kv_cache_dtype=kv_cache_dtype, kv_b_proj=lambda latent: (latent.to(weight.dtype) @ weight, None)
    )
    cache = server.kv_cache = vllm_server.latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
    layer = SimpleNamespace(_k_scale=torch.tensor(vllm_server.LAYER_SCALES[0], device=backend.device))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device(backend.device))
    sequences = [[] for _ in server.lengths]  # keys and values expanded from the cache's dequantized latents
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
        # only blocks of earlier tokens are expanded; sequence 1 has a bound on the host that is 20 too high
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
            numbers = torch.stack([vllm_server.latent_bytes(row, kv_cache_dtype, layer._k_scale)[1] for row in new[:n, 0]])
            new = new[n:]
            sequences[s] += zip(*impl.expansion.keys_and_values(numbers[:, :rank], numbers[:, rank:]))
        of_prompts = {s: queries[s] for s in prompts}
        server.check(of_prompts, q[decoded:], out.view(-1, server.nheads, columns), is_causal=True, softmax_scale=impl.scale)
        assert builder.build_for_cudagraph_capture(common).prefill is None
