//! The kernels that append to a KV cache, one for each format.

use super::{CacheFormat, Family, FeatureSet, Pass, Variant};

/// Returns a kernel that appends to caches of one format, for all headdims: it reads the headdim from its parameters.
/// In decode a block has one token of a KV head and of its query heads, about 400 words of 4 bytes: two for each
/// thread, all in flight at once. Quantizing takes more registers than four blocks an SM would leave.
pub const fn append(family: Family, cache: CacheFormat, name: &'static str, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant {
        name,
        family,
        pass: Pass::Append,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache,
        source: "shared/append/append.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 4,
        step: 0,
        threads: 256,
        shared_bytes: 0,
        blocks_per_sm,
        registers,
    }
}
