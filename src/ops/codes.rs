//! int8 codes of K (a code times its scale is a number of K) and V's largest magnitudes, which `volta_fa::fwd_fast` computes first: their
//! sizes, and their layout in the uint8 tensor that `volta_fa::prepare_fast` returns for later calls. fast.rs and cpu/ use it.

use crate::error::{Error, Result};
use crate::problem::Attention;
use tch::{Device, Kind, Tensor};

/// Keys of a block, which has scales of its own. Codes of a sequence begin on a block (csrc/turing/fast/codes.cuh).
pub const SCALE_KEYS: i64 = 64;
/// Number of scales of a block of keys. Keys 8i + 2t and 8i + 2t + 1 share scale t: those that one GPU lane has scores of.
pub const SCALES: i64 = 4;
/// Unused bytes at the end of the tensor with the option `rotate` (codes are of K after a Hadamard transform), so that its size tells.
const ROTATED: i64 = 16;

/// Returns the headdim of the kernel of `fwd_fast` that takes this many columns.
pub fn kernel_headdim(columns: i64) -> i64 {
    match columns {
        ..=64 => 64,
        65..=128 => 128,
        _ => 256,
    }
}

/// Codes of K, and the range of V. Rows are keys of all entries, each entry rounded up to whole blocks.
pub struct Codes {
    /// (nheads_k, rows, the kernel's headdim) int8
    pub k_codes: Tensor,
    /// (nheads_k, rows / 64, 4) fp32
    pub k_scales: Tensor,
    /// (nheads_k, batch, the kernel's headdim) fp32: what was subtracted from K
    pub k_mean: Tensor,
    /// (nheads_k, batch, blocks of the longest sequence) fp32: largest magnitude of V in the keys of each block of the prepare kernel
    pub v_max: Tensor,
    /// V times a power of 2, fp16 below 1 in magnitude; only if V is bf16.
    pub v_scaled: Option<Tensor>,
}

/// Sizes and dtypes of the tensors of [`Codes`], in the order of its fields.
pub struct CodeSizes {
    /// (sizes, dtype) of each.
    parts: Vec<(Vec<i64>, Kind)>,
}

impl CodeSizes {
    /// Returns the sizes of a problem with padded headdims. `headdim` is the kernel's, `v_blocks` the last size of `v_max`, `is_bf16` of V.
    pub fn new(a: &Attention, headdim: i64, v_blocks: i64, is_bf16: bool) -> CodeSizes {
        // each packed sequence begins on a block, so it may leave a part of one unused
        let blocks = a.total_k().map_or(a.batch * ceil_div(a.seqlen_k, SCALE_KEYS), |total| total / SCALE_KEYS + a.batch + 1);
        let heads = a.nheads_k;
        let mut parts = vec![
            (vec![heads, blocks * SCALE_KEYS, headdim], Kind::Int8),
            (vec![heads, blocks, SCALES], Kind::Float),
            (vec![heads, a.batch, headdim], Kind::Float),
            (vec![heads, a.batch, v_blocks], Kind::Float),
        ];
        if is_bf16 {
            let v = a.total_k().map_or(vec![a.batch, a.seqlen_k, heads, a.headdim_v], |total| vec![total, heads, a.headdim_v]);
            parts.push((v, Kind::Half));
        }
        CodeSizes { parts }
    }

    /// Returns the sizes in the tensor of `prepare_fast`, with room for the smallest blocks of a prepare kernel. torch_ops/meta.cpp
    /// computes their sum in bytes too. Parts begin at multiples of 16 bytes.
    pub fn prepared(a: &Attention, is_bf16: bool) -> CodeSizes {
        // a float for each SCALE_KEYS keys, rounded up to a multiple of four, which take 16 bytes
        let v_blocks = ceil_div(a.seqlen_k, 4 * SCALE_KEYS) * 4;
        CodeSizes::new(a, kernel_headdim(a.headdim.max(a.headdim_v)), v_blocks, is_bf16)
    }

    fn bytes_of((sizes, kind): &(Vec<i64>, Kind)) -> i64 {
        sizes.iter().product::<i64>() * kind.elt_size_in_bytes() as i64
    }

    /// Returns the size of the tensor of `prepare_fast`, bytes.
    pub fn bytes(&self, rotate: bool) -> i64 {
        self.parts.iter().map(CodeSizes::bytes_of).sum::<i64>() + if rotate { ROTATED } else { 0 }
    }

    /// Returns codes in tensors that `make` returns for sizes and a dtype.
    pub fn make(&self, make: impl Fn(&[i64], Kind) -> Result<Tensor>) -> Result<Codes> {
        let mut made = self.parts.iter().map(|(sizes, kind)| make(sizes, *kind));
        let mut next = || made.next().expect("four parts, and in bf16 v_scaled");
        Ok(Codes { k_codes: next()?, k_scales: next()?, k_mean: next()?, v_max: next()?, v_scaled: made.next().transpose()? })
    }

    /// Checks the size of the option `prepared`, bytes.
    pub fn check(&self, given: i64, rotate: bool) -> Result<()> {
        let bytes = self.bytes(rotate);
        if given == bytes {
            return Ok(());
        }
        let expected = format!("{bytes} bytes: what volta_fa::prepare_fast returns for the same k, v, lengths and rotate");
        Err(Error::value("prepared", format!("{given} bytes"), expected))
    }

    /// Returns views of the codes in `prepared`, a uint8 vector on `device`, or in a copy if it is strided or not aligned to 16 bytes.
    pub fn within(&self, prepared: &Tensor, rotate: bool, device: Device) -> Result<Codes> {
        let sizes = prepared.size();
        let bytes = sizes[0];
        self.check(bytes, rotate)?;
        let whole = if prepared.data_ptr() as usize % 16 == 0 && prepared.stride() == [1] {
            prepared.shallow_clone()
        } else {
            let copy = Tensor::f_empty(&sizes, (Kind::Uint8, device))?;
            copy.f_narrow(0, 0, bytes)?.f_copy_(prepared)?;
            copy
        };
        let start = std::cell::Cell::new(0);
        self.make(|sizes, kind| {
            let bytes = CodeSizes::bytes_of(&(sizes.to_vec(), kind));
            let part = whole.f_narrow(0, start.replace(start.get() + bytes), bytes)?;
            Ok(part.f_view_dtype(kind)?.f_view(sizes)?)
        })
    }
}

/// Returns n / by, rounded up. Neither is negative.
pub fn ceil_div(n: i64, by: i64) -> i64 {
    (n + by - 1) / by
}
