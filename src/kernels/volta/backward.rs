//! The backward kernels. docs/backward-kernel.md derives the shapes. A thread can have 255 registers.

use super::{CacheFormat, Need, Needs, Pass, Variant, VOLTA};

/// dk, dv and, by atomics, dq.
const MAIN: [Variant; 6] = [
    // Four warps with 32 keys each: dV and dK are 2 x 32 registers of a thread. Two blocks an SM,
    // as for headdim 64. Shared: K, V 16 KB, Q, dO 4 KB, P or dS 8 KB.
    Variant {
        name: "volta_bwd_32",
        family: VOLTA,
        pass: Pass::Backward,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/small.cu",
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
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/small.cu",
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
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/split.cu",
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
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/split.cu",
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
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/split.cu",
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
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/split.cu",
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
        source: "volta/backward/split.cu",
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
        name: "volta_bwd_queries_32",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
        name: "volta_bwd_queries_64",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
        name: "volta_bwd_queries_96",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
        name: "volta_bwd_queries_128",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
        name: "volta_bwd_queries_192",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
        name: "volta_bwd_queries_256",
        family: VOLTA,
        pass: Pass::BackwardQueries,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/backward/queries.cu",
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
    name: "volta_bwd_prepare",
    family: VOLTA,
    pass: Pass::BackwardPrepare,
    needs: Needs::NONE,
    requires: Needs::NONE,
    cache: CacheFormat::Float,
    source: "volta/backward/prepare.cu",
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
const FINISH: Variant =
    Variant { name: "volta_bwd_finish", pass: Pass::BackwardFinish, source: "volta/backward/finish.cu", registers: 38, ..PREPARE };

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
    .covering(Needs::GENERAL, name, registers)
}

const GENERAL: [Variant; 5] = [
    general("volta_bwd_general_64", 64, 128, 32, 179),
    general("volta_bwd_general_96", 96, 128, 32, 212),
    general("volta_bwd_general_128", 128, 128, 32, 242),
    general("volta_bwd_general_192", 192, 64, 32, 212),
    general("volta_bwd_general_256", 256, 64, 16, 254),
];

/// A kernel that does one thing to scores, which a problem has to ask for: a general one without its branches on the others, and so without
/// the misses of the instruction cache; or, where registers allow, one of plain tiles (`volta/backward/joint_scores.cuh`).
const fn with(need: Need, name: &'static str, tiles: Variant, registers: u32) -> Variant {
    let requires = Needs::of(&[need]);
    Variant { requires, ..tiles }.covering(Needs::RAGGED.union(requires).with_fp32_bias(), name, registers)
}

/// The main kernel `main` without its dQ product.
const fn keys(main: Variant, name: &'static str, source: &'static str, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardKeys, source, registers, ..main }
}

/// A main kernel that does all of a backward pass.
const fn whole(name: &'static str, main: Variant, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardWhole, source: "volta/backward/split_whole.cu", registers, ..main }
}

