"""Runs transformers with volta_fa as Hugging Face's `kernels` loads it from a folder of `make hub`, and compares with eager attention.

    python tools/programs/hub.py dist/hub
    python tools/programs/hub.py dist/hub --device cuda

Needs kernels 0.17.2 and a transformers that accepts it (5.18 to 5.22 do), but no network: the models are small and random.

Compares logits and gradients of a padded Llama and of gpt-oss, whose sinks and windows reach the kernel as `s_aux` and `window_size`,
and generates with both. Exits with 1 if an error is more than twice that of eager attention in the same dtype (gradients: three times),
limits of flash-attn's tests, or if get_kernel gives another module."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import torch

#: Name on the hub. The variable LOCAL_KERNELS makes it mean the folder.
REPOSITORY = "volta-fa-test/volta-fa"
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def models():
    """Yields a name and a small random model in fp64 with eager attention."""
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

    for name, config in (
        ("Llama", LlamaConfig(**SMALL)),
        ("gpt-oss", GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)),
    ):
        torch.manual_seed(0)
        # grouped matrix products of experts have no fp64
        yield name, AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").double()


def results(model, ids, mask, implementation: str):
    """Returns in fp64 the logits of real tokens, and the gradient of the query projection of the first layer.

    Without a mask, each sequence runs alone, without padding: in fp64, eager attention gives NaN for padded queries."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    if mask is None:
        logits = torch.cat([model(input_ids=sequence[None]).logits[0] for sequence in ids])
    else:
        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    logits.to(torch.promote_types(logits.dtype, torch.float32)).square().mean().backward()
    return logits.detach().double(), model.model.layers[0].self_attn.q_proj.weight.grad.double()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `make hub` made")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={arguments.folder.resolve()}"

    import kernels
    import transformers

    print(f"kernels {kernels.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    module = kernels.get_local_kernel(arguments.folder.resolve())
    same = kernels.get_kernel(REPOSITORY, version=1, check_arch=False) is module
    print(f"{module.__file__}: get_kernel by LOCAL_KERNELS gives the same module: {same}")

    dtype = torch.float16 if arguments.device == "cuda" else torch.float32
    ids = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1)).to(arguments.device)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    failed = not same
    for name, wide in models():
        wide = wide.to(arguments.device)
        narrow = copy.deepcopy(wide).to(dtype)
        narrow.set_attn_implementation(REPOSITORY, allow_all_kernels=True)
        exact = results(wide, [row[used.bool()] for row, used in zip(ids, mask)], None, "eager")
        ours = results(narrow, ids, mask, REPOSITORY)
        eager = results(narrow, ids, mask, "eager")
        for what, factor, expected, found, theirs in zip(("logits", "gradient"), (2, 3), exact, ours, eager):
            error, eager_error = ((t - expected).abs().max().item() for t in (found, theirs))
            wrong = not error <= factor * eager_error
            failed |= wrong
            print(f"{name:8} {what:9} error {error:.2e}, eager's {eager_error:.2e}{'  WRONG' if wrong else ''}")
        tokens = {}
        for implementation in (REPOSITORY, "eager"):
            narrow.set_attn_implementation(implementation)
            tokens[implementation] = narrow.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
        equal = (tokens[REPOSITORY] == tokens["eager"]).all(dim=1).sum().item()
        print(f"{name:8} generate: {equal} of {len(ids)} sequences equal eager's")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
