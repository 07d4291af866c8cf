"""Tests of the switch that makes volta_fa run scaled_dot_product_attention: enable_sdpa(), `with sdpa_enabled()`, VOLTA_FA_ENABLE_SDPA.

The switch is on while enable_sdpa() or any block is active, for all threads, on the devices that it names (`cpu` is for tests).
sdpa_stats() counts calls that volta_fa `ran` (of these `fast`, with precision "fast"), `traced` into a compiled graph, or that `fell_back`.
`ops_of(f)` returns the names of the ops that f() runs, `qkv` draws q, k and v, (batch, nheads, seqlen, headdim), in a backend's dtype: here
of the CPU. `refused` checks that a call raises an error with a message that matches."""

import threading
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

import volta_fa
from conftest import LIBRARY, NEEDS_FORK, on, run_process
from flash_attention import refused
from sdpa_helpers import causal, ops_of, qkv
from sdpa_helpers import switched_off as switched_off  # a fixture of every test
from volta_fa.diagnostics import driver_cuda
from volta_fa.integrations import devices


def is_on() -> bool:
    """Returns whether PyTorch's function runs volta_fa on the CPU."""
    t = torch.randn(1, 1, 2, 8)
    return "volta_fa::fwd" in ops_of(lambda: F.scaled_dot_product_attention(t, t, t))


def test_on_and_off():
    assert not is_on()
    volta_fa.enable_sdpa("cpu")
    with pytest.warns(UserWarning, match="enabled already: nothing changed"):
        volta_fa.enable_sdpa(torch.device("cpu"))
    assert is_on()
    volta_fa.disable_sdpa()  # once is enough
    assert not is_on()
    volta_fa.disable_sdpa()  # harmless
    assert volta_fa.sdpa_stats(reset=True)["ran"] == 1 and volta_fa.sdpa_stats()["ran"] == 0


def test_blocks_nest_and_overlap():
    with volta_fa.sdpa_enabled("cpu"):
        with volta_fa.sdpa_enabled("cpu"):
            assert is_on()
            volta_fa.disable_sdpa()  # undoes enable_sdpa, which was not called
            assert is_on()
        assert is_on()
        volta_fa.enable_sdpa("cpu")
    assert is_on()
    volta_fa.disable_sdpa()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(volta_fa.sdpa_enabled("cpu"))
        second.enter_context(volta_fa.sdpa_enabled("cpu"))
        first.close()
        assert is_on()
        second.close()
        assert not is_on()
    with pytest.raises(KeyError), volta_fa.sdpa_enabled("cpu"):
        raise KeyError
    assert not is_on()


def fast_and_exact(q, k, v, **options):
    """Returns out of the ops fwd_fast and fwd for SDPA's arguments; None for fwd_fast if it does not support the mask."""
    operands = [t.transpose(1, 2) for t in (q, k, v)]
    mask, fwd, fwd_fast = options.pop("attn_mask", None), torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_fast
    fast = None if mask is not None and mask.dtype != torch.bool else fwd_fast(*operands, attn_mask=mask, **options)[0].transpose(1, 2)
    return fast, fwd(*operands, attn_bias=mask, **options)[0].transpose(1, 2)


@on("cpu-fp16", "cpu-bf16")
def test_fast_precision(backend):
    """Forward calls run volta_fa::fwd_fast (int8 products), which has other bits than volta_fa::fwd, unless it lacks what a call asks."""
    q, k, v = qkv(backend, 2, 2, 40, 64)
    mask = backend.randn(1, 1, 40, 40) > 0
    cases = [({}, {}), ({"is_causal": True}, {"is_causal": True}), ({"attn_mask": mask[0, 0]}, {"attn_mask": mask})]
    with volta_fa.sdpa_enabled("cpu", precision="fast"):
        for passed, options in cases:
            fast, exact = fast_and_exact(q, k, v, **options)
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, **passed), fast) and not torch.equal(fast, exact)
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 3, "traced": 0, "fast": 3, "fell_back": {}}
        # a bias, a gradient, dropout and fp32 run the exact op
        bias = mask.to(q.dtype)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), fast_and_exact(q, k, v, attn_mask=bias)[1])
        leaf = q.clone().requires_grad_()
        out = F.scaled_dot_product_attention(leaf, k, v)
        assert torch.equal(out, fast_and_exact(q, k, v)[1]) and torch.autograd.grad(out.sum(), leaf)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 4, "traced": 0, "fell_back": {}}
        with torch.no_grad():
            assert torch.equal(F.scaled_dot_product_attention(leaf, k, v), fast_and_exact(q, k, v)[0])


@on("cpu-fp16")
def test_compiled_programs_follow_the_precision(backend):
    torch.compiler.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k, v = qkv(backend, 2, 2, 40, 64)
    fast, exact = fast_and_exact(q, k, v)
    for precision, expected in (("fast", fast), ("exact", exact), ("fast", fast)):
        with volta_fa.sdpa_enabled("cpu", precision=precision):
            assert torch.equal(compiled(q, k, v), expected)
    with volta_fa.sdpa_enabled("cpu", precision="fast"):
        leaf = q.clone().requires_grad_()
        assert torch.equal(compiled(leaf, k, v), exact)
    torch.compiler.reset()


