//! Rows of Turing's backward kernels, and the reasons for their tiles. docs/design/turing-backward.md derives the shapes.
//!
//! Main kernels own `block_rows` keys and step over `step` queries: they compute dk and dv, and add to dq by atomics. `dkdv` kernels leave
//! dq to dq kernels, which own queries and step over keys; `fused` ones do all of a pass. S are scores, P probabilities, dP and dS their
//! gradients; dV and dK below are accumulators in registers. A thread can have 255 registers, an SM 64 KB of shared memory.
//!
//! Capitals in the sources are macros: the row's fields, and DQ_MODE, what the pass does with dq (`Pass::dq_mode`). `p` is the parameter
//! block. Of a block mask, `p.blocks_t` has the lists for blocks of keys, `p.blocks` those for blocks of queries.

use super::super::shared::{self, dkdv, fused, with};
use super::super::variants::{Feature, FeatureSet, Pass, Source, Variant};
use super::family::TURING;

const SINGLE_ROLE: Source =
    Source::new(&["turing/backward/single_role.cuh"], "turing::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::DQ_MODE>");
const HALVES: Source =
    Source::new(&["turing/backward/single_role_halves.cuh"], "turing::BackwardSingleRoleHalves<HEADDIM, BLOCK_ROWS, STEP, THREADS>");
// the number before DQ_MODE is that of the slots for Q and dO in shared memory: two fit up to headdim 192
const WARP_SPECIALIZED: Source = Source::new(
    &["turing/backward/warp_specialized.cuh"],
    "turing::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, (HEADDIM <= 192 ? 2 : 1), DqMode::DQ_MODE>",
);
const WARP_SPECIALIZED_BLOCK_MASK: Source = Source::new(
    &["turing/backward/warp_specialized.cuh", "turing/backward/block_mask.cuh"],
    "turing::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, (HEADDIM <= 192 ? 2 : 1), DqMode::DQ_MODE, turing::ListedBlocks>",
)
.with_arguments("p.backward, turing::ListedBlocks(p.blocks_t)");

const DQ_KERNEL: Source = Source::new(&["turing/backward/dq.cuh"], "turing::BackwardDq<HEADDIM, BLOCK_ROWS, STEP, THREADS>");
const DQ_BLOCK_MASK: Source = Source::new(
    &["turing/backward/dq.cuh", "turing/backward/block_mask.cuh"],
    "turing::BackwardDq<HEADDIM, BLOCK_ROWS, STEP, THREADS, turing::ListedBlocks>",
)
.with_arguments("p.backward, turing::ListedBlocks(p.blocks)");
const DQ_WARP_SPECIALIZED: Source =
    Source::new(&["turing/backward/dq_warp_specialized.cuh"], "turing::BackwardDqWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS>");
const DQ_WARP_SPECIALIZED_BLOCK_MASK: Source = Source::new(
    &["turing/backward/dq_warp_specialized.cuh", "turing/backward/block_mask.cuh"],
    "turing::BackwardDqWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, turing::ListedBlocks>",
)
.with_arguments("p.backward, turing::ListedBlocks(p.blocks)");

/// `turing/backward/single_role`: 4 warps of 32 keys that all do the same; two blocks an SM. Shared memory: K, two tiles of Q, dO and dS.
const fn single_role(headdim: u32, step: u32) -> Variant {
    let block_rows = 128;
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads: 128,
        // fp16: 2 bytes of K; then two slots of Q and dO, 4 bytes together, and of dS, 2 bytes
        shared_bytes: 2 * headdim * block_rows + 2 * (4 * headdim * step + 2 * block_rows * step),
        blocks_per_sm: 2,
        ..Variant::new(TURING, Pass::Backward, SINGLE_ROLE)
    }
}

