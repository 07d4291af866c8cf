"""One suite, several ways to run it: the `backend` fixture.

- `cpu-fp32`, `cpu-fp64`, `cpu-bf16`, `cpu-fp16`: the CPU backend;
- `sim`: the kernels' sm_70 machine code in the simulator, on fp16 CPU tensors, in both warp orders;
- `cuda`: the kernels on the GPU of this machine (newer than Volta: their PTX), fp16.

Environment:
- VOLTA_FA_TEST_LIBRARY: the library to test, instead of the one in python/volta_fa or the installed package's
- VOLTA_FA_TEST_SEED: changes all random inputs (default 0)
- VOLTA_FA_TEST_REQUIRE: backends, as `sim,cuda`, that must run: their absence fails instead of skipping
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor

import reference

REPOSITORY = Path(__file__).resolve().parent.parent


def _load_library() -> Path:
    """In a checkout, its own build and never an installed one: only the former has the simulator."""
    package = REPOSITORY / "python" / "volta_fa"
    named = os.environ.get("VOLTA_FA_TEST_LIBRARY")
    if named:
        torch.ops.load_library(named)
        return Path(named)
    if (package / "libvolta_fa.so").exists():
        sys.path.insert(0, str(package.parent))
    import volta_fa  # noqa: F401  loads the library

    return Path(volta_fa.__file__).parent / "libvolta_fa.so"


LIBRARY = _load_library()
INFO = json.loads(torch.ops.volta_fa._info())
HAS_CUDA = torch.cuda.is_available()

# The problems are small: on a busy machine, threads that wait for each other cost ten times what they save.
# test_cpu_speed.py uses all cores.
CORES = torch.get_num_threads()
torch.set_num_threads(1)

CPU_DTYPES = {"cpu-fp32": torch.float32, "cpu-fp64": torch.float64, "cpu-bf16": torch.bfloat16, "cpu-fp16": torch.float16}
CPU = list(CPU_DTYPES)
KERNELS = ["sim", "cuda"]
ALL = CPU + KERNELS
# Warp instructions before the next warp runs: one warp far ahead, and all in step. A result that depends on it
# is a race.
WARP_ORDERS = (20000, 1)

hypothesis.settings.register_profile("default", derandomize="CI" in os.environ, deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def _unavailable(backend: str) -> str | None:
    if backend == "sim" and not INFO["simulator"]:
        return "this library was built without the simulator (cargo feature `sim`)"
    if backend == "sim" and not INFO["variants"]:
        return "this library has no kernels"
    if backend == "cuda" and not HAS_CUDA:
        return "no GPU"
    if backend == "cuda" and torch.cuda.get_device_capability() < (7, 0):
        return "the GPU is older than compute capability 7.0"
    return None


def need(backend: str):
    """Skip the test where this machine or build cannot run the backend; fail if it was required."""
    reason = _unavailable(backend)
    if reason and backend in os.environ.get("VOLTA_FA_TEST_REQUIRE", "").split(","):
        pytest.fail(f"{backend} was required, but {reason}")
    if reason:
        pytest.skip(reason)


def on(*backends: str):
    """Parametrize a test over backends."""
    return pytest.mark.parametrize("backend", [_param(b) for b in backends], indirect=True)


def on_cases(*pairs: tuple[list[str], list]):
    """Parametrize over (backends, cases) pairs; each case has an `id`."""
    seen, params = set(), []
    for backends, cases in pairs:
        for case in cases:
            for b in backends:
                name = f"{b}-{case}"
                if name not in seen:
                    seen.add(name)
                    params.append(_param(b, case, name=name))
    return pytest.mark.parametrize("backend,case", params, indirect=["backend"])


def _param(backend: str, *rest, name: str | None = None):
    marks = [pytest.mark.cuda] if backend == "cuda" else []
    return pytest.param(backend, *rest, id=name or backend, marks=marks)


@dataclass(frozen=True)
class Case:
    """One attention problem."""

    seqlen_q: int
    seqlen_k: int
    headdim: int
    headdim_v: int | None = None
    batch: int = 2
    nheads: int = 2
    nheads_k: int | None = None
    is_causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float | None = None
    spread: float = 1.0  # standard deviation of q, k and v

    def __str__(self):
        parts = [f"b{self.batch}", f"q{self.seqlen_q}", f"k{self.seqlen_k}", f"h{self.nheads}", f"d{self.headdim}"]
        if self.nheads_k is not None:
            parts[3] += f"on{self.nheads_k}"
        if self.headdim_v is not None:
            parts[4] += f"v{self.headdim_v}"
        if self.is_causal:
            parts.append("causal")
        if self.window_left >= 0 or self.window_right >= 0:
            parts.append(f"window{self.window_left}:{self.window_right}")
        if self.softmax_scale is not None:
            parts.append(f"scale{self.softmax_scale:g}")
        if self.spread != 1.0:
            parts.append(f"spread{self.spread:g}")
        return "_".join(parts)

    @property
    def options(self) -> dict:
        """The op's keyword arguments; the reference takes the same."""
        o = {"is_causal": self.is_causal, "window_left": self.window_left, "window_right": self.window_right}
        if self.softmax_scale is not None:
            o["softmax_scale"] = self.softmax_scale
        return o

    def inputs(self, backend: Backend) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout."""
        hk = self.nheads if self.nheads_k is None else self.nheads_k
        dv = self.headdim if self.headdim_v is None else self.headdim_v
        q = backend.randn(self.batch, self.seqlen_q, self.nheads, self.headdim, spread=self.spread)
        k = backend.randn(self.batch, self.seqlen_k, hk, self.headdim, spread=self.spread)
        v = backend.randn(self.batch, self.seqlen_k, hk, dv, spread=self.spread)
        return q, k, v, backend.randn(self.batch, self.seqlen_q, self.nheads, dv)


@dataclass
class Backend:
    """A way to run the ops: where tensors live, and how often and in which environment a call runs."""

    name: str
    seed: int
    monkeypatch: pytest.MonkeyPatch
    device: str = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self):
        self.device = "cuda" if self.name == "cuda" else "cpu"
        self.dtype = CPU_DTYPES.get(self.name, torch.float16)
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def kernels(self) -> bool:
        return self.name in KERNELS

    def randn(self, *shape: int, spread: float = 1.0) -> Tensor:
        t = torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (t * spread).to(self.dtype)

    def forward(self, q, k, v, **options) -> tuple[Tensor, Tensor]:
        """out and softmax_lse. Kernels run twice (simulator: in both warp orders) and must agree to the bit."""
        runs = [torch.ops.volta_fa.fwd(q, k, v, **options)[:2] for _ in self._runs(q, v)]
        for other in runs[1:]:
            for name, a, b in zip(("out", "softmax_lse"), runs[0], other):
                assert_same_bits(name, a, b)
        return runs[0]

    def backward(self, dout, q, k, v, out, softmax_lse, **options) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(dq, dk, dv) of each run. Kernels sum dq by atomics, in any order, unless asked to be deterministic; all else
        must agree to the bit."""
        runs = [
            torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, **options)[:3] for _ in self._runs(q, k, v)
        ]
        for other in runs[1:]:
            assert_same_bits("dk", runs[0][1], other[1])
            assert_same_bits("dv", runs[0][2], other[2])
            if options.get("deterministic"):
                assert_same_bits("dq", runs[0][0], other[0])
        return runs

    def _runs(self, *like: Tensor):
        if self.name == "sim":
            self.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
            for quantum in WARP_ORDERS:
                self.monkeypatch.setenv("VOLTA_FA_SIM_QUANTUM", str(quantum))
                yield  # the simulator itself fills outputs and scratch with NaN
            self.monkeypatch.delenv("VOLTA_FA_SIMULATE")
        elif self.name == "cuda":
            for _ in range(2):
                poison_cuda(*like)
                yield
        else:
            yield


