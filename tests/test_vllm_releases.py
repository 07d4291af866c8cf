"""Tests of volta_fa.vllm with vLLM's own code around it: layers, selection, kernels, vision encoders, and 1Cat-vLLM's backend.

Tests with NEEDS_VLLM need a real vLLM, with which test_real_vllm runs this file; the others use vllm_stub.py. Helpers are in
vllm_server.py: Server makes the tensors of a step, STEPS are steps as {sequence: new tokens}, PAGE is the tokens of a block of the cache.
Caches: "packed": K and V side by side; nhd: tokens before heads, hnd: heads before tokens.
`on(...)` lists the values of the fixture `backend`: CPU (`cpu-DTYPE`), simulator (`sim`). `refused` checks an error's type and message.

Releases: OLD are those up to 0.26 and the stub, which ask the backend for the cache's shape. With PREFILL layers build another attention
for prompts of models with latents. LATER and SPANS skip tests if a release lacks room for scales, or passes no image spans to plugins.

A latent is a token's one key and value of all heads (MLA). A span is the tokens of one image, which see each other. 1Cat-vLLM is a fork of
vLLM for V100s. Cache dtypes: INT8 and MIXED (int8 keys, int4 values; this package adds it) have scales beside their codes (BESIDE).

Environment:
- VOLTA_FA_TEST_VLLM: folders (separated by colons) in each of which `import vllm` works, with which the tests run again: the Python files
  of a release and what these import. To make one: `pip download --no-deps vllm==0.33.0`, `unzip` of its `vllm/*.py`, `vllm/*.json` and
  `*/METADATA` into the folder, and the packages of the section [vllm] of tools/requirements.txt:
  `pip install --no-deps --target FOLDER $(sed -n '/^# .vllm/,/^$/{/^#/d;p}' tools/requirements.txt)`. No GPU is needed
- VOLTA_FA_TEST_VLLM_HERE: test_real_vllm sets it, so that vllm_server.py imports the real vLLM in place of the stub (REAL)"""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import subprocess
import sys
import types
from types import SimpleNamespace

import numpy
import pytest
import torch

import reference
import vllm_server
from conftest import REPOSITORY, on, within
from flash_attention import refused
from processes import output_of, run_program
from vllm_server import LAYER_SCALES, MIXED, OLD, PAGE, REAL, SPANS, STEPS, QuantizedServer, Server, implementation, with_first_rows

# Without a real vLLM, the import of vllm_server puts a stub of it into sys.modules.
# isort: split
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import volta_fa.vllm
from volta_fa.integrations.vllm import mla
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaBackend, VoltaMetadata, VoltaV100Backend, find_ranks
from volta_fa.integrations.vllm.mla import VoltaMLABackend, VoltaMLAImpl, VoltaMLAMetadataBuilder
from volta_fa.integrations.vllm.spans import find_spans

NEEDS_VLLM = pytest.mark.skipif(not REAL, reason="no vLLM")


@NEEDS_VLLM
@pytest.mark.parametrize(
    "cls", [VoltaBackend, VoltaAttentionImpl, VoltaMLABackend, VoltaMLAImpl, VoltaMLAMetadataBuilder, vllm_server.VoltaMetadataBuilder]
)
def test_methods_have_vllms_arguments(cls):
    """Methods that vLLM's base class has are of its kind (static, class) and have its arguments in its order. Either may have more."""
    base = next(parent for parent in cls.__mro__ if parent.__module__.startswith("vllm."))
    shared = [name for name, member in vars(cls).items() if callable(getattr(cls, name)) and hasattr(base, name)]
    assert len(shared) > 1

    def arguments(method):
        parameters = inspect.signature(getattr(method, "__func__", method)).parameters.values()
        return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    for name in shared:
        ours, theirs = (inspect.getattr_static(of, name) for of in (cls, base))
        assert type(ours) is type(theirs), name
        assert all(a == b for a, b in zip(arguments(ours), arguments(theirs))), name


