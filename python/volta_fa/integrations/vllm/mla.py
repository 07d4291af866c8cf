"""Latent attention (DeepSeek's MLA) for vLLM: the backend that `--attention-backend CUSTOM` selects with VOLTA_FA_VLLM_MLA=1.

MLA is absorbed: vLLM multiplies the up-projection of the keys into the queries, and the output by the up-projection of the values. So
all query heads attend to one KV head, the latent with its rotary part; the latent is also the value. This backend does so for prompts
too. A prompt then costs (576 + 512) / (192 + 128) = 3.4 times the products of attention to expanded keys, but needs no expanded keys, no
workspace for them and no lengths on the host.

`volta_fa::fwd_mla` has the sizes of DeepSeek's models, 512 + 64 columns. The backend reports other sizes as unsupported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MLAAttentionImpl

from ...errors import bad_argument
from . import paged
from .backend import VoltaBackend, VoltaMetadata, VoltaMetadataBuilder

__all__ = ["VoltaMLABackend", "VoltaMLAImpl", "VoltaMLAMetadata", "VoltaMLAMetadataBuilder"]

#: Columns of the rotary part after a latent, in all models so far.
_ROTARY = 64


@dataclasses.dataclass
class VoltaMLAMetadata(VoltaMetadata):
    """`VoltaMetadata`, with the attributes by which vLLM's layer divides a batch. They declare all tokens to be those of decode steps."""

    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    decode: str | None = "all tokens"
    prefill: None = None


class VoltaMLAMetadataBuilder(VoltaMetadataBuilder):
    """Builds `VoltaMLAMetadata` as `VoltaMetadataBuilder` does."""

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> VoltaMLAMetadata:
        """Returns the metadata of a step, without synchronizing."""
        metadata = super().build(0, common_attn_metadata, fast_build)
        counts = {"num_decodes": common_attn_metadata.num_reqs, "num_decode_tokens": common_attn_metadata.num_actual_tokens}
        return VoltaMLAMetadata(**vars(metadata), **counts)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Returns False."""
        return False


class VoltaMLABackend(VoltaBackend):
    """Tells vLLM what the backend supports, before it builds a model."""

    @staticmethod
    def get_impl_cls() -> type[VoltaMLAImpl]:
        """Returns the class of a layer's attention."""
        return VoltaMLAImpl

    @staticmethod
    def get_builder_cls() -> type[VoltaMLAMetadataBuilder]:
        """Returns the class that builds a step's metadata."""
        return VoltaMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(0.26) Returns the shape of a layer's cache of latents, which have one head."""
        blocks, _, rows, _, columns = VoltaBackend.get_kv_cache_shape(num_blocks, block_size, 1, head_size, cache_dtype_str)
        return (blocks, rows, columns)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """(0.26) Returns the order of those dimensions in memory."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns the supported numbers of columns of a latent with its rotary part; [0] for none, because [] means all."""
        return [size for size in (320, 576) if paged.takes_latents(size, size - _ROTARY)] or [0]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Returns True for decoders."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def is_mla(cls) -> bool:
        """Returns True."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns False: no model has latents and sinks."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """(0.33) Returns False."""
        return False


class VoltaMLAImpl(MLAAttentionImpl):
    """A layer's attention. vLLM calls `do_kv_cache_update`, then `forward_mqa` for all tokens."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "indexer": indexer,
        }
        for name, value in options.items():
            if value is not None:
                raise bad_argument(name, value, "None in latent attention", error=NotImplementedError)
        paged.check_cache_dtype(kv_cache_dtype)
        paged.check_latents(head_size, kv_lora_rank)
        _use_no_prefill()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: vLLM passes all tokens to `forward_mqa`."""
        raise bad_argument("forward_mha", "a call", "none: all tokens are forward_mqa's", error=NotImplementedError)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: VoltaMLAMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attention of all tokens of a step to the latents, (tokens, num_heads, kv_lora_rank), and None for softmax_lse.

        Args:
            q: (tokens, num_heads, kv_lora_rank + rotary), or both parts.
            kv_c_and_k_pe_cache: the cache for `paged.split_latents`. vLLM's layer views every quantized cache as float8_e4m3fn.
            layer: holds the scale of an fp8 cache.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        scale = None if layer is None else layer._k_scale
        out = paged.attend_to_latents(q, kv_c_and_k_pe_cache, self.kv_lora_rank, self.scale, attn_metadata, self.kv_cache_dtype, scale)
        return out, None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Writes a step's latents into the cache, by `paged.write_latents`."""
        if kv_cache.numel():
            paged.write_latents(kv_c_normed, k_pe, kv_cache, slot_mapping.flatten(), self.kv_cache_dtype, k_scale)


# ---- prompts, from vLLM 0.26 on (checked with 0.26 and 0.33) ----
#
# vLLM's MLA layer builds a second attention backend for prompts. On Volta and Turing it would choose FlashAttention, which does not run
# there. `VoltaMLAImpl` computes prompts itself: `VoltaMLAMetadata` declares all tokens to be those of decode steps, so the layer calls
# no method of the backend here.


def _use_no_prefill() -> None:
    """Makes `NoPrefill` the prefill backend of the model that vLLM builds, unless `mla_prefill_backend` names one.

    Does nothing in releases without such backends, or while vLLM has no current config.
    """
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    except ImportError:
        return
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.attention_config.mla_prefill_backend is None:
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, f"{__name__}.NoPrefill")
        config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM


def __getattr__(name: str) -> Any:
    """Defines `NoPrefill` on first use, because releases before 0.26 have no base class for it."""
    if name != "NoPrefill":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    class NoPrefill(MLAPrefillBackend):
        """Supports all models, and computes nothing."""

        @staticmethod
        def get_name() -> str:
            """Returns the registered name."""
            return "CUSTOM"

        @classmethod
        def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
            """Returns no reasons against any model: the attention backend checks its own."""
            return []

        def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
            """Raises NotImplementedError: `VoltaMLAImpl.forward_mqa` computes all tokens."""
            raise bad_argument("run_prefill_new_tokens", "a call", "none: all tokens are forward_mqa's", error=NotImplementedError)

        run_prefill_context_chunk = run_prefill_new_tokens

    globals()["NoPrefill"] = NoPrefill
    return NoPrefill
