//! The forward kernels, and why their tiles are what they are. Figures: `docs/forward-kernel.md`. `registers` comes last in each
//! row, of the 255 that one thread can have.

use super::{Needs, Pass, Variant, TURING};

/// `turing/forward/pipelined`: 4 warps, steps of 16 keys through a ring of 8 slots. 32 KB, so that two blocks fill an SM's shared
/// memory.
const fn pipelined(name: &'static str, headdim: u32, block_rows: u32, registers: u32) -> Variant {
    let (slots, step) = (8, 16);
    Variant {
        name,
        family: TURING,
        pass: Pass::Forward,
        needs: Needs::NONE,
        source: "turing/forward/pipelined.cu",
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads: 128,
        shared_bytes: slots * step * 2 * 2 * headdim,
        blocks_per_sm: 2,
        registers,
    }
}

/// 48 rows a warp: a fragment of K or V that a warp reads serves three products, and shared memory is half as fast as Volta's.
const LARGE: Variant = pipelined("turing_fwd_64x64", 64, 192, 235);

pub const FORWARD: &[Variant] = &[
    LARGE,
    // 16 rows a warp, for grids that would leave SMs idle
    pipelined("turing_fwd_64x64_small", 64, 64, 117),
    LARGE.covering(Needs::RAGGED, "turing_fwd_ragged_64x64", 240),
    // 32 rows a warp: 48 are 254 registers, without spills and a quarter slower
    Variant { block_rows: 128, ..LARGE }.covering(Needs::GENERAL, "turing_fwd_general_64x64", 194),
];
