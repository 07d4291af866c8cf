"""Checks of `torch.ops.volta_fa.fwd_kvcache`, attention with a KV cache, for test_kvcache*.py, test_decode_kernels.py and others.

`Cached` (volta_fa.check.cache_cases.CacheCase, which explains its fields) describes a problem: lengths of each sequence, (queries, cached
tokens, appended tokens), and the layout of the cache. By default headdim is 64, nheads 2 on one KV head, pages have 16 tokens, and queries
are causal. A backend is a dtype with the CPU, the simulator or a GPU (conftest.py). `case.problem(backend)` draws `CacheInputs`, which has:

- q, k_cache, v_cache, `new` (k and v to append, or none), and the operator's `options`. Cache elements that hold no token are NaN.
- `places`: for each sequence the page (or entry) and row of each token; `tokens(b, first, end)` are those of tokens of sequence b.
- `numbers(which, cache, tokens, b)`: these tokens of K or V ("k" or "v"), dequantized; `appended(b)`: the k and v to append, in fp64.
- `copy_of_cache()`, `fresh()`: caches, and options, that a call may write.
- `parts(b, k, v)`: exact results of sequence b, with error limits.

`check` runs a problem and compares results and caches; `judge` (conftest.py) checks results against `parts`.

A case with `latents` is one of `fwd_mla`, multi-head latent attention: its cache has one head, whose first columns are also the values.
WRITTEN names the options that an append to a quantized cache writes: scales and zero points of the new tokens."""

import torch
from torch import Tensor
from torch.library import opcheck

# agreed: the first of runs, which must be bitwise identical. check_form: shapes, dtypes and strides of out and softmax_lse
from conftest import agreed, assert_same_bits, check_form, judge, reads_no_value
from volta_fa import quantize_kv
from volta_fa.check.cache_cases import WRITTEN, CacheInputs, has_scales  # has_scales: whether a format has a scale per token and head
from volta_fa.check.cache_cases import CacheCase as Cached

fwd_kvcache, fwd_mla = torch.ops.volta_fa.fwd_kvcache, torch.ops.volta_fa.fwd_mla


def mla_options(p: CacheInputs) -> dict:
    """Returns the options of fwd_mla, which names the scales of latents otherwise than the case does."""
    names = {"k_scale": "latent_scale", "k_descale": "latent_descale"}
    return {names.get(name, name): value for name, value in p.options.items()}


