//! The decode kernels: few queries a sequence over a KV cache. docs/decode-kernels.md has what was tried.
//!
//! `block_rows` are queries of all heads of a key head, `step` those of a warp; warps beside each other take the same tokens for other
//! rows: of two the second finds the bytes in the first cache, more of them share what each loads (csrc/decode/shared_steps.cuh). What decides is how many bytes an SM has in flight, and so registers:
//! a step of a warp is eight tokens, 32 * headdim bytes. Shared memory holds what warps with other tokens found out, in fp32, for the
//! merge behind the loop.

use super::{CacheFormat, Needs, Pass, Variant, VOLTA};

/// Of `rows` the first are `block_rows`, the second `step`.
pub const fn decode(name: &'static str, headdim: u32, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    let [block_rows, step] = rows;
    let parts = threads / 32 * step / block_rows;
    Variant {
        name,
        family: VOLTA,
        pass: Pass::Decode,
        needs: Needs::NONE,
        requires: Needs::NONE,
        cache: CacheFormat::Float,
        source: "volta/decode/decode.cu",
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        // csrc/decode/block.cuh: rows of outputs, four floats longer than columns, two floats of states for each, two of the row; and
        // where the block is
        shared_bytes: (parts * (headdim + 4 + 2) + 2) * block_rows * 4 + 256,
        blocks_per_sm,
        registers,
    }
}

/// The same of another cache.
const fn of_cache(
    cache: CacheFormat,
    name: &'static str,
    headdim: u32,
    rows: [u32; 2],
    threads: u32,
    blocks_per_sm: u32,
    registers: u32,
) -> Variant {
    Variant { cache, ..decode(name, headdim, rows, threads, blocks_per_sm, registers) }
}

/// Rows up to 16 are a warp's, where they leave it registers: 16 of headdim 256 would not.
pub const DECODE: &[Variant] = &[
    decode("volta_decode_64x8", 64, [8, 8], 128, 4, 110),
    decode("volta_decode_64x16", 64, [16, 16], 128, 3, 146),
    decode("volta_decode_64x32", 64, [32, 16], 128, 3, 144),
    decode("volta_decode_64x64", 64, [64, 16], 384, 1, 136),
    decode("volta_decode_128x8", 128, [8, 8], 128, 3, 148),
    decode("volta_decode_128x16", 128, [16, 16], 128, 2, 210),
    decode("volta_decode_128x32", 128, [32, 16], 128, 2, 210),
    decode("volta_decode_128x64", 128, [64, 16], 256, 1, 199),
    decode("volta_decode_256x8", 256, [8, 8], 128, 2, 225),
    decode("volta_decode_256x16", 256, [16, 8], 128, 2, 225),
    decode("volta_decode_256x32", 256, [32, 8], 128, 2, 209),
    decode("volta_decode_256x64", 256, [64, 8], 256, 1, 202),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_64x8", 64, [8, 8], 128, 4, 126),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_64x16", 64, [16, 16], 128, 3, 152),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_64x32", 64, [32, 16], 128, 3, 152),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_64x64", 64, [64, 16], 384, 1, 154),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_128x8", 128, [8, 8], 128, 3, 168),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_128x16", 128, [16, 16], 128, 2, 242),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_128x32", 128, [32, 16], 128, 2, 242),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_128x64", 128, [64, 16], 256, 1, 235),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_256x8", 256, [8, 8], 128, 2, 254),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_256x16", 256, [16, 8], 128, 2, 254),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_256x32", 256, [32, 8], 128, 2, 254),
    of_cache(CacheFormat::Bfloat, "volta_decode_bf16_256x64", 256, [64, 8], 256, 1, 254),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x8", 64, [8, 8], 128, 4, 123),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x16", 64, [16, 16], 128, 3, 168),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x32", 64, [32, 16], 128, 3, 168),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x8", 128, [8, 8], 128, 3, 165),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x16", 128, [16, 16], 128, 2, 237),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x32", 128, [32, 16], 128, 2, 238),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x8", 256, [8, 8], 128, 2, 206),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x16", 256, [16, 8], 128, 2, 207),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x32", 256, [32, 8], 128, 2, 207),
    of_cache(CacheFormat::Int4, "volta_decode_int4_64x8", 64, [8, 8], 128, 4, 127),
    of_cache(CacheFormat::Int4, "volta_decode_int4_64x16", 64, [16, 16], 128, 2, 184),
    of_cache(CacheFormat::Int4, "volta_decode_int4_64x32", 64, [32, 16], 128, 2, 185),
    of_cache(CacheFormat::Int4, "volta_decode_int4_128x8", 128, [8, 8], 128, 3, 159),
    of_cache(CacheFormat::Int4, "volta_decode_int4_128x16", 128, [16, 16], 128, 2, 240),
    of_cache(CacheFormat::Int4, "volta_decode_int4_128x32", 128, [32, 16], 128, 2, 241),
    of_cache(CacheFormat::Int4, "volta_decode_int4_256x8", 256, [8, 8], 128, 2, 194),
    of_cache(CacheFormat::Int4, "volta_decode_int4_256x16", 256, [16, 8], 128, 2, 194),
    of_cache(CacheFormat::Int4, "volta_decode_int4_256x32", 256, [32, 8], 128, 2, 194),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x8", 64, [8, 8], 128, 4, 122),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x16", 64, [16, 16], 128, 3, 166),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x32", 64, [32, 16], 128, 3, 168),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x8", 128, [8, 8], 128, 3, 165),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x16", 128, [16, 16], 128, 2, 231),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x32", 128, [32, 16], 128, 2, 233),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x8", 256, [8, 8], 128, 2, 200),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x16", 256, [16, 8], 128, 2, 202),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x32", 256, [32, 8], 128, 2, 202),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x8", 64, [8, 8], 128, 4, 125),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x16", 64, [16, 16], 128, 3, 168),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x32", 64, [32, 16], 128, 3, 168),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x8", 128, [8, 8], 128, 3, 163),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x16", 128, [16, 16], 128, 2, 236),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x32", 128, [32, 16], 128, 2, 237),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x8", 256, [8, 8], 128, 2, 210),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x16", 256, [16, 8], 128, 2, 212),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x32", 256, [32, 8], 128, 2, 212),
];

/// Latents of 576 columns, of which the first 512 are the values. All warps of a block have the same tokens, and columns of their own.
const fn latents(name: &'static str, source: &'static str, block_rows: u32, threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    // outputs of one set of tokens in shared memory, as of one warp
    let v = decode(name, 512, [block_rows, block_rows], 32, blocks_per_sm, registers);
    Variant { pass: Pass::DecodeLatents, source, headdim: 576, threads, ..v }
}

/// With 16 rows memory decides, and what is in flight; with more the time goes into arithmetic and shuffles.
pub const LATENTS: &[Variant] = &[
    latents("volta_latents_16", "volta/decode/latents.cu", 16, 128, 2, 231),
    latents("volta_latents_32", "volta/decode/latents_pipelined.cu", 32, 256, 1, 222),
];