/// None of 128 keys at headdim 64: `volta/backward/small` has no registers left.
const WHOLE: [Variant; 3] = [
    whole("volta_bwd_whole_64_small", SMALL[0], 115),
    whole("volta_bwd_whole_128", MAIN[3], 244),
    whole("volta_bwd_whole_128_small", SMALL[1], 163),
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
    keys(MAIN[0], "volta_bwd_keys_32", "volta/backward/small_keys.cu", 193),
    keys(MAIN[1], "volta_bwd_keys_64", "volta/backward/small_keys.cu", 255),
    keys(MAIN[2], "volta_bwd_keys_96", "volta/backward/split_keys.cu", 185),
    keys(MAIN[3], "volta_bwd_keys_128", "volta/backward/split_keys.cu", 217),
    keys(MAIN[4], "volta_bwd_keys_192", "volta/backward/split_keys.cu", 195),
    keys(MAIN[5], "volta_bwd_keys_256", "volta/backward/split_keys.cu", 214),
    // (those of small grids too, so that both modes have the same dk and dv)
    keys(SMALL[0], "volta_bwd_keys_64_small", "volta/backward/split_keys.cu", 110),
    keys(SMALL[1], "volta_bwd_keys_128_small", "volta/backward/split_keys.cu", 140),
    // ... then dq.
    QUERIES[0],
    QUERIES[1],
    QUERIES[2],
    QUERIES[3],
    QUERIES[4],
    QUERIES[5],
    FINISH,
    PREPARE.covering(Needs::RAGGED, "volta_bwd_ragged_prepare", 56),
    MAIN[0].covering(Needs::RAGGED, "volta_bwd_ragged_32", 195),
    MAIN[1].covering(Needs::RAGGED, "volta_bwd_ragged_64", 255),
    MAIN[2].covering(Needs::RAGGED, "volta_bwd_ragged_96", 210),
    MAIN[3].covering(Needs::RAGGED, "volta_bwd_ragged_128", 248),
    MAIN[4].covering(Needs::RAGGED, "volta_bwd_ragged_192", 212),
    MAIN[5].covering(Needs::RAGGED, "volta_bwd_ragged_256", 237),
    NARROW_V.covering(Needs::RAGGED, "volta_bwd_ragged_192x128", 216),
    FINISH.covering(Needs::RAGGED, "volta_bwd_ragged_finish", 44),
    keys(MAIN[1], "volta_bwd_keys_64", "volta/backward/small_keys.cu", 255).covering(Needs::RAGGED, "volta_bwd_ragged_keys_64", 254),
    keys(MAIN[3], "volta_bwd_keys_128", "volta/backward/split_keys.cu", 214).covering(Needs::RAGGED, "volta_bwd_ragged_keys_128", 228),
    QUERIES[1].covering(Needs::RAGGED, "volta_bwd_ragged_queries_64", 200),
    QUERIES[3].covering(Needs::RAGGED, "volta_bwd_ragged_queries_128", 229),
    with(Need::Softcap, "volta_bwd_softcap_64", MAIN[1], 255),
    with(Need::Softcap, "volta_bwd_softcap_128", GENERAL[2], 240),
    with(Need::Alibi, "volta_bwd_alibi_64", MAIN[1], 255),
    with(Need::Alibi, "volta_bwd_alibi_128", GENERAL[2], 236),
    with(Need::Bias, "volta_bwd_bias_64", MAIN[1], 255),
    with(Need::Bias, "volta_bwd_bias_128", GENERAL[2], 244),
    with(Need::Dropout, "volta_bwd_dropout_64", MAIN[1], 254),
    with(Need::Dropout, "volta_bwd_dropout_128", GENERAL[2], 238),
    GENERAL[0],
    GENERAL[1],
    GENERAL[2],
    GENERAL[3],
    GENERAL[4],
    keys(GENERAL[0], "volta_bwd_general_keys_64", "volta/backward/split_keys.cu", 170),
    keys(GENERAL[1], "volta_bwd_general_keys_96", "volta/backward/split_keys.cu", 205),
    keys(GENERAL[2], "volta_bwd_general_keys_128", "volta/backward/split_keys.cu", 232),
    keys(GENERAL[3], "volta_bwd_general_keys_192", "volta/backward/split_keys.cu", 186),
    keys(GENERAL[4], "volta_bwd_general_keys_256", "volta/backward/split_keys.cu", 252),
    QUERIES[1].covering(Needs::GENERAL, "volta_bwd_general_queries_64", 193),
    QUERIES[2].covering(Needs::GENERAL, "volta_bwd_general_queries_96", 212),
    QUERIES[3].covering(Needs::GENERAL, "volta_bwd_general_queries_128", 227),
    QUERIES[4].covering(Needs::GENERAL, "volta_bwd_general_queries_192", 168),
    QUERIES[5].covering(Needs::GENERAL, "volta_bwd_general_queries_256", 149),
    WHOLE[0],
    WHOLE[1],
    WHOLE[2],
    WHOLE[0].covering(Needs::RAGGED, "volta_bwd_ragged_whole_64_small", 111),
    WHOLE[1].covering(Needs::RAGGED, "volta_bwd_ragged_whole_128", 244),
    WHOLE[2].covering(Needs::RAGGED, "volta_bwd_ragged_whole_128_small", 163),
];
