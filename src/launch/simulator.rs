//! Launches in the simulator: the embedded machine code for sm_70 or sm_75 runs on the CPU tensors' own memory.
//!
//! `VOLTA_FA_SIMULATE=1` executes every block. `VOLTA_FA_SIMULATE=timing` times one SM's share of each
//! launch on a copy of the memory instead, so that outputs stay as they were allocated, and keeps the
//! reports for [`take_reports`].
//! `VOLTA_FA_SIMULATE=launches` runs nothing: it only keeps a report with the kernel, the grid and a digest of the
//! machine code of each launch.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `VOLTA_FA_SIM_GPU` | the GPU that plans are made for and that is timed: a description of volta-sim's | v100 |
//! | `VOLTA_FA_SIM_QUANTUM` | warp instructions before the next warp runs; 1: all together | 20000 |
//! | `VOLTA_FA_SIM_THREADS` | host threads; 1 makes the atomics' order repeatable | 1 |
//! | `VOLTA_FA_SIM_SET` | machine constants of a timed run, `icache=false,clock_mhz=1380` | |
//!
//! A family of which that GPU gets the PTX runs as the machine code of the family's own architecture, which computes the same;
//! timing it would say nothing, and is refused.

use super::tuning::{self, DeviceTuning};
use super::{only_family, KernelLaunch, Launcher, MemoryRange};
use crate::error::{Error, Result};
use crate::kernels::{self, Code};
use crate::plan::DeviceLimits;
use crate::tuning::Card;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use volta_sim::{Machine, Module, Schedule, TimingOptions};

/// A GPU, and how launches on it are simulated.
pub struct Simulator {
    machine: Machine,
    mode: Mode,
}

/// As `VOLTA_FA_SIMULATE` says.
enum Mode {
    /// every block is executed: outputs hold what the kernels compute
    Functional(Schedule),
    /// one SM's share of a launch is timed, on a copy of the memory: outputs stay unwritten
    Timed,
    /// launches are recorded and not run: outputs stay unwritten
    Recorded,
}

static TUNINGS: Mutex<Option<HashMap<String, &'static DeviceTuning>>> = Mutex::new(None);
static MODULES: Mutex<Option<HashMap<&'static str, Arc<Module>>>> = Mutex::new(None);
static REPORTS: Mutex<Vec<serde_json::Value>> = Mutex::new(Vec::new());

/// Returns the reports of the timed or recorded launches since the last call, oldest first.
pub fn take_reports() -> Vec<serde_json::Value> {
    std::mem::take(&mut *REPORTS.lock().unwrap_or_else(|e| e.into_inner()))
}

fn keep_report(report: serde_json::Value) {
    REPORTS.lock().unwrap_or_else(|e| e.into_inner()).push(report);
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> Result<T> {
    match variable(name) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| Error::value(name, format!("`{text}`"), "a positive integer")),
    }
}

impl Simulator {
    /// Returns the simulator that the environment requests; None: it requests none.
    ///
    /// # Errors
    /// A variable that cannot be understood.
    pub fn from_env() -> Result<Option<Self>> {
        let mode = match variable("VOLTA_FA_SIMULATE").as_deref() {
            None | Some("0") => return Ok(None),
            Some("1") => Mode::Functional(Schedule {
                quantum: number("VOLTA_FA_SIM_QUANTUM", Schedule::default().quantum)?,
                threads: number("VOLTA_FA_SIM_THREADS", 1)?,
            }),
            Some("timing") => Mode::Timed,
            Some("launches") => Mode::Recorded,
            Some(other) => return Err(Error::value("VOLTA_FA_SIMULATE", format!("`{other}`"), "0, 1, timing or launches")),
        };
        let settings = variable("VOLTA_FA_SIM_SET").filter(|_| matches!(mode, Mode::Timed)).unwrap_or_default();
        Ok(Some(Simulator { machine: machine(variable("VOLTA_FA_SIM_GPU"), &settings)?, mode }))
    }

    fn untuned_limits(&self) -> Result<DeviceLimits> {
        let Machine { sm, sms, smem_per_sm, .. } = self.machine;
        let capability = ((sm / 10) as i32, (sm % 10) as i32);
        Ok(DeviceLimits { capability, sms, shared_bytes_per_block: smem_per_sm, only: only_family()?, tuning: None })
    }

    /// The tuning of what this stands for, which has a file as cards have.
    ///
    /// # Errors
    /// A variable that cannot be understood.
    pub fn tuning(&self) -> Result<&'static DeviceTuning> {
        let mut tunings = TUNINGS.lock().unwrap_or_else(|e| e.into_inner());
        let tunings = tunings.get_or_insert_with(HashMap::new);
        if let Some(found) = tunings.get(&self.machine.name) {
            return Ok(found);
        }
        let device = format!("simulated {}", self.machine.name.to_uppercase());
        let card = Card { device, driver: "simulator".into(), volta_fa: env!("CARGO_PKG_VERSION").into() };
        let found = tuning::look_up(card, &self.untuned_limits()?);
        tunings.insert(self.machine.name.clone(), found);
        Ok(found)
    }
}

