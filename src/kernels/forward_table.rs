//! Forward rows of the variant table, and why their tiles are what they are. Figures and the record of
//! what else was tried: `docs/forward-kernel.md`.

use super::variants::*;

/// `forward_register_q`: 4 warps of 32 rows, steps of 16 keys through a ring of 4 slots whose rows are
/// padded by 8 elements.
const fn register_q(
    name: &'static str,
    headdim: u32,
    headdim_v: u32,
    blocks_per_sm: u32,
) -> Variant {
    let (slots, step, pad) = (4, 16, 8);
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Forward,
        source: "volta/forward_register_q.cu",
        headdim,
        headdim_v,
        block_rows: 128,
        step,
        threads: 128,
        shared_bytes: slots * step * 2 * (headdim + pad + headdim_v + pad),
        blocks_per_sm,
    }
}

/// `forward_shared_q`: 128 rows of Q and one step of 32 keys of K and of V in shared memory.
const fn shared_q(
    name: &'static str,
    headdim: u32,
    headdim_v: u32,
    threads: u32,
    blocks_per_sm: u32,
) -> Variant {
    let (block_rows, step) = (128, 32);
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Forward,
        source: "volta/forward_shared_q.cu",
        headdim,
        headdim_v,
        block_rows,
        step,
        threads,
        shared_bytes: 2 * (headdim * (block_rows + step) + headdim_v * step),
        blocks_per_sm,
    }
}

pub const FORWARD: &[Variant] = &[
    // 168 registers: three blocks fit.
    register_q("volta_fwd_32x32", 32, 32, 3),
    // 64 registers of Q and 64 of output: 250 in all, two blocks.
    register_q("volta_fwd_64x64", 64, 64, 2),
    // 32 rows a warp: 96 and 128 registers of output, 222 and 255 in all; 36 and 48 KB: two blocks.
    shared_q("volta_fwd_96x96", 96, 96, 128, 2),
    shared_q("volta_fwd_128x128", 128, 128, 128, 2),
    // 32 rows of output or of Q would not leave room for two blocks, so 16 rows a warp and 8 warps: the
    // same two warps a scheduler, in one block that shares each tile of K and V. 175 registers; 68 KB.
    shared_q("volta_fwd_192x128", 192, 128, 256, 1),
    // 210 registers, 72 KB.
    shared_q("volta_fwd_192x192", 192, 192, 256, 1),
    // 128 registers of output, 232 in all; exactly the 96 KB that a block can have.
    shared_q("volta_fwd_256x256", 256, 256, 256, 1),
];