def test_the_last_block_decides_the_precision():
    q = torch.randn(1, 1, 40, 64).half()
    attention, (fast, exact) = F.scaled_dot_product_attention, fast_and_exact(q, q, q)
    refused(ValueError, "enable_sdpa: precision: got 'int8', expected 'exact' or 'fast'", volta_fa.enable_sdpa, "cpu", precision="int8")
    with pytest.raises(ValueError, match="sdpa_enabled: precision: got 'int8'"), volta_fa.sdpa_enabled("cpu", precision="int8"):
        pass
    volta_fa.enable_sdpa("cpu", precision="fast")
    assert torch.equal(attention(q, q, q), fast)
    with volta_fa.sdpa_enabled("cpu"):
        assert torch.equal(attention(q, q, q), exact)
    assert torch.equal(attention(q, q, q), fast)
    volta_fa.enable_sdpa("cpu")  # precision is exact by default, also after another
    assert torch.equal(attention(q, q, q), exact)
    # blocks may end in another order than they began: the one entered last, of those still open, decides
    with ExitStack() as outer, ExitStack() as inner:
        outer.enter_context(volta_fa.sdpa_enabled("cpu", precision="fast"))
        outer.enter_context(volta_fa.sdpa_enabled("cpu"))
        inner.enter_context(volta_fa.sdpa_enabled("cpu", precision="fast"))
        assert torch.equal(attention(q, q, q), fast)
        inner.close()  # its request equals that of the first block: one of the two is closed, not both
        assert torch.equal(attention(q, q, q), exact)


def test_threads_share_one_switch():
    """Results stay right, and counters lose no call. Three threads call within blocks; volta_fa may run the calls of the others too."""
    tensors = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*tensors)
    calls, errors = 40, []

    def work(toggle):
        try:
            for _ in range(calls):
                if toggle:
                    with volta_fa.sdpa_enabled("cpu"):
                        out = F.scaled_dot_product_attention(*tensors)
                else:
                    out = F.scaled_dot_product_attention(*tensors)
                torch.testing.assert_close(out, expected)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and not is_on()
    assert 3 * calls <= volta_fa.sdpa_stats()["ran"] <= 6 * calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch):
    refused(RuntimeError, "this machine has no CUDA device that torch can use: .*cpu", volta_fa.enable_sdpa)
    with pytest.raises(RuntimeError, match="volta_fa.sdpa_enabled: .*no CUDA device"), volta_fa.sdpa_enabled(force=True):
        pass
    monkeypatch.setattr(devices, "cuda_problem", lambda: "no driver")
    refused(ValueError, "cuda:3, expected one of this machine.s 0 CUDA devices: no driver", volta_fa.enable_sdpa, "cuda:3")
    assert not is_on()


