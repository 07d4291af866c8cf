//! Volta: `mma.sync.m8n8k4`, fp16 in and out, fp32 accumulation.

mod append;
mod backward;
mod decode;
mod dequantize;
mod forward;
mod merge;

pub use append::APPEND;
pub use backward::BACKWARD;
pub use decode::{decode, shared_bytes, DECODE, LATENTS};
pub use dequantize::DEQUANTIZE;
pub use forward::{FORWARD, FORWARD_STREAM_K, PREFILL};
pub use merge::MERGE;

use super::variants::{CacheFormat, Family, Feature, FeatureSet, Pass, Scratch, Variant};

/// Compute capability 7.0 and 7.2, and through PTX every newer GPU whose shared memory is large enough.
pub const VOLTA: Family = Family {
    name: "volta",
    sm: 70,
    native: &[70, 72],
    shared_bytes: 96 * 1024,
    threads: 2048,
    // csrc/volta/backward/row_stats.cuh
    scratch: Some(Scratch {
        row_rounding: 32,
        group_rows: 4,
        group_floats: 16,
        // every value is there twice: these are the first copies
        neg_lse_offsets: &[0, 1, 4, 5],
        neg_delta_offsets: &[8, 9, 12, 13],
    }),
    either_order: &[Pass::Forward, Pass::Backward, Pass::BackwardDkDv],
    has_key_block_offset: true,
    stores_dbias: true,
};
