"""Exact attention, forward and backward, for NVIDIA Volta and Turing GPUs, as native PyTorch operators.

Tensors are (batch, seqlen, nheads, headdim), as in flash-attn. PyTorch's scaled_dot_product_attention has heads before tokens.

Importing this package loads the native library, which registers

    torch.ops.volta_fa.fwd(q, k, v, *, <options>, generator=None)
        -> (out, softmax_lse, rng_state)
    torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, *, rng_state=None, <options>, attn_bias_requires_grad=False,
                           dlse=None)
        -> (dq, dk, dv, dattn_bias, dsinks)
    torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, *, <options>)
    torch.ops.volta_fa.fwd_kvcache.append(q, k_cache, v_cache, k, v, *, <options>)
        -> (out, softmax_lse)
    torch.ops.volta_fa.fwd_mla(q, latent_cache, *, <options>)
        -> (out, softmax_lse)
    torch.ops.volta_fa.fwd_sparse_mla(q, cache, indices, *, topk_length=None, extra_cache=None, extra_indices=None,
                                      extra_topk_length=None, sinks=None, softmax_scale=None, fp16_positions=False)
        -> (out, softmax_lse, max_logits)
    torch.ops.volta_fa.indexer_logits(q, k, weights, k_end, *, k_start=None, k_scales=None, block_table=None, max_seqlen_k=None,
                                      clean_logits=True)
        -> logits
    torch.ops.volta_fa.fwd_fast(q, k, v, *, <options>)
        -> (out, softmax_lse)
    torch.ops.volta_fa.prepare_fast(k, v, *, cu_seqlens_k=None, max_seqlen_k=None, smooth_k=True, rotate=False, check_lengths=False)
        -> prepared
    torch.ops.volta_fa.merge_attention_states(out_a, softmax_lse_a, out_b, softmax_lse_b)
        -> (out, softmax_lse)
    torch.ops.volta_fa.merge_attention_states_(out_a, softmax_lse_a, out_b, softmax_lse_b)
        -> ()

fwd is differentiable in q, k, v, attn_bias and sinks, from out and softmax_lse: autograd calls bwd, with the options of the forward
call. The others have no derivative. `help(volta_fa.merge_attention_states)` describes that operator. The one with an underscore
writes the result into the first two arguments; its out_a may be float32 with an out_b in lower precision, so merging many parts loses
no precision.

Tensors. seqlen_q and seqlen_k are any, nheads is a multiple of nheads_k, headdim and headdim_v are 1 to 512 (one that is not a
multiple of 8 costs a copy on the kernels):

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

On CUDA devices q, k and v are float16, bfloat16 or float32; the last two are converted before and after the kernels (float32: see
docs/design/numerics.md, "float32"). On the CPU they may also be float64. They have one dtype and device. Their last dimension is
contiguous; all other strides are free. out, dout and the gradients have q's dtype. A query without a visible key has out 0 and gradient 0.
softmax_lse is float32: the natural logarithm of the sum of exponentials, +inf for a query without a visible key. rng_state, int64, is the
seed and the offset of the call's random numbers; bwd takes the forward's with dropout, and None without.

Options, in the order of what happens to a score `x = softmax_scale * (q_i . k_j)`:

    softmax_scale   float; headdim ** -0.5 unless given
    softcap         float: x becomes softcap * tanh(x / softcap); 1e-4 to 1e4, or 0: off. Not together with dropout_p
    alibi_slopes    float32, (nheads) or (batch, nheads): slope * |i + seqlen_k - seqlen_q - j| is subtracted. No gradient
    attn_bias       broadcastable to (batch, nheads, seqlen_q, seqlen_k), all four dimensions there; packed, of max_seqlen_q
                    and max_seqlen_k, by positions inside a sequence. q's dtype or float32: added; bool: False hides the key
    is_causal       query i sees the keys j <= i + seqlen_k - seqlen_q (bottom-right aligned, as flash-attn)
    window_left     query i sees the keys j >= i + seqlen_k - seqlen_q - window_left; -1 is no limit
    window_right    query i sees the keys j <= i + seqlen_k - seqlen_q + window_right; -1 is no limit. With is_causal -1 or 0
    sinks           (nheads), q's dtype or float32: an additional logit in each head's softmax, with a value vector of 0
    dropout_p       in [0, 1): drops probabilities and divides the others by the kept share, 1 - dropout_p within 2^-16
    deterministic   gradients are bitwise identical from run to run; also with torch.use_deterministic_algorithms(True)
    batch_invariant  a row of out and softmax_lse has the same bits alone, in any chunk of its sequence and in any batch of calls of
                    this operator. VOLTA_FA_BATCH_INVARIANT=1 asks all calls for it. Gradients are not batch-invariant. Rejected on
                    the CPU backend, with dropout_p or block lists, and for float32 in full precision

A block mask says which blocks of 128 queries x 64 keys have scores, besides the masks above. Not together with attn_bias or cu_seqlens:

    block_lists     int32, (mask batch, mask heads, seqlen_q / 128 rounded up, 4 + entries): for each block of queries the number of
                    partial key blocks, the number of full ones, its first tile of bits, the block of queries to launch at this place
                    (a permutation), then its key blocks, partial before full, both ascending. Further entries are not read. Batch entry
                    b and query head h take the lists of b modulo mask batch and h modulo mask heads
    block_bits      int32, (tiles, 256): bits of the partial blocks, those of a block of queries in consecutive tiles. Query i of a block
                    has the words 2 * i and 2 * i + 1; the lowest bits are those of keys 0 and 32
    block_lists_t, block_bits_t  the same of blocks of 128 keys x 64 queries, for gradients: bwd requires them with block_lists

Lengths:

    cu_seqlens_q, cu_seqlens_k  int32, (batch + 1): where each sequence begins, from 0, and at the end total_q and total_k.
                    Both or neither. Sequences may be empty
    max_seqlen_q, max_seqlen_k  int: at least the longest sequence's length. With cu_seqlens only, and then required
    seqused_k       int32, (batch): number of valid keys of each entry, from its first; masks are aligned to that length
    check_lengths   check the values of these tensors and of block lists on a GPU too, which synchronizes. VOLTA_FA_CHECK_LENGTHS=1
                    does so for all calls

Of fwd alone:

    generator       torch.Generator of dropout's random numbers; PyTorch's default one (torch.manual_seed) unless given

Of bwd alone:

    attn_bias_requires_grad  whether to compute dattn_bias
    dlse            gradient of softmax_lse, float32, in its shape; ignored for rows with neither a visible key nor a sink. None stands
                    for 0, at no cost

fwd_kvcache: attention of new queries over a KV cache. The overload .append first writes k and v into the cache, in place, after its
tokens; masks are aligned to the lengths after that:

                    dense                                    packed (with cu_seqlens_q)
    q               (batch, seqlen_q, nheads, headdim)       (total_q, nheads, headdim)
    k               (batch, seqlen_new, nheads_k, headdim)   (total_new, nheads_k, headdim)
    v               (batch, seqlen_new, nheads_k, headdim_v) (total_new, nheads_k, headdim_v)
    out             (batch, seqlen_q, nheads, headdim_v)     (total_q, nheads, headdim_v)
    softmax_lse     (batch, nheads, seqlen_q)                (nheads, total_q)

                    dense cache                              pages (with block_table)
    k_cache         (entries, seqlen, nheads_k, headdim)     (pages, page_size, nheads_k, headdim)
    v_cache         (entries, seqlen, nheads_k, headdim_v)   (pages, page_size, nheads_k, headdim_v)

page_size is any multiple of 16. All strides but the last dimension's are free: k_cache and v_cache may be views of one tensor, and
heads may come before tokens in memory. Each call copies caches whose headdim is not a multiple of 8, whose rows are not on 16-byte
boundaries, and in bfloat16 with more than 64 query rows per KV head. Caches in int8, uint8 (int4: two columns in a byte), float8_e5m2 and
float8_e4m3fn are quantized: `quantize_kv` describes the formats, and q, k and v have any dtype of an unquantized call. k_cache and
v_cache have one format, or are int8 and int4. softmax_scale, softcap, alibi_slopes, is_causal, window_left, window_right, sinks,
batch_invariant and check_lengths are fwd's, and:

    cache_seqlens   int32, (batch): tokens of each sequence in the cache before this call appends; unless given, all that the cache
                    has room for. Required with k and v
    block_table     int32, (batch, max_pages): the pages of each sequence, in order; pages after its last token's, or before a
                    window, are not read
    cache_batch_idx int32, (batch): the entry of a dense cache for each sequence; entry b for sequence b unless given
    leftpad_k       int32, (batch): number of padding tokens at the beginning of each entry of a dense cache
    k_scale, v_scale  float32, k_cache's shape without the headdim: required for an int8 or int4 cache. Appending writes them
    k_zero_point, v_zero_point  the same shape: required for int4, each beside its cache
    k_descale, v_descale  float32, (1), (nheads_k) or (batch, nheads_k): scales of an fp8 cache; 1 unless given
    cu_seqlens_q, max_seqlen_q  as fwd's
    cu_seqlens_k_new  int32, (batch + 1): the same for packed k and v; cu_seqlens_q unless given
    rotary_cos, rotary_sin  (seqlen_rotary, rotary_dim / 2), q's dtype or float32: k is rotated by its positions, which count from
                    cache_seqlens on, as it is appended; q likewise where a mask orders the queries, else by the first position
    rotary_interleaved  dimensions 2 i and 2 i + 1 are a pair; else i and i + rotary_dim / 2
    num_splits      maximum number of parts into which a sequence's keys are split; 0: the scheduler decides
    tree_mask       int64, (batch, seqlen_q), packed (total_q): the last seqlen_q keys of a sequence, at most 64, are draft tokens; query i
                    sees key seqlen_k - seqlen_q + j if bit j of its number is set, and all keys before the draft tokens. Replaces
                    is_causal and window_right. window_left counts from the query's depth. Not with alibi_slopes or rotary_cos
    kv_indices      int32, (batch, seqlen_q, 1 or nheads_k, topk), packed (total_q, 1 or nheads_k, topk): the blocks of tokens to which each
                    query attends, in any order; -1 ends a list. Not with windows, alibi_slopes, leftpad_k or tree_mask
    kv_block        tokens of a block of kv_indices: a power of two up to 128

fwd_mla: multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): attention of new queries over a cache of latents. All query
heads share one head of latents, whose first 512 columns are the values:

                    dense                                    packed (with cu_seqlens_q)
    q               (batch, seqlen_q, nheads, 576)           (total_q, nheads, 576)
    latent_cache    (entries, seqlen, 1, 576), or pages (pages, page_size, 1, 576) with block_table
    out             (batch, seqlen_q, nheads, 512)           (total_q, nheads, 512)
    softmax_lse     (batch, nheads, seqlen_q)                (nheads, total_q)

cache_seqlens, cu_seqlens_q, max_seqlen_q, block_table, cache_batch_idx, softmax_scale (576 ** -0.5 unless given), is_causal, kv_indices,
kv_block, num_splits, batch_invariant and check_lengths are fwd_kvcache's. A latent_cache of another dtype than q is quantized by
volta_fa.quantize_kv, not with int4:

    latent_scale    torch.int8: float32 (entries, seqlen, 1) or (pages, page_size, 1), of each token
    latent_descale  torch.float8_e5m2, torch.float8_e4m3fn: float32 (1,) or (batch, 1); 1 unless given

fwd_mla has no append: callers write the cache themselves.

fwd_sparse_mla: attention of each query to latents that it chose (DeepSeek V3.2, GLM-5; V4 with a second cache), in one softmax:

    q               (total_q, nheads, 576), or 512 columns, which are all values
    cache           (pages, page_size, 1, columns): q's dtype and columns, or FlashMLA's fp8 rows as torch.float8_e4m3fn, uint8 or int8:
                    656 bytes beside 576 columns (512 e4m3 codes, four float32 scales, 64 columns of 16 bits), 584 beside 512 (a page
                    has 448 codes and 64 columns of 16 bits of each row, then seven E8M0 scales and a byte of padding of each)
    indices         int32 (total_q, topk): tokens, as page * page_size + row. Numbers outside the cache are no tokens
    topk_length     int32 (total_q): indices of a query that count, from the first on
    extra_cache, extra_indices, extra_topk_length: a second cache of the same format, and its tokens
    sinks           float32 (nheads), also -inf and inf: a logit in the denominator of out. softmax_lse and max_logits leave it out
    fp16_positions  the 64 columns of 16 bits of fp8 rows are float16, else bfloat16
    out             (total_q, nheads, 512); zeros for queries without tokens
    softmax_lse     float32 (nheads, total_q); inf for queries without tokens
    max_logits      float32 (nheads, total_q): the largest scaled score, NaN left out by kernels; -inf for queries without tokens

indexer_logits: scores by which queries choose their tokens (DeepSeek V3.2, GLM-5), scale * sum over heads of weights * relu(q . k):

    q               (batch, seqlen_q, nheads, 128), torch.float8_e4m3fn, float16 or bfloat16; up to 64 heads
    k               e4m3 codes (total_k, 128) with k_scales, float32 (total_k); or pages, torch.uint8 (pages, page_size, 1, 132), with
                    block_table, int32 (batch, max_pages): a page has the codes of all its tokens, then their float32 scales
    weights         float32 (batch, seqlen_q, nheads)
    k_end, k_start  int32 (batch, seqlen_q): keys k_start to k_end - 1 of each query; k_end (batch): of the last query, and each query
                    before sees one key less. Ends outside of the keys are moved to them; a token of no page gets -inf
    max_seqlen_k    columns of logits; only with pages
    clean_logits    False: logits of keys that a query does not see are undefined, instead of -inf
    logits          float32 (batch, seqlen_q, total_k or max_seqlen_k)

fwd_fast: attention for inference with a stated error of about 1% (docs/guides/fast.md): int8 scores and fp16 sums, for GeForce RTX 20xx.
q, k and v are float16 or bfloat16; tensors that require grad are rejected. cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
softmax_scale, is_causal, window_left, window_right and check_lengths are fwd's:

    attn_mask       bool, broadcastable as attn_bias: False hides the key
    smooth_k        quantizes k less its mean over keys, which changes no result but for the error
    prepared        uint8, what prepare_fast made of the same k, v, lengths, smooth_k and rotate: k and v are not quantized again
    rotate          rotates q and k by a Hadamard transform before they are quantized: less error where few channels are wide

The exact kernels of fwd run instead on Volta, for fewer than 768 keys, and for fewer than 512 query rows of a KV head unless k and v are
prepared. The CPU backend is a model of the fast kernels.

A wrong argument raises ValueError, `argument: got X, expected Y`, before anything runs. Unsupported arguments raise
NotImplementedError, failures of the device or driver RuntimeError. A value of a type outside the schema raises PyTorch's own
RuntimeError. Values of int32 tensors on a GPU are not checked, and wrong ones give NaN: docs/reference/options.md, "Lengths on a GPU".

GPUs: Volta (compute capability 7.0, 7.2) and Turing (7.5) have kernels of their own. Newer GPUs run Turing's PTX, which is correct but
not tuned for them. Older ones raise NotImplementedError.

Besides the operators:

    flash_attn_func, ...                 flash-attn 2's functions; install_flash_attn_shim() lets programs import them as flash_attn
    install_sageattention_shim()         fwd_fast for programs that import sageattention; volta_fa.sageattention has its functions
    enable_sdpa()                        PyTorch's scaled_dot_product_attention, and so existing models
    flex_attention()                     torch's flex_attention; enable_flex() makes torch's own name run it
    BlockMask                            block-sparse masks for fwd and bwd, from torch's, a mask function or blocks
    enable_xformers()                    xformers' memory_efficient_attention
    volta_fa.transformers, volta_fa.vllm, volta_fa.unsloth, volta_fa.flash_mla   other programs: help(volta_fa.integrations) lists them all
    volta_fa.indexer                     DeepGEMM's functions for the lightning indexer, by which sparse attention chooses tokens
    volta_fa.distributed                 sequences that are sharded over several GPUs
    quantize_kv(), dequantize_kv()       quantized KV caches; cascade_attention() reads a shared prefix once
    anchored_window_attention()          a sliding window and the first tokens; anchored_window_attention_with_kvcache() over a cache

Environment, read at each call unless it says otherwise:

    VOLTA_FA_BATCH_INVARIANT=1  all calls with batch_invariant=True
    VOLTA_FA_WARN_LAYOUT=0      no warning where q probably has heads before tokens
    VOLTA_FA_CHECK_LENGTHS=1    check cu_seqlens and seqused_k on a GPU too, which synchronizes. 0: do not check simulated calls either
    VOLTA_FA_FAMILY=volta       use kernels of this family only, for tests and comparisons
    VOLTA_FA_TUNING=0           read no tuning file (docs/reference/tuning-file.md); a path: read this one. Read once for each device
    VOLTA_FA_LOG=1              print each kernel once for each reason it was chosen for, to standard error. Read once
    VOLTA_FA_ENABLE_SDPA=1      enable_sdpa() when the library is loaded; force: on newer GPUs too; cpu: on the CPU
    VOLTA_FA_SIMULATE=1         run float16 and bfloat16 CPU tensors through the machine code in the simulator
                                (more in docs/reference/environment.md)

`python -m volta_fa --help` lists the command line's commands."""

