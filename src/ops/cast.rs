//! Casts bf16 or fp32 q, k and v to fp16, scaled by powers of two, so that kernels for fp16 can compute with them. scaled.rs and
//! kvcache/latents.rs use it. One kernel (csrc/shared/cast/cast.cuh) chooses the exponents and casts; the exponents stay on the device.
//!
//! The exponents of q and k have a sum of 0, as far as fp16 holds both: they cancel in the product, so kernels need not know them. A row of
//! q with very large scores gets a smaller exponent of its own, and its softmax_lse has to be scaled back. A group is the elements that
//! share an exponent: those of a KV head and its query heads, in a batch entry (of all sequences if packed). A number may also be split
//! into a sum of two fp16 numbers, its parts.

use super::block_mask::{self, NO_BLOCKS};
use super::blocks::{self, lse_at, Blocks}; // Blocks: parts of parameter blocks, from a call's tensors
use super::inputs::Inputs;
use super::launches::{memory_ranges, Launches}; // ranges: memory that kernels may access, for the simulator
use crate::error::{Error, Result};
use crate::launch::{bytes_of, Launcher};
use crate::limits::MAX_HEADS;
use crate::log;
use crate::params::{CastParams, Operand, Output};
use crate::plan::{self, DeviceLimits, PlannedKernel};
use crate::problem::{padded_headdim, Attention};
use crate::tensor::{self, element_type, output, Absent}; // Absent: NONE, a block of null pointers and zeros
use std::mem::replace;
use std::ptr::null_mut;
use tch::{Kind, Tensor};

/// Limits of scores (in log2 units), as exponents of 2. A row of q with larger scores is scaled down by a power of two.
#[derive(Clone, Copy)]
struct ScoreExponents {
    /// Exponent of the largest score that a row keeps.
    max: i32,
    /// Exponent to which larger ones are lowered.
    lowered: i32,
}

/// Forward: below 2^26 fp32 rounds scores and their maximum to multiples of 4 (log2 units). Beyond, a row's largest probability, 2^(score -
/// maximum), may become 0 or infinity.
const SCORES_OF_FORWARD: ScoreExponents = ScoreExponents { max: 26, lowered: 26 };
/// Backward recomputes probabilities P from scores and softmax_lse. Below 2^23 fp32 resolves both to 1/2 or finer. So P is wrong by a small
/// factor at most, and keys that nearly tie keep their shares; P * 2^12, which some kernels store, stays in fp16's range. Larger scores are
/// lowered to 2^19: a row that attends to one key alone is then right within 4.4%.
const SCORES_OF_BACKWARD: ScoreExponents = ScoreExponents { max: 23, lowered: 19 };
/// Most row tiles of a grid whose blocks rarely have work: each block walks over several.
const MAX_SPARSE_TILES: u32 = 8;

/// Passes of the kernel over the tensors, a launch each, in this order: `cast::Phase` in csrc/shared/cast/cast.cuh.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Takes the largest magnitude of each group, and casts q and k unscaled (not if they are split).
    TakeLargest,
    /// Takes magnitudes again, without outlying keys and values that no query sees. Only if there may be such keys.
    LeaveOutHidden,
    /// Casts v, and q and k where they need a scale.
    CastScaled,
    /// In a backward pass with parts: casts q and k once more, for products with gradients of scores.
    CastForGradients,
    /// After a forward pass: scales softmax_lse back.
    RestoreLse,
}

/// Rows of [`CastParams::largest`] (`cast::Magnitude`), each with a magnitude for each group. Rows 0 to 2: the largest of q, k and v. 3 and
/// 4: the smallest of k and v. 5 and 6: the largest of k and v without hidden outlying ones; 0: no key was looked at for that.
const MAGNITUDES: i64 = 7;
const LARGEST_V: i64 = 2;
const LARGEST_VISIBLE_V: i64 = 6;

/// What a cast does to a call's operands.
pub(super) struct Operands {
    /// How v is scaled; None: v is not cast.
    pub v: Option<Values>,
    /// Not 0: numbers of q and k are split. A row has this many columns of high parts, then the low parts.
    pub low_column: i64,
}

/// How v is scaled.
pub(super) struct Values {
    /// Exponent of the largest |v| after scaling, rounded up.
    pub largest_exponent: i32,
    /// True: one exponent for all of v; false: one for each group.
    pub is_shared: bool,
    /// True: v gets no exponent if fp16 holds it, so that its bits do not depend on other tokens (batch invariance).
    pub keeps_ordinary: bool,
    /// As [`Operands::low_column`], of v.
    pub low_column: i64,
}

