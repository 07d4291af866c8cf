//! Checks that the validators of src/problem/ share, and the words of their errors. A tensor is its description; sizes and strides that are
//! not known (symbolic, in meta kernels) pass every check.

use super::tensor::{Backend, DType, TensorDesc}; // Backend: Cpu is ATen's; Kernels, a GPU or the simulator; Meta computes shapes only
use crate::error::{Error, Result};
use crate::limits::MAX_ROW_STRIDE; // 2^32 - 1 elements
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)
use std::fmt;

/// Returns the error `argument: got {found}, expected {allowed}` from the function if the condition holds.
macro_rules! reject_if {
    ($condition:expr, $argument:expr, $found:expr, $allowed:expr) => {
        if $condition {
            return Err(Error::value($argument, $found, $allowed));
        }
    };
}
pub(super) use reject_if;

/// Formats a number; `?` if it is unknown.
pub fn number(n: i64) -> String {
    match n {
        UNKNOWN => "?".into(),
        _ => n.to_string(),
    }
}

/// Formats sizes: `(2, 128, ?)`.
pub fn listed(sizes: &[i64]) -> String {
    let dims: Vec<String> = sizes.iter().map(|&n| number(n)).collect();
    format!("({})", dims.join(", "))
}

/// Formats a shape: `shape (2, 128)`.
pub fn shape(d: &TensorDesc) -> String {
    format!("shape {}", listed(&d.sizes))
}

/// Formats a tensor whose rank is wrong: `a tensor of rank 2 with shape (2, 128)`.
pub fn rank(d: &TensorDesc) -> String {
    format!("a tensor of rank {} with {}", d.sizes.len(), shape(d))
}

/// Returns true if two sizes are equal or may be.
pub fn same_size(a: i64, b: i64) -> bool {
    a == b || a == UNKNOWN || b == UNKNOWN
}

/// Returns true if all sizes are equal or may be.
pub fn same_sizes(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| same_size(a, b))
}

/// Rejects a property that differs from that of another argument.
pub fn check_same<T: PartialEq + fmt::Display>(name: &str, what: &str, found: T, other: &str, expected: T) -> Result<()> {
    reject_if!(found != expected, name, format!("{what} {found}"), format!("{what} {expected}, that of {other}"));
    Ok(())
}

/// Rejects a size that differs from that of another argument; unknown sizes pass.
pub fn check_same_size(name: &str, what: &str, found: i64, other: &str, expected: i64) -> Result<()> {
    if same_size(found, expected) {
        return Ok(());
    }
    check_same(name, what, found, other, expected)
}

/// Rejects a number above `most`, whose name is `what`.
pub fn check_at_most(name: &str, what: &str, n: i64, most: i64) -> Result<()> {
    reject_if!(n > most, name, format!("{what} {n}"), format!("at most {most}"));
    Ok(())
}

/// Rejects another dtype than `expected`.
pub fn check_dtype(name: &str, d: &TensorDesc, expected: DType) -> Result<()> {
    reject_if!(d.dtype != expected, name, format!("dtype {}", d.dtype), expected);
    Ok(())
}

/// Rejects dtypes other than q's and fp32.
pub fn check_dtype_of_q_or_fp32(name: &str, d: &TensorDesc, q: &TensorDesc) -> Result<()> {
    if d.dtype != q.dtype && d.dtype != DType::Float {
        return Err(Error::value(name, format!("dtype {}", d.dtype), format!("{} (q's) or torch.float32", q.dtype)));
    }
    Ok(())
}

