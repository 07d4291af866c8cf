//! Rows of Volta's forward kernels, and the reasons for their tiles. docs/design/volta-forward.md has figures and what else was tried.
//!
//! A row of the table is a kernel; rows of a block, a warp or Q are queries. A block has `block_rows` queries and steps over `step` keys.
//! Plain kernels have no features, varlen and generic ones sets of src/kernels/features.rs; others require one or two features. Stream-K
//! kernels run on a grid that splits the keys of the last row tiles among blocks. A `...Grid` in a source is the C++ type that gives a
//! block its rows, heads and keys. A thread can have 255 registers, an SM 96 KB of shared memory and 64 Ki registers.

use super::super::shared;
use super::super::variants::{Feature, FeatureSet, Pass, Size, Source, Variant};
use super::family::VOLTA;

const REGISTER_Q: Source = Source::new(&["volta/forward/register_q.cuh"], "volta::ForwardRegisterQ<HEADDIM, HEADDIM_V, THREADS / 32>");
const REGISTER_Q_STREAM_K: Source = Source::new(
    &["volta/forward/register_q.cuh", "volta/forward/stream_k.cuh"],
    "volta::ForwardRegisterQ<HEADDIM, HEADDIM_V, THREADS / 32, volta::StreamKGrid<BLOCK_ROWS>>",
)
.with_arguments("p.forward, volta::StreamKGrid<BLOCK_ROWS>(p.stream_k)");
const REGISTER_Q_BLOCK_MASK: Source = Source::new(
    &["volta/forward/register_q.cuh", "volta/forward/block_mask.cuh"],
    "volta::ForwardRegisterQ<HEADDIM, HEADDIM_V, THREADS / 32, volta::BlockMaskGrid>",
)
.with_arguments("p.forward, volta::BlockMaskGrid(p)");

/// `volta/forward/register_q`: Q in registers; 4 warps of 32 rows, steps of 16 keys through a ring of 4 slots in shared memory. Rows of K
/// and V there are padded by 8 fp16 numbers.
const fn register_q(headdim: u32, blocks_per_sm: u32) -> Variant {
    let (slots, step, pad) = (4, 16, 8);
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows: 128,
        step,
        threads: 128,
        shared_bytes: slots * step * 2 * (headdim + pad + headdim + pad),
        blocks_per_sm,
        ..Variant::new(VOLTA, Pass::Forward, REGISTER_Q)
    }
}

const SHARED_Q: Source = Source::new(&["volta/forward/shared_q.cuh"], "volta::SharedQ<volta::DataParallelGrid>");
const SHARED_Q_STREAM_K: Source =
    Source::new(&["volta/forward/shared_q.cuh", "volta/forward/stream_k.cuh"], "volta::SharedQ<volta::StreamKGrid<BLOCK_ROWS>>")
        .with_arguments("p.forward, volta::StreamKGrid<BLOCK_ROWS>(p.stream_k)");
const SHARED_Q_BLOCK_MASK: Source =
    Source::new(&["volta/forward/shared_q.cuh", "volta/forward/block_mask.cuh"], "volta::SharedQ<volta::BlockMaskGrid>")
        .with_arguments("p.forward, volta::BlockMaskGrid(p)");

/// Rows of a block, keys of a step, and size.
type Tile = (u32, u32, Size);

/// `volta/forward/shared_q`: a block's rows of Q and one step of K and of V in shared memory, fp16.
const fn shared_q((headdim, headdim_v): (u32, u32), (block_rows, step, size): Tile, threads: u32, blocks_per_sm: u32) -> Variant {
    Variant {
        headdim,
        headdim_v,
        block_rows,
        step,
        size,
        threads,
        shared_bytes: 2 * (headdim * (block_rows + step) + headdim_v * step),
        blocks_per_sm,
        ..Variant::new(VOLTA, Pass::Forward, SHARED_Q)
    }
}

/// `shared_q` with one group of warps, of 16 rows each, in blocks of fewer than 128 rows. (`SharedQ` has two groups there, each for all
/// rows and half of a step's keys.) The numbers after the headdims: warps, 16-row tiles of a warp, keys of a step, groups.
const SHARED_Q_ONE_GROUP: Source =
    Source::new(&["volta/forward/shared_q.cuh"], "volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, 1, STEP, 1, BLOCKS_PER_SM>");