@NEEDS_VLLM
def test_vllm_validates_the_backend():
    """vLLM's own validation accepts the backend on a V100, and gives a reason for each unsupported option."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    def reasons(capability=(7, 0), **options):
        asked = AttentionSelectorConfig(**dict(head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=16) | options)
        return VoltaBackend.validate_configuration(device_capability=DeviceCapability(*capability), **asked._asdict())

    supported = ({}, {"has_sink": True}, {"head_size": 512}, {"head_size": 256, "block_size": 48}, {"kv_cache_dtype": "fp8_e5m2"})
    for options in (*supported, {"kv_cache_dtype": "fp8"}, {"capability": (7, 5), "kv_cache_dtype": "float16"}):
        assert reasons(**options) == [], options
    assert reasons(dtype=torch.bfloat16) == ["dtype not supported"]
    assert all(reasons(kv_cache_dtype=dtype) == (["kv_cache_dtype not supported"] if OLD else []) for dtype in vllm_server.BESIDE)
    assert reasons(kv_cache_dtype="fp8_inc") == ["kv_cache_dtype not supported"]
    assert reasons(head_size=520) == ["head_size not supported"] and reasons(use_mla=True) == ["MLA not supported"]
    assert reasons((6, 0)) == ["compute capability not supported"] and reasons(block_size=8) == ["block_size not supported"]
    spans = "mm_req_doc_ranges" in CommonAttentionMetadata.__dataclass_fields__
    assert reasons(use_mm_prefix=True) == ([] if spans else ["partial multimodal token full attention not supported"])
    if "has_sliding_window" in AttentionSelectorConfig._fields:
        assert reasons(has_sliding_window=True) == reasons(use_non_causal=True) == []


@pytest.mark.skipif(not REAL or OLD, reason="vLLM asks the backend for the shape")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *vllm_server.BESIDE])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
@on("cpu-fp32")
def test_vllm_lays_the_cache_out(backend, layout, kv_cache_dtype):
    """vLLM's own views of two layers' memory, with room for int8's scales. `layout` orders layers, blocks, heads, tokens (N), contents."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.worker.utils import customize_attention_spec

    volta_fa.vllm.register()
    # vLLM's own answer, but for a layer that computes in float32
    dtype = torch.float32 if kv_cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]
    mode = interface.get_kv_quant_mode(kv_cache_dtype)
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=dtype, kv_quant_mode=mode)
    spec = customize_attention_spec(VoltaBackend, spec)
    # 16 tokens, 2 heads, and the bytes of a token and head
    assert spec.page_size_bytes == 16 * 2 * {"auto": 256, vllm_server.INT8: 64 + 16, MIXED: 32 + 16 + 16}[kv_cache_dtype]
    blocks, layers = 25, ["a", "b"]
    layout = interface.KVCacheLayout[layout]
    layer_stride, block_stride, *_ = interface.compute_layout_strides(spec, blocks, len(layers), layout)
    memory = torch.zeros(len(layers) * blocks * spec.page_size_bytes, dtype=torch.int8)
    tensor = interface.KVCacheTensor(memory.numel(), layers, layer_stride, block_stride)
    views = interface.create_kv_cache_views(memory, spec, blocks, layout, tensor)
    server = QuantizedServer(backend, kv_cache_dtype, "packed-hnd") if kv_cache_dtype != "auto" else Server(backend, "packed-hnd")
    for view in views:
        assert view.shape == server.kv_cache.shape and view.dtype == server.kv_cache.dtype
        view.copy_(server.kv_cache)
    server.kv_cache = views[1]
    vllm_server.serve(server, implementation(server, kv_cache_dtype=kv_cache_dtype), STEPS[:2], is_causal=True)
    assert views[0].isnan().all() or (views[0].view(torch.int8) == -1).all()


