//! Rows of the kernel tables for sources that no family owns (`csrc/shared`), and what rows of two families have in common.
//! Each function takes the family that compiles the source, and returns its row or rows.

use super::variants::{CacheFormat, Family, Feature, FeatureSet, Pass, Source, Variant};

const APPEND: Source = Source::new(&["shared/append/append.cuh"], "append::Kernel");
const DEQUANTIZE: Source = Source::new(&["shared/dequantize/dequantize.cuh"], "dequantize::Kernel");
const CAST: Source = Source::new(&["shared/cast/cast.cuh"], "cast::Kernel");
const SELECT: Source = Source::new(&["shared/select/select.cuh"], "select::Kernel");
const MERGE: Source = Source::new(&["shared/merge/merge.cuh"], "merge::Kernel");

/// Returns the kernel that appends to caches of one format, for all headdims: it reads the headdim from its parameters.
/// In decode a block has one token of a KV head and of its query heads, about 400 words of 4 bytes: two for each
/// thread, all in flight at once. Quantizing takes more registers than four blocks an SM would leave.
pub fn append(family: Family, cache: CacheFormat) -> Variant {
    let blocks_per_sm = if cache.is_quantized() { 3 } else { 4 };
    Variant { cache, block_rows: 4, blocks_per_sm, ..Variant::new(family, Pass::Append, APPEND) }
}

/// Returns the kernel for all headdims and formats, which it reads from its parameters. Memory bounds it: four blocks
/// an SM are 1024 threads, each with eight columns at a time. Its step is the longest of the kernels that read its output.
pub fn dequantize(family: Family) -> Variant {
    Variant { block_rows: 64, step: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Dequantize, DEQUANTIZE) }
}

/// Returns the kernel that casts bf16 tensors to fp16, for all headdims, which it reads from its parameters. Memory bounds it: four blocks
/// an SM are 1024 threads, each with 16 bytes of two rows at a time.
pub fn cast(family: Family) -> Variant {
    Variant { block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Cast, CAST) }
}

/// Returns the kernel before sparse MLA. A block has the list of a query, or as many of its heads as there are warps. Shared memory has a
/// number for each warp.
pub fn select(family: Family) -> Variant {
    Variant { block_rows: 1, blocks_per_sm: 4, shared_bytes: 32, ..Variant::new(family, Pass::SparseSelect, SELECT) }
}

/// Returns the kernel for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM are
/// 1024 threads with two 16-byte loads each (fp32: four) at a time.
pub fn merge(family: Family) -> Variant {
    let block_rows = 32;
    let shared_bytes = 2 * block_rows * 4; // two weights of each row
    Variant { block_rows, shared_bytes, blocks_per_sm: 4, ..Variant::new(family, Pass::Merge, MERGE) }
}

/// Returns the kernels of the indexer (csrc/indexer/indexer.cuh), for 256 rows (four queries of 64 heads) and for 64. Two buffers of 64
/// keys have rows of 17 chunks. Beside them are four buffers of sums and of scales, eight ranges and twelve numbers of the schedule.
pub fn indexer(family: Family, source: Source) -> impl Iterator<Item = Variant> {
    [256, 64].into_iter().map(move |block_rows| Variant {
        headdim: 128,
        headdim_v: 128,
        block_rows,
        step: 64,
        shared_bytes: 2 * 64 * 17 * 16 + 4 * block_rows / 32 * 64 * 4 + 4 * 64 * 4 + 8 * 8 + 12 * 4,
        ..Variant::new(family, Pass::Indexer, source)
    })
}

// ---- fp32 -----------------------------------------------------------------------------------------