/// `turing/backward/single_role_halves`: the same with 32 queries a step: a load of K serves twice as many. To save registers, each half of
/// a step (16 queries) is computed alone, from dP to dV and dK. To save memory, Q, dO and dS have one tile each.
const SINGLE_ROLE_HALVES: Variant = {
    let (row, step) = (single_role(64, 16), 32);
    let Variant { headdim, block_rows, .. } = row;
    // 2: fp16, of K, of Q and dO, and of dS
    Variant { step, shared_bytes: 2 * (headdim * block_rows + 2 * headdim * step + block_rows * step), source: HALVES, ..row }
};

/// `turing/backward/warp_specialized`: two roles of four warps, one for S, P and dV, one for dP, dS and dK. Shared memory has K, tiles of
/// Q, of dO and of dS (two where they fit), and P. All numbers are fp16.
const fn warp_specialized(headdim: u32, block_rows: u32, step: u32) -> Variant {
    let scores = 2 * block_rows * step;
    // at headdim 256 one tile of each, and a quarter of V
    let (slots, values) = if headdim > 192 { (1, 2 * headdim / 4 * block_rows) } else { (2, 0) };
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        shared_bytes: 2 * headdim * block_rows + slots * (4 * headdim * step + scores) + scores + values,
        ..Variant::new(TURING, Pass::Backward, WARP_SPECIALIZED)
    }
}

// The main kernel of each headdim. Arguments: headdim, keys of a block (`single_role`: 128), queries of a step. Comments count registers
// of a thread (a warp's fp32 tile of r rows by c columns: r * c / 32, fp16: half), and shared memory of a block.

/// 32 queries a step, so that all threads have a part of Q and dO to load; S and dP are 2 x 32 registers, dV and dK 2 x 32
const MAIN_32: Variant = single_role(32, 32);
/// dV and dK are 2 x 64 registers, V 32, S and dP 2 x 16
const MAIN_64: Variant = single_role(64, 16);
/// 32 keys a warp: 96 registers of dV or dK, 48 of K or V; 48 KB
const MAIN_96: Variant = warp_specialized(96, 128, 16);
/// 128 and 64 registers; 60 KB
const MAIN_128: Variant = warp_specialized(128, 128, 16);
/// 16 keys a warp: 96 and 48 registers; 54 KB
const MAIN_192: Variant = warp_specialized(192, 64, 16);
/// 128 and 48 registers, because shared memory has a quarter of V; 60 KB
const MAIN_256: Variant = warp_specialized(256, 64, 16);
const MAIN: [Variant; 6] = [MAIN_32, MAIN_64, MAIN_96, MAIN_128, MAIN_192, MAIN_256];

/// Returns the main kernel without score features. Its roles compute dQ at different times, so that tensor cores have products while a role
/// computes P or dS. This takes two tiles of dS, which only the kernel of headdim 256 lacks.
fn staggered(main: Variant) -> Variant {
    let second_tile = if main.headdim > 192 { 2 * main.block_rows * main.step } else { 0 };
    Variant { shared_bytes: main.shared_bytes + second_tile, ..main }
}

/// Kernels with all features, of headdims from 64 on; at 64, 32 queries a step, so that all threads have a part of Q and dO to load.
const GENERIC: [Variant; 5] = [warp_specialized(64, 128, 32), MAIN_96, MAIN_128, MAIN_192, MAIN_256];

/// deterministic=True: dq from blocks of queries, so that its sums have a fixed order. `turing/backward/dq`: Q, dO and dQ in registers, two
/// tiles of K and of V in shared memory.
const fn dq(headdim: u32, step: u32, threads: u32) -> Variant {
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows: 128,
        step,
        threads,
        // 8: two slots, K and V, 2 bytes
        shared_bytes: 8 * headdim * step,
        blocks_per_sm: if threads == 128 { 2 } else { 1 },
        ..Variant::new(TURING, Pass::BackwardDq, DQ_KERNEL)
    }
}

/// `turing/backward/dq_warp_specialized`: two roles of four warps with 16 queries each. Shared memory has three tiles of K
/// and of V, and what one role hands to the other: P, dS and the derivative of scores.
const fn dq_warp_specialized(headdim: u32) -> Variant {
    let (block_rows, step) = (64, 16);
    Variant {
        block_rows,
        source: DQ_WARP_SPECIALIZED,
        // 12: three slots, K and V, 2 bytes; then three tiles of fp16 scores
        shared_bytes: 12 * headdim * step + 3 * 2 * block_rows * step,
        ..dq(headdim, step, 256)
    }
}

