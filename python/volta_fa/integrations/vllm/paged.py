"""What vLLM's attention is made of, on the operators: the cache in its layouts, writing to it, attending to it.

Nothing here imports vLLM; nor waits for a GPU or looks at a value on one, unless VOLTA_FA_CHECK_LENGTHS=1 asks for that.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import bad_argument
from ...kv_cache.cascade import cascade_attention
from ...kv_cache.formats import quantize_kv
from ...limits import MAX_HEADDIM, PAGE_SIZE_MULTIPLE

#: The values of --kv-cache-dtype that there are kernels for, which is the one place that knows of them, and what the bytes are that vLLM
#: hands over for them, as uint8, int8 or, to latent attention, always as float8_e4m3fn. None: it hands over the type itself; `auto` is the
#: model's own, and a model that runs here is float16.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}

#: Bytes before the codes of a token and head of an int8 cache: the scale of its key and that of its value, float32, or a latent's one. 8
#: would do, and 16 leave rows of codes on the 16-byte boundaries that decode kernels ask for.
SCALE_BYTES = 16


def check_cache_dtype(kv_cache_dtype: str, beside_codes: bool = True) -> None:
    """Raise NotImplementedError for a type of cache that the operator cannot read or write, and, unless scales have a place `beside_codes`,
    for int8."""
    allowed = [name for name, dtype in CACHE_DTYPES.items() if beside_codes or dtype != torch.int8]
    if kv_cache_dtype in allowed:
        return
    why = "the operator reads no others"
    if kv_cache_dtype == "bfloat16":
        why = "Volta and Turing have no bfloat16"
    elif kv_cache_dtype in CACHE_DTYPES:
        why = "a cache of this vLLM has no place for a scale of each token"
    raise bad_argument("kv_cache_dtype", kv_cache_dtype, f"{' or '.join(allowed)}: {why}", error=NotImplementedError)


def bytes_of_a_token(dtype: torch.dtype, columns: int) -> int | None:
    """Of a token and head of this many columns, keys and values together, in the caches of releases that ask; None: what these take."""
    return SCALE_BYTES + columns if dtype == torch.int8 else None


def split_scales(cache: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor | None]:
    """A cache's codes, of the operator's type, and the scales that int8 ones have beside them: float32, as `cache` but for the last
    dimension, which is keys and values (of latents the first alone means something). Views of the same memory.

    Args:
        cache: of any shape, its last dimension the columns, behind `SCALE_BYTES` bytes if it is int8.
    """
    dtype = CACHE_DTYPES[kv_cache_dtype]
    if dtype is None:
        return cache, None
    if dtype != torch.int8:
        return cache.view(dtype), None
    return cache[..., SCALE_BYTES:].view(dtype), cache[..., : 2 * torch.float32.itemsize].view(torch.float32)


def split_cache(
    kv_cache: Tensor, head_size: int, kv_cache_dtype: str = "auto", layer: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """k_cache and v_cache, (blocks, block_size, nheads_k, head_size or head_size_v), views of one layer's tensor, and what their codes are
    multiplied by, as options of `volta_fa::fwd_kvcache`; none where the cache has the numbers themselves.

    Args:
        kv_cache: (blocks, 2, block_size, nheads_k, head_size), keys and values side by side, as vLLM up to 0.19 asks the backend for its
            shape; or (blocks, nheads_k, block_size, head_size + head_size_v), as later releases have it, of int8 with `SCALE_BYTES` more.
            In memory the dimensions are in any order, and pages may lie apart.
        kv_cache_dtype: of `CACHE_DTYPES`.
        layer: vLLM's, which has one scale of fp8 keys and one of values, float32 on its device.
    """
    content, scales = split_scales(kv_cache, kv_cache_dtype)
    options: dict[str, Tensor] = {}
    if scales is not None:
        check_cache_dtype(kv_cache_dtype, beside_codes=kv_cache.dim() == 4)
        options["k_scale"], options["v_scale"] = scales.transpose(1, 2).unbind(-1)
    elif CACHE_DTYPES[kv_cache_dtype] is not None:
        options = {"k_descale": layer._k_scale.reshape(1), "v_descale": layer._v_scale.reshape(1)}
    if content.dim() == 5 and content.shape[1] == 2:
        k_cache, v_cache = content.unbind(1)
        return k_cache, v_cache, options
    if content.dim() == 4 and content.shape[3] > head_size:
        content = content.transpose(1, 2)
        return content[..., :head_size], content[..., head_size:], options
    raise bad_argument(
        "kv_cache",
        f"shape {tuple(kv_cache.shape)}",
        f"(blocks, 2, block_size, nheads_k, {head_size}) or (blocks, nheads_k, block_size, {head_size} + head_size_v)",
    )


def write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **scales: Tensor) -> None:
    """Write tokens into the cache where `slot_mapping` says.

    That mapping, and not the lengths, is what vLLM promises: it leaves out padding and rejected guesses, and later tokens of a sequence
    need not follow earlier ones. So each token goes to the append kernel as a sequence of its own, whose one page is its slot's and
    whose length is the rows before it there; there is no query to attend.

    Args:
        key, value: (tokens, nheads_k, head_size or head_size_v); tokens behind the mapping's are padding.
        k_cache, v_cache: as `split_cache` gives them.
        slot_mapping: integers (tokens), block * block_size + row; a negative one: the token is not written.
        scales: as `split_cache` gives them.
    """
    if slot_mapping.device.type == "cpu" or os.environ.get("VOLTA_FA_CHECK_LENGTHS") == "1":
        # where the op looks at values, it refuses a page that there is not; kernels leave such a token out themselves
        there = slot_mapping >= 0
        if not there.all():
            key, value, slot_mapping = (t[: len(there)][there] for t in (key, value, slot_mapping))
    write_slots(key, value, k_cache, v_cache, slot_mapping, **scales)


def write_slots(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **scales: Tensor) -> None:
    """`write`, by the op alone."""
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    block_size, nheads_k, headdim = k_cache.shape[1:]
    slots = slot_mapping.to(torch.int32)
    torch.ops.volta_fa.fwd_kvcache(
        key.new_empty(tokens, 0, nheads_k, headdim),
        k_cache,
        v_cache,
        key[:tokens, None],
        value[:tokens, None],
        cache_seqlens=slots % block_size,
        block_table=(slots // block_size)[:, None],
        **scales,
    )


@dataclasses.dataclass
class Batch:
    """The sequences of a step, whose new tokens are in the cache already.

    Attributes:
        num_actual_tokens: rows of the packed queries that belong to the step. Of a captured graph all: then those behind
            query_start_loc's last value belong to nobody, and their rows of the output hold anything.
        max_query_len: at least the longest sequence's queries.
        query_start_loc: int32 (batch + 1): where each sequence's queries begin.
        seq_lens: int32 (batch): tokens of each in the cache, these included.
        block_table: int32 (batch, max_blocks): the blocks of each, in order.
        causal: the last query sees the last token, the one before all but that; else each sees all.
        common_prefix_len: so many tokens, in whole blocks, are the first of all sequences and lie in the same blocks; 0 unless they
            are to be read once for all.
        shared_seqlen, own_seqlens: with common_prefix_len, int32 (1) and (batch): the shared tokens, and each sequence's without them.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    causal: bool = True
    common_prefix_len: int = 0
    shared_seqlen: Tensor | None = None
    own_seqlens: Tensor | None = None


