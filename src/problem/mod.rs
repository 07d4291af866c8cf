//! Validation: from a description of the tensors and arguments to a checked attention problem.
//!
//! Pure: it never sees a tensor, only [`TensorDesc`]s, so every rule is tested without torch data or a
//! GPU. Every refusal names the argument, what was given and what is allowed, and happens before
//! anything is allocated or launched.

mod kvcache;
mod quantized;

pub use kvcache::{validate_kvcache, validate_kvcache_values, validate_mla, CacheOptions, CacheValues, CachedAttention, CachedSequence};

use crate::error::{Error, Result};
use crate::options::UNKNOWN;
use smallvec::SmallVec;
use std::fmt;

/// Element types that the ops know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// torch.float16
    Half,
    /// torch.bfloat16
    BFloat16,
    /// torch.float32
    Float,
    /// torch.float64
    Double,
    /// torch.int32
    Int32,
    /// torch.int64
    Int64,
    /// torch.bool
    Bool,
    /// torch.int8
    Int8,
    /// torch.uint8
    Uint8,
    /// torch.float8_e5m2
    Float8E5m2,
    /// torch.float8_e4m3fn
    Float8E4m3,
    /// no argument may have it; the name is for the refusal
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

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// the CPU backend's, and the simulator's
    Cpu,
    /// a GPU, as PyTorch counts them
    Cuda(usize),
    /// no data: shapes only
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

/// What validation needs to know of one tensor. Sizes and strides may be [`UNKNOWN`]: what depends on them is not checked then.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    /// of its elements
    pub dtype: DType,
    /// where it is; a call's tensors share it
    pub device: Device,
    /// as many as the tensor has dimensions; no argument has more than four
    pub sizes: Dims,
    /// in elements
    pub strides: Dims,
}

/// Sizes or strides. Arguments have four at most, and one tensor for q, k and v, which is given by mistake, has five: with room for
/// these no call asks for memory, which it would do twice for each of its tensors.
pub type Dims = SmallVec<[i64; 5]>;

/// Who will compute: it decides which dtypes and layouts are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// ATen operations on the CPU
    Cpu,
    /// our kernels, on a GPU or in the simulator: fp16 (bf16 is converted)
    Kernels,
    /// nobody: tensors without data, which may stand for those of either
    Meta,
}

/// The options of a call, with its tensors described.
pub type Options = crate::options::Options<TensorDesc>;

impl Options {
    /// Whether sequences of different lengths lie one after the other in tensors without a batch dimension.
    fn is_packed(&self) -> bool {
        self.cu_seqlens_q.is_some() || self.cu_seqlens_k.is_some()
    }
}

/// Which keys a query row sees: row `i` sees `j` with
/// `i + offset - left <= j <= i + offset + right`, `offset = seqlen_k - seqlen_q`; `None` is no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// keys before position `i + offset` that row `i` sees; at least 0
    pub left: Option<i64>,
    /// keys after it; at least 0, and 0 is causal
    pub right: Option<i64>,
}

/// Rows of tensors that hold sequences one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// of q, out and their gradients
    pub total_q: i64,
    /// of k, v and their gradients
    pub total_k: i64,
}

/// What a problem asks for beyond the window: it decides which kernels can run it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestedFeatures {
    /// 0: off
    pub softcap: f64,
    /// the probability to be dropped, in [0, 1); 0: off
    pub dropout_p: f64,
    /// `alibi_slopes` is given
    pub alibi: bool,
    /// `attn_bias` is given, added or a mask
    pub attn_bias: bool,
    /// ... and reaches kernels as fp32: where it is that, or bf16
    pub fp32_bias: bool,
    /// `sinks` is given
    pub sinks: bool,
    /// `seqused_k` is given
    pub seqused_k: bool,
}

