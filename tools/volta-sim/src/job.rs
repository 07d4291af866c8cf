//! Jobs: launches described in JSON, with their memory contents, as the command `volta-sim LAUNCH.json` takes them (`main.rs`). This one
//! adds 0.5 to the 8 floats of x.bin. Sizes are in bytes, grid and block along x, y, z, 1 where absent:
//! ```json
//! { "cubin": "k.cubin", "kernel": "add", "grid": [1], "block": [8], "params": [{"ptr": "x"}, {"f32": 0.5}],
//!   "buffers": [{"name": "x", "size": 32, "init": {"file": "x.bin"}, "out": "result.bin"}] }
//! ```

use crate::launch::{Schedule, TimingOptions};
use crate::mem::GlobalMem;
use crate::module::{Module, Shape};
use crate::report::Report;
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;

/// What to do with a job, in this order. With both, the timing does not affect the outputs.
#[derive(Clone, Debug, Default)]
pub struct JobOptions {
    /// time one SM's share
    pub timing: Option<TimingOptions>,
    /// execute every CTA; the schedule says how its warps take turns, and on how many host threads
    pub functional: Option<Schedule>,
}

/// Runs the job in a JSON file; paths in it are relative to the file. Outputs are those of the functional run. Without one, they have what
/// the timed CTAs wrote.
///
/// # Errors
/// A file cannot be read or written, or the launch fails.
pub fn run_job(path: &Path, options: &JobOptions) -> Result<Report> {
    let text = std::fs::read_to_string(path).map_err(|e| at(path, e))?;
    let job: Job = serde_json::from_str(&text).map_err(|e| at(path, e))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let cubin = dir.join(&job.cubin);
    let module = Module::load(&std::fs::read(&cubin).map_err(|e| at(&cubin, e))?)?;

    let mut mem = GlobalMem::default();
    let mut address = HashMap::new();
    for b in &job.buffers {
        let base = mem.alloc(&b.name, &b.content(dir)?, true); // true: the kernel may write it
        if address.insert(b.name.as_str(), base).is_some() {
            return Err(format!("buffers: got `{}` twice, expected different names", b.name).into());
        }
    }
    let params = job.params.iter().map(|p| p.bytes(&address)).collect::<Result<Vec<_>>>()?;
    let shape = Shape { grid: dim3(&job.grid), block: dim3(&job.block), dynamic_smem: job.smem };
    let p = module.prepare(module.kernel(&job.kernel)?, shape, &params, mem)?;

    let machine = options.timing.as_ref().map_or_else(|| module.machine(), |t| t.machine.clone());
    let launch = p.info(&machine)?;
    let timed = options.timing.as_ref().map(|t| p.timing(&TimingOptions { flops: job.flops, ..t.clone() })).transpose()?;
    let functional = options.functional.as_ref().map(|s| p.functional(s)).transpose()?;
    let (timing, timed_mem) = timed.unzip();
    let result = timed_mem.as_ref().filter(|_| functional.is_none()).unwrap_or(&p.mem);
    for (i, b) in job.buffers.iter().enumerate() {
        if let Some(f) = &b.out {
            let f = dir.join(f);
            std::fs::write(&f, result.bytes(i)).map_err(|e| at(&f, e))?;
        }
    }
    Ok(Report { launch, functional, timing })
}

fn at(path: &Path, e: impl std::fmt::Display) -> Error {
    format!("{}: {e}", path.display()).into()
}

#[derive(Deserialize)]
struct Job {
    cubin: String,
    kernel: String,
    grid: Vec<u32>,
    block: Vec<u32>,
    /// dynamic shared memory of a CTA, in bytes
    #[serde(default)]
    smem: u32,
    #[serde(default)]
    params: Vec<ParamVal>,
    #[serde(default)]
    buffers: Vec<BufferDesc>,
    /// floating-point operations of the whole grid, for the TFLOP/s figure
    #[serde(default)]
    flops: Option<f64>,
}

#[derive(Deserialize)]
struct BufferDesc {
    name: String,
    size: u64,
    #[serde(default)]
    init: Init,
    /// write the final content here
    #[serde(default)]
    out: Option<String>,
}

/// Content of a buffer before the launch.
#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum Init {
    Zeros,
    /// 0xFF bytes (NaNs as floats)
    #[default]
    Poison,
    /// the file's bytes, then poison; a longer file is an error
    File(String),
    NormalF16(Normal),
    NormalF32(Normal),
}

