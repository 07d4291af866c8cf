"""Checks each kind of use once, on the CPU. tools/torch_matrix.py runs this file in the environment of each torch release.

    python tools/torch_matrix_checks.py [CHECK ...]    # default: all but `transformers`; prints a JSON object of verdicts

A verdict is "ok", "- REASON" for a check that this environment cannot run, or the type and first line of an exception.
The checks need volta_fa, torch and numpy. `transformers` needs that package too, so callers request it by name.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

import old_userland as old_libraries
import torch_releases
import volta_fa

CHECKS: dict[str, Callable[[], None]] = {}
fwd, bwd = torch.ops.volta_fa.fwd, torch.ops.volta_fa.bwd


class NotHereError(Exception):
    """This environment cannot run the check."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def qkv(dtype=torch.float32, seqlen=(9, 11), headdim=16, grad=False) -> list[torch.Tensor]:
    """Returns q, k and v with grouped heads and lengths that are no multiples of a tile."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, seqlen[0], 4, headdim), (2, seqlen[1], 2, headdim), (2, seqlen[1], 2, headdim))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def eager(q, k, v, is_causal=False):
    """Computes softmax(q k^T) v with plain operators. The causal mask is aligned bottom-right."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2]).logical_not()
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def attention(q, k, v, is_causal=True):
    return fwd(q, k, v, is_causal=is_causal)[0]


def gradients(function, *inputs) -> list[torch.Tensor]:
    """Returns the output, then the gradients of its sum of squares."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def close(found, expected, tolerance=1e-5) -> None:
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@contextmanager
def raises(kind: type[Exception], pattern: str) -> Iterator[None]:
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__}"
    assert re.search(pattern, message), f"{message} does not match {pattern}"


# ---- the library and torch ---------------------------------------------------------------------------------------------


@check
def symbols() -> None:
    """Resolves all symbols of the libraries at once. By default, the loader finds a missing function only when it is called."""
    ctypes.CDLL(str(volta_fa.library_path()), os.RTLD_NOW)


@check
def stream() -> None:
    """Finds the function that returns the current stream, as the library finds it."""
    if tuple(map(int, torch_releases.minor(torch.__version__).split("."))) >= tuple(map(int, torch_releases.STREAM_SINCE.split("."))):
        raise NotHereError("c10::Stream tells it")
    if torch.version.cuda is None:
        raise NotHereError("a torch for the CPU")
    ctypes.CDLL("libtorch_cuda.so", os.RTLD_LAZY | os.RTLD_NOLOAD)[torch_releases.STREAM_FUNCTION]


@check
def old_userland() -> None:
    """Loads the libraries and computes with the C and C++ libraries of an older Linux, without Python."""
    if "OLD_USERLAND" not in os.environ:
        raise NotHereError("this machine has no older libraries")
    shim = volta_fa.library_path()
    assert not (said := old_libraries.complaint(Path(os.environ["OLD_USERLAND"]), Path(torch.__file__).parent, shim)), said


# ---- results -----------------------------------------------------------------------------------------------------------


@check
def gradients_fp32() -> None:
    for is_causal in (False, True):
        close(*(gradients(lambda *t: f(*t, is_causal=is_causal), *qkv()) for f in (attention, eager)))


@contextmanager
def simulation() -> Iterator[None]:
    """Runs 16-bit CPU tensors through the kernels' machine code."""
    if not volta_fa.info()["simulator"]:
        raise NotHereError("the library was built without the simulator")
    if "VOLTA_SIM_NVDISASM" not in os.environ:
        raise NotHereError("VOLTA_SIM_NVDISASM names no disassembler, which the simulator needs")
    os.environ["VOLTA_FA_SIMULATE"] = "1"
    try:
        yield
    finally:
        del os.environ["VOLTA_FA_SIMULATE"]


def _simulated(dtype: torch.dtype, tolerance: float) -> None:
    with simulation():
        found = gradients(attention, *qkv(dtype))
    assert all(t.dtype == dtype for t in found)
    close(found, gradients(attention, *(t.float() for t in qkv(dtype))), tolerance)


@check
def simulated_fp16() -> None:
    _simulated(torch.float16, 1e-2)


@check
def simulated_bf16() -> None:
    _simulated(torch.bfloat16, 8e-2)


@check
def gradcheck() -> None:
    inputs = qkv(torch.float64, (4, 5), 8, grad=True)
    assert torch.autograd.gradcheck(attention, inputs)


@check
def opcheck() -> None:
    q, k, v = qkv(seqlen=(5, 6), headdim=8, grad=True)
    torch.library.opcheck(fwd.default, (q, k, v), {"is_causal": True})
    out, lse, _ = (t.detach() for t in fwd(q, k, v))
    torch.library.opcheck(bwd.default, (torch.ones_like(out), *(t.detach() for t in (q, k, v)), out, lse))


