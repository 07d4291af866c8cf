"""What tools/suites.py has to know of each suite: how its calls run on volta_fa, and which changes its files need.

Suites are tests of flash-attn, flash-attention-turing, FlashMLA, PyTorch (SDPA, nested tensors, FlexAttention), SageAttention,
comfy-kitchen and xformers (SUITES). install_...() puts volta_fa in the place of the suite's package in this process. Some suites have
adapt_...(), which edits the source of a test file, prepare_...(), which changes its module after it ran, or wanted_...(), which chooses
cases. `options`: the arguments of tools/suites.py."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import io
import json
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest


@dataclass(frozen=True)
class Suite:
    #: Folder below --sources, which suites.py copies and runs, and the files of tests in it. Those that a release lacks are left out.
    folder: str
    files: tuple[str, ...]
    #: Makes the suite's calls run on volta_fa. Returns a function that is called after each test: it returns a reason for each call since
    #: then that ran elsewhere. Suites whose calls all run on volta_fa return `list`, which makes [].
    install: Callable[[Any], Callable[[], list[str]]]
    adapt: Callable[[str, Any], str] = lambda source, options: source  # changes a copied file's source
    prepare: Callable[[dict, Any], None] = lambda module, options: None  # changes a file's globals, as its last line
    wanted: Callable[[dict], bool] = lambda case: True  # whether a case of a parameter grid runs
    #: By the reason that reports show, a regular expression. left_out: for ids of tests to skip. known: for `case: message` of the
    #: failures that this reason explains.
    left_out: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    sample: int | None = None  # cases of each test function unless --sample says how many; None: all
    runs_alone: bool = False  # whether it runs on PyTorch without volta_fa


def on_device(source: str, options) -> str:
    """Returns a test's source for --device. For the CPU, capability and memory are those of a large GPU (9.0, 1 TiB), tensors and devices
    are the CPU's, and calls that synchronize or select a GPU are left out."""
    if options.device == "cuda":
        return source
    source = re.sub(r"torch\.cuda\.get_device_capability\([^)]*\)", "(9, 0)", source)
    source = re.sub(r'device\s*=\s*"cuda(:0)?"', f'device="{options.device}"', source)
    source = re.sub(r"torch\.cuda\.get_device_properties\([^)]*\)\.total_memory", "2**40", source)
    source = source.replace('torch.device("cuda:0")', f'torch.device("{options.device}")').replace(".cuda()", f'.to("{options.device}")')
    source = re.sub(r"^\s*torch\.cuda\.(synchronize|set_device|init|current_device)\(.*\)\n", "", source, flags=re.MULTILINE)
    return source.replace("torch.cuda.is_available()", "True")


# flash-attn


def install_flash_attn(_) -> Callable[[], list[str]]:
    import volta_fa

    volta_fa.install_flash_attn_shim()
    import flash_attn.flash_attn_interface as interface

    # the suite imports this function of flash-attn's tile sizes. Only normalize_flash_attn_S uses it, which prepare_flash_attn() replaces.
    interface._get_block_size_n = None
    return list


def adapt_flash_attn(source: str, options) -> str:
    # volta_fa raises ValueError for wrong arguments
    return on_device(source.replace("pytest.raises(RuntimeError,", "pytest.raises((RuntimeError, ValueError),"), options)


def adapt_turing(source: str, options) -> str:
    # needed only for tables of failures, which the file writes if asked
    return on_device(source.replace("import pandas as pd\n", ""), options)


