//! Rows of the kernel tables for sources that no family owns (`csrc/shared`), and what rows of two families have in common. Each function
//! takes the family (volta, turing) that compiles the source, and returns its row or rows.
//!
//! A row of a table ([`Variant`]) is one kernel; rows of a block or warp are queries or keys.
//! - `block_rows`: rows of a thread block; `step`: keys or queries of an iteration of its main loop;
//! - `shared_bytes`: dynamic shared memory of a block; `blocks_per_sm`: blocks that an SM must hold, which limits registers;
//! - [`Variant::new`]: a row with no feature, headdims to 256, 256 threads and one block per SM;
//! - `with_features`: sets the options that a row has code for, [`FeatureSet::VARLEN`] (varying lengths, sinks, fp32 gradients) or GENERIC
//!   (these, fp32 output and all features of scores); `with_blocks`: adds block masks, and sets the source that reads them;
//! - `arguments` of a [`Source`]: C++, what the kernel's function `run` gets, where `p` is the parameter block.
//!
//! An SM has 96 KB of shared memory (Volta) or 64 KB (Turing), and 64 Ki registers.

use super::variants::{CacheFormat, Family, Feature, FeatureSet, Pass, Size, Source, Variant};

const APPEND: Source = Source::new(&["shared/append/append.cuh"], "append::Kernel");
const DEQUANTIZE: Source = Source::new(&["shared/dequantize/dequantize.cuh"], "dequantize::Kernel");
const CAST: Source = Source::new(&["shared/cast/cast.cuh"], "cast::Kernel");
const SELECT: Source = Source::new(&["shared/select/select.cuh"], "select::Kernel");
const MERGE: Source = Source::new(&["shared/merge/merge.cuh"], "merge::Kernel");

/// Returns a source of a family. In its texts `FAMILY` stands for the family's folder below csrc/ and for its C++ namespace.
fn source(family: Family, headers: &[&str], kernel: &str, arguments: &str) -> Source {
    let named = |text: &str| -> &'static str { text.replace("FAMILY", family.name).leak() };
    let headers = headers.iter().map(|header| named(header)).collect::<Vec<_>>();
    Source { headers: headers.leak(), kernel: named(kernel), arguments: named(arguments) }
}

/// Returns the kernel that appends to caches of one format, for all headdims: it reads the headdim from its parameters. A block appends
/// up to four tokens of a KV head. In a decoding step that is one token, with queries to rotate: about 400 words of 4 bytes. So each of the
/// 256 threads has two loads, all in flight at once. Quantizing takes more registers than four blocks an SM would leave: three.
pub fn append(family: Family, cache: CacheFormat) -> Variant {
    let blocks_per_sm = if cache.is_quantized() { 3 } else { 4 };
    Variant { cache, block_rows: 4, blocks_per_sm, ..Variant::new(family, Pass::Append, APPEND) }
}

/// Returns the kernel that copies a quantized cache as fp16 or bf16, for all headdims and formats, which it reads from its parameters.
/// Memory bounds it: four blocks an SM are 1024 threads, each with eight columns at a time. It has no loop of steps: its `step` is the
/// longest of the attention kernels that read its output, up to which it writes zeros before the first visible token.
pub fn dequantize(family: Family) -> Variant {
    Variant { block_rows: 64, step: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Dequantize, DEQUANTIZE) }
}

/// Returns the kernel that casts bf16 tensors to fp16, for all headdims, which it reads from its parameters. Memory bounds it: four blocks
/// an SM are 1024 threads, each with 16 bytes of two rows at a time.
pub fn cast(family: Family) -> Variant {
    Variant { block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::Cast, CAST) }
}

/// Returns the kernel before sparse MLA, which lists the tokens that each query chose and casts bf16 queries. A block has one query: its
/// list, or as many of its heads as there are warps. Shared memory has a number for each warp.
pub fn select(family: Family) -> Variant {
    let shared_bytes = 8 * 4; // an int of each of the 8 warps
    Variant { block_rows: 1, blocks_per_sm: 4, shared_bytes, ..Variant::new(family, Pass::SparseSelect, SELECT) }
}

/// Returns the kernel that merges two results of attention, for all headdims, which it reads from its parameters. Memory bounds it: four
/// blocks an SM are 1024 threads with two 16-byte loads each (fp32: four) at a time.
pub fn merge(family: Family) -> Variant {
    let block_rows = 32;
    let shared_bytes = 2 * block_rows * 4; // two weights of each row
    Variant { block_rows, shared_bytes, blocks_per_sm: 4, ..Variant::new(family, Pass::Merge, MERGE) }
}

