//! The tables of Volta's kernels, by pass. They multiply fp16 by `mma.sync.m8n8k4` and accumulate in fp32. Newer GPUs run them as PTX,
//! where Turing's tables have no kernel for a pass.

mod backward;
mod decode;
mod family;
mod forward;

pub use family::VOLTA;

use super::formats::FORMATS;
use super::shared;
use super::variants::{table, Variant};

/// Returns the tables, for src/kernels/tables.rs. Of rows of equal cost in one table, the planner takes the earlier.
pub fn tables() -> Vec<&'static [Variant]> {
    vec![
        table(forward::forward_rows()),
        // grids that divide the keys of the last row tiles evenly among blocks
        table(forward::stream_k_rows()),
        // calls with batch_invariant=True, where a row's bits depend on no other row
        table(forward::invariant_rows()),
        // fp32 tensors: each number is split into two fp16 parts
        table(forward::split_rows()),
        table(forward::split_stream_k_rows()),
        table(backward::backward_rows()),
        table([shared::merge(VOLTA)]),
        // many queries a sequence over a KV cache
        table(forward::prefill_rows()),
        table(FORMATS.iter().map(|row| shared::append(VOLTA, row.format))),
        table([shared::dequantize(VOLTA)]),
        table([shared::cast(VOLTA)]),
        table(decode::decode_rows()),
        table(decode::mla_rows()),
        // lists of the latents that queries chose, for sparse MLA
        table([shared::select(VOLTA)]),
        table(decode::sparse_mla_rows()),
        // scores by which queries of sparse attention choose tokens
        table(shared::indexer(VOLTA, decode::INDEXER)),
    ]
}
