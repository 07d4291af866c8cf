//! Launches through the CUDA driver, on PyTorch's stream and in its (primary) context.
//!
//! Opens libcuda on first use, so this library loads on a machine without a driver.

use super::tuning::{self, DeviceTuning};
use super::{load_errors, only_family, KernelLaunch, Launcher};
use crate::error::{Error, Result};
use crate::kernels::{self, Code, Variant};
use crate::plan::DeviceLimits;
use crate::tuning::Card;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::ffi::{c_void, CString};
use std::sync::{Mutex, OnceLock, RwLock};

/// A CUDA stream of one device, from PyTorch.
pub struct Driver {
    /// PyTorch's device index: 0 for `cuda:0`.
    pub device: usize,
    /// `cudaStream_t`; null is the default stream.
    pub stream: *mut c_void,
}

/// Properties of a device that do not change while the process lives.
#[derive(Clone, Copy)]
struct DeviceState {
    limits: DeviceLimits,
    context: sys::CUcontext,
}
// SAFETY: contexts are process-wide handles; the driver synchronizes their use.
unsafe impl Send for DeviceState {}
unsafe impl Sync for DeviceState {}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);
// SAFETY: functions are handles of a context (see DeviceState).
unsafe impl Send for Function {}
unsafe impl Sync for Function {}

static DEVICES: RwLock<Vec<(usize, DeviceState)>> = RwLock::new(Vec::new());
static FUNCTIONS: OnceLock<RwLock<HashMap<(usize, &'static str), Function>>> = OnceLock::new();
/// Serializes loading, so that each kernel is loaded once. Loading is rare and slow, because the driver may compile PTX.
static LOADING: Mutex<()> = Mutex::new(());

/// Returns true if this machine has a CUDA driver.
pub fn is_available() -> bool {
    // SAFETY: tries to open libcuda, nothing else.
    unsafe { sys::is_culib_present() }
}

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
    fn state(&self) -> Result<DeviceState> {
        let known = |list: &[(usize, DeviceState)]| list.iter().find(|(d, _)| *d == self.device).map(|(_, s)| *s);
        if let Some(state) = known(&DEVICES.read().unwrap_or_else(|e| e.into_inner())) {
            return Ok(state);
        }
        let mut list = DEVICES.write().unwrap_or_else(|e| e.into_inner());
        if let Some(state) = known(&list) {
            return Ok(state);
        }
        let state = self.query()?;
        list.push((self.device, state));
        Ok(state)
    }

    /// Returns the compute capability (major, minor). The environment does not restrict it.
    ///
    /// # Errors
    /// There is no driver or no such device.
    pub fn capability(&self) -> Result<(i32, i32)> {
        Ok(self.state()?.limits.capability)
    }

    /// Returns the tuning of the device, without a context.
    ///
    /// # Errors
    /// There is no driver or no such device. An unusable file is not an error.
    pub fn tuning(&self) -> Result<&'static DeviceTuning> {
        tuning::of_device(self.device, || {
            let (device, limits) = self.attributes()?;
            let device = check("cuDeviceGetName", result::device::get_name(device))?;
            Ok((Card { device, driver: driver_version()?, volta_fa: env!("CARGO_PKG_VERSION").into() }, limits))
        })
    }

    /// Loads a kernel ahead of its first launch, which would otherwise load it and perhaps wait for the driver to compile PTX.
    ///
    /// # Errors
    /// There is no such kernel, no driver or no such device, or the driver refuses the kernel's code.
    pub fn preload(&self, kernel: &str) -> Result<()> {
        let variant = kernels::variants().find(|v| v.name == kernel);
        let variant = variant.ok_or_else(|| Error::value("kernel", format!("`{kernel}`"), "a kernel that `_info()` lists"))?;
        let state = self.state()?;
        self.enter(&state)?;
        self.function(variant, &state).map(|_| ())
    }

    /// Queries the device and its limits without a context.
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
            only: None,
            tuning: None,
            capability,
            sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        };
        Ok((device, limits))
    }

    fn query(&self) -> Result<DeviceState> {
        let (device, limits) = self.attributes()?;
        let limits = DeviceLimits { tuning: self.tuning()?.tuning(), ..limits };
        // SAFETY: `device` exists. The reference is never released: PyTorch too holds the context as long as the process lives.
        let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(DeviceState { limits, context })
    }

    /// Makes the device's primary context current on this thread, which may not have used CUDA before.
    fn enter(&self, state: &DeviceState) -> Result<()> {
        if check("cuCtxGetCurrent", result::ctx::get_current())? != Some(state.context) {
            // SAFETY: the context is retained.
            check("cuCtxSetCurrent", unsafe { result::ctx::set_current(state.context) })?;
        }
        Ok(())
    }

    fn function(&self, variant: &'static Variant, state: &DeviceState) -> Result<Function> {
        let functions = FUNCTIONS.get_or_init(Default::default);
        let key = (self.device, variant.name);
        let find = || functions.read().unwrap_or_else(|e| e.into_inner()).get(&key).copied();
        if let Some(f) = find() {
            return Ok(f);
        }
        let _one_at_a_time = LOADING.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(f) = find() {
            return Ok(f);
        }
        let f = self.load(variant, &state.limits)?;
        functions.write().unwrap_or_else(|e| e.into_inner()).insert(key, f);
        Ok(f)
    }
}

/// Returns the driver's version as nvidia-smi prints it. If its kernel module is not visible (WSL, some containers), returns the CUDA
/// version that it supports.
fn driver_version() -> Result<String> {
    let module = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    if !module.trim().is_empty() {
        return Ok(module.trim().into());
    }
    let mut version = 0;
    // SAFETY: writes one number.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}

impl Driver {
    fn load(&self, variant: &Variant, limits: &DeviceLimits) -> Result<Function> {
        let what = format!("loading {}", variant.name);
        let module = self.module(variant, limits, &what)?;
        let name = CString::new(variant.name).expect("kernel names have no NUL");
        // SAFETY: modules are never unloaded, so the function stays valid.
        unsafe {
            let f = check(&what, result::module::get_function(module, name))?;
            check(
                &what,
                result::function::set_function_attribute(
                    f,
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    variant.shared_bytes as i32,
                ),
            )?;
            Ok(Function(f))
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
                Err(e) if load_errors::is_refusal(e.0) => answers.push((form, e.0)),
                done => return check(what, done),
            }
        }
        let card = result::device::get(self.device as i32).and_then(result::device::get_name);
        let card = card.unwrap_or_else(|_| format!("cuda:{}", self.device));
        let driver = driver_version().unwrap_or_else(|_| "of unknown version".into());
        Err(Error::runtime(load_errors::describe(variant.name, &card, limits.sm(), &driver, &answers)))
    }
}

impl Launcher for Driver {
    fn device(&self) -> tch::Device {
        tch::Device::Cuda(self.device)
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
        // SAFETY: the kernel takes one argument, of the size of `params` (a test compares the two); the tensors
        // behind its pointers are alive, and PyTorch's allocator keeps their memory for this stream.
        let r = unsafe { result::launch_kernel(f.0, (x, y, z), (v.threads, 1, 1), v.shared_bytes, self.stream.cast(), &mut arguments) };
        // formats the text only after an error
        r.or_else(|e| check(&format!("launching {}", v.name), Err(e)))
    }
}
