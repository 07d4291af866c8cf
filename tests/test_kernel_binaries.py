"""What the embedded machine code promises: no spills, the declared occupancy, a library of bounded size.

That each kernel's parameter block has the size of the Rust struct is checked on the cubins in tests/kernels.rs.
"""

import os

import pytest

from conftest import INFO, LIBRARY

# A V100's streaming multiprocessor.
REGISTERS = 64 * 1024
SHARED_BYTES = 96 * 1024
WARPS = 64
# Registers are handed out to a warp in units of 256, that is 8 a thread.
REGISTER_UNIT = 8

variants = pytest.mark.parametrize("variant", INFO["variants"], ids=lambda v: v["name"])


def test_there_are_kernels_for_both_passes():
    passes = {v["pass"] for v in INFO["variants"]}
    assert {"Forward", "Backward"} <= passes
    assert len({v["name"] for v in INFO["variants"]}) == len(INFO["variants"])


@variants
def test_no_spills(variant):
    assert variant["spill_bytes"] == 0


@variants
def test_occupancy(variant):
    registers = -(-variant["registers"] // REGISTER_UNIT) * REGISTER_UNIT
    blocks = variant["blocks_per_sm"]
    assert blocks * variant["threads"] * registers <= REGISTERS
    assert blocks * variant["shared_bytes"] <= SHARED_BYTES
    assert blocks * variant["threads"] <= WARPS * 32


@variants
def test_parameters_fit_the_constant_bank(variant):
    assert 0 < variant["params_bytes"] <= 4096


@pytest.mark.parametrize("pass_", ["Forward", "Backward", "BackwardKeys", "BackwardQueries", "BackwardPrepare", "BackwardFinish"])
def test_every_headdim_is_covered(pass_):
    mine = [v for v in INFO["variants"] if v["pass"] == pass_]
    assert max(v["headdim"] for v in mine) >= 256 and max(v["headdim_v"] for v in mine) >= 256


def test_library_size():
    assert os.path.getsize(LIBRARY) <= 40 * 2**20
