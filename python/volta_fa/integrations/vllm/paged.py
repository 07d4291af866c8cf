"""vLLM's paged KV cache on volta_fa's operators: its layouts, writing tokens to it, attention over it. backend.py and mla.py call it.

Does not import vLLM. Does not synchronize with a GPU, unless VOLTA_FA_CHECK_LENGTHS=1. vLLM calls a page of the cache a block, and the
position of a token in the cache a slot. (0.33) marks what only releases of vLLM after 0.26 call."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import bad_argument
from ...kv_cache.anchored import anchored_window_attention_with_kvcache  # to a sequence's first tokens and last ones
from ...kv_cache.cascade import cascade_attention  # reads a shared prefix once for all sequences
from ...kv_cache.formats import cache_dtype, parts_of, quantize_kv  # of volta_fa's formats: torch's dtype; the formats of keys and values
from ...operands import LATENT_HEADDIMS, PAGE_SIZE_MULTIPLE  # columns of values, and of the rotary part; tokens
from ...operators import merge_attention_states  # of attention to two sets of keys

if TYPE_CHECKING:
    from .ranks import Earlier
    from .spans import Spans

#: Keys in int8, values in int4. vLLM has no such value of --kv-cache-dtype, so `register` adds it.
INT8K_INT4V = "int8k_int4v"

#: By the supported values of --kv-cache-dtype: volta_fa's name of the format (`volta_fa.quantize_kv`). None: float16, the model's dtype.
_FORMATS = {
    "auto": None,
    "float16": None,
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8",
    INT8K_INT4V: INT8K_INT4V,
}

#: By the values of --kv-cache-dtype: the dtype to which a cache is viewed (of int8k_int4v that of its keys), because vLLM passes it as
#: uint8, as int8 or, to latent attention, as float8_e4m3fn. None: vLLM passes the dtype itself.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    name: None if ours is None else cache_dtype(parts_of(ours)[0]) for name, ours in _FORMATS.items()
}

#: Bytes before the codes of each token and head of a cache with int8 keys. They hold float32 k_scale, v_scale and, with int4 values,
#: v_zero_point; of a latent its one scale. 4 to 12 would suffice, but decode kernels need codes on 16-byte boundaries.
SCALE_BYTES = 16


def cache_dtypes(beside_codes: bool, of_latents: bool = False) -> list[str]:
    """Returns the supported values of --kv-cache-dtype.

    Args:
        beside_codes: whether this vLLM's cache has room for the scales of tokens.
        of_latents: whether a token has one row, a latent (DeepSeek's MLA), which cannot have one format for keys and another for values.
    """
    return [
        name for name, dtype in CACHE_DTYPES.items() if (beside_codes or dtype != torch.int8) and not (of_latents and name == INT8K_INT4V)
    ]


def check_cache_dtype(kv_cache_dtype: str, beside_codes: bool = True, of_latents: bool = False) -> None:
    """Raises NotImplementedError for an unsupported --kv-cache-dtype. `beside_codes`, `of_latents`: as for `cache_dtypes`."""
    allowed = cache_dtypes(beside_codes, of_latents)
    if kv_cache_dtype in allowed:
        return
    why = "the operators read no others"
    if kv_cache_dtype == "bfloat16":
        why = "Volta and Turing have no bfloat16"
    elif of_latents and kv_cache_dtype == INT8K_INT4V:
        why = "a latent is key and value at once"
    elif kv_cache_dtype in CACHE_DTYPES:
        why = "a cache of this vLLM has no room for a scale of each token"
    raise bad_argument("kv_cache_dtype", kv_cache_dtype, f"{' or '.join(allowed)}: {why}", error=NotImplementedError)


def bytes_of_a_token(spec: Any) -> int | None:
    """(0.33) Returns the bytes of a token and head, keys and values together, for vLLM's spec of the cache; None: vLLM's own number."""
    if spec.dtype == torch.int8:
        return SCALE_BYTES + spec.head_size + spec.head_size_v
    # `register` gives int8k_int4v the mode of int8, and uint8; the other format of uint8 is fp8
    if spec.dtype == torch.uint8 and getattr(spec.kv_quant_mode, "name", "") == "INT8_PER_TOKEN_HEAD":
        return SCALE_BYTES + spec.head_size + spec.head_size_v // 2
    return None


def split_scales(cache: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor | None]:
    """Returns views of a cache: its codes in the operators' dtype, and, if keys are int8, the `SCALE_BYTES` before these as float32.
    `cache`: of any shape; the last dimension is the columns."""
    dtype = CACHE_DTYPES[kv_cache_dtype]
    if dtype is None:
        return cache, None
    if dtype != torch.int8:
        return cache.view(dtype), None
    return cache[..., SCALE_BYTES:].view(dtype), cache[..., :SCALE_BYTES].view(torch.float32)


def split_cache(
    kv_cache: Tensor, head_size: int, kv_cache_dtype: str = "auto", layer: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns views k_cache and v_cache, (blocks, block_size, nheads_k, head_size or head_size_v), of a layer's tensor, and the scales of a
    quantized cache as arguments of `volta_fa::fwd_kvcache`.

    Args:
        kv_cache: (blocks, 2, block_size, nheads_k, head_size) in vLLM up to 0.26; or (blocks, nheads_k, block_size,
            head_size + head_size_v) in later releases, with `SCALE_BYTES` more columns if keys are int8, and head_size_v / 2 of int4
            values. Strides are free.
        kv_cache_dtype: a key of `CACHE_DTYPES`.
        layer: vLLM's layer, with one float32 scale of fp8 keys and one of values, on its device.

    Raises ValueError for another shape, NotImplementedError for int8 in the first shape.
    """
    content, scales = split_scales(kv_cache, kv_cache_dtype)
    options: dict[str, Tensor] = {}
    if scales is not None:
        check_cache_dtype(kv_cache_dtype, beside_codes=kv_cache.dim() == 4)
        names = ("k_scale", "v_scale", "v_zero_point")[: 3 if kv_cache_dtype == INT8K_INT4V else 2]
        options = dict(zip(names, scales.transpose(1, 2).unbind(-1)))
    elif CACHE_DTYPES[kv_cache_dtype] is not None:
        options = {"k_descale": layer._k_scale.reshape(1), "v_descale": layer._v_scale.reshape(1)}
    if content.dim() == 5 and content.shape[1] == 2:
        k_cache, v_cache = content.unbind(1)
        return k_cache, v_cache, options
    if content.dim() == 4 and content.shape[3] > head_size:
        content = content.transpose(1, 2)
        k_cache, v_cache = content[..., :head_size], content[..., head_size:]
        return k_cache, v_cache.view(torch.uint8) if kv_cache_dtype == INT8K_INT4V else v_cache, options
    expected = f"(blocks, 2, block_size, nheads_k, {head_size}) or (blocks, nheads_k, block_size, {head_size} + head_size_v)"
    raise bad_argument("kv_cache", f"shape {tuple(kv_cache.shape)}", expected)


def write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **scales: Tensor) -> None:
    """Writes tokens into the cache slots of `slot_mapping`.

    vLLM guarantees this mapping, not the lengths: it leaves out padding and rejected draft tokens, and tokens of a sequence need not
    follow each other. So the append kernel gets each token as a sequence of its own: its page is the slot's block, its length the rows
    before the slot. There are no queries.

    Args:
        key, value: (tokens, nheads_k, head_size or head_size_v); tokens after the mapping's are padding.
        k_cache, v_cache, scales: the results of `split_cache`.
        slot_mapping: integers (tokens), block * block_size + row. A token with a negative slot is not written.
    """
    if slot_mapping.device.type == "cpu" or os.environ.get("VOLTA_FA_CHECK_LENGTHS") == "1":
        # where the operator checks values it raises for negative pages; the kernels skip such tokens
        is_written = slot_mapping >= 0
        if not is_written.all():
            key, value, slot_mapping = (t[: len(is_written)][is_written] for t in (key, value, slot_mapping))
    write_slots(key, value, k_cache, v_cache, slot_mapping, **scales)