/// Normal numbers with mean 0 and the standard deviation `scale`.
#[derive(Deserialize)]
struct Normal {
    seed: u64,
    #[serde(default = "one")]
    scale: f32,
}
fn one() -> f32 {
    1.0
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ParamVal {
    /// device address of a buffer
    Ptr(String),
    /// the same plus an offset in bytes
    PtrAt {
        buffer: String,
        offset: i64,
    },
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
    /// raw bytes as hex, with device addresses patched in at the given offsets
    Bytes {
        hex: String,
        #[serde(default)]
        relocs: Vec<Reloc>,
    },
}

#[derive(Deserialize)]
struct Reloc {
    /// offset in the parameter's bytes
    at: usize,
    buffer: String,
    #[serde(default)]
    offset: i64,
}

impl ParamVal {
    fn bytes(&self, address: &HashMap<&str, u64>) -> Result<Vec<u8>> {
        let find = |name: &str, offset: i64| -> Result<[u8; 8]> {
            let base = address.get(name).ok_or_else(|| format!("unknown buffer `{name}`"))?;
            Ok(base.wrapping_add_signed(offset).to_le_bytes())
        };
        Ok(match self {
            ParamVal::Ptr(b) => find(b, 0)?.to_vec(),
            ParamVal::PtrAt { buffer, offset } => find(buffer, *offset)?.to_vec(),
            ParamVal::I32(x) => x.to_le_bytes().to_vec(),
            ParamVal::U32(x) => x.to_le_bytes().to_vec(),
            ParamVal::I64(x) => x.to_le_bytes().to_vec(),
            ParamVal::U64(x) => x.to_le_bytes().to_vec(),
            ParamVal::F32(x) => x.to_le_bytes().to_vec(),
            ParamVal::F64(x) => x.to_le_bytes().to_vec(),
            ParamVal::Bytes { hex, relocs } => {
                let mut d = unhex(hex)?;
                for r in relocs {
                    let place = r.at.checked_add(8).and_then(|end| d.get_mut(r.at..end));
                    place.ok_or("relocation outside the parameter".to_string())?.copy_from_slice(&find(&r.buffer, r.offset)?);
                }
                d
            }
        })
    }
}

fn unhex(hex: &str) -> Result<Vec<u8>> {
    let byte = |c: &[u8]| -> Option<u8> {
        let digit = |i: usize| (*c.get(i)? as char).to_digit(16);
        Some((digit(0)? << 4 | digit(1)?) as u8)
    };
    let bytes: Option<Vec<u8>> = hex.as_bytes().chunks(2).map(byte).collect();
    Ok(bytes.ok_or("parameter bytes: not hexadecimal".to_string())?)
}

fn dim3(v: &[u32]) -> [u32; 3] {
    std::array::from_fn(|i| v.get(i).copied().unwrap_or(1))
}

impl Normal {
    /// Returns `n` numbers (splitmix64 + Box-Muller), the same on all platforms.
    fn numbers(&self, n: usize) -> impl Iterator<Item = f32> {
        let (mut state, scale) = (self.seed, self.scale);
        let mut uniform = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        };
        (0..n).map(move |_| {
            let (a, b) = (uniform().max(1e-300), uniform());
            ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32 * scale
        })
    }
}

impl BufferDesc {
    fn content(&self, dir: &Path) -> Result<Vec<u8>> {
        let n = self.size as usize;
        let element = match self.init {
            Init::NormalF16(_) => 2,
            Init::NormalF32(_) => 4,
            _ => 1,
        };
        if n % element != 0 {
            return Err(format!("buffer `{}`: size: got {n}, expected a multiple of {element}", self.name).into());
        }
        Ok(match &self.init {
            Init::Zeros => vec![0; n],
            Init::Poison => vec![0xff; n],
            Init::File(f) => {
                let mut d = std::fs::read(dir.join(f)).map_err(|e| format!("buffer `{}`: {f}: {e}", self.name))?;
                if d.len() > n {
                    return Err(format!("buffer `{}`: {f}: got {} bytes, expected at most its size, {n}", self.name, d.len()).into());
                }
                d.resize(n, 0xff); // poison after a shorter file
                d
            }
            Init::NormalF16(normal) => normal.numbers(n / 2).flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Init::NormalF32(normal) => normal.numbers(n / 4).flat_map(f32::to_le_bytes).collect(),
        })
    }
}
