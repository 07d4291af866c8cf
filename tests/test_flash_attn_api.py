"""volta_fa's functions with flash-attn 2's interface (`flash_attn_func` etc.): signatures, results, gradients and errors.

flash_attention.py has the fp64 reference (`attention`, `packed`), comparisons in the backend's dtype (`close`, `check_gradients`), CASES
(options by name, whose slopes `drawn` draws), LENGTHS (queries and keys of five packed sequences) and inputs: `leaf` is a random tensor
that requires a gradient, `packed_leaves` q, k and v of LENGTHS with cu_seqlens and maxima, `cu` makes cu_seqlens of lengths. LSE_ROUNDING
is the least tolerance of probabilities: they are computed from softmax_lse, which is fp32 even where all else is fp64. BACKENDS runs a test
on the CPU in fp64 and fp32, and on a GPU. The last part calls the functions of all integrations with strided index tensors."""

import inspect
import math
import re

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attention
import volta_fa.flash_mla
import volta_fa.sageattention
from conftest import on
from flash_attention import BACKENDS, CASES, LENGTHS, LSE_ROUNDING, attention, check_gradients, close, close_lse, cu, leaf, packed, refused
from volta_fa import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
from volta_fa.integrations import torch_flash_impl
from volta_fa.integrations.flash_attn import fa3, private

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", volta_fa.integrations.flash_attn.interface.__all__)
def test_signatures_are_flash_attns(name):
    """Signatures are those of release 2.8.3. `s_aux` is volta_fa's addition, by name only."""
    ours = "" if "packed" in name else ", *, s_aux=None"
    assert flash_attention.signature_of(getattr(volta_fa, name)) == f"({SIGNATURES[name]}{ours})"


#: Arguments that are tensors in every call.
TENSORS = ("q", "k", "v", "kv", "qkv", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "k_cache", "v_cache")


@pytest.mark.parametrize("name", SIGNATURES)
def test_none_for_a_tensor_is_an_error_that_names_it(name):
    parameters = inspect.signature(getattr(volta_fa, name)).parameters.values()
    arguments = {p.name: 5 for p in parameters if p.default is p.empty}
    shape = {"kv": (2, 3, 2, 1, 8), "qkv": (2, 3, 3, 1, 8)} if "varlen" not in name else {"kv": (6, 2, 1, 8), "qkv": (6, 3, 1, 8)}
    tensors = arguments.keys() & set(TENSORS)
    assert tensors
    arguments |= {tensor: torch.zeros(shape.get(tensor, (2, 3, 1, 8))) for tensor in tensors}
    for tensor in tensors:
        with pytest.raises(ValueError, match=f"volta_fa: {tensor}: got None, expected a tensor$"):
            getattr(volta_fa, name)(**arguments | {tensor: None})


@pytest.mark.parametrize("name", SIGNATURES)
def test_errors_name_lists_in_place_of_tensors(name):
    """Lists had no attribute `dim` or `shape`, and the error said no more."""
    parameters = inspect.signature(getattr(volta_fa, name)).parameters.values()
    arguments = {p.name: 2 for p in parameters if p.default is p.empty}
    shape = {"kv": (3, 2, 1, 8), "qkv": (3, 3, 1, 8)} if "varlen" in name else {"kv": (2, 3, 2, 1, 8), "qkv": (2, 3, 3, 1, 8)}
    operand = (3, 1, 8) if "varlen" in name else (2, 3, 1, 8)
    for tensor in (tensors := arguments.keys() & set(TENSORS)):
        lengths = torch.tensor([0, 1, 3], dtype=torch.int32)
        arguments[tensor] = lengths if "cu" in tensor else torch.zeros(shape.get(tensor, operand))
    for tensor in tensors:
        with pytest.raises(ValueError, match=f"volta_fa: {tensor}: got an object of type list, expected a tensor$"):
            getattr(volta_fa, name)(**arguments | {tensor: [0, 1, 3]})
    lists = {"alibi_slopes": [1.0]}  # the dispatcher rejects these
    if "kvcache" in name:
        lists |= {"cache_seqlens": [1, 2], "block_table": [[0], [1]], "rotary_cos": [[1.0]], "k": [1.0]}
        arguments |= {"cache_seqlens": 1, "v": torch.zeros(2, 1, 1, 8), "k": torch.zeros(2, 1, 1, 8)}
    for argument in lists:
        with pytest.raises((ValueError, RuntimeError), match=f"{argument}.*\\blist\\b"):
            getattr(volta_fa, name)(**arguments | {argument: lists[argument]})


