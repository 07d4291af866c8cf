//! What this build contains and this machine has, as JSON for `python -m volta_fa info` and the tests.

use crate::error::{Error, Result};
use crate::ffi::PlanArgs;
use crate::kernels::{self, Variant};
use crate::launch::driver;
use crate::params::{BwdParams, FwdParams};
use crate::plan::{self, BackwardMode, DeviceLimits, Step};
use crate::problem::{Attention, Features, Window};
use serde_json::{json, Value};

fn variant(v: &Variant) -> Value {
    let image = kernels::image(v);
    json!({
        "name": v.name,
        "family": v.family.name,
        "sm": v.family.sm,
        "pass": format!("{:?}", v.pass),
        "flavor": format!("{:?}", v.flavor),
        "source": v.source,
        "headdim": v.headdim,
        "headdim_v": v.headdim_v,
        "block_rows": v.block_rows,
        "step": v.step,
        "threads": v.threads,
        "shared_bytes": v.shared_bytes,
        "blocks_per_sm": v.blocks_per_sm,
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "params_bytes": match v.pass {
            kernels::Pass::Forward => size_of::<FwdParams>(),
            _ => size_of::<BwdParams>(),
        },
    })
}

/// Version, features and every variant with its resources.
pub fn describe() -> Value {
    let variants: Vec<Value> = kernels::variants().map(variant).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "torch": "2.11.0",
        "simulator": cfg!(feature = "sim"),
        "cuda_driver": driver::is_available(),
        "variants": variants,
    })
}

/// What the plan picks for a shape on a device: `forward` and the three kernels of `backward`.
///
/// # Errors
/// Numbers that make no sense, or a device that no kernel fits.
pub fn plan(args: &PlanArgs) -> Result<Value> {
    let positive = |name: &str, n: i64| {
        if n < 1 || n > i64::from(i32::MAX) {
            return Err(Error::value(name, n, "a positive 32-bit number"));
        }
        Ok(n)
    };
    let a = Attention {
        batch: positive("batch", args.batch)?,
        seqlen_q: positive("seqlen_q", args.seqlen_q)?,
        seqlen_k: positive("seqlen_k", args.seqlen_k)?,
        nheads: positive("nheads", args.nheads)?,
        nheads_k: positive("nheads_k", args.nheads_k)?,
        headdim: positive("headdim", args.headdim)?,
        headdim_v: positive("headdim_v", args.headdim_v)?,
        softmax_scale: 1.0,
        window: Window { left: None, right: args.is_causal.then_some(0) },
        packed: None,
        features: Features::default(),
    };
    let limits = DeviceLimits {
        capability: (args.capability_major as i32, args.capability_minor as i32),
        sms: positive("sms", args.sms)? as u32,
        shared_bytes_per_block: positive("shared_bytes", args.shared_bytes_per_block)? as u32,
    };
    let step = |s: Step| {
        let mut value = variant(s.variant);
        value["grid"] = json!([s.blocks[0], s.blocks[1], a.batch]);
        value
    };
    let backward = plan::backward(&a, BackwardMode::default(), &limits)?;
    Ok(json!({
        "forward": step(plan::forward(&a, &limits)?),
        "backward": {
            "prepare": step(backward.prepare),
            "main": step(backward.main),
            "finish": step(backward.finish),
        },
    }))
}

/// The reports of the timed simulations (`VOLTA_FA_SIMULATE=timing`) since the last call.
pub fn take_simulations() -> String {
    #[cfg(feature = "sim")]
    return serde_json::to_string(&crate::launch::simulator::take_reports()).unwrap_or_else(|_| "[]".into());
    #[cfg(not(feature = "sim"))]
    "[]".into()
}
