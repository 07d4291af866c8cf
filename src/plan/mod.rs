//! The planner: which kernels run a problem, on which grid, with which parameters. src/ops/ calls it after validation, `_plan()` for tools.
//! Pure functions of the problem, the kernels, and the device's properties and tuning (measured choices of kernels).
//!
//! - row tile: the rows of one block, queries or (backward) keys; the latter is a key block.
//! - resident blocks: those that the GPU holds at once; wave: as many blocks of a grid; tail: a last launch with smaller blocks.
//! - prefill kernels: forward kernels over a KV cache. Stream-K grid: divides the steps of some row tiles evenly among blocks.

mod backward;
mod choose;
mod decode;
mod device;
mod fast;
mod features;
mod forward;
mod kernel;
mod stream_k;
mod tokens;

pub use backward::{backward, backward_among, BackwardPlan, BackwardStreamKPlan, BackwardStreamKSchedule, StoredPlan, Tail, STORED_ROWS};
pub use decode::{decode, indexer, indexer_head_shift, sparse_mla, DecodePlan};
pub use device::{families, DeviceLimits, FAMILY_VARIABLE};
pub use fast::{fast, fast_prepare, FastPlan, FAST_MIN_KEYS, FAST_MIN_ROWS};
pub use features::{features, problem_block, using, BackwardMode};
pub use forward::{forward, forward_among, forward_split, prefill};
pub use kernel::{batch_chunks, PlannedKernel, Reason};
pub use stream_k::{StreamKPlan, StreamKSchedule};
pub use tokens::{append, cast, dequantize, merge, sparse_select};
