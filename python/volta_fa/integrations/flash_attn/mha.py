"""flash-attn 2.8's attention modules: `flash_attn.modules.mha`, which programs import from the shim (`install_flash_attn_shim()`).

`MHA` is a layer with projections, around one of four classes. FlashSelfAttention and FlashCrossAttention call volta_fa. SelfAttention and
CrossAttention, which take padding masks, call PyTorch's attention, which `volta_fa.enable_sdpa()` can route to volta_fa.
ParallelMHA and depthwise convolutions are left out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...errors import bad_argument
from ...rotary import RotaryEmbedding
from .interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]

#: Score of hidden keys, as in flash-attn. SelfAttention adds it to scores, as CrossAttention does for key_padding_mask: in rows without a
#: visible key it cancels. CrossAttention's causal mask replaces scores by it, so these rows average all values.
_HIDDEN = -10000.0


def get_alibi_slopes(nheads: int) -> list[float]:
    """Returns ALiBi's slope of each head (arXiv 2108.12409): powers of 2 ** (-8 / n) for n heads, a power of two. Other numbers of heads
    get the slopes of the next lower power of two, then every second slope of the next higher one."""
    lower = 2 ** (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(nheads - lower)]


class _FlashOptions(nn.Module):
    """Options of FlashSelfAttention and FlashCrossAttention, under flash-attn's names."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashOptions):
    """Computes self-attention with `flash_attn_qkvpacked_func`, or the varlen one, whose arguments it takes."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Returns out, (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with cu_seqlens.

        Args:
            qkv: (batch, seqlen, 3, nheads, headdim), or (total, 3, nheads, headdim) with cu_seqlens.
            causal: overrides the module's.
            cu_seqlens, max_seqlen: as for `flash_attn_varlen_qkvpacked_func`.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        if max_seqlen is None:
            raise bad_argument("max_seqlen", "None", "the length of the longest sequence: cu_seqlens is given")
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))


class FlashCrossAttention(_FlashOptions):
    """Computes cross-attention with `flash_attn_kvpacked_func`, or the varlen one, whose arguments it takes."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Returns out, of q's shape.

        Args:
            q: (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with cu_seqlens.
            kv: (batch, seqlen_k, 2, nheads_k, headdim), or (total_k, 2, nheads_k, headdim) with cu_seqlens_k.
            causal: overrides the module's.
            cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k: as for `flash_attn_varlen_kvpacked_func`.
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        if cu_seqlens_k is None or max_seqlen is None or max_seqlen_k is None:
            raise bad_argument("cu_seqlens_k, max_seqlen, max_seqlen_k", "None", "values: cu_seqlens is given")
        return flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal))


class _PyTorchAttention(nn.Module):
    """Attention by PyTorch, for SelfAttention and CrossAttention."""

    _causal_mask_replaces: bool  # True: the causal mask replaces scores by _HIDDEN. False: it adds that.

    def __init__(self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool | None, key_padding_mask: Tensor | None, lengths: Tensor) -> Tensor:
        """Returns out. lengths: (batch or 1), the number of keys. The causal mask is aligned to the last key."""
        i, j = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
        bias = q.new_zeros(1, 1, q.shape[1], k.shape[1])
        if key_padding_mask is not None:
            bias = bias.masked_fill(~key_padding_mask[:, None, None, :], _HIDDEN)
        if self.causal if causal is None else causal:
            offset = lengths[:, None, None, None] - q.shape[1]
            is_later = j > i + offset
            if self._causal_mask_replaces and key_padding_mask is not None:
                # A row whose visible keys are all padding weighs their scores against the replaced ones, so no bias will do. The scores
                # have q's dtype, as flash-attn's: adding _HIDDEN rounds them.
                k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (k, v))
                scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
                scores = q.transpose(1, 2) @ (k * scale).transpose(-1, -2) + bias
                weights = self.drop(scores.masked_fill(is_later, _HIDDEN).softmax(-1, dtype=v.dtype))
                return (weights @ v).transpose(1, 2)
            if self._causal_mask_replaces:
                bias = bias.masked_fill(is_later, _HIDDEN)
                q = q.masked_fill(i[:, None] < -offset, 0)  # rows that see no key: equal scores
            else:
                bias = bias + is_later * _HIDDEN
        dropout_p = self.drop.p if self.training else 0.0
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, bias, dropout_p, scale=self.softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)


