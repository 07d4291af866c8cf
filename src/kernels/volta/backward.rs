//! Rows of Volta's backward kernels, and the reasons for their tiles. docs/design/volta-backward.md derives the shapes.
//!
//! A row of the table is a kernel. Other rows are queries or keys, of a block or in shared memory.
//! - main kernels: a block has `block_rows` keys and steps over `step` queries. They compute dk and dv, and add to dq by atomics;
//! - `dkdv` kernels: leave dq to dq kernels, which own queries and step over keys; `fused` ones: do all of a pass;
//! - S: scores; P: probabilities; dP, dS: their gradients; dV, dK below: accumulators in registers;
//! - capitals in the sources: macros, the row's fields, and DQ_MODE, what the pass does with dq (`Pass::dq_mode`);
//! - `p`: the parameter block. Of a block mask, `p.blocks_t` has the lists for blocks of keys, `p.blocks` those for blocks of queries.
//!
//! A thread can have 255 registers, an SM 96 KB of shared memory. tests/test_variants.py runs each kernel, tests/kernels.rs finds spills.

use super::super::shared::{self, dkdv, fused, with}; // make a row of a main kernel's; with: one feature, which problems must use
use super::super::variants::{Feature, FeatureSet, Pass, Size, Source, Variant};
use super::family::VOLTA;

const SINGLE_ROLE: Source =
    Source::new(&["volta/backward/single_role.cuh"], "volta::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE>");
const SINGLE_ROLE_STREAM_K: Source = Source::new(
    &["volta/backward/single_role.cuh", "volta/backward/stream_k.cuh"],
    "volta::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE, volta::StreamKKeyBlock>",
)
.with_arguments("p.backward, volta::StreamKKeyBlock(p.stream_k)");

const WARP_SPECIALIZED: Source = Source::new(
    &["volta/backward/warp_specialized.cuh"],
    "volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE, HEADDIM_V>",
);
const WARP_SPECIALIZED_STREAM_K: Source = Source::new(
    &["volta/backward/warp_specialized.cuh", "volta/backward/stream_k.cuh"],
    "volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE, HEADDIM_V, DenseBlocks, volta::StreamKKeyBlock>",
)
.with_arguments("p.backward, DenseBlocks(), volta::StreamKKeyBlock(p.stream_k)");
const WARP_SPECIALIZED_BLOCK_MASK: Source = Source::new(
    &["volta/backward/warp_specialized.cuh", "backward/block_mask.cuh"],
    "volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE, HEADDIM, ListedBlocks>",
)
.with_arguments("p.backward, ListedBlocks(p.blocks_t)");

const DQ_KERNEL: Source = Source::new(&["volta/backward/dq.cuh"], "volta::BackwardDq<HEADDIM, BLOCK_ROWS, STEP, THREADS>");
const DQ_BLOCK_MASK: Source = Source::new(
    &["volta/backward/dq.cuh", "backward/block_mask.cuh"],
    "volta::BackwardDq<HEADDIM, BLOCK_ROWS, STEP, THREADS, ListedBlocks>",
)
.with_arguments("p.backward, ListedBlocks(p.blocks)");

/// `volta/backward/single_role`: four warps with 32 keys each that all do the same; two blocks an SM by registers and by shared memory,
/// which has K, V, Q, dO, and P or dS, all fp16.
const fn single_role(headdim: u32) -> Variant {
    let (block_rows, step) = (128, 32);
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads: 128,
        // 4: two fp16 numbers, of K and V, or of Q and dO
        shared_bytes: 4 * headdim * (block_rows + step) + 2 * step * block_rows,
        blocks_per_sm: 2,
        ..Variant::new(VOLTA, Pass::Backward, SINGLE_ROLE)
    }
}

