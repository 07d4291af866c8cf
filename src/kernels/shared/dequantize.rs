//! The kernel that dequantizes a KV cache.

use super::{CacheFormat, Family, FeatureSet, Pass, Variant};

/// Returns the kernel for all headdims and formats, which it reads from its parameters. Memory bounds it: four blocks
/// an SM are 1024 threads, each with eight columns at a time. Its step is the longest of the kernels that read its output.
pub const fn dequantize(family: Family, name: &'static str, registers: u32) -> Variant {
    Variant {
        name,
        family,
        pass: Pass::Dequantize,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "shared/dequantize/dequantize.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 64,
        threads: 256,
        shared_bytes: 0,
        blocks_per_sm: 4,
        registers,
    }
}
