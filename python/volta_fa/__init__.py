"""Exact attention, forward and backward, for NVIDIA Volta and Turing GPUs, as native PyTorch operators.

Importing this package loads the native library, which registers

    torch.ops.volta_fa.fwd(q, k, v, *, softmax_scale=None, is_causal=False, window_left=-1, window_right=-1, ...)
        -> (out, softmax_lse, rng_state)

    q               (batch, seqlen_q, nheads, headdim)
    k               (batch, seqlen_k, nheads_k, headdim); nheads is a multiple of nheads_k
    v               (batch, seqlen_k, nheads_k, headdim_v)
    softmax_scale   headdim ** -0.5 unless given
    is_causal       query i sees the keys j <= i + seqlen_k - seqlen_q (bottom-right aligned, as flash-attn)
    window_left     query i sees the keys j >= i + seqlen_k - seqlen_q - window_left; -1 is no limit
    window_right    query i sees the keys j <= i + seqlen_k - seqlen_q + window_right; -1 is no limit

    out             (batch, seqlen_q, nheads, headdim_v), in the dtype of q; 0 where a query sees no key
    softmax_lse     (batch, nheads, seqlen_q), float32, natural logarithm; +inf where a query sees no key
    rng_state       empty (for dropout, which is not there yet)

The last dimension of q, k and v must be contiguous; all other strides are free. On CUDA devices q, k and v
are float16, with headdim and headdim_v multiples of 8 up to 256; on the CPU they are float16, bfloat16,
float32 or float64. Gradients come from autograd as usual, through `torch.ops.volta_fa.bwd`.

A wrong argument raises ValueError and names it; an option of the schema that this version lacks raises
NotImplementedError; a failure of the device or driver raises RuntimeError.

The environment is read at each call:
    VOLTA_FA_SIMULATE=1     run float16 CPU tensors through the sm_70 machine code in the simulator
                            (a build with the `sim` feature, as `make build` makes it)

`enable_sdpa()` lets PyTorch's own scaled_dot_product_attention run these ops, and so existing models; it is
switched on at import by
    VOLTA_FA_ENABLE_SDPA=1

`python -m volta_fa --help` lists the command line's commands.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .flash_attn_shim import install_flash_attn_shim
from .inspection import info, kernel_family
from .library import library_path, load
from .sdpa import _enable_from_environment, disable_sdpa, enable_sdpa, sdpa_enabled, sdpa_stats
from .version import __version__

__all__ = [
    "__version__",
    "disable_sdpa",
    "enable_sdpa",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "info",
    "install_flash_attn_shim",
    "kernel_family",
    "library_path",
    "sdpa_enabled",
    "sdpa_stats",
]

load()
_enable_from_environment()
del load, _enable_from_environment
