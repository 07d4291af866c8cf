"""vLLM's abstract classes on `paged`: the backend that `--attention-backend CUSTOM` selects.

Written for vLLM 0.19.1 to 0.33.0. (0.26) marks what releases up to 0.26 call, (0.33) what later ones call.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ...errors import bad_argument
from ...operands import MAX_HEADDIM, PAGE_SIZE_MULTIPLE
from .paged import Attention, Batch, bytes_of_a_token, cache_dtypes, check_cache_dtype, is_batch_invariant, split_cache, write

__all__ = ["VoltaAttentionImpl", "VoltaBackend", "VoltaMetadata", "VoltaMetadataBuilder", "VoltaV100Backend"]

#: Bytes of KV cache that a cascade must save. It costs two launches more in each layer, and vLLM then runs without whole-step graphs:
#: estimated 15 us (not measured), in which a V100 reads at 750 GB/s.
_CASCADE_BYTES = 15e-6 * 750e9


@dataclasses.dataclass
class VoltaMetadata(Batch, AttentionMetadata):
    """A step's `Batch`, and the other attributes that vLLM reads from metadata.

    All tensors are the runner's own, so a captured graph reads the values of the next step from them.
    """

    max_seq_len: int = 0
    slot_mapping: Tensor | None = None


class VoltaMetadataBuilder(AttentionMetadataBuilder):
    """Builds a step's metadata from references. With a common prefix it also subtracts its length, on the device.

    Supports CUDA graphs of all kinds: the kernels read lengths, block tables and query starts. The host decides by the number of
    rows and max_query_len, for which the runner passes upper bounds when it captures. Runner v2 of releases up to 0.26 passes that of its
    dummy batch, so there graphs serve decode steps alone.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    #: the tensors are the runner's
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculation = getattr(vllm_config, "speculative_config", None)
        is_tree = getattr(speculation, "use_dflash_ddtree", lambda: False)()
        if is_tree and not getattr(speculation, "ddtree_disable_tree_verify", False):
            expected = "another method, or ddtree_disable_tree_verify: 1Cat-vLLM tells no other backend the tree"
            raise bad_argument("speculative_config", "dflash_ddtree", expected, error=NotImplementedError)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Returns which steps a CUDA graph may serve."""
        runner_v2 = getattr(vllm_config, "use_v2_model_runner", os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1")
        is_fixed = not hasattr(AttentionBackend, "get_kv_cache_shape")  # 0.33
        return cls._cudagraph_support if is_fixed or not runner_v2 else AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> VoltaMetadata:
        """Returns the metadata of a step, without synchronizing."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise bad_argument("causal", "a tensor, one value a sequence", "one for the batch", error=NotImplementedError)
        metadata = VoltaMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=common.causal,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
        )
        if common_prefix_len:
            metadata.common_prefix_len = common_prefix_len
            metadata.shared_seqlen = torch.full((1,), common_prefix_len, dtype=torch.int32, device=common.seq_lens.device)
            metadata.own_seqlens = common.seq_lens - common_prefix_len
        return metadata

    def update_draft_decode_metadata(self, metadata: VoltaMetadata) -> None:
        """Does nothing, because the tensors are the runner's own."""

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """(0.26, with --no-disable-cascade-attn) Returns whether to read the first common_prefix_len tokens once for all sequences."""
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1 or is_batch_invariant():
            return False
        spec = self.kv_cache_spec
        token = 2 * num_kv_heads * spec.head_size * spec.dtype.itemsize
        return common_prefix_len * (len(query_lens) - 1) * token > _CASCADE_BYTES


