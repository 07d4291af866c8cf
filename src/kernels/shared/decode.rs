//! Rows of decode kernels: tiles and shared memory, which families share. docs/design/decode.md lists experiments.
//!
//! `block_rows` are queries of all heads of a KV head, `step` those of one warp. Warps beside each other take the same
//! tokens for other rows: of two the second finds the bytes in L1, four share what each loads
//! (csrc/decode/cooperative_loader.cuh). The bytes that an SM has in flight decide the speed, and registers decide these:
//! one step of a warp is eight tokens, 32 * headdim bytes.

use super::{CacheFormat, Family, Feature, FeatureSet, Pass, Variant};

/// Warps that share the columns of a row (csrc/decode/column_groups.cuh).
pub const fn column_groups(headdim: u32) -> u32 {
    if headdim > 256 {
        2
    } else {
        1
    }
}

/// Shared memory of csrc/decode/block.cuh, bytes: fp32 outputs of warps with other tokens, which the block merges after
/// its loop, in rows padded by four floats. An SM without room for all of them holds half at a time, or a quarter. `work`: what
/// the loop takes in their place. Besides these, two floats of state for each part of a row, two for the row, and the block's
/// position.
fn shared_bytes(family: &Family, (headdim, [block_rows, step], threads, blocks_per_sm): DecodeTile, work: u32) -> u32 {
    let parts = threads / 32 * step / block_rows / column_groups(headdim);
    let mut outputs = parts * (headdim + 4) * block_rows * 4;
    while outputs * blocks_per_sm > family.shared_bytes {
        outputs /= 2;
    }
    outputs.max(work) + (parts * 2 + 2) * block_rows * 4 + 256
}

/// Shared memory of the loop of a kernel with column groups, bytes: two buffers for the scores of each warp, and where four warps
/// share what they load, two steps of keys and values and half of each warp's eight chunks of queries, or a quarter.
fn wide_work(family: &Family, (headdim, [block_rows, step], threads, _): DecodeTile) -> u32 {
    let shared_chunks = if family.shared_bytes > 65536 { 4 } else { 2 };
    let (warps, loads) = (threads / 32, if block_rows / step == 4 { 2 * 8 * 2 * headdim * 2 + 64 } else { 0 });
    let queries = if loads > 0 && step > 8 { shared_chunks * step / 8 * 512 } else { 0 };
    let sets = warps * step / block_rows / column_groups(headdim);
    sets * loads + warps * (queries + step / 8 * 512)
}

/// The tile of a decode kernel: headdim, rows of a block and of one warp, threads of a block, blocks that an SM must hold.
pub type DecodeTile = (u32, [u32; 2], u32, u32);

/// Returns a decode kernel over caches of one format.
pub fn decode(family: Family, source: &'static str, cache: CacheFormat, tile: DecodeTile) -> Variant {
    let (headdim, [block_rows, step], threads, blocks_per_sm) = tile;
    let work = if column_groups(headdim) > 1 { wide_work(&family, tile) } else { 0 };
    Variant {
        cache,
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        shared_bytes: shared_bytes(&family, tile, work),
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
