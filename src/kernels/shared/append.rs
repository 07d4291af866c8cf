//! The kernels that append to a KV cache, one for each format.

use super::{CacheFormat, Family, Pass, Variant};

/// Returns the kernel that appends to caches of one format, for all headdims: it reads the headdim from its parameters.
/// In decode a block has one token of a KV head and of its query heads, about 400 words of 4 bytes: two for each
/// thread, all in flight at once. Quantizing takes more registers than four blocks an SM would leave.
pub fn append(family: Family, cache: CacheFormat) -> Variant {
    let blocks_per_sm = if cache.is_quantized() { 3 } else { 4 };
    Variant { cache, block_rows: 4, blocks_per_sm, ..Variant::new(family, Pass::Append, "shared/append/append.cu") }
}
