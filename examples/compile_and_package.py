"""torch.compile, and a package of compiled code that runs where only the native library is.

    python examples/compile_and_package.py

In a checkout with PYTHONPATH=python. It needs g++ and takes a minute or two.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import volta_fa


class Attention(torch.nn.Module):
    """Causal self-attention on the op itself, so that a package made anywhere names volta_fa."""

    def __init__(self, width: int = 64, nheads: int = 4):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, -1).unbind(2)
        out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
        return out.reshape(b, s, w)


class ExistingModel(torch.nn.Module):
    """As one finds it: scaled_dot_product_attention, and no word of volta_fa."""

    def __init__(self, width: int = 64, nheads: int = 4):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w)


def calls(f) -> set[str]:
    """Which attention ran in f()."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        f()
    # volta_fa's CPU backend runs PyTorch's operator inside its own
    theirs = {e.name for e in profiler.events() if "scaled_dot_product" in e.name and "volta_fa::" not in getattr(e.cpu_parent, "name", "")}
    return theirs | {e.name for e in profiler.events() if "volta_fa::" in e.name}


LOADER = """
import sys, torch
import torch._inductor.codecache  # torch 2.10 takes for granted that somebody did
library, package = sys.argv[1:]
torch.ops.load_library(library)  # all that is needed of volta_fa
model = torch._inductor.aoti_load_package(package)
print("the package returns", tuple(model(torch.randn(2, 33, 64)).shape), "without the Python package:", "volta_fa" not in sys.modules)
"""


def main():
    torch.manual_seed(0)

    # An existing model: switch once, before anything is compiled. What torch.compile has made keeps what was on then.
    existing, x = ExistingModel(), torch.randn(2, 20, 64)
    expected = existing(x)
    try:
        volta_fa.enable_sdpa()
        existing, x, expected = existing.half().cuda(), x.half().cuda(), expected.half().cuda()
    except RuntimeError:  # no Volta or Turing GPU: the same on the CPU
        volta_fa.enable_sdpa("cpu")
    compiled = torch.compile(existing, fullgraph=True)
    compiled(x).float().square().mean().backward()
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if x.is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(compiled(x), expected, **tolerance)
    ran = calls(lambda: compiled(x).sum().backward())
    print("an existing model, compiled:", *sorted(ran))
    assert ran == {"volta_fa::fwd", "volta_fa::bwd"}
    volta_fa.disable_sdpa()

    model = Attention()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seqlen in (20, 31):
        x = torch.randn(2, seqlen, 64)
        compiled(x).square().mean().backward()
        print(f"compiled, seqlen {seqlen}: largest difference", (compiled(x) - model(x)).abs().max().item())
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

    program = torch.export.export(model.eval(), (torch.randn(2, 20, 64),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "attention.pt2"))
        subprocess.run([sys.executable, "-c", LOADER, str(volta_fa.library_path()), package], check=True)


if __name__ == "__main__":
    main()
