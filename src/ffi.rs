//! The C ABI between the C++ shim (`torch_ops/`) and Rust. cbindgen generates `volta_fa_abi.h` from this file.
//!
//! Arguments are borrowed `at::Tensor*`, null for None. The caller owns results. No panic crosses the boundary: functions that can fail
//! return a [`Status`].

use crate::error::{Error, ErrorKind, Result};
use crate::info::PlanArgs;
use crate::launch::driver::Driver;
use crate::limits::LATENT_HEADDIMS;
use crate::ops::{self, fast, kvcache, merge, sparse, Gradients, Inputs, Saved};
use crate::options::{FastOptionArgs, KvCacheOptionArgs, MlaOptionArgs, OptionArgs, Options, PrepareOptionArgs};
use std::ffi::{c_char, c_void, CStr, CString};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use tch::Tensor;

/// Arguments that `volta_fa::fwd` and `volta_fa::bwd` share.
#[repr(C)]
pub struct AttentionArgs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim). A null q, k or v is rejected.
    pub q: *mut c_void,
    /// (batch, seqlen_k, nheads_k, headdim), packed (total_k, nheads_k, headdim)
    pub k: *mut c_void,
    /// (batch, seqlen_k, nheads_k, headdim_v), packed (total_k, nheads_k, headdim_v)
    pub v: *mut c_void,
    /// (2) int64, seed and offset; null without dropout
    pub rng_state: *mut c_void,
    /// All keyword options, with their defaults if not given.
    pub options: OptionArgs,
    /// Current `cudaStream_t` of q's device; null on the CPU and for the default stream.
    pub stream: *mut c_void,
}

/// Arguments of `volta_fa::bwd`.
#[repr(C)]
pub struct BackwardArgs {
    /// Tensors and options of the forward call, and its rng_state.
    pub attention: AttentionArgs,
    /// Gradient of out, with its shape and any strides.
    pub dout: *mut c_void,
    /// Result of the forward call.
    pub out: *mut c_void,
    /// Result of the forward call.
    pub softmax_lse: *mut c_void,
    /// Gradient of softmax_lse, with its shape and any strides; null: none
    pub dlse: *mut c_void,
    /// True to compute dattn_bias; rejected without a bias and for a bool bias.
    pub attn_bias_requires_grad: bool,
}

/// Outcome of a call.
#[repr(C)]
pub struct Status {
    /// 0 success, 1 ValueError, 2 NotImplementedError, 3 RuntimeError.
    pub code: i32,
    /// Null on success, else the exception's text. The caller owns it (`volta_fa_free_string`).
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

/// Returns another handle of a tensor; None for null.
///
/// # Safety
/// `handle` is null or an `at::Tensor*` that lives through the call.
unsafe fn tensor(handle: *mut c_void) -> Option<Tensor> {
    (!handle.is_null()).then(|| unsafe { Tensor::clone_from_ptr(handle.cast()) })
}

/// Rejects None: Python passes it as an undefined tensor even where the schema requires a tensor.
fn check_given(name: &str, handle: *mut c_void) -> Result<()> {
    if handle.is_null() {
        return Err(Error::value(name, "None", "a tensor"));
    }
    Ok(())
}

/// Returns another handle of a tensor; rejects null.
///
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
            dlse: tensor(args.dlse),
            attn_bias_requires_grad: args.attn_bias_requires_grad,
        })
    }
}

/// Gives a tensor to the caller as an owned `at::Tensor*`.
fn release(mut t: Tensor) -> *mut c_void {
    let handle = t.as_mut_ptr().cast();
    std::mem::forget(t);
    handle
}

/// Gives all results of an op to the caller; null for an absent one.
///
/// # Safety
/// `outputs` has room for `N` pointers.
unsafe fn release_all<const N: usize>(outputs: *mut *mut c_void, results: [Option<Tensor>; N]) {
    for (i, t) in results.into_iter().enumerate() {
        unsafe { *outputs.add(i) = t.map_or(std::ptr::null_mut(), release) };
    }
}

