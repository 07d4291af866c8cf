//! From tch tensors to what the pure modules and the launch seam see.

use crate::error::{Error, Result};
use crate::launch::Extent;
use crate::params::{Operand, Output};
use crate::problem::{DType, Device, TensorDesc};
use tch::{Kind, Tensor};

/// Alignment of the kernels' global accesses, bytes.
const ALIGNMENT: usize = 16;
/// The same in fp16 elements.
const ALIGNED_STRIDE: i64 = 8;

fn dtype(kind: Kind) -> DType {
    match kind {
        Kind::Half => DType::Half,
        Kind::BFloat16 => DType::BFloat16,
        Kind::Float => DType::Float,
        Kind::Double => DType::Double,
        Kind::Int => DType::Int32,
        Kind::Int64 => DType::Int64,
        Kind::Int16 => DType::Other("torch.int16"),
        Kind::Int8 => DType::Other("torch.int8"),
        Kind::Uint8 => DType::Other("torch.uint8"),
        Kind::Bool => DType::Bool,
        Kind::ComplexHalf => DType::Other("torch.complex32"),
        Kind::ComplexFloat => DType::Other("torch.complex64"),
        Kind::ComplexDouble => DType::Other("torch.complex128"),
        _ => DType::Other("another dtype"),
    }
}

/// Describe a tensor for validation.
pub fn describe(t: &Tensor) -> Result<TensorDesc> {
    let device = match t.device() {
        tch::Device::Cpu => Device::Cpu,
        tch::Device::Cuda(i) => Device::Cuda(i),
        other => return Err(Error::unsupported(format!("device {other:?}: volta_fa runs on cpu and cuda tensors"))),
    };
    Ok(TensorDesc { dtype: dtype(t.f_kind()?), device, sizes: t.size(), strides: t.stride() })
}

/// `t` itself where all its rows start on 16-byte boundaries, else a contiguous copy: slices of wider tensors may begin
/// anywhere and have any stride.
pub fn with_aligned_rows(t: &Tensor) -> Result<Tensor> {
    let (sizes, strides) = (t.size(), t.stride());
    let last = sizes.len() - 1;
    let aligned = t.data_ptr() as usize % ALIGNMENT == 0 && (0..last).all(|i| sizes[i] <= 1 || strides[i] % ALIGNED_STRIDE == 0);
    if aligned {
        return Ok(t.shallow_clone());
    }
    // not f_contiguous, which returns a misaligned tensor as it is
    let mut copy = Tensor::f_empty(&sizes, (t.kind(), t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}

/// A gradient as autograd left it, in a layout the backends read: an expanded or transposed one is copied.
///
/// Users choose the layout of q, k and v and get an error for one that cannot be read; nobody chooses
/// that of an incoming gradient.
pub fn readable_gradient(t: &Tensor) -> Result<Tensor> {
    let d = describe(t)?;
    let contiguous = d.sizes.last().is_none_or(|n| *n <= 1) || d.strides.last() == Some(&1);
    Ok(if contiguous { t.shallow_clone() } else { t.f_contiguous()? })
}

/// An uninitialised contiguous tensor for a kernel to write, at a multiple of `alignment` bytes if that is more than
/// ATen's allocator gives. It then begins inside its storage.
pub fn empty(sizes: &[i64], kind: Kind, device: tch::Device, alignment: usize) -> Result<Tensor> {
    if alignment <= ALIGNMENT {
        return Ok(Tensor::f_empty(sizes, (kind, device))?);
    }
    let (count, bytes) = (sizes.iter().product::<i64>(), kind.elt_size_in_bytes());
    let room = Tensor::f_empty([count + (alignment / bytes) as i64], (kind, device))?;
    let start = room.data_ptr() as usize;
    let skip = start.next_multiple_of(alignment) - start;
    Ok(room.f_narrow(0, (skip / bytes) as i64, count)?.f_view(sizes)?)
}

/// The bytes that the strided tensor spans, from its first to its last element.
pub fn extent(name: &'static str, t: &Tensor, writable: bool) -> Extent {
    let (sizes, strides) = (t.size(), t.stride());
    let span: i64 = sizes.iter().zip(&strides).map(|(n, s)| (n - 1) * s).sum::<i64>() + 1;
    let empty = sizes.contains(&0);
    let bytes = if empty { 0 } else { span as usize * t.kind().elt_size_in_bytes() };
    Extent { name, ptr: t.data_ptr().cast(), bytes, writable }
}

/// A (batch, seqlen, heads, headdim) tensor as kernel input, its first batch being `batch`; or a packed (total, heads,
/// headdim) one.
pub fn operand(t: &Tensor, batch: i64) -> Operand {
    let strides = t.stride();
    let [batch_stride, row_stride, head_stride] = match strides[..] {
        [b, s, h, _] => [b, s, h],
        [s, h, _] => [0, s, h],
        _ => unreachable!("validation checked the rank"),
    };
    let ptr = (t.data_ptr() as *const u16).wrapping_offset((batch * batch_stride) as isize);
    Operand { ptr, batch_stride, row_stride, head_stride }
}

/// The same as kernel output.
pub fn output(t: &Tensor, batch: i64) -> Output {
    let Operand { ptr, batch_stride, row_stride, head_stride } = operand(t, batch);
    Output { ptr: ptr.cast_mut(), batch_stride, row_stride, head_stride }
}
