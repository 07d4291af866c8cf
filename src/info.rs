//! What this build contains and this machine has, as JSON for `python -m volta_fa info` and the tests.

use crate::error::{Error, Result};
use crate::ffi::PlanArgs;
use crate::kernels::{self, CacheFormat, Code, Feature, FeatureSet, Variant, COMPILED, PASSES};
use crate::launch::driver::{self, Driver};
use crate::launch::tuning::{self, DeviceTuning, Outcome};
use crate::launch::{only_family, Launcher};
use crate::limits::MAX_DECODE_ROWS;
use crate::plan::{self, BackwardMode, DeviceLimits, PlannedKernel};
use crate::problem::{padded_headdim, Appended, Attention, Cache, CacheLayout, DType, Keys, Queries, RequestedFeatures, Window};
use serde_json::{json, Value};

fn names(needs: FeatureSet) -> Vec<&'static str> {
    needs.iter().map(Feature::name).collect()
}

fn variant(v: &Variant) -> Value {
    let image = kernels::image(v);
    json!({
        "name": v.name,
        "family": v.family.name,
        "sm": v.family.sm,
        "pass": format!("{:?}", v.pass),
        "needs": names(v.needs),
        "requires": names(v.requires),
        "source": v.source,
        "cache": v.cache.name(),
        "headdim": v.headdim,
        "headdim_v": v.headdim_v,
        "block_rows": v.block_rows,
        "step": v.step,
        "threads": v.threads,
        "shared_bytes": v.shared_bytes,
        "blocks_per_sm": v.blocks_per_sm,
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "params_bytes": kernels::params_bytes(v.pass.facts().params),
    })
}

/// Version, features, passes, families and every variant with its resources.
pub fn describe() -> Value {
    let variants: Vec<Value> = kernels::variants().map(variant).collect();
    let passes = PASSES.map(|p| {
        json!({
            "name": format!("{:?}", p.pass),
            "params": p.params.name(),
            "rows": format!("{:?}", p.rows),
            "needs": names(p.needs),
        })
    });
    let families: Vec<Value> = COMPILED
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
        "passes": passes,
        "families": families,
        "variants": variants,
    })
}

/// The families that a device of this compute capability runs, in the order in which a plan asks them; `native`: as machine code.
///
/// # Errors
/// Where the environment restricts the choice to a family that is unknown or does not run there.
pub fn families(capability: (i32, i32)) -> Result<Value> {
    let limits = DeviceLimits { capability, only: only_family()?, ..DeviceLimits::V100 };
    let found = plan::families(COMPILED, &limits)?;
    Ok(found.into_iter().map(|(f, code)| json!({"name": f.name, "native": code == Code::Cubin})).collect())
}

/// A problem's features, and a backward pass' mode, that ask for these needs, which are names between commas.
fn asking(needs: &str) -> Result<(RequestedFeatures, BackwardMode)> {
    let (mut features, mut mode) = (RequestedFeatures::default(), BackwardMode::default());
    for name in needs.split(',').filter(|name| !name.is_empty()) {
        let need = Feature::ALL.into_iter().find(|n| n.name() == name).ok_or_else(|| {
            let known: Vec<_> = Feature::ALL.into_iter().map(Feature::name).collect();
            Error::value("needs", format!("`{name}`"), format!("some of {}, between commas", known.join(", ")))
        })?;
        match need {
            Feature::Lengths => features.seqused_k = true,
            Feature::Sinks => features.sinks = true,
            Feature::Bf16Gradients => mode.bf16_gradients = true,
            Feature::Softcap => features.softcap = 1.0,
            Feature::Alibi => features.alibi = true,
            Feature::Bias => features.attn_bias = true,
            Feature::Dropout => features.dropout_p = 0.5,
            // nothing that an attention could ask for
            Feature::Pages => {}
            Feature::Fp32Bias => (features.attn_bias, features.fp32_bias) = (true, true),
        }
    }
    Ok((features, mode))
}