from .block_mask import BlockMask
from .diagnostics import warn_when_cuda_starts
from .flex import disable_flex, enable_flex, flex_attention
from .inspection import info, kernel_family
from .integrations import torch_flash_impl as _torch_flash_impl
from .integrations.dtensor import register_dtensor_rules
from .integrations.flash_attn import interface as _flash_attn
from .integrations.flash_attn.interface import *
from .integrations.sdpa import _read_library_state, disable_sdpa, enable_sdpa, sdpa_enabled, sdpa_stats
from .integrations.stand_in import install_flash_attn_shim, install_sageattention_shim
from .integrations.unsloth import disable_unsloth, enable_unsloth, unsloth_stats
from .integrations.xformers import disable_xformers, enable_xformers, xformers_stats
from .kv_cache.anchored import anchored_window_attention, anchored_window_attention_with_kvcache
from .kv_cache.cascade import cascade_attention
from .kv_cache.formats import QuantizedKV, dequantize_kv, quantize_kv
from .library import library_path, load
from .operators import merge_attention_states, prepare_fast
from .version import __version__

__all__ = [
    "BlockMask", "QuantizedKV", "__version__", "anchored_window_attention", "anchored_window_attention_with_kvcache",
    "cascade_attention", "dequantize_kv", "disable_flex", "disable_sdpa", "disable_unsloth", "disable_xformers",
    "enable_flex", "enable_sdpa", "enable_unsloth", "enable_xformers", "flex_attention", "info",
    "install_flash_attn_shim", "install_sageattention_shim", "kernel_family", "library_path",
    "merge_attention_states", "prepare_fast", "quantize_kv", "sdpa_enabled", "sdpa_stats", "unsloth_stats",
    "xformers_stats",
]  # fmt: skip
__all__ += _flash_attn.__all__

load()  # the native library: its operators exist from here on
_torch_flash_impl.register()  # "VOLTA" for torch.nn.attention.activate_flash_attention_impl
register_dtensor_rules()
_read_library_state()  # whether VOLTA_FA_ENABLE_SDPA made the library take over scaled_dot_product_attention
warn_when_cuda_starts()  # if torch's own kernels do not run on the GPU
del register_dtensor_rules, load, _read_library_state, warn_when_cuda_starts