def prepare_flash_attn(module: dict, _) -> None:
    def exact_probabilities(attn_unnorm, q, k, v, query_padding_mask=None, *_, **__):
        """flash-attn returns unnormalized dropout probabilities by tile; here they are exact."""
        hidden = None if query_padding_mask is None else ~query_padding_mask[:, None, :, None]
        return attn_unnorm if hidden is None else attn_unnorm.masked_fill(hidden, 0.0)

    def with_checked_lengths(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            os.environ["VOLTA_FA_CHECK_LENGTHS"] = "1"
            try:
                return function(*args, **kwargs)
            finally:
                del os.environ["VOLTA_FA_CHECK_LENGTHS"]

        return run

    if "normalize_flash_attn_S" in module:
        module["normalize_flash_attn_S"] = exact_probabilities
    # tests that expect errors for lengths in GPU memory
    module |= {name: with_checked_lengths(function) for name, function in module.items() if fnmatch.fnmatch(name, "test_*_bounds")}


def wanted_flash_attn(case: dict) -> bool:
    """Returns False for cases that the file itself would skip, but only after a setup that takes time."""
    paged, rotary = case.get("paged_kv_block_size"), case.get("rotary_fraction", 0) > 0
    return not (paged and (case.get("has_leftpad") or case.get("has_batch_idx"))) and (case.get("new_kv", True) or not rotary)


# FlashMLA


def install_flash_mla(_) -> Callable[[], list[str]]:
    sys.modules["flash_mla"] = importlib.import_module("volta_fa.flash_mla")
    return list


def adapt_flash_mla(source: str, options) -> str:
    # Sparse prefill builds its cases in its main block, before a loop that runs them. The block becomes listed_cases(), which returns them
    # in place of the loop, for prepare_flash_mla(). Other files change by on_device() alone.
    listed = source.replace("if __name__ == '__main__':", "def listed_cases():") if "correctness_cases = [" in source else source
    before, loop, _ = listed.partition("    is_no_cooldown = lib.is_no_cooldown()")
    return on_device(before + "    return testcases\n" if loop and "def listed_cases" in before else source, options)


@contextlib.contextmanager
def flash_mla_case(dtype: Any, device: str) -> Iterator[Callable[[], str]]:
    """Sets torch's defaults for a case, as FlashMLA's files do once. Yields a function that returns what the case printed."""
    import torch

    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield lambda: "; ".join(said.getvalue().splitlines()[2:])  # without a line of dashes and the case
    finally:
        torch.set_default_device(None)


def prepare_sparse_flash_mla(module: dict, cases: list, options) -> None:
    """Puts one parametrized test into a module of FlashMLA's sparse tests: of `cases`, without those that measure time (num_runs > 0)."""
    import torch

    run = module["test_flash_mla"] if "test_flash_mla" in module else module["run_test"]
    cases = [case for case in cases if case.num_runs == 0]

    def test_sparse_flash_mla(case):
        with flash_mla_case(torch.bfloat16, options.device) as printed:
            result = run(module["TestParam"](**case))
        assert result is True or getattr(result, "is_correct", False), printed()

    module["TestParam"].__test__ = False
    module.pop("test_flash_mla", None)
    # without the copies of dataclasses.asdict, which turns nested cases into dictionaries
    grid = [{name: getattr(case, name) for name in vars(case)} for case in cases]
    module["test_sparse_flash_mla"] = pytest.mark.parametrize("case", grid)(test_sparse_flash_mla)


def prepare_flash_mla(module: dict, options) -> None:
    """Turns the cases of a FlashMLA file's own loop into a parametrized test, without those that measure time. Of dense decoding, it takes
    those with one KV head: `volta_fa.flash_mla` has no others."""
    import torch

    if options.device == "cpu" and "lib" in module:
        # the cases' tensors are made by a module of FlashMLA that moves them to a GPU
        torch.Tensor.cuda = lambda self, *_, **__: self
    if "listed_cases" in module:
        return prepare_sparse_flash_mla(module, module["listed_cases"](), options)
    if "gen_testcase" in module:
        return prepare_sparse_flash_mla(module, [case.to_test_param() for case in module["gen_testcase"]()], options)
    test, param, capability, cases = module["test_flash_mla"], module["TestParam"], torch.cuda.get_device_capability, []
    # the file asserts the GPU that FlashMLA's kernels need
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for dtype in ("float16", "bfloat16"):
        listed: list = []
        module["test_flash_mla"] = listed.append
        module["main"](getattr(torch, dtype))
        cases += [{"dtype": dtype, **vars(c)} for c in listed if c.h_kv == 1 and not c.test_performance]
    torch.cuda.get_device_capability = capability

    def test_flash_mla(case):
        try:
            with flash_mla_case(getattr(torch, case["dtype"]), options.device) as printed:
                test(param(**{name: value for name, value in case.items() if name != "dtype"}))
        except AssertionError as error:
            raise AssertionError(printed() or str(error)) from None

    param.__test__ = False
    module["test_flash_mla"] = pytest.mark.parametrize("case", cases)(test_flash_mla)


# torch


def install_sdpa(options) -> Callable[[], list[str]]:
    import volta_fa

    # None: all GPUs. force: also those newer than Turing
    volta_fa.enable_sdpa("cpu" if options.device == "cpu" else None, force=options.device != "cpu")
    return lambda: list(volta_fa.sdpa_stats(reset=True)["fell_back"])


def install_flex(options) -> Callable[[], list[str]]:
    """Enables FlexAttention. The suite's eager references stay torch's own."""
    import torch
    import torch.nn.attention.flex_attention as module

    import volta_fa
    from volta_fa.flex import attention, compiled  # attention.devices: where enable_flex() is on

    torch_function, torch_compile, reasons = module.flex_attention, torch.compile, []  # reasons: of calls that fell back
    volta_fa.enable_flex("cpu" if options.device == "cpu" else None, force=options.device != "cpu")
    enabled = module.flex_attention

    def flex_attention(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return enabled(*args, **kwargs)
        with mock.patch.object(attention, "devices", attention.NO_DEVICES):
            return torch_function(*args, **kwargs)

    def compile_(*args, **kwargs):
        return torch_compile(*args, **({"backend": options.backend or "aot_eager"} | kwargs))

    module.flex_attention = flex_attention
    if options.device == "cpu":  # where the suite names no device
        from torch.nn.attention.experimental._paged_attention import PagedAttention

        for made in (module.create_block_mask, PagedAttention.__init__):
            made.__defaults__ = tuple("cpu" if default in (None, "cuda") else default for default in made.__defaults__)
    if options.backend or options.device == "cpu":
        torch.compile = compile_
    attention.log_fallback = compiled.log_fallback = reasons.append

    def fallbacks() -> list[str]:
        torch._dynamo.reset()
        found = list(reasons)
        reasons.clear()
        return found

    return fallbacks


def adapt_torch(source: str, _) -> str:
    """Replaces imports that the installed torch does not have: tests that use them fail, or are left out.

    Keeps TF32 off where tests allow it. The tests' limits expect float32's digits. PyTorch's memory-efficient kernel always has them,
    volta_fa only without TF32."""
    source = source.replace("@tf32_enabled()\n", "\n")
    source = re.sub(r"from test_cpp_extensions_open_device_registration import \(\s*generate_faked_module\s*\)", "pass", source)
    return source.replace("import create_nested_block_mask, flex_attention", "import flex_attention")


def adapt_flex_decoding(source: str, options) -> str:
    """Lets the file run on the CPU, where `aot_eager` needs no Triton. Later releases take positions of each batch entry."""
    source = adapt_torch(source, options).replace("assign(batch_idx, input_pos,", "assign(batch_idx, input_pos.expand(KV_B, -1),")
    return source if options.device == "cuda" else on_device(source.replace("and has_triton()", ""), options)


# SageAttention and comfy-kitchen


def select_fast_kernels(device: str) -> None:
    """Sets a tuning that chooses the kernels of fwd_fast (int8 scores) for all lengths. The planner takes them for long ones alone."""
    import torch

    import volta_fa

    if device != "cuda":
        return
    names = [v["name"] for v in volta_fa.info()["variants"] if v["pass"] == "FastForward"]
    # By headdim_v, after the name's x. The first kernel that fits wins: the plain one, then that with lengths and masks.
    names.sort(key=lambda name: (int(name.rpartition("x")[2]), "generic" in name))
    choices = [{"pass": "FastForward", "variant": name} for name in names]
    torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices}))