/// A call's operands after the cast, and what scales results back.
pub(super) struct Cast<'a> {
    /// fp16 copies with padded headdims, perhaps split; v as it was given if it was not cast.
    pub inputs: Inputs,
    /// The problem with a scale that fp16 operands can have.
    pub problem: Attention,
    /// Exponents of q, k and v, int32: (3, batch, 1, nheads_k, 1, 1), packed (3, 1, nheads_k, 1, 1). They broadcast to (batch, seqlen,
    /// nheads_k, heads of a group, headdim).
    exponents: Tensor,
    /// Exponent that softmax_scale lost and q has.
    scale_exponent: i32,
    /// [`SCORES_OF_FORWARD`] or [`SCORES_OF_BACKWARD`].
    score_exponents: ScoreExponents,
    kernel: PlannedKernel,
    operands: Operands,
    /// The inputs before the cast, as kernels read them.
    given: Inputs,
    /// ([`MAGNITUDES`], groups) int32: bits of fp32 magnitudes.
    largest: Tensor,
    launcher: &'a dyn Launcher,
}

/// Returns the exponent e of a normal number, rounded up: 2^(e - 1) <= |x| < 2^e.
fn exponent(x: f32) -> i32 {
    (x.abs().to_bits() >> 23) as i32 - 126
}

/// Returns the exponent that q takes over from the scale, so that scores of fp16 operands can be as small or large as those of bf16 ones.
/// The scale keeps 1/8 to 1/4, as at headdims 16 to 64. 0 for the scales that models have.
fn scale_exponent(softmax_scale: f64) -> i32 {
    match softmax_scale as f32 {
        0.0 => 0,
        scale if (-9..=1).contains(&exponent(scale)) => 0,
        scale => exponent(scale) + 2,
    }
}

/// Returns true if there may be keys that no query sees, beside those past `seqused_k`. They must not decide a scale.
fn may_hide_keys(inputs: &Inputs, a: &Attention) -> bool {
    let before_window = a.window.left.is_some_and(|left| a.seqlen_k - a.seqlen_q > left);
    // a packed sequence may have no queries, or fewer than others
    inputs.options.attn_bias.is_some() || inputs.options.block_lists.is_some() || before_window || a.total_q().is_some()
}

/// Plans the kernel that casts q, k and perhaps v. Rejects more heads than its grid can have.
pub(super) fn plan(a: &Attention, has_v: bool, limits: &DeviceLimits) -> Result<PlannedKernel> {
    let heads = a.nheads + if has_v { 2 } else { 1 } * a.nheads_k;
    if heads > MAX_HEADS {
        let found = format!("{} heads of q and {} of k in {:?}", a.nheads, a.nheads_k, a.dtype);
        return Err(Error::value("q, k and v", found, format!("at most {MAX_HEADS} heads of q, k and v together, or fp16")));
    }
    plan::cast(a.seqlen_q.max(a.seqlen_k), heads, limits)
}

/// Fills split tensors of `columns` columns with zeros if there are columns between their parts.
fn clear_between_parts<'t>(split: impl IntoIterator<Item = &'t Tensor>, columns: i64, low_column: i64) -> Result<()> {
    for t in split.into_iter().filter(|_| low_column > padded_headdim(columns)) {
        let _ = t.shallow_clone().f_zero_()?;
    }
    Ok(())
}

