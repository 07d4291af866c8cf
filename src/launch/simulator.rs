//! Launches in the simulator (tools/volta-sim): the embedded machine code for sm_70 or sm_75 runs on the CPU tensors' own memory. Calls of
//! fp16 or bf16 CPU tensors (fwd and bwd: fp32 too) get a [`Simulator`] from src/ops/inputs.rs if the environment asks for it.
//!
//! `VOLTA_FA_SIMULATE=1` executes every block. `VOLTA_FA_SIMULATE=timing` times one SM's share of each launch on a copy of the memory, so
//! outputs stay as they were allocated. It keeps the reports for [`take_reports`]. `VOLTA_FA_SIMULATE=launches` runs nothing: it only keeps
//! a report with the kernel, the grid and a digest of the machine code of each launch.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `VOLTA_FA_SIM_GPU` | the GPU of plans and times: v100, pg503 (a GV100 with 72 SMs), t4, rtx2080ti or titanrtx | v100 |
//! | `VOLTA_FA_SIM_QUANTUM` | instructions that a warp runs before the next one does; 1: warps advance in turn | 20000 |
//! | `VOLTA_FA_SIM_THREADS` | host threads; 1 makes the atomics' order repeatable | 1 |
//! | `VOLTA_FA_SIM_SET` | machine constants of a timed run, `icache=false,clock_mhz=1380` | none |
//!
//! Kernels that a GPU of this kind would get as PTX (Volta's on a T4) run as their family's own machine code, which computes the same.
//! Timing that would say nothing, and is refused.

use super::memo::Memo;
use super::tuning::{self, DeviceTuning};
use super::{only_family, KernelLaunch, Launcher, MemoryRange, SCRATCH};
use crate::error::{Error, Result};
use crate::kernels::{self, Code, Variant};
use crate::limits::MAX_GRID_YZ;
use crate::plan::DeviceLimits;
use crate::tuning::Card; // GPU and software that a tuning file is for
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use volta_sim::{Machine, Module, Schedule, TimingOptions};

/// A GPU, and how launches on it are simulated.
pub struct Simulator {
    machine: Machine, // the GPU: sm (70), sms, shared memory, and the constants of its timing
    mode: Mode,
}

/// What `VOLTA_FA_SIMULATE` asks for.
enum Mode {
    /// every block is executed: outputs hold what the kernels compute
    Functional(Schedule),
    /// one SM's share of a launch is timed, on a copy of the memory: outputs stay unwritten
    Timed,
    /// launches are recorded and not run: outputs stay unwritten
    Recorded,
}

/// Tuning files by simulated GPU.
static TUNINGS: Memo<String, &'static DeviceTuning> = Memo::new();
/// Decoded machine code by kernel.
static MODULES: Memo<&'static str, Arc<Module>> = Memo::new();
/// Reports that [`take_reports`] has not returned yet.
static REPORTS: Mutex<Vec<serde_json::Value>> = Mutex::new(Vec::new());

/// Returns the reports of the timed or recorded launches since the last call, oldest first.
pub fn take_reports() -> Vec<serde_json::Value> {
    std::mem::take(&mut *REPORTS.lock().unwrap_or_else(|e| e.into_inner()))
}

fn keep_report(report: serde_json::Value) {
    REPORTS.lock().unwrap_or_else(|e| e.into_inner()).push(report);
}

/// Returns an environment variable; None if it is empty or not set.
fn variable(name: &str) -> Result<Option<String>> {
    let Some(value) = std::env::var_os(name).filter(|v| !v.is_empty()) else { return Ok(None) };
    value.into_string().map(Some).map_err(|value| Error::value(name, format!("`{}`", value.to_string_lossy()), "UTF-8 text"))
}

/// Returns the positive integer of an environment variable.
fn positive<T: std::str::FromStr + PartialOrd + From<u8>>(name: &str, default: T) -> Result<T> {
    let Some(text) = variable(name)? else { return Ok(default) };
    let number = text.parse().ok().filter(|n| *n >= T::from(1));
    number.ok_or_else(|| Error::value(name, format!("`{text}`"), "a positive integer"))
}