/// A checked problem: everything that planning and the CPU backend need. Of tensors without data, sizes may be [`UNKNOWN`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// entries, or sequences of packed tensors
    pub batch: i64,
    /// of every entry; packed, of the longest that there can be: what the caller says, and at most all rows
    pub seqlen_q: i64,
    /// the same for keys
    pub seqlen_k: i64,
    /// query heads; a multiple of nheads_k
    pub nheads: i64,
    /// heads of k and v
    pub nheads_k: i64,
    /// of q and k, 1 to [`MAX_HEADDIM`]
    pub headdim: i64,
    /// of v and out, 1 to [`MAX_HEADDIM`]
    pub headdim_v: i64,
    /// finite as fp32; may be 0 or negative
    pub softmax_scale: f64,
    /// which keys a row sees, is_causal included
    pub window: Window,
    /// None: dense, with a batch dimension
    pub packed: Option<Packed>,
    /// what kernels have to be prepared for besides
    pub features: RequestedFeatures,
}

impl Attention {
    /// No output element, or no key for any row: nothing to launch.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.nheads, self.seqlen_q, self.seqlen_k].contains(&0)
    }

    /// Whether sequence lengths have to be read from memory.
    pub fn is_ragged(&self) -> bool {
        self.packed.is_some() || self.features.seqused_k
    }

    /// Shape of out, of which `headdim` is the last size.
    pub fn query_shape(&self, headdim: i64) -> Vec<i64> {
        match self.packed {
            Some(p) => vec![p.total_q, self.nheads, headdim],
            None => vec![self.batch, self.seqlen_q, self.nheads, headdim],
        }
    }

    /// Shape of softmax_lse.
    pub fn lse_shape(&self) -> Vec<i64> {
        match self.packed {
            Some(p) => vec![self.nheads, p.total_q],
            None => vec![self.batch, self.nheads, self.seqlen_q],
        }
    }
}

/// Largest headdim of the compiled kernels.
pub const MAX_HEADDIM: i64 = 256;
/// Columns of a latent of multi-head latent attention, which are its values, and of what stands behind it for positions: the only
/// sizes that models have.
pub const LATENT_HEADDIMS: [i64; 2] = [512, 64];
/// Rows and keys are int32 in the kernels. The mask (csrc/mask.cuh) adds up to three sequence lengths and a tile, and four bytes
/// for each key of an fp32 bias must not overflow either (`Bias::load4` in csrc/score_mod.cuh).
const MAX_SEQLEN: i64 = (1 << 29) - 1;
/// What `max_seqlen_q` and `max_seqlen_k` may be: any length that int32 cu_seqlens can say.
const MAX_GIVEN_SEQLEN: i64 = i32::MAX as i64;
/// Of packed sequences, each has up to 32 rows of scratch memory beyond its own, and those are counted in int32 as well.
const MAX_SEQUENCES: i64 = 1 << 25;
/// The kernels form a capped score as cap - 2 * cap / (e^2x + 1) (csrc/score_mod.cuh), so its error is about cap * 2^-23
/// whatever the score is. At 1e4 the simulator has 4e-4 (root mean square; 1.2e-3 at most), where fp16 rounds a probability by up to
/// 2^-11 of itself, 5e-4. It would grow with the cap. Below 1e-4 all scores are equal to within that rounding anyway.
const SOFTCAPS: std::ops::RangeInclusive<f64> = 1e-4..=1e4;
/// The kernels step from row to row with 32-bit multiples (`TileStream` in csrc/tile.cuh).
const MAX_ROW_STRIDE: i64 = (1 << 32) - 1;
/// The merge kernel counts the chunks of a block's rows in int32.
const MAX_MERGED_HEADDIM: i64 = 1 << 20;
/// Gradient and forward grids have the heads on an axis of at most 65535 blocks.
const MAX_HEADS: i64 = 65535;

fn number(n: i64) -> String {
    if n == UNKNOWN {
        "?".into()
    } else {
        n.to_string()
    }
}

fn listed(sizes: &[i64]) -> String {
    let dims: Vec<String> = sizes.iter().map(|&n| number(n)).collect();
    format!("({})", dims.join(", "))
}

/// Whether a size is, or may be, another.
fn same_size(a: i64, b: i64) -> bool {
    a == b || a == UNKNOWN || b == UNKNOWN
}

