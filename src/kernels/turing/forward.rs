//! The forward kernels, and why their tiles are what they are. Figures and the record of what else was tried:
//! `docs/design/turing-forward.md`. `registers` comes last in each row, of the 255 that one thread can have.

use super::{CacheFormat, Feature, FeatureSet, Pass, Variant, TURING};

/// `turing/forward/pipelined`: steps of 16 keys through a ring of 4 or 8 slots. `warp_rows` is 16, 32 or 48: a fragment of K or V
/// that a warp reads serves that many rows, and shared memory is half as fast as Volta's.
const fn pipelined(
    name: &'static str,
    (headdim, headdim_v): (u32, u32),
    (warps, warp_rows): (u32, u32),
    slots: u32,
    blocks_per_sm: u32,
    registers: u32,
) -> Variant {
    let step = 16;
    Variant {
        name,
        family: TURING,
        pass: Pass::Forward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "turing/forward/pipelined.cu",
        headdim,
        headdim_v,
        block_rows: warps * warp_rows,
        step,
        threads: 32 * warps,
        shared_bytes: slots * step * 2 * (headdim + headdim_v),
        blocks_per_sm,
        registers,
    }
}

/// What changes scores lives beside them: fewer rows a warp than the plain kernel has.
const fn general(name: &'static str, plain: Variant, (warps, warp_rows): (u32, u32), registers: u32) -> Variant {
    Variant { block_rows: warps * warp_rows, threads: 32 * warps, ..plain }.covering(FeatureSet::GENERIC, name, registers)
}

/// Ragged kernels that do one thing to scores besides, the one that a problem asks for: what the general ones ask at every tile is
/// known here, and what can be is carried from tile to tile.
const fn with(need: Feature, name: &'static str, plain: Variant, (warps, warp_rows): (u32, u32), registers: u32) -> Variant {
    let requires = FeatureSet::of(&[need]);
    Variant { block_rows: warps * warp_rows, threads: 32 * warps, requires, ..plain }.covering(
        FeatureSet::VARLEN.union(requires).with_fp32_bias(),
        name,
        registers,
    )
}

/// `with` as many rows a warp as plain has, where all registers are in use: half the slots, and behind them 32 bytes of a thread's own.
const fn with_all_rows(need: Feature, name: &'static str, plain: Variant, registers: u32) -> Variant {
    let plain = Variant { shared_bytes: plain.shared_bytes / 2 + 32 * plain.threads, ..plain };
    with(need, name, plain, (plain.threads / 32, 32 * plain.block_rows / plain.threads), registers)
}

const PLAIN: [Variant; 7] = [
    pipelined("turing_fwd_32x32", (32, 32), (4, 32), 8, 4, 128),
    // 48 registers of Q and 96 of output; 32 KB: two blocks.
    pipelined("turing_fwd_64x64", (64, 64), (4, 48), 8, 2, 246),
    pipelined("turing_fwd_96x96", (96, 96), (8, 32), 8, 1, 238),
    // 64 registers of Q and 128 of output; the 64 KB that an SM has.
    pipelined("turing_fwd_128x128", (128, 128), (8, 32), 8, 1, 255),
    // 32 rows of Q and of output do not fit: 16 rows a warp.
    pipelined("turing_fwd_192x128", (192, 128), (8, 16), 4, 1, 209),
    pipelined("turing_fwd_192x192", (192, 192), (8, 16), 4, 1, 251),
    pipelined("turing_fwd_256x256", (256, 256), (8, 16), 4, 1, 255),
];

const MEDIUM_64: Variant = pipelined("turing_fwd_64x64_medium", (64, 64), (4, 32), 8, 2, 181);

