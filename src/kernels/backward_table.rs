//! The backward kernels. docs/backward-kernel.md derives the shapes; "registers" are those of the sm_70
//! machine code, of the 255 that one thread can have.

use super::variants::*;

pub const BACKWARD: &[Variant] = &[
    // One for all headdims, which it learns at run time: bound by memory. 54 registers; four blocks an SM
    // have 1024 threads with two or more 16-byte loads each in flight.
    Variant {
        name: "volta_bwd_prepare",
        family: VOLTA,
        pass: Pass::BackwardPrepare,
        source: "volta/backward_prepare.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 0,
        threads: 256,
        shared_bytes: 0,
        blocks_per_sm: 4,
    },
    // Four warps with 32 keys each: dV and dK are 2 x 32 registers of a thread, so 198 in all and two
    // blocks an SM, as for headdim 64. Shared: K, V 16 KB, Q, dO 4 KB, P or dS 8 KB.
    Variant {
        name: "volta_bwd_32",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_small.cu",
        headdim: 32,
        headdim_v: 32,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 28672,
        blocks_per_sm: 2,
    },
    // dV and dK are 2 x 64 registers, S and dP 2 x 32, operands 32: 255 and no spill. Two blocks an SM by
    // registers, and by shared memory: K, V 32 KB, Q, dO 8 KB, P or dS 8 KB.
    Variant {
        name: "volta_bwd_64",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_small.cu",
        headdim: 64,
        headdim_v: 64,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 49152,
        blocks_per_sm: 2,
    },
    // Two roles of four warps: a warp has 32 keys of dV or of dK, 96 registers; 231 in all. One block an
    // SM. K, V 48 KB, Q, dO 12 KB, P and dS 16 KB. Six of the eight warps have a part of dQ.
    Variant {
        name: "volta_bwd_96",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_split.cu",
        headdim: 96,
        headdim_v: 96,
        block_rows: 128,
        step: 32,
        threads: 256,
        shared_bytes: 77824,
        blocks_per_sm: 1,
    },
    // The same with 128 registers of dV or dK: 255 in all, and all of the 96 KB: K, V 64, Q, dO 16, P and
    // dS 16.
    Variant {
        name: "volta_bwd_128",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_split.cu",
        headdim: 128,
        headdim_v: 128,
        block_rows: 128,
        step: 32,
        threads: 256,
        shared_bytes: 98304,
        blocks_per_sm: 1,
    },
    // 64 keys, so that K and V leave room: 48 KB, Q, dO 24 KB, P and dS 8 KB. dV or dK 96 registers, 237.
    Variant {
        name: "volta_bwd_192",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_split.cu",
        headdim: 192,
        headdim_v: 192,
        block_rows: 64,
        step: 32,
        threads: 256,
        shared_bytes: 81920,
        blocks_per_sm: 1,
    },
    // 64 keys in steps of 16 queries: K, V 64 KB, Q, dO 16 KB, P and dS 8 KB (rows padded to 32 queries);
    // 32 queries would need 104 KB. dV or dK 128 registers, 239 in all.
    Variant {
        name: "volta_bwd_256",
        family: VOLTA,
        pass: Pass::Backward,
        source: "volta/backward_split.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 16,
        threads: 256,
        shared_bytes: 90112,
        blocks_per_sm: 1,
    },
    // As the first: any headdim. 34 registers.
    Variant {
        name: "volta_bwd_finish",
        family: VOLTA,
        pass: Pass::BackwardFinish,
        source: "volta/backward_finish.cu",
        headdim: 256,
        headdim_v: 256,
        block_rows: 64,
        step: 0,
        threads: 256,
        shared_bytes: 0,
        blocks_per_sm: 4,
    },
];