fn same_sizes(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| same_size(a, b))
}

fn shape(d: &TensorDesc) -> String {
    format!("shape {}", listed(&d.sizes))
}

/// Sizes of a (batch, seqlen, nheads, headdim) or a packed (total, nheads, headdim) tensor.
#[derive(Clone, Copy)]
struct Sizes {
    /// 0 where packed
    batch: i64,
    /// total where packed
    rows: i64,
    nheads: i64,
    headdim: i64,
}

impl Sizes {
    fn of(name: &str, d: &TensorDesc, packed: bool) -> Result<Sizes> {
        let allowed = match packed {
            false => "rank 4, (batch, seqlen, nheads, headdim); packed (total, nheads, headdim) needs cu_seqlens_q and cu_seqlens_k",
            true => "rank 3, (total, nheads, headdim), since cu_seqlens_q and cu_seqlens_k are given",
        };
        match (packed, &d.sizes[..]) {
            (false, &[batch, rows, nheads, headdim]) => Ok(Sizes { batch, rows, nheads, headdim }),
            (true, &[rows, nheads, headdim]) => Ok(Sizes { batch: 0, rows, nheads, headdim }),
            _ => Err(Error::value(name, format!("a tensor of rank {} with {}", d.sizes.len(), shape(d)), allowed)),
        }
    }
}

