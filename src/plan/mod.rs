//! The planner: which kernels run a problem, on which grid, with which parameters.
//!
//! Pure functions of the problem, the kernels, and the device's properties and tuning.
//!
//! Words: a row tile is the rows of one block. Resident blocks are those that the GPU holds at once, and a wave is as many blocks of a
//! grid. A key block is a row tile of the backward pass. A tail is a last launch with smaller blocks.

mod backward;
mod block;
mod cached;
mod choose;
mod decode;
mod device;
mod fast;
mod features;
mod forward;
mod indexer;
mod kernel;
mod stream_k;
mod tokens;

pub use backward::{backward, backward_among, BackwardPlan, BackwardStreamKPlan, BackwardStreamKSchedule, StoredPlan, Tail, STORED_ROWS};
pub use block::problem_block;
pub use decode::{decode, sparse_mla, DecodePlan};
pub use device::{families, DeviceLimits, FAMILY_VARIABLE};
pub use fast::{fast, fast_prepare, FastPlan, FAST_MIN_KEYS, FAST_MIN_ROWS};
pub use features::{features, using, BackwardMode};
pub use forward::{forward, forward_among, forward_split, prefill};
pub use indexer::{indexer, indexer_head_shift};
pub use kernel::{batch_chunks, PlannedKernel, Reason};
pub use stream_k::{StreamKPlan, StreamKSchedule};
pub use tokens::{append, cast, dequantize, merge, sparse_select};