pub const FORWARD: &[Variant] = &[
    PLAIN[0],
    PLAIN[1],
    // Fewer rows a warp, for grids that would leave SMs idle: the larger first.
    MEDIUM_64,
    pipelined("turing_fwd_64x64_small", (64, 64), (4, 16), 8, 2, 122),
    PLAIN[2],
    pipelined("turing_fwd_96x96_medium", (96, 96), (8, 16), 8, 1, 156),
    pipelined("turing_fwd_96x96_small", (96, 96), (4, 16), 4, 1, 157),
    PLAIN[3],
    pipelined("turing_fwd_128x128_medium", (128, 128), (8, 16), 8, 1, 184),
    // One block, though two fit: two of 64 rows are slower than one of 128.
    pipelined("turing_fwd_128x128_small", (128, 128), (4, 16), 4, 1, 187),
    PLAIN[4],
    PLAIN[5],
    PLAIN[6],
    PLAIN[0].covering(FeatureSet::VARLEN, "turing_fwd_varlen_32x32", 128),
    PLAIN[1].covering(FeatureSet::VARLEN, "turing_fwd_varlen_64x64", 246),
    MEDIUM_64.covering(FeatureSet::VARLEN, "turing_fwd_varlen_64x64_medium", 181),
    PLAIN[2].covering(FeatureSet::VARLEN, "turing_fwd_varlen_96x96", 238),
    PLAIN[3].covering(FeatureSet::VARLEN, "turing_fwd_varlen_128x128", 255),
    PLAIN[4].covering(FeatureSet::VARLEN, "turing_fwd_varlen_192x128", 209),
    PLAIN[5].covering(FeatureSet::VARLEN, "turing_fwd_varlen_192x192", 253),
    PLAIN[6].covering(FeatureSet::VARLEN, "turing_fwd_varlen_256x256", 255),
    with(Feature::Softcap, "turing_fwd_softcap_64x64", PLAIN[1], (4, 32), 188),
    with(Feature::Softcap, "turing_fwd_softcap_128x128", PLAIN[3], (8, 16), 189),
    with(Feature::Alibi, "turing_fwd_alibi_64x64", PLAIN[1], (4, 48), 254),
    with(Feature::Alibi, "turing_fwd_alibi_64x64_medium", PLAIN[1], (4, 32), 195),
    with_all_rows(Feature::Alibi, "turing_fwd_alibi_128x128", PLAIN[3], 255),
    with(Feature::Alibi, "turing_fwd_alibi_128x128_medium", PLAIN[3], (8, 16), 195),
    with(Feature::Bias, "turing_fwd_bias_64x64", PLAIN[1], (4, 32), 218),
    with(Feature::Bias, "turing_fwd_bias_128x128", PLAIN[3], (8, 16), 210),
    with(Feature::Dropout, "turing_fwd_dropout_64x64", PLAIN[1], (4, 32), 205),
    with_all_rows(Feature::Dropout, "turing_fwd_dropout_128x128", PLAIN[3], 255),
    with(Feature::Dropout, "turing_fwd_dropout_128x128_medium", PLAIN[3], (8, 16), 200),
    Variant { blocks_per_sm: 3, ..general("turing_fwd_generic_32x32", PLAIN[0], (4, 32), 150) },
    general("turing_fwd_generic_64x64", PLAIN[1], (4, 32), 195),
    general("turing_fwd_generic_96x96", PLAIN[2], (8, 16), 162),
    general("turing_fwd_generic_128x128", PLAIN[3], (8, 16), 189),
    general("turing_fwd_generic_192x128", PLAIN[4], (8, 16), 213),
    general("turing_fwd_generic_192x192", PLAIN[5], (8, 16), 255),
    general("turing_fwd_generic_256x256", PLAIN[6], (8, 16), 255),
];

/// Kernels of a KV cache: the same with rows that come through a table of pages. `(warps, warp_rows)` as in `general`.
const fn paged(name: &'static str, plain: Variant, (warps, warp_rows): (u32, u32), needs: FeatureSet, registers: u32) -> Variant {
    Variant { pass: Pass::Prefill, block_rows: warps * warp_rows, threads: 32 * warps, ..plain }.covering(needs, name, registers)
}
const PAGED_GENERIC: FeatureSet = FeatureSet::GENERIC.union(FeatureSet::PAGED);

/// Three headdims, to whose next others are padded: chunks of prompts, not training, run here.
pub const PREFILL: &[Variant] = &[
    paged("turing_prefill_64x64", PLAIN[1], (4, 48), FeatureSet::PAGED, 247),
    // Fewer rows a warp, as above: chunks have few.
    paged("turing_prefill_64x64_medium", PLAIN[1], (4, 32), FeatureSet::PAGED, 190),
    paged("turing_prefill_64x64_small", PLAIN[1], (4, 16), FeatureSet::PAGED, 128),
    paged("turing_prefill_128x128", PLAIN[3], (8, 32), FeatureSet::PAGED, 255),
    paged("turing_prefill_128x128_medium", PLAIN[3], (8, 16), FeatureSet::PAGED, 192),
    paged("turing_prefill_128x128_small", PLAIN[3], (4, 16), FeatureSet::PAGED, 188),
    paged("turing_prefill_256x256", PLAIN[6], (8, 16), FeatureSet::PAGED, 255),
    paged("turing_prefill_generic_64x64", PLAIN[1], (4, 32), PAGED_GENERIC, 190),
    paged("turing_prefill_generic_128x128", PLAIN[3], (8, 16), PAGED_GENERIC, 190),
    paged("turing_prefill_generic_256x256", PLAIN[6], (8, 16), PAGED_GENERIC, 255),
];
