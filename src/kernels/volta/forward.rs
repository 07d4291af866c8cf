//! The forward kernels, and why their tiles are what they are. Figures and the record of what else was tried:
//! `docs/design/volta-forward.md`. `registers` comes last in each row, of the 255 that one thread can have.

use super::{CacheFormat, Feature, FeatureSet, Pass, Variant, VOLTA};

/// `volta/forward/register_q`: 4 warps of 32 rows, steps of 16 keys through a ring of 4 slots whose rows are
/// padded by 8 elements.
const fn register_q(name: &'static str, headdim: u32, headdim_v: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    let (slots, step, pad) = (4, 16, 8);
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Forward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/forward/register_q.cu",
        headdim,
        headdim_v,
        block_rows: 128,
        step,
        threads: 128,
        shared_bytes: slots * step * 2 * (headdim + pad + headdim_v + pad),
        blocks_per_sm,
        registers,
    }
}

/// `volta/forward/shared_q`: a block's rows of Q and one step of K and of V in shared memory.
const fn shared_q(
    name: &'static str,
    (headdim, headdim_v): (u32, u32),
    (block_rows, step): (u32, u32),
    threads: u32,
    blocks_per_sm: u32,
    registers: u32,
) -> Variant {
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Forward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/forward/shared_q.cu",
        headdim,
        headdim_v,
        block_rows,
        step,
        threads,
        shared_bytes: 2 * (headdim * (block_rows + step) + headdim_v * step),
        blocks_per_sm,
        registers,
    }
}

/// 128 rows, for grids that fill the GPU: each tile of K and V in shared memory serves many rows.
const LARGE: (u32, u32) = (128, 32);
/// 64 rows by two groups of 4 warps, each of which takes 32 of the 64 keys of a step: four times as many
/// warps for the same rows, for grids that would leave SMs or their schedulers idle.
const SMALL: (u32, u32) = (64, 64);

/// The kernel with Q in shared memory, also for headdim 64, whose registers are needed for the scores. What changes them
/// is made at every step from parameters, so that the tiles can be the plain kernels'.
const fn general(plain: Variant, name: &'static str, registers: u32) -> Variant {
    let headdims = (plain.headdim, plain.headdim_v);
    // 256 threads take 64 rows of 12 chunks at once (TileStream)
    let tile = if plain.headdim == 96 { (128, 64) } else { LARGE };
    let blocks_per_sm = if plain.headdim == 64 { 2 } else { 1 };
    shared_q(name, headdims, tile, 256, blocks_per_sm, registers).covering(FeatureSet::GENERIC, name, registers)
}

/// The plain kernel and one thing or two that it does to scores, which a problem has to ask for (`volta/forward/features.cuh`). No registers
/// are left for lengths from memory besides, nor for a bias in fp32: what needs these gets the general kernel.
const fn with(asked: &[Feature], name: &'static str, plain: Variant, registers: u32) -> Variant {
    let requires = FeatureSet::of(asked);
    let has_bias = requires.covers(FeatureSet::of(&[Feature::Bias]));
    let has_dropout = requires.covers(FeatureSet::of(&[Feature::Dropout]));
    // with Q in registers, 16 bytes of a lane's own for the bias and 32 for dropout, in rows of K
    let chunks = if plain.headdim > 64 { 0 } else { has_bias as u32 + 2 * has_dropout as u32 };
    let shared_bytes = plain.shared_bytes + chunks * plain.step * 2 * (plain.headdim + 8);
    Variant { requires, shared_bytes, ..plain }.covering(requires, name, registers)
}