class SelfAttention(_PyTorchAttention):
    """Computes self-attention with PyTorch."""

    _causal_mask_replaces = False

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Returns out, (batch, seqlen, nheads, headdim).

        Args:
            qkv: (batch, seqlen, 3, nheads, headdim).
            causal: overrides the module's.
            key_padding_mask: bool, (batch, seqlen): False hides the key.
        """
        q, k, v = qkv.unbind(2)
        return self._attend(q, k, v, causal, key_padding_mask, torch.tensor([qkv.shape[1]], device=qkv.device))


class CrossAttention(_PyTorchAttention):
    """Computes cross-attention with PyTorch."""

    _causal_mask_replaces = True

    def forward(self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Returns out, of q's shape.

        Args:
            q: (batch, seqlen_q, nheads, headdim), kv: (batch, seqlen_k, 2, nheads_k, headdim).
            causal: overrides the module's. The mask is aligned to the last key, or the number of keys that key_padding_mask keeps.
            key_padding_mask: bool, (batch, seqlen_k): False hides the key.
        """
        lengths = torch.tensor([kv.shape[1]], device=q.device) if key_padding_mask is None else key_padding_mask.sum(-1)
        k, v = kv.unbind(2)
        return self._attend(q, k, v, causal, key_padding_mask, lengths)


