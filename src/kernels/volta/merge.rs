//! The kernel that merges attention states.

use super::{CacheFormat, FeatureSet, Pass, Variant, VOLTA};

/// One for all headdims, which it learns at run time: bound by memory. Four blocks an SM have 1024 threads with two
/// 16-byte loads each (fp32: four) at a time.
pub const MERGE: &[Variant] = &[Variant {
    name: "volta_merge",
    family: VOLTA,
    pass: Pass::Merge,
    needs: FeatureSet::NONE,
    requires: FeatureSet::NONE,
    cache: CacheFormat::Unquantized,
    source: "merge/merge.cu",
    headdim: 256,
    headdim_v: 256,
    block_rows: 32,
    step: 0,
    threads: 256,
    shared_bytes: 2 * 32 * 4, // two weights of each row
    blocks_per_sm: 4,
    registers: 48,
}];
