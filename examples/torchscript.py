"""TorchScript: a scripted and a traced module, saved, and loaded by a process that has only the native library.

    python examples/torchscript.py [module.pt]      (in a checkout: PYTHONPATH=python .venv/bin/python examples/torchscript.py)

With an argument a scripted module stays there for the C++ program examples/cpp/attention.cpp. It calls PyTorch's own
scaled_dot_product_attention, which VOLTA_FA_ENABLE_SDPA lets volta_fa run.
"""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import volta_fa

warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)


class Attention(torch.nn.Module):
    """Causal self-attention. TorchScript finds the op by its name, as everybody does."""

    def __init__(self, width: int = 32, nheads: int = 4):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def split(self, x: torch.Tensor):
        return self.qkv(x).view(x.shape[0], x.shape[1], 3, self.nheads, -1).unbind(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
        return out.flatten(2)


class SdpaAttention(Attention):
    """The same, by PyTorch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return out.transpose(1, 2).flatten(2)


def reference(module: Attention, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in module.split(x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


LOADER = """
import sys, torch
library, example, *modules = sys.argv[1:]
torch.ops.load_library(library)  # all that is needed of volta_fa
x, out, gradient = torch.load(example)
for path in modules:
    module = torch.jit.load(path)
    for _ in range(3):  # the first runs profile, the later ones are optimized
        module.zero_grad()
        found = module(x)
        found.square().mean().backward()
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(module.qkv.weight.grad, gradient)
assert "volta_fa" not in sys.modules
"""


def main():
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 9, 32)
    expected = reference(module, x)
    expected.square().mean().backward()

    with tempfile.TemporaryDirectory() as folder:
        example = Path(folder) / "example.pt"
        torch.save((x, expected.detach(), module.qkv.weight.grad), example)
        # a scripted module takes inputs of any shape, a traced one those of the shape that it has seen
        programs = {"scripted": torch.jit.script(module), "traced": torch.jit.trace(module, x)}
        saved = [Path(folder) / f"{how}.pt" for how in programs]
        for path, program in zip(saved, programs.values(), strict=True):
            program.save(path)
        subprocess.run([sys.executable, "-c", LOADER, volta_fa.library_path(), example, *saved], check=True)
        print(" and ".join(programs), "module, loaded without the Python package: out and gradients agree with PyTorch's attention")
        longer = torch.randn(1, 20, 32)
        torch.testing.assert_close(programs["scripted"](longer), reference(module, longer))

    if sys.argv[1:]:
        torch.jit.script(SdpaAttention()).save(sys.argv[1])
        print("saved", sys.argv[1])


if __name__ == "__main__":
    main()
