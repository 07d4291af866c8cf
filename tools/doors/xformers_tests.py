"""Runs xformers' own tests of its operators on volta_fa, through `volta_fa.enable_xformers()`.

    git clone --depth 1 --branch v0.0.35 https://github.com/facebookresearch/xformers
    python tools/doors/xformers_tests.py xformers --device cpu        # or cuda; more arguments go to pytest

It needs xformers of that release (`pip install --no-deps xformers==0.0.35`), pytest and scipy. The tests choose cases by what an operator
declares. This program puts operators with volta_fa's declarations in the place of xformers' own, and sends calls that name them to the
function that `enable_xformers` patches. The tests, their references and their tolerances are unchanged.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
warnings.simplefilter("ignore")

import pytest
import torch
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias
from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase

import volta_fa
from volta_fa.integrations.xformers import _RULES

#: Tests of results that volta_fa computes. The others are of xformers' dispatcher, its logsumexp and its other kernels.
TESTS = "test_forward or test_backward or test_custom_scale or test_grad_checkpointing or test_empty"
#: In the tests' order of arguments; the rest have no class for the inputs of a test.
BIASES = {name: getattr(attn_bias, name, None) for name in _RULES} | {"None": type(None), "Tensor": torch.Tensor}


def declare(device: str) -> None:
    """Puts operators in the place of xformers' lists, which its tests read."""

    class Declarations:
        OPERATOR = staticmethod(lambda: None)
        SUPPORTED_DEVICES = frozenset({device})
        SUPPORTED_DTYPES = frozenset({torch.float32 if device == "cpu" else torch.float16})
        SUPPORTED_MAX_K = 256
        SUPPORTS_DROPOUT = SUPPORTS_CUSTOM_SCALE = SUPPORTS_DIFFERENT_VALUE_EMBED = SUPPORTS_BMGHK = True
        _TEST_BATCH_SIZES = (1, 7)

        @classmethod
        def is_available(cls) -> bool:
            return True

    class Forward(Declarations, AttentionFwOpBase):
        NAME = "voltaF"
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in BIASES.values() if kind is not None)

    class Backward(Declarations, AttentionBwOpBase):
        NAME = "voltaB"
        SUPPORTS_ATTN_BIAS_GRAD = True
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in Forward.SUPPORTED_ATTN_BIAS_TYPES if not kind.__name__.startswith("Paged"))

    fmha.ALL_FW_OPS[:], fmha.ALL_BW_OPS[:] = [Forward], [Backward]
    volta_fa.enable_xformers(device, force=device != "cpu")
    door = fmha._memory_efficient_attention

    def without_op(inp: Any, op: Any = None) -> torch.Tensor:
        return door(inp, None)

    def forward(query: Any, key: Any, value: Any, bias: Any = None, p: float = 0.0, scale: Any = None, *, op: Any = None) -> torch.Tensor:
        inputs = fmha.Inputs(query=query, key=key, value=value, attn_bias=bias, p=p, scale=scale)
        return without_op(inputs)

    fmha._memory_efficient_attention = without_op
    fmha.memory_efficient_attention_forward = forward
    sys.modules["xformers.ops"].memory_efficient_attention_forward = forward


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of xformers' repository, of the installed release")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments, more = parser.parse_known_args()
    declare(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        # without the checkout's own package, which is not built
        shutil.copytree(arguments.checkout / "tests", Path(folder) / "tests")
        selection = [] if "-k" in more else ["-k", TESTS]
        status = pytest.main([f"{folder}/tests/test_mem_eff_attention.py", "-q", "-p", "no:cacheprovider", *selection, *more])
    print(f"calls: {volta_fa.xformers_stats()}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