@pytest.mark.skipif(not REAL or OLD, reason="this vLLM has no values of --kv-cache-dtype from plugins")
def test_vllm_accepts_the_cache_dtype_of_the_plugin(monkeypatch):
    """vLLM refuses `--kv-cache-dtype int8k_int4v` before the plugin registers it. Registering it twice has no further effect."""
    from vllm.config import CacheConfig
    from vllm.config import cache as of_caches
    from vllm.engine.arg_utils import get_kwargs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    for table in ("KV_CACHE_DTYPES", "_KV_CACHE_DTYPE_HANDLERS"):
        kept = [name for name in getattr(of_caches, table) if name != MIXED]
        monkeypatch.setattr(of_caches, table, kept if table == "KV_CACHE_DTYPES" else {})
    with pytest.raises(ValueError, match="Invalid kv_cache_dtype: 'int8k_int4v'"):  # of pydantic, which has several lines
        CacheConfig(cache_dtype=MIXED)
    for _ in range(2):
        volta_fa.vllm.register()
    assert of_caches.KV_CACHE_DTYPES.count(MIXED) == 1 and is_quantized_kv_cache(MIXED)
    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-cache-dtype", **get_kwargs(CacheConfig)["cache_dtype"])  # as EngineArgs does, which asks for a device
    given = parser.parse_args(["--kv-cache-dtype", MIXED])
    assert CacheConfig(cache_dtype=given.kv_cache_dtype).cache_dtype == MIXED


@NEEDS_VLLM
def test_vllm_finds_the_plugin(tmp_path, monkeypatch):
    """vLLM loads the plugin by the entry point in a distribution's metadata, as pip installs it."""
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


@NEEDS_VLLM
def test_vllm_chooses_the_backend(monkeypatch):
    """vLLM's CUDA platform, with the capability of a V100, selects the backend for `--attention-backend CUSTOM`."""
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
    refused(ValueError, "MLA not supported", V100.get_attn_backend_cls, choice, asked._replace(use_mla=True))


@NEEDS_VLLM
@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", "fp8_e5m2", "fp8", *(pytest.param(dtype, marks=vllm_server.LATER) for dtype in vllm_server.BESIDE)]
)
@on("cpu-fp32")
def test_vllm_layer(backend, kv_cache_dtype, monkeypatch):
    """vLLM's own attention layer, in its forward context, gives right results: it calls the backend's cache update and forward."""
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
        layer = Attention(4, 32, 32**-0.5, cache_config=cache, **options)  # heads, headdim, scale
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