/// Returns the kernels of fp32 tensors (csrc/forward/split.cuh), which step 16 keys. Rows in shared memory have high and low parts, and a
/// chunk of padding; two slots of K and V. `q_bytes`: of a row of Q that lies there too. Two sources: for headdims to 128, and above, where
/// a warp has 128 columns, and a slot one part of K or V; sums of scores take a kilobyte of each warp. `listed`: the same with block masks,
/// which have three headdims as those of fp16, and generic kernels alone.
pub fn split_forward(
    family: Family,
    [narrow, wide]: [Source; 2],
    listed: [Source; 2],
    tiles: &[(u32, u32, u32, u32)],
) -> impl Iterator<Item = Variant> + '_ {
    let row = move |&(headdim, warps, blocks_per_sm, q_bytes): &(u32, u32, u32, u32)| {
        let is_wide = headdim > 128;
        let ring = if is_wide { 2 * 16 * (2 * headdim + 16) + 1024 * warps } else { 2 * 2 * 16 * (4 * headdim + 16) };
        Variant {
            headdim,
            headdim_v: headdim,
            block_rows: if is_wide { 16 * warps / (headdim / 128) } else { 16 * warps },
            step: 16,
            threads: 32 * warps,
            shared_bytes: ring + 16 * warps * q_bytes,
            blocks_per_sm,
            ..Variant::new(family, Pass::ForwardSplit, if is_wide { wide } else { narrow })
        }
    };
    // to 128 the other features do not pay for dropout
    let without_dropout = FeatureSet::GENERIC.without(FeatureSet::of(&[Feature::Dropout]));
    let features = [FeatureSet::VARLEN, FeatureSet::GENERIC, without_dropout];
    let of = move |headdim: u32| features.into_iter().take(if headdim > 128 { 2 } else { 3 });
    let with = |row: Variant, features: FeatureSet| {
        // a third block would leave dropout too few registers
        let most = if features.contains(FeatureSet::of(&[Feature::Dropout])) { 2 } else { row.blocks_per_sm };
        Variant { blocks_per_sm: row.blocks_per_sm.min(most), ..row.with_features(features) }
    };
    let with_blocks = move |row: Variant| {
        with(row, FeatureSet::GENERIC).with_blocks(FeatureSet::GENERIC_BLOCKS, if row.source == wide { listed[1] } else { listed[0] })
    };
    let rows = move || tiles.iter().map(row);
    let listed_rows = rows().filter(|row| row.headdim <= 256).map(with_blocks);
    rows().flat_map(move |row| of(row.headdim).map(move |features| with(row, features))).chain(listed_rows)
}

// ---- kernels with one feature ---------------------------------------------------------------------

/// Returns a varlen kernel with one feature that the problem must use: the generic kernel without branches on the others, and so without
/// misses of the instruction cache. It carries values from tile to tile where it can.
pub fn with(feature: Feature, tile: Variant) -> Variant {
    let required_features = FeatureSet::of(&[feature]);
    Variant { required_features, ..tile }.with_features(FeatureSet::VARLEN.union(required_features).with_fp32_bias())
}

// ---- the backward pass ----------------------------------------------------------------------------

/// Sources around the main kernels of a family, and those of kernels that store P and dS in memory.
pub struct BackwardSources {
    /// before main kernels
    pub preprocess: Source,
    /// after main kernels with atomics
    pub postprocess: Source,
    /// P and dS, and the gradients from them, for large headdims
    pub stored: [Source; 2],
    /// P and dS of fp32 tensors, without and with block masks
    pub split_scores: [Source; 2],
    /// their gradients, without and with block masks
    pub split_gradients: [Source; 2],
}