def install_sageattention(options) -> Callable[[], list[str]]:
    import volta_fa

    select_fast_kernels(options.device)
    volta_fa.install_sageattention_shim(replace=True)
    return list


def prepare_sageattention(module: dict, _) -> None:
    """Makes a test of the script: it prints differences, and says that all but the largest relative one are to be below 0.05."""

    def test_differences():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            module["torch"].manual_seed(0)
            module["main"]()
        found = {name: float(value) for name, value in re.findall(r"(\w+_[ar]tol)=(\S+)", output.getvalue())}
        assert len(found) == 4 and all(value < 0.05 for name, value in found.items() if name != "max_rtol"), found

    module["test_differences"] = test_differences


def install_comfy_kitchen(options) -> Callable[[], list[str]]:
    """Makes comfy_kitchen's attention, laid out as torch's. It rotates Q and K; `fwd_fast` has no fp32, which is cast to fp16 and back."""
    import torch

    import volta_fa

    select_fast_kernels(options.device)

    def operands(q, k, v):
        return [(t.half() if t.dtype == torch.float32 else t).transpose(1, 2) for t in (q, k, v)]

    def attend(operands, dtype, mask, scale, prepared=None):
        q, k, v = operands
        if mask is None or mask.dtype == torch.bool:
            out = torch.ops.volta_fa.fwd_fast(q, k, v, attn_mask=mask, softmax_scale=scale, rotate=True, prepared=prepared)[0]
        else:  # an added mask
            out = torch.ops.volta_fa.fwd(q, k, v, attn_bias=mask.to(q.dtype), softmax_scale=scale)[0]
        return out.transpose(1, 2).to(dtype)

    def int8_attention(q, k, v, attn_mask=None, scale=None):
        return attend(operands(q, k, v), q.dtype, attn_mask, scale)

    def prequantize_int8_attention(q, k, v, attn_mask=None, scale=None):
        found = operands(q, k, v)
        return found, q.dtype, attn_mask, scale, volta_fa.prepare_fast(*found[1:], rotate=True)

    made = types.ModuleType("comfy_kitchen")
    made.int8_attention, made.prequantize_int8_attention = int8_attention, prequantize_int8_attention
    made.int8_attention_from_prequantized = lambda prequantized: attend(*prequantized)
    made.int8_attention_is_available = lambda: True
    made.sage_attention = types.ModuleType("comfy_kitchen.sage_attention")
    sys.modules |= {"comfy_kitchen": made, "comfy_kitchen.sage_attention": made.sage_attention}
    return list


