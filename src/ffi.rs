//! The C ABI between the C++ shim (`torch_ops/`) and Rust: the functions that the shim calls. cbindgen makes `volta_fa_abi.h` of it.
//!
//! Operators take their arguments as [`Value`]s, which borrow tensors. The caller owns results. No panic crosses the boundary: functions
//! that can fail return a [`Status`]. An operator's number is its row in [`OPERATORS`], an internal one's its row in [`INTERNAL`].

use crate::error::{Error, ErrorKind, Result};
use crate::internal::{Output, INTERNAL};
use crate::launch::driver::Driver;
// Call: the arguments of one call, by the operator's schema; Autocast: which of its tensors torch.autocast casts
use crate::operators::{Autocast, Call, OPERATORS};
use crate::value::Value; // tensor, number or absent
use std::ffi::{c_char, c_void, CString};
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

/// Returns an internal operator's schema; null past the last operator. The caller owns it.
#[no_mangle]
pub extern "C" fn volta_fa_internal(number: usize) -> *mut c_char {
    INTERNAL.get(number).map_or(std::ptr::null_mut(), |operator| c_string(operator.schema))
}

/// Computes a call of an internal operator. `text` or `tensor` receives the result, if its schema has one.
///
/// # Safety
/// As [`volta_fa_call`]; `text` and `tensor` have room for a pointer each.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_call_internal(
    number: usize,
    values: *const Value,
    count: usize,
    text: *mut *mut c_char,
    tensor: *mut *mut c_void,
) -> Status {
    let operator = &INTERNAL[number];
    status(operator.name(), || unsafe {
        match (operator.run)(std::slice::from_raw_parts(values, count))? {
            Output::Nothing => {}
            Output::Text(found) => *text = c_string(&found),
            Output::Tensor(found) => *tensor = release(found),
        }
        Ok(())
    })
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
