//! Converts tch tensors: to descriptions for validation ([`describe`]), to layouts that kernels read ([`readable`]), and to the pointers
//! and strides of parameter blocks ([`operand`], [`output`]). Allocates outputs of kernels ([`empty`]). Used by src/ops/.

use crate::error::{Error, Result};
use crate::launch::{Launcher, MemoryRange}; // Launcher: runs kernels, on the CUDA driver or in the simulator
use crate::limits::HEADDIM_MULTIPLE; // 8
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)
use crate::params::{BlockLists, Cache, CacheScale, ChosenTokens, ElementType, FastParams, Operand, Output};
use crate::problem::{padded_headdim, DType, Device, Dims, TensorDesc};
use crate::shim::{volta_fa_describe, TensorInfo};
use tch::{Kind, Tensor};

/// Alignment of the kernels' loads and stores, bytes: 16 in one instruction.
const ALIGNMENT: usize = 16;

/// Converts the number of a `c10::ScalarType`.
fn dtype(scalar_type: i32) -> DType {
    match scalar_type {
        0 => DType::Uint8,
        1 => DType::Int8,
        2 => DType::Other("torch.int16"),
        3 => DType::Int32,
        4 => DType::Int64,
        5 => DType::Half,
        6 => DType::Float,
        7 => DType::Double,
        8 => DType::Other("torch.complex32"),
        9 => DType::Other("torch.complex64"),
        10 => DType::Other("torch.complex128"),
        11 => DType::Bool,
        15 => DType::BFloat16,
        23 => DType::Float8E5m2,
        24 => DType::Float8E4m3,
        _ => DType::Other("a dtype that volta_fa does not know"),
    }
}

/// Reads dtype, device and layout of a tensor in one call, without allocations. None: it has no strides.
fn info(t: &Tensor) -> Option<TensorInfo> {
    // placeholders, which the shim overwrites
    let mut info = TensorInfo { dtype: -1, device_kind: -1, device_index: 0, rank: 0, sizes: [0; 8], strides: [0; 8] };
    // SAFETY: the handle is that of a live tensor.
    unsafe { volta_fa_describe(t.as_ptr().cast(), &mut info) }.then_some(info)
}

/// Returns (rank, sizes, strides) of a validated tensor, which has at most eight dimensions.
fn layout(t: &Tensor) -> (usize, [i64; 8], [i64; 8]) {
    let info = info(t).expect("validation checked that there are strides");
    (info.rank as usize, info.sizes, info.strides)
}

/// Describes a tensor for validation; symbolic sizes are unknown. Fails without strides, or on other devices than cpu, cuda and meta.
pub fn describe(t: &Tensor) -> Result<TensorDesc> {
    let info = info(t).ok_or_else(|| Error::unsupported("a tensor without sizes and strides: volta_fa takes strided tensors"))?;
    let device = match info.device_kind {
        0 => Device::Cpu,
        1 => Device::Cuda(info.device_index as usize),
        2 => Device::Meta,
        _ => return Err(Error::unsupported("a tensor on another device: volta_fa runs on cpu and cuda tensors")),
    };
    let rank = info.rank as usize;
    // every operator rejects the rank of a tensor with more dimensions
    let all = |known: [i64; 8]| {
        let mut dims = Dims::from_slice(&known[..rank.min(known.len())]);
        dims.resize(rank, UNKNOWN);
        dims
    };
    Ok(TensorDesc { dtype: dtype(info.dtype), device, sizes: all(info.sizes), strides: all(info.strides) })
}