// Arguments of `dq`: headdim, keys of a step, threads; blocks have 128 queries.

/// Four warps of 32 queries.
const DQ_64: Variant = dq(64, 16, 128);
/// Eight warps of 16 queries, as at headdim 128.
const DQ_96: Variant = dq(96, 16, 256);
const DQ_128: Variant = dq(128, 16, 256);
const DQ_192: Variant = dq_warp_specialized(192);
const DQ_256: Variant = dq_warp_specialized(256);
const DQ: [Variant; 5] = [DQ_64, DQ_96, DQ_128, DQ_192, DQ_256];

/// Kernels of block masks (`csrc/turing/backward/block_mask.cuh`). They have three headdims, and other headdims are padded to the next. At
/// headdim 64 they have two roles, because single-role kernels have no registers left. Generic ones have no atomics (dkdv and dq only), and
/// at 128 half the keys: lists beside all features would spill.
fn block_mask_rows() -> impl Iterator<Item = Variant> {
    let main = [warp_specialized(64, 128, 32), MAIN_128, MAIN_256];
    let generic_main = [main[0], warp_specialized(128, 64, 32), main[2]];
    let deterministic = |main: [Variant; 3], features| {
        let dq = [(DQ_64, DQ_BLOCK_MASK), (DQ_128, DQ_BLOCK_MASK), (DQ_256, DQ_WARP_SPECIALIZED_BLOCK_MASK)];
        let rows = main.map(|row| (dkdv(row), WARP_SPECIALIZED_BLOCK_MASK)).into_iter().chain(dq);
        rows.map(move |(row, source)| row.with_blocks(features, source))
    };
    let plain = deterministic(main, FeatureSet::NONE);
    let generic = deterministic(generic_main, FeatureSet::GENERIC_BLOCKS);
    let with_atomics = |row: Variant| staggered(row).with_blocks(FeatureSet::NONE, WARP_SPECIALIZED_BLOCK_MASK);
    main.map(with_atomics).into_iter().chain(plain).chain(generic)
}

pub fn backward_rows() -> Vec<Variant> {
    let varlen = |row: Variant| row.with_features(FeatureSet::VARLEN);
    let generic = |row: Variant| row.with_features(FeatureSet::GENERIC);
    let fused_rows = [MAIN_64, MAIN_128].map(fused);
    let mut rows = vec![varlen(shared::preprocess(TURING)), varlen(shared::postprocess(TURING))];
    // plain kernels (no features) of headdims 64 and 128: at the others the varlen kernels take at most 1% more time (32: 5%)
    let [headdim_32, _, larger @ ..] = MAIN;
    rows.extend([SINGLE_ROLE_HALVES, MAIN_128]);
    rows.extend([headdim_32, SINGLE_ROLE_HALVES].into_iter().chain(larger.map(staggered)).map(varlen));
    // one feature: at headdim 64 `single_role` has registers for it; generic kernels are warp-specialized
    for feature in Feature::OF_SCORES {
        // these two would spill at headdim 128
        let tiles: &[_] = if matches!(feature, Feature::Alibi | Feature::Bias) { &[MAIN_64] } else { &[MAIN_64, MAIN_128] };
        rows.extend(tiles.iter().map(|&tile| with(feature, tile)));
    }
    rows.extend(GENERIC.map(generic));
    rows.extend(MAIN.map(dkdv).into_iter().chain(GENERIC.map(|row| generic(dkdv(row)))));
    rows.extend(DQ.into_iter().chain(DQ.map(generic)));
    rows.extend(fused_rows.map(varlen));
    rows.extend(block_mask_rows());
    // headdims above 256: P and dS in memory; then fp32 tensors, of all headdims, too
    rows.extend(shared::stored_backward(TURING));
    rows.extend(shared::split_backward(TURING));
    rows
}