/// Computes `volta_fa::fwd`; `outputs` receives out, softmax_lse.
///
/// # Safety
/// `args` and its handles are valid, and `outputs` has room for 2 pointers, which are written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd(args: *const AttentionArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd", || unsafe {
        let (out, softmax_lse) = ops::forward(&attention(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// Computes `volta_fa::bwd`; `outputs` receives dq, dk, dv, dattn_bias, dsinks. The last two may be absent: null.
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

/// Rejects what [`volta_fa_fwd`] rejects, as far as sizes are known. Tensors may have no data.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd(args: *const AttentionArgs) -> Status {
    status("fwd", || unsafe { ops::check_forward(&attention(&*args)?) })
}

/// Rejects what [`volta_fa_bwd`] rejects, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_bwd(args: *const BackwardArgs) -> Status {
    status("bwd", || unsafe { ops::check_backward(&attention(&(*args).attention)?, &saved(&*args)?) })
}

/// Arguments of `volta_fa::fwd_fast`.
#[repr(C)]
pub struct FastArgs {
    /// As in [`AttentionArgs`], fp16 or bf16.
    pub q: *mut c_void,
    /// As in [`AttentionArgs`].
    pub k: *mut c_void,
    /// As in [`AttentionArgs`].
    pub v: *mut c_void,
    /// All keyword options, with their defaults if not given.
    pub options: FastOptionArgs,
    /// As in [`AttentionArgs`].
    pub stream: *mut c_void,
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn fast_inputs(args: &FastArgs) -> Result<Inputs> {
    unsafe { dense_inputs(("q", args.q), args.k, args.v, args.options.read(|handle| tensor(handle)), args.stream) }
}

/// Returns the inputs of an operator without a cache and a derivative. `q` has the name that an error gives it.
///
/// # Safety
/// The handles are valid.
unsafe fn dense_inputs(
    (name, q): (&str, *mut c_void),
    k: *mut c_void,
    v: *mut c_void,
    options: Options<Tensor>,
    stream: *mut c_void,
) -> Result<Inputs> {
    let [q, k, v] = unsafe { [required(name, q)?, required("k", k)?, required("v", v)?] };
    Ok(Inputs { q, k, v, appended: None, rng_state: None, options, stream })
}

/// Computes `volta_fa::fwd_fast`; `outputs` receives out, softmax_lse.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd_fast(args: *const FastArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd_fast", || unsafe {
        let (out, softmax_lse) = fast::forward(&fast_inputs(&*args)?)?;
        release_all(outputs, [Some(out), Some(softmax_lse)]);
        Ok(())
    })
}

/// Rejects what [`volta_fa_fwd_fast`] rejects, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_fast(args: *const FastArgs) -> Status {
    status("fwd_fast", || unsafe { fast::check(&fast_inputs(&*args)?) })
}

/// Arguments of `volta_fa::prepare_fast`.
#[repr(C)]
pub struct PrepareArgs {
    /// As in [`AttentionArgs`], fp16 or bf16.
    pub k: *mut c_void,
    /// As in [`AttentionArgs`].
    pub v: *mut c_void,
    /// All keyword options, with their defaults if not given.
    pub options: PrepareOptionArgs,
    /// As in [`AttentionArgs`].
    pub stream: *mut c_void,
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn prepare_inputs(args: &PrepareArgs) -> Result<Inputs> {
    unsafe { dense_inputs(("k", args.k), args.k, args.v, args.options.read(|handle| tensor(handle)), args.stream) }
}

/// Computes `volta_fa::prepare_fast`; `output` receives the codes.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_prepare_fast(args: *const PrepareArgs, output: *mut *mut c_void) -> Status {
    status("prepare_fast", || unsafe {
        release_all(output, [Some(fast::prepare(&prepare_inputs(&*args)?)?)]);
        Ok(())
    })
}

/// Rejects what [`volta_fa_prepare_fast`] rejects, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_prepare_fast(args: *const PrepareArgs) -> Status {
    status("prepare_fast", || unsafe { fast::check_prepare(&prepare_inputs(&*args)?) })
}

