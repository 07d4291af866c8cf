"""Latent attention (DeepSeek's MLA) for vLLM: the backend that `--attention-backend CUSTOM` selects with VOLTA_FA_VLLM_MLA=1.

A latent of 512 columns and its rotary part of 64 stand for a token's keys and values of all heads. There are two forms of attention:

- Absorbed, for decoding: vLLM multiplies the up-projection of the keys into the queries, and the output by the up-projection of the
  values. So all query heads attend to one KV head, the latent with its rotary part; the latent is also the value. CUDA graphs of whole
  steps have this form alone, because they must serve any batch.
- Expanded, for sequences with many new tokens: attention to keys and values that `expanded` makes from latents.

`volta_fa::fwd_mla` has the sizes of DeepSeek's models, 512 + 64 columns. The backend reports other sizes as unsupported. (0.26) marks what
only releases of vLLM up to 0.26 call, (0.33) what only later ones call."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MLAAttentionImpl

from ...errors import bad_argument, require_none
from . import paged  # Batch: the sequences of a step; split_latents: a layer's latents, and the scales of a quantized cache
from .backend import VoltaBackend, VoltaMetadata, VoltaMetadataBuilder, answer  # answer: a class method that returns a constant

# MOST_ABSORBED_QUERIES: most new tokens of a sequence for which the absorbed form costs less. Prompts: the sequences of a step that have
# more. Expansion: how a layer expands latents.
from .expanded import MOST_ABSORBED_QUERIES, Expansion, Prompts, attend_to_expanded

#: Columns of the rotary part after a latent, in all MLA models so far.
_ROTARY_COLUMNS = 64


@dataclasses.dataclass
class VoltaMLAMetadata(VoltaMetadata):
    """`VoltaMetadata`, with the attributes by which vLLM's layer divides a batch: the sequences before the first one with many new tokens
    take the absorbed form ("decode"), the others the expanded form ("prefill")."""

    num_decodes: int = 0  # sequences
    num_prefills: int = 0  # sequences
    num_decode_tokens: int = 0
    decode: paged.Batch | None = None  # None: there are none
    prefill: Prompts | None = None  # None: there are none


class VoltaMLAMetadataBuilder(VoltaMetadataBuilder):
    """Builds `VoltaMLAMetadata`."""

    reorder_batch_threshold = MOST_ABSORBED_QUERIES  # vLLM reorders a batch so that sequences with more new tokens come last

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> VoltaMLAMetadata:
        """Returns the metadata of a step, without synchronizing."""
        common = common_attn_metadata
        metadata = self.build_for_cudagraph_capture(common)
        # batch-invariant calls use one form alone, because the two forms round differently
        if metadata.max_query_len <= MOST_ABSORBED_QUERIES or paged.is_batch_invariant():
            return metadata
        starts = common.query_start_loc_cpu
        lengths = starts.diff()
        is_long = lengths > MOST_ABSORBED_QUERIES
        seq_lens_cpu = getattr(common, "seq_lens_cpu_upper_bound", None)
        if seq_lens_cpu is None:
            seq_lens_cpu = getattr(common, "_seq_lens_cpu", None)
        # vLLM's second model runner has no lengths on the host in 0.19 and 0.20. It also captures graphs by this method, with a max_seq_len
        # above all lengths. Then all sequences take the absorbed form.
        if not is_long.any() or seq_lens_cpu is None or metadata.max_seq_len > int(seq_lens_cpu.max()):
            return metadata
        decodes = int(is_long.int().argmax())  # the index of the first long one, so the number of those before it
        tokens = int(starts[decodes])
        metadata.num_decodes, metadata.num_decode_tokens = decodes, tokens
        metadata.num_prefills = common.num_reqs - decodes
        metadata.decode = None
        if decodes:
            metadata.decode = paged.Batch(
                num_actual_tokens=tokens, max_query_len=int(lengths[:decodes].max()),
                query_start_loc=metadata.query_start_loc[: decodes + 1], seq_lens=metadata.seq_lens[:decodes],
                block_table=metadata.block_table[:decodes], causal=metadata.causal,
            )  # fmt: skip
        prompt_starts = metadata.query_start_loc[decodes:]
        metadata.prefill = Prompts(
            cu_seqlens_q=prompt_starts - tokens,
            max_seqlen_q=metadata.max_query_len,
            context_lens=metadata.seq_lens[decodes:] - prompt_starts.diff(),
            most_context=seq_lens_cpu[decodes:] - lengths[decodes:],
            block_table=metadata.block_table[decodes:],
        )
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> VoltaMLAMetadata:
        """Returns metadata with which all tokens take the absorbed form."""
        metadata = VoltaMLAMetadata(**vars(super().build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)))
        metadata.num_decodes, metadata.num_decode_tokens = common_attn_metadata.num_reqs, metadata.num_actual_tokens
        metadata.decode = metadata
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Returns False."""
        return False


