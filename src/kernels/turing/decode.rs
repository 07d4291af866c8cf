//! The kernel table's rows (one [`Variant`] each) of Turing's decode kernels: attention of few queries a sequence over a KV cache. The rows
//! of a tile, block or warp are queries of all heads of a KV head. src/kernels/shared.rs has what the kernels share with Volta's.
//!
//! Warps "beside each other" take the same tokens for different rows; other warps of a block take other tokens. All store their results to
//! shared memory (a Turing SM has 64 KB), and the block merges them. So only blocks of 8 rows at headdims 64 and 128 divide the
//! tokens four ways; the others divide them two ways or not. Results that do not fit are stored half at a time (128x64, 256x64, 512x16 and
//! 512x32: headdim x rows), or a quarter (512x64). Below headdim 512, 32 rows take the time of 16, so no tile has 16. Four warps beside
//! each other share what they load, where a tile has as many (csrc/decode/mainloop.cuh). Above headdim 256, two warps divide the columns.

use super::super::shared::{self, DecodeTile};
use super::super::variants::{CacheFormat, Source, Variant};
use super::family::TURING;

// Capitals are the row's fields. STEP is the rows of a warp here. The numbers: 8-row tiles of a warp, warps beside each other, warps.
const DECODE: Source = Source::new(
    &["turing/decode/layout.cuh"],
    "decode::Block<decode::DecodeMainloop<turing::DecodeLayout, STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>>",
);

/// Source of the indexer's kernels, whose rows `shared::indexer` makes: they score tokens, and sparse attention takes the best.
pub const INDEXER: Source = Source::new(&["turing/indexer.cuh"], "indexer::Kernel<turing::IndexerProducts, BLOCK_ROWS>");

/// A tuple has the headdim, [rows of a block, rows of a warp], threads of a block, and the blocks that an SM must hold.
const TILES: [DecodeTile; 13] = [
    (64, [8, 8], 128, 4),
    (64, [32, 16], 128, 3),
    (64, [64, 16], 128, 3),
    (128, [8, 8], 128, 3),
    (128, [32, 16], 64, 3),
    (128, [64, 16], 256, 1),
    (256, [8, 8], 64, 3),
    (256, [32, 8], 128, 1),
    (256, [64, 16], 128, 1),
    (512, [8, 8], 64, 3),
    (512, [16, 8], 128, 2),
    (512, [32, 8], 256, 1),
    (512, [64, 16], 256, 1),
];

/// Tiles of batch-invariant calls. A row's bits depend on one property of a tile: in how many parts its warps divide the tokens. It is
/// warps * rows of a warp / rows of a block, above headdim 256 half of that. All tiles of a headdim have the same, so the planner may take
/// any. Headdim x rows: 64x32, 64x64, 128x32, 128x64, 256x32, 256x64, 512x32, 512x64.
const INVARIANT_TILES: [DecodeTile; 8] =
    [TILES[1], (64, [64, 16], 256, 1), TILES[4], (128, [64, 16], 128, 3), TILES[7], TILES[8], TILES[11], TILES[12]];

pub fn decode_rows() -> impl Iterator<Item = Variant> {
    // in both types: for fp16 and for bf16
    let of_tile = |tile| shared::decode(TURING, DECODE, CacheFormat::Unquantized, tile);
    let rows = shared::in_both_types(TILES.into_iter().map(of_tile));
    let invariant = shared::in_both_types(INVARIANT_TILES.into_iter().map(of_tile)).into_iter().map(Variant::batch_invariant);
    // calls with a tree mask (speculative decoding) and batch-invariant calls have kernels of their own
    rows.clone().into_iter().chain(shared::with_tree(rows.into_iter())).chain(invariant)
}