/// What stands for the simulator where a device is asked for: the GPU that `VOLTA_FA_SIM_GPU` names.
const SIMULATOR: i64 = -1;

fn driver_of(device: i64) -> Result<Driver> {
    let wrong = || Error::value("device", device, format!("the number of a CUDA device, or {SIMULATOR}: the simulator"));
    Ok(Driver { device: usize::try_from(device).map_err(|_| wrong())?, stream: std::ptr::null_mut() })
}

#[cfg(feature = "sim")]
fn simulator_tuning() -> Result<&'static DeviceTuning> {
    crate::launch::simulator::tuning()
}
#[cfg(not(feature = "sim"))]
fn simulator_tuning() -> Result<&'static DeviceTuning> {
    Err(Error::unsupported("this build has no simulator"))
}

#[cfg(feature = "sim")]
fn simulator_limits() -> Result<DeviceLimits> {
    crate::launch::simulator::limits()
}
#[cfg(not(feature = "sim"))]
fn simulator_limits() -> Result<DeviceLimits> {
    Err(Error::unsupported("this build has no simulator"))
}

/// A device's tuning: what the file has to say that it was made on, where it lies, and what became of it (`off`, `missing`, `read`
/// or `ignored`, then why).
///
/// # Errors
/// Where there is no driver or no such device.
pub fn tuning(device: i64) -> Result<Value> {
    let found = if device == SIMULATOR { simulator_tuning()? } else { driver_of(device)?.tuning()? };
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

/// The device that [`plan()`] is asked about: one of this machine, with the tuning it has, or the one that the numbers describe.
fn limits(args: &PlanArgs, device: Option<i64>) -> Result<DeviceLimits> {
    match device {
        Some(SIMULATOR) => simulator_limits(),
        Some(device) => driver_of(device)?.limits(),
        None => Ok(DeviceLimits {
            capability: (args.capability_major as i32, args.capability_minor as i32),
            sms: positive("sms", args.sms)? as u32,
            shared_bytes_per_block: positive("shared_bytes", args.shared_bytes_per_block)? as u32,
            only: only_family()?,
            tuning: tuning::forced(),
        }),
    }
}

fn positive(name: &str, n: i64) -> Result<i64> {
    if n < 1 || n > i64::from(i32::MAX) {
        return Err(Error::value(name, n, "a positive 32-bit number"));
    }
    Ok(n)
}

/// The plans of the same shape with its keys in a cache: of `decode` as in a packed batch, whose sequences of many rows are left to
/// `prefill`, where there may be any; of decode over `bfloat16` and `quantized` caches, these by their formats, and of what converts the
/// latter where there are such sequences; and of `append`, of as many tokens as there are queries. Each null where no kernel does that; all,
/// where something is asked for that a cache's passes do not know.
fn cached(a: &Attention, mode: BackwardMode, limits: &DeviceLimits, described: impl Fn(PlannedKernel, i64) -> Value) -> Value {
    if mode != BackwardMode::default() || a.features.attn_bias || a.features.dropout_p > 0.0 {
        return Value::Null;
    }
    let has_long = a.rows_per_kv_head() > MAX_DECODE_ROWS;
    let decode = |format| {
        let dtype = if format == CacheFormat::Bf16 { DType::BFloat16 } else { DType::Half };
        let format = if format == CacheFormat::Bf16 { CacheFormat::Unquantized } else { format };
        let keys = Keys::Cache(Cache { layout: CacheLayout::Entries, entries: a.batch, rows: a.seqlen_k, format });
        plan::decode(&Attention { dtype, keys, ..*a }, has_long, limits).ok().map(|decode| {
            let mut value = described(decode.kernel, 1);
            value["partials"] = json!(decode.partials);
            value["semaphores"] = json!(decode.semaphores);
            value
        })
    };
    let append = |format| plan::append(a.seqlen_q, a.nheads_k, format, limits).ok().map(|kernel| described(kernel, a.batch));
    let of_quantized = |planned: &dyn Fn(CacheFormat) -> Option<Value>| -> serde_json::Map<String, Value> {
        let quantized = [CacheFormat::Int8, CacheFormat::Int4, CacheFormat::E5m2, CacheFormat::E4m3];
        quantized.into_iter().map(|format| (format.name().into(), json!(planned(format)))).collect()
    };
    let prefill = has_long.then(|| plan::prefill(a, limits).ok()).flatten();
    json!({
        "append": append(CacheFormat::Unquantized),
        "append_quantized": of_quantized(&append),
        "decode": decode(CacheFormat::Unquantized),
        "bfloat16": decode(CacheFormat::Bf16),
        "quantized": of_quantized(&decode),
        "convert": has_long.then(|| plan::dequantize(a.seqlen_k, a.nheads_k, limits).ok()).flatten().map(|kernel| described(kernel, a.batch)),
        "prefill": prefill.map(|kernel| described(kernel, a.batch)),
    })
}

/// What the plan picks for a shape on a device: `forward`, the kernels of `backward` (null where one does all), and those of a KV
/// `cache`, each with its reason; `needs` as the variants have them. `device`: a real one (see [`SIMULATOR`]), whose numbers in `args` do
/// not count then.
///
/// # Errors
/// Numbers that make no sense, or a device that no kernel fits.
pub fn plan(args: &PlanArgs, asked: &str, device: Option<i64>) -> Result<Value> {
    let (features, mode) = asking(asked)?;
    let a = Attention {
        batch: positive("batch", args.batch)?,
        seqlen_q: positive("seqlen_q", args.seqlen_q)?,
        seqlen_k: positive("seqlen_k", args.seqlen_k)?,
        nheads: positive("nheads", args.nheads)?,
        nheads_k: positive("nheads_k", args.nheads_k)?,
        headdim: padded_headdim(positive("headdim", args.headdim)?),
        headdim_v: padded_headdim(positive("headdim_v", args.headdim_v)?),
        softmax_scale: 1.0,
        window: Window { left: None, right: args.is_causal.then_some(0) },
        dtype: DType::Half,
        queries: Queries::Dense,
        keys: Keys::Dense,
        features,
        appended: Appended::default(),
        num_splits: 0,
    };
    let limits = limits(args, device)?;
    let on_grid = |kernel: PlannedKernel, batch: i64| {
        let mut value = variant(kernel.variant);
        value["grid"] = json!(kernel.grid(batch));
        value["reason"] = json!(kernel.reason.to_string());
        value
    };
    let described = |kernel: PlannedKernel| on_grid(kernel, a.batch);
    let mode = BackwardMode { deterministic: args.deterministic, ..mode };
    let backward = plan::backward(&a, mode, &limits)?;
    Ok(json!({
        "mode": {
            "is_causal": args.is_causal,
            "deterministic": mode.deterministic,
            "bf16_gradients": mode.bf16_gradients,
            "needs": names(plan::features(&a, mode)),
        },
        "forward": described(plan::forward(&a, &limits)?),
        "backward": {
            "prepare": backward.prepare.map(described),
            "main": described(backward.main),
            "finish": backward.finish.map(described),
            "deterministic": backward.deterministic,
            "rounds": backward.rounds,
            "tail": backward.tail.map(|tail| described(tail.kernel)),
            "dq_accum_splits": backward.dq_accum_splits,
        },
        "cache": cached(&a, mode, &limits, on_grid),
    }))
}

/// The reports of the timed simulations (`VOLTA_FA_SIMULATE=timing`) since the last call.
pub fn take_simulations() -> String {
    #[cfg(feature = "sim")]
    return serde_json::to_string(&crate::launch::simulator::take_reports()).unwrap_or_else(|_| "[]".into());
    #[cfg(not(feature = "sim"))]
    "[]".into()
}