@pytest.mark.parametrize("form", ["jagged", "nested", "sparse", "mkldnn"])
def test_errors_name_tensors_that_are_not_dense(form):
    """torch's errors for these are "volta_fa.fwd.default" and the like."""
    rows, dense = [torch.zeros(2, 1, 8), torch.zeros(3, 1, 8)], torch.zeros(2, 3, 1, 8)
    wrong = {
        "jagged": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
        "nested": lambda: torch.nested.nested_tensor(rows),
        "sparse": dense.to_sparse,
        "mkldnn": dense.to_mkldnn,
    }[form]()
    remedy = "pass its values" if "ed" in form else "convert it with to_dense"
    for arguments in ({"q": wrong}, {"k": wrong}, {"v": wrong}):
        with pytest.raises(ValueError, match=f"volta_fa: {next(iter(arguments))}: got .*, expected a dense tensor: {remedy}"):
            flash_attn_func(**{"q": dense, "k": dense, "v": dense} | arguments)
    with pytest.raises(ValueError, match=f"volta_fa: k_cache: got .*, expected a dense tensor: {remedy}"):
        flash_attn_with_kvcache(dense, wrong, dense, cache_seqlens=1)
    with pytest.raises(ValueError, match=f"volta_fa: qkv: got .*, expected a dense tensor: {remedy}"):
        volta_fa.flash_attn_qkvpacked_func(wrong)


def test_paged_call_without_max_seqlen_k_is_an_error_that_names_it():
    q, pages, lengths = torch.zeros(2, 1, 8), torch.zeros(1, 16, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="volta_fa: max_seqlen_k: got None, expected the length of the longest sequence"):
        flash_attn_varlen_func(q, pages, pages, lengths, lengths, 2, None, block_table=torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize("headdim", [32, 20])
@pytest.mark.parametrize("name", CASES)
@BACKENDS
def test_dense(backend, name, headdim):
    """S_dmask, the third result, is the softmax, negative where dropped, so that the reference can drop the same."""
    q, k, v = leaf(backend, 2, 33, 4, headdim), leaf(backend, 2, 40, 2, headdim), leaf(backend, 2, 40, 2, headdim)
    options = flash_attention.drawn(backend, CASES[name])
    torch.manual_seed(3)
    out, lse, s_dmask = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    keep = ~s_dmask.signbit() if "dropout_p" in options else None
    expected, expected_lse, p = attention(q, k, v, keep=keep, **options)
    assert out.dtype == s_dmask.dtype == q.dtype
    close(backend, out, expected)
    close_lse(lse, expected_lse)
    check_gradients(backend, out, expected, (q, k, v))
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(q, k, v, **options), out), "a tensor without return_attn_probs, of the same seed"
    if keep is None:
        assert s_dmask.shape == (0,)
        return
    assert s_dmask.shape == (2, 4, 33, 40)
    close(backend, s_dmask.abs(), p, LSE_ROUNDING)
    share = (~keep & (p > 0)).sum() / (p > 0).sum()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / (p > 0).sum()), share
    assert not torch.equal(flash_attn_func(q, k, v, **options), out), "another mask"


@BACKENDS
def test_strides(backend):
    """Any strides give the right result, also those of a last dimension that is not contiguous."""
    q = backend.randn(2, 16, 5, 2).transpose(1, 3).transpose(1, 2)
    k, v = backend.randn(2, 2, 7, 16).transpose(1, 2), backend.randn(2, 7, 2, 16)
    assert q.shape == (2, 5, 2, 16) and q.stride(-1) != 1
    close(backend, flash_attn_func(q, k, v), attention(q, k, v)[0])


