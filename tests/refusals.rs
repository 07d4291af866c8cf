//! Drivers that do not take the embedded code, played by a libcuda of our own: what is tried, and what the user reads.

use cudarc::driver::sys::CUresult;
use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use volta_fa::kernels::{self, Family, Pass};
use volta_fa::launch::driver::{self, Driver};
use volta_fa::launch::{KernelLaunch, Launcher};

/// Device d is a card of capability d / 10, d % 10. An ELF file is answered with `answer_to_cubin`, PTX with `answer_to_ptx`.
const LIBCUDA: &str = r#"
#include <stdio.h>
#include <string.h>
int answer_to_cubin, answer_to_ptx, launches;
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 11040; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { snprintf(name, size, "Pretended Card %d", device); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? device / 10 : attribute == 76 ? device % 10 : attribute == 16 ? 80 : 98304;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { static char contexts[100]; *context = &contexts[device]; return 0; }
int cuCtxGetCurrent(void** context) { *context = 0; return 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuModuleLoadData(void** module, const char* image) {
    *module = (void*)image;
    return memcmp(image, "\177ELF", 4) ? answer_to_ptx : answer_to_cubin;
}
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = module; return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuLaunchKernel(void* function) { launches++; return 0; }
int cuGetErrorName(int error, const char** name) { *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_ANOTHER_KIND"; return 0; }
"#;

struct Pretended {
    library: *mut libc::c_void,
}

impl Pretended {
    /// Compiles it and has the process find it wherever libcuda is looked for from now on.
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (source, library) = (folder.join("pretended_libcuda.c"), folder.join("libcuda.so"));
        std::fs::write(&source, LIBCUDA).unwrap();
        let made = Command::new("g++")
            .args(["-x", "c", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so", "-o"])
            .args([&library, &source])
            .status();
        assert!(made.expect("g++ runs").success());
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a library without initialisers; loaded, it is what a search for its soname finds.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null());
        Self { library }
    }

    fn number(&self, name: &str) -> &AtomicI32 {
        let name = CString::new(name).unwrap();
        // SAFETY: the library has these ints, for as long as the process lives.
        unsafe { &*libc::dlsym(self.library, name.as_ptr()).cast() }
    }

    /// Launches the family's first forward kernel on device `sm`, with these answers to its code: what the user reads.
    fn launch(&self, family: &str, sm: usize, cubin: CUresult, ptx: CUresult) -> Result<(), String> {
        self.number("answer_to_cubin").store(cubin as i32, Relaxed);
        self.number("answer_to_ptx").store(ptx as i32, Relaxed);
        let is_family = |f: &Family| f.name == family;
        let variant = kernels::variants().find(|v| is_family(&v.family) && v.pass == Pass::Forward).unwrap();
        let launch = KernelLaunch { variant, grid: [1, 1, 1], params: &[0; 8], ranges: &[] };
        Driver { device: sm, stream: std::ptr::null_mut() }.launch(&launch).map_err(|e| e.message)
    }
}

// One test: the library and its answers are the process'.
#[test]
fn reports_drivers_that_reject_the_code() {
    use CUresult::*;
    if driver::is_available() {
        return; // the machine's own would be found as well
    }
    let cuda = Pretended::new();
    let (done, launches) = (CUDA_SUCCESS, |cuda: &Pretended| cuda.number("launches").load(Relaxed));

    // refused as PTX too: one line with the card, the driver, both answers and the remedy, again at the next call
    for _ in 0..2 {
        let message = cuda.launch("volta", 70, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_UNSUPPORTED_PTX_VERSION).unwrap_err();
        for part in [
            "on Pretended Card 70 (sm_70), driver ",
            ": CUDA_ERROR_INVALID_IMAGE for its machine code, CUDA_ERROR_UNSUPPORTED_PTX_VERSION for its PTX: ",
            "update the NVIDIA driver to 525 or newer",
        ] {
            assert!(message.contains(part), "{message}");
        }
        assert!(!message.contains('\n'));
    }
    if !Path::new("/sys/module/nvidia/version").exists() {
        let message = cuda.launch("volta", 70, CUDA_ERROR_INVALID_SOURCE, CUDA_ERROR_INVALID_PTX).unwrap_err();
        assert!(message.contains("driver CUDA 11.4: CUDA_ERROR_INVALID_SOURCE for its machine code, CUDA_ERROR_INVALID_PTX"), "{message}");
    }
    // what keeps PTX from being compiled at all has remedies of its own
    let message = cuda.launch("volta", 70, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_JIT_COMPILER_NOT_FOUND).unwrap_err();
    assert!(message.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{message}");
    let message = cuda.launch("volta", 90, done, CUDA_ERROR_JIT_COMPILATION_DISABLED).unwrap_err();
    assert!(message.contains("sm_90") && message.contains("unset CUDA_DISABLE_PTX_JIT") && !message.contains("machine code,"), "{message}");
    // another failure is said as it is, and nothing else is tried
    let message = cuda.launch("volta", 70, CUDA_ERROR_OUT_OF_MEMORY, done).unwrap_err();
    assert!(message.contains("CUDA_ERROR_OUT_OF_MEMORY") && !message.contains("PTX"), "{message}");
    assert_eq!(launches(&cuda), 0);

    // a driver of 2020: no machine code of CUDA 12, but the PTX
    cuda.launch("volta", 70, CUDA_ERROR_INVALID_IMAGE, done).unwrap();
    cuda.launch("turing", 75, CUDA_ERROR_NO_BINARY_FOR_GPU, done).unwrap();
    // the right one, and other architectures, which get no machine code
    cuda.launch("volta", 72, done, CUDA_ERROR_INVALID_PTX).unwrap();
    cuda.launch("volta", 90, CUDA_ERROR_INVALID_IMAGE, done).unwrap();
    assert_eq!(launches(&cuda), 4);
}
