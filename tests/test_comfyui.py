"""The node package of integrations/comfyui: its attention override in all of ComfyUI's layouts, calls that fall back, and its import.

ComfyUI calls an override with the function that it replaces. The override runs volta_fa, or that function for calls that volta_fa does
not support, and counts both (`counts`: "ran", or the reason of the fallback). A layout is (skip_reshape, skip_output_reshape): whether
q, k, v, and out, have a dimension of heads. `make_override(every_device=True)` also runs volta_fa on the CPU, where these tests are.
`on(...)` lists a test's backends: CPU (`cpu-DTYPE`), simulator (`sim`), GPU (`cuda`). A backend runs a call several times (`_runs`: the
simulator in two warp orders), with bitwise identical results (`agreed` returns the first). `within` checks a result's error budget.

Environment:
- VOLTA_FA_TEST_COMFYUI: folder of ComfyUI's source, whose requirements this Python has: tools/programs/run_comfyui.py runs its models"""

import os
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch

import reference
import volta_fa
from conftest import REPOSITORY, agreed, assert_same_bits, need, on, on_cases, run_process, run_python, within
from processes import output_of, run_program

PACKAGE = REPOSITORY / "integrations" / "comfyui"
#: The package's name as a module, which ComfyUI derives from its path.
NAME = str(PACKAGE).replace(".", "_x_")
# Loads the package as ComfyUI loads a folder of custom_nodes.
LOAD = f"""
import importlib.util, logging, sys
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
name = {NAME!r}
spec = importlib.util.spec_from_file_location(name, {str(PACKAGE / "__init__.py")!r})
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def after_loading(code: str) -> str:
    """Returns a program that loads the package and then runs the code."""
    return LOAD + textwrap.dedent(code)


@pytest.fixture(scope="module")
def attention():
    """Returns the override's module, loaded as ComfyUI does, but without enabling scaled_dot_product_attention in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOLTA_FA_ENABLE_SDPA", "0")
        exec(LOAD, {})
    yield sys.modules[f"{NAME}.attention"]
    for loaded in [n for n in sys.modules if n.startswith(NAME)]:
        del sys.modules[loaded]


@pytest.fixture
def counts(attention):
    """Returns the override's counts, which start at 0."""
    attention.counts.clear()
    return attention.counts


def refuses(*args, **kwargs):
    """Stands for the function that an override replaces, in calls that must not fall back to it."""
    raise AssertionError("the call fell back")


def flat(t):
    """Joins the dimensions of heads and headdim."""
    return t.flatten(2)


def heads_first(t):
    return t.transpose(1, 2)


#: (skip_reshape, skip_output_reshape).
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
#: Masks by name: the shape (batch, nheads, 20 queries, 24 keys) with 1 where it broadcasts, dtype, and the form that ComfyUI passes.
MASKS = {
    "none": None,
    "bool, rank 2": ((1, 1, 20, 24), torch.bool, lambda m: m[0, 0]),
    "added, rank 2": ((1, 1, 20, 24), torch.float16, lambda m: m[0, 0]),
    "added, rank 3": ((2, 1, 20, 24), torch.float16, lambda m: m[:, 0]),
    "bool, rank 3": ((2, 1, 20, 24), torch.bool, lambda m: m[:, 0]),
    "keys only, rank 3": ((2, 1, 1, 24), torch.float16, lambda m: m[:, 0]),
    "each head, rank 4": ((2, 4, 20, 24), torch.float16, lambda m: m),
    "fp32, rank 4": ((1, 4, 20, 24), torch.float32, lambda m: m),
}


def draw_mask(backend, mask):
    """Returns a mask of MASKS as ComfyUI passes it, and with all dimensions; None twice for "none"."""
    if not MASKS[mask]:
        return None, None
    shape, dtype, as_passed = MASKS[mask]
    bias = backend.randn(*shape) < 0.5 if dtype == torch.bool else backend.randn(*shape).to(dtype)
    return as_passed(bias), bias


