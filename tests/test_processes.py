"""Tests of the ops in several processes (data loader) and in a C++ program, and of a warning once per process.

`Layer(width)` (test_routes.py) is causal self-attention around volta_fa::fwd; LIBRARY is the library that all programs load. `run_process`
runs a program, with environment variables by name; `run_python` returns what one prints."""

import os
import subprocess

import pytest
import torch

from conftest import LIBRARY, NEEDS_COMPILER, REPOSITORY, run_process, run_python
from test_routes import Layer

# ---- modules and processes ---------------------------------------------------------------------------------------------


def test_data_loader_workers():
    """Worker processes, forked after the parent has run the op, run it too. Attention over rows of i gives i."""
    code = """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        torch.set_num_threads(1)

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                t = torch.full((1, 3, 1, 8), float(i))
                return torch.ops.volta_fa.fwd(t, t, t)[0].mean()

        Data()[0]
        print([b.item() for b in torch.utils.data.DataLoader(Data(), num_workers=2)])
    """
    assert run_python(code, LIBRARY) == "[0.0, 1.0, 2.0, 3.0]"


# ---- programs without Python -------------------------------------------------------------------------------------------


class SdpaLayer(Layer):
    """Layer with PyTorch's scaled_dot_product_attention instead of the op; VOLTA_FA_ENABLE_SDPA routes it to volta_fa."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, w // self.nheads).permute(2, 0, 3, 1, 4).unbind(0)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_p, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, w))


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_cpp_program(tmp_path):
    """A program that links libtorch alone runs the op by name, its gradients, and saved TorchScript modules. One of these calls PyTorch's
    own function, which VOLTA_FA_ENABLE_SDPA switches to volta_fa."""
    from torch.utils.cpp_extension import include_paths

    torch.jit.script(Layer(64)).save(str(tmp_path / "layer.pt"))
    torch.jit.script(SdpaLayer(64)).save(str(tmp_path / "sdpa.pt"))
    # one g++ command against libtorch, as docs/guides/integrations.md shows it
    torch_lib = os.path.join(os.path.dirname(torch.__file__), "lib")
    command = ["g++", "-std=c++17", "-O1", REPOSITORY / "examples/cpp/attention.cpp", "-o", tmp_path / "attention"]
    command += [f"-isystem{path}" for path in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    linked = subprocess.run(["ldd", tmp_path / "attention"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in linked.splitlines()]
    assert not [name for name in names if "python" in name or "volta" in name]
    result = subprocess.run([tmp_path / "attention", LIBRARY, tmp_path / "layer.pt"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "gradients agree" in result.stdout and "module: 2 9 64" in result.stdout
    for value, calls in (("", 0), ("cpu", 1)):
        command, env = [tmp_path / "attention", LIBRARY, tmp_path / "sdpa.pt"], {**os.environ, "VOLTA_FA_ENABLE_SDPA": value}
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        assert f"scaled_dot_product_attention run by volta_fa: {calls}" in result.stdout, result.stderr + result.stdout


# ---- warnings, once in a process ---------------------------------------------------------------------------------------

#: Defines `call`, for the programs of LAYOUTS.
CALL = """
import torch, volta_fa
from volta_fa.integrations.flash_attn import fa3

def call(q, k, function=volta_fa.flash_attn_func):
    function(torch.randn(q), torch.randn(k), torch.randn(k))

SHAPES = [  # of q and k, in the right order
    ((2, 256, 8, 16), (2, 256, 8, 16)),
    ((1, 5, 32, 16), (1, 5, 32, 16)),  # a short prompt
    ((1, 5, 128, 16), (1, 5, 8, 16)),  # the same of many heads, grouped
    ((1, 1, 128, 16), (1, 200, 128, 16)),  # decoding
    ((1, 80, 160, 16), (1, 77, 80, 16)),  # heads first, 77 KV heads would not divide 80 heads
]
"""
SWAPPED = "call((1, 2, 100, 16), (1, 2, 100, 16))\n"
#: Programs that seem to pass (batch, nheads, seqlen, headdim) instead of (batch, seqlen, nheads, headdim), or not: source,
#: VOLTA_FA_WARN_LAYOUT, and words of the only warning; None: no warning.
LAYOUTS = {
    "as expected": ("for q, k in SHAPES: call(q, k)\n", "", None),
    "swapped, twice": (2 * SWAPPED, "", "[1, 2, 100, 16]: 100 heads and 2 tokens, expected (batch, seqlen, nheads, headdim)"),
    "grouped heads": ("call((1, 32, 512, 16), (1, 8, 512, 16))", "", "512 heads and 32 tokens"),
    "other tokens": ("call((1, 8, 256, 16), (1, 8, 128, 16))", "", "pass q.transpose(1, 2)"),
    "the operator": ("call((1, 8, 256, 16), (1, 8, 256, 16), torch.ops.volta_fa.fwd)", "", "256 heads"),
    "FlashAttention 3": ("call((1, 8, 256, 16), (1, 8, 256, 16), fa3.flash_attn_func)", "", "256 heads"),
    "silenced": (SWAPPED, "0", None),
    # only a process's first 100 calls are checked
    "later calls": ("for _ in range(100): call((1, 100, 2, 16), (1, 100, 2, 16))\n" + SWAPPED, "", None),
}


@pytest.mark.parametrize("program", LAYOUTS)
def test_heads_before_tokens_warn_once(program):
    source, variable, text = LAYOUTS[program]
    stderr = run_process(CALL + source, VOLTA_FA_WARN_LAYOUT=variable).stderr
    warned = [line for line in stderr.splitlines() if "volta_fa: q: got shape" in line]
    assert len(warned) == (text is not None), stderr
    assert text is None or text in warned[0]
