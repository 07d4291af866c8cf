//! The kernel table's rows (one [`Variant`] each) of Volta's decode kernels: attention of few queries a sequence over a KV cache; also over
//! latents (multi-head latent attention, MLA), and over latents that each query chose (sparse MLA). The rows of a tile, block or warp are
//! queries of all heads of a KV head. A batch-invariant kernel gives such a row the same bits whatever the rest of the batch. An SM has
//! 96 KB of shared memory. src/kernels/shared.rs computes decode kernels' share of it, and has what they share with Turing's.

use super::super::formats::FORMATS;
use super::super::shared::{self, DecodeTile};
use super::super::variants::{CacheFormat, FeatureSet, Pass, Source, Variant};
use super::family::VOLTA;

// Capitals are the fields of the table's row. STEP is the rows of a warp here; over latents, the rows whose output shared memory holds at a
// time (`MlaTile`). The numbers: 8-row tiles of a warp, warps that have different rows and the same tokens, warps of a block.
const DECODE: Source = Source::new(
    &["volta/decode/layout.cuh"],
    "decode::Block<decode::DecodeMainloop<volta::DecodeLayout, STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>>",
);
const MLA: Source = Source::new(&["volta/decode/mla.cuh"], "decode::Block<volta::MlaMainloop<THREADS / 32>>");

// false: softmax_lse is that of the keys, without the sink
const SPARSE_MLA: Source = Source::new(
    &["volta/decode/sparse_mla.cuh"],
    "decode::Block<volta::MlaMainloop<THREADS / 32, volta::SparseTokens>, decode::WriteOutputAs<false>>",
)
.with_arguments("p.decode"); // the DecodeParams with which SparseMlaParams, its parameter block, begins; SparseTokens reads on

/// Source of the indexer's kernels: scores by which queries of sparse attention choose tokens.
pub const INDEXER: Source = Source::new(&["volta/indexer.cuh"], "indexer::Kernel<volta::IndexerProducts, BLOCK_ROWS>");

/// A warp has up to 16 rows, as many as its registers hold. At headdim 256 it has 16 in the tile of 64 rows alone, which keeps keys, values
/// and half of the queries in shared memory. At headdim 512 two warps share the columns. `decode` has other warps for caches of bytes.
/// A tuple has the headdim, [rows of a block, rows of a warp], threads of a block, and the blocks that an SM must hold.
const TILES: [DecodeTile; 16] = [
    (64, [8, 8], 128, 4),
    (64, [16, 16], 128, 3),
    (64, [32, 16], 128, 3),
    (64, [64, 16], 384, 1),
    (128, [8, 8], 128, 3),
    (128, [16, 16], 128, 2),
    (128, [32, 16], 128, 2),
    (128, [64, 16], 256, 1),
    (256, [8, 8], 128, 2),
    (256, [16, 8], 128, 2),
    (256, [32, 8], 128, 2),
    (256, [64, 16], 256, 1),
    (512, [8, 8], 128, 2),
    (512, [16, 8], 128, 2),
    (512, [32, 8], 256, 1),
    (512, [64, 16], 256, 1),
];

/// Tiles of batch-invariant calls. A row's bits depend on one property of a tile: in how many parts its warps divide the tokens. It is
/// warps * rows of a warp / rows of a block, above headdim 256 half of that. All tiles of a headdim have the same, so plans may take any.
const INVARIANT_TILES: [DecodeTile; 8] = [
    (64, [32, 8], 128, 4),
    (64, [64, 16], 128, 3),
    (128, [32, 8], 128, 4),
    (128, [64, 16], 128, 3),
    TILES[10], // (256, [32, 8], 128, 2)
    (256, [64, 16], 128, 2),
    TILES[14], // (512, [32, 8], 256, 1)
    TILES[15], // (512, [64, 16], 256, 1)
];

