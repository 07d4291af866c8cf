//! The backward kernels. docs/design/turing-backward.md derives the shapes. A thread can have 255 registers.

use super::{CacheFormat, Feature, FeatureSet, Pass, Variant, TURING};

/// `turing/backward/small`: 4 warps of 32 keys, two blocks an SM. Shared: K, and two tiles of Q, of dO and of dS.
const fn small(name: &'static str, headdim: u32, step: u32, registers: u32) -> Variant {
    let block_rows = 128;
    Variant {
        name,
        family: TURING,
        pass: Pass::Backward,
        needs: FeatureSet::NONE,
        requires: FeatureSet::NONE,
        cache: CacheFormat::Unquantized,
        source: "turing/backward/single_role.cu",
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads: 128,
        shared_bytes: 2 * headdim * block_rows + 2 * (4 * headdim * step + 2 * block_rows * step),
        blocks_per_sm: 2,
        registers,
    }
}

const SMALL: [Variant; 2] = [
    // 32 queries a step, for all threads to load; S and dP are 2 x 32 registers, dV and dK 2 x 32
    small("turing_bwd_32", 32, 32, 224),
    // dV and dK are 2 x 64 registers, V 32, S and dP 2 x 16
    small("turing_bwd_64", 64, 16, 255),
];

/// `turing/backward/split`: two roles of four warps. Shared: K, tiles of Q, of dO and of dS (two where they fit), and P.
const fn split(name: &'static str, headdim: u32, block_rows: u32, step: u32, registers: u32) -> Variant {
    let scores = 2 * block_rows * step;
    // at headdim 256 one tile of each, and a quarter of V
    let (slots, values) = if headdim > 192 { (1, 2 * headdim / 4 * block_rows) } else { (2, 0) };
    Variant {
        name,
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        cache: CacheFormat::Unquantized,
        source: "turing/backward/warp_specialized.cu",
        threads: 256,
        shared_bytes: 2 * headdim * block_rows + slots * (4 * headdim * step + scores) + scores + values,
        blocks_per_sm: 1,
        registers,
        ..SMALL[0]
    }
}

const SPLIT: [Variant; 5] = [
    // for general kernels alone: 32 queries a step, for all threads to load
    split("turing_bwd_split_64", 64, 128, 32, 197),
    split("turing_bwd_96", 96, 128, 16, 213),
    // 128 registers of dV or dK, 64 of K or V; 60 KB
    split("turing_bwd_128", 128, 128, 16, 252),
    // 16 keys a warp: 96 and 48 registers; 56 KB
    split("turing_bwd_192", 192, 64, 16, 247),
    // 128 and 48 registers; 60 KB
    split("turing_bwd_256", 256, 64, 16, 238),
];

/// deterministic=True: dq from blocks of queries. `turing/backward/queries`: Q, dO and dQ in registers, two tiles of K and of V in
/// shared memory.
const fn queries(name: &'static str, headdim: u32, step: u32, threads: u32, registers: u32) -> Variant {
    Variant {
        name,
        pass: Pass::BackwardDq,
        headdim,
        headdim_v: headdim,
        step,
        cache: CacheFormat::Unquantized,
        source: "turing/backward/dq.cu",
        threads,
        shared_bytes: 8 * headdim * step,
        blocks_per_sm: if threads == 128 { 2 } else { 1 },
        registers,
        ..SMALL[0]
    }
}

/// `turing/backward/queries_split`: two roles of four warps with 16 queries each. Shared: three tiles of K and of V, and what goes
/// from one role to the other, P, dS and softcap's derivative.
const fn queries_split(name: &'static str, headdim: u32, registers: u32) -> Variant {
    let (block_rows, step) = (64, 16);
    Variant {
        block_rows,
        cache: CacheFormat::Unquantized,
        source: "turing/backward/dq_warp_specialized.cu",
        shared_bytes: 12 * headdim * step + 3 * 2 * block_rows * step,
        ..queries(name, headdim, step, 256, registers)
    }
}

const QUERIES: [Variant; 6] = [
    // four warps of 32 queries
    queries("turing_bwd_dq_32", 32, 32, 128, 177),
    queries("turing_bwd_dq_64", 64, 16, 128, 210),
    // eight of 16
    queries("turing_bwd_dq_96", 96, 16, 256, 163),
    queries("turing_bwd_dq_128", 128, 16, 256, 196),
    queries_split("turing_bwd_dq_192", 192, 168),
    queries_split("turing_bwd_dq_256", 256, 254),
];

/// One for all headdims, which it learns at run time: bound by memory. Four blocks an SM have 1024 threads with two or
/// more 16-byte loads each in flight.
const PREPARE: Variant = Variant {
    name: "turing_bwd_preprocess",
    family: TURING,
    pass: Pass::BackwardPreprocess,
    needs: FeatureSet::NONE,
    requires: FeatureSet::NONE,
    cache: CacheFormat::Unquantized,
    source: "turing/backward/preprocess.cu",
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
    name: "turing_bwd_postprocess",
    pass: Pass::BackwardPostprocess,
    source: "turing/backward/postprocess.cu",
    registers: 38,
    ..PREPARE
};

/// The main kernel `main` without its dQ product.
const fn keys(main: Variant, name: &'static str, source: &'static str, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardDkDv, source, registers, ..main }
}
/// Ragged kernels that do one thing to scores besides, the one that a problem asks for. (At headdim 64 the plain kernel has room for
/// that; all else takes `split`.)
const fn with(need: Feature, name: &'static str, plain: Variant, registers: u32) -> Variant {
    let requires = FeatureSet::of(&[need]);
    Variant { requires, ..plain }.covering(FeatureSet::VARLEN.union(requires).with_fp32_bias(), name, registers)
}