/// Returns the type of ATen's arithmetic on tensors of a type: fp64 for fp64, else fp32.
pub fn compute_kind(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Returns the element type for kernels that read several: fp16, bf16 or fp32.
pub fn element_type(t: &Tensor) -> ElementType {
    match t.kind() {
        Kind::Half => ElementType::Half,
        Kind::BFloat16 => ElementType::Bf16,
        _ => ElementType::Float,
    }
}

/// Returns true if kernels can read `t` in place: rows begin on 16-byte boundaries, and have a multiple of 8 elements (of bytes: 16). The
/// last dimension's stride is 1 in operands, and not tested here.
pub fn is_readable(t: &Tensor) -> bool {
    let (rank, sizes, strides) = layout(t);
    let last = rank - 1;
    let chunk = if t.kind().elt_size_in_bytes() == 1 { ALIGNMENT as i64 } else { HEADDIM_MULTIPLE };
    let aligned = t.data_ptr() as usize % ALIGNMENT == 0 && (0..last).all(|i| sizes[i] <= 1 || strides[i] % chunk == 0);
    aligned && sizes[last] % chunk == 0
}

/// Returns `t` if kernels can read it in place, else a contiguous copy. Its headdim (last dimension) is padded to a multiple of 8: the
/// zeros add nothing to a dot product. Bytes need no padding: kernels read them only where the headdim is a multiple of 16. Slices of wider
/// tensors may begin anywhere and have any stride.
pub fn readable(t: &Tensor) -> Result<Tensor> {
    if is_readable(t) {
        return Ok(t.shallow_clone());
    }
    let mut sizes = t.size();
    let last = sizes.len() - 1;
    let headdim = sizes[last];
    sizes[last] = padded_headdim(headdim);
    // not f_contiguous, which returns a misaligned tensor unchanged
    let copy = Tensor::f_empty(&sizes, (t.kind(), t.device()))?;
    copy.f_narrow(last as i64, 0, headdim)?.f_copy_(t)?;
    if sizes[last] > headdim {
        let _ = copy.f_narrow(last as i64, headdim, sizes[last] - headdim)?.f_zero_()?;
    }
    Ok(copy)
}

/// Removes the columns of an output that stand for those that [`readable`] added to inputs; the result is contiguous.
pub fn without_padding(t: Tensor, headdim: i64) -> Result<Tensor> {
    let (rank, sizes, _) = layout(&t);
    match sizes[rank - 1] == headdim {
        true => Ok(t),
        false => Ok(t.f_narrow(-1, 0, headdim)?.f_contiguous()?),
    }
}

/// Returns a gradient in a layout that backends read; copies an expanded or transposed one.
///
/// Users choose the layout of q, k and v and get an error for an unreadable one. Autograd chooses that of a gradient.
pub fn readable_gradient(t: &Tensor) -> Result<Tensor> {
    let d = describe(t)?;
    let contiguous = d.sizes.last().is_none_or(|n| *n <= 1) || d.strides.last() == Some(&1);
    Ok(if contiguous { t.shallow_clone() } else { t.f_contiguous()? })
}

/// Allocates an uninitialized contiguous tensor on a launcher's device. A launcher that times kernels in the simulator wants more alignment
/// than ATen gives; the tensor then begins inside a larger storage.
pub fn empty(sizes: &[i64], kind: Kind, launcher: &dyn Launcher) -> Result<Tensor> {
    let (device, alignment) = (launcher.device(), launcher.output_alignment());
    if alignment <= ALIGNMENT {
        return Ok(Tensor::f_empty(sizes, (kind, device))?);
    }
    let (count, bytes) = (sizes.iter().product::<i64>(), kind.elt_size_in_bytes());
    let room = Tensor::f_empty([count + (alignment / bytes) as i64], (kind, device))?;
    let start = room.data_ptr() as usize;
    let skip = start.next_multiple_of(alignment) - start;
    Ok(room.f_narrow(0, (skip / bytes) as i64, count)?.f_view(sizes)?)
}

/// Returns another handle of the same tensor.
pub fn share(t: &Option<Tensor>) -> Option<Tensor> {
    t.as_ref().map(Tensor::shallow_clone)
}

/// Returns a tensor in another type, or itself. This skips ATen's check, which takes time in small problems on the CPU.
pub fn in_kind(t: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(if t.kind() == kind { t.shallow_clone() } else { t.f_to_kind(kind)? })
}

/// Copies a tensor, to contiguous memory of its own. `f_contiguous` would return a contiguous tensor itself, also if it is not aligned.
pub fn copied(t: &Tensor, kind: Kind) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(t.size(), (kind, t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}

/// Returns the memory of a tensor that a kernel only reads.
pub fn read_range(name: &'static str, t: &Tensor) -> MemoryRange {
    memory_range(name, t, false)
}

/// Returns the memory of a tensor that a kernel writes, and may read.
pub fn written_range(name: &'static str, t: &Tensor) -> MemoryRange {
    memory_range(name, t, true)
}

/// Returns the memory from a strided tensor's first element to its last, for the simulator, which checks accesses.
fn memory_range(name: &'static str, t: &Tensor, writable: bool) -> MemoryRange {
    let (sizes, strides) = (t.size(), t.stride());
    let span: i64 = sizes.iter().zip(&strides).map(|(n, s)| (n - 1) * s).sum::<i64>() + 1;
    let empty = sizes.contains(&0);
    let bytes = if empty { 0 } else { span as usize * t.kind().elt_size_in_bytes() };
    MemoryRange { name, ptr: t.data_ptr().cast(), bytes, writable }
}

/// Parts of parameter blocks that stand for what a call does not have, by null pointers and zeros.
///
/// # Safety
/// All bits 0 are a value of the type.
pub unsafe trait Absent: Sized {
    /// The value.
    // SAFETY: as the trait demands
    const NONE: Self = unsafe { std::mem::zeroed() };
}

// SAFETY: structs of pointers, numbers, and enums whose first variant is 0
unsafe impl Absent for Operand {}
unsafe impl Absent for Output {}
unsafe impl Absent for BlockLists {}
unsafe impl Absent for Cache {}
unsafe impl Absent for CacheScale {}
unsafe impl Absent for ChosenTokens {}
unsafe impl Absent for FastParams {}

/// Describes a (batch, seqlen, heads, headdim) tensor from entry `batch` on, or a packed (total, heads, headdim) one, as kernel input.
pub fn operand(t: &Tensor, batch: i64) -> Operand {
    let (rank, _, strides) = layout(t);
    let [batch_stride, row_stride, head_stride] = match strides[..rank] {
        [b, s, h, _] => [b, s, h],
        [s, h, _] => [0, s, h],
        _ => unreachable!("validation checked the rank"),
    };
    let bytes = if batch == 0 { 0 } else { batch * batch_stride * t.kind().elt_size_in_bytes() as i64 };
    let ptr = (t.data_ptr() as *const u8).wrapping_offset(bytes as isize).cast();
    Operand { ptr, batch_stride, row_stride, head_stride }
}

/// Describes a tensor as kernel output, as [`operand`].
pub fn output(t: &Tensor, batch: i64) -> Output {
    let Operand { ptr, batch_stride, row_stride, head_stride } = operand(t, batch);
    Output { ptr: ptr.cast_mut(), batch_stride, row_stride, head_stride }
}
