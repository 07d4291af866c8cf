//! Passes: what kernels compute, from which parameter block (the struct that is a kernel's argument), over which rows. The kernel tables
//! name the pass of each kernel, the planner asks for kernels by pass. Also a module of build.rs.
//!
//! - P: probabilities; dS: gradients of scores; delta: the row sum of out * dout.
//! - main kernels: those of a backward pass that compute dk, dv and dq, or add to dq's fp32 accumulator.
//! - stream-K grid: divides the steps of some row tiles (the rows of one block) evenly among all blocks.
//! - split: fp32 numbers as sums of two fp16 numbers. A split in [`SPLIT_TOKENS`] is another thing: a part of a sequence's keys.
//! - latents: the compressed keys and values of multi-head latent attention (MLA).

use super::features::{named, Feature, FeatureSet};

named! {
    /// The argument of a pass's kernels: a struct of src/params/, by its name. build.rs writes all of them into the kernels' header.
    enum ParamBlock {
        Forward = "FwdParams",
        ForwardStreamK = "FwdStreamKParams",
        /// of backward passes; the other backward structs contain it
        Backward = "BwdParams",
        BackwardStreamK = "BwdStreamKParams",
        /// of forward kernels with `Feature::Blocks` (block masks)
        ForwardBlocks = "FwdBlockParams",
        /// of backward kernels with `Feature::Blocks`
        BackwardBlocks = "BwdBlockParams",
        /// of kernels that keep P and dS in memory
        BackwardStored = "BwdStoredParams",
        /// of the same kernels with `Feature::Blocks`
        BackwardStoredBlocks = "BwdStoredBlockParams",
        Merge = "MergeParams",
        Decode = "DecodeParams",
        Append = "AppendParams",
        Dequantize = "DequantizeParams",
        Cast = "CastParams",
        Fast = "FastParams",
        SparseMla = "SparseMlaParams",
        Indexer = "IndexerParams",
    }
}

/// Kind of the rows of a pass's blocks, which decides the first two axes of its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// queries of a query head
    Queries,
    /// the same, rounded up as in the scratch memory of a backward pass
    ScratchQueries,
    /// keys of a KV head
    Keys,
    /// queries of all heads of a KV head, or (indexer) all heads of queries; the grid is as large as the GPU
    PackedQueries,
    /// tiles of P and dS in memory, or of gradients; `plan::backward` chooses their number
    StoredTiles,
}

/// A row of the table of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassInfo {
    pub pass: Pass,
    /// words in the names of its kernels: before and after those of the features, `volta_bwd_varlen_preprocess`
    pub words: (&'static str, &'static str),
    /// argument of its kernels; those of kernels with `Feature::Blocks` contain it (`Variant::params`)
    pub params: ParamBlock,
    /// kind of the `block_rows` of its kernels
    pub rows: RowKind,
    /// features that problems can ask of it
    pub features: FeatureSet,
}

/// Tokens of a split in batch-invariant decode kernels: blocks share a sequence's keys in parts of this length, whatever the batch. Longer
/// splits may leave SMs idle; shorter ones take time to begin and to join.
pub const SPLIT_TOKENS: u32 = 512;