/// Returns true if the table has this kernel. Quantized caches have no tile of 64 rows. Unquantized ones have one of 16 rows only in fp16
/// at headdim 512: elsewhere the tile of 32 rows takes 16 in the same time. With a tree (the mask of draft tokens in speculative decoding),
/// fp16's 64 rows of headdim 512 would spill.
fn is_built(v: &Variant) -> bool {
    let is_wide_fp16 = v.headdim > 256 && !v.is_bf16;
    let is_wide_fp16_tree = is_wide_fp16 && v.required_features != FeatureSet::NONE;
    match v.cache {
        CacheFormat::Unquantized => (v.block_rows != 16 || is_wide_fp16) && (v.block_rows < 64 || !is_wide_fp16_tree),
        _ => v.block_rows < 64,
    }
}

/// Returns the decode kernel of a tile over caches of a format. Those of int4 load in stages. Over caches of bytes, 32 rows of headdim 256
/// are two warps of 16 rows. So each converted byte serves twice as many products. Shared memory holds their queries.
fn decode(format: CacheFormat, tile: DecodeTile) -> Variant {
    match format.info().bits {
        4 => staged(shared::decode(VOLTA, DECODE, format, tile)),
        8 if (tile.0, tile.1) == (256, [32, 8]) => shared::decode(VOLTA, DECODE, format, (256, [32, 16], tile.2, tile.3)),
        _ => shared::decode(VOLTA, DECODE, format, tile),
    }
}

/// Returns the kernel with stages of tokens in shared memory (csrc/decode/staged_loader.cuh), where its outputs will be after the loop; it
/// grows where stages take more space. At headdim 64 its registers leave room for two blocks with 16 rows a warp.
fn staged(row: Variant) -> Variant {
    let Variant { headdim, block_rows, step, threads, shared_bytes, .. } = row;
    let warps = threads / 32;
    // bytes; rows of fp32 outputs have 4 floats of padding
    let outputs = warps / shared::column_groups(headdim) * step * (headdim + 4) * 4;
    // A token has a row of keys, a row of values, and two scales and two zero points in fp32. pitch: bytes of a row of int4 codes of one
    // column group (at most 256 columns); those of 128 bytes get 32 of padding (`kPitch` of staged_loader.cuh).
    let pitch = if headdim >= 256 { 160 } else { headdim / 2 };
    let tokens = if headdim == 64 { 32 } else { 16 }; // of a warp
    let stages = warps * tokens * (2 * pitch + 16);
    let blocks_per_sm = if (headdim, block_rows > 8) == (64, true) { 2 } else { row.blocks_per_sm };
    Variant { shared_bytes: shared_bytes + stages.saturating_sub(outputs), blocks_per_sm, ..row }
}

pub fn decode_rows() -> impl Iterator<Item = Variant> {
    let of_format = |format| TILES.into_iter().map(move |tile| decode(format, tile));
    let of_formats = FORMATS.iter().flat_map(move |row| match row.format {
        CacheFormat::Unquantized => shared::in_both_types(of_format(row.format)),
        quantized => of_format(quantized).collect(),
    });
    // One tile serves drafts over quantized caches: 8 to 64 tokens, whose rows are those of all heads of a group. A T4 runs these kernels
    // too, and has no shared memory for 32 rows of headdim 512.
    let tile_of_drafts = |row: &Variant| row.block_rows == if row.headdim > 256 { 16 } else { 32 };
    let trees = shared::with_tree(of_formats.clone().filter(move |row| row.cache == CacheFormat::Unquantized || tile_of_drafts(row)));
    // batch-invariant calls over quantized caches: of each headdim the one tile of 32 rows
    let of_quantized = || TILES.into_iter().filter(|&(_, [block_rows, _], ..)| block_rows == 32);
    let invariant = FORMATS.iter().flat_map(move |row| match row.format {
        CacheFormat::Unquantized => shared::in_both_types(INVARIANT_TILES.into_iter().map(|tile| decode(row.format, tile))),
        quantized => of_quantized().map(|tile| decode(quantized, tile)).collect(),
    });
    let invariant = invariant.map(Variant::batch_invariant);
    of_formats.chain(trees).filter(is_built).chain(invariant)
}

