"""xformers' `memory_efficient_attention` on volta_fa, for xformers 0.0.29 to 0.0.35.

    import volta_fa

    volta_fa.enable_xformers()

`enable_xformers()` replaces `xformers.ops.fmha._memory_efficient_attention`, which `xformers.ops.memory_efficient_attention` calls;
`disable_xformers()` puts it back. Modules that imported the public function earlier use volta_fa too. `enable_xformers` raises
RuntimeError if the installed xformers does not fit this description.

Calls without a kernel in volta_fa run xformers' own operators; `xformers_stats()` counts them by reason, and docs/guides/xformers.md
explains the reasons. xformers' functions without autograd (`memory_efficient_attention_forward` and its relatives) are unchanged."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# takes_dtype: whether volta_fa::fwd takes q's dtype on its device. with_unit_stride copies a tensor if its last dimension has gaps.
from ..operands import PAGE_SIZE_MULTIPLE, takes_dtype, with_unit_stride
from .devices import NO_DEVICES, devices_of, max_headdim  # devices_of: the user's that qualify; max_headdim: a device's largest
from .flash_attn.interface import _lengths  # cu_seqlens and max_seqlen as keyword arguments

_RELEASES = "0.0.29 to 0.0.35"
#: Module and name of the function that `_attention` replaces, and the fields that it reads of its argument, an `Inputs` of that module.
_MODULE = "xformers.ops.fmha"
_NAME = "_memory_efficient_attention"
_FIELDS = {"query", "key", "value", "attn_bias", "p", "scale"}  # p: probability of dropout

_lock = threading.Lock()
_devices = NO_DEVICES  # the enabled ones
_original: Callable[..., Tensor] | None = None  # xformers' own, set once: other programs may hold `_attention` after a disable
_replaced: Callable[..., Tensor] | None = None  # what `_attention` took the place of; None while it is not in place
_counts: Counter[str] = Counter()  # calls on enabled devices: "ran", or the reason for which xformers' operators ran


def enable_xformers(device: str | torch.device | int | None = None, *, force: bool = False) -> None:
    """Run `xformers.ops.memory_efficient_attention` through volta_fa, forward and backward.

    Calls without a kernel in volta_fa run xformers' operators; `xformers_stats()` counts both. A second call replaces the devices of
    the first.

    Args:
        device: one CUDA device, or "cpu", to test the routing without a GPU. Default: all Volta and Turing GPUs.
        force: also use newer GPUs. The kernels are correct there, but slower than xformers'.

    Raises ImportError without xformers, RuntimeError if no device qualifies or this xformers has another structure, ValueError for a
    device that does not exist.
    """
    global _devices, _original, _replaced
    try:
        fmha = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(f"volta_fa.enable_xformers: it needs xformers {_RELEASES} ({error}): run `pip install xformers`") from error
    wanted = devices_of("enable_xformers", device, force)
    with _lock:
        current = getattr(fmha, _NAME, None)
        # another program's function in its place may wrap `_attention`, so it stays
        if current is not _attention and (_replaced is None or current is _original):
            _check_structure(fmha)
            _original, _replaced = _original or current, current
            setattr(fmha, _NAME, _attention)
        _devices = wanted


def disable_xformers() -> None:
    """Undoes `enable_xformers`. Does nothing if it is off."""
    global _devices, _replaced
    with _lock:
        _devices = NO_DEVICES
        if _replaced is None:
            return
        fmha = importlib.import_module(_MODULE)
        # another program's function may wrap `_attention`, which must stay then: without devices it calls the original
        if getattr(fmha, _NAME, None) is _attention:
            setattr(fmha, _NAME, _replaced)
            _replaced = None


def xformers_stats(reset: bool = False) -> dict[str, Any]:
    """Returns the number of calls of `memory_efficient_attention` on enabled devices, since the start or a reset.
    `reset`: set all counts to 0 afterwards.

    Keys:
        ran: calls that volta_fa ran.
        fell_back: calls that xformers' operators ran, by reason; docs/guides/xformers.md explains the reasons.

    Compiled programs are not counted.
    """
    counts = dict(sorted(_counts.items()))
    if reset:
        _counts.clear()
    return {"ran": counts.pop("ran", 0), "fell_back": counts}


# ---- the patch point ---------------------------------------------------------------------------------------------------


def _check_structure(fmha: ModuleType) -> None:
    """Raises RuntimeError unless the public function calls the function that is replaced, with the arguments of known releases."""
    public, patched, inputs = (getattr(fmha, name, None) for name in ("memory_efficient_attention", _NAME, "Inputs"))
    difference = ""
    if not callable(patched) or list(inspect.signature(patched).parameters) != ["inp", "op"]:
        difference = f"{_MODULE}.{_NAME} does not take (inp, op)"
    elif not inspect.isfunction(public) or public.__globals__ is not vars(fmha) or _NAME not in public.__code__.co_names:
        difference = f"memory_efficient_attention does not call {_MODULE}.{_NAME}"
    elif not dataclasses.is_dataclass(inputs) or not {field.name for field in dataclasses.fields(inputs)} >= _FIELDS:
        difference = f"{_MODULE}.Inputs has other fields than {', '.join(sorted(_FIELDS))}"
    if difference:
        version = getattr(importlib.import_module("xformers"), "__version__", "of unknown version")
        raise RuntimeError(
            f"volta_fa.enable_xformers: xformers: got {version}, expected {_RELEASES} ({difference}): install one of these, or use "
            "volta_fa.enable_sdpa() and switch xformers off"
        )


class _Unsupported(Exception):
    """volta_fa does not run the call. The argument is the reason for `xformers_stats`."""


def _attention(inp: Any, op: Any = None) -> Tensor:
    """Replaces xformers' `_memory_efficient_attention`. inp: xformers' `Inputs`. op: the operator that the caller chose, or None."""
    original = _original
    assert original is not None
    if inp.query.device not in _devices:
        return original(inp, op)
    try:
        if op is not None:
            raise _Unsupported("op")
        call = dataclasses.replace(inp)  # a copy, which normalize_bmhk() changes
        try:
            output_shape = call.normalize_bmhk()  # brings q, k and v into the shapes that `_run` takes
            call.validate_inputs()
        except ValueError:
            raise _Unsupported("arguments") from None
        out = _run(call).reshape(output_shape)
    except _Unsupported as unsupported:
        _count(unsupported.args[0])
        return original(inp, op)
    _count("ran")
    return out


def _count(key: str) -> None:
    if not torch.compiler.is_compiling():  # a compiled program would be compiled again at each count
        _counts[key] += 1


# ---- the call ----------------------------------------------------------------------------------------------------------


def _run(inp: Any) -> Tensor:
    """Computes a call of (batch, seqlen, heads, headdim), or of (batch, seqlen, groups, heads, headdim), where `heads` query heads share a
    KV head. Returns (batch, seqlen, all heads, headdim). Raises _Unsupported."""
    q, k, v = inp.query, inp.key, inp.value
    if not takes_dtype(q):
        raise _Unsupported("dtype")
    if getattr(inp, "output_dtype", None) not in (None, q.dtype):
        raise _Unsupported("output_dtype")
    if min(q.shape[-1], v.shape[-1]) < 1 or max(q.shape[-1], v.shape[-1]) > max_headdim(q.device):
        raise _Unsupported("headdim")
    if not inp.p < 1.0:
        raise _Unsupported("dropout")
    if q.ndim == 5:
        q, (k, v) = q.flatten(2, 3), _grouped(k, v)
    q, k, v = map(with_unit_stride, (q, k, v))
    options = {"softmax_scale": inp.scale, "dropout_p": inp.p}
    rule = _RULES.get(_bias_name(inp.attn_bias))
    if rule is None:
        raise _Unsupported("attn_bias")
    compute, options_of = rule  # the function that computes attention with this kind of bias, and the options that the bias stands for
    # xformers computes in the dtype of its inputs
    with torch.autocast(q.device.type, enabled=False):
        return compute(inp.attn_bias, q, k, v, options | (options_of(inp.attn_bias) if options_of else {}))


def _grouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k and v of (batch, seqlen, groups, heads, headdim) in four dimensions: with one head for each group if expand() made its
    heads, which are then equal, else with all heads."""

    def is_expanded(t: Tensor) -> bool:
        # not a leaf that requires grad, whose gradient must have every head
        return t.shape[3] == 1 or (t.stride(3) == 0 and not (t.requires_grad and t.is_leaf))

    if is_expanded(k) and is_expanded(v) and k.shape[3]:
        return k.select(3, 0), v.select(3, 0)
    return k.flatten(2, 3), v.flatten(2, 3)


