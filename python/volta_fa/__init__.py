"""Exact attention, forward and backward, for NVIDIA Volta and Turing GPUs, as native PyTorch operators.

Importing this package loads the native library, which registers

    torch.ops.volta_fa.fwd(q, k, v, *, <options>, generator=None)
        -> (out, softmax_lse, rng_state)
    torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, *, rng_state=None, <options>, attn_bias_requires_grad=False)
        -> (dq, dk, dv, dattn_bias, dsinks)
    torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, *, <options>)
    torch.ops.volta_fa.fwd_kvcache.append(q, k_cache, v_cache, k, v, *, <options>)
        -> (out, softmax_lse)
    torch.ops.volta_fa.fwd_mla(q, latent_cache, *, <options>)
        -> (out, softmax_lse)
    torch.ops.volta_fa.merge_attention_states(out_a, softmax_lse_a, out_b, softmax_lse_b)
        -> (out, softmax_lse)
    torch.ops.volta_fa.merge_attention_states_(out_a, softmax_lse_a, out_b, softmax_lse_b)
        -> ()

fwd is differentiable in q, k, v, attn_bias and sinks: autograd calls bwd, with the options of the forward call. The others have
no derivative. merge_attention_states, also a function of this package, has a docstring of its own; with an underscore it leaves the
result in the first two, and its out_a may be float32 beside an out_b in lower precision: many parts lose nothing that way.
fwd_kvcache has a part of its own below.

Tensors. seqlen_q and seqlen_k are free, nheads is a multiple of nheads_k, headdim and headdim_v are 1 to 256 (on the kernels what
is not a multiple of 8 costs a copy):

                    dense                                    packed (with cu_seqlens_q and cu_seqlens_k)
    q               (batch, seqlen_q, nheads, headdim)       (total_q, nheads, headdim)
    k               (batch, seqlen_k, nheads_k, headdim)     (total_k, nheads_k, headdim)
    v               (batch, seqlen_k, nheads_k, headdim_v)   (total_k, nheads_k, headdim_v)
    out, dout       (batch, seqlen_q, nheads, headdim_v)     (total_q, nheads, headdim_v)
    softmax_lse     (batch, nheads, seqlen_q)                (nheads, total_q)
    rng_state       (2) with dropout, else (0)
    dq, dk, dv      as q, k, v
    dattn_bias      as attn_bias, not expanded; (0) unless asked for
    dsinks          as sinks; (0) without sinks

On CUDA devices q, k and v are float16, or bfloat16, which is converted around the kernels; on the CPU also float32 and float64.
They share dtype and device. Their last dimension is contiguous; all other strides are free. out, dout and the gradients have
q's dtype. A query that sees no key has out 0 and gradient 0. softmax_lse is float32: the natural logarithm of the sum of
exponentials, +inf where a query sees no key. rng_state, int64, is the seed and the offset of the call's random numbers; bwd
takes the forward's with dropout, and None without.

Options, in the order of what happens to a score `x = softmax_scale * (q_i . k_j)`:

    softmax_scale   float; headdim ** -0.5 unless given
    softcap         float: x becomes softcap * tanh(x / softcap); 1e-4 to 1e4, or 0: off. Not together with dropout_p
    alibi_slopes    float32, (nheads) or (batch, nheads): slope * |i + seqlen_k - seqlen_q - j| is subtracted. No gradient
    attn_bias       broadcastable to (batch, nheads, seqlen_q, seqlen_k), all four dimensions there; packed, of max_seqlen_q
                    and max_seqlen_k, by positions inside a sequence. q's dtype or float32: added; bool: False hides the key
    is_causal       query i sees the keys j <= i + seqlen_k - seqlen_q (bottom-right aligned, as flash-attn)
    window_left     query i sees the keys j >= i + seqlen_k - seqlen_q - window_left; -1 is no limit
    window_right    query i sees the keys j <= i + seqlen_k - seqlen_q + window_right; -1 is no limit. With is_causal -1 or 0
    sinks           (nheads), q's dtype or float32: a logit more for each head's softmax, whose value is 0
    dropout_p       in [0, 1): probabilities are dropped, the others divided by the share that is kept: 1 - dropout_p, within 2^-16
    deterministic   gradients equal to the bit, run to run; so with torch.use_deterministic_algorithms(True)

Lengths:

    cu_seqlens_q, cu_seqlens_k  int32, (batch + 1): where each sequence begins, from 0, and at the end total_q and total_k.
                    Both or neither. Sequences may be empty
    max_seqlen_q, max_seqlen_k  int: at least the longest sequence's length. Needed with cu_seqlens, refused without
    seqused_k       int32, (batch): of an entry's keys only so many, the first, exist; masks are aligned to that length
    check_lengths   look at the values of these tensors on a GPU too, which waits for it; so does VOLTA_FA_CHECK_LENGTHS=1 for
                    all calls

Of fwd alone:

    generator       torch.Generator of dropout's random numbers; PyTorch's default one (torch.manual_seed) unless given

Of bwd alone:

    attn_bias_requires_grad  whether to compute dattn_bias

fwd_kvcache: attention of new queries over keys and values in a cache. With k and v (.append) these are first written into the cache, in
place, behind the tokens that are there; queries are aligned to the lengths that this gives:

                    dense                                    packed (with cu_seqlens_q)
    q               (batch, seqlen_q, nheads, headdim)       (total_q, nheads, headdim)
    k               (batch, seqlen_new, nheads_k, headdim)   (total_new, nheads_k, headdim)
    v               (batch, seqlen_new, nheads_k, headdim_v) (total_new, nheads_k, headdim_v)
    out             (batch, seqlen_q, nheads, headdim_v)     (total_q, nheads, headdim_v)
    softmax_lse     (batch, nheads, seqlen_q)                (nheads, total_q)

                    dense cache                              pages (with block_table)
    k_cache         (entries, seqlen, nheads_k, headdim)     (pages, page_size, nheads_k, headdim)
    v_cache         (entries, seqlen, nheads_k, headdim_v)   (pages, page_size, nheads_k, headdim_v)

page_size is any multiple of 16. All strides but the last dimension's are free: k_cache and v_cache may be parts of one tensor, and
heads may come before tokens in memory. Caches of headdims that are not multiples of 8, or off 16-byte boundaries, and of bfloat16 where a
sequence has more than 64 rows a key head, are copied at each call. Caches of int8, uint8 (int4: two columns in a byte), float8_e5m2 and
float8_e4m3fn are quantized: `quantize_kv` has the formats, and q, and k and v to append, are of any type that goes without. softmax_scale,
softcap, alibi_slopes, is_causal, window_left, window_right, sinks and check_lengths are fwd's, and:

    cache_seqlens   int32, (batch): tokens of each sequence in the cache before this call appends; all that there is room for
                    unless given. Needed with k and v
    block_table     int32, (batch, max_pages): the pages of each sequence, in order; what lies behind its last token's page, or before
                    a window, is not looked at
    cache_batch_idx int32, (batch): which entry of a dense cache is each sequence's; its own number unless given
    leftpad_k       int32, (batch): so many tokens at the beginning of a dense cache's entry do not exist
    k_scale, v_scale  float32, k_cache's shape without the headdim: of an int8 or int4 cache, which needs them. Appending writes them
    k_zero_point, v_zero_point  the same of an int4 cache
    k_descale, v_descale  float32, (1), (nheads_k) or (batch, nheads_k): of an fp8 cache; 1 unless given
    cu_seqlens_q, max_seqlen_q  as fwd's
    cu_seqlens_k_new  int32, (batch + 1): the same for packed k and v; cu_seqlens_q unless given
    rotary_cos, rotary_sin  (seqlen_rotary, rotary_dim / 2), q's dtype or float32: k is rotated by its positions, which count from
                    cache_seqlens on, as it is appended; q likewise where a mask orders the queries, else by the first position
    rotary_interleaved  dimensions 2 i and 2 i + 1 are a pair; else i and i + rotary_dim / 2
    num_splits      parts into which a sequence's keys are cut, at most; 0: as the schedule finds best

fwd_mla: attention of new queries over a cache of latents (multi-head latent attention, absorbed: DeepSeek-V2, arXiv 2405.04434), one head
that all query heads share, whose first 512 columns are the values:

                    dense                                    packed (with cu_seqlens_q)
    q               (batch, seqlen_q, nheads, 576)           (total_q, nheads, 576)
    latent_cache    (entries, seqlen, 1, 576), or pages (pages, page_size, 1, 576) with block_table
    out             (batch, seqlen_q, nheads, 512)           (total_q, nheads, 512)
    softmax_lse     (batch, nheads, seqlen_q)                (nheads, total_q)

cache_seqlens, cu_seqlens_q, max_seqlen_q, block_table, cache_batch_idx, softmax_scale (576 ** -0.5 unless given), is_causal, num_splits and
check_lengths are fwd_kvcache's. A latent_cache of another type than q is quantized, as volta_fa.quantize_kv does it (no int4):

    latent_scale    torch.int8: float32 (entries, seqlen, 1) or (pages, page_size, 1), of each token
    latent_descale  torch.float8_e5m2, torch.float8_e4m3fn: float32 (1,) or (batch, 1); 1 unless given

Callers write the cache. volta_fa.flash_mla has FlashMLA's functions.

A wrong argument raises ValueError: the message names it, says what was given and what is allowed, and nothing has run. What
this version lacks raises NotImplementedError; a failure of the device or driver raises RuntimeError. A value of a type that
the schema does not have raises PyTorch's own RuntimeError. Values in int32 tensors are not looked at on a GPU, where
wrong ones give NaN: docs/reference/options.md, "Lengths on a GPU".

GPUs: Volta (compute capability 7.0, 7.2) and Turing (7.5) have kernels of their own. Newer GPUs run Turing's through PTX, where they
are faster than emulation but not made for the card: for tests, and where nothing else does what is asked. Older ones raise
NotImplementedError.

Besides the operators: `flash_attn_func` and its relatives have flash-attn 2's interface, and
`install_flash_attn_shim()` lets programs import it as flash_attn; `volta_fa.transformers` is for Hugging Face models;
`volta_fa.distributed` attends over sequences that are sharded over several GPUs;
`enable_sdpa()` lets PyTorch's own scaled_dot_product_attention run these ops, and so existing models; where PyTorch has
`torch.nn.attention.activate_flash_attention_impl`, "VOLTA" is a name for it. `cascade_attention` reads what sequences share once.

Environment, read at each call unless it says otherwise:

    VOLTA_FA_CHECK_LENGTHS=1    look at cu_seqlens and seqused_k on a GPU too, which waits for it. 0: nor simulated
    VOLTA_FA_FAMILY=volta       take kernels of this family alone, for tests and comparisons
    VOLTA_FA_TUNING=0           read no tuning file (docs/reference/tuning-file.md); a path: read this one. Read once for each device
    VOLTA_FA_LOG=1              each distinct plan once to standard error, with the reason for each kernel. Read once
    VOLTA_FA_ENABLE_SDPA=1      enable_sdpa() as the library is loaded; force: on newer GPUs too; cpu: on the CPU
    VOLTA_FA_SIMULATE=1         run float16 and bfloat16 CPU tensors through the machine code in the simulator
                                (more in docs/reference/environment.md)

`python -m volta_fa --help` lists the command line's commands.
"""

