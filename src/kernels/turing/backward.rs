//! The backward kernels. docs/turing-backward.md derives the shapes. A thread can have 255 registers.

use super::{Needs, Pass, Variant, TURING};

/// `turing/backward/small`: 4 warps of 32 keys, two blocks an SM. Shared: K, and two tiles of Q, of dO and of dS.
const fn small(name: &'static str, headdim: u32, step: u32, registers: u32) -> Variant {
    let block_rows = 128;
    Variant {
        name,
        family: TURING,
        pass: Pass::Backward,
        needs: Needs::NONE,
        source: "turing/backward/small.cu",
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
    small("turing_bwd_32", 32, 32, 244),
    // dV and dK are 2 x 64 registers, V 32, S and dP 2 x 16
    small("turing_bwd_64", 64, 16, 255),
];

/// `turing/backward/split`: two roles of four warps. Shared: K, tiles of Q, of dO and of dS (two where they fit), and P.
const fn split(name: &'static str, headdim: u32, block_rows: u32, step: u32, slots: u32, registers: u32) -> Variant {
    let scores = 2 * block_rows * step;
    Variant {
        name,
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        source: "turing/backward/split.cu",
        threads: 256,
        shared_bytes: 2 * headdim * block_rows + slots * (4 * headdim * step + scores) + scores,
        blocks_per_sm: 1,
        registers,
        ..SMALL[0]
    }
}

const SPLIT: [Variant; 5] = [
    // for the general flavor alone
    split("turing_bwd_split_64", 64, 128, 32, 2, 204),
    split("turing_bwd_96", 96, 128, 16, 2, 255),
    split("turing_bwd_128", 128, 128, 16, 2, 255),
    split("turing_bwd_192", 192, 64, 16, 2, 255),
    split("turing_bwd_256", 256, 64, 16, 1, 255),
];

/// One for all headdims, which it learns at run time: bound by memory. Four blocks an SM have 1024 threads with two or
/// more 16-byte loads each in flight.
const PREPARE: Variant = Variant {
    name: "turing_bwd_prepare",
    family: TURING,
    pass: Pass::BackwardPrepare,
    needs: Needs::NONE,
    source: "turing/backward/prepare.cu",
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
    Variant { name: "turing_bwd_finish", pass: Pass::BackwardFinish, source: "turing/backward/finish.cu", registers: 39, ..PREPARE };

pub const BACKWARD: &[Variant] = &[
    PREPARE,
    SMALL[0],
    SMALL[1],
    SPLIT[1],
    SPLIT[2],
    SPLIT[3],
    SPLIT[4],
    FINISH,
    PREPARE.covering(Needs::RAGGED, "turing_bwd_ragged_prepare", 56),
    SMALL[0].covering(Needs::RAGGED, "turing_bwd_ragged_32", 225),
    SMALL[1].covering(Needs::RAGGED, "turing_bwd_ragged_64", 255),
    SPLIT[1].covering(Needs::RAGGED, "turing_bwd_ragged_96", 255),
    SPLIT[2].covering(Needs::RAGGED, "turing_bwd_ragged_128", 255),
    SPLIT[3].covering(Needs::RAGGED, "turing_bwd_ragged_192", 255),
    SPLIT[4].covering(Needs::RAGGED, "turing_bwd_ragged_256", 255),
    FINISH.covering(Needs::RAGGED, "turing_bwd_ragged_finish", 39),
    SPLIT[0].covering(Needs::GENERAL, "turing_bwd_general_64", 255),
    SPLIT[1].covering(Needs::GENERAL, "turing_bwd_general_96", 255),
    SPLIT[2].covering(Needs::GENERAL, "turing_bwd_general_128", 255),
    SPLIT[3].covering(Needs::GENERAL, "turing_bwd_general_192", 255),
    SPLIT[4].covering(Needs::GENERAL, "turing_bwd_general_256", 255),
];