#: Compute capabilities of a machine's devices, `force`, and the devices that are switched on (None: an error): without `force` Volta's.
MACHINES = {
    "V100": ([(7, 0)], False, [0]),
    "Xavier": ([(7, 2)], False, [0]),
    "H200": ([(9, 0)], False, None),
    "H200 forced": ([(9, 0)], True, [0]),
    "P100 forced": ([(6, 0)], True, None),
    "mixed": ([(9, 0), (7, 0), (6, 1)], False, [1]),
    "mixed forced": ([(9, 0), (7, 0), (6, 1)], True, [0, 1]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_which_devices_are_switched_on(machine, monkeypatch):
    capabilities, force, expected = MACHINES[machine]
    switched = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"device {i}")
    monkeypatch.setattr("volta_fa.integrations.devices.info", lambda: {"families": [{"name": "sm_70", "sm": 70, "variants": 1}]})
    monkeypatch.setattr("volta_fa.integrations.sdpa._apply", lambda request, *others: switched.append(sorted(request.devices.cuda)))
    if expected is None:
        refused(RuntimeError, r"kernels for sm_70, and cuda:0 is a device 0, sm_\d+", volta_fa.enable_sdpa, force=force)
    else:
        volta_fa.enable_sdpa(force=force)
        assert switched == [expected]


def test_a_refused_device_changes_nothing(monkeypatch):
    """The library has room for 64 devices."""
    refused(ValueError, "got meta, expected a CUDA device", volta_fa.enable_sdpa, "meta")
    sdpa = volta_fa.integrations.sdpa
    monkeypatch.setattr(sdpa, "devices_of", lambda op, device, force: sdpa.Devices(cpu=False, cuda=frozenset([64])))
    refused(ValueError, "got CUDA device 64, expected one from 0 to 63", volta_fa.enable_sdpa)
    with pytest.raises(ValueError, match="got CUDA device 64"), volta_fa.sdpa_enabled():
        pass
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        volta_fa.enable_sdpa("cpu")
    assert is_on()
    volta_fa.disable_sdpa()
    assert not is_on()


# ---- the environment variable ----------------------------------------------------------------------------------------

#: How a program loads the library.
LOADED = {
    "package": "import volta_fa",
    "library": "torch.ops.load_library(sys.argv[1])",
    "library, then package": "torch.ops.load_library(sys.argv[1]); import volta_fa",
}
#: How the library is loaded, the variable, and how many of one call on the CPU volta_fa runs.
VALUES = [
    *(("package", value, int(value == "cpu")) for value in ("cpu", "0", "1", "force", "maybe")),
    *(("library", value, int(value == "cpu")) for value in ("cpu", "", "maybe")),
    *(("library, then package", value, int(value == "cpu")) for value in ("cpu", "1")),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("loaded,value,ran", VALUES)
def test_environment_variable(loaded, value, ran, tmp_path):
    """The variable takes effect when the library is loaded, with or without the Python package. Errors only warn; CUDA stays unused."""
    torch.jit.script(causal).save(str(tmp_path / "program.pt"))
    code = f"""
        import sys, torch
        {LOADED[loaded]}
        program = torch.jit.load(sys.argv[2])
        t = torch.randn(1, 1, 4, 8)
        program(t, t, t)
        print(torch.ops.volta_fa._sdpa_stats()["ran"], torch.cuda.is_initialized())
        if "package" in "{loaded}":
            from torch.compiler import config
            # torch.compile's cache key: has a tag while the switch is on
            print(config.cache_key_tag.partition("sdpa.")[0])
            volta_fa.disable_sdpa()  # undoes the variable, as it undoes enable_sdpa
            print(config.cache_key_tag)
            program(t, t, t)
            print(volta_fa.sdpa_stats()["ran"])
    """
    result = run_process(code, LIBRARY, tmp_path / "program.pt", VOLTA_FA_ENABLE_SDPA=value, CUDA_VISIBLE_DEVICES="")
    asked = value in ("1", "force", "cpu")
    expected = [f"{ran} False"] + (["volta_fa." if asked else "", "", str(ran)] if "package" in loaded else [])
    assert result.stdout.split("\n")[:-1] == expected
    assert ("VOLTA_FA_ENABLE_SDPA: got 'maybe', expected 1, force, cpu or 0" in result.stderr) == (value == "maybe")
    no_driver = "package" in loaded and value in ("1", "force") and driver_cuda() is None  # CUDA version of the driver
    assert result.stderr.count("VOLTA_FA_ENABLE_SDPA: no GPU runs it: no CUDA driver on this machine") == no_driver
    assert value == "maybe" or no_driver or "VOLTA_FA_ENABLE_SDPA" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_environment_variable_with_fake_tensors_of_a_missing_device():
    """With 1, the first call on a device decides, and warns once if it cannot. Fake tensors (shapes only) may be on a missing device."""
    code = """
        import torch, volta_fa
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            t = torch.empty(1, 1, 4, 8, device="cuda:1", dtype=torch.float16)
            for _ in range(2):
                print(torch.nn.functional.scaled_dot_product_attention(t, t, t).shape)
                with volta_fa.sdpa_enabled("cpu"):
                    pass
        print(volta_fa.sdpa_stats())
    """
    result = run_process(code, VOLTA_FA_ENABLE_SDPA="1")
    assert result.stdout.splitlines()[-1] == "{'ran': 0, 'traced': 0, 'fell_back': {}}"
    assert result.stderr.count("VOLTA_FA_ENABLE_SDPA: cuda:1 keeps PyTorch's attention") == 1
    assert "no CUDA driver" in result.stderr


@NEEDS_FORK
@pytest.mark.parametrize("loaded", LOADED)
@on("cuda")
def test_environment_variable_on_cuda(backend, loaded):
    """Loading the library does not initialize CUDA, so a process forked after it can use the GPU."""
    code = f"""
        import os, sys, torch
        {LOADED[loaded]}
        def say(what):  # in one write, because two processes say something: print may write the end of the line by itself
            os.write(1, f"{{what}}\\n".encode())
        say(torch.cuda.is_initialized())
        child = os.fork()
        t = torch.randn(1, 2, 40, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(t, t, t).sum().backward()
        say(torch.ops.volta_fa._sdpa_stats()["ran"])
        if child == 0:
            os._exit(0)
        os.wait()
    """
    forced = run_process(code, LIBRARY, VOLTA_FA_ENABLE_SDPA="force")
    assert forced.stdout.split() == ["False", "1", "1"] and "VOLTA_FA_ENABLE_SDPA" not in forced.stderr
    suitable = run_process(code, LIBRARY, VOLTA_FA_ENABLE_SDPA="1")
    made_for = torch.cuda.get_device_capability() in ((7, 0), (7, 2), (7, 5))  # "1" serves these; "force" also newer GPUs
    assert suitable.stdout.split() == ["False", *["1" if made_for else "0"] * 2]
    assert ("cuda:0 keeps PyTorch's attention: it is of sm_" in suitable.stderr) != made_for