def _bias_name(bias: Any) -> str:
    """Returns the key of `_RULES` for a bias: the class of xformers' biases, "Tensor" or "None"; "" for other types."""
    kind = type(bias)
    if bias is None or kind in (Tensor, torch.nn.Parameter):
        return "Tensor" if bias is not None else "None"
    return kind.__name__ if kind.__module__ == f"{_MODULE}.attn_bias" else ""


# ---- options of the operators that a bias stands for: functions of `_RULES` --------------------------------------------------


def _window(bias: Any) -> dict[str, Any]:
    """Biases with a window to both sides, whose fields have the operators' names."""
    return {"window_left": bias.window_left, "window_right": bias.window_right}


def _causal(bias: Any) -> dict[str, Any]:
    """Causal biases, aligned bottom-right as the operators are, with or without a window."""
    return {"is_causal": True, "window_left": _window_left(bias)}


def _window_left(bias: Any) -> int:
    """Returns window_left of a causal bias, -1 without a window. xformers counts the query's own position, the operators do not."""
    window: int = getattr(bias, "_window_size", 0)
    return window - 1


# ---- biases of whole batches: functions of `_RULES`, which compute attention with one kind of bias ----------------------------


def _fwd(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Computes attention with a bias that the options describe already."""
    return torch.ops.volta_fa.fwd(q, k, v, **options)[0]


def _tensor(bias: Tensor, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Computes attention with a tensor that is added to the scores."""
    return _fwd(bias, q, k, v, options | {"attn_bias": _checked_bias(bias, q, k)})


def _checked_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns a bias of (batch, heads, seqlen_q, seqlen_k) or (batch, groups, heads, seqlen_q, seqlen_k) with four dimensions."""
    bias = bias.flatten(1, 2) if bias.ndim == 5 else bias
    broadcasts = bias.ndim == 4 and all(n in (1, m) for n, m in zip(bias.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1])))
    if not broadcasts or bias.dtype not in (q.dtype, torch.float32) or bias.device != q.device:
        raise _Unsupported("attn_bias")
    return bias


def _top_left(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """LowerTriangularMask: query i sees the keys j <= i. The operator aligns the last query with the last key instead."""
    keys = min(q.shape[1], k.shape[1])  # no query sees later keys
    return _fwd(bias, q, k[:, :keys], v[:, :keys], options | {"window_right": q.shape[1] - keys})


def _top_left_with_tensor(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """LowerTriangularMaskWithTensorBias: `_top_left` with a tensor that is added to the scores."""
    added = getattr(bias, "_bias", None)
    if added is None:  # up to 0.0.31 the bias is a tensor subclass, which alone receives the gradient
        if bias.requires_grad:
            raise _Unsupported("gradient")
        added = bias._subtensor
    added = _checked_bias(added, q, k)
    keys = min(q.shape[1], k.shape[1])
    return _top_left(bias, q, k, v, options | {"attn_bias": added if added.shape[3] == 1 else added[..., :keys]})


# ---- biases of packed sequences ----------------------------------------------------------------------------------------
#
# xformers packs sequences into a batch of 1, and calls each a block. `q_seqinfo` and `k_seqinfo` hold `seqstart` (the operators'
# cu_seqlens, on the device), `seqstart_py` (the same on the host) and `max_seqlen`. Keys may have room to grow, or gaps, after each
# block ("padded", "gappy"): then `k_seqinfo` also has `seqlen` and `seqlen_py`, the used keys of each block.


def _top_left_blocks(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """BlockDiagonalCausalMask, also with a window: in each block (sequence) query i sees the keys j <= i. The operator aligns a sequence's
    last query with its last key instead, so other lengths need other windows, fewer keys or a bias."""
    if bias.q_seqinfo is bias.k_seqinfo or bias.q_seqinfo.seqstart_py == bias.k_seqinfo.seqstart_py:
        return _packed(bias, q, k, v, options | _causal(bias))
    left = _window_left(bias)
    intervals = zip(bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals())  # (begin, end) of each block
    offsets = {(q_end - q_begin) - (k_end - k_begin) for (q_begin, q_end), (k_begin, k_end) in intervals}  # seqlen_q - seqlen_k
    if max(offsets) <= 0:
        # no query sees the last keys of the longer blocks
        seqused_k = torch.minimum(bias.q_seqinfo.seqstart.diff(), bias.k_seqinfo.seqstart.diff())
        return _packed(bias, q, k, v, options | {"is_causal": True, "window_left": left, "seqused_k": seqused_k})
    if len(offsets) == 1:
        offset = offsets.pop()
        return _packed(bias, q, k, v, options | {"window_left": left - offset if left >= 0 else -1, "window_right": offset})
    visible = torch.ones(bias.q_seqinfo.max_seqlen, bias.k_seqinfo.max_seqlen, dtype=torch.bool, device=q.device).tril_()
    visible = visible.triu_(-left) if left >= 0 else visible
    return _packed(bias, q, k, v, options | {"attn_bias": visible[None, None]})


def _packed(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Computes attention within each block."""
    q_lengths, k_lengths = bias.q_seqinfo, bias.k_seqinfo
    starts = k_lengths.seqstart_py
    if q.shape[0] != 1 or k.shape[0] != 1 or q.shape[1] != q_lengths.seqstart_py[-1] or k.shape[1] != starts[-1]:
        raise _Unsupported("arguments")
    cu_seqlens_k, max_seqlen_k = k_lengths.seqstart, k_lengths.max_seqlen
    if hasattr(k_lengths, "seqlen"):
        room = [end - start for start, end in zip(starts, starts[1:])]  # keys from a block's beginning to the next one's
        if all(length <= space for length, space in zip(k_lengths.seqlen_py, room)):
            options = options | {"seqused_k": k_lengths.seqlen}
            max_seqlen_k = max(room)
            if starts[0]:  # cu_seqlens must begin with 0
                k, v, cu_seqlens_k = k[:, starts[0] :], v[:, starts[0] :], cu_seqlens_k - starts[0]
        else:  # gappy keys whose blocks overlap or lie in another order: copy them together
            rows = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, k_lengths.seqlen_py)])
            k, v = (t.index_select(1, rows.to(t.device, non_blocking=True)) for t in (k, v))
            cu_seqlens_k = torch.nn.functional.pad(k_lengths.seqlen.cumsum(0, dtype=torch.int32), (1, 0))
    lengths = _lengths(q_lengths.seqstart, cu_seqlens_k, q_lengths.max_seqlen, max_seqlen_k)
    return _fwd(bias, q[0], k[0], v[0], options | lengths)


