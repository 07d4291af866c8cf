//! Volta: `mma.sync.m8n8k4`, fp16 in and out, fp32 accumulation.

mod backward;
mod decode;
mod forward;

pub use backward::BACKWARD;
pub use decode::{DECODE, LATENTS};
pub use forward::{FORWARD, FORWARD_STREAM_K, PREFILL};

use super::shared;
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

/// Kernels whose source no family owns.
pub const SHARED: &[Variant] = &[
    shared::merge(VOLTA, "volta_merge", 48),
    shared::append(VOLTA, CacheFormat::Unquantized, "volta_append", 4, 48),
    shared::append(VOLTA, CacheFormat::Int8, "volta_append_int8", 3, 80),
    shared::append(VOLTA, CacheFormat::Int4, "volta_append_int4", 3, 80),
    shared::append(VOLTA, CacheFormat::E5m2, "volta_append_e5m2", 3, 80),
    shared::append(VOLTA, CacheFormat::E4m3, "volta_append_e4m3", 3, 80),
    shared::dequantize(VOLTA, "volta_dequantize", 46),
];