class VoltaBackend(AttentionBackend):
    """Tells vLLM what the backend supports, before it builds a model."""

    #: (0.26) the backend writes into the output that vLLM allocates
    accept_output_buffer = True
    #: bfloat16 would copy the whole cache in each step
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    #: vLLM's cache has room for the scales of int8 if the backend can ask for it
    supported_kv_cache_dtypes: ClassVar[list[Any]] = cache_dtypes(beside_codes=hasattr(AttentionBackend, "customize_spec"))
    #: vLLM calls `do_kv_cache_update` for it
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Returns the registered name."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[VoltaAttentionImpl]:
        """Returns the class of a layer's attention."""
        return VoltaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[VoltaMetadataBuilder]:
        """Returns the class that builds a step's metadata."""
        return VoltaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Returns the page sizes of the kernels, of which vLLM's block sizes are multiples."""
        return [MultipleOf(PAGE_SIZE_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(0.26) Returns the shape of a layer's cache, for `paged.split_cache`."""
        if block_size % PAGE_SIZE_MULTIPLE:
            raise bad_argument("block_size", block_size, f"a multiple of {PAGE_SIZE_MULTIPLE}")
        check_cache_dtype(cache_dtype_str, beside_codes=False)
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """(0.33) Returns vLLM's layout of the layer's cache, with room for the scales of int8."""
        size = bytes_of_a_token(spec.dtype, spec.head_size + spec.head_size_v)
        return spec if size is None else dataclasses.replace(spec, state_content_bytes=size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """(0.26) Returns the order of those dimensions in memory: tokens before heads (NHD) or after (HND), as vLLM or a connector
        configures it. The kernels read both. With include_num_layers_dimension the layers are dimension 0 of the shape."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        hnd = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            # blocks outside of layers: what a connector moves is one piece of memory; with HND it may move single heads
            return (1, 2, 4, 0, 3, 5) if hnd else (1, 0, 2, 3, 4, 5)
        return (0, 1, 3, 2, 4) if hnd else (0, 1, 2, 3, 4)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns the headdims of caches that the kernels read without a copy."""
        return list(range(8, MAX_HEADDIM + 1, 8))

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Returns True for Volta, Turing, and later GPUs, which run Turing's PTX."""
        return (capability.major, capability.minor) >= (7, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Returns True for decoders, encoders and attention between both."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True: the kernels have sinks, as gpt-oss uses them."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns True: with VLLM_BATCH_INVARIANT every call is batch-invariant, and no prefix is shared."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """(0.33) Returns True."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """(0.33) Returns True."""
        return True


class VoltaV100Backend(VoltaBackend):
    """The same under the name of 1Cat-vLLM's backend for V100s, so that vLLM's policies for that name hold."""

    @staticmethod
    def get_name() -> str:
        """Returns the registered name."""
        return "FLASH_ATTN_V100"


class VoltaAttentionImpl(AttentionImpl):
    """A layer's attention. vLLM calls `do_kv_cache_update`, then `forward`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        check_cache_dtype(kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._without_cache = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self._attention = Attention(
            {"softmax_scale": self.scale, "softcap": logits_soft_cap or 0.0, "sinks": sinks}
            | ({"batch_invariant": True} if is_batch_invariant() else {}),
            sliding_window=sliding_window,
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: VoltaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Computes the attention of a step into output, and returns output.

        Args:
            query: (tokens, num_heads, head_size).
            key, value: (tokens, num_kv_heads, head_size), read in encoders only. Decoders read them from kv_cache.
            attn_metadata: None while vLLM measures memory: output becomes zeros.
        """
        for name, t in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if t is not None:
                raise bad_argument(name, "a tensor", "None: the output is not quantized", error=NotImplementedError)
        if attn_metadata is None:
            return output.zero_()
        attention = self._attention.to(query.device)
        if self._without_cache:
            assert key is not None and value is not None
            attention.attend_without_cache(query, key, value, attn_metadata, output)
        else:
            k_cache, v_cache, scales = split_cache(kv_cache, self.head_size, self.kv_cache_dtype, layer)
            attention.attend(query, k_cache, v_cache, attn_metadata, output, **scales)
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes a step's keys and values into the cache, by `paged.write`."""
        if not self._without_cache:
            k_cache, v_cache, scales = split_cache(kv_cache, self.head_size, self.kv_cache_dtype, layer)
            write(key, value, k_cache, v_cache, slot_mapping, **scales)