class VoltaMLABackend(VoltaBackend):
    """Tells vLLM what the backend supports, before it builds a model."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [name for name in VoltaBackend.supported_kv_cache_dtypes if name != paged.INT8K_INT4V]
    get_builder_cls = answer(VoltaMLAMetadataBuilder)
    is_mla = answer(True)
    supports_mm_prefix = answer(False)  # neither form of latent attention has spans, runs of image tokens that see each other
    supports_sink = answer(False)  # no model has latents and sinks
    supports_sliding_window = answer(False)  # (0.33)

    @staticmethod
    def get_impl_cls() -> type[VoltaMLAImpl]:
        """Returns the class of a layer's attention."""
        return VoltaMLAImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(0.26) Returns the shape of a layer's cache of latents, which have one head."""
        heads = 1
        blocks, _, rows, _, columns = VoltaBackend.get_kv_cache_shape(num_blocks, block_size, heads, head_size, cache_dtype_str)
        return (blocks, rows, columns)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """(0.26) Returns the order of those dimensions in memory."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns the supported numbers of columns of a latent with its rotary part; [0] for none, because [] means all."""
        # models have latents of 256 or 512 columns; takes_latents() asks the operators, which have kernels for 512
        return [size for size in (320, 576) if paged.takes_latents(size, size - _ROTARY_COLUMNS)] or [0]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Returns True for decoders."""
        return attn_type == AttentionType.DECODER


class VoltaMLAImpl(MLAAttentionImpl):
    """A layer's attention. vLLM calls `do_kv_cache_update`, then `forward_mha` for prompts and `forward_mqa` for the other tokens. Caches
    are (blocks, block_size, kv_lora_rank + rotary), in int8 with 16 columns before these: a token's scale. The constructor's head_size is
    kv_lora_rank + rotary, the columns of the cache. q_lora_rank and q_pad_num_heads change nothing here."""

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
        require_none(
            "None in latent attention", got=None, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap, kv_sharing_target_layer_name=kv_sharing_target_layer_name, indexer=indexer,
        )  # fmt: skip
        paged.check_cache_dtype(kv_cache_dtype, of_latents=True)
        if not paged.takes_latents(head_size, kv_lora_rank):
            got = f"{head_size} with kv_lora_rank {kv_lora_rank}"
            raise bad_argument("head_size", got, "sizes that volta_fa::fwd_mla takes", error=NotImplementedError)
        _use_no_prefill()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        # kv_b_proj: vLLM's up-projection of a latent, which returns a bias too
        self.expansion = Expansion(lambda latent: kv_b_proj(latent)[0], num_heads, qk_nope_head_dim, v_head_dim)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: VoltaMLAMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Computes the attention of the prompts' new tokens into output, (tokens, num_heads * v_head_dim).

        Args:
            q: (tokens, num_heads, qk_nope_head_dim + rotary).
            kv_c_normed: (tokens, kv_lora_rank); k_pe: (tokens, 1, rotary). The cache has them too.
            kv_c_and_k_pe_cache: the cache for `paged.split_latents`.
        """
        require_none("None", output_scale=output_scale)
        assert attn_metadata.prefill is not None
        cached = paged.split_latents(kv_c_and_k_pe_cache, self.kv_cache_dtype, k_scale)
        out = attend_to_expanded(q, (kv_c_normed, k_pe), cached, attn_metadata.prefill, self.expansion, self.scale)
        output.copy_(out.view_as(output))

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: VoltaMLAMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attention of the other tokens of a step to the latents, (tokens, num_heads, kv_lora_rank), and None for softmax_lse.

        Args:
            q: (tokens, num_heads, kv_lora_rank + rotary), or both parts.
            kv_c_and_k_pe_cache: the cache for `paged.split_latents`. vLLM's layer views every quantized cache as float8_e4m3fn.
            layer: holds the scale of an fp8 cache.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        assert attn_metadata.decode is not None
        cached = paged.split_latents(kv_c_and_k_pe_cache, self.kv_cache_dtype, None if layer is None else layer._k_scale)
        return paged.attend_to_latents(q, *cached, self.kv_lora_rank, self.scale, attn_metadata.decode), None

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
# there. `VoltaMLAImpl.forward_mha` computes prompts itself, and calls no method of the backend here.


def _use_no_prefill() -> None:
    """Makes `NoPrefill` the prefill backend of the model that vLLM builds, unless `mla_prefill_backend` names one.
    Does nothing in releases without such backends, or while vLLM has no current config."""
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

        get_name = answer("CUSTOM")

        @classmethod
        def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
            """Returns no reasons against any model: the attention backend checks its own."""
            return []

        def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
            """Raises NotImplementedError: `VoltaMLAImpl.forward_mha` computes prompts."""
            raise bad_argument("run_prefill_new_tokens", "a call", "none: forward_mha computes prompts", error=NotImplementedError)

        run_prefill_context_chunk = run_prefill_new_tokens

    globals()["NoPrefill"] = NoPrefill
    return NoPrefill
