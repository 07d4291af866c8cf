//! The table of Volta's kernels. They multiply fp16 by `mma.sync.m8n8k4` and accumulate in fp32.

mod backward;
mod decode;
mod family;
mod forward;

pub use family::VOLTA;

use super::formats::FORMATS;
use super::shared;
use super::variants::{table, Variant};

/// Returns the tables of the family's kernels, one or several for each pass.
pub fn tables() -> Vec<&'static [Variant]> {
    vec![
        table(forward::forward_rows()),
        table(forward::stream_k_rows()),
        table(forward::invariant_rows()),
        table(forward::split_rows()),
        table(backward::backward_rows()),
        table([shared::merge(VOLTA)]),
        table(forward::prefill_rows()),
        table(FORMATS.iter().map(|row| shared::append(VOLTA, row.format))),
        table([shared::dequantize(VOLTA)]),
        table([shared::cast(VOLTA)]),
        table(decode::decode_rows()),
        table(decode::mla_rows()),
        // lists of the latents that queries chose, for sparse MLA
        table([shared::select(VOLTA)]),
        table(decode::sparse_mla_rows()),
        table(shared::indexer(VOLTA, decode::INDEXER)),
    ]
}
