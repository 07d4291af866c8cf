"""torch.compile, and a package of compiled code that runs where only the native library is.

    python examples/compile_and_package.py        (in a checkout with PYTHONPATH=python; needs g++; takes a minute or two)
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

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


LOADER = """
import sys, torch
library, package = sys.argv[1:]
torch.ops.load_library(library)  # all that is needed of volta_fa
model = torch._inductor.aoti_load_package(package)
print("the package returns", tuple(model(torch.randn(2, 33, 64)).shape), "without the Python package:", "volta_fa" not in sys.modules)
"""


def main():
    torch.manual_seed(0)
    model = Attention()

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seqlen in (20, 31):
        x = torch.randn(2, seqlen, 64)
        compiled(x).square().mean().backward()
        print(f"compiled, seqlen {seqlen}: largest difference", (compiled(x) - model(x)).abs().max().item())

    program = torch.export.export(model.eval(), (torch.randn(2, 20, 64),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "attention.pt2"))
        subprocess.run([sys.executable, "-c", LOADER, str(volta_fa.library_path()), package], check=True)


if __name__ == "__main__":
    main()