def check(backend, attention, counts, *, layout=(False, False), mask="none", nheads_k=4, headdim=64, scale=None):
    """Compares a call through the override, in ComfyUI's layout, with the fp64 reference."""
    q, k, v = backend.randn(2, 20, 4, headdim), backend.randn(2, 24, nheads_k, headdim), backend.randn(2, 24, nheads_k, headdim)
    skip_reshape, skip_output_reshape = layout
    kwargs = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    kwargs |= {"transformer_options": {}, "_inside_attn_wrapper": True}  # ComfyUI's own, which the override ignores
    options = {}
    kwargs["mask"], options["attn_bias"] = draw_mask(backend, mask)
    if scale is not None:
        kwargs["scale"] = options["softmax_scale"] = scale
    if nheads_k != 4:
        kwargs["enable_gqa"] = True
    passed = [(heads_first if skip_reshape else flat)(t) for t in (q, k, v)]
    override = attention.make_override(every_device=True)
    runs = [override(refuses, *passed, 4, **kwargs) for _ in backend._runs(q, v)]  # 4: heads
    (out,) = agreed([(out,) for out in runs], "out")
    assert out.shape == ((2, 4, 20, headdim) if skip_output_reshape else (2, 20, 4 * headdim)) and counts == {"ran": len(runs)}
    out, ref = out.transpose(1, 2) if skip_output_reshape else out.unflatten(-1, (4, headdim)), reference.forward(q, k, v, **options)
    within(backend, "out", out, ref.out, reference.forward_budget(ref, q, k, v, **options))


@on("cpu-fp16", "sim", "cuda")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(backend, attention, counts, layout):
    """Results have the layout that ComfyUI asks for, and volta_fa computed them."""
    check(backend, attention, counts, layout=layout)


@on_cases((["cpu-fp16", "cuda"], list(MASKS)[1:]), (["sim"], ["bool, rank 2", "added, rank 3"]))
@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
def test_masks(backend, attention, counts, layout, case):
    """Masks in all forms in which ComfyUI passes them."""
    check(backend, attention, counts, layout=layout, mask=case)


@on("cpu-fp16", "cuda")
@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
@pytest.mark.parametrize("options", [dict(nheads_k=2), dict(nheads_k=1), dict(scale=0.5), dict(headdim=40), dict(headdim=72)], ids=str)
def test_groups_scales_and_headdims(backend, attention, counts, layout, options):
    check(backend, attention, counts, layout=layout, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_float32(attention, counts, masked):
    """fp32 calls run in fp32, with precision "fast" too, whose int8 scores are for fp16."""
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in tensors(torch.float32))
    mask = torch.randn(5, 6) if masked else None
    override = attention.make_override(every_device=True, precision="fast")
    # None: no function to fall back to; 2: heads
    found = override(None, q, k, v, 2, mask=mask, skip_reshape=True, skip_output_reshape=True)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert counts == {"ran": 1}


def tensors(dtype=torch.float16, headdim=8, nheads_k=2):
    """Returns q (1, 5, 2 heads * headdim) and k and v (1, 6, nheads_k * headdim): fp16 with 2 KV heads is supported."""
    return torch.randn(1, 5, 2 * headdim).to(dtype), *(torch.randn(1, 6, nheads_k * headdim).to(dtype) for _ in "kv")


@pytest.mark.parametrize(
    "reason, call, options",
    [
        ("float64", tensors(torch.float64), {}),
        ("bfloat16", tensors(torch.bfloat16), {}),
        ("headdim 520", tensors(headdim=520), {}),
        ("headdim 0", (torch.zeros(1, 2, 5, 0).half(),) * 3, dict(skip_reshape=True)),
        ("mask in float64", tensors(), dict(mask=torch.zeros(5, 6, dtype=torch.float64))),
        ("mask", tensors(), dict(mask=torch.zeros(3, 5, 6))),
        ("mask", tensors(), dict(mask=torch.zeros(6))),
        ("shape", tensors(nheads_k=1), {}),
        ("shape", tensors(nheads_k=3), dict(enable_gqa=True)),
        ("shape", tensors(), dict(skip_reshape=True)),
        ("float32", (tensors()[0], *tensors(torch.float32)[1:]), {}),
    ],
)
def test_other_calls_run_the_given_function_unchanged(attention, counts, reason, call, options):
    """The function that the override replaces gets the arguments of the call, and `counts` the reason."""
    seen = []

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        return "its result"

    override = attention.make_override(every_device=True)
    assert override(function, *call, 2, attn_precision=torch.float32, **options) == "its result"
    ((args, kwargs),) = seen
    assert [id(a) for a in args[:3]] == [id(t) for t in call] and args[3:] == (2,)
    expected = {"mask": None, "attn_precision": torch.float32, "skip_reshape": False, "skip_output_reshape": False, **options}
    assert kwargs.keys() == expected.keys() and all(kwargs[name] is value for name, value in expected.items())
    assert counts == {reason: 1}


