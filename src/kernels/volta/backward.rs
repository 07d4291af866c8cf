//! The backward kernels. docs/design/volta-backward.md derives the shapes. A thread can have 255 registers.

use super::{CacheFormat, Feature, FeatureSet, Pass, Variant, VOLTA};

/// dk, dv and, by atomics, dq.
const MAIN: [Variant; 6] = [
    // Four warps with 32 keys each: dV and dK are 2 x 32 registers of a thread. Two blocks an SM,
    // as for headdim 64. Shared: K, V 16 KB, Q, dO 4 KB, P or dS 8 KB.
    Variant {
        name: "volta_bwd_32",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/single_role.cu",
        headdim: 32,
        headdim_v: 32,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 28672,
        blocks_per_sm: 2,
        registers: 197,
    },
    // dV and dK are 2 x 64 registers, S and dP 2 x 32, operands 32: all there are, and no spill. Two
    // blocks an SM by registers, and by shared memory: K, V 32 KB, Q, dO 8 KB, P or dS 8 KB.
    Variant {
        name: "volta_bwd_64",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/single_role.cu",
        headdim: 64,
        headdim_v: 64,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 49152,
        blocks_per_sm: 2,
        registers: 255,
    },
    // Two roles of four warps: a warp has 32 keys of dV or of dK, 96 registers. One block an SM.
    // K, V 48 KB, Q, dO 12 KB, P and dS 16 KB. Six of the eight warps have a part of dQ.
    Variant {
        name: "volta_bwd_96",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/warp_specialized.cu",
        headdim: 96,
        headdim_v: 96,
        block_rows: 128,
        step: 32,
        threads: 256,
        shared_bytes: 77824,
        blocks_per_sm: 1,
        registers: 212,
    },
    // The same with 128 registers of dV or dK, and all of the 96 KB: K, V 64, Q, dO 16, P and dS 16.
    Variant {
        name: "volta_bwd_128",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/warp_specialized.cu",
        headdim: 128,
        headdim_v: 128,
        block_rows: 128,
        step: 32,
        threads: 256,
        shared_bytes: 98304,
        blocks_per_sm: 1,
        registers: 249,
    },
    // 64 keys, so that K and V leave room: 48 KB, Q, dO 24 KB, P and dS 8 KB. dV or dK 96 registers.
    Variant {
        name: "volta_bwd_192",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/warp_specialized.cu",
        headdim: 192,
        headdim_v: 192,
        block_rows: 64,
        step: 32,
        threads: 256,
        shared_bytes: 81920,
        blocks_per_sm: 1,
        registers: 212,
    },
    // 64 keys in steps of 16 queries: K, V 64 KB, Q, dO 16 KB, P and dS 8 KB (rows padded to 32 queries);
    // 32 queries would need 104 KB. dV or dK 128 registers.
    Variant {
        name: "volta_bwd_256",
        family: VOLTA,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/warp_specialized.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 16,
        threads: 256,
        shared_bytes: 90112,
        blocks_per_sm: 1,
        registers: 219,
    },
];

/// The same tiles where V and dO have 128 columns: a third less of dP and of dV. (Multi-head latent attention trains with these headdims.)
const NARROW_V: Variant = Variant { name: "volta_bwd_192x128", headdim_v: 128, registers: 218, ..MAIN[4] };

/// Blocks of 64 keys in two roles, for grids that are small (`plan::smaller`): at most half as long as the others', if slower a key.
const fn small(name: &'static str, main: Variant, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant {
        name,
        source: "volta/backward/warp_specialized.cu",
        block_rows: 64,
        threads: 256,
        shared_bytes: 4 * main.headdim * (64 + main.step) + 2 * 64 * 64,
        blocks_per_sm,
        registers,
        ..main
    }
}
/// At headdim 64 two blocks an SM by registers, 32 KB each; at 128 one.
const SMALL: [Variant; 2] = [small("volta_bwd_64_small", MAIN[1], 2, 120), small("volta_bwd_128_small", MAIN[3], 1, 168)];

