"""Tests of volta_fa.vllm's metadata, which each step's attention reads, and of what the backend tells vLLM about itself.

Names, most from vllm_server.py:
- Server: makes the tensors of a step (`step({sequence: new tokens})`); layout "packed-nhd": K and V side by side, tokens before heads
- `implementation`: the attention of a layer; PAGE: tokens of a block of the cache
- OLD: whether vLLM is 0.26 or older, or the stub: caches have no room for scales. 1Cat-vLLM: a fork for V100s
- FP8: vLLM's cache dtypes, whose scales belong to the layer
- BESIDE: cache dtypes with scales beside their codes: INT8, and MIXED (int8 keys, int4 values), which this package adds
- cascade: attends once to the prefix that sequences share
- spans: images, whose tokens see each other (mm_req_doc_ranges, is_mm_prefix_lm)
- anchored window (ANCHORS:WINDOW): a query sees the first ANCHORS tokens and the last WINDOW
- latents (MLA): `forward_mqa` attends to them; more than MOST_ABSORBED_QUERIES new tokens expand them to keys (`forward_mha`)
- `on(...)`: the backend of a test, tensors on the CPU; `refused`: checks that a call raises an error that matches"""

import dataclasses
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

import vllm_server
from conftest import REPOSITORY, on
from flash_attention import refused
from vllm_server import BESIDE, FP8, INT8, MIXED, OLD, PAGE, QuantizedServer, Server, implementation, latent_implementation, run

# Without a real vLLM, the import of vllm_server puts a stub of it into sys.modules.
# isort: split
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import volta_fa.vllm
from volta_fa.integrations.vllm import mla, paged
from volta_fa.integrations.vllm.backend import VoltaAttentionImpl, VoltaBackend, VoltaMetadataBuilder
from volta_fa.integrations.vllm.mla import VoltaMLABackend, VoltaMLAMetadataBuilder

# ---- metadata ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8, *BESIDE])
@on("cpu-fp32")
def test_no_value_is_read_on_the_host(backend, kv_cache_dtype, monkeypatch):
    """No step reads a value on the host, which would wait for the GPU: with meta tensors, which have no values, reading would raise. Covers
    metadata, cache update and attention, with a cascade, spans and latents."""
    server = Server(backend) if kv_cache_dtype == "auto" else QuantizedServer(backend, kv_cache_dtype, "packed-nhd")
    q, k, v, slots, common = server.step({0: 21, 1: 5})
    latents = vllm_server.latent_cache("auto" if kv_cache_dtype == MIXED else kv_cache_dtype, 576, of=q)
    q, k, v, slots, kv_cache, latents = (t.to("meta") for t in (q, k, v, slots, server.kv_cache, latents))
    layer = SimpleNamespace(_k_scale=torch.empty((), device="meta"), _v_scale=torch.empty((), device="meta"))
    for name, t in vars(common).items():
        if isinstance(t, torch.Tensor) and name != "query_start_loc_cpu":
            setattr(common, name, t.to("meta"))

    def check(common_prefix_len, **options):
        impl = implementation(server, kv_cache_dtype=kv_cache_dtype, **options)
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
        metadata = server.builder.build(common_prefix_len, common)
        assert impl.forward(layer, q, k, v, kv_cache, metadata, torch.empty_like(q)).shape == q.shape

    check(0, alibi_slopes=[0.5] * 4)
    common.seq_lens_cpu_upper_bound, common.mm_req_doc_ranges = torch.tensor([21, 5]), {0: [(3, 9)], 1: []}
    check(16)
    common.seq_lens_cpu_upper_bound = common.mm_req_doc_ranges = None
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", "4:8")
    check(0)
    if kv_cache_dtype == MIXED:  # no format of latents
        return
    of_latents = latent_implementation(512, 64, kv_cache_dtype=kv_cache_dtype, kv_b_proj=lambda t: (t.new_empty(len(t), 4 * 64), None))
    builder = VoltaMLAMetadataBuilder(server.spec, ["layer"], None, torch.device("meta"))
    made = torch.empty(26, 576, device="meta").split((512, 64), dim=-1)
    of_latents.do_kv_cache_update(*made, latents, slots, kv_cache_dtype, layer._k_scale)
    out, _ = of_latents.forward_mqa(torch.empty(26, 4, 576, device="meta"), latents, builder.build(0, common), layer)
    assert out.shape == (26, 4, 512)
    monkeypatch.setattr(mla, "MOST_ABSORBED_QUERIES", 4)
    common.seq_lens_cpu_upper_bound = torch.tensor([38, 5])  # sequence 0 may have 17 earlier tokens beside 21 new ones
    q, out = torch.empty(26, 4, 96, device="meta"), torch.empty(26, 4 * 32, device="meta")
    of_latents.forward_mha(q, *made, latents, builder.build(0, common), layer._k_scale, out)


