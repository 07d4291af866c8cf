//! The C ABI between the C++ shim (`torch_ops/`) and Rust. cbindgen turns this file into `volta_fa_abi.h`.
//!
//! Tensors travel as `at::Tensor*`: borrowed on the way in (null is None), owned by the caller on the
//! way out. No panic crosses the boundary: every entry returns a [`Status`].

use crate::error::{Error, ErrorKind, Result};
use crate::info::PlanArgs;
use crate::launch::driver::Driver;
use crate::limits::LATENT_HEADDIMS;
use crate::ops::{self, kvcache, merge, Gradients, Inputs, Saved};
use crate::options::{KvCacheOptionArgs, MlaOptionArgs, OptionArgs};
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use tch::Tensor;

/// Arguments that `volta_fa::fwd` and `volta_fa::bwd` share.
#[repr(C)]
pub struct AttentionArgs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim); never null, as k and v
    pub q: *mut c_void,
    /// (batch, seqlen_k, nheads_k, headdim), packed (total_k, nheads_k, headdim)
    pub k: *mut c_void,
    /// (batch, seqlen_k, nheads_k, headdim_v), packed (total_k, nheads_k, headdim_v)
    pub v: *mut c_void,
    /// (2) int64, seed and offset; null without dropout
    pub rng_state: *mut c_void,
    /// every keyword option, given or at its default
    pub options: OptionArgs,
    /// the current `cudaStream_t` of q's device; null on the CPU and for the default stream
    pub stream: *mut c_void,
}

/// What `volta_fa::bwd` takes beside.
#[repr(C)]
pub struct BackwardArgs {
    /// the tensors and options of the forward call, and its rng_state
    pub attention: AttentionArgs,
    /// gradient of out, of its shape, with any strides
    pub dout: *mut c_void,
    /// as the forward call returned it
    pub out: *mut c_void,
    /// as the forward call returned it
    pub softmax_lse: *mut c_void,
    /// whether dattn_bias is to be computed; refused without a bias, and for one of bool
    pub attn_bias_requires_grad: bool,
}

/// What became of a call.
#[repr(C)]
pub struct Status {
    /// 0 success, 1 ValueError, 2 NotImplementedError, 3 RuntimeError
    pub code: i32,
    /// null on success, else the exception's text, owned by the caller (`volta_fa_free_string`)
    pub message: *mut c_char,
}

fn c_string(text: &str) -> *mut c_char {
    CString::new(text.replace('\0', " ")).expect("NULs were replaced").into_raw()
}

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

/// # Safety
/// `handle` is null or an `at::Tensor*` that lives through the call.
unsafe fn tensor(handle: *mut c_void) -> Option<Tensor> {
    (!handle.is_null()).then(|| unsafe { Tensor::clone_from_ptr(handle.cast()) })
}

/// Refuses an argument that is None: Python turns that into an undefined tensor whatever the schema says.
fn check_given(name: &str, handle: *mut c_void) -> Result<()> {
    if handle.is_null() {
        return Err(Error::value(name, "None", "a tensor"));
    }
    Ok(())
}