/// deterministic=True: dq from blocks of queries, as the main kernels' from blocks of keys.
const QUERIES: [Variant; 6] = [
    // Four warps with 32 queries each: dQ is 32 registers of a thread; three blocks an SM. Shared: Q, dO 16 KB,
    // K, V 4 KB, dS 8 KB.
    Variant {
        name: "volta_bwd_dq_32",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 32,
        headdim_v: 32,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 28672,
        blocks_per_sm: 3,
        registers: 168,
    },
    // dQ 64 registers, S and dP 64. Two blocks: Q, dO 32 KB, K, V 8 KB, dS 8 KB.
    Variant {
        name: "volta_bwd_dq_64",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 64,
        headdim_v: 64,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 49152,
        blocks_per_sm: 2,
        registers: 196,
    },
    // Eight warps, two to 32 queries, in steps of 64 keys, so that a warp's scores are 32x32 as above.
    // One block: Q, dO 48 KB, K, V 24 KB, dS 16 KB.
    Variant {
        name: "volta_bwd_dq_96",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 96,
        headdim_v: 96,
        block_rows: 128,
        step: 64,
        threads: 256,
        shared_bytes: 90112,
        blocks_per_sm: 1,
        registers: 212,
    },
    // The same. Q, dO 64 KB, K, V 32 KB; dS takes the place of V.
    Variant {
        name: "volta_bwd_dq_128",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 128,
        headdim_v: 128,
        block_rows: 128,
        step: 64,
        threads: 256,
        shared_bytes: 98304,
        blocks_per_sm: 1,
        registers: 226,
    },
    // 64 queries, so four warps to 32 and their scores 32x16. Q, dO 48 KB, K, V 48 KB.
    Variant {
        name: "volta_bwd_dq_192",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 192,
        headdim_v: 192,
        block_rows: 64,
        step: 64,
        threads: 256,
        shared_bytes: 98304,
        blocks_per_sm: 1,
        registers: 182,
    },
    // 64 queries in steps of 32 keys, scores 16x16. Q, dO 64 KB, K, V 32 KB.
    Variant {
        name: "volta_bwd_dq_256",
        family: VOLTA,
        pass: Pass::BackwardDq,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "volta/backward/dq.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 32,
        threads: 256,
        shared_bytes: 98304,
        blocks_per_sm: 1,
        registers: 155,
    },
];

/// One for all headdims, which it learns at run time: bound by memory. Four blocks an SM have
/// 1024 threads with two or more 16-byte loads each in flight.
const PREPARE: Variant = Variant {
    name: "volta_bwd_preprocess",
    family: VOLTA,
    pass: Pass::BackwardPreprocess,
    needs: FeatureSet::NONE,
    requires: FeatureSet::NONE,
    cache: CacheFormat::Unquantized,
    source: "volta/backward/preprocess.cu",
    headdim: 256,
    headdim_v: 256,
    block_rows: 64,
    step: 0,
    threads: 256,
    shared_bytes: 0,
    blocks_per_sm: 4,
    registers: 56,
};

/// As `PREPARE`: any headdim.
const FINISH: Variant = Variant {
    name: "volta_bwd_postprocess",
    pass: Pass::BackwardPostprocess,
    source: "volta/backward/postprocess.cu",
    registers: 38,
    ..PREPARE
};

/// Both roles of `volta/backward/split` for all headdims.
const fn general(name: &'static str, headdim: u32, block_rows: u32, step: u32, registers: u32) -> Variant {
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        shared_bytes: 4 * headdim * (block_rows + step) + 2 * 64 * block_rows,
        ..MAIN[3]
    }
    .covering(FeatureSet::GENERIC, name, registers)
}

const GENERIC: [Variant; 5] = [
    general("volta_bwd_generic_64", 64, 128, 32, 179),
    general("volta_bwd_generic_96", 96, 128, 32, 212),
    general("volta_bwd_generic_128", 128, 128, 32, 242),
    general("volta_bwd_generic_192", 192, 64, 32, 212),
    general("volta_bwd_generic_256", 256, 64, 16, 254),
];

/// A kernel that does one thing to scores, which a problem has to ask for: a general one without its branches on the others, and so without
/// the misses of the instruction cache; or, where registers allow, one of plain tiles (`volta/backward/joint_scores.cuh`).
const fn with(need: Feature, name: &'static str, tiles: Variant, registers: u32) -> Variant {
    let requires = FeatureSet::of(&[need]);
    Variant { requires, ..tiles }.covering(FeatureSet::VARLEN.union(requires).with_fp32_bias(), name, registers)
}

/// The main kernel `main` without its dQ product.
const fn keys(main: Variant, name: &'static str, source: &'static str, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardDkDv, source, registers, ..main }
}

/// A main kernel that does all of a backward pass.
const fn whole(name: &'static str, main: Variant, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardFused, source: "volta/backward/warp_specialized_fused.cu", registers, ..main }
}

/// None of 128 keys at headdim 64: `volta/backward/small` has no registers left.
const WHOLE: [Variant; 3] = [
    whole("volta_bwd_fused_64_small", SMALL[0], 115),
    whole("volta_bwd_fused_128", MAIN[3], 244),
    whole("volta_bwd_fused_128_small", SMALL[1], 163),
];

