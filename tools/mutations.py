"""Applies deliberate defects one at a time and checks that the short test suite catches each.

    python tools/mutations.py [--python] [--only TEXT] > table.md

A defect is a file, a text that the file contains once, the text that replaces it, and the tests that must fail. The script rebuilds
after a change outside Python and restores the file in every case. A defect in a header of csrc/ compiles every kernel
that includes it. Run it in a checkout without other changes: it edits files in place.
Exits with status 1 if a defect survives or does not apply.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = (["cargo", "build", "--release", "--locked", "--features", "sim", "--quiet"], [sys.executable, "tools/build_shims.py"])


class Mutation(NamedTuple):
    """A defect and the tests that must catch it: a file of tests/ and pytest's -k expression."""

    path: str
    old: str
    new: str
    tests: str
    selection: str


PY, T = "python/volta_fa", "tests"
MUTATIONS = [
    # Python
    Mutation(f"{PY}/rotary.py", "x0 * cos - x1 * sin", "x0 * cos + x1 * sin", f"{T}/test_flash_attn_layers.py", "rotary"),
    Mutation(f"{PY}/rotary.py", "sin = -sin", "sin = sin", f"{T}/test_flash_attn_layers.py", "rotary"),
    Mutation(f"{PY}/bert_padding.py", "F.pad(seqlens.cumsum(0", "F.pad(seqlens.flip(0).cumsum(0",
             f"{T}/test_flash_attn_layers.py", "pad"),
    Mutation(f"{PY}/bert_padding.py", ".arange(attention_mask_in_length.shape[-1], device=tokens.device) <",
             ".arange(attention_mask_in_length.shape[-1], device=tokens.device) <=", f"{T}/test_flash_attn_layers.py", "pad"),
    Mutation(f"{PY}/flops.py", "return batch * nheads * seqlen_q * k.shape[1]", "return batch * nheads * seqlen_q * seqlen_q",
             f"{T}/test_routes.py", "flops"),
    Mutation(f"{PY}/distributed/plan.py", "2 * size - 1 - rank", "2 * size - 2 - rank", f"{T}/test_distributed.py", ""),
    Mutation(f"{PY}/distributed/plan.py", "joined[-1][1] == begin", "joined[-1][1] <= begin", f"{T}/test_distributed.py", ""),
    Mutation(f"{PY}/kv_cache/cascade.py", "merge_attention_states(own, own_lse, shared, shared_lse)",
             "merge_attention_states(own, own_lse, own, own_lse)", f"{T}/test_kvcache_api.py", "cascade"),
    Mutation(f"{PY}/operators.py", "merge_attention_states(out_a, softmax_lse_a, out_b, softmax_lse_b)\n    return",
             "merge_attention_states(out_a, softmax_lse_b, out_b, softmax_lse_a)\n    return", f"{T}/test_merge.py", "python_function"),
    Mutation(f"{PY}/integrations/transformers/mask_rule.py", "max(a, b) if min(a, b) < 0 else min(a, b)", "max(a, b)",
             f"{T}/test_transformers.py", "two_patterns"),
    # validation
    Mutation("src/problem/score_function.rs", "o.dropout_p > 0.0", "o.dropout_p > 1e9", f"{T}/test_validation.py", ""),
    Mutation("src/problem/scores.rs", "if o.is_causal && o.window_right > 0", "if o.is_causal && o.window_right > 1",
             f"{T}/test_validation.py", ""),
    Mutation("src/problem/scores.rs", "right: if o.is_causal { Some(0) }", "right: if o.is_causal { Some(1) }",
             f"{T}/test_forward_backward.py", "causal and cpu"),
    # CPU backend
    Mutation("src/ops/cpu/scores.rs", "[rows[0] + a.seqlen_k - a.seqlen_q, rows[1]]", "[rows[0], rows[1]]",
             f"{T}/test_features.py", "alibi and cpu"),
    Mutation("src/ops/cpu/scores.rs", "bias.f_logical_not()?", "bias", f"{T}/test_features.py", "cpu"),
    Mutation("src/ops/cpu/scores.rs", "let (entry, key_head) = (group / part.a.nheads_k, group % part.a.nheads_k);",
             "let (entry, key_head) = (group / part.a.nheads_k, 0 * group);", f"{T}/test_features.py", "bias and cpu"),
    Mutation("src/ops/dropout.rs", "0xD251_1F53", "0xD251_1F55", f"{T}/test_features.py", "philox"),
    # plan
    Mutation("src/plan/forward.rs", "(shape.is_causal != Some(false) ||", "(shape.is_causal == Some(false) ||",
             f"{T}/test_stream_k.py", ""),
    Mutation("src/plan/forward.rs", "let small = if large.1 == Reason::Tuned { None }", "let small = if large.1 != Reason::Tuned { None }",
             f"{T}/test_variants.py", "fwd and small"),
    # kernels
    Mutation("csrc/mask.cuh", "key <= row + high && key < seqlen_k", "key < row + high && key < seqlen_k",
             f"{T}/test_variants.py", "volta_bwd_64 and causal"),
    Mutation("csrc/forward/scores.cuh", "(j < first || j > last)", "(j < first || j >= last)",
             f"{T}/test_variants.py", "volta_fwd_64 and causal"),
    Mutation("csrc/score_mod.cuh", "return fmaf(-slope, fabsf(distance), x);", "return fmaf(slope, fabsf(distance), x);",
             f"{T}/test_variants.py", "alibi"),
    Mutation("csrc/philox.cuh", "0xD2511F53ull", "0xD2511F55ull", f"{T}/test_features.py", "sim and dropout"),
]  # fmt: skip


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in the checkout."""
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def build() -> str:
    """Builds the library. Returns the error, or an empty text."""
    return next((done.stderr for done in map(run, BUILD) if done.returncode), "")


def attempt(mutation: Mutation) -> str:
    """Applies a mutation, runs its tests and restores the file. Returns the result for the table."""
    path = REPOSITORY / mutation.path
    before = path.read_text()
    if before.count(mutation.old) != 1:
        return f"does not apply: {before.count(mutation.old)} places"
    python = path.suffix == ".py"
    try:
        path.write_text(before.replace(mutation.old, mutation.new))
        if not python and build():
            return "caught by the compiler"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not slow", mutation.tests]
        code = run([*command, "-k", mutation.selection] if mutation.selection else command).returncode
        return {0: "SURVIVED", 1: "caught"}.get(code, f"pytest's status {code}")
    finally:
        path.write_text(before)


def main() -> int:
    """Prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="store_true", help="only the mutations that need no build")
    parser.add_argument("--only", default="", help="only mutations of paths with this text")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in m.path and (m.path.endswith(".py") or not arguments.python)]
    print("| file | defect | tests | result |\n|---|---|---|---|", flush=True)
    good = True
    for mutation in chosen:
        result = attempt(mutation)
        good &= result.startswith("caught")
        defect = " to ".join(f"`{' '.join(text.split())}`".replace("|", r"\|") for text in (mutation.old, mutation.new))
        print(f"| `{mutation.path}` | {defect} | `{mutation.tests}` {mutation.selection} | {result} |", flush=True)
    if any(not m.path.endswith(".py") for m in chosen):
        build()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