def write_slots(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **scales: Tensor) -> None:
    """Does what `write` does, without removing negative slots."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    block_size, nheads_k, headdim = k_cache.shape[1:]
    slots = slot_mapping.to(torch.int32)
    no_queries = key.new_empty(tokens, 0, nheads_k, headdim)
    torch.ops.volta_fa.fwd_kvcache(
        no_queries, k_cache, v_cache, key[:tokens, None], value[:tokens, None],
        cache_seqlens=slots % block_size, block_table=(slots // block_size)[:, None], **scales,
    )  # fmt: skip


@dataclasses.dataclass
class Batch:
    """The sequences of a step. The cache already holds their new tokens."""

    #: rows of the packed queries that belong to the step. A captured graph counts all rows; those after query_start_loc's last value belong
    #: to no sequence, and their output is undefined.
    num_actual_tokens: int
    max_query_len: int  # at least the longest sequence's number of queries
    query_start_loc: Tensor  # int32 (batch + 1): where each sequence's queries begin
    seq_lens: Tensor  # int32 (batch): tokens of each sequence in the cache, new ones included
    block_table: Tensor  # int32 (batch, max_blocks): the blocks of each sequence, in order
    causal: bool = True  # the last query sees all tokens, the one before it all but the last, and so on. False: each sees all.
    common_prefix_len: int = 0  # tokens, in whole blocks, that all sequences share at their beginning, to be read once; 0 for none
    #: with common_prefix_len, int32 (1) and (batch): the shared tokens, and each sequence's without them
    shared_seqlen: Tensor | None = None
    own_seqlens: Tensor | None = None
    #: the tokens before the new ones, if ranks share them (ranks.py): `attend_across_ranks` reads only these from the cache
    earlier: Earlier | None = None
    #: the queries of images, which see later tokens too (spans.py). vLLM's Gemma 4 sets this name to None for layers in which they do not.
    mm_prefix_range: Spans | None = None


def is_batch_invariant() -> bool:
    """Returns whether vLLM's VLLM_BATCH_INVARIANT asks that no result depends on the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def anchored_window() -> tuple[int, int] | None:
    """Returns VOLTA_FA_VLLM_ANCHORED_WINDOW=ANCHORS:WINDOW as two numbers of tokens, or None if it is empty.
    Raises ValueError for another value."""
    value = os.environ.get("VOLTA_FA_VLLM_ANCHORED_WINDOW", "")
    if not value:
        return None
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in value.split(":")]
    if len(numbers) != 2 or min(numbers) < 1:
        expected = "ANCHORS:WINDOW, two numbers of tokens of 1 or more, such as 4:4096"
        raise bad_argument("VOLTA_FA_VLLM_ANCHORED_WINDOW", f"`{value}`", expected)
    return numbers[0], numbers[1]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns attention among the tokens of each sequence, (tokens, nheads, headdim_v), and its softmax_lse, by `volta_fa::fwd`.

    Args:
        q, k, v: (tokens, nheads or nheads_k, headdim or headdim_v).
        cu_seqlens: int32 (batch + 1): where each sequence begins.
        max_seqlen: at least the longest sequence's number of tokens.
        options: others of `volta_fa::fwd`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    out, softmax_lse, _ = torch.ops.volta_fa.fwd(q, k, v, **lengths, **options)
    return out, softmax_lse