@dataclasses.dataclass
class Attention:
    """How a layer scores. The attributes are those of `volta_fa::fwd_kvcache`, but for sliding_window: so many tokens a query sees, its
    own included; None: all."""

    softmax_scale: float
    sliding_window: int | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def to(self, device: torch.device) -> Attention:
        """With all tensors there: vLLM may have made the slopes before it knew of a device."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, output: Tensor, **scales: Tensor) -> None:
        """Attention of a step over the cache, into output.

        Args:
            query: (tokens, nheads, head_size).
            output: (tokens, nheads, head_size_v), or with the last two as one.
            scales: as `split_cache` gives them.
        """
        q = query[: batch.num_actual_tokens]
        scores: dict[str, Any] = {"softmax_scale": self.softmax_scale, "softcap": self.softcap, "sinks": self.sinks}
        scores |= scales
        packed: dict[str, Any] = {"cu_seqlens_q": batch.query_start_loc, "max_seqlen_q": batch.max_query_len}
        if batch.common_prefix_len:
            assert batch.shared_seqlen is not None and batch.own_seqlens is not None
            shared = batch.common_prefix_len // k_cache.shape[1]
            out, _ = cascade_attention(
                q,
                k_cache,
                v_cache,
                batch.block_table[0, :shared],
                batch.shared_seqlen,
                block_table=batch.block_table[:, shared:],
                cache_seqlens=batch.own_seqlens,
                is_causal=batch.causal,
                **packed,
                **scores,
            )
        else:
            out, _ = torch.ops.volta_fa.fwd_kvcache(
                q,
                k_cache,
                v_cache,
                cache_seqlens=batch.seq_lens,
                block_table=batch.block_table,
                is_causal=batch.causal,
                window_left=self._window(),
                alibi_slopes=self.alibi_slopes,
                **packed,
                **scores,
            )
        output[: batch.num_actual_tokens].view_as(out).copy_(out)

    def attend_without_cache(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, output: Tensor) -> None:
        """Attention of the tokens of each sequence to each other, in both directions: encoders."""
        q, k, v = (t[: batch.num_actual_tokens] for t in (query, key, value))
        starts, longest, window = batch.query_start_loc, batch.max_query_len, self._window()
        out, _, _ = torch.ops.volta_fa.fwd(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            window_left=window,
            window_right=window,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
        output[: batch.num_actual_tokens].view_as(out).copy_(out)

    def _window(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window - 1


def split_latents(cache: Tensor, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer's latents, (blocks, block_size, 1, kv_lora_rank + rotary), a view of its cache, and what their codes are multiplied by:
    `scale` or `descale`, as options of `volta_fa::fwd_mla` after `latent_`, and of `volta_fa::fwd_kvcache` after `k_` and `v_`.

    Args:
        cache: (blocks, block_size, kv_lora_rank + rotary), of int8 with `SCALE_BYTES` more.
        kv_cache_dtype: of `CACHE_DTYPES`.
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
    latent: Tensor,
    rotary: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
) -> None:
    """`write` of one head's latents and of their rotary part behind them. Columns are columns to the append kernel: of each part it takes
    a half as a key and the other as a value, so that none is longer than it knows, and makes fp8 of both by the same scale.

    A token's int8 scale is that of all its columns, of which no half knows. So its bytes, scale and codes, are made here, by PyTorch's
    operations, and written as the 16-bit words that they are too: the append kernel copies these as they are.

    Args:
        latent: (tokens, kv_lora_rank); rotary: (tokens, rotary) or (tokens, 1, rotary). Tokens behind the mapping's are padding.
        cache, kv_cache_dtype, k_scale: as of `split_latents`.
    """
    parts = [t[: slot_mapping.shape[0]] for t in (latent, rotary.flatten(1))]
    if CACHE_DTYPES[kv_cache_dtype] == torch.int8:
        made = quantize_kv(torch.cat(parts, dim=-1)[:, None], "int8")
        assert made.scale is not None
        scales = F.pad(made.scale.view(torch.int8), (0, SCALE_BYTES - made.scale.itemsize))
        parts = [torch.cat((scales, made.data[:, 0]), dim=-1).view(torch.float16)]
        latents, scale = cache.view(torch.float16)[:, :, None], None
    else:
        latents, options = split_latents(cache, kv_cache_dtype, k_scale)
        scale = options.get("descale")
    descales = {} if scale is None else {"k_descale": scale, "v_descale": scale}
    first = 0
    for part in parts:
        columns = latents[..., first : first + part.shape[1]]
        half = part.shape[1] // 16 * 8  # whole groups of columns, as the operator reads them without a copy
        key, value = part[:, None].tensor_split((half,), dim=-1)
        k_cache, v_cache = columns.tensor_split((half,), dim=-1)
        write(key, value, k_cache, v_cache, slot_mapping, **descales)
        first += part.shape[1]


def attend_to_latents(
    query: Tensor,
    cache: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    batch: Batch,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
) -> Tensor:
    """Attention of many query heads, (tokens, nheads, kv_lora_rank + rotary), to the cache's one: (tokens, nheads, kv_lora_rank).

    By `volta_fa::fwd_mla`, which has kernels for the sizes of DeepSeek's models; what `volta_fa::fwd_kvcache` takes is that of small ones.

    Args:
        cache, kv_cache_dtype, k_scale: as of `split_latents`.
    """
    latents, scales = split_latents(cache, kv_cache_dtype, k_scale)
    options: dict[str, Any] = {
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": batch.max_query_len,
        "cache_seqlens": batch.seq_lens,
        "block_table": batch.block_table,
        "is_causal": batch.causal,
        "softmax_scale": softmax_scale,
    }
    if query.shape[-1] > MAX_HEADDIM:
        options |= {f"latent_{name}": t for name, t in scales.items()}
        out, _ = torch.ops.volta_fa.fwd_mla(query, latents, **options)
    else:
        options |= {f"{side}_{name}": t for side in "kv" for name, t in scales.items()}
        out, _ = torch.ops.volta_fa.fwd_kvcache(query, latents, latents[..., :kv_lora_rank], **options)
    return out


def takes_latents(head_size: int, kv_lora_rank: int) -> bool:
    """Whether the operators of this build do: asked with tensors that have no data."""
    query, cache = (
        torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 1, head_size), (1, PAGE_SIZE_MULTIPLE, head_size))
    )
    ints = torch.empty(2, dtype=torch.int32, device="meta")
    try:
        out = attend_to_latents(query, cache, kv_lora_rank, 1.0, Batch(1, 1, ints, ints[:1], ints[:1, None]))
    except (AttributeError, ValueError, NotImplementedError):  # AttributeError: a build without fwd_mla
        return False
    return out.shape[-1] == kv_lora_rank


def check_latents(head_size: int, kv_lora_rank: int) -> None:
    """Raise NotImplementedError where they do not."""
    if not takes_latents(head_size, kv_lora_rank):
        got = f"{head_size} with kv_lora_rank {kv_lora_rank}"
        raise bad_argument("head_size", got, "sizes that volta_fa::fwd_mla takes", error=NotImplementedError)
