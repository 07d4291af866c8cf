//! Descriptions of tensors: what validation needs to know of them. src/tensor.rs makes them from tensors, tests write them.

use smallvec::SmallVec;
use std::fmt;

/// Element types that operators know, as PyTorch names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DType {
    #[default]
    Half,
    BFloat16,
    Float,
    Double,
    Int32,
    Int64,
    Bool,
    Int8,
    Uint8,
    Float8E5m2,
    Float8E4m3,
    /// A type that no argument takes, by name for the error message.
    Other(&'static str),
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Half => "torch.float16",
            DType::BFloat16 => "torch.bfloat16",
            DType::Float => "torch.float32",
            DType::Double => "torch.float64",
            DType::Int32 => "torch.int32",
            DType::Int64 => "torch.int64",
            DType::Bool => "torch.bool",
            DType::Int8 => "torch.int8",
            DType::Uint8 => "torch.uint8",
            DType::Float8E5m2 => "torch.float8_e5m2",
            DType::Float8E4m3 => "torch.float8_e4m3fn",
            DType::Other(name) => name,
        })
    }
}

/// Device of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Memory of the CPU backend and of the simulator.
    Cpu,
    /// A GPU, by PyTorch's index.
    Cuda(usize),
    /// No data, shapes only.
    Meta,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(i) => write!(f, "cuda:{i}"),
            Device::Meta => f.write_str("meta"),
        }
    }
}

/// Sizes or strides. Room for five avoids allocations: arguments have at most four dimensions, and a packed qkv, given by mistake, five.
pub type Dims = SmallVec<[i64; 5]>;

/// Describes a tensor. Sizes and strides may be [`crate::options::UNKNOWN`]: checks then skip what depends on them.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    pub dtype: DType,
    /// Where it is. Validation rejects a call whose tensors are on several devices.
    pub device: Device,
    pub sizes: Dims,
    /// One stride per dimension, in elements.
    pub strides: Dims,
}

/// Backend of a call, which decides the possible dtypes and layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// ATen operations on the CPU: fp16, bf16, fp32 and fp64.
    Cpu,
    /// The compiled kernels, on a GPU or in the simulator: fp16, and bf16 by conversion.
    Kernels,
    /// The same with fp32, by conversion too.
    KernelsWithFp32,
    /// Nothing is computed: meta tensors, which may stand for tensors of any backend.
    Meta,
}

/// The options of a call, with its tensors described.
pub type Options = crate::options::Options<TensorDesc>;
