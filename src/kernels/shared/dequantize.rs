//! The kernel that dequantizes a KV cache.

use super::{Family, Pass, Variant};

/// Returns the kernel for all headdims and formats, which it reads from its parameters. Memory bounds it: four blocks
/// an SM are 1024 threads, each with eight columns at a time. Its step is the longest of the kernels that read its output.
pub fn dequantize(family: Family) -> Variant {
    Variant { block_rows: 64, step: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Dequantize, "shared/dequantize/dequantize.cu") }
}