def test_support_of_cuda_graphs(monkeypatch):
    """With vLLM's second model runner up to 0.26, whose bounds of mixed steps are too low, only graphs of uniform batches are allowed."""
    assert VoltaMetadataBuilder.get_cudagraph_support(SimpleNamespace(use_v2_model_runner=False), None) is AttentionCGSupport.ALWAYS
    is_old = hasattr(AttentionBackend, "get_kv_cache_shape")
    expected = AttentionCGSupport.UNIFORM_BATCH if is_old else AttentionCGSupport.ALWAYS
    assert VoltaMLAMetadataBuilder.get_cudagraph_support(SimpleNamespace(use_v2_model_runner=True), None) is expected
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert VoltaMetadataBuilder.get_cudagraph_support(SimpleNamespace(), None) is expected
    # spans are in a step's metadata, and a graph replays another step's
    with_spans = SimpleNamespace(use_v2_model_runner=False, model_config=SimpleNamespace(is_mm_prefix_lm=True))
    assert VoltaMetadataBuilder.get_cudagraph_support(with_spans, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    with_spans.model_config.is_mm_prefix_lm = False
    assert VoltaMetadataBuilder.get_cudagraph_support(with_spans, None) is AttentionCGSupport.ALWAYS


def builder_of(config=None, **spec):
    """Returns a builder of metadata, for a cache with these fields."""
    fields = {"head_size": 64, "dtype": torch.float16, "block_size": PAGE}
    return VoltaMetadataBuilder(SimpleNamespace(**fields | spec), [], config, torch.device("cpu"))


def test_draft_trees_of_1cat_are_refused():
    tree = SimpleNamespace(use_dflash_ddtree=lambda: True, ddtree_disable_tree_verify=True)
    config = SimpleNamespace(speculative_config=tree)
    builder_of(config)
    tree.ddtree_disable_tree_verify = False
    refused(NotImplementedError, "speculative_config: got dflash_ddtree", builder_of, config)


def test_when_a_cascade_pays():
    """A cascade reads the common prefix once instead of once per sequence, so it pays for long prefixes of several sequences."""
    builder = builder_of(head_size=128)
    names = ("use_alibi", "use_sliding_window", "use_local_attention")
    options = dict.fromkeys(names, False) | {"num_query_heads": 32, "num_kv_heads": 8, "num_sms": 80, "dcp_world_size": 1}

    def pays(prefix, requests, **other):
        return builder.use_cascade_attention(common_prefix_len=prefix, query_lens=[1] * requests, **options | other)

    assert pays(2048, 4) and pays(16384, 2) and not pays(2048, 2) and not pays(2048, 1) and not pays(256, 8)
    assert not any(pays(16384, 8, **{name: True}) for name in names) and not pays(16384, 8, dcp_world_size=2)


# ---- what vLLM asks before it runs a model -----------------------------------------------------------------------------


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
    refused(ValueError, "VOLTA_FA_VLLM_MLA: got `yes`, expected 0 or 1", volta_fa.vllm.register)
    monkeypatch.delenv("VOLTA_FA_VLLM_MLA")
    # an older vLLM without a registry still starts
    monkeypatch.delattr(registry, "register_backend")
    with pytest.warns(UserWarning, match="no registry of attention backends"):
        volta_fa.vllm.register()


def test_unsupported_anchored_windows_are_refused(monkeypatch):
    """Invalid values of the variable, and layers and models for which an anchored window has no meaning or no first tokens."""
    name = "VOLTA_FA_VLLM_ANCHORED_WINDOW"
    server = SimpleNamespace(nheads=4, headdim=32, nheads_k=2)
    for value in ("4", "0:7", "4:0", "-1:7", "4:7:9", "a:b", ":"):
        monkeypatch.setenv(name, value)
        for call in (volta_fa.vllm.register, lambda: implementation(server)):
            refused(ValueError, f"{name}: got `{value}`, expected ANCHORS:WINDOW, two numbers of tokens", call)
    monkeypatch.setenv(name, "4:7")
    volta_fa.vllm.register()
    refused(NotImplementedError, f"alibi_slopes: got slopes, expected None with {name}", implementation, server, alibi_slopes=[0.5] * 4)
    spans = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    refused(NotImplementedError, f"is_mm_prefix_lm: got True, expected none with {name}", builder_of, spans)
    # as `pays(16384, 8)` in test_when_a_cascade_pays, by position
    assert not builder_of().use_cascade_attention(16384, [1] * 8, 32, 8, False, False, False, 80, 1)
    refused(NotImplementedError, f"attention_chunk_size: got 8192, expected none with {name}", builder_of, attention_chunk_size=8192)
    monkeypatch.setenv("VOLTA_FA_VLLM_MLA", "1")
    refused(ValueError, f"{name}: got a window, expected none with VOLTA_FA_VLLM_MLA=1: unset one", volta_fa.vllm.register)


@on("cpu-fp32")
def test_unsupported_causality_is_refused(backend, monkeypatch):
    server = Server(backend)
    *_, common = server.step({0: 21, 1: 5})
    common.causal = torch.ones(2, dtype=torch.bool)
    refused(NotImplementedError, "causal: got a tensor", server.builder.build, 0, common)
    monkeypatch.setenv("VOLTA_FA_VLLM_ANCHORED_WINDOW", "4:7")
    with pytest.raises(NotImplementedError, match="causal: got False, expected True with VOLTA_FA_VLLM_ANCHORED_WINDOW"):
        run(server, implementation(server), {0: 9}, causal=False)


def test_entry_point():
    """pyproject.toml names volta_fa.vllm.register as a plugin of vLLM."""
    project = pytest.importorskip("tomllib").loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"vllm.general_plugins": {"volta_fa": "volta_fa.vllm:register"}}


