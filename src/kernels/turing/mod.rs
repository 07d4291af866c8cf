//! The tables of Turing's kernels, by pass. They load operands by `ldmatrix`, multiply fp16 by `mma.sync.m16n8k8` and accumulate in fp32;
//! the fast forward kernels multiply int8, and sum fp16. Passes that are missing here (MLA, merging) run Volta's kernels, as PTX.

mod backward;
mod decode;
mod family;
mod fast;
mod forward;

pub use family::TURING;

use super::shared;
use super::variants::{table, CacheFormat, Variant};

/// Returns the tables, for src/kernels/tables.rs. Of rows of equal cost in one table, the planner takes the earlier.
pub fn tables() -> Vec<&'static [Variant]> {
    vec![
        table(forward::forward_rows()),
        // calls with batch_invariant=True, where a row's bits depend on no other row
        table(forward::invariant_rows()),
        // fp32 tensors: each number is split into two fp16 parts
        table(forward::split_rows()),
        table(forward::split_stream_k_rows()),
        table(backward::backward_rows()),
        // many queries a sequence over a KV cache
        table(forward::prefill_rows()),
        table([shared::append(TURING, CacheFormat::Unquantized)]),
        table([shared::dequantize(TURING)]),
        table([shared::cast(TURING)]),
        table(decode::decode_rows()),
        // scores by which queries of sparse attention choose tokens
        table(shared::indexer(TURING, decode::INDEXER)),
        table(fast::rows()),
    ]
}
