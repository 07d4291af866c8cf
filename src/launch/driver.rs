//! Launches kernels through the CUDA driver: [`Driver`] implements [`Launcher`] on PyTorch's stream and in its (primary) context. It loads
//! a kernel on its first launch, and opens libcuda on first use, so this library loads on a machine without a driver. src/ops/ makes a
//! [`Driver`] for a call's CUDA tensors, info.rs one to describe a device. Tests: tests/driver.rs, refusals.rs.

use super::memo::Memo;
use super::tuning::{self, DeviceTuning};
use super::{only_family, KernelLaunch, Launcher};
use crate::error::{Error, Result};
use crate::kernels::{self, Code, Variant};
use crate::plan::DeviceLimits;
use crate::tuning::Card; // GPU and software that a tuning file is for
use cudarc::driver::{result, sys};
use std::ffi::{c_void, CString};
use std::fmt::Write;

/// A CUDA stream of one device, from PyTorch.
pub struct Driver {
    /// PyTorch's device index: 0 for `cuda:0`.
    pub device: usize,
    /// `cudaStream_t`; null is the default stream.
    pub stream: *mut c_void,
}

/// A handle of the driver: a context, or a function, a loaded kernel.
#[derive(Clone, Copy)]
struct Handle<T>(T);
// SAFETY: an opaque pointer, which only the driver follows. All threads of a process may use its contexts, and this one stays retained.
unsafe impl Send for Handle<sys::CUcontext> {}
unsafe impl Sync for Handle<sys::CUcontext> {}
// SAFETY: as above. All threads may launch a function, and modules are never unloaded.
unsafe impl Send for Handle<sys::CUfunction> {}
unsafe impl Sync for Handle<sys::CUfunction> {}

/// Properties of a device that do not change while the process lives. Queried at its first launch.
#[derive(Clone, Copy)]
struct DeviceState {
    limits: DeviceLimits,
    context: Handle<sys::CUcontext>, // the primary one
}

/// Devices that were queried, by index.
static DEVICES: Memo<usize, DeviceState> = Memo::new();
/// Tuning files by device.
static TUNINGS: Memo<usize, &'static DeviceTuning> = Memo::new();
/// Loaded kernels, by device and address of the [`Variant`]: every launch searches, and comparing names would take longer.
static FUNCTIONS: Memo<(usize, usize), Handle<sys::CUfunction>> = Memo::new();

/// Returns true if libcuda can be opened.
pub fn is_available() -> bool {
    // SAFETY: tries to open libcuda, nothing else.
    unsafe { sys::is_culib_present() }
}

/// Turns an error of the driver, in a step `what`, into one for the user.
fn check<T>(what: &str, r: std::result::Result<T, result::DriverError>) -> Result<T> {
    r.map_err(|e| {
        let name = e.error_name().map(|s| s.to_string_lossy().into_owned()).unwrap_or_else(|_| format!("{:?}", e.0));
        // These errors stay with the context until the process ends, so an earlier kernel may have caused them.
        const STICKY: [sys::CUresult; 4] = [
            sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            sys::CUresult::CUDA_ERROR_LAUNCH_FAILED,
            sys::CUresult::CUDA_ERROR_ASSERT,
            sys::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        ];
        let hint = if STICKY.contains(&e.0) {
            " (left by earlier work on this device: the process must be restarted; CUDA_LAUNCH_BLOCKING=1 finds the culprit)"
        } else {
            ""
        };
        Error::runtime(format!("CUDA driver: {what}: {name}{hint}"))
    })
}

impl Driver {
    /// Returns the device's properties, which the first call queries.
    fn state(&self) -> Result<DeviceState> {
        DEVICES.get_or_make(self.device, || self.query())
    }

    /// Returns the compute capability (major, minor). The environment does not restrict it.
    pub fn capability(&self) -> Result<(i32, i32)> {
        Ok(self.state()?.limits.capability)
    }

    /// Loads a kernel ahead of its first launch, which would otherwise load it and perhaps wait for the driver to compile PTX.
    pub fn preload(&self, kernel: &str) -> Result<()> {
        let variant = kernels::variants().find(|v| v.name == kernel);
        let variant = variant.ok_or_else(|| Error::value("kernel", format!("`{kernel}`"), "a kernel that `_info()` lists"))?;
        let state = self.state()?;
        self.enter(&state)?;
        self.function(variant, &state).map(|_| ())
    }

