//! The decode kernels: few queries a sequence over a KV cache.

use super::super::shared;
use super::{CacheFormat, Pass, Variant, VOLTA};

/// [`shared::decode`] of this family.
const fn decode(name: &'static str, headdim: u32, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    Variant { source: "volta/decode/decode.cu", ..shared::decode(VOLTA, name, headdim, rows, threads, blocks_per_sm, registers) }
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

/// int4. The steps that its warps lay down (csrc/decode/staged_loader.cuh) lie where outputs will, and may be longer.
const fn int4(name: &'static str, headdim: u32, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    let v = of_cache(CacheFormat::Int4, name, headdim, rows, threads, blocks_per_sm, registers);
    let warps = threads / 32;
    let outputs = warps * rows[1] * (headdim + 4) * 4;
    // of a token its keys and its values, each a row, and four numbers
    let pitch = if headdim == 256 { 160 } else { headdim / 2 };
    let tokens = if headdim == 64 { 32 } else { 16 };
    let steps = warps * tokens * (2 * pitch + 16);
    Variant { shared_bytes: if steps > outputs { v.shared_bytes + steps - outputs } else { v.shared_bytes }, ..v }
}

/// Rows up to 16 are a warp's, where they leave it registers: 16 of headdim 256 do where keys, values and half of the queries are in
/// shared memory. (16 rows of bf16 and headdim 256 are left to the tile of 32, whose warps share what becomes fp16.)
pub const DECODE: &[Variant] = &[
    decode("volta_decode_64x8", 64, [8, 8], 128, 4, 94),
    decode("volta_decode_64x16", 64, [16, 16], 128, 3, 128),
    decode("volta_decode_64x32", 64, [32, 16], 128, 3, 128),
    decode("volta_decode_64x64", 64, [64, 16], 384, 1, 122),
    decode("volta_decode_128x8", 128, [8, 8], 128, 3, 132),
    decode("volta_decode_128x16", 128, [16, 16], 128, 2, 194),
    decode("volta_decode_128x32", 128, [32, 16], 128, 2, 194),
    decode("volta_decode_128x64", 128, [64, 16], 256, 1, 183),
    decode("volta_decode_256x8", 256, [8, 8], 128, 2, 216),
    decode("volta_decode_256x16", 256, [16, 8], 128, 2, 216),
    decode("volta_decode_256x32", 256, [32, 8], 128, 2, 186),
    decode("volta_decode_256x64", 256, [64, 16], 256, 1, 255),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_64x8", 64, [8, 8], 128, 4, 96),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_64x16", 64, [16, 16], 128, 3, 139),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_64x32", 64, [32, 16], 128, 3, 128),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_64x64", 64, [64, 16], 384, 1, 146),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_128x8", 128, [8, 8], 128, 3, 167),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_128x16", 128, [16, 16], 128, 2, 230),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_128x32", 128, [32, 16], 128, 2, 230),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_128x64", 128, [64, 16], 256, 1, 195),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_256x8", 256, [8, 8], 128, 2, 255),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_256x32", 256, [32, 8], 128, 2, 223),
    of_cache(CacheFormat::Bf16, "volta_decode_bf16_256x64", 256, [64, 16], 256, 1, 255),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x8", 64, [8, 8], 128, 4, 110),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x16", 64, [16, 16], 128, 3, 158),
    of_cache(CacheFormat::Int8, "volta_decode_int8_64x32", 64, [32, 16], 128, 3, 159),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x8", 128, [8, 8], 128, 3, 156),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x16", 128, [16, 16], 128, 2, 224),
    of_cache(CacheFormat::Int8, "volta_decode_int8_128x32", 128, [32, 16], 128, 2, 225),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x8", 256, [8, 8], 128, 2, 193),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x16", 256, [16, 8], 128, 2, 194),
    of_cache(CacheFormat::Int8, "volta_decode_int8_256x32", 256, [32, 8], 128, 2, 194),
    int4("volta_decode_int4_64x8", 64, [8, 8], 128, 4, 122),
    int4("volta_decode_int4_64x16", 64, [16, 16], 128, 2, 172),
    int4("volta_decode_int4_64x32", 64, [32, 16], 128, 2, 173),
    int4("volta_decode_int4_128x8", 128, [8, 8], 128, 3, 156),
    int4("volta_decode_int4_128x16", 128, [16, 16], 128, 2, 242),
    int4("volta_decode_int4_128x32", 128, [32, 16], 128, 2, 244),
    int4("volta_decode_int4_256x8", 256, [8, 8], 128, 2, 208),
    int4("volta_decode_int4_256x16", 256, [16, 8], 128, 2, 210),
    int4("volta_decode_int4_256x32", 256, [32, 8], 128, 2, 210),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x8", 64, [8, 8], 128, 4, 108),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x16", 64, [16, 16], 128, 3, 153),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_64x32", 64, [32, 16], 128, 3, 155),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x8", 128, [8, 8], 128, 3, 152),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x16", 128, [16, 16], 128, 2, 216),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_128x32", 128, [32, 16], 128, 2, 218),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x8", 256, [8, 8], 128, 2, 188),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x16", 256, [16, 8], 128, 2, 189),
    of_cache(CacheFormat::E5m2, "volta_decode_e5m2_256x32", 256, [32, 8], 128, 2, 189),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x8", 64, [8, 8], 128, 4, 112),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x16", 64, [16, 16], 128, 3, 156),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_64x32", 64, [32, 16], 128, 3, 157),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x8", 128, [8, 8], 128, 3, 159),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x16", 128, [16, 16], 128, 2, 222),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_128x32", 128, [32, 16], 128, 2, 223),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x8", 256, [8, 8], 128, 2, 200),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x16", 256, [16, 8], 128, 2, 203),
    of_cache(CacheFormat::E4m3, "volta_decode_e4m3_256x32", 256, [32, 8], 128, 2, 203),
];

