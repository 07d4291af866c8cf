//! Rows of the fast forward kernels (`volta_fa::fwd_fast`). They multiply Q and K as int8 codes, and sum the products P V of a span (the
//! keys of one step) in fp16, because GeForce sums in fp32 at half rate. A prepare kernel first makes the codes of K and takes the largest
//! magnitudes of V. A warp takes queries (its rows) in tiles of 16; a row of the table is a kernel. Reasons: docs/design/turing-forward.md.

use super::super::variants::{Feature, FeatureSet, Pass, Source, Variant};
use super::family::TURING;

/// Template arguments: headdim, warps of a block, 16-row tiles of a warp, keys of a span, tiles of eight keys whose scores are in registers
/// together, and [`PREPARED_KEYS`]. Capitals are macros of the row's fields.
const FORWARD: Source =
    Source::new(&["turing/fast/forward.cuh"], "turing::FastForward<HEADDIM, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, STEP, 2, 256>");
const PREPARE: Source = Source::new(&["turing/fast/prepare.cuh"], "turing::FastPrepare<HEADDIM, BLOCK_ROWS, THREADS>");

/// Threads of every block: one moves 16 bytes of K's codes and 32 of V in each span.
const THREADS: u32 = 256;
/// Slots of the ring in shared memory through which K and V move, of one span each.
const SLOTS: u32 = 4;
/// Keys of a block of the prepare kernel, which the type in [`FORWARD`] names too.
const PREPARED_KEYS: u32 = 256;

/// (headdim, rows of a warp, keys of a span). Spans are as long as registers allow: a lane has 128, 64 and 16 bytes of probabilities (fp16,
/// rows * keys / 32 lanes), and 64, 128 and 128 registers of output.
const TILES: [(u32, u32, u32); 3] = [(64, 32, 64), (128, 32, 32), (256, 16, 16)];

/// Returns the forward kernel of a tile of [`TILES`].
fn forward((headdim, warp_rows, step): (u32, u32, u32)) -> Variant {
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows: THREADS / 32 * warp_rows,
        step,
        threads: THREADS,
        // a key in the ring has a byte of K and two of V for each column; then 32 bytes of row state for each four threads, and 48 bytes of
        // the block: addresses of K and V, and V's exponent
        shared_bytes: SLOTS * step * 3 * headdim + THREADS / 4 * 32 + 48,
        ..Variant::new(TURING, Pass::FastForward, FORWARD)
    }
}

/// Returns the prepare kernel: two blocks an SM, as many as registers allow at the largest headdim. Shared memory has a partial mean of K
/// of each row that the block reads at once.
fn prepare((headdim, ..): (u32, u32, u32)) -> Variant {
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows: PREPARED_KEYS,
        step: 64, // keys of a block of codes, which has scales of its own
        threads: THREADS,
        shared_bytes: THREADS * 8 * 4, // each thread's eight columns, as fp32
        blocks_per_sm: 2,
        ..Variant::new(TURING, Pass::FastPrepare, PREPARE)
    }
    .with_features(FeatureSet::of(&[Feature::Lengths]))
}

/// Returns plain kernels, kernels for lengths from memory and boolean masks (as the feature of a bias), and prepare kernels.
pub fn rows() -> impl Iterator<Item = Variant> {
    let features = FeatureSet::of(&[Feature::Lengths, Feature::Bias]);
    let generic = move |tile| forward(tile).with_features(features);
    TILES.into_iter().map(forward).chain(TILES.into_iter().map(generic)).chain(TILES.into_iter().map(prepare))
}