impl<'a> Cast<'a> {
    /// Casts a call's operands, to what `to` says. `softmax_lse`: given in a backward pass, contiguous; scaled in place as the scores are.
    pub fn new(inputs: &Inputs, a: &Attention, to: Operands, softmax_lse: Option<&Tensor>, launcher: &'a dyn Launcher) -> Result<Cast<'a>> {
        let scale_exponent = scale_exponent(a.softmax_scale);
        let problem = Attention { softmax_scale: a.softmax_scale * f64::from(-scale_exponent).exp2(), ..*a };
        let values = to.v.as_ref();
        let kernel = plan(a, values.is_some(), &launcher.limits()?)?;
        // If v is not cast, nothing reads it here. It may be a whole cache, so q takes its place, lest `readable` copy it.
        let read = Inputs { v: values.map_or(&inputs.q, |_| &inputs.v).shallow_clone(), ..inputs.share() };
        let given = blocks::readable(&read, a)?.unwrap_or(read);
        let half = |t: &Tensor, low_column: i64| {
            let mut sizes = t.size();
            if let Some(last) = sizes.last_mut().filter(|_| low_column > 0) {
                *last = 2 * low_column;
            }
            tensor::empty(&sizes, Kind::Half, launcher)
        };
        let v = values.map_or_else(|| Ok(inputs.v.shallow_clone()), |values| half(&given.v, values.low_column))?;
        let cast = Inputs { q: half(&given.q, to.low_column)?, k: half(&given.k, to.low_column)?, v, ..given.share() };
        let score_exponents = if softmax_lse.is_some() { SCORES_OF_BACKWARD } else { SCORES_OF_FORWARD };
        let entries = if a.total_q().is_some() { 1 } else { a.batch };
        let int = (Kind::Int, given.q.device());
        let largest = Tensor::f_zeros([MAGNITUDES, entries * a.nheads_k], int)?;
        let exponents = Tensor::f_empty([3, entries * a.nheads_k], int)?;
        log::cast(a, &kernel)?;
        let written = [
            ("q_fp16", Some(&cast.q)),
            ("k_fp16", Some(&cast.k)),
            ("v_fp16", Some(&cast.v).filter(|_| values.is_some())),
            ("exponents", Some(&exponents)),
        ];
        let mut launches = Launches::begin(&given, a, launcher, written);
        launches.also_write(&[], Some(("largest", &largest)));
        launches.also_write(&[], softmax_lse.map(|t| ("softmax_lse", t)));
        // after begin, which fills writable memory with NaN
        clear_between_parts([&cast.q, &cast.k], a.headdim, to.low_column)?;
        clear_between_parts(values.map(|_| &cast.v), a.headdim_v, values.map_or(0, |values| values.low_column))?;
        let shape: &[i64] = if a.total_q().is_some() { &[3, 1, a.nheads_k, 1, 1] } else { &[3, entries, 1, a.nheads_k, 1, 1] };
        let this = Cast {
            inputs: cast,
            problem,
            exponents: exponents.f_view(shape)?,
            scale_exponent,
            score_exponents,
            kernel,
            operands: to,
            given,
            largest,
            launcher,
        };
        // None: softmax_lse stays as it is
        this.run(&launches, Phase::TakeLargest, None)?;
        if may_hide_keys(&this.given, a) {
            this.run(&launches, Phase::LeaveOutHidden, None)?;
        }
        if this.operands.v.as_ref().is_some_and(|values| values.is_shared) {
            this.share_largest_v()?;
        }
        this.run(&launches, Phase::CastScaled, softmax_lse)?;
        Ok(this)
    }

    /// Casts q and k, split, with exponents that bring their largest magnitudes below 1 whatever the scores: gradients of scores times q or
    /// k need all their digits. [`Cast::gradient_exponents`] are then of these.
    pub fn for_gradients(&mut self) -> Result<[Tensor; 2]> {
        let Operands { low_column, .. } = self.operands;
        let like = |t: &Tensor| tensor::empty(&t.size(), Kind::Half, self.launcher);
        let (q, k) = (like(&self.inputs.q)?, like(&self.inputs.k)?);
        let written = [("q_fp16", Some(&q)), ("k_fp16", Some(&k))];
        let mut launches = Launches::begin(&self.given, &self.problem, self.launcher, written);
        // `&[]`: no other range changes
        launches.also_write(&[], Some(("largest", &self.largest)));
        launches.also_write(&[], Some(("exponents", &self.exponents)));
        clear_between_parts([&q, &k], self.problem.headdim, low_column)?;
        // run() writes to the inputs' tensors; None: softmax_lse stays as it is
        let (q_of_scores, k_of_scores) = (replace(&mut self.inputs.q, q), replace(&mut self.inputs.k, k));
        self.run(&launches, Phase::CastForGradients, None)?;
        Ok([replace(&mut self.inputs.q, q_of_scores), replace(&mut self.inputs.k, k_of_scores)])
    }

    /// Gives all groups of v the largest magnitude of any group, so that the kernel computes one exponent for all.
    fn share_largest_v(&self) -> Result<()> {
        let [mut largest, mut visible] = [self.largest.f_select(0, LARGEST_V)?, self.largest.f_select(0, LARGEST_VISIBLE_V)?];
        // bits of positive numbers compare as the numbers do. Where a group has a visible magnitude (not 0), that one counts.
        let _ = largest.f_masked_fill_(&visible.f_eq(0)?.f_logical_not()?, 0.0)?;
        let all = largest.f_maximum(&visible)?.f_amax([0_i64].as_slice(), true)?;
        largest.f_copy_(&all)?;
        let _ = visible.f_zero_()?;
        Ok(())
    }

    /// Scales softmax_lse of these inputs back to that of the given ones, in place.
    pub fn restore_lse(&self, softmax_lse: &Tensor) -> Result<()> {
        let written = [("softmax_lse", Some(softmax_lse)), ("largest", Some(&self.largest))];
        // in place: the simulator fills neither with NaN first
        let ranges = memory_ranges(&self.given, &self.problem, self.launcher, written);
        self.run(&Launches::in_place(self.launcher, ranges), Phase::RestoreLse, Some(softmax_lse))
    }

    /// Returns the exponents of k: k_fp16 = k * 2^exponent.
    pub fn k_exponents(&self) -> Result<Tensor> {
        Ok(self.exponents.f_select(0, 1)?)
    }

    pub fn v_exponents(&self) -> Result<Tensor> {
        Ok(self.exponents.f_select(0, 2)?)
    }

    /// Returns the exponents that the gradients of q and k, in this order, have as kernels compute them from the cast operands.
    pub fn gradient_exponents(&self) -> Result<[Tensor; 2]> {
        // dq is a sum of scale * dS * k, dk of scale * dS * q; the scale lost scale_exponent
        let lost = -i64::from(self.scale_exponent);
        let of_q = self.exponents.f_select(0, 0)?; // those of rows without an exponent of their own
        Ok([self.k_exponents()?.f_add_scalar(lost)?, of_q.f_add_scalar(lost)?])
    }

    /// Launches the kernel for one phase. `softmax_lse`: what the phase scales; None: nothing.
    fn run(&self, launches: &Launches, phase: Phase, softmax_lse: Option<&Tensor>) -> Result<()> {
        let a = &self.problem.padded();
        let is_packed = a.total_q().is_some();
        let mut kernel = self.kernel;
        let has_v = self.operands.v.is_some() && phase != Phase::CastForGradients;
        if !has_v {
            kernel.blocks[1] = (a.nheads + a.nheads_k) as u32; // no heads of v, which may be planned for other phases
        }
        if matches!(phase, Phase::LeaveOutHidden | Phase::RestoreLse) || (phase == Phase::CastScaled && !has_v) {
            kernel.blocks[0] = kernel.blocks[0].min(MAX_SPARSE_TILES);
        }
        let blocks = block_mask::of_queries(&self.given.options).unwrap_or(NO_BLOCKS);
        let values = self.operands.v.as_ref();
        // (first entry, number of entries) of each launch
        for (first, batches) in plan::batch_chunks(a.batch) {
            // problem.scale_log2: |softmax_scale| * log2(e)
            let Blocks { q, k, v, problem, lengths, score_options, .. } = Blocks::new(&self.given, a, (first, batches));
            let params = CastParams {
                q,
                k,
                v: if has_v { v } else { Operand::NONE },
                q_fp16: output(&self.inputs.q, first),
                k_fp16: output(&self.inputs.k, first),
                v_fp16: if has_v { output(&self.inputs.v, first) } else { Output::NONE },
                softmax_lse: softmax_lse.map_or(null_mut(), |t| lse_at(t, a, first)),
                largest: self.largest.data_ptr().cast(),
                exponents: self.exponents.data_ptr().cast(),
                element: element_type(&self.given.q),
                low_column: self.operands.low_column as i32,
                low_column_v: values.map_or(0, |values| values.low_column as i32),
                groups: self.largest.size()[1] as i32,
                first_entry: if is_packed { 0 } else { first as i32 },
                scale_exponent: self.scale_exponent,
                scale_log2_exponent: exponent(problem.scale_log2),
                score_exponent: exponent(a.headdim as f32 * problem.scale_log2),
                max_score_exponent: self.score_exponents.max,
                lowered_score_exponent: self.score_exponents.lowered,
                largest_v_exponent: values.map_or(0, |values| values.largest_exponent),
                keeps_ordinary_v: i32::from(values.is_some_and(|values| values.keeps_ordinary)),
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
