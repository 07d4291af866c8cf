//! Parameters that all attention kernels share.

use crate::params;
use crate::problem::Attention;

/// Returns the parameters of a launch of `batches` entries.
pub fn problem_block(a: &Attention, batches: i64) -> params::Problem {
    let unbounded = a.seqlen_q + a.seqlen_k;
    let side = |w: Option<i64>| w.map_or(unbounded, |w| w.min(unbounded)) as i32;
    // A zero scale gives all visible keys equal weight. So does a tiny one, and kernels can divide by it.
    const TINY: f32 = 1e-30;
    let scale = (a.softmax_scale as f32).abs().max(TINY);
    params::Problem {
        batch: batches as i32,
        nheads: a.nheads as i32,
        nheads_k: a.nheads_k as i32,
        seqlen_q: a.seqlen_q as i32,
        seqlen_k: a.seqlen_k as i32,
        headdim: a.headdim as i32,
        headdim_v: a.headdim_v as i32,
        window_left: side(a.window.left),
        window_right: side(a.window.right),
        scale,
        scale_log2: scale * std::f32::consts::LOG2_E,
        sign_flip: if a.softmax_scale < 0.0 { 0x8000_8000 } else { 0 },
    }
}