/// Rejects dtypes of q, k, v and their gradients that the backend does not compute with.
pub fn check_compute_dtype(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    let (ok, allowed) = match backend {
        Backend::Kernels => (matches!(d.dtype, DType::Half | DType::BFloat16), "torch.float16 or torch.bfloat16"),
        Backend::KernelsWithFp32 => {
            (matches!(d.dtype, DType::Half | DType::BFloat16 | DType::Float), "torch.float16, torch.bfloat16 or torch.float32")
        }
        Backend::Cpu | Backend::Meta => (
            matches!(d.dtype, DType::Half | DType::BFloat16 | DType::Float | DType::Double),
            "torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        ),
    };
    reject_if!(!ok, name, format!("dtype {}", d.dtype), allowed);
    Ok(())
}

/// Rejects another dtype or device than q's.
pub fn check_like_q(name: &str, d: &TensorDesc, q: &TensorDesc) -> Result<()> {
    check_same(name, "dtype", d.dtype, "q", q.dtype)?;
    check_device(name, d, q)
}

/// Rejects another device than q's.
pub fn check_device(name: &str, d: &TensorDesc, q: &TensorDesc) -> Result<()> {
    check_same(name, "device", d.device, "q", q.device)
}

/// Rejects a last dimension of two elements or more with a stride other than 1. A tensor without dimensions has none.
pub fn check_contiguous_last(name: &str, d: &TensorDesc) -> Result<()> {
    let Some(last) = d.sizes.len().checked_sub(1) else { return Ok(()) };
    if d.sizes[last] > 1 && !same_size(d.strides[last], 1) {
        let given = format!("stride {} in the last dimension", d.strides[last]);
        return Err(Error::value(name, given, "a contiguous last dimension (stride 1)"));
    }
    Ok(())
}

/// Rejects a tensor that the call writes if elements of it share memory (stride 0, as after `expand`).
pub fn check_written(name: &str, d: &TensorDesc) -> Result<()> {
    let is_repeated = |dim: &usize| d.sizes[*dim] > 1 && d.strides[*dim] == 0;
    match (0..d.sizes.len()).find(is_repeated) {
        Some(dim) if !d.sizes.contains(&0) => {
            let given = format!("stride 0 in dimension {dim}, of size {}", d.sizes[dim]);
            Err(Error::value(name, given, "memory for each element, because the call writes it: pass a contiguous tensor"))
        }
        _ => Ok(()),
    }
}

/// Rejects strides that the backend cannot read, of a tensor (rows, heads, headdim) or (batch, rows, heads, headdim).
pub fn check_layout(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    if d.sizes.contains(&0) {
        return Ok(());
    }
    check_contiguous_last(name, d)?;
    // fp16 alone is read in place: other dtypes are converted, and the copy has its own strides
    let rows = d.sizes.len() - 3; // index of the dimension
    if matches!(backend, Backend::Kernels | Backend::KernelsWithFp32)
        && d.dtype == DType::Half
        && d.sizes[rows] > 1
        && d.strides[rows] > MAX_ROW_STRIDE
    {
        return Err(Error::value(name, format!("stride {} between rows", d.strides[rows]), format!("at most {MAX_ROW_STRIDE} elements")));
    }
    Ok(())
}

/// Checks dtype, shape and device of a tensor of any strides. `what`: names of its sizes, `(batch, seqlen_q)`.
pub fn check_tensor(name: &str, d: &TensorDesc, dtype: DType, q: &TensorDesc, expected: &[i64], what: &str) -> Result<()> {
    check_dtype(name, d, dtype)?;
    reject_if!(!same_sizes(&d.sizes, expected), name, shape(d), format!("shape {what}, here {}", listed(expected)));
    check_device(name, d, q)
}

/// Checks an int32 vector or table on q's device with a contiguous last dimension.
pub fn check_int32(name: &str, d: &TensorDesc, q: &TensorDesc, expected: &[i64], what: &str) -> Result<()> {
    check_tensor(name, d, DType::Int32, q, expected, what)?;
    check_contiguous_last(name, d)
}

/// Rejects another shape than `(expected,)`. `what`: name of the length.
pub fn check_length(name: &str, d: &TensorDesc, expected: i64, what: &str) -> Result<()> {
    reject_if!(!same_sizes(&d.sizes, &[expected]), name, shape(d), format!("shape ({what},), here ({},)", number(expected)));
    Ok(())
}
