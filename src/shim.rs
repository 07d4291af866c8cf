//! What the C++ shim (`torch_ops/`) does for Rust. With `ffi.rs`, which is the other direction, cbindgen turns this file into
//! `volta_fa_abi.h`.

use std::ffi::c_void;

/// What the shim tells of a tensor. Symbolic sizes and strides are [`crate::options::UNKNOWN`].
#[repr(C)]
pub struct TensorInfo {
    /// `c10::ScalarType`
    pub dtype: i32,
    /// 0 CPU, 1 CUDA, 2 meta, 3 another
    pub device_kind: i32,
    /// which of the devices of a kind that has several, as CUDA
    pub device_index: i64,
    /// all dimensions, of which `sizes` and `strides` tell the first eight
    pub rank: i64,
    /// of the first eight dimensions
    pub sizes: [i64; 8],
    /// in elements
    pub strides: [i64; 8],
}

extern "C" {
    /// Fills in `info` (torch_ops/describe.cpp). Returns whether that could be done.
    pub(crate) fn volta_fa_describe(tensor: *const c_void, info: *mut TensorInfo) -> bool;
}
