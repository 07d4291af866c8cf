"""Checks one kernel: runs each of its problems twice, in memory filled with NaN, and compares with exact results in fp64, or of int8
kernels with a model of their rounding. `check_kernel` is the entry point; `isolation` calls it in subprocesses. A result may be as far from
the exact one as `tolerance` allows, and both runs must agree bitwise, except where gradients are summed by atomics.

variant        a kernel's entry in `info()["variants"]`
pass           what it computes: Forward, BackwardDkDv (dk and dv), BackwardDq, Cast and others
inconclusive   not checked, for a reason that is no failure of the kernel: no memory, or the planner took another kernel"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import first_line
from . import cached, int8_scores, sparse_cases, tolerance  # three kinds of problems, with runs of them and exact results; allowed errors
from .cache_cases import CacheCase, CacheInputs  # a problem with a KV cache, and its tensors
from .cases import Case  # a problem of `fwd` and `bwd`
from .int8_scores import FastCase, FastInputs  # a problem of `fwd_fast`, and its tensors

# FORWARD: passes of `fwd`. WITHOUT_PROBLEM: passes for which `problems` has none. Target: the device. lacks_memory: whether an error is
# about memory.
from .kernels import FORWARD, WITHOUT_PROBLEM, Target, lacks_memory, problems

# Inputs: a problem's tensors. Part: a part of a result with exact values and the allowed error. exact_forward returns the exact results,
# their Parts, out and softmax_lse; exact_backward the Parts of the gradients.
from .problems import Error, Inputs, Part, WrongReference, exact_backward, exact_forward

#: Outcomes of a whole check (report.py): all kernels are correct; something is wrong; some kernels are unchecked and nothing is wrong.
RIGHT, WRONG, INCOMPLETE = "right", "wrong", "incomplete"
#: Results of a call, by name: out, dq, ...
Results = dict[str, Tensor]


@dataclass
class Worst:
    """The largest error of a kernel, relative to the allowed error."""

    share: float = 0.0  # error / allowed error
    result: str = ""  # its name: out, dq, ...
    kind: str = ""  # as in problems.Error: largest, rms, ...
    error: float = 0.0
    allowed: float = 0.0
    problem: str = ""  # str() of the problem
    seed: int = 0


@dataclass
class KernelResult:
    """The result of checking one kernel."""

    kernel: str  # its name
    family: str  # volta, turing or cpu
    pass_: str
    problems: int = 0  # number of problems that were run
    runs_with: list[str] = field(default_factory=list)  # other kernels of the same calls
    failures: list[str] = field(default_factory=list)  # what the kernel did wrong, one line each
    #: why problems could not be checked, for reasons that are no failure of the kernel
    inconclusive: list[str] = field(default_factory=list)
    worst: Worst = field(default_factory=Worst)
    poisoned: bool = True  # whether memory was filled with NaN before each call
    note: str = ""  # for the report
    load_seconds: float = 0.0  # seconds in which the driver loaded or compiled its kernels
    check_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Returns True if all problems were checked and correct."""
        return not self.failures and not self.inconclusive

    def data(self) -> dict[str, Any]:
        """Returns data for JSON, with infinite errors as text."""
        data = asdict(self)
        data["pass"] = data.pop("pass_")
        for name in ("share", "error"):
            if not math.isfinite(data["worst"][name]):
                data["worst"][name] = str(data["worst"][name])
        return {**data, "passed": self.passed}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> KernelResult:
        """The inverse of `data`."""
        worst: dict[str, Any] = {n: float(value) if n in ("share", "error") else value for n, value in data["worst"].items()}
        fields = {name: value for name, value in data.items() if name not in ("pass", "passed", "worst")}
        return cls(**fields, pass_=data["pass"], worst=Worst(**worst))


#: Gradients by which a backward kernel is judged, by its pass: those that it computes, where others of the call compute the rest.
_JUDGED_GRADIENTS = {"BackwardDkDv": ("dk", "dv", "dattn_bias"), "BackwardDq": ("dq",), "BackwardPostprocess": ("dq",)}