def poison_cuda(*like: Tensor):
    """Leave NaN in the memory that the caching allocator hands out next: outputs, statistics, fp32 scratch."""
    held = []
    for t in like:
        for copies in (1, 1, 2, 4):
            held.append(torch.full((t.numel() * copies,), float("nan"), dtype=t.dtype, device=t.device))
        held.append(torch.full((max(t.numel() // max(t.shape[-1], 1), 1),), float("nan"), device=t.device))
    del held


def assert_same_bits(name: str, a: Tensor, b: Tensor):
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    different = (a.contiguous().view(ints) != b.contiguous().view(ints)).sum().item()
    assert different == 0, f"{name}: {different} of {a.numel()} elements differ between two runs: a race"


def seed_of(name: str) -> int:
    return zlib.crc32(f"{name}:{os.environ.get('VOLTA_FA_TEST_SEED', '0')}".encode())


@pytest.fixture
def backend(request, monkeypatch) -> Backend:
    need(request.param)
    monkeypatch.delenv("VOLTA_FA_SIMULATE", raising=False)
    return Backend(request.param, seed_of(request.node.nodeid), monkeypatch)


@pytest.fixture
def seed(request) -> int:
    return seed_of(request.node.nodeid)


# ---- error budgets ---------------------------------------------------------------------------------------------

_worst: dict[tuple[str, str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))


def within(backend: Backend, what: str, found: Tensor, expected: Tensor, budget: reference.Budget):
    errors = {
        "largest": (reference.max_error(found, expected), budget.allowed, budget.eager_error),
        "rms": (reference.rms_error(found, expected), budget.allowed_rms, budget.eager_rms),
    }
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    for kind, (error, allowed, eager) in errors.items():
        share = error / allowed if allowed > 0 else (0.0 if error == 0 else float("inf"))
        _worst[backend.name, what, kind] = max(_worst[backend.name, what, kind], (share, test))
        assert error <= allowed, (
            f"{what}: {kind} error {error:.3g}, allowed {allowed:.3g} "
            f"({budget.factor:g} x {eager:.3g}, the error of PyTorch's eager attention in {budget.dtype})"
        )


def check(backend: Backend, q, k, v, dout=None, deterministic=False, **options):
    """Forward, and with `dout` backward, against the fp64 reference. Returns what the ops gave."""
    ref = reference.forward(q, k, v, **options)
    out, lse = backend.forward(q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32 and lse.is_contiguous()
    within(backend, "out", out, ref.out, reference.forward_budget(ref, q, k, v, **options))
    error, tolerance = reference.max_error(lse, ref.softmax_lse), reference.lse_tolerance(ref, q.dtype)
    assert error <= tolerance, f"softmax_lse: max error {error:.3g}, allowed {tolerance:.3g}"
    masked = ref.softmax_lse.isinf()
    assert (out.transpose(1, 2)[masked] == 0).all(), "fully masked rows must be exactly 0"
    if dout is None:
        return out, lse
    refs = reference.backward(dout, q, k, v, **options)
    budgets = reference.gradient_budgets(ref, refs, dout, q, k, v, **options)
    for gradients in backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options):
        for name, t, g, r, b in zip(("dq", "dk", "dv"), (q, k, v), gradients, refs, budgets):
            assert g.shape == t.shape and g.dtype == t.dtype, name
            within(backend, name, g, r, b)
        assert (gradients[0].transpose(1, 2)[masked] == 0).all(), "fully masked rows must have a zero gradient"
    return out, lse, *gradients


def pytest_terminal_summary(terminalreporter):
    if _worst:
        terminalreporter.section("worst errors, as a share of what is allowed")
        for (backend, what, kind), (share, test) in sorted(_worst.items()):
            terminalreporter.write_line(f"{backend:9} {what:4} {kind:8} {share:6.1%}  {test}")