/// A tile of latents: [rows of a block, rows whose output shared memory holds at a time], threads, blocks an SM. With 16 rows memory bounds
/// the kernel, and bytes in flight decide its speed; with more, products and shared memory do.
type MlaTile = ([u32; 2], u32, u32);
const MLA_TILES: [MlaTile; 2] = [([32, 32], 256, 1), ([64, 32], 256, 1)];

/// Returns a kernel over latents of 576 columns, whose first 512 are the values (csrc/volta/decode/mla.cuh). An iteration takes 16 tokens,
/// the same for all warps of a block: four warps divide the columns, more than four the rows too.
fn mla(format: CacheFormat, ([block_rows, step], threads, blocks_per_sm): MlaTile) -> Variant {
    let warps = threads / 32;
    // For each 16 rows a warp has nine operands of queries, of 16 columns each (576 / 4 columns). Registers hold 2 of them where a warp has
    // more than 16 rows, 5 where three blocks share an SM, else all (`kRegisterOperands` in mla.cuh). Shared memory has the rest.
    let warp_rows = block_rows * 4 / warps; // four warps have the same rows
    let stored = match (warp_rows, blocks_per_sm) {
        (17.., _) => 7,
        (_, 3..) => 4,
        _ => 0,
    };
    // an operand is 512 bytes: 16 rows of 16 columns, fp16
    let queries = block_rows / 16 * 4 * stored * 512;
    // 16 tokens (fp16, 16 bytes of padding) and their scales; of each row fp32 scores in four parts, a factor, fp16 probabilities
    let work = queries + 16 * (2 * 576 + 16) + 16 * 4 + block_rows * (4 * 16 * 4 + 16 * 2 + 4);
    // rows of fp32 outputs have 4 floats of padding
    let output = step * (512 + 4) * 4;
    // 16 bytes a row: its softmax state and RowInfo (csrc/decode/block.cuh); 256 bytes for the rest of the block
    let shared_bytes = work.max(output) + block_rows * 16 + 256;
    Variant {
        cache: format,
        headdim: 576,
        headdim_v: 512,
        block_rows,
        step,
        threads,
        shared_bytes,
        blocks_per_sm,
        ..Variant::new(VOLTA, Pass::DecodeMla, MLA)
    }
}

pub fn mla_rows() -> impl Iterator<Item = Variant> {
    FORMATS.iter().filter(|row| row.of_latents).flat_map(|row| {
        let first = if row.format.is_quantized() { ([16, 8], 128, 3) } else { ([16, 16], 128, 2) };
        let rows = [first].into_iter().chain(MLA_TILES).map(|tile| mla(row.format, tile));
        // In batch-invariant int8 kernels each row moves the unit of its probabilities by itself (ProbabilityScale,
        // csrc/decode/scales.cuh). Three blocks of 16 rows an SM leave no registers for that.
        let (_, threads, _) = first;
        let invariant = match row.format {
            CacheFormat::Int8 => [([16, 8], threads, 2)],
            _ => [first],
        };
        let invariant = invariant.into_iter().chain(MLA_TILES).map(|tile| mla(row.format, tile));
        rows.chain(invariant.map(Variant::batch_invariant))
    })
}

const SPARSE_TILES: [MlaTile; 3] = [([16, 8], 128, 2), MLA_TILES[0], MLA_TILES[1]];

/// Returns the kernels over latents that queries chose (csrc/volta/decode/sparse_mla.cuh): caches in fp8 and in q's type, of 576 columns
/// (DeepSeek V3.2) and of 512 (V4), for fp16 and bf16 queries.
pub fn sparse_mla_rows() -> impl Iterator<Item = Variant> {
    let formats = [CacheFormat::E4m3, CacheFormat::Unquantized];
    let kinds = formats.into_iter().flat_map(|format| [576, 512].map(|headdim| (format, headdim)));
    let rows = kinds.flat_map(|(format, headdim)| {
        SPARSE_TILES.into_iter().map(move |tile| Variant { headdim, pass: Pass::SparseMla, source: SPARSE_MLA, ..mla(format, tile) })
    });
    shared::in_both_types(rows).into_iter()
}
