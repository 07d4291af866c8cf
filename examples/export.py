"""A model compiled, packaged and scripted; processes that have only the native library load the results.

    python examples/export.py [compile] [package] [script] [--save FILE]
    (in a checkout: PYTHONPATH=python .venv/bin/python examples/export.py)

Runs the named parts, or all: torch.compile, an AOTInductor package, and TorchScript modules. The first two need g++ and a minute.
--save also scripts a model that calls PyTorch's own scaled_dot_product_attention, for examples/cpp/attention.cpp. With the environment
variable VOLTA_FA_ENABLE_SDPA=1 (`cpu` without a GPU), volta_fa runs such calls.
"""

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import volta_fa

warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
WIDTH = 64


class ExistingModel(torch.nn.Module):
    """Causal self-attention as in existing code: it calls scaled_dot_product_attention and does not know volta_fa."""

    def __init__(self, nheads: int = 4):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def split(self, x: torch.Tensor):
        return self.qkv(x).view(x.shape[0], x.shape[1], 3, self.nheads, -1).unbind(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return out.transpose(1, 2).flatten(2)


class Attention(ExistingModel):
    """The same attention by the op. Packages and scripts of it call volta_fa too, whether or not enable_sdpa was on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
        return out.flatten(2)


def models() -> tuple[Attention, ExistingModel]:
    """Returns both models, with the same weights."""
    model, existing = Attention(), ExistingModel()
    existing.load_state_dict(model.state_dict())
    return model, existing


def load_elsewhere(loader: str, *arguments: str | Path) -> None:
    """Runs code in a process that registers the ops, and needs nothing else of volta_fa."""
    start = "import sys, torch\ntorch.ops.load_library(sys.argv[1])\n"
    end = 'assert "volta_fa" not in sys.modules\n'
    subprocess.run([sys.executable, "-c", start + loader + end, volta_fa.library_path(), *arguments], check=True)


def calls(f) -> set[str]:
    """Returns the names of the attention ops that f() runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        f()
    # volta_fa's CPU backend runs PyTorch's operator inside its own
    theirs = {e.name for e in profiler.events() if "scaled_dot_product" in e.name and "volta_fa::" not in getattr(e.cpu_parent, "name", "")}
    return theirs | {e.name for e in profiler.events() if "volta_fa::" in e.name}


def compile_models(folder: Path) -> None:
    # An existing model: call enable_sdpa before the first compilation, because compiled code keeps the attention of that moment.
    (model, existing), x = models(), torch.randn(2, 20, WIDTH)
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

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seqlen in (20, 31):
        x = torch.randn(2, seqlen, WIDTH)
        compiled(x).square().mean().backward()
        print(f"compiled, seqlen {seqlen}: largest difference", (compiled(x) - model(x)).abs().max().item())
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


PACKAGE_LOADER = """
import torch._inductor.codecache  # aoti_load_package of torch 2.10 uses it without importing it
model = torch._inductor.aoti_load_package(sys.argv[2])
print("the package, without the Python package, returns", tuple(model(torch.randn(2, 33, 64)).shape))
"""


def package(folder: Path) -> None:
    model, _ = models()
    program = torch.export.export(model.eval(), (torch.randn(2, 20, WIDTH),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    load_elsewhere(PACKAGE_LOADER, torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "attention.pt2")))


SCRIPT_LOADER = """
x, out, gradient = torch.load(sys.argv[2])
for path in sys.argv[3:]:
    module = torch.jit.load(path)
    for _ in range(3):  # the first runs profile, the later ones are optimized
        module.zero_grad()
        found = module(x)
        found.square().mean().backward()
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(module.qkv.weight.grad, gradient)
"""


def script(folder: Path) -> None:
    (model, existing), x = models(), torch.randn(2, 9, WIDTH)
    expected = existing(x)
    expected.square().mean().backward()
    torch.save((x, expected.detach(), existing.qkv.weight.grad), folder / "example.pt")
    # A scripted module takes inputs of any shape, a traced one those of its example's shape.
    programs = {"scripted": torch.jit.script(model), "traced": torch.jit.trace(model, x)}
    for how, program in programs.items():
        program.save(folder / f"{how}.pt")
    load_elsewhere(SCRIPT_LOADER, folder / "example.pt", *(folder / f"{how}.pt" for how in programs))
    print(" and ".join(programs), "module, loaded without the Python package: out and gradients agree with PyTorch's attention")
    longer = torch.randn(1, 20, WIDTH)
    torch.testing.assert_close(programs["scripted"](longer), existing(longer))


def main():
    parts = {"compile": compile_models, "package": package, "script": script}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--save", metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.parts or parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[name](Path(folder))
    if options.save:
        torch.jit.script(ExistingModel()).save(options.save)
        print("saved", options.save)


if __name__ == "__main__":
    main()