# xformers


def install_xformers(options) -> Callable[[], list[str]]:
    """Puts operators with volta_fa's declarations in the place of xformers' lists, which its tests read, and calls of them on `fmha`."""
    import torch
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias
    from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase

    import volta_fa
    from volta_fa.integrations.xformers import _RULES

    biases = {name: getattr(attn_bias, name, None) for name in _RULES} | {"None": type(None), "Tensor": torch.Tensor}
    cpu = options.device == "cpu"

    class Declarations:
        OPERATOR = staticmethod(lambda: None)
        SUPPORTED_DEVICES = frozenset({options.device})
        SUPPORTED_DTYPES = frozenset({torch.float32 if cpu else torch.float16})
        SUPPORTED_MAX_K = 256
        SUPPORTS_DROPOUT = SUPPORTS_CUSTOM_SCALE = SUPPORTS_DIFFERENT_VALUE_EMBED = SUPPORTS_BMGHK = True
        _TEST_BATCH_SIZES = (1, 7)
        is_available = classmethod(lambda cls: True)

    class Forward(Declarations, AttentionFwOpBase):
        NAME = "voltaF"
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in biases.values() if kind is not None)

    class Backward(Declarations, AttentionBwOpBase):
        NAME = "voltaB"
        SUPPORTS_ATTN_BIAS_GRAD = True
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in Forward.SUPPORTED_ATTN_BIAS_TYPES if not kind.__name__.startswith("Paged"))

    fmha.ALL_FW_OPS[:], fmha.ALL_BW_OPS[:] = [Forward], [Backward]
    volta_fa.enable_xformers(options.device, force=not cpu)
    enabled = fmha._memory_efficient_attention  # volta_fa's

    def forward(query: Any, key: Any, value: Any, bias: Any = None, p: float = 0.0, scale: Any = None, *, op: Any = None) -> Any:
        return enabled(fmha.Inputs(query=query, key=key, value=value, attn_bias=bias, p=p, scale=scale), None)

    fmha._memory_efficient_attention = lambda inp, op=None: enabled(inp, None)
    fmha.memory_efficient_attention_forward = sys.modules["xformers.ops"].memory_efficient_attention_forward = forward
    counts = Counter()

    def fallbacks() -> list[str]:
        found = Counter(volta_fa.xformers_stats()["fell_back"])
        new = found - counts
        counts.update(new)
        return list(new)

    return fallbacks


