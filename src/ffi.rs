//! The C ABI between the C++ shim (`torch_ops/`) and Rust: the functions that the shim calls. cbindgen makes `volta_fa_abi.h` of it.
//!
//! Operators take their arguments as [`Value`]s, which borrow tensors. The caller owns results. No panic crosses the boundary: functions
//! that can fail return a [`Status`]. An operator's number is its row in [`OPERATORS`].

use crate::error::{Error, ErrorKind, Result};
use crate::info::PlanArgs;
use crate::launch::driver::Driver;
use crate::operators::{Autocast, Call, OPERATORS};
use crate::ops::dropout;
use crate::value::Value;
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use tch::Tensor;

/// Outcome of a call.
#[repr(C)]
pub struct Status {
    /// 0 success, 1 ValueError, 2 NotImplementedError, 3 RuntimeError.
    pub code: i32,
    /// Null on success, else the exception's text. The caller owns it (`volta_fa_free_string`).
    pub message: *mut c_char,
}

/// Returns a copy that the caller owns (`volta_fa_free_string`).
fn c_string(text: &str) -> *mut c_char {
    CString::new(text.replace('\0', " ")).expect("NULs were replaced").into_raw()
}

/// Runs `body`. Returns its error, or its panic, as a status that names the operator.
fn status(op: &str, body: impl FnOnce() -> Result<()>) -> Status {
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status { code: 0, message: std::ptr::null_mut() },
        Ok(Err(e)) => e,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Error::runtime(format!("internal error (please report it): {}", text.unwrap_or("panic")))
        }
    };
    let error = error.in_op(op);
    let code = match error.kind {
        ErrorKind::Value => 1,
        ErrorKind::Unsupported => 2,
        ErrorKind::Runtime => 3,
    };
    Status { code, message: c_string(&error.message) }
}

/// Gives a tensor to the caller as an owned `at::Tensor*`.
fn release(mut t: Tensor) -> *mut c_void {
    let handle = t.as_mut_ptr().cast();
    std::mem::forget(t);
    handle
}

/// Returns an operator's schema, for its registration with PyTorch; null past the last operator. The caller owns it. `autocast` receives
/// which of the operator's tensors autocast casts.
///
/// # Safety
/// `autocast` is valid to write.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_operator(number: usize, autocast: *mut Autocast) -> *mut c_char {
    let Some(operator) = OPERATORS.get(number) else { return std::ptr::null_mut() };
    unsafe { *autocast = operator.autocast };
    c_string(&operator.schema())
}

/// Computes a call of an operator; `outputs` receives the results of its schema. An absent result is null.
///
/// # Safety
/// `number` is that of an operator. `values` has the `count` arguments of its schema, and their handles live through the call. `stream` is
/// the current `cudaStream_t` of their device, null on the CPU and for the default stream. `outputs` has room for 5 pointers.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_call(
    number: usize,
    values: *const Value,
    count: usize,
    stream: *mut c_void,
    outputs: *mut *mut c_void,
) -> Status {
    let operator = &OPERATORS[number];
    status(operator.op(), || unsafe {
        let call = Call::read(operator, std::slice::from_raw_parts(values, count), stream)?;
        for (i, result) in (operator.run)(&call)?.into_iter().enumerate() {
            *outputs.add(i) = result.map_or(std::ptr::null_mut(), release);
        }
        Ok(())
    })
}

/// Rejects what [`volta_fa_call`] rejects, as far as sizes are known. Meta kernels call it, whose tensors have no data. `columns` receives
/// what the result's sizes need beside those of arguments. Operators on latents (MLA): the columns of out. Those on KV caches: the columns
/// in an element of the values, 2 in int4, else 1. Others: 0.
///
/// # Safety
/// As [`volta_fa_call`]. `columns` is valid to write; it is written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check(number: usize, values: *const Value, count: usize, columns: *mut i64) -> Status {
    let operator = &OPERATORS[number];
    status(operator.op(), || unsafe {
        let call = Call::read(operator, std::slice::from_raw_parts(values, count), std::ptr::null_mut())?;
        *columns = (operator.check)(&call)?;
        Ok(())
    })
}

/// Arguments of `volta_fa::_dropout_mask`, which tests call, and flash-attn's interface for `return_attn_probs`.
#[repr(C)]
pub struct DropoutMaskArgs {
    /// (2) int64, seed and offset, on the CPU: the shim copies it.
    pub rng_state: *mut c_void,
    pub batch: i64,
    pub nheads: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    /// Probability of dropping, in [0, 1).
    pub dropout_p: f64,
}