/// Returns the kernels of the indexer (csrc/indexer/indexer.cuh), for 256 rows (four queries of 64 heads) and for 64. Shared memory has two
/// buffers of 64 keys, whose rows are 17 chunks of 16 bytes (128 columns of fp16, and one of padding). Beside them are four buffers of sums
/// (an fp32 for each key and each 32 rows) and of keys' scales. After these come ranges of keys for at most eight queries (of 32 rows or
/// more), and twelve ints of the schedule.
pub fn indexer(family: Family, source: Source) -> impl Iterator<Item = Variant> {
    [256, 64].into_iter().map(move |block_rows| Variant {
        headdim: 128,
        headdim_v: 128,
        block_rows,
        step: 64,
        // keys, sums, scales, ranges, ints
        shared_bytes: 2 * 64 * 17 * 16 + 4 * block_rows / 32 * 64 * 4 + 4 * 64 * 4 + 8 * 8 + 12 * 4,
        ..Variant::new(family, Pass::Indexer, source)
    })
}

// ---- fp32 -----------------------------------------------------------------------------------------

/// A tile of fp32 tensors' forward kernels: headdim, warps of a block, blocks that an SM must hold, bytes of a row of Q in shared memory.
type SplitTile = (u32, u32, u32, u32);

/// Returns the forward kernels of fp32 tensors (csrc/forward/split.cuh), whose numbers are split: a high part and a low part, both fp16. A
/// step is 16 keys, and a warp has 16 rows. Shared memory has two slots of K and V, whose rows are both parts and 16 bytes of padding.
///
/// Two sources: for headdims to 128, and above (wide). Above, a warp has 128 of the columns, a slot holds one part of K or of V, and sums
/// of scores take a kilobyte of each warp. Both have generic versions with block masks (`listed`: they read lists of blocks of keys), for
/// headdims 64, 128 and 256.
pub fn split_forward(family: Family, tiles: &[SplitTile]) -> impl Iterator<Item = Variant> + '_ {
    let [narrow, wide] = ["split::Forward<FAMILY::Split>", "split::WideForward<FAMILY::Split>"]
        .map(|kernel| source(family, &["FAMILY/forward/split.cuh"], kernel, "p"));
    let [listed_narrow, listed_wide] =
        ["split::Forward<FAMILY::Split, split::ListedKeys>", "split::WideForward<FAMILY::Split, split::ListedKeys>"].map(|kernel| {
            let headers = ["FAMILY/forward/split.cuh", "forward/split_block_mask.cuh"];
            source(family, &headers, kernel, "p.forward, split::ListedKeys(p.blocks)")
        });
    let row = move |&(headdim, warps, blocks_per_sm, q_bytes): &SplitTile| {
        let is_wide = headdim > 128;
        // two slots of 16 rows, bytes: wide, of one fp16 part of K or V, and the sums; else of K and V with both parts
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
    // up to headdim 128 generic kernels come with and without dropout, whose registers would slow the other features
    let without_dropout = FeatureSet::GENERIC.without(FeatureSet::of(&[Feature::Dropout]));
    let features = [FeatureSet::VARLEN, FeatureSet::GENERIC, without_dropout];
    let features_of = move |headdim: u32| features.into_iter().take(if headdim > 128 { 2 } else { 3 });
    let with = |row: Variant, features: FeatureSet| {
        // a third block would leave dropout too few registers
        let max_blocks = if features.has(Feature::Dropout) { 2 } else { row.blocks_per_sm };
        Variant { blocks_per_sm: row.blocks_per_sm.min(max_blocks), ..row.with_features(features) }
    };
    let with_blocks = move |row: Variant| {
        let listed = if row.source == wide { listed_wide } else { listed_narrow };
        with(row, FeatureSet::GENERIC).with_blocks(FeatureSet::GENERIC_BLOCKS, listed)
    };
    let rows = move || tiles.iter().map(row);
    let listed_rows = rows().filter(|row| row.headdim <= 256).map(with_blocks);
    rows().flat_map(move |row| features_of(row.headdim).map(move |features| with(row, features))).chain(listed_rows)
}

