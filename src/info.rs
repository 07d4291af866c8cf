//! Describes this build and this machine as JSON, for `python -m volta_fa info`, `python -m volta_fa check` and the tests. They read it by
//! internal operators: `_info()`, `_plan()`, `_families()`, `_tuning()` and `_sim_report()` of `torch.ops.volta_fa` (internal.rs).
//!
//! - variant: one compiled kernel; family: the kernels for one kind of tensor core (volta, turing);
//! - pass: what kernels compute (forward, decode); a backward pass is a preprocess, a main and a postprocess kernel;
//! - mode: what a call asks of its backward pass; feature: an option that kernels need code for;
//! - tuning file: which kernels plans take or avoid on one GPU.

use crate::error::{Error, Result};
use crate::kernels::{self, CacheFormat, Code, Feature, FeatureSet, FormatInfo, ScaleGranularity, Variant, COMPILED, FORMATS, PASSES};
use crate::launch::driver::{self, Driver};
use crate::launch::tuning::{self, Outcome};
use crate::launch::{only_family, Launcher};
use crate::limits;
use crate::ops::all_are_batch_invariant;
use crate::plan::{self, BackwardMode, BackwardPlan, DeviceLimits, PlannedKernel};
use crate::problem::{padded_headdim, Attention, Cache, CacheLayout, DType, Keys, RequestedFeatures, Window};
use crate::value::{arguments, Value};
use serde_json::{json, Value as Json};

/// Returns names of features, as the arguments of [`plan()`] have them.
fn names(features: FeatureSet) -> Vec<&'static str> {
    features.iter().map(Feature::name).collect()
}

/// Describes the formats of KV caches. `columns`: numbers of a key or value in one element of the tensor. `max_code`: the largest magnitude
/// of a code. `of_latents`: `fwd_mla` takes it. `keys` and `values`: the formats of either, if the row is a pair.
fn cache_formats() -> Vec<Json> {
    let row = |f: &FormatInfo| {
        let [keys, values] = f.format.parts();
        json!({
            "name": f.name,
            "dtype": f.dtype,
            "bits": f.bits,
            "columns": f.columns(),
            "scale": match f.scale {
                ScaleGranularity::None => "none",
                ScaleGranularity::Token => "token",
                ScaleGranularity::Head => "head",
            },
            "zero_point": f.has_zero_point,
            "max_code": f.max_code,
            "is_quantized": f.format.is_quantized(),
            "of_latents": f.of_latents,
            "keys": keys.name(),
            "values": values.name(),
        })
    };
    FORMATS.iter().map(row).collect()
}

/// Describes a kernel. A block has `block_rows` rows (queries or keys, as the pass's `rows` says) of each of `heads` heads, and its main
/// loop takes `step` rows of the other kind at a time (decode: a warp has `step` of the rows). It runs only problems that use all
/// `required_features`, and no feature beyond `features`. `headdim` and `headdim_v` are the largest that it takes; `shared_bytes` is of a
/// block, `registers` and `spill_bytes` of a thread, `params_bytes` of its argument. `source`: its header below csrc/.
fn variant(v: &Variant) -> Json {
    let image = kernels::image(v);
    json!({
        "name": v.name,
        "family": v.family.name,
        "sm": v.family.sm,
        "pass": format!("{:?}", v.pass),
        "features": names(v.features),
        "required_features": names(v.required_features),
        "batch_invariant": v.is_batch_invariant,
        "source": v.source.headers[0],
        "cache": if v.is_bf16 { "bfloat16" } else { v.cache.name() },
        "headdim": v.headdim,
        "headdim_v": v.headdim_v,
        "block_rows": v.block_rows,
        "heads": v.heads,
        "step": v.step,
        "threads": v.threads,
        "shared_bytes": v.shared_bytes,
        "blocks_per_sm": v.blocks_per_sm,
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "params_bytes": kernels::params_bytes(v.params()),
    })
}

