//! What this build contains and this machine has, as JSON for `python -m volta_fa info` and the tests.

use crate::kernels;
use crate::launch::driver;
use crate::params::{BwdParams, FwdParams};
use serde_json::{json, Value};

/// Version, features and every variant with its resources.
pub fn describe() -> Value {
    let variants: Vec<Value> = kernels::variants()
        .map(|v| {
            let image = kernels::image(v);
            json!({
                "name": v.name,
                "family": v.family.name,
                "sm": v.family.sm,
                "pass": format!("{:?}", v.pass),
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
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "torch": "2.11.0",
        "simulator": cfg!(feature = "sim"),
        "cuda_driver": driver::is_available(),
        "variants": variants,
    })
}

/// The reports of the timed simulations (`VOLTA_FA_SIMULATE=timing`) since the last call.
pub fn take_simulations() -> String {
    #[cfg(feature = "sim")]
    return serde_json::to_string(&crate::launch::simulator::take_reports()).unwrap_or_else(|_| "[]".into());
    #[cfg(not(feature = "sim"))]
    "[]".into()
}