/// Computes `volta_fa::_dropout_mask`: bool (batch, nheads, seqlen_q, seqlen_k), true for kept probabilities.
///
/// # Safety
/// `args` and its handle are valid, and `output` has room for a pointer, written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_dropout_mask(args: *const DropoutMaskArgs, output: *mut *mut c_void) -> Status {
    status("_dropout_mask", || unsafe {
        let args = &*args;
        let shape = [args.batch, args.nheads, args.seqlen_q, args.seqlen_k];
        let rng_state = ManuallyDrop::new(Tensor::from_ptr(args.rng_state.cast()));
        *output = release(dropout::mask(&rng_state, shape, args.dropout_p)?);
        Ok(())
    })
}

/// Returns JSON about this build and machine, see [`crate::info`].
#[no_mangle]
pub extern "C" fn volta_fa_info() -> *mut c_char {
    c_string(&crate::info::describe().to_string())
}

/// Returns a CUDA device's compute capability in two digits: 70 for 7.0. The shim asks before it takes over
/// `scaled_dot_product_attention`, so an error names that function.
///
/// # Safety
/// `sm` is valid to write; it is written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_device_sm(device: i64, sm: *mut i32) -> Status {
    status("scaled_dot_product_attention", || unsafe {
        let (major, minor) = Driver { device: device as usize, stream: std::ptr::null_mut() }.capability()?;
        *sm = 10 * major + minor;
        Ok(())
    })
}

/// Returns true if volta_fa takes over scaled_dot_product_attention on devices of this architecture (70 for sm_70). Without `newer_too` it
/// does where kernels in the device's own machine code run every call, with it also where the driver compiles their PTX.
#[no_mangle]
pub extern "C" fn volta_fa_serves_sm(sm: i32, newer_too: bool) -> bool {
    u32::try_from(sm).is_ok_and(|sm| crate::kernels::COMPILED.serve(sm, newer_too))
}

/// Returns the largest headdim that devices of this architecture run (70 for sm_70; 0: fp16 tensors of the CPU).
#[no_mangle]
pub extern "C" fn volta_fa_max_headdim(sm: i32) -> i64 {
    match u32::try_from(sm) {
        Ok(sm) if sm > 0 => crate::kernels::COMPILED.max_headdim(sm),
        _ => crate::ops::cpu_max_headdim(),
    }
}

/// Returns the kernels that would run a shape, and why, as JSON, see [`crate::info::plan`].
///
/// # Safety
/// `args` and its text are valid and `json` has room for a pointer, written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_plan(args: *const PlanArgs, json: *mut *mut c_char) -> Status {
    status("_plan", || unsafe {
        let features = CStr::from_ptr((*args).features).to_string_lossy();
        *json = c_string(&crate::info::plan(&*args, &features, (*args).device.as_ref().copied())?.to_string());
        Ok(())
    })
}

/// Sets a tuning (a JSON text that says which kernels plans take or avoid) in place of tuning files, see [`crate::launch::tuning::force`].
///
/// # Safety
/// `text` is NUL-terminated.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_set_tuning(text: *const c_char) -> Status {
    status("_set_tuning", || unsafe { crate::launch::tuning::force(&CStr::from_ptr(text).to_string_lossy()) })
}

/// Returns JSON about a device's tuning file, see [`crate::info::tuning`].
///
/// # Safety
/// `json` has room for a pointer, written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_tuning(device: i64, json: *mut *mut c_char) -> Status {
    status("_tuning", || unsafe {
        *json = c_string(&crate::info::tuning(device)?.to_string());
        Ok(())
    })
}

/// Loads a kernel ahead of its first launch, see [`crate::info::preload`].
///
/// # Safety
/// `kernel` is NUL-terminated.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_preload(kernel: *const c_char, device: i64) -> Status {
    status("_preload", || unsafe { crate::info::preload(&CStr::from_ptr(kernel).to_string_lossy(), device) })
}

/// Returns the kernel families (volta, turing) that a device runs as JSON, see [`crate::info::families`].
///
/// # Safety
/// `json` has room for a pointer, written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_families(major: i32, minor: i32, json: *mut *mut c_char) -> Status {
    status("_families", || unsafe {
        *json = c_string(&crate::info::families((major, minor))?.to_string());
        Ok(())
    })
}

/// Returns the reports of the timed or recorded simulations since the last call as JSON, see [`crate::info::take_simulations`].
#[no_mangle]
pub extern "C" fn volta_fa_take_simulations() -> *mut c_char {
    c_string(&crate::info::take_simulations())
}

/// Frees a string of this library.
///
/// # Safety
/// `text` is null or came from this library, and is not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_free_string(text: *mut c_char) {
    if !text.is_null() {
        drop(unsafe { CString::from_raw(text) });
    }
}
