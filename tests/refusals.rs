//! Tests of CUDA drivers that reject the embedded code, without a GPU: which code is tried next, and the error messages.
//!
//! The library embeds machine code (cubin) and PTX of each kernel. It loads the cubin on the architectures that run it, and the PTX after a
//! rejection or on newer ones. A fake libcuda, compiled here with g++, answers each with the error of the test's choice.

use cudarc::driver::sys::CUresult;
use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use volta_fa::kernels::{self, Family, Pass};
use volta_fa::launch::driver::{self, Driver};
use volta_fa::launch::{KernelLaunch, Launcher};

/// Source of the fake libcuda. Device d has compute capability d / 10, d % 10 (attributes 75, 76), 80 SMs (16), and 96 KiB of shared memory
/// for a block. It answers `answer_to_cubin` to an ELF file, `answer_to_ptx` to PTX.
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

/// The fake libcuda, loaded into this process.
struct Pretended {
    library: *mut libc::c_void,
}

impl Pretended {
    /// Compiles the library and loads it, so that later searches for libcuda find it.
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
        // SAFETY: the library has no initializers. Once loaded, a search for its soname finds it.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null());
        Self { library }
    }

    /// Returns a global int of the library.
    fn number(&self, name: &str) -> &AtomicI32 {
        let name = CString::new(name).unwrap();
        // SAFETY: the library has these ints as long as the process lives.
        unsafe { &*libc::dlsym(self.library, name.as_ptr()).cast() }
    }

    /// Launches the family's first forward kernel on device `sm` with these answers to its code. Returns the error message.
    fn launch(&self, family: &str, sm: usize, cubin: CUresult, ptx: CUresult) -> Result<(), String> {
        self.number("answer_to_cubin").store(cubin as i32, Relaxed);
        self.number("answer_to_ptx").store(ptx as i32, Relaxed);
        let is_family = |f: &Family| f.name == family;
        let variant = kernels::variants().find(|v| is_family(&v.family) && v.pass == Pass::Forward).unwrap();
        let launch = KernelLaunch { variant, grid: [1, 1, 1], params: &[0; 8], ranges: &[] };
        Driver { device: sm, stream: std::ptr::null_mut() }.launch(&launch).map_err(|e| e.message)
    }
}

// One test only, because the process has one library and one set of answers.
#[test]
fn reports_drivers_that_reject_the_code() {
    use CUresult::*;
    if driver::is_available() {
        return; // this machine has a driver, and a search could find that
    }
    let cuda = Pretended::new();
    let (done, launches) = (CUDA_SUCCESS, |cuda: &Pretended| cuda.number("launches").load(Relaxed));

    // PTX rejected too: one line with GPU, driver, both answers and the remedy, in each call
    for _ in 0..2 {
        let message = cuda.launch("volta", 70, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_UNSUPPORTED_PTX_VERSION).unwrap_err();
        for part in [
            "on Pretended Card 70 (sm_70), driver ",
            ": CUDA_ERROR_INVALID_IMAGE for its machine code, CUDA_ERROR_UNSUPPORTED_PTX_VERSION for its PTX: ",
            "update the NVIDIA driver to 525 to 580, which",
        ] {
            assert!(message.contains(part), "{message}");
        }
        assert!(!message.contains('\n'));
    }
    // with NVIDIA's kernel module, messages have its version instead of the fake library's
    if !Path::new("/sys/module/nvidia/version").exists() {
        let message = cuda.launch("volta", 70, CUDA_ERROR_INVALID_SOURCE, CUDA_ERROR_INVALID_PTX).unwrap_err();
        assert!(message.contains("driver CUDA 11.4: CUDA_ERROR_INVALID_SOURCE for its machine code, CUDA_ERROR_INVALID_PTX"), "{message}");
    }
    // a driver without PTX compiler has its own remedy
    let message = cuda.launch("volta", 70, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_JIT_COMPILER_NOT_FOUND).unwrap_err();
    assert!(message.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{message}");
    let message = cuda.launch("volta", 90, done, CUDA_ERROR_JIT_COMPILATION_DISABLED).unwrap_err();
    assert!(message.contains("sm_90") && message.contains("unset CUDA_DISABLE_PTX_JIT") && !message.contains("machine code,"), "{message}");
    let message = cuda.launch("turing", 75, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX).unwrap_err();
    assert!(message.contains("update the NVIDIA driver to 525 or newer, which"), "{message}");
    // other errors are reported unchanged, without another attempt
    let message = cuda.launch("volta", 70, CUDA_ERROR_OUT_OF_MEMORY, done).unwrap_err();
    assert!(message.contains("CUDA_ERROR_OUT_OF_MEMORY") && !message.contains("PTX"), "{message}");
    assert_eq!(launches(&cuda), 0);

    // a driver of 2020 rejects machine code of CUDA 12 but compiles PTX
    cuda.launch("volta", 70, CUDA_ERROR_INVALID_IMAGE, done).unwrap();
    cuda.launch("turing", 75, CUDA_ERROR_NO_BINARY_FOR_GPU, done).unwrap();
    // native architectures take machine code, others get only PTX
    cuda.launch("volta", 72, done, CUDA_ERROR_INVALID_PTX).unwrap();
    cuda.launch("volta", 90, CUDA_ERROR_INVALID_IMAGE, done).unwrap();
    assert_eq!(launches(&cuda), 4);
}
