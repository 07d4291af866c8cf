"""The attention backend that vLLM's `--attention-backend CUSTOM` selects: vLLM's abstract classes, implemented by `paged`.

For a model vLLM asks `VoltaBackend` what it supports. For each step (a forward pass of all scheduled sequences) the model runner calls
`VoltaMetadataBuilder.build`. Each layer's `VoltaAttentionImpl` then writes the new tokens into the paged cache and attends to it.

An anchored window (VOLTA_FA_VLLM_ANCHORED_WINDOW=ANCHORS:WINDOW) applies to decoder layers without a window of their own: a query sees the
first ANCHORS tokens of its sequence and the last WINDOW up to its own.

Written for vLLM 0.19.1 to 0.33.0. (0.26) marks what only releases up to 0.26 call, (0.33) what only later ones call."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
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

from ...errors import bad_argument, require_none
from ...operands import MAX_HEADDIM, PAGE_SIZE_MULTIPLE  # columns; tokens

# Of paged: Batch: the sequences of a step; Attention: a layer's options and calls of the operators; split_cache: views k_cache and v_cache
# of a layer's tensor, and the scales of a quantized one.
from . import paged
from .paged import anchored_window  # (ANCHORS, WINDOW) of the variable, or None
from .ranks import Earlier, Ranks  # GPUs that share the cached tokens of a KV head; the tokens before a step's new ones
from .spans import find_spans  # the images of a step whose tokens see each other

#: A cascade reads a shared prefix once for all sequences. It runs if that saves at least these bytes of a layer's KV cache: a V100 reads
#: them in 15 us (at 750 GB/s), the estimated, unmeasured cost of its two more launches and of running outside a full CUDA graph.
_MIN_CASCADE_BYTES = 15e-6 * 750e9


@dataclasses.dataclass
class VoltaMetadata(paged.Batch, AttentionMetadata):
    """A step's `Batch`, and the other attributes that vLLM reads from metadata.
    All tensors are the runner's own, so a captured graph reads the values of the next step from them."""

    max_seq_len: int = 0  # tokens of the longest sequence, or more
    slot_mapping: Tensor | None = None  # (tokens): the place in the cache of each new token


def answer(value: object) -> Any:
    """Returns a class method without arguments that returns `value`: the form of vLLM's questions about a backend."""
    return classmethod(lambda cls: value)


def _has_spans(vllm_config: Any) -> bool:  # whether the model's image tokens see each other (`spans`)
    return getattr(getattr(vllm_config, "model_config", None), "is_mm_prefix_lm", False)


def find_ranks(vllm_config: Any, kv_cache_spec: Any) -> Ranks | None:
    """Returns the ranks that share the tokens of a layer's cache (decode context parallelism), or None."""
    parallel = getattr(vllm_config, "parallel_config", None)
    size = getattr(parallel, "decode_context_parallel_size", 1)
    if size == 1 or not getattr(kv_cache_spec, "dcp_sharded", True):  # a draft model's cache may be whole on each rank
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    # vLLM's functions that combine the ranks' partial results: by all-to-all, or by all-gather and reduce-scatter
    name = "dcp_a2a_lse_reduce" if getattr(parallel, "dcp_comm_backend", None) == "a2a" else "cp_lse_ag_out_rs"
    pynccl = getattr(getattr(get_dcp_group(), "device_communicator", None), "pynccl_comm", None)
    if name == "cp_lse_ag_out_rs" and getattr(pynccl, "disabled", False):
        # without NCCL, vLLM's reduce_scatter returns and has not written the result
        expected = "a2a: vLLM could not load NCCL, which its ag_rs needs (VLLM_NCCL_SO_PATH names another library)"
        raise bad_argument("dcp_comm_backend", "ag_rs", expected, error=RuntimeError)
    for module in ("dcp", "dcp_alltoall", "common"):  # the first from 0.33 on
        with contextlib.suppress(ImportError, AttributeError):
            combine = getattr(importlib.import_module(f"vllm.v1.attention.ops.{module}"), name)
            return Ranks(get_dcp_group(), getattr(parallel, "cp_kv_cache_interleave_size", 1), combine)
    raise bad_argument("decode_context_parallel_size", size, f"1: this vLLM has no {name}; install vLLM 0.19.1 to 0.33.0")


