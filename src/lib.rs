//! volta_fa: exact attention, forward and backward, for NVIDIA Volta and Turing, as PyTorch operators.
//!
//! A call passes these modules, in this order; indented ones serve the one above. tests/modules.rs rejects circles of imports.
//!
//! ```text
//! torch_ops/ (C++)      dispatch keys, autograd
//! ffi                   C ABI: panics and errors become a status
//! operators             the table of operators: schemas, arguments
//! ops                   validates, plans, allocates, launches
//!   problem             validation                               no tensors, no device
//!   plan                chooses kernels and grids                no tensors, no device
//!     tuning            what `python -m volta_fa check` measured on a GPU
//!   ops::blocks         fills parameter blocks
//!   ops::cpu            ATen operations on the CPU
//! launch                the launch interface, implemented by
//!   launch::driver      the CUDA driver                          cudarc
//!   launch::simulator   volta-sim (feature `sim`), which runs the kernels' machine code on the CPU
//! ```
//!
//! Below them: `options` (the operators' keyword options), `value` (an argument in the C ABI), `limits` (of sizes), `kernels` (the table of
//! kernels, and their machine code), `params` (parameter blocks: kernels' arguments, shared with CUDA C++), `log` (prints plans), `shim`
//! (C++ functions that Rust calls), `error` (messages and Python exceptions), `tensor` (describes tch tensors to validation and to
//! kernels). Beside `operators`: `internal` (the table of internal operators), which publishes `info` (build and machine as JSON).

pub mod error;
pub mod ffi;
pub mod info;
pub mod internal;
pub mod kernels;
pub mod launch;
pub mod limits;
pub mod log;
pub mod operators;
pub mod ops;
pub mod options;
pub mod params;
pub mod plan;
pub mod problem;
mod shim;
mod tensor;
pub mod tuning;
pub mod value;
