//! What the families' decode kernels have in common: tiles and shared memory. docs/design/decode.md has what was tried.
//!
//! `block_rows` are queries of all heads of a KV head, `step` those of one warp. Warps beside each other take the same
//! tokens for other rows: of two the second finds the bytes in L1, four share what each loads
//! (csrc/decode/cooperative_loader.cuh). The bytes that an SM has in flight decide the speed, and registers decide these:
//! one step of a warp is eight tokens, 32 * headdim bytes.

use super::{CacheFormat, Family, FeatureSet, Pass, Variant};

/// Shared memory of csrc/decode/block.cuh, bytes: fp32 outputs of warps with other tokens, which the block merges after
/// its loop, in rows padded by four floats. An SM without room for all of them holds half at a time. Besides these, two
/// floats of state for each part of a row, two for the row, and the block's position.
const fn shared_bytes(family: &Family, headdim: u32, block_rows: u32, step: u32, threads: u32) -> u32 {
    let parts = threads / 32 * step / block_rows;
    let outputs = parts * (headdim + 4) * block_rows * 4;
    let at_once = if outputs > family.shared_bytes { outputs / 2 } else { outputs };
    at_once + (parts * 2 + 2) * block_rows * 4 + 256
}

/// Returns a decode kernel over an unquantized cache, whose source the family adds; `rows` are `block_rows` and `step`.
pub const fn decode(
    family: Family,
    name: &'static str,
    headdim: u32,
    rows: [u32; 2],
    threads: u32,
    blocks_per_sm: u32,
    registers: u32,
) -> Variant {
    let [block_rows, step] = rows;
    Variant {
        name,
        family,
        pass: Pass::Decode,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "",
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        shared_bytes: shared_bytes(&family, headdim, block_rows, step, threads),
        blocks_per_sm,
        registers,
    }
}