@pytest.mark.parametrize("headdim", [16, 12])
@BACKENDS
def test_dense_packed_tensors(backend, headdim):
    """k and v, or q, k and v in one tensor: the same result, and one gradient."""
    options = {"causal": True, "window_size": (5, 0), "softmax_scale": 0.2}
    q, kv, qkv = leaf(backend, 2, 5, 4, headdim), leaf(backend, 2, 8, 2, 2, headdim), leaf(backend, 2, 8, 3, 2, headdim)
    out = flash_attn_kvpacked_func(q, kv, **options)
    assert torch.equal(out, flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options))
    check_gradients(backend, out, attention(q, kv[:, :, 0], kv[:, :, 1], **options)[0], (q, kv))

    parts = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    out, lse, s_dmask = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    assert torch.equal(out, flash_attn_func(*parts, **options)) and lse.shape == (2, 2, 8) and s_dmask.numel() == 0
    check_gradients(backend, out, attention(*parts, **options)[0], (qkv,))


@BACKENDS
def test_sinks(backend):
    """Functions that transformers hands gpt-oss's sinks to, under its name `s_aux`: one more key per row, without a value."""
    q, k, v = backend.randn(2, 9, 4, 16), backend.randn(2, 11, 2, 16), backend.randn(2, 11, 2, 16)
    sinks = backend.randn(4).detach().float().requires_grad_()
    expected, *_ = attention(q, k, v, causal=True, sinks=sinks)
    out = flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    close(backend, out, expected)
    (found,) = torch.autograd.grad(out.double().square().sum(), sinks)
    (right,) = torch.autograd.grad(expected.square().sum(), sinks)
    torch.testing.assert_close(found, right, rtol=2e-2 if backend.dtype == torch.float16 else 1e-4, atol=1e-3)
    cu = [backend.ints([0, n, 2 * n]) for n in (9, 11)]
    packed = [t.detach().flatten(0, 1) for t in (q, k, v)]
    close(backend, flash_attn_varlen_func(*packed, *cu, 9, 11, causal=True, s_aux=sinks), expected.flatten(0, 1))
    close(backend, flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), causal=True, s_aux=sinks.detach()), expected)


class Calls(TorchDispatchMode):
    """The keyword arguments of volta_fa::fwd and bwd, call by call."""

    def __init__(self):
        super().__init__()
        self.options = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "volta_fa":
            self.options.append((function._opname, kwargs))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [False, True])
@on("cpu-fp32")
def test_deterministic_reaches_the_op(backend, deterministic):
    q, cu_seqlens = leaf(backend, 6, 1, 8), cu([6])
    with Calls() as calls:
        flash_attn_func(q[None], q[None], q[None], deterministic=deterministic).sum().backward()
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 6, 6, deterministic=deterministic).sum().backward()
    assert [name for name, _ in calls.options] == ["fwd", "bwd"] * 2
    assert [options.get("deterministic", False) for _, options in calls.options] == [deterministic] * 4


@on("cpu-fp32")
def test_torch_compile(backend):
    """torch.compile makes one graph, with right results and gradients."""
    q, kv = leaf(backend, 2, 6, 2, 12), leaf(backend, 2, 6, 2, 2, 12)
    compiled = torch.compile(flash_attn_kvpacked_func, backend="aot_eager", fullgraph=True)
    out, expected = (f(q, kv, causal=True, window_size=(3, 0)) for f in (compiled, flash_attn_kvpacked_func))
    close(backend, out, expected)
    check_gradients(backend, out, expected, (q, kv))


@pytest.mark.parametrize("headdim, headdim_v", [(16, 16), (20, 36)])
@pytest.mark.parametrize("name", CASES)
@BACKENDS
def test_varlen(backend, name, headdim, headdim_v):
    lengths_q, lengths_k = LENGTHS
    (q, k, v), lengths = flash_attention.packed_leaves(backend, headdim, headdim_v)
    options = flash_attention.drawn(backend, CASES[name], entries=5)
    # max_seqlen_k 19, though no sequence has as many keys
    out, lse, s_dmask = flash_attn_varlen_func(q, k, v, *lengths[:3], 19, return_attn_probs=True, **options)
    keep = ~s_dmask.signbit() if "dropout_p" in options else None
    expected, expected_lse, ps = packed(q, k, v, lengths_q, lengths_k, keep=keep, **options)
    assert out.shape == (sum(lengths_q), 4, headdim_v) and out.dtype == q.dtype and lse.shape == (4, sum(lengths_q))
    close(backend, out, expected)
    close_lse(lse, expected_lse)
    check_gradients(backend, out, expected, (q, k, v))
    if keep is None:
        assert s_dmask.shape == (0,)
        return
    assert s_dmask.shape == (5, 4, 17, 19)
    for b, p in enumerate(ps):
        close(backend, s_dmask[b, :, : lengths_q[b], : lengths_k[b]].abs(), p, LSE_ROUNDING)
        assert (s_dmask[b, :, lengths_q[b] :] == 0).all() and (s_dmask[b, :, :, lengths_k[b] :] == 0).all()
    assert 0.15 < (s_dmask < 0).sum() / (s_dmask != 0).sum() < 0.45