/// `volta/backward/warp_specialized`: two roles of four warps, one for S, P and dV, one for dP, dS and dK. Shared memory has K, V, Q, dO,
/// and P and dS, all fp16. Rows of P and dS, one for each key, are padded to 32 queries: 64 bytes.
const fn warp_specialized(headdim: u32, block_rows: u32, step: u32) -> Variant {
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        // 4: two fp16 numbers, of K and V, or of Q and dO; 2: P and dS
        shared_bytes: 4 * headdim * (block_rows + step) + 2 * 64 * block_rows,
        ..Variant::new(VOLTA, Pass::Backward, WARP_SPECIALIZED)
    }
}

// The main kernel of each headdim. Arguments: headdim, keys of a block, queries of a step. Comments count registers of a thread (a warp's
// fp32 tile of r rows by c columns: r * c / 32), and shared memory of a block.

/// dV and dK are 2 x 32 registers of a thread. 28 KB.
const MAIN_32: Variant = single_role(32);
/// dV and dK are 2 x 64 registers, S and dP 2 x 32, operands 32: all there are, and no spill. 48 KB.
const MAIN_64: Variant = single_role(64);
/// A warp has 32 keys of dV or of dK, 96 registers. Six of the eight warps have a part of dQ. 76 KB.
const MAIN_96: Variant = warp_specialized(96, 128, 32);
/// 128 registers of dV or dK, and all of the 96 KB.
const MAIN_128: Variant = warp_specialized(128, 128, 32);
/// 64 keys, so that K and V leave room: 80 KB. dV or dK 96 registers.
const MAIN_192: Variant = warp_specialized(192, 64, 32);
/// 64 keys in steps of 16 queries: 88 KB; 32 queries would need 104 KB. dV or dK 128 registers.
const MAIN_256: Variant = warp_specialized(256, 64, 16);
const MAIN: [Variant; 6] = [MAIN_32, MAIN_64, MAIN_96, MAIN_128, MAIN_192, MAIN_256];

/// Headdim 192 with V and dO of 128 columns: a third less of dP and of dV. (Multi-head latent attention trains with these headdims.)
const NARROW_V: Variant = Variant { headdim_v: 128, ..MAIN_192 };

/// Blocks of 64 keys in two roles, for small grids (`plan::choose::sized`): a block takes at most half the time of the others, though more
/// for a key. Two blocks an SM by registers, 32 KB each.
const SMALL_64: Variant = Variant { size: Size::Small, blocks_per_sm: 2, ..warp_specialized(64, 64, 32) };
/// The same, one block an SM.
const SMALL_128: Variant = Variant { size: Size::Small, ..warp_specialized(128, 64, 32) };
const SMALL: [Variant; 2] = [SMALL_64, SMALL_128];

/// Kernels with all features, of headdims from 64 on, all with two roles of warps.
const GENERIC: [Variant; 5] = [warp_specialized(64, 128, 32), MAIN_96, MAIN_128, MAIN_192, MAIN_256];

/// deterministic=True: dq from blocks of queries, so that its sums have a fixed order. Shared memory: Q, dO, K, V, and dS, which takes V's
/// place where it would not fit.
const fn dq(headdim: u32, block_rows: u32, step: u32, threads: u32, blocks_per_sm: u32) -> Variant {
    let operands = 4 * headdim * (block_rows + step); // 4: two fp16 numbers, of Q and dO, or of K and V
    let with_ds = operands + 2 * block_rows * step;
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        shared_bytes: if with_ds > VOLTA.shared_bytes { operands } else { with_ds },
        blocks_per_sm,
        ..Variant::new(VOLTA, Pass::BackwardDq, DQ_KERNEL)
    }
}

// Arguments: headdim, queries of a block, keys of a step, threads, blocks that an SM must hold.

/// Four warps with 32 queries each: dQ is 64 registers of a thread, S and dP 64.
const DQ_64: Variant = dq(64, 128, 32, 128, 2);
/// Eight warps, two to 32 queries, in steps of 64 keys, so that a warp's scores are 32x32 as above.
const DQ_96: Variant = dq(96, 128, 64, 256, 1);
const DQ_128: Variant = dq(128, 128, 64, 256, 1);
/// 64 queries, so four warps to 32 and their scores 32x16.
const DQ_192: Variant = dq(192, 64, 64, 256, 1);
/// 64 queries in steps of 32 keys, scores 16x16.
const DQ_256: Variant = dq(256, 64, 32, 256, 1);
const DQ: [Variant; 5] = [DQ_64, DQ_96, DQ_128, DQ_192, DQ_256];