/// Latents of 576 columns, of which the first 512 are the values (csrc/volta/decode/mla.cuh). All warps of a block have the same
/// tokens: four share the columns, more than four the rows too. Of `rows` the first are `block_rows`, the second `step` those whose
/// output shared memory has room for at a time.
const fn latents(cache: CacheFormat, name: &'static str, rows: [u32; 2], threads: u32, blocks_per_sm: u32, registers: u32) -> Variant {
    let [block_rows, step] = rows;
    // outputs of one set of tokens in shared memory, as of one warp
    let v = of_cache(cache, name, 512, [step, step], 32, blocks_per_sm, registers);
    let warps = threads / 32;
    // of a warp's nine operands of queries for each 16 rows those that registers have no room for
    let stored = if block_rows * 4 / warps > 16 {
        7
    } else if blocks_per_sm > 2 {
        4
    } else {
        0
    };
    let queries = block_rows / 16 * 4 * stored * 512;
    // tokens and their scales; four parts of scores, probabilities and a factor of each row
    let work = queries + 16 * (2 * 576 + 16) + 16 * 4 + block_rows * (4 * 16 * 4 + 16 * 2 + 4);
    let output = step * (512 + 4) * 4;
    let shared_bytes = if work > output { work } else { output } + block_rows * 16 + 256;
    Variant { pass: Pass::DecodeMla, source: "volta/decode/mla.cu", headdim: 576, block_rows, step, threads, shared_bytes, ..v }
}

/// With 16 rows memory decides, and what is in flight; with more the time goes into products and shared memory.
pub const LATENTS: &[Variant] = &[
    latents(CacheFormat::Unquantized, "volta_mla_decode_16", [16, 16], 128, 2, 216),
    latents(CacheFormat::Unquantized, "volta_mla_decode_32", [32, 32], 256, 1, 202),
    latents(CacheFormat::Unquantized, "volta_mla_decode_64", [64, 32], 256, 1, 255),
    latents(CacheFormat::Int8, "volta_mla_decode_int8_16", [16, 8], 128, 3, 168),
    latents(CacheFormat::Int8, "volta_mla_decode_int8_32", [32, 32], 256, 1, 196),
    latents(CacheFormat::Int8, "volta_mla_decode_int8_64", [64, 32], 256, 1, 251),
    latents(CacheFormat::E5m2, "volta_mla_decode_e5m2_16", [16, 8], 128, 3, 168),
    latents(CacheFormat::E5m2, "volta_mla_decode_e5m2_32", [32, 32], 256, 1, 194),
    latents(CacheFormat::E5m2, "volta_mla_decode_e5m2_64", [64, 32], 256, 1, 247),
    latents(CacheFormat::E4m3, "volta_mla_decode_e4m3_16", [16, 8], 128, 3, 168),
    latents(CacheFormat::E4m3, "volta_mla_decode_e4m3_32", [32, 32], 256, 1, 192),
    latents(CacheFormat::E4m3, "volta_mla_decode_e4m3_64", [64, 32], 256, 1, 247),
];