/// The same where each of the 4 warps has the rows of another head.
const SHARED_Q_HEADS: Source = Source::new(
    &["volta/forward/shared_q.cuh"],
    "volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, 1, STEP, 1, BLOCKS_PER_SM, volta::HeadGroupGrid<4>>",
);

const COLUMN_GROUPS: Source = Source::new(&["volta/forward/column_groups.cuh"], "volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS>");
const COLUMN_GROUPS_STREAM_K: Source = Source::new(
    &["volta/forward/column_groups.cuh", "volta/forward/stream_k.cuh"],
    "volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS, volta::StreamKGrid<BLOCK_ROWS>>",
)
.with_arguments("p.forward, volta::StreamKGrid<BLOCK_ROWS>(p.stream_k)");

/// `volta/forward/column_groups`: 8 warps, a group of them for each 32 rows. The warps of a group divide the columns. Shared memory has Q
/// except for 32 columns a warp (one group: 48) in registers, a tile of K and of V, and fp32 partial scores of 32 rows a warp.
/// Probabilities take the place of scores; with one group they have 2 KB of their own.
const fn column_groups(headdim: u32, (block_rows, size): (u32, Size)) -> Variant {
    let (step, groups) = (16, block_rows / 32);
    let one_group = groups == 1;
    // of Q in shared memory; 8 / groups: warps of a group
    let columns_of_q = headdim - 8 / groups * if one_group { 48 } else { 32 };
    let scores = 8 * 32 * step * 4; // 8 warps, 32 rows, fp32
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        size,
        shared_bytes: 2 * (block_rows * columns_of_q + 2 * step * headdim) + scores + if one_group { 2048 } else { 0 },
        ..Variant::new(VOLTA, Pass::Forward, COLUMN_GROUPS)
    }
}

/// 128 rows, for grids that fill the GPU: a tile of K and V serves many rows.
const LARGE: Tile = (128, 32, Size::Large);
/// 64 rows by one group of 4 warps, for full grids in which rows of larger blocks would be padding, or many of their keys hidden.
const MEDIUM: Tile = (64, 32, Size::Medium);
/// 64 rows by two groups of 4 warps. Each group takes 32 of the 64 keys of a step: four times as many warps for the same rows
/// as `LARGE` with 4 warps, for grids that would leave SMs or their schedulers idle.
const SMALL: Tile = (64, 64, Size::Small);

// Plain kernels, from which the others are made. Arguments of `shared_q`: headdims of q and v, tile, threads, blocks that an SM must hold;
// of `register_q`: headdim and these blocks; of `column_groups`: headdim, rows of a block, size. Comments count registers of a thread (a
// warp's fp32 tile of r rows by c columns: r * c / 32), and shared memory of a block.

/// 64 registers of Q and 64 of output: two blocks.
const PLAIN_64: Variant = register_q(64, 2);
/// 16 KB: four blocks.
const MEDIUM_64: Variant = Variant { source: SHARED_Q_ONE_GROUP, ..shared_q((64, 64), MEDIUM, 128, 4) };
/// The same for 4 heads, for short windows: 16 rows see 143 keys under a window of 128, in five steps; 64 rows see 191, in six.
const HEADS_64: Variant = Variant { source: SHARED_Q_HEADS, block_rows: 16, heads: 4, size: Size::Small, ..MEDIUM_64 };
/// 24 KB: two blocks.
const SMALL_64: Variant = shared_q((64, 64), SMALL, 256, 2);
/// 32 rows a warp: 128 registers of output; 48 KB: two blocks.
const PLAIN_128: Variant = shared_q((128, 128), LARGE, 128, 2);
/// 128 registers of output; exactly the 96 KB that a block can have.
const PLAIN_256: Variant = shared_q((256, 256), LARGE, 256, 1);
/// 128 registers of output, for 32 rows and a quarter of the columns; then half of the rows, for grids that leave SMs idle.
const PLAIN_512: [Variant; 2] = [column_groups(512, (64, Size::Large)), column_groups(512, (32, Size::Small))];
const PLAIN: [Variant; 13] = [
    register_q(32, 3),
    PLAIN_64,
    MEDIUM_64,
    SMALL_64,
    // 32 rows a warp: 96 registers of output; 36 KB: two blocks.
    shared_q((96, 96), LARGE, 128, 2),
    // As at 128, in 36 KB.
    shared_q((96, 96), SMALL, 256, 1),
    PLAIN_128,
    // Too many registers for two blocks of 256 threads; 48 KB.
    shared_q((128, 128), SMALL, 256, 1),
    // 32 rows of output or of Q would not leave room for two blocks. So 16 rows a warp and 8 warps: the same two warps a
    // scheduler, in one block that shares each tile of K and V: 68 and 72 KB.
    shared_q((192, 128), LARGE, 256, 1),
    shared_q((192, 192), LARGE, 256, 1),
    PLAIN_256,
    PLAIN_512[0],
    PLAIN_512[1],
];
/// The large kernels of four headdims. Where only these have variants, other headdims are padded to the next.
const PADDED: [Variant; 4] = [PLAIN_64, PLAIN_128, PLAIN_256, PLAIN_512[0]];