def run(backend, p: CacheInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
    """Returns out, softmax_lse, the caches and the options after the call, which writes scales of appended tokens. Kernels run twice
    (simulator: in both warp orders), bitwise identically."""
    results = []
    for _ in backend._runs(p.q, p.v_cache):
        caches, options = p.copy_of_cache(), p.fresh()
        if p.case.latents:
            out, lse = fwd_mla(p.q, caches[0], **mla_options(p))
        else:
            out, lse = fwd_kvcache(p.q, *caches, *p.new, **options)
        results.append((out, lse, *caches, options))
    agreed([[options[name] for name in WRITTEN if name in options] for *_, options in results], *WRITTEN)
    return agreed(results)


def check(backend, case: Cached, change=lambda problem: None):
    """Compares results with attention in fp64 over the (dequantized) tokens, and the cache with what appending must write. `change` may
    change the problem's tensors before the call."""
    problem = case.problem(backend)
    change(problem)
    out, lse, *caches, options = run(backend, problem)
    check_cache(problem, *caches, options)
    problem.options = options
    check_sequences(backend, problem, out, lse, *caches, gathers(backend, case))


def gathers(backend, case: Cached) -> bool:
    """Returns whether the call dequantizes tokens to q's dtype: more rows (queries times heads per KV head) than decode kernels' 64 without
    a tree, rows of the cache not aligned to 16 bytes, bf16."""
    if not case.kv_dtype or case.latents:
        return False
    rows = max(n for n, _, _ in case.lengths) * case.nheads // case.nheads_k
    columns = {"k": case.headdim, "v": case.columns_v}
    bytes_of_rows = [d // (2 if case.kv_dtype_of(which) == "int4" else 1) for which, d in columns.items()]
    has_kernel = (rows <= 64 or case.tree) and backend.dtype == torch.float16 and all(n % 16 == 0 for n in bytes_of_rows)
    return backend.kernels and not has_kernel


def store(which: str, cache: Tensor, options: dict, place, made):
    """Writes tokens of K or V (`which`), `made` by quantize_kv, into a cache at the index `place`; scales and zero points into options."""
    cache.view(torch.uint8)[place] = made.data.view(torch.uint8)
    for name, t in ((f"{which}_scale", made.scale), (f"{which}_zero_point", made.zero_point)):
        if name in options:
            options[name][place] = t


def check_cache(p: CacheInputs, k_cache: Tensor, v_cache: Tensor, options: dict):
    """Checks that appended tokens are in their places of the cache, and that no other byte of caches and scales has changed. Those of a
    quantized cache are bitwise quantize_kv's, but not rotated keys, which round."""
    c = p.case
    for i, (which, before, after) in enumerate((("k", p.k_cache, k_cache), ("v", p.v_cache, v_cache))):
        expected = before.clone()
        scales = {name: p.options[name].clone() for name in WRITTEN if name[0] == which and name in p.options}
        for b, (_, cached, new) in enumerate(c.lengths if p.new else ()):
            place, values = p.tokens(b, cached, cached + new), p.appended(b)[i]  # k, rotated, and v in fp64
            if c.kv_dtype and not (c.rotary and which == "k"):
                scale = None if has_scales(c.kv_dtype) else options.get(f"{which}_descale")
                scale = scale[b] if scale is not None and scale.dim() == 2 else scale
                store(which, expected, scales, place, quantize_kv(values.to(p.q.dtype), c.kv_dtype_of(which), scale=scale))
                continue
            if not c.kv_dtype:
                # one rounding, of a sum of two products in fp32
                epsilon = max(torch.finfo(after.dtype).eps, torch.finfo(torch.float32).eps if after.dtype != torch.float64 else 0) * 2
                torch.testing.assert_close(after[place].double(), values, rtol=epsilon, atol=epsilon)
            expected.view(torch.uint8)[place] = after.view(torch.uint8)[place]
            for name, t in scales.items():
                t[place] = options[name][place]
        assert_same_bits(f"{which}_cache", after, expected)
        for name, t in scales.items():
            assert_same_bits(name, options[name], t)


def keys_and_values(p: CacheInputs, b: int, k_cache: Tensor, v_cache: Tensor) -> list[Tensor]:
    """Returns k and v of sequence b, (tokens, nheads_k, headdim), read from these caches and dequantized. Left padding is left out."""
    tokens = p.tokens(b, p.case.leftpad[b] if p.case.leftpad else 0)
    return [p.numbers(which, t, tokens, b) for which, t in (("k", k_cache), ("v", v_cache))]


def check_sequence(
    backend, p: CacheInputs, b: int, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False, **changed
):
    """Judges out and softmax_lse of sequence b. `is_dequantized`: the operator rounded a quantized cache to q's dtype before attention.
    `changed`: options of scores that replace the case's."""
    parts = p.parts(b, *keys_and_values(p, b, k_cache, v_cache), is_dequantized, **changed)
    judge(backend, parts, {"out": out, "softmax_lse": lse})


def check_sequences(backend, p: CacheInputs, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False):
    """Judges a call's results, with the tokens that these caches hold after it."""
    check_form(p.q, p.case.columns_v, out, lse)
    for b, (seqlen_q, _, _) in enumerate(p.case.lengths):
        if seqlen_q:
            check_sequence(backend, p, b, out, lse, k_cache, v_cache, is_dequantized)


def check_opcheck(backend, p: CacheInputs, **options):
    """Runs torch.library.opcheck on the call. `options` are opcheck's."""
    backend.simulate()
    # opcheck compares caches and scales: NaN would differ from itself
    for t in (p.k_cache, p.v_cache):
        t.view(torch.uint8).zero_() if p.case.kv_dtype else t.nan_to_num_(0.0)
    for name in p.options.keys() & {*WRITTEN}:
        p.options[name].nan_to_num_(0.0)
    if p.case.latents:
        opcheck(fwd_mla.default, (p.q, p.k_cache), mla_options(p), **options)
    else:
        opcheck(fwd_kvcache.append if p.new else fwd_kvcache.default, (p.q, p.k_cache, p.v_cache, *p.new), p.options, **options)


def check_reads_no_value(backend, p: CacheInputs, *calls: str):
    """Checks that the call reads no tensor value on the host, which a CUDA graph forbids, and that it runs the operators `calls`."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")  # the check reads lengths on the host
    backend.simulate()
    reads_no_value(lambda: fwd_kvcache(p.q, p.k_cache, p.v_cache, *p.new, **p.options), "volta_fa::fwd_kvcache", *calls)
