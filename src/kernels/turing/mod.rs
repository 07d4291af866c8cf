//! Turing: `mma.sync.m16n8k8`, fp16 in, fp32 accumulation; `ldmatrix`. Forward only so far: backward is Volta's, through PTX.

mod forward;

pub use forward::FORWARD;

use super::variants::{Family, Need, Needs, Pass, Variant};

pub const TURING: Family =
    Family { name: "turing", sm: 75, native: &[75], shared_bytes: 64 * 1024, threads: 1024, scratch: None, either_order: true };