pub const BACKWARD: &[Variant] = &[
    PREPARE,
    MAIN[0],
    MAIN[1],
    MAIN[2],
    MAIN[3],
    MAIN[4],
    MAIN[5],
    NARROW_V,
    SMALL[0],
    SMALL[1],
    // deterministic=True: dk and dv by the main kernels without their dQ product, with the same tiles and, but for
    // headdim 64, fewer registers ...
    keys(MAIN[0], "volta_bwd_dkdv_32", "volta/backward/single_role_dkdv.cu", 193),
    keys(MAIN[1], "volta_bwd_dkdv_64", "volta/backward/single_role_dkdv.cu", 255),
    keys(MAIN[2], "volta_bwd_dkdv_96", "volta/backward/warp_specialized_dkdv.cu", 185),
    keys(MAIN[3], "volta_bwd_dkdv_128", "volta/backward/warp_specialized_dkdv.cu", 217),
    keys(MAIN[4], "volta_bwd_dkdv_192", "volta/backward/warp_specialized_dkdv.cu", 195),
    keys(MAIN[5], "volta_bwd_dkdv_256", "volta/backward/warp_specialized_dkdv.cu", 214),
    // (those of small grids too, so that both modes have the same dk and dv)
    keys(SMALL[0], "volta_bwd_dkdv_64_small", "volta/backward/warp_specialized_dkdv.cu", 110),
    keys(SMALL[1], "volta_bwd_dkdv_128_small", "volta/backward/warp_specialized_dkdv.cu", 140),
    // ... then dq.
    QUERIES[0],
    QUERIES[1],
    QUERIES[2],
    QUERIES[3],
    QUERIES[4],
    QUERIES[5],
    FINISH,
    PREPARE.covering(FeatureSet::VARLEN, "volta_bwd_varlen_preprocess", 56),
    MAIN[0].covering(FeatureSet::VARLEN, "volta_bwd_varlen_32", 195),
    MAIN[1].covering(FeatureSet::VARLEN, "volta_bwd_varlen_64", 255),
    MAIN[2].covering(FeatureSet::VARLEN, "volta_bwd_varlen_96", 210),
    MAIN[3].covering(FeatureSet::VARLEN, "volta_bwd_varlen_128", 248),
    MAIN[4].covering(FeatureSet::VARLEN, "volta_bwd_varlen_192", 212),
    MAIN[5].covering(FeatureSet::VARLEN, "volta_bwd_varlen_256", 237),
    NARROW_V.covering(FeatureSet::VARLEN, "volta_bwd_varlen_192x128", 216),
    FINISH.covering(FeatureSet::VARLEN, "volta_bwd_varlen_postprocess", 44),
    keys(MAIN[1], "volta_bwd_dkdv_64", "volta/backward/single_role_dkdv.cu", 255).covering(
        FeatureSet::VARLEN,
        "volta_bwd_varlen_dkdv_64",
        254,
    ),
    keys(MAIN[3], "volta_bwd_dkdv_128", "volta/backward/warp_specialized_dkdv.cu", 214).covering(
        FeatureSet::VARLEN,
        "volta_bwd_varlen_dkdv_128",
        228,
    ),
    QUERIES[1].covering(FeatureSet::VARLEN, "volta_bwd_varlen_dq_64", 200),
    QUERIES[3].covering(FeatureSet::VARLEN, "volta_bwd_varlen_dq_128", 229),
    with(Feature::Softcap, "volta_bwd_softcap_64", MAIN[1], 255),
    with(Feature::Softcap, "volta_bwd_softcap_128", GENERIC[2], 240),
    with(Feature::Alibi, "volta_bwd_alibi_64", MAIN[1], 255),
    with(Feature::Alibi, "volta_bwd_alibi_128", GENERIC[2], 236),
    with(Feature::Bias, "volta_bwd_bias_64", MAIN[1], 255),
    with(Feature::Bias, "volta_bwd_bias_128", GENERIC[2], 244),
    with(Feature::Dropout, "volta_bwd_dropout_64", MAIN[1], 254),
    with(Feature::Dropout, "volta_bwd_dropout_128", GENERIC[2], 238),
    GENERIC[0],
    GENERIC[1],
    GENERIC[2],
    GENERIC[3],
    GENERIC[4],
    keys(GENERIC[0], "volta_bwd_generic_dkdv_64", "volta/backward/warp_specialized_dkdv.cu", 170),
    keys(GENERIC[1], "volta_bwd_generic_dkdv_96", "volta/backward/warp_specialized_dkdv.cu", 205),
    keys(GENERIC[2], "volta_bwd_generic_dkdv_128", "volta/backward/warp_specialized_dkdv.cu", 232),
    keys(GENERIC[3], "volta_bwd_generic_dkdv_192", "volta/backward/warp_specialized_dkdv.cu", 186),
    keys(GENERIC[4], "volta_bwd_generic_dkdv_256", "volta/backward/warp_specialized_dkdv.cu", 252),
    QUERIES[1].covering(FeatureSet::GENERIC, "volta_bwd_generic_dq_64", 193),
    QUERIES[2].covering(FeatureSet::GENERIC, "volta_bwd_generic_dq_96", 212),
    QUERIES[3].covering(FeatureSet::GENERIC, "volta_bwd_generic_dq_128", 227),
    QUERIES[4].covering(FeatureSet::GENERIC, "volta_bwd_generic_dq_192", 168),
    QUERIES[5].covering(FeatureSet::GENERIC, "volta_bwd_generic_dq_256", 149),
    WHOLE[0],
    WHOLE[1],
    WHOLE[2],
    WHOLE[0].covering(FeatureSet::VARLEN, "volta_bwd_varlen_fused_64_small", 111),
    WHOLE[1].covering(FeatureSet::VARLEN, "volta_bwd_varlen_fused_128", 244),
    WHOLE[2].covering(FeatureSet::VARLEN, "volta_bwd_varlen_fused_128_small", 163),
];
