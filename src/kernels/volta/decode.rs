//! The decode kernels: few queries a sequence over a KV cache.

use super::super::formats::FORMATS;
use super::super::shared::{self, DecodeTile};
use super::super::variants::{CacheFormat, FeatureSet, Pass, Source, Variant};
use super::family::VOLTA;

// STEP: rows of a warp
const DECODE: Source = Source::new(
    &["volta/decode/layout.cuh"],
    "decode::Block<decode::DecodeMainloop<volta::DecodeLayout, STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>>",
);
const MLA: Source = Source::new(&["volta/decode/mla.cuh"], "decode::Block<volta::MlaMainloop<THREADS / 32>>");

const SPARSE_MLA: Source = Source::new(
    &["volta/decode/sparse_mla.cuh"],
    "decode::Block<volta::MlaMainloop<THREADS / 32, volta::SparseTokens>, decode::WriteOutputAs<false>>",
)
.with_arguments("p.decode");

/// The indexer's kernels.
pub const INDEXER: Source = Source::new(&["volta/indexer.cuh"], "indexer::Kernel<volta::IndexerProducts, BLOCK_ROWS>");

/// Up to 16 rows are one warp's, if its registers hold them: at headdim 256 they hold 16, with keys, values and half of
/// the queries in shared memory. At headdim 512 two warps share the columns.
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

/// The one tile of each headdim for batch-invariant calls, whatever the number of rows.
const INVARIANT_TILES: [DecodeTile; 4] = [TILES[2], TILES[6], TILES[10], TILES[14]];

/// Returns true if the table has a kernel. Quantized caches have none of 64 rows. Of unquantized ones the tile of 32 rows takes
/// 16 rows in the same time, but for fp16 at headdim 512. With a tree, the mask of
/// draft tokens in speculative decoding, fp16's 64 rows of headdim 512 would spill.
fn is_built(v: &Variant) -> bool {
    let is_wide = v.headdim > 256 && !v.is_bf16;
    let is_wide_tree = is_wide && v.required_features != FeatureSet::NONE;
    match v.cache {
        CacheFormat::Unquantized => (v.block_rows != 16 || is_wide) && (v.block_rows < 64 || !is_wide_tree),
        _ => v.block_rows < 64,
    }
}

fn decode(format: CacheFormat, tile: DecodeTile) -> Variant {
    let row = shared::decode(VOLTA, DECODE, format, tile);
    match format.info().bits {
        4 => staged(row),
        _ => row,
    }
}

/// The kernel with stages of tokens where its outputs will be (csrc/decode/staged_loader.cuh); they may take more space.
/// At headdim 64 its registers leave room for two blocks with 16 rows a warp.
fn staged(row: Variant) -> Variant {
    let Variant { headdim, block_rows, step, threads, shared_bytes, .. } = row;
    let warps = threads / 32;
    // bytes; rows of fp32 outputs have 4 floats of padding
    let outputs = warps / shared::column_groups(headdim) * step * (headdim + 4) * 4;
    // A token has a row of keys, a row of values and four numbers. pitch: bytes of a row of int4 codes of one column group; those of
    // 128 bytes get 32 of padding (`kPitch` of staged_loader.cuh).
    let pitch = if headdim >= 256 { 160 } else { headdim / 2 };
    let tokens = if headdim == 64 { 32 } else { 16 };
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
    let trees = shared::with_tree(shared::in_both_types(of_format(CacheFormat::Unquantized)).into_iter());
    let invariant = FORMATS.iter().flat_map(move |row| {
        let of_tiles = INVARIANT_TILES.into_iter().map(|tile| decode(row.format, tile));
        match row.format {
            CacheFormat::Unquantized => shared::in_both_types(of_tiles),
            _ => of_tiles.collect(),
        }
    });
    let invariant = invariant.map(Variant::batch_invariant);
    of_formats.chain(trees).filter(is_built).chain(invariant)
}

/// Tiles of latents: rows of a block, rows whose output shared memory holds at a time, threads, blocks an SM. With 16 rows
/// memory bounds the kernel, and bytes in flight decide; with more, products and shared memory do.
type MlaTile = ([u32; 2], u32, u32);
const MLA_TILES: [MlaTile; 2] = [([32, 32], 256, 1), ([64, 32], 256, 1)];

/// Returns a kernel over latents of 576 columns. The first 512 are the values (csrc/volta/decode/mla.cuh). All
/// warps of a block have the same tokens: four share the columns, more than four the rows too.
fn mla(format: CacheFormat, ([block_rows, step], threads, blocks_per_sm): MlaTile) -> Variant {
    let warps = threads / 32;
    // a warp has nine operands of queries for each 16 rows: these are kept in shared memory for lack of registers
    let stored = match (block_rows * 4 / warps, blocks_per_sm) {
        (17.., _) => 7,
        (_, 3..) => 4,
        _ => 0,
    };
    // 512 bytes are an operand: 16 rows of 16 columns
    let queries = block_rows / 16 * 4 * stored * 512;
    // tokens and their scales; four parts of scores, probabilities and a factor of each row
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
        // In batch-invariant int8 kernels each row moves its own unit of probabilities (ProbabilityScale, csrc/decode/scales.cuh). Three
        // blocks of 16 rows an SM leave no registers for that.
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

/// Returns the kernels over latents that queries chose (csrc/volta/decode/sparse_mla.cuh): fp8 rows and rows of q's type, of 576 columns
/// and of 512, beside fp16 and bf16 queries.
pub fn sparse_mla_rows() -> impl Iterator<Item = Variant> {
    let formats = [CacheFormat::E4m3, CacheFormat::Unquantized];
    let kinds = formats.into_iter().flat_map(|format| [576, 512].map(|headdim| (format, headdim)));
    let rows = kinds.flat_map(|(format, headdim)| {
        SPARSE_TILES.into_iter().map(move |tile| Variant { headdim, pass: Pass::SparseMla, source: SPARSE_MLA, ..mla(format, tile) })
    });
    shared::in_both_types(rows).into_iter()
}