/// Returns version, limits, cache formats, passes, families, and all variants with their resources. Of a family, `native` lists the
/// architectures (70 for sm_70) that run its machine code; `shared_bytes` and `threads` are those of an SM.
pub fn describe() -> Json {
    let variants: Vec<Json> = kernels::variants().map(variant).collect();
    let passes = PASSES.map(|p| {
        json!({
            "name": format!("{:?}", p.pass),
            "params": p.params.name(),
            "rows": format!("{:?}", p.rows),
            "features": names(p.features),
        })
    });
    let families: Vec<Json> = COMPILED
        .families()
        .map(|f| {
            json!({
                "name": f.name,
                "sm": f.sm,
                "native": f.native,
                "shared_bytes": f.shared_bytes,
                "threads": f.threads,
                "variants": kernels::variants().filter(|v| v.family.name == f.name).count(),
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "simulator": cfg!(feature = "sim"),
        "cuda_driver": driver::is_available(),
        "cache_formats": cache_formats(),
        "limits": limits::published(),
        "passes": passes,
        "families": families,
        "variants": variants,
    })
}

/// Returns the families that a device of this compute capability runs, in the order of preference. `native`: in embedded machine code, else
/// as PTX, which the driver compiles. Fails if `VOLTA_FA_FAMILY` names a family that is unknown or does not run there.
pub fn families(capability: (i32, i32)) -> Result<Json> {
    // of the limits, families depend on these two alone
    let limits = DeviceLimits { capability, only: only_family()?, ..DeviceLimits::V100 };
    let found = plan::families(*COMPILED, &limits)?;
    Ok(found.into_iter().map(|(f, code)| json!({"name": f.name, "native": code == Code::Cubin})).collect())
}

/// Returns the features of these names, separated by commas.
fn parse_features(names: &str) -> Result<FeatureSet> {
    let feature = |name| {
        Feature::named(name).ok_or_else(|| {
            let known: Vec<_> = Feature::ALL.into_iter().map(Feature::name).collect();
            Error::value("features", format!("`{name}`"), format!("some of {}, separated by commas", known.join(", ")))
        })
    };
    let listed = names.split(',').filter(|name| !name.is_empty()).map(feature).collect::<Result<Vec<_>>>()?;
    Ok(FeatureSet::of(&listed))
}

/// Device number of the simulator, which models the GPU that `VOLTA_FA_SIM_GPU` names.
const SIMULATOR: i64 = -1;

/// Returns the driver of a CUDA device, with the default stream.
pub(crate) fn driver_of(device: i64) -> Result<Driver> {
    let wrong = || Error::value("device", device, format!("the number of a CUDA device, or {SIMULATOR}: the simulator"));
    Ok(Driver { device: usize::try_from(device).map_err(|_| wrong())?, stream: std::ptr::null_mut() })
}

/// Returns the launcher of a CUDA device or, for [`SIMULATOR`], of the simulated GPU.
fn launcher_of(device: i64) -> Result<Box<dyn Launcher>> {
    match device {
        #[cfg(feature = "sim")]
        SIMULATOR => Ok(Box::new(crate::launch::simulator::Simulator::of_named_gpu()?)),
        #[cfg(not(feature = "sim"))]
        SIMULATOR => Err(Error::unsupported("this build has no simulator")),
        _ => Ok(Box::new(driver_of(device)?)),
    }
}

/// Describes a device's tuning file: the GPU and software it must be made on, its path, and the outcome of reading it (an [`Outcome`]).
/// `choices` counts its choices, `failed` has the kernels that it excludes, and `overridden` is true if `_set_tuning()` replaces it.
pub fn tuning(device: i64) -> Result<Json> {
    let found = launcher_of(device)?.tuning()?;
    let (outcome, why) = match &found.outcome {
        Outcome::Off => ("off", None),
        Outcome::Missing => ("missing", None),
        Outcome::Read(_) => ("read", None),
        Outcome::Ignored(why) => ("ignored", Some(why)),
    };
    Ok(json!({
        "device": found.card.device,
        "driver": found.card.driver,
        "volta_fa": found.card.volta_fa,
        "path": found.path.as_ref().map(|path| path.to_string_lossy()),
        "outcome": outcome,
        "why": why,
        "choices": found.tuning().map_or(0, |t| t.choices()),
        "failed": found.tuning().map_or(&[][..], |t| t.failed()),
        "overridden": tuning::forced().is_some(),
    }))
}

/// Returns the device that numbers of a [`plan()`] call describe.
fn described_device([sms, major, minor, shared_bytes]: &[Value; 4]) -> Result<DeviceLimits> {
    Ok(DeviceLimits {
        capability: (major.int() as i32, minor.int() as i32),
        sms: positive("sms", sms)? as u32,
        shared_bytes_per_block: positive("shared_bytes", shared_bytes)? as u32,
        only: only_family()?, // the one family that VOLTA_FA_FAMILY allows
        tuning: tuning::forced(),
    })
}

/// Returns a size of a [`plan()`] call. `name`: of the argument, for the error.
fn positive(name: &str, size: &Value) -> Result<i64> {
    match size.int() {
        n if (1..=i64::from(i32::MAX)).contains(&n) => Ok(n),
        n => Err(Error::value(name, n, "a positive 32-bit number")),
    }
}

/// Describes plans of the same shape with its keys in a KV cache, by `described` (a kernel on a grid of some batch entries). A plan is null
/// if there is no kernel for it. Returns null itself if a feature or mode does not apply to caches.
/// - `append` and `append_quantized`: appends as many tokens as there are queries.
/// - `decode`, `bfloat16` and `quantized`: decodes over fp16, bf16 and quantized caches, the last by format. Its blocks exchange `partials`
///   floats through scratch memory, and count themselves in `semaphores` of 8 bytes.
/// - `dequantize` and `prefill`: dequantizes, and computes the sequences with more query rows per KV head than decode kernels take, if any.
fn cached(a: &Attention, mode: BackwardMode, limits: &DeviceLimits, described: impl Fn(PlannedKernel, i64) -> Json) -> Json {
    if mode != BackwardMode::default() || a.features.attn_bias || a.features.dropout_p > 0.0 {
        return Json::Null;
    }
    let has_long = a.has_prefill(); // there may be sequences that decode kernels leave to prefill
    let decode = |dtype, format| {
        let keys = Keys::Cache(Cache { layout: CacheLayout::Entries, entries: a.batch, rows: a.seqlen_k, format });
        plan::decode(&Attention { dtype, keys, ..*a }, has_long, limits).ok().map(|decode| {
            let mut value = described(decode.kernel, 1); // a decode grid divides all entries itself
            value["partials"] = json!(decode.partials);
            value["semaphores"] = json!(decode.semaphores);
            value
        })
    };
    let append = |format| plan::append(a.seqlen_q, a.nheads_k, format, limits).ok().map(|kernel| described(kernel, a.batch));
    let of_quantized = |planned: &dyn Fn(CacheFormat) -> Option<Json>| -> serde_json::Map<String, Json> {
        CacheFormat::quantized().map(|format| (format.name().into(), json!(planned(format)))).collect()
    };
    let dequantize = has_long.then(|| plan::dequantize(a.seqlen_k, a.nheads_k, limits).ok()).flatten();
    let prefill = has_long.then(|| plan::prefill(a, limits).ok()).flatten();
    json!({
        "append": append(CacheFormat::Unquantized),
        "append_quantized": of_quantized(&append),
        "decode": decode(DType::Half, CacheFormat::Unquantized),
        "bfloat16": decode(DType::BFloat16, CacheFormat::Unquantized),
        "quantized": of_quantized(&|format| decode(DType::Half, format)),
        "dequantize": dequantize.map(|kernel| described(kernel, a.batch)),
        "prefill": prefill.map(|kernel| described(kernel, a.batch)),
    })
}

/// Describes the kernels of a shape on a device, with grids and reasons; null where the plan has none. `values`: arguments of `_plan`
/// (internal.rs); all batch entries have these lengths. Fails for sizes out of range, or without applicable kernels. In `backward`:
/// - `main_launches`: launches of `main` for the whole batch. `tail`: one more for the last keys, with smaller blocks.
/// - `dq_accum_splits`: fp32 accumulators of dq, to which `main` adds; 0: none.
pub fn plan(values: &[Value]) -> Result<Json> {
    let [batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, is_causal, device_numbers @ .., deterministic, features, device] =
        arguments::<15>(values);
    // what a call requests that uses these features: of its problem, and of its backward pass
    let (features, mode) = plan::using(parse_features(&features.text())?);
    let a = Attention {
        batch: positive("batch", batch)?,
        seqlen_q: positive("seqlen_q", seqlen_q)?,
        seqlen_k: positive("seqlen_k", seqlen_k)?,
        nheads: positive("nheads", nheads)?,
        nheads_k: positive("nheads_k", nheads_k)?,
        headdim: padded_headdim(positive("headdim", headdim)?),
        headdim_v: padded_headdim(positive("headdim_v", headdim_v)?),
        softmax_scale: 1.0, // plans do not depend on it
        window: Window { left: None, right: is_causal.bool().then_some(0) },
        features,
        ..Attention::default()
    };
    // VOLTA_FA_BATCH_INVARIANT asks for batch-invariant kernels in all calls; gradients have none
    let forward = Attention { features: RequestedFeatures { batch_invariant: all_are_batch_invariant()?, ..a.features }, ..a };
    let limits = match device.optional_int() {
        Some(device) => launcher_of(device)?.limits()?,
        None => described_device(device_numbers)?,
    };
    let on_grid = |kernel: PlannedKernel, batch: i64| {
        let mut value = variant(kernel.variant);
        value["grid"] = json!(kernel.grid(batch));
        value["reason"] = json!(kernel.reason.to_string());
        value
    };
    let described = |kernel: PlannedKernel| on_grid(kernel, a.batch);
    let mode = BackwardMode { deterministic: deterministic.bool(), ..mode };
    let backward = plan::backward(&a, mode, &limits)?;
    let kernels_of = |plan: &BackwardPlan| {
        // launch_entries: the most batch entries that one launch takes
        let of_backward = |kernel: PlannedKernel| on_grid(kernel, plan.launch_entries(a.batch));
        json!({
            "preprocess": plan.preprocess.map(of_backward),
            "main": of_backward(plan.main),
            "postprocess": plan.postprocess.map(of_backward),
            "deterministic": plan.deterministic,
            "main_launches": plan.all_main_launches(a.batch),
            "tail": plan.tail.map(|tail| of_backward(tail.kernel)),
            "dq_accum_splits": plan.dq_accum_splits,
        })
    };
    // fp32 tensors, whose numbers kernels take as sums of two fp16 numbers
    let split = BackwardMode { split: true, fp32_gradients: true, ..mode };
    Ok(json!({
        "mode": {
            "is_causal": is_causal.bool(),
            "deterministic": mode.deterministic,
            "fp32_gradients": mode.fp32_gradients,
            "features": names(plan::features(&a, mode)),
        },
        "forward": described(plan::forward(&forward, &limits)?),
        // null where fp32 tensors have no kernel
        "forward_split": plan::forward_split(&a, &limits).ok().map(described),
        "backward": kernels_of(&backward),
        "backward_split": plan::backward(&a, split, &limits).ok().map(|plan| kernels_of(&plan)),
        "cache": cached(&forward, mode, &limits, on_grid),
    }))
}

/// Returns the reports of the launches that were timed (`VOLTA_FA_SIMULATE=timing`) or recorded (`=launches`) since the last call.
pub fn take_simulations() -> String {
    #[cfg(feature = "sim")]
    return serde_json::to_string(&crate::launch::simulator::take_reports()).unwrap_or_else(|_| "[]".into());
    #[cfg(not(feature = "sim"))]
    "[]".into()
}