    /// Queries the device and its limits. Creates no CUDA context.
    fn attributes(&self) -> Result<(sys::CUdevice, DeviceLimits)> {
        if !is_available() {
            return Err(Error::runtime("no CUDA driver on this machine (libcuda.so.1 not found): cuda tensors need one"));
        }
        use sys::CUdevice_attribute as Attribute;
        check("cuInit", result::init())?;
        let device = check("cuDeviceGet", result::device::get(self.device as i32))?;
        // SAFETY: `device` was just handed out by the driver.
        let attribute = |a: Attribute| check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, a) });
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let limits = DeviceLimits {
            only: None,   // limits() sets the one family that VOLTA_FA_FAMILY allows,
            tuning: None, // and query() the tuning file's content
            capability,
            sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        };
        Ok((device, limits))
    }

    /// Queries the device, and retains its primary context.
    fn query(&self) -> Result<DeviceState> {
        let (device, limits) = self.attributes()?;
        let limits = DeviceLimits { tuning: self.tuning()?.tuning(), ..limits };
        // SAFETY: `device` exists. The reference is never released: PyTorch too holds the context as long as the process lives.
        let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(DeviceState { limits, context: Handle(context) })
    }

    /// Makes the device's primary context current on this thread, which may not have used CUDA before.
    fn enter(&self, state: &DeviceState) -> Result<()> {
        let Handle(context) = state.context;
        if check("cuCtxGetCurrent", result::ctx::get_current())? != Some(context) {
            // SAFETY: the context is retained.
            check("cuCtxSetCurrent", unsafe { result::ctx::set_current(context) })?;
        }
        Ok(())
    }

    /// Returns a kernel on this device, which the first call loads.
    fn function(&self, variant: &'static Variant, state: &DeviceState) -> Result<Handle<sys::CUfunction>> {
        FUNCTIONS.get_or_make((self.device, std::ptr::from_ref(variant) as usize), || self.load(variant, &state.limits))
    }

    /// Loads a kernel into the current context, and allows it the dynamic shared memory of its blocks.
    fn load(&self, variant: &Variant, limits: &DeviceLimits) -> Result<Handle<sys::CUfunction>> {
        let what = format!("loading {}", variant.name);
        let module = self.module(variant, limits, &what)?;
        let name = CString::new(variant.name).expect("kernel names have no NUL");
        // SAFETY: modules are never unloaded, so the function stays valid.
        unsafe {
            let f = check(&what, result::module::get_function(module, name))?;
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check(&what, result::function::set_function_attribute(f, attribute, variant.shared_bytes as i32))?;
            Ok(Handle(f))
        }
    }

    /// Loads the variant's code in the first form that the driver accepts.
    fn module(&self, variant: &Variant, limits: &DeviceLimits, what: &str) -> Result<sys::CUmodule> {
        let image = kernels::image(variant);
        let forms: &[Code] = match variant.family.code_for(limits.sm()) {
            // a driver older than the compiler of the machine code may still compile the PTX
            Some(Code::Cubin) => &[Code::Cubin, Code::Ptx],
            Some(Code::Ptx) => &[Code::Ptx],
            None => return Err(Error::runtime(format!("{what}: this is an sm_{} device", limits.sm()))),
        };
        let mut answers = vec![];
        for &form in forms {
            let code = match form {
                Code::Cubin => image.cubin()?,
                Code::Ptx => image.ptx()?,
            };
            // SAFETY: `code` is a complete cubin or NUL-terminated PTX.
            match unsafe { result::module::load_data(code.as_ptr().cast()) } {
                Err(e) if is_refusal(e.0) => answers.push((form, e.0)),
                done => return check(what, done),
            }
        }
        let card = result::device::get(self.device as i32).and_then(result::device::get_name);
        let card = card.unwrap_or_else(|_| format!("cuda:{}", self.device));
        let driver = driver_version().unwrap_or_else(|_| "of unknown version".into());
        Err(Error::runtime(describe_refusal(variant.name, &card, limits.sm(), &driver, &answers)))
    }
}

