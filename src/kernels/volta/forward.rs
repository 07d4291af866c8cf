//! The forward kernels and the reasons for their tiles. docs/design/volta-forward.md has figures and what else was tried.
//! A thread can have 255 registers.

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

/// `volta/forward/register_q`: 4 warps of 32 rows, steps of 16 keys through a ring of 4 slots, whose rows are padded by 8
/// elements.
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

/// `volta/forward/shared_q`: a block's rows of Q and one step of K and of V in shared memory.
const fn shared_q(
    (headdim, headdim_v): (u32, u32),
    (block_rows, step, size): (u32, u32, Size),
    threads: u32,
    blocks_per_sm: u32,
) -> Variant {
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

const COLUMN_GROUPS: Source = Source::new(&["volta/forward/column_groups.cuh"], "volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS>");
const COLUMN_GROUPS_STREAM_K: Source = Source::new(
    &["volta/forward/column_groups.cuh", "volta/forward/stream_k.cuh"],
    "volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS, volta::StreamKGrid<BLOCK_ROWS>>",
)
.with_arguments("p.forward, volta::StreamKGrid<BLOCK_ROWS>(p.stream_k)");

/// `volta/forward/column_groups`: 8 warps, a group of them for each 32 rows. The warps of a group divide the columns. In shared memory Q
/// but for 32 columns a warp (one group: 48), a tile of K and of V, and partial scores, whose place probabilities take; with one group
/// these have 2 KB of their own.
const fn column_groups(headdim: u32, (block_rows, size): (u32, Size)) -> Variant {
    let (step, groups) = (16, block_rows / 32);
    let one_group = groups == 1;
    let columns_of_q = headdim - 8 / groups * if one_group { 48 } else { 32 };
    let scores = 8 * 32 * step * 4;
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

/// 128 rows, for grids that fill the GPU: each tile of K and V in shared memory serves many rows.
const LARGE: (u32, u32, Size) = (128, 32, Size::Large);
/// 64 rows by two groups of 4 warps. Each group takes 32 of the 64 keys of a step: four times as many warps for the same
/// rows, for grids that would leave SMs or their schedulers idle.
const SMALL: (u32, u32, Size) = (64, 64, Size::Small);

const PLAIN: [Variant; 12] = [
    register_q(32, 3),
    // 64 registers of Q and 64 of output: two blocks.
    register_q(64, 2),
    // 24 KB: two blocks.
    shared_q((64, 64), SMALL, 256, 2),
    // 32 rows a warp: 96 and, below, 128 registers of output; 36 and 48 KB: two blocks.
    shared_q((96, 96), LARGE, 128, 2),
    // As at 128, in 36 KB.
    shared_q((96, 96), SMALL, 256, 1),
    shared_q((128, 128), LARGE, 128, 2),
    // Too many registers for two blocks of 256 threads; 48 KB.
    shared_q((128, 128), SMALL, 256, 1),
    // 32 rows of output or of Q would not leave room for two blocks. So 16 rows a warp and 8 warps: the same two warps a
    // scheduler, in one block that shares each tile of K and V: 68 and 72 KB.
    shared_q((192, 128), LARGE, 256, 1),
    shared_q((192, 192), LARGE, 256, 1),
    // 128 registers of output; exactly the 96 KB that a block can have.
    shared_q((256, 256), LARGE, 256, 1),
    // 128 registers of output as above, for 32 rows and a quarter of the columns.
    column_groups(512, (64, Size::Large)),
    // For grids that leave SMs idle.
    column_groups(512, (32, Size::Small)),
];
const PLAIN_64: Variant = PLAIN[1];
const PLAIN_128: Variant = PLAIN[5];
const PLAIN_256: Variant = PLAIN[9];
const PLAIN_512: [Variant; 2] = [PLAIN[10], PLAIN[11]];

/// Returns the sets of features with kernels of their own, at headdims 64 and 128: training asks for a mask and dropout together.
fn required() -> impl Iterator<Item = FeatureSet> {
    let pair = FeatureSet::of(&[Feature::Bias, Feature::Dropout]);
    Feature::OF_SCORES.into_iter().map(|feature| FeatureSet::of(&[feature])).chain([pair])
}

/// Returns a kernel with all features. It has Q in shared memory at headdim 64 too, because scores need the registers. It
/// computes what changes scores from parameters at every step, so it has large tiles too.
fn generic(plain: Variant) -> Variant {
    if plain.source == COLUMN_GROUPS {
        return plain.with_features(FeatureSet::GENERIC);
    }
    // 256 threads take 64 rows of 12 chunks at once (TileStream)
    let tile = if plain.headdim == 96 { (128, 64, Size::Large) } else { LARGE };
    let blocks_per_sm = if plain.headdim == 64 { 2 } else { 1 };
    shared_q((plain.headdim, plain.headdim_v), tile, 256, blocks_per_sm).with_features(FeatureSet::GENERIC)
}

/// Returns the plain kernel with one or two features that a problem must use (`volta/forward/required_features.cuh`). They leave no
/// registers for lengths from memory or a bias in fp32: problems with these run the generic kernel.
fn with(required_features: FeatureSet, plain: Variant) -> Variant {
    let has = |feature| required_features.contains(FeatureSet::of(&[feature]));
    // with Q in registers, 16 bytes of a lane's own for the bias and 32 for dropout, in rows of K
    let chunks = if plain.headdim > 64 { 0 } else { has(Feature::Bias) as u32 + 2 * has(Feature::Dropout) as u32 };
    let shared_bytes = plain.shared_bytes + chunks * plain.step * 2 * (plain.headdim + 8);
    Variant { required_features, shared_bytes, ..plain }.with_features(required_features)
}

/// Returns the rows that have kernels with lengths from memory and with all features: the large ones, and of headdim 512 both.
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
    let plain = rows.into_iter().map(|row| with_blocks(row, FeatureSet::NONE));
    plain.chain(rows.into_iter().map(|row| with_blocks(generic(row), FeatureSet::GENERIC_BLOCKS)))
}

pub fn forward_rows() -> impl Iterator<Item = Variant> {
    // at headdims 192 and 256 varlen kernels take at most 2% more time than plain ones would
    let is_plain = |row: &Variant| !matches!(row.headdim_v, 192 | 256);
    PLAIN
        .into_iter()
        .filter(is_plain)
        .chain(complete().map(|row| row.with_features(FeatureSet::VARLEN)))
        .chain(required().flat_map(|required| [PLAIN_64, PLAIN_128].map(|row| with(required, row))))
        // padding costs headdim 32 and values of 128 columns less than kernels
        .chain(complete().filter(|row| row.headdim > 32 && row.headdim == row.headdim_v).map(generic))
        .chain(block_mask_rows())
}

/// The kernels of batch-invariant calls: of each headdim one for calls without features of scores, and one for the others.
pub fn invariant_rows() -> impl Iterator<Item = Variant> {
    let is_large = |row: &Variant| row.size == Size::Large && !matches!((row.headdim, row.headdim_v), (32, _) | (192, 192));
    let varlen = PLAIN.into_iter().filter(is_large).map(|row| row.with_features(FeatureSet::VARLEN));
    varlen.chain([PLAIN_64, PLAIN_128, PLAIN_256, PLAIN_512[0]].map(generic)).map(Variant::batch_invariant)
}

/// The kernels of fp32 tensors. A tuple has the headdim, the warps, the blocks of an SM, and the bytes of a row of Q's low parts in shared
/// memory. The high parts of Q and the output are 64 registers at headdim 64, and 128 at 128. The low parts of Q lie in
/// shared memory.
pub fn split_rows() -> impl Iterator<Item = Variant> {
    const fn source(kernel: &'static str) -> Source {
        Source::new(&["volta/forward/split.cuh"], kernel)
    }
    const fn listed(kernel: &'static str) -> Source {
        Source::new(&["volta/forward/split.cuh", "forward/split_block_mask.cuh"], kernel)
            .with_arguments("p.forward, split::ListedKeys(p.blocks)")
    }
    const SPLIT: [Source; 2] = [source("split::Forward<volta::Split>"), source("split::WideForward<volta::Split>")];
    const LISTED: [Source; 2] =
        [listed("split::Forward<volta::Split, split::ListedKeys>"), listed("split::WideForward<volta::Split, split::ListedKeys>")];
    shared::split_forward(VOLTA, SPLIT, LISTED, &[(64, 4, 3, 144), (128, 8, 1, 272), (256, 8, 1, 272), (512, 8, 1, 272)])
}

/// Returns the same tile on a stream-K grid (`volta/forward/stream_k.cuh`). Sinks are code of the epilogue alone.
fn stream_k(row: Variant) -> Variant {
    let pass = if row.pass.info().features.contains(FeatureSet::PAGED) { Pass::PrefillStreamK } else { Pass::ForwardStreamK };
    let source = match row.source {
        REGISTER_Q => REGISTER_Q_STREAM_K,
        COLUMN_GROUPS => COLUMN_GROUPS_STREAM_K,
        _ => SHARED_Q_STREAM_K,
    };
    Variant { pass, source, ..row }.with_features(row.features.union(FeatureSet::of(&[Feature::Sinks])))
}

/// Headdim 32 has none: with three blocks an SM, a launch can have more splits than kernel parameters hold (MAX_STREAM_K_SPLITS). Of the
/// features of scores a bias has kernels: the others' problems are causal, and dropout needs the head in every step.
pub fn stream_k_rows() -> impl Iterator<Item = Variant> {
    let has = |row: &Variant| row.size == Size::Large && row.headdim > 32 && row.headdim_v != 192;
    let with_bias = [PLAIN_64, PLAIN_128].map(|row| with(FeatureSet::of(&[Feature::Bias]), row));
    PLAIN.into_iter().filter(has).chain(with_bias).map(stream_k)
}

/// Kernels of a KV cache: the same tiles, with rows through a block table. They have four headdims, and
/// other headdims are padded to the next: chunks of prompts run here, not training.
pub fn prefill_rows() -> impl Iterator<Item = Variant> {
    let paged = |row: Variant| Variant { pass: Pass::Prefill, ..row };
    let rows = [PLAIN_64, PLAIN_128, PLAIN_256].into_iter().chain(PLAIN_512);
    let plain = rows.clone().map(move |row| paged(row).with_features(FeatureSet::PAGED));
    // 64 rows of headdim 512 leave the generic kernel no registers for pages
    let rows = rows.filter(|row| (row.headdim, row.size) != (512, Size::Large));
    let stream_k_rows = [PLAIN_64, PLAIN_128, PLAIN_256].map(|row| stream_k(paged(row).with_features(FeatureSet::PAGED)));
    plain.chain(stream_k_rows).chain(rows.map(move |row| paged(generic(row)).with_features(FeatureSet::GENERIC.union(FeatureSet::PAGED))))
}