class DeviceLost(Exception):
    """A kernel destroyed the CUDA context, so this process can launch no other kernel. Holds the result so far."""

    def __init__(self, result: KernelResult):
        super().__init__(result.kernel)
        self.result = result


def load_kernel(target: Target, variant: dict[str, Any], quick: bool) -> None:
    """Loads the kernel and the kernels that run with it, which the driver may have to compile. Ignores errors, because `check_kernel`
    gets them again and reports them."""
    if target.kind != "cuda":
        return
    with contextlib.suppress(Exception):
        names = {variant["name"]: None}
        for problem in _problems(variant, quick):
            names.update(dict.fromkeys(_planned(target, problem, variant)))
        for name in names:
            torch.ops.volta_fa._preload(name, target.number)


def _problems(variant: dict[str, Any], quick: bool) -> Sequence[Case | CacheCase]:
    """Returns the problems of a kernel; none for passes whose problems are no Cases (`_ALONE`, Cast and int8 kernels)."""
    if variant["pass"] in (*WITHOUT_PROBLEM, *int8_scores.PASSES):
        return []
    return (cached.problems if variant["pass"] in cached.PASSES else problems)(variant)[: 1 if quick else None]


def _planned(target: Target, problem: Case | CacheCase, variant: dict[str, Any]) -> list[str]:
    """Returns the names of the kernels that the planner takes for the problem if `variant` is preferred."""
    if isinstance(problem, CacheCase):
        return [kernel["name"] for kernel in cached.planned(target, problem, variant)]
    return target.planned(problem, variant)


@dataclass(frozen=True)
class _Record:
    """Adds what one problem shows to the result of its kernel."""

    result: KernelResult
    problem: str
    seed: int

    def failure(self, text: str) -> None:
        """Adds a failure."""
        self.result.failures.append(f"{text} ({self.problem}, seed {self.seed})")

    def inconclusive(self, text: str) -> None:
        """Adds why the problem could not be checked."""
        self.result.inconclusive.append(f"{text} ({self.problem}, seed {self.seed})")

    def error(self, error: Error) -> None:
        """Adds an error: as the worst so far, and as a failure if it exceeds what is allowed."""
        if error.share > self.result.worst.share:
            self.result.worst = Worst(error.share, error.result, error.kind, error.error, error.allowed, self.problem, self.seed)
        if not error.share <= 1:  # also for NaN
            self.failure(str(error))

    def errors(self, parts: Sequence[Part], found: Results) -> None:
        """Adds the errors of the results' parts."""
        on_cpu = {name: t.cpu() for name, t in found.items()}
        for part in parts:
            for error in part.errors(on_cpu):
                self.error(error)

    def same_bits(self, first: Results, second: Results) -> None:
        """Adds a failure for each result that is not bitwise the same in two runs."""
        for name, a in first.items():
            different = int((_bits(a) != _bits(second[name])).sum())
            if different:
                self.failure(f"{name}: {different} of {a.numel()} elements differ between two runs")


def check_kernel(target: Target, variant: dict[str, Any], seed: int, quick: bool = False) -> KernelResult:
    """Runs the kernel's problems and returns the result with all failures. Each problem has its own seed, from the kernel's and the
    problem's name. `quick` runs the first problem only. Raises DeviceLost if the CUDA context is destroyed."""
    pass_ = variant["pass"]
    result = KernelResult(variant["name"], variant["family"], pass_)
    if pass_ in _ALONE:  # a table, below, of passes without listed problems: a function of their own checks each
        name, check_alone = _ALONE[pass_]
        record = _Record(result, name, seed)
        _guarded(record, target, lambda: check_alone(record, target, variant))
    elif pass_ == "Cast":
        for magnitudes in _CAST_MAGNITUDES:
            record = _Record(result, "bf16 q and k times 2^{}, 2^{}".format(*magnitudes), seed)
            _guarded(record, target, lambda: _check_cast(record, target, magnitudes))
    else:
        check: Callable[..., None] = _check_cached if pass_ in cached.PASSES else _check_problem
        listed: Sequence[Any] = _problems(variant, quick)
        if pass_ in int8_scores.PASSES:
            check, listed = _check_int8, int8_scores.problems(variant)[: 1 if quick else None]
        for problem in listed:
            record = _Record(result, str(problem), zlib.crc32(f"{variant['name']}:{problem}:{seed}".encode()))
            _guarded(record, target, lambda: check(record, target, variant, problem))
    return result