class MHA(nn.Module):
    """Projects to heads, attends and projects back: multi-head self-attention or cross-attention.

    Args:
        embed_dim: hidden_size, a multiple of num_heads. num_heads_kv divides num_heads, and equals it unless given.
        cross_attn: q comes from x, and k and v from x_kv.
        use_flash_attn: the Flash classes of this module; the others otherwise. use_alibi and window_size need it.
        rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: `RotaryEmbedding`'s; 0 is off.
        layer_idx: key of the layer's KV cache in forward()'s inference_params, a flash-attn InferenceParams.
        return_residual: also return x.
        checkpointing: compute attention again in the backward pass.
        fused_bias_fc: no effect.

    Raises NotImplementedError for dwconv, and ValueError for wrong arguments.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dwconv:
            raise bad_argument("dwconv", True, "False", error=NotImplementedError)
        if not use_flash_attn and (use_alibi or window_size != (-1, -1)):
            raise bad_argument("use_flash_attn", False, "True with use_alibi or a window_size")
        if rotary_emb_dim > 0 and cross_attn:
            raise bad_argument("rotary_emb_dim", rotary_emb_dim, "0 with cross_attn")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % self.num_heads_kv:
            got = f"{embed_dim}, {num_heads} and {self.num_heads_kv}"
            raise bad_argument("embed_dim, num_heads, num_heads_kv", got, "each a multiple of the next")
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device=device)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **factory)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        self.inner_attn: nn.Module
        self.inner_cross_attn: nn.Module
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            options |= {"alibi_slopes": slopes, "window_size": window_size}
            self.inner_attn, self.inner_cross_attn = FlashSelfAttention(**options), FlashCrossAttention(**options)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**options), CrossAttention(**options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an uninitialized cache, (batch_size, max_seqlen, 2, num_heads_kv, head_dim)."""
        weight = self.out_proj.weight
        return torch.empty(
            batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns out, of x's shape, and with return_residual also x.

        Args:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: (batch, seqlen_k, embed_dim), for cross_attn; x unless given.
            key_padding_mask: bool, (batch, seqlen): False hides the key. Only without use_flash_attn.
            cu_seqlens, max_seqlen: packed sequences. Only with use_flash_attn, without rotary embeddings.
            mixer_subset: index of the positions of x that are queries, for cross_attn.
            inference_params: flash-attn's InferenceParams: the caches of all layers, and the number of tokens in them.

        Raises ValueError for arguments that exclude each other, NotImplementedError for inference_params with lengths_per_sample without
        use_flash_attn or with xPos.
        """
        self._check(cu_seqlens, key_padding_mask, inference_params)
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen} if self.use_flash_attn else {"key_padding_mask": key_padding_mask}
        options |= kwargs
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            if x_kv is not None or mixer_subset is not None:
                raise bad_argument("x_kv, mixer_subset", "values", "None without cross_attn")
            qkv = self.Wqkv(x)
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if inference_params is not None:
            context = self._attend_to_cache(q, kv, inference_params)
        elif not self.cross_attn and self.num_heads_kv == self.num_heads:  # q, k and v fit the self-attention classes' one tensor
            qkv = qkv.unflatten(-1, (3, self.num_heads, self.head_dim))
            context = self._call(self.inner_attn, self.rotary_emb(qkv) if self.rotary_emb_dim > 0 else qkv, **options)
        else:
            if self.use_flash_attn and not self.cross_attn:
                options = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen} | options
            if self.rotary_emb_dim > 0:
                # a copy, because autograd rejects in-place rotations of two views of one tensor
                q, kv = self.rotary_emb(q.clone(), kv)
            context = self._call(self.inner_cross_attn, q, kv, **options)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _call(self, attention: nn.Module, *operands: Tensor, **options: Any) -> Any:
        return checkpoint(attention, *operands, use_reentrant=False, **options) if self.checkpointing else attention(*operands, **options)

    def _check(self, cu_seqlens: Tensor | None, key_padding_mask: Tensor | None, inference_params: Any) -> None:
        """Raises ValueError for arguments that exclude each other."""
        if cu_seqlens is not None and (not self.use_flash_attn or self.rotary_emb_dim > 0):
            raise bad_argument("cu_seqlens", "a tensor", "None without use_flash_attn, or with rotary embeddings")
        if key_padding_mask is not None and self.use_flash_attn:
            raise bad_argument("key_padding_mask", "a tensor", "None with use_flash_attn: pass cu_seqlens")
        if inference_params is not None and (cu_seqlens is not None or key_padding_mask is not None):
            raise bad_argument("inference_params", "a value", "None with cu_seqlens or key_padding_mask")
        if inference_params is not None and self.layer_idx is None:
            raise bad_argument("layer_idx", "None", "a number: inference_params is given")

    def _attend_to_cache(self, q: Tensor, kv: Tensor, params: Any) -> Tensor:
        """Appends kv to this layer's cache and attends to it. params: flash-attn's InferenceParams; its seqlen_offset tokens are cached.

        As in flash-attn, one call of `flash_attn_with_kvcache` rotates, appends and attends, except for the first tokens, without
        use_flash_attn, and with xPos: a scale of rotary embeddings that depends on the position (arXiv 2212.10554)."""
        caches = params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
        first, begin = params.batch_size_offset, params.seqlen_offset  # of this batch among the cache's sequences, and of its new tokens
        cache = caches[self.layer_idx]
        if first + len(kv) > cache.shape[0] or begin + kv.shape[1] > cache.shape[1]:  # slices would end early, and lose what is written
            got = f"a cache of {cache.shape[0]} sequences and {cache.shape[1]} tokens"
            expected = f"at least {first + len(kv)} and {begin + kv.shape[1]}: raise max_batch_size or max_seqlen"
            raise bad_argument("inference_params", got, expected)
        cache = cache[first : first + len(kv)]
        lengths = params.lengths_per_sample
        rotates = self.rotary_emb_dim > 0
        if begin > 0 and self.use_flash_attn and not (rotates and self.rotary_emb.scale is not None):
            names = ("softmax_scale", "causal", "window_size", "alibi_slopes")
            options: dict[str, Any] = {name: getattr(self.inner_cross_attn, name) for name in names}
            if rotates:
                self.rotary_emb._update_cos_sin_cache(params.max_seqlen, device=q.device, dtype=q.dtype)
                options |= {"rotary_cos": self.rotary_emb._cos_cached, "rotary_sin": self.rotary_emb._sin_cached}
            (k_cache, v_cache), (k, v) = cache.unbind(2), kv.unbind(2)
            out: Any = flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=begin if lengths is None else lengths[first : first + len(kv)],
                rotary_interleaved=rotates and self.rotary_emb.interleaved, **options,
            )  # fmt: skip
            return out
        if lengths is not None and begin > 0:
            raise bad_argument("lengths_per_sample", "a tensor", "None without use_flash_attn, or with xPos", error=NotImplementedError)
        if rotates:
            q, kv = self.rotary_emb(q, kv, seqlen_offset=begin, max_seqlen=params.max_seqlen)
        cache[:, begin : begin + kv.shape[1]] = kv
        return self.inner_cross_attn(q, cache[:, : begin + kv.shape[1]])