@dataclasses.dataclass
class Attention:
    """A layer's options, under the names of `volta_fa::fwd_kvcache`, and its calls of the operators."""

    scores: dict[str, Any]  # arguments of every call: softmax_scale, softcap, sinks, batch_invariant
    sliding_window: int | None = None  # number of tokens that a query sees, its own included; None: all
    alibi_slopes: Tensor | None = None  # float32 (nheads)
    anchor_tokens: int = 0  # with sliding_window, number of first tokens of a sequence that all its queries see too

    def to(self, device: torch.device) -> Attention:
        """Moves the tensors to a device, and returns self: vLLM may create the slopes before it knows the device."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, output: Tensor, **scales: Tensor) -> None:
        """Computes the attention of a step over the cache into output.

        Args:
            query: (tokens, nheads, head_size).
            k_cache, v_cache, scales: the results of `split_cache`.
            output: (tokens, nheads, head_size_v) or (tokens, nheads * head_size_v).
        """
        q = query[: batch.num_actual_tokens]
        out = self._attend(q, k_cache, v_cache, batch, scales)
        spans = batch.mm_prefix_range
        if spans is not None:
            if self.alibi_slopes is not None:
                expected = "None with ALiBi, which has no bias for later tokens"
                raise bad_argument("mm_prefix_range", "spans", expected, error=NotImplementedError)
            # The operator copies keys of a quantized cache for many queries. Copies are as long as the table allows, so it is cut.
            blocks = -(-spans.max_seqlen_k // k_cache.shape[1])
            part = dataclasses.replace(spans.batch, block_table=spans.batch.block_table[:, :blocks])
            out.index_copy_(0, spans.rows, self._attend(q.index_select(0, spans.rows), k_cache, v_cache, part, scales))
        output[: batch.num_actual_tokens].view_as(out).copy_(out)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scales: dict[str, Tensor]) -> Tensor:
        """Returns attention of the batch's queries over the cache, (tokens, nheads, head_size_v), without `mm_prefix_range`."""
        scores = self.scores | scales
        packed: dict[str, Any] = {"cu_seqlens_q": batch.query_start_loc, "max_seqlen_q": batch.max_query_len}
        if batch.common_prefix_len:  # not with ALiBi or a window (`use_cascade_attention` of backend.py)
            assert batch.shared_seqlen is not None and batch.own_seqlens is not None
            shared = batch.common_prefix_len // k_cache.shape[1]
            out, _ = cascade_attention(
                q, k_cache, v_cache, batch.block_table[0, :shared], batch.shared_seqlen, block_table=batch.block_table[:, shared:],
                cache_seqlens=batch.own_seqlens, is_causal=batch.causal, **packed, **scores,
            )  # fmt: skip
            return out
        packed |= {"cache_seqlens": batch.seq_lens, "block_table": batch.block_table}
        if self.anchor_tokens:  # not with ALiBi, which backend.py refuses then
            if not batch.causal:
                expected = "True with VOLTA_FA_VLLM_ANCHORED_WINDOW: unset the variable"
                raise bad_argument("causal", False, expected, error=NotImplementedError)
            out, _ = anchored_window_attention_with_kvcache(
                q, k_cache, v_cache, anchor_tokens=self.anchor_tokens, window_left=self._window(), **packed, **scores
            )
            return out
        options = {"is_causal": batch.causal, "window_left": self._window(), "alibi_slopes": self.alibi_slopes, **packed, **scores}
        return torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, **options)[0]

    def attend_across_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, output: Tensor, **scales: Tensor
    ) -> None:
        """Computes what `attend` does with a cache whose tokens several ranks share, into output. All ranks must call it.
        For layers without ALiBi and windows: backend.py refuses these.

        Args:
            query: (tokens, nheads, head_size), of this rank's heads.
            key, value: (tokens, nheads_k, head_size or head_size_v), the new tokens.
            k_cache, v_cache, scales: the results of `split_cache`, with this rank's tokens.
            output: as for `attend`.
        """
        assert batch.earlier is not None
        q, k, v = (t[: batch.num_actual_tokens] for t in (query, key, value))
        # Only the new tokens' call gets the sinks, because merging adds the sums of exponentials, and every row has new tokens.
        out, softmax_lse = attend_packed(q, k, v, batch.query_start_loc, batch.max_query_len, is_causal=batch.causal, **self.scores)
        if batch.earlier.any:
            ranks = batch.earlier.ranks
            partial, partial_lse = torch.ops.volta_fa.fwd_kvcache(
                ranks.group.all_gather(q.contiguous(), dim=1), k_cache, v_cache, cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len, cache_seqlens=batch.earlier.lengths, block_table=batch.block_table,
                is_causal=False, **(self.scores | {"sinks": None} | scales),
            )  # fmt: skip
            partial, partial_lse = ranks.combine(partial, partial_lse.transpose(0, 1), ranks.group, return_lse=True)
            out, _ = merge_attention_states(out, softmax_lse, partial, partial_lse.transpose(0, 1).contiguous())
        output[: batch.num_actual_tokens].view_as(out).copy_(out)

    def attend_without_cache(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, output: Tensor) -> None:
        """Computes attention among the tokens of each sequence, in both directions, into output: encoders."""
        q, k, v = (t[: batch.num_actual_tokens] for t in (query, key, value))
        options = self.scores | {"window_left": self._window(), "window_right": self._window(), "alibi_slopes": self.alibi_slopes}
        out, _ = attend_packed(q, k, v, batch.query_start_loc, batch.max_query_len, **options)
        output[: batch.num_actual_tokens].view_as(out).copy_(out)

    def _window(self) -> int:  # the operators' window, which does not count the query's own token
        return -1 if self.sliding_window is None else self.sliding_window - 1


