//! The kernel that appends to a KV cache.

use super::{CacheFormat, Needs, Pass, Variant, VOLTA};

/// One for all headdims, which it learns at run time. In decode a block has a token of a key head and of its query heads, some 400 words
/// of 4 bytes: two for each thread, all in flight at once. (Three blocks: quantising takes more registers than four would have.)
pub const APPEND: &[Variant] = &[Variant {
    name: "volta_append",
    family: VOLTA,
    pass: Pass::Append,
    needs: Needs::NONE,
    requires: Needs::NONE,
    cache: CacheFormat::Float,
    source: "append/append.cu",
    headdim: 256,
    headdim_v: 256,
    block_rows: 4,
    step: 0,
    threads: 256,
    shared_bytes: 0,
    blocks_per_sm: 3,
    registers: 80,
}];
