"""Launches small forward and backward problems for compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/gpu/sanitizer_cases.py            kernels as the planner selects them
    compute-sanitizer --tool memcheck python tools/gpu/sanitizer_cases.py --kernels  each kernel, forced
    ... --kernels 'turing_bwd_*'                                                     kernels that match a pattern

Without --kernels: odd sizes, masks, GQA, packed sequences, every feature and both backward modes.
With --kernels: the problems of `python -m volta_fa check`. Uses the library in python/volta_fa for this torch.
Exits non-zero if a result is not finite or a kernel does not run. The sanitizer reports everything else.
"""

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[2] / "python/volta_fa"


def every_kernel(pattern: str) -> int:
    sys.path.insert(0, str(PACKAGE.parent))
    from volta_fa.check import cached, int8_scores, kernels
    from volta_fa.check.problems import Inputs

    target = kernels.Target.of("cuda:0")
    variants = json.loads(torch.ops.volta_fa._info())["variants"]
    chosen = [v for v in kernels.wanted(target, variants) if v["pass"] != "Merge" and fnmatchcase(v["name"], pattern)]
    launches = 0
    for variant in chosen:
        if variant["pass"] in int8_scores.PASSES:
            launches += fast_forward(target, variant)
            continue
        with_cache = variant["pass"] in cached.PASSES
        for problem in (cached if with_cache else kernels).problems(variant):
            if with_cache:
                planned = [kernel["name"] for kernel in cached.planned(target, problem, variant)]
            else:
                planned = target.planned(problem, variant)
            if variant["name"] not in planned:
                print(f"the plan takes {', '.join(planned)} instead of {variant['name']}: {problem}")
                return 1
            with target.running(variant):
                if with_cache:
                    found = [cached.run(cached.draw(problem, 0, target.device))["out"]]
                else:
                    inputs = Inputs.draw(problem, 0, target.device)
                    out, lse, rng_state = inputs.forward(torch.Generator("cuda").manual_seed(0))
                    found = [out] if variant["pass"] in kernels.FORWARD else list(inputs.gradients(out, lse, rng_state).values())
            if not all(torch.isfinite(x.cpu()).all() for x in found):
                print(f"not finite: {variant['name']}, {problem}")
                return 1
            launches += 1
    print(f"{len(chosen)} kernels, {launches} problems")
    return 0 if chosen else 1


def fast_forward(target, variant: dict) -> int:
    """Runs the problems of a kernel of `fwd_fast`, and returns their number."""
    from volta_fa.check import int8_scores

    problems = int8_scores.problems(variant)
    with target.running(variant):
        for problem in problems:
            inputs = int8_scores.FastInputs.draw(problem, 0)
            inputs.prepare(target)
            inputs.forward(target)
    return len(problems)


def cases() -> int:
    variants = json.loads(torch.ops.volta_fa._info())["variants"]
    sizes = sorted({(v["headdim"], v["headdim_v"]) for v in variants if v["pass"] == "Forward"})

    def tensor(*shape: int) -> torch.Tensor:
        # torch.randn launches kernels of its own on fresh memory; a copy from the CPU initializes every byte
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()
        return x.cuda()

    def problems(d: int, dv: int):
        """Returns q, k, v and options."""
        for seqlen_q, seqlen_k, options in [
            (113, 255, {}),
            (77, 33, {"is_causal": True}),
            (130, 257, {"is_causal": True, "window_left": 40}),
        ]:
            yield tensor(1, seqlen_q, 2, d), tensor(1, seqlen_k, 1, d), tensor(1, seqlen_k, 1, dv), options

        ints = {
            "cu_seqlens_q": [0, 5, 5, 90, 107],
            "cu_seqlens_k": [0, 3, 43, 43, 193],
            "seqused_k": [3, 20, 0, 149],
        }
        packed = {name: torch.tensor(values, dtype=torch.int32).cuda() for name, values in ints.items()}
        packed.update(max_seqlen_q=100, max_seqlen_k=150, is_causal=True)
        yield tensor(107, 2, d), tensor(193, 1, d), tensor(193, 1, dv), packed
        slopes = torch.tensor([0.5, 0.1]).cuda()
        yield tensor(107, 2, d), tensor(193, 1, d), tensor(193, 1, dv), {**packed, "dropout_p": 0.3, "alibi_slopes": slopes}

        dense = tensor(1, 77, 2, d), tensor(1, 131, 1, d), tensor(1, 131, 1, dv)
        yield *dense, {"softcap": 3.0, "sinks": tensor(2), "window_left": 50, "attn_bias": tensor(1, 2, 77, 131)}
        yield *dense, {"dropout_p": 0.3, "attn_bias": tensor(1, 1, 1, 131).float()}
        yield *dense, {"is_causal": True, "attn_bias": tensor(1, 1, 77, 131) > -1}

    count = 0
    for headdim, headdim_v in sizes:
        for d, dv in {(headdim, headdim_v), (headdim - 8, headdim_v - 8)}:
            for q, k, v, options in problems(d, dv):
                out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **options)
                bias = options.get("attn_bias")
                of_backward = {"rng_state": rng_state, "attn_bias_requires_grad": bias is not None and bias.dtype != torch.bool}
                for deterministic in (False, True):
                    gradients = torch.ops.volta_fa.bwd(
                        torch.ones_like(out), q, k, v, out, lse, deterministic=deterministic, **of_backward, **options
                    )
                    if not all(torch.isfinite(x.cpu()).all() for x in (out, *gradients) if x is not None):
                        given = {name: value.shape if isinstance(value, torch.Tensor) else value for name, value in options.items()}
                        print(f"not finite: headdim {d}, {dv}, seqlens {q.size(-3)}, {k.size(-3)}, {given}, {deterministic=}")
                        return 1
                    count += 1
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        states = [t for _ in range(2) for t in (tensor(2, 77, 3, 40).to(dtype), tensor(2, 3, 77).float())]
        if not all(torch.isfinite(x.cpu()).all() for x in torch.ops.volta_fa.merge_attention_states(*states)):
            print(f"not finite: merge_attention_states of {dtype}")
            return 1
    torch.cuda.synchronize()
    print(f"{count} backward passes, with their forward ones")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="?", const="*", metavar="PATTERN", help="each kernel of such a name in turn (default: all)")
    arguments = parser.parse_args()
    library = PACKAGE / f"torch-{'.'.join(torch.__version__.split('.')[:2])}" / "libvolta_fa.so"
    torch.ops.load_library(library)
    return cases() if arguments.kernels is None else every_kernel(arguments.kernels)


if __name__ == "__main__":
    sys.exit(main())