/// Arguments of `volta_fa::merge_attention_states`.
#[repr(C)]
pub struct MergeArgs {
    /// Attention over the first set of keys: (batch, seqlen_q, nheads, headdim_v) or packed (total_q, nheads, headdim_v)
    pub out_a: *mut c_void,
    /// float32, (batch, nheads, seqlen_q) or packed (nheads, total_q).
    pub softmax_lse_a: *mut c_void,
    /// Attention over the second set, with the shape and dtype of out_a. In place, float16 or bfloat16 may go with float32 too.
    pub out_b: *mut c_void,
    /// Shape of softmax_lse_a.
    pub softmax_lse_b: *mut c_void,
    /// As in [`AttentionArgs`].
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

/// Computes `volta_fa::merge_attention_states`; `outputs` receives out, softmax_lse.
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

/// Computes `volta_fa::merge_attention_states_`: out_a and softmax_lse_a receive the results over both sets.
///
/// # Safety
/// As [`volta_fa_fwd`].
#[no_mangle]
pub unsafe extern "C" fn volta_fa_merge_in_place(args: *const MergeArgs) -> Status {
    status("merge_attention_states_", || unsafe { merge::merge_in_place(&states(&*args)?) })
}

/// Rejects what [`volta_fa_merge`] or, if `in_place`, [`volta_fa_merge_in_place`] rejects, as far as sizes are known.
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
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim). A null q or cache is rejected.
    pub q: *mut c_void,
    /// (batch, seqlen, nheads_k, headdim), or pages (pages, page_size, nheads_k, headdim).
    pub k_cache: *mut c_void,
    /// Shape of k_cache, with headdim_v.
    pub v_cache: *mut c_void,
    /// New keys for k_cache: (batch, seqlen_new, nheads_k, headdim), packed (total_new, nheads_k, headdim); null: none.
    pub k: *mut c_void,
    /// New values for v_cache; null if and only if k is.
    pub v: *mut c_void,
    /// All keyword options, with their defaults if not given.
    pub options: KvCacheOptionArgs,
    /// As in [`AttentionArgs`].
    pub stream: *mut c_void,
}

/// Borrows the caller's tensors without counting references, to save host time in a decode step. They are never released.
///
/// # Safety
/// The handles of `args` are valid.
unsafe fn cached(args: &KvCacheArgs) -> Result<ManuallyDrop<Inputs>> {
    // before borrowing any tensor: an early return would release it
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

/// Computes both overloads of `volta_fa::fwd_kvcache`; `outputs` receives out, softmax_lse.
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

/// Rejects what [`volta_fa_fwd_kvcache`] rejects, as far as sizes are known. `columns` receives the columns of an element of the caches.
///
/// # Safety
/// `args` and its handles are valid. `columns` is valid to write; it is written on success only.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_kvcache(args: *const KvCacheArgs, columns: *mut i64) -> Status {
    status("fwd_kvcache", || unsafe {
        *columns = kvcache::check(&*cached(&*args)?)?.columns();
        Ok(())
    })
}

/// Arguments of `volta_fa::fwd_mla`.
#[repr(C)]
pub struct MlaArgs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim). A null q or cache is rejected.
    pub q: *mut c_void,
    /// (batch, seqlen, 1, headdim), or pages (pages, page_size, 1, headdim).
    pub latent_cache: *mut c_void,
    /// All keyword options, with their defaults if not given.
    pub options: MlaOptionArgs,
    /// As in [`AttentionArgs`].
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

/// Computes `volta_fa::fwd_mla`; `outputs` receives out, softmax_lse.
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

/// Rejects what [`volta_fa_fwd_mla`] rejects, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_mla(args: *const MlaArgs) -> Status {
    status("fwd_mla", || unsafe { kvcache::check_mla(&latents(&*args)?) })
}

/// Returns the number of columns of `volta_fa::fwd_mla`'s out.
#[no_mangle]
pub extern "C" fn volta_fa_latent_values() -> i64 {
    LATENT_HEADDIMS[0]
}

/// Arguments of `volta_fa::fwd_sparse_mla`.
#[repr(C)]
pub struct SparseMlaArgs {
    /// (total_q, nheads, headdim). A null q, cache or indices is rejected.
    pub q: *mut c_void,
    /// (pages, page_size, 1, columns).
    pub cache: *mut c_void,
    /// int32 (total_q, topk).
    pub indices: *mut c_void,
    /// int32 (total_q) or null.
    pub topk_length: *mut c_void,
    /// A second cache, or null.
    pub extra_cache: *mut c_void,
    /// int32 (total_q, extra_topk), with a second cache.
    pub extra_indices: *mut c_void,
    /// int32 (total_q) or null.
    pub extra_topk_length: *mut c_void,
    /// float32 (nheads) or null.
    pub sinks: *mut c_void,
    /// Null: headdim^-0.5.
    pub softmax_scale: *const f64,
    /// True: the last 64 columns of fp8 rows are fp16. False: bf16.
    pub fp16_positions: bool,
    /// As in [`AttentionArgs`].
    pub stream: *mut c_void,
}

