//! The family's instruction set and resources.

use super::super::variants::{Family, Pass, Scratch};

/// Compute capability 7.0 and 7.2, and through PTX every newer GPU whose shared memory is large enough.
pub const VOLTA: Family = Family {
    name: "volta",
    sm: 70,
    native: &[70, 72],
    shared_bytes: 96 * 1024,
    threads: 2048, // of an SM
    // csrc/volta/backward/row_stats.cuh
    scratch: Some(Scratch {
        row_rounding: 32,
        group_rows: 4,
        group_floats: 16,
        // every value is there twice: these are the first copies
        neg_lse_offsets: &[0, 1, 4, 5],
        neg_delta_offsets: &[8, 9, 12, 13],
        copy_distances: &[0, 2],
    }),
    // passes whose grids may have heads as their first axis
    either_order: &[Pass::Forward, Pass::ForwardSplit, Pass::Prefill, Pass::Backward, Pass::BackwardDkDv],
    has_key_block_offset: true, // main backward launches may take a part of the blocks of keys
    stores_dbias: true,         // kernels store the gradient of a bias as fp16 where no two scores share an element
    stored_above: 192,          // headdim: wider heads are faster with P and dS in memory
};