@BACKENDS
def test_varlen_packed_tensors(backend):
    """kv and qkv get one gradient each; max_seqlen may be larger than needed, and a tensor of one element."""
    lengths_q, lengths_k = LENGTHS
    options = {"causal": True, "softmax_scale": 0.4}
    cu_q, cu_k = cu(lengths_q, backend.device), cu(lengths_k, backend.device)
    q, kv = leaf(backend, sum(lengths_q), 4, 12), leaf(backend, sum(lengths_k), 2, 2, 12)
    qkv = leaf(backend, sum(lengths_q), 3, 2, 12)
    out = volta_fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, torch.tensor(17), torch.tensor(40), **options)
    expected, *_ = packed(q, kv[:, 0], kv[:, 1], lengths_q, lengths_k, **options)
    close(backend, out, expected)
    check_gradients(backend, out, expected, (q, kv))

    out, lse, _ = volta_fa.flash_attn_varlen_qkvpacked_func(qkv, cu_q, torch.tensor([17]), return_attn_probs=True, **options)
    expected, expected_lse, _ = packed(*qkv.unbind(1), lengths_q, lengths_q, **options)
    close(backend, out, expected)
    close_lse(lse, expected_lse)
    check_gradients(backend, out, expected, (qkv,))


@on("cpu-fp32")
def test_errors(backend):
    q, qkv = backend.randn(2, 5, 2, 16), backend.randn(2, 5, 3, 2, 16)
    refused(ValueError, r"softcap: got 1 together with dropout_p 0.1", flash_attn_func, q, q, q, softcap=1.0, dropout_p=0.1)
    one = torch.tensor(1.0)
    refused(ValueError, r"q: got a tensor of rank 0 with shape \(\), expected rank 4, \(batch, seqlen", flash_attn_func, one, q, q)
    refused(ValueError, r"v_cache: got a tensor of rank 2", flash_attn_with_kvcache, q, q, q[0, 0])
    expected = r"qkv: got shape \(2, 5, 2, 16\), expected \(batch, seqlen, 3, nheads, headdim\)"
    refused(ValueError, expected, flash_attn_qkvpacked_func, q)
    expected = r"kv: got shape \(2, 5, 3, 2, 16\), expected \(batch, seqlen_k, 2, nheads_k, headdim\)"
    refused(ValueError, expected, flash_attn_kvpacked_func, q, qkv)


@pytest.mark.parametrize(
    "message, headdims",
    [
        (r"q: got headdim 513, expected a headdim from 1 to 512", (513, 513, 513)),
        (r"q: got headdim 516, .* to 512", (516, 516, 16)),
        (r"v: got headdim 513, .* to 512", (16, 16, 513)),
        (r"k: got headdim 14, expected headdim 12, that of q", (12, 14, 12)),  # both are padded to 16
        (r"k: got headdim 9, expected headdim 16", (16, 9, 16)),
        (r"q: got headdim 0, expected a headdim from 1", (0, 0, 16)),
        (r"v: got headdim 0, expected a headdim from 1", (16, 16, 0)),
    ],
)
@on("cpu-fp32", "cuda")
def test_headdim_errors(backend, headdims, message):
    """Messages name the shapes that the caller passed, not the padded ones."""
    q, k, v = (backend.randn(2, 5, 2, n) for n in headdims)
    cu_seqlens = cu([5, 5], backend.device)
    refused(ValueError, message, flash_attn_func, q, k, v)
    refused(ValueError, message, flash_attn_varlen_func, *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens, cu_seqlens, 5, 5)
    refused(ValueError, re.sub(r"^([kv])", r"\1_cache", message), flash_attn_with_kvcache, q, k, v)