impl Simulator {
    /// Returns the simulator that the environment requests; None: it requests none.
    pub fn from_env() -> Result<Option<Self>> {
        let mode = match variable("VOLTA_FA_SIMULATE")?.as_deref() {
            None | Some("0") => return Ok(None),
            Some("1") => Mode::Functional(Schedule {
                quantum: positive("VOLTA_FA_SIM_QUANTUM", Schedule::default().quantum)?,
                threads: positive("VOLTA_FA_SIM_THREADS", 1)?,
            }),
            Some("timing") => Mode::Timed,
            Some("launches") => Mode::Recorded,
            Some(other) => return Err(Error::value("VOLTA_FA_SIMULATE", format!("`{other}`"), "0, 1, timing or launches")),
        };
        let settings = variable("VOLTA_FA_SIM_SET")?.filter(|_| matches!(mode, Mode::Timed)).unwrap_or_default();
        Ok(Some(Simulator { machine: machine(variable("VOLTA_FA_SIM_GPU")?, &settings)?, mode }))
    }

    /// Returns a simulator of the GPU that `VOLTA_FA_SIM_GPU` names, to describe it. The environment need not simulate calls.
    pub fn of_named_gpu() -> Result<Self> {
        Ok(Simulator { machine: machine(variable("VOLTA_FA_SIM_GPU")?, "")?, mode: Mode::Timed })
    }

    /// Returns the limits of the GPU, without its tuning file.
    fn untuned_limits(&self) -> Result<DeviceLimits> {
        let Machine { sm, sms, smem_per_sm, .. } = self.machine;
        let capability = ((sm / 10) as i32, (sm % 10) as i32);
        Ok(DeviceLimits { capability, sms, shared_bytes_per_block: smem_per_sm, only: only_family()?, tuning: None })
    }
}

/// Returns a GPU of volta-sim by name, with constants changed by `settings` (`name=value,...`).
fn machine(name: Option<String>, settings: &str) -> Result<Machine> {
    let mut machine = match name {
        None => Machine::default(),
        Some(name) => {
            Machine::named(&name).ok_or_else(|| Error::value("VOLTA_FA_SIM_GPU", format!("`{name}`"), Machine::names().join(" or ")))?
        }
    };
    for setting in settings.split(',').filter(|s| !s.is_empty()) {
        let refuse = |e: String| Error::value("VOLTA_FA_SIM_SET", format!("`{setting}`"), e);
        let (name, value) = setting.split_once('=').ok_or_else(|| refuse("name=value".into()))?;
        machine.set(name, value).map_err(|e| refuse(e.to_string()))?;
    }
    machine
        .check()
        .map_err(|e| Error::value("VOLTA_FA_SIM_SET", format!("`{settings}`"), format!("constants that the model can time ({e})")))?;
    Ok(machine)
}

