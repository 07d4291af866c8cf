"""Runs models with volta_fa's fast attention, whose scores are int8, and compares their final output with fp64, exact and eager attention.

    python tools/programs/fast_models.py                          # small models of diffusers' classes on the CPU
    python tools/programs/fast_models.py --device cuda            # models of real width
    python tools/programs/fast_models.py --minilm FOLDER          # also MiniLM with its weights, from a folder that transformers reads

It needs diffusers. Weights of diffusers' models are random; queries and keys without a norm get scores of standard deviation 2. Columns
are relative L1 errors of the output in fp16: eager attention, `enable_sdpa()`, `enable_sdpa(precision="fast")`, and diffusers' backend
`sage` on volta_fa's sageattention. `calls` and `fell back` count those of "fast". The script fails if a call does not run where it
should, or if the error of an output with int8 scores is more than LIMIT."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import volta_fa

volta_fa.install_sageattention_shim()  # before diffusers looks for it

# flux() and the like return the arguments of Model; build(): a float32 module and its inputs; forward(): its output
from diffusers_models import LARGE, Model, build, cast, flux, forward, sd3, sdxl, wan

#: Allowed relative L1 error (sum of |error| by sum of |exact|) of a model's output. A call of `fwd_fast` has about 1%.
LIMIT = 0.05


def models(device: str) -> list[Model]:
    if device == "cuda":
        return [model for model in LARGE if "vae" not in model.name]
    # heads of the released models' width, one or two of them
    return [
        Model("flux", **flux(heads=2, headdim=128, layers=1, tokens=256, text=32, axes=(16, 56, 56), width=64)),
        Model("sd3", **sd3(heads=2, headdim=64, layers=2, side=32, text=40, width=64, dual=(0,))),
        Model("sdxl-unet", **sdxl(channels=(64, 128), heads=(1, 2), blocks=(1, 2), side=32, width=64)),
        Model("wan", **wan(heads=2, headdim=128, layers=2, frames=3, height=16, width=16, text=40)),
    ]


def spread_scores(module: torch.nn.Module) -> None:
    """Gives scores a standard deviation of about 2 in layers that do not norm queries and keys. PyTorch's initialization gives nearly 0.

    Queries and keys get a variance of 2, so the sum of their headdim products has a deviation of 2 * headdim ** 0.5."""
    normed = {name.rpartition(".")[0] for name, _ in module.named_modules() if name.endswith("norm_q")}
    generator = torch.Generator(next(module.parameters()).device).manual_seed(3)
    for name, weight in module.named_parameters():
        if name.endswith(("to_q.weight", "to_k.weight")) and name.rsplit(".", 2)[0] not in normed:
            weight.data.normal_(std=(2 / weight.shape[1]) ** 0.5, generator=generator)


def relative_l1(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs().sum() / expected.abs().sum()).item()


def compare(name: str, run, module, device: str, dispatches: bool) -> bool:
    """Prints a row. Returns whether it is right. `run` returns the output of a module for inputs of a dtype.

    `dispatches`: whether set_attention_backend reaches all of the module's attention."""
    force = device == "cuda"  # on GPUs newer than Turing too
    with torch.no_grad():
        expected = run(copy.deepcopy(module).double(), torch.float64).double()
        module = module.half()
        errors: dict[str, float] = {}
        with sdpa_kernel(SDPBackend.MATH):
            errors["eager"] = relative_l1(run(module, torch.float16), expected)
        with volta_fa.sdpa_enabled(device, force=force):
            errors["exact"] = relative_l1(run(module, torch.float16), expected)
        volta_fa.sdpa_stats(reset=True)
        with volta_fa.sdpa_enabled(device, force=force, precision="fast"):
            errors["fast"] = relative_l1(run(module, torch.float16), expected)
        stats = volta_fa.sdpa_stats()
        right = stats["ran"] == stats.get("fast", 0) > 0 and errors["fast"] <= LIMIT
        if dispatches:
            module.set_attention_backend("sage")  # volta_fa's stand-in for sageattention serves it
            errors["sage"] = relative_l1(run(module, torch.float16), expected)
            module.set_attention_backend("native")  # for the next model: diffusers also keeps a backend of the process
            right &= errors["sage"] <= LIMIT
    cells = " ".join(f"{errors[column]:9.5f}" if column in errors else f"{'':9}" for column in ("eager", "exact", "fast", "sage"))
    fell_back = ", ".join(f"{n} {reason}" for reason, n in stats["fell_back"].items())
    print(f"{name:12} {cells} {stats.get('fast', 0):5} {fell_back:12} {'' if right else 'WRONG'}".rstrip(), flush=True)
    return right


def minilm(folder: str, device: str) -> bool:
    """Compares sentence embeddings, the mean of the last layer over tokens."""
    from transformers import AutoModel, AutoTokenizer

    sentences = [
        "The cat sat on the mat and watched the rain run down the window.",
        "A GeForce card of the Turing generation multiplies int8 matrices four times as fast as half precision ones.",
        "Where is the railway station?",
        "Attention weights are the softmax of scaled products of queries and keys; the output is the mean of the values. " * 6,
    ]
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt").to(device)
    module = AutoModel.from_pretrained(folder, attn_implementation="sdpa").to(device).eval()

    def run(module, dtype):
        mask = tokens["attention_mask"][..., None]
        return (module(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)

    return compare("MiniLM", run, module, device, dispatches=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="models, comma-separated")
    parser.add_argument("--minilm", help="folder with MiniLM's weights and tokenizer")
    options = parser.parse_args()
    print(f"{'model':12} {'eager':>9} {'exact':>9} {'fast':>9} {'sage':>9} {'calls':>5} fell back")
    right, start = True, time.monotonic()
    found = [m for m in models(options.device) if not options.only or m.name in options.only.split(",")]
    if not found:
        parser.error(f"--only: got {options.only}, expected one of {', '.join(m.name for m in models(options.device))}")
    for model in found:
        module, inputs = build(model, options.device)
        spread_scores(module)
        right &= compare(model.name, lambda m, t, inputs=inputs: forward(m, cast(inputs, t)), module, options.device, model.dispatches)
    if options.minilm:
        right &= minilm(options.minilm, options.device)
    print(f"{time.monotonic() - start:.0f} s", "" if right else "WRONG")
    return not right


if __name__ == "__main__":
    sys.exit(main())