@pytest.mark.parametrize(
    "window_size",
    [
        None, 3, (3,), (), (1, 2, 3), (None, None), (3.0, 0.0), (1, "2"), "12", {1: 2, 3: 4},
        torch.tensor(3), torch.tensor([1.0, 2.0]), (torch.tensor(1.0), 2), (torch.tensor([1, 2]), 2), torch.tensor([[1, 2]]),
    ],
    ids=repr,
)  # fmt: skip
@on("cpu-fp32")
def test_window_size_errors(backend, window_size):
    q, cu_seqlens = backend.randn(2, 5, 2, 16), cu([5, 5])
    message = r"^volta_fa: window_size: got .*, expected \(left, right\)"
    refused(ValueError, message, flash_attn_func, q, q, q, window_size=window_size)
    flat = q.flatten(0, 1)
    refused(ValueError, message, flash_attn_varlen_func, flat, flat, flat, cu_seqlens, cu_seqlens, 5, 5, window_size=window_size)
    refused(ValueError, message, flash_attn_with_kvcache, q, q, q, window_size=window_size, causal=True)


@pytest.mark.parametrize(
    "window_size",
    [[3, 1], torch.tensor([3, 1]), (torch.tensor(3), 1), (numpy.int64(3), numpy.int32(1)), (torch.tensor([3]), torch.tensor(1).int())],
    ids=repr,
)
@on("cpu-fp32")
def test_types_of_window_size(backend, window_size):
    q = backend.randn(2, 9, 2, 16)
    assert torch.equal(flash_attn_func(q, q, q, window_size=window_size), flash_attn_func(q, q, q, window_size=(3, 1)))


@on("cpu-fp32")
def test_varlen_errors(backend):
    q, qkv, cu_seqlens = backend.randn(10, 2, 16), backend.randn(10, 3, 2, 16), cu([4, 6])
    varlen = flash_attn_varlen_func
    refused(ValueError, r"max_seqlen_k: got 5", varlen, q, q, q, cu_seqlens, cu_seqlens, 6, torch.tensor(5))
    refused(ValueError, r"cu_seqlens_q: ", varlen, q, q, q, cu([4, 5]), cu_seqlens, 6, 6)
    expected = r"qkv: got shape \(10, 2, 16\), expected \(total, 3, nheads"
    refused(ValueError, expected, volta_fa.flash_attn_varlen_qkvpacked_func, q, cu_seqlens, 6)
    expected = r"kv: got shape \(10, 3, 2, 16\), expected \(total_k, 2, nheads_k"
    refused(ValueError, expected, volta_fa.flash_attn_varlen_kvpacked_func, q, qkv, cu_seqlens, cu_seqlens, 6, 6)


def is_index(t):
    """Returns whether an argument is a tensor of lengths or page numbers."""
    return isinstance(t, torch.Tensor) and t.dtype == torch.int32


def strided(t):
    """Returns a view with the same values and no stride of 1. The elements between hold -99, which is no valid length or page."""
    return torch.stack((t, torch.full_like(t, -99)), -1)[..., 0]