/// Returns the driver's version as nvidia-smi prints it. Without its kernel module (WSL, some containers), returns its CUDA version.
fn driver_version() -> Result<String> {
    let module = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    if !module.trim().is_empty() {
        return Ok(module.trim().into());
    }
    // 1000 * major + 10 * minor
    let mut version = 0;
    // SAFETY: writes one number.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

impl Launcher for Driver {
    fn device(&self) -> tch::Device {
        tch::Device::Cuda(self.device)
    }

    /// Creates no CUDA context.
    fn tuning(&self) -> Result<&'static DeviceTuning> {
        TUNINGS.get_or_make(self.device, || {
            let (device, limits) = self.attributes()?;
            let device = check("cuDeviceGetName", result::device::get_name(device))?;
            let card = Card { device, driver: driver_version()?, volta_fa: env!("CARGO_PKG_VERSION").into() };
            Ok(tuning::look_up(card, &limits))
        })
    }

    fn limits(&self) -> Result<DeviceLimits> {
        let limits = self.state()?.limits;
        Ok(DeviceLimits { only: only_family()?, tuning: tuning::forced().or(limits.tuning), ..limits })
    }

    fn launch(&self, launch: &KernelLaunch) -> Result<()> {
        let state = self.state()?;
        self.enter(&state)?;
        let v = launch.variant;
        let f = self.function(v, &state)?;
        let mut arguments = [launch.params.as_ptr() as *mut c_void];
        let [x, y, z] = launch.grid;
        // SAFETY: the kernel takes one argument, of the size of `params` (tests/kernels.rs compares the two); the tensors behind its
        // pointers are alive, and PyTorch's allocator keeps their memory for this stream.
        let r = unsafe { result::launch_kernel(f.0, (x, y, z), (v.threads, 1, 1), v.shared_bytes, self.stream.cast(), &mut arguments) };
        // formats the text only after an error
        r.or_else(|e| check(&format!("launching {}", v.name), Err(e)))
    }
}

// ---- the error when the driver loads neither of a kernel's two forms: machine code, or PTX, which the driver compiles ----
// Driver branches are the first part of nvidia-smi's version: 525 of 525.60.13.

/// First driver branch of CUDA 12. CUDA 12's drivers load machine code of any 12.x compiler. CUDA 12.9's compiles the kernels.
const CUBIN_DRIVER: &str = "525";
/// Last driver branch that runs Volta GPUs.
const LAST_VOLTA_DRIVER: &str = "580";
/// Driver branch of CUDA 10.2, the first with PTX ISA 6.5. Turing's kernels need that version; Volta's need less.
const PTX_DRIVER: &str = "440";

/// Returns true for errors about the code rather than the state of the machine: then the other form may load.
fn is_refusal(code: sys::CUresult) -> bool {
    use sys::CUresult::*;
    matches!(
        code,
        CUDA_ERROR_INVALID_IMAGE
            | CUDA_ERROR_INVALID_SOURCE
            | CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | CUDA_ERROR_JIT_COMPILATION_DISABLED
    )
}

/// Returns one line about a kernel that the driver loads in no form: its error for each form tried, and the remedy. `sm`: 70 for 7.0.
fn describe_refusal(kernel: &str, card: &str, sm: u32, driver: &str, answers: &[(Code, sys::CUresult)]) -> String {
    let mut text = format!("CUDA driver: loading {kernel} on {card} (sm_{sm}), driver {driver}:");
    for (i, (code, answer)) in answers.iter().enumerate() {
        let form = match code {
            Code::Cubin => "machine code",
            Code::Ptx => "PTX",
        };
        let separator = if i > 0 { "," } else { "" };
        write!(text, "{separator} {answer:?} for its {form}").expect("strings take all that is written");
    }
    let drivers = match sm {
        70..75 => format!("{CUBIN_DRIVER} to {LAST_VOLTA_DRIVER}"),
        _ => format!("{CUBIN_DRIVER} or newer"),
    };
    let remedy = match answers.last().map(|(_, answer)| answer) {
        Some(sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND) => format!(
            "libnvidia-ptxjitcompiler, which compiles it, is missing: install the whole driver, {drivers} \
             (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        ),
        Some(sys::CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED) => {
            format!("unset CUDA_DISABLE_PTX_JIT, or update the NVIDIA driver to {drivers}")
        }
        _ => format!(
            "update the NVIDIA driver to {drivers}, which loads the machine code of Volta and Turing \
             (from {PTX_DRIVER} on, drivers compile the PTX)"
        ),
    };
    write!(text, ": {remedy}").expect("strings take all that is written");
    text
}
