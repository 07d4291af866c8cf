//! Turing's properties as a [`Family`]: instruction set, resources, and what its kernels can do. The rows of its tables name it.

use super::super::variants::{Family, Pass, Scratch};

/// Compute capability 7.5, and through PTX every newer GPU.
pub const TURING: Family = Family {
    name: "turing",
    sm: 75,
    native: &[75], // run the machine code; later ones get PTX
    shared_bytes: 64 * 1024,
    threads: 1024, // of an SM
    // passes whose grids may have heads, not row tiles (rows of a block), as first axis, so that the long tiles of all heads start first
    either_order: &[Pass::Forward, Pass::ForwardSplit, Pass::Prefill, Pass::FastForward],
    has_key_block_offset: false, // no backward launch takes a part of the blocks of keys
    stores_dbias: false,         // no kernel stores the gradient of a bias as fp16; they add to fp32
    stored_above: 256,           // headdim: the backward pass of wider heads keeps P and dS in memory
    // the row statistics of csrc/backward/scratch.cuh: -lse/scale of 16 queries, then their -delta, as floats: one load of a whole warp
    scratch: Some(Scratch {
        row_rounding: 32, // rows of an entry are a multiple
        group_rows: 16,   // rows whose statistics lie together
        group_floats: 32,
        neg_lse_offsets: &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        neg_delta_offsets: &[16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31],
        copy_distances: &[0], // one copy of each
    }),
};
