//! The kernel that merges attention states.

use super::{CacheFormat, Family, FeatureSet, Pass, Variant};

/// Returns the kernel for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM are
/// 1024 threads with two 16-byte loads each (fp32: four) at a time.
pub const fn merge(family: Family, name: &'static str, registers: u32) -> Variant {
    let block_rows = 32;
    Variant {
        name,
        family,
        pass: Pass::Merge,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "shared/merge/merge.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows,
        step: 0,
        threads: 256,
        shared_bytes: 2 * block_rows * 4, // two weights of each row
        blocks_per_sm: 4,
        registers,
    }
}