/// # Safety
/// The handles of `args` are valid.
unsafe fn sparse_call(args: &SparseMlaArgs) -> Result<sparse::Call> {
    unsafe {
        let lengths = [tensor(args.topk_length), tensor(args.extra_topk_length)];
        let [own_lengths, extra_lengths] = lengths;
        let (extra_cache, extra_indices) = (tensor(args.extra_cache), tensor(args.extra_indices));
        let (extra, unused) = match extra_cache {
            Some(cache) => {
                let indices = required("extra_indices", args.extra_indices)?;
                (Some(sparse::ChosenTokens { cache, indices, lengths: extra_lengths }), [None, None])
            }
            None => (None, [extra_indices, extra_lengths]),
        };
        Ok(sparse::Call {
            q: required("q", args.q)?,
            own: sparse::ChosenTokens {
                cache: required("cache", args.cache)?,
                indices: required("indices", args.indices)?,
                lengths: own_lengths,
            },
            extra,
            unused,
            sinks: tensor(args.sinks),
            softmax_scale: args.softmax_scale.as_ref().copied(),
            has_fp16_positions: args.fp16_positions,
            stream: args.stream,
        })
    }
}

/// Computes `volta_fa::fwd_sparse_mla`; `outputs` receives out, and softmax_lse and max_logits, both (total_q, nheads).
///
/// # Safety
/// As [`volta_fa_fwd`], with room for 3 pointers.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_fwd_sparse_mla(args: *const SparseMlaArgs, outputs: *mut *mut c_void) -> Status {
    status("fwd_sparse_mla", || unsafe {
        release_all(outputs, sparse::forward(&sparse_call(&*args)?)?.map(Some));
        Ok(())
    })
}

/// Rejects what [`volta_fa_fwd_sparse_mla`] rejects, as far as sizes are known.
///
/// # Safety
/// `args` and its handles are valid.
#[no_mangle]
pub unsafe extern "C" fn volta_fa_check_fwd_sparse_mla(args: *const SparseMlaArgs) -> Status {
    status("fwd_sparse_mla", || unsafe { sparse::check(&sparse_call(&*args)?) })
}

/// Arguments of `volta_fa::_dropout_mask`, for tests and `return_attn_probs`.
#[repr(C)]
pub struct DropoutMaskArgs {
    /// (2) int64, seed and offset, on the CPU: the shim copies it.
    pub rng_state: *mut c_void,
    /// First size of the mask.
    pub batch: i64,
    /// Query heads.
    pub nheads: i64,
    /// Rows of a head.
    pub seqlen_q: i64,
    /// Columns of a row.
    pub seqlen_k: i64,
    /// Probability of dropping, in [0, 1).
    pub dropout_p: f64,
}

/// Computes `volta_fa::_dropout_mask`: bool (batch, nheads, seqlen_q, seqlen_k), true for kept probabilities.
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

/// Returns JSON about this build and machine, see [`crate::info`].
#[no_mangle]
pub extern "C" fn volta_fa_info() -> *mut c_char {
    c_string(&crate::info::describe().to_string())
}

/// Returns a CUDA device's compute capability in two digits, as in `sm_70`.
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

/// Returns true if volta_fa runs scaled_dot_product_attention on devices of this architecture, see [`crate::kernels::serves`].
#[no_mangle]
pub extern "C" fn volta_fa_serves_sm(sm: i32, newer_too: bool) -> bool {
    u32::try_from(sm).is_ok_and(|sm| crate::kernels::serves(sm, newer_too))
}

/// Returns the largest headdim that devices of this architecture run, see [`crate::kernels::max_headdim`]. 0: fp16 tensors of the CPU.
#[no_mangle]
pub extern "C" fn volta_fa_max_headdim(sm: i32) -> i64 {
    match u32::try_from(sm) {
        Ok(sm) if sm > 0 => crate::kernels::max_headdim(sm),
        _ => crate::ops::cpu_max_headdim(),
    }
}

/// Returns the plans of a shape as JSON, see [`crate::info::plan`].
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

/// Sets a tuning for all plans in place of the files, see [`crate::launch::tuning::force`].
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

/// Returns the families that a device runs as JSON, see [`crate::info::families`].
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

/// Returns the timed simulations since the last call as JSON, see [`crate::info::take_simulations`].
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