def calls_of_integrations(backend):
    """Yields calls of functions with another library's interface: a name, the function, its arguments and its options. `packed`: positional
    arguments q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    q, k, v = (backend.randn(7, heads, 16) for heads in (4, 2, 2))
    cu, half = backend.ints([0, 3, 7]), backend.dtype if backend.dtype == torch.float16 else torch.float16
    slopes, sinks = flash_attention.slopes_of(backend, 2, 4), backend.randn(4)
    pages, table = (backend.randn(4, 16, 2, 16) for _ in range(2)), backend.ints([2, 0, 1, 3]).view(2, 2)
    k_pages, v_pages = pages
    lengths, queries, new = backend.ints([20, 5]), backend.randn(2, 2, 4, 16), backend.randn(2, 2, 2, 16)
    cos, sin = backend.randn(40, 4), backend.randn(40, 4)
    packed = q, k, v, cu, cu, 4, 4
    dense = backend.randn(2, 40, 2, 16), backend.randn(2, 40, 2, 16)
    entries = backend.ints([1, 0])
    yield "varlen", flash_attn_varlen_func, packed, {"alibi_slopes": slopes, "s_aux": sinks}
    yield "varlen pages", flash_attn_varlen_func, (q, k_pages, v_pages, cu, cu, 4, 4), {"block_table": table}
    yield "varlen qkv", volta_fa.flash_attn_varlen_qkvpacked_func, (torch.stack((k, k, v), 1), cu, 4), {}
    yield "varlen kv", volta_fa.flash_attn_varlen_kvpacked_func, (q, torch.stack((k, v), 1), cu, cu, 4, 4), {}
    yield "dense", flash_attn_func, (queries, new, new), {"alibi_slopes": slopes, "s_aux": sinks}
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    yield "pages", flash_attn_with_kvcache, (queries, k_pages.clone(), v_pages.clone(), new, new), {
        "cache_seqlens": lengths, "block_table": table, "alibi_slopes": slopes, **rotary,
    }  # fmt: skip
    of_entries = {"cache_seqlens": lengths, "cache_batch_idx": entries, "cache_leftpad": entries}
    yield "cache", flash_attn_with_kvcache, (queries, *dense), of_entries
    yield "fa3 varlen", fa3.flash_attn_varlen_func, packed, {"seqused_q": lengths * 0 + 3, "seqused_k": lengths * 0 + 2}
    yield "fa3 chunks", fa3.flash_attn_varlen_func, packed, {"attention_chunk": 2}
    for chunk in (0, 5, 16):
        yield f"fa3 pages {chunk}", fa3.flash_attn_with_kvcache, (queries, k_pages.clone(), v_pages.clone(), new, new), {
            "cache_seqlens": lengths, "page_table": table, "attention_chunk": chunk, "rotary_seqlens": entries, **rotary,
        }  # fmt: skip
        yield f"fa3 cache {chunk}", fa3.flash_attn_with_kvcache, (q, *dense, k, v), {
            **of_entries, "attention_chunk": chunk, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 4,
        }  # fmt: skip
    options = {"alibi_slopes": slopes, "leftpad_k": entries, "seqused_k": lengths * 0 + 3}
    forward = (*packed, 0.0, 0.25, True)  # dropout_p, softmax_scale, causal
    yield "private", private._flash_attn_varlen_forward, forward, options
    out, lse, _, _ = private._flash_attn_varlen_forward(*forward)
    yield "private backward", private._flash_attn_varlen_backward, (q, q, k, v, out, lse, None, None, None, cu, cu, 4, 4), {
        "dropout_p": 0.0, "softmax_scale": 0.25, "causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "alibi_slopes": slopes, "deterministic": True,
    }  # fmt: skip
    latents = backend.randn(2, 16, 1, 576)
    mla = backend.randn(2, 1, 4, 576), latents, backend.ints([0, 1]).view(2, 1), lengths.clamp(max=16), 512
    yield "flash_mla", volta_fa.flash_mla.flash_mla_with_kvcache, mla, {}
    sage = (t.to(half).repeat(1, 1, 4) for t in (q, k, v))
    yield "sageattention", volta_fa.sageattention.sageattn_varlen, (*sage, cu, cu, 4, 4), {}
    if hasattr(torch.ops.aten, "_flash_attention_forward"):
        more = 0.0, True, False  # dropout_p, is_causal, return_debug_mask
        yield "torch lengths", torch_flash_impl._forward, (*packed, *more), {"seqused_k": lengths * 0 + 3, "alibi_slopes": slopes}
        yield "torch pages", torch_flash_impl._forward, (q, k_pages, v_pages, cu, cu, 4, 4, *more), {"block_table": table}


@on("cpu-fp32", "cuda")
def test_strided_lengths_and_tables(backend):
    """As in flash-attn, vectors of lengths, tables of pages and of rotations, slopes and sinks may have any strides."""
    for name, function, arguments, options in calls_of_integrations(backend):
        copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in arguments]  # a cache is written
        expected = function(*arguments, **options)
        given = {n: strided(t) if isinstance(t, torch.Tensor) and (is_index(t) or t.dim() < 3) else t for n, t in options.items()}
        found = function(*(strided(t) if is_index(t) else t for t in copies), **given)
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        for f, e in zip(found, expected):
            if f is not None and f.dtype.is_floating_point and f.dim():
                torch.testing.assert_close(f, e, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
