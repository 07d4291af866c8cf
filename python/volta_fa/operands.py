"""What the operators require of tensors, for Python code that checks arguments before it calls them: size limits, which the native library
publishes, dtypes, strides and values."""

import os
from typing import TypeVar

import torch
from torch import Tensor

from .errors import bad_argument
from .inspection import limits

_LIMITS = limits()
_T = TypeVar("_T", Tensor, Tensor | None)

#: Largest headdim of `volta_fa::fwd`, `bwd` and `fwd_kvcache`.
MAX_HEADDIM: int = _LIMITS["max_headdim"]
#: Columns of a latent of `volta_fa::fwd_mla`: (value columns, rotary columns), 512 and 64.
LATENT_HEADDIMS: tuple[int, int] = tuple(_LIMITS["latent_headdims"])
#: The page size of a paged KV cache, in tokens, must be a multiple of this.
PAGE_SIZE_MULTIPLE: int = _LIMITS["page_size_multiple"]
#: Maximum query rows per KV head (seqlen_q * nheads / nheads_k) that decode kernels take, 64; more rows run on prefill kernels.
MAX_DECODE_ROWS: int = _LIMITS["max_decode_rows"]


def takes_dtype(q: Tensor) -> bool:
    """Returns whether `volta_fa::fwd` takes tensors of q's dtype on q's device."""
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) or (q.dtype == torch.float64 and q.device.type == "cpu")


def with_unit_stride(t: _T) -> _T:
    """Returns t if its last dimension has stride 1, as the operators require, else a contiguous copy. flash-attn copies too. Returns what
    is no tensor as it is: the operators' error names the argument."""
    return t if not isinstance(t, Tensor) or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()


def reads_values(t: Tensor) -> bool:
    """Returns whether a call checks the values of t, as the operators do: on a GPU only with VOLTA_FA_CHECK_LENGTHS=1, because that
    synchronizes; in the simulator unless it is 0; on the CPU backend always. Never where t has no values (torch.compile, fake tensors, meta
    tensors)."""
    if torch.compiler.is_compiling() or type(t) is not Tensor or t.device.type not in ("cpu", "cuda"):
        return False
    is_simulated = os.environ.get("VOLTA_FA_SIMULATE", "0") not in ("", "0")
    if t.is_cpu and not is_simulated:
        return True
    return (os.environ.get("VOLTA_FA_CHECK_LENGTHS") or str(int(is_simulated))) != "0"


def in_range(name: str, values: Tensor, most: int | Tensor, what: str) -> Tensor:
    """Returns whether each value is from 0 to `most`, a number or a tensor of the same shape. Raises ValueError for the first that is not,
    if `reads_values`. `what` describes a value, with its article."""
    allowed = (values >= 0) & (values <= most)
    if reads_values(values) and not allowed.all():
        entry = (~allowed).nonzero()[0].tolist()
        limit = int(most[tuple(entry)]) if isinstance(most, Tensor) else most
        got = f"{int(values[tuple(entry)])} (entry {', '.join(map(str, entry))})"
        raise bad_argument(name, got, f"{what} from 0 to {limit}")
    return allowed
