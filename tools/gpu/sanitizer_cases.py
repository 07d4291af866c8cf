"""Runs each kernel under compute-sanitizer, which finds wrong memory accesses and races. tools/gpu/validate.sh calls it.

    compute-sanitizer --tool memcheck python tools/gpu/sanitizer_cases.py
    ... --kernels 'turing_bwd_*'          kernels that match a pattern
    ... --device simulator                without a GPU, to try this script

The problems are those of `python -m volta_fa check`, which forces each kernel in turn in place of the planner's choice. Uses the library in
python/volta_fa. Exits with 1 if a result is wrong or a kernel does not run. The sanitizer reports everything else."""

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from volta_fa.check import correctness, kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="each kernel of such a name in turn (default: all)")
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    target = kernels.Target.of(arguments.device)  # the device, with its capability
    variants = kernels.wanted(target, json.loads(torch.ops.volta_fa._info())["variants"])  # those that the device runs
    chosen = [v for v in variants if fnmatchcase(v["name"], arguments.kernels)]
    problems = 0  # that ran
    for variant in chosen:
        result = correctness.check_kernel(target, variant, seed=0)
        problems += result.problems
        for text in (*result.failures, *result.inconclusive):
            print(f"{variant['name']}: {text}")
        if not result.passed:  # it has a failure, or a problem that could not be checked
            return 1
    print(f"{len(chosen)} kernels, {problems} problems")
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