from .diagnostics import warn_when_cuda_starts
from .inspection import info, kernel_family
from .integrations import torch_flash_impl as _torch_flash_impl
from .integrations.dtensor import register_dtensor_rules
from .integrations.flash_attn import interface as _flash_attn
from .integrations.flash_attn.install import install_flash_attn_shim
from .integrations.flash_attn.interface import *
from .integrations.sdpa import _read_library_state, disable_sdpa, enable_sdpa, sdpa_enabled, sdpa_stats
from .kv_cache.cascade import cascade_attention
from .kv_cache.formats import QuantizedKV, dequantize_kv, quantize_kv
from .library import library_path, load
from .merge import merge_attention_states
from .version import __version__

__all__ = [
    "QuantizedKV",
    "__version__",
    "cascade_attention",
    "dequantize_kv",
    "disable_sdpa",
    "enable_sdpa",
    "info",
    "install_flash_attn_shim",
    "kernel_family",
    "library_path",
    "merge_attention_states",
    "quantize_kv",
    "sdpa_enabled",
    "sdpa_stats",
]
__all__ += _flash_attn.__all__

load()
_torch_flash_impl.register()
register_dtensor_rules()
_read_library_state()
warn_when_cuda_starts()
del register_dtensor_rules, load, _read_library_state, warn_when_cuda_starts