TORCH = {"folder": "pytorch/test", "adapt": adapt_torch, "runs_alone": True}
FLEX = TORCH | {
    "install": install_flex,
    "known": {
        "passes, where the suite expects torch's kernel to fail": "Unexpected success|RuntimeError not raised",
        "reads the code of torch's kernel": 'Expected to find "',
    },
}
SDPA = TORCH | {"install": install_sdpa}
SUITES = {
    "flash-attn": Suite(
        "flash-attention/tests",
        ("test_flash_attn.py", "test_rotary.py", "ops/triton/test_layer_norm.py", "losses/test_cross_entropy.py"),
        install_flash_attn,
        adapt_flash_attn,
        prepare_flash_attn,
        wanted_flash_attn,
        known={"counts compilations of flash-attn's own Triton kernel": "cannot import name 'rotary_kernel'"},
        sample=500,
    ),
    "flash-attn-turing": Suite("flash-attention-turing", ("test_flash_attn.py",), install_flash_attn, adapt_turing, sample=100),
    "flash-mla": Suite(
        "FlashMLA/tests",
        ("test_flash_mla_dense_decoding.py", "test_flash_mla_sparse_prefill.py", "test_flash_mla_sparse_decoding.py"),
        install_flash_mla,
        adapt_flash_mla,
        prepare_flash_mla,
    ),
    "sdpa": Suite(
        files=("test_transformers.py",),
        left_out={"builds a C++ extension": "PrivateUse1"},
        known={"repeats the dropout mask of PyTorch's own kernel": r"dropout(_p)?_0_[1-9]"},
        **SDPA,
    ),
    "nested": Suite(files=("test_nestedtensor.py",), **SDPA),
    "flex": Suite(files=("inductor/test_flex_attention.py",), **FLEX),
    "flex-decoding": Suite(files=("inductor/test_flex_decoding.py",), **FLEX | {"adapt": adapt_flex_decoding}),
    "sageattention": Suite("SageAttention/tests", ("test_sageattn.py",), install_sageattention, on_device, prepare_sageattention),
    "comfy-kitchen": Suite(
        "comfy-kitchen/tests",
        ("test_int8_attention.py",),
        install_comfy_kitchen,
        on_device,
        left_out={"of comfy-kitchen's own parts": "availability|cta_k_selection|rejects_cpu|y_dispatch|hip_dispatch|allocates|releases"},
    ),
    "xformers": Suite(
        "xformers/tests",
        ("test_mem_eff_attention.py",),
        install_xformers,
        left_out={
            "of xformers' dispatcher, logsumexp and other kernels": "::(?!test_(.*_)?(forward|backward|custom_scale|grad_check|empty))"
        },
    ),
}
