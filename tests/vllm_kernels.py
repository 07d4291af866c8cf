"""Compares vLLM's own Triton kernels with volta_fa on a CPU, and prints the largest differences as JSON: python vllm_kernels.py.

`spans` compares attention with image spans, whose tokens see each other; `ranks` how ranks that share a cache combine their results.
test_vllm_kernels_agree (test_vllm_releases.py) runs this in a process of its own with a real vLLM. Triton's interpreter runs the kernels:
vLLM switches Triton off without a GPU, so this file puts Triton back before it imports them."""

import json
import math
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language
import vllm.triton_utils as placeholders
import vllm.utils.torch_utils

placeholders.triton, placeholders.tl, placeholders.HAS_TRITON = triton, triton.language, True
vllm.utils.torch_utils.PIN_MEMORY = False

from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from test_vllm import combine
from volta_fa.integrations.vllm import paged
from volta_fa.integrations.vllm.spans import find_spans

NHEADS, NHEADS_K, HEADDIM, PAGE = 4, 2, 64, 16


def spans() -> list[dict]:
    """Returns differences to vLLM's out for four sets of options: `difference`: of volta_fa's; `without_spans`: of volta_fa's without
    spans, which must be large. The sequences are a whole prompt, decoding, a chunk that begins within a span, and text."""
    # first and last position of each sequence's spans; lengths; first rows of the sequences' queries
    ranges = {0: [(0, 2), (5, 20), (21, 37), (39, 39)], 1: [(3, 20)], 2: [(9, 30), (33, 44)], 3: []}
    seq_lens, starts = [43, 30, 46, 5], [0, 43, 44, 64, 69]
    generator = torch.Generator().manual_seed(1)
    q, sinks = torch.randn(starts[-1], NHEADS, HEADDIM, generator=generator), torch.randn(NHEADS, generator=generator)
    k_cache, v_cache = (torch.randn(17, PAGE, NHEADS_K, HEADDIM, generator=generator) for _ in range(2))
    table = (torch.randperm(16, generator=generator) + 1).int().view(4, 4)
    lengths = {"query_start_loc": torch.tensor(starts, dtype=torch.int32), "seq_lens": torch.tensor(seq_lens, dtype=torch.int32)}
    batch = paged.Batch(num_actual_tokens=starts[-1], max_query_len=43, **lengths, block_table=table)
    found = []
    # window: tokens, the query's own included (None: all). clamped: whether the window hides tokens of a span too
    for window, clamped, softcap, sink in ((None, False, 0.0, None), (24, False, 5.0, None), (7, True, 0.0, None), (24, False, 0.0, sinks)):
        theirs, ours, causal = (torch.full_like(q, math.nan) for _ in range(3))
        unified_attention(
            q=q, k=k_cache, v=v_cache, out=theirs, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens, max_seqlen_k=max(seq_lens), softmax_scale=HEADDIM**-0.5, causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0), block_table=table, softcap=softcap,
            q_descale=None, k_descale=None, v_descale=None, sinks=sink, mm_prefix_clamp_sliding_window=clamped,
            mm_prefix_range=compute_mm_prefix_range_tensor(ranges, len(seq_lens), q.device),
        )  # fmt: skip
        attention = paged.Attention({"softmax_scale": HEADDIM**-0.5, "softcap": softcap, "sinks": sink}, sliding_window=window)
        batch.mm_prefix_range = None  # no spans
        attention.attend(q, k_cache, v_cache, batch, output=causal)
        batch.mm_prefix_range = find_spans(ranges, starts, seq_lens, table)
        attention.attend(q, k_cache, v_cache, batch, output=ours)
        found.append({"difference": largest(ours, theirs), "without_spans": largest(causal, theirs)})
    return found


def ranks() -> list[float]:
    """Returns differences between test_vllm.combine, which adds up the results of two ranks, and vLLM's kernel: of each rank's corrected
    out and of its softmax_lse. Some rows have no tokens on one rank or on both (lse +inf), and one is NaN, as padding is. `exchange`
    stands for the ranks' communication: it returns a tensor of each rank."""
    try:
        from vllm.v1.attention.ops import dcp as theirs

        theirs.CorrectAttnCPOutKernel.kernel.constexprs = ()  # compiled functions have it, and vLLM counts them
    except ImportError:
        from vllm.v1.attention.ops import common as theirs
    generator = torch.Generator().manual_seed(1)
    out, lse = torch.randn(2, 5, 4, HEADDIM, generator=generator), torch.randn(2, 5, 4, generator=generator)
    lse[:, 1], lse[0, 2], lse[1, 3] = math.inf, math.inf, math.nan
    # the last arguments are the rank, and a context that vLLM makes for None
    corrected = [theirs.correct_attn_out(out[r].clone(), lse, r, None) for r in range(2)]
    found = []

    def exchange(t):
        if t.dim() == 2:
            return list(lse)
        found.append(largest(t, corrected[r][0]))
        return [t, t]

    for r in range(2):
        _, total = combine(out[r], lse[r], SimpleNamespace(rank_in_group=r, world_size=2, exchange=exchange), return_lse=True)
        # exp, because a row without tokens has -inf
        found.append(largest(total.exp(), corrected[r][1][:, 2 * r : 2 * r + 2].exp()))
    return found


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference."""
    return (a - b).abs().max().item()


if __name__ == "__main__":
    print(json.dumps({"spans": spans(), "ranks": ranks()}))