@check
def fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out, lse, _ = fwd(*(torch.empty(t.shape, dtype=torch.half, device="cuda") for t in qkv()))
    assert out.shape == (2, 9, 4, 16) and out.dtype == torch.half and out.device.type == "cuda"
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32


@check
def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out, *found = gradients(attention, *qkv())
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in found)
    close([out, *found], gradients(attention, *qkv()), 8e-2)


@check
def dropout() -> None:
    q, k, v = qkv()

    def dropped(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return gradients(lambda *t: fwd(*t, dropout_p=0.5)[0], q, k, v)

    close(dropped(1), dropped(1), 0)
    assert not torch.equal(dropped(1)[0], dropped(2)[0])


@check
def errors() -> None:
    q, k, v = qkv()
    with raises(ValueError, r"volta_fa::fwd: k\b"):
        fwd(q, k[..., :8], v)
    with raises(NotImplementedError, "volta_fa::fwd.*forward-mode"):
        torch.func.jvp(lambda t: fwd(t, k, v), (q,), (torch.ones_like(q),))


@check
def vmap() -> None:
    many = [torch.stack([t, t * 2]) for t in qkv()]
    out, *_ = torch.vmap(lambda *t: fwd(*t))(*many)
    close(out, [attention(*(t[i] for t in many), is_causal=False) for i in range(2)])


@check
def inference_mode() -> None:
    with torch.inference_mode():
        out = attention(*qkv())
    assert out.is_inference()
    close([out], [eager(*qkv(), is_causal=True)])


@check
def double_backward() -> None:
    inputs = qkv(grad=True)
    grads = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    with raises(RuntimeError, "volta_fa::bwd.*not implemented|not implemented.*volta_fa::bwd"):
        grads[0].sum().backward()


# ---- a KV cache ---------------------------------------------------------------------------------------------------------

#: Lengths of two sequences before the append.
CACHED = (20, 3)


def cached_step(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Returns q, the caches, new k and v, and options. Pages are out of order, and entries without a token are NaN."""
    q, k, v = qkv(dtype, seqlen=(3, 3))
    pages = torch.full((2, 5, 16, 2, 16), float("nan"), dtype=dtype)
    table = torch.tensor([[3, 1], [4, -7]], dtype=torch.int32)
    for cache, tokens in zip(pages, qkv(dtype, seqlen=(3, max(CACHED)))[1:]):
        for b, length in enumerate(CACHED):
            for token in range(length):
                cache[table[b, token // 16], token % 16] = tokens[b, token]
    return (q, *pages, k, v), {"block_table": table, "cache_seqlens": torch.tensor(CACHED, dtype=torch.int32)}


def decoded(q, k_cache, v_cache, k, v, block_table, cache_seqlens):
    """Returns the output and the updated caches."""
    caches = k_cache.clone(), v_cache.clone()
    out, _ = torch.ops.volta_fa.fwd_kvcache(q, *caches, k, v, block_table=block_table, cache_seqlens=cache_seqlens, is_causal=True)
    return [out, *(c.nan_to_num() for c in caches)]


@check
def kv_cache() -> None:
    inputs, options = cached_step(torch.float32)
    out, *_ = decoded(*inputs, **options)
    q, _, _, k, v = inputs
    old_k, old_v = qkv(seqlen=(3, max(CACHED)))[1:]
    for b, length in enumerate(CACHED):
        keys, values = (torch.cat([old[b, :length], new[b]])[None] for old, new in ((old_k, k), (old_v, v)))
        close([out[b : b + 1]], [eager(q[b : b + 1], keys, values, is_causal=True)])
    half, options = cached_step(torch.float16)
    with simulation():
        found = decoded(*half, **options)
    close(found, decoded(*(t.float() for t in half), **options), 1e-2)
    # pages without holes, because the comparisons do not handle NaN
    whole = tuple(t.nan_to_num() for t in inputs)
    torch.library.opcheck(torch.ops.volta_fa.fwd_kvcache.append, whole, {**options, "is_causal": True})
    torch.compiler.reset()
    close(torch.compile(decoded, backend="aot_eager", fullgraph=True)(*inputs, **options), decoded(*inputs, **options))


@check
def flash_attention_door() -> None:
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise NotHereError("this release has no such door")
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].repeat_interleave(4 // t.shape[2], 1).contiguous() for t in qkv(seqlen=(9, 9)))
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    activate_flash_attention_impl("VOLTA")
    try:
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 5, 5)
    finally:
        # before 2.11 torch cannot deactivate it; later checks do not use PyTorch's own kernels
        getattr(torch.nn.attention, "restore_flash_attention_impl", lambda: None)()
    close([out], [torch.cat([eager(*(t[a:b][None] for t in (q, k, v)))[0] for a, b in ((0, 4), (4, 9))])])


# ---- programs ----------------------------------------------------------------------------------------------------------


def _compiled(backend: str, dynamic: bool) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    for seqlen in ((9, 11), (13, 17), (24, 24)) if dynamic else ((9, 11),):
        inputs = qkv(seqlen=seqlen)
        close(gradients(compiled, *inputs), gradients(attention, *inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a new seqlen compiled again"


@check
def aot_eager_dynamic() -> None:
    _compiled("aot_eager", True)


@check
def inductor() -> None:
    _compiled("inductor", False)


@check
def sdpa_override() -> None:
    q, k, v = (t.transpose(1, 2) for t in qkv(seqlen=(9, 9)))

    def train(*t):
        return F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True)

    expected = gradients(train, q, k, v)
    with volta_fa.sdpa_enabled("cpu"), torch.profiler.profile() as profile:
        found = gradients(train, q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert {"volta_fa::fwd", "volta_fa::bwd"} <= names, sorted(names)
    close(found, expected)


class _Module(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]


@check
def context_parallelism() -> None:
    """Runs a ring, DTensor rules and the hook into PyTorch's context_parallel, in a group of one rank."""
    import torch.distributed as dist

    if not dist.is_available():
        raise NotHereError("torch.distributed is not in this torch")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    from volta_fa.distributed import context_parallel_attention

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
        q, k, v = qkv(seqlen=(9, 9), grad=True)
        expected = attention(q, k, v)
        gradient = torch.autograd.grad(expected.sum(), q)[0]
        found = context_parallel_attention(q, k, v, mesh, is_causal=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), q)[0], gradient)
        of_heads = [distribute_tensor(t.detach(), mesh["ring"], [Shard(2)]) for t in (q, k, v)]
        torch.testing.assert_close(attention(*of_heads).to_local(), expected)
        buffers = [t.detach().transpose(1, 2).repeat_interleave(4 // t.shape[2], 1)[:, :, :8].contiguous() for t in (q, k, v)]
        whole = F.scaled_dot_product_attention(*buffers, is_causal=True)
        volta_fa.enable_sdpa("cpu")
        volta_fa.sdpa_stats(reset=True)
        try:
            with context_parallel(mesh["ring"], buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                torch.testing.assert_close(F.scaled_dot_product_attention(*buffers, is_causal=True), whole)
            assert volta_fa.sdpa_stats(reset=True)["ran"] == 1
        finally:
            volta_fa.disable_sdpa()
    finally:
        dist.destroy_process_group()


@check
def torchscript() -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.script(_Module()).save(f"{folder}/program.pt")
        program = torch.jit.load(f"{folder}/program.pt")
    for _ in range(3):  # later runs are optimized
        close(gradients(program, *qkv()), gradients(attention, *qkv()))


@check
def export() -> None:
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    program = torch.export.export(_Module(), tuple(qkv(seqlen=(9, 9))), dynamic_shapes=[{1: seqlen}] * 3)
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, f"{folder}/program.pt2")
        module = torch.export.load(f"{folder}/program.pt2").module()
    inputs = qkv(seqlen=(21, 21))
    close([module(*inputs)], [attention(*inputs)])


# ---- transformers: in separate processes, with the release on the path ---------------------------------------------


def transformers() -> None:
    """Trains and generates with a small padded Llama, and compares with eager attention."""
    import transformers

    import volta_fa.transformers  # noqa: F401

    torch.manual_seed(0)
    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=0, attn_implementation="eager")).eval()
    ids = torch.randint(3, 100, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    # ignore predictions from padding
    labels = ids.masked_fill(torch.cat([mask[:, :1] * 0, mask[:, :-1]], 1) == 0, -100)
    results = {}
    for implementation in ("eager", "volta_fa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        results[implementation] = [out.loss.detach(), *(p.grad.clone() for p in model.parameters()), tokens]
    close(results["volta_fa"], results["eager"], 2e-5)


def main(names: list[str]) -> int:
    checks = {**CHECKS, "transformers": transformers}
    if not set(names) <= set(checks):
        print(f"usage: {Path(__file__).name} [CHECK ...], of {', '.join(checks)}", file=sys.stderr)
        return 2
    verdicts = {}
    for name in names or CHECKS:
        try:
            checks[name]()
            verdicts[name] = "ok"
        except NotHereError as reason:
            verdicts[name] = f"- {reason}"
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            verdicts[name] = f"{type(error).__name__}: {lines[0]}"
        print(f"{name}: {verdicts[name]}", file=sys.stderr, flush=True)
    print(json.dumps({"torch": torch.__version__, "library": str(volta_fa.library_path()), "checks": verdicts}))
    return 0 if all(v == "ok" or v.startswith("- ") for v in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
