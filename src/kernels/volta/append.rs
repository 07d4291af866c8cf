//! The kernels that append to a KV cache, one for each kind of cache.

use super::{CacheFormat, FeatureSet, Pass, Variant, VOLTA};

/// For all headdims, which a kernel learns at run time. In decode a block has a token of a key head and of its query heads, some 400 words
/// of 4 bytes: two for each thread, all in flight at once. (Three blocks: quantizing takes more registers than four would have.)
const fn append(cache: CacheFormat, name: &'static str, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Append,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache,
        source: "append/append.cu",
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

pub const APPEND: &[Variant] = &[
    append(CacheFormat::Unquantized, "volta_append", 4, 48),
    append(CacheFormat::Int8, "volta_append_int8", 3, 80),
    append(CacheFormat::Int4, "volta_append_int4", 3, 80),
    append(CacheFormat::E5m2, "volta_append_e5m2", 3, 80),
    append(CacheFormat::E4m3, "volta_append_e4m3", 3, 80),
];