const SMALL_KEYS: &str = "turing/backward/single_role_dkdv.cu";
const SPLIT_KEYS: &str = "turing/backward/warp_specialized_dkdv.cu";

const KEYS: [Variant; 7] = [
    keys(SMALL[0], "turing_bwd_dkdv_32", SMALL_KEYS, 206),
    keys(SMALL[1], "turing_bwd_dkdv_64", SMALL_KEYS, 243),
    keys(SPLIT[1], "turing_bwd_dkdv_96", SPLIT_KEYS, 208),
    keys(SPLIT[2], "turing_bwd_dkdv_128", SPLIT_KEYS, 240),
    keys(SPLIT[3], "turing_bwd_dkdv_192", SPLIT_KEYS, 213),
    keys(SPLIT[4], "turing_bwd_dkdv_256", SPLIT_KEYS, 232),
    // for general kernels alone
    keys(SPLIT[0], "turing_bwd_split_dkdv_64", SPLIT_KEYS, 190),
];

/// A main kernel that does all of a backward pass.
const fn whole(name: &'static str, main: Variant, source: &'static str, registers: u32) -> Variant {
    Variant { name, pass: Pass::BackwardFused, source, registers, ..main }
}

const WHOLE: [Variant; 2] = [
    whole("turing_bwd_fused_64", SMALL[1], "turing/backward/single_role_fused.cu", 254),
    whole("turing_bwd_fused_128", SPLIT[2], "turing/backward/warp_specialized_fused.cu", 252),
];

pub const BACKWARD: &[Variant] = &[
    PREPARE,
    SMALL[0],
    SMALL[1],
    SPLIT[1],
    SPLIT[2],
    SPLIT[3],
    SPLIT[4],
    KEYS[0],
    KEYS[1],
    KEYS[2],
    KEYS[3],
    KEYS[4],
    KEYS[5],
    QUERIES[0],
    QUERIES[1],
    QUERIES[2],
    QUERIES[3],
    QUERIES[4],
    QUERIES[5],
    FINISH,
    PREPARE.covering(FeatureSet::VARLEN, "turing_bwd_varlen_preprocess", 56),
    SMALL[0].covering(FeatureSet::VARLEN, "turing_bwd_varlen_32", 220),
    SMALL[1].covering(FeatureSet::VARLEN, "turing_bwd_varlen_64", 255),
    SPLIT[1].covering(FeatureSet::VARLEN, "turing_bwd_varlen_96", 216),
    SPLIT[2].covering(FeatureSet::VARLEN, "turing_bwd_varlen_128", 252),
    SPLIT[3].covering(FeatureSet::VARLEN, "turing_bwd_varlen_192", 248),
    SPLIT[4].covering(FeatureSet::VARLEN, "turing_bwd_varlen_256", 238),
    FINISH.covering(FeatureSet::VARLEN, "turing_bwd_varlen_postprocess", 44),
    with(Feature::Softcap, "turing_bwd_softcap_64", SMALL[1], 255),
    with(Feature::Softcap, "turing_bwd_softcap_128", SPLIT[2], 252),
    with(Feature::Alibi, "turing_bwd_alibi_64", SMALL[1], 255),
    with(Feature::Bias, "turing_bwd_bias_64", SMALL[1], 252),
    with(Feature::Dropout, "turing_bwd_dropout_64", SMALL[1], 251),
    with(Feature::Dropout, "turing_bwd_dropout_128", SPLIT[2], 250),
    SPLIT[0].covering(FeatureSet::GENERIC, "turing_bwd_generic_64", 218),
    SPLIT[1].covering(FeatureSet::GENERIC, "turing_bwd_generic_96", 224),
    SPLIT[2].covering(FeatureSet::GENERIC, "turing_bwd_generic_128", 247),
    SPLIT[3].covering(FeatureSet::GENERIC, "turing_bwd_generic_192", 248),
    SPLIT[4].covering(FeatureSet::GENERIC, "turing_bwd_generic_256", 236),
    KEYS[6].covering(FeatureSet::GENERIC, "turing_bwd_generic_dkdv_64", 225),
    KEYS[2].covering(FeatureSet::GENERIC, "turing_bwd_generic_dkdv_96", 223),
    KEYS[3].covering(FeatureSet::GENERIC, "turing_bwd_generic_dkdv_128", 255),
    KEYS[4].covering(FeatureSet::GENERIC, "turing_bwd_generic_dkdv_192", 216),
    KEYS[5].covering(FeatureSet::GENERIC, "turing_bwd_generic_dkdv_256", 254),
    QUERIES[1].covering(FeatureSet::GENERIC, "turing_bwd_generic_dq_64", 218),
    QUERIES[2].covering(FeatureSet::GENERIC, "turing_bwd_generic_dq_96", 166),
    QUERIES[3].covering(FeatureSet::GENERIC, "turing_bwd_generic_dq_128", 198),
    QUERIES[4].covering(FeatureSet::GENERIC, "turing_bwd_generic_dq_192", 198),
    QUERIES[5].covering(FeatureSet::GENERIC, "turing_bwd_generic_dq_256", 232),
    WHOLE[0],
    WHOLE[1],
    WHOLE[0].covering(FeatureSet::VARLEN, "turing_bwd_varlen_fused_64", 255),
    WHOLE[1].covering(FeatureSet::VARLEN, "turing_bwd_varlen_fused_128", 255),
];