/// Defines [`Pass`], and [`PASSES`] with a row for each.
macro_rules! passes {
    ($($(#[$doc:meta])* $Pass:ident: $before:literal $after:literal, $Params:ident, $Rows:ident, $features:expr;)*) => {
        /// The computation of a kernel. An op runs one pass, or several one after the other.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Pass { $($(#[$doc])* $Pass,)* }

        /// The table of passes, in the order of the enum.
        pub const PASSES: [PassInfo; [$(Pass::$Pass),*].len()] = [$(PassInfo {
            pass: Pass::$Pass,
            words: ($before, $after),
            params: ParamBlock::$Params,
            rows: RowKind::$Rows,
            features: $features,
        }),*];
    };
}

/// Features of the passes that see scores.
const SCORES: FeatureSet = FeatureSet::GENERIC.union(FeatureSet::of(&[Feature::Blocks]));
const FORWARD: FeatureSet = SCORES.without(FeatureSet::of(&[Feature::Fp32Gradients]));
/// The output of fp32 tensors is fp32 in any case.
const FORWARD_SPLIT: FeatureSet = FORWARD.without(FeatureSet::of(&[Feature::Fp32Output]));
/// The backward pass finds all that sinks did in softmax_lse, and writes no out.
const BACKWARD_MAIN: FeatureSet = SCORES.without(FeatureSet::of(&[Feature::Sinks, Feature::Fp32Output]));
const PREPROCESS: FeatureSet = FeatureSet::of(&[Feature::Lengths]);
const POSTPROCESS: FeatureSet = FeatureSet::of(&[Feature::Lengths, Feature::Fp32Gradients]);
const POSTPROCESS_BLOCKS: FeatureSet = POSTPROCESS.union(FeatureSet::of(&[Feature::Blocks]));
const PREFILL: FeatureSet = FeatureSet::PAGED.union(FeatureSet::of(&[Feature::Softcap, Feature::Alibi]));

// Pass: words in kernel names, before and after those of the features, then the parameter block, the kind of rows, the features.
passes! {
    /// out and softmax_lse
    Forward: "fwd" "", Forward, Queries, FORWARD;
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    ForwardStreamK: "fwd_streamk" "", ForwardStreamK, Queries, FORWARD;
    /// out and softmax_lse of fp32 tensors, whose numbers are split
    ForwardSplit: "fwd_split" "", Forward, Queries, FORWARD_SPLIT;
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    ForwardSplitStreamK: "fwd_split_streamk" "", ForwardStreamK, Queries, FORWARD_SPLIT;
    /// delta and the other row statistics, zeroing of dq's accumulator
    BackwardPreprocess: "bwd" "preprocess", Backward, ScratchQueries, PREPROCESS;
    /// dk, dv, and dq added to its accumulator by atomics
    Backward: "bwd" "", Backward, Keys, BACKWARD_MAIN;
    /// the same on a stream-K grid, if few blocks of many steps would leave much of the GPU idle
    BackwardStreamK: "bwd_streamk" "", BackwardStreamK, Keys, BACKWARD_MAIN;
    /// dk and dv alone, for the deterministic mode
    BackwardDkDv: "bwd" "dkdv", Backward, Keys, BACKWARD_MAIN;
    /// dq alone, for the deterministic mode
    BackwardDq: "bwd" "dq", Backward, Queries, BACKWARD_MAIN;
    /// dq's accumulator to fp16 or fp32
    BackwardPostprocess: "bwd" "postprocess", Backward, Queries, POSTPROCESS;
    /// all of a backward pass, if one block has all keys of its heads
    BackwardFused: "bwd" "fused", Backward, Keys, BACKWARD_MAIN;
    /// P and dS to memory, for large headdims
    BackwardScores: "bwd" "scores", BackwardStored, StoredTiles, BACKWARD_MAIN;
    /// dq, dk and dv from them
    BackwardGradients: "bwd" "gradients", BackwardStored, StoredTiles, POSTPROCESS;
    /// P and dS to memory, of fp32 tensors, whose numbers are split
    BackwardSplitScores: "bwd_split" "scores", BackwardStored, StoredTiles, BACKWARD_MAIN;
    /// dq, dk and dv from them
    BackwardSplitGradients: "bwd_split" "gradients", BackwardStored, StoredTiles, POSTPROCESS_BLOCKS;
    /// attention over two sets of keys, from the results over each
    Merge: "merge" "", Merge, Queries, FeatureSet::NONE;
    /// out and softmax_lse of few queries a sequence, over a KV cache
    Decode: "decode" "", Decode, PackedQueries, FeatureSet::of(&[Feature::Tree]);
    /// the same of many queries a sequence
    Prefill: "prefill" "", Forward, Queries, PREFILL;
    /// the same on a stream-K grid, if the last wave of the usual grid would leave much of the GPU idle
    PrefillStreamK: "prefill_streamk" "", ForwardStreamK, Queries, PREFILL;
    /// the same as decode over a cache of latents, whose first columns are the values
    DecodeMla: "mla_decode" "", Decode, PackedQueries, FeatureSet::NONE;
    /// keys and values into a KV cache, and rotary embeddings of keys and queries
    Append: "append" "", Append, Keys, FeatureSet::NONE;
    /// a quantized KV cache as fp16 or bf16
    Dequantize: "dequantize" "", Dequantize, Keys, FeatureSet::NONE;
    /// bf16 or fp32 q, k and v as fp16, scaled by powers of two
    Cast: "cast" "", Cast, Queries, FeatureSet::NONE;
    /// int8 codes of K and largest magnitudes of V, for the fast forward
    FastPrepare: "fast_fwd" "prepare", Fast, Keys, FeatureSet::of(&[Feature::Lengths]);
    /// out and softmax_lse from int8 scores and fp16 sums
    FastForward: "fast_fwd" "", Fast, Queries, FeatureSet::of(&[Feature::Lengths, Feature::Bias]);
    /// lists of the latents that queries chose, and bf16 queries as fp16
    SparseSelect: "sparse_select" "", SparseMla, Queries, FeatureSet::NONE;
    /// out and softmax_lse over these latents
    SparseMla: "sparse_mla" "", SparseMla, PackedQueries, FeatureSet::NONE;
    /// logits by which queries choose latents
    Indexer: "indexer" "", Indexer, PackedQueries, FeatureSet::NONE;
}

impl Pass {
    pub const fn info(self) -> PassInfo {
        PASSES[self as usize]
    }

    /// Returns what its kernels do with dq (`DqMode` in csrc/backward/gradient_output.cuh), if they are main kernels of the backward pass:
    /// add it to the accumulator, leave it to a kernel of its own, or store it (one block has all keys).
    /// build.rs defines it for the kernel's C++ type as `DQ_MODE`, so these passes share their sources.
    pub const fn dq_mode(self) -> Option<&'static str> {
        match self {
            Pass::Backward | Pass::BackwardStreamK => Some("kAtomicAdd"),
            Pass::BackwardDkDv => Some("kSeparate"),
            Pass::BackwardFused => Some("kStore"),
            _ => None,
        }
    }
}

// Sets of passes whose kernels run one after the other and share scratch memory: a plan takes all of a set from one family.

/// The set of `volta_fa::bwd` with an accumulator of dq, to which blocks add by atomics, in any order. In deterministic mode, a family
/// whose main kernels can take a part of the keys (`has_key_block_offset`) may run it too: several launches then fix the order.
pub const BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::Backward, Pass::BackwardPostprocess];
/// The other set of a deterministic `volta_fa::bwd`: dq has a kernel of its own, and no accumulator.
pub const DETERMINISTIC_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardDkDv, Pass::BackwardDq];
/// The set of `volta_fa::bwd` for large headdims: P and dS travel through memory. It is deterministic.
pub const STORED_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardScores, Pass::BackwardGradients];
/// The set of `volta_fa::bwd` of fp32 tensors. It is deterministic.
pub const SPLIT_BACKWARD: [Pass; 3] = [Pass::BackwardPreprocess, Pass::BackwardSplitScores, Pass::BackwardSplitGradients];
/// The sets that run every fp16 problem of `fwd` and `bwd` up to headdim `COMMON_HEADDIM` (256), for `Kernels::serve`. For each set, some
/// family must have all passes. Stream-K and fused kernels only save time.
pub const PASS_SETS: [&[Pass]; 3] = [&[Pass::Forward], &BACKWARD, &DETERMINISTIC_BACKWARD];
/// The same for headdims above, to 512.
pub const LARGE_PASS_SETS: [&[Pass]; 2] = [&[Pass::Forward], &STORED_BACKWARD];
