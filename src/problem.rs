//! Validation: from a description of the tensors and arguments to a checked attention problem.
//!
//! Pure: it never sees a tensor, only [`TensorDesc`]s, so every rule is tested without torch data or a
//! GPU. Every refusal names the argument, what was given and what is allowed, and happens before
//! anything is allocated or launched.

use crate::error::{Error, Result};
use std::fmt;

/// Element types that the ops know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    Half,
    BFloat16,
    Float,
    Double,
    Int32,
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
            DType::Other(name) => name,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(i) => write!(f, "cuda:{i}"),
        }
    }
}

/// What validation needs to know of one tensor.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    pub dtype: DType,
    pub device: Device,
    pub sizes: Vec<i64>,
    /// in elements
    pub strides: Vec<i64>,
    /// data pointer modulo 16 bytes
    pub misalignment: usize,
}

/// Who will compute: it decides which dtypes and layouts are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// ATen operations on the CPU
    Cpu,
    /// our kernels, on a GPU or in the simulator: fp16, 16-byte accesses
    Kernels,
}

/// Arguments of `volta_fa::fwd` (and, but for the tensors, of `volta_fa::bwd`) that are not q, k, v.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub cu_seqlens_q: Option<TensorDesc>,
    pub cu_seqlens_k: Option<TensorDesc>,
    pub max_seqlen_q: Option<i64>,
    pub max_seqlen_k: Option<i64>,
    pub seqused_k: Option<TensorDesc>,
    pub attn_bias: Option<TensorDesc>,
    pub alibi_slopes: Option<TensorDesc>,
    pub sinks: Option<TensorDesc>,
    pub dropout_p: f64,
    pub softmax_scale: Option<f64>,
    pub is_causal: bool,
    pub window_left: i64,
    pub window_right: i64,
    pub softcap: f64,
    pub deterministic: bool,
}

/// Which keys a query row sees: row `i` sees `j` with
/// `i + offset - left <= j <= i + offset + right`, `offset = seqlen_k - seqlen_q`; `None` is no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub left: Option<i64>,
    pub right: Option<i64>,
}

/// A checked problem: everything that planning and the CPU backend need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub batch: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub nheads: i64,
    pub nheads_k: i64,
    pub headdim: i64,
    pub headdim_v: i64,
    pub softmax_scale: f64,
    pub window: Window,
}

impl Attention {
    /// No output element, or no key for any row: nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.batch == 0 || self.nheads == 0 || self.seqlen_q == 0 || self.seqlen_k == 0 || self.headdim_v == 0
    }
}

/// Largest headdim of the compiled kernels.
pub const MAX_HEADDIM: i64 = 256;
/// 16-byte accesses of fp16.
const HEADDIM_MULTIPLE: i64 = 8;
/// Row indices are 32-bit and `seqlen_q + seqlen_k` must not overflow.
const MAX_SEQLEN: i64 = 1 << 30;
/// The kernels step from row to row with 32-bit multiples (`TileStream` in csrc/tile.cuh).
const MAX_ROW_STRIDE: i64 = (1 << 32) - 1;
/// Gradient and forward grids have the heads on an axis of at most 65535 blocks.
const MAX_HEADS: i64 = 65535;

fn shape(d: &TensorDesc) -> String {
    let dims: Vec<String> = d.sizes.iter().map(i64::to_string).collect();
    format!("shape ({})", dims.join(", "))
}

fn check_rank(name: &str, d: &TensorDesc) -> Result<()> {
    if d.sizes.len() != 4 {
        return Err(Error::value(
            name,
            format!("a tensor of rank {} with {}", d.sizes.len(), shape(d)),
            "rank 4, (batch, seqlen, nheads, headdim); packed (total, nheads, headdim) needs cu_seqlens_q and cu_seqlens_k",
        ));
    }
    Ok(())
}

