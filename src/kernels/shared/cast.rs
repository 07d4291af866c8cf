//! The kernel that casts bf16 tensors to fp16.

use super::{Family, Pass, Variant};

/// Returns the kernel for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM are 1024 threads, each
/// with 16 bytes of two rows at a time.
pub fn cast(family: Family) -> Variant {
    Variant { block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Cast, "shared/cast/cast.cu") }
}
