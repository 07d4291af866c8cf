//! Functions of the C++ shim (`torch_ops/`) that Rust calls, because only torch's C++ knows the answers. They are undefined in this
//! library; the shim that loads it defines them. cbindgen writes their header, `volta_fa_abi.h`. ffi.rs has the functions that C++ calls.

use std::ffi::c_void;

/// Description of a tensor. Symbolic sizes and strides (`torch.compile` with dynamic shapes) are [`crate::options::UNKNOWN`].
#[repr(C)]
pub struct TensorInfo {
    /// `c10::ScalarType`.
    pub dtype: i32,
    /// 0 CPU, 1 CUDA, 2 meta, 3 other.
    pub device_kind: i32,
    /// Index among devices of the kind, as of `cuda:0`.
    pub device_index: i64,
    /// Number of dimensions. `sizes` and `strides` hold the first eight.
    pub rank: i64,
    /// Sizes of the first eight dimensions.
    pub sizes: [i64; 8],
    /// Strides of the first eight dimensions, in elements.
    pub strides: [i64; 8],
}

extern "C" {
    /// Fills `info` for an `at::Tensor` (torch_ops/shim.cpp). Returns false after a C++ exception, as for a tensor without strides.
    pub(crate) fn volta_fa_describe(tensor: *const c_void, info: *mut TensorInfo) -> bool;
    /// Returns true if PyTorch's settings allow products of fp32 matrices in fewer digits (`torch.set_float32_matmul_precision`). Returns
    /// false after an exception.
    pub(crate) fn volta_fa_reduces_fp32() -> bool;
}
