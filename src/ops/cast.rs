//! bf16 or fp32 q, k and v as fp16, scaled by powers of two. csrc/shared/cast/cast.cuh chooses the exponents, which stay on the device.

use super::block_mask::{block_lists, NO_BLOCKS};
use super::blocks::{self, lse_at, Blocks};
use super::inputs::Inputs;
use super::launches::{memory_ranges, Launches};
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::{CastParams, Operand, Output};
use crate::plan::{self, PlannedKernel};
use crate::problem::{padded_headdim, Attention};
use crate::tensor::{self, element_type, output};
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// Exponents of the largest score, log2 units, that rows keep, and to which larger ones are lowered. Forward: fp32 resolves a difference of
/// 8, and probabilities fit fp16.
const SCORES_OF_FORWARD: [i32; 2] = [26, 26];
/// Backward recomputes probabilities from softmax_lse. Below 2^23 both have units of at most 1/2, and P, stored as P * 2^12, stays in fp16.
/// Keys that nearly tie keep their shares there, as in PyTorch's kernels. Beyond, a key that has a row alone is right within 4% at 2^19.
const SCORES_OF_BACKWARD: [i32; 2] = [23, 19];
/// Row tiles of a grid whose blocks rarely have work: each walks over several.
const MAX_SPARSE_TILES: u32 = 8;

/// Passes of the kernel, in their order: `cast::Phase`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    TakeLargest,
    LeaveOutHidden,
    CastScaled,
    RestoreLse,
}

/// Rows of [`CastParams::largest`], and numbers of two of them: `cast::Magnitude`.
const MAGNITUDES: i64 = 7;
const LARGEST_V: i64 = 2;
const LARGEST_VISIBLE_V: i64 = 6;

/// What a cast writes.
pub(super) struct Operands {
    /// How v is scaled; None: v is not cast.
    pub v: Option<Values>,
    /// Not 0: numbers of q and k become sums of two. A row has this many columns of high parts, then the low parts.
    pub low_column: i64,
}

/// How v is scaled.
pub(super) struct Values {
    /// Exponent of the largest |v| after scaling, rounded up.
    pub largest_exponent: i32,
    /// One exponent for all of v.
    pub is_shared: bool,
    /// No exponent if fp16 holds v, so that its bits do not depend on other tokens.
    pub keeps_ordinary: bool,
    /// As [`Operands::low_column`].
    pub low_column: i64,
}

/// A call's fp16 inputs.
pub(super) struct Cast<'a> {
    /// fp16 copies, with padded headdims, or their parts; v as it was given if it was not cast.
    pub inputs: Inputs,
    /// The problem with a scale that fp16 operands can have.
    pub problem: Attention,
    /// (3, batch or 1, 1, nheads_k, 1, 1), packed (3, 1, nheads_k, 1, 1), int32: exponents of q, k and v.
    exponents: Tensor,
    /// Exponent that softmax_scale lost and q has.
    scale_exponent: i32,
    score_exponents: [i32; 2],
    kernel: PlannedKernel,
    of: Operands,
    /// The inputs before the cast, as kernels read them.
    given: Inputs,
    largest: Tensor,
    launcher: &'a dyn Launcher,
}

/// Returns e with 2^(e - 1) <= |x| < 2^e, of a normal number.
fn exponent(x: f32) -> i32 {
    (x.abs().to_bits() >> 23) as i32 - 126
}

/// Returns the power of two that q takes over from the scale, so that scores of fp16 operands can be as small or large as those of bf16
/// ones. 0 for the scales that models have.
fn scale_exponent(softmax_scale: f64) -> i32 {
    match softmax_scale as f32 {
        0.0 => 0,
        scale if (-9..=1).contains(&exponent(scale)) => 0,
        scale => exponent(scale) + 2,
    }
}

/// Returns true if there may be keys that no query sees, beside those past `seqused_k`.
fn may_hide_keys(inputs: &Inputs, a: &Attention) -> bool {
    let before_window = a.window.left.is_some_and(|left| a.seqlen_k - a.seqlen_q > left);
    // a packed sequence may have no queries, or fewer than others
    inputs.options.attn_bias.is_some() || inputs.options.block_lists.is_some() || before_window || a.total_q().is_some()
}