/// Returns the features that have kernels of their own at headdims 64 and 128: each of scores, and a bias with dropout.
fn required() -> impl Iterator<Item = FeatureSet> {
    let pair = FeatureSet::of(&[Feature::Bias, Feature::Dropout]);
    Feature::OF_SCORES.into_iter().map(|feature| FeatureSet::of(&[feature])).chain([pair])
}

/// Returns a kernel with all features. It has Q in shared memory at headdim 64 too, because features of scores need the registers. Every
/// step reads parameters of features, so large tiles pay.
fn generic(plain: Variant) -> Variant {
    if plain.source == COLUMN_GROUPS {
        return plain.with_features(FeatureSet::GENERIC);
    }
    // at headdim 96 a row is 12 chunks of 16 bytes, which 256 threads load 64 rows at a time (`TileStream` in csrc/tile.cuh)
    let tile = if plain.headdim == 96 { (128, 64, Size::Large) } else { LARGE };
    let blocks_per_sm = if plain.headdim == 64 { 2 } else { 1 };
    shared_q((plain.headdim, plain.headdim_v), tile, 256, blocks_per_sm).with_features(FeatureSet::GENERIC)
}

/// Returns the plain kernel with one or two features that a problem must use (`volta/forward/required_features.cuh`). They leave no
/// registers for lengths from memory or a bias in fp32: problems with these run the generic kernel.
fn with(required_features: FeatureSet, plain: Variant) -> Variant {
    // With Q in registers, a thread keeps 16 bytes of the bias and twice 16 of dropout in shared memory after the ring. 16 bytes of all
    // threads lie as in a ring slot of K, and take its size: a step of rows padded by 8 fp16 numbers.
    let [bias, dropout] = [Feature::Bias, Feature::Dropout].map(|feature| u32::from(required_features.has(feature)));
    let slots = if plain.source == REGISTER_Q { bias + 2 * dropout } else { 0 };
    let shared_bytes = plain.shared_bytes + slots * plain.step * 2 * (plain.headdim + 8);
    Variant { required_features, shared_bytes, ..plain }.with_features(required_features)
}

/// Returns the plain kernels that have generic versions: the large ones, and of headdim 512 both sizes.
fn complete() -> impl Iterator<Item = Variant> {
    PLAIN.into_iter().filter(|row| row.size == Size::Large || row.source == COLUMN_GROUPS)
}

/// Returns the kernel with lists of key blocks (`csrc/forward/block_mask.cuh`).
fn with_blocks(row: Variant, features: FeatureSet) -> Variant {
    let source = if row.source == REGISTER_Q { REGISTER_Q_BLOCK_MASK } else { SHARED_Q_BLOCK_MASK };
    row.with_blocks(features, source)
}

/// Kernels of block masks. They have three headdims, and other headdims are padded to the next. A block has the 128 rows of a list.
fn block_mask_rows() -> impl Iterator<Item = Variant> {
    let rows = [PLAIN_64, PLAIN_128, PLAIN_256];
    let plain = rows.into_iter().map(|row| with_blocks(row, FeatureSet::of(&[Feature::Fp32Output])));
    plain.chain(rows.into_iter().map(|row| with_blocks(generic(row), FeatureSet::GENERIC_BLOCKS)))
}