fn check_dtype(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    let (ok, allowed) = match backend {
        Backend::Kernels => (matches!(d.dtype, DType::Half | DType::BFloat16), "torch.float16 or torch.bfloat16"),
        Backend::Cpu | Backend::Meta => (
            matches!(d.dtype, DType::Half | DType::BFloat16 | DType::Float | DType::Double),
            "torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        ),
    };
    if !ok {
        return Err(Error::value(name, format!("dtype {}", d.dtype), allowed));
    }
    Ok(())
}

/// Checks that hold for every (batch, seqlen, nheads, headdim) or packed tensor that a backend reads.
fn check_operand(name: &str, d: &TensorDesc, packed: bool, backend: Backend) -> Result<Sizes> {
    check_dtype(name, d, backend)?;
    let sizes = Sizes::of(name, d, packed)?;
    check_layout(name, d, backend)?;
    Ok(sizes)
}

fn check_layout(name: &str, d: &TensorDesc, backend: Backend) -> Result<()> {
    if d.sizes.contains(&0) {
        return Ok(());
    }
    let (columns, rows) = (d.sizes.len() - 1, d.sizes.len() - 3);
    if d.sizes[columns] > 1 && !same_size(d.strides[columns], 1) {
        return Err(Error::value(
            name,
            format!("stride {} in the last dimension", d.strides[columns]),
            "a contiguous last dimension (stride 1)",
        ));
    }
    // bf16 is converted, and the copy has strides of its own
    if backend == Backend::Kernels && d.dtype == DType::Half && d.sizes[rows] > 1 && d.strides[rows] > MAX_ROW_STRIDE {
        return Err(Error::value(name, format!("stride {} between rows", d.strides[rows]), format!("at most {MAX_ROW_STRIDE} elements")));
    }
    Ok(())
}

fn check_headdim(name: &str, what: &str, headdim: i64) -> Result<()> {
    if headdim != UNKNOWN && !(1..=MAX_HEADDIM).contains(&headdim) {
        return Err(Error::value(name, format!("{what} {headdim}"), format!("a headdim from 1 to {MAX_HEADDIM}")));
    }
    Ok(())
}

/// Query heads and key heads, `keys` the tensors with the latter.
fn check_heads(nheads: i64, nheads_k: i64, keys: &str) -> Result<()> {
    if nheads > 0 && nheads_k != UNKNOWN && (nheads_k == 0 || nheads % nheads_k != 0) {
        return Err(Error::value("q", format!("nheads {nheads}"), format!("a multiple of nheads_k {nheads_k}, that of {keys}")));
    }
    if nheads > MAX_HEADS {
        return Err(Error::value("q", format!("nheads {nheads}"), format!("at most {MAX_HEADS}")));
    }
    Ok(())
}

fn check_same_size(name: &str, what: &str, found: i64, other: &str, expected: i64) -> Result<()> {
    if same_size(found, expected) {
        return Ok(());
    }
    check_same(name, what, found, other, expected)
}

fn check_same<T: PartialEq + fmt::Display>(name: &str, what: &str, found: T, other: &str, expected: T) -> Result<()> {
    if found != expected {
        return Err(Error::value(name, format!("{what} {found}"), format!("{what} {expected}, that of {other}")));
    }
    Ok(())
}

/// An int32 vector on q's device: `cu_seqlens_q`, `cu_seqlens_k`, `seqused_k`.
fn check_lengths(name: &str, d: &TensorDesc, q: &TensorDesc, count: Option<i64>, what: &str) -> Result<()> {
    if d.dtype != DType::Int32 {
        return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.int32"));
    }
    let wrong = |found: i64| count.map_or(found != UNKNOWN && found < 1, |n| !same_size(found, n));
    if d.sizes.len() != 1 || wrong(d.sizes[0]) {
        let n = count.map_or(String::new(), |n| format!(", here ({},)", number(n)));
        return Err(Error::value(name, shape(d), format!("shape {what}{n}")));
    }
    if d.sizes[0] > 1 && !same_size(d.strides[0], 1) {
        return Err(Error::value(name, format!("stride {}", d.strides[0]), "a contiguous tensor"));
    }
    check_same(name, "device", d.device, "q", q.device)
}

/// (batch, max_seqlen_q, max_seqlen_k) of packed sequences.
fn check_packed(q: &TensorDesc, o: &Options, totals: Packed, backend: Backend) -> Result<(i64, i64, i64)> {
    let both = "a tensor, since the other of cu_seqlens_q and cu_seqlens_k is given";
    let cu_q = o.cu_seqlens_q.as_ref().ok_or_else(|| Error::value("cu_seqlens_q", "None", both))?;
    let cu_k = o.cu_seqlens_k.as_ref().ok_or_else(|| Error::value("cu_seqlens_k", "None", both))?;
    check_lengths("cu_seqlens_q", cu_q, q, None, "(batch + 1,)")?;
    check_lengths("cu_seqlens_k", cu_k, q, Some(cu_q.sizes[0]), "(batch + 1,), that of cu_seqlens_q")?;
    let batch = if cu_q.sizes[0] == UNKNOWN { UNKNOWN } else { cu_q.sizes[0] - 1 };
    if batch > MAX_SEQUENCES {
        return Err(Error::value("cu_seqlens_q", shape(cu_q), format!("at most {MAX_SEQUENCES} sequences")));
    }
    // What no values of cu_seqlens can make right is known without reading them.
    for (name, cu, total) in [("cu_seqlens_q", cu_q, totals.total_q), ("cu_seqlens_k", cu_k, totals.total_k)] {
        if batch == 0 && total > 0 {
            return Err(Error::value(
                name,
                shape(cu),
                format!("shape (batch + 1,) of one sequence or more, to which the {total} rows belong"),
            ));
        }
    }
    let longest = |name: &str, given: Option<i64>, total: i64| match given {
        None => Err(Error::value(name, "None", "the length of the longest sequence, since cu_seqlens_q and cu_seqlens_k are given")),
        Some(UNKNOWN) if backend == Backend::Meta => Ok(UNKNOWN),
        Some(n) if !(0..=MAX_GIVEN_SEQLEN).contains(&n) => Err(Error::value(name, n, format!("a length from 0 to {MAX_GIVEN_SEQLEN}"))),
        Some(0) if total > 0 => {
            Err(Error::value(name, 0, format!("the length of the longest sequence, at least 1: there are {total} rows")))
        }
        Some(n) => Ok(n),
    };
    Ok((batch, longest("max_seqlen_q", o.max_seqlen_q, totals.total_q)?, longest("max_seqlen_k", o.max_seqlen_k, totals.total_k)?))
}

/// Tensors that change the scores; `longest` are the sizes that a bias has for queries and keys.
fn check_features(q: &TensorDesc, a: &Attention, longest: [i64; 2], o: &Options) -> Result<()> {
    if let Some(d) = &o.seqused_k {
        check_lengths("seqused_k", d, q, Some(a.batch), "(batch,)")?;
    }
    if let Some(d) = &o.alibi_slopes {
        check_alibi(d, q, a.batch, a.nheads)?;
    }
    if let Some(d) = &o.sinks {
        check_sinks(d, q, a.nheads)?;
    }
    if let Some(d) = &o.attn_bias {
        if d.dtype != q.dtype && d.dtype != DType::Float && d.dtype != DType::Bool {
            return Err(Error::value("attn_bias", format!("dtype {}", d.dtype), format!("torch.bool, {} (q's) or torch.float32", q.dtype)));
        }
        let full = [a.batch, a.nheads, longest[0], longest[1]];
        if d.sizes.len() != 4 || d.sizes.iter().zip(full).any(|(&n, full)| n != 1 && !same_size(n, full)) {
            return Err(Error::value(
                "attn_bias",
                shape(d),
                format!("shape (batch, nheads, seqlen_q, seqlen_k), here {}, in which any size may be 1", listed(&full)),
            ));
        }
        check_same("attn_bias", "device", d.device, "q", q.device)?;
    }
    Ok(())
}

/// What every op with scores has: scale, cap and window.
struct Scores {
    softmax_scale: Option<f64>,
    softcap: f64,
    is_causal: bool,
    window_left: i64,
    window_right: i64,
}

impl Scores {
    fn check(&self, backend: Backend) -> Result<()> {
        if self.softcap != 0.0 && !SOFTCAPS.contains(&self.softcap) {
            let allowed = format!("0 (off) or a number from {:e} to {:e}", SOFTCAPS.start(), SOFTCAPS.end());
            return Err(Error::value("softcap", self.softcap, allowed));
        }
        if let Some(s) = self.softmax_scale {
            if !s.is_finite() || (s as f32).is_infinite() {
                return Err(Error::value("softmax_scale", s, "a finite float32 number"));
            }
        }
        for (name, w) in [("window_left", self.window_left), ("window_right", self.window_right)] {
            if w < -1 && !(w == UNKNOWN && backend == Backend::Meta) {
                return Err(Error::value(name, w, "-1 (no bound) or a number of keys >= 0"));
            }
        }
        if self.is_causal && self.window_right > 0 {
            return Err(Error::value(
                "window_right",
                format!("{} together with is_causal=True", self.window_right),
                "-1 or 0, since a causal mask hides later keys",
            ));
        }
        Ok(())
    }

    /// softmax_scale, given or not.
    fn scale(&self, headdim: i64) -> f64 {
        self.softmax_scale.unwrap_or_else(|| (headdim as f64).powf(-0.5))
    }

    fn window(&self) -> Window {
        // an unknown one bounds nothing: no kernel runs
        let bound = |w: i64| (w >= 0).then_some(w);
        Window { left: bound(self.window_left), right: if self.is_causal { Some(0) } else { bound(self.window_right) } }
    }
}

fn check_alibi(d: &TensorDesc, q: &TensorDesc, batch: i64, nheads: i64) -> Result<()> {
    if d.dtype != DType::Float {
        return Err(Error::value("alibi_slopes", format!("dtype {}", d.dtype), "torch.float32"));
    }
    if !same_sizes(&d.sizes, &[nheads]) && !same_sizes(&d.sizes, &[batch, nheads]) {
        return Err(Error::value(
            "alibi_slopes",
            shape(d),
            format!("shape (nheads,) or (batch, nheads), here ({0},) or ({1}, {0})", number(nheads), number(batch)),
        ));
    }
    check_same("alibi_slopes", "device", d.device, "q", q.device)
}

fn check_sinks(d: &TensorDesc, q: &TensorDesc, nheads: i64) -> Result<()> {
    if d.dtype != q.dtype && d.dtype != DType::Float {
        return Err(Error::value("sinks", format!("dtype {}", d.dtype), format!("{} (q's) or torch.float32", q.dtype)));
    }
    if !same_sizes(&d.sizes, &[nheads]) {
        return Err(Error::value("sinks", shape(d), format!("shape (nheads,), here ({},)", number(nheads))));
    }
    check_same("sinks", "device", d.device, "q", q.device)
}

/// Check everything about q, k, v and the options.
///
/// # Errors
/// `Value` for a wrong argument, `Unsupported` for a feature that this version does not have.
pub fn validate(q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    if !(0.0..1.0).contains(&o.dropout_p) {
        return Err(Error::value("dropout_p", o.dropout_p, "a probability in [0, 1)"));
    }
    let Options { softmax_scale, softcap, is_causal, window_left, window_right, .. } = *o;
    let scores = Scores { softmax_scale, softcap, is_causal, window_left, window_right };
    scores.check(backend)?;
    if o.softcap > 0.0 && o.dropout_p > 0.0 {
        return Err(Error::value("softcap", format!("{} together with dropout_p {}", o.softcap, o.dropout_p), "one of the two to be 0"));
    }
    let packed = o.is_packed();
    let qs = check_operand("q", q, packed, backend)?;
    let ks = check_operand("k", k, packed, backend)?;
    let vs = check_operand("v", v, packed, backend)?;
    for (name, d, sizes) in [("k", k, ks), ("v", v, vs)] {
        check_same(name, "dtype", d.dtype, "q", q.dtype)?;
        check_same(name, "device", d.device, "q", q.device)?;
        check_same_size(name, "batch", sizes.batch, "q", qs.batch)?;
    }
    let rows = if packed { "total" } else { "seqlen" };
    check_same_size("v", rows, vs.rows, "k", ks.rows)?;
    check_same_size("v", "nheads", vs.nheads, "k", ks.nheads)?;
    check_same_size("k", "headdim", ks.headdim, "q", qs.headdim)?;
    let (nheads, nheads_k) = (qs.nheads, ks.nheads);
    check_heads(nheads, nheads_k, "k and v")?;
    check_headdim("q", "headdim", qs.headdim)?;
    check_headdim("v", "headdim", vs.headdim)?;
    for (name, seqlen) in [("q", qs.rows), ("k", ks.rows)] {
        if seqlen > MAX_SEQLEN {
            return Err(Error::value(name, format!("{rows} {seqlen}"), format!("at most {MAX_SEQLEN}")));
        }
    }
    let totals = Packed { total_q: qs.rows, total_k: ks.rows };
    let (batch, longest_q, longest_k) = if packed {
        check_packed(q, o, totals, backend)?
    } else {
        for (name, given) in [("max_seqlen_q", o.max_seqlen_q), ("max_seqlen_k", o.max_seqlen_k)] {
            if let Some(n) = given {
                return Err(Error::value(name, number(n), "None, since cu_seqlens_q and cu_seqlens_k are not given"));
            }
        }
        (qs.batch, qs.rows, ks.rows)
    };
    let a = Attention {
        batch,
        seqlen_q: longest_q.min(totals.total_q),
        seqlen_k: longest_k.min(totals.total_k),
        nheads,
        nheads_k,
        headdim: qs.headdim,
        headdim_v: vs.headdim,
        softmax_scale: scores.scale(qs.headdim),
        window: scores.window(),
        packed: packed.then_some(totals),
        features: RequestedFeatures {
            softcap: o.softcap,
            dropout_p: o.dropout_p,
            alibi: o.alibi_slopes.is_some(),
            attn_bias: o.attn_bias.is_some(),
            fp32_bias: o.attn_bias.as_ref().is_some_and(|d| matches!(d.dtype, DType::Float | DType::BFloat16)),
            sinks: o.sinks.is_some(),
            seqused_k: o.seqused_k.is_some(),
        },
    };
    check_features(q, &a, [longest_q, longest_k], o)?;
    Ok(a)
}

/// The values of cu_seqlens of `total` rows, in sequences of at most `longest`, as `longest_name` says.
fn check_cu_seqlens(name: &str, cu: &[i32], total: i64, longest_name: &str, longest: i64) -> Result<()> {
    if cu[0] != 0 {
        return Err(Error::value(name, format!("{} as its first value", cu[0]), "0"));
    }
    if let Some(i) = (1..cu.len()).find(|&i| cu[i] < cu[i - 1]) {
        return Err(Error::value(name, format!("{} after {} (entry {i})", cu[i], cu[i - 1]), "values that never descend"));
    }
    if i64::from(cu[cu.len() - 1]) != total {
        return Err(Error::value(name, format!("{} as its last value", cu[cu.len() - 1]), format!("{total}, the number of rows")));
    }
    if let Some(i) = (1..cu.len()).find(|&i| i64::from(cu[i] - cu[i - 1]) > longest) {
        return Err(Error::value(longest_name, longest, format!("at least {}, the length of sequence {}", cu[i] - cu[i - 1], i - 1)));
    }
    Ok(())
}

/// Check the lengths themselves, where somebody has read them.
///
/// # Errors
/// `Value`, naming the argument.
pub fn validate_lengths(
    a: &Attention,
    cu_seqlens_q: Option<&[i32]>,
    cu_seqlens_k: Option<&[i32]>,
    seqused_k: Option<&[i32]>,
) -> Result<()> {
    let Packed { total_q, total_k } = a.packed.unwrap_or(Packed { total_q: 0, total_k: a.seqlen_k });
    for (name, cu, total, longest_name, longest) in [
        ("cu_seqlens_q", cu_seqlens_q, total_q, "max_seqlen_q", a.seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, total_k, "max_seqlen_k", a.seqlen_k),
    ] {
        if let Some(cu) = cu {
            check_cu_seqlens(name, cu, total, longest_name, longest)?;
        }
    }
    if let Some(used) = seqused_k {
        for (b, &n) in used.iter().enumerate() {
            let stored = cu_seqlens_k.map_or(a.seqlen_k, |cu| i64::from(cu[b + 1] - cu[b]));
            if !(0..=stored).contains(&i64::from(n)) {
                return Err(Error::value("seqused_k", format!("{n} (entry {b})"), format!("a length from 0 to {stored}")));
            }
        }
    }
    Ok(())
}

/// Check the tensors that `volta_fa::bwd` takes beside those of the forward pass.
pub fn validate_backward(
    dout: &TensorDesc,
    out: &TensorDesc,
    softmax_lse: &TensorDesc,
    rng_state: Option<&TensorDesc>,
    q: &TensorDesc,
    a: &Attention,
    backend: Backend,
) -> Result<()> {
    let expected = a.query_shape(a.headdim_v);
    for (name, d) in [("dout", dout), ("out", out)] {
        check_dtype(name, d, backend)?;
        Sizes::of(name, d, a.packed.is_some())?;
        check_same(name, "dtype", d.dtype, "q", q.dtype)?;
        check_same(name, "device", d.device, "q", q.device)?;
        // an incoming gradient in a layout that no backend reads is copied before it is used (`readable_gradient` in tensor.rs)
        if !(name == "dout" && backend == Backend::Meta) {
            check_layout(name, d, backend)?;
        }
        if !same_sizes(&d.sizes, &expected) {
            return Err(Error::value(name, shape(d), format!("shape {}, that of the forward's out", listed(&expected))));
        }
    }
    if softmax_lse.dtype != DType::Float {
        return Err(Error::value("softmax_lse", format!("dtype {}", softmax_lse.dtype), "torch.float32"));
    }
    check_same("softmax_lse", "device", softmax_lse.device, "q", q.device)?;
    if !same_sizes(&softmax_lse.sizes, &a.lse_shape()) {
        return Err(Error::value("softmax_lse", shape(softmax_lse), format!("shape {}", listed(&a.lse_shape()))));
    }
    match rng_state {
        Some(d) if a.features.dropout_p > 0.0 => {
            if d.dtype != DType::Int64 || !same_sizes(&d.sizes, &[2]) {
                return Err(Error::value(
                    "rng_state",
                    format!("{} of dtype {}", shape(d), d.dtype),
                    "shape (2,) of dtype torch.int64, that of the forward",
                ));
            }
            check_same("rng_state", "device", d.device, "q", q.device)
        }
        None if a.features.dropout_p > 0.0 => Err(Error::value("rng_state", "None", "that of the forward, since dropout_p is not 0")),
        Some(d) => Err(Error::value("rng_state", format!("a tensor of {}", shape(d)), "None, since dropout_p is 0")),
        None => Ok(()),
    }
}

/// A checked `volta_fa::merge_attention_states`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedStates {
    /// 1 where packed
    pub batch: i64,
    /// all rows where packed
    pub seqlen_q: i64,
    /// heads of out
    pub nheads: i64,
    /// columns of out; the kernel takes any number
    pub headdim_v: i64,
}