def split_latents(cache: Tensor, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a layer's latents, (blocks, block_size, 1, kv_lora_rank + rotary), a view of its cache, and their `scale` or `descale`.

    The key becomes an argument's name after `latent_` in `volta_fa::fwd_mla`, and after `k_` and `v_` in `volta_fa::fwd_kvcache`.

    Args:
        cache: (blocks, block_size, kv_lora_rank + rotary), with `SCALE_BYTES` more columns if int8.
        kv_cache_dtype: a key of `CACHE_DTYPES`.
        k_scale: the one scale of an fp8 layer, float32 on its device.
    """
    content, scales = split_scales(cache, kv_cache_dtype)
    if scales is not None:
        return content[:, :, None], {"scale": scales[..., :1]}
    if CACHE_DTYPES[kv_cache_dtype] is None:
        return content[:, :, None], {}
    assert k_scale is not None
    return content[:, :, None], {"descale": k_scale.reshape(1)}


def write_latents(
    latent: Tensor, rotary: Tensor, cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None
) -> None:
    """Writes the latents of tokens, and their rotary parts after them, into the slots of `slot_mapping`.

    An append writes a key and a value, and a latent is one row. So the append kernel gets one half of each part as a key and the other as
    a value. In fp8 both halves have the same scale. The scale of int8 depends on all columns of a token, and no half has them all. So
    PyTorch's operations quantize to int8 here, and the append kernel copies scale and codes as 16-bit words.

    Args:
        latent: (tokens, kv_lora_rank); rotary: (tokens, rotary) or (tokens, 1, rotary). Tokens after the mapping's are padding.
        cache, kv_cache_dtype, k_scale: as for `split_latents`.
    """
    parts = [t[: slot_mapping.shape[0]] for t in (latent, rotary.flatten(1))]
    if CACHE_DTYPES[kv_cache_dtype] == torch.int8:
        quantized = quantize_kv(torch.cat(parts, dim=-1)[:, None], "int8")
        assert quantized.scale is not None
        scales = F.pad(quantized.scale.view(torch.int8), (0, SCALE_BYTES - quantized.scale.itemsize))
        parts = [torch.cat((scales, quantized.data[:, 0]), dim=-1).view(torch.float16)]
        latents, scale = cache.view(torch.float16)[:, :, None], None
    else:
        latents, options = split_latents(cache, kv_cache_dtype, k_scale)
        scale = options.get("descale")
    descales = {} if scale is None else {"k_descale": scale, "v_descale": scale}
    for part, columns in zip(parts, latents.split([part.shape[1] for part in parts], dim=-1)):
        half = part.shape[1] // 16 * 8  # a multiple of 8 columns, which the operator reads without a copy
        key, value = part[:, None].tensor_split((half,), dim=-1)
        k_cache, v_cache = columns.tensor_split((half,), dim=-1)
        write(key, value, k_cache, v_cache, slot_mapping, **descales)


def attend_to_latents(
    query: Tensor, latents: Tensor, scales: dict[str, Tensor], kv_lora_rank: int, softmax_scale: float, batch: Batch
) -> Tensor:
    """Returns attention of queries (tokens, nheads, kv_lora_rank + rotary) to the cache's one head, (tokens, nheads, kv_lora_rank).
    `latents`, `scales`: the results of `split_latents`.

    Calls `volta_fa::fwd_mla` for the sizes of DeepSeek's models, and `volta_fa::fwd_kvcache` for others, up to `MAX_HEADDIM` columns."""
    options: dict[str, Any] = {
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": batch.max_query_len,
        "cache_seqlens": batch.seq_lens,
        "block_table": batch.block_table,
        "is_causal": batch.causal,
        "softmax_scale": softmax_scale,
        "batch_invariant": is_batch_invariant(),
    }
    if (kv_lora_rank, query.shape[-1] - kv_lora_rank) == LATENT_HEADDIMS:
        options |= {f"latent_{name}": t for name, t in scales.items()}
        out, _ = torch.ops.volta_fa.fwd_mla(query, latents, **options)
    else:
        options |= {f"{side}_{name}": t for side in "kv" for name, t in scales.items()}
        out, _ = torch.ops.volta_fa.fwd_kvcache(query, latents, latents[..., :kv_lora_rank], **options)
    return out


def takes_latents(head_size: int, kv_lora_rank: int) -> bool:
    """Returns whether the operators support these sizes, by a call with meta tensors. `head_size`: kv_lora_rank and rotary columns."""
    query, latents = (
        torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 1, head_size), (1, PAGE_SIZE_MULTIPLE, 1, head_size))
    )
    ints = torch.empty(2, dtype=torch.int32, device="meta")
    batch = Batch(num_actual_tokens=1, max_query_len=1, query_start_loc=ints, seq_lens=ints[:1], block_table=ints[:1, None])
    try:
        out = attend_to_latents(query, latents, {}, kv_lora_rank, softmax_scale=1.0, batch=batch)
    except (AttributeError, ValueError, NotImplementedError):  # AttributeError: a build without fwd_mla
        return False
    return out.shape[-1] == kv_lora_rank