@NEEDS_VLLM
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *vllm_server.FP8, pytest.param(vllm_server.INT8, marks=vllm_server.LATER)])
@pytest.mark.parametrize("most_absorbed", [mla.MOST_ABSORBED_QUERIES, 4], ids=["absorbed", "expanded"])
@on("cpu-fp32")
def test_vllm_latent_layer(backend, kv_cache_dtype, most_absorbed, monkeypatch, tmp_path):
    """vLLM's own layer of latent attention (MLA), which absorbs the up-projections into queries and outputs, gives the result of attention
    to expanded keys and values. Sequences with more than `most_absorbed` new tokens are expanded by volta_fa."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.platforms import current_platform

    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", most_absorbed)
    monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *args, **kwargs: VoltaMLABackend)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(7, 0)))
    # a head's query has `nope` columns that meet the expanded latent, and `rotary` more; its values have `columns`
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
        if vllm_server.PREFILL and OLD:  # between 0.20.2 and 0.26, 1Cat-vLLM's among them, the choice of a prefill backend reads it
            config.model_config = SimpleNamespace(dtype=torch.float32, hf_text_config=None)
        dims = dict(qk_nope_head_dim=nope, qk_rope_head_dim=rotary, v_head_dim=columns, q_lora_rank=None, kv_lora_rank=rank)
        layer = mla_attention.MLAAttention(num_heads=heads, scale=0.2, kv_b_proj=projection, prefix="layer", cache_config=cached, **dims)
        layer.process_weights_after_loading(torch.float32)
    try:
        assert isinstance(layer.impl, VoltaMLAImpl)
        # vLLM chooses no attention of its own for prompts, which might not run on a V100, and does not treat the backend as sparse
        assert type(getattr(layer, "prefill_backend", None)).__name__ == ("NoPrefill" if vllm_server.PREFILL else "NoneType")
        assert not getattr(layer.impl, "is_sparse", False)
        server = Server(backend, nheads_k=1, headdim=rank + rotary)
        layer.kv_cache = vllm_server.latent_cache(kv_cache_dtype, rank + rotary, of=server.kv_cache)
        layer._k_scale.fill_(LAYER_SCALES[0])
        if not OLD:
            config.cache_config.block_size, config.model_config = PAGE, SimpleNamespace(dtype=torch.float32)
            from vllm.v1.worker.utils import customize_attention_spec

            spec = customize_attention_spec(VoltaMLABackend, layer.get_kv_cache_spec(config))
            assert (PAGE, 1, spec.page_size_bytes) == (spec.block_size, spec.num_heads, layer.kv_cache[0].nbytes)
        builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device("cpu"))
        for step in STEPS:
            queries = dict(sorted(step.items(), key=lambda item: item[1]))  # vLLM's runner puts long prompts last
            _, latents, _, slots, common = server.step(queries)
            latent, k_pe = latents.split((rank, rotary), dim=-1)

            def keys_and_values(rows):
                seen, seen_pe = rows[:, None].split((rank, rotary), dim=-1)
                k_nope, v = (seen[:, 0] @ projection.weight.T).view(-1, heads, nope + columns).split((nope, columns), dim=-1)
                return list(zip(torch.cat([k_nope, seen_pe.expand(-1, heads, -1)], -1), v))

            rounded = torch.stack([vllm_server.latent_bytes(row, kv_cache_dtype, layer._k_scale)[1] for row in latents[:, 0]])
            in_cache, given = keys_and_values(rounded), keys_and_values(latents[:, 0])
            q = backend.randn(len(latents), heads, nope + rotary)
            common.seq_lens_cpu_upper_bound = torch.tensor([server.lengths[s] for s in queries])
            in_step = set_forward_context({"layer": builder.build(0, common)}, config, slot_mapping={"layer": slots})
            with torch.inference_mode(), set_current_vllm_config(config), in_step:
                out = layer(q, latent[:, 0], k_pe, output_shape=(len(q), heads * columns))
            for (s, n), first in with_first_rows(queries):
                # a long prompt attends to its own tokens before quantization
                server.tokens[s][-n:] = (given if n > most_absorbed else in_cache)[first : first + n]
                inputs = (q[first : first + n][None], *(torch.stack(t)[None] for t in zip(*server.tokens[s])))
                server.tokens[s][-n:] = in_cache[first : first + n]
                expected = reference.forward(*inputs, is_causal=True, softmax_scale=0.2).out[0].float()
                # fp32 rounding: absorbed and expanded products of 64 terms are summed in different orders
                torch.testing.assert_close(out.view(-1, heads, columns)[first : first + n], expected, rtol=1e-5, atol=1e-5)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


# ---- vLLM's kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL or not importlib.util.find_spec("triton"), reason="no vLLM, or no Triton")
@SPANS
def test_vllm_kernels_agree():
    """vLLM's own kernels for image spans, and for combining ranks, agree with volta_fa in Triton's interpreter (vllm_kernels.py)."""
    command = [sys.executable, str(REPOSITORY / "tests/vllm_kernels.py")]
    found = json.loads(output_of(subprocess.run(command, capture_output=True, text=True)).splitlines()[-1])
    rounding = 3e-6  # of fp32
    assert len(found["spans"]) == 4 and all(pair["difference"] < rounding and pair["without_spans"] > 1 for pair in found["spans"])
    assert len(found["ranks"]) == 4 and max(found["ranks"]) < rounding


# ---- image spans -------------------------------------------------------------------------------------------------------


@NEEDS_VLLM
@pytest.mark.parametrize("seed", range(20))
@SPANS
def test_vllm_finds_the_same_spans(seed):
    """In random steps, find_spans gives the same queries that see later tokens, and the last of these, as vLLM's own map of queries."""
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    if not hasattr(utils, "fill_mm_prefix_query_ranges"):
        pytest.skip("this vLLM has no such map")
    rng = random.Random(seed)
    ranges, starts, seq_lens = {}, [0], []
    for i in range(rng.randrange(1, 6)):
        edges = sorted(rng.sample(range(60), 2 * rng.randrange(0, 4)))
        ranges[i] = list(zip(edges[::2], edges[1::2]))
        queries = rng.randrange(1, 50)
        starts.append(starts[-1] + queries)
        seq_lens.append(queries + rng.randrange(0, 20))
    table = torch.arange(4 * len(seq_lens), dtype=torch.int32).view(len(seq_lens), 4)  # so block // 4 is a sequence
    of_rows = numpy.full((starts[-1], 2), -1, dtype=numpy.int32)
    utils.fill_mm_prefix_query_ranges(of_rows, ranges, torch.tensor(starts), torch.tensor(seq_lens))
    found = find_spans(ranges, starts, seq_lens, table)
    theirs, ours = {}, {}  # of each row: its sequence, and the last key that it sees
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        for row in range(begin, end):
            later = min(int(of_rows[row, 1]), seq_lens[b] - 1)
            if of_rows[row, 0] >= 0 and later > row - end + seq_lens[b]:
                theirs[row] = (b, later)
    if found is not None:
        lengths = found.batch.query_start_loc.diff()
        of = torch.arange(len(lengths)).repeat_interleave(lengths)
        for row, span in zip(found.rows.tolist(), of.tolist()):
            ours[row] = (int(found.batch.block_table[span, 0]) // 4, int(found.batch.seq_lens[span]) - 1)
        for last in found.batch.query_start_loc[1:].tolist():  # the last query of a span has no later token
            del ours[int(found.rows[last - 1])]
    assert ours == theirs


@NEEDS_VLLM
@SPANS
def test_vllm_clears_spans_of_gemma4():
    """Gemma 4's global layers are causal: vLLM's model clears the metadata of these layers by the names of its own backends."""
    from vllm.forward_context import ForwardContext, override_forward_context

    try:
        from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
    except ImportError as error:
        pytest.skip(f"Gemma 4 needs more than the classes: {error}")
    steps = {f"model.layers.{i}.attn": SimpleNamespace(mm_prefix_range="spans") for i in range(2)}
    fields = {name: None for name in ForwardContext.__dataclass_fields__ if name not in ("attn_metadata",)}
    model = SimpleNamespace(_full_attn_layer_idxs={1})
    context = ForwardContext.__new__(ForwardContext)
    vars(context).update(fields, attn_metadata=steps)
    with override_forward_context(context):
        Gemma4ForConditionalGeneration._clear_mm_prefix_for_full_attn_layers(model)
    assert [step.mm_prefix_range for step in steps.values()] == ["spans", None]
    assert "mm_prefix_range" in VoltaMetadata.__dataclass_fields__


# ---- decode context parallelism ----------------------------------------------------------------------------------------


@NEEDS_VLLM
@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_find_ranks(exchange, monkeypatch):
    """With vLLM's decode context parallelism each rank has a part of the cache, and a function combines their results by `exchange`.
    find_ranks returns vLLM's group, this function, and the formula of a rank's length; None if each rank has the whole cache."""
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    assert VoltaAttentionImpl.can_return_lse_for_decode and not VoltaMLAImpl.can_return_lse_for_decode
    if hasattr(VoltaBackend, "supports_dcp"):
        assert VoltaBackend.supports_dcp() and not VoltaMLABackend.supports_dcp()
    lengths = torch.arange(200, dtype=torch.int32)
    for size, interleave, rank in ((2, 1, 0), (2, 1, 1), (4, 16, 0), (4, 16, 2), (3, 5, 2)):
        group = SimpleNamespace(world_size=size, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_DCP", group)
        parallel = SimpleNamespace(decode_context_parallel_size=size, cp_kv_cache_interleave_size=interleave, dcp_comm_backend=exchange)
        config = SimpleNamespace(parallel_config=parallel)
        ranks = find_ranks(config, SimpleNamespace())
        assert ranks.group is group and ranks.combine.__name__ == ("dcp_a2a_lse_reduce" if exchange == "a2a" else "cp_lse_ag_out_rs")
        assert list(inspect.signature(ranks.combine).parameters)[:3] == ["cp_attn_out", "cp_attn_lse", "cp_group"]
        assert inspect.signature(ranks.combine).parameters["is_lse_base_on_e"].default is True
        assert torch.equal(ranks.local_lengths(lengths), get_dcp_local_seq_lens(lengths, size, rank, interleave))
        assert find_ranks(config, SimpleNamespace(dcp_sharded=False)) is None
    parallel.decode_context_parallel_size = 1
    assert find_ranks(config, SimpleNamespace()) is None and find_ranks(None, None) is None


def test_ranks_without_vllms_nccl(monkeypatch):
    """If vLLM could not load NCCL, its reduce_scatter returns unwritten memory (seen on two H200s as wrong tokens), so ag_rs is refused."""
    pynccl = SimpleNamespace(disabled=True)
    group = SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=pynccl), world_size=2, rank_in_group=0)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(get_dcp_group=lambda: group))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.dcp", SimpleNamespace(cp_lse_ag_out_rs=max, dcp_a2a_lse_reduce=min))
    parallel = SimpleNamespace(decode_context_parallel_size=2, dcp_comm_backend="ag_rs")
    config = SimpleNamespace(parallel_config=parallel)
    refused(RuntimeError, "dcp_comm_backend: got ag_rs, expected a2a", find_ranks, config, None)
    parallel.dcp_comm_backend = "a2a"
    assert find_ranks(config, None).combine is min
    parallel.dcp_comm_backend, pynccl.disabled = "ag_rs", False
    assert find_ranks(config, None).combine is max