fn check_dtype(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    let (ok, allowed) = match backend {
        Backend::Kernels => (d.dtype == DType::Half, "torch.float16 (the kernels' only input type)"),
        Backend::Cpu => (
            matches!(d.dtype, DType::Half | DType::BFloat16 | DType::Float | DType::Double),
            "torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        ),
    };
    if !ok {
        return Err(Error::value(name, format!("dtype {}", d.dtype), allowed));
    }
    Ok(())
}

/// Checks that hold for every (batch, seqlen, nheads, headdim) tensor a kernel or the CPU backend reads.
fn check_operand(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    check_dtype(name, d, backend)?;
    check_rank(name, d)?;
    let elements: i64 = d.sizes.iter().product();
    if elements > 0 && d.sizes[3] > 1 && d.strides[3] != 1 {
        return Err(Error::value(name, format!("stride {} in the last dimension", d.strides[3]), "a contiguous last dimension (stride 1)"));
    }
    if elements > 0 && backend == Backend::Kernels && d.sizes[1] > 1 && d.strides[1] > MAX_ROW_STRIDE {
        return Err(Error::value(name, format!("stride {} between rows", d.strides[1]), format!("at most {MAX_ROW_STRIDE} elements")));
    }
    if elements > 0 && backend == Backend::Kernels && d.misalignment != 0 {
        return Err(Error::value(
            name,
            format!("a data pointer {} bytes past a 16-byte boundary", d.misalignment),
            "a 16-byte aligned data pointer (call .clone() on such a slice)",
        ));
    }
    Ok(())
}

fn check_headdim(name: &str, what: &str, headdim: i64) -> Result<()> {
    if !(1..=MAX_HEADDIM).contains(&headdim) || headdim % HEADDIM_MULTIPLE != 0 {
        return Err(Error::value(
            name,
            format!("{what} {headdim}"),
            format!("a multiple of {HEADDIM_MULTIPLE} from {HEADDIM_MULTIPLE} to {MAX_HEADDIM}"),
        ));
    }
    Ok(())
}

fn check_same<T: PartialEq + fmt::Display>(name: &str, what: &str, found: T, other: &str, expected: T) -> Result<()> {
    if found != expected {
        return Err(Error::value(name, format!("{what} {found}"), format!("{what} {expected}, that of {other}")));
    }
    Ok(())
}

/// Features whose kernels are not written yet: a clear refusal, never a wrong answer.
fn check_unimplemented(o: &Options) -> Result<()> {
    let later = |name: &str| Err(Error::unsupported(format!("{name} is not implemented yet in this version of volta_fa")));
    for (name, given) in [
        ("cu_seqlens_q", o.cu_seqlens_q.is_some()),
        ("cu_seqlens_k", o.cu_seqlens_k.is_some()),
        ("max_seqlen_q", o.max_seqlen_q.is_some()),
        ("max_seqlen_k", o.max_seqlen_k.is_some()),
        ("seqused_k", o.seqused_k.is_some()),
        ("attn_bias", o.attn_bias.is_some()),
        ("alibi_slopes", o.alibi_slopes.is_some()),
        ("sinks", o.sinks.is_some()),
        ("dropout_p > 0", o.dropout_p > 0.0),
        ("softcap > 0", o.softcap > 0.0),
    ] {
        if given {
            return later(name);
        }
    }
    Ok(())
}

/// Packed arguments are checked for type and rank even before the packed kernels exist, so that the
/// first message a user sees is about their mistake.
fn check_cu_seqlens(name: &str, d: &TensorDesc) -> Result<()> {
    if d.dtype != DType::Int32 {
        return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.int32"));
    }
    if d.sizes.len() != 1 || d.sizes[0] < 1 {
        return Err(Error::value(name, shape(d), "shape (batch + 1,)"));
    }
    Ok(())
}

fn check_scalars(o: &Options) -> Result<f64> {
    if !(0.0..1.0).contains(&o.dropout_p) {
        return Err(Error::value("dropout_p", o.dropout_p, "a probability in [0, 1)"));
    }
    if !(o.softcap >= 0.0 && o.softcap.is_finite()) {
        return Err(Error::value("softcap", o.softcap, "0 (off) or a positive finite number"));
    }
    if let Some(s) = o.softmax_scale {
        if !s.is_finite() || (s as f32).is_infinite() {
            return Err(Error::value("softmax_scale", s, "a finite float32 number"));
        }
    }
    for (name, w) in [("window_left", o.window_left), ("window_right", o.window_right)] {
        if w < -1 {
            return Err(Error::value(name, w, "-1 (no bound) or a number of keys >= 0"));
        }
    }
    Ok(o.softmax_scale.unwrap_or(f64::NAN))
}

/// Check everything about q, k, v and the options.
///
/// # Errors
/// `Value` for a wrong argument, `Unsupported` for a feature that this version does not have.
pub fn validate(q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    let scale = check_scalars(o)?;
    for (name, cu) in [("cu_seqlens_q", &o.cu_seqlens_q), ("cu_seqlens_k", &o.cu_seqlens_k)] {
        if let Some(d) = cu {
            check_cu_seqlens(name, d)?;
        }
    }
    check_unimplemented(o)?;
    for (name, d) in [("q", q), ("k", k), ("v", v)] {
        check_operand(name, d, backend)?;
    }
    for (name, d) in [("k", k), ("v", v)] {
        check_same(name, "dtype", d.dtype, "q", q.dtype)?;
        check_same(name, "device", d.device, "q", q.device)?;
        check_same(name, "batch", d.sizes[0], "q", q.sizes[0])?;
    }
    check_same("v", "seqlen", v.sizes[1], "k", k.sizes[1])?;
    check_same("v", "nheads", v.sizes[2], "k", k.sizes[2])?;
    check_same("k", "headdim", k.sizes[3], "q", q.sizes[3])?;
    let (nheads, nheads_k) = (q.sizes[2], k.sizes[2]);
    if nheads > 0 && (nheads_k == 0 || nheads % nheads_k != 0) {
        return Err(Error::value("q", format!("nheads {nheads}"), format!("a multiple of nheads_k {nheads_k}, that of k and v")));
    }
    check_headdim("q", "headdim", q.sizes[3])?;
    check_headdim("v", "headdim", v.sizes[3])?;
    for (name, seqlen) in [("q", q.sizes[1]), ("k", k.sizes[1])] {
        if seqlen > MAX_SEQLEN {
            return Err(Error::value(name, format!("seqlen {seqlen}"), format!("at most {MAX_SEQLEN}")));
        }
    }
    if nheads > MAX_HEADS {
        return Err(Error::value("q", format!("nheads {nheads}"), format!("at most {MAX_HEADS}")));
    }
    let bound = |w: i64| (w >= 0).then_some(w);
    let right = if o.is_causal { Some(0) } else { bound(o.window_right) };
    Ok(Attention {
        batch: q.sizes[0],
        seqlen_q: q.sizes[1],
        seqlen_k: k.sizes[1],
        nheads,
        nheads_k,
        headdim: q.sizes[3],
        headdim_v: v.sizes[3],
        softmax_scale: if scale.is_nan() { (q.sizes[3] as f64).powf(-0.5) } else { scale },
        window: Window { left: bound(o.window_left), right },
    })
}

/// Check the tensors that `volta_fa::bwd` takes beside those of the forward pass.
pub fn validate_backward(
    dout: &TensorDesc,
    out: &TensorDesc,
    softmax_lse: &TensorDesc,
    q: &TensorDesc,
    a: &Attention,
    backend: Backend,
) -> Result<()> {
    let sizes = [a.batch, a.seqlen_q, a.nheads, a.headdim_v];
    for (name, d) in [("dout", dout), ("out", out)] {
        check_operand(name, d, backend)?;
        check_same(name, "dtype", d.dtype, "q", q.dtype)?;
        check_same(name, "device", d.device, "q", q.device)?;
        if d.sizes != sizes {
            return Err(Error::value(
                name,
                shape(d),
                format!("shape ({}, {}, {}, {}), that of the forward's out", sizes[0], sizes[1], sizes[2], sizes[3]),
            ));
        }
    }
    if softmax_lse.dtype != DType::Float {
        return Err(Error::value("softmax_lse", format!("dtype {}", softmax_lse.dtype), "torch.float32"));
    }
    check_same("softmax_lse", "device", softmax_lse.device, "q", q.device)?;
    if softmax_lse.sizes != [a.batch, a.nheads, a.seqlen_q] {
        return Err(Error::value("softmax_lse", shape(softmax_lse), format!("shape ({}, {}, {})", a.batch, a.nheads, a.seqlen_q)));
    }
    Ok(())
}
