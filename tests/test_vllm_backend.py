"""volta_fa.vllm's metadata, what it answers vLLM, and vLLM's own code around it. test_vllm.py runs these tests with real releases too."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import math
import os
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import reference
import vllm_stub
from conftest import REPOSITORY, on, within
from test_vllm import (
    FP8,
    INT8,
    LATER,
    LAYER_SCALES,
    OLD,
    PAGE,
    PREFILL,
    REAL,
    STEPS,
    QuantizedServer,
    Server,
    implementation,
    latent_bytes,
    latent_cache,
    latent_implementation,
    run,
)  # fmt: skip

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import volta_fa.vllm
from volta_fa.integrations.vllm import mla, paged
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaBackend, VoltaMetadataBuilder, VoltaV100Backend
from volta_fa.integrations.vllm.mla import VoltaMLABackend, VoltaMLAImpl, VoltaMLAMetadataBuilder

# ---- metadata ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8, INT8])
@on("cpu-fp32")
def test_nothing_waits(backend, kv_cache_dtype, monkeypatch):
    """Tensors without values: reading one raises. Building, writing and attending, with a cascade too, and to latents."""
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
    of_latents = latent_implementation(512, 64, kv_cache_dtype=kv_cache_dtype, kv_b_proj=lambda t: (t.new_empty(len(t), 4 * 64), None))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device("meta"))
    made = torch.empty(26, 576, device="meta").split((512, 64), dim=-1)
    of_latents.do_kv_cache_update(*made, latents, slots, kv_cache_dtype, layer._k_scale)
    out, _ = of_latents.forward_mqa(torch.empty(26, 4, 576, device="meta"), latents, builder.build(0, common), layer)
    assert out.shape == (26, 4, 512)
    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", 4)
    common.seq_lens_cpu_upper_bound = torch.tensor([38, 5])
    q, out = torch.empty(26, 4, 96, device="meta"), torch.empty(26, 4 * 32, device="meta")
    of_latents.forward_mha(q, *made, latents, builder.build(0, common), layer._k_scale, out)


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


def test_graphs_of_runner_v2(monkeypatch):
    """Up to 0.26 it captures mixed steps with too low bounds."""
    assert VoltaMetadataBuilder.get_cudagraph_support(SimpleNamespace(use_v2_model_runner=False), None) is AttentionCGSupport.ALWAYS
    is_old = hasattr(AttentionBackend, "get_kv_cache_shape")
    expected = AttentionCGSupport.UNIFORM_BATCH if is_old else AttentionCGSupport.ALWAYS
    assert VoltaMLAMetadataBuilder.get_cudagraph_support(SimpleNamespace(use_v2_model_runner=True), None) is expected
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert VoltaMetadataBuilder.get_cudagraph_support(SimpleNamespace(), None) is expected


def test_draft_trees_of_1cat_are_refused():
    tree = SimpleNamespace(use_dflash_ddtree=lambda: True, ddtree_disable_tree_verify=False)
    spec = SimpleNamespace(head_size=64, dtype=torch.float16, block_size=16)
    for disabled in (False, True):
        tree.ddtree_disable_tree_verify = disabled
        config = SimpleNamespace(speculative_config=tree)
        if disabled:
            VoltaMetadataBuilder(spec, [], config, torch.device("cpu"))
        else:
            with pytest.raises(NotImplementedError, match="speculative_config: got dflash_ddtree"):
                VoltaMetadataBuilder(spec, [], config, torch.device("cpu"))


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
    """The methods that stand-ins have are there, and take the same arguments in the same order. Newer ones may take more."""
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
@pytest.mark.parametrize("most_absorbed", [mla.MOST_ABSORBED_QUERIES, 4], ids=["absorbed", "expanded"])
@on("cpu-fp32")
def test_vllm_latent_layer(backend, kv_cache_dtype, most_absorbed, monkeypatch, tmp_path):
    """vLLM's own layer of latent attention, which multiplies the up-projections into queries and outputs, against attention to expanded
    keys and values: prompts, chunks and decoding, with long prompts expanded or not."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.platforms import current_platform

    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", most_absorbed)
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
        if PREFILL and OLD:  # between 0.20.2 and 0.26, 1Cat-vLLM's among them, the choice of a prefill backend reads it
            config.model_config = SimpleNamespace(dtype=torch.float32, hf_text_config=None)
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
        for step in STEPS:
            queries = dict(sorted(step.items(), key=lambda item: item[1]))  # vLLM's runner moves long prompts back
            _, latents, _, slots, common = server.step(queries)
            latent, k_pe = latents.split((rank, rotary), dim=-1)

            def keys_and_values(rows):
                seen, seen_pe = rows[:, None].split((rank, rotary), dim=-1)
                k_nope, v = (seen[:, 0] @ projection.weight.T).view(-1, heads, nope + columns).split((nope, columns), dim=-1)
                return list(zip(torch.cat([k_nope, seen_pe.expand(-1, heads, -1)], -1), v))

            in_cache = torch.stack([latent_bytes(row, kv_cache_dtype, layer._k_scale)[1] for row in latents[:, 0]])
            cached_ones, given = (keys_and_values(rows) for rows in (in_cache, latents[:, 0]))
            q = backend.randn(len(latents), heads, nope + rotary)
            common.seq_lens_cpu_upper_bound = torch.tensor([server.lengths[s] for s in queries])
            metadata = {"layer": builder.build(0, common)}
            with (
                torch.inference_mode(),
                set_current_vllm_config(config),
                set_forward_context(metadata, config, slot_mapping={"layer": slots}),
            ):
                out = layer(q, latent[:, 0], k_pe, output_shape=(len(q), heads * columns))
            first = 0
            for s, n in queries.items():
                # a long prompt attends to its own tokens as they were before the cache rounded them
                server.tokens[s][-n:] = (given if n > most_absorbed else cached_ones)[first : first + n]
                inputs = (q[first : first + n][None], *(torch.stack(t)[None] for t in zip(*server.tokens[s])))
                server.tokens[s][-n:] = cached_ones[first : first + n]
                expected = reference.forward(*inputs, is_causal=True, softmax_scale=0.2).out[0].float()
                # products in another order than those of expanded keys: fp32's rounding, of sums of 64
                torch.testing.assert_close(out.view(-1, heads, columns)[first : first + n], expected, rtol=1e-5, atol=1e-5)
                first += n
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


