//! volta_fa: exact attention, forward and backward, for NVIDIA Volta and Turing, as PyTorch operators.
//!
//! The path of a call, and what each module may use. tests/modules.rs keeps the modules free of circles.
//!
//! ```text
//! torch_ops/ (C++)      schemas, dispatch keys, autograd        -> ffi
//! ffi                   C ABI: panics and errors become a status -> ops
//! ops                   allocate outputs, call a backend         -> tensor, problem, plan, launch
//!   problem             validation                               pure: no tensors, no device
//!   plan                variant, grid, parameter block           pure
//!     tuning            measurements on one card           pure
//!   ops::cpu            ATen operations                          tch only
//! launch                the launch interface: a planned launch runs on
//!   launch::driver      the CUDA driver                          cudarc
//!   launch::simulator   volta-sim (feature `sim`)
//! options               the list of the ops' options
//! log                   plans, on standard error
//! shim                  C++ functions for Rust: descriptions of tensors
//! kernels               the table of variants and their machine code
//! params                the parameter blocks, shared with CUDA C++
//! ```

#![warn(missing_docs)]

pub mod error;
pub mod ffi;
pub mod info;
pub mod kernels;
pub mod launch;
pub mod limits;
pub mod log;
pub mod ops;
pub mod options;
pub mod params;
pub mod plan;
pub mod problem;
mod shim;
mod tensor;
pub mod tuning;