impl<'a> Cast<'a> {
    /// Casts a call's operands. `softmax_lse`: contiguous, and scaled in place as the scores are.
    pub fn new(inputs: &Inputs, a: &Attention, of: Operands, softmax_lse: Option<&Tensor>, launcher: &'a dyn Launcher) -> Result<Cast<'a>> {
        let scale_exponent = scale_exponent(a.softmax_scale);
        let problem = Attention { softmax_scale: a.softmax_scale * f64::from(-scale_exponent).exp2(), ..*a };
        let of_v = of.v.as_ref();
        // without its cast v may be a whole cache, which nothing reads here: q keeps its place
        let read = Inputs { v: of_v.map_or(&inputs.q, |_| &inputs.v).shallow_clone(), ..inputs.share() };
        let given = blocks::readable(&read, a)?.unwrap_or(read);
        let half = |t: &Tensor, low_column: i64| {
            let mut sizes = t.size();
            if let Some(last) = sizes.last_mut().filter(|_| low_column > 0) {
                *last = 2 * low_column;
            }
            tensor::empty(&sizes, Kind::Half, launcher)
        };
        let v = of_v.map_or_else(|| Ok(inputs.v.shallow_clone()), |of| half(&given.v, of.low_column))?;
        let cast = Inputs { q: half(&given.q, of.low_column)?, k: half(&given.k, of.low_column)?, v, ..given.share() };
        let score_exponents = if softmax_lse.is_some() { SCORES_OF_BACKWARD } else { SCORES_OF_FORWARD };
        let entries = if a.total_q().is_some() { 1 } else { a.batch };
        let int = (Kind::Int, given.q.device());
        let largest = Tensor::f_zeros([MAGNITUDES, entries * a.nheads_k], int)?;
        let exponents = Tensor::f_empty([3, entries * a.nheads_k], int)?;
        let heads = a.nheads + if of_v.is_some() { 2 } else { 1 } * a.nheads_k;
        let kernel = plan::cast(a.seqlen_q.max(a.seqlen_k), heads, &launcher.limits()?)?;
        log::cast(a, &kernel)?;
        let written = [
            ("q_fp16", Some(&cast.q)),
            ("k_fp16", Some(&cast.k)),
            ("v_fp16", Some(&cast.v).filter(|_| of_v.is_some())),
            ("exponents", Some(&exponents)),
        ];
        let mut launches = Launches::begin(&given, a, launcher, written);
        launches.also_write(&[], Some(("largest", &largest)));
        launches.also_write(&[], softmax_lse.map(|t| ("softmax_lse", t)));
        let targets = [(&cast.q, a.headdim, of.low_column), (&cast.k, a.headdim, of.low_column)];
        let of_values = of_v.map(|of| (&cast.v, a.headdim_v, of.low_column));
        for (t, ..) in targets.into_iter().chain(of_values).filter(|(_, columns, low_column)| *low_column > padded_headdim(*columns)) {
            // columns between the parts; after begin, which fills writable memory with NaN
            let _ = t.shallow_clone().f_zero_()?;
        }
        let shape: &[i64] = if a.total_q().is_some() { &[3, 1, a.nheads_k, 1, 1] } else { &[3, entries, 1, a.nheads_k, 1, 1] };
        let this = Cast {
            inputs: cast,
            problem,
            exponents: exponents.f_view(shape)?,
            scale_exponent,
            score_exponents,
            kernel,
            of,
            given,
            largest,
            launcher,
        };
        this.run(&launches, Phase::TakeLargest, None)?;
        if may_hide_keys(&this.given, a) {
            this.run(&launches, Phase::LeaveOutHidden, None)?;
        }
        if this.of.v.as_ref().is_some_and(|of| of.is_shared) {
            this.share_largest_v()?;
        }
        this.run(&launches, Phase::CastScaled, softmax_lse)?;
        Ok(this)
    }

    /// Gives all groups of v the largest magnitude of any.
    fn share_largest_v(&self) -> Result<()> {
        let [mut largest, mut visible] = [self.largest.f_select(0, LARGEST_V)?, self.largest.f_select(0, LARGEST_VISIBLE_V)?];
        // bits of positive numbers compare as the numbers do
        let _ = largest.f_masked_fill_(&visible.f_eq(0)?.f_logical_not()?, 0.0)?;
        let all = largest.f_maximum(&visible)?.f_amax([0_i64].as_slice(), true)?;
        largest.f_copy_(&all)?;
        let _ = visible.f_zero_()?;
        Ok(())
    }

    /// Scales softmax_lse of these inputs back to that of the given ones, in place.
    pub fn restore_lse(&self, softmax_lse: &Tensor) -> Result<()> {
        let written = [("softmax_lse", Some(softmax_lse))];
        let ranges =
            memory_ranges(&self.given, &self.problem, self.launcher, written.into_iter().chain([("largest", Some(&self.largest))]));
        self.run(&Launches::in_place(self.launcher, ranges), Phase::RestoreLse, Some(softmax_lse))
    }

    /// Exponents of v: v_fp16 = v * 2^exponent.
    pub fn of_v(&self) -> Result<Tensor> {
        Ok(self.exponents.f_select(0, 2)?)
    }

    /// Exponents of k.
    pub fn of_k(&self) -> Result<Tensor> {
        Ok(self.exponents.f_select(0, 1)?)
    }

    /// Exponents of what kernels computed of the gradients of q and k.
    pub fn of_gradients(&self) -> Result<[Tensor; 2]> {
        // dq is a sum of scale * dS * k, dk of scale * dS * q; the scale lost scale_exponent
        let of =
            |other: i64| Ok::<_, crate::error::Error>(self.exponents.f_select(0, other)?.f_add_scalar(-i64::from(self.scale_exponent))?);
        Ok([of(1)?, of(0)?])
    }

    fn run(&self, launches: &Launches, phase: Phase, softmax_lse: Option<&Tensor>) -> Result<()> {
        let a = &self.problem.padded();
        let is_packed = a.total_q().is_some();
        let mut kernel = self.kernel;
        let has_v = self.of.v.is_some();
        if matches!(phase, Phase::LeaveOutHidden | Phase::RestoreLse) || (phase == Phase::CastScaled && !has_v) {
            kernel.blocks[0] = kernel.blocks[0].min(MAX_SPARSE_TILES);
        }
        let o = &self.given.options;
        let blocks = o.block_lists.as_ref().map_or(NO_BLOCKS, |lists| block_lists(lists, o.block_bits.as_ref()));
        let of_v = self.of.v.as_ref();
        for (first, batches) in plan::batch_chunks(a.batch) {
            let Blocks { q, k, v, problem, lengths, score_options, .. } = Blocks::new(&self.given, a, (first, batches));
            let nothing = Operand { ptr: null(), batch_stride: 0, row_stride: 0, head_stride: 0 };
            let nowhere = Output { ptr: null_mut(), batch_stride: 0, row_stride: 0, head_stride: 0 };
            let params = CastParams {
                q,
                k,
                v: if has_v { v } else { nothing },
                q_fp16: output(&self.inputs.q, first),
                k_fp16: output(&self.inputs.k, first),
                v_fp16: if has_v { output(&self.inputs.v, first) } else { nowhere },
                softmax_lse: softmax_lse.map_or(null_mut(), |t| lse_at(t, a, first)),
                largest: self.largest.data_ptr().cast(),
                exponents: self.exponents.data_ptr().cast(),
                element: element_type(&self.given.q),
                low_column: self.of.low_column as i32,
                low_column_v: of_v.map_or(0, |of| of.low_column as i32),
                groups: self.largest.size()[1] as i32,
                first_entry: if is_packed { 0 } else { first as i32 },
                scale_exponent: self.scale_exponent,
                scale_log2_exponent: exponent(problem.scale_log2),
                score_exponent: exponent(a.headdim as f32 * problem.scale_log2),
                max_score_exponent: self.score_exponents[0],
                lowered_score_exponent: self.score_exponents[1],
                largest_v_exponent: of_v.map_or(0, |of| of.largest_exponent),
                keeps_ordinary_v: i32::from(of_v.is_some_and(|of| of.keeps_ordinary)),
                score_options,
                blocks,
                phase: phase as i32,
                problem,
                lengths,
            };
            launches.run(&kernel, batches, bytes_of(&params))?;
        }
        Ok(())
    }
}