def _pages(bias: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """PagedBlockDiagonalPaddedKeysMask, also causal: k and v are pages of `page_size` keys, one after the other."""
    if options.pop("dropout_p"):
        raise _Unsupported("dropout")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise _Unsupported("gradient")
    size, queries = bias.page_size, bias.q_seqinfo.seqstart_py[-1]
    if q.shape[0] != 1 or k.shape[0] != 1 or q.shape[1] != queries or size % PAGE_SIZE_MULTIPLE or k.shape[1] % size:
        raise _Unsupported("arguments")
    return torch.ops.volta_fa.fwd_kvcache(
        q[0], k[0].unflatten(0, (-1, size)), v[0].unflatten(0, (-1, size)), cu_seqlens_q=bias.q_seqinfo.seqstart,
        max_seqlen_q=bias.q_seqinfo.max_seqlen, cache_seqlens=bias.k_seqinfo.seqlen,
        block_table=with_unit_stride(bias.block_tables), **options,
    )[0]  # fmt: skip


_Compute = Callable[[Any, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
#: By `_bias_name` of the bias: the function that computes attention with it, and the options that it stands for; None: no options.
_RULES: dict[str, tuple[_Compute, Callable[[Any], dict[str, Any]] | None]] = {
    "None": (_fwd, None),
    "Tensor": (_tensor, None),
    "LowerTriangularMask": (_top_left, None),
    "LowerTriangularMaskWithTensorBias": (_top_left_with_tensor, None),
    "LowerTriangularFromBottomRightMask": (_fwd, _causal),
    "LowerTriangularFromBottomRightLocalAttentionMask": (_fwd, _causal),
    "LocalAttentionFromBottomRightMask": (_fwd, _window),
    "BlockDiagonalMask": (_packed, None),
    "BlockDiagonalCausalMask": (_top_left_blocks, None),
    "BlockDiagonalCausalLocalAttentionMask": (_top_left_blocks, None),
    "BlockDiagonalCausalFromBottomRightMask": (_packed, _causal),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (_packed, _causal),
    "BlockDiagonalPaddedKeysMask": (_packed, None),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (_packed, _causal),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (_packed, _causal),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (_packed, _window),
    "BlockDiagonalGappyKeysMask": (_packed, None),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (_packed, _causal),
    "PagedBlockDiagonalPaddedKeysMask": (_pages, None),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (_pages, _causal),
}