/// Returns kernels of fp32 tensors on stream-K grids (csrc/forward/split_stream_k.cuh), from `rows`, those of [`split_forward`]. Only
/// headdim 512 has them: that of VAEs, whose one head has few tiles of query rows. Takes the rows without features of scores (softcap).
/// Their one feature is sinks, which only the epilogue needs.
pub fn split_stream_k(family: Family, rows: impl Iterator<Item = Variant>) -> impl Iterator<Item = Variant> {
    let source = source(
        family,
        &["FAMILY/forward/split.cuh", "forward/split_stream_k.cuh"],
        "split::WideForward<FAMILY::Split, split::StreamKKeys<FAMILY::Split>>",
        "p.forward, split::StreamKKeys<FAMILY::Split>(p.stream_k)",
    );
    let features = FeatureSet::of(&[Feature::Sinks]);
    let plain = rows.filter(|row| row.headdim == 512 && !row.features.has(Feature::Softcap));
    plain.map(move |row| Variant { pass: Pass::ForwardSplitStreamK, source, ..row }.with_features(features))
}

// ---- batch-invariant calls ------------------------------------------------------------------------

/// Returns the forward kernels of batch-invariant calls, one for a headdim. Of a family's `plain` kernels it takes the large tiles of six
/// pairs of headdims, all but 32 and 192 by 192, for calls without features of scores. `generic`: for the others, four headdims. Other
/// headdims are padded to the next.
pub fn invariant_forward<const N: usize>(plain: [Variant; N], generic: [Variant; 4]) -> impl Iterator<Item = Variant> {
    let is_large = |row: &Variant| row.size == Size::Large && !matches!((row.headdim, row.headdim_v), (32, _) | (192, 192));
    let of_plain = plain.into_iter().filter(is_large).map(|row| row.with_features(FeatureSet::FP32_OUTPUT));
    of_plain.chain(generic).map(Variant::batch_invariant)
}

// ---- kernels with one feature ---------------------------------------------------------------------

/// Returns a kernel with one feature that the problem must use, and lengths from memory. Unlike a generic kernel it has no branches on
/// other features, so its loop fits the instruction cache. Where it can, it carries values of the feature from tile to tile.
pub fn with(feature: Feature, tile: Variant) -> Variant {
    let required_features = FeatureSet::of(&[feature]);
    // kernels of a bias read both types
    let fp32_bias = if feature == Feature::Bias { FeatureSet::of(&[Feature::Fp32Bias]) } else { FeatureSet::NONE };
    Variant { required_features, ..tile }.with_features(FeatureSet::VARLEN.union(required_features).union(fp32_bias))
}

// ---- the backward pass ----------------------------------------------------------------------------
//
// A backward pass is a preprocess kernel (row statistics), a main kernel (dk, dv, and dq added to fp32 accumulators) and a postprocess
// kernel (the accumulators to dq in its type).

/// Returns the main kernel without its dQ product, for deterministic passes: a kernel of its own computes dq.
pub fn dkdv(main: Variant) -> Variant {
    Variant { pass: Pass::BackwardDkDv, ..main }
}

/// Returns the main kernel as a whole pass, without preprocess and postprocess, for heads whose keys are all in one block.
pub fn fused(main: Variant) -> Variant {
    Variant { pass: Pass::BackwardFused, ..main }
}

/// Returns the kernel before main kernels, for all headdims, which it reads from its parameters. Memory bounds it: four blocks an SM have
/// 1024 threads with two or more 16-byte loads each in flight.
pub fn preprocess(family: Family) -> Variant {
    let source = source(family, &["backward/preprocess.cuh"], "BackwardPreprocess<BLOCK_ROWS, THREADS>", "p");
    Variant { headdim: 512, headdim_v: 512, block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::BackwardPreprocess, source) }
}

/// Returns the kernel after main kernels with atomics, like [`preprocess`] but to headdim 256: above, `stored_backward` sums dq.
pub fn postprocess(family: Family) -> Variant {
    let headers = ["backward/postprocess.cuh", "FAMILY/backward/dq_accumulator.cuh"];
    let source = source(family, &headers, "BackwardPostprocess<FAMILY::DqAccumulator, BLOCK_ROWS, THREADS>", "p");
    Variant { block_rows: 64, blocks_per_sm: 4, ..Variant::new(family, Pass::BackwardPostprocess, source) }
}

/// Returns the source of a kernel that stores P (probabilities) and dS (gradients of scores) in memory.
fn scores_source(family: Family, kernel: &str) -> Source {
    source(family, &["backward/store_scores.cuh", "FAMILY/backward/stored.cuh"], kernel, "p.backward, p.stored")
}

