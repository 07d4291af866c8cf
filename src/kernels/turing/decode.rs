//! The decode kernels, as Volta's (`src/kernels/shared/decode.rs`). A Turing SM has 64 KB of shared memory for what warps of other tokens
//! found out: so blocks whose rows are long or many have two warps. Of headdim 256, warps beside each other take more than eight rows.
//! Four beside each other share what they load, and where there are 64 rows lay down half of what they found out at a time.

use super::super::shared;
use super::{CacheFormat, Variant, TURING};

/// [`shared::decode`] of this family.
const fn decode(name: &'static str, headdim: u32, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant { source: "turing/decode/decode.cu", ..shared::decode(TURING, name, headdim, rows, threads, blocks_per_sm, registers) }
}

/// The same of a cache of bf16.
const fn bfloat(name: &'static str, headdim: u32, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant { cache: CacheFormat::Bf16, ..decode(name, headdim, rows, threads, blocks_per_sm, registers) }
}

pub const DECODE: &[Variant] = &[
    decode("turing_decode_64x8", 64, [8, 8], 128, 4, 91),
    decode("turing_decode_64x16", 64, [16, 16], 128, 3, 117),
    decode("turing_decode_64x32", 64, [32, 16], 128, 3, 120),
    decode("turing_decode_64x64", 64, [64, 16], 128, 3, 113),
    decode("turing_decode_128x8", 128, [8, 8], 128, 3, 139),
    decode("turing_decode_128x16", 128, [16, 16], 64, 3, 183),
    decode("turing_decode_128x32", 128, [32, 16], 64, 3, 184),
    decode("turing_decode_128x64", 128, [64, 16], 256, 1, 176),
    decode("turing_decode_256x8", 256, [8, 8], 64, 3, 233),
    decode("turing_decode_256x16", 256, [16, 8], 64, 3, 235),
    decode("turing_decode_256x32", 256, [32, 8], 128, 1, 210),
    decode("turing_decode_256x64", 256, [64, 16], 128, 1, 242),
    bfloat("turing_decode_bf16_64x8", 64, [8, 8], 128, 4, 94),
    bfloat("turing_decode_bf16_64x16", 64, [16, 16], 128, 3, 128),
    bfloat("turing_decode_bf16_64x32", 64, [32, 16], 128, 3, 128),
    bfloat("turing_decode_bf16_64x64", 64, [64, 16], 128, 3, 129),
    bfloat("turing_decode_bf16_128x8", 128, [8, 8], 128, 3, 167),
    bfloat("turing_decode_bf16_128x16", 128, [16, 16], 64, 3, 222),
    bfloat("turing_decode_bf16_128x32", 128, [32, 16], 64, 3, 226),
    bfloat("turing_decode_bf16_128x64", 128, [64, 16], 256, 1, 196),
    bfloat("turing_decode_bf16_256x8", 256, [8, 8], 64, 3, 255),
    bfloat("turing_decode_bf16_256x16", 256, [16, 8], 64, 3, 255),
    bfloat("turing_decode_bf16_256x32", 256, [32, 8], 128, 1, 213),
    bfloat("turing_decode_bf16_256x64", 256, [64, 16], 128, 1, 254),
];
