//! Turing: `mma.sync.m16n8k8`, fp16 in, fp32 accumulation; `ldmatrix`.

mod backward;
mod decode;
mod family;
mod fast;
mod forward;

pub use family::TURING;

use super::shared;
use super::variants::{table, CacheFormat, Variant};

/// Returns the family's tables.
pub fn tables() -> Vec<&'static [Variant]> {
    vec![
        table(forward::forward_rows()),
        table(forward::invariant_rows()),
        table(forward::split_rows()),
        table(backward::backward_rows()),
        table(forward::prefill_rows()),
        table([shared::append(TURING, CacheFormat::Unquantized)]),
        table([shared::dequantize(TURING)]),
        table([shared::cast(TURING)]),
        table(decode::decode_rows()),
        table(shared::indexer(TURING, decode::INDEXER)),
        table(fast::rows()),
    ]
}