@on("cpu-fp16", "cuda")
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_strides(backend, attention, counts, skip_reshape):
    """Views whose last dimension is strided."""
    call = [backend.randn(2, 4, 5, 16) if skip_reshape else backend.randn(2, 5, 64) for _ in range(3)]
    override = attention.make_override(every_device=True)
    expected = override(refuses, *call, 4, skip_reshape=skip_reshape)
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in call]
    assert_same_bits("out", override(refuses, *strided, 4, skip_reshape=skip_reshape), expected)
    assert counts == {"ran": 2}


def test_a_call_that_raises_is_not_counted(attention, counts, monkeypatch):
    monkeypatch.setattr(attention, "_reason", lambda *a: "")  # as for a call whose defect it does not know
    with pytest.raises(ValueError, match="headdim"):
        attention.make_override(every_device=True)(refuses, *tensors(headdim=520), 2)
    assert not counts


def test_devices_without_kernels_of_their_own_fall_back(attention, counts):
    assert attention.make_override()(lambda *a, **k: "own", *tensors(), 2) == "own"
    assert counts == {"device cpu": 1}


def test_an_earlier_override_runs_what_falls_back(attention, counts):
    def earlier(func, *args, **kwargs):
        return "earlier", func(*args, **kwargs)

    override = attention.make_override(every_device=True, previous=earlier)
    assert override(lambda *a, **k: "own", *tensors(torch.bfloat16), 2) == ("earlier", "own")
    twice = attention.make_override(every_device=True, previous=override)  # the node twice: the second replaces the first
    assert twice(lambda *a, **k: "own", *tensors(torch.bfloat16), 2) == ("earlier", "own")
    assert counts == {"bfloat16": 2}


@on("cpu-fp16")
@pytest.mark.parametrize("mask", ["none", "bool, rank 3", "added, rank 3"])
def test_fast_precision(backend, attention, counts, mask):
    """Int8 scores, and the exact operator for masks that are added and where a gradient is needed."""
    q, k, v = backend.randn(2, 20, 4, 64), backend.randn(2, 24, 4, 64), backend.randn(2, 24, 4, 64)
    passed, whole = draw_mask(backend, mask)
    override = attention.make_override(every_device=True, precision="fast")
    found = override(refuses, flat(q), flat(k), flat(v), 4, mask=passed)
    is_added = whole is not None and whole.dtype != torch.bool
    out = torch.ops.volta_fa.fwd(q, k, v, attn_bias=whole)[0] if is_added else torch.ops.volta_fa.fwd_fast(q, k, v, attn_mask=whole)[0]
    assert_same_bits("out", found, flat(out))
    assert counts == ({"ran": 1} if is_added else {"ran": 1, "fast": 1})
    counts.clear()
    override(refuses, flat(q).requires_grad_(), flat(k), flat(v), 4, mask=passed).sum().backward()
    assert counts == {"ran": 1}


def test_counts_in_words(attention):
    assert attention.describe(Counter(ran=10, fast=8)) == "10 ran on volta_fa (8 by fwd_fast), 0 fell back"
    assert attention.describe(Counter()) == "0 ran on volta_fa, 0 fell back"
    assert attention.describe(Counter(ran=10, float32=2, mask=1)) == "10 ran on volta_fa, 3 fell back (float32: 2, mask: 1)"


def test_compiled_models_do_not_recompile_for_each_count(attention, counts):
    """Compiled calls are not counted, because each new count would compile again: the one count is the eager call's."""
    override, call = attention.make_override(every_device=True), tensors()
    compiled = torch.compile(lambda q, k, v: override(refuses, q, k, v, 2), backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [compiled(*call) for _ in range(3)]
    torch.testing.assert_close(found[2], override(refuses, *call, 2))
    assert counts == {"ran": 1}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_question_about_the_device_compiles(attention, device):
    need(device)
    override, call = attention.make_override(), [t.to(device) for t in tensors()]

    def run(q, k, v):
        return override(lambda q, *a, **k: q + 1, q, k, v, 2)

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(*call), run(*call))