impl MergedStates {
    /// No element: nothing to launch.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.seqlen_q, self.nheads, self.headdim_v].contains(&0)
    }
}

/// Check the tensors of `volta_fa::merge_attention_states`, or, `in_place`, of what adds a part to out_a and its softmax_lse: two outs
/// and their softmax_lse, dense or packed. In place out_a may be float32 beside a part of lower precision.
///
/// # Errors
/// `Value`, naming the argument.
pub fn validate_merge(outs: [&TensorDesc; 2], lses: [&TensorDesc; 2], in_place: bool, backend: Backend) -> Result<MergedStates> {
    let [a, b] = outs;
    let floats = [DType::Half, DType::BFloat16, DType::Float, DType::Double];
    let allowed = if backend == Backend::Kernels { &floats[..3] } else { &floats };
    if !allowed.contains(&a.dtype) {
        let names: Vec<String> = allowed.iter().map(DType::to_string).collect();
        return Err(Error::value("out_a", format!("dtype {}", a.dtype), names.join(", ")));
    }
    if !matches!(a.sizes.len(), 3 | 4) {
        let given = format!("a tensor of rank {} with {}", a.sizes.len(), shape(a));
        return Err(Error::value("out_a", given, "(batch, seqlen_q, nheads, headdim_v) or packed (total_q, nheads, headdim_v)"));
    }
    let packed = a.sizes.len() == 3;
    let sizes = Sizes::of("out_a", a, packed)?;
    if !(in_place && a.dtype == DType::Float && matches!(b.dtype, DType::Half | DType::BFloat16)) {
        check_same("out_b", "dtype", b.dtype, "out_a", a.dtype)?;
    }
    check_same("out_b", "device", b.device, "out_a", a.device)?;
    if !same_sizes(&a.sizes, &b.sizes) {
        return Err(Error::value("out_b", shape(b), format!("{}, that of out_a", shape(a))));
    }
    for (name, d) in [("out_a", a), ("out_b", b)] {
        check_layout(name, d, backend)?;
    }
    let expected = if packed { vec![sizes.nheads, sizes.rows] } else { vec![sizes.batch, sizes.nheads, sizes.rows] };
    for (name, d) in ["softmax_lse_a", "softmax_lse_b"].into_iter().zip(lses) {
        if d.dtype != DType::Float {
            return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.float32"));
        }
        check_same(name, "device", d.device, "out_a", a.device)?;
        if !same_sizes(&d.sizes, &expected) {
            return Err(Error::value(name, shape(d), format!("shape {}, that of out_a's softmax_lse", listed(&expected))));
        }
    }
    let rows = if packed { "total" } else { "seqlen" };
    for (what, n, most) in
        [(rows, sizes.rows, MAX_SEQLEN), ("nheads", sizes.nheads, MAX_HEADS), ("headdim", sizes.headdim, MAX_MERGED_HEADDIM)]
    {
        if n > most {
            return Err(Error::value("out_a", format!("{what} {n}"), format!("at most {most}")));
        }
    }
    let batch = if packed { 1 } else { sizes.batch };
    Ok(MergedStates { batch, seqlen_q: sizes.rows, nheads: sizes.nheads, headdim_v: sizes.headdim })
}