const PLAIN_LARGE: [Variant; 7] = [
    register_q("volta_fwd_32x32", 32, 32, 3, 168),
    // 64 registers of Q and 64 of output: two blocks.
    register_q("volta_fwd_64x64", 64, 64, 2, 249),
    // 32 rows a warp: 96 and 128 registers of output; 36 and 48 KB: two blocks.
    shared_q("volta_fwd_96x96", (96, 96), LARGE, 128, 2, 214),
    shared_q("volta_fwd_128x128", (128, 128), LARGE, 128, 2, 248),
    // 32 rows of output or of Q would not leave room for two blocks, so 16 rows a warp and 8 warps: the
    // same two warps a scheduler, in one block that shares each tile of K and V: 68 and 72 KB.
    shared_q("volta_fwd_192x128", (192, 128), LARGE, 256, 1, 162),
    shared_q("volta_fwd_192x192", (192, 192), LARGE, 256, 1, 190),
    // 128 registers of output; exactly the 96 KB that a block can have.
    shared_q("volta_fwd_256x256", (256, 256), LARGE, 256, 1, 222),
];

pub const FORWARD: &[Variant] = &[
    PLAIN_LARGE[0],
    PLAIN_LARGE[1],
    // 24 KB: two blocks.
    shared_q("volta_fwd_64x64_small", (64, 64), SMALL, 256, 2, 119),
    PLAIN_LARGE[2],
    // As at 128, in 36 KB.
    shared_q("volta_fwd_96x96_small", (96, 96), SMALL, 256, 1, 154),
    PLAIN_LARGE[3],
    // Too many registers for two blocks of 256 threads; 48 KB.
    shared_q("volta_fwd_128x128_small", (128, 128), SMALL, 256, 1, 168),
    PLAIN_LARGE[4],
    PLAIN_LARGE[5],
    PLAIN_LARGE[6],
    PLAIN_LARGE[0].covering(FeatureSet::VARLEN, "volta_fwd_varlen_32x32", 168),
    PLAIN_LARGE[1].covering(FeatureSet::VARLEN, "volta_fwd_varlen_64x64", 250),
    PLAIN_LARGE[2].covering(FeatureSet::VARLEN, "volta_fwd_varlen_96x96", 215),
    PLAIN_LARGE[3].covering(FeatureSet::VARLEN, "volta_fwd_varlen_128x128", 250),
    PLAIN_LARGE[4].covering(FeatureSet::VARLEN, "volta_fwd_varlen_192x128", 163),
    PLAIN_LARGE[5].covering(FeatureSet::VARLEN, "volta_fwd_varlen_192x192", 186),
    PLAIN_LARGE[6].covering(FeatureSet::VARLEN, "volta_fwd_varlen_256x256", 224),
    with(&[Feature::Softcap], "volta_fwd_softcap_64x64", PLAIN_LARGE[1], 255),
    with(&[Feature::Softcap], "volta_fwd_softcap_128x128", PLAIN_LARGE[3], 250),
    with(&[Feature::Alibi], "volta_fwd_alibi_64x64", PLAIN_LARGE[1], 254),
    with(&[Feature::Alibi], "volta_fwd_alibi_128x128", PLAIN_LARGE[3], 255),
    with(&[Feature::Bias], "volta_fwd_bias_64x64", PLAIN_LARGE[1], 255),
    with(&[Feature::Bias], "volta_fwd_bias_128x128", PLAIN_LARGE[3], 255),
    with(&[Feature::Dropout], "volta_fwd_dropout_64x64", PLAIN_LARGE[1], 255),
    with(&[Feature::Dropout], "volta_fwd_dropout_128x128", PLAIN_LARGE[3], 254),
    with(&[Feature::Softcap, Feature::Alibi], "volta_fwd_alibi_softcap_64x64", PLAIN_LARGE[1], 246),
    with(&[Feature::Softcap, Feature::Alibi], "volta_fwd_alibi_softcap_128x128", PLAIN_LARGE[3], 255),
    with(&[Feature::Bias, Feature::Dropout], "volta_fwd_bias_dropout_64x64", PLAIN_LARGE[1], 255),
    with(&[Feature::Bias, Feature::Dropout], "volta_fwd_bias_dropout_128x128", PLAIN_LARGE[3], 255),
    general(PLAIN_LARGE[1], "volta_fwd_generic_64x64", 120),
    general(PLAIN_LARGE[2], "volta_fwd_generic_96x96", 200),
    general(PLAIN_LARGE[3], "volta_fwd_generic_128x128", 174),
    general(PLAIN_LARGE[4], "volta_fwd_generic_192x128", 180),
    general(PLAIN_LARGE[5], "volta_fwd_generic_192x192", 206),
    general(PLAIN_LARGE[6], "volta_fwd_generic_256x256", 244),
];