# ---- vision encoders ---------------------------------------------------------------------------------------------------


@NEEDS_VLLM
@pytest.mark.parametrize("lengths", [None, [9, 40, 1, 15]], ids=str)
@pytest.mark.parametrize("nheads_k", [4, 2])
@on("cpu-fp32", "sim")
def test_vllm_vision_layer(backend, nheads_k, lengths, monkeypatch):
    """The plugin replaces vLLM's attention layer of vision encoders: one image per batch entry, or packed images of several sizes."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import mm_encoder_attention

    backend.simulate()
    monkeypatch.setenv("VOLTA_FA_VLLM_VISION", "1")
    for _ in range(2):
        volta_fa.vllm.register()
    monkeypatch.setattr(mm_encoder_attention, "get_vit_attn_backend", lambda **_: AttentionBackendEnum.TORCH_SDPA)
    nheads, headdim, batch, total = 4, 72, 2 if lengths is None else 1, 65
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        layer = mm_encoder_attention.MMEncoderAttention(nheads, headdim, num_kv_heads=nheads_k)
    assert type(layer).__name__ == "VoltaMMEncoderAttention"
    q, k, v = (backend.randn(batch, total, n, headdim) for n in (nheads, nheads_k, nheads_k))
    starts = None if lengths is None else backend.ints([0, *itertools.accumulate(lengths)]).long()
    monkeypatch.setattr(mm_encoder_attention, "vit_torch_sdpa_wrapper", None)
    out = layer(q, k, v, starts)
    assert out.shape == q.shape and torch.equal(layer(*(t.flatten(2) for t in (q, k, v)), starts), out.flatten(2))
    parts = [(b, slice(0, total)) for b in range(batch)] if starts is None else [(0, slice(a, b)) for a, b in itertools.pairwise(starts)]
    for b, rows in parts:
        inputs = [t[b : b + 1, rows] for t in (q, k, v)]
        ref = reference.forward(*inputs)
        within(backend, "out", out[b : b + 1, rows], ref.out, reference.forward_budget(ref, *inputs))
    if backend.name == "sim":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        monkeypatch.setenv("VOLTA_FA_SIMULATE", "launches")
        layer(q, k, v, starts)
        assert "invariant" in str(torch.ops.volta_fa._sim_report())


# ---- 1Cat-vLLM ---------------------------------------------------------------------------------------------------------

NEEDS_1CAT = pytest.mark.skipif(not hasattr(AttentionBackendEnum, "FLASH_ATTN_V100"), reason="this vLLM is not 1Cat's")


def test_the_variable_for_1cat_vllm(monkeypatch):
    """VOLTA_FA_VLLM_1CAT=backend replaces the backend FLASH_ATTN_V100 of 1Cat-vLLM. A vLLM without that name refuses the value."""
    monkeypatch.setenv("VOLTA_FA_VLLM_1CAT", "yes")
    refused(ValueError, "VOLTA_FA_VLLM_1CAT: got `yes`, expected backend or package", volta_fa.vllm.register)
    monkeypatch.setenv("VOLTA_FA_VLLM_1CAT", "backend")
    if not hasattr(AttentionBackendEnum, "FLASH_ATTN_V100"):
        refused(ValueError, "VOLTA_FA_VLLM_1CAT: got `backend`, expected 1Cat-vLLM", volta_fa.vllm.register)
        return
    volta_fa.vllm.register()
    assert AttentionBackendEnum.FLASH_ATTN_V100.get_class() is VoltaV100Backend
    assert VoltaV100Backend.get_name() == "FLASH_ATTN_V100" and AttentionBackendEnum.CUSTOM.get_class() is VoltaBackend


@NEEDS_1CAT
@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
@on("sim")
def test_backend_of_1cat_on_the_package(backend, kv_cache_dtype, headdim, monkeypatch):
    """1Cat-vLLM's own FLASH_ATTN_V100 with volta_fa's functions as its package: prompts, chunks, decoding and several tokens at once."""
    monkeypatch.setenv("VOLTA_FA_VLLM_1CAT", "package")
    volta_fa.vllm.register()
    from vllm.v1.attention.backends import flash_attn_v100 as theirs
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    sizes = {"nheads": 6, "nheads_k": 1, "headdim": headdim}
    server = Server(backend, **sizes) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, **sizes)
    impl = theirs.FlashAttnV100Impl(6, headdim, headdim**-0.5, 1, None, None, kv_cache_dtype)  # heads, ..., KV heads, no ALiBi, no window
    ours = implementation(server, kv_cache_dtype=kv_cache_dtype)
    layer = SimpleNamespace(
        layer_name="layer", _k_scale_float=LAYER_SCALES[0], _v_scale_float=LAYER_SCALES[1], **vars(server.layer or SimpleNamespace())
    )
    names = [field.name for field in dataclasses.fields(TritonAttentionMetadata)]
    for queries in STEPS:
        q, k, v, slots, common = server.step(queries)
        ours.do_kv_cache_update(layer, k, v, server.kv_cache, slots)
        known = vars(common) | {"block_table": common.block_table_tensor, "use_cascade": False, "common_prefix_len": 0}
        metadata = TritonAttentionMetadata(**dict.fromkeys(names) | {name: known[name] for name in names if name in known})
        out = torch.full_like(q, math.nan)
        impl.forward(layer, q, k, v, server.kv_cache, metadata, out)
        for (s, n), first in with_first_rows(queries):
            # a whole prompt attends to k and v before quantization
            if kv_cache_dtype == "auto" or server.lengths[s] > n:
                server.check({s: n}, q[first:], out[first:], is_causal=True)


# ---- all tests with a real release ------------------------------------------------------------------------------------

FOLDERS = [folder for folder in os.environ.get("VOLTA_FA_TEST_VLLM", "").split(":") if folder]


@pytest.mark.parametrize(
    "folder", FOLDERS or [pytest.param("", marks=pytest.mark.skip("VOLTA_FA_TEST_VLLM names no vLLM"))], ids=os.path.basename
)
@pytest.mark.skipif(REAL, reason="this process runs a real vLLM")
def test_real_vllm(folder):
    """Runs the tests of volta_fa.vllm with a real release, including those that need one."""
    files = sorted((REPOSITORY / "tests").glob("test_vllm*.py"))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *files]
    assert " passed" in output_of(run_program(*command, path=[folder], VOLTA_FA_TEST_VLLM_HERE="1"))
