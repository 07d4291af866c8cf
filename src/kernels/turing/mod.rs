//! The table of Turing's kernels. They load operands by `ldmatrix`, multiply fp16 by `mma.sync.m16n8k8` and accumulate in fp32; the fast
//! forward kernel also multiplies int8.

mod backward;
mod decode;
mod family;
mod fast;
mod forward;

pub use family::TURING;

use super::shared;
use super::variants::{table, CacheFormat, Variant};

/// Returns the tables of the family's kernels, one or several for each pass.
pub fn tables() -> Vec<&'static [Variant]> {
    vec![
        table(forward::forward_rows()),
        // calls with batch_invariant=True
        table(forward::invariant_rows()),
        // fp32 tensors: each number is split into two fp16 parts
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