/// # Safety
/// As [`tensor`].
unsafe fn required(name: &str, handle: *mut c_void) -> Result<Tensor> {
    check_given(name, handle)?;
    Ok(unsafe { Tensor::clone_from_ptr(handle.cast()) })
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn attention(args: &AttentionArgs) -> Result<Inputs> {
    unsafe {
        Ok(Inputs {
            q: required("q", args.q)?,
            k: required("k", args.k)?,
            v: required("v", args.v)?,
            appended: None,
            rng_state: tensor(args.rng_state),
            options: args.options.read(|handle| tensor(handle)),
            stream: args.stream,
        })
    }
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn saved(args: &BackwardArgs) -> Result<Saved> {
    unsafe {
        Ok(Saved {
            dout: required("dout", args.dout)?,
            out: required("out", args.out)?,
            softmax_lse: required("softmax_lse", args.softmax_lse)?,
            attn_bias_requires_grad: args.attn_bias_requires_grad,
        })
    }
}

/// Hand a tensor to the caller as an owned `at::Tensor*`.
fn release(mut t: Tensor) -> *mut c_void {
    let handle = t.as_mut_ptr().cast();
    std::mem::forget(t);
    handle
}

/// The same for all of an op's results; null where one is absent.
///
/// # Safety
/// `outputs` has room for `N` pointers.
unsafe fn release_all<const N: usize>(outputs: *mut *mut c_void, results: [Option<Tensor>; N]) {
    for (i, t) in results.into_iter().enumerate() {
        unsafe { *outputs.add(i) = t.map_or(std::ptr::null_mut(), release) };
    }
}

/// `volta_fa::fwd`; `outputs` receives out, softmax_lse.
///
/// # Safety
/// `args` and its handles are valid, `outputs` has room for 2 pointers; they are written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd(args: *const AttentionArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd", || unsafe {
        let (out, softmax_lse) = ops::forward(&attention(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// `volta_fa::bwd`; `outputs` receives dq, dk, dv, dattn_bias, dsinks, of which the last two may be null: absent.
///
/// # Safety
/// As [`volta_fa_fwd`], with room for 5 pointers.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_bwd(args: *const BackwardArgs, outputs: *mut *mut c_void) -> Status {
    status("bwd", || unsafe {
        let args = &*args;
        let Gradients { dq, dk, dv, dattn_bias, dsinks } = ops::backward(&attention(&args.attention)?, &saved(args)?)?;
        release_all(outputs, [Some(dq), Some(dk), Some(dv), dattn_bias, dsinks]);
        Ok(())
    })
}

/// What [`volta_fa_fwd`] would refuse, as far as sizes are known: for tensors without data.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd(args: *const AttentionArgs) -> Status {
    status("fwd", || unsafe { ops::check_forward(&attention(&*args)?) })
}

/// The same for [`volta_fa_bwd`].
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_bwd(args: *const BackwardArgs) -> Status {
    status("bwd", || unsafe { ops::check_backward(&attention(&(*args).attention)?, &saved(&*args)?) })
}

/// Arguments of `volta_fa::merge_attention_states`.
#[repr(C)]
pub struct MergeArgs {
    /// attention over the one set of keys, (batch, seqlen_q, nheads, headdim_v) or packed (total_q, nheads, headdim_v)
    pub out_a: *mut c_void,
    /// float32, (batch, nheads, seqlen_q) or packed (nheads, total_q)
    pub softmax_lse_a: *mut c_void,
    /// over the other set: shape and dtype of out_a; in place float16 or bfloat16 beside float32 too
    pub out_b: *mut c_void,
    /// shape of softmax_lse_a
    pub softmax_lse_b: *mut c_void,
    /// as in [`AttentionArgs`]
    pub stream: *mut c_void,
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn states(args: &MergeArgs) -> Result<merge::States> {
    unsafe {
        Ok(merge::States {
            outs: [required("out_a", args.out_a)?, required("out_b", args.out_b)?],
            lses: [required("softmax_lse_a", args.softmax_lse_a)?, required("softmax_lse_b", args.softmax_lse_b)?],
            stream: args.stream,
        })
    }
}

/// `volta_fa::merge_attention_states`; `outputs` receives out, softmax_lse.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_merge(args: *const MergeArgs, outputs: *mut *mut c_void) -> Status {
    status("merge_attention_states", || unsafe {
        let (out, softmax_lse) = merge::merge(&states(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// `volta_fa::merge_attention_states_`: out_a and softmax_lse_a become those over both.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_merge_in_place(args: *const MergeArgs) -> Status {
    status("merge_attention_states_", || unsafe { merge::merge_in_place(&states(&*args)?) })
}

/// What [`volta_fa_merge`] or, `in_place`, [`volta_fa_merge_in_place`] would refuse, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_merge(args: *const MergeArgs, in_place: bool) -> Status {
    let op = if in_place { "merge_attention_states_" } else { "merge_attention_states" };
    status(op, || unsafe { merge::check(&states(&*args)?, in_place) })
}

/// Arguments of `volta_fa::fwd_kvcache`.
#[repr(C)]
pub struct KvCacheArgs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim); never null, as the caches
    pub q: *mut c_void,
    /// (batch, seqlen, nheads_k, headdim), or pages (pages, page_size, nheads_k, headdim)
    pub k_cache: *mut c_void,
    /// the same with headdim_v
    pub v_cache: *mut c_void,
    /// appended to k_cache: (batch, seqlen_new, nheads_k, headdim), packed (total_new, nheads_k, headdim); null: nothing is
    pub k: *mut c_void,
    /// appended to v_cache; null if and only if k is
    pub v: *mut c_void,
    /// every keyword option, given or at its default
    pub options: KvCacheOptionArgs,
    /// as in [`AttentionArgs`]
    pub stream: *mut c_void,
}

/// The caller's own tensors, which are not counted and so not released: a decode step is short.
///
/// # Safety
/// The handles of `args` are valid.
unsafe fn cached(args: &KvCacheArgs) -> Result<ManuallyDrop<Inputs>> {
    // before any tensor is borrowed: an early return would release it
    for (name, handle) in [("q", args.q), ("k_cache", args.k_cache), ("v_cache", args.v_cache)] {
        check_given(name, handle)?;
    }
    if !(args.k.is_null() && args.v.is_null()) {
        check_given("k", args.k)?;
        check_given("v", args.v)?;
    }
    let given = |handle: *mut c_void| unsafe { Tensor::from_ptr(handle.cast()) };
    let optional = |handle: *mut c_void| (!handle.is_null()).then(|| given(handle));
    Ok(ManuallyDrop::new(Inputs {
        q: given(args.q),
        k: given(args.k_cache),
        v: given(args.v_cache),
        appended: optional(args.k).map(|k| [k, given(args.v)]),
        rng_state: None,
        options: args.options.read(optional),
        stream: args.stream,
    }))
}

/// `volta_fa::fwd_kvcache`, both overloads; `outputs` receives out, softmax_lse.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd_kvcache(args: *const KvCacheArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd_kvcache", || unsafe {
        let (out, softmax_lse) = kvcache::forward(&*cached(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// What [`volta_fa_fwd_kvcache`] would refuse, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_kvcache(args: *const KvCacheArgs) -> Status {
    status("fwd_kvcache", || unsafe { kvcache::check(&*cached(&*args)?) })
}

/// Arguments of `volta_fa::fwd_mla`.
#[repr(C)]
pub struct MlaArgs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim); never null, as the cache
    pub q: *mut c_void,
    /// (batch, seqlen, 1, headdim), or pages (pages, page_size, 1, headdim)
    pub latent_cache: *mut c_void,
    /// every keyword option, given or at its default
    pub options: MlaOptionArgs,
    /// as in [`AttentionArgs`]
    pub stream: *mut c_void,
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn latents(args: &MlaArgs) -> Result<Inputs> {
    unsafe {
        Ok(Inputs {
            q: required("q", args.q)?,
            k: required("latent_cache", args.latent_cache)?,
            v: required("latent_cache", args.latent_cache)?,
            appended: None,
            rng_state: None,
            options: args.options.read(|handle| tensor(handle)).with_latents_as_keys(),
            stream: args.stream,
        })
    }
}

/// `volta_fa::fwd_mla`; `outputs` receives out, softmax_lse.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd_mla(args: *const MlaArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd_mla", || unsafe {
        let (out, softmax_lse) = kvcache::forward_mla(latents(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// What [`volta_fa_fwd_mla`] would refuse, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_mla(args: *const MlaArgs) -> Status {
    status("fwd_mla", || unsafe { kvcache::check_mla(&latents(&*args)?) })
}

/// Columns of `volta_fa::fwd_mla`'s out.
#[no_mangle]
pub extern "C" fn volta_fa_latent_values() -> i64 {
    LATENT_HEADDIMS[0]
}

/// The random numbers' verdict that dropout makes, for tests and `return_attn_probs`; `output` receives a bool tensor.
#[repr(C)]
pub struct DropoutMaskArgs {
    /// (2) int64, seed and offset, on the CPU: the shim copies it
    pub rng_state: *mut c_void,
    /// first size of the mask; the next three are those of its other dimensions
    pub batch: i64,
    /// query heads
    pub nheads: i64,
    /// rows of a head
    pub seqlen_q: i64,
    /// columns of a row
    pub seqlen_k: i64,
    /// the probability to be dropped, in [0, 1)
    pub dropout_p: f64,
}

/// `volta_fa::_dropout_mask`: (batch, nheads, seqlen_q, seqlen_k), true where a probability is kept.
///
/// # Safety
/// As [`volta_fa_fwd`], with room for 1 pointer.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_dropout_mask(args: *const DropoutMaskArgs, output: *mut *mut c_void) -> Status {
    status("_dropout_mask", || unsafe {
        let args = &*args;
        let shape = [args.batch, args.nheads, args.seqlen_q, args.seqlen_k];
        *output = release(ops::dropout::mask(&required("rng_state", args.rng_state)?, shape, args.dropout_p)?);
        Ok(())
    })
}

/// JSON about this build and machine, see [`crate::info`].
#[no_mangle]
pub extern "C" fn volta_fa_info() -> *mut c_char {
    c_string(&crate::info::describe().to_string())
}

/// The compute capability of a CUDA device in two digits, as in `sm_70`.
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

/// Whether scaled_dot_product_attention is ours on such devices, see [`crate::kernels::serves`].
#[no_mangle]
pub extern "C" fn volta_fa_serves_sm(sm: i32, newer_too: bool) -> bool {
    u32::try_from(sm).is_ok_and(|sm| crate::kernels::serves(sm, newer_too))
}

/// JSON of what the plan picks for a shape, see [`crate::info::plan`].
///
/// # Safety
/// `args` and its text are valid and `json` has room for a pointer, written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_plan(args: *const PlanArgs, json: *mut *mut c_char) -> Status {
    status("_plan", || unsafe {
        let needs = CStr::from_ptr((*args).needs).to_string_lossy();
        *json = c_string(&crate::info::plan(&*args, &needs, (*args).device.as_ref().copied())?.to_string());
        Ok(())
    })
}

/// Makes all plans take a tuning instead of those in files, see [`crate::launch::tuning::force`].
///
/// # Safety
/// `text` is NUL-terminated.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_set_tuning(text: *const c_char) -> Status {
    status("_set_tuning", || unsafe { crate::launch::tuning::force(&CStr::from_ptr(text).to_string_lossy()) })
}

/// JSON about a device's tuning file, see [`crate::info::tuning`].
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

/// JSON of the families that a device runs, see [`crate::info::families`].
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

/// JSON list of the timed simulations since the last call, see [`crate::info::take_simulations`].
#[no_mangle]
pub extern "C" fn volta_fa_take_simulations() -> *mut c_char {
    c_string(&crate::info::take_simulations())
}

/// # Safety
/// `text` came from this library, and is not used afterwards.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_free_string(text: *mut c_char) {
    if !text.is_null() {
        drop(unsafe { CString::from_raw(text) });
    }
}
