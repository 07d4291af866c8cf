//! Errors of drivers that cannot load a kernel's code, with their remedies.

use crate::kernels::Code;
use cudarc::driver::sys::CUresult;
use std::fmt::Write;

/// First driver of CUDA 12. Its minor releases load each other's machine code; ours is that of CUDA 12.9.
const CUBIN_DRIVER: &str = "525";
/// Driver of CUDA 10.2, the first with PTX 6.5. Turing's kernels need that version; Volta's need less.
const PTX_DRIVER: &str = "440";

/// Returns true for errors about the code rather than the state of the machine: another form of the code may load.
pub fn is_refusal(code: CUresult) -> bool {
    use CUresult::*;
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

/// Returns one line about a kernel that the driver loads in no form: its errors, and the remedy.
pub fn describe(kernel: &str, card: &str, sm: u32, driver: &str, answers: &[(Code, CUresult)]) -> String {
    let mut text = format!("CUDA driver: loading {kernel} on {card} (sm_{sm}), driver {driver}:");
    for (i, (code, answer)) in answers.iter().enumerate() {
        let form = match code {
            Code::Cubin => "machine code",
            Code::Ptx => "PTX",
        };
        let separator = if i > 0 { "," } else { "" };
        write!(text, "{separator} {answer:?} for its {form}").expect("strings take all that is written");
    }
    let remedy = match answers.last().map(|(_, answer)| answer) {
        Some(CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND) => format!(
            "libnvidia-ptxjitcompiler, which compiles it, is missing: install the whole driver, {CUBIN_DRIVER} or newer \
             (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        ),
        Some(CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED) => {
            format!("unset CUDA_DISABLE_PTX_JIT, or update the NVIDIA driver to {CUBIN_DRIVER} or newer")
        }
        _ => format!(
            "update the NVIDIA driver to {CUBIN_DRIVER} or newer, which loads the machine code of Volta and Turing \
             (from {PTX_DRIVER} on, drivers compile the PTX)"
        ),
    };
    write!(text, ": {remedy}").expect("strings take all that is written");
    text
}