def _guarded(record: _Record, target: Target, work: Callable[[], None]) -> None:
    """Runs a problem and records an exception. Raises DeviceLost if the device fails to synchronize after one."""
    result = record.result
    result.problems += 1
    try:
        work()
        target.synchronize()
    except Exception as error:
        said = first_line(error)
        if isinstance(error, WrongReference) or lacks_memory(error):
            record.inconclusive(said)
        else:
            record.failure(f"{type(error).__name__}: {said}")
        try:
            target.synchronize()
        except Exception as lost:
            if not result.failures:
                record.failure(f"{type(lost).__name__}: {said}")
            raise DeviceLost(result) from lost


def _is_planned(record: _Record, target: Target, planned: list[str]) -> bool:
    """Returns whether `planned`, the planner's kernels for a problem, include this one; if not, the result is inconclusive. Records the
    others."""
    result = record.result
    if target.has_kernels and result.kernel not in planned:
        result.inconclusive.append(f"the plan takes {', '.join(planned)} instead ({record.problem})")
        return False
    result.runs_with = sorted({*result.runs_with, *planned} - {result.kernel})
    return True


def _check_cached(record: _Record, target: Target, variant: dict[str, Any], problem: CacheCase) -> None:
    """Checks a kernel with a KV cache: its results, and that it changes no other part of the cache."""
    kernels = cached.planned(target, problem, variant)
    if not _is_planned(record, target, [kernel["name"] for kernel in kernels]):
        return
    inputs = cached.draw(problem, record.seed, target.device, kernels)
    first, second = _twice(record, target, lambda: cached.run(inputs), variant, inputs)
    record.same_bits(first, second)
    found = {name: t.cpu() for name, t in first.items()}
    parts, caches = cached.exact(inputs.mapped(lambda t: t.cpu()))
    record.errors(parts, found)
    written = cached.written(inputs)
    for name, given in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        lost = int((_bits(found[name]) != _bits(given.cpu()))[~written].sum())
        if lost:
            record.failure(f"{name}: {lost} elements changed that nothing is appended to")
        if written.any():
            exact = caches[name][written]
            # a rotated key is a sum of two products in fp32, rounded once; largest: the largest absolute value
            allowed = 2 * torch.finfo(exact.dtype).eps * (1 + tolerance.largest(exact))
            value = cached.numbers(inputs, name[0], found[name])[written]  # name[0]: "k" or "v"
            record.error(Error(name, "largest", tolerance.max_error(value, exact), allowed))


def _check_int8(record: _Record, target: Target, variant: dict[str, Any], problem: FastCase) -> None:
    """Checks a kernel of `fwd_fast` or `prepare_fast` against its model on the CPU."""
    inputs = FastInputs.draw(problem, record.seed)
    expected = inputs.model()
    if variant["pass"] == "FastPrepare":
        runs = _twice(record, target, lambda: {"prepared": inputs.prepare(target)}, variant, inputs)
        found = inputs.model(runs[0]["prepared"].cpu())
    else:
        runs = _twice(record, target, lambda: dict(zip(("out", "softmax_lse"), inputs.forward(target))), variant, inputs)
        found = runs[0]["out"], runs[0]["softmax_lse"]
        with target.running():
            if torch.equal(found[0], inputs.exact(target)):
                record.result.inconclusive.append(f"the plan takes exact kernels instead ({problem})")
                return
    record.same_bits(*runs)
    for error in int8_scores.errors(found, expected, problem.dtype):
        record.error(error)