/// The sources of a family, whose folder below csrc/ and namespace have its name.
macro_rules! backward_sources {
    ($family:literal) => {{
        const ROW_STATS: &str = concat!($family, "/backward/row_stats.cuh");
        const STORED: &str = concat!($family, "/backward/stored.cuh");
        const SCORES: &[&str] = &["backward/store_scores.cuh", STORED];
        const GRADIENTS: &[&str] = &["backward/stored_gradients.cuh", STORED];
        const fn stored(headers: &'static [&'static str], kernel: &'static str) -> Source {
            Source::new(headers, kernel).with_arguments("p.backward, p.stored")
        }
        BackwardSources {
            preprocess: Source::new(
                &["backward/preprocess.cuh", ROW_STATS],
                concat!("BackwardPreprocess<", $family, "::RowStats, BLOCK_ROWS, THREADS>"),
            ),
            postprocess: Source::new(
                &["backward/postprocess.cuh", concat!($family, "/backward/dq_accumulator.cuh"), ROW_STATS],
                concat!("BackwardPostprocess<", $family, "::RowStats, ", $family, "::DqAccumulator, BLOCK_ROWS, THREADS>"),
            ),
            stored: [
                stored(SCORES, concat!("BackwardScores<", $family, "::StoredFamily>")),
                stored(GRADIENTS, concat!("BackwardGradients<", $family, "::StoredFamily>")),
            ],
            split_scores: [
                stored(SCORES, concat!("BackwardScores<", $family, "::StoredFamily, true>")),
                Source::new(
                    &["backward/store_scores.cuh", STORED, "backward/stored_block_mask.cuh"],
                    concat!("BackwardScores<", $family, "::StoredFamily, true, ListedScores>"),
                )
                .with_arguments("p.backward, p.stored, ListedScores(p.blocks)"),
            ],
            split_gradients: [
                stored(GRADIENTS, concat!("BackwardGradients<", $family, "::StoredFamily, true>")),
                stored(GRADIENTS, concat!("BackwardGradients<", $family, "::StoredFamily, true, true>")),
            ],
        }
    }};
}
pub(super) use backward_sources;

/// Returns the main kernel without its dQ product.
pub fn dkdv(main: Variant) -> Variant {
    Variant { pass: Pass::BackwardDkDv, ..main }
}

/// Returns the main kernel that does all of a backward pass.
pub fn fused(main: Variant) -> Variant {
    Variant { pass: Pass::BackwardFused, ..main }
}

/// Returns the kernel before main kernels, for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM have
/// 1024 threads with two or more 16-byte loads each in flight.
pub const fn preprocess(family: Family, source: Source) -> Variant {
    Variant { headdim: 512, headdim_v: 512, block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::BackwardPreprocess, source) }
}

/// Returns the kernel after main kernels with atomics, like [`preprocess`] but for headdims to 256: larger ones sum dq elsewhere
/// (`stored_backward`).
pub const fn postprocess(family: Family, source: Source) -> Variant {
    Variant { block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::BackwardPostprocess, source) }
}

/// Returns the kernels for headdims above 256, which pass P and dS through memory (csrc/backward/stored_scores.cuh), from a family's
/// sources. Tiles are 128 by 128, four warps with 64 by 64 each, so that
/// two blocks an SM have all registers. Two buffers of both operands are 32 KB; two blocks have the 64 KB of Turing.
pub fn stored_backward(family: Family, [scores, gradients]: [Source; 2]) -> [Variant; 5] {
    let row = |pass, source| Variant {
        headdim: 512,
        headdim_v: 512,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 2 * 2 * 2 * 128 * 32,
        blocks_per_sm: 2,
        ..Variant::new(family, pass, source)
    };
    let (scores, gradients) = (row(Pass::BackwardScores, scores), row(Pass::BackwardGradients, gradients));
    let varlen = |row: Variant| row.with_features(FeatureSet::VARLEN);
    [scores, gradients, varlen(scores), varlen(gradients), scores.with_features(FeatureSet::GENERIC)]
}

/// Returns the kernels of fp32 tensors, of all headdims, with the same tiles. Gradients are fp32. The sources: without and with block masks,
/// which have forward kernels up to headdim 256.
pub fn split_backward(family: Family, [scores, listed]: [Source; 2], [gradients, sparse]: [Source; 2]) -> [Variant; 5] {
    let [of_scores, of_gradients, ..] = stored_backward(family, [scores, gradients]);
    let scores = Variant { pass: Pass::BackwardSplitScores, ..of_scores };
    let gradients = Variant { pass: Pass::BackwardSplitGradients, ..of_gradients };
    let common = |row: Variant| Variant { headdim: 256, headdim_v: 256, ..row };
    [
        scores.with_features(FeatureSet::VARLEN),
        gradients.with_features(FeatureSet::VARLEN),
        scores.with_features(FeatureSet::GENERIC),
        common(scores).with_blocks(FeatureSet::GENERIC_BLOCKS, listed),
        common(gradients).with_blocks(FeatureSet::VARLEN, sparse),
    ]
}