/// Returns the path of nvdisasm, which decodes machine code, in the triton wheel beside this process's torch. None: there is none, or
/// `VOLTA_SIM_NVDISASM` names one; volta-sim then looks by its own rules.
fn nvdisasm() -> Option<PathBuf> {
    if std::env::var_os("VOLTA_SIM_NVDISASM").is_some_and(|v| !v.is_empty()) {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let torch = maps.lines().filter_map(|l| l.split_whitespace().nth(5)).find(|p| p.ends_with("/torch/lib/libtorch_cpu.so"))?;
    let site = PathBuf::from(torch).ancestors().nth(3)?.to_path_buf();
    Some(site.join("triton/backends/nvidia/bin/nvdisasm")).filter(|p| p.is_file())
}

/// Returns a kernel's machine code, which the first call decodes.
fn module(variant: &'static Variant) -> Result<Arc<Module>> {
    MODULES.get_or_make(variant.name, || {
        let cubin = kernels::image(variant).cubin()?;
        let loaded = Module::load_with(&cubin, nvdisasm().as_deref()).map_err(|e| Error::runtime(format!("simulator: {e}")))?;
        Ok(Arc::new(loaded))
    })
}

impl Launcher for Simulator {
    fn device(&self) -> tch::Device {
        tch::Device::Cpu
    }

    /// Timed launches need the 256 bytes of CUDA's allocators: ATen's CPU allocator aligns to 64, and rows would straddle 128-byte cache
    /// lines that they do not straddle on a GPU. Functional runs have no such need, and their outputs begin their storage.
    fn output_alignment(&self) -> usize {
        match self.mode {
            Mode::Functional(_) => 1,
            Mode::Timed | Mode::Recorded => 256,
        }
    }

    fn looks_at_memory(&self) -> bool {
        true
    }

    fn runs_all_blocks(&self) -> bool {
        matches!(self.mode, Mode::Functional(_))
    }

    /// Fills outputs and scratch memory with NaN, so that what kernels forget to write shows.
    fn begin(&self, ranges: &[MemoryRange]) {
        for e in ranges.iter().filter(|e| e.writable && e.bytes > 0) {
            // SAFETY: writable ranges are whole, live tensors. 0xFF bytes are NaN as fp16 and as fp32.
            unsafe { std::ptr::write_bytes(e.ptr, 0xff, e.bytes) };
        }
    }

    /// The simulated GPU has a tuning file as real ones have, under the name `simulated V100`.
    fn tuning(&self) -> Result<&'static DeviceTuning> {
        TUNINGS.get_or_make(self.machine.name.clone(), || {
            let device = format!("simulated {}", self.machine.name.to_uppercase());
            let card = Card { device, driver: "simulator".into(), volta_fa: env!("CARGO_PKG_VERSION").into() };
            Ok(tuning::look_up(card, &self.untuned_limits()?))
        })
    }

    fn limits(&self) -> Result<DeviceLimits> {
        Ok(DeviceLimits { tuning: tuning::forced().or(self.tuning()?.tuning()), ..self.untuned_limits()? })
    }

    fn launch(&self, launch: &KernelLaunch) -> Result<()> {
        let v = launch.variant;
        if launch.grid[1..].iter().any(|&blocks| i64::from(blocks) > MAX_GRID_YZ) {
            return Err(Error::runtime(format!(
                "{}: a GPU refuses a grid of {:?} blocks, over {MAX_GRID_YZ} in y or z",
                v.name, launch.grid
            )));
        }
        if matches!(self.mode, Mode::Recorded) {
            let code = format!("{:016x}", kernels::image(v).digest());
            keep_report(serde_json::json!({ "kernel": v.name, "grid": launch.grid, "code": code }));
            return Ok(());
        }
        let module = module(v)?;
        // `exchanged`: a timed run takes reads of it as hits in L2, because other blocks have just written it
        let extents: Vec<_> = launch
            .ranges
            .iter()
            .map(|e| volta_sim::Extent { name: e.name, ptr: e.ptr, len: e.bytes, read_only: !e.writable, exchanged: e.name == SCRATCH })
            .collect();
        let sim = volta_sim::Launch {
            grid: launch.grid,
            block: [v.threads, 1, 1],
            dynamic_smem: v.shared_bytes,
            params: launch.params,
            extents: &extents,
        };
        let failed = |e| Error::runtime(format!("simulator: {e}"));
        match &self.mode {
            Mode::Functional(schedule) => {
                // SAFETY: the extents are tensors that the caller holds; the op writes its own outputs only.
                unsafe { module.run(v.name, &sim, schedule) }.map_err(failed)?;
            }
            Mode::Timed => {
                if v.family.code_for(self.machine.sm) != Some(Code::Cubin) {
                    let what = format!("{}: a {} gets its PTX, which the simulator cannot time", v.name, self.machine.name);
                    return Err(Error::unsupported(what));
                }
                let options = TimingOptions { machine: self.machine.clone(), ..Default::default() };
                // SAFETY: as above.
                let report = unsafe { module.time(v.name, &sim, &options) }.map_err(failed)?;
                keep_report(serde_json::to_value(report).map_err(|e| Error::runtime(e.to_string()))?);
            }
            Mode::Recorded => {}
        }
        Ok(())
    }
}
