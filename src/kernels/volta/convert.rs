//! The kernel that makes numbers of a quantised KV cache.

use super::{CacheFormat, Needs, Pass, Variant, VOLTA};

/// One for all headdims and formats, which it learns at run time: bound by memory. Four blocks an SM are 1024 threads, each with eight
/// columns at a time. Its step is the longest of the kernels that read what it writes.
pub const CONVERT: &[Variant] = &[Variant {
    name: "volta_convert",
    family: VOLTA,
    pass: Pass::Convert,
    needs: Needs::NONE,
    requires: Needs::NONE,
    cache: CacheFormat::Float,
    source: "convert/convert.cu",
    headdim: 256,
    headdim_v: 256,
    block_rows: 64,
    step: 64,
    threads: 256,
    shared_bytes: 0,
    blocks_per_sm: 4,
    registers: 46,
}];
