//! Volta's properties as a [`Family`]: instruction set, resources, and what its kernels can do. Each row of its kernel tables has it.

use super::super::variants::{Family, Pass, Scratch};

/// Compute capability 7.0 and 7.2, and through PTX every newer GPU whose shared memory is large enough.
pub const VOLTA: Family = Family {
    name: "volta",
    sm: 70,
    native: &[70, 72], // run the machine code; later ones get PTX
    shared_bytes: 96 * 1024,
    threads: 2048, // of an SM
    // the row statistics of csrc/backward/scratch.cuh: -lse/scale and -delta of four queries, as floats. Each twice: in this order two
    // 16-byte loads fill an accumulator of dP, two keys by four queries, with -delta
    scratch: Some(Scratch {
        row_rounding: 32, // rows of an entry are a multiple
        group_rows: 4,    // rows whose statistics lie together
        group_floats: 16,
        // of the four queries' first copies; the second ones are 2 floats further
        neg_lse_offsets: &[0, 1, 4, 5],
        neg_delta_offsets: &[8, 9, 12, 13],
        copy_distances: &[0, 2], // floats from an offset to each copy
    }),
    // passes whose grids may have heads, not row tiles (rows of a block), as first axis, so that the long tiles of all heads start first
    either_order: &[Pass::Forward, Pass::ForwardSplit, Pass::Prefill, Pass::Backward, Pass::BackwardDkDv],
    has_key_block_offset: true, // main backward launches may take a part of the blocks of keys
    stores_dbias: true,         // kernels store the gradient of a bias as fp16 if each element belongs to one score; else they add to fp32
    stored_above: 192,          // headdim: the backward pass of wider heads is faster with P and dS in memory
};