/// The same tiles on a grid of equal shares (`volta/forward/stream_k.cuh`).
const fn shares(of: Variant, source: &'static str, name: &'static str, registers: u32) -> Variant {
    Variant { pass: Pass::ForwardStreamK, name, source, registers, ..of }
}
const REGISTER_Q_SHARES: &str = "volta/forward/register_q_stream_k.cu";
const SHARED_Q_SHARES: &str = "volta/forward/shared_q_stream_k.cu";

/// Headdim 32 has three places an SM, whose pieces a kernel's parameters have no room for.
pub const FORWARD_STREAM_K: &[Variant] = &[
    shares(PLAIN_LARGE[1], REGISTER_Q_SHARES, "volta_fwd_streamk_64x64", 247),
    shares(PLAIN_LARGE[2], SHARED_Q_SHARES, "volta_fwd_streamk_96x96", 228),
    shares(PLAIN_LARGE[3], SHARED_Q_SHARES, "volta_fwd_streamk_128x128", 254),
    shares(PLAIN_LARGE[4], SHARED_Q_SHARES, "volta_fwd_streamk_192x128", 162),
    shares(PLAIN_LARGE[5], SHARED_Q_SHARES, "volta_fwd_streamk_192x192", 214),
    shares(PLAIN_LARGE[6], SHARED_Q_SHARES, "volta_fwd_streamk_256x256", 254),
    shares(with(&[Feature::Softcap], "", PLAIN_LARGE[1], 0), REGISTER_Q_SHARES, "volta_fwd_streamk_softcap_64x64", 254),
    shares(with(&[Feature::Softcap], "", PLAIN_LARGE[3], 0), SHARED_Q_SHARES, "volta_fwd_streamk_softcap_128x128", 254),
    shares(with(&[Feature::Alibi], "", PLAIN_LARGE[1], 0), REGISTER_Q_SHARES, "volta_fwd_streamk_alibi_64x64", 253),
    shares(with(&[Feature::Alibi], "", PLAIN_LARGE[3], 0), SHARED_Q_SHARES, "volta_fwd_streamk_alibi_128x128", 255),
    shares(
        with(&[Feature::Softcap, Feature::Alibi], "", PLAIN_LARGE[1], 0),
        REGISTER_Q_SHARES,
        "volta_fwd_streamk_alibi_softcap_64x64",
        247,
    ),
    shares(
        with(&[Feature::Softcap, Feature::Alibi], "", PLAIN_LARGE[3], 0),
        SHARED_Q_SHARES,
        "volta_fwd_streamk_alibi_softcap_128x128",
        255,
    ),
];

/// Kernels of a KV cache: the tiles of the plain ones, whose rows come through a table of pages.
const fn paged(plain: Variant, name: &'static str, registers: u32) -> Variant {
    Variant { pass: Pass::Prefill, ..plain }.covering(FeatureSet::PAGED, name, registers)
}
const fn paged_general(plain: Variant, name: &'static str, registers: u32) -> Variant {
    Variant { pass: Pass::Prefill, ..general(plain, name, registers) }.covering(
        FeatureSet::GENERIC.union(FeatureSet::PAGED),
        name,
        registers,
    )
}

/// Three headdims, to whose next others are padded: chunks of prompts, not training, run here.
pub const PREFILL: &[Variant] = &[
    paged(PLAIN_LARGE[1], "volta_prefill_64x64", 251),
    paged(PLAIN_LARGE[3], "volta_prefill_128x128", 254),
    paged(PLAIN_LARGE[6], "volta_prefill_256x256", 227),
    paged_general(PLAIN_LARGE[1], "volta_prefill_generic_64x64", 123),
    paged_general(PLAIN_LARGE[3], "volta_prefill_generic_128x128", 161),
    paged_general(PLAIN_LARGE[6], "volta_prefill_generic_256x256", 231),
];