def _check_problem(record: _Record, target: Target, variant: dict[str, Any], problem: Case) -> None:
    """Checks a kernel of `fwd` or `bwd`. A backward kernel gets an exact forward pass, rounded."""
    if not _is_planned(record, target, target.planned(problem, variant)):
        return
    seed = record.seed
    inputs = Inputs.draw(problem, seed, target.device)
    host = inputs.on_cpu()
    if variant["pass"] in FORWARD:

        def forward() -> Results:
            results = inputs.forward(torch.Generator(target.device).manual_seed(seed))
            return dict(zip(("out", "softmax_lse", "rng_state"), results))

        runs = _twice(record, target, forward, variant, inputs)
        record.same_bits(*runs)
        _, parts, *_ = exact_forward(host, runs[0]["rng_state"])
        record.errors(parts, runs[0])
        return
    rng_state = torch.tensor([seed, 7], device=target.device)  # seed and offset of dropout's random numbers; any offset serves
    exact, _, out, lse = exact_forward(host, rng_state)
    parts = exact_backward(exact, host, out, lse, rng_state)
    # the backward pass gets exact results of the forward pass, rounded, so that errors of forward kernels do not count
    given = out.to(inputs.q.dtype).to(target.device), lse.to(target.device)
    runs = _twice(record, target, lambda: inputs.gradients(*given, rng_state), variant, inputs)
    runs = [{n: t for n, t in run.items() if n in _JUDGED_GRADIENTS.get(variant["pass"], run)} for run in runs]
    unordered = () if problem.deterministic else ("dq", "dattn_bias")  # summed by atomics, so not bitwise the same in two runs
    record.same_bits(*({n: t for n, t in run.items() if n not in unordered} for run in runs))
    for run in runs:
        record.errors(parts, run)


AnyInputs = Inputs | CacheInputs | FastInputs


def _twice(
    record: _Record, target: Target, work: Callable[[], Results], variant: dict[str, Any] | None = None, inputs: AnyInputs | None = None
) -> list[Results]:
    """Returns the results of two calls, which run the variant if it is given, in memory filled with NaN. Without `inputs`, the sizes of
    results are known only after the first call, so only the second one gets such memory."""
    found: list[Results] = []
    for _ in range(2):
        if inputs is not None:
            record.result.poisoned &= poison(target, inputs)
        elif found:
            sizes = [t.nbytes for t in found[0].values() for _ in range(2)]
            record.result.poisoned &= fill_with_nan(target, sizes, probed=sizes[0])
        with target.running(variant):
            found.append(work())
            target.synchronize()
    return found


def poison(target: Target, inputs: AnyInputs) -> bool:
    """Fills the memory that a call will allocate with NaN, as `fill_with_nan` does, and returns what that does."""
    rows = inputs.q.numel() // max(inputs.q.shape[-1], 1)
    # bytes: twice a result like each input, row statistics in fp32, dq's fp32 accumulator with and without rows rounded up to tiles
    sizes = [t.nbytes for t in inputs.given for _ in range(2)] + [4 * rows, 16 * rows, 4 * inputs.q.numel(), 8 * inputs.q.numel()]
    sizes.append(inputs.scratch_bytes)
    return fill_with_nan(target, sizes, probed=inputs.q.nbytes)