/// The tuning of the GPU that simulated calls stand for, whether any is asked for or not.
///
/// # Errors
/// A variable that cannot be understood.
pub fn tuning() -> Result<&'static DeviceTuning> {
    stood_for()?.tuning()
}

/// Returns the limits of that GPU, which plans of simulated calls rely on.
///
/// # Errors
/// A variable that cannot be understood.
pub fn limits() -> Result<DeviceLimits> {
    stood_for()?.limits()
}

fn stood_for() -> Result<Simulator> {
    Ok(Simulator { machine: machine(variable("VOLTA_FA_SIM_GPU"), "")?, mode: Mode::Timed })
}

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
    Ok(machine)
}

/// nvdisasm of the triton wheel that the process' torch came with, unless volta-sim's own rules find one.
fn nvdisasm() -> Option<PathBuf> {
    if variable("VOLTA_SIM_NVDISASM").is_some() {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let torch = maps.lines().filter_map(|l| l.split_whitespace().nth(5)).find(|p| p.ends_with("/torch/lib/libtorch_cpu.so"))?;
    let site = PathBuf::from(torch).ancestors().nth(3)?.to_path_buf();
    Some(site.join("triton/backends/nvidia/bin/nvdisasm")).filter(|p| p.is_file())
}

fn module(launch: &KernelLaunch) -> Result<Arc<Module>> {
    let mut modules = MODULES.lock().unwrap_or_else(|e| e.into_inner());
    let modules = modules.get_or_insert_with(HashMap::new);
    if let Some(m) = modules.get(launch.variant.name) {
        return Ok(m.clone());
    }
    let cubin = kernels::image(launch.variant).cubin()?;
    let loaded = Module::load_with(&cubin, nvdisasm().as_deref()).map_err(|e| Error::runtime(format!("simulator: {e}")))?;
    Ok(modules.entry(launch.variant.name).or_insert(Arc::new(loaded)).clone())
}

impl Launcher for Simulator {
    fn device(&self) -> tch::Device {
        tch::Device::Cpu
    }

    /// As CUDA's allocators align: ATen's CPU allocator stops at 64 bytes, and rows would straddle cache lines that
    /// they do not straddle on a GPU. (A functional run does not care, and its outputs may begin their storage.)
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

    /// Fill outputs and scratch with NaN: what the kernels forget to write shows.
    fn begin(&self, ranges: &[MemoryRange]) {
        for e in ranges.iter().filter(|e| e.writable && e.bytes > 0) {
            // SAFETY: writable ranges are whole, live tensors. 0xFF bytes are NaN as fp16 and as fp32.
            unsafe { std::ptr::write_bytes(e.ptr, 0xff, e.bytes) };
        }
    }

    fn limits(&self) -> Result<DeviceLimits> {
        Ok(DeviceLimits { tuning: tuning::forced().or(self.tuning()?.tuning()), ..self.untuned_limits()? })
    }

    fn launch(&self, launch: &KernelLaunch) -> Result<()> {
        let v = launch.variant;
        if matches!(self.mode, Mode::Recorded) {
            let code = format!("{:016x}", kernels::image(v).digest());
            keep_report(serde_json::json!({ "kernel": v.name, "grid": launch.grid, "code": code }));
            return Ok(());
        }
        let module = module(launch)?;
        let extents: Vec<_> =
            launch.ranges.iter().map(|e| volta_sim::Extent { name: e.name, ptr: e.ptr, len: e.bytes, read_only: !e.writable }).collect();
        let sim = volta_sim::Launch {
            grid: launch.grid,
            block: [v.threads, 1, 1],
            dynamic_smem: v.shared_bytes,
            params: launch.params,
            extents: &extents,
        };
        match &self.mode {
            Mode::Functional(schedule) => {
                // SAFETY: the extents are tensors that the caller holds; the op writes its own outputs only.
                unsafe { module.run(v.name, &sim, schedule) }.map_err(|e| Error::runtime(format!("simulator: {e}")))?;
            }
            Mode::Timed => {
                if v.family.code_for(self.machine.sm) != Some(Code::Cubin) {
                    let what = format!("{}: a {} gets its PTX, which the simulator cannot time", v.name, self.machine.name);
                    return Err(Error::unsupported(what));
                }
                let options = TimingOptions { machine: self.machine.clone(), ..Default::default() };
                // SAFETY: as above.
                let report = unsafe { module.time(v.name, &sim, &options) }.map_err(|e| Error::runtime(format!("simulator: {e}")))?;
                keep_report(serde_json::to_value(report).map_err(|e| Error::runtime(e.to_string()))?);
            }
            Mode::Recorded => {}
        }
        Ok(())
    }
}