/// Returns the main kernel on a stream-K grid (`volta/backward/stream_k.cuh`).
fn stream_k(main: Variant) -> Variant {
    let source = if main.source == SINGLE_ROLE { SINGLE_ROLE_STREAM_K } else { WARP_SPECIALIZED_STREAM_K };
    Variant { pass: Pass::BackwardStreamK, source, ..main }
}

/// Kernels of block masks (`csrc/backward/block_mask.cuh`). They have three headdims, and other headdims are padded to the next. At
/// headdim 64 they have two roles, because single-role kernels have no registers left. Generic ones have no atomics (dkdv and dq only).
fn block_mask_rows() -> impl Iterator<Item = Variant> {
    let main = [warp_specialized(64, 128, 32), MAIN_128, MAIN_256];
    let dkdv_rows = main.map(|row| (dkdv(row), WARP_SPECIALIZED_BLOCK_MASK));
    let rows = dkdv_rows.into_iter().chain([DQ_64, DQ_128, DQ_256].map(|row| (row, DQ_BLOCK_MASK)));
    let features = [FeatureSet::NONE, FeatureSet::GENERIC_BLOCKS];
    let rows = rows.flat_map(move |(row, source)| features.map(|of| row.with_blocks(of, source)));
    let plain = |row: Variant| row.with_blocks(FeatureSet::NONE, WARP_SPECIALIZED_BLOCK_MASK);
    main.map(plain).into_iter().chain(rows)
}

pub fn backward_rows() -> Vec<Variant> {
    let varlen = |row: Variant| row.with_features(FeatureSet::VARLEN);
    let generic = |row: Variant| row.with_features(FeatureSet::GENERIC);
    // none of 128 keys at headdim 64: `volta/backward/single_role` has no registers left
    let fused_rows = [SMALL_64, MAIN_128, SMALL_128].map(fused);
    let mut rows = vec![varlen(shared::preprocess(VOLTA)), varlen(shared::postprocess(VOLTA))];
    // plain kernels (no features) of headdims 64, 96, 128 and 192 / 128: at the others the varlen kernels take at most 2% more time
    rows.extend([MAIN_64, MAIN_96, MAIN_128, NARROW_V].into_iter().chain(SMALL));
    rows.extend([MAIN_64, MAIN_128].map(stream_k));
    rows.extend(MAIN.into_iter().chain([NARROW_V]).map(varlen));
    // one feature: at headdim 64 the single-role kernel has registers for it (`volta/backward/joint_scores.cuh`)
    rows.extend(Feature::OF_SCORES.into_iter().flat_map(|feature| [MAIN_64, MAIN_128].map(|tile| with(feature, tile))));
    rows.extend(GENERIC.map(generic));
    // deterministic=True: dk and dv by the main kernels without their dQ product, so both modes have the same dk and dv ...
    rows.extend(MAIN.into_iter().chain(SMALL).map(dkdv));
    rows.extend([MAIN_64, MAIN_128].map(|row| varlen(dkdv(row))));
    rows.extend(GENERIC.map(|row| generic(dkdv(row))));
    // ... then dq: plain ones of headdim 96, varlen ones of 64 and 128. At headdims 192 and 256 generic kernels are as fast as others
    rows.extend([DQ_96, varlen(DQ_64), varlen(DQ_128)].into_iter().chain(DQ.map(generic)));
    rows.extend(block_mask_rows());
    // headdims above 256, and above 192 where faster: P and dS in memory; then fp32 tensors, of all headdims, too
    rows.extend(shared::stored_backward(VOLTA));
    rows.extend(shared::split_backward(VOLTA));
    rows.extend(fused_rows.map(varlen));
    rows
}