def test_capabilities():
    """What the backend tells vLLM: classes, kinds of attention, supported GPUs and head sizes, block sizes, and bytes of a token."""
    assert VoltaBackend.get_impl_cls() is VoltaAttentionImpl and VoltaBackend.get_builder_cls() is VoltaMetadataBuilder
    assert not VoltaBackend.forward_includes_kv_cache_update
    assert [size.base for size in VoltaBackend.get_supported_kernel_block_sizes()] == [16]
    assert VoltaBackend.supports_sink() and VoltaBackend.supports_sliding_window() and VoltaBackend.supports_non_causal()
    assert all(VoltaBackend.supports_attn_type(kind) for kind in AttentionType)
    has_spans = "mm_req_doc_ranges" in CommonAttentionMetadata.__dataclass_fields__
    assert VoltaBackend.supports_mm_prefix() == has_spans and not VoltaMLABackend.supports_mm_prefix()
    capabilities = {(7, 0): True, (7, 5): True, (9, 0): True, (6, 1): False}
    assert {pair: VoltaBackend.supports_compute_capability(DeviceCapability(*pair)) for pair in capabilities} == capabilities
    sizes = VoltaBackend.get_supported_head_sizes()
    assert {64, 80, 96, 128, 256, 512} < set(sizes) and not {100, 520, 576} & set(sizes)
    refused(ValueError, "block_size: got 24, expected a multiple of 16", VoltaBackend.get_kv_cache_shape, 3, 24, 2, 64)
    # for later releases: bytes of int8 keys and values (or int4: half), or a latent, and 16 that hold scales
    optional = [("state_content_bytes", object, None), ("kv_quant_mode", object, None)]
    spec = dataclasses.make_dataclass("Spec", [("dtype", torch.dtype), "head_size", "head_size_v", *optional])
    per_token = SimpleNamespace(name="INT8_PER_TOKEN_HEAD")
    assert VoltaBackend.customize_spec(spec(torch.uint8, 128, 64, kv_quant_mode=per_token)).state_content_bytes == 128 + 32 + 16
    assert VoltaBackend.customize_spec(spec(torch.int8, 128, 64)).state_content_bytes == 128 + 64 + 16
    assert VoltaMLABackend.customize_spec(spec(torch.int8, 576, 0)).state_content_bytes == 576 + 16
    assert VoltaBackend.customize_spec(spec(torch.uint8, 128, 64)).state_content_bytes is None


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.skipif(not OLD, reason="this vLLM lays caches out itself")
def test_strides(layout, layers, monkeypatch):
    """vLLM allocates a cache in the stride order and permutes it back. With HND a head's rows of a block are contiguous, else a token's."""
    monkeypatch.setattr(importlib.import_module("vllm.v1.attention.backends.utils"), "get_kv_cache_layout", lambda: layout)
    shape = ((3,) if layers else ()) + VoltaBackend.get_kv_cache_shape(5, 16, 2, 64)
    order = VoltaBackend.get_kv_cache_stride_order(layers)
    assert sorted(order) == list(range(len(shape)))
    cache = torch.empty([shape[i] for i in order]).permute(*(order.index(i) for i in range(len(order))))
    assert cache.shape == shape
    k_cache, v_cache, _ = paged.split_cache(cache[1] if layers else cache, 64)
    assert k_cache.shape == v_cache.shape == (5, 16, 2, 64) and k_cache.stride(3) == 1
    count = 3 if layers else 1
    # all layers' parts of a block are contiguous; with HND within it all layers' parts of a head
    assert k_cache.stride() == (count * 2 * 16 * 2 * 64, *((2 * 64, 64) if layout == "NHD" else (64, count * 16 * 64)), 1)