def fill_with_nan(target: Target, sizes: Sequence[int], probed: int) -> bool:
    """Fills the memory that the caching allocator hands out next with NaN, so that elements that no kernel writes are NaN.

    The simulator fills memory by itself. On the CPU, ATen writes all results.

    Args:
        sizes: bytes of the allocations to come.
        probed: bytes of one of them.

    Returns whether an allocation of `probed` bytes then gets that memory.
    """
    if target.kind != "cuda":
        return True
    # all bits set are NaN in every floating-point type
    held = [torch.full((max(size, 1),), 255, dtype=torch.uint8, device=target.device) for size in sizes]
    del held
    probe = torch.empty(probed, dtype=torch.uint8, device=target.device)
    return bool((probe == 255).all())


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _check_sparse(record: _Record, target: Target, variant: dict[str, Any]) -> None:
    """Checks the kernels of sparse latents against the fp64 CPU backend."""
    for name, arguments, expected in sparse_cases.problems(variant, record.seed):
        of_problem = replace(record, problem=name)
        on_device = {argument: t.to(target.device) if isinstance(t, Tensor) else t for argument, t in arguments.items()}
        chosen = variant if variant["pass"] == "SparseMla" else None
        fwd = torch.ops.volta_fa.fwd_sparse_mla
        runs = _twice(of_problem, target, lambda: dict(zip(sparse_cases.RESULTS, fwd(**on_device))), chosen)
        for error in sparse_cases.errors(tuple(runs[0].values()), expected, arguments):
            of_problem.error(error)
        of_problem.same_bits(*runs)


def _check_indexer(record: _Record, target: Target, variant: dict[str, Any]) -> None:
    """Checks the indexer's kernels against exact logits."""
    for name, arguments, exact, allowed in sparse_cases.indexer_problems(variant, record.seed):
        of_problem = replace(record, problem=name)
        on_device = {argument: t.to(target.device) if isinstance(t, Tensor) else t for argument, t in arguments.items()}
        runs = _twice(of_problem, target, lambda: {"logits": torch.ops.volta_fa.indexer_logits(**on_device)}, variant)
        of_problem.error(sparse_cases.indexer_error(runs[0]["logits"], exact, allowed))
        of_problem.same_bits(*runs)


def _check_merge(record: _Record, target: Target, variant: dict[str, Any]) -> None:
    """Checks the merge kernel, which combines attention over two parts of the keys. Its fp64 CPU backend is the reference, because eager
    attention has no such operation. out may be off by two units in the last place, softmax_lse by 2^-21, relative to 1 plus the largest
    value."""
    generator = torch.Generator().manual_seed(record.seed)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        states: list[Tensor] = []
        for _ in range(2):
            out, lse = torch.randn(2, 77, 3, 40, generator=generator), 3 * torch.randn(2, 3, 77, generator=generator)
            lse.flatten()[:: 5 + len(states)] = math.inf  # what the operators return for rows without a key
            states += [out.to(dtype), lse]
        merge = torch.ops.volta_fa.merge_attention_states
        expected = merge(states[0].double(), states[1], states[2].double(), states[3])
        on_device = [t.to(target.device) for t in states]
        of_problem = replace(record, problem=f"merging two states of (2, 77, 3, 40), {str(dtype).removeprefix('torch.')}")
        runs = _twice(of_problem, target, lambda: dict(zip(("out", "softmax_lse"), merge(*on_device))))
        of_problem.same_bits(*runs)
        for (name, value), exact in zip(runs[0].items(), expected):
            allowed = (2 * torch.finfo(dtype).eps if name == "out" else 2**-21) * (1 + tolerance.largest(exact[exact.isfinite()]))
            of_problem.error(Error(name, "largest", tolerance.max_error(value.cpu(), exact), allowed))


#: Passes that are checked without listed problems: what the report calls the problem, and the function.
_ALONE: dict[str, tuple[str, Callable[..., None]]] = {
    "Merge": ("merging two states", _check_merge),
    "Indexer": ("indexer", _check_indexer),
    **dict.fromkeys(("SparseSelect", "SparseMla"), ("sparse latents", _check_sparse)),
}


#: Relative error of a probability from scores and lse that are each off by 2^-5 in log2 units; `_check_cast` explains it.
_LARGE_ROW_ERROR = 2 * 2**-5 * math.log(2)
#: Base-2 exponents of the magnitudes of q and k: in fp16's range, beyond either end, both small, and scores of about 2^32, in which fp32
#: has no fractions.
_CAST_MAGNITUDES = ((0, 0), (20, -20), (-40, 40), (-30, -30), (16, 16))


