//! The kernel that makes numbers of a quantized KV cache.

use super::{CacheFormat, FeatureSet, Pass, Variant, VOLTA};

/// One for all headdims and formats, which it learns at run time: bound by memory. Four blocks an SM are 1024 threads, each with eight
/// columns at a time. Its step is the longest of the kernels that read what it writes.
pub const DEQUANTIZE: &[Variant] = &[Variant {
    name: "volta_dequantize",
    family: VOLTA,
    pass: Pass::Dequantize,
    needs: FeatureSet::NONE,
    requires: FeatureSet::NONE,
    cache: CacheFormat::Unquantized,
    source: "dequantize/dequantize.cu",
    headdim: 256,
    headdim_v: 256,
    block_rows: 64,
    step: 64,
    threads: 256,
    shared_bytes: 0,
    blocks_per_sm: 4,
    registers: 46,
}];