// ---- decode ---------------------------------------------------------------------------------------
//
// docs/design/decode.md lists experiments. `block_rows` are queries of all heads of a KV head, `step` those of one warp. Warps beside each
// other take the same tokens for other rows: of two the second finds the bytes in L1, four share what each loads
// (csrc/decode/cooperative_loader.cuh). The bytes that an SM has in flight decide the speed, and registers decide these: one step of a warp
// is eight tokens, 32 * headdim bytes.

/// Warps that share the columns of a row (csrc/decode/column_groups.cuh).
pub const fn column_groups(headdim: u32) -> u32 {
    if headdim > 256 {
        2
    } else {
        1
    }
}

/// Shared memory of csrc/decode/block.cuh, bytes: fp32 outputs of warps with other tokens, which the block merges after
/// its loop, in rows padded by four floats. An SM without room for all of them holds half at a time, or a quarter. `work`: what
/// the loop takes in their place. Besides these, two floats of state for each part of a row, two for the row, and the block's
/// position.
fn shared_bytes(family: &Family, (headdim, [block_rows, step], threads, blocks_per_sm): DecodeTile, work: u32) -> u32 {
    let parts = threads / 32 * step / block_rows / column_groups(headdim);
    let mut outputs = parts * (headdim + 4) * block_rows * 4;
    while outputs * blocks_per_sm > family.shared_bytes {
        outputs /= 2;
    }
    outputs.max(work) + (parts * 2 + 2) * block_rows * 4 + 256
}

/// Shared memory of the loop of a kernel with column groups, bytes: two buffers for the scores of each warp, and where four warps share
/// what they load, two steps of keys and values and half of each warp's eight chunks of queries, or a quarter. A chunk of all lanes is 512
/// bytes, and factors of bf16 steps are 64.
fn wide_work(family: &Family, (headdim, [block_rows, step], threads, _): DecodeTile) -> u32 {
    let shared_chunks = if family.shared_bytes > 65536 { 4 } else { 2 };
    let (warps, loads) = (threads / 32, if block_rows / step == 4 { 2 * 8 * 2 * headdim * 2 + 64 } else { 0 });
    let queries = if loads > 0 && step > 8 { shared_chunks * step / 8 * 512 } else { 0 };
    let sets = warps * step / block_rows / column_groups(headdim);
    sets * loads + warps * (queries + step / 8 * 512)
}

/// The tile of a decode kernel: headdim, rows of a block and of one warp, threads of a block, blocks that an SM must hold.
pub type DecodeTile = (u32, [u32; 2], u32, u32);

/// Returns a decode kernel over caches of one format.
pub fn decode(family: Family, source: Source, cache: CacheFormat, tile: DecodeTile) -> Variant {
    let (headdim, [block_rows, step], threads, blocks_per_sm) = tile;
    let work = if column_groups(headdim) > 1 { wide_work(&family, tile) } else { 0 };
    Variant {
        cache,
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        threads,
        shared_bytes: shared_bytes(&family, tile, work),
        blocks_per_sm,
        ..Variant::new(family, Pass::Decode, source)
    }
}

/// Returns the kernels with a tree mask (csrc/decode/tree.cuh), of these rows. Draft tokens have a tile of 16 rows or more.
pub fn with_tree(rows: impl Iterator<Item = Variant>) -> impl Iterator<Item = Variant> {
    const TREE: FeatureSet = FeatureSet::of(&[Feature::Tree]);
    // a row has its draft tokens in shared memory, 8 bytes
    let tree = |row: Variant| Variant { required_features: TREE, shared_bytes: row.shared_bytes + 8 * row.block_rows, ..row };
    rows.filter(|row| row.block_rows > 8).map(move |row| tree(row).with_features(TREE))
}

/// Returns kernels over unquantized caches, first in fp16, then in bf16.
pub fn in_both_types(rows: impl Iterator<Item = Variant>) -> Vec<Variant> {
    let rows: Vec<_> = rows.collect();
    let bf16 = rows.iter().map(|&row| Variant { is_bf16: true, ..row });
    rows.iter().copied().chain(bf16).collect()
}