class VoltaMetadataBuilder(AttentionMetadataBuilder):
    """Builds a step's metadata, mostly references to the runner's tensors. Supports CUDA graphs of all kinds: the kernels read lengths,
    block tables and query starts. The host decides only by the number of rows and max_query_len, for which the runner passes upper bounds
    when it captures. vLLM's second model runner ("runner v2") passes the max_query_len of its dummy batch instead in releases up to 0.26.
    So there graphs serve decode steps alone."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    #: whether metadata stays valid between the steps of a draft model: yes, because the tensors are the runner's, which it updates
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculation = getattr(vllm_config, "speculative_config", None)
        is_tree = getattr(speculation, "use_dflash_ddtree", lambda: False)()  # draft tokens in a tree, a method of 1Cat-vLLM alone
        if is_tree and not getattr(speculation, "ddtree_disable_tree_verify", False):
            expected = "another method, or ddtree_disable_tree_verify: 1Cat-vLLM tells no other backend the tree"
            raise bad_argument("speculative_config", "dflash_ddtree", expected, error=NotImplementedError)
        chunk_size = getattr(kv_cache_spec, "attention_chunk_size", None)
        for name, option in (("is_mm_prefix_lm", _has_spans(vllm_config)), ("attention_chunk_size", chunk_size)):
            if option and anchored_window() is not None:
                expected = "none with VOLTA_FA_VLLM_ANCHORED_WINDOW: unset the variable"
                raise bad_argument(name, option, expected, error=NotImplementedError)
        self._ranks = find_ranks(vllm_config, kv_cache_spec)
        if self._ranks is not None:
            if _has_spans(vllm_config):
                size = self._ranks.group.world_size
                expected = "1 for a model whose image tokens see each other: remove --decode-context-parallel-size"
                raise bad_argument("decode_context_parallel_size", size, expected, error=NotImplementedError)
            # one tensor for all steps, because captured graphs read it
            self._earlier_lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
            self.supports_draft_decode_metadata_update = False  # the runner does not update that tensor

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Returns which steps a CUDA graph may serve."""
        if _has_spans(vllm_config):
            # a graph replays a step without spans, which only steps of one new token a sequence are sure to be
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        runner_v2 = getattr(vllm_config, "use_v2_model_runner", os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1")
        is_fixed = not hasattr(AttentionBackend, "get_kv_cache_shape")  # 0.33, whose runner v2 passes upper bounds
        return cls._cudagraph_support if is_fixed or not runner_v2 else AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> VoltaMetadata:
        """Returns the metadata of a step, without synchronizing. `fast_build`, vLLM's wish for less work, changes nothing."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise bad_argument("causal", "a tensor, one value a sequence", "one for the batch", error=NotImplementedError)
        ranges = getattr(common, "mm_req_doc_ranges", None)
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
        seq_lens_cpu = getattr(common, "seq_lens_cpu_upper_bound", None)
        if self._ranks is not None:
            new_tokens, count = common.query_start_loc.diff(), len(common.seq_lens)
            self._earlier_lengths[:count] = self._ranks.local_lengths((common.seq_lens - new_tokens).clamp(min=0))
            # tokens before the step's are shared among the ranks, those of the step are whole on each
            is_any = seq_lens_cpu is None or bool((seq_lens_cpu[:count] > common.query_start_loc_cpu.diff()).any())
            metadata.earlier = Earlier(self._ranks, self._earlier_lengths[:count], is_any)
        if ranges and common.causal and common.max_query_len > 1:
            if seq_lens_cpu is None:
                seq_lens_cpu = common.seq_lens.cpu()  # waits for the GPU; the runners of 0.26 and 0.33 have the lengths
            metadata.mm_prefix_range = find_spans(ranges, common.query_start_loc_cpu.tolist(), seq_lens_cpu.tolist(), metadata.block_table)
        if common_prefix_len:  # `use_cascade_attention` returned True: the shared tokens, and each sequence's without them
            metadata.common_prefix_len = common_prefix_len
            metadata.shared_seqlen = torch.full((1,), common_prefix_len, dtype=torch.int32, device=common.seq_lens.device)
            metadata.own_seqlens = common.seq_lens - common_prefix_len
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> VoltaMetadata:
        """Returns metadata of a graph that serves any step: with ranks, it reads earlier tokens."""
        metadata = self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)
        if metadata.earlier is not None:
            metadata.earlier.any = True
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
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1 or paged.is_batch_invariant() or anchored_window():
            return False
        spec = self.kv_cache_spec
        bytes_of_a_token = 2 * num_kv_heads * spec.head_size * spec.dtype.itemsize  # keys and values of all KV heads
        return common_prefix_len * (len(query_lens) - 1) * bytes_of_a_token > _MIN_CASCADE_BYTES


class VoltaBackend(AttentionBackend):
    """Tells vLLM what the backend supports, before it builds a model."""

    accept_output_buffer = True  # (0.26) the backend writes into the output that vLLM allocates
    #: not bfloat16: the operators would copy its cache in steps with more than 64 query rows per KV head
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    #: int8 codes need scales of tokens beside them: vLLM's cache has room for these if the backend can ask for it (`customize_spec`, 0.33)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = paged.cache_dtypes(beside_codes=hasattr(AttentionBackend, "customize_spec"))
    forward_includes_kv_cache_update = False  # vLLM calls `do_kv_cache_update` before `forward`

    get_name = answer("CUSTOM")  # the registered name
    get_builder_cls = answer(VoltaMetadataBuilder)

    @staticmethod
    def get_impl_cls() -> type[VoltaAttentionImpl]:
        """Returns the class of a layer's attention."""
        return VoltaAttentionImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Returns the page sizes of the kernels. vLLM's block sizes are multiples of them."""
        return [MultipleOf(PAGE_SIZE_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(0.26) Returns the shape of a layer's cache, for `paged.split_cache`."""
        if block_size % PAGE_SIZE_MULTIPLE:
            raise bad_argument("block_size", block_size, f"a multiple of {PAGE_SIZE_MULTIPLE}")
        paged.check_cache_dtype(cache_dtype_str, beside_codes=False)  # this shape has no room for scales
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """(0.33) Returns vLLM's layout of the layer's cache, with room for the scales of tokens."""
        size = paged.bytes_of_a_token(spec)
        return spec if size is None else dataclasses.replace(spec, state_content_bytes=size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """(0.26) Returns the order of the dimensions of `get_kv_cache_shape` in memory: tokens before heads (NHD) or after (HND), as vLLM
        or a connector configures it. The kernels read both. include_num_layers_dimension: dimension 0 of the shape is the layers."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        hnd = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            # blocks before layers, so that a block of all layers, which a connector moves, is contiguous; with HND each head of it is
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

    supports_sink = answer(True)  # the kernels have sinks, as gpt-oss uses them
    supports_batch_invariance = answer(True)  # with VLLM_BATCH_INVARIANT every call is batch-invariant, and no prefix is shared
    supports_sliding_window = answer(True)  # (0.33)
    supports_non_causal = answer(True)  # (0.33)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Returns whether vLLM's metadata has the spans of images, whose queries also see later tokens: from 0.26 on."""
        return "mm_req_doc_ranges" in CommonAttentionMetadata.__dataclass_fields__


class VoltaV100Backend(VoltaBackend):
    """The same backend under the name of 1Cat-vLLM's (a fork of vLLM) for V100s, by which that program decides about features."""

    get_name = answer("FLASH_ATTN_V100")


class VoltaAttentionImpl(AttentionImpl):
    """A layer's attention. vLLM calls `do_kv_cache_update`, then `forward`."""

    #: flags that vLLM requires for decode context parallelism (0.33: supports_dcp), with speculative tokens and any interleave too:
    #: `paged.attend_across_ranks` attends to new tokens apart from those in the shared cache
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

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
        paged.check_cache_dtype(kv_cache_dtype)
        if getattr(self, "dcp_world_size", 1) > 1:
            require_none(
                "None with decode context parallelism: remove --decode-context-parallel-size", got=None, alibi_slopes=alibi_slopes,
                sliding_window=sliding_window, kv_sharing_target_layer_name=kv_sharing_target_layer_name,
                VOLTA_FA_VLLM_ANCHORED_WINDOW=anchored_window(),
            )  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._without_cache = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        anchors = 0
        # not for layers with a sliding window of their own, whose first tokens vLLM frees
        if attn_type == AttentionType.DECODER and sliding_window is None and (given := anchored_window()) is not None:
            anchors, sliding_window = given
            require_none("None with VOLTA_FA_VLLM_ANCHORED_WINDOW: unset the variable", got="slopes", alibi_slopes=alibi_slopes)
        self._attention = paged.Attention(
            {"softmax_scale": self.scale, "softcap": logits_soft_cap or 0.0, "sinks": sinks}
            | ({"batch_invariant": True} if paged.is_batch_invariant() else {}),
            sliding_window=sliding_window,
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            anchor_tokens=anchors,
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
            key, value: (tokens, num_kv_heads, head_size), read in encoders and with ranks that share the cache. Else kv_cache is read.
            kv_cache: (blocks, 2, block_size, num_kv_heads, head_size), or (0.33) (blocks, num_kv_heads, block_size, 2 * head_size).
            attn_metadata: None while vLLM measures memory: output becomes zeros.
        """
        require_none("None: the output is not quantized", output_scale=output_scale, output_block_scale=output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        attention = self._attention.to(query.device)
        if self._without_cache:
            assert key is not None and value is not None
            attention.attend_without_cache(query, key, value, attn_metadata, output)
        else:
            self._check_spans(attn_metadata, layer)
            k_cache, v_cache, scales = paged.split_cache(kv_cache, self.head_size, self.kv_cache_dtype, layer)
            if attn_metadata.earlier is not None:
                if key is None or value is None:
                    expected = "new tokens: remove --decode-context-parallel-size for models with cross-attention"
                    raise bad_argument("key", "None", expected, error=NotImplementedError)
                attention.attend_across_ranks(query, key, value, k_cache, v_cache, attn_metadata, output, **scales)
                return output
            attention.attend(query, k_cache, v_cache, attn_metadata, output, **scales)
        return output

    def _check_spans(self, metadata: VoltaMetadata, layer: Any) -> None:
        """Raises NotImplementedError for a span (of an image) longer than the layer's window, unless the model wants the window to cut it:
        vLLM's runners do not report such spans."""
        spans, window = metadata.mm_prefix_range, self._attention.sliding_window
        if spans is None or window is None or spans.longest <= window or getattr(layer, "mm_prefix_clamp_sliding_window", False):
            return
        expected = f"at most {window}, the sliding window of the layer: use a smaller image"
        raise bad_argument("mm_req_doc_ranges", f"a span of {spans.longest} tokens", expected, error=NotImplementedError)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes a step's keys and values into the cache, by `paged.write`."""
        if not self._without_cache:
            k_cache, v_cache, scales = paged.split_cache(kv_cache, self.head_size, self.kv_cache_dtype, layer)
            paged.write(key, value, k_cache, v_cache, slot_mapping, **scales)
