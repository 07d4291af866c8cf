//! The kernel that merges attention states.

use super::{Family, Pass, Variant};

/// Returns the kernel for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM are
/// 1024 threads with two 16-byte loads each (fp32: four) at a time.
pub fn merge(family: Family) -> Variant {
    let block_rows = 32;
    let shared_bytes = 2 * block_rows * 4; // two weights of each row
    Variant { block_rows, shared_bytes, blocks_per_sm: 4, ..Variant::new(family, Pass::Merge, "shared/merge/merge.cu") }
}