def test_without_volta_fa_one_message_and_no_node():
    code = 'import sys; sys.modules["volta_fa"] = None' + LOAD  # an import raises ImportError
    ran = run_process(code + "assert module.NODE_CLASS_MAPPINGS == module.NODE_DISPLAY_NAME_MAPPINGS == {}")
    (message,) = ran.stderr.strip().splitlines()
    assert message.startswith("ERROR volta_fa: no nodes, because volta_fa is not installed in ") and "install its wheel" in message


def test_the_package_registers_its_node_and_enables_pytorchs_attention(monkeypatch):
    code = after_loading("""
        import torch, volta_fa
        node = module.NODE_CLASS_MAPPINGS["VoltaAttention"]
        assert set(module.NODE_CLASS_MAPPINGS) == set(module.NODE_DISPLAY_NAME_MAPPINGS) == {"VoltaAttention"}
        assert set(node.INPUT_TYPES()["required"]) == {"model"} and node.INPUT_TYPES()["optional"]["precision"][1]["default"] == "exact"
        assert callable(getattr(node, node.FUNCTION))
        q = torch.randn(1, 2, 16, 8)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        print(volta_fa.sdpa_stats()["ran"])
    """)
    assert run_python(code, VOLTA_FA_ENABLE_SDPA="cpu") == "1"
    assert run_python(code, VOLTA_FA_ENABLE_SDPA="0") == "0"
    if not torch.cuda.is_available():  # no error, a line instead
        monkeypatch.delenv("VOLTA_FA_ENABLE_SDPA", raising=False)
        assert "INFO volta_fa.enable_sdpa: this library has kernels for" in run_process(code).stderr


@pytest.mark.parametrize(
    "choice, on",
    [("0", False), ("cpu", True), *(pytest.param(*more, marks=pytest.mark.slow) for more in [("off", False), ("", False), ("1", True)])],
)
def test_the_variable_decides_about_xformers(choice, on):
    code = """
        import sys, types, volta_fa
        sys.modules["xformers.ops"] = types.ModuleType("xformers.ops")
        volta_fa.enable_xformers = lambda *args, **options: print("enabled")
    """
    assert run_python(textwrap.dedent(code) + LOAD, VOLTA_FA_ENABLE_SDPA=choice) == ("enabled" if on else "")


def test_the_log_line_of_a_run():
    """It has the counts of this run alone: the node's, and those of PyTorch's function since the line before."""
    code = after_loading("""
        import torch
        node, attention = sys.modules[name + ".node"], sys.modules[name + ".attention"]
        attention.counts.update(ran=5)
        def sample(x, y):
            attention.counts.update({"ran": 2, "float32": 1})
            q = torch.randn(1, 2, 16, 8)
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
            return x + y
        assert node._log_counts(sample, 1, y=2) == node._log_counts(sample, 1, y=2) == 3
    """)
    lines = [line for line in run_process(code, VOLTA_FA_ENABLE_SDPA="cpu").stderr.splitlines() if "attention calls" in line]
    run = "INFO volta_fa: attention calls of this run: 2 ran on volta_fa, 1 fell back (float32: 1)"
    assert lines == [run + "; of scaled_dot_product_attention since the last line: 1 ran on volta_fa, 0 fell back"] * 2


def test_the_registry_reads_its_version():
    text = (PACKAGE / "pyproject.toml").read_text()
    assert f'version = "{volta_fa.__version__}"' in text and "[tool.comfy]" in text


@pytest.mark.skipif("VOLTA_FA_TEST_COMFYUI" not in os.environ, reason="VOLTA_FA_TEST_COMFYUI names no folder of ComfyUI")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_comfyuis_own_models(dtype):
    command = ["tools/programs/run_comfyui.py", Path(os.environ["VOLTA_FA_TEST_COMFYUI"]).absolute(), "--dtype", dtype]
    command += ["--models", "flux,flux-mask,qwen,vae,dtypes", "--starts", "pytorch,flash"]
    output_of(run_program(*command, path=[Path(volta_fa.__file__).parents[1]]))