def _check_cast(record: _Record, target: Target, magnitudes: tuple[int, int]) -> None:
    """Checks the kernel that casts bf16 to fp16, by the results and gradients of a call that needs it. Errors may be two units of bf16,
    relative to the largest exact number; softmax_lse 2^-18. In scores of 2^32, a row's largest key takes a probability of 1, unless keys
    tie. So the operators may scale such scores down: `bwd` to 2^19 (log2 units). The gradients of q and k nearly vanish, and only dv is
    compared. A score and an lse of 2^19 are each rounded by up to 2^-5, so that probability is right within _LARGE_ROW_ERROR."""
    generator = torch.Generator().manual_seed(record.seed)
    shapes = ((2, 45, 4, 40), (2, 70, 2, 40), (2, 70, 2, 40), (2, 45, 4, 40))  # q, k, v, dout
    factors = (*(2.0**x for x in magnitudes), 1.0, 1.0)
    drawn = [(factor * torch.randn(shape, generator=generator)).bfloat16() for shape, factor in zip(shapes, factors)]
    is_large = sum(magnitudes) > 0

    def results(tensors: list[Tensor]) -> Results:
        *operands, dout = tensors
        out, lse, _ = torch.ops.volta_fa.fwd(*operands)
        dq, dk, dv, *_ = torch.ops.volta_fa.bwd(dout, *operands, out, lse, deterministic=True)
        return {"out": out, "softmax_lse": lse, "dv": dv} | ({} if is_large else {"dq": dq, "dk": dk})

    expected = results([t.double() for t in drawn])
    runs = _twice(record, target, lambda: results([t.to(target.device) for t in drawn]))
    record.same_bits(*runs)
    for name, value in runs[0].items():
        largest = tolerance.largest(expected[name])
        of_large_rows = _LARGE_ROW_ERROR if name == "dv" and is_large else 0.0
        allowed = (2 * torch.finfo(torch.bfloat16).eps + of_large_rows) * largest
        if name == "softmax_lse":
            allowed = 2**-18 * max(largest, 1.0)
        record.error(Error(name, "largest", tolerance.max_error(value.cpu(), expected[name]), allowed))


def share_blame(results: Sequence[KernelResult]) -> None:
    """Decides whether a helper (preprocess or postprocess kernel) or a main kernel (all others) caused wrong gradients of a backward pass.
    Both run in the same calls, so a wrong one makes the other fail too. A helper that passes with one main kernel is correct, so its
    failures with others are removed. If several main kernels fail with a helper and none passes, the helper is wrong. Then the main
    kernels' failures about the gradients that depend on it are removed."""
    for helper in results:
        if helper.pass_ not in _HELPERS or not helper.failures:
            continue
        others = [v for v in results if helper.kernel in v.runs_with and v.pass_ not in _HELPERS]
        failed = [v for v in others if v.failures]
        if any(v.passed for v in others) and any(v.kernel in helper.runs_with for v in failed):
            names = ", ".join(v.kernel for v in failed if v.kernel in helper.runs_with)
            _absolve(helper, f"failed with {names} alone, which failed with others too")
        elif len(failed) > 1 and failed == others:
            for result in failed:
                if all(text.startswith(_HELPERS[helper.pass_]) for text in result.failures):
                    _absolve(result, f"not judged: {helper.kernel} failed")


#: Prefixes of failures that a helper may have caused: the gradients that depend on it.
_HELPERS = {"BackwardPreprocess": ("dq: ", "dk: ", "dv: ", "dattn_bias: ", "dsinks: "), "BackwardPostprocess": ("dq: ",)}


def _absolve(result: KernelResult, why: str) -> None:
    result.failures, result.worst, result.note = [], Worst(), why