# ---- vision encoders ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL, reason="no vLLM")
@pytest.mark.parametrize("lengths", [None, [9, 40, 1, 15]], ids=str)
@pytest.mark.parametrize("nheads_k", [4, 2])
@on("cpu-fp32", "sim")
def test_vllm_vision_layer(backend, nheads_k, lengths, monkeypatch):
    """vLLM's own layer of vision encoders, which the plugin replaces: one image an entry, and images of several sizes."""
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

of_1cat = pytest.mark.skipif(not hasattr(AttentionBackendEnum, "FLASH_ATTN_V100"), reason="this vLLM is not 1Cat's")


def test_names_of_1cat(monkeypatch):
    """Other vLLMs have no such name; with it, the class answers to it."""
    monkeypatch.setenv("VOLTA_FA_VLLM_1CAT", "yes")
    with pytest.raises(ValueError, match="VOLTA_FA_VLLM_1CAT: got `yes`, expected backend or package"):
        volta_fa.vllm.register()
    monkeypatch.setenv("VOLTA_FA_VLLM_1CAT", "backend")
    if not hasattr(AttentionBackendEnum, "FLASH_ATTN_V100"):
        with pytest.raises(ValueError, match="VOLTA_FA_VLLM_1CAT: got `backend`, expected 1Cat-vLLM"):
            volta_fa.vllm.register()
        return
    volta_fa.vllm.register()
    assert AttentionBackendEnum.FLASH_ATTN_V100.get_class() is VoltaV100Backend
    assert VoltaV100Backend.get_name() == "FLASH_ATTN_V100" and AttentionBackendEnum.CUSTOM.get_class() is VoltaBackend


@of_1cat
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
    impl = theirs.FlashAttnV100Impl(6, headdim, headdim**-0.5, 1, None, None, kv_cache_dtype)
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
        first = 0
        for s, n in queries.items():
            # a whole prompt attends to k and v as they were before they became fp8
            if kv_cache_dtype == "auto" or server.lengths[s] > n:
                server.check({s: n}, q[first:], out[first:], is_causal=True)
            first += n