def test_unsupported_caches_and_outputs_are_refused():
    server = SimpleNamespace(nheads=4, headdim=32, nheads_k=2)
    for dtype, why in (("fp8_inc", "read no others"), ("int4_per_token_head", "read no others"), ("bfloat16", "no bfloat16")):
        with pytest.raises(NotImplementedError, match=f"kv_cache_dtype: got {dtype}, expected auto or float16 or fp8 or .*: .*{why}"):
            implementation(server, kv_cache_dtype=dtype)
        assert dtype not in VoltaBackend.supported_kv_cache_dtypes
    why = "kv_cache_dtype: got int8_per_token_head, expected auto .* or fp8_e5m2: a cache of this vLLM has no room for a scale"
    for backend in (VoltaBackend, VoltaMLABackend):
        refused(NotImplementedError, why, backend.get_kv_cache_shape, 25, PAGE, 1, 64, INT8)
        # vLLM asks before it loads a model
        assert (INT8 in backend.supported_kv_cache_dtypes) == (not OLD) and "fp8" in backend.supported_kv_cache_dtypes
    assert (MIXED in VoltaBackend.supported_kv_cache_dtypes) == (not OLD) and MIXED not in VoltaMLABackend.supported_kv_cache_dtypes
    refused(NotImplementedError, why, paged.split_cache, torch.zeros(3, 2, PAGE, 2, 48, dtype=torch.int8), 32, INT8)
    q = torch.randn(3, 4, 32)
    impl = implementation(server)
    # arguments: layer, query, key, value, kv_cache, metadata (None while vLLM measures memory), output
    for name in ("output_scale", "output_block_scale"):
        refused(NotImplementedError, f"{name}: got a tensor", impl.forward, None, q, q, q, q, None, q, **{name: q})
    assert (impl.forward(None, q, q, q, q, None, torch.full_like(q, math.nan)) == 0).all()
    refused(ValueError, r"kv_cache: got shape \(3, 4, 32\)", paged.split_cache, q, 32)