/// Returns the source of a kernel that computes gradients from stored P and dS.
fn gradients_source(family: Family, kernel: &str) -> Source {
    source(family, &["backward/stored_gradients.cuh", "FAMILY/backward/stored.cuh"], kernel, "p.backward, p.stored")
}

/// Returns the backward kernels that pass P and dS through memory (csrc/backward/stored_scores.cuh), for headdims above 256. Where they are
/// faster, the planner takes them above `Family::stored_above` (volta: 192) too. Tiles are 128 by 128, four warps with 64 by 64 each, so
/// that two blocks an SM have all registers. Two buffers of both operands, 128 rows of 32 fp16 numbers each, are 32 KB, half of Turing's.
pub fn stored_backward(family: Family) -> [Variant; 5] {
    let row = |pass, source| Variant {
        headdim: 512,
        headdim_v: 512,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 2 * 2 * 128 * 32 * 2,
        blocks_per_sm: 2,
        ..Variant::new(family, pass, source)
    };
    let scores = row(Pass::BackwardScores, scores_source(family, "BackwardScores<FAMILY::StoredFamily>"));
    let gradients = row(Pass::BackwardGradients, gradients_source(family, "BackwardGradients<FAMILY::StoredFamily>"));
    let varlen = |row: Variant| row.with_features(FeatureSet::VARLEN);
    [scores, gradients, varlen(scores), varlen(gradients), scores.with_features(FeatureSet::GENERIC)]
}

/// Returns the backward kernels of fp32 tensors, of all headdims, with the same tiles. Gradients are fp32. Those with block masks go up to
/// headdim 256, as their forward kernels do.
///
/// Blocks of gradients have 64 columns where these suffice: a block of 128 would multiply padding half of its time.
pub fn split_backward(family: Family) -> [Variant; 7] {
    let [scores, gradients, ..] = stored_backward(family);
    // the kernels' template arguments: the first `true` stands for split numbers, the next for a block mask
    let source_of_scores = scores_source(family, "BackwardScores<FAMILY::StoredFamily, true>");
    let source_of_gradients = gradients_source(family, "BackwardGradients<FAMILY::StoredFamily, true>");
    let listed = source(
        family,
        &["backward/store_scores.cuh", "FAMILY/backward/stored.cuh", "backward/stored_block_mask.cuh"],
        "BackwardScores<FAMILY::StoredFamily, true, ListedScores>",
        "p.backward, p.stored, ListedScores(p.blocks)",
    );
    let listed_gradients = gradients_source(family, "BackwardGradients<FAMILY::StoredFamily, true, true>");
    let scores = Variant { pass: Pass::BackwardSplitScores, source: source_of_scores, ..scores };
    let gradients = Variant { pass: Pass::BackwardSplitGradients, source: source_of_gradients, ..gradients };
    let up_to_256 = |row: Variant| Variant { headdim: 256, headdim_v: 256, ..row };
    // Two buffers of 128 + 64 rows of 32 fp16 numbers. Four blocks have all registers; Turing has shared memory for two.
    let narrow = |row: Variant| {
        let shared_bytes = 2 * (128 + 64) * 32 * 2;
        let blocks_per_sm = (family.shared_bytes / shared_bytes).min(4);
        Variant { headdim: 64, headdim_v: 64, threads: 64, shared_bytes, blocks_per_sm, ..row }
    };
    [
        scores.with_features(FeatureSet::VARLEN),
        gradients.with_features(FeatureSet::VARLEN),
        narrow(gradients).with_features(FeatureSet::VARLEN),
        scores.with_features(FeatureSet::GENERIC),
        up_to_256(scores).with_blocks(FeatureSet::GENERIC_BLOCKS, listed),
        up_to_256(gradients).with_blocks(FeatureSet::VARLEN, listed_gradients),
        narrow(gradients).with_blocks(FeatureSet::VARLEN, listed_gradients),
    ]
}

// ---- decode ---------------------------------------------------------------------------------------
//
// docs/design/decode.md lists experiments. Rows are queries of all heads of a KV head. `block_rows` are those of a block, `step` here those
// of one warp. Warps "beside each other" take the same tokens for different rows: of two the second finds the bytes in L1, four share what
// each loads (csrc/decode/cooperative_loader.cuh). Other warps of a block take other tokens. The bytes that an SM has in flight decide the
// speed, and registers decide these: a warp loads eight tokens of K and V at a time, in fp16 32 * headdim bytes.