pub fn forward_rows() -> impl Iterator<Item = Variant> {
    // at headdims 192 and 256 varlen kernels take at most 2% more time than plain ones would
    let is_plain = |row: &Variant| !matches!(row.headdim_v, 192 | 256);
    PLAIN
        .into_iter()
        .filter(is_plain)
        // for short windows with sinks (gpt-oss): blocks of several heads, medium ones where a KV head has fewer, small ones for small
        // grids
        .chain(complete().chain([MEDIUM_64, HEADS_64, SMALL_64]).map(|row| row.with_features(FeatureSet::VARLEN)))
        .chain(PADDED.map(|row| row.with_features(FeatureSet::FP32_OUTPUT)))
        .chain(required().flat_map(|required| [PLAIN_64, PLAIN_128].map(|row| with(required, row))))
        // no generic kernels of headdims 32 and 192 x 128: padding costs less than more kernels in the library
        .chain(complete().filter(|row| row.headdim > 32 && row.headdim == row.headdim_v).map(generic))
        .chain(block_mask_rows())
}

/// Kernels of batch-invariant calls, in which a row's bits depend on no other row.
pub fn invariant_rows() -> impl Iterator<Item = Variant> {
    shared::invariant_forward(PLAIN, PADDED.map(generic))
}

/// The kernels of fp32 tensors, whose numbers are split into two fp16 parts, high and low. A tuple has headdim, warps, blocks of an SM, and
/// the bytes of a warp's row of Q's low parts in shared memory: 2 for each column, to 128, and 16 of padding. Q's high parts and the output
/// are headdim registers, to 128.
pub fn split_rows() -> impl Iterator<Item = Variant> {
    shared::split_forward(VOLTA, &[(64, 4, 3, 144), (128, 8, 1, 272), (256, 8, 1, 272), (512, 8, 1, 272)])
}

pub fn split_stream_k_rows() -> impl Iterator<Item = Variant> {
    shared::split_stream_k(VOLTA, split_rows())
}

/// Returns the same tile on a stream-K grid (`volta/forward/stream_k.cuh`). It always has sinks, which only the epilogue needs.
fn stream_k(row: Variant) -> Variant {
    let pass = if row.pass.info().features.contains(FeatureSet::PAGED) { Pass::PrefillStreamK } else { Pass::ForwardStreamK };
    let source = match row.source {
        REGISTER_Q => REGISTER_Q_STREAM_K,
        COLUMN_GROUPS => COLUMN_GROUPS_STREAM_K,
        _ => SHARED_Q_STREAM_K,
    };
    Variant { pass, source, ..row }.with_features(row.features.union(FeatureSet::of(&[Feature::Sinks])))
}

/// Kernels on stream-K grids, for large tiles; 192 by 192 has none. Headdim 32 has none: with three blocks an SM, a launch can have more
/// splits than kernel parameters hold (MAX_STREAM_K_SPLITS). Of the features of scores only a bias has kernels: problems with softcap or
/// ALiBi are causal, whose row tiles are uneven, and dropout needs the head in every step.
pub fn stream_k_rows() -> impl Iterator<Item = Variant> {
    let has = |row: &Variant| row.size == Size::Large && row.headdim > 32 && row.headdim_v != 192;
    let with_bias = [PLAIN_64, PLAIN_128].map(|row| with(FeatureSet::of(&[Feature::Bias]), row));
    let of_fp32 = [PLAIN_64, PLAIN_128, PLAIN_512[0]].map(|row| row.with_features(FeatureSet::of(&[Feature::Fp32Output])));
    PLAIN.into_iter().filter(has).chain(with_bias).chain(of_fp32).map(stream_k)
}

/// Prefill kernels: the same tiles over a KV cache, whose rows they find by a block table. They have four headdims, and other headdims are
/// padded to the next: chunks of prompts run here, not training.
pub fn prefill_rows() -> impl Iterator<Item = Variant> {
    let paged = |row: Variant| Variant { pass: Pass::Prefill, ..row };
    let rows = [PLAIN_64, PLAIN_128, PLAIN_256].into_iter().chain(PLAIN_512);
    let plain = rows.clone().chain([MEDIUM_64, HEADS_64, SMALL_64]).map(move |row| paged(row).with_features(FeatureSet::PAGED));
    // 64 rows of headdim 512 leave the generic kernel no registers for pages
    let rows = rows.filter(|row| (row.headdim, row.size) != (512, Size::Large));
    let stream_k_rows = [PLAIN_64, PLAIN_128, PLAIN_256].map(|row| stream_k(paged(row).with_features(FeatureSet::PAGED)));
    plain.chain(stream_k_rows).chain(rows.map(move |row| paged(generic(row)).with_features(FeatureSet::GENERIC.union(FeatureSet::PAGED))))
}
