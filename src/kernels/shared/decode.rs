//! Rows of decode kernels: tiles and shared memory, which families share. docs/design/decode.md lists experiments.
//!
//! `block_rows` are queries of all heads of a KV head, `step` those of one warp. Warps beside each other take the same
//! tokens for other rows: of two the second finds the bytes in L1, four share what each loads
//! (csrc/decode/cooperative_loader.cuh). The bytes that an SM has in flight decide the speed, and registers decide these:
//! one step of a warp is eight tokens, 32 * headdim bytes.

use super::{CacheFormat, Family, Feature, FeatureSet, Pass, Variant};

/// Shared memory of csrc/decode/block.cuh, bytes: fp32 outputs of warps with other tokens, which the block merges after
/// its loop, in rows padded by four floats. An SM without room for all of them holds half at a time. Besides these, two
/// floats of state for each part of a row, two for the row, and the block's position.
fn shared_bytes(family: &Family, headdim: u32, block_rows: u32, step: u32, threads: u32) -> u32 {
    let parts = threads / 32 * step / block_rows;
    let outputs = parts * (headdim + 4) * block_rows * 4;
    let at_once = if outputs > family.shared_bytes { outputs / 2 } else { outputs };
    at_once + (parts * 2 + 2) * block_rows * 4 + 256
}

/// The tile of a decode kernel: headdim, rows of a block and of one warp, threads of a block, blocks that an SM must hold.
pub type DecodeTile = (u32, [u32; 2], u32, u32);

/// Returns a decode kernel over caches of one format.
pub fn decode(family: Family, source: &'static str, cache: CacheFormat, tile: DecodeTile) -> Variant {
    let (headdim, [block_rows, step], threads, blocks_per_sm) = tile;
    Variant {
        cache,
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        shared_bytes: shared_bytes(&family, headdim, block_rows, step, threads),
        blocks_per_sm,
        ..Variant::new(family, Pass::Decode, source)
    }
}

/// Returns the kernels with a tree mask (csrc/decode/tree.cuh), of these rows. Draft tokens have a tile of 16 rows or more.
pub fn with_tree(rows: impl Iterator<Item = Variant>) -> impl Iterator<Item = Variant> {
    const TREE: FeatureSet = FeatureSet::of(&[Feature::Tree]);
    // a row has its draft tokens in shared memory, 8 bytes
    let tree = |row: Variant| Variant { required_features: TREE, shared_bytes: row.shared_bytes + 8 * row.block_rows, ..row };
    rows.filter(|row| row.block_rows > 8).map(move |row| tree(row).with_features(TREE))
}

/// Returns kernels over unquantized caches, first in fp16, then in bf16.
pub fn in_both_types(rows: impl Iterator<Item = Variant>) -> Vec<Variant> {
    let rows: Vec<_> = rows.collect();
    let bf16 = rows.iter().map(|&row| Variant { is_bf16: true, ..row });
    rows.iter().copied().chain(bf16).collect()
}