/// Returns the warps that share the columns of a row (csrc/decode/column_groups.cuh): two above headdim 256, else one.
pub const fn column_groups(headdim: u32) -> u32 {
    1 + (headdim > 256) as u32
}

/// Returns the shared memory of csrc/decode/block.cuh, bytes: a part for each set of warps with tokens of its own. A part has fp32 outputs,
/// which the block merges after its loop, in rows padded by four floats. An SM without room for all of them holds half at a time, or a
/// quarter. In their place the loop has its own bytes (block.cuh asserts that these fit). Besides these, two floats of state for each part
/// of a row, two for the row, and 256 bytes for the block's position.
fn decode_shared_bytes(row: &Variant) -> u32 {
    let Variant { family, headdim, block_rows, step, threads, blocks_per_sm, .. } = *row;
    let of_loop = if column_groups(headdim) > 1 { wide_loop_bytes(row) } else { 0 };
    // sets of warps: those of a set have all rows and columns of the same tokens
    let parts = threads / 32 * step / block_rows / column_groups(headdim);
    let mut outputs = parts * (headdim + 4) * block_rows * 4; // 4 floats of padding; 4 bytes
    while outputs * blocks_per_sm > family.shared_bytes {
        outputs /= 2;
    }
    outputs.max(of_loop) + (parts * 2 + 2) * block_rows * 4 + 256
}

/// Returns the shared memory of the loop of a kernel with two column groups, bytes: buffers for the scores of each warp (64 bytes a row).
/// Where four warps share what they load, also two steps of keys and values (8 tokens, fp16), 64 bytes of factors of bf16 steps, and some
/// of each warp's eight chunks of queries (32 columns each). A chunk of eight rows is 512 bytes; four chunks fit on Volta, else two. A set
/// is the warps with the same tokens.
fn wide_loop_bytes(row: &Variant) -> u32 {
    let Variant { family, headdim, block_rows, step, threads, .. } = *row;
    let shared_chunks = if family.shared_bytes > 65536 { 4 } else { 2 };
    // two steps of 8 tokens, each of keys and of values, fp16
    let (warps, loads) = (threads / 32, if block_rows / step == 4 { 2 * 8 * 2 * headdim * 2 + 64 } else { 0 });
    let queries = if loads > 0 && step > 8 { shared_chunks * step / 8 * 512 } else { 0 };
    let sets = warps * step / block_rows / column_groups(headdim);
    sets * loads + warps * (queries + step / 8 * 512)
}

/// The tile of a decode kernel: headdim, rows of a block and of one warp, threads of a block, blocks that an SM must hold.
pub type DecodeTile = (u32, [u32; 2], u32, u32);

/// Returns the decode kernel of a tile for caches of one format.
pub fn decode(family: Family, source: Source, cache: CacheFormat, tile: DecodeTile) -> Variant {
    let (headdim, [block_rows, step], threads, blocks_per_sm) = tile;
    let usual = Variant::new(family, Pass::Decode, source);
    let row = Variant { cache, headdim, headdim_v: headdim, block_rows, step, threads, blocks_per_sm, ..usual };
    Variant { shared_bytes: decode_shared_bytes(&row), ..row }
}

/// Returns these rows with a tree mask (csrc/decode/tree.cuh), which says which draft tokens of speculative decoding each query sees.
/// Several draft tokens make more than 8 rows, so tiles of 8 rows have no such kernel.
pub fn with_tree(rows: impl Iterator<Item = Variant>) -> impl Iterator<Item = Variant> {
    const TREE: FeatureSet = FeatureSet::of(&[Feature::Tree]);
    // a row has its draft tokens in shared memory, 8 bytes
    let tree = |row: Variant| Variant { required_features: TREE, shared_bytes: row.shared_bytes + 8 * row.block_rows, ..row };
    rows.filter(|row| row.block_rows > 8).map(move |row| tree(row).with_features(TREE))
}

/// Returns these rows twice: first for fp16 queries, unquantized caches and outputs, then for bf16 ones.
pub fn in_both_types(rows: impl Iterator<Item = Variant>) -> Vec<Variant> {
    let rows: Vec<_> = rows.collect();
    let bf16 = rows.iter().map(|&row| Variant { is_bf16: true, ..row });
    rows.iter().copied().chain(bf16).collect()
}
